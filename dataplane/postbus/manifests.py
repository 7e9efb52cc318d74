"""Reads the YAML that Kubernetes would take, for a bus that runs without Kubernetes.

Kinds: Namespace and Queue of `postbus.dev/v1alpha1`, and the core Secret that holds keys. The
command line calls it once at start. It only reads files; it must never guess: every field is
checked, and every complaint names file, line and field. All complaints are collected, so that one
run shows them all.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from postbus.contract import (
    AuthorizationRule,
    Model,
    NamespaceProperties,
    QueueProperties,
    Right,
    Rules,
    check_entity_name,
    check_namespace_name,
    complete_queue,
    queue_problems,
)
from postbus.yaml_documents import Document, ManifestError, Problem, files_of, read_documents

API_VERSION: Final = "postbus.dev/v1alpha1"


@dataclass(frozen=True, slots=True)
class RuleKeys:
    """The keys of a rule as text; either signs."""

    primary: str = field(repr=False)
    secondary: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RuleDefinition:
    """A rule and its keys, None where the bus is to make them."""

    name: str
    rights: frozenset[Right]
    keys: RuleKeys | None


@dataclass(frozen=True, slots=True)
class QueueDefinition:
    """A queue as it shall be, with the defaults of its namespace's tier."""

    name: str
    properties: QueueProperties
    rules: tuple[RuleDefinition, ...]


@dataclass(frozen=True, slots=True)
class BusDefinition:
    """A bus namespace with everything that belongs to it."""

    name: str
    properties: NamespaceProperties
    rules: tuple[RuleDefinition, ...]
    queues: tuple[QueueDefinition, ...]


# --- documents as written -----------------------------------------------------------------------


class Metadata(Model):
    """The part of Kubernetes' metadata that means something here; the rest is let through."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
    namespace: str = Field("default", min_length=1, max_length=63)


class AllowedNamespaces(Model):
    """Which cluster namespaces may hold entities of the bus."""

    source: Literal["Same", "All", "Selector"] = Field("Same", alias="from")
    selector: dict[str, Any] | None = None


class NamespaceOperatorSpec(Model):
    """For the operator. Without it only `allowedNamespaces` means something."""

    allowed_namespaces: AllowedNamespaces = Field(AllowedNamespaces(), alias="allowedNamespaces")
    image: Any = None
    brokers: int | None = Field(None, ge=1)
    resources: Any = None
    storage: Any = None
    pod_template: Any = Field(None, alias="podTemplate")
    tls: Any = None
    network_policy: Any = Field(None, alias="networkPolicy")
    pod_disruption_budget: Any = Field(None, alias="podDisruptionBudget")
    soft_delete: Any = Field(None, alias="softDelete")
    deletion_policy: Literal["Delete", "DeleteIfEmpty", "Retain"] | None = Field(
        None, alias="deletionPolicy"
    )
    deletion_protection: bool = Field(False, alias="deletionProtection")
    reconcile_policy: Literal["Manage", "Observe", "DetachOnDelete"] | None = Field(
        None, alias="reconcilePolicy"
    )
    upgrade_strategy: Any = Field(None, alias="upgradeStrategy")
    secrets: Any = None


class QueueOperatorSpec(Model):
    """For the operator; a bus without one checks the words and goes on."""

    deletion_policy: Literal["Delete", "DeleteIfEmpty", "Retain"] | None = Field(
        None, alias="deletionPolicy"
    )
    deletion_protection: bool = Field(False, alias="deletionProtection")
    reconcile_policy: Literal["Manage", "Observe", "DetachOnDelete"] | None = Field(
        None, alias="reconcilePolicy"
    )
    on_auto_delete: Literal["KeepResource", "Recreate", "DeleteResource"] | None = Field(
        None, alias="onAutoDelete"
    )
    adopt: Literal["IfMatching", "Always", "Never"] | None = None
    secrets: Any = None


class Owner(Model):
    """The bus namespace a queue belongs to; its cluster namespace defaults to the queue's."""

    name: str = Field(min_length=1)
    namespace: str | None = Field(None, min_length=1)


class NamespaceSpec(NamespaceProperties):
    """`spec` of kind Namespace."""

    entity_name: Annotated[str, AfterValidator(check_namespace_name)] | None = Field(
        None, alias="entityName"
    )
    operator_spec: NamespaceOperatorSpec = Field(NamespaceOperatorSpec(), alias="operatorSpec")


class QueueSpec(QueueProperties):
    """`spec` of kind Queue."""

    owner: Owner
    entity_name: Annotated[str, AfterValidator(check_entity_name)] | None = Field(
        None, alias="entityName"
    )
    authorization_rules: Rules = Field((), alias="authorizationRules")
    operator_spec: QueueOperatorSpec = Field(QueueOperatorSpec(), alias="operatorSpec")


class NamespaceDocument(Model):
    """A whole document of kind Namespace."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Namespace"]
    metadata: Metadata
    spec: NamespaceSpec


class QueueDocument(Model):
    """A whole document of kind Queue."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Queue"]
    metadata: Metadata
    spec: QueueSpec


class SecretDocument(Model):
    """A whole document of kind Secret: `stringData` wins over `data`, as in Kubernetes."""

    api_version: Literal["v1"] = Field(alias="apiVersion")
    kind: Literal["Secret"]
    metadata: Metadata
    type: str = "Opaque"
    immutable: bool = False
    data: dict[str, str] = Field(default_factory=dict)
    string_data: dict[str, str] = Field(default_factory=dict, alias="stringData")


MODELS: Final[dict[tuple[str, str], type[Model]]] = {
    (API_VERSION, "Namespace"): NamespaceDocument,
    (API_VERSION, "Queue"): QueueDocument,
    ("v1", "Secret"): SecretDocument,
}
LATER: Final = {(API_VERSION, "Topic"), (API_VERSION, "Subscription")}


# --- checking -----------------------------------------------------------------------------------

M = TypeVar("M", bound=Model)


def _explain(error: Any, model: type[Model]) -> str:
    """Return one sentence for an error of pydantic."""
    kind = error["type"]
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(error["loc"][-1]), _field_names(model), 1)
        return "unknown field" + (f"; did you mean {close[0]}?" if close else "")
    if kind == "missing":
        return "this field is required"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:] if kind != "value_error" else message


def _field_names(model: type[Model]) -> list[str]:
    names = []
    for name, info in model.model_fields.items():
        names.append(info.alias or name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, Model):
            names += _field_names(info.annotation)
    return names


@dataclass(slots=True)
class _Read:
    """Everything read so far, by cluster namespace and resource name."""

    problems: list[Problem] = field(default_factory=list)
    namespaces: dict[tuple[str, str], tuple[Document, NamespaceDocument]] = field(
        default_factory=dict
    )
    queues: dict[tuple[str, str], tuple[Document, QueueDocument]] = field(default_factory=dict)
    secrets: dict[tuple[str, str], tuple[Document, SecretDocument]] = field(default_factory=dict)

    def add(self, document: Document) -> None:
        """Check one document on its own and file it."""
        value = document.value
        if not isinstance(value, dict):
            self.problems.append(document.problem((), "a document must be a mapping"))
            return
        kind = (str(value.get("apiVersion")), str(value.get("kind")))
        model = MODELS.get(kind)
        if model is None:
            self.problems.append(document.problem(("kind",), _wrong_kind(*kind)))
            return
        try:
            parsed = model.model_validate_json(json.dumps(value), strict=True)
        except ValidationError as failure:
            self.problems += [
                document.problem(tuple(error["loc"]), _explain(error, model))
                for error in failure.errors(include_url=False)
            ]
            return
        if isinstance(parsed, NamespaceDocument):
            self._file(self.namespaces, document, parsed, parsed.metadata)
        elif isinstance(parsed, QueueDocument):
            self._file(self.queues, document, parsed, parsed.metadata)
        elif isinstance(parsed, SecretDocument):
            self._file(self.secrets, document, parsed, parsed.metadata)

    def _file(
        self,
        shelf: dict[tuple[str, str], tuple[Document, M]],
        document: Document,
        parsed: M,
        metadata: Metadata,
    ) -> None:
        key = (metadata.namespace, metadata.name)
        if key in shelf:
            first = shelf[key][0]
            message = f"the same object stands in {first.file}:{first.lines[()]}"
            self.problems.append(document.problem(("metadata", "name"), message))
            return
        shelf[key] = (document, parsed)

    # --- references -----------------------------------------------------------------------------

    def rules(
        self, document: Document, cluster_namespace: str, rules: Sequence[AuthorizationRule]
    ) -> tuple[RuleDefinition, ...]:
        """Return rules with the keys of the Secrets that they name."""
        return tuple(
            RuleDefinition(
                rule.name,
                rule.effective_rights,
                None
                if rule.secret_name is None
                else self._keys(document, cluster_namespace, at, rule.secret_name),
            )
            for at, rule in enumerate(rules)
        )

    def _keys(
        self, document: Document, cluster_namespace: str, at: int, secret_name: str
    ) -> RuleKeys | None:
        field_path = ("spec", "authorizationRules", at, "secretName")
        found = self.secrets.get((cluster_namespace, secret_name))
        if found is None:
            message = f"the Secret {secret_name} is not among the manifests"
            self.problems.append(document.problem(field_path, message))
            return None
        primary = self._secret_text(*found, "primaryKey")
        secondary = self._secret_text(*found, "secondaryKey")
        if primary is None:
            message = f"the Secret {secret_name} has no usable primaryKey"
            self.problems.append(document.problem(field_path, message))
            return None
        return RuleKeys(primary, secondary)

    def _secret_text(self, document: Document, secret: SecretDocument, key: str) -> str | None:
        if key in secret.string_data:
            return secret.string_data[key] or None
        if key not in secret.data:
            return None
        try:
            packed = "".join(secret.data[key].split())
            return base64.b64decode(packed, validate=True).decode("utf-8") or None
        except (binascii.Error, UnicodeDecodeError):
            problem = document.problem(("data", key), "must be base64 of UTF-8 text")
            if problem not in self.problems:
                self.problems.append(problem)
            return None


def _wrong_kind(api_version: str, kind: str) -> str:
    if (api_version, kind) in LATER:
        return f"kind {kind} is not available yet (docs/roadmap.md)"
    if (api_version, kind) == ("v1", "Namespace"):
        return f"this is the cluster's own Namespace; that of a bus has apiVersion {API_VERSION}"
    if any(kind == known for _, known in MODELS):
        wanted = next(version for version, known in MODELS if known == kind)
        return f"apiVersion of kind {kind} must be {wanted}"
    return f"apiVersion {api_version}, kind {kind}: only Namespace, Queue and Secret are read here"


def _queues_of(read: _Read, bus_key: tuple[str, str]) -> Iterator[QueueDefinition]:
    """Yield the queues that a bus owns, noting what is wrong with them."""
    _, bus = read.namespaces[bus_key]
    limits = bus.spec.limits
    seen: dict[str, Document] = {}
    for (cluster_namespace, _), (document, queue) in read.queues.items():
        owner = queue.spec.owner
        if (owner.namespace or cluster_namespace, owner.name) != bus_key:
            continue
        allowed = bus.spec.operator_spec.allowed_namespaces.source
        if allowed == "Same" and cluster_namespace != bus_key[0]:
            message = f"the bus admits queues of its own cluster namespace {bus_key[0]} only"
            read.problems.append(document.problem(("spec", "owner"), message))
        name = queue.spec.entity_name or queue.metadata.name
        if name.lower() in seen:
            message = f"{seen[name.lower()].file} has a queue {name} already"
            read.problems.append(document.problem(("spec", "entityName"), message))
            continue
        seen[name.lower()] = document
        properties = complete_queue(
            QueueProperties.model_construct(
                _fields_set=queue.spec.model_fields_set & set(QueueProperties.model_fields),
                **{name: getattr(queue.spec, name) for name in QueueProperties.model_fields},
            ),
            limits,
        )
        read.problems += [
            document.problem(("spec", where), message)
            for where, message in queue_problems(properties, limits).items()
        ]
        rules = read.rules(document, cluster_namespace, queue.spec.authorization_rules)
        yield QueueDefinition(name, properties, rules)


def _define(read: _Read, key: tuple[str, str]) -> BusDefinition:
    document, bus = read.namespaces[key]
    properties = NamespaceProperties.model_construct(
        _fields_set=bus.spec.model_fields_set & set(NamespaceProperties.model_fields),
        **{name: getattr(bus.spec, name) for name in NamespaceProperties.model_fields},
    )
    return BusDefinition(
        bus.spec.entity_name or bus.metadata.name,
        properties,
        read.rules(document, key[0], bus.spec.authorization_rules),
        tuple(_queues_of(read, key)),
    )


def read_manifests(paths: Sequence[Path]) -> tuple[BusDefinition, ...]:
    """Return every bus namespace defined in files or folders of `*.yaml`.

    Raises `ManifestError` with everything that is wrong with them.
    """
    read = _Read()
    for path in files_of(paths):
        try:
            for document in read_documents(path, str(path)):
                read.add(document)
        except ManifestError as error:
            read.problems += error.problems
    if read.problems:
        raise ManifestError(read.problems)
    for (cluster_namespace, _), (document, queue) in read.queues.items():
        owner = queue.spec.owner
        if (owner.namespace or cluster_namespace, owner.name) not in read.namespaces:
            message = f"the Namespace {owner.name} is not among the manifests"
            read.problems.append(document.problem(("spec", "owner", "name"), message))
    buses = tuple(_define(read, key) for key in read.namespaces)
    if read.problems:
        raise ManifestError(read.problems)
    return buses


def read_one_bus(paths: Sequence[Path]) -> BusDefinition:
    """Return the bus of manifests that define exactly one; raises `ManifestError` otherwise."""
    buses = read_manifests(paths)
    if len(buses) == 1:
        return buses[0]
    found = ", ".join(bus.name for bus in buses) or "none"
    message = f"exactly one Namespace of {API_VERSION} is needed, found {found}"
    raise ManifestError([Problem(", ".join(map(str, paths)), 0, "", message)])
