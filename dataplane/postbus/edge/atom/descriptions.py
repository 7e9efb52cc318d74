"""Queues, topics and subscriptions in the XML of administration, in the order of Service Bus.

One table for each kind maps elements to properties. Elements may come in any order; elements
outside the table are ignored, as newer clients send more. Properties without an ATOM element are
kept when a definition is replaced. Source: Service Bus's answers as recorded in the SDKs' tests,
api-version 2024-05.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from pydantic import ValidationError

from postbus.broker.access.authorization_rules import AuthorizationRuleDescription, WantedRule
from postbus.broker.administration import EntityDescription, RuntimeInformation
from postbus.contract.checks import IMMUTABLE
from postbus.contract.durations import format_duration
from postbus.contract.entities import (
    PROPERTIES_OF,
    EntityKind,
    EntityProperties,
    NamespaceLimits,
    RuleProperties,
)
from postbus.edge.atom.authorization import read_authorization_rules, write_authorization_rules
from postbus.edge.atom.rules import read_rule
from postbus.edge.atom.xml_text import (
    COUNTS_NAMESPACE,
    BadDocument,
    children,
    element,
    read_boolean,
    read_duration_ms,
    read_integer,
    text_of,
    write_boolean,
    write_time,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Address of this namespace in the client's request: `https`, `host:port`."""

    scheme: str
    authority: str


@dataclass(frozen=True, slots=True)
class Shown:
    """An entity to be written. `filter_counts`: SQL and correlation filters of a topic.

    `size_factor`: ratio of its total size to that of its definition.
    """

    description: EntityDescription
    runtime: RuntimeInformation
    place: Place
    authorization_rules: Sequence[AuthorizationRuleDescription] = ()
    filter_counts: tuple[int, int] | None = None
    size_factor: int = 1

    @property
    def is_counted(self) -> bool:
        """Return whether a partition is available: zeros would look like an empty queue."""
        return len(self.runtime.unavailable_partitions) < len(self.description.partitions)


# --- properties -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PropertyElement:
    """An element for a property. `write` returns None where the element is omitted."""

    element: str
    field: str
    read: Callable[[str], object]
    write: Callable[[Any, Place], str | None]

    def shown(self, shown: Shown) -> str:
        text = self.write(getattr(shown.description.properties, self.field), shown.place)
        return "" if text is None else element(self.element, text)


class SizeLimit(PropertyElement):
    """The quota of an entity, written as the total of all its parts."""

    def shown(self, shown: Shown) -> str:
        most_mb = getattr(shown.description.properties, self.field) * shown.size_factor
        return element(self.element, str(most_mb))


class ForwardTarget(PropertyElement):
    """A forwarding target: stored as an entity's name, written as the URL that a client sent."""

    def shown(self, shown: Shown) -> str:
        name = getattr(shown.description.properties, self.field)
        if name is None:
            return ""
        sent = shown.description.forwards_as_sent.get(self.field, "")
        if (read_path(sent) or "").lower() != name.lower():  # changed since then by its name
            sent = f"sb://{shown.place.authority}/{name}"
        return element(self.element, sent)


def _duration(name: str, field: str) -> PropertyElement:
    return PropertyElement(name, field, read_duration_ms, lambda value, _: format_duration(value))


def _boolean(name: str, field: str) -> PropertyElement:
    return PropertyElement(name, field, read_boolean, lambda value, _: write_boolean(value))


def _integer(name: str, field: str) -> PropertyElement:
    return PropertyElement(name, field, read_integer, lambda value, _: str(value))


def _text(name: str, field: str) -> PropertyElement:
    return PropertyElement(name, field, lambda text: text, lambda value, _: value)


def _target(name: str, field: str) -> ForwardTarget:
    return ForwardTarget(name, field, read_path, lambda value, _: value)


def read_path(text: str) -> str | None:
    """Return the name of an entity, given as such or as a URL of any scheme and host."""
    _, is_absolute, rest = text.strip().partition("://")
    if is_absolute:
        text = unquote(rest.partition("/")[2].partition("?")[0])
    return text.strip().strip("/") or None


def _read_status(text: str) -> str:
    return text.strip()


_STATUS: Final = PropertyElement("Status", "status", _read_status, lambda value, _: value.value)


# --- further facts about an entity ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fact:
    """Elements of responses only; in a request they are ignored."""

    shown: Callable[[Shown], str]


def _fact(name: str, value: Callable[[Shown], str]) -> Fact:
    return Fact(lambda shown: f"<{name}>{value(shown)}</{name}>")


def _count(name: str, value: Callable[[Shown], int]) -> Fact:
    return Fact(lambda shown: f"<{name}>{value(shown)}</{name}>" if shown.is_counted else "")


def _counts(shown: Shown) -> str:
    """Return the counts; JavaScript's client looks for the prefix that is declared right here.

    Without counts the element is empty: Go's client requires it, Python's then returns None.
    """
    counts = shown.runtime
    if not shown.is_counted:
        return f'<CountDetails xmlns:d2p1="{COUNTS_NAMESPACE}"/>'
    return (
        f'<CountDetails xmlns:d2p1="{COUNTS_NAMESPACE}">'
        f"<d2p1:ActiveMessageCount>{counts.active}</d2p1:ActiveMessageCount>"
        f"<d2p1:DeadLetterMessageCount>{counts.dead_letter}</d2p1:DeadLetterMessageCount>"
        f"<d2p1:ScheduledMessageCount>{counts.scheduled}</d2p1:ScheduledMessageCount>"
        f"<d2p1:TransferMessageCount>{counts.transfer}</d2p1:TransferMessageCount>"
        "<d2p1:TransferDeadLetterMessageCount>"
        f"{counts.transfer_dead_letter}</d2p1:TransferDeadLetterMessageCount>"
        "</CountDetails>"
    )


def _total(shown: Shown) -> int:
    counts = shown.runtime
    return (
        counts.active
        + counts.dead_letter
        + counts.scheduled
        + counts.transfer
        + counts.transfer_dead_letter
    )


def _filter_counts(shown: Shown) -> str:
    if shown.filter_counts is None:
        return ""
    sql, correlation = shown.filter_counts
    return (
        f"<SqlFilterCount>{sql}</SqlFilterCount>"
        f"<CorrelationFilterCount>{correlation}</CorrelationFilterCount>"
    )


_SIZE: Final = _count("SizeInBytes", lambda shown: shown.runtime.size_bytes)
_MESSAGE_COUNT: Final = _count("MessageCount", _total)
_NOT_ANONYMOUS: Final = _fact("IsAnonymousAccessible", lambda _: "false")
_CREATED: Final = _fact("CreatedAt", lambda shown: write_time(shown.description.created_ms))
_UPDATED: Final = _fact("UpdatedAt", lambda shown: write_time(shown.description.updated_ms))
_ACCESSED: Final = _fact("AccessedAt", lambda shown: write_time(shown.runtime.accessed_ms))
_COUNTS: Final = Fact(_counts)
_AVAILABILITY: Final = _fact(
    "EntityAvailabilityStatus", lambda shown: shown.runtime.availability.value
)
_RULES: Final = Fact(
    lambda shown: write_authorization_rules(shown.authorization_rules, shown.description.created_ms)
)


# --- the tables -----------------------------------------------------------------------------------

_LOCK: Final = _duration("LockDuration", "lock_duration_ms")
_SIZE_LIMIT: Final = SizeLimit(
    "MaxSizeInMegabytes", "max_size_in_megabytes", read_integer, lambda value, _: str(value)
)
_DUPLICATES: Final = _boolean("RequiresDuplicateDetection", "requires_duplicate_detection")
_WINDOW: Final = _duration(
    "DuplicateDetectionHistoryTimeWindow", "duplicate_detection_history_time_window_ms"
)
_SESSIONS: Final = _boolean("RequiresSession", "requires_session")
_TTL: Final = _duration("DefaultMessageTimeToLive", "default_message_ttl_ms")
_EXPIRED: Final = _boolean(
    "DeadLetteringOnMessageExpiration", "dead_lettering_on_message_expiration"
)
_DELIVERIES: Final = _integer("MaxDeliveryCount", "max_delivery_count")
_BATCHED: Final = _boolean("EnableBatchedOperations", "enable_batched_operations")
_IDLE: Final = _duration("AutoDeleteOnIdle", "auto_delete_on_idle_ms")
_PARTITIONED: Final = _boolean("EnablePartitioning", "enable_partitioning")
_EXPRESS: Final = _boolean("EnableExpress", "enable_express")
_FORWARD: Final = _target("ForwardTo", "forward_to")
_FORWARD_DEAD: Final = _target("ForwardDeadLetteredMessagesTo", "forward_dead_lettered_messages_to")
_METADATA: Final = _text("UserMetadata", "user_metadata")
_MESSAGE_SIZE: Final = _integer("MaxMessageSizeInKilobytes", "max_message_size_in_kilobytes")

COLUMNS: Final[Mapping[EntityKind, Sequence[PropertyElement | Fact]]] = {
    EntityKind.QUEUE: (
        _LOCK,
        _SIZE_LIMIT,
        _DUPLICATES,
        _SESSIONS,
        _TTL,
        _EXPIRED,
        _WINDOW,
        _DELIVERIES,
        _BATCHED,
        _SIZE,
        _MESSAGE_COUNT,
        _NOT_ANONYMOUS,
        _RULES,
        _STATUS,
        _CREATED,
        _UPDATED,
        _ACCESSED,
        _fact("SupportOrdering", lambda _: "true"),
        _COUNTS,
        _IDLE,
        _PARTITIONED,
        _AVAILABILITY,
        _EXPRESS,
        _FORWARD,
        _METADATA,
        _FORWARD_DEAD,
        _MESSAGE_SIZE,
    ),
    EntityKind.TOPIC: (
        _TTL,
        _SIZE_LIMIT,
        _DUPLICATES,
        _WINDOW,
        _BATCHED,
        _SIZE,
        _fact("FilteringMessagesBeforePublishing", lambda _: "false"),
        _NOT_ANONYMOUS,
        _RULES,
        _STATUS,
        _CREATED,
        _UPDATED,
        _ACCESSED,
        _boolean("SupportOrdering", "support_ordering"),
        _COUNTS,
        _fact("SubscriptionCount", lambda shown: str(shown.runtime.subscription_count)),
        Fact(_filter_counts),
        _IDLE,
        _PARTITIONED,
        _AVAILABILITY,
        _fact("EnableSubscriptionPartitioning", lambda _: "false"),
        _EXPRESS,
        _METADATA,
        _MESSAGE_SIZE,
    ),
    EntityKind.SUBSCRIPTION: (
        _LOCK,
        _SESSIONS,
        _TTL,
        _EXPIRED,
        _boolean(
            "DeadLetteringOnFilterEvaluationExceptions",
            "dead_lettering_on_filter_evaluation_exceptions",
        ),
        _MESSAGE_COUNT,
        _DELIVERIES,
        _BATCHED,
        _STATUS,
        _FORWARD,
        _CREATED,
        _UPDATED,
        _ACCESSED,
        _COUNTS,
        _METADATA,
        _FORWARD_DEAD,
        _IDLE,
        _AVAILABILITY,
    ),
}
"""Elements of a response for each kind, in this order; a client's serialiser may depend on it."""

MAX_URL: Final = 1_024
"""Longest URL of a target that is stored as sent. Our choice: a path has at most 260."""

_READABLE: Final = {
    kind: {column.element: column for column in columns if isinstance(column, PropertyElement)}
    for kind, columns in COLUMNS.items()
}
_ELEMENTS: Final = {
    kind: {column.field: name for name, column in readable.items()}
    for kind, readable in _READABLE.items()
}
DESCRIPTIONS: Final = {
    "QueueDescription": EntityKind.QUEUE,
    "TopicDescription": EntityKind.TOPIC,
    "SubscriptionDescription": EntityKind.SUBSCRIPTION,
}


# --- reading and writing --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """The definition in a request.

    `default_rule` replaces `$Default` in a new subscription, if given. `forwards_as_sent`: field ->
    URL of the target as sent.
    """

    properties: EntityProperties
    default_rule: RuleProperties | None = None
    authorization_rules: tuple[WantedRule, ...] | None = None
    forwards_as_sent: Mapping[str, str] = field(default_factory=dict)


def read_description(
    kind: EntityKind,
    description: Element,
    known: EntityProperties | None,
    limits: NamespaceLimits,
) -> Wanted:
    """Return the definition in a description; `known` is the current entity.

    A description replaces the whole definition: omitted elements take their defaults. Only
    immutable properties, and those without an ATOM element, are kept. Raises `BadDocument`.
    """
    said: dict[str, Any] = {}
    sent: dict[str, str] = {}
    default_rule = authorization_rules = None
    readable = _READABLE[kind]
    for tag, child in children(description):
        column = readable.get(tag)
        if column is not None:
            text = text_of(child)
            try:
                said[column.field] = column.read(text)
            except ValueError as error:
                raise BadDocument(f"{tag}: {error}") from None
            if isinstance(column, ForwardTarget) and "://" in text and len(text) <= MAX_URL:
                sent[column.field] = text.strip()
        elif tag == "DefaultRuleDescription" and kind is EntityKind.SUBSCRIPTION:
            default_rule = read_rule(child)
        elif tag == "AuthorizationRules" and kind is not EntityKind.SUBSCRIPTION:
            authorization_rules = read_authorization_rules(child)
        elif tag == "IsAnonymousAccessible" and text_of(child).strip().lower() in ("true", "1"):
            raise BadDocument(f"{tag}: anonymous access is not supported; leave it false")
    if known is not None and type(known) is PROPERTIES_OF[kind]:
        said = _kept(known, readable) | said
    if _SIZE_LIMIT.field in said:
        said[_SIZE_LIMIT.field] = _size_of_part(said, known, limits)
    try:
        properties = PROPERTIES_OF[kind].model_validate(said)
    except ValidationError as error:
        raise BadDocument(_mistakes(kind, error)) from None
    return Wanted(properties, default_rule, authorization_rules, sent)


def _size_of_part(
    said: Mapping[str, Any], known: EntityProperties | None, limits: NamespaceLimits
) -> int:
    """Return the size that a description asks for; it may be in the form of an answer.

    The answer for an entity of several partitions has the sum of their sizes. In Premium one sum is
    a size as well, 80 GB: it is the sum if that is what the entity has.
    """
    size_mb: int = said[_SIZE_LIMIT.field]
    factor = limits.size_factor(is_partitioned=said.get(_PARTITIONED.field) is True)
    size_of_part, rest = divmod(size_mb, factor)
    is_sum = size_mb not in limits.sizes_mb and not rest and size_of_part in limits.sizes_mb
    if is_sum or size_mb == getattr(known, _SIZE_LIMIT.field, 0) * factor:
        return size_of_part
    return size_mb


def _kept(known: EntityProperties, readable: Mapping[str, PropertyElement]) -> dict[str, Any]:
    """Return the properties that a description leaves unchanged if it omits them."""
    given = {column.field for column in readable.values()} - IMMUTABLE.keys()
    return {name: getattr(known, name) for name in known.model_fields_set if name not in given}


def _mistakes(kind: EntityKind, error: ValidationError) -> str:
    """Return all mistakes, each with the name of its element."""
    elements = {
        name: _ELEMENTS[kind][field]
        for field, info in PROPERTIES_OF[kind].model_fields.items()
        for name in (field, info.alias)
        if field in _ELEMENTS[kind] and name is not None
    }
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        where = ".".join(map(str, problem["loc"]))
        why = str(problem["msg"]).removeprefix("Value error, ")
        lines.append(f"{elements.get(where, where)}: {why[:1].lower()}{why[1:]}")
    return "; ".join(lines)


def write_description(shown: Shown) -> str:
    """Return the content of a description of the entity's kind."""
    return "".join([column.shown(shown) for column in COLUMNS[shown.description.kind]])
