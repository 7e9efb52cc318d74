"""Which resources a change concerns: those that must be looked at again because of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from postbus_operator.kube.cache import Cache, Change, bus_label, owners_of
from postbus_operator.kube.resource_types import CLUSTER_NAMESPACES, RESOURCES, SECRETS
from postbus_operator.objects import Key, Resource

ChildName = Callable[[str], str]
"""Name of a Namespace resource -> the name of its children."""

BUS_FIELDS: Final = ("sku", "authorizationRules")
BUS_OPERATOR_FIELDS: Final = ("allowedNamespaces", "softDelete", "tls", "service")


def concerned(cache: Cache, change: Change, child_name: ChildName) -> set[Key]:
    """Return the resources that a change concerns, the changed one included."""
    if change.key.type in RESOURCES.values():
        return _of_resource(cache, change)
    if change.key.type is CLUSTER_NAMESPACES:
        return _of_cluster_namespace(cache, change)
    found = _of_child(cache, change, child_name)
    if change.key.type is SECRETS and _data(change.before) != _data(change.after):
        named = cache.referencing_secret(change.key.namespace, change.key.name)
        found |= {each.key for each in named}
    return found


def is_own_write(change: Change) -> bool:
    """Return whether nothing differs but what the operator itself writes: status, finalizers."""
    before, after = change.before, change.after
    if not isinstance(before, Resource) or not isinstance(after, Resource):
        return False
    return _written_by_others(before) == _written_by_others(after)


def has_other_status(change: Change) -> bool:
    """Return whether the status of a child differs, which only its controller writes."""
    before, after = change.before, change.after
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return False
    return before.get("status") != after.get("status")


def _written_by_others(resource: Resource) -> tuple[Any, ...]:
    return (
        resource.uid,
        resource.generation,
        resource.deleted_at,
        resource.labels,
        resource.annotations,
    )


def _of_resource(cache: Cache, change: Change) -> set[Key]:
    before, after = change.before, change.after
    assert not isinstance(before, Mapping)
    assert not isinstance(after, Mapping)
    some = after or before
    assert some is not None
    found = {some.key}
    if some.key.kind == "Pipeline":
        return found | _rivals(cache, some, before, after)
    if _shown_to_others(before) == _shown_to_others(after):
        return found
    for owned in cache.owned_by(some.key):
        # The state of a bus reaches subscriptions directly: their topics may show no change.
        found |= {owned.key, *(each.key for each in cache.owned_by(owned.key))}
    if some.owner is None:
        return found
    for each in (before, after):
        if each is not None:
            found |= {other.key for other in cache.claimants(each)}
            found |= {other.key for other in cache.forwarders_to(each)}
    owner = cache.get(some.owner)
    if owner is not None and owner.is_deleting:
        found.add(owner.key)
    return found


def _rivals(
    cache: Cache, some: Resource, before: Resource | None, after: Resource | None
) -> set[Key]:
    """Return the pipelines that may wait for a reader group or a folder of the changed one."""
    if before is not None and after is not None:
        shown = [(each.uid, each.generation, each.is_deleting) for each in (before, after)]
        if shown[0] == shown[1]:
            return set()
    return {
        each.key
        for each in cache.of_kind("Pipeline")
        if each.owner == some.owner or each.key.namespace == some.key.namespace
    }


def _shown_to_others(resource: Resource | None) -> tuple[Any, ...]:
    """Return what other resources depend on."""
    if resource is None:
        return ()
    shown = (resource.uid, resource.is_deleting, resource.entity_name, _readiness(resource))
    spec, status = resource.spec, resource.status
    if resource.key.kind != "Namespace":
        return (*shown, status.get("entityId"))
    operator_spec = spec.get("operatorSpec") or {}
    return (
        *shown,
        status.get("serviceBusEndpoint"),
        *(spec.get(name) for name in BUS_FIELDS),
        *(operator_spec.get(name) for name in BUS_OPERATOR_FIELDS),
    )


def _readiness(resource: Resource) -> tuple[Any, ...]:
    return tuple(
        (each.get("status"), each.get("reason"))
        for each in resource.status.get("conditions", ())
        if each.get("type") == "Ready"
    )


def _of_cluster_namespace(cache: Cache, change: Change) -> set[Key]:
    """Return the resources in a namespace whose labels changed: a bus selects by them."""
    if _labels(change.before) == _labels(change.after):
        return set()
    return {key for key in cache.all_keys() if key.namespace == change.key.name}


def _of_child(cache: Cache, change: Change, child_name: ChildName) -> set[Key]:
    """Return the owner of a child, and the bus that its label names."""
    found = set()
    for each in (change.before, change.after):
        assert not isinstance(each, Resource)
        if each is None:
            continue
        found |= owners_of(each)
        label = bus_label(each)
        if label is not None:
            found |= {
                bus.key
                for bus in cache.of_kind("Namespace")
                if bus.key.namespace == change.key.namespace and child_name(bus.key.name) == label
            }
    return {key for key in found if cache.get(key) is not None}


def _labels(found: object) -> Any:
    return found["metadata"].get("labels") if isinstance(found, Mapping) else None


def _data(found: object) -> Any:
    return found.get("data") if isinstance(found, Mapping) else None
