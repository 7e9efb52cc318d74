"""Partitioned queues and topics with the unmodified SDK: only their numbers differ."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceiveMode,
)
from azure.servicebus.exceptions import (
    MessageLockLostError,
    MessageNotFoundError,
    OperationTimeoutError,
    ServiceBusError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)

from postbus.contract.entities import Sku
from postbus.message.codec import Described, Symbol, Ulong, encode_value
from postbus.process.embedded import EmbeddedPostgres
from tests.edge.amqp.test_transactions import TransactionClient, accepts, complete, condition
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import ACCEPTED, FLOW, REJECTED, TRANSFER, RawClient, described
from tests.edge.sdk.sdk_steps import (
    DEAD,
    SOON_S,
    bodies_of,
    is_empty,
    path_of,
    peek_all,
    receive,
    reload_all,
    send,
    send_each,
    send_together,
    start_wide,
    take,
    total,
)

pytestmark = pytest.mark.slow

PARTITIONS = 4
ROLLED_BACK = "amqp:transaction:rollback"


@pytest.fixture(scope="module")
def running_bus(postgres_server: EmbeddedPostgres) -> Iterator[BusThread]:
    bus = start_wide(postgres_server, "edge_wide", PARTITIONS, Sku.STANDARD)
    for partition_id in range(PARTITIONS):
        bus.queue(f"anchor{partition_id}", enable_partitioning=True)
    yield bus
    bus.stop()


@pytest.fixture
def queue(bus: BusThread) -> str:
    return bus.queue(enable_partitioning=True)


@pytest.fixture
def raw(bus: BusThread) -> Iterator[RawClient]:
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as opened:
        yield opened


def keyed(body: bytes, key: str | None = None, **properties: object) -> bytes:
    """Encode a message with a partition key and an id or session id."""
    fields = [properties.get("message_id"), *[None] * 9, properties.get("session_id")]
    annotations = {} if key is None else {Symbol("x-opt-partition-key"): key}
    return (
        encode_value(Described(Ulong(0x72), annotations))
        + encode_value(described(0x73, *fields))
        + encode_value(Described(Ulong(0x75), body))
    )


def place_of(number: int) -> int:
    return number >> 48


# --- where messages go ----------------------------------------------------------------------------


@pytest.mark.behaviour("S178", "S222", "S188", "S142", "S143")
def test_messages_without_key_go_round(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    plain = bus.queue()
    names = [f"m{number}" for number in range(48)]
    send(client, queue, *names)
    send(client, plain, "plain")
    assert total(bus, queue).active == 48
    seen = peek_all(client, queue)
    assert sorted(bodies_of(seen)) == sorted(names)
    spread = Counter(place_of(each.sequence_number) for each in seen)
    assert set(spread) == set(range(PARTITIONS))
    assert max(spread.values()) - min(spread.values()) <= 12
    assert bodies_of(take(client, plain, 1)) == ["plain"]


@pytest.mark.behaviour("S166", "S167", "S170", "S162", "S195")
def test_a_key_pins_messages_to_a_partition(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    keys = [f"key{number}" for number in range(12)]
    for round_no in range(2):
        each = {f"{key}/{round_no}{n}": {"partition_key": key} for key in keys for n in range(2)}
        send_each(client, queue, each)
        reload_all(bus)
    seen = peek_all(client, queue)
    for key in keys:
        mine = [each for each in seen if str(each).startswith(f"{key}/")]
        assert bodies_of(mine) == [f"{key}/{tail}" for tail in ("00", "01", "10", "11")]
        assert len({place_of(each.sequence_number) for each in mine}) == 1
        numbers = [each.sequence_number for each in mine]
        assert numbers == sorted(set(numbers))
    assert len({place_of(each.sequence_number) for each in seen}) > 1


def test_keys_keep_their_order_for_a_receiver(client: ServiceBusClient, queue: str) -> None:
    keys = [f"key{number}" for number in range(6)]
    each = {f"{key}/{number}": {"partition_key": key} for number in range(5) for key in keys}
    send_each(client, queue, each)
    messages = take(client, queue, 30)
    for key in keys:
        mine = [str(each) for each in messages if str(each).startswith(f"{key}/")]
        assert mine == [f"{key}/{number}" for number in range(5)]


@pytest.mark.behaviour("S168", "S171")
def test_the_session_id_is_the_key(
    bus: BusThread, raw: RawClient, client: ServiceBusClient
) -> None:
    queue = bus.queue(enable_partitioning=True)
    raw.attach_sender(queue)
    for number in range(8):
        raw.write(
            raw.transfer(3 * number, keyed(b"%d" % number, session_id=f"k{number}")),
            raw.transfer(3 * number + 1, keyed(b"%d" % number, f"k{number}")),
            raw.transfer(
                3 * number + 2, keyed(b"%d" % number, f"k{number}", session_id=f"k{number}")
            ),
        )
    assert set(raw.dispositions(24).values()) == {ACCEPTED}
    places: dict[str, set[int]] = {}
    for each in peek_all(client, queue):
        places.setdefault(str(each), set()).add(place_of(each.sequence_number))
    assert {len(found) for found in places.values()} == {1}
    assert len(set.union(*places.values())) > 1


@pytest.mark.behaviour("S172", "S230")
@pytest.mark.parametrize("requires_session", [False, True])
def test_two_different_keys_are_an_invalid_operation(
    bus: BusThread, raw: RawClient, requires_session: bool
) -> None:
    queue = bus.queue(enable_partitioning=True, requires_session=requires_session)
    raw.attach_sender(queue)
    raw.write(
        raw.transfer(0, keyed(b"bad", "one", session_id="other")),
        raw.transfer(1, keyed(b"good", "same", session_id="same")),
    )
    assert raw.dispositions(2) == {0: REJECTED, 1: ACCEPTED}
    assert total(bus, queue).active == 1
    refused = TransactionClient.state_of
    raw.write(raw.transfer(2, keyed(b"bad", "one", session_id="other")))
    assert condition(refused(raw, 2)) == "amqp:not-allowed"


@pytest.mark.behaviour("S13")
def test_pipelined_sends_each_get_their_result(bus: BusThread, raw: RawClient, queue: str) -> None:
    raw.attach_sender(queue)
    bad = set(range(0, 120, 7))
    raw.write(
        *(
            raw.transfer(
                number,
                keyed(b"m", "k", session_id="x" if number in bad else None)
                if number % 2
                else keyed(b"m", session_id="x" * 129 if number in bad else None),
            )
            for number in range(120)
        )
    )
    outcomes = raw.dispositions(120)
    assert {number for number, outcome in outcomes.items() if outcome != ACCEPTED} == bad
    assert total(bus, queue).active == 120 - len(bad)


@pytest.mark.behaviour("S180")
def test_messages_show_no_partition(client: ServiceBusClient, queue: str) -> None:
    send(client, queue, "m")
    (seen,) = peek_all(client, queue)
    (received,) = take(client, queue, 1)
    for each in (seen, received):
        names = [bytes(key) for key in each.raw_amqp_message.annotations]
        assert [name for name in names if b"partition" in name] == []


# --- browsing -------------------------------------------------------------------------------------


@pytest.mark.behaviour("S165", "S162", "S161")
def test_browsing_sees_every_message_once(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    names = [f"m{number}" for number in range(30)]
    send(client, queue, *names)
    with client.get_queue_receiver(queue) as receiver:
        seen = []
        while page := receiver.peek_messages(7):  # the SDK goes on behind the last one
            seen += page
        assert sorted(bodies_of(seen)) == sorted(names)
        numbers = [each.sequence_number for each in seen]
        assert numbers == sorted(numbers)
        (first,) = receiver.peek_messages(1, sequence_number=1)
        assert first.sequence_number == numbers[0]
        (middle,) = receiver.peek_messages(1, sequence_number=numbers[17])
        assert middle.sequence_number == numbers[17]
        assert receiver.peek_messages(5, sequence_number=numbers[-1] + 1) == []


# --- receiving ------------------------------------------------------------------------------------


def script(client: ServiceBusClient, path: str) -> list[object]:
    """Use a queue as a program may and record everything it could notice."""
    seen: list[object] = []
    names = [f"m{number}" for number in range(8)]
    send(client, path, *names)
    with client.get_queue_receiver(path, prefetch_count=3) as receiver:
        messages = {str(each): each for each in receive(receiver, 8)}
        seen.append(sorted(messages))
        seen.append([each.delivery_count for each in messages.values()])
        receiver.complete_message(messages["m0"])
        receiver.abandon_message(messages["m1"])
        receiver.defer_message(messages["m2"])
        receiver.defer_message(messages["m3"])
        receiver.dead_letter_message(messages["m4"], reason="r", error_description="d")
        before = messages["m5"].locked_until_utc
        seen.append(receiver.renew_message_lock(messages["m5"]) >= before)
        (again,) = receive(receiver, 1)
        seen.append((str(again), again.delivery_count))
        deferred = receiver.receive_deferred_messages(
            [messages["m2"].sequence_number, messages["m3"].sequence_number]
        )
        seen.append(sorted(bodies_of(deferred)))
        for each in (*deferred, again, messages["m5"], messages["m6"]):
            receiver.complete_message(each)
        seen.append(bodies_of(receiver.peek_messages(10, sequence_number=1)))
        receiver.complete_message(messages["m7"])
        seen.append(bodies_of(receiver.receive_messages(1, max_wait_time=SOON_S)))
        with pytest.raises(MessageNotFoundError):
            receiver.receive_deferred_messages(messages["m2"].sequence_number)
    (dead,) = take(client, path, 1, sub_queue=DEAD)
    seen.append((str(dead), dead.dead_letter_reason, dead.dead_letter_error_description))
    return seen


@pytest.mark.behaviour("S159", "S225")
def test_a_program_sees_no_difference(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    assert script(client, queue) == script(client, bus.queue())
    assert is_empty(bus, queue)


@pytest.mark.behaviour("S156", "S206")
def test_few_messages_in_many_partitions_are_all_received(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    keys = [f"key{number}" for number in range(20)]
    send_each(client, queue, {key: {"partition_key": key} for key in keys})
    found = []
    with client.get_queue_receiver(queue) as receiver:
        while more := receiver.receive_messages(50, max_wait_time=SOON_S):
            found += bodies_of(more)
            for each in more:
                receiver.complete_message(each)
    assert sorted(found) == sorted(keys)
    assert is_empty(bus, queue)


def test_a_waiting_receiver_gets_hints_of_every_partition(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    raw.attach_receiver(queue)
    raw.attach_sender(queue)
    raw.write(raw.flow(100))
    for number in range(20):
        raw.write(raw.transfer(number, keyed(b"%d" % number, f"key{number}")))
    got, answered = set(), 0
    while len(got) < 20 or answered < 20:
        found = raw.read()
        if found.code == TRANSFER:
            got.add(found.payload[-2:].strip(b"\x01\x02\xa0"))
        elif found.code != FLOW:
            first, last = found.fields[1], found.fields[2]
            answered += (first if last is None else last) - first + 1
    assert len(got) == 20


def test_credit_is_never_exceeded_and_shared(
    bus: BusThread, raw: RawClient, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, *(f"m{number}" for number in range(24)))
    raw.attach_receiver(queue)
    raw.write(raw.flow(5))
    taken = [raw.expect(TRANSFER) for _ in range(5)]
    raw.write(raw.flow(0, count=5, drain=True))
    while not (found := raw.expect(FLOW)).fields[8]:
        pass
    assert (found.fields[5], found.fields[6]) == (5, 0)
    raw.write(raw.flow(24, count=5))
    taken += [raw.expect(TRANSFER) for _ in range(19)]
    tags = [bytes(each.fields[2]) for each in taken]
    assert len(set(tags)) == 24


@pytest.mark.parametrize("backlog", [0, 1, 6])
def test_a_drain_is_answered_within_200_ms(
    bus: BusThread, raw: RawClient, client: ServiceBusClient, queue: str, backlog: int
) -> None:
    send(client, queue, *(f"m{number}" for number in range(backlog)))
    raw.attach_receiver(queue)
    for _ in range(3):
        raw.write(raw.flow(0, drain=True))
        while not raw.expect(FLOW).fields[8]:
            pass
    began = time.monotonic()
    raw.write(raw.flow(50, drain=True))
    taken = 0
    while True:
        found = raw.read()
        if found.code == TRANSFER:
            taken += 1
        elif found.fields[8]:
            break
    assert time.monotonic() - began < 0.2
    assert taken == backlog
    assert (found.fields[5], found.fields[6]) == (50, 0)


def test_receive_and_delete(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    names = [f"m{number}" for number in range(40)]
    send_together(client, queue, names[:20])
    send(client, queue, *names[20:])
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client.get_queue_receiver(queue, receive_mode=mode) as receiver:
        assert sorted(bodies_of(receive(receiver, 40))) == sorted(names)
    assert is_empty(bus, queue)


def test_receive_and_delete_takes_no_more_than_asked_for(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, *(f"m{number}" for number in range(12)))
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client.get_queue_receiver(queue, receive_mode=mode) as receiver:
        taken = receive(receiver, 5)
    assert len(taken) == 5
    assert total(bus, queue).active == 7


def test_locks_of_all_partitions(bus: BusThread, client: ServiceBusClient, queue: str) -> None:
    send(client, queue, *(f"m{number}" for number in range(8)))
    with client.get_queue_receiver(queue) as receiver:
        first = receive(receiver, 8)
        for each in first[:4]:
            assert receiver.renew_message_lock(each)
        bus.advance(61_000)
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(first[7])
        again = receive(receiver, 8)
        assert sorted(bodies_of(again)) == sorted(bodies_of(first))
        assert {each.delivery_count for each in again} == {1}
        for each in again:
            receiver.complete_message(each)
    assert is_empty(bus, queue)


def test_a_partition_that_starts_again_loses_locks_only(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    names = [f"m{number}" for number in range(16)]
    send(client, queue, *names)
    with client.get_queue_receiver(queue) as receiver:
        held = receive(receiver, 16)
        reload_all(bus)
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(held[0])
    assert sorted(bodies_of(take(client, queue, 16))) == sorted(names)


# --- deferred, scheduled, dead letters ------------------------------------------------------------


def test_deferred_messages_of_several_partitions(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, *(f"m{number}" for number in range(8)))
    with client.get_queue_receiver(queue) as receiver:
        numbers = []
        for each in receive(receiver, 8):
            receiver.defer_message(each)
            numbers.append(each.sequence_number)
        assert len({place_of(number) for number in numbers}) > 1
        assert receiver.receive_messages(1, max_wait_time=SOON_S) == []
        absent = max(numbers) + 1
        with pytest.raises(MessageNotFoundError):
            receiver.receive_deferred_messages([*numbers, absent])
        with pytest.raises(MessageNotFoundError):
            receiver.receive_deferred_messages([*numbers, (PARTITIONS + 5 << 48) + 1])
        found = receiver.receive_deferred_messages(list(reversed(numbers)))
        assert sorted(each.sequence_number for each in found) == sorted(numbers)
        for each in found:
            receiver.complete_message(each)
    assert is_empty(bus, queue)


def test_scheduled_messages_of_several_partitions(
    bus: BusThread, client: ServiceBusClient, queue: str
) -> None:
    due = bus.now() + timedelta(seconds=60)
    numbers = []
    with client.get_queue_sender(queue) as sender:
        for number in range(8):
            numbers += sender.schedule_messages(ServiceBusMessage(f"m{number}"), due)
        assert len(set(numbers)) == 8
        assert len({place_of(number) for number in numbers}) > 1
        assert total(bus, queue).scheduled == 8
        sender.cancel_scheduled_messages(numbers[:4])
        with pytest.raises((MessageNotFoundError, ServiceBusError)):
            sender.cancel_scheduled_messages(numbers[0])
    assert total(bus, queue).scheduled == 4
    bus.advance(61_000)
    assert sorted(bodies_of(take(client, queue, 4))) == ["m4", "m5", "m6", "m7"]


def test_dead_letters_of_all_partitions(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue(enable_partitioning=True, max_delivery_count=1)
    names = [f"m{number}" for number in range(8)]
    send(client, queue, *names)
    with client.get_queue_receiver(queue) as receiver:
        for each in receive(receiver, 8):
            receiver.abandon_message(each)
    assert total(bus, queue).dead_letter == 8
    seen = peek_all(client, queue, sub_queue=DEAD)
    assert sorted(bodies_of(seen)) == names
    reload_all(bus)
    dead = take(client, queue, 8, sub_queue=DEAD)
    assert sorted(bodies_of(dead)) == names
    assert {each.dead_letter_reason for each in dead} == {"MaxDeliveryCountExceeded"}
    assert is_empty(bus, queue, DEAD)


def test_expiry_works_in_every_partition(bus: BusThread, client: ServiceBusClient) -> None:
    queue = bus.queue(enable_partitioning=True, dead_lettering_on_message_expiration=True)
    send(client, queue, *(f"m{n}" for n in range(8)), time_to_live=timedelta(seconds=5))
    bus.advance(6_000)
    with client.get_queue_receiver(queue) as receiver:
        assert receiver.receive_messages(1, max_wait_time=SOON_S) == []
    assert len(take(client, queue, 8, sub_queue=DEAD)) == 8


# --- sessions -------------------------------------------------------------------------------------


@pytest.fixture
def grouped(bus: BusThread) -> str:
    return bus.queue(enable_partitioning=True, requires_session=True)


@pytest.mark.behaviour("S169", "S229", "S155")
def test_sessions_lie_in_one_partition_each(
    bus: BusThread, client: ServiceBusClient, grouped: str
) -> None:
    sessions = [f"s{number}" for number in range(6)]
    each = {f"{name}/{number}": {"session_id": name} for number in range(3) for name in sessions}
    send_each(client, grouped, each)
    places = set()
    for session in sessions[:3]:
        with client.get_queue_receiver(grouped, session_id=session) as receiver:
            receiver.session.set_state(f"state of {session}")
            messages = receive(receiver, 3)
            assert bodies_of(messages) == [f"{session}/{number}" for number in range(3)]
            (place,) = {place_of(each.sequence_number) for each in messages}
            places.add(place)
            assert bodies_of(receiver.peek_messages(9, sequence_number=1)) == bodies_of(messages)
            receiver.complete_message(messages[0])
            receiver.defer_message(messages[1])
            (deferred,) = receiver.receive_deferred_messages(messages[1].sequence_number)
            receiver.complete_message(deferred)
            receiver.dead_letter_message(messages[2])
    reload_all(bus)
    with client.get_queue_receiver(grouped, session_id="s1") as receiver:
        assert receiver.session.get_state() == b"state of s1"
    assert sorted(client.list_queue_sessions(grouped)) == sessions
    assert sorted(bodies_of(take(client, grouped, 3, sub_queue=DEAD))) == ["s0/2", "s1/2", "s2/2"]
    assert total(bus, grouped).active == 9


def test_next_available_session_of_any_partition(
    bus: BusThread, client: ServiceBusClient, grouped: str
) -> None:
    sessions = [f"s{number}" for number in range(5)]
    send_each(client, grouped, {session: {"session_id": session} for session in sessions})
    seen = []
    opened = []
    for _ in sessions:
        receiver = client.get_queue_receiver(grouped, session_id=NEXT_AVAILABLE_SESSION)
        opened.append(receiver)
        (message,) = receive(receiver, 1)
        assert receiver.session.session_id == str(message)
        receiver.complete_message(message)
        seen.append(str(message))
    assert sorted(seen) == sessions
    with (
        pytest.raises(OperationTimeoutError),
        client.get_queue_receiver(grouped, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=SOON_S),
    ):
        pass
    with (
        pytest.raises(SessionCannotBeLockedError),
        client.get_queue_receiver(grouped, session_id=seen[0]),
    ):
        pass
    for receiver in opened:
        receiver.close()
    send(client, grouped, "again", session_id=seen[0])
    assert bodies_of(take(client, grouped, 1, session_id=seen[0])) == ["again"]


def test_a_session_lock_runs_out_in_its_partition(
    bus: BusThread, client: ServiceBusClient, grouped: str
) -> None:
    send(client, grouped, "a", "b", session_id="s")
    with client.get_queue_receiver(grouped, session_id="s") as receiver:
        receive(receiver, 1)
        bus.advance(50_000)
        receiver.session.renew_lock()
        bus.advance(50_000)
        receiver.session.set_state("kept")
        bus.advance(61_000)
        with pytest.raises(SessionLockLostError):
            receiver.session.set_state("lost")
    messages = take(client, grouped, 2, session_id="s")
    assert bodies_of(messages) == ["a", "b"]
    assert messages[0].delivery_count == 1


# --- topics ---------------------------------------------------------------------------------------


@pytest.mark.behaviour("S223")
def test_subscriptions_of_a_partitioned_topic(bus: BusThread, client: ServiceBusClient) -> None:
    topic = bus.topic(enable_partitioning=True)
    for name in ("one", "two"):
        bus.subscription(topic, name)
    bus.subscription(topic, "grouped", requires_session=True)
    names = [f"m{number}" for number in range(16)]
    send(client, topic, *names, session_id=None)
    send(client, topic, "a", "b", session_id="s")
    for name in ("one", "two"):
        path = path_of(topic, name)
        assert total(bus, path).active == 18
        found = take(client, path, 18)
        assert sorted(bodies_of(found)) == sorted([*names, "a", "b"])
        assert len({place_of(each.sequence_number) for each in found}) > 1
    assert bodies_of(take(client, path_of(topic, "grouped"), 2, session_id="s")) == ["a", "b"]
    assert total(bus, path_of(topic, "grouped")).dead_letter == 16


@pytest.mark.behaviour("S64")
def test_a_changed_topic_or_subscription_loses_no_locked_message(
    bus: BusThread, client: ServiceBusClient
) -> None:
    for is_spread in (False, True):
        topic = bus.topic(enable_partitioning=is_spread)
        bus.subscription(topic)
        send(client, topic, "a", "b")
        with client.get_subscription_receiver(topic, "all") as receiver:
            first, second = receive(receiver, 2)
            bus.topic(topic, enable_partitioning=is_spread, default_message_ttl_ms=900_000_000)
            bus.subscription(topic, "all", lock_duration_ms=30_000, max_delivery_count=20)
            for each in (first, second):
                try:
                    receiver.abandon_message(each)
                except MessageLockLostError:
                    continue
        assert sorted(bodies_of(take(client, path_of(topic), 2))) == ["a", "b"]


# --- transactions ---------------------------------------------------------------------------------


@pytest.fixture
def transactional(bus: BusThread) -> Iterator[TransactionClient]:
    with TransactionClient(bus) as opened:
        yield opened


def attempt(
    client: TransactionClient, *messages: bytes, handle: int = 0
) -> tuple[list[str], str | None]:
    """Send messages in a transaction; return the conditions of refusals, and its end."""
    transaction = client.declare()
    refused = []
    for each in messages:
        state = client.send_in(transaction, each, handle=handle)
        if not accepts(state, transaction):
            refused.append(condition(state))
    end = client.discharge(transaction)
    return refused, None if int(end.descriptor) == ACCEPTED else condition(end)


@pytest.mark.behaviour("S189", "S190", "S191", "S195", "S233")
def test_sends_with_one_key_commit_together(
    bus: BusThread, transactional: TransactionClient, client: ServiceBusClient, queue: str
) -> None:
    transactional.attach_sender(queue)
    for number in range(4):
        key = f"k{number}"
        transaction = transactional.declare()
        for payload in (keyed(b"a", key), keyed(b"b", key), keyed(b"c", session_id=key)):
            assert accepts(transactional.send_in(transaction, payload), transaction)
        assert total(bus, queue).active == 3 * number
        assert int(transactional.discharge(transaction).descriptor) == ACCEPTED
        assert total(bus, queue).active == 3 * number + 3
    rolled_back = transactional.declare()
    transactional.send_in(rolled_back, keyed(b"never", "k"))
    transactional.discharge(rolled_back, fail=True)
    seen = peek_all(client, queue)
    assert len(seen) == 12
    places: dict[str | None, set[int]] = {}
    for each in seen:
        key = each.partition_key or each.session_id
        places.setdefault(key, set()).add(place_of(each.sequence_number))
    assert {len(found) for found in places.values()} == {1}


@pytest.mark.behaviour("S192")
def test_the_message_id_is_a_key_only_with_duplicate_detection(
    bus: BusThread, transactional: TransactionClient, queue: str
) -> None:
    detecting = bus.queue(enable_partitioning=True, requires_duplicate_detection=True)
    transactional.attach_sender(detecting, handle=3)
    same = [keyed(b"m", message_id="id"), keyed(b"copy", message_id="id")]
    assert attempt(transactional, *same, handle=3) == ([], None)
    assert total(bus, detecting).active == 1
    other = [keyed(b"m", message_id="x"), keyed(b"m", message_id="y")]
    assert_invalid(attempt(transactional, *other, handle=3))
    assert total(bus, detecting).active == 1
    transactional.attach_sender(queue)
    assert_invalid(attempt(transactional, *same))
    assert total(bus, queue).active == 0


def assert_invalid(found: tuple[list[str], str | None]) -> None:
    """A send was refused as an invalid operation, and the transaction is rolled back."""
    refused, end = found
    assert set(refused) == {"amqp:not-allowed"}
    assert end == ROLLED_BACK


@pytest.mark.behaviour("S193", "S194", "S198", "S214", "S234", "S235", "S237")
@pytest.mark.parametrize(
    "second",
    [
        keyed(b"no key"),
        keyed(b"other key", "other"),
        keyed(b"other session", session_id="other"),
        keyed(b"id is no key", message_id="k"),
    ],
    ids=["none", "key", "session", "id"],
)
def test_other_keys_are_an_invalid_operation(
    bus: BusThread, transactional: TransactionClient, queue: str, second: bytes
) -> None:
    transactional.attach_sender(queue)
    for first in (keyed(b"first", "k"), keyed(b"first", session_id="k")):
        assert_invalid(attempt(transactional, first, second))
    assert total(bus, queue).active == 0
    transactional.write(transactional.transfer(transactional.next_id(), keyed(b"alone", "k")))
    assert set(transactional.dispositions(1).values()) == {ACCEPTED}


@pytest.mark.behaviour("S193", "S234")
def test_a_message_without_key_alone_is_an_invalid_operation(
    bus: BusThread, transactional: TransactionClient, queue: str
) -> None:
    transactional.attach_sender(queue)
    assert_invalid(attempt(transactional, keyed(b"no key")))
    assert total(bus, queue).active == 0


@pytest.mark.behaviour("S196", "S197", "S236", "S198", "S237", "S214")
def test_sessions_in_transactions(
    bus: BusThread, transactional: TransactionClient, grouped: str
) -> None:
    transactional.attach_sender(grouped)
    assert_invalid_or_refused(attempt(transactional, keyed(b"m", "only a key")))
    assert_invalid(attempt(transactional, keyed(b"m", "one", session_id="other")))
    assert_invalid(attempt(transactional, keyed(b"m", session_id="a"), keyed(b"m", session_id="b")))
    assert total(bus, grouped).active == 0
    good = [keyed(b"m", "s", session_id="s"), keyed(b"m", session_id="s")]
    assert attempt(transactional, *good) == ([], None)
    assert total(bus, grouped).active == 2


def assert_invalid_or_refused(found: tuple[list[str], str | None]) -> None:
    """Nothing was committed, and the client got an error at the send or at the discharge."""
    assert found[1] == ROLLED_BACK


@pytest.mark.behaviour("S199")
def test_two_sessions_in_one_transaction_of_a_plain_queue(
    bus: BusThread, transactional: TransactionClient
) -> None:
    queue = bus.queue(requires_session=True)
    transactional.attach_sender(queue)
    two = [keyed(b"m", session_id="a"), keyed(b"m", session_id="b")]
    assert attempt(transactional, *two) == ([], None)
    assert total(bus, queue).active == 2


def test_a_settlement_and_a_send_of_one_partition(
    bus: BusThread, transactional: TransactionClient, client: ServiceBusClient, queue: str
) -> None:
    send(client, queue, "work", partition_key="k")
    transactional.attach_sender(queue)
    (work,) = transactional.receive(queue, 1)
    delivery_id = int(work.fields[1])
    for fail in (True, False):
        transaction = transactional.declare()
        if not fail:
            settled = transactional.settle_in(transaction, delivery_id, complete())
            assert accepts(settled, transaction)
        transactional.send_in(transaction, keyed(b"result", "k"))
        transactional.discharge(transaction, fail=fail)
        assert bodies_of(peek_all(client, queue)) == (["work"] if fail else ["result"])
