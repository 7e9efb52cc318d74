"""The next step of a queue, topic or subscription: a function of what is known of it. Pure.

A second look after a step that was made plans nothing. Definitions are put on a precondition only,
so that a step which was planned on old knowledge changes nothing: what was deleted because it was
idle is not made again by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from postbus_operator.annotations import START_EMPTY
from postbus_operator.bus.entity_paths import EntityPath
from postbus_operator.bus.marks import mark_of, read_mark
from postbus_operator.bus.view import LiveEntity, Tombstone
from postbus_operator.entities.definitions import definition_of, targets_of
from postbus_operator.entities.idle import AfterIdle, after_idle
from postbus_operator.entities.memory import Memory
from postbus_operator.objects import Resource


@dataclass(frozen=True, slots=True)
class Sight:
    """All that a step is planned from.

    `live` is the entity at the path, of any kind; `tombstones` are those of the path. `missing`:
    fields whose forwarding target does not exist. `is_claimed`: whether the resource that a mark
    names exists.
    """

    resource: Resource
    path: EntityPath
    memory: Memory
    live: LiveEntity | None
    tombstones: Sequence[Tombstone]
    missing: frozenset[str]
    is_claimed: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Nothing:
    """The bus has what is wanted."""


@dataclass(frozen=True, slots=True)
class Put:
    """Put a definition: of a new entity (`version` None), or over that version.

    `fallback` is put if the broker refuses targets that are gone. `lost`: the entity was there, and
    somebody deleted it.
    """

    body: Mapping[str, Any]
    version: int | None
    fallback: Mapping[str, Any] | None = None
    lost: Tombstone | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore what a deletion has left."""

    stone: Tombstone


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take an entity that belongs to nobody, if its definition is the wanted one."""

    body: Mapping[str, Any]
    live: LiveEntity


@dataclass(frozen=True, slots=True)
class Observe:
    """Compare only; `live` None: there is nothing."""

    body: Mapping[str, Any]
    live: LiveEntity | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The name is taken; the resource waits until it is free."""

    message: str
    is_other_kind: bool = False


@dataclass(frozen=True, slots=True)
class Idle:
    """The entity was deleted because it was idle; it stays deleted."""

    deletes_resource: bool


Step: TypeAlias = Nothing | Put | Restore | Adopt | Observe | Refuse | Idle


def plan(sight: Sight) -> Step:
    """Return the next step of a resource that is not being deleted."""
    resource, live = sight.resource, sight.live
    operator_spec = resource.spec.get("operatorSpec") or {}
    if live is not None and live.kind != sight.path.kind:
        return Refuse(
            f"{live.name} exists already and is a {live.kind}: set another entityName, or delete"
            " that one",
            is_other_kind=True,
        )
    if operator_spec.get("reconcilePolicy") == "Observe":
        return Observe(definition_of(resource), live)
    if live is None:
        return _plan_missing(sight)
    return _plan_existing(sight, live, operator_spec.get("adopt", "IfMatching"))


# --- an entity that exists ----------------------------------------------------------------------


def _plan_existing(sight: Sight, live: LiveEntity, adopt: str) -> Step:
    resource, memory = sight.resource, sight.memory
    mark = read_mark(live.mark)
    if live.mark == mark_of(resource):
        return _put_over(sight, live) if _is_due(sight, live) else Nothing()
    is_own = mark is not None and mark.key == resource.key  # of the resource before this one
    is_unmarked = not live.mark or (mark is not None and not sight.is_claimed(live.mark))
    if is_own or (is_unmarked and str(live.entity_id) == memory.entity_id):
        return _put_over(sight, live)
    if not is_unmarked:
        owner = live.mark if mark is None else str(mark.key)
        return Refuse(f"{live.name} belongs to {owner}: set another entityName, or delete that one")
    match adopt:
        case "Always":
            return _put_over(sight, live)
        case "IfMatching":
            return Adopt(definition_of(resource), live)
        case _:
            return Refuse(
                f"{live.name} exists already and was not made by a resource: set"
                " operatorSpec.adopt to IfMatching or Always, or delete it"
            )


def _is_due(sight: Sight, live: LiveEntity) -> bool:
    memory = sight.memory
    return (
        memory.entity_id != str(live.entity_id)
        or memory.applied_hash != live.applied_hash
        or memory.programmed != sight.resource.generation
        or (not memory.is_forwarding and bool(targets_of(sight.resource)) and not sight.missing)
    )


def _put_over(sight: Sight, live: LiveEntity) -> Put:
    """Put all targets: the broker accepts a missing one that the entity has already."""
    body = definition_of(sight.resource)
    return Put(body, live.version, without(body, sight.missing) if sight.missing else None)


def without(body: Mapping[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    """Return a body without some fields."""
    return {name: value for name, value in body.items() if name not in fields}


# --- an entity that does not exist ---------------------------------------------------------------


def _plan_missing(sight: Sight) -> Step:
    resource, memory = sight.resource, sight.memory
    last = last_of(sight)
    if (last is not None and last.reason == "idle") or (last is None and memory.was_idle):
        match after_idle(resource, memory):
            case AfterIdle.KEEP:
                return Idle(deletes_resource=False)
            case AfterIdle.DELETE:
                return Idle(deletes_resource=True)
            case AfterIdle.CREATE:
                return _create(sight)
    starts_empty = resource.annotations.get(START_EMPTY) == "true"
    found = None if starts_empty else _restorable(sight, last)
    if found is not None:
        return Restore(found)
    return _create(sight, last)


def last_of(sight: Sight) -> Tombstone | None:
    """Return the tombstone of the resource's own entity: of its last one, if it had several."""
    own = mark_of(sight.resource)
    entity_id = sight.memory.entity_id
    found = [
        each for each in sight.tombstones if each.mark == own or str(each.entity_id) == entity_id
    ]
    return max(
        found, key=lambda each: (str(each.entity_id) == entity_id, each.entity_id), default=None
    )


def _restorable(sight: Sight, last: Tombstone | None) -> Tombstone | None:
    """Return what the resource, or an earlier one of its name, has left."""
    if last is not None:
        return last if last.restorable_until is not None else None
    for stone in sight.tombstones:
        mark = read_mark(stone.mark)
        if mark is not None and mark.key == sight.resource.key:
            return stone if stone.restorable_until is not None else None
    return None


def _create(sight: Sight, lost: Tombstone | None = None) -> Put:
    return Put(without(definition_of(sight.resource), sight.missing), None, lost=lost)
