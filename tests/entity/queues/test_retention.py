"""An entity with a history: a settled message stays in its row, with the reason (ADR 18)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from postbus.contract.entities import (
    DAY_MS,
    QueueProperties,
    SubscriptionProperties,
)
from postbus.entity.commands import (
    CancelScheduled,
    Command,
    CompleteSessions,
    DeleteMessages,
    Disposition,
    DropEntity,
    MessagesDeleted,
    ReceiveDeferred,
)
from postbus.entity.outcomes import MoveMessage, Outcome, SettleRows, Settling
from tests.entity.partition_rig import (
    ACTIVE,
    DELETE,
    DLQ,
    PEEK_LOCK,
    QUEUE,
    START_MS,
    Rig,
    message,
    name_of,
    properties_of,
)
from tests.entity.topics.topic_rig import ONE, publish, topic_rig
from tests.entity.transfer.forward_rig import Bus

COMPLETE, DEFER = Disposition.COMPLETE, Disposition.DEFER


def with_history(**properties: object) -> QueueProperties:
    return QueueProperties(history_retention_ms=DAY_MS, **properties)  # type: ignore[arg-type]


def kept(rig: Rig) -> list[tuple[str, Settling]]:
    """Return name and reason of the settled messages, in order of row."""
    return [
        (name_of(rig.tables.rows[row_key][1]), how)
        for row_key, (_, how, _) in sorted(rig.tables.settled.items())
    ]


def assert_only_settled(rig: Rig, *expected: tuple[str, Settling]) -> None:
    """Assert that no row is live, now and after a load, and exactly these are kept."""
    assert kept(rig) == list(expected)
    for _ in range(2):
        for sub_queue in (ACTIVE, DLQ):
            assert rig.peek_names(sub_queue) == []
            assert rig.receive("R", 10, sub_queue=sub_queue, mode=DELETE) == []
            rig.detach("R")
        counts = rig.state.counts(QUEUE)
        assert counts is not None
        assert (counts.active, counts.dead_letter, counts.size_bytes) == (0, 0, 0)
        rig.crash()
    assert kept(rig) == list(expected)


def completed(rig: Rig) -> Settling:
    rig.send("m")
    rig.settle(COMPLETE, *rig.receive())
    return Settling.COMPLETED


def received(rig: Rig) -> Settling:
    rig.send("m")
    assert len(rig.receive("B", mode=DELETE)) == 1
    rig.detach("B")
    return Settling.RECEIVED


def received_at_once(rig: Rig) -> Settling:
    """The row is inserted and settled by one outcome."""
    rig.consumer("B", mode=DELETE)
    rig.demand("B", 1)
    rig.send("m")
    assert len(rig.inbox("B")) == 1
    rig.detach("B")
    return Settling.RECEIVED


def expired(rig: Rig) -> Settling:
    rig.send(message("m", ttl_ms=1_000))
    rig.advance(2_000)
    assert rig.receive() == []
    return Settling.EXPIRED


def purged(rig: Rig) -> Settling:
    rig.send("m")
    reply = rig.apply(DeleteMessages(QUEUE, ACTIVE, 10, rig.now_ms))
    assert reply == MessagesDeleted(1)
    return Settling.PURGED


def deferred(rig: Rig) -> Settling:
    (number,) = rig.send("m")
    rig.settle(DEFER, *rig.receive())
    rig.apply(ReceiveDeferred(QUEUE, ACTIVE, [number], DELETE))
    return Settling.RECEIVED


def deferred_and_completed(rig: Rig) -> Settling:
    (number,) = rig.send("m")
    rig.settle(DEFER, *rig.receive())
    reply = rig.apply(ReceiveDeferred(QUEUE, ACTIVE, [number], PEEK_LOCK))
    rig.settle(COMPLETE, *reply.deliveries)  # type: ignore[union-attr]
    return Settling.COMPLETED


def deferred_and_expired(rig: Rig) -> Settling:
    (number,) = rig.send(message("m", ttl_ms=1_000))
    rig.settle(DEFER, *rig.receive())
    rig.advance(2_000)
    rig.apply(ReceiveDeferred(QUEUE, ACTIVE, [number], DELETE))
    return Settling.EXPIRED


def activated(rig: Rig) -> Settling:
    """The move of an activation is none of the history."""
    rig.send(message("m", scheduled_ms=rig.now_ms + 1_000))
    rig.advance(1_000)
    rig.settle(COMPLETE, *rig.receive())
    return Settling.COMPLETED


WAYS = [
    completed, received, received_at_once, expired, purged, deferred, deferred_and_completed,
    deferred_and_expired, activated,
]  # fmt: skip


@pytest.mark.parametrize("budget_bytes", [1 << 30, 250])
@pytest.mark.parametrize("leave", WAYS)
def test_settled_messages_are_kept_with_their_reason(
    leave: Callable[[Rig], Settling], budget_bytes: int
) -> None:
    rig = Rig(with_history(), budget_bytes=budget_bytes)
    how = leave(rig)
    ((settled_ms, *_),) = {(ms,) for _, _, ms in rig.tables.settled.values()}
    assert START_MS <= settled_ms <= rig.now_ms
    assert_only_settled(rig, ("m", how))


@pytest.mark.parametrize("leave", WAYS)
def test_settled_messages_are_deleted_without_a_history(leave: Callable[[Rig], Settling]) -> None:
    rig = Rig()
    leave(rig)
    assert not rig.tables.rows
    assert_only_settled(rig)
    assert not any(
        isinstance(change, SettleRows) or (isinstance(change, MoveMessage) and change.keeps_source)
        for result in rig.results
        if isinstance(result, Outcome)
        for change in result.mutations
    )


@pytest.mark.parametrize("is_late", [True, False])
def test_purged_messages_are_kept_in_the_history(is_late: bool) -> None:
    rig = Rig(with_history())
    rig.send("m", "n")
    if is_late:
        rig.crash()
    assert rig.apply(DeleteMessages(QUEUE, ACTIVE, 1, rig.now_ms)) == MessagesDeleted(1)
    assert kept(rig) == [("m", Settling.PURGED)]
    assert rig.peek_names() == ["n"]


@pytest.mark.parametrize("how", ["rejected", "exhausted", "expired", "expired at once"])
def test_a_dead_letter_leaves_its_row_behind(how: str) -> None:
    rig = Rig(with_history(max_delivery_count=1, dead_lettering_on_message_expiration=True))
    if how == "expired at once":
        rig.demand("A", 1)
        rig.send(message("m", ttl_ms=0))
    else:
        rig.send(message("m", ttl_ms=9_000))
    if how == "rejected":
        rig.settle(Disposition.DEAD_LETTER, *rig.receive(), reason="broken")
    elif how == "exhausted":
        rig.settle(Disposition.ABANDON, *rig.receive())
    else:
        rig.advance(9_000)
        assert rig.receive() == []
    rig.detach("A")
    assert kept(rig) == [("m", Settling.DEAD_LETTERED)]
    ((row_key, _),) = rig.tables.settled.items()
    assert not properties_of(rig.tables.rows[row_key][1])  # as it was enqueued
    for _ in range(2):
        assert rig.peek_names() == []
        (dead,) = rig.peek(sub_queue=DLQ)
        assert "DeadLetterReason" in properties_of(dead.envelope)
        rig.crash()
    rig.settle(COMPLETE, *rig.receive(sub_queue=DLQ), sub_queue=DLQ)
    rig.detach("D")
    assert_only_settled(rig, ("m", Settling.DEAD_LETTERED), ("m", Settling.COMPLETED))


def test_a_forwarded_dead_letter_leaves_its_row_behind() -> None:
    properties = with_history(forward_dead_lettered_messages_to="far")
    bus = Bus({1: Rig(properties), 2: Rig()}, {"far": (2, QUEUE)})
    rig = bus.rigs[1]
    rig.send("m")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive(), reason="broken")
    assert kept(rig) == [("m", Settling.DEAD_LETTERED)]
    bus.settle()
    assert bus.rigs[2].peek_names() == ["m"]
    assert len(rig.tables.rows) == 1
    rig.crash()
    assert (rig.peek_names(), rig.peek_names(DLQ)) == ([], [])
    assert kept(rig) == [("m", Settling.DEAD_LETTERED)]


def test_forwarded_messages_are_not_kept_as_history() -> None:
    bus = Bus({1: Rig(with_history(forward_to="far")), 2: Rig()}, {"far": (2, QUEUE)})
    rig = bus.rigs[1]
    rig.send("m")
    bus.settle()
    assert bus.rigs[2].peek_names() == ["m"]
    assert not rig.tables.rows


def test_messages_stored_before_forwarding_are_not_kept_as_history() -> None:
    bus = Bus({1: Rig(with_history()), 2: Rig()}, {"far": (2, QUEUE)})
    rig = bus.rigs[1]
    rig.send("m")
    rig.put(with_history(forward_to="far"))
    rig.tick_now()
    bus.settle()
    assert bus.rigs[2].peek_names() == ["m"]
    assert not rig.tables.rows


def test_messages_of_sessions_are_kept() -> None:
    rig = Rig(with_history(requires_session=True))
    rig.send(message("a", session="s"), message("b", session="s"), message("c", session="t"))
    assert rig.accept("A", "s") == "s"
    rig.demand("A", 2)
    rig.settle(COMPLETE, *rig.inbox("A"), session_id=b"s")
    assert rig.accept("B", "t", DELETE) == "t"
    rig.demand("B", 1)
    assert kept(rig) == [
        ("a", Settling.COMPLETED), ("b", Settling.COMPLETED), ("c", Settling.RECEIVED)
    ]  # fmt: skip
    rig.crash()
    assert rig.peek_names() == []
    assert rig.accept("A") is None


def test_messages_of_several_sessions_are_kept_by_one_command() -> None:
    rig = Rig(with_history(requires_session=True))
    rig.send(*(message(name, session=name[0]) for name in ("s1", "t1", "t2")))
    parts: list[tuple[bytes, list[bytes]]] = []
    for receiver, session in (("A", "s"), ("B", "t")):
        assert rig.accept(receiver, session) == session
        rig.demand(receiver, 5)
        tokens = [delivery.lock_token for delivery in rig.inbox(receiver)]
        parts.append((session.encode(), tokens))
    rig.apply(CompleteSessions(QUEUE, parts))
    assert kept(rig) == [(name, Settling.COMPLETED) for name in ("s1", "t1", "t2")]
    last = rig.results[-1]
    assert isinstance(last, Outcome)
    assert [type(change) for change in last.mutations] == [SettleRows]
    rig.crash()
    assert rig.peek_names() == []


def test_copies_of_a_subscription_are_kept() -> None:
    rig = topic_rig()
    rig.put_subscription(ONE, SubscriptionProperties(history_retention_ms=DAY_MS))
    publish(rig, "m")
    (delivery,) = rig.receive("S", entity_no=ONE, mode=DELETE)
    assert name_of(delivery.envelope) == "m"
    assert kept(rig) == [("m", Settling.RECEIVED)]


def test_cancelled_messages_are_no_history() -> None:
    rig = Rig(with_history())
    (number,) = rig.send(message("m", scheduled_ms=rig.now_ms + 1_000))
    rig.apply(CancelScheduled(QUEUE, [number]))
    assert not rig.tables.rows
    assert_only_settled(rig)


def test_one_command_makes_one_mutation_for_each_reason() -> None:
    rig = Rig(with_history())
    rig.send(*(message(f"m{number}", ttl_ms=1_000 if number < 3 else None) for number in range(9)))
    rig.settle(COMPLETE, *rig.receive("A", 6))
    rig.detach("A")
    last = next(r for r in reversed(rig.results) if isinstance(r, Outcome) and r.mutations)
    assert [type(change) for change in last.mutations] == [SettleRows]
    rig.send(*(message(f"n{number}", ttl_ms=1_000) for number in range(3)))
    rig.advance(2_000)
    rig.receive("B", 9, mode=DELETE)
    changes = [
        change
        for result in rig.results
        if isinstance(result, Outcome)
        for change in result.mutations
        if isinstance(change, SettleRows)
    ]
    assert [(change.how, len(change.row_keys)) for change in changes] == [
        (Settling.COMPLETED, 6), (Settling.RECEIVED, 3), (Settling.EXPIRED, 3)
    ]  # fmt: skip


def test_a_lost_lock_settles_no_message() -> None:
    rig = Rig(with_history())
    rig.send("m")
    (delivery,) = rig.receive()
    rig.advance(60_000)
    rig.settle(COMPLETE, delivery)
    assert kept(rig) == []
    assert not any(
        isinstance(change, SettleRows)
        for result in rig.results
        if isinstance(result, Outcome)
        for change in result.mutations
    )
    assert rig.peek_names() == ["m"]


def test_history_can_begin_and_end_at_any_time() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    rig.settle(COMPLETE, *rig.receive())
    rig.put(with_history())
    rig.settle(COMPLETE, *rig.receive())
    rig.put(QueueProperties())
    rig.settle(COMPLETE, *rig.receive())
    assert kept(rig) == [("b", Settling.COMPLETED)]
    rig.detach("A")
    assert_only_settled(rig, ("b", Settling.COMPLETED))
    rig.tables.reap({})
    assert not rig.tables.rows


def test_a_drop_deletes_live_rows_and_leaves_settled_rows_to_the_reaper() -> None:
    rig = Rig(with_history())
    rig.send("a", "b")
    rig.settle(COMPLETE, *rig.receive())
    drop: Command = DropEntity(QUEUE, 2)
    rig.apply(drop)
    rig.advance(1_000)
    assert kept(rig) == [("a", Settling.COMPLETED)]
    assert len(rig.tables.rows) == 1
    rig.tables.reap({})
    assert not rig.tables.rows


def test_quota_and_counts_are_those_of_live_messages() -> None:
    rig, plain = Rig(with_history()), Rig()
    for each in (rig, plain):
        each.send(*(message(f"m{number}", size_bytes=1_000) for number in range(20)))
        each.settle(COMPLETE, *each.receive(count=15))
        each.crash()
    assert rig.state.counts(QUEUE) == plain.state.counts(QUEUE)
    assert rig.peek_names() == plain.peek_names()
    assert len(rig.tables.rows) == 20
