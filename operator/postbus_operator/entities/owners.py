"""Owners of entities: whether they are there, and admit resources of a cluster namespace. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from postbus_operator.objects import Key, Resource

OwnerReason = Literal["NotFound", "NotPermitted", "Deleting"]


@dataclass(frozen=True, slots=True)
class Owner:
    """`direct` is what `spec.owner` names: the bus itself, or the topic of a subscription."""

    direct: Resource
    bus: Resource


@dataclass(frozen=True, slots=True)
class NoOwner:
    """The reason why a resource has no owner for now; the message ends with the next step."""

    reason: OwnerReason
    message: str


Find: TypeAlias = Callable[[Key], Resource | None]


def owner_of(
    resource: Resource, find: Find, labels_of: Callable[[str], Mapping[str, str]]
) -> Owner | NoOwner:
    """Return the owner. `labels_of` returns the labels of a cluster namespace."""
    found = _chain(resource, find)
    if isinstance(found, NoOwner):
        return found
    allowed = (found.bus.spec.get("operatorSpec") or {}).get("allowedNamespaces") or {}
    if not admits(allowed, resource.key.namespace, found.bus.key.namespace, labels_of):
        return NoOwner(
            "NotPermitted",
            f"{found.bus.key} admits no resources of the namespace {resource.key.namespace}:"
            " change its operatorSpec.allowedNamespaces",
        )
    return found


def is_owner_gone(resource: Resource, find: Find) -> bool:
    """Return whether the bus or the topic of a resource is missing or being deleted."""
    return isinstance(_chain(resource, find), NoOwner)


def _chain(resource: Resource, find: Find) -> Owner | NoOwner:
    each, direct = resource, None
    while each.key.kind != "Namespace":
        key = each.owner
        assert key is not None
        found = find(key)
        if found is None:
            return NoOwner("NotFound", f"there is no {key}: create it, or correct spec.owner")
        if found.is_deleting:
            return NoOwner("Deleting", f"{key} is being deleted: create it again when it is gone")
        each, direct = found, direct or found
    assert direct is not None
    return Owner(direct, each)


def admits(
    allowed: Mapping[str, Any],
    namespace: str,
    own_namespace: str,
    labels_of: Callable[[str], Mapping[str, str]],
) -> bool:
    """Return whether `allowedNamespaces` of a bus admits a cluster namespace."""
    if namespace == own_namespace:
        return True
    match allowed.get("from", "Same"):
        case "All":
            return True
        case "Selector":
            labels = labels_of(namespace)  # Each namespace has one; none: they may not be read.
            return bool(labels) and selects(allowed.get("selector") or {}, labels)
        case _:
            return False


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector of Kubernetes matches; an empty one matches everything."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        _holds(each, labels) for each in selector.get("matchExpressions") or ()
    )


def _holds(requirement: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    name, values = requirement["key"], requirement.get("values") or ()
    match requirement["operator"]:
        case "In":
            return name in labels and labels[name] in values
        case "NotIn":
            return name not in labels or labels[name] not in values
        case "Exists":
            return name in labels
        case _:
            return name not in labels
