"""Sessions with the unmodified azure-servicebus SDK; a raw client where the SDK has no API."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    AutoLockRenewer,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import (
    MessageLockLostError,
    OperationTimeoutError,
    ServiceBusError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)

from postbus.message.codec import Described, Symbol, Uint, Ulong
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import ATTACH, BEGIN, DETACH, RawClient, described, frame

pytestmark = pytest.mark.slow

SOON_S = 0.5
LONG_S = 10
DEAD = ServiceBusSubQueue.DEAD_LETTER
FILTER = Symbol("com.microsoft:session-filter")
DESCRIBED_FILTER = Ulong(0x0000_0013_7000_000C)


@pytest.fixture
def queue(bus: BusThread) -> str:
    return bus.queue(requires_session=True)


def send(
    client: ServiceBusClient, queue: str, session: str, *bodies: str, **properties: object
) -> None:
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(
            [
                ServiceBusMessage(body, session_id=session, message_id=body, **properties)
                for body in bodies
            ]
        )


def take(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    taken: list[ServiceBusReceivedMessage] = []
    while len(taken) < count:
        more = receiver.receive_messages(count - len(taken), max_wait_time=LONG_S)
        assert more, f"only {len(taken)} of {count} came"
        taken += more
    return taken


def bodies(messages: list[ServiceBusReceivedMessage]) -> list[str]:
    return [str(message) for message in messages]


@pytest.mark.behaviour("S169", "S229")
def test_messages_of_a_session_come_in_order_with_its_state(
    client: ServiceBusClient, queue: str
) -> None:
    for number in range(6):
        send(client, queue, f"s{number % 2}", f"m{number}")
    with client.get_queue_receiver(queue, session_id="s1") as receiver:
        assert receiver.session.session_id == "s1"
        assert receiver.session.get_state() is None
        messages = take(receiver, 3)
        assert bodies(messages) == ["m1", "m3", "m5"]
        assert {message.session_id for message in messages} == {"s1"}
        for message in messages:
            receiver.complete_message(message)
            receiver.session.set_state(str(message))
    with client.get_queue_receiver(queue, session_id="s1", max_wait_time=SOON_S) as receiver:
        assert receiver.session.get_state() == b"m5"
        assert receiver.receive_messages(1) == []
        receiver.session.set_state(None)
        assert receiver.session.get_state() is None


def test_next_available_session(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "first", "a")
    send(client, queue, "second", "b")
    seen = {}
    with (
        client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION) as one,
        client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION) as two,
    ):
        for receiver in (one, two):
            (message,) = take(receiver, 1)
            seen[receiver.session.session_id] = str(message)
            receiver.complete_message(message)
    assert seen == {"first": "a", "second": "b"}


def test_next_session_waits_for_one_and_times_out(client: ServiceBusClient, queue: str) -> None:
    with (
        pytest.raises(OperationTimeoutError),
        client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=SOON_S),
    ):
        pass
    accepted: list[str] = []

    def accept() -> None:
        with client.get_queue_receiver(
            queue, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=LONG_S
        ) as receiver:
            accepted.extend(bodies(take(receiver, 1)))

    waiting = threading.Thread(target=accept)
    waiting.start()
    send(client, queue, "late", "here")
    waiting.join(LONG_S)
    assert accepted == ["here"]


def test_a_next_session_that_was_there_at_once_is_kept(
    client: ServiceBusClient, queue: str
) -> None:
    """Granted while the attach is read, before anything could wait."""
    send(client, queue, "s", "a")
    with client.get_queue_receiver(
        queue, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=SOON_S
    ) as receiver:
        (message,) = take(receiver, 1)
        assert receiver.receive_messages(1, max_wait_time=3 * SOON_S) == []
        receiver.complete_message(message)


def test_a_session_has_one_holder(client: ServiceBusClient, queue: str) -> None:
    with client.get_queue_receiver(queue, session_id="mine") as receiver:
        assert receiver.session.session_id == "mine"
        with (
            pytest.raises(SessionCannotBeLockedError),
            client.get_queue_receiver(queue, session_id="mine"),
        ):
            pass
    with client.get_queue_receiver(queue, session_id="mine") as receiver:
        assert receiver.session.session_id == "mine"


def test_renewed_session_lives_on_and_a_lapsed_one_is_lost(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "s", "a")
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        before = receiver.session.locked_until_utc
        (message,) = take(receiver, 1)
        bus.advance(50_000)
        assert receiver.session.renew_lock() > before
        bus.advance(50_000)
        receiver.session.set_state("kept")
        bus.advance(61_000)
        with pytest.raises(SessionLockLostError):
            receiver.session.get_state()
        with pytest.raises((SessionLockLostError, ServiceBusError)):
            receiver.complete_message(message)
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        (again,) = take(receiver, 1)
        assert again.delivery_count == 1
        assert receiver.session.get_state() == b"kept"
        receiver.complete_message(again)


def test_closing_gives_messages_back_uncounted_and_in_order(
    client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "s", "a", "b", "c")
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        take(receiver, 2)
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        messages = take(receiver, 3)
        assert bodies(messages) == ["a", "b", "c"]
        assert [message.delivery_count for message in messages] == [0, 0, 0]


def test_an_abandoned_message_stays_first_of_its_session(
    client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "s", "a", "b")
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        (first,) = take(receiver, 1)
        receiver.abandon_message(first)
        assert bodies(take(receiver, 2)) == ["a", "b"]


def test_deferring_and_dead_lettering_in_a_session(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "s", "a", "b")
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        deferred, bad = take(receiver, 2)
        receiver.defer_message(deferred)
        receiver.dead_letter_message(bad, reason="why", error_description="because")
        (found,) = receiver.receive_deferred_messages(deferred.sequence_number)
        assert str(found) == "a"
        receiver.complete_message(found)
    with client.get_queue_receiver(queue, sub_queue=DEAD) as receiver:
        (dead,) = take(receiver, 1)
        assert (str(dead), dead.session_id, dead.dead_letter_reason) == ("b", "s", "why")
        receiver.complete_message(dead)


def test_receive_and_delete_in_a_session(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "s", "a", "b")
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client.get_queue_receiver(queue, session_id="s", receive_mode=mode) as receiver:
        assert bodies(take(receiver, 2)) == ["a", "b"]
    assert bus.counts(queue).active == 0


def test_peek_in_a_session_and_over_all(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "s1", "a")
    send(client, queue, "s2", "b")
    with client.get_queue_receiver(queue, session_id="s2") as receiver:
        assert bodies(receiver.peek_messages(5)) == ["b"]


def test_list_sessions(client: ServiceBusClient, queue: str) -> None:
    for number in range(5):
        send(client, queue, f"s{number}", "m")
    with client.get_queue_receiver(queue, session_id="empty") as receiver:
        receiver.session.set_state("only a state")
    assert sorted(client.list_queue_sessions(queue)) == ["empty", *(f"s{n}" for n in range(5))]


def test_states_count_in_the_size_and_no_bytes_clear_one(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    for number in range(3):
        with client.get_queue_receiver(queue, session_id=f"made up {number}") as receiver:
            receiver.session.set_state(b"x" * 200_000)
    assert bus.counts(queue).size_bytes >= 600_000
    for name in client.list_queue_sessions(queue):
        with client.get_queue_receiver(queue, session_id=name) as receiver:
            receiver.session.set_state(b"")
            assert receiver.session.get_state() is None
    assert list(client.list_queue_sessions(queue)) == []
    assert bus.counts(queue).size_bytes == 0


def test_list_sessions_of_a_subscription(bus: BusThread, client: ServiceBusClient) -> None:
    topic = bus.topic()
    name = bus.subscription(topic, requiresSession=True)
    with client.get_topic_sender(topic) as sender:
        for session in ("s2", "s1"):
            sender.send_messages(ServiceBusMessage("x", session_id=session))
    assert sorted(client.list_subscription_sessions(topic, name)) == ["s1", "s2"]


def test_auto_renewer_keeps_a_session(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "s", "a")
    with (
        AutoLockRenewer() as renewer,
        client.get_queue_receiver(queue, session_id="s", auto_lock_renewer=renewer) as receiver,
    ):
        (message,) = take(receiver, 1)
        assert receiver.session.auto_renew_error is None
        receiver.complete_message(message)


@pytest.mark.behaviour("S196", "S236")
def test_a_message_without_session_is_refused_by_a_session_queue(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with (
        client.get_queue_sender(queue) as sender,
        pytest.raises(ServiceBusError, match="session"),
    ):
        sender.send_messages(ServiceBusMessage("no session"))
    assert bus.counts(queue).active == 0


def test_sessions_and_plain_receivers_do_not_mix(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    plain = bus.queue()
    with (
        pytest.raises(ServiceBusError, match="non-sessionful"),
        client.get_queue_receiver(queue) as receiver,
    ):
        receiver.receive_messages(1, max_wait_time=SOON_S)
    with (
        pytest.raises(ServiceBusError, match="RequiresSession"),
        client.get_queue_receiver(plain, session_id="s"),
    ):
        pass


def test_a_reloaded_partition_loses_session_locks_only(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "s", "a", "b")
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        receiver.session.set_state("kept")
        first, _ = take(receiver, 2)
        bus.reload(queue)
        with pytest.raises((SessionLockLostError, MessageLockLostError, ServiceBusError)):
            receiver.complete_message(first)
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        assert bodies(take(receiver, 2)) == ["a", "b"]
        assert receiver.session.get_state() == b"kept"


def test_an_expired_message_of_a_session_is_not_delivered(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "s", "short", time_to_live=timedelta(seconds=5))
    send(client, queue, "s", "long")
    bus.advance(6_000)
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        assert bodies(take(receiver, 1)) == ["long"]


# --- without an API in the SDKs -------------------------------------------------------------------


@pytest.fixture
def raw(bus: BusThread) -> RawClient:
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as opened:
        yield opened


def test_the_filter_is_answered_in_the_form_it_came_in(raw: RawClient, queue: str) -> None:
    attached = raw.attach_receiver(queue, 1, filters={FILTER: "plain"})
    assert attached.fields[5].value[7] == {FILTER: "plain"}
    wanted = {FILTER: Described(DESCRIBED_FILTER, "go")}
    attached = raw.attach_receiver(queue, 2, filters=wanted)
    assert attached.fields[5].value[7] == wanted
    ticks = attached.fields[13][Symbol("com.microsoft:locked-until-utc")]
    assert type(ticks) is int
    assert ticks > 621_355_968_000_000_000


def test_a_detach_while_waiting_leaves_the_session_to_others(
    bus: BusThread, raw: RawClient, client: ServiceBusClient, queue: str
) -> None:
    source = described(0x28, queue, *[None] * 6, {FILTER: None})
    raw.write(
        frame(ATTACH, "waiting", Uint(1), True, None, None, source, described(0x29, "here")),
        frame(DETACH, Uint(1), True),
        frame(BEGIN, None, Uint(0), Uint(5_000), Uint(5_000), channel=1),
    )
    assert raw.expect(ATTACH).fields[5] is None
    send(client, queue, "s", "a")
    with client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION) as receiver:
        assert bodies(take(receiver, 1)) == ["a"]


@pytest.mark.parametrize("value", [Uint(7), Described([1], "s"), Described(Ulong(1), "s")])
def test_a_session_filter_of_another_shape_is_refused(
    raw: RawClient, queue: str, value: object
) -> None:
    attached = raw.attach_receiver(queue, 1, filters={FILTER: value})
    assert attached.fields[5] is None
    assert str(raw.expect(DETACH).fields[2].value[0]) == "amqp:invalid-field"


def test_a_lost_connection_frees_its_sessions(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as holder:
        holder.attach_receiver(queue, 1, filters={FILTER: "s"})
        with (
            pytest.raises(SessionCannotBeLockedError),
            client.get_queue_receiver(queue, session_id="s"),
        ):
            pass
    with (
        bus.client(retry_total=10, retry_backoff_factor=0.05) as patient,
        patient.get_queue_receiver(queue, session_id="s") as receiver,
    ):
        assert receiver.session.session_id == "s"
