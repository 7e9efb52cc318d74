"""What the watches and the operator's own writes have shown: resources, children, namespaces.

Everything that a reconcile looks up without asking the API server. Fed by `observe` and `forget`
only; an older version of an object than the one here is ignored, since the answer to a write comes
before the event of the write before it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final, NamedTuple

from postbus.contract.entities import subscription_path
from postbus_operator.annotations import BUS_LABEL, RESOURCE
from postbus_operator.crds import GROUP
from postbus_operator.kube.resource_types import (
    CHILDREN,
    CLUSTER_NAMESPACES,
    RESOURCES,
    SECRETS,
    ResourceType,
    type_of,
)
from postbus_operator.kube.slimming import CERTIFICATE_END, Sharing, slim
from postbus_operator.objects import Key, Resource

MAX_GONE: Final = 10_000
"""Deleted objects whose version is remembered, so that a late answer does not bring them back."""

FORWARDS: Final = ("forwardTo", "forwardDeadLetteredMessagesTo")


class ObjectKey(NamedTuple):
    """The identity of any object; `namespace` is empty for one of the cluster."""

    type: ResourceType
    namespace: str
    name: str


class Change(NamedTuple):
    """A difference that an object's version made; None: it was not there, or it is gone."""

    key: ObjectKey
    before: Resource | Mapping[str, Any] | None
    after: Resource | Mapping[str, Any] | None


class Cache:
    """Objects by name, and the indexes that reconciles ask."""

    def __init__(self) -> None:
        self._resources: dict[Key, Resource] = {}
        self._others: dict[ObjectKey, Mapping[str, Any]] = {}
        self._gone: dict[ObjectKey, int] = {}
        self._by_kind: dict[str, dict[Key, Resource]] = {kind: {} for kind in RESOURCES}
        self._by_owner: defaultdict[Key, set[Key]] = defaultdict(set)
        self._by_name: defaultdict[tuple[Key, str], set[Key]] = defaultdict(set)
        self._by_target: defaultdict[str, set[Key]] = defaultdict(set)
        self._by_secret: defaultdict[tuple[str, str], set[Key]] = defaultdict(set)
        self._children: defaultdict[tuple[str, str], set[ObjectKey]] = defaultdict(set)
        self._owned_secrets: defaultdict[Key, set[ObjectKey]] = defaultdict(set)
        self._sharing = Sharing()

    # --- feeding ------------------------------------------------------------------------------

    def observe(self, found: Mapping[str, Any]) -> Change | None:
        """Keep an object's JSON; None: it was known, or it is of a type that nobody needs."""
        key = _object_key(found)
        if key is None or _version(found) <= self._version_of(key):
            return None
        shared = self._sharing.share(slim(found))
        kind = _resource_kind(key.type)
        if kind is None:
            before = self._others.get(key)
            self._others[key] = shared
            self._index_child(key, before, shared)
            return Change(key, before, shared)
        resource = Resource.from_object(kind, shared)
        known = self._resources.get(resource.key)
        self._unindex(known)
        self._index(resource)
        return Change(key, known, resource)

    def forget(self, found: Mapping[str, Any]) -> Change | None:
        """Drop an object that is deleted; None: it was not here, or it exists again."""
        key = _object_key(found)
        return None if key is None else self.drop(key, _version(found))

    def drop(self, key: ObjectKey, version: int) -> Change | None:
        """Drop an object unless it is newer than `version`, the one of its deletion."""
        if self._version_of(key) > version:
            return None
        self._gone[key] = version
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        kind = _resource_kind(key.type)
        if kind is None:
            other = self._others.pop(key, None)
            self._index_child(key, other, None)
            return None if other is None else Change(key, other, None)
        known = self._resources.get(Key(kind, key.namespace, key.name))
        self._unindex(known)
        return None if known is None else Change(key, known, None)

    def keys_of(self, type: ResourceType, namespace: str | None) -> list[ObjectKey]:
        """Return the objects of a type, in one namespace or in all."""
        kind = _resource_kind(type)
        if kind is None:
            found = [each for each in self._others if each.type is type]
        else:
            found = [ObjectKey(type, each.namespace, each.name) for each in self._by_kind[kind]]
        return [each for each in found if namespace is None or each.namespace == namespace]

    # --- resources ----------------------------------------------------------------------------

    def get(self, key: Key) -> Resource | None:
        """Return a resource."""
        return self._resources.get(key)

    def of_kind(self, kind: str) -> list[Resource]:
        """Return all resources of a kind."""
        return list(self._by_kind[kind].values())

    def count(self, kind: str) -> int:
        """Return the number of resources of a kind."""
        return len(self._by_kind[kind])

    def all(self) -> list[Resource]:
        """Return all resources."""
        return list(self._resources.values())

    def all_keys(self) -> list[Key]:
        """Return the keys of all resources."""
        return list(self._resources)

    def owned_by(self, owner: Key) -> list[Resource]:
        """Return the resources whose `spec.owner` names another one: of a bus, of a topic."""
        return self._sorted(self._by_owner.get(owner, ()))

    def bus_of(self, resource: Resource) -> Key | None:
        """Return the Namespace that a resource belongs to; None: its topic is not there."""
        if resource.key.kind == "Namespace":
            return resource.key
        owner = resource.owner
        if owner is None or owner.kind == "Namespace":
            return owner
        topic = self._resources.get(owner)
        return None if topic is None else topic.owner

    def claimants(self, resource: Resource) -> list[Resource]:
        """Return the resources that stand for the same entity, this one included: oldest first.

        Queues and topics share their names; a name is the same in upper and lower case.
        """
        if resource.owner is None or not _has_entity(resource):
            return [resource]
        keys = self._by_name.get((resource.owner, resource.entity_name.lower()), set())
        found = [self._resources[key] for key in keys - {resource.key}]
        return sorted((resource, *found), key=lambda each: (each.created_at, each.key))

    def forwarders_to(self, resource: Resource) -> list[Resource]:
        """Return the resources of the same bus that use the entity of this one, as `forwarding_to`
        does.
        """
        bus = self.bus_of(resource)
        found = self._sorted(self._by_target.get(resource.entity_name.lower(), ()))
        return [each for each in found if self.bus_of(each) == bus and each.key != resource.key]

    def referencing_secret(self, namespace: str, name: str) -> list[Resource]:
        """Return the resources whose spec names a Secret, to be read or to be written."""
        return self._sorted(self._by_secret.get((namespace, name), ()))

    def named(self, owner: Key, name: str) -> list[Resource]:
        """Return the resources of an owner that stand for the entity of a name."""
        return self._sorted(self._by_name.get((owner, name.lower()), ()))

    def forwarding_to(self, bus: Key, name: str) -> list[Resource]:
        """Return the resources of a bus that forward to an entity, and pipelines that use it.

        `name` of a subscription is its path.
        """
        found = self._sorted(self._by_target.get(name.lower(), ()))
        return [each for each in found if self.bus_of(each) == bus]

    # --- other objects ------------------------------------------------------------------------

    def find(self, type: ResourceType, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return a child, a Secret with digests for values, or a namespace of the cluster."""
        return self._others.get(ObjectKey(type, namespace, name))

    def children_of(self, namespace: str, bus: str) -> list[Mapping[str, Any]]:
        """Return the objects in a namespace whose label `postbus.dev/bus` has a value."""
        keys = self._children.get((namespace, bus), ())
        ordered = sorted(keys, key=lambda each: (each.type.plural, each.name))
        return [self._others[key] for key in ordered]

    def secrets_owned_by(self, owner: Key) -> list[Mapping[str, Any]]:
        """Return the Secrets that are of a resource, or of a former one with its name."""
        return [self._others[key] for key in sorted(self._owned_secrets.get(owner, ()))]

    def certificate_ends(self) -> dict[tuple[str, str], float]:
        """Return the ends of certificates, seconds since 1970, by namespace and Secret."""
        return {
            (key.namespace, key.name): found[CERTIFICATE_END]
            for key, found in self._others.items()
            if CERTIFICATE_END in found
        }

    def labels_of_namespace(self, name: str) -> Mapping[str, str]:
        """Return the labels of a namespace of the cluster; none if it is not watched."""
        found = self.find(CLUSTER_NAMESPACES, "", name)
        return {} if found is None else found["metadata"].get("labels", {})

    # --- indexes ------------------------------------------------------------------------------

    def _version_of(self, key: ObjectKey) -> int:
        gone = self._gone.get(key, -1)
        kind = _resource_kind(key.type)
        if kind is None:
            other = self._others.get(key)
            return gone if other is None else max(gone, _version(other))
        known = self._resources.get(Key(kind, key.namespace, key.name))
        return gone if known is None else max(gone, int(known.resource_version))

    def _index(self, resource: Resource) -> None:
        key = resource.key
        self._resources[key] = resource
        self._by_kind[key.kind][key] = resource
        if resource.owner is not None:
            self._by_owner[resource.owner].add(key)
            if _has_entity(resource):
                self._by_name[resource.owner, resource.entity_name.lower()].add(key)
        for target in _targets(resource):
            self._by_target[target].add(key)
        for secret in secrets_of(resource):
            self._by_secret[key.namespace, secret].add(key)

    def _unindex(self, resource: Resource | None) -> None:
        if resource is None:
            return
        key = resource.key
        del self._resources[key], self._by_kind[key.kind][key]
        if resource.owner is not None:
            _discard(self._by_owner, resource.owner, key)
            if _has_entity(resource):
                _discard(self._by_name, (resource.owner, resource.entity_name.lower()), key)
        for target in _targets(resource):
            _discard(self._by_target, target, key)
        for secret in secrets_of(resource):
            _discard(self._by_secret, (key.namespace, secret), key)

    def _index_child(
        self, key: ObjectKey, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
    ) -> None:
        if key.type is SECRETS:
            for owner in owners_of(before):
                _discard(self._owned_secrets, owner, key)
            for owner in owners_of(after):
                self._owned_secrets[owner].add(key)
        old, new = bus_label(before), bus_label(after)
        if old is not None and old != new:
            _discard(self._children, (key.namespace, old), key)
        if new is not None:
            self._children[key.namespace, new].add(key)

    def _sorted(self, keys: Set[Key] | tuple[()]) -> list[Resource]:
        return [self._resources[key] for key in sorted(keys)]


def secrets_of(resource: Resource) -> set[str]:
    """Return the Secrets that the spec names, whatever for."""
    parts = (resource.spec.get("operatorSpec"), resource.spec.get("authorizationRules"))
    return {name for part in parts for name in _secret_names(part)}


def bus_label(found: Mapping[str, Any] | None) -> str | None:
    """Return the bus that a child belongs to, as its label says."""
    labels = {} if found is None else found["metadata"].get("labels") or {}
    label: str | None = labels.get(BUS_LABEL)
    return label


def owners_of(found: Mapping[str, Any] | None) -> set[Key]:
    """Return the resources that an object's owner references name, or its annotation."""
    metadata = {} if found is None else found["metadata"]
    owners = {
        Key(each["kind"], metadata["namespace"], each["name"])
        for each in metadata.get("ownerReferences") or ()
        if each["apiVersion"].partition("/")[0] == GROUP and each["kind"] in RESOURCES
    }
    named = (metadata.get("annotations") or {}).get(RESOURCE, "").split("/")
    if len(named) == 3 and named[0] in RESOURCES and named[1] == metadata["namespace"]:
        owners.add(Key(*named))  # not on a copy in another namespace
    return owners


def _secret_names(value: Any, field: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        is_reference = field.lower().endswith("secretref") or field == "secrets"
        for name, each in value.items():
            if name == "secretName" or (name == "name" and is_reference):
                yield each
            else:
                yield from _secret_names(each, "secrets" if field == "secrets" else name)
    elif isinstance(value, list):
        for each in value:
            yield from _secret_names(each, field)


def _has_entity(resource: Resource) -> bool:
    """Return whether the resource stands for an entity; a pipeline only uses some."""
    return resource.key.kind != "Pipeline"


def _targets(resource: Resource) -> set[str]:
    if resource.key.kind == "Pipeline":
        return {path.lower() for path in entities_of(resource)}
    return {resource.spec[name].lower() for name in FORWARDS if resource.spec.get(name)}


def entities_of(pipeline: Resource) -> list[str]:
    """Return the paths of the entities that a pipeline reads and writes: its source first."""
    parts = [*pipeline.spec.get("sources", ()), *pipeline.spec.get("sinks", ())]
    found = [
        subscription_path(each["topic"], each["subscription"])
        if "subscription" in each
        else each.get("queue") or each.get("topic")
        for each in parts
    ]
    return list(dict.fromkeys(path for path in found if path))


def _discard(index: defaultdict[Any, set[Any]], name: Any, key: Any) -> None:
    index[name].discard(key)
    if not index[name]:
        del index[name]


def _object_key(found: Mapping[str, Any]) -> ObjectKey | None:
    try:
        type = type_of(found)
    except KeyError:
        return None
    if type not in _KEPT:
        return None
    metadata = found["metadata"]
    return ObjectKey(type, sys.intern(metadata.get("namespace", "")), sys.intern(metadata["name"]))


def _resource_kind(type: ResourceType) -> str | None:
    return type.kind if RESOURCES.get(type.kind) is type else None


def _version(found: Mapping[str, Any]) -> int:
    """Return the version of an object; the API server counts them in one row for all objects."""
    return int(found["metadata"]["resourceVersion"])


_KEPT: Final = frozenset({*RESOURCES.values(), *CHILDREN, CLUSTER_NAMESPACES})
