"""Additions of the broker to delivered messages, at the socket and with azure-servicebus."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
)
from azure.servicebus.amqp import AmqpAnnotatedMessage

from postbus.message.codec import Described, Symbol, Timestamp, Uint, Ulong, decode_value
from postbus.message.codec import encode_value as encode
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import TRANSFER, RawClient, message

LOCK_TOKEN = Symbol("x-opt-lock-token")
HEADER, DELIVERY, ANNOTATIONS, PROPERTIES = range(0x70, 0x74)


@pytest.fixture
def raw(bus: BusThread) -> Iterator[RawClient]:
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as client:
        yield client


def section(code: int, value: object) -> bytes:
    return encode(Described(Ulong(code), value))


def send(raw: RawClient, queue: str, *payloads: bytes) -> None:
    raw.attach_sender(queue)
    raw.write(*[raw.transfer(number, each) for number, each in enumerate(payloads)])
    assert set(raw.dispositions(len(payloads)).values()) == {0x24}


def receive(raw: RawClient, queue: str, *, mode: int = 0) -> tuple[bytes, dict[int, object]]:
    """Return the delivery tag and the sections by their code."""
    raw.attach_receiver(queue, mode=mode)
    raw.write(raw.flow(1))
    found = raw.expect(TRANSFER)
    sections: dict[int, object] = {}
    pos = 0
    while pos < len(found.payload):
        value, pos = decode_value(found.payload, pos)
        assert isinstance(value, Described)
        sections[int(value.descriptor)] = value.value
    return bytes(found.fields[2]), sections


# --- delivery annotations -------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [None, Uint(60_000)])
def test_a_locked_delivery_has_its_token_twice(
    raw: RawClient, queue: str, ttl: Uint | None
) -> None:
    send(raw, queue, section(HEADER, [True, None, ttl]) + message(b"x"))
    tag, sections = receive(raw, queue)
    assert sections[DELIVERY] == {LOCK_TOKEN: uuid.UUID(bytes_le=tag)}


def test_a_delivery_without_a_lock_has_empty_delivery_annotations(
    raw: RawClient, queue: str
) -> None:
    send(raw, queue, message(b"x"))
    assert receive(raw, queue, mode=1)[1][DELIVERY] == {}


@pytest.mark.parametrize("is_behind", [False, True])
def test_delivery_annotations_of_the_sender_are_handed_on(
    bus: BusThread, raw: RawClient, queue: str, is_behind: bool
) -> None:
    own = {Symbol("x-mine"): "text", Symbol("n"): None}
    foreign = section(DELIVERY, {**own, LOCK_TOKEN: "a foreign token"})
    body = message(b"x")
    send(raw, queue, body + foreign if is_behind else foreign + body)
    bus.reload(queue)  # they are stored
    tag, sections = receive(raw, queue)
    assert sections[DELIVERY] == {LOCK_TOKEN: uuid.UUID(bytes_le=tag), **own}


@pytest.mark.slow
def test_the_sdk_finds_the_token_in_both_places(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(
            AmqpAnnotatedMessage(data_body=b"x", delivery_annotations={"x-mine": "text"})
        )
        sender.send_messages(ServiceBusMessage("y"))
    with client.get_queue_receiver(queue) as receiver:
        (first,) = receiver.receive_messages(1, max_wait_time=5)
        annotations = first.raw_amqp_message.delivery_annotations
        assert annotations == {b"x-opt-lock-token": first.lock_token, b"x-mine": b"text"}
        receiver.complete_message(first)
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client.get_queue_receiver(queue, receive_mode=mode) as receiver:
        (second,) = receiver.receive_messages(1, max_wait_time=5)
        assert second.raw_amqp_message.delivery_annotations == {}


# --- partition keys -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x-opt-partition-key", "x-opt-via-partition-key"])
@pytest.mark.parametrize("key", ["k", "cl\xe9", "k" * 128])
def test_a_partition_key_in_a_binary_is_a_string(
    bus: BusThread, raw: RawClient, queue: str, name: str, key: str
) -> None:
    given = {Symbol("x-mine"): b"binary", Symbol(name): key.encode()}
    send(raw, queue, section(ANNOTATIONS, given) + message(b"x"))
    bus.reload(queue)
    annotations = receive(raw, queue)[1][ANNOTATIONS]
    assert isinstance(annotations, dict)
    assert annotations[Symbol(name)] == key
    assert annotations[Symbol("x-mine")] == b"binary"


@pytest.mark.slow
def test_a_received_message_with_a_partition_key_can_be_sent_again(
    client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        sender.send_messages(ServiceBusMessage("x", partition_key="key"))
        for _ in range(2):
            (received,) = receiver.receive_messages(1, max_wait_time=5)
            assert received.partition_key == "key"
            receiver.complete_message(received)
            sender.send_messages(received)


# --- times ----------------------------------------------------------------------------------------


def times_of(received: ServiceBusReceivedMessage) -> tuple[datetime | None, datetime | None]:
    """Return the creation and expiry times of a message."""
    properties = received.raw_amqp_message.properties
    assert properties is not None
    times = properties.creation_time, properties.absolute_expiry_time
    return tuple(each and datetime.fromtimestamp(each / 1_000, UTC) for each in times)


HOUR = timedelta(hours=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "default", "effective"),
    [
        (2 * HOUR, None, 2 * HOUR),
        (2 * HOUR, HOUR, HOUR),
        (None, HOUR, HOUR),
        (None, None, None),
    ],
    ids=str,
)
def test_creation_and_expiry_are_those_of_the_broker(
    bus: BusThread,
    client: ServiceBusClient,
    own: timedelta | None,
    default: timedelta | None,
    effective: timedelta | None,
) -> None:
    queue = (
        bus.queue()
        if default is None
        else bus.queue(default_message_ttl_ms=default // timedelta(milliseconds=1))
    )
    bus.advance(10_000)  # the sender's clock is behind the broker's
    with client.get_queue_sender(queue) as sender, client.get_queue_receiver(queue) as receiver:
        sender.send_messages(ServiceBusMessage("x", time_to_live=own))
        (peeked,) = receiver.peek_messages()
        (received,) = receiver.receive_messages(1, max_wait_time=5)
        enqueued = received.enqueued_time_utc
        assert enqueued is not None
        expected = (None, None) if effective is None else (enqueued, enqueued + effective)
        assert times_of(received) == expected
        assert times_of(peeked) == ((None, None) if own is None else expected)
        if own is not None:
            assert received.time_to_live == effective
        receiver.complete_message(received)


def test_a_time_to_live_beyond_the_header_follows_from_the_times(
    raw: RawClient, queue: str
) -> None:
    days_ms = 90 * 24 * 3_600_000
    header = section(HEADER, [True, None, Uint(2**32 - 1)])
    times = [Timestamp(days_ms + 5), Timestamp(5)]
    send(raw, queue, header + section(PROPERTIES, ["m", *[None] * 7, *times]) + message(b"x")[-6:])
    sections = receive(raw, queue)[1]
    expiry, creation = sections[PROPERTIES][8:10]
    assert creation == sections[ANNOTATIONS][Symbol("x-opt-enqueued-time")]
    assert expiry - creation == days_ms


def test_times_without_a_life_stay_the_sender_s(raw: RawClient, queue: str) -> None:
    times = [Timestamp(1_900_000_000_000), Timestamp(1_800_000_000_000)]
    send(raw, queue, section(PROPERTIES, [None] * 8 + times) + section(0x75, b"x"))
    sections = receive(raw, queue)[1]
    assert sections[PROPERTIES][8:10] == times
    assert sections[HEADER][2] is None
