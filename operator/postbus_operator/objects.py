"""Custom resources as the API server returned them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Self

from postbus_operator.annotations import FINALIZER, FORCE_RELEASE, PAUSED


class Key(NamedTuple):
    """The identity of a resource. `kind` is the name in the table of kinds, such as `Queue`."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Resource:
    """A custom resource. `spec` and `status` are those of the API server, defaults written out."""

    key: Key
    uid: str
    generation: int
    resource_version: str
    created_at: datetime
    deleted_at: datetime | None
    finalizers: tuple[str, ...]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]
    status: Mapping[str, Any]

    @classmethod
    def from_object(cls, kind: str, found: Mapping[str, Any]) -> Self:
        """Return the resource of an object's JSON."""
        metadata = found["metadata"]
        deleted_at = metadata.get("deletionTimestamp")
        return cls(
            key=Key(kind, metadata["namespace"], metadata["name"]),
            uid=metadata["uid"],
            generation=metadata["generation"],
            resource_version=metadata["resourceVersion"],
            created_at=datetime.fromisoformat(metadata["creationTimestamp"]),
            deleted_at=None if deleted_at is None else datetime.fromisoformat(deleted_at),
            finalizers=tuple(metadata.get("finalizers", ())),
            labels=metadata.get("labels", {}),
            annotations=metadata.get("annotations", {}),
            spec=found.get("spec", {}),
            status=_readable(found.get("status", {})),
        )

    @property
    def is_deleting(self) -> bool:
        """Whether somebody has deleted it; it exists until its finalizers are gone."""
        return self.deleted_at is not None

    @property
    def has_finalizer(self) -> bool:
        """Whether the operator must release it."""
        return FINALIZER in self.finalizers

    @property
    def is_paused(self) -> bool:
        """Whether the operator leaves it alone."""
        return self.annotations.get(PAUSED) == "true"

    @property
    def is_released_by_force(self) -> bool:
        """Whether its deletion asks nobody."""
        return self.annotations.get(FORCE_RELEASE) == "true"

    def meets(self, condition: str) -> bool:
        """Return whether a condition is true of the spec as it is now."""
        return any(
            (each["type"], each["status"], each.get("observedGeneration"))
            == (condition, "True", self.generation)
            for each in self.status.get("conditions", ())
        )

    @property
    def owner(self) -> Key | None:
        """The resource that `spec.owner` names: a Topic for a Subscription, else a Namespace."""
        owner = self.spec.get("owner")
        if owner is None:
            return None
        kind = "Topic" if self.key.kind == "Subscription" else "Namespace"
        return Key(kind, owner.get("namespace") or self.key.namespace, owner["name"])

    @property
    def entity_name(self) -> str:
        """The name on the bus; for a Subscription, within its topic."""
        return str(self.spec.get("entityName") or self.key.name)


def _readable(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a status without conditions whose time cannot be read: they are replaced.

    The API server accepts times that Python does not know, such as the year 0.
    """
    conditions = status.get("conditions", ())
    kept = [each for each in conditions if _is_readable(each["lastTransitionTime"])]
    return status if len(kept) == len(conditions) else {**status, "conditions": kept}


def _is_readable(time: str) -> bool:
    try:
        datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return False
    return True
