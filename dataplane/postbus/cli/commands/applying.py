"""Comparison of manifests with a running bus, for `apply` and `diff`.

Entities that exist only in the bus stay unchanged. Applying twice changes nothing the second time,
so an interrupted run can be repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from postbus.cli.client.control_client import ConflictError, ControlClient, NotFoundError, part
from postbus.cli.client.live_namespace import (
    known,
    queue_path,
    read_queue,
    read_subscription,
    read_topic,
    subscription_path_of,
    topic_path,
)
from postbus.cli.failures import InputError, RefusedError
from postbus.cli.formats.manifest_text import Entity, Manifest, ManifestWriter, difference
from postbus.cli.formats.output import as_yaml_documents
from postbus.contract.checks import (
    PlainDefinition,
    change_problems,
    complete,
    in_order_of_forwarding,
)
from postbus.contract.entities import (
    EntityKind,
    NamespaceLimits,
    NamespaceProperties,
    QueueProperties,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
    subscription_path,
)
from postbus.contract.namespace import NamespaceShape
from postbus.contract.yaml_documents import Document, files_of, parse_documents, read_documents
from postbus.manifests.reader import (
    BusDefinition,
    QueueDefinition,
    RuleDefinition,
    SubscriptionDefinition,
    TopicDefinition,
    read_one_bus,
)

P = TypeVar("P", QueueProperties, TopicProperties, SubscriptionProperties)

NOWHERE: Final = {"forward_to": None, "forward_dead_lettered_messages_to": None}
TOP: Final = ("Queue", "Topic")
FORWARDS: Final = ("forwardTo", "forwardDeadLetteredMessagesTo")
LIVE: Final = "the bus"
KINDS: Final = {
    QueueDefinition: EntityKind.QUEUE,
    TopicDefinition: EntityKind.TOPIC,
    SubscriptionDefinition: EntityKind.SUBSCRIPTION,
}


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """An entity with its current and its wanted definition. `before` None: it is new."""

    kind: str
    name: str
    before: Entity | None
    after: Entity

    @property
    def word(self) -> str:
        """The kind of change: one word."""
        if self.before is None:
            return "created"
        return "changed" if _facts(self.before) != _facts(self.completed) else "unchanged"

    @property
    def completed(self) -> Entity:
        """The wanted entity, with its current rules where the manifest names none."""
        after, before = self.after, self.before
        if isinstance(after, QueueDefinition | TopicDefinition):
            return replace(after, rules=())
        if after.rules is None and isinstance(before, SubscriptionDefinition):
            return replace(after, rules=before.rules)
        return after

    def shown(self) -> dict[str, Any]:
        """Return the change for output; `fields`: the changed fields."""
        shown: dict[str, Any] = {"change": self.word, "kind": self.kind, "name": self.name}
        if self.before is not None and self.word == "changed":
            old, new = _facts(self.before), _facts(self.completed)
            before, after = old["properties"], new["properties"]
            shown["fields"] = [
                name for name in {**before, **after} if before.get(name) != after.get(name)
            ]
            shown["fields"] += ["rules"] if old["rules"] != new["rules"] else []
        return shown


@dataclass(frozen=True, slots=True)
class RuleChange:
    """A change of an authorization rule; `owner` None: of the namespace."""

    owner: QueueDefinition | TopicDefinition | None
    rule: RuleDefinition
    word: str

    @property
    def at(self) -> str:
        """Path of its owner's rules in the control API."""
        match self.owner:
            case None:
                return "/v1/authorization-rules"
            case QueueDefinition(name):
                return f"{queue_path(name)}/authorization-rules"
            case TopicDefinition(name):
                return f"{topic_path(name)}/authorization-rules"

    def shown(self) -> dict[str, Any]:
        """Return the change for output."""
        owner = "" if self.owner is None else f"{self.owner.name}/"
        name = f"{owner}{self.rule.name}"
        return {"change": self.word, "kind": "authorization rule", "name": name}


@dataclass(frozen=True, slots=True)
class Plan:
    """All changes that applying manifests makes to a bus, in order."""

    wanted: BusDefinition
    live_name: str
    limits: NamespaceLimits
    changes: tuple[PlannedChange, ...]
    rules: tuple[RuleChange, ...]

    def differences(self) -> Iterator[list[str]]:
        """Yield the unified diff of each entity that differs from its manifest."""
        before_writer = ManifestWriter(self.wanted.name, self.limits)
        after_writer = ManifestWriter(self.wanted.name, self.limits)
        for change in self.changes:
            before: Manifest | None = None
            if change.before is not None:
                before = before_writer.entity(_renamed(change.before, change.after))
            yield difference(before, after_writer.entity(change.completed), change.name)
        for rule in self.rules:
            if rule.word != "unchanged":
                rights = ", ".join(sorted(each.value for each in rule.rule.rights))
                yield [f"+authorization rule {rule.shown()['name']}: {rights}"]


# --- reading ------------------------------------------------------------------------------------


async def make_plan(control: ControlClient, paths: Sequence[Path]) -> Plan:
    """Return the plan for manifests; raises `ManifestError`, `InputError` and `RefusedError`."""
    answer = await control.get("/v1/namespace")
    live = known(NamespaceProperties, answer["properties"])
    documents = [each for path in files_of(paths) for each in read_documents(path, str(path))]
    if not documents:
        raise InputError(f"{', '.join(map(str, paths))}: no manifests found")
    given = await _missing(control, documents, live)
    wanted = read_one_bus((), [*given, *documents])
    return await plan_of(control, wanted, {_name(each) for each in given})


async def plan_of(
    control: ControlClient,
    wanted: BusDefinition,
    given: Collection[tuple[str, str]] = (),
) -> Plan:
    """Return the plan for a definition. `given`: kinds and names to leave out."""
    answer = await control.get("/v1/namespace")
    live = known(NamespaceProperties, answer["properties"])
    shape = NamespaceShape(live.sku.name, int(answer["partitionCount"]))
    _check_namespace(wanted.properties, str(answer["name"]), shape)
    queues = [each for each in wanted.queues if ("Queue", each.name.lower()) not in given]
    topics = [each for each in wanted.topics if ("Topic", each.name.lower()) not in given]
    changes: dict[str, PlannedChange] = {}
    for queue in queues:
        before = await read_queue(control, queue.name)
        after = replace(queue, properties=_completed(queue.properties, shape, before))
        changes[queue.name.lower()] = PlannedChange("queue", queue.name, before, after)
    for topic in topics:
        was = await read_topic(control, topic.name)
        to_be = replace(topic, properties=_completed(topic.properties, shape, was))
        changes[topic.name.lower()] = PlannedChange("topic", topic.name, was, to_be)
    for each in wanted.subscriptions:
        path = subscription_path(each.topic, each.name)
        found = await read_subscription(control, each.topic, each.name)
        one = replace(each, properties=_completed(each.properties, shape, found))
        changes[path.lower()] = PlannedChange("subscription", path, found, one)
    _check_changes(changes.values())
    described = [
        PlainDefinition(name, KINDS[type(each.after)], each.after.properties)
        for name, each in changes.items()
    ]
    ordered = tuple(changes[each.name.lower()] for each in in_order_of_forwarding(described))
    namespace_rules = () if ("Namespace", "") in given else wanted.rules
    rules = [rule async for rule in _rule_changes(control, None, namespace_rules)]
    owners: list[QueueDefinition | TopicDefinition] = [*queues, *topics]
    for owner in owners:
        rules += [rule async for rule in _rule_changes(control, owner, owner.rules)]
    return Plan(wanted, str(answer["name"]), shape.limits, ordered, tuple(rules))


def _check_namespace(wanted: NamespaceProperties, name: str, live: NamespaceShape) -> None:
    """Raise `InputError` for another tier or another number of partitions than the bus has."""
    sku = wanted.declared_sku
    if sku not in (None, live.sku):
        advice = (
            live.tier_problem(sku)
            or "change it with PUT /v1/namespace or in the manifest of the broker first"
        )
        raise InputError(
            f"the manifests declare {sku.value}, but the bus {name} is {live.sku.value}: {advice}"
        )
    problem = live.partitions_problem(wanted.premium_messaging_partitions)
    if problem is not None:
        raise InputError(f"{problem}: leave premiumMessagingPartitions out")


def _completed(properties: P, live: NamespaceShape, before: Entity | None) -> P:
    """Return properties with the defaults that the bus has for fields left out."""
    return complete(properties, live.limits, None if before is None else before.properties)


def _check_changes(changes: Iterable[PlannedChange]) -> None:
    """Raise `InputError` for changes of immutable fields, before anything is changed."""
    problems = [
        f"{change.kind} {change.name}: {where}: {text}"
        for change in changes
        if change.before is not None
        for where, text in change_problems(
            change.before.properties, change.after.properties
        ).items()
    ]
    if problems:
        raise InputError("\n".join(problems))


async def _rule_changes(
    control: ControlClient,
    owner: QueueDefinition | TopicDefinition | None,
    rules: Sequence[RuleDefinition],
) -> AsyncIterator[RuleChange]:
    if not rules:
        return
    try:
        answer = await control.get(RuleChange(owner, rules[0], "").at, keys=True)
    except NotFoundError:
        answer = {"items": []}
    live = {each["name"].lower(): each for each in answer["items"]}
    for rule in rules:
        found = live.get(rule.name.lower())
        word = "unchanged"
        if found is None:
            word = "created"
        elif set(found["rights"]) != {right.value for right in rule.rights} or not _has_keys(
            found, rule
        ):
            word = "changed"
        yield RuleChange(owner, rule, word)


def _has_keys(found: dict[str, Any], rule: RuleDefinition) -> bool:
    if rule.keys is None:
        return True
    return found.get("primaryKey") == rule.keys.primary and rule.keys.secondary in {
        None,
        found.get("secondaryKey"),
    }


@dataclass(frozen=True, slots=True)
class _Said:
    """Fields of a document that are needed before it is checked."""

    kind: str
    resource: str
    cluster: str | None
    owner: str | None
    names: frozenset[str]
    targets: frozenset[str]

    @classmethod
    def of(cls, document: Document) -> _Said:
        value = document.value if isinstance(document.value, dict) else {}
        metadata, spec = _mapping(value, "metadata"), _mapping(value, "spec")
        owner = _mapping(spec, "owner").get("name")
        names = {str(each).lower() for each in (spec.get("entityName"), metadata.get("name"))}
        return cls(
            str(value.get("kind")),
            str(metadata.get("name")),
            metadata.get("namespace"),
            owner if isinstance(owner, str) else None,
            frozenset(names),
            frozenset(str(spec[field]) for field in FORWARDS if spec.get(field)),
        )


def _mapping(value: dict[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


async def _missing(
    control: ControlClient, documents: Sequence[Document], live: NamespaceProperties
) -> list[Document]:
    """Return entities that manifests refer to but do not contain, from the bus.

    These are the namespace, topics of subscriptions, and forwarding targets. With them, a single
    queue can be applied.
    """
    said = [_Said.of(each) for each in documents]
    held = {(each.kind, name) for each in said for name in each.names}
    bus = next((each.resource for each in said if each.kind == "Namespace"), None)
    owner = next((each.owner for each in said if each.kind in TOP and each.owner), None)
    writer = ManifestWriter(bus or owner or "the-bus", live.new_limits)
    found = [] if bus is not None else [writer.namespace(live, ())]
    for name in sorted({each.owner for each in said if each.kind == "Subscription" and each.owner}):
        topic = None if ("Topic", name.lower()) in held else await read_topic(control, name)
        if topic is not None:
            held.add(("Topic", name.lower()))
            found.append(writer.entity(topic))
    for target in sorted({target for each in said for target in each.targets}):
        if not held.isdisjoint((kind, target.lower()) for kind in TOP):
            continue
        queue = await read_queue(control, target)
        if queue is not None:  # it may forward too; the bus looks for loops
            plain = queue.properties.model_copy(update=NOWHERE)
            found.append(writer.entity(replace(queue, properties=plain)))
        elif (topic := await read_topic(control, target)) is not None:
            found.append(writer.entity(topic))
    cluster = next((each.cluster for each in said if each.cluster), None)
    for each in found:
        if cluster is not None:
            each["metadata"]["namespace"] = cluster
    return list(parse_documents(as_yaml_documents(found), LIVE)) if found else []


def _name(document: Document) -> tuple[str, str]:
    kind = str(document.value["kind"])
    if kind == "Namespace":
        return kind, ""
    spec = document.value["spec"]
    return kind, str(spec.get("entityName") or document.value["metadata"]["name"]).lower()


# --- doing --------------------------------------------------------------------------------------


async def carry_out(control: ControlClient, plan: Plan) -> list[dict[str, Any]]:
    """Carry out a plan; raises `RefusedError` with the number of changes made before it."""
    done: list[dict[str, Any]] = []
    try:
        for change in sorted(plan.changes, key=lambda each: each.kind == "subscription"):
            if change.before is None and change.kind != "topic":
                await _put(control, change.after, is_forwarding=False)
            elif change.before is None:
                await _put(control, change.after)
        for change in plan.changes:
            if change.word == "changed" or (change.before is None and _forwards(change.after)):
                await _put(control, change.after)
            done.append(change.shown())
        for rule in plan.rules:
            done += [await _put_rule(control, rule)]
    except RefusedError as error:
        count = sum(each["change"] != "unchanged" for each in done)
        raise RefusedError(
            f"{error}\n{count} changes were made before this error; apply again when it is fixed"
        ) from None
    return done


async def _put_rule(control: ControlClient, rule: RuleChange) -> dict[str, Any]:
    """Put an authorization rule; the bus refuses it for a rule it was started with."""
    shown = rule.shown()
    if rule.word != "unchanged":
        try:
            await control.put(f"{rule.at}/{part(rule.rule.name)}", _rule_body(rule.rule))
        except ConflictError as error:
            shown |= {"change": "refused", "why": str(error)}
    return shown


def _forwards(entity: Entity) -> bool:
    return any(getattr(entity.properties, name, None) is not None for name in NOWHERE)


def _rule_body(rule: RuleDefinition) -> dict[str, Any]:
    body: dict[str, Any] = {"rights": sorted(right.value for right in rule.rights)}
    if rule.keys is not None:
        body["primaryKey"] = rule.keys.primary
        if rule.keys.secondary is not None:
            body["secondaryKey"] = rule.keys.secondary
    return body


async def _put(control: ControlClient, entity: Entity, *, is_forwarding: bool = True) -> None:
    body = _facts(entity)["properties"]
    if not is_forwarding:
        body = {key: value for key, value in body.items() if key not in FORWARDS}
    try:
        match entity:
            case QueueDefinition(name):
                await control.put(queue_path(name), body)
            case TopicDefinition(name):
                await control.put(topic_path(name), body)
            case SubscriptionDefinition(topic, name, _, rules):
                if rules is not None:
                    body["rules"] = [_rule_facts(each) for each in rules]
                await control.put(subscription_path_of(topic, name), body)
    except RefusedError as error:
        kind = KINDS[type(entity)].value
        raise RefusedError(f"{kind} {entity.name}: {error}") from None


def _facts(entity: Entity) -> dict[str, Any]:
    """Return an entity in comparable form: names in lower case, rules without order."""
    properties = entity.properties.model_dump(mode="json", by_alias=True, exclude_none=True)
    rules = getattr(entity, "rules", None) if isinstance(entity, SubscriptionDefinition) else None
    in_order = sorted(map(_rule_facts, rules or ()), key=lambda rule: str(rule["name"]).lower())
    return {"properties": properties, "rules": in_order}


def _rule_facts(rule: RuleProperties) -> dict[str, Any]:
    said: dict[str, Any] = rule.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return said


def _renamed(before: Entity, after: Entity) -> Entity:
    """Return the live entity under its name in the manifests, without authorization rules."""
    if isinstance(before, SubscriptionDefinition) and isinstance(after, SubscriptionDefinition):
        return replace(before, topic=after.topic, name=after.name)
    return replace(before, name=after.name)
