"""Request and response bodies of the control API.

Only JSON models, so that clients (operator, CI, command line) can use them too. Definitions of
entities use the models of `entities`, with the field names of the manifests. Unknown fields of a
request are rejected; responses may gain fields, and clients ignore fields they do not know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    SecretStr,
)

from postbus.contract.bodies import Body, ResponseBody
from postbus.contract.durations import DurationMs
from postbus.contract.entities import (
    EntityProperties,
    NamespaceProperties,
    QueueProperties,
    Right,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.contract.namespace import NamespaceDefinition

PROTOCOL: Final = 1
"""Version of this API, the `1` of `/v1`. Fields and paths are only added within one version."""

EPOCH_HEADER: Final = "Postbus-Caller-Epoch"
"""The epoch of the calling lease holder; a bus that has seen a higher one rejects the call."""

MAX_EPOCH: Final = 2**63 - 1
MAX_OUTAGE_MS: Final = 3_600_000
"""Our choice: longer than any client retries."""

MAX_PAGE: Final = 1_000
DEFAULT_PAGE: Final = 100
MAX_WAIT_S: Final = 60
"""Maximum wait of a request for changes. Our choice: below the usual timeouts of proxies."""

# --- definitions --------------------------------------------------------------------------------


class SubscriptionDefinition(SubscriptionProperties):
    """A subscription with its rules.

    `rules` replace the existing rules. Without the field they stay; a new subscription then
    receives every message of its topic.
    """

    rules: tuple[RuleProperties, ...] | None = Field(None, max_length=100_000)


class DeletionPolicy(Enum):
    """Fate of an entity's messages: deleted, a reason to refuse the deletion, or kept for a
    restore.
    """

    DELETE = "Delete"
    DELETE_IF_EMPTY = "DeleteIfEmpty"
    RETAIN = "Retain"


class Applied(ResponseBody):
    """The result of a change.

    `version` is the catalog version of the entity's last change; `acknowledged` maps each partition
    to the catalog version it follows. `applied_hash` changes only with the definition.
    """

    entity_id: int
    applied_hash: str
    version: int
    acknowledged: dict[int, int]
    created: bool


class Deleted(ResponseBody):
    """A deleted entity. `restorable`: it can be restored until its retention ends."""

    entity_id: int
    version: int
    restorable: bool


def applied_hash(
    properties: EntityProperties | NamespaceProperties, rules: Sequence[RuleProperties] = ()
) -> str:
    """Return the sha256, in hex, of a definition as canonical JSON.

    Fields with their default value are left out, so that a field that is added later changes no
    hash. The order of rules does not matter, nor whether `rules` are part of `properties`.
    """
    said = _canonical(properties, {"rules"})
    rules = getattr(properties, "rules", None) or rules
    if rules:
        in_order = sorted(rules, key=lambda rule: rule.name.lower())
        said["rules"] = [_canonical(rule, set()) for rule in in_order]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _canonical(model: BaseModel, without: set[str]) -> dict[str, Any]:
    said: dict[str, Any] = model.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude=without
    )
    for rule in said.get("authorizationRules", ()):
        rule["rights"].sort()  # a set has no order
    return said


# --- what exists --------------------------------------------------------------------------------


class EntityFacts(ResponseBody):
    """Fields common to all entities. `version` is the ETag.

    `managed_by` is the mark that the last PUT with `managed-by` set, empty if none did.

    `warnings` name fields of the definition that are valid but probably not intended. They are
    present for a single entity, not in lists.
    """

    entity_id: int
    name: str
    version: int
    applied_hash: str
    created_at: datetime
    updated_at: datetime
    is_partitioned: bool
    partitions: tuple[int, ...]
    managed_by: str
    warnings: tuple[str, ...] = ()


class QueueDescription(EntityFacts):
    """A queue. `properties` can be sent back unchanged in a PUT."""

    properties: QueueProperties


class TopicDescription(EntityFacts):
    """A topic. `properties` can be sent back unchanged in a PUT."""

    properties: TopicProperties


class SubscriptionDescription(EntityFacts):
    """A subscription; `name` is the name within its topic, `path` the address for receivers."""

    topic: str
    path: str
    properties: SubscriptionDefinition


class RuleDescription(ResponseBody):
    """A rule of a subscription. `properties` can be sent back unchanged in a PUT."""

    name: str
    created_at: datetime
    properties: RuleProperties


class QueuePage(ResponseBody):
    """A page of queues, by name. `next_skip` is null on the last page."""

    items: list[QueueDescription]
    next_skip: int | None


class TopicPage(ResponseBody):
    """A page of topics, by name. `next_skip` is null on the last page."""

    items: list[TopicDescription]
    next_skip: int | None


class SubscriptionPage(ResponseBody):
    """A page of subscriptions, by topic and name. `next_skip` is null on the last page."""

    items: list[SubscriptionDescription]
    next_skip: int | None


class RulePage(ResponseBody):
    """A page of a subscription's rules, by name. `next_skip` is null on the last page."""

    items: list[RuleDescription]
    next_skip: int | None


class CountDetails(ResponseBody):
    """Message counts by sub-queue."""

    active_message_count: int
    dead_letter_message_count: int
    scheduled_message_count: int
    transfer_message_count: int
    transfer_dead_letter_message_count: int


class MessageRates(ResponseBody):
    """Messages per second over the last 10 to 15 seconds, as seen by this broker.

    `incoming`: messages sent; for a subscription, its copies. `outgoing`: deliveries, including
    repeated ones; zero for a topic, its subscriptions count them. `completed`: messages removed by
    receivers.
    """

    incoming: float
    outgoing: float
    completed: float


class RuntimeInformation(ResponseBody):
    """Counts and size of an entity, exact while nobody sends or receives.

    `availability` is `Available`, or `Limited` while one of its partitions is unavailable or
    accepts no messages. Counts, size, `accessed_at` and the age of the oldest message exclude the
    partitions listed in `unavailable_partitions`. When all partitions are unavailable, the response
    is 503.

    `message_count` is the sum over all sub-queues. `accessed_at` is coarse and starts with the time
    of creation. `rates` is null in a broker's first second. `oldest_message_age_seconds` is the age
    of the oldest active message; null when there is none, or when its partition is unavailable.
    """

    message_count: int
    count_details: CountDetails
    size_in_bytes: int
    accessed_at: datetime
    availability: str
    unavailable_partitions: tuple[int, ...]
    subscription_count: int
    rates: MessageRates | None
    oldest_message_age_seconds: float | None


class EntityTotals(ResponseBody):
    """Numbers of entities of a namespace, as of its `version`.

    `unmanaged` is the number of those without a `managedBy` mark.
    """

    queues: int
    topics: int
    subscriptions: int
    unmanaged: int


class NamespaceDescription(ResponseBody):
    """The bus namespace. `version`: catalog version, and ETag. `is_closed`: it was closed
    and accepts no messages until it is opened.

    `properties` can be sent back unchanged in a PUT.
    """

    name: str
    version: int
    partition_count: int
    is_closed: bool
    entities: EntityTotals
    applied_hash: str
    properties: NamespaceDefinition


# --- deleted entities and changes ---------------------------------------------------------------


class Tombstone(ResponseBody):
    """A deleted entity. `restorable_until` is null when its messages are deleted too."""

    entity_id: int
    name: str
    kind: Literal["queue", "topic", "subscription"]
    reason: str
    version: int
    deleted_at: datetime
    restorable_until: datetime | None
    managed_by: str


class Tombstones(ResponseBody):
    """Entities deleted after a version, oldest first. `version`: start of the next request."""

    version: int
    items: list[Tombstone]


class EntityChange(ResponseBody):
    """A change of the catalog: an entity was put (created or changed), or deleted.

    `applied_hash` is that of an entity that exists. `reason` and `restorable_until` are those of a
    tombstone.
    """

    version: int
    entity_id: int
    name: str
    kind: Literal["queue", "topic", "subscription"]
    change: Literal["put", "deleted"]
    managed_by: str
    applied_hash: str | None = None
    reason: str | None = None
    restorable_until: datetime | None = None


class EntityChanges(ResponseBody):
    """Changes after a version, oldest first: 1,000 or a few more.

    `version` is the start of the next request. Without `wait`, an empty list is the end.
    `counts_cursor` is there after a wait without a change: the `cursor` of the counts of all
    entities. Who has asked for counts up to this one knows them all.
    """

    version: int
    items: list[EntityChange]
    counts_cursor: str | None = None


# --- authorization rules ------------------------------------------------------------------------


KeyText = Annotated[SecretStr, Field(min_length=1, max_length=256)]


class AuthorizationRuleDefinition(Body):
    """Rights of a rule. Keys that are not given stay as they are; a new rule gets random keys."""

    rights: frozenset[Right] = Field(min_length=1)
    primary_key: KeyText | None = None
    secondary_key: KeyText | None = None


class AuthorizationRuleDescription(ResponseBody):
    """An authorization rule. Keys are null unless requested with `?keys=true`.

    `is_declared`: a manifest declares the rule; it can only be changed there, and has no
    timestamps.
    `managed_by` is the mark that the last PUT with `managed-by` set, empty if none did.
    """

    name: str
    rights: list[Right]
    is_declared: bool
    created_at: datetime | None
    updated_at: datetime | None
    managed_by: str
    primary_key: str | None = Field(None, repr=False)
    secondary_key: str | None = Field(None, repr=False)


class AuthorizationRulePage(ResponseBody):
    """All rules of a namespace, a queue or a topic, by name."""

    items: list[AuthorizationRuleDescription]


# --- status -------------------------------------------------------------------------------------


class PartitionStatus(ResponseBody):
    """A partition. `version`: catalog version it follows. `trouble` is null while it works.

    `epoch` rises with each claim; it and `schema_version`, that of the tables, are null while this
    broker has not claimed the partition.
    """

    partition: int
    status: str
    version: int | None
    epoch: int | None = None
    schema_version: int | None = None
    reload_count: int
    trouble: str | None


class Status(ResponseBody):
    """The state of this broker. `is_ready`: it accepts clients; at least one partition is usable.

    `troubles` describe current problems, for people.
    """

    program: Literal["postbus"] = "postbus"
    program_version: str
    protocol: int = PROTOCOL
    namespace: str
    broker: str
    is_ready: bool
    is_development: bool
    version: int
    highest_caller_epoch: int
    partitions: list[PartitionStatus]
    troubles: list[str]


class LinkDescription(ResponseBody):
    """A link of a client. `credit`: outstanding link credit; `locks`: unsettled messages."""

    entity: str
    role: Literal["sender", "receiver"]
    credit: int
    locks: int


class ConnectionDescription(ResponseBody):
    """A connection of an AMQP client.

    `rules`: authorization rules whose keys it presented; `idle_s`: seconds since its last frame.
    """

    connection: int
    address: str | None
    rules: list[str]
    idle_s: int
    links: list[LinkDescription]


class ConnectionPage(ResponseBody):
    """A page of clients, longest connected first. `next_skip` is null on the last page."""

    items: list[ConnectionDescription]
    next_skip: int | None


# --- development --------------------------------------------------------------------------------


def _above_zero(value_ms: int) -> int:
    if value_ms <= 0:
        raise ValueError("must be longer than PT0S")
    return value_ms


def _short(value_ms: int) -> int:
    if value_ms > MAX_OUTAGE_MS:
        raise ValueError("must be at most PT1H")
    return value_ms


SomeTime = Annotated[DurationMs, AfterValidator(_above_zero)]


class Advance(Body):
    """Duration by which to advance the time of messages."""

    duration: SomeTime


class LoseLocksOf(Body):
    """The entity that loses its locks."""

    entity: str = Field(min_length=1)


class StoreOutage(Body):
    """A simulated outage of the store, in real time. `partition` null: all partitions."""

    duration: Annotated[SomeTime, AfterValidator(_short)]
    partition: int | None = Field(None, ge=0)


class Clock(ResponseBody):
    """The time of messages. `offset_ms`: milliseconds by which it is ahead of the wall clock."""

    mode: Literal["wall", "manual"]
    now: datetime
    offset_ms: int


class LocksLost(ResponseBody):
    """The entity whose locks were expired, with its name as created."""

    entity: str


class StoreInterrupted(ResponseBody):
    """The partitions without a store, and the duration of the outage."""

    duration: DurationMs
    partitions: list[int]


# --- refusals -----------------------------------------------------------------------------------


class ProblemType(Enum):
    """Kinds of problems, for programs; `about:blank` if the status says everything."""

    PLAIN = "about:blank"
    INVALID = "urn:postbus:problem:invalid"
    UNAUTHORIZED = "urn:postbus:problem:unauthorized"
    NOT_FOUND = "urn:postbus:problem:not-found"
    ALREADY_EXISTS = "urn:postbus:problem:already-exists"
    IMMUTABLE = "urn:postbus:problem:immutable"
    QUOTA_EXCEEDED = "urn:postbus:problem:quota-exceeded"
    VERSION_DIFFERS = "urn:postbus:problem:version-differs"
    NOT_EMPTY = "urn:postbus:problem:not-empty"
    CALLER_TOO_OLD = "urn:postbus:problem:caller-too-old"
    NOT_HERE = "urn:postbus:problem:not-here"
    TOO_OLD = "urn:postbus:problem:too-old"
    UNAVAILABLE = "urn:postbus:problem:unavailable"


class FieldProblem(ResponseBody):
    """A problem with one field; `field` is its path in the body, with dots."""

    field: str
    problem: str


class Problem(ResponseBody):
    """The reason for rejecting a request (RFC 9457). `detail` is for people and says what to do."""

    type: ProblemType = ProblemType.PLAIN
    title: str
    status: int
    detail: str
    problems: list[FieldProblem] = Field(default_factory=list)


# --- audit --------------------------------------------------------------------------------------


class AuditEntry(ResponseBody):
    """A manual change and its caller.

    Equal calls of one caller within a minute are combined into one entry; `calls` is their number.
    `entity` "" is the namespace.
    `outcome` is `done`, `unknown`, or the reason for a refusal; null: the change is in progress, or
    its result was not recorded.
    """

    number: int
    begun_at: datetime
    ended_at: datetime | None
    calls: int
    caller: str
    address: str
    protocol: str
    verb: str
    entity: str
    detail: dict[str, Any]
    outcome: str | None


class AuditPage(ResponseBody):
    """Audit entries, newest first. Next page: `next_before` as `before`; null on the last page."""

    items: list[AuditEntry]
    next_before: int | None
