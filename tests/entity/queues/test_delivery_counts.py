"""ADR 19: the journalling of deliveries, and the delivery count after a crash."""

from __future__ import annotations

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    DeferredReceived,
    Disposition,
    MessageState,
    Quiesce,
    ReceiveDeferred,
    Tick,
)
from postbus.entity.outcomes import Deliver, Outcome, RecordAcquired
from tests.entity.partition_rig import ACTIVE, DLQ, PEEK_LOCK, QUEUE, Rig, message, name_of

ABANDON, RELEASE = Disposition.ABANDON, Disposition.RELEASE


def records(rig: Rig) -> list[RecordAcquired]:
    return [
        mutation
        for result in rig.results
        if isinstance(result, Outcome)
        for mutation in result.mutations
        if isinstance(mutation, RecordAcquired)
    ]


def test_a_first_delivery_settled_soon_is_never_journalled() -> None:
    rig = Rig()
    rig.send(*"abc")
    rig.settle(Disposition.COMPLETE, *rig.receive(count=3))
    rig.advance(1_000)
    assert records(rig) == []


def test_deliveries_outstanding_after_100_ms_are_journalled_as_one_row() -> None:
    rig = Rig()
    rig.send(*"abcd")
    taken = rig.receive(count=4)
    assert rig.state.next_deadline_ms == rig.now_ms + 100
    rig.settle(Disposition.COMPLETE, taken[1])
    rig.advance(99)
    assert records(rig) == []
    rig.advance(1)
    assert records(rig) == [RecordAcquired([1, 3, 4], [1, 1, 1])]
    rig.advance(1_000)
    assert len(records(rig)) == 1


def test_a_redelivery_is_journalled_with_its_delivery() -> None:
    rig = Rig()
    rig.send("m")
    rig.settle(ABANDON, *rig.receive())
    rig.results.clear()
    rig.receive()
    (outcome,) = [
        result
        for result in rig.results
        if isinstance(result, Outcome) and any(isinstance(e, Deliver) for e in result.effects)
    ]
    assert outcome.mutations == [RecordAcquired([1], [2])]


def test_deliveries_of_loaded_messages_are_journalled_and_crashes_count() -> None:
    rig = Rig(QueueProperties(max_delivery_count=3))
    rig.send("poison")
    rig.receive()
    rig.crash()  # within 100 ms: this delivery is missed
    for attempt in range(3):
        (delivery,) = rig.receive()
        assert delivery.delivery_count == attempt
        rig.crash()
    assert rig.receive() == []
    assert rig.peek_names(DLQ) == ["poison"]


def test_an_outstanding_delivery_counts_after_a_crash() -> None:
    rig = Rig()
    rig.send("m")
    rig.receive()
    rig.advance(100)
    rig.crash()
    (delivery,) = rig.receive()
    assert delivery.delivery_count == 1


def test_released_takes_a_journalled_attempt_back() -> None:
    rig = Rig()
    rig.send("m")
    held = rig.receive()
    rig.advance(100)
    rig.settle(RELEASE, *held)
    assert records(rig)[-1] == RecordAcquired([1], [0])
    rig.crash()
    (delivery,) = rig.receive()
    assert delivery.delivery_count == 0


def test_a_release_before_the_journal_writes_no_record() -> None:
    rig = Rig()
    rig.send("m")
    rig.settle(RELEASE, *rig.receive())
    assert records(rig) == []


def test_a_clean_stop_journals_outstanding_and_abandoned_attempts() -> None:
    rig = Rig()
    rig.send("held", "abandoned")
    held, abandoned = rig.receive(count=2)
    rig.settle(ABANDON, abandoned)
    rig.apply(Quiesce())
    rig.crash()
    assert [delivery.delivery_count for delivery in rig.receive(count=2)] == [1, 1]
    assert held.delivery_count == 0


def test_quiesce_checkpoints_sizes() -> None:
    rig = Rig()
    rig.send("a", "b")
    rig.apply(Quiesce())
    assert rig.tables.sizes[7].size_bytes == 200
    assert rig.tables.sizes[7].message_count == 2


def test_abandon_and_expiry_write_no_further_record() -> None:
    rig = Rig()
    rig.send("m")
    rig.receive()
    rig.advance(100)
    assert len(records(rig)) == 1
    rig.advance(60_000)
    assert len(records(rig)) == 1
    (delivery,) = rig.receive()
    rig.settle(ABANDON, delivery)
    assert records(rig)[1:] == [RecordAcquired([1], [2])]


def test_a_lowered_maximum_applies_before_the_next_delivery() -> None:
    rig = Rig()
    rig.send("m")
    for _ in range(4):
        rig.settle(ABANDON, *rig.receive())
    rig.put(QueueProperties(max_delivery_count=3))
    assert rig.receive() == []
    assert rig.peek_names(DLQ) == ["m"]


def test_journalling_ticks_come_at_most_every_50_ms() -> None:
    rig = Rig()
    rig.consumer("A")
    rig.demand("A", 10_000)
    rig.results.clear()
    for _ in range(500):
        rig.send("m")
        rig.advance(1)
    assert len(records(rig)) <= 10
    rig.advance(100)
    assert sum(len(record.row_keys) for record in records(rig)) == 500


def test_a_deferral_takes_back_an_attempt_folded_into_the_row() -> None:
    """Its record was folded into the row; the one that took it back is newer."""
    rig = Rig()
    numbers = rig.send("m")
    held = rig.receive()
    rig.advance(100)
    rig.tables.fold()
    rig.settle(Disposition.DEFER, *held)
    assert [peeked.delivery_count for peeked in rig.peek()] == [0]
    reply = rig.apply(ReceiveDeferred(QUEUE, ACTIVE, numbers, PEEK_LOCK))
    assert isinstance(reply, DeferredReceived)
    assert reply.deliveries[0].delivery_count == 0


def test_closing_a_session_repeatedly_does_not_count() -> None:
    rig = Rig(QueueProperties(requires_session=True, max_delivery_count=2), budget_bytes=800)
    rig.send(message("m", session="s"))
    for _ in range(3):
        rig.accept("A", "s")
        (delivery,) = rig.receive()
        assert delivery.delivery_count == 0
        rig.advance(100)
        rig.tables.fold()
        rig.detach("A")


def test_a_deferred_message_that_may_live_on_after_all_stays_deferred() -> None:
    """It was out of deliveries and not loaded; meanwhile more deliveries are allowed."""
    properties = QueueProperties(max_delivery_count=1, lock_duration_ms=5_000)
    rig = Rig(properties, budget_bytes=700)
    numbers = rig.send("m")
    rig.settle(Disposition.DEFER, *rig.receive())
    rig.apply(ReceiveDeferred(QUEUE, ACTIVE, numbers, PEEK_LOCK))
    rig.send("n")
    rig.receive()  # the budget suffices for one message
    rig.is_auto = False
    rig.now_ms += 5_000
    rig.submit(Tick())
    rig.put(properties.model_copy(update={"max_delivery_count": 3}))
    rig.tick_now()
    rig.is_auto = True
    assert rig.receive("B", 5) == []
    assert [(name_of(p.envelope), p.state) for p in rig.peek()] == [("m", MessageState.DEFERRED)]
