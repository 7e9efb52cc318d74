"""Definitions that the operator puts, made from specs, and their comparison with those of a bus.

The API server writes defaults out. What equals a default is left out, because the broker completes
a definition by its tier: a written time to live of "for ever" is refused in Basic, silence is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from postbus.contract.control import (
    EntityFacts,
    QueueDescription,
    SubscriptionDefinition,
    SubscriptionDescription,
    TopicDescription,
)
from postbus.contract.entities import QueueProperties, TopicProperties, subscription_path
from postbus_operator.bus.entity_paths import EntityPath
from postbus_operator.crdgen import schema_of
from postbus_operator.crds import KINDS
from postbus_operator.objects import Resource
from postbus_operator.outcome import SpecInvalid

FORWARDS: Final = ("forwardTo", "forwardDeadLetteredMessagesTo")

OF_THE_OPERATOR: Final = frozenset({
    "owner", "entityName", "authorizationRules", "operatorSpec", "isClientAffine",
    "clientAffineProperties",
})  # fmt: skip
"""Fields that are not part of the definition: keys have calls of their own."""

WITHOUT_MEANING: Final = {"Subscription": frozenset({"duplicateDetectionHistoryTimeWindow"})}
"""Fields of Azure's templates that the control API does not have."""

OF_THE_TIER: Final = frozenset({
    "default_message_ttl_ms", "max_message_size_in_kilobytes", "enable_partitioning",
})  # fmt: skip
"""Fields that the broker completes; without a value in the spec, any value is right."""

MODELS: Final[dict[str, type[BaseModel]]] = {
    "queue": QueueProperties,
    "topic": TopicProperties,
    "subscription": SubscriptionDefinition,
}


@cache
def schema_defaults(kind: str) -> Mapping[str, Any]:
    """Return the defaults that the API server writes into the spec of a kind."""
    [found] = [each for each in KINDS if each.name == kind]
    fields = schema_of(found)["properties"]["spec"]["properties"]
    return {name: field["default"] for name, field in fields.items() if "default" in field}


def path_of(resource: Resource, topic: str = "") -> EntityPath:
    """Return the entity of a resource; `topic` is the name of a Subscription's one."""
    match resource.key.kind:
        case "Queue":
            return EntityPath("queue", resource.entity_name)
        case "Topic":
            return EntityPath("topic", resource.entity_name)
        case _:
            return EntityPath("subscription", subscription_path(topic, resource.entity_name))


def definition_of(resource: Resource) -> dict[str, Any]:
    """Return the body of a PUT."""
    kind = resource.key.kind
    defaults = schema_defaults(kind)
    left_out = OF_THE_OPERATOR | WITHOUT_MEANING.get(kind, frozenset())
    body = {
        name: value
        for name, value in resource.spec.items()
        if name not in left_out
        and value is not None
        and (name not in defaults or value != defaults[name])
    }
    history = (resource.spec.get("operatorSpec") or {}).get("history") or {}
    if history.get("retention") is not None:
        body["historyRetention"] = history["retention"]
    return body


def targets_of(resource: Resource) -> dict[str, str]:
    """Return field -> entity that the resource forwards to."""
    return {name: resource.spec[name] for name in FORWARDS if resource.spec.get(name)}


def differences(path: EntityPath, body: Mapping[str, Any], found: EntityFacts) -> list[str]:
    """Return the fields in which a definition on the bus is not the wanted one, for people."""
    try:
        wanted = MODELS[path.kind].model_validate_json(json.dumps(body))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise SpecInvalid("InvalidSpec", f"{field}: {first['msg']}") from error
    assert isinstance(found, QueueDescription | TopicDescription | SubscriptionDescription)
    shown_wanted, shown_found = _shown(wanted), _shown(found.properties)
    compared = set(type(wanted).model_fields) - (OF_THE_TIER - wanted.model_fields_set)
    if "rules" not in body:
        compared -= {"rules"}
    aliases = {
        name: field.alias or name
        for name, field in type(wanted).model_fields.items()
        if name in compared
    }
    return [
        f"{alias} is {_brief(shown_found.get(alias))}, wanted {_brief(shown_wanted.get(alias))}"
        for alias in sorted(aliases.values())
        if shown_wanted.get(alias) != shown_found.get(alias)
    ]


def _shown(model: BaseModel) -> dict[str, Any]:
    shown: dict[str, Any] = model.model_dump(mode="json", by_alias=True)
    if shown.get("rules") is not None:
        shown["rules"] = {each["name"].lower(): each for each in shown["rules"]}
    return shown


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return f"{len(value)} rules: {', '.join(sorted(value))}"[:200]
    return "not set" if value is None else json.dumps(value)[:200].strip('"')
