"""Contents of the Secrets that applications connect with.

One Secret for each authorization rule serves people and the Service Binding specification: it has
that specification's keys beside connection strings. `operatorSpec.secrets` adds Secrets with names
and keys that the user chooses, for the first rule.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from postbus.contract.entities import ROOT_RULE_NAME
from postbus.contract.operator_spec import ExportedSecrets
from postbus_operator.annotations import COMPONENT_LABEL, MANAGED_BY_LABEL, RESOURCE
from postbus_operator.conditions import timestamp
from postbus_operator.crds import GROUP, VERSION
from postbus_operator.finalizers import is_left
from postbus_operator.keys.rules import KeyPair, Problem, Side, visible
from postbus_operator.names import pipeline_name
from postbus_operator.objects import Key, Resource

BINDING_TYPE: Final = "servicebinding.io/postbus"
COMPONENT: Final = "keys"
RULE_ANNOTATION: Final = "postbus.dev/authorization-rule"
HIDDEN_ANNOTATION: Final = "postbus.dev/hidden-key"
"""The key that a rotation renews, and that the Secret does not name: `primary`, `secondary`."""

HIDDEN_SINCE_ANNOTATION: Final = "postbus.dev/hidden-since"

PORT: Final = 5671
MAX_NAME: Final = 253
KIND_WORDS: Final = {"Namespace": "bus", "Queue": "queue", "Topic": "topic"}
ROOT_WORD: Final = "root"
NAMES_OF_THE_BUS: Final = re.compile(r"(?:^|-)(?:ca|tls|key|token|stores|auth|pipeline)$")
"""Ends of the names that other Secrets of a bus have (`names.py`)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a bus for clients; `ca` None: an authority that systems know signed it."""

    host: str
    ca: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class RuleKeys:
    """A rule of the bus with its keys. `hidden`: the key that its Secret must not name."""

    name: str
    keys: KeyPair
    hidden: Side | None = None

    @property
    def visible(self) -> KeyPair:
        """The keys as the Secret names them."""
        return visible(self.keys, self.hidden)


@dataclass(frozen=True, slots=True)
class WantedSecret:
    """A Secret as it shall be."""

    name: str
    type: str
    data: Mapping[str, bytes] = field(repr=False)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def manifest(self, owner: Resource) -> dict[str, Any]:
        """Return the object; it goes with its owner, unless what its keys are of stays."""
        metadata = {
            "name": self.name,
            "namespace": owner.key.namespace,
            "labels": labels(),
            "annotations": {RESOURCE: "/".join(owner.key), **self.annotations},
        }
        reference = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": owner.key.kind,
            "name": owner.key.name,
            "uid": owner.uid,
            "controller": True,
        }
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata if is_left(owner) else metadata | {"ownerReferences": [reference]},
            "type": self.type,
            "data": {key: base64.b64encode(value).decode() for key, value in self.data.items()},
        }


def labels() -> dict[str, str]:
    """Return the labels of every Secret with keys."""
    return {
        "app.kubernetes.io/name": "postbus",
        MANAGED_BY_LABEL: "postbus-operator",
        COMPONENT_LABEL: COMPONENT,
    }


# --- names --------------------------------------------------------------------------------------


def secret_name(key: Key, rule: str) -> str:
    """Return the name of a rule's Secret: `orders-queue-worker`, `shop-bus-root`.

    That of a pipeline's only rule is `price-orders-pipeline`.

    What is no name in Kubernetes, or is too long, gets a hash, so that names stay different.
    """
    if key.kind == "Pipeline":
        return pipeline_name(key.name)
    word = ROOT_WORD if rule == ROOT_RULE_NAME else rule
    is_plain = re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", word) is not None
    if not is_plain or rule == ROOT_WORD or NAMES_OF_THE_BUS.search(word):
        parts = re.sub(r"([a-z0-9])([A-Z])", r"\1-\2", rule).lower()
        word = f"{re.sub(r'[^a-z0-9]+', '-', parts)}-{_hash(rule)}"
    name = f"{key.name}-{KIND_WORDS[key.kind]}-{word}"
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9].rstrip('-.')}-{_hash(name)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# --- contents -----------------------------------------------------------------------------------


def wanted_secrets(
    resource: Resource,
    endpoint: Endpoint,
    rules: Sequence[RuleKeys],
    hidden_since: datetime,
) -> tuple[list[WantedSecret], list[Problem]]:
    """Return the Secrets for the rules of a resource, and what is wrong with the chosen ones.

    `hidden_since`: since when the Secrets hide the key that a rotation renews.
    """
    is_of_bus = resource.key.kind in {"Namespace", "Pipeline"}
    entity = None if is_of_bus else resource.entity_name
    found = {}
    for rule in rules:
        name = secret_name(resource.key, rule.name)
        notes = {RULE_ANNOTATION: rule.name, **_notes(rule, hidden_since)}
        found[name] = WantedSecret(name, BINDING_TYPE, _contents(endpoint, entity, rule), notes)
    first = rules[0] if rules else None
    chosen, problem = _chosen(resource, endpoint, entity, first)
    for name, data in chosen.items():
        same = found.get(name)
        if same is None:
            notes = {} if first is None else _notes(first, hidden_since)
            found[name] = WantedSecret(name, "Opaque", data, notes)
        else:
            found[name] = WantedSecret(name, same.type, {**same.data, **data}, same.annotations)
    return list(found.values()), [] if problem is None else [problem]


def _notes(rule: RuleKeys, hidden_since: datetime) -> dict[str, str]:
    if rule.hidden is None:
        return {}
    return {HIDDEN_ANNOTATION: rule.hidden, HIDDEN_SINCE_ANNOTATION: timestamp(hidden_since)}


def hidden_since(secret: Mapping[str, Any], side: str) -> datetime | None:
    """Return since when a Secret has not named a key; None: it names it, or that is unknown."""
    notes = secret["metadata"].get("annotations") or {}
    if notes.get(HIDDEN_ANNOTATION) != side:
        return None
    try:
        return datetime.strptime(notes.get(HIDDEN_SINCE_ANNOTATION, ""), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None


def connection_string(endpoint: Endpoint, entity: str | None, rule: str, key: str) -> str:
    """Return a connection string of Service Bus; `entity` None: of the namespace."""
    text = f"Endpoint=sb://{endpoint.host}/;SharedAccessKeyName={rule};SharedAccessKey={key}"
    return text if entity is None else f"{text};EntityPath={entity}"


def _contents(endpoint: Endpoint, entity: str | None, rule: RuleKeys) -> dict[str, bytes]:
    primary = rule.visible.primary
    account = f"{quote(rule.name, safe='')}:{quote(primary, safe='')}"
    texts = {
        "type": "postbus",
        "provider": "postbus",
        "host": endpoint.host,
        "port": str(PORT),
        "uri": f"amqps://{account}@{endpoint.host}:{PORT}/{quote(entity or '')}",
        "username": rule.name,
        "password": primary,
        "connectionString": connection_string(endpoint, entity, rule.name, primary),
        **_variants(endpoint, entity, rule),
    }
    if entity is not None:
        texts["entityPath"] = entity
    data = {key: text.encode() for key, text in texts.items()}
    if endpoint.ca is not None:
        data["ca.crt"] = endpoint.ca
    return data


def _variants(endpoint: Endpoint, entity: str | None, rule: RuleKeys) -> dict[str, str]:
    """Return the values that `operatorSpec.secrets` can export, by their names there."""
    primary, secondary = rule.visible.primary, rule.visible.secondary
    return {
        "endpoint": f"sb://{endpoint.host}/",
        "primaryKey": primary,
        "secondaryKey": secondary,
        "primaryConnectionString": connection_string(endpoint, entity, rule.name, primary),
        "secondaryConnectionString": connection_string(endpoint, entity, rule.name, secondary),
    }


def chosen_names(resource: Resource) -> set[str]:
    """Return the names of the Secrets that `operatorSpec.secrets` names."""
    spec = resource.spec.get("operatorSpec", {}).get("secrets") or {}
    return {reference["name"] for reference in spec.values()}


def _chosen(
    resource: Resource, endpoint: Endpoint, entity: str | None, first: RuleKeys | None
) -> tuple[dict[str, dict[str, bytes]], Problem | None]:
    """Return the data of the Secrets that the user has named, by name."""
    spec = resource.spec.get("operatorSpec", {}).get("secrets")
    if spec is None:
        return {}, None
    exported = ExportedSecrets.model_validate(spec)
    values = {"endpoint": f"sb://{endpoint.host}/"}
    if first is not None:
        values = _variants(endpoint, entity, first)
    data: dict[str, dict[str, bytes]] = {}
    missing = []
    for name, info in ExportedSecrets.model_fields.items():
        reference = getattr(exported, name)
        if reference is None:
            continue
        field_name = info.alias or name
        if field_name in values:
            data.setdefault(reference.name, {})[reference.key] = values[field_name].encode()
        else:
            missing.append(field_name)
    if not missing:
        return data, None
    return data, Problem(
        "SourceMissing",
        f"operatorSpec.secrets names {', '.join(missing)}, and there is no rule whose keys they"
        " are: add one to authorizationRules",
    )
