"""Preconditions of a change of an entity: its name, present definition, tier and namespace.

Checks only; the directory calls them under its lock, so that they hold until the change is written.
They raise `DirectoryRefusal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from postbus.broker.catalog.entries import Entries
from postbus.contract.checks import (
    PlainDefinition,
    change_problems,
    complete,
    doubled_rule,
    forwarding_problems,
    forwarding_warnings,
    rule_count_problem,
    rules_size_problem,
    tier_problems,
)
from postbus.contract.entities import (
    DEFAULT_RULE,
    EntityKind,
    EntityProperties,
    NamespaceLimits,
    RuleProperties,
    TopicProperties,
    catalog_key,
    check_entity_name,
    check_subscription_name,
    subscription_path,
)
from postbus.entity.commands import Refusal, Refused
from postbus.rules.compiled import check_rule
from postbus.rules.nodes import RuleError
from postbus.store.catalog import NONE_SENT, CatalogEntry, CatalogPut, StoredRule


class DirectoryRefusal(Exception):
    """A refused change or question; nothing was changed unless the refusal is UNKNOWN."""

    def __init__(self, refused: Refused) -> None:
        self.refused = refused
        super().__init__(refused.detail)


class NotWritten(Exception):
    """A change failed, and the tables show that nothing was written. `why`: the error."""

    def __init__(self, why: Exception) -> None:
        self.why = why
        super().__init__(str(why))


def refusal(why: Refusal, detail: str) -> DirectoryRefusal:
    return DirectoryRefusal(Refused(why, detail))


class VersionDiffers(DirectoryRefusal):
    """The object of a change has another version than expected, `version`."""

    def __init__(self, name: str, version: int, expected: frozenset[int]) -> None:
        self.version = version
        said = " or ".join(map(str, sorted(expected)))
        detail = f"{name} has version {version} and not {said}"
        super().__init__(Refused(Refusal.CONFLICT, detail))


class PutMode(Enum):
    """Requirement of a put on existence: create, update, or either."""

    CREATE = "create"
    UPDATE = "update"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Precondition:
    """Condition on an entity before a change. `versions` None: any.

    The only comparison of versions, also those of `If-Match`.
    """

    mode: PutMode = PutMode.ANY
    versions: frozenset[int] | None = None

    def check(self, kind: EntityKind, name: str, known: CatalogEntry | None) -> None:
        """Refuse if the entity of this name, None if there is none, does not meet the condition."""
        if known is None:
            if self.mode is PutMode.UPDATE or self.versions is not None:
                raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no {kind.value} {name}")
        elif known.kind is not kind or self.mode is PutMode.CREATE:
            raise refusal(
                Refusal.ALREADY_EXISTS, f"{known.name} exists already and is a {known.kind.value}"
            )
        else:
            self.check_version(known.name, known.version)

    def check_version(self, name: str, version: int) -> None:
        """Refuse if the entity of this name has none of the expected versions."""
        if self.versions is not None and version not in self.versions:
            raise VersionDiffers(name, version, self.versions)


UNCONDITIONAL: Final = Precondition()


@dataclass(frozen=True, slots=True)
class WantedEntity:
    """The wanted definition of an entity. `topic` and `rules` are those of a subscription.

    `name` of a subscription is that below its topic. `rules` replace those it has; None keeps them,
    or gives a new one `$Default`. `forwards_as_sent`: field -> the URL that a client named a target
    by; None: those it has. `managed_by` None: the mark it has.
    """

    kind: EntityKind
    name: str
    properties: EntityProperties
    topic: str | None = None
    rules: Sequence[RuleProperties] | None = None
    forwards_as_sent: Mapping[str, str] | None = None
    managed_by: str | None = None

    @property
    def path(self) -> str:
        """The name within the namespace, in its original case."""
        return self.name if self.topic is None else subscription_path(self.topic, self.name)


class Put(NamedTuple):
    """The result of a change. `is_new`: the entity, or the rule, was created."""

    entry: CatalogEntry
    is_new: bool


def plan(
    entries: Entries,
    limits: NamespaceLimits,
    wanted: WantedEntity,
    condition: Precondition,
    home_of: Callable[[str], int],
) -> CatalogPut | CatalogEntry:
    """Return the definition to store, or the entity if it is unchanged; refuse an invalid one."""
    is_subscription = wanted.kind is EntityKind.SUBSCRIPTION
    check_name(check_subscription_name if is_subscription else check_entity_name, wanted.name)
    topic: CatalogEntry | None = None
    name = wanted.name
    if wanted.topic is not None:
        topic = entries.find(wanted.topic.lower())
        if topic is None or topic.kind is not EntityKind.TOPIC:
            raise refusal(Refusal.ENTITY_NOT_FOUND, f"there is no topic {wanted.topic}")
        name = subscription_path(topic.name, name)
    known = entries.find(name.lower())
    condition.check(wanted.kind, name, known)
    properties = complete(wanted.properties, limits, known.properties if known else None)
    rules = _rules_of(wanted, known) if is_subscription else ()
    sent = wanted.forwards_as_sent
    if sent is None:
        sent = NONE_SENT if known is None else known.forwards_as_sent
    mark = wanted.managed_by
    if mark is None:
        mark = "" if known is None else known.managed_by
    if known is not None and (
        (known.properties, known.rules, known.forwards_as_sent, known.managed_by)
        == (properties, rules, sent, mark)
    ):
        return known
    name = known.name if known else name
    check_definition(entries, limits, PlainDefinition(name, wanted.kind, properties), known)
    if known is None:
        check_count(entries, limits, properties, topic)
    if topic is None:
        is_partitioned = getattr(properties, "enable_partitioning", False)
        return CatalogPut(
            known,
            name,
            wanted.kind,
            properties,
            home_of(name),
            is_partitioned=is_partitioned,
            forwards_as_sent=sent,
            managed_by=mark,
        )
    check_rules(entries, limits, rules, known, topic)
    return CatalogPut(
        known,
        name,
        wanted.kind,
        properties,
        topic.home_partition,
        topic.entity_no,
        rules,
        topic.is_partitioned,
        sent,
        mark,
    )


def _rules_of(wanted: WantedEntity, known: CatalogEntry | None) -> tuple[StoredRule, ...]:
    before = known.rules if known is not None else ()
    if wanted.rules is not None:
        return to_store(wanted.rules, before)
    return before if known is not None else (StoredRule(DEFAULT_RULE),)


def check_name(check: Callable[[str], str], name: str) -> None:
    """Refuse a name for which `check` raises ValueError."""
    try:
        check(name)
    except ValueError as error:
        raise refusal(Refusal.ARGUMENT_OUT_OF_RANGE, f"{name!r}: {error}") from error


def check_definition(
    entries: Entries, limits: NamespaceLimits, wanted: PlainDefinition, known: CatalogEntry | None
) -> None:
    """Refuse what the tier, the past or the rest of the namespace does not allow.

    `known` is the existing entity, or the one that is restored: it may keep what it has.
    """
    if known is not None:
        changed = change_problems(known.properties, wanted.properties)
        if changed:
            raise refusal(Refusal.NOT_ALLOWED, _shown(changed))
    problems = tier_problems(wanted.properties, limits, known.properties if known else None)
    forwards = _forwards_of(wanted.properties)
    if known is None or known.is_retained or _forwards_of(known.properties) != forwards:
        problems |= forwarding_problems(wanted, entries.find)
        if (
            known is not None
            and known.is_retained
            and _is_dead_letter_target_retained(entries, wanted.properties)
        ):
            problems.pop("forwardDeadLetteredMessagesTo", None)
    if problems:
        raise refusal(Refusal.ARGUMENT_OUT_OF_RANGE, _shown(problems))


def _is_dead_letter_target_retained(entries: Entries, properties: EntityProperties) -> bool:
    """Return whether dead letters go to an entity that can be restored, too.

    Entities that dead-letter into each other could otherwise not be restored, whichever is first.
    """
    target = getattr(properties, "forward_dead_lettered_messages_to", None)
    return target is not None and bool(entries.retained_named(catalog_key(target)))


def warnings_of(entries: Entries, entry: CatalogEntry) -> dict[str, str]:
    """Return field -> warning, for definitions that are valid but probably not intended."""
    return forwarding_warnings(entry, entries.find, entries.subscriptions_named)


def check_count(
    entries: Entries,
    limits: NamespaceLimits,
    properties: EntityProperties,
    topic: CatalogEntry | None,
) -> None:
    """Refuse a new entity above the limits of their number; `topic` is that of a subscription."""
    if topic is not None:
        most = limits.max_subscription_count
        if len(entries.subscriptions_of(topic.entity_no)) >= most:
            raise refusal(
                Refusal.QUOTA_EXCEEDED,
                f"{topic.name} has the maximum of {most} subscriptions",
            )
        return
    if entries.count >= limits.max_entity_count:
        raise refusal(
            Refusal.QUOTA_EXCEEDED,
            f"the namespace already has the maximum of {limits.max_entity_count} queues and topics",
        )
    most_partitioned = limits.max_partitioned_count
    is_partitioned = getattr(properties, "enable_partitioning", False)
    if (
        is_partitioned
        and most_partitioned is not None
        and entries.partitioned_count >= most_partitioned
    ):
        raise refusal(
            Refusal.QUOTA_EXCEEDED,
            f"the namespace already has the maximum of {most_partitioned} partitioned queues and"
            " topics",
        )


def check_rules(
    entries: Entries,
    limits: NamespaceLimits,
    rules: Sequence[StoredRule],
    known: CatalogEntry | None,
    topic: CatalogEntry,
) -> None:
    """Refuse rules that are invalid, named twice or too many for their topic."""
    before = {} if known is None else {_key(rule): rule for rule in known.rules}
    if known is not None and tuple(rules) == known.rules:
        return
    wanted = [rule.properties for rule in rules]
    name = doubled_rule(wanted)
    if name is not None:
        raise refusal(Refusal.ARGUMENT_OUT_OF_RANGE, f"the rule {name} is named twice")
    for rule in rules:
        if before.get(_key(rule)) != rule:
            try:
                check_rule(rule.properties)
            except RuleError as error:
                detail = f"rule {rule.properties.name}: {error}"
                raise refusal(Refusal.ARGUMENT_OUT_OF_RANGE, detail) from error
    too_large = rules_size_problem(wanted)
    if too_large is not None:
        raise refusal(Refusal.QUOTA_EXCEEDED, too_large)
    others = entries.rules_of_topic(topic.entity_no, known.entity_no if known else None)
    problem = rule_count_problem([*others, *wanted], limits)
    if problem is not None:
        raise refusal(Refusal.QUOTA_EXCEEDED, problem)


def check_retained_count(entries: Entries, limits: NamespaceLimits, entity_no: int) -> None:
    """Refuse to retain one more entity if as many are retained as may exist."""
    count = len(entries.retained()) + len(entries.subscriptions_of(entity_no)) + 1
    most = limits.max_entity_count
    if count > most:
        raise refusal(
            Refusal.QUOTA_EXCEEDED,
            f"{most} deleted entities are already retained: delete it without Retain, or wait",
        )


def check_restore(entries: Entries, limits: NamespaceLimits, entity_no: int) -> CatalogEntry:
    """Return the entities to restore, or refuse: they must be retained, their names free."""
    entry = entries.stored_numbered(entity_no)
    if entry is None or not entry.is_retained:
        raise refusal(Refusal.ENTITY_NOT_FOUND, f"no restorable entity has the number {entity_no}")
    if entry.deleted_with is not None:
        raise refusal(
            Refusal.NOT_ALLOWED,
            f"{entry.name} was deleted with its topic: restore the topic, number"
            f" {entry.deleted_with}",
        )
    topic = None if entry.topic_no is None else entries.numbered(entry.topic_no)
    if entry.topic_no is not None and topic is None:
        raise refusal(
            Refusal.NOT_ALLOWED,
            f"the topic of {entry.name} is deleted too: restore it first, number {entry.topic_no}",
        )
    known = entries.find(entry.name.lower())
    if known is not None:
        raise refusal(
            Refusal.ALREADY_EXISTS,
            f"{known.name} exists again: delete that one first",
        )
    check_count(entries, limits, entry.properties, topic)
    for each in (entry, *entries.retained_below(entity_no)):
        if each is entry or each.deleted_with == entity_no:
            wanted = PlainDefinition(each.name, each.kind, each.properties)
            check_definition(entries, limits, wanted, each)
    if topic is not None:
        check_rules(entries, limits, entry.rules, None, topic)
    return entry


def rule_named(rules: Sequence[StoredRule], name: str) -> StoredRule | None:
    """Return the rule of a name, which is case-insensitive."""
    return next((rule for rule in rules if _key(rule) == name.lower()), None)


def to_store(
    rules: Sequence[RuleProperties], known: Sequence[StoredRule]
) -> tuple[StoredRule, ...]:
    """Return rules to store; an existing one keeps its creation time, even if it changes."""
    times = {_key(rule): rule.created_ms for rule in known}
    return tuple(StoredRule(rule, times.get(rule.name.lower(), 0)) for rule in rules)


def _key(rule: StoredRule) -> str:
    return rule.properties.name.lower()


def _shown(problems: dict[str, str]) -> str:
    return "; ".join(f"{where}: {text}" if where else text for where, text in problems.items())


def _forwards_of(properties: EntityProperties) -> tuple[str | None, str | None]:
    if isinstance(properties, TopicProperties):
        return None, None
    return properties.forward_to, properties.forward_dead_lettered_messages_to
