"""Peek, deferred messages, batch delete, cancelling."""

from __future__ import annotations

import pytest

from postbus.contract.entities import LIMITS, EntityStatus, QueueProperties, Sku
from postbus.entity.commands import (
    DeferredReceived,
    DeleteMessages,
    Disposition,
    Enqueue,
    MessagesDeleted,
    MessageState,
    Peek,
    ReceiveDeferred,
    Refusal,
    Refused,
    SetDemand,
    Settle,
    Settled,
)
from postbus.entity.outcomes import Needs
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

COMPLETE, ABANDON, DEFER = Disposition.COMPLETE, Disposition.ABANDON, Disposition.DEFER
LOCK_MS = 60_000


def names(messages: list) -> list[str]:
    return [name_of(entry.envelope) for entry in messages]


def deferred(rig: Rig, *numbers: int, mode=PEEK_LOCK, sub_queue=ACTIVE) -> object:
    return rig.apply(ReceiveDeferred(QUEUE, sub_queue, list(numbers), mode))


def take_deferred(rig: Rig, *numbers: int, mode=PEEK_LOCK, sub_queue=ACTIVE) -> list:
    reply = deferred(rig, *numbers, mode=mode, sub_queue=sub_queue)
    assert isinstance(reply, DeferredReceived), reply
    return reply.deliveries


def delete(rig: Rig, limit: int, before_ms: int | None = None, sub_queue=ACTIVE) -> int:
    reply = rig.apply(DeleteMessages(QUEUE, sub_queue, limit, before_ms))
    assert isinstance(reply, MessagesDeleted)
    return reply.count


# --- peek -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_bytes", [1 << 30, 700])
def test_peek_lists_every_state_in_order_of_number(budget_bytes: int) -> None:
    rig = Rig(budget_bytes=budget_bytes)
    rig.send("deferred", "locked", "returned")
    taken = rig.receive(count=3)
    rig.settle(DEFER, taken[0])
    rig.settle(ABANDON, taken[2])
    rig.send(message("scheduled", scheduled_ms=rig.now_ms + 1_000), "ready", "last")
    peeked = rig.peek()
    assert names(peeked) == ["deferred", "locked", "returned", "scheduled", "ready", "last"]
    assert [entry.sequence for entry in peeked] == [1, 2, 3, 4, 5, 6]
    assert [entry.state for entry in peeked] == [
        MessageState.DEFERRED,
        MessageState.ACTIVE,
        MessageState.ACTIVE,
        MessageState.SCHEDULED,
        MessageState.ACTIVE,
        MessageState.ACTIVE,
    ]
    assert [entry.delivery_count for entry in peeked] == [0, 0, 1, 0, 0, 0]
    assert names(rig.peek(3, 2)) == ["returned", "scheduled"]
    rig.crash()
    assert [entry.sequence for entry in rig.peek()] == [1, 2, 3, 4, 5, 6]


def test_peek_changes_nothing() -> None:
    rig = Rig()
    rig.send("m")
    rig.peek()
    (delivery,) = rig.receive()
    assert delivery.delivery_count == 0


def test_peek_stops_at_the_size_limit_but_gives_at_least_one() -> None:
    rig = Rig()
    rig.send(*(message(name, size_bytes=1_000) for name in "abc"))
    assert names(rig.peek(max_bytes=2_000)) == ["a", "b"]
    assert names(rig.peek(max_bytes=10)) == ["a"]


def test_peek_does_not_overtake_rows_that_are_not_committed() -> None:
    rig = Rig(budget_bytes=700, is_auto=False)
    rig.send("a")
    rig.submit(Enqueue(QUEUE, [message("b"), message("c")]))
    replies = rig.submit(Peek(QUEUE, ACTIVE, 0, 10, 10_000))
    rig.commit()
    assert names(replies[0].messages) == ["a"]


@pytest.mark.parametrize("budget_bytes", [1 << 30, 700])
def test_peek_of_the_dead_letter_queue_goes_by_the_kept_number(budget_bytes: int) -> None:
    rig = Rig(budget_bytes=budget_bytes)
    rig.send(*"abcde")
    taken = rig.receive(count=5)
    for index in (3, 0, 2):
        rig.settle(Disposition.DEAD_LETTER, taken[index])
    assert names(rig.peek(sub_queue=DLQ)) == ["a", "c", "d"]
    assert names(rig.peek(2, 1, sub_queue=DLQ)) == ["c"]
    (first,) = rig.receive(sub_queue=DLQ)
    assert name_of(first.envelope) == "d"
    rig.settle(DEFER, first, sub_queue=DLQ)
    assert [entry.state for entry in rig.peek(sub_queue=DLQ)] == [
        MessageState.ACTIVE,
        MessageState.ACTIVE,
        MessageState.DEFERRED,
    ]


def test_peek_leaves_out_dead_letters_whose_delete_is_under_way() -> None:
    rig = Rig()
    rig.send(*"abc")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive(count=3))
    taken = rig.receive(count=2, sub_queue=DLQ)
    rig.is_auto = False
    rig.submit(Settle(QUEUE, DLQ, [d.lock_token for d in taken], COMPLETE))
    replies = rig.submit(Peek(QUEUE, DLQ, 0, 2, 10_000))
    rig.commit()
    assert names(replies[0].messages) == ["c"]


def test_a_disabled_entity_cannot_be_peeked() -> None:
    rig = Rig(QueueProperties(status=EntityStatus.DISABLED))
    reply = rig.apply(Peek(QUEUE, ACTIVE, 0, 1, 1))
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.ENTITY_DISABLED


# --- deferred -------------------------------------------------------------------------------------


@pytest.mark.behaviour("S56")
@pytest.mark.parametrize("budget_bytes", [1 << 30, 700])
def test_a_deferred_message_comes_only_by_number(budget_bytes: int) -> None:
    rig = Rig(budget_bytes=budget_bytes)
    first, second = rig.send("a", "b")
    assert rig.settle(DEFER, *rig.receive()) == Settled()
    assert names(rig.receive(count=2)) == ["b"]
    assert deferred(rig, second) == Refused(
        Refusal.MESSAGE_NOT_FOUND, "no deferred message has the number 2"
    )
    (delivery,) = take_deferred(rig, first)
    assert delivery.locked_until_ms == rig.now_ms + LOCK_MS
    assert isinstance(deferred(rig, first), Refused)  # locked now
    assert rig.settle(COMPLETE, delivery) == Settled()
    assert isinstance(deferred(rig, first), Refused)


def test_receiving_deferred_ones_is_all_or_none() -> None:
    rig = Rig()
    rig.send("a", "b")
    rig.settle(DEFER, *rig.receive(count=2))
    assert isinstance(deferred(rig, 1, 9), Refused)
    assert names(take_deferred(rig, 2, 1)) == ["b", "a"]


@pytest.mark.parametrize("disposition", [ABANDON, Disposition.RELEASE, DEFER, None])
def test_a_deferred_message_stays_deferred_when_its_lock_ends(
    disposition: Disposition | None,
) -> None:
    rig = Rig()
    rig.send("a")
    rig.settle(DEFER, *rig.receive())
    (delivery,) = take_deferred(rig, 1)
    assert delivery.delivery_count == 0
    if disposition is None:
        rig.advance(LOCK_MS)
    else:
        rig.settle(disposition, delivery)
    assert rig.receive() == []
    (again,) = take_deferred(rig, 1)
    assert again.delivery_count == (1 if disposition in (ABANDON, None) else 0)
    rig.crash()
    assert names(take_deferred(rig, 1)) == ["a"]


def test_deferred_ones_can_be_received_and_deleted() -> None:
    rig = Rig()
    rig.send("a")
    rig.settle(DEFER, *rig.receive())
    (delivery,) = take_deferred(rig, 1, mode=DELETE)
    assert delivery.lock_token == b""
    assert rig.tables.rows == {}


def test_properties_set_while_deferring_are_seen_before_they_are_stored() -> None:
    rig = Rig()
    rig.send("a")
    (held,) = rig.receive()
    rig.is_auto = False
    rig.submit(Settle(QUEUE, ACTIVE, [held.lock_token], DEFER, properties={"k": "v"}))
    replies = rig.submit(ReceiveDeferred(QUEUE, ACTIVE, [1], PEEK_LOCK))
    rig.commit()
    (delivery,) = replies[0].deliveries
    assert properties_of(delivery.envelope) == {"k": "v"}


def test_an_expired_deferred_message_expires_when_touched() -> None:
    rig = Rig(QueueProperties(dead_lettering_on_message_expiration=True))
    rig.send(message("a", ttl_ms=1_000))
    rig.settle(DEFER, *rig.receive())
    rig.advance(1_000)
    assert names(rig.peek()) == ["a"]
    assert isinstance(deferred(rig, 1), Refused)
    assert names(rig.peek()) == []
    assert names(rig.peek(sub_queue=DLQ)) == ["a"]


def test_a_deferred_message_exhausts_its_deliveries_too() -> None:
    rig = Rig(QueueProperties(max_delivery_count=2))
    rig.send("a")
    rig.settle(DEFER, *rig.receive())
    for _ in range(2):
        rig.settle(ABANDON, *take_deferred(rig, 1))
    assert names(rig.peek(sub_queue=DLQ)) == ["a"]


def test_deferring_in_the_dead_letter_queue() -> None:
    rig = Rig()
    rig.send("a", "b")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive(count=2))
    rig.settle(DEFER, *rig.receive(sub_queue=DLQ), sub_queue=DLQ)
    rig.crash()
    assert names(rig.receive(count=2, sub_queue=DLQ)) == ["b"]
    (delivery,) = take_deferred(rig, 1, sub_queue=DLQ)
    assert rig.settle(COMPLETE, delivery, sub_queue=DLQ) == Settled()


# --- batch delete ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reloaded", [False, True])
@pytest.mark.parametrize("budget_bytes", [1 << 30, 3_000])
def test_batch_delete_takes_the_oldest_unlocked_ones(budget_bytes: int, is_reloaded: bool) -> None:
    rig = Rig(budget_bytes=budget_bytes)
    rig.send(*(f"m{n}" for n in range(10)))
    if is_reloaded:
        rig.crash()
    rig.receive(count=2)
    rig.advance(5)
    rig.send("late")
    assert delete(rig, 3) == 3
    assert names(rig.peek()) == ["m0", "m1", "m5", "m6", "m7", "m8", "m9", "late"]
    assert delete(rig, 100, rig.now_ms - 1) == 5
    assert names(rig.peek()) == ["m0", "m1", "late"]
    rig.advance(LOCK_MS)
    assert delete(rig, 100) == 3
    assert rig.tables.rows == {}
    assert rig.state.counts(QUEUE).size_bytes == 0


def test_batch_delete_is_limited_by_the_tier() -> None:
    rig = Rig()
    rig.checks = False
    rig.send(*["m"] * 1_200)
    assert delete(rig, 4_000) == 500


def test_batch_delete_empties_the_dead_letter_queue() -> None:
    rig = Rig()
    rig.send(*"abc")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive(count=3))
    assert delete(rig, 2, sub_queue=DLQ) == 2
    assert names(rig.peek(sub_queue=DLQ)) == ["c"]
    assert rig.state.counts(QUEUE).dead_letter == 1


def test_batch_delete_keeps_returned_messages_that_are_too_new() -> None:
    rig = Rig()
    rig.send("a")
    rig.advance(10)
    rig.send("b")
    rig.settle(ABANDON, *rig.receive(count=2))
    assert delete(rig, 5, rig.now_ms - 1) == 1
    assert names(rig.receive(count=2)) == ["b"]


def test_peek_of_dead_letters_stops_at_the_size_limit() -> None:
    rig = Rig()
    rig.send(*"abc")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive(count=3))
    assert names(rig.peek(sub_queue=DLQ, max_bytes=200)) == ["a", "b"]


# --- large messages -------------------------------------------------------------------------------

MEGABYTE = 1024 * 1024


def test_deferred_messages_that_are_large_are_asked_for_in_parts() -> None:
    properties = QueueProperties(max_message_size_in_kilobytes=1_024)
    rig = Rig(properties, limits=LIMITS[Sku.PREMIUM])
    numbers = rig.send(*(message(f"m{n}", size_bytes=MEGABYTE // 2) for n in range(80)))
    rig.settle(DEFER, *rig.receive(count=80))
    refused = deferred(rig, *numbers)
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.ARGUMENT_OUT_OF_RANGE
    assert len(take_deferred(rig, *numbers[:60])) == 60


@pytest.mark.behaviour("S163")
@pytest.mark.parametrize("session", [None, "s"])
def test_a_backlog_of_large_messages_is_not_read_at_once(session: str | None) -> None:
    """Every command on many of them handles a part: rows are read with their bodies."""
    properties = QueueProperties(
        requires_session=session is not None, max_message_size_in_kilobytes=1_024
    )
    rig = Rig(properties, budget_bytes=MEGABYTE // 4, limits=LIMITS[Sku.PREMIUM])
    for number in range(100):
        rig.send(message(f"m{number}", size_bytes=MEGABYTE // 2, session=session))
    rig.results.clear()
    assert 1 <= len(rig.peek(limit=100)) <= 4
    assert 40 <= delete(rig, 4_000) <= 70
    locked = 0
    if session is None:
        consumer_id = rig.consumer("A")
        rig.apply(SetDemand(consumer_id, 100, is_drain=True))
        locked = len(rig.inbox("A"))
        assert 1 <= locked <= 40
    reads = [len(result.row_keys) for result in rig.results if isinstance(result, Needs)]
    assert len(reads) == (3 if session is None else 2)
    assert max(reads) <= 70
    while delete(rig, 4_000):
        pass
    counts = rig.state.counts(QUEUE)
    assert counts is not None
    assert counts.active == locked


def test_deferred_messages_that_are_too_large_together_are_refused_and_stay() -> None:
    """The usual size is small: the size of the requested ones counts."""
    rig = Rig(QueueProperties(max_message_size_in_kilobytes=20_000), limits=LIMITS[Sku.PREMIUM])
    numbers = rig.send(*(message(f"big-{n}", size_bytes=12 << 20) for n in range(3)))
    rig.settle(DEFER, *rig.receive(count=3))
    rig.send(*("small" for _ in range(5_000)))
    reply = deferred(rig, *numbers)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.ARGUMENT_OUT_OF_RANGE
    assert "ask for fewer at a time" in reply.detail
    assert names(take_deferred(rig, *numbers[:2])) == ["big-0", "big-1"]
    assert names(take_deferred(rig, numbers[2])) == ["big-2"]
