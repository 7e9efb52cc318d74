"""Time to live and schedules, with the unmodified azure-servicebus SDK and a moved clock."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)

from tests.edge.bus_thread import BusThread

pytestmark = pytest.mark.slow

MINUTE = timedelta(minutes=1)
MINUTE_MS = 60_000
SOON_S = 0.5
LONG_S = 10


def send(client: ServiceBusClient, queue: str, body: str, **properties: object) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage(body, **properties))


def receive_one(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    (message,) = receiver.receive_messages(1, max_wait_time=LONG_S)
    return message


def is_empty_queue(receiver: ServiceBusReceiver) -> bool:
    return receiver.receive_messages(1, max_wait_time=SOON_S) == []


def is_close(one: datetime, other: datetime) -> bool:
    return abs(one - other) < timedelta(seconds=2)


@pytest.mark.behaviour("S68", "S106")
def test_expiry_is_an_instant(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "one", time_to_live=MINUTE)
    with client.get_queue_receiver(queue) as receiver:
        message = receive_one(receiver)
    assert message.expires_at_utc == message.enqueued_time_utc + MINUTE


@pytest.mark.behaviour("S69")
def test_equal_times_to_live_end_as_far_apart_as_they_began(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", time_to_live=MINUTE * 10)
    bus.advance(MINUTE_MS)
    send(client, queue, "two", time_to_live=MINUTE * 10)
    with client.get_queue_receiver(queue) as receiver:
        first, second = receive_one(receiver), receive_one(receiver)
    between = second.enqueued_time_utc - first.enqueued_time_utc
    assert second.expires_at_utc - first.expires_at_utc == between
    assert between >= MINUTE


@pytest.mark.behaviour("S70", "S74", "S75", "S108")
def test_expired_message_is_not_returned_and_a_live_one_behind_it_is(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "dead", time_to_live=MINUTE)
    send(client, queue, "alive", time_to_live=MINUTE * 10)
    bus.advance(MINUTE_MS + 1)
    with client.get_queue_receiver(queue) as receiver:
        assert str(receive_one(receiver)) == "alive"
        assert is_empty_queue(receiver)
    assert bus.counts(queue).active == 1
    assert bus.counts(queue).dead_letter == 0


@pytest.mark.behaviour("S71", "S72", "S73", "S280")
def test_expired_message_stays_without_a_receiver(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue(dead_lettering_on_message_expiration=True)
    send(client, queue, "old", time_to_live=MINUTE)
    bus.advance(MINUTE_MS * 10)
    assert bus.counts(queue).active == 1
    assert bus.counts(queue).dead_letter == 0
    with client.get_queue_receiver(queue) as receiver:
        assert len(receiver.peek_messages(1)) <= 1


@pytest.mark.behaviour("S76", "S80", "S81")
def test_message_that_expires_under_lock_can_be_completed(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(lock_duration_ms=300_000)
    send(client, queue, "one", time_to_live=MINUTE)
    with client.get_queue_receiver(queue) as receiver:
        message = receive_one(receiver)
        bus.advance(MINUTE_MS * 2)
        assert message.expires_at_utc < bus.now()
        receiver.complete_message(message)
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S77")
def test_message_that_expired_under_lock_is_gone_with_the_lock(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(lock_duration_ms=120_000)
    send(client, queue, "one", time_to_live=MINUTE)
    with client.get_queue_receiver(queue) as receiver:
        receive_one(receiver)
        bus.advance(120_001)
        assert is_empty_queue(receiver)


@pytest.mark.behaviour("S78", "S82")
def test_message_that_expired_under_lock_is_gone_when_abandoned(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(lock_duration_ms=300_000)
    send(client, queue, "one", time_to_live=MINUTE)
    with client.get_queue_receiver(queue) as receiver:
        message = receive_one(receiver)
        bus.advance(MINUTE_MS * 2)
        receiver.abandon_message(message)
        assert is_empty_queue(receiver)


@pytest.mark.behaviour("S79")
def test_lock_of_an_expired_message_can_be_renewed(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(lock_duration_ms=120_000)
    send(client, queue, "one", time_to_live=MINUTE)
    with client.get_queue_receiver(queue) as receiver:
        message = receive_one(receiver)
        bus.advance(MINUTE_MS + 1)
        receiver.renew_message_lock(message)
        bus.advance(MINUTE_MS + 1)
        receiver.complete_message(message)
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S83")
def test_life_of_a_millisecond_is_accepted(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", time_to_live=timedelta(milliseconds=1))
    bus.advance(1_000)
    with client.get_queue_receiver(queue) as receiver:
        assert is_empty_queue(receiver)


@pytest.mark.behaviour("S87", "S88", "S89")
def test_life_of_a_scheduled_message_begins_when_it_is_due(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    due = bus.now() + MINUTE * 5
    send(client, queue, "long", time_to_live=MINUTE * 10, scheduled_enqueue_time_utc=due)
    send(client, queue, "short", time_to_live=MINUTE, scheduled_enqueue_time_utc=due)
    bus.advance(MINUTE_MS * 5 + 1)
    with client.get_queue_receiver(queue) as receiver:
        found = {str(message): message for message in (receive_one(receiver) for _ in "12")}
    assert is_close(found["long"].expires_at_utc, due + MINUTE * 10)
    assert is_close(found["short"].expires_at_utc, due + MINUTE)


@pytest.mark.behaviour("S90", "S105")
def test_default_life_applies_where_none_was_given(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(default_message_ttl_ms=MINUTE_MS)
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        message = receive_one(receiver)
        assert message.time_to_live == MINUTE
        assert message.expires_at_utc == message.enqueued_time_utc + MINUTE


@pytest.mark.behaviour("S94", "S95", "S96", "S97")
@pytest.mark.parametrize(("own", "effective"), [(10, 5), (5, 5), (1, 1)])
def test_default_life_is_the_longest(
    bus: BusThread, client: ServiceBusClient, own: int, effective: int
) -> None:
    queue = bus.queue(default_message_ttl_ms=5 * MINUTE_MS)
    send(client, queue, "one", time_to_live=MINUTE * own)
    with client.get_queue_receiver(queue) as receiver:
        message = receive_one(receiver)
        assert message.expires_at_utc == message.enqueued_time_utc + MINUTE * effective


@pytest.mark.behaviour("S98")
def test_without_any_life_a_message_never_expires(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        message = receive_one(receiver)
        assert message.time_to_live is None
        assert message.expires_at_utc is None


@pytest.mark.behaviour("S93")
def test_changed_default_time_to_live_applies_to_later_messages(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    bus.change(queue, default_message_ttl_ms=MINUTE_MS)
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        assert receive_one(receiver).time_to_live == MINUTE


@pytest.mark.behaviour("S104", "S107")
def test_peek_shows_only_the_time_to_live_set_by_the_sender(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(default_message_ttl_ms=10 * MINUTE_MS)
    send(client, queue, "default")
    send(client, queue, "own", time_to_live=MINUTE)
    with client.get_queue_receiver(queue) as receiver:
        default, own = receiver.peek_messages(2)
    assert default.expires_at_utc is None
    assert own.expires_at_utc == own.enqueued_time_utc + MINUTE


# --- expiry and the dead-letter queue -------------------------------------------------------------


@pytest.mark.behaviour("S109", "S111", "S256", "S257", "S261", "S278", "S281")
def test_expired_messages_go_to_the_dead_letter_queue_when_a_receiver_comes(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(dead_lettering_on_message_expiration=True)
    send(client, queue, "one", time_to_live=MINUTE)
    bus.advance(MINUTE_MS + 1)
    with client.get_queue_receiver(queue) as receiver:
        assert is_empty_queue(receiver)
    with client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
        message = receive_one(receiver)
    assert message.dead_letter_reason == "TTLExpiredException"
    description = "The message expired and was dead lettered."
    assert message.dead_letter_error_description == description


@pytest.mark.behaviour("S112", "S113", "S114")
@pytest.mark.parametrize("ending", ["abandoned", "lock expired", "completed"])
def test_message_that_expired_under_lock_is_dead_lettered_unless_completed(
    bus: BusThread, client: ServiceBusClient, ending: str
) -> None:
    queue = bus.queue(dead_lettering_on_message_expiration=True, lock_duration_ms=120_000)
    send(client, queue, "one", time_to_live=MINUTE)
    with client.get_queue_receiver(queue) as receiver:
        message = receive_one(receiver)
        bus.advance(MINUTE_MS + 1)
        if ending == "abandoned":
            receiver.abandon_message(message)
        elif ending == "completed":
            receiver.complete_message(message)
        else:
            bus.advance(MINUTE_MS)
        assert is_empty_queue(receiver)
    assert bus.counts(queue).dead_letter == (0 if ending == "completed" else 1)


@pytest.mark.behaviour("S110")
def test_switched_flag_holds_for_later_expiries(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", time_to_live=MINUTE)
    bus.change(queue, dead_lettering_on_message_expiration=True)
    bus.advance(MINUTE_MS + 1)
    with client.get_queue_receiver(queue) as receiver:
        assert is_empty_queue(receiver)
    assert bus.counts(queue).dead_letter == 1


@pytest.mark.behaviour("S116")
def test_jobs_with_a_deadline_are_handled_or_dead_lettered(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(dead_lettering_on_message_expiration=True)
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(
            [ServiceBusMessage(str(number), time_to_live=MINUTE) for number in range(10)]
        )
    handled = set()
    with client.get_queue_receiver(queue) as receiver:
        for _ in range(4):
            message = receive_one(receiver)
            receiver.complete_message(message)
            handled.add(str(message))
            bus.advance(10_000)
        bus.advance(MINUTE_MS)
        assert is_empty_queue(receiver)
    with client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
        dead = {str(receive_one(receiver)) for _ in range(6)}
    assert handled | dead == {str(number) for number in range(10)}
    assert not handled & dead
