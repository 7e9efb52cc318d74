"""The memory of a resource: the part of its status that decides what is done next.

A status may be lost, as after a restore of a backup without status: then nothing is known, and
marks and tombstones of the bus decide alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from postbus_operator.annotations import RECREATE_REQUESTED_AT
from postbus_operator.objects import Resource


@dataclass(frozen=True, slots=True)
class Memory:
    """Earlier looks at a resource under the same owner.

    `generation` is the last one seen, `programmed` the last one that the bus has in force.
    `is_forwarding`: the entity was put with all targets. `recreate_request`: last seen value of the
    annotation.
    """

    entity_id: str | None = None
    applied_hash: str | None = None
    generation: int | None = None
    programmed: int | None = None
    is_forwarding: bool = False
    was_idle: bool = False
    recreate_request: str | None = None


def memory_of(resource: Resource, owner_uid: str) -> Memory:
    """Return the memory of a resource; an owner with another uid is another bus."""
    status = resource.status
    if status.get("ownerUid") != owner_uid:
        return Memory()
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    programmed = conditions.get("Programmed", {})
    is_programmed = programmed.get("status") == "True"
    return Memory(
        entity_id=status.get("entityId"),
        applied_hash=status.get("appliedHash"),
        generation=status.get("observedGeneration"),
        programmed=programmed.get("observedGeneration") if is_programmed else None,
        is_forwarding=conditions.get("ForwardTargetsResolved", {}).get("status") == "True",
        was_idle=conditions.get("Ready", {}).get("reason") == "AutoDeletedOnIdle",
        recreate_request=status.get("recreateRequestedAt"),
    )


def asks_for_creation(resource: Resource, memory: Memory) -> bool:
    """Return whether somebody wants an entity that was deleted: by a new spec, or the annotation.

    Without a memory nobody does: an annotation may be as old as the deletion before.
    """
    if memory.generation is None:
        return False
    request = resource.annotations.get(RECREATE_REQUESTED_AT)
    return memory.generation < resource.generation or (
        request is not None and request != memory.recreate_request
    )
