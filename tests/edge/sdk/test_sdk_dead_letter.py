"""Dead-letter queues with the unmodified azure-servicebus SDK."""

from __future__ import annotations

from datetime import timedelta

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import MessageLockLostError, ServiceBusError

from tests.edge.bus_thread import BusThread

pytestmark = pytest.mark.slow

DEAD = ServiceBusSubQueue.DEAD_LETTER
SOON_S = 0.5
LONG_S = 10


def send(client: ServiceBusClient, queue: str, *bodies: str, **properties: object) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(
            [ServiceBusMessage(body, message_id=f"id-{body}", **properties) for body in bodies]
        )


def receive_one(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    (message,) = receiver.receive_messages(1, max_wait_time=LONG_S)
    return message


def is_empty_queue(receiver: ServiceBusReceiver) -> bool:
    return receiver.receive_messages(1, max_wait_time=SOON_S) == []


def dead_letter_one(client: ServiceBusClient, queue: str, **reason: object) -> None:
    with client.get_queue_receiver(queue) as receiver:
        receiver.dead_letter_message(receive_one(receiver), **reason)


@pytest.mark.behaviour("S240", "S245")
def test_new_queue_has_an_empty_dead_letter_queue(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        assert receiver.peek_messages(1) == []
        assert is_empty_queue(receiver)


@pytest.mark.behaviour("S54", "S55", "S58", "S258", "S264", "S285")
def test_dead_lettered_message_has_the_reason_that_was_given(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", application_properties={"own": "kept"})
    dead_letter_one(client, queue, reason="bad payload", error_description="cannot parse it")
    assert bus.counts(queue).active == 0
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        message = receive_one(receiver)
        assert str(message) == "one"
        assert message.message_id == "id-one"
        assert message.dead_letter_reason == "bad payload"
        assert message.dead_letter_error_description == "cannot parse it"
        assert message.application_properties[b"own"] == b"kept"
        receiver.complete_message(message)
        assert is_empty_queue(receiver)


def test_dead_lettering_without_a_reason_is_accepted(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one")
    dead_letter_one(client, queue)
    assert bus.counts(queue).dead_letter == 1


@pytest.mark.behaviour("S247")
def test_dead_letter_queue_cannot_be_sent_to(client: ServiceBusClient, queue: str) -> None:
    with pytest.raises(ServiceBusError, match="cannot be sent to"):
        send(client, f"{queue}/$DeadLetterQueue", "one")


@pytest.mark.behaviour("S248", "S252")
def test_life_of_a_message_does_not_end_in_the_dead_letter_queue(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", time_to_live=timedelta(minutes=1))
    dead_letter_one(client, queue, reason="r")
    bus.advance(3_600_000)
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        assert str(receive_one(receiver)) == "one"


@pytest.mark.behaviour("S249")
def test_message_cannot_be_dead_lettered_twice(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one")
    dead_letter_one(client, queue, reason="r")
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        with pytest.raises(ServiceBusError) as refused:
            receiver.dead_letter_message(receive_one(receiver), reason="again")
        assert not isinstance(refused.value, MessageLockLostError)
    assert bus.counts(queue).dead_letter == 1


@pytest.mark.behaviour("S250", "S253")
def test_dead_letter_queue_locks_like_any_queue(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue(lock_duration_ms=30_000)
    send(client, queue, "one")
    dead_letter_one(client, queue, reason="r")
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        message = receive_one(receiver)
        until = message.locked_until_utc
        bus.advance(10_000)
        assert receiver.renew_message_lock(message) > until
        receiver.abandon_message(message)
        late = receive_one(receiver)
        bus.advance(30_001)
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(late)
        receiver.complete_message(receive_one(receiver))
        assert is_empty_queue(receiver)


@pytest.mark.behaviour("S254")
def test_abandoning_goes_on_for_ever_in_the_dead_letter_queue(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(max_delivery_count=2)
    send(client, queue, "one")
    dead_letter_one(client, queue, reason="r")
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        for _ in range(5):
            receiver.abandon_message(receive_one(receiver))
        receiver.complete_message(receive_one(receiver))
    assert bus.counts(queue).dead_letter == 0


@pytest.mark.behaviour("S255")
def test_repaired_message_is_sent_again_as_a_new_one(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "broken")
    dead_letter_one(client, queue, reason="r")
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        message = receive_one(receiver)
        send(client, queue, "repaired")
        receiver.complete_message(message)
    with client.get_queue_receiver(queue) as receiver:
        again = receive_one(receiver)
        assert again.delivery_count == 0
        assert again.sequence_number == 2
        assert again.dead_letter_reason is None


@pytest.mark.behaviour("S43", "S256", "S257", "S265", "S271", "S272")
def test_ten_deliveries_are_all_a_message_gets(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one")
    counts = []
    with client.get_queue_receiver(queue) as receiver:
        while messages := receiver.receive_messages(1, max_wait_time=SOON_S):
            counts.append(messages[0].delivery_count)
            receiver.abandon_message(messages[0])
    assert counts == list(range(10))
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        message = receive_one(receiver)
        assert message.dead_letter_reason == "MaxDeliveryCountExceeded"
        assert "10 delivery attempts" in message.dead_letter_error_description


@pytest.mark.behaviour("S44", "S45", "S271")
def test_lock_expiries_and_abandons_add_up(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue(max_delivery_count=3, lock_duration_ms=30_000)
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        receive_one(receiver)
        bus.advance(30_001)
        receiver.abandon_message(receive_one(receiver))
        receive_one(receiver)
        bus.advance(30_001)
        assert is_empty_queue(receiver)
    assert bus.counts(queue).dead_letter == 1


@pytest.mark.behaviour("S275")
def test_one_delivery_may_be_all(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue(max_delivery_count=1)
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        receiver.abandon_message(receive_one(receiver))
    assert bus.counts(queue).dead_letter == 1


@pytest.mark.behaviour("S270")
def test_receive_and_delete_never_dead_letters_over_amqp(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(max_delivery_count=1)
    send(client, queue, "one")
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client.get_queue_receiver(queue, receive_mode=mode) as receiver:
        receive_one(receiver)
        assert is_empty_queue(receiver)
    assert bus.counts(queue).dead_letter == 0


@pytest.mark.behaviour("S296")
def test_poison_loop_ends_with_the_message_in_the_dead_letter_queue(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(max_delivery_count=3)
    send(client, queue, "poison")
    with client.get_queue_receiver(queue) as receiver:
        while messages := receiver.receive_messages(1, max_wait_time=0.1):
            receiver.abandon_message(messages[0])
    counts = bus.counts(queue)
    assert (counts.active, counts.dead_letter) == (0, 1)


@pytest.mark.behaviour("S297")
def test_dead_letter_queue_can_be_emptied(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, *map(str, range(6)))
    with client.get_queue_receiver(queue) as receiver:
        for _ in range(6):
            receiver.dead_letter_message(receive_one(receiver), reason="r")
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        while messages := receiver.receive_messages(10, max_wait_time=SOON_S):
            for message in messages:
                receiver.complete_message(message)
    assert bus.counts(queue).dead_letter == 0


@pytest.mark.behaviour("S244")
def test_dead_letters_go_with_their_queue(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one")
    dead_letter_one(client, queue, reason="r")
    bus.delete(queue)
    bus.queue(queue)
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        assert is_empty_queue(receiver)


@pytest.mark.behaviour("S292")
def test_transfer_dead_letter_queue_can_be_opened(client: ServiceBusClient, queue: str) -> None:
    transfer = ServiceBusSubQueue.TRANSFER_DEAD_LETTER
    with client.get_queue_receiver(queue, sub_queue=transfer) as receiver:
        assert is_empty_queue(receiver)


@pytest.mark.behaviour("S291", "S292")
def test_transfer_dead_letter_queue_of_a_topic_can_be_opened(
    bus: BusThread, client: ServiceBusClient
) -> None:
    """A topic has one too: a transaction may send by way of it."""
    topic = bus.topic()
    transfer = ServiceBusSubQueue.TRANSFER_DEAD_LETTER
    with client.get_queue_receiver(topic, sub_queue=transfer) as receiver:
        assert is_empty_queue(receiver)
    with (
        pytest.raises(ServiceBusError),
        client.get_queue_receiver(topic, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver,
    ):
        receiver.receive_messages(1, max_wait_time=SOON_S)
