"""Commands for reader groups, applied to the entity that they name (ADR 42).

`groups` has the cursors; what a command does to receivers, forwarding and messages is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.contract.entities import TopicProperties
from postbus.entity import rejects
from postbus.entity.commands import Refusal, Refused, SubQueue
from postbus.entity.group_commands import (
    ClaimGroup,
    CursorAt,
    DropGroup,
    GroupDropped,
    GroupKind,
    GroupsListed,
    ListGroups,
    ListRanges,
    PlacedCursor,
    PlanRange,
    PutGroup,
    RangesListed,
    RejectRows,
)
from postbus.entity.groups import UNDRAINED, group_fenced, group_not_found

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from postbus.entity.commands import Reply, StoredRow
    from postbus.entity.group_commands import GroupCommand
    from postbus.entity.outcomes import Needs
    from postbus.entity.queues.queue_state import QueueState

OF_TOPIC: Final = Refused(
    Refusal.NOT_ALLOWED, "a topic keeps no messages: create a group of one of its subscriptions"
)


def handle(
    entities: Mapping[int, QueueState],
    command: GroupCommand,
    partition_id: int,
    found: Sequence[StoredRow] | None,
) -> Reply | Needs:
    """Apply a command for a group."""
    if isinstance(command, ListGroups):
        return GroupsListed(
            [
                PlacedCursor(number, kind, name, cursor, entity.next_position(kind))
                for number, entity in sorted(entities.items())
                for kind, name, cursor in entity.listed_groups()
            ]
        )
    entity = entities.get(command.entity_no)
    if entity is None:
        return Refused(Refusal.ENTITY_NOT_FOUND)
    if isinstance(entity.properties, TopicProperties):
        return OF_TOPIC
    groups = entity.groups
    match command:
        case ListRanges():
            return _listed(entity, command.sub_queue, command.name)
        case PutGroup():
            return _put(entity, command)
        case DropGroup():
            return _drop(entity, command)
        case RejectRows():
            cursor = groups.find(command.sub_queue, command.name)
            if cursor is None:
                return group_not_found(command.name)
            if command.epoch != cursor.epoch:
                return group_fenced(command.name, cursor)
            return rejects.reject(entity, command, cursor, found)
        case ClaimGroup() | PlanRange() if (refused := entity.status_refusal()) is not None:
            return refused
        case _:
            used = groups.use(
                command, partition_id, _listed(entity, command.sub_queue, command.name)
            )
            if groups.undrained():
                entity.remove_drained()
            return used


def _listed(entity: QueueState, sub_queue: SubQueue, name: str | None) -> RangesListed:
    sub = entity.sub_queue(sub_queue)
    next_position = readable = entity.next_position(sub_queue)
    cursor = None if name is None else entity.groups.find(sub_queue, name)
    if cursor is not None and cursor.kind is GroupKind.DRAIN:
        held = sub.lowest_held()
        readable = next_position if held is None else min(held, next_position)
    return RangesListed(
        next_position, readable, sub.live, entity.average_bytes, sub.deferred_count(), cursor
    )


def _put(entity: QueueState, command: PutGroup) -> CursorAt | Refused:
    kind, is_drain = command.sub_queue, command.kind is GroupKind.DRAIN
    is_known = entity.groups.find(kind, command.name) is not None
    refused = entity.status_refusal()
    target = entity.target_of(kind)
    if refused is None and target is not None and not is_known:
        refused = Refused(Refusal.NOT_ALLOWED, f"the messages are forwarded to {target}")
    if refused is not None:
        return refused
    put = entity.groups.put(command, entity.next_position(kind))
    if isinstance(put, CursorAt) and not is_known:
        entity.follow_groups()
        if is_drain:
            entity.start_drain(kind)
    return put


def _drop(entity: QueueState, command: DropGroup) -> GroupDropped | Refused:
    kind, groups = command.sub_queue, entity.groups
    is_drain = groups.drain_of(kind) == command.name
    if is_drain and any(kind is each for each, _ in groups.undrained()):
        return UNDRAINED
    dropped = groups.drop(command)
    entity.follow_groups()
    if is_drain:
        entity.end_drain(kind)
    return dropped
