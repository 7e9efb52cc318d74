"""Reader of Kubernetes manifests for a bus that runs without Kubernetes.

Kinds: Namespace, Queue, Topic and Subscription of `postbus.dev/v1alpha1`, and the core Secret that
holds keys. The command line calls it once at start. It never guesses: every field is checked, and
every problem names file, line and field. All problems are collected, so that one run shows them
all.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

from postbus.contract.checks import (
    PlainDefinition,
    assume,
    doubled_rule,
    forwarding_problems,
    forwarding_warnings,
    rule_count_problem,
    rules_size_problem,
    tier_problems,
)
from postbus.contract.entities import (
    LEAST_KEY_CHARS,
    LIMITS,
    PUBLIC_KEY,
    AuthorizationRule,
    EntityKind,
    EntityProperties,
    Model,
    NamespaceProperties,
    QueueProperties,
    Right,
    RuleProperties,
    Sku,
    SubscriptionProperties,
    TopicProperties,
    check_subscription_name,
    subscription_path,
)
from postbus.contract.namespace import NamespaceDefinition, SoftDelete
from postbus.contract.operator_spec import NamespaceOperatorSpec
from postbus.contract.resources import (
    API_VERSION,
    Metadata,
    NamespaceDocument,
    QueueDocument,
    QueueSpec,
    SubscriptionDocument,
    TopicDocument,
)
from postbus.contract.yaml_documents import (
    Document,
    ManifestError,
    ManifestProblem,
    files_of,
    read_as,
    read_documents,
)
from postbus.manifests.documents import MODELS, SecretDocument
from postbus.rules.compiled import check_rule
from postbus.rules.grammar import pointed
from postbus.rules.nodes import RuleError


@dataclass(frozen=True, slots=True)
class RuleKeys:
    """The keys of a rule as text; tokens may be signed with either."""

    primary: str = field(repr=False)
    secondary: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RuleDefinition:
    """A rule and its keys; None: the bus generates them."""

    name: str
    rights: frozenset[Right]
    keys: RuleKeys | None


@dataclass(frozen=True, slots=True)
class QueueDefinition:
    """The definition of a queue, with the defaults of its namespace's tier."""

    name: str
    properties: QueueProperties
    rules: tuple[RuleDefinition, ...]


@dataclass(frozen=True, slots=True)
class TopicDefinition:
    """The definition of a topic, with the defaults of its namespace's tier."""

    name: str
    properties: TopicProperties
    rules: tuple[RuleDefinition, ...]


@dataclass(frozen=True, slots=True)
class SubscriptionDefinition:
    """The definition of a subscription. `rules` None: keep them; `$Default` for a new one."""

    topic: str
    name: str
    properties: SubscriptionProperties
    rules: tuple[RuleProperties, ...] | None = None


@dataclass(frozen=True, slots=True)
class BusDefinition:
    """A bus namespace with everything that belongs to it.

    `deleted_retention_ms`: retention of deleted entities; None: not set by the manifest.
    `warnings`: definitions that are valid but probably not intended.
    """

    name: str
    properties: NamespaceProperties
    rules: tuple[RuleDefinition, ...]
    queues: tuple[QueueDefinition, ...]
    topics: tuple[TopicDefinition, ...] = ()
    subscriptions: tuple[SubscriptionDefinition, ...] = ()
    deleted_retention_ms: int | None = None
    warnings: tuple[ManifestProblem, ...] = ()

    @property
    def declared(self) -> NamespaceDefinition:
        """The namespace without its entities; fields that the manifest leaves out are unset."""
        said = set(self.properties.model_fields_set)
        values = {name: getattr(self.properties, name) for name in NamespaceProperties.model_fields}
        values["soft_delete"] = SoftDelete()
        if self.deleted_retention_ms is not None:
            said.add("soft_delete")
            kept_ms = self.deleted_retention_ms
            values["soft_delete"] = SoftDelete.model_construct(retention_ms=kept_ms)
        return NamespaceDefinition.model_construct(_fields_set=said, **values)


# --- checking -----------------------------------------------------------------------------------

M = TypeVar("M", bound=Model)


@dataclass(slots=True)
class _Read:
    """All documents read so far, by cluster namespace and resource name."""

    problems: list[ManifestProblem] = field(default_factory=list)
    namespaces: dict[tuple[str, str], tuple[Document, NamespaceDocument]] = field(
        default_factory=dict
    )
    queues: dict[tuple[str, str], tuple[Document, QueueDocument]] = field(default_factory=dict)
    topics: dict[tuple[str, str], tuple[Document, TopicDocument]] = field(default_factory=dict)
    subscriptions: dict[tuple[str, str], tuple[Document, SubscriptionDocument]] = field(
        default_factory=dict
    )
    secrets: dict[tuple[str, str], tuple[Document, SecretDocument]] = field(default_factory=dict)

    def add(self, document: Document) -> None:
        """Validate a document by itself and store it."""
        value = document.value
        if not isinstance(value, dict):
            self.problems.append(document.problem((), "a document must be a mapping"))
            return
        kind = (str(value.get("apiVersion")), str(value.get("kind")))
        model = MODELS.get(kind)
        if model is None:
            self.problems.append(document.problem(("kind",), _wrong_kind(*kind)))
            return
        parsed, problems = read_as(document, model)
        self.problems += problems
        if isinstance(parsed, NamespaceDocument):
            self._file(self.namespaces, document, parsed, parsed.metadata)
        elif isinstance(parsed, QueueDocument):
            self._file(self.queues, document, parsed, parsed.metadata)
        elif isinstance(parsed, TopicDocument):
            self._file(self.topics, document, parsed, parsed.metadata)
        elif isinstance(parsed, SubscriptionDocument):
            self._file(self.subscriptions, document, parsed, parsed.metadata)
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
            message = f"the same object is defined in {first.file}:{first.lines[()]}"
            self.problems.append(document.problem(("metadata", "name"), message))
            return
        shelf[key] = (document, parsed)

    # --- references -----------------------------------------------------------------------------

    def rules(
        self, document: Document, cluster_namespace: str, rules: Sequence[AuthorizationRule]
    ) -> tuple[RuleDefinition, ...]:
        """Return rules with the keys of their Secrets."""
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
        for name, key in (("primaryKey", primary), ("secondaryKey", secondary)):
            if key is not None and key != PUBLIC_KEY and len(key) < LEAST_KEY_CHARS:
                self._refuse_short(*found, name)
        return RuleKeys(primary, secondary)

    def _refuse_short(self, document: Document, secret: SecretDocument, key: str) -> None:
        """Add a problem with a key, once for all rules that name its Secret."""
        message = (
            f"a key has at least {LEAST_KEY_CHARS} characters:"
            " generate one with `openssl rand -base64 32`"
        )
        place = "stringData" if key in secret.string_data else "data"
        problem = document.problem((place, key), message)
        if problem not in self.problems:
            self.problems.append(problem)

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
    if (api_version, kind) == ("v1", "Namespace"):
        return f"this is the cluster's own Namespace; that of a bus has apiVersion {API_VERSION}"
    if kind == "Pipeline":
        return "a Pipeline is run by `postbus-pipeline run`: keep it in a file of its own"
    if any(kind == known for _, known in MODELS):
        wanted = next(version for version, known in MODELS if known == kind)
        return f"apiVersion of kind {kind} must be {wanted}"
    return (
        f"apiVersion {api_version}, kind {kind}: only Namespace, Queue, Topic, Subscription and"
        " Secret are read here"
    )


# --- one bus ------------------------------------------------------------------------------------


class _BusReader:
    """Builds the definition of one bus and collects the problems of its entities."""

    def __init__(self, read: _Read, key: tuple[str, str]) -> None:
        self._read = read
        self._key = key
        self._document, self._bus = read.namespaces[key]
        self._limits = self._bus.spec.new_limits
        self._entities: dict[str, tuple[Document, PlainDefinition]] = {}
        self._subscriptions: dict[str, list[PlainDefinition]] = {}
        self._topic_rules: dict[str, list[RuleProperties]] = {}

    def define(self) -> BusDefinition:
        """Return the definition; add errors in it to the problems."""
        spec = self._bus.spec
        definition = BusDefinition(
            spec.entity_name or self._bus.metadata.name,
            _only(NamespaceProperties, spec).model_copy(update={"zone_redundant": False}),
            self._read.rules(self._document, self._key[0], spec.authorization_rules),
            tuple(self._queues()),
            tuple(self._topics()),
            tuple(self._subscribed()),
            _said_retention_ms(spec.operator_spec),
        )
        warnings = (*self._without_operator(), *self._check_forwarding())
        self._check_counts()
        return replace(definition, warnings=warnings)

    def _queues(self) -> Iterator[QueueDefinition]:
        for (cluster_namespace, _), (document, queue) in self._read.queues.items():
            spec: QueueSpec = queue.spec
            if (spec.owner.namespace or cluster_namespace, spec.owner.name) != self._key:
                continue
            name = spec.entity_name or queue.metadata.name
            properties = assume(_only(QueueProperties, spec), self._limits)
            if self._admit(document, cluster_namespace, name, EntityKind.QUEUE, properties):
                rules = self._read.rules(document, cluster_namespace, spec.authorization_rules)
                yield QueueDefinition(name, properties, rules)

    def _topics(self) -> Iterator[TopicDefinition]:
        for (cluster_namespace, _), (document, topic) in self._read.topics.items():
            spec = topic.spec
            if (spec.owner.namespace or cluster_namespace, spec.owner.name) != self._key:
                continue
            name = spec.entity_name or topic.metadata.name
            properties = assume(_only(TopicProperties, spec), self._limits)
            if self._admit(document, cluster_namespace, name, EntityKind.TOPIC, properties):
                rules = self._read.rules(document, cluster_namespace, spec.authorization_rules)
                yield TopicDefinition(name, properties, rules)

    def _subscribed(self) -> Iterator[SubscriptionDefinition]:
        for (cluster_namespace, _), (document, subscription) in self._read.subscriptions.items():
            spec = subscription.spec
            found = self._read.topics.get(
                (spec.owner.namespace or cluster_namespace, spec.owner.name)
            )
            if found is None or self._owner_of(found) != self._key:
                continue
            topic = found[1].spec.entity_name or found[1].metadata.name
            name = spec.entity_name or subscription.metadata.name
            try:
                check_subscription_name(name)
            except ValueError as error:
                self._complain(document, ("metadata", "name"), f"{error}: set entityName")
            properties = assume(_only(SubscriptionProperties, spec), self._limits)
            path = subscription_path(topic, name)
            if self._admit(document, cluster_namespace, path, EntityKind.SUBSCRIPTION, properties):
                described = self._entities[path.lower()][1]
                self._subscriptions.setdefault(topic.lower(), []).append(described)
                self._check_rules(document, topic, spec.rules)
                yield SubscriptionDefinition(topic, name, properties, spec.rules)

    def _owner_of(self, found: tuple[Document, TopicDocument]) -> tuple[str, str]:
        owner = found[1].spec.owner
        return (owner.namespace or found[1].metadata.namespace, owner.name)

    # --- checks ---------------------------------------------------------------------------------

    def _complain(self, document: Document, path: tuple[str | int, ...], message: str) -> None:
        self._read.problems.append(document.problem(path, message))

    def _admit(
        self,
        document: Document,
        cluster_namespace: str,
        name: str,
        kind: EntityKind,
        properties: EntityProperties,
    ) -> bool:
        """Validate an entity by itself and store it; return False if its name is already used."""
        allowed = self._bus.spec.operator_spec.allowed_namespaces.source
        if allowed == "Same" and cluster_namespace != self._key[0]:
            message = f"the bus admits entities of its own cluster namespace {self._key[0]} only"
            self._complain(document, ("spec", "owner"), message)
        if name.lower() in self._entities:
            first, known = self._entities[name.lower()]
            message = f"{first.file} has a {known.kind.value} {name} already"
            self._complain(document, ("spec", "entityName"), message)
            return False
        self._entities[name.lower()] = (document, PlainDefinition(name, kind, properties))
        for where, message in self._tier_problems(properties).items():
            self._complain(document, ("spec", where) if where else ("kind",), message)
        return True

    def _tier_problems(self, properties: EntityProperties) -> dict[str, str]:
        """Return what the tier does not allow.

        A Premium namespace that does not name its partitions may have been Standard: its entities
        may then be as they were. Only the bus knows.
        """
        spec, problems = self._bus.spec, tier_problems(properties, self._limits)
        if spec.sku.name is not Sku.PREMIUM or spec.premium_messaging_partitions is not None:
            return problems
        in_standard = tier_problems(properties, LIMITS[Sku.STANDARD])
        return {where: text for where, text in problems.items() if where in in_standard}

    def _check_rules(
        self, document: Document, topic: str, rules: tuple[RuleProperties, ...] | None
    ) -> None:
        if rules is None:
            return
        self._topic_rules.setdefault(topic.lower(), []).extend(rules)
        for at, rule in enumerate(rules):
            for part, checked, sql in (
                ("sqlFilter", rule.model_copy(update={"action": None}), rule.sql_filter),
                ("action", rule, rule.action),
            ):
                try:
                    check_rule(checked)
                except RuleError as error:
                    where = ("spec", "rules", at, part, "sqlExpression")
                    text = "" if sql is None else sql.sql_expression
                    self._complain(document, where, pointed(str(error), text))
                    break
        name = doubled_rule(rules)
        if name is not None:
            self._complain(document, ("spec", "rules"), f"the rule {name} is named twice")
        too_large = rules_size_problem(rules)
        if too_large is not None:
            self._complain(document, ("spec", "rules"), too_large)

    def _without_operator(self) -> Iterator[ManifestProblem]:
        """Yield warnings for fields that have no effect on one machine."""
        if self._bus.spec.zone_redundant:
            message = "has an effect on Kubernetes only, where the operator spreads brokers"
            yield self._document.problem(("spec", "zoneRedundant"), message)

    def _check_forwarding(self) -> Iterator[ManifestProblem]:
        """Report invalid forwarding targets; yield warnings."""

        def find(name: str) -> PlainDefinition | None:
            return self._entities[name][1] if name in self._entities else None

        def subscriptions_of(topic: str) -> Sequence[PlainDefinition]:
            return self._subscriptions.get(topic, ())

        for document, described in self._entities.values():
            for where, message in forwarding_problems(described, find).items():
                self._complain(document, ("spec", where), message)
            for where, message in forwarding_warnings(described, find, subscriptions_of).items():
                yield document.problem(("spec", where), message)

    def _check_counts(self) -> None:
        """Check the limits on numbers of entities."""
        limits = self._limits
        top = [
            described.properties
            for _, described in self._entities.values()
            if not isinstance(described.properties, SubscriptionProperties)
        ]
        partitioned = sum(properties.enable_partitioning for properties in top)
        counts: list[tuple[int, int | None, str]] = [
            (len(top), limits.max_entity_count, "queues and topics"),
            (partitioned, limits.max_partitioned_count, "partitioned queues and topics"),
            *(
                (len(found), limits.max_subscription_count, f"subscriptions of the topic {topic}")
                for topic, found in self._subscriptions.items()
            ),
        ]
        problems = [
            f"at most {most} {what}, here are {count}"
            for count, most, what in counts
            if most is not None and count > most
        ]
        for topic, rules in self._topic_rules.items():
            problem = rule_count_problem(rules, limits)
            if problem is not None:
                problems.append(f"{topic}: {problem}")
        for problem in problems:
            self._complain(self._document, ("metadata", "name"), problem)


def _said_retention_ms(spec: NamespaceOperatorSpec) -> int | None:
    is_said = "soft_delete" in spec.model_fields_set
    return spec.soft_delete.retention_ms if is_said else None


def _only(model: type[M], spec: Model) -> M:
    """Return the part of a spec that is the broker's; pydantic's set of given fields is kept."""
    values = {name: getattr(spec, name) for name in model.model_fields}
    said = spec.model_fields_set & set(model.model_fields)
    return cast("M", model.model_construct(_fields_set=said, **values))


def _check_owners(read: _Read) -> None:
    """Report every missing owner."""

    def check(
        document: Document, key: tuple[str, str], kind: str, is_known: Callable[[object], bool]
    ) -> None:
        if not is_known(key):
            message = f"the {kind} {key[1]} is not among the manifests"
            read.problems.append(document.problem(("spec", "owner", "name"), message))

    for (namespace, _), (document, queue) in read.queues.items():
        owner = queue.spec.owner
        key = (owner.namespace or namespace, owner.name)
        check(document, key, "Namespace", read.namespaces.__contains__)
    for (namespace, _), (document, topic) in read.topics.items():
        owner = topic.spec.owner
        key = (owner.namespace or namespace, owner.name)
        check(document, key, "Namespace", read.namespaces.__contains__)
    for (namespace, _), (document, subscription) in read.subscriptions.items():
        owner = subscription.spec.owner
        key = (owner.namespace or namespace, owner.name)
        check(document, key, "Topic", read.topics.__contains__)


def read_manifests(
    paths: Sequence[Path], given: Sequence[Document] = ()
) -> tuple[BusDefinition, ...]:
    """Return every bus namespace defined in files or folders of `*.yaml`.

    `given` documents are treated like those of files. Raises `ManifestError` with all problems.
    """
    read = _Read()
    for document in given:
        read.add(document)
    for path in files_of(paths):
        try:
            for document in read_documents(path, str(path)):
                read.add(document)
        except ManifestError as error:
            read.problems += error.problems
    if read.problems:
        raise ManifestError(read.problems)
    _check_owners(read)
    buses = tuple(_BusReader(read, key).define() for key in read.namespaces)
    if read.problems:
        raise ManifestError(read.problems)
    return buses


def read_one_bus(paths: Sequence[Path], given: Sequence[Document] = ()) -> BusDefinition:
    """Return the bus of manifests that define exactly one; raises `ManifestError` otherwise."""
    buses = read_manifests(paths, given)
    if len(buses) == 1:
        return buses[0]
    found = ", ".join(bus.name for bus in buses) or "none"
    message = f"exactly one Namespace of {API_VERSION} is needed, found {found}"
    raise ManifestError([ManifestProblem(", ".join(map(str, paths)), 0, "", message)])
