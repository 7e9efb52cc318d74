"""Definitions as manifests, which `export` writes and `diff` compares.

Defaults of the namespace's tier are left out. `reader` reads the result back to the same
definitions; a test compares both directions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from postbus.cli.formats.output import as_yaml
from postbus.contract.checks import complete
from postbus.contract.entities import (
    EntityProperties,
    Model,
    NamespaceLimits,
    NamespaceProperties,
    QueueProperties,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.contract.namespace import SoftDelete
from postbus.contract.resources import API_VERSION
from postbus.manifests.reader import (
    BusDefinition,
    QueueDefinition,
    RuleDefinition,
    SubscriptionDefinition,
    TopicDefinition,
)

Entity = QueueDefinition | TopicDefinition | SubscriptionDefinition
Manifest = dict[str, Any]
MAX_NAME: Final = 253
NO_RESOURCE: Final = re.compile(r"[^a-z0-9.-]+")
_KEEP: Final = {"rules", "authorization_rules"}


class ManifestWriter:
    """Writer of the manifests of one bus; resource names are unique within it."""

    def __init__(self, bus_name: str, limits: NamespaceLimits) -> None:
        self._limits = limits
        self.bus = resource_name(bus_name)
        self._bus_name = bus_name
        self.secrets: list[Manifest] = []
        """Secrets of rules with known keys."""
        self._taken: dict[str, dict[str, str]] = {}

    def namespace(
        self,
        properties: NamespaceProperties,
        rules: Sequence[RuleDefinition],
        deleted_retention_ms: int | None = None,
    ) -> Manifest:
        """Return the manifest of the namespace; its keys, if known, are added to `secrets`."""
        spec = _said(properties, NamespaceProperties())
        if deleted_retention_ms not in {None, SoftDelete().retention_ms}:
            kept = SoftDelete.model_construct(retention_ms=deleted_retention_ms)
            spec["operatorSpec"] = {"softDelete": kept.model_dump(by_alias=True, mode="json")}
        if "sku" in spec:
            spec["sku"] = {"name": properties.sku.name.value, **spec["sku"]}
        return self._manifest(
            "Namespace", self.bus, self._bus_name, spec | self._rules(self.bus, rules)
        )

    def entity(self, entity: Entity) -> Manifest:
        """Return the manifest of an entity."""
        properties = entity.properties
        spec = _said(properties, _plain(properties, self._limits))
        retention = spec.pop("historyRetention", None)
        if retention is not None:
            spec["operatorSpec"] = {"history": {"retention": retention}}
        match entity:
            case QueueDefinition(name, _, rules):
                resource = self._unique("Queue", name)
                owner = {"owner": {"name": self.bus}}
                return self._manifest(
                    "Queue", resource, name, owner | spec | self._rules(resource, rules)
                )
            case TopicDefinition(name, _, rules):
                resource = self._unique("Topic", name)
                owner = {"owner": {"name": self.bus}}
                return self._manifest(
                    "Topic", resource, name, owner | spec | self._rules(resource, rules)
                )
            case SubscriptionDefinition(topic, name, _, filters):
                owner = {"owner": {"name": self._unique("Topic", topic)}}
                if filters is not None:
                    spec["rules"] = [_rule(each) for each in filters]
                resource = self._unique("Subscription", f"{topic}.{name}")
                return self._manifest("Subscription", resource, name, owner | spec)

    def _unique(self, kind: str, name: str) -> str:
        """Return the resource name of an entity; the same for the same name."""
        taken = self._taken.setdefault(kind, {})
        wanted = candidate = resource_name(name)
        number = 1
        while taken.setdefault(candidate, name.lower()) != name.lower():
            number += 1
            candidate = f"{wanted[: MAX_NAME - 6]}-{number}"
        return candidate

    def _rules(self, owner: str, rules: Sequence[RuleDefinition]) -> dict[str, Any]:
        said = []
        for rule in rules:
            rights = [right.value for right in _shortest(rule)]
            said.append({"name": rule.name, "rights": rights})
            if rule.keys is not None:
                secret = self._unique("Secret", f"{owner}-{rule.name}")
                keys = {"primaryKey": rule.keys.primary, "secondaryKey": rule.keys.secondary}
                self.secrets.append(
                    {
                        "apiVersion": "v1",
                        "kind": "Secret",
                        "metadata": {"name": secret},
                        "stringData": {key: each for key, each in keys.items() if each is not None},
                    }
                )
                said[-1]["secretName"] = secret
        return {"authorizationRules": said} if said else {}

    @staticmethod
    def _manifest(kind: str, resource: str, name: str, spec: Mapping[str, Any]) -> Manifest:
        named = {} if resource == name else {"entityName": name}
        return {
            "apiVersion": API_VERSION,
            "kind": kind,
            "metadata": {"name": resource},
            "spec": {**named, **spec},
        }


def resource_name(name: str) -> str:
    """Return a valid Kubernetes name: lower case, hyphens for characters that are not allowed."""
    text = NO_RESOURCE.sub("-", name.lower()).strip(".-")[:MAX_NAME].strip(".-")
    return text or "unnamed"


def manifests_of(definition: BusDefinition) -> Iterator[Manifest]:
    """Yield the manifests of a bus: namespace, queues, topics with subscriptions, known keys."""
    writer = ManifestWriter(definition.name, definition.properties.new_limits)
    yield writer.namespace(definition.properties, definition.rules, definition.deleted_retention_ms)
    for queue in definition.queues:
        yield writer.entity(queue)
    for topic in definition.topics:
        yield writer.entity(topic)
        for each in definition.subscriptions:
            if each.topic.lower() == topic.name.lower():
                yield writer.entity(each)
    yield from writer.secrets


def difference(before: Manifest | None, after: Manifest | None, name: str) -> list[str]:
    """Return the unified diff of two manifests, empty when they are equal."""
    old = [] if before is None else as_yaml(before).splitlines()
    new = [] if after is None else as_yaml(after).splitlines()
    return list(difflib.unified_diff(old, new, f"bus/{name}", f"manifests/{name}", lineterm=""))


def _plain(properties: EntityProperties, limits: NamespaceLimits) -> EntityProperties:
    match properties:
        case QueueProperties():
            return complete(QueueProperties(), limits)
        case TopicProperties():
            return complete(TopicProperties(), limits)
        case SubscriptionProperties():
            return complete(SubscriptionProperties(), limits)


def _said(properties: Model, plain: Model) -> dict[str, Any]:
    """Return the fields that differ from the defaults, in order."""
    said = properties.model_dump(mode="json", by_alias=True, exclude=_KEEP)
    defaults = plain.model_dump(mode="json", by_alias=True, exclude=_KEEP)
    return {key: _sparse(value) for key, value in said.items() if value != defaults[key]}


def _sparse(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sparse(each) for key, each in value.items() if each is not None}
    return value


def _rule(rule: RuleProperties) -> dict[str, Any]:
    said: dict[str, Any] = rule.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if rule.filter_type is not None:
        del said["sqlFilter"]  # the type says it
    return said


def _shortest(rule: RuleDefinition) -> list[Any]:
    from postbus.contract.entities import Right

    if Right.MANAGE in rule.rights:
        return [Right.MANAGE]
    return [right for right in Right if right in rule.rights]
