"""Messages that arrive from an outbox where they cannot be taken together, but one by one."""

from __future__ import annotations

import pytest

from postbus.contract.entities import SubscriptionProperties
from postbus.entity.commands import Arrive, Arrived, Disposition, Refusal, Settle, Shipped
from postbus.entity.topics.publish_limits import PublishLimits
from postbus.entity.transfer import inbox
from tests.entity.partition_checks import check_partition
from tests.entity.partition_rig import ACTIVE, DELETE, QUEUE, TOPIC, Rig, message
from tests.entity.topics.topic_rig import ONE, names, publish, take, topic_rig, with_properties
from tests.entity.transfer.forward_rig import forwarded

SOURCE = 5


def test_too_many_copies_for_one_commit_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "ARRIVAL_ROWS", 50)
    rig = topic_rig(10, publish_limits=PublishLimits(max_copies=50))
    numbers = list(range(1, 21))
    messages = [with_properties(f"m{number}") for number in numbers]
    counts: list[int] = []
    while not counts or counts[-1] < len(numbers):
        reply = rig.apply(Arrive(SOURCE, TOPIC, numbers, messages))
        assert isinstance(reply, Arrived)
        assert reply.refused is None or reply.refused.refusal is Refusal.BUSY
        counts.append(reply.count)
    assert counts == [5, 10, 15, 20]
    assert names(rig, ONE) == [f"m{number}" for number in numbers]


def test_messages_are_not_stored_before_those_that_they_follow() -> None:
    rig = Rig()
    behind = Arrive(SOURCE, QUEUE, [3, 4], [message("m3"), message("m4")], after=2)
    early = rig.apply(behind)
    assert isinstance(early, Arrived)
    assert early.count == 0
    assert early.refused is not None
    assert early.refused.refusal is Refusal.BUSY
    first = Arrive(SOURCE, QUEUE, [1, 2], [message("m1"), message("m2")])
    assert rig.apply(first) == Arrived(2)
    assert rig.apply(behind) == Arrived(2)
    assert rig.apply(behind) == Arrived(2)
    rig.consumer("A", mode=DELETE)
    rig.demand("A", 100)
    assert len(rig.inbox("A")) == 4


def test_immediate_delivery_frees_quota_for_the_next_arrival() -> None:
    rig = Rig()
    entity = rig.state.entities.get(QUEUE)
    assert entity is not None
    entity.max_size_bytes = 1_000
    rig.consumer("A", mode=DELETE)
    rig.demand("A", 100)
    messages = [message(f"m{number}") for number in range(20)]
    assert rig.apply(Arrive(SOURCE, QUEUE, list(range(1, 21)), messages)) == Arrived(20)
    assert len(rig.inbox("A")) == 20


def test_a_body_that_was_shared_where_it_comes_from_is_not_accounted_for_as_such() -> None:
    rig, other = topic_rig(2), Rig()
    rig.put_subscription(ONE, SubscriptionProperties(forward_dead_lettered_messages_to="queue-7"))
    publish(rig, with_properties("m", b"b" * 5_000))
    (delivery,) = take(rig, ONE)
    rig.apply(Settle(ONE, ACTIVE, [delivery.lock_token], Disposition.DEAD_LETTER))
    (ship,) = rig.ships
    (envelope,) = ship.envelopes
    assert envelope is not None
    assert envelope.shared is not None
    other.apply(Arrive(SOURCE, QUEUE, ship.numbers, [forwarded(envelope, b"topic")]))
    (delivery,) = other.receive("A")
    other.settle(Disposition.COMPLETE, delivery)
    assert other.budget.used_bytes == 0
    rig.apply(Shipped("queue-7", ship.numbers, {}))
    check_partition(rig.state)
