"""Forwarding and the outbox: its messages, their shipment, undeliverable ones."""

from __future__ import annotations

import pytest

from postbus.contract.entities import (
    DEFAULT_RULE,
    EntityKind,
    EntityStatus,
    QueueProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    AddConsumer,
    Arrive,
    Arrived,
    Disposition,
    DropEntity,
    Enqueue,
    Enqueued,
    LoseLocks,
    PutEntity,
    Refusal,
    Refused,
    Shipped,
    SubQueue,
    Tick,
)
from postbus.entity.outcomes import Outcome
from postbus.entity.transfer.inbox import MAX_FORWARD_HOPS
from postbus.entity.transfer.outbox import SHIP_MESSAGES
from tests.entity.partition_rig import (
    ACTIVE,
    DELETE,
    DLQ,
    PEEK_LOCK,
    QUEUE,
    Rig,
    message,
    name_of,
    properties_of,
)
from tests.entity.transfer.forward_rig import Bus, forwarded

TDLQ = SubQueue.TRANSFER_DEAD_LETTER
TARGET = 8
FORWARDING = QueueProperties(forward_to="far")
DEAD_FORWARDING = QueueProperties(
    forward_dead_lettered_messages_to="far", dead_lettering_on_message_expiration=True
)


def make_bus(source: QueueProperties, **target: object) -> Bus:
    """Queue 7 of partition 1 beside `far`, queue 8 of partition 2."""
    rigs = {1: Rig(source), 2: Rig()}
    rigs[2].put(QueueProperties(**target), entity_no=TARGET)
    return Bus(rigs, {"far": (2, TARGET)})


def bodies(bus: Bus) -> list[str]:
    """Take everything from the target in order."""
    rig = bus.rigs[2]
    rig.consumer("T", mode=DELETE, entity_no=TARGET)
    rig.demand("T", 10_000)
    return [name_of(delivery.envelope) for delivery in rig.inbox("T")]


# --- forwarding -----------------------------------------------------------------------------------


@pytest.mark.behaviour("S203")
def test_new_messages_go_straight_to_the_target_in_order() -> None:
    bus = make_bus(FORWARDING)
    names = [f"m{n}" for n in range(200)]
    assert bus.rigs[1].send(*names) == list(range(1, 201))
    counts = bus.rigs[1].state.counts(QUEUE)
    assert counts is not None
    assert counts.active == 0
    bus.settle()
    assert bodies(bus) == names
    assert bus.rigs[1].tables.rows == {}
    assert bus.rigs[1].state.entities[QUEUE].size_bytes == 0


@pytest.mark.behaviour("S204")
@pytest.mark.parametrize("budget_bytes", [1 << 30, 1_500])
def test_enabling_forwarding_moves_stored_messages(budget_bytes: int) -> None:
    bus = make_bus(QueueProperties(lock_duration_ms=5_000))
    rig = bus.rigs[1]
    rig.budget.limit_bytes = budget_bytes
    names = [f"m{n}" for n in range(50)]
    rig.send(*names)
    held = rig.receive("A", 3)
    rig.put(QueueProperties(lock_duration_ms=5_000, forward_to="far"))
    assert rig.clients[rig.names["A"]].ended is Refusal.NOT_ALLOWED
    bus.settle()
    assert bodies(bus) == names[3:]
    rig.settle(Disposition.COMPLETE, held[0])
    rig.settle(Disposition.ABANDON, held[1])
    bus.settle()
    assert bodies(bus) == ["m1"]
    rig.advance(5_000)
    bus.settle()
    assert bodies(bus) == ["m2"]
    assert rig.tables.rows == {}


def test_forwarding_goes_on_after_a_crash() -> None:
    bus = make_bus(QueueProperties())
    rig = bus.rigs[1]
    names = [f"m{n}" for n in range(2_500)]
    rig.send(*names)
    rig.is_auto = False
    rig.submit(PutEntity(QUEUE, "queue-7", EntityKind.QUEUE, FORWARDING, 2))
    rig.commit(1)
    rig.crash()
    bus.settle()
    assert bodies(bus) == names


def test_a_large_backlog_is_moved_by_several_commands() -> None:
    rig = Rig(QueueProperties())
    rig.send(*(f"m{n}" for n in range(2_500)))
    start = len(rig.results)
    rig.put(FORWARDING)
    rig.tick_now()
    moves = [len(r.mutations) for r in rig.results[start:] if isinstance(r, Outcome)]
    assert max(moves) <= 2_100
    assert len(rig.state._outbox) == 2_500


def test_a_forwarding_queue_has_no_receivers_but_a_dead_letter_queue() -> None:
    rig = Rig(FORWARDING)
    reply = rig.apply(AddConsumer(QUEUE, ACTIVE, 90, PEEK_LOCK))
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.NOT_ALLOWED
    rig.consumer("D", sub_queue=DLQ)
    rig.put(QueueProperties(forward_to="far", forward_dead_lettered_messages_to="x"))
    assert isinstance(rig.apply(AddConsumer(QUEUE, DLQ, 92, PEEK_LOCK)), Refused)


def test_a_scheduled_message_is_forwarded_when_it_is_due() -> None:
    bus = make_bus(FORWARDING)
    rig = bus.rigs[1]
    rig.send(message("a", scheduled_ms=rig.now_ms + 1_000))
    bus.settle()
    assert bodies(bus) == []
    assert rig.peek_names() == ["a"]
    rig.advance(1_000)
    bus.rigs[2].advance(1_000)
    bus.settle()
    assert bodies(bus) == ["a"]


def test_expired_messages_are_not_forwarded() -> None:
    bus = make_bus(QueueProperties(dead_lettering_on_message_expiration=True))
    rig = bus.rigs[1]
    rig.send(message("old", ttl_ms=1_000), "new")
    rig.advance(1_000)
    rig.put(QueueProperties(forward_to="far", dead_lettering_on_message_expiration=True))
    bus.settle()
    assert bodies(bus) == ["new"]
    assert rig.peek_names(DLQ) == ["old"]


def test_a_queue_that_is_receive_disabled_keeps_its_messages() -> None:
    bus = make_bus(
        QueueProperties(forward_to="far", status=EntityStatus.RECEIVE_DISABLED),
    )
    bus.rigs[1].send("a")
    bus.settle()
    assert bodies(bus) == []
    bus.rigs[1].put(FORWARDING)
    bus.settle()
    assert bodies(bus) == ["a"]


def test_sessions_keep_their_order() -> None:
    sessions = QueueProperties(requires_session=True)
    bus = make_bus(sessions)
    rig = bus.rigs[1]
    rig.send(*(message(f"{n}", session="st"[n % 2]) for n in range(40)))
    rig.put(QueueProperties(requires_session=True, forward_to="far"))
    rig.send(*(message(f"{n}", session="st"[n % 2]) for n in range(40, 60)))
    bus.settle()
    arrived = [int(name) for name in bodies(bus)]
    for parity in (0, 1):
        mine = [n for n in arrived if n % 2 == parity]
        assert mine == list(range(parity, 60, 2))


def test_lost_locks_leave_the_forwarder_its_session() -> None:
    bus = make_bus(QueueProperties(requires_session=True))
    rig = bus.rigs[1]
    rig.budget.limit_bytes = 3_000
    rig.send(*(message(f"{n}", session="s") for n in range(50)))
    rig.is_auto = False
    put = QueueProperties(requires_session=True, forward_to="far")
    rig.submit(PutEntity(QUEUE, "near", EntityKind.QUEUE, put, 9))
    rig.submit(Tick())
    rig.submit(LoseLocks(QUEUE))  # a session is held, and its messages are being read
    rig.is_auto = True
    rig.commit()
    bus.settle()
    assert bodies(bus) == [str(n) for n in range(50)]


def test_copies_of_a_topic_are_forwarded() -> None:
    bus = make_bus(QueueProperties())
    rig = bus.rigs[1]
    rig.apply(PutEntity(20, "t", EntityKind.TOPIC, TopicProperties(), 2))
    properties = SubscriptionProperties(forward_to="far")
    kind = EntityKind.SUBSCRIPTION
    rig.apply(PutEntity(21, "t/Subscriptions/s", kind, properties, 3, 20, (DEFAULT_RULE,)))
    names = [f"m{n}" for n in range(100)]
    rig.send(*names, message("late", scheduled_ms=rig.now_ms + 500), entity_no=20)
    bus.settle()
    assert bodies(bus) == names
    for each in bus.rigs.values():
        each.advance(500)
    bus.settle()
    assert bodies(bus) == ["late"]
    assert rig.tables.rows == {}


def test_new_messages_do_not_overtake_a_moving_backlog() -> None:
    bus = make_bus(QueueProperties())
    rig = bus.rigs[1]
    rig.budget.limit_bytes = 3_000
    rig.send(*(f"m{n}" for n in range(50)))
    rig.put(FORWARDING)
    rig.send(*(f"m{n}" for n in range(50, 60)))
    bus.settle()
    assert bodies(bus) == [f"m{n}" for n in range(60)]


# --- dead letters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_dead_letters_are_forwarded_with_their_reason(is_late: bool) -> None:
    bus = make_bus(QueueProperties() if is_late else DEAD_FORWARDING)
    rig = bus.rigs[1]
    rig.send("a", "b")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive("A", 2), reason="why", description="so")
    rig.put(DEAD_FORWARDING)
    rig.tick_now()
    bus.start()
    assert {source for hop in bus.hops for source in hop.ship.sources} == {b"queue-7"}
    bus.settle()
    rig2 = bus.rigs[2]
    rig2.consumer("T", entity_no=TARGET)
    rig2.demand("T", 5)
    arrived = rig2.inbox("T")
    assert [name_of(d.envelope) for d in arrived] == ["a", "b"]
    properties = properties_of(arrived[0].envelope)
    assert properties == {"DeadLetterReason": "why", "DeadLetterErrorDescription": "so"}
    assert rig.tables.rows == {}


def test_an_expired_message_is_forwarded_as_a_dead_letter() -> None:
    bus = make_bus(DEAD_FORWARDING)
    rig = bus.rigs[1]
    rig.send(message("a", ttl_ms=1_000))
    rig.advance(1_000)
    rig.receive()
    bus.settle()
    assert bodies(bus) == ["a"]


# --- undeliverable messages -----------------------------------------------------------------------


def transfer_letters(rig: Rig) -> dict[str, dict[str, object]]:
    rig.consumer("X", sub_queue=TDLQ)
    rig.demand("X", 100)
    return {name_of(d.envelope): properties_of(d.envelope) for d in rig.inbox("X")}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param("disabled", "MessagingEntityDisabled", marks=pytest.mark.behaviour("S288")),
        pytest.param("gone", "MessagingEntityNotFound", marks=pytest.mark.behaviour("S289")),
        pytest.param("full", "QuotaExceeded", marks=pytest.mark.behaviour("S290")),
        ("session", "Session id is null."),
    ],
)
def test_messages_refused_by_the_target_are_transfer_dead_lettered(case: str, reason: str) -> None:
    status = EntityStatus.DISABLED if case == "disabled" else EntityStatus.ACTIVE
    bus = make_bus(FORWARDING, status=status, requires_session=case == "session")
    if case == "gone":
        bus.places.clear()
    elif case == "full":
        bus.rigs[2].send("first", entity_no=TARGET)
        bus.rigs[2].state.entities[TARGET].size_bytes = 1 << 30
    bus.rigs[1].send("a", "b", "c")
    bus.settle()
    assert bus.rigs[1].peek_names(DLQ) == []
    letters = transfer_letters(bus.rigs[1])
    assert list(letters) == ["a", "b", "c"]
    assert {item["DeadLetterReason"] for item in letters.values()} == {reason}
    assert all("DeadLetterErrorDescription" in item for item in letters.values())


@pytest.mark.behaviour("S292", "S293")
def test_a_transfer_dead_letter_is_completed_and_gone() -> None:
    bus = make_bus(FORWARDING)
    bus.places.clear()
    rig = bus.rigs[1]
    (number,) = rig.send("a")
    bus.settle()
    rig.crash()
    rig.consumer("X", sub_queue=TDLQ)
    rig.demand("X", 1)
    (letter,) = rig.inbox("X")
    assert letter.sequence == number
    assert rig.peek_names(DLQ) == []
    rig.settle(Disposition.COMPLETE, letter, sub_queue=TDLQ)
    assert rig.tables.rows == {}
    assert rig.state.entities[QUEUE].size_bytes == 0


def test_a_refused_message_does_not_hold_up_the_next() -> None:
    bus = make_bus(FORWARDING)
    bus.rigs[1].send("a", message("x", size_bytes=200_000), "b")
    bus.rigs[2].state.entities[TARGET].max_message_bytes = 1_000
    bus.settle()
    assert bodies(bus) == ["a", "b"]
    assert list(transfer_letters(bus.rigs[1])) == ["x"]


def chain(length: int) -> Bus:
    """Make q0 -> q1 -> ... -> q<length>, alternating between two partitions."""
    rigs = {1: Rig(), 2: Rig()}
    places: dict[str, tuple[int, int]] = {}
    for n in range(length + 1):
        target = f"q{n + 1}" if n < length else None
        properties = QueueProperties(forward_to=target)
        rigs[n % 2 + 1].apply(PutEntity(30 + n, f"q{n}", EntityKind.QUEUE, properties, 2))
        places[f"q{n}"] = (n % 2 + 1, 30 + n)
    return Bus(rigs, places)


@pytest.mark.behaviour("S287")
def test_a_chain_at_the_limit() -> None:
    bus = chain(MAX_FORWARD_HOPS)
    bus.rigs[1].send("a", entity_no=30)
    bus.settle()
    assert set(bus.where()["a"]) == {(MAX_FORWARD_HOPS % 2 + 1, 30 + MAX_FORWARD_HOPS, ACTIVE)}


@pytest.mark.behaviour("S263", "S286")
def test_a_chain_above_the_limit() -> None:
    bus = chain(MAX_FORWARD_HOPS + 1)
    bus.rigs[1].send("a", entity_no=30)
    bus.settle()
    last = MAX_FORWARD_HOPS
    rig = bus.rigs[last % 2 + 1]
    assert set(bus.where()["a"]) == {(last % 2 + 1, 30 + last, TDLQ)}
    rig.consumer("X", sub_queue=TDLQ, entity_no=30 + last)
    rig.demand("X", 1)
    (letter,) = rig.inbox("X")
    assert properties_of(letter.envelope) == {
        "DeadLetterReason": "MaxTransferHopCountExceeded",
        "DeadLetterErrorDescription": None,
    }


def test_a_dead_letter_keeps_its_reason_when_it_cannot_be_forwarded() -> None:
    bus = make_bus(DEAD_FORWARDING)
    bus.places.clear()
    rig = bus.rigs[1]
    rig.send("a")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive(), reason="why")
    bus.settle()
    assert transfer_letters(rig) == {"a": {"DeadLetterReason": "why"}}


def test_transfer_dead_letters_are_never_forwarded() -> None:
    bus = make_bus(QueueProperties(forward_to="gone", forward_dead_lettered_messages_to="far"))
    bus.rigs[1].send("a")
    bus.settle()
    assert bodies(bus) == []
    assert bus.rigs[1].peek_names(TDLQ) == ["a"]


# --- the outbox -----------------------------------------------------------------------------------


def test_one_ship_is_open_for_a_target_and_it_is_bounded() -> None:
    rig = Rig(FORWARDING)
    rig.send(*(f"m{n}" for n in range(100)))
    rig.send("last")
    (ship,) = rig.ships
    assert len(ship.numbers) == SHIP_MESSAGES
    rig.ships.clear()
    rig.apply(Shipped("FAR", ship.numbers, {}))
    (ship,) = rig.ships
    assert len(ship.numbers) == 101 - SHIP_MESSAGES
    large = Rig(FORWARDING)
    large.send(*(message(f"m{n}", size_bytes=200_000) for n in range(20)))
    assert len(large.ships[0].numbers) == 5


def test_targets_that_differ_in_case_are_one() -> None:
    rig = Rig(FORWARDING)
    rig.put(QueueProperties(forward_to="/FAR/"), entity_no=TARGET)
    rig.send("a")
    rig.send("b", entity_no=TARGET)
    assert len(rig.ships) == 1


def test_undecided_messages_are_shipped_again_after_a_delay() -> None:
    rig = Rig(FORWARDING)
    rig.send("a")
    ship = rig.ships.pop()
    rig.apply(Shipped("far", [], {ship.numbers[0]: Refused(Refusal.BUSY)}))
    rig.tick_now()
    assert rig.ships == []
    rig.advance(1_000)
    assert rig.ships[0].numbers == ship.numbers


def test_messages_in_the_outbox_count_in_the_size_of_their_source() -> None:
    rig = Rig(FORWARDING)
    rig.state.entities[QUEUE].max_size_bytes = 1_000
    for n in range(10):
        rig.send(f"m{n}")
    reply = rig.apply(Enqueue(QUEUE, [message("x")]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    rig.apply(Shipped("far", rig.ships[0].numbers, {}))
    rig.send("y")


def test_a_dropped_source_takes_its_messages_along() -> None:
    bus = make_bus(FORWARDING)
    rig = bus.rigs[1]
    rig.put(FORWARDING, entity_no=9)
    rig.send(*(f"a{n}" for n in range(70)))
    rig.send("b", entity_no=9)
    rig.apply(DropEntity(QUEUE, 3))
    rig.tick_now()
    bus.settle()
    arrived = bodies(bus)
    assert arrived == [f"a{n}" for n in range(64)] + ["b"]  # the first 64 were on their way
    assert rig.tables.rows == {}
    rig.apply(PutEntity(50, "q", EntityKind.QUEUE, FORWARDING, 4))
    rig.send("c", entity_no=50)
    rig.apply(DropEntity(50, 5))
    rig.crash()
    rig.advance(1_000)
    assert rig.tables.rows == {}


# --- arrivals -------------------------------------------------------------------------------------


def test_a_number_arrives_once_for_each_source_and_entity() -> None:
    rig = Rig()
    a, b, c = (message(name) for name in "abc")
    assert rig.apply(Arrive(1, QUEUE, [3, 5], [a, b])) == Arrived(2)
    assert rig.apply(Arrive(1, QUEUE, [3, 5, 9], [a, b, c])) == Arrived(3)
    rig.crash()
    assert rig.apply(Arrive(1, QUEUE, [5, 9], [b, c])) == Arrived(2)
    assert rig.peek_names() == ["a", "b", "c"]
    assert rig.apply(Arrive(2, QUEUE, [5], [message("d")])) == Arrived(1)
    rig.put(QueueProperties(), entity_no=TARGET)
    assert rig.apply(Arrive(1, TARGET, [5], [message("e")])) == Arrived(1)
    assert rig.peek_names() == ["a", "b", "c", "d"]


def test_arrivals_stop_before_the_first_refused() -> None:
    rig = Rig()
    good, large, late = message("a"), message("b", size_bytes=300_000), message("c")
    reply = rig.apply(Arrive(1, QUEUE, [1, 2, 3], [good, large, late]))
    assert isinstance(reply, Arrived)
    assert (reply.count, reply.refused and reply.refused.refusal) == (1, Refusal.MESSAGE_TOO_LARGE)
    assert rig.apply(Arrive(1, QUEUE, [3], [late])) == Arrived(1)
    assert rig.peek_names() == ["a", "c"]
    far = message("d")
    for _ in range(MAX_FORWARD_HOPS + 1):
        far = forwarded(far, None)
    reply = rig.apply(Arrive(1, QUEUE, [4, 5], [message("e"), far]))
    assert reply == Arrived(1, Refused(Refusal.HOPS_EXCEEDED))


def test_a_new_entity_under_an_old_name_starts_afresh() -> None:
    rig = Rig()
    rig.apply(Arrive(1, QUEUE, [7], [message("a")]))
    rig.apply(DropEntity(QUEUE, 2))
    assert rig.apply(Arrive(1, QUEUE, [8], [message("b")])) == Arrived(
        0, Refused(Refusal.ENTITY_NOT_FOUND)
    )
    rig.put(QueueProperties(), entity_no=TARGET)
    assert rig.apply(Arrive(1, TARGET, [7], [message("a")])) == Arrived(1)
    rig.crash()
    assert rig.state._inbox._last_numbers == {(1, TARGET): 7}
