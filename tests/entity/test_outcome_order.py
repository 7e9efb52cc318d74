"""`touches_uncommitted`: which outcomes may overlap a commit in flight (ADR 32)."""

from __future__ import annotations

import pytest

from postbus.entity.commands import (
    DeleteMessages,
    Disposition,
    Enqueue,
    SetDemand,
    Settle,
    Tick,
)
from postbus.entity.outcomes import Outcome
from tests.entity.partition_rig import ACTIVE, DELETE, QUEUE, Rig, message


def last(rig: Rig) -> Outcome:
    outcome = rig.results[-1]
    assert isinstance(outcome, Outcome)
    return outcome


@pytest.mark.parametrize("is_known", [False, True])
def test_a_delete_without_a_lock_is_a_barrier_while_its_row_may_be_uncommitted(
    is_known: bool,
) -> None:
    rig = Rig(is_auto=False)
    consumer_id = rig.consumer("R", mode=DELETE)
    rig.submit(Enqueue(QUEUE, [message("a"), message("b")]))
    if is_known:
        rig.now_ms += 1
        rig.submit(Tick())
        rig.commit()
    rig.submit(SetDemand(consumer_id, 1))
    assert last(rig).deletes == [1]
    assert last(rig).touches_uncommitted is not is_known
    rig.submit(DeleteMessages(QUEUE, ACTIVE, 1, rig.now_ms))
    assert last(rig).deletes == [2]
    assert last(rig).touches_uncommitted is not is_known


def test_rows_of_an_earlier_life_are_committed() -> None:
    rig = Rig()
    rig.send("a")
    rig.crash()
    rig.receive("R", mode=DELETE)
    deleting = [r for r in rig.results if isinstance(r, Outcome) and r.deletes]
    assert [outcome.touches_uncommitted for outcome in deleting] == [False]


def test_a_settlement_is_never_a_barrier() -> None:
    rig = Rig()
    rig.send("a")
    (held,) = rig.receive()
    rig.submit(Settle(QUEUE, ACTIVE, [held.lock_token], Disposition.COMPLETE))
    assert last(rig).deletes == [1]
    assert last(rig).touches_uncommitted is False
    assert last(rig).mutations == []


def test_sends_and_completions_of_a_running_queue_are_plain() -> None:
    """The hot path makes nothing but inserts and deletes."""
    rig = Rig()
    rig.send("first")
    rig.settle(Disposition.COMPLETE, *rig.receive())
    rig.results.clear()
    for _ in range(20):
        rig.send("m")
        rig.settle(Disposition.COMPLETE, *rig.receive())
    outcomes = [each for each in rig.results if isinstance(each, Outcome)]
    assert len(outcomes) == len(rig.results) >= 40
    assert [each.mutations for each in outcomes if each.mutations] == []


def test_outcomes_carry_the_time_they_were_applied_at() -> None:
    rig = Rig()
    rig.advance(77)
    rig.send("m")
    assert last(rig).applied_ms == rig.now_ms
