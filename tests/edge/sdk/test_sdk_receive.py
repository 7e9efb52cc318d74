"""Receiving, settling and locks with the unmodified azure-servicebus SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from azure.servicebus import (
    AutoLockRenewer,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusMessageState,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
)
from azure.servicebus.exceptions import (
    MessageLockLostError,
    MessageNotFoundError,
    MessagingEntityDisabledError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusServerBusyError,
    SessionLockLostError,
)

from postbus.edge.amqp import receiver_links
from postbus.entity.commands import Settle
from tests.edge.bus_thread import BusThread

pytestmark = pytest.mark.slow

DELETE = ServiceBusReceiveMode.RECEIVE_AND_DELETE
SOON_S = 0.5
LONG_S = 10


def send(client: ServiceBusClient, queue: str, *bodies: str) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage(body, message_id=f"id-{body}") for body in bodies])


def receive(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    """Receive exactly `count` messages."""
    found: list[ServiceBusReceivedMessage] = []
    while len(found) < count:
        messages = receiver.receive_messages(count - len(found), max_wait_time=LONG_S)
        assert messages, f"{len(found)} of {count} came"
        found += messages
    return found


def bodies(messages: list[ServiceBusReceivedMessage]) -> list[str]:
    return [str(message) for message in messages]


def is_empty(receiver: ServiceBusReceiver) -> bool:
    return receiver.receive_messages(1, max_wait_time=SOON_S) == []


# --- receive-and-delete -------------------------------------------------------------------------


@pytest.mark.behaviour("S25", "S27")
def test_receive_and_delete_takes_messages_for_good(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, *map(str, range(30)))
    with client.get_queue_receiver(queue, receive_mode=DELETE) as receiver:
        first = receive(receiver, 10)
        assert bus.counts(queue).active == 20
        assert bodies(first + receive(receiver, 20)) == list(map(str, range(30)))
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S28")
def test_receive_and_delete_cannot_settle(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue, receive_mode=DELETE) as receiver:
        (message,) = receive(receiver, 1)
        for settle in (
            receiver.complete_message,
            receiver.abandon_message,
            receiver.defer_message,
            receiver.dead_letter_message,
            receiver.renew_message_lock,
        ):
            with pytest.raises((ValueError, ServiceBusError)):
                settle(message)


@pytest.mark.behaviour("S29")
def test_both_modes_on_one_queue_share_the_messages(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, *map(str, range(20)))
    with (
        client.get_queue_receiver(queue) as locking,
        client.get_queue_receiver(queue, receive_mode=DELETE) as deleting,
    ):
        locked = receive(locking, 5)
        deleted = receive(deleting, 5) + receive(deleting, 5)
        locked += receive(locking, 5)
        assert len(set(bodies(locked)) | set(bodies(deleted))) == 20


# --- exclusivity --------------------------------------------------------------------------------


@pytest.mark.behaviour("S30", "S33")
def test_locked_message_is_hidden_from_other_receivers(
    client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", "two")
    with client.get_queue_receiver(queue) as first, client.get_queue_receiver(queue) as second:
        assert bodies(receive(first, 1)) == ["one"]
        assert bodies(receive(second, 1)) == ["two"]
        assert is_empty(second)


@pytest.mark.behaviour("S32")
def test_concurrent_receivers_never_share_a_message(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, *map(str, range(60)))
    seen: list[str] = []
    guard = threading.Lock()

    def work() -> None:
        with client.get_queue_receiver(queue) as receiver:
            while messages := receiver.receive_messages(5, max_wait_time=1):
                with guard:
                    seen.extend(bodies(messages))
                for message in messages:
                    receiver.complete_message(message)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen, key=int) == list(map(str, range(60)))


@pytest.mark.behaviour("S34")
def test_lock_lasts_for_the_lock_duration_of_the_queue(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(lock_duration_ms=30_000)
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        before = bus.now()
        (message,) = receive(receiver, 1)
        lock = timedelta(seconds=30)
        assert before + lock - timedelta(seconds=1) <= message.locked_until_utc
        assert message.locked_until_utc <= bus.now() + lock


@pytest.mark.behaviour("S36", "S37")
def test_renewed_lock_outlives_its_first_expiry(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue(lock_duration_ms=30_000)
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as owner, client.get_queue_receiver(queue) as other:
        (message,) = receive(owner, 1)
        for _ in range(4):
            bus.advance(20_000)
            until = message.locked_until_utc
            assert owner.renew_message_lock(message) > until
            assert message.locked_until_utc > until
        assert is_empty(other)
        owner.complete_message(message)
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S38")
def test_renewal_with_an_unknown_token_is_refused(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", "two")
    with client.get_queue_receiver(queue) as receiver:
        first, second = receive(receiver, 2)
        receiver.complete_message(first)
        first._settled = False
        with pytest.raises(MessageLockLostError):
            receiver.renew_message_lock(first)
        receiver.complete_message(second)


def test_auto_renewer_keeps_a_lock(premium_bus: BusThread) -> None:
    """On a bus with unmoved time: the renewer uses the clock of this machine."""
    queue = premium_bus.queue(lock_duration_ms=5_000)
    lost: list[object] = []
    renewed = threading.Event()
    with premium_bus.client() as client, client.get_queue_receiver(queue) as receiver:
        send(client, queue, "one")
        (message,) = receive(receiver, 1)
        renew = receiver.renew_message_lock

        def note(*args: object, **options: object) -> object:
            until = renew(*args, **options)
            renewed.set()
            return until

        receiver.renew_message_lock = note
        with AutoLockRenewer(on_lock_renew_failure=lambda *given: lost.append(given)) as renewer:
            renewer.register(receiver, message, max_lock_renewal_duration=30)
            assert renewed.wait(LONG_S)
        receiver.complete_message(message)
    assert lost == []


# --- giving back --------------------------------------------------------------------------------


@pytest.mark.behaviour("S39", "S41", "S268")
def test_abandoned_message_comes_back_first_with_a_higher_count(
    client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "1", "2", "3", "4", "5")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        assert message.delivery_count == 0
        receiver.abandon_message(message)
        (again,) = receive(receiver, 1)
        assert str(again) == "1"
        assert again.delivery_count == 1
        assert again.lock_token != message.lock_token


@pytest.mark.behaviour("S40", "S42", "S269")
def test_expired_lock_gives_the_message_back_first(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(lock_duration_ms=30_000)
    send(client, queue, "1", "2", "3")
    with client.get_queue_receiver(queue) as receiver:
        receive(receiver, 1)
        bus.advance(30_001)
        (again,) = receive(receiver, 1)
        assert str(again) == "1"
        assert again.delivery_count == 1


def test_messages_left_in_the_clients_buffer_are_released_uncounted(
    client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, *map(str, range(10)))
    with client.get_queue_receiver(queue, prefetch_count=10) as receiver:
        receiver.complete_message(receive(receiver, 1)[0])
    with client.get_queue_receiver(queue) as receiver:
        messages = receive(receiver, 9)
        assert sorted(map(int, bodies(messages))) == list(range(1, 10))
        assert {message.delivery_count for message in messages} == {0}


@pytest.mark.behaviour("S59", "S60")
def test_locks_of_a_closed_receiver_end_with_their_time(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(lock_duration_ms=30_000)
    send(client, queue, "1")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
    bus.advance(30_001)
    with client.get_queue_receiver(queue) as other:
        (again,) = receive(other, 1)
        assert again.message_id == message.message_id
        other.complete_message(again)


# --- settlement ---------------------------------------------------------------------------------


@pytest.mark.behaviour("S47", "S48")
def test_completed_message_is_gone(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        receiver.complete_message(receive(receiver, 1)[0])
        assert is_empty(receiver)
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S49")
def test_settlements_from_many_threads_get_their_own_outcomes(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(lock_duration_ms=30_000)
    send(client, queue, *map(str, range(20)))
    with client.get_queue_receiver(queue) as receiver:
        early = receive(receiver, 10)
        bus.advance(30_001)
        late = receive(receiver, 20)
        for message in late:
            receiver.complete_message(message)
        for message in early:
            with pytest.raises(MessageLockLostError):
                receiver.complete_message(message)
    assert bus.counts(queue).active == 0


@contextmanager
def expired_lock(
    bus: BusThread, client: ServiceBusClient
) -> Iterator[tuple[str, ServiceBusReceiver, ServiceBusReceivedMessage]]:
    queue = bus.queue(lock_duration_ms=30_000)
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        bus.advance(30_001)
        yield queue, receiver, message


@pytest.mark.behaviour("S50", "S57", "S65", "S67")
def test_completion_after_expiry_raises_and_the_message_comes_again(
    bus: BusThread, client: ServiceBusClient
) -> None:
    with expired_lock(bus, client) as (queue, receiver, message):
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(message)
        (again,) = receive(receiver, 1)
        assert again.message_id == message.message_id
        receiver.complete_message(again)
        assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S51", "S65")
def test_dead_lettering_after_expiry_raises_and_moves_no_message(
    bus: BusThread, client: ServiceBusClient
) -> None:
    with expired_lock(bus, client) as (queue, receiver, message):
        with pytest.raises(MessageLockLostError):
            receiver.dead_letter_message(message, reason="late")
        assert bus.counts(queue).dead_letter == 0


@pytest.mark.behaviour("S52", "S65")
def test_renewal_after_expiry_raises_and_revives_no_lock(
    bus: BusThread, client: ServiceBusClient
) -> None:
    with expired_lock(bus, client) as (_, receiver, message):
        with pytest.raises(MessageLockLostError):
            receiver.renew_message_lock(message)
        (again,) = receive(receiver, 1)
        assert again.delivery_count == 1


@pytest.mark.behaviour("S53", "S61", "S65")
@pytest.mark.parametrize("refusal", ["unknown", "store-full", "busy"])
def test_settlement_lost_with_the_store_raises_lock_lost(
    bus: BusThread,
    client: ServiceBusClient,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        bus.refuse_next(monkeypatch, refusal, Settle)
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(message)


@pytest.mark.behaviour("S61", "S65")
@pytest.mark.parametrize("refusal", ["unknown", "store-full", "busy"])
def test_settlement_by_token_lost_with_the_store_raises_lock_lost(
    bus: BusThread,
    client: ServiceBusClient,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        receiver.defer_message(message)
        (deferred,) = receiver.receive_deferred_messages([message.sequence_number])
        bus.refuse_next(monkeypatch, refusal, Settle)
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(deferred)
        bus.refuse_next(monkeypatch, "not-applied", Settle)
        with pytest.raises(ServiceBusServerBusyError):
            receiver.complete_message(deferred)
        receiver.complete_message(deferred)


@pytest.mark.behaviour("S48", "S53")
def test_settlement_with_a_failed_read_is_repeated_while_its_lock_is_valid(
    bus: BusThread, client: ServiceBusClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        bus.refuse_next(monkeypatch, "not-applied", Settle)
        receiver.complete_message(message)
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S61", "S65")
def test_settlement_with_a_failed_read_is_lost_with_a_reload(
    bus: BusThread, client: ServiceBusClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_links, "REPEAT_S", 0.0)
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        bus.refuse_next(monkeypatch, "not-applied", Settle, then=lambda: bus.drop(queue))
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(message)
    assert bus.counts(queue).active == 1


@pytest.mark.behaviour("S61", "S65", "S67")
def test_reload_of_the_partition_loses_locks_but_no_message(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", "two")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        bus.reload(queue)
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(message)
        again = receive(receiver, 2)
        assert sorted(bodies(again)) == ["one", "two"]
        for each in again:
            receiver.complete_message(each)
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S66")
def test_retry_with_the_same_token_fails_again_cleanly(bus: BusThread) -> None:
    with bus.client(retry_total=2, retry_backoff_factor=0.01) as client:  # noqa: SIM117
        with expired_lock(bus, client) as (queue, receiver, message):
            with pytest.raises(MessageLockLostError):
                receiver.complete_message(message)
            assert bus.counts(queue).active == 1


@pytest.mark.behaviour("S63")
def test_change_of_the_queue_loses_no_message(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        bus.change(queue, lock_duration_ms=20_000)
        receiver.complete_message(message)  # locks survive here
    assert bus.counts(queue).active == 0


# --- defer --------------------------------------------------------------------------------------


@pytest.mark.behaviour("S56")
def test_deferred_message_comes_only_by_its_number(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one", "two")
    with client.get_queue_receiver(queue) as receiver:
        first, second = receive(receiver, 2)
        receiver.defer_message(first)
        receiver.complete_message(second)
        assert is_empty(receiver)
        (peeked,) = receiver.peek_messages(5, sequence_number=1)
        assert peeked.state is ServiceBusMessageState.DEFERRED
        number = first.sequence_number
        (deferred,) = receiver.receive_deferred_messages([number])
        assert str(deferred) == "one"
        assert deferred.state is ServiceBusMessageState.DEFERRED
        assert deferred.lock_token is not None
        assert receiver.renew_message_lock(deferred) >= deferred.locked_until_utc
        receiver.complete_message(deferred)
        with pytest.raises(MessageNotFoundError):
            receiver.receive_deferred_messages([number])
    assert bus.counts(queue).active == 0


def test_deferred_messages_can_be_settled_in_every_way(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "abandon", "defer", "dead")
    with client.get_queue_receiver(queue) as receiver:
        messages = receive(receiver, 3)
        for message in messages:
            receiver.defer_message(message)
        numbers = [message.sequence_number for message in messages]
        abandoned, deferred, dead = receiver.receive_deferred_messages(numbers)
        receiver.abandon_message(abandoned)
        receiver.defer_message(deferred)
        receiver.dead_letter_message(dead, reason="why", error_description="because")
        assert bus.counts(queue).dead_letter == 1
        again = receiver.receive_deferred_messages(numbers[:2])
        assert bodies(again) == ["abandon", "defer"]
        assert again[0].delivery_count >= 1


def test_deferred_messages_can_be_received_for_good(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        (message,) = receive(receiver, 1)
        receiver.defer_message(message)
    with client.get_queue_receiver(queue, receive_mode=DELETE) as receiver:
        (taken,) = receiver.receive_deferred_messages(message.sequence_number)
        assert str(taken) == "one"
    assert bus.counts(queue).active == 0


# --- peek ---------------------------------------------------------------------------------------


@pytest.mark.behaviour("S160")
def test_peek_walks_the_queue_without_locking(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, *map(str, range(12)))
    with client.get_queue_receiver(queue) as receiver:
        assert bodies(receiver.peek_messages(5)) == ["0", "1", "2", "3", "4"]
        assert bodies(receiver.peek_messages(5)) == ["5", "6", "7", "8", "9"]
        assert bodies(receiver.peek_messages(5, sequence_number=3)) == ["2", "3", "4", "5", "6"]
        assert receiver.peek_messages(5, sequence_number=13) == []
        (message,) = receive(receiver, 1)
        (locked,) = receiver.peek_messages(1, sequence_number=1)
        assert locked.message_id == message.message_id
        assert locked.locked_until_utc is None


@pytest.mark.behaviour("S163")
def test_peek_of_much_answers_with_less(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_sender(queue) as sender:
        for _ in range(8):
            sender.send_messages(ServiceBusMessage(b"x" * 200_000))
    with client.get_queue_receiver(queue) as receiver:
        assert 1 <= len(receiver.peek_messages(8)) < 8


# --- waiting ------------------------------------------------------------------------------------


@pytest.mark.behaviour("S294")
def test_ready_message_is_returned_at_once(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "one")
    with client.get_queue_receiver(queue) as receiver:
        assert bodies(receiver.receive_messages(1, max_wait_time=0.1)) == ["one"]


@pytest.mark.behaviour("S295")
def test_empty_queue_returns_no_message_and_no_error(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_receiver(queue) as receiver:
        assert receiver.receive_messages(10, max_wait_time=0.1) == []


def test_message_that_comes_later_wakes_a_waiting_receiver(
    client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_receiver(queue) as receiver:
        sending = threading.Timer(0.2, send, (client, queue, "late"))
        sending.start()
        assert bodies(receive(receiver, 1)) == ["late"]
        sending.join()


def test_iteration_ends_without_messages(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "1", "2", "3")
    found = []
    with client.get_queue_receiver(queue, max_wait_time=1) as receiver:
        for message in receiver:
            receiver.complete_message(message)
            found.append(str(message))
    assert found == ["1", "2", "3"]


# --- entities that change -----------------------------------------------------------------------


def test_disabled_queue_ends_its_receivers(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_receiver(queue) as receiver:
        assert is_empty(receiver)
        bus.change(queue, status="ReceiveDisabled")
        with pytest.raises(MessagingEntityDisabledError):
            receive(receiver, 1)


def test_deleted_queue_ends_its_receivers(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with client.get_queue_receiver(queue) as receiver:
        assert is_empty(receiver)
        bus.delete(queue)
        with pytest.raises(ServiceBusError):
            receive(receiver, 1)


def test_recreated_queue_is_empty_and_serves_a_new_sender(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "old")
    bus.delete(queue)
    bus.queue(queue)
    with client.get_queue_receiver(queue) as receiver:
        assert is_empty(receiver)
        send(client, queue, "new")
        assert bodies(receive(receiver, 1)) == ["new"]


# --- sessions are refused -----------------------------------------------------------------------


def test_session_receiver_is_refused_on_a_queue_without_sessions(
    client: ServiceBusClient, queue: str
) -> None:
    with pytest.raises(ServiceBusError, match="does not require sessions") as refused:
        client.get_queue_receiver(queue, session_id="one").__enter__()
    assert not isinstance(refused.value, ServiceBusConnectionError | SessionLockLostError)


def test_sessions_of_a_queue_without_them_cannot_be_listed(
    client: ServiceBusClient, queue: str
) -> None:
    with pytest.raises(ServiceBusError):
        list(client.list_queue_sessions(queue))
