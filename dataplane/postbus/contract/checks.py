"""Checks of definitions against their tier, their namespace and their previous state.

Listeners, manifests and the directory all use them, so that each gives the same answer. A check
returns a mapping, field of the manifest -> problem, that is empty when there is no problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from postbus.contract.durations import MAX_DURATION_MS, format_duration
from postbus.contract.entities import (
    EntityKind,
    EntityProperties,
    NamespaceLimits,
    QueueProperties,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
    topic_of,
)

P = TypeVar("P", QueueProperties, TopicProperties, SubscriptionProperties, EntityProperties)

IMMUTABLE: Final = {
    "requires_session": "requiresSession",
    "requires_duplicate_detection": "requiresDuplicateDetection",
    "enable_partitioning": "enablePartitioning",
}
"""Fields that cannot change after creation."""


class Definition(Protocol):
    """An entity in a manifest or the catalog; the name of a subscription is its path."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> EntityKind: ...

    @property
    def properties(self) -> EntityProperties: ...


class PlainDefinition(NamedTuple):
    """The minimal `Definition`."""

    name: str
    kind: EntityKind
    properties: EntityProperties


# --- the tier -----------------------------------------------------------------------------------


def complete(properties: P, limits: NamespaceLimits, known: EntityProperties | None = None) -> P:
    """Return the properties with the tier's defaults for unset fields.

    In a namespace that is partitioned as a whole, `enable_partitioning` is true for each entity,
    except for one that was created before: `known` has the properties of an existing entity.
    """
    return properties.model_copy(update=_tier_defaults(properties, limits, known))


def assume(properties: P, limits: NamespaceLimits) -> P:
    """Return the properties with the defaults of an assumed tier.

    These fields stay unset, so that `complete` replaces them by the defaults of the actual tier.
    """
    values = dict(complete(properties, limits))
    return type(properties).model_construct(_fields_set=properties.model_fields_set, **values)


def _tier_defaults(
    properties: EntityProperties, limits: NamespaceLimits, known: EntityProperties | None
) -> dict[str, Any]:
    said = properties.model_fields_set
    changes: dict[str, Any] = {}
    if "default_message_ttl_ms" not in said:
        changes["default_message_ttl_ms"] = limits.max_default_ttl_ms
    if not isinstance(properties, SubscriptionProperties):
        if "max_message_size_in_kilobytes" not in said:
            changes["max_message_size_in_kilobytes"] = limits.default_message_size_kb
        is_plain = known is not None and not getattr(known, "enable_partitioning", False)
        if limits.is_wholly_partitioned and not is_plain:
            changes["enable_partitioning"] = True
        elif "enable_partitioning" not in said:
            changes["enable_partitioning"] = False
    return changes


def tier_problems(
    properties: EntityProperties, limits: NamespaceLimits, known: EntityProperties | None = None
) -> dict[str, str]:
    """Return properties that the namespace's tier does not allow, and contradictions.

    An existing entity may keep its properties, also those of another tier: `known` has them.
    """
    problems = _tier_problems(properties, limits)
    if problems and known is not None:
        kept, wanted = (each.model_dump(by_alias=True) for each in (known, properties))
        missing = object()
        return {
            field: text
            for field, text in problems.items()
            if kept.get(field, missing) != wanted.get(field)
        }
    return problems


def _tier_problems(properties: EntityProperties, limits: NamespaceLimits) -> dict[str, str]:
    problems: dict[str, str] = {}
    if properties.default_message_ttl_ms > limits.max_default_ttl_ms:
        most = format_duration(limits.max_default_ttl_ms)
        problems["defaultMessageTimeToLive"] = f"this tier allows at most {most}"
    if limits.is_basic:
        problems |= _basic_problems(properties)
    if not isinstance(properties, SubscriptionProperties):
        problems |= _size_problems(properties, limits)
        if properties.enable_partitioning and not _can_partition(limits):
            problems["enablePartitioning"] = (
                "in Premium the namespace is partitioned as a whole, when it is created"
                " (premiumMessagingPartitions)"
            )
    return problems


def _can_partition(limits: NamespaceLimits) -> bool:
    return limits.max_partitioned_count is not None or limits.is_wholly_partitioned


def _basic_problems(properties: EntityProperties) -> dict[str, str]:
    """Return features that Basic lacks. Source: price page and limits of Azure Service Bus."""
    missing = "not available in Basic: use Standard or Premium"
    asked = {
        "requiresSession": getattr(properties, "requires_session", False),
        "requiresDuplicateDetection": getattr(properties, "requires_duplicate_detection", False),
        "autoDeleteOnIdle": properties.auto_delete_on_idle_ms < MAX_DURATION_MS,
        "forwardTo": getattr(properties, "forward_to", None) is not None,
        "forwardDeadLetteredMessagesTo": (
            getattr(properties, "forward_dead_lettered_messages_to", None) is not None
        ),
    }
    problems = {where: missing for where, is_asked in asked.items() if is_asked}
    if not isinstance(properties, QueueProperties):
        problems[""] = f"topics and subscriptions are {missing}"
    return problems


def _size_problems(
    properties: QueueProperties | TopicProperties, limits: NamespaceLimits
) -> dict[str, str]:
    problems = {}
    if properties.max_size_in_megabytes not in limits.sizes_mb:
        sizes = ", ".join(map(str, limits.sizes_mb))
        problems["maxSizeInMegabytes"] = f"this tier allows {sizes}"
    size_kb = properties.max_message_size_in_kilobytes
    if not limits.is_message_size_settable and size_kb != limits.default_message_size_kb:
        problems["maxMessageSizeInKilobytes"] = "can only be changed in Premium"
    elif limits.is_message_size_settable and size_kb < 1024:
        problems["maxMessageSizeInKilobytes"] = "must be at least 1024"
    return problems


# --- the past -----------------------------------------------------------------------------------


def change_problems(before: EntityProperties, after: EntityProperties) -> dict[str, str]:
    """Return changes to fields that cannot change after creation."""
    return {
        field: (
            f"cannot be changed from {_said(getattr(before, name))}: create another entity and"
            " forward to it"
        )
        for name, field in IMMUTABLE.items()
        if getattr(before, name, None) != getattr(after, name, None)
    }


def _said(value: object) -> str:
    return str(value).lower()


# --- the namespace ------------------------------------------------------------------------------


def forwarding_problems(
    wanted: Definition, find: Callable[[str], Definition | None]
) -> dict[str, str]:
    """Return invalid forwarding targets.

    A target must exist when it is set, as in Azure; when it is deleted later, messages for it are
    dead-lettered. `find` takes names in lower case.
    """
    problems: dict[str, str] = {}
    properties = wanted.properties
    if isinstance(properties, TopicProperties):
        return problems
    for field, target in (
        ("forwardTo", properties.forward_to),
        ("forwardDeadLetteredMessagesTo", properties.forward_dead_lettered_messages_to),
    ):
        if target is None:
            continue
        name = target.lower()
        if name == wanted.name.lower():
            continue
        if (found := find(name)) is None:
            problems[field] = f"there is no queue or topic {target}"
        elif found.kind is EntityKind.SUBSCRIPTION:
            problems[field] = "messages can only be forwarded to a queue or a topic"
    return problems


def forwarding_warnings(
    wanted: Definition,
    find: Callable[[str], Definition | None],
    subscriptions_of: Callable[[str], Iterable[Definition]],
) -> dict[str, str]:
    """Return forwarding that is allowed, as in Azure, but probably not intended.

    Messages in a forwarding loop end in a transfer dead-letter queue, since hops are counted and
    limited. Dead letters that return through another entity are a valid retry queue.
    """
    warnings: dict[str, str] = {}
    properties = wanted.properties
    if isinstance(properties, TopicProperties):
        return warnings
    if properties.forward_to is not None:
        way = _way_back(wanted, properties.forward_to.lower(), find, subscriptions_of)
        if way:
            warnings["forwardTo"] = (
                f"forwarding loop; messages in it will be dead-lettered: {' -> '.join(way)}"
            )
        elif properties.requires_session:
            warnings["forwardTo"] = "all messages are forwarded, so no session can be received"
    dead_to = properties.forward_dead_lettered_messages_to
    if dead_to is not None and dead_to.lower() in _homes(wanted):
        warnings["forwardDeadLetteredMessagesTo"] = "dead letters return to this entity"
    return warnings


def _homes(wanted: Definition) -> set[str]:
    """Return the names that messages for an entity are sent to, in lower case."""
    name = wanted.name.lower()
    is_subscription = wanted.kind is EntityKind.SUBSCRIPTION
    return {name, topic_of(name)} if is_subscription else {name}


def _way_back(
    wanted: Definition,
    target: str,
    find: Callable[[str], Definition | None],
    subscriptions_of: Callable[[str], Iterable[Definition]],
) -> list[str]:
    """Return the names of a forwarding loop through an entity, empty when there is none."""
    goals = _homes(wanted)
    came_from: dict[str, str | None] = {target: None}
    open_names = [target]
    while open_names:
        name = open_names.pop()
        if name in goals:
            way: list[str] = []
            step: str | None = name
            while step is not None:
                found = find(step)
                way.append(found.name if found else step)
                step = came_from[step]
            return [wanted.name, *reversed(way)]
        for following in _targets_of(name, find, subscriptions_of):
            if following not in came_from:
                came_from[following] = name
                open_names.append(following)
    return []


def _targets_of(
    name: str,
    find: Callable[[str], Definition | None],
    subscriptions_of: Callable[[str], Iterable[Definition]],
) -> list[str]:
    """Return the forwarding targets of a queue or topic, in lower case."""
    found = find(name)
    if found is None:
        return []
    sources = subscriptions_of(name) if found.kind is EntityKind.TOPIC else (found,)
    targets = [getattr(source.properties, "forward_to", None) for source in sources]
    return [target.lower() for target in targets if target is not None]


def in_order_of_forwarding(definitions: Iterable[Definition]) -> list[Definition]:
    """Return targets before the entities that forward to them; a topic follows its subscriptions.

    Changing definitions in this order creates no loop that is not in the result. The members of a
    loop may come in any order.
    """
    named = {each.name.lower(): each for each in definitions}
    subscriptions: dict[str, list[Definition]] = {}
    for each in named.values():
        if each.kind is EntityKind.SUBSCRIPTION:
            subscriptions.setdefault(topic_of(each.name).lower(), []).append(each)
    ordered: dict[str, Definition] = {}
    begun: set[str] = set()
    for first in named.values():
        waiting = [(first.name.lower(), False)]
        while waiting:
            name, is_ready = waiting.pop()
            if is_ready:
                ordered[name] = named[name]
                continue
            if name not in named or name in begun:  # begun and not ready: a loop
                continue
            begun.add(name)
            waiting.append((name, True))
            if named[name].kind is EntityKind.TOPIC:
                waiting += [(one.name.lower(), False) for one in subscriptions.get(name, ())]
            elif (target := getattr(named[name].properties, "forward_to", None)) is not None:
                waiting.append((target.lower(), False))
    return list(ordered.values())


# --- rules --------------------------------------------------------------------------------------


def rule_count_problem(rules: Iterable[RuleProperties], limits: NamespaceLimits) -> str | None:
    """Return an error if the rules of all subscriptions of a topic are too many, else None."""
    sql = correlation = 0
    for rule in rules:
        if rule.sql_filter is not None:
            sql += 1
        else:
            correlation += 1
    if sql > limits.max_sql_rule_count:
        return f"a topic has at most {limits.max_sql_rule_count} rules with a SQL filter"
    if correlation > limits.max_correlation_rule_count:
        most = limits.max_correlation_rule_count
        return f"a topic has at most {most} rules with a correlation filter"
    return None


MAX_RULES_BYTES: Final = 1_048_576
"""Maximum size of a subscription's rules as JSON. Our choice: each change stores all of them."""


def rules_size_problem(rules: Iterable[RuleProperties]) -> str | None:
    """Return an error if the rules of a subscription are too large together, else None."""
    size_bytes = sum([len(rule.text.encode()) for rule in rules])
    if size_bytes <= MAX_RULES_BYTES:
        return None
    return (
        f"the rules of the subscription have {size_bytes} bytes as JSON, {MAX_RULES_BYTES} are"
        " allowed: remove some, or spread them over several subscriptions"
    )


def doubled_rule(rules: Iterable[RuleProperties]) -> str | None:
    """Return a rule name that occurs twice, None when there is none. Names compare without case."""
    seen: set[str] = set()
    for rule in rules:
        if rule.name.lower() in seen:
            return rule.name
        seen.add(rule.name.lower())
    return None
