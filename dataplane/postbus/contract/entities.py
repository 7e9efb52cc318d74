"""Entity properties, limits and defaults.

Every other package may import this module. Field aliases are those of the manifests (camelCase of
Service Bus's names); inside, durations are integer milliseconds. A model rejects values that no
tier allows; `checks` rejects values that the tier or the rest of the namespace does not allow.
Known features that do not exist yet are rejected by name, never ignored.
Source: the quota and property tables of Azure Service Bus.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from postbus.contract.durations import (
    MAX_DURATION_MS,
    DurationMs,
    DurationRange,
)
from postbus.contract.rule_values import PropertyValue

T = TypeVar("T")

DAY_MS: Final = 86_400_000
ROOT_RULE_NAME: Final = "RootManageSharedAccessKey"  # Azure's name for a namespace's first rule


class EntityStatus(Enum):
    """Operations that an entity accepts. Source: Service Bus EntityStatus."""

    ACTIVE = "Active"
    DISABLED = "Disabled"
    SEND_DISABLED = "SendDisabled"
    RECEIVE_DISABLED = "ReceiveDisabled"


class Sku(Enum):
    """Tier of a namespace: it selects limits and the number of partitions."""

    BASIC = "Basic"
    STANDARD = "Standard"
    PREMIUM = "Premium"


class Right(Enum):
    """A right of an authorization rule's keys. `Manage` implies the other two."""

    LISTEN = "Listen"
    SEND = "Send"
    MANAGE = "Manage"


STANDARD_SIZES_MB: Final = (1024, 2048, 3072, 4096, 5120)
PREMIUM_SIZES_MB: Final = (*STANDARD_SIZES_MB, 10_240, 20_480, 40_960, 81_920)


@dataclass(frozen=True, slots=True)
class NamespaceLimits:
    """Limits of a tier. Sizes are in bytes. Source: the quota page of Azure Service Bus."""

    partition_count: int
    max_message_bytes: int
    max_batch_bytes: int
    max_default_ttl_ms: int
    max_header_bytes: int = 65_536
    max_id_chars: int = 128
    max_delete_count: int = 500
    default_message_size_kb: int = 256
    is_message_size_settable: bool = False
    sizes_mb: tuple[int, ...] = STANDARD_SIZES_MB
    max_session_state_bytes: int = 256 * 1024
    max_entity_count: int = 10_000
    """Queues and topics together. Premium's limit of 1,000 per messaging unit is not enforced:
    messaging units are only informative here."""

    max_partitioned_count: int | None = 100
    """None: partitioning is a property of the namespace and applies to every entity in it."""

    max_subscription_count: int = 2_000
    max_sql_rule_count: int = 2_000
    max_correlation_rule_count: int = 100_000
    """Limits of subscriptions and rules apply per topic."""

    max_connections: int = 5_000
    """Over all listeners. Premium's limit of 1,000 per messaging unit is not enforced either."""

    is_basic: bool = False
    """No topics, sessions, duplicate detection, forwarding, transactions, auto-delete on idle."""

    @property
    def is_wholly_partitioned(self) -> bool:
        """True if every entity is partitioned, regardless of its definition."""
        return self.max_partitioned_count is None and self.partition_count > 1

    def size_factor(self, *, is_partitioned: bool) -> int:
        """Return the factor by which an entity's size exceeds the size in its definition.

        In Standard each partition of a partitioned entity has the full size: 5 GB become 80 GB, and
        stay 80 GB in Premium. In a namespace that was created as Premium the partitions share it.
        Source: Azure's page on partitioned entities.
        """
        is_each = self.max_partitioned_count is not None or self.is_upgraded
        return self.partition_count if is_partitioned and is_each else 1

    @property
    def is_upgraded(self) -> bool:
        """True if it is Premium and was created in another tier, whose partitions it keeps."""
        return (
            self.max_partitioned_count is None
            and self.partition_count == LIMITS[Sku.STANDARD].partition_count
        )


LIMITS: Final = {
    Sku.BASIC: NamespaceLimits(
        16, 256 * 1024, 256 * 1024, 14 * DAY_MS, max_connections=1_000, is_basic=True
    ),
    Sku.STANDARD: NamespaceLimits(16, 256 * 1024, 256 * 1024, MAX_DURATION_MS),
    Sku.PREMIUM: NamespaceLimits(
        1,
        100 * 1024 * 1024,
        1024 * 1024,
        MAX_DURATION_MS,
        max_delete_count=4_000,
        default_message_size_kb=1024,
        is_message_size_settable=True,
        sizes_mb=PREMIUM_SIZES_MB,
        max_session_state_bytes=1024 * 1024,
        max_partitioned_count=None,
    ),
}


def limits_of(sku: Sku, partition_count: int | None = None) -> NamespaceLimits:
    """Return the limits of a tier with a number of partitions; None: that of a new namespace."""
    limits = LIMITS[sku]
    return replace(limits, partition_count=partition_count or limits.partition_count)


# --- names --------------------------------------------------------------------------------------

ENTITY_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/~-]{0,258}[A-Za-z0-9])?")
NAMESPACE_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]{4,48}[A-Za-z0-9]")
RULE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,254}[A-Za-z0-9])?")
SUBSCRIPTION_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,48}[A-Za-z0-9])?")
FILTER_NAME: Final = re.compile(r"\$Default|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,48}[A-Za-z0-9])?")


def check_entity_name(name: str) -> str:
    """Return a valid name of a queue or topic, or raise ValueError. Names compare without case."""
    if ENTITY_NAME.fullmatch(name) is None or "//" in name or "/subscriptions/" in name.lower():
        raise ValueError(
            "the name of a queue or topic has 1 to 260 letters, digits and . - _ / ~, begins and"
            " ends with a letter or digit, has no empty part and does not look like that of a"
            " subscription"
        )
    return name


def catalog_key(path: str) -> str:
    """Return the catalog key of a path: without outer slashes, in lower case."""
    return path.strip("/").lower()


def is_subscription_path(path: str) -> bool:
    """Return whether a path has the shape `topic/Subscriptions/name`."""
    return path.lower().rpartition("/")[0].endswith("/subscriptions")


def topic_of(path: str) -> str:
    """Return the topic in the path of a subscription."""
    return path.rpartition("/")[0].rpartition("/")[0]


def subscription_name(path: str) -> str:
    """Return the subscription's own name in its path."""
    return path.rpartition("/")[2]


def subscription_path(topic: str, subscription: str) -> str:
    """Return the path that addresses a subscription and identifies it in the catalog."""
    return f"{topic}/Subscriptions/{subscription}"


def check_subscription_name(name: str) -> str:
    """Return a valid name of a subscription, or raise ValueError."""
    return _matching(
        SUBSCRIPTION_NAME,
        name,
        "a subscription's name has 1 to 50 letters, digits and . - _, and begins and ends with a"
        " letter or digit",
    )


def check_filter_name(name: str) -> str:
    """Return a valid name of a subscription's rule, or raise ValueError."""
    return _matching(
        FILTER_NAME,
        name,
        "a rule's name has 1 to 50 letters, digits and . - _, begins and ends with a letter or"
        " digit, or is $Default",
    )


def check_namespace_name(name: str) -> str:
    """Return a valid name of a bus namespace, or raise ValueError."""
    return _matching(
        NAMESPACE_NAME,
        name,
        "a namespace's name has 6 to 50 letters, digits and hyphens, begins with a letter and does"
        " not end with a hyphen",
    )


EntityName = Annotated[
    str,
    AfterValidator(check_entity_name),
    WithJsonSchema({"type": "string", "maxLength": 260, "pattern": f"^{ENTITY_NAME.pattern}$"}),
]
SubscriptionName = Annotated[
    str,
    AfterValidator(check_subscription_name),
    WithJsonSchema(
        {"type": "string", "maxLength": 50, "pattern": f"^{SUBSCRIPTION_NAME.pattern}$"}
    ),
]
FilterName = Annotated[
    str,
    AfterValidator(check_filter_name),
    WithJsonSchema({"type": "string", "maxLength": 50, "pattern": f"^({FILTER_NAME.pattern})$"}),
]
NamespaceName = Annotated[
    str,
    AfterValidator(check_namespace_name),
    WithJsonSchema({"type": "string", "maxLength": 50, "pattern": f"^{NAMESPACE_NAME.pattern}$"}),
]

LEAST_KEY_CHARS: Final = 20
"""Minimum length of a key that a user supplies. Our choice: keys that people make up are shorter;
20 characters of random base64 are 120 bits."""

PUBLIC_KEY: Final = "SAS_KEY_VALUE"
"""The publicly known key of Microsoft's emulator and our examples; for loopback only."""


def check_rule_name(name: str) -> str:
    """Return a valid name of an authorization rule, or raise ValueError."""
    return _matching(
        RULE_NAME,
        name,
        "a rule's name has 1 to 256 letters, digits and . - _, and begins and ends with a letter or"
        " digit",
    )


def _matching(pattern: re.Pattern[str], name: str, rule: str) -> str:
    if pattern.fullmatch(name) is None:
        raise ValueError(rule)
    return name


RuleName = Annotated[
    str,
    AfterValidator(check_rule_name),
    WithJsonSchema({"type": "string", "maxLength": 256, "pattern": f"^{RULE_NAME.pattern}$"}),
]


# --- models -------------------------------------------------------------------------------------


def not_yet(allowed: object, feature: str) -> AfterValidator:
    """Return a check that rejects any other value, until the feature exists."""

    def check(value: T) -> T:
        if value is not None and value != allowed:
            raise ValueError(f"{feature} not available yet: leave the field out")
        return value

    return AfterValidator(check)


class Model(BaseModel):
    """Base of all models here: frozen; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


DnsName = Annotated[
    str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
]
"""Name of an object of Kubernetes (RFC 1123)."""


class AuthorizationRule(Model):
    """A named key pair and its rights, for a namespace or one entity."""

    name: RuleName
    rights: frozenset[Right] = Field(min_length=1)
    secret_name: DnsName | None = Field(None, alias="secretName")

    @property
    def effective_rights(self) -> frozenset[Right]:
        """The rights including those that `Manage` implies."""
        return frozenset(Right) if Right.MANAGE in self.rights else self.rights


def _unique_names(rules: tuple[AuthorizationRule, ...]) -> tuple[AuthorizationRule, ...]:
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the rule {name} is named twice")
    return rules


Rules = Annotated[
    tuple[AuthorizationRule, ...], Field(max_length=12), AfterValidator(_unique_names)
]


class SkuProperties(Model):
    """The tier. `tier` repeats `name` as in Azure's templates; `capacity` is informative only."""

    name: Sku = Sku.STANDARD
    tier: Sku | None = None
    capacity: Literal[1, 2, 4, 8, 16] | None = None

    @field_validator("tier")
    @classmethod
    def _tier_equals_name(cls, value: Sku | None, info: ValidationInfo) -> Sku | None:
        if value is not None and value != info.data.get("name", value):
            raise ValueError("must equal the sku's name")
        return value

    @field_validator("capacity")
    @classmethod
    def _capacity_is_premium(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("name", Sku.PREMIUM) is not Sku.PREMIUM:
            raise ValueError("only Premium has a capacity")
        return value


class NamespaceProperties(Model):
    """The definition of a bus namespace."""

    sku: SkuProperties = SkuProperties()
    premium_messaging_partitions: Literal[1, 2, 4, 8] | None = Field(
        None, alias="premiumMessagingPartitions"
    )
    minimum_tls_version: Literal["1.2", "1.3"] = Field("1.2", alias="minimumTlsVersion")
    disable_local_auth: Annotated[bool, not_yet(False, "signing in without a key is")] = Field(
        False, alias="disableLocalAuth"
    )
    zone_redundant: Annotated[bool, not_yet(False, "zone redundancy is")] = Field(
        False, alias="zoneRedundant"
    )
    public_network_access: Literal["Enabled", "Disabled"] = Field(
        "Enabled", alias="publicNetworkAccess"
    )
    alternate_name: Annotated[str | None, not_yet(None, "an alternate name is")] = Field(
        None, alias="alternateName"
    )
    tags: dict[str, str] = Field(default_factory=dict)
    authorization_rules: Rules = Field((), alias="authorizationRules")

    @field_validator("premium_messaging_partitions")
    @classmethod
    def _partitions_are_premium(cls, value: int | None, info: ValidationInfo) -> int | None:
        sku = info.data.get("sku")
        if value is not None and sku is not None and sku.name is not Sku.PREMIUM:
            raise ValueError("only Premium can set its partitions; Basic and Standard have 16")
        return value

    @property
    def declared_sku(self) -> Sku | None:
        """The tier if the definition names it."""
        is_said = "sku" in self.model_fields_set and "name" in self.sku.model_fields_set
        return self.sku.name if is_said else None

    @property
    def new_limits(self) -> NamespaceLimits:
        """The limits of a new namespace with this definition; an existing one has its store's."""
        return limits_of(self.sku.name, self.premium_messaging_partitions)


EntityPath = Annotated[str, StringConstraints(min_length=1, max_length=260)]
UserMetadata = Annotated[str, StringConstraints(max_length=1_024)]
"""A note of the owner. It is stored and returned; the bus does not interpret it."""

LockDuration = Annotated[DurationMs, DurationRange(5_000, 300_000)]
TtlDuration = Annotated[DurationMs, DurationRange(1_000, MAX_DURATION_MS)]
DetectionWindow = Annotated[DurationMs, DurationRange(20_000, 7 * DAY_MS)]
IdleDuration = Annotated[DurationMs, DurationRange(300_000, MAX_DURATION_MS)]
Retention = Annotated[DurationMs, DurationRange(60_000, 90 * DAY_MS)]
"""Retention of settled messages. Our choice: the store looks for expired rows every ten seconds, so
it could not honour less than a minute; 90 days is the longest retention of a log in Azure (Event
Hubs), and kept messages count towards no quota."""


class QueueFields(Model):
    """Properties of a queue in Service Bus's templates; defaults are Service Bus's."""

    status: EntityStatus = EntityStatus.ACTIVE
    lock_duration_ms: LockDuration = Field(60_000, alias="lockDuration")
    max_delivery_count: int = Field(10, alias="maxDeliveryCount", ge=1, le=2_147_483_647)
    default_message_ttl_ms: TtlDuration = Field(MAX_DURATION_MS, alias="defaultMessageTimeToLive")
    dead_lettering_on_message_expiration: bool = Field(
        False, alias="deadLetteringOnMessageExpiration"
    )
    max_size_in_megabytes: int = Field(1024, alias="maxSizeInMegabytes", ge=1024, le=81_920)
    max_message_size_in_kilobytes: int = Field(
        256, alias="maxMessageSizeInKilobytes", ge=256, le=102_400
    )
    enable_batched_operations: bool = Field(True, alias="enableBatchedOperations")
    """Accepted for compatibility with templates; the store groups operations in any case."""

    duplicate_detection_history_time_window_ms: DetectionWindow = Field(
        600_000, alias="duplicateDetectionHistoryTimeWindow"
    )
    requires_session: bool = Field(False, alias="requiresSession")
    requires_duplicate_detection: bool = Field(False, alias="requiresDuplicateDetection")
    enable_partitioning: bool = Field(False, alias="enablePartitioning")
    enable_express: bool = Field(False, alias="enableExpress")
    """Accepted for compatibility with clients; each message is stored before it is accepted."""

    auto_delete_on_idle_ms: IdleDuration = Field(MAX_DURATION_MS, alias="autoDeleteOnIdle")
    forward_to: EntityPath | None = Field(None, alias="forwardTo")
    forward_dead_lettered_messages_to: EntityPath | None = Field(
        None, alias="forwardDeadLetteredMessagesTo"
    )
    user_metadata: UserMetadata | None = Field(None, alias="userMetadata")


class QueueProperties(QueueFields):
    """The definition of a queue. `history_retention` null: settled messages are deleted."""

    history_retention_ms: Retention | None = Field(None, alias="historyRetention")


# --- topics, subscriptions, rules -----------------------------------------------------------------


class TopicProperties(Model):
    """The definition of a topic; fields have the same meaning as for a queue."""

    status: EntityStatus = EntityStatus.ACTIVE
    default_message_ttl_ms: TtlDuration = Field(MAX_DURATION_MS, alias="defaultMessageTimeToLive")
    max_size_in_megabytes: int = Field(1024, alias="maxSizeInMegabytes", ge=1024, le=81_920)
    max_message_size_in_kilobytes: int = Field(
        256, alias="maxMessageSizeInKilobytes", ge=256, le=102_400
    )
    requires_duplicate_detection: bool = Field(False, alias="requiresDuplicateDetection")
    duplicate_detection_history_time_window_ms: DetectionWindow = Field(
        600_000, alias="duplicateDetectionHistoryTimeWindow"
    )
    enable_partitioning: bool = Field(False, alias="enablePartitioning")
    enable_batched_operations: bool = Field(True, alias="enableBatchedOperations")
    enable_express: bool = Field(False, alias="enableExpress")
    support_ordering: bool = Field(True, alias="supportOrdering")
    """Accepted for compatibility with templates; subscriptions always keep their topic's order."""

    auto_delete_on_idle_ms: IdleDuration = Field(MAX_DURATION_MS, alias="autoDeleteOnIdle")
    user_metadata: UserMetadata | None = Field(None, alias="userMetadata")


class SubscriptionFields(Model):
    """Properties of a subscription in Service Bus's templates; the topic has size, partitioning."""

    status: EntityStatus = EntityStatus.ACTIVE
    lock_duration_ms: LockDuration = Field(60_000, alias="lockDuration")
    max_delivery_count: int = Field(10, alias="maxDeliveryCount", ge=1, le=2_147_483_647)
    default_message_ttl_ms: TtlDuration = Field(MAX_DURATION_MS, alias="defaultMessageTimeToLive")
    dead_lettering_on_message_expiration: bool = Field(
        False, alias="deadLetteringOnMessageExpiration"
    )
    dead_lettering_on_filter_evaluation_exceptions: bool = Field(
        True, alias="deadLetteringOnFilterEvaluationExceptions"
    )
    requires_session: bool = Field(False, alias="requiresSession")
    enable_batched_operations: bool = Field(True, alias="enableBatchedOperations")
    auto_delete_on_idle_ms: IdleDuration = Field(MAX_DURATION_MS, alias="autoDeleteOnIdle")
    forward_to: EntityPath | None = Field(None, alias="forwardTo")
    forward_dead_lettered_messages_to: EntityPath | None = Field(
        None, alias="forwardDeadLetteredMessagesTo"
    )
    user_metadata: UserMetadata | None = Field(None, alias="userMetadata")


class SubscriptionProperties(SubscriptionFields):
    """The definition of a subscription. `history_retention_ms` as for a queue."""

    history_retention_ms: Retention | None = Field(None, alias="historyRetention")


SqlText = Annotated[str, StringConstraints(min_length=1, max_length=1_024)]


class SqlFilter(Model):
    """Selects messages by an expression. The compatibility level is stored but has no effect.

    `parameters` are the values of `@name` in the expression; keys may have the `@` or not.
    """

    sql_expression: SqlText = Field(alias="sqlExpression")
    compatibility_level: int = Field(20, alias="compatibilityLevel")
    parameters: dict[str, PropertyValue] = Field(default_factory=dict)


class CorrelationFilter(Model):
    """Selects messages whose fields equal the given ones; at least one is set."""

    content_type: str | None = Field(None, alias="contentType")
    correlation_id: str | None = Field(None, alias="correlationId")
    label: str | None = None
    message_id: str | None = Field(None, alias="messageId")
    reply_to: str | None = Field(None, alias="replyTo")
    reply_to_session_id: str | None = Field(None, alias="replyToSessionId")
    session_id: str | None = Field(None, alias="sessionId")
    to: str | None = None
    properties: dict[str, PropertyValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _selects_something(self) -> CorrelationFilter:
        if not self.properties and not any(
            getattr(self, name) is not None
            for name in type(self).model_fields
            if name != "properties"
        ):
            raise ValueError("a correlation filter names at least one field or property")
        return self


class SqlAction(Model):
    """Changes the copy of a message that the rule selected. `parameters` as in a filter."""

    sql_expression: SqlText = Field(alias="sqlExpression")
    compatibility_level: int = Field(20, alias="compatibilityLevel")
    parameters: dict[str, PropertyValue] = Field(default_factory=dict)


FIXED_FILTERS: Final = {"TrueFilter": "1=1", "FalseFilter": "1=0"}
"""Type of a filter with a constant result -> the equivalent SQL."""


class RuleProperties(Model):
    """A named filter with an optional action.

    `filter_type` distinguishes true and false filters, which need no `sql_filter`, from SQL
    filters. Other filter types are accepted for Azure's templates, and returned as null.
    """

    name: FilterName
    filter_type: Literal["SqlFilter", "CorrelationFilter", "TrueFilter", "FalseFilter"] | None = (
        Field(None, alias="filterType")
    )
    sql_filter: SqlFilter | None = Field(None, alias="sqlFilter")
    correlation_filter: CorrelationFilter | None = Field(None, alias="correlationFilter")
    action: SqlAction | None = None

    @model_validator(mode="after")
    def _has_one_filter(self) -> RuleProperties:
        fixed = FIXED_FILTERS.get(self.filter_type or "")
        if fixed is not None:
            given = self.sql_filter
            is_other = given is not None and (given.sql_expression != fixed or given.parameters)
            if is_other or self.correlation_filter is not None:
                raise ValueError(f"a {self.filter_type} has no other filter than {fixed}")
            object.__setattr__(self, "sql_filter", SqlFilter(sql_expression=fixed))
            return self
        kinds = [
            kind
            for kind, given in (
                ("SqlFilter", self.sql_filter),
                ("CorrelationFilter", self.correlation_filter),
            )
            if given is not None
        ]
        if len(kinds) != 1 or self.filter_type not in (None, kinds[0]):
            raise ValueError("a rule has either a sqlFilter or a correlationFilter")
        object.__setattr__(self, "filter_type", None)
        return self

    @cached_property
    def text(self) -> str:
        """The rule as JSON, as it is stored; cached, since a rule does not change."""
        return self.model_dump_json(by_alias=True, exclude_none=True)

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> RuleProperties:
        """Return a copy without the cached text."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("text", None)
        return copied


DEFAULT_RULE: Final = RuleProperties(name="$Default", filter_type="TrueFilter")
"""The rule of a new subscription when no rules are given."""

EntityProperties: TypeAlias = QueueProperties | TopicProperties | SubscriptionProperties


class EntityKind(Enum):
    """Kinds of entities in the catalog; the value is that of its column."""

    QUEUE = "queue"
    TOPIC = "topic"
    SUBSCRIPTION = "subscription"


PROPERTIES_OF: Final[dict[EntityKind, type[EntityProperties]]] = {
    EntityKind.QUEUE: QueueProperties,
    EntityKind.TOPIC: TopicProperties,
    EntityKind.SUBSCRIPTION: SubscriptionProperties,
}
