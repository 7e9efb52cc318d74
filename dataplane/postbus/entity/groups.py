"""Reader groups of one entity in one partition: their cursors, claims and plans (ADR 42).

`partition_state` calls it; commands and positions are explained in `group_commands`. A tap keeps
messages from deletion: while an entity has one, its settled rows stay, and the store deletes those
below the cursors of all taps of their sub-queue. A command may be repeated: it then has the answer
of the first time and no other effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from postbus.entity.commands import Refusal, Refused, SubQueue
from postbus.entity.group_commands import (
    NO_LIMITS,
    ClaimGroup,
    Cursor,
    CursorAt,
    DropGroup,
    FollowHome,
    GroupDropped,
    GroupKind,
    Plan,
    PlanRange,
    PutGroup,
    RangesListed,
    ResetGroup,
    SettleRange,
)
from postbus.entity.outcomes import DropCursor, PutCursor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from postbus.entity.apply_context import ApplyContext
    from postbus.entity.group_commands import Ranges

MAX_GROUPS: Final = 32
"""Groups of an entity. Our choice: each is compared when rows are deleted."""

NOT_FOUND: Final = "create it first: postbus groups create"
UNDRAINED: Final = Refused(
    Refusal.BUSY, "messages that the group has settled are still being removed: try again"
)
LIMITED_DRAIN: Final = Refused(
    Refusal.ARGUMENT_OUT_OF_RANGE, "limits are for taps: a drain keeps no messages for itself"
)
WHOLE_DRAIN: Final = Refused(
    Refusal.ARGUMENT_OUT_OF_RANGE,
    "a group that drains begins with the earliest message: purge what it must not read",
)


class ReaderGroups:
    """The cursors of an entity."""

    __slots__ = ("_context", "_cursors", "_entity_no", "_undrained")

    def __init__(self, entity_no: int, context: ApplyContext) -> None:
        self._entity_no = entity_no
        self._context = context
        self._cursors: dict[tuple[SubQueue, str], Cursor] = {}
        self._undrained: set[SubQueue] = set()

    def load(self, put: PutCursor) -> None:
        """Take over a stored cursor."""
        self._cursors[put.sub_queue, put.name] = put.cursor
        if put.cursor.kind is GroupKind.DRAIN:
            self._undrained.add(put.sub_queue)

    @property
    def has_tap(self) -> bool:
        """True while settled messages must stay for a group."""
        return any(cursor.kind is GroupKind.TAP for cursor in self._cursors.values())

    def drain_of(self, sub_queue: SubQueue) -> str | None:
        """Return the name of the group that drains a sub-queue, None without one."""
        drains = (
            name
            for (kind, name), cursor in self._cursors.items()
            if kind is sub_queue and cursor.kind is GroupKind.DRAIN
        )
        return next(drains, None)

    def frozen_below(self, sub_queue: SubQueue) -> int:
        """Return the position below which a drain has planned to read."""
        name = self.drain_of(sub_queue)
        return 0 if name is None else self._cursors[sub_queue, name].planned

    def undrained(self) -> list[tuple[SubQueue, int]]:
        """Return the sub-queues with messages that a drain has settled, and its position."""
        return [
            (kind, self._cursors[kind, name].settled)
            for kind in self._undrained
            if (name := self.drain_of(kind)) is not None
        ]

    def note_drained(self, sub_queue: SubQueue) -> None:
        """Record that all messages which a drain has settled are removed."""
        self._undrained.discard(sub_queue)

    def find(self, sub_queue: SubQueue, name: str) -> Cursor | None:
        return self._cursors.get((sub_queue, name))

    def all(self) -> list[tuple[SubQueue, str, Cursor]]:
        """Return (sub-queue, name, cursor) of each group, in order."""
        return [(*place, self._cursors[place]) for place in sorted(self._cursors)]

    # --- commands -------------------------------------------------------------------------------

    def put(self, command: PutGroup, next_position: int) -> CursorAt | Refused:
        """Create a cursor, or return the existing one, with other limits if some are given."""
        known = self.find(command.sub_queue, command.name)
        if command.kind is GroupKind.DRAIN and command.limits not in (None, NO_LIMITS):
            return LIMITED_DRAIN
        if known is not None:
            if known.kind is not command.kind:
                text = f"the reader group {command.name} is of another kind"
                return Refused(Refusal.CONFLICT, text)
            if command.limits is None or command.limits == known.limits:
                return CursorAt(known)
            limited = known._replace(limits=command.limits)
            return self._write(command.sub_queue, command.name, limited, is_placed=False)
        if len(self._cursors) >= MAX_GROUPS:
            return Refused(
                Refusal.QUOTA_EXCEEDED, f"an entity has at most {MAX_GROUPS} reader groups"
            )
        drain = self.drain_of(command.sub_queue) if command.kind is GroupKind.DRAIN else None
        if drain is not None:
            return Refused(Refusal.CONFLICT, f"the reader group {drain} drains the messages")
        start = next_position if command.start is None else min(command.start, next_position)
        if command.kind is GroupKind.DRAIN and start:
            return WHOLE_DRAIN
        cursor = Cursor(
            command.kind,
            0,
            "",
            start,
            None,
            planned=start,
            placed_ms=self._context.now_ms,
            limits=command.limits or NO_LIMITS,
        )
        return self._write(command.sub_queue, command.name, cursor, is_placed=True)

    def drop(self, command: DropGroup) -> GroupDropped:
        known = self._cursors.pop((command.sub_queue, command.name), None)
        if known is not None and known.kind is GroupKind.DRAIN:
            self._undrained.discard(command.sub_queue)
        if known is not None:
            self._context.outcome.mutations.append(
                DropCursor(self._entity_no, command.sub_queue, command.name)
            )
        return GroupDropped(known is not None)

    def use(
        self,
        command: ResetGroup | ClaimGroup | PlanRange | SettleRange | FollowHome,
        partition_id: int,
        listed: RangesListed,
    ) -> CursorAt | Refused:
        """Change an existing cursor."""
        cursor = self.find(command.sub_queue, command.name)
        if cursor is None:
            return group_not_found(command.name)
        changed = self._changed(cursor, command, partition_id, listed)
        if isinstance(changed, Refused):
            return changed
        is_set_back = False
        if cursor.kind is GroupKind.DRAIN:
            if changed.settled < cursor.settled and command.sub_queue in self._undrained:
                return UNDRAINED
            if changed.settled > cursor.settled:
                self._undrained.add(command.sub_queue)
            # By a claim, too, when the reset before it did not come through.
            is_set_back = changed.planned < cursor.planned
            if is_set_back:
                changed = changed._replace(placed_ms=self._context.now_ms)
        is_placed = (
            is_set_back
            or isinstance(command, ResetGroup)
            or (isinstance(command, FollowHome) and command.is_placed)
        )
        if changed == cursor and not is_placed:
            return CursorAt(cursor)
        return self._write(command.sub_queue, command.name, changed, is_placed=is_placed)

    def _write(
        self, sub_queue: SubQueue, name: str, cursor: Cursor, *, is_placed: bool
    ) -> CursorAt:
        self._cursors[sub_queue, name] = cursor
        self._context.outcome.mutations.append(
            PutCursor(self._entity_no, sub_queue, name, cursor, is_placed)
        )
        return CursorAt(cursor)

    def _changed(
        self,
        cursor: Cursor,
        command: ResetGroup | ClaimGroup | PlanRange | SettleRange | FollowHome,
        partition_id: int,
        listed: RangesListed,
    ) -> Cursor | Refused:
        """Return the cursor after a command."""
        plan = cursor.plan
        match command:
            case ResetGroup() if command.is_first and plan is not None:
                return cursor
            case ResetGroup() if cursor.kind is GroupKind.DRAIN and any(command.positions.values()):
                return WHOLE_DRAIN
            case ResetGroup():
                return _reset(cursor, command.positions, partition_id, self._context.now_ms)
            case FollowHome():
                return _following(cursor, command, self._context.now_ms)
            case _ if plan is None:
                return group_not_found(command.name)
            case ClaimGroup():
                return cursor._replace(epoch=cursor.epoch + 1, reader=command.reader)
            case _ if command.epoch != cursor.epoch:
                return group_fenced(command.name, cursor)
            case SettleRange():
                return _settled(cursor, plan, command.number, partition_id)
            case PlanRange():
                end = max(command.ranges.get(partition_id, (0, 0)))
                refused = end_refusal(listed, end, partition_id)
                if refused is not None:
                    return refused
                return _planned(cursor, plan, command.ranges, partition_id)
            case _:
                assert_never(command)


def _reset(cursor: Cursor, positions: Mapping[int, int], partition_id: int, now_ms: int) -> Cursor:
    """The first epoch of a group is above those of an earlier one that had its name: a reader that
    was paused meanwhile stays refused.
    """
    number = 0 if cursor.plan is None else cursor.plan.number + 1
    epoch = max(cursor.epoch + 1, now_ms if cursor.plan is None else 0)
    ranges = {partition: (position, position) for partition, position in positions.items()}
    plan = Plan(number, ranges, epoch, 0, is_settled=True)
    settled = plan.settled_at(partition_id)
    return cursor._replace(
        epoch=epoch, reader="", settled=settled, plan=plan, planned=settled, placed_ms=now_ms
    )


def _following(cursor: Cursor, command: FollowHome, now_ms: int) -> Cursor | Refused:
    """Within an epoch a cursor only rises; a claim or reset may set it back."""
    if command.epoch < cursor.epoch:
        return group_fenced(command.name, cursor)
    settled, planned = command.settled, command.planned
    if command.epoch == cursor.epoch:
        settled, planned = max(settled, cursor.settled), max(planned, cursor.planned)
    placed_ms = now_ms if command.is_placed and command.epoch > cursor.epoch else cursor.placed_ms
    return cursor._replace(
        epoch=command.epoch,
        reader=command.reader,
        settled=settled,
        planned=planned,
        placed_ms=placed_ms,
    )


def _settled(cursor: Cursor, plan: Plan, number: int, partition_id: int) -> Cursor | Refused:
    if number > plan.number:
        return _restored(f"plan {number}")
    if number < plan.number:
        return cursor  # a later plan has settled it
    plan = plan._replace(is_settled=True)
    return cursor._replace(settled=plan.settled_at(partition_id), plan=plan)


def _planned(cursor: Cursor, plan: Plan, ranges: Ranges, partition_id: int) -> Cursor | Refused:
    if ranges.keys() != plan.ranges.keys():
        return Refused(
            Refusal.ARGUMENT_OUT_OF_RANGE,
            f"a plan has one range for each of the partitions {sorted(plan.ranges)}",
        )
    if any(first > end for first, end in ranges.values()):
        return Refused(Refusal.ARGUMENT_OUT_OF_RANGE, "a range ends before it begins")
    if ranges == plan.ranges and not plan.is_settled:
        if plan.epoch == cursor.epoch:
            return cursor
        plan = plan._replace(epoch=cursor.epoch, attempts=plan.attempts + 1)
        return cursor._replace(plan=plan)
    for partition, (first, _) in sorted(ranges.items()):
        planned = plan.ranges[partition][1]
        where = f"{first} of partition {partition}, the last plan {plan.number} ends at {planned}"
        if first < planned:
            return Refused(
                Refusal.STALE_CHECKPOINT,
                f"the reader goes on at {where}: its checkpoint is older than the group",
            )
        if first > planned:
            return _restored(where)
    if all(first == end for first, end in ranges.values()):
        return cursor
    plan = Plan(plan.number + 1, dict(ranges), cursor.epoch, 1, is_settled=False)
    first, end = ranges[partition_id]
    return cursor._replace(settled=first, planned=end, plan=plan)


def group_not_found(name: str) -> Refused:
    """Return the refusal for a group that does not exist."""
    return Refused(Refusal.GROUP_NOT_FOUND, f"there is no reader group {name}: {NOT_FOUND}")


def group_fenced(name: str, cursor: Cursor) -> Refused:
    """Return the refusal for a reader whose claim is not the latest."""
    who = f" by {cursor.reader}" if cursor.reader else ""
    return Refused(
        Refusal.GROUP_FENCED, f"the reader group {name} was claimed{who}, epoch {cursor.epoch}"
    )


def end_refusal(listed: RangesListed, end: int, partition_id: int) -> Refused | None:
    """Return a refusal if a range must not end there, else None."""
    if end > listed.next_position:
        return _restored(f"position {end} of partition {partition_id}")
    if end > listed.readable:
        text = f"a receiver has locked a message of partition {partition_id}: read up to "
        return Refused(Refusal.ARGUMENT_OUT_OF_RANGE, f"{text}{listed.readable}")
    return None


def _restored(where: str) -> Refused:
    return Refused(
        Refusal.BUS_RESTORED,
        f"the reader goes on at {where}: it is ahead of the bus, whose store was restored",
    )
