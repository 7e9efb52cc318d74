"""Reader groups of one partition: cursors, claims, plans, and what a tap keeps (ADR 42)."""

from __future__ import annotations

from typing import Any

import pytest

from postbus.contract.entities import EntityStatus, QueueProperties, TopicProperties
from postbus.entity.commands import Disposition, DropEntity, Refusal, Refused
from postbus.entity.group_commands import (
    ClaimGroup,
    Cursor,
    CursorAt,
    DropGroup,
    FollowHome,
    GroupDropped,
    GroupKind,
    Limits,
    ListRanges,
    Plan,
    PlanRange,
    PutGroup,
    RangesListed,
    ResetGroup,
    SettleRange,
)
from postbus.entity.groups import MAX_GROUPS
from postbus.entity.outcomes import Outcome
from tests.entity.partition_rig import ACTIVE, DLQ, QUEUE, Rig, message
from tests.entity.topics.topic_rig import topic_rig
from tests.entity.transfer.forward_rig import Bus

PLACE = (QUEUE, ACTIVE, "lake")
HOME = 3
"""The partition of the rig."""
TAP = GroupKind.TAP


def cursor_of(reply: object) -> Cursor:
    assert isinstance(reply, CursorAt), reply
    return reply.cursor


def refusal_of(reply: object) -> Refusal:
    assert isinstance(reply, Refused), reply
    return reply.refusal


def next_position(rig: Rig, place: tuple[Any, ...] = PLACE) -> int:
    listed = rig.apply(ListRanges(*place))
    assert isinstance(listed, RangesListed)
    return listed.next_position


def created(rig: Rig, partitions: tuple[int, ...] = (HOME,), start: int | None = 0) -> Cursor:
    """Create a group whose home is here, over some partitions."""
    at = cursor_of(rig.apply(PutGroup(*PLACE, TAP, start))).settled
    return cursor_of(rig.apply(ResetGroup(*PLACE, dict.fromkeys(partitions, at), is_first=True)))


def claimed(rig: Rig, reader: str = "driver") -> Cursor:
    return cursor_of(rig.apply(ClaimGroup(*PLACE, reader)))


def plan_of(rig: Rig) -> Plan:
    cursor = rig.state.entities[QUEUE].groups.find(ACTIVE, "lake")
    assert cursor is not None
    assert cursor.plan is not None
    return cursor.plan


def planned(rig: Rig, epoch: int, ends: dict[int, int]) -> Cursor:
    """Plan from the end of the last plan."""
    ranges = {at: (end, ends[at]) for at, (_, end) in plan_of(rig).ranges.items()}
    return cursor_of(rig.apply(PlanRange(*PLACE, epoch, ranges)))


def test_a_group_begins_where_it_was_asked_to_and_is_created_once() -> None:
    rig = Rig()
    rig.send("a", "b")
    end = next_position(rig)
    first = cursor_of(rig.apply(PutGroup(*PLACE, TAP, None)))
    assert first == Cursor(TAP, 0, "", end, None, end, rig.now_ms)
    assert cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0))) == first
    assert cursor_of(rig.apply(PutGroup(QUEUE, DLQ, "lake", TAP, 0))).settled == 0


def test_limits_are_those_of_the_last_request_that_has_some() -> None:
    rig = Rig()
    first, second = Limits(max_bytes=7, drops=True), Limits(max_age_ms=9, parts=2)
    at = cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0, first)))
    assert at == Cursor(TAP, 0, "", 0, None, 0, rig.now_ms, first)
    created(rig)
    epoch = claimed(rig).epoch
    for same in (None, first):
        assert cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0, same))).limits == first
        written = rig.results[-1]
        assert isinstance(written, Outcome)
        assert written.mutations == [], "a repeated request writes nothing"
    changed = cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0, second)))
    assert (changed.limits, changed.epoch, changed.reader) == (second, epoch, "driver")
    rig.crash()
    assert cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0))) == changed
    assert cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0, Limits()))).limits == Limits()


def test_other_limits_move_no_group() -> None:
    rig = Rig()
    rig.send("a")
    created(rig)
    rig.apply(PutGroup(*PLACE, TAP, None, Limits(max_bytes=7)))
    assert not rig.tables.cursors[QUEUE, ACTIVE, "lake"].is_placed


def test_messages_lie_below_the_next_position_and_later_ones_do_not() -> None:
    rig = Rig()
    before = next_position(rig)
    for count in (1, 300, 7):
        rig.send(*[f"m{n}" for n in range(count)])
        after = next_position(rig)
        keys = [key for key in rig.tables.rows if before <= key < after]
        assert len(keys) == count
        before = after
    rig.crash()
    assert next_position(rig) >= before
    rig.send("last")
    assert max(rig.tables.rows) >= before


def test_a_plan_goes_on_exactly_where_the_last_one_ended() -> None:
    rig = Rig()
    rig.send("a", "b")
    created(rig)
    epoch = claimed(rig).epoch
    end = next_position(rig)
    plan = planned(rig, epoch, {HOME: end}).plan
    assert plan == Plan(1, {HOME: (0, end)}, epoch, 1, is_settled=False)
    rig.send("c")
    later = next_position(rig)
    cursor = planned(rig, epoch, {HOME: later})
    assert cursor.plan == Plan(2, {HOME: (end, later)}, epoch, 1, is_settled=False)
    assert cursor.settled == end, "a plan settles the one before"
    stale = rig.apply(PlanRange(*PLACE, epoch, {HOME: (end - 1, later)}))
    assert refusal_of(stale) is Refusal.STALE_CHECKPOINT
    for ranges in ({HOME: (later + 1, later + 1)}, {HOME: (later, later + 10**12)}):
        assert refusal_of(rig.apply(PlanRange(*PLACE, epoch, ranges))) is Refusal.BUS_RESTORED
    for wrong in ({}, {1: (0, 1)}, {HOME: (later, later), 1: (0, 0)}, {HOME: (later, later - 1)}):
        reply = rig.apply(PlanRange(*PLACE, epoch, wrong))
        assert refusal_of(reply) is Refusal.ARGUMENT_OUT_OF_RANGE


def test_a_plan_that_is_repeated_keeps_its_number_and_counts_readers() -> None:
    rig = Rig()
    rig.send("a")
    created(rig)
    epoch = claimed(rig, "first").epoch
    end = next_position(rig)
    first = planned(rig, epoch, {HOME: end})
    again = PlanRange(*PLACE, epoch, {HOME: (0, end)})
    assert cursor_of(rig.apply(again)) == first
    for attempts in (2, 3):
        epoch = claimed(rig, f"reader {attempts}").epoch
        again = PlanRange(*PLACE, epoch, {HOME: (0, end)})
        for _ in range(2):
            plan = cursor_of(rig.apply(again)).plan
            assert plan == Plan(1, {HOME: (0, end)}, epoch, attempts, is_settled=False)
        rig.crash()
    settled = cursor_of(rig.apply(SettleRange(*PLACE, epoch, 1)))
    assert (settled.settled, settled.plan and settled.plan.is_settled) == (end, True)
    assert refusal_of(rig.apply(again)) is Refusal.STALE_CHECKPOINT
    assert cursor_of(rig.apply(SettleRange(*PLACE, epoch, 1))) == settled
    assert cursor_of(rig.apply(SettleRange(*PLACE, epoch, 0))) == settled
    assert refusal_of(rig.apply(SettleRange(*PLACE, epoch, 2))) is Refusal.BUS_RESTORED


def test_a_range_without_positions_plans_nothing() -> None:
    rig = Rig()
    before = created(rig)
    epoch = claimed(rig).epoch
    cursor = cursor_of(rig.apply(PlanRange(*PLACE, epoch, {HOME: (0, 0)})))
    assert cursor.plan == before.plan


def test_an_earlier_reader_is_refused_by_name_of_the_later() -> None:
    rig = Rig()
    rig.send("a")
    created(rig)
    first = claimed(rig, "first").epoch
    planned(rig, first, {HOME: next_position(rig)})
    second = claimed(rig, "second").epoch
    assert second == first + 1
    for command in (
        PlanRange(*PLACE, first, {HOME: (0, 1)}),
        SettleRange(*PLACE, first, 1),
        FollowHome(*PLACE, first, "first", 5, 5),
    ):
        reply = rig.apply(command)
        assert refusal_of(reply) is Refusal.GROUP_FENCED
        assert isinstance(reply, Refused)
        assert "second" in reply.detail


def test_a_reset_moves_the_group_and_refuses_its_reader() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    created(rig)
    epoch = claimed(rig).epoch
    end = next_position(rig)
    planned(rig, epoch, {HOME: end})
    back = cursor_of(rig.apply(ResetGroup(*PLACE, {HOME: 1})))
    assert (back.settled, back.epoch) == (1, epoch + 1)
    assert back.plan == Plan(2, {HOME: (1, 1)}, epoch + 1, 0, is_settled=True)
    reply = rig.apply(SettleRange(*PLACE, epoch, 1))
    assert refusal_of(reply) is Refusal.GROUP_FENCED
    unchanged = cursor_of(rig.apply(ResetGroup(*PLACE, {HOME: 3}, is_first=True)))
    assert unchanged == back


def test_a_cursor_follows_its_home_upwards_and_a_claim_back() -> None:
    rig = Rig()
    cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0)))

    def follow(epoch: int, settled: int) -> int:
        return cursor_of(rig.apply(FollowHome(*PLACE, epoch, "driver", settled, settled))).settled

    assert [follow(1, 10), follow(1, 7), follow(1, 12)] == [10, 10, 12]
    assert follow(2, 5) == 5
    assert refusal_of(rig.apply(FollowHome(*PLACE, 1, "old", 50, 50))) is Refusal.GROUP_FENCED


def test_a_plan_over_several_partitions_is_one_fact() -> None:
    rig = Rig()
    rig.send("a")
    created(rig, partitions=(HOME, 1, 2))
    epoch = claimed(rig).epoch
    end = next_position(rig)
    cursor = planned(rig, epoch, {HOME: end, 1: 70, 2: 0})
    assert cursor.plan == Plan(
        1, {HOME: (0, end), 1: (0, 70), 2: (0, 0)}, epoch, 1, is_settled=False
    )
    rig.crash()
    assert rig.state.entities[QUEUE].groups.find(ACTIVE, "lake") == cursor
    reply = rig.apply(PlanRange(*PLACE, epoch, {HOME: (end, end), 1: (69, 80), 2: (0, 0)}))
    assert refusal_of(reply) is Refusal.STALE_CHECKPOINT


def test_a_group_without_a_plan_cannot_be_claimed() -> None:
    rig = Rig()
    assert refusal_of(rig.apply(ClaimGroup(*PLACE, "x"))) is Refusal.GROUP_NOT_FOUND
    rig.apply(PutGroup(*PLACE, TAP, 0))
    assert refusal_of(rig.apply(ClaimGroup(*PLACE, "x"))) is Refusal.GROUP_NOT_FOUND


def test_what_a_tap_has_not_read_stays_when_it_is_settled() -> None:
    rig = Rig()
    rig.send("a", "b")
    rig.settle(Disposition.COMPLETE, *rig.receive(limit=1))
    assert rig.tables.settled == {}
    created(rig)
    rig.settle(Disposition.COMPLETE, *rig.receive("B", limit=1))
    assert len(rig.tables.settled) == 1
    rig.crash()
    rig.send("c", "d")
    rig.settle(Disposition.COMPLETE, *rig.receive("C", limit=1))
    rig.settle(Disposition.DEAD_LETTER, *rig.receive("D", limit=1))
    assert len(rig.tables.settled) == 3
    rig.send("e")
    assert rig.apply(DropGroup(*PLACE)) == GroupDropped(True)
    assert rig.apply(DropGroup(*PLACE)) == GroupDropped(False)
    rig.settle(Disposition.COMPLETE, *rig.receive("E", limit=1))
    assert len(rig.tables.settled) == 3


def test_a_dropped_entity_takes_its_groups_along() -> None:
    rig = Rig()
    created(rig)
    rig.apply(DropEntity(QUEUE, 9))
    assert rig.tables.cursors == {} or not rig.state.entities
    assert refusal_of(rig.apply(ClaimGroup(*PLACE, "x"))) is Refusal.ENTITY_NOT_FOUND


def test_an_entity_has_a_bounded_number_of_groups() -> None:
    rig = Rig()
    for number in range(MAX_GROUPS):
        cursor_of(rig.apply(PutGroup(QUEUE, ACTIVE, f"g{number}", TAP, 0)))
    reply = rig.apply(PutGroup(QUEUE, ACTIVE, "one-more", TAP, 0))
    assert refusal_of(reply) is Refusal.QUOTA_EXCEEDED


def test_topics_and_forwarding_queues_have_no_groups() -> None:
    rig = topic_rig()
    topic = next(
        each for each in rig.state.entities.values() if isinstance(each.properties, TopicProperties)
    )
    reply = rig.apply(PutGroup(topic.entity_no, ACTIVE, "lake", TAP, 0))
    assert refusal_of(reply) is Refusal.NOT_ALLOWED
    forwarding = Rig(properties=QueueProperties(forward_to="elsewhere"))
    assert refusal_of(forwarding.apply(PutGroup(*PLACE, TAP, 0))) is Refusal.NOT_ALLOWED


@pytest.mark.parametrize("status", ["Disabled", "ReceiveDisabled"])
def test_a_queue_that_is_not_received_from_is_not_read_either(status: str) -> None:
    rig = Rig()
    created(rig)
    epoch = claimed(rig).epoch
    rig.put(QueueProperties(status=EntityStatus(status)))
    for command in (
        PutGroup(QUEUE, ACTIVE, "new", TAP, 0),
        ClaimGroup(*PLACE, "x"),
        PlanRange(*PLACE, epoch, {HOME: (0, 0)}),
    ):
        assert refusal_of(rig.apply(command)) in (
            Refusal.ENTITY_DISABLED,
            Refusal.RECEIVE_DISABLED,
        )
    assert rig.apply(DropGroup(*PLACE)) == GroupDropped(True)


@pytest.mark.parametrize("has_session", [False, True])
def test_messages_that_are_forwarded_later_stay_for_a_tap(has_session: bool) -> None:
    """A queue that begins to forward sends on what it holds: a planned range stays whole."""
    properties = {"requires_session": has_session}
    bus = Bus({1: Rig(QueueProperties(**properties)), 2: Rig()}, {"far": (2, QUEUE)})
    rig = bus.rigs[1]
    cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0)))
    session = "s" if has_session else None
    rig.send(message("a", session=session), message("b", session=session))
    rig.put(QueueProperties(forward_to="far", **properties))
    assert cursor_of(rig.apply(PutGroup(*PLACE, TAP, 0))).kind is TAP, "it is there already"
    rig.tick_now()
    bus.settle()
    assert bus.rigs[2].peek_names() == ["a", "b"]
    assert rig.peek_names() == []
    assert len(rig.tables.rows) == 2
    rig.crash()
    assert rig.peek_names() == []
    assert len(rig.tables.rows) == 2


def test_a_group_that_is_created_again_has_higher_epochs() -> None:
    rig = Rig()
    created(rig)
    first = claimed(rig)
    rig.apply(DropGroup(*PLACE))
    rig.now_ms += 10
    assert created(rig).epoch > first.epoch
