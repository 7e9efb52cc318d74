"""A receiver that requested a hint gets one with more messages than its demand (ADR 24)."""

from __future__ import annotations

import pytest

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import DemandSet, Disposition, SetDemand
from postbus.entity.outcomes import Available
from tests.entity.partition_rig import DLQ, Rig, message


def hints(rig: Rig) -> list[tuple[int, int]]:
    """Take the hints that were sent: (consumer, count)."""
    received, rig.hints = rig.hints, []
    return [(hint.consumer_id, hint.count) for hint in received]


def test_a_hint_is_sent_at_once_with_more_messages_than_demand() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    consumer_id = rig.consumer()
    rig.apply(SetDemand(consumer_id, 1, wants_hint=True))
    assert len(rig.inbox("A")) == 1
    assert hints(rig) == [(consumer_id, 2)]
    rig.send("d")
    assert hints(rig) == []  # sent once


def test_a_hint_is_sent_when_a_message_arrives() -> None:
    rig = Rig()
    consumer_id = rig.consumer()
    rig.apply(SetDemand(consumer_id, 0, wants_hint=True))
    assert hints(rig) == []
    rig.send("a")
    assert hints(rig) == [(consumer_id, 1)]
    assert rig.inbox("A") == []


def test_a_hint_waits_until_the_demand_is_used_up() -> None:
    rig = Rig()
    consumer_id = rig.consumer()
    rig.apply(SetDemand(consumer_id, 2, wants_hint=True))
    rig.send("a")
    rig.send("b")
    assert hints(rig) == []
    rig.send("c", "d")
    assert hints(rig) == [(consumer_id, 2)]


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1_500])
def test_a_drain_with_a_hint_sends_it_in_the_same_outcome(budget_bytes: int) -> None:
    rig = Rig(budget_bytes=budget_bytes)
    rig.send(*(f"m{n}" for n in range(5)))
    consumer_id = rig.consumer()
    assert rig.apply(SetDemand(consumer_id, 2, is_drain=True, wants_hint=True)) == DemandSet(2)
    result = rig.results[-1]
    assert [e for e in result.effects if isinstance(e, Available)] == [Available(consumer_id, 3)]


def test_returned_messages_cause_a_hint() -> None:
    rig = Rig(QueueProperties(lock_duration_ms=5_000))
    rig.send("a", "b")
    first, _ = rig.receive("A", 2)
    consumer_id = rig.consumer("B")
    rig.apply(SetDemand(consumer_id, 0, wants_hint=True))
    assert hints(rig) == []
    rig.settle(Disposition.ABANDON, first)
    assert hints(rig) == [(consumer_id, 1)]
    rig.receive("A")
    rig.apply(SetDemand(consumer_id, 0, wants_hint=True))
    rig.advance(5_000)  # the locks run out
    assert [consumer for consumer, _ in hints(rig)] == [consumer_id]


def test_a_due_message_causes_a_hint() -> None:
    rig = Rig()
    rig.send(message("a", scheduled_ms=rig.now_ms + 1_000))
    consumer_id = rig.consumer()
    rig.apply(SetDemand(consumer_id, 0, wants_hint=True))
    assert hints(rig) == []
    rig.advance(1_000)
    assert hints(rig) == [(consumer_id, 1)]


def test_dead_letters_cause_a_hint() -> None:
    rig = Rig()
    rig.send("a")
    consumer_id = rig.consumer("D", sub_queue=DLQ)
    rig.apply(SetDemand(consumer_id, 0, wants_hint=True))
    rig.settle(Disposition.DEAD_LETTER, *rig.receive())
    assert hints(rig) == [(consumer_id, 1)]


def test_all_receivers_that_asked_get_a_hint_unless_another_takes_the_message() -> None:
    rig = Rig()
    ids = [rig.consumer(name) for name in "AB"]
    taker = rig.consumer("C")
    for consumer_id in ids:
        rig.apply(SetDemand(consumer_id, 0, wants_hint=True))
    rig.apply(SetDemand(taker, 1))
    rig.send("a")
    assert hints(rig) == []
    rig.send("b")
    assert hints(rig) == [(ids[0], 1), (ids[1], 1)]


def test_a_hint_is_withdrawn_by_the_next_demand_and_by_leaving() -> None:
    rig = Rig()
    consumer_id = rig.consumer("A")
    rig.apply(SetDemand(consumer_id, 0, wants_hint=True))
    rig.apply(SetDemand(consumer_id, 0))
    gone = rig.consumer("B")
    rig.apply(SetDemand(gone, 0, wants_hint=True))
    rig.detach("B")
    rig.send("a")
    assert hints(rig) == []
