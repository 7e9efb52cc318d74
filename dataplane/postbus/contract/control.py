"""Bodies of the control API: what the operator, CI and the command line say, and what they hear.

Models of JSON and nothing else, so that whoever calls the API may use them too. What an entity is
told to be is said in `entities`'s models, whose field names are those of the manifests. An unknown
field of a request is refused; answers may gain fields, callers ignore what they do not know.
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
    ConfigDict,
    Field,
    SecretStr,
)
from pydantic.alias_generators import to_camel

from postbus.contract.entities import (
    DurationMs,
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
"""Which holder of a lease speaks: whoever has seen a higher number refuses it."""

MAX_EPOCH: Final = 2**63 - 1
MAX_OUTAGE_MS: Final = 3_600_000
"""Our choice: longer than any client retries."""

MAX_PAGE: Final = 1_000
DEFAULT_PAGE: Final = 100
MAX_WAIT_S: Final = 60
"""How long a question for changes may wait. Our choice: less than what proxies allow."""


class Body(BaseModel):
    """A body that this API is sent: camel case on the wire, nothing unknown accepted."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )


class ResponseBody(BaseModel):
    """A body that this API answers with."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


# --- definitions --------------------------------------------------------------------------------


class SubscriptionDefinition(SubscriptionProperties):
    """A subscription with its rules.

    `rules` replace those it has. Without the field they stay, and a new subscription takes every
    message of its topic.
    """

    rules: tuple[RuleProperties, ...] | None = Field(None, max_length=100_000)


class DeletionPolicy(Enum):
    """What happens to messages: gone, in the way of the deletion, or kept for a restore."""

    DELETE = "Delete"
    DELETE_IF_EMPTY = "DeleteIfEmpty"
    RETAIN = "Retain"


class Applied(ResponseBody):
    """What a change led to.

    `version` is the catalog's when the entity changed last; `acknowledged` says of each partition
    which version of the catalog it follows. `applied_hash` changes with the definition only.
    """

    entity_id: int
    applied_hash: str
    version: int
    acknowledged: dict[int, int]
    created: bool


class Deleted(ResponseBody):
    """An entity went. `restorable`: `entity_id` brings it back until its retention is over."""

    entity_id: int
    version: int
    restorable: bool


def applied_hash(
    properties: EntityProperties | NamespaceProperties, rules: Sequence[RuleProperties] = ()
) -> str:
    """Return sha256, in hex, of a definition as canonical JSON.

    Fields that have their default do not count, so that a field that is added later changes no
    hash; neither does the order of rules. Whether `rules` are part of `properties` is the same.
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
    """What is said of every entity. `version` is its ETag.

    `warnings`, told of one entity and not in lists: what of the definition is allowed and hardly
    meant, each with its field.
    """

    entity_id: int
    name: str
    version: int
    applied_hash: str
    created_at: datetime
    updated_at: datetime
    is_partitioned: bool
    partitions: tuple[int, ...]
    warnings: tuple[str, ...] = ()


class QueueDescription(EntityFacts):
    """A queue. `properties` may be put back as they are."""

    properties: QueueProperties


class TopicDescription(EntityFacts):
    """A topic. `properties` may be put back as they are."""

    properties: TopicProperties


class SubscriptionDescription(EntityFacts):
    """A subscription; `name` is its own, `path` what a receiver opens."""

    topic: str
    path: str
    properties: SubscriptionDefinition


class RuleDescription(ResponseBody):
    """A rule of a subscription. `properties` may be put back as they are."""

    name: str
    created_at: datetime
    properties: RuleProperties


class QueuePage(ResponseBody):
    """Some of the queues, by name. `next_skip` None: that was the last page."""

    items: list[QueueDescription]
    next_skip: int | None


class TopicPage(ResponseBody):
    """Some of the topics, by name. `next_skip` None: that was the last page."""

    items: list[TopicDescription]
    next_skip: int | None


class SubscriptionPage(ResponseBody):
    """Some subscriptions of a topic, by name. `next_skip` None: that was the last page."""

    items: list[SubscriptionDescription]
    next_skip: int | None


class RulePage(ResponseBody):
    """Some rules of a subscription, by name. `next_skip` None: that was the last page."""

    items: list[RuleDescription]
    next_skip: int | None


class CountDetails(ResponseBody):
    """How many messages lie where."""

    active_message_count: int
    dead_letter_message_count: int
    scheduled_message_count: int
    transfer_message_count: int
    transfer_dead_letter_message_count: int


class MessageRates(ResponseBody):
    """Messages a second over the last 10 to 15 seconds, as this broker sees them.

    `incoming`: sent, of a subscription its copies. `outgoing`: delivered, again each time; of a
    topic none, its subscriptions have them. `completed` ones are gone.
    """

    incoming: float
    outgoing: float
    completed: float


class RuntimeInformation(ResponseBody):
    """What an entity holds, exact while nobody sends or receives.

    `availability` is `Available`, or `Limited` while one of its partitions is away or takes no
    messages. Counts, size, `accessed_at` and the age of the oldest message leave out the partitions
    that are away: `unavailable_partitions`. While all are away the answer is 503.

    `message_count` is the sum of all sub-queues. `accessed_at` is coarse, the creation at first.
    `rates` is null in a broker's first second. `oldest_message_age_seconds`: how long the active
    message has waited that waits longest; null when none waits, or when its partition is away.
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


class NamespaceDescription(ResponseBody):
    """The bus namespace. `version`: the catalog's, the ETag. `properties` may be put back."""

    name: str
    version: int
    partition_count: int
    applied_hash: str
    properties: NamespaceDefinition


# --- deleted entities and changes ---------------------------------------------------------------


class Tombstone(ResponseBody):
    """An entity that is gone. `restorable_until` None: its messages are gone too."""

    entity_id: int
    name: str
    kind: Literal["queue", "topic", "subscription"]
    reason: str
    version: int
    deleted_at: datetime
    restorable_until: datetime | None


class Tombstones(ResponseBody):
    """What was deleted after a version, oldest first. `version`: ask from here next time."""

    version: int
    items: list[Tombstone]


class Change(ResponseBody):
    """One change of the catalog: an entity was put (created or changed), or deleted."""

    version: int
    entity_id: int
    name: str
    kind: Literal["queue", "topic", "subscription"]
    change: Literal["put", "deleted"]


class Changes(ResponseBody):
    """What changed after a version, oldest first. `version`: ask from here next time."""

    version: int
    items: list[Change]


# --- authorization rules ------------------------------------------------------------------------


KeyText = Annotated[SecretStr, Field(min_length=1, max_length=256)]


class AuthorizationRuleDefinition(Body):
    """What a rule may do. A key that is not given stays as it is; a new rule gets random ones."""

    rights: frozenset[Right] = Field(min_length=1)
    primary_key: KeyText | None = None
    secondary_key: KeyText | None = None


class AuthorizationRuleDescription(ResponseBody):
    """A rule. Its keys are told only to who asks for them (`?keys=true`), else they are None.

    `is_declared`: a manifest declares it, and only there it is changed; it has no times.
    """

    name: str
    rights: list[Right]
    is_declared: bool
    created_at: datetime | None
    updated_at: datetime | None
    primary_key: str | None = Field(None, repr=False)
    secondary_key: str | None = Field(None, repr=False)


class AuthorizationRulePage(ResponseBody):
    """All rules of a namespace, a queue or a topic, by name."""

    items: list[AuthorizationRuleDescription]


# --- status -------------------------------------------------------------------------------------


class PartitionStatus(ResponseBody):
    """One partition. `version`: the catalog's that it follows. `trouble` None: it works."""

    partition: int
    status: str
    version: int | None
    reload_count: int
    trouble: str | None


class Status(ResponseBody):
    """How this broker is. `is_ready`: clients may come, at least one partition can be used.

    `troubles` name what does not work, for people.
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
    """A link of a client. `credit`: messages that may come; `locks`: those not settled."""

    entity: str
    role: Literal["sender", "receiver"]
    credit: int
    locks: int


class ConnectionDescription(ResponseBody):
    """A client over AMQP. `rules`: whose keys it has shown; `idle_s`: since it said something."""

    connection: int
    address: str | None
    rules: list[str]
    idle_s: int
    links: list[LinkDescription]


class ConnectionPage(ResponseBody):
    """Some clients, the longest connected ones first. `next_skip` None: that was the last page."""

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
    """How far to move the time of messages."""

    duration: SomeTime


class LoseLocksOf(Body):
    """Whose locks to take away."""

    entity: str = Field(min_length=1)


class StoreOutage(Body):
    """`partition` None: all of them. The duration is real time."""

    duration: Annotated[SomeTime, AfterValidator(_short)]
    partition: int | None = Field(None, ge=0)


class Clock(ResponseBody):
    """`now` is entity time, `offset_ms` how far it was moved ahead of the wall."""

    mode: Literal["wall", "manual"]
    now: datetime
    offset_ms: int


class LocksLost(ResponseBody):
    """`entity` as it was created."""

    entity: str


class StoreInterrupted(ResponseBody):
    """Which partitions have no store for that long."""

    duration: DurationMs
    partitions: list[int]


# --- refusals -----------------------------------------------------------------------------------


class ProblemType(Enum):
    """Kinds of problems, for programs; of the others the status says everything."""

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
    """What is wrong with one field; `field` as in the body, with dots."""

    field: str
    problem: str


class Problem(ResponseBody):
    """Why a request was refused (RFC 9457). `detail` is for people and says what to do."""

    type: ProblemType = ProblemType.PLAIN
    title: str
    status: int
    detail: str
    problems: list[FieldProblem] = Field(default_factory=list)


# --- audit --------------------------------------------------------------------------------------


class AuditedChange(ResponseBody):
    """Who changed what by hand.

    `calls` of one caller that did the same within a minute are taken together. `entity` "" is the
    namespace. `outcome` is `done`, `unknown`, or says why it was refused; null: it is under way, or
    nobody knows how it ended.
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
    """Lines of the audit, the newest first; go on with `before` as `next_before`, null: no more."""

    items: list[AuditedChange]
    next_before: int | None
