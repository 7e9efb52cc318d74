"""Deletion of a resource: when its finalizer goes, and what becomes of its entity. Pure.

A deletion never waits for something that nobody will do: it asks no Secret and no sibling, an owner
that goes frees everything below it, and an annotation frees a resource whatever else holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from postbus.contract.control import DeletionPolicy
from postbus_operator.annotations import FORCE_RELEASE, PAUSED
from postbus_operator.bus.marks import mark_of
from postbus_operator.bus.view import LiveEntity
from postbus_operator.objects import Resource

CALLS: Final = {
    "Delete": DeletionPolicy.RETAIN,
    "DeleteIfEmpty": DeletionPolicy.DELETE_IF_EMPTY,
    "Retain": None,
}
"""`deletionPolicy` of a resource -> policy of the control API; None: no call.

The words mean different things. A resource's Delete keeps messages for the retention of the
namespace; the Delete of the API destroys them, and is used for no resource.
"""


@dataclass(frozen=True, slots=True)
class Free:
    """The finalizer goes; the entity stays as it is, or is gone."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The deletion waits, until something changes."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Delete:
    """The entity is deleted, if it has this version; then the finalizer goes."""

    policy: DeletionPolicy
    version: int


@dataclass(frozen=True, slots=True)
class AskTheBus:
    """The next step depends on whether the entity exists."""


Step: TypeAlias = Free | Blocked | Delete | AskTheBus


def release(resource: Resource, *, is_owner_gone: bool) -> Step:
    """Return the first step. `is_owner_gone`: its bus, or topic, is missing or being deleted."""
    if not resource.has_finalizer or resource.is_released_by_force or is_owner_gone:
        return Free()
    if _call_of(resource) is None and not _is_protected(resource):
        return Free()
    return AskTheBus()


def release_known(resource: Resource, live: LiveEntity | None) -> Step:
    """Return the step for what the bus has at the resource's path."""
    if live is None or live.mark != mark_of(resource):
        return Free()  # deleted when it was idle, by somebody, or never made
    if _is_protected(resource):
        return Blocked(
            "Protected",
            "operatorSpec.deletionProtection is set: set it to false to let the deletion go on",
        )
    if resource.is_paused:
        return Blocked(
            "Paused", f"the resource is paused: remove the annotation {PAUSED} to let it go on"
        )
    policy = _call_of(resource)
    return Free() if policy is None else Delete(policy, live.version)


def release_unasked(resource: Resource, trouble: str) -> Free | Blocked:
    """Return the step while the bus does not answer. What it never had needs no answer: a bus that
    cannot start must not hold its entities. If a status was lost, the entity stays as it is.
    """
    if resource.status.get("entityId") is None:
        return Free()
    return blocked_by_the_bus(trouble)


def blocked_by_the_bus(trouble: str) -> Blocked:
    """Return the step while the bus does not answer for an entity that it has."""
    return Blocked(
        "BackendUnavailable",
        f"the bus does not answer ({trouble}): wait, delete its Namespace, or set the annotation"
        f" {FORCE_RELEASE}=true to leave the entity as it is",
    )


def _call_of(resource: Resource) -> DeletionPolicy | None:
    spec = resource.spec.get("operatorSpec") or {}
    if spec.get("reconcilePolicy", "Manage") != "Manage":
        return None
    return CALLS[spec.get("deletionPolicy", "DeleteIfEmpty")]


def _is_protected(resource: Resource) -> bool:
    return (resource.spec.get("operatorSpec") or {}).get("deletionProtection") is True
