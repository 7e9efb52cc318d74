"""Entity properties, limits and defaults: all that every other package may import.

Field aliases are the ones of the manifests (camelCase of Service Bus's names); inside, durations
are integer milliseconds. A model refuses what no tier allows; `queue_problems` refuses what the
tier of the namespace does not. What is known but not built yet is refused by name, never ignored.
Source: the quota and property tables of Azure Service Bus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

T = TypeVar("T")

MAX_DURATION_MS: Final = 922_337_203_685_477  # .NET TimeSpan.MaxValue: "never"
DAY_MS: Final = 86_400_000
DURATION: Final = re.compile(
    r"^P(?:(\d{1,8})D)?(?:T(?:(\d{1,4})H)?(?:(\d{1,5})M)?(?:(\d{1,7}(?:\.\d{1,7})?)S)?)?$"
)
ROOT_RULE_NAME: Final = "RootManageSharedAccessKey"  # what Azure calls a namespace's first rule


class EntityStatus(Enum):
    """What an entity accepts. Source: Service Bus EntityStatus."""

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
    """What a rule's key may do. `Manage` implies the other two."""

    LISTEN = "Listen"
    SEND = "Send"
    MANAGE = "Manage"


STANDARD_SIZES_MB: Final = (1024, 2048, 3072, 4096, 5120)
PREMIUM_SIZES_MB: Final = (*STANDARD_SIZES_MB, 10_240, 20_480, 40_960, 81_920)


@dataclass(frozen=True, slots=True)
class NamespaceLimits:
    """What a tier allows. Sizes in bytes. Source: the quota page of Azure Service Bus."""

    partition_count: int
    max_message_bytes: int
    max_batch_bytes: int
    max_default_ttl_ms: int
    max_property_bytes: int = 32_768
    max_header_bytes: int = 65_536
    max_id_chars: int = 128
    max_delete_count: int = 500
    default_message_size_kb: int = 256
    is_message_size_settable: bool = False
    sizes_mb: tuple[int, ...] = STANDARD_SIZES_MB
    max_queue_count: int = 10_000


LIMITS: Final = {
    Sku.BASIC: NamespaceLimits(16, 256 * 1024, 256 * 1024, 14 * DAY_MS),
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
    ),
}


# --- durations ----------------------------------------------------------------------------------


def parse_duration_ms(value: object) -> int:
    """Return milliseconds of an ISO 8601 duration such as `PT1M`; integers pass as they are."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = DURATION.match(value) if isinstance(value, str) else None
    if match is None or not any(match.groups()) or str(value).endswith("T"):
        raise ValueError("use an ISO 8601 duration such as PT30S, PT5M or P14D")
    days, hours, minutes, seconds = match.groups(default="0")
    whole_ms = (int(days) * 86_400 + int(hours) * 3_600 + int(minutes) * 60) * 1_000
    return min(whole_ms + round(float(seconds) * 1_000), MAX_DURATION_MS)


def format_duration(value_ms: int) -> str:
    """Return the ISO 8601 form that `parse_duration_ms` reads back."""
    if value_ms >= MAX_DURATION_MS:
        return "P10675199DT2H48M5.4775807S"
    days, rest = divmod(value_ms, 86_400_000)
    hours, rest = divmod(rest, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    time = f"{hours}H" * bool(hours) + f"{minutes}M" * bool(minutes)
    if rest or not (days or time):
        time += f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "S"
    return f"P{days}D" * bool(days) + ("" if days else "P") + (f"T{time}" if time else "")


def _read_duration(value: object, info: ValidationInfo) -> int:
    """Read a field; in JSON, thus in manifests, a bare number has no unit and is refused."""
    if info.mode == "json" and not isinstance(value, str):
        raise ValueError("use an ISO 8601 duration such as PT30S, PT5M or P14D")
    return parse_duration_ms(value)


def _duration_between(least_ms: int, most_ms: int) -> AfterValidator:
    """Check a range and say it in the notation of the field."""

    def check(value_ms: int) -> int:
        if not least_ms <= value_ms <= most_ms:
            least, most = format_duration(least_ms), format_duration(most_ms)
            if most_ms == MAX_DURATION_MS:
                raise ValueError(f"must be at least {least}")
            raise ValueError(f"must be between {least} and {most}")
        return value_ms

    return AfterValidator(check)


DurationMs = Annotated[
    int, BeforeValidator(_read_duration), PlainSerializer(format_duration, return_type=str)
]


# --- names --------------------------------------------------------------------------------------

ENTITY_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/~-]{0,258}[A-Za-z0-9])?")
NAMESPACE_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]{4,48}[A-Za-z0-9]")
RULE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,254}[A-Za-z0-9])?")


def check_entity_name(name: str) -> str:
    """Return the name of a queue, or raise ValueError. Names ignore case when compared."""
    if ENTITY_NAME.fullmatch(name) is None or "//" in name:
        raise ValueError(
            "a queue's name has 1 to 260 letters, digits and . - _ / ~, begins and ends with a"
            " letter or digit, and has no empty part"
        )
    return name


def check_namespace_name(name: str) -> str:
    """Return the name of a bus namespace, or raise ValueError."""
    if NAMESPACE_NAME.fullmatch(name) is None:
        raise ValueError(
            "a namespace's name has 6 to 50 letters, digits and hyphens, begins with a letter and"
            " does not end with a hyphen"
        )
    return name


def check_rule_name(name: str) -> str:
    """Return the name of an authorization rule, or raise ValueError."""
    if RULE_NAME.fullmatch(name) is None:
        raise ValueError(
            "a rule's name has 1 to 256 letters, digits and . - _, and begins and ends with a"
            " letter or digit"
        )
    return name


# --- models -------------------------------------------------------------------------------------


def _not_yet(allowed: object, feature: str) -> AfterValidator:
    """Refuse any other value: honest until the feature exists."""

    def check(value: T) -> T:
        if value is not None and value != allowed:
            raise ValueError(f"{feature} not available yet: leave the field out (docs/roadmap.md)")
        return value

    return AfterValidator(check)


class Model(BaseModel):
    """Settings of all models here: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class AuthorizationRule(Model):
    """A named key pair and what it may do, for a namespace or one entity."""

    name: Annotated[str, AfterValidator(check_rule_name)]
    rights: frozenset[Right] = Field(min_length=1)
    secret_name: str | None = Field(None, alias="secretName", min_length=1, max_length=253)

    @property
    def effective_rights(self) -> frozenset[Right]:
        """Rights with what they imply."""
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
    """`tier` repeats `name` as in Azure's templates; `capacity` is kept for information."""

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
    """What a bus namespace is told to be."""

    sku: SkuProperties = SkuProperties()
    premium_messaging_partitions: Annotated[
        Literal[1, 2, 4, 8] | None, _not_yet(1, "more than one partition in Premium is")
    ] = Field(None, alias="premiumMessagingPartitions")
    minimum_tls_version: Literal["1.2", "1.3"] = Field("1.2", alias="minimumTlsVersion")
    disable_local_auth: Annotated[bool, _not_yet(False, "signing in without a key is")] = Field(
        False, alias="disableLocalAuth"
    )
    zone_redundant: Annotated[bool, _not_yet(False, "zone redundancy is")] = Field(
        False, alias="zoneRedundant"
    )
    public_network_access: Literal["Enabled", "Disabled"] = Field(
        "Enabled", alias="publicNetworkAccess"
    )
    alternate_name: Annotated[str | None, _not_yet(None, "an alternate name is")] = Field(
        None, alias="alternateName"
    )
    tags: dict[str, str] = Field(default_factory=dict)
    authorization_rules: Rules = Field((), alias="authorizationRules")

    @field_validator("premium_messaging_partitions")
    @classmethod
    def _partitions_are_premium(cls, value: int | None, info: ValidationInfo) -> int | None:
        sku = info.data.get("sku")
        if value is not None and sku is not None and sku.name is not Sku.PREMIUM:
            raise ValueError("only Premium chooses its partitions; Basic and Standard have 16")
        return value

    @property
    def limits(self) -> NamespaceLimits:
        """What the namespace's tier allows."""
        return LIMITS[self.sku.name]


EntityPath = Annotated[str, StringConstraints(min_length=1, max_length=260)]


class QueueProperties(Model):
    """What a queue is told to be; defaults are Service Bus's."""

    status: EntityStatus = EntityStatus.ACTIVE
    lock_duration_ms: Annotated[DurationMs, _duration_between(5_000, 300_000)] = Field(
        60_000, alias="lockDuration"
    )
    max_delivery_count: int = Field(10, alias="maxDeliveryCount", ge=1, le=2_147_483_647)
    default_message_ttl_ms: Annotated[DurationMs, _duration_between(1, MAX_DURATION_MS)] = Field(
        MAX_DURATION_MS, alias="defaultMessageTimeToLive"
    )
    dead_lettering_on_message_expiration: bool = Field(
        False, alias="deadLetteringOnMessageExpiration"
    )
    max_size_in_megabytes: int = Field(1024, alias="maxSizeInMegabytes", ge=1024, le=81_920)
    max_message_size_in_kilobytes: int = Field(
        256, alias="maxMessageSizeInKilobytes", ge=256, le=102_400
    )
    enable_batched_operations: bool = Field(True, alias="enableBatchedOperations")
    """Accepted for the sake of templates; the store groups operations in any case."""

    duplicate_detection_history_time_window_ms: Annotated[
        DurationMs, _duration_between(20_000, 7 * DAY_MS)
    ] = Field(600_000, alias="duplicateDetectionHistoryTimeWindow")
    requires_session: Annotated[bool, _not_yet(False, "sessions are")] = Field(
        False, alias="requiresSession"
    )
    requires_duplicate_detection: Annotated[bool, _not_yet(False, "duplicate detection is")] = (
        Field(False, alias="requiresDuplicateDetection")
    )
    enable_partitioning: Annotated[bool, _not_yet(False, "partitioned entities are")] = Field(
        False, alias="enablePartitioning"
    )
    enable_express: Annotated[bool, _not_yet(False, "express queues are")] = Field(
        False, alias="enableExpress"
    )
    auto_delete_on_idle_ms: Annotated[
        DurationMs,
        _duration_between(300_000, MAX_DURATION_MS),
        _not_yet(MAX_DURATION_MS, "deletion of idle queues is"),
    ] = Field(MAX_DURATION_MS, alias="autoDeleteOnIdle")
    forward_to: Annotated[EntityPath | None, _not_yet(None, "forwarding is")] = Field(
        None, alias="forwardTo"
    )
    forward_dead_lettered_messages_to: Annotated[
        EntityPath | None, _not_yet(None, "forwarding is")
    ] = Field(None, alias="forwardDeadLetteredMessagesTo")


# --- what depends on the tier -------------------------------------------------------------------


def complete_queue(properties: QueueProperties, limits: NamespaceLimits) -> QueueProperties:
    """Return the properties with the tier's defaults where nothing was said."""
    said = properties.model_fields_set
    changes: dict[str, Any] = {}
    if "default_message_ttl_ms" not in said:
        changes["default_message_ttl_ms"] = limits.max_default_ttl_ms
    if "max_message_size_in_kilobytes" not in said:
        changes["max_message_size_in_kilobytes"] = limits.default_message_size_kb
    return properties.model_copy(update=changes)


def queue_problems(properties: QueueProperties, limits: NamespaceLimits) -> dict[str, str]:
    """Return manifest field -> what the namespace's tier does not allow; empty when fine."""
    problems = {}
    if properties.default_message_ttl_ms > limits.max_default_ttl_ms:
        most = format_duration(limits.max_default_ttl_ms)
        problems["defaultMessageTimeToLive"] = f"this tier allows at most {most}"
    if properties.max_size_in_megabytes not in limits.sizes_mb:
        sizes = ", ".join(map(str, limits.sizes_mb))
        problems["maxSizeInMegabytes"] = f"this tier allows {sizes}"
    size_kb = properties.max_message_size_in_kilobytes
    if not limits.is_message_size_settable and size_kb != limits.default_message_size_kb:
        problems["maxMessageSizeInKilobytes"] = "only Premium lets you choose it"
    elif limits.is_message_size_settable and size_kb < 1024:
        problems["maxMessageSizeInKilobytes"] = "must be at least 1024"
    return problems
