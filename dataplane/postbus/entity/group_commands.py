"""Commands for reader groups, and their replies.

A reader group is a durable cursor in one sub-queue of an entity. Positions are row keys of a
partition; a range is half-open and lies in one sub-queue, whose blocks divide it. Each partition of
the entity has the group's cursor. One of them, the home, has its plan too: the range of each
partition that is read now, under one number. It decides alone, so that a plan over several
partitions is one durable fact, and the cursors of all partitions follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from postbus.entity.expects import Expects

if TYPE_CHECKING:
    from postbus.entity.commands import Refused, SubQueue

Ranges: TypeAlias = Mapping[int, tuple[int, int]]
"""Partition -> its first position and the one behind its last."""


class GroupKind(IntEnum):
    """The way in which a group reads; the value is that of its column."""

    TAP = 1
    """Beside all receivers: messages stay until the group has read them."""
    DRAIN = 2
    """Instead of receivers, which are refused: messages leave when the group has settled them."""


class Plan(NamedTuple):
    """The ranges that a group reads under a number, which rises with each plan.

    `epoch`: that of the reader who planned them last. `attempts`: readers that did so, each after
    its own claim. `is_settled`: they are processed; the next plan begins where this one ends.
    """

    number: int
    ranges: dict[int, tuple[int, int]]
    epoch: int
    attempts: int
    is_settled: bool

    def settled_at(self, partition_id: int) -> int:
        """Return the position in a partition below which everything is processed."""
        first, end = self.ranges[partition_id]
        return end if self.is_settled else first


class Limits(NamedTuple):
    """Bounds of what a group keeps: settled messages at or above its settled position.

    `max_bytes`: of all partitions, which divide it into `parts`. `max_age_ms`: since a message was
    settled. None: no bound. `drops`: beyond a bound the group drops its oldest messages;
    otherwise it is shown, and nothing is deleted.
    """

    max_bytes: int | None = None
    max_age_ms: int | None = None
    drops: bool = False
    parts: int = 1

    @property
    def share_bytes(self) -> int | None:
        """Bound of one partition."""
        return None if self.max_bytes is None else self.max_bytes // self.parts


NO_LIMITS: Final = Limits()


class Cursor(NamedTuple):
    """A group in one partition.

    `epoch` rises with each claim, `reader` is the name in the last one. Everything below `settled`
    is processed. `plan` is None in partitions that are not the home, and at the home until the
    group's creation is complete. `planned` is the end of what is read here now, and `placed_ms` the
    time at which the group was created or reset.
    """

    kind: GroupKind
    epoch: int
    reader: str
    settled: int
    plan: Plan | None
    planned: int = 0
    placed_ms: int = 0
    limits: Limits = NO_LIMITS


# --- replies ------------------------------------------------------------------------------------


@dataclass(slots=True)
class CursorAt:
    """The cursor after the command."""

    cursor: Cursor


@dataclass(slots=True)
class GroupDropped:
    """`existed`: the partition had the group."""

    existed: bool


@dataclass(slots=True)
class RangesListed:
    """The part of a sub-queue that can be read.

    All messages below `next_position` are durable, and all later ones are at or above it.
    `readable`: the position up to which the group may read; receivers have locked a message behind
    the end of what a drain may read. `live`: messages that are not settled, `average_bytes` their
    size, `deferred` how many of them are deferred. `cursor` None: no group of this name.
    """

    next_position: int
    readable: int
    live: int
    average_bytes: int
    deferred: int
    cursor: Cursor | None


@dataclass(slots=True)
class RowsRejected:
    """Messages that were dead-lettered, and the row keys of those to be named again.

    `refused`: why a message could not be rejected, by row key. A message that was rejected before
    is in none of them.
    """

    rejected: int
    left: list[int]
    refused: dict[int, Refused]


class PlacedCursor(NamedTuple):
    """A cursor with its place; `next_position` is that of `RangesListed`."""

    entity_no: int
    sub_queue: SubQueue
    name: str
    cursor: Cursor
    next_position: int


@dataclass(slots=True)
class GroupsListed:
    """The cursors of a partition, in order of entity, sub-queue and name."""

    cursors: list[PlacedCursor]


# --- commands -----------------------------------------------------------------------------------


@dataclass(slots=True)
class PutGroup(Expects[CursorAt]):
    """Create a group's cursor unless it exists; `start` None begins behind all messages.

    What was deleted from `start` on is not missing for it: it begins with what is left.

    Its first `ResetGroup` gives the home a plan. `limits` replace those of an existing group; None
    keeps them.
    """

    entity_no: int
    sub_queue: SubQueue
    name: str
    kind: GroupKind
    start: int | None
    limits: Limits | None = None


@dataclass(slots=True)
class DropGroup(Expects[GroupDropped]):
    """Delete a group's cursor; what only the group needed is deleted later."""

    entity_no: int
    sub_queue: SubQueue
    name: str


@dataclass(slots=True)
class ResetGroup(Expects[CursorAt]):
    """Let the next plan of a group begin at these positions. Only at the home.

    `positions`: one of each partition. It counts as a claim, so that the reader of the old plan is
    refused. `is_first`: a group that has a plan stays as it is.
    """

    entity_no: int
    sub_queue: SubQueue
    name: str
    positions: Mapping[int, int]
    is_first: bool = False


@dataclass(slots=True)
class ClaimGroup(Expects[CursorAt]):
    """Raise the epoch, so that earlier readers are refused. Only at the home."""

    entity_no: int
    sub_queue: SubQueue
    name: str
    reader: str


@dataclass(slots=True)
class PlanRange(Expects[CursorAt]):
    """Plan to read ranges, one of each partition, that begin at the ends of the last plan.

    Settles the last plan. Ranges that are planned already keep their number. Only at the home.
    """

    entity_no: int
    sub_queue: SubQueue
    name: str
    epoch: int
    ranges: Ranges


@dataclass(slots=True)
class SettleRange(Expects[CursorAt]):
    """Record that a plan is processed, by its number. Only at the home."""

    entity_no: int
    sub_queue: SubQueue
    name: str
    epoch: int
    number: int


@dataclass(slots=True)
class FollowHome(Expects[CursorAt]):
    """Take over epoch and settled position that the home has decided.

    `is_placed`: the group was created or reset, and begins with what is left there.
    """

    entity_no: int
    sub_queue: SubQueue
    name: str
    epoch: int
    reader: str
    settled: int
    planned: int
    is_placed: bool = False


@dataclass(slots=True)
class RejectRows(Expects[RowsRejected]):
    """Dead-letter messages of the range that a drain reads now.

    A copy goes to the dead-letter queue; the row itself leaves with its range, so that the range
    can be read again as it was. A repeated command changes nothing.
    """

    entity_no: int
    sub_queue: SubQueue
    name: str
    epoch: int
    row_keys: list[int]
    reason: str
    description: str


@dataclass(slots=True)
class ListRanges(Expects[RangesListed]):
    """Return what can be read of a sub-queue, by a group if one is named."""

    entity_no: int
    sub_queue: SubQueue
    name: str | None = None


@dataclass(slots=True)
class ListGroups(Expects[GroupsListed]):
    """Return the cursors of all groups in the partition."""


GroupCommand: TypeAlias = (
    PutGroup | DropGroup | ResetGroup | ClaimGroup | PlanRange | SettleRange | FollowHome
    | RejectRows | ListRanges | ListGroups
)  # fmt: skip
