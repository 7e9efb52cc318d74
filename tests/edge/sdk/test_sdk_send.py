"""Sending with the unmodified azure-servicebus SDK."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusMessageState,
    ServiceBusReceivedMessage,
)
from azure.servicebus.amqp import (
    AmqpAnnotatedMessage,
    AmqpMessageBodyType,
    AmqpMessageHeader,
    AmqpMessageProperties,
)
from azure.servicebus.exceptions import (
    MessageSizeExceededError,
    MessagingEntityDisabledError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusError,
    ServiceBusServerBusyError,
)

from tests.edge.bus_thread import BusThread

pytestmark = pytest.mark.slow


def send(client: ServiceBusClient, queue: str, *bodies: str) -> None:
    with client.get_queue_sender(queue) as sender:
        for body in bodies:
            sender.send_messages(ServiceBusMessage(body))


def take(
    client: ServiceBusClient, queue: str, count: int = 10, **options: object
) -> list[ServiceBusReceivedMessage]:
    """Receive and complete up to `count` messages."""
    found: list[ServiceBusReceivedMessage] = []
    with client.get_queue_receiver(queue, **options) as receiver:
        while len(found) < count:
            messages = receiver.receive_messages(count - len(found), max_wait_time=1)
            if not messages:
                break
            for message in messages:
                receiver.complete_message(message)
            found += messages
    return found


def tracking_id(error: Exception) -> str:
    found = re.search(r"TrackingId:([^,]+),", str(error))
    assert found is not None, str(error)
    return found.group(1)


@pytest.mark.behaviour("S1", "S2")
def test_send_returns_when_the_message_is_stored(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("hello"))
        assert bus.counts(queue).active == 1


@pytest.mark.behaviour("S1")
def test_every_property_comes_back(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    sent = ServiceBusMessage(
        b"\x00\xffbody",
        application_properties={
            "text": "täxt", "number": 1 << 30, "small": 3, "real": 0.5, "flag": True,
            "id": uuid.UUID(int=7), "bytes": b"\x00\x01",
        },
        content_type="application/json",
        correlation_id="correlated",
        message_id="the id",
        partition_key="key",
        reply_to="answers",
        reply_to_session_id="their session",
        subject="label",
        time_to_live=timedelta(hours=1),
        to="somewhere",
    )  # fmt: skip
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(sent)
    (received,) = take(client, queue, 1)
    assert b"".join(received.body) == b"\x00\xffbody"
    properties = received.application_properties
    assert properties == {
        b"text": b"t\xc3\xa4xt", b"number": 1 << 30, b"small": 3, b"real": 0.5, b"flag": True,
        b"id": uuid.UUID(int=7), b"bytes": b"\x00\x01",
    }  # fmt: skip
    assert received.content_type == "application/json"
    assert received.correlation_id == "correlated"
    assert received.message_id == "the id"
    assert received.partition_key == "key"
    assert received.reply_to == "answers"
    assert received.reply_to_session_id == "their session"
    assert received.subject == "label"
    assert received.time_to_live == timedelta(hours=1)
    assert received.to == "somewhere"
    assert received.sequence_number == 1
    assert received.delivery_count == 0
    assert received.state is ServiceBusMessageState.ACTIVE
    assert received.enqueued_sequence_number in (None, 1)
    assert received.dead_letter_source is None
    assert abs(received.enqueued_time_utc - bus.now()) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"value_body": {"key": [1, "two"]}}, AmqpMessageBodyType.VALUE),
        ({"sequence_body": [[1, 2], ["three"]]}, AmqpMessageBodyType.SEQUENCE),
        ({"data_body": [b"one", b"two"]}, AmqpMessageBodyType.DATA),
    ],
)
def test_bodies_of_every_kind_come_back(
    client: ServiceBusClient, queue: str, sent: dict[str, object], kind: AmqpMessageBodyType
) -> None:
    message = AmqpAnnotatedMessage(
        **sent,
        header=AmqpMessageHeader(priority=7, durable=True),
        annotations={"x-own": "mine"},
        footer={"f": 1},
        properties=AmqpMessageProperties(message_id="m", group_sequence=3),
    )
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(message)
    (received,) = take(client, queue, 1)
    raw = received.raw_amqp_message
    assert raw.body_type is kind
    assert raw.header.priority == 7
    assert raw.header.durable is True
    assert raw.annotations[b"x-own"] == b"mine"
    assert raw.footer == {b"f": 1}
    assert raw.properties.group_sequence == 3


@pytest.mark.behaviour("S15")
def test_messages_are_stored_in_send_order(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage(str(number)) for number in range(50)])
        for number in range(50, 60):
            sender.send_messages(ServiceBusMessage(str(number)))
    received = take(client, queue, 60)
    assert [str(message) for message in received] == [str(number) for number in range(60)]
    assert [message.sequence_number for message in received] == list(range(1, 61))


def test_batch_is_exploded(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_sender(queue) as sender:
        batch = sender.create_message_batch()
        assert batch.max_size_in_bytes == 256 * 1024
        for number in range(20):
            batch.add_message(ServiceBusMessage(str(number), message_id=f"id-{number}"))
        sender.send_messages(batch)
    assert bus.counts(queue).active == 20
    received = take(client, queue, 20)
    assert [message.message_id for message in received] == [f"id-{n}" for n in range(20)]


def test_batch_takes_no_more_than_the_limit(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_sender(queue) as sender:
        batch = sender.create_message_batch(max_size_in_bytes=2_000)
        with pytest.raises(MessageSizeExceededError):
            batch.add_message(ServiceBusMessage(b"x" * 2_000))


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.behaviour("S4", "S5", "S8", "S9", "S10")
def test_too_large_message_is_refused_for_good(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender:
        with pytest.raises(MessageSizeExceededError) as refused:
            sender.send_messages(ServiceBusMessage(b"x" * (256 * 1024)))
        assert tracking_id(refused.value) in bus.log.tracking_ids()
        sender.send_messages(ServiceBusMessage("fits"))  # the link goes on
    with client.get_queue_receiver(queue) as receiver:
        assert [str(message) for message in receiver.peek_messages(10)] == ["fits"]


@pytest.mark.behaviour("S4", "S8", "S9")
def test_far_too_large_message_is_refused_for_good(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_sender(queue) as sender, pytest.raises(MessageSizeExceededError):
        sender.send_messages(ServiceBusMessage(b"x" * (3 << 20)))


@pytest.mark.behaviour("S5", "S6")
def test_two_refusals_have_two_tracking_ids_that_are_logged(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    ids = []
    with client.get_queue_sender(queue) as sender:
        for _ in range(2):
            with pytest.raises(MessageSizeExceededError) as refused:
                sender.send_messages(ServiceBusMessage(b"x" * (256 * 1024)))
            ids.append(tracking_id(refused.value))
    assert ids[0] != ids[1]
    assert set(ids) <= bus.log.tracking_ids()


@pytest.mark.behaviour("S4", "S9")
def test_disabled_entity_refuses_open_and_new_senders(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("before"))
        bus.change(queue, status="SendDisabled")
        with pytest.raises(MessagingEntityDisabledError):
            sender.send_messages(ServiceBusMessage("after"))
    with pytest.raises(MessagingEntityDisabledError):
        send(client, queue, "later")
    assert [str(message) for message in take(client, queue)] == ["before"]


@pytest.mark.behaviour("S4", "S8", "S9")
def test_properties_beyond_their_limit_are_refused(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_sender(queue) as sender:
        with pytest.raises(ServiceBusError):
            sender.send_messages(
                ServiceBusMessage("x", application_properties={"big": "x" * 33_000})
            )
        with pytest.raises(ServiceBusError):
            sender.send_messages(
                AmqpAnnotatedMessage(
                    data_body=b"", properties=AmqpMessageProperties(message_id="i" * 129)
                )
            )


@pytest.mark.behaviour("S8", "S9")
def test_entity_that_is_not_there_fails_authentication(
    bus: BusThread, client: ServiceBusClient
) -> None:
    """As on Azure: the token for an unknown entity is answered with 404."""
    with pytest.raises(ServiceBusAuthenticationError):
        send(client, "no-such-queue", "lost")


@pytest.mark.behaviour("S7", "S9")
@pytest.mark.parametrize(
    ("refusal", "error"),
    [("not-applied", ServiceBusServerBusyError), ("unknown", OperationTimeoutError)],
)
def test_store_errors_are_retryable(
    bus: BusThread,
    client: ServiceBusClient,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
    error: type[Any],
) -> None:
    bus.refuse_next(monkeypatch, refusal)
    with client.get_queue_sender(queue) as sender, pytest.raises(error) as refused:
        sender.send_messages(ServiceBusMessage("x"))
    assert refused.value._retryable
    assert tracking_id(refused.value)


@pytest.mark.behaviour("S7")
def test_default_retry_of_the_sdk_gets_a_message_through(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus.refuse_next(monkeypatch, "unknown")
    with bus.client(retry_total=3, retry_backoff_factor=0.01) as client:
        send(client, queue, "again")
    assert bus.counts(queue).active == 1


# --- schedule -----------------------------------------------------------------------------------


def test_schedule_and_cancel(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    due = bus.now() + timedelta(hours=1)
    with client.get_queue_sender(queue) as sender:
        numbers = sender.schedule_messages(
            [ServiceBusMessage("one"), ServiceBusMessage("two")], due
        )
        single = sender.schedule_messages(ServiceBusMessage("three"), due)
        assert len({*numbers, *single}) == 3
        sender.cancel_scheduled_messages(numbers)
        with pytest.raises(ServiceBusError):
            sender.cancel_scheduled_messages(numbers)
    assert bus.counts(queue).scheduled == 1
    with client.get_queue_receiver(queue) as receiver:
        (peeked,) = receiver.peek_messages(5)
        assert peeked.state is ServiceBusMessageState.SCHEDULED
        assert str(peeked) == "three"


@pytest.mark.behaviour("S84", "S85", "S86")
def test_scheduled_message_comes_when_it_is_due(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    due = bus.now() + timedelta(minutes=5)
    message = ServiceBusMessage("later", scheduled_enqueue_time_utc=due)
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(message)
    assert take(client, queue) == []
    bus.advance(300_001)
    (received,) = take(client, queue, 1)
    assert str(received) == "later"
    assert abs(received.enqueued_time_utc - due) < timedelta(seconds=1)
    assert abs(received.scheduled_enqueue_time_utc - due) < timedelta(seconds=1)
