"""Losing every lock of an entity at once, the fault that `postbus fault lose-locks` makes."""

from __future__ import annotations

import pytest

from postbus.contract.entities import QueueProperties
from postbus.entity.apply_context import MAINTENANCE_LIMIT
from postbus.entity.commands import (
    Disposition,
    Done,
    LocksRenewed,
    LoseLocks,
    Refusal,
    Refused,
    RenewLocks,
    Settled,
)
from tests.entity.partition_rig import ACTIVE, DLQ, QUEUE, Rig, name_of


def names(deliveries: list) -> list[str]:
    return [name_of(delivery.envelope) for delivery in deliveries]


@pytest.mark.parametrize("disposition", [Disposition.COMPLETE, Disposition.ABANDON])
def test_lost_locks_settle_no_message_and_redeliver_all(disposition: Disposition) -> None:
    rig = Rig()
    rig.send("m1", "m2", "m3")
    first = rig.receive("A", count=2)
    assert rig.apply(LoseLocks(QUEUE)) == Done()
    tokens = [delivery.lock_token for delivery in first]
    assert rig.apply(RenewLocks(QUEUE, ACTIVE, tokens)) == Refused(Refusal.LOCK_LOST)
    assert rig.settle(disposition, *first) == Settled([0, 1])
    again = rig.receive("B", count=3)
    assert [(name_of(each.envelope), each.delivery_count) for each in again] == [
        ("m1", 1),
        ("m2", 1),
        ("m3", 0),
    ]
    assert isinstance(rig.apply(RenewLocks(QUEUE, ACTIVE, [again[0].lock_token])), LocksRenewed)
    assert rig.settle(Disposition.COMPLETE, *again) == Settled()


def test_a_waiting_receiver_gets_them_at_once() -> None:
    rig = Rig()
    rig.send("m")
    rig.receive("A")
    rig.demand("B", 1)
    assert rig.inbox("B") == []
    rig.apply(LoseLocks(QUEUE))
    assert names(rig.inbox("B")) == ["m"]


def test_the_last_allowed_delivery_ends_in_the_dead_letter_queue() -> None:
    rig = Rig(QueueProperties(max_delivery_count=1))
    rig.send("m")
    rig.receive("A")
    rig.apply(LoseLocks(QUEUE))
    assert rig.peek_names(DLQ) == ["m"]
    (letter,) = rig.receive("D", sub_queue=DLQ)
    rig.apply(LoseLocks(QUEUE))
    assert rig.settle(Disposition.COMPLETE, letter, sub_queue=DLQ) == Settled([0])
    assert names(rig.receive("E", sub_queue=DLQ)) == ["m"]


def test_all_locks_are_lost_over_several_commands() -> None:
    count = 2 * MAINTENANCE_LIMIT + 1
    rig = Rig()
    rig.send(*(f"m{n}" for n in range(count)))
    held = rig.receive("A", count=count)
    rig.apply(LoseLocks(QUEUE))
    assert rig.settle(Disposition.COMPLETE, held[-1]) == Settled([0])
    rig.tick_now()
    assert len(rig.receive("B", count=count)) == count


def test_an_entity_that_is_not_there() -> None:
    assert Rig().apply(LoseLocks(99)) == Refused(Refusal.ENTITY_NOT_FOUND)
