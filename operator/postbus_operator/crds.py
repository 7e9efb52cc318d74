"""The table of kinds: names, models, printed columns and validation rules of custom resources.

A rule is an expression in CEL that the API server evaluates when an object is written; `self` is
the value at the rule's place, `oldSelf` the value before an update. Rules say what models say in
Python, so that a mistake is refused by `kubectl apply`; `tests/kube` compares the two. What needs a
second object (a tier's limits, forwarding targets) is no rule: the operator reports it (ADR 39).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from postbus.contract.entities import LIMITS, NAMESPACE_NAME, PREMIUM_SIZES_MB, Sku
from postbus.contract.pipeline import (
    BUCKET,
    CRON_FIELD,
    DEFAULT_ATTEMPTS,
    DEFAULT_BYTES_PER_TRIGGER,
    LEAST_MEMORY_MIB,
    MAX_SINKS,
    MAX_SOURCES,
    S3,
    S3_NAME,
    VIEW_NAME,
    PipelineDocument,
    PipelineSpec,
)
from postbus.contract.resources import (
    API_VERSION,
    NamespaceDocument,
    NamespaceSpec,
    QueueDocument,
    QueueSpec,
    SubscriptionDocument,
    SubscriptionSpec,
    TopicDocument,
    TopicSpec,
)
from postbus_operator.status import (
    NamespaceStatus,
    PipelineStatus,
    QueueStatus,
    ResourceStatus,
    SubscriptionStatus,
    TopicStatus,
)

GROUP, VERSION = API_VERSION.split("/")
ARM_API_VERSION: Final = "2024-01-01"
"""The version of Azure Resource Manager's templates whose fields the specs have."""

Document = (
    NamespaceDocument | QueueDocument | TopicDocument | SubscriptionDocument | PipelineDocument
)
Spec = NamespaceSpec | QueueSpec | TopicSpec | SubscriptionSpec | PipelineSpec


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`; with `priority` 1 it is shown by `-o wide` only."""

    name: str
    path: str
    type: str = "string"
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """A validation rule at `path`, dots between names; an empty path is the whole object.

    `field` is the field below `path` that errors name.
    """

    path: str
    expression: str
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of custom resource."""

    name: str
    plural: str
    short_name: str
    document: type[Document]
    spec: type[Spec]
    status: type[ResourceStatus]
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...]
    has_scale: bool = False

    @property
    def singular(self) -> str:
        """The name for `kubectl get`."""
        return self.plural.removesuffix("s")


# --- columns ------------------------------------------------------------------------------------


def _condition(name: str, field: str) -> Column:
    return Column(name, f'.status.conditions[?(@.type=="Ready")].{field}')


READY: Final = (_condition("Ready", "status"), _condition("Reason", "reason"))
AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")
STATUS: Final = Column("Status", ".status.status")
MESSAGES: Final = (
    Column("Active", ".status.countDetails.activeMessageCount", "integer"),
    Column("DLQ", ".status.countDetails.deadLetterMessageCount", "integer"),
)
MESSAGE: Final = Column("Message", '.status.conditions[?(@.type=="Ready")].message', priority=1)


# --- rules --------------------------------------------------------------------------------------


def _unchanged(field: str, advice: str) -> Rule:
    """Return a rule for an optional field, which may be neither added nor dropped nor changed."""
    return Rule(
        "spec",
        f"has(self.{field}) == has(oldSelf.{field})"
        f" && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"{field} cannot be changed: {advice}",
        field,
    )


def _fixed(field: str) -> Rule:
    """Return a rule for a field with a default, which is never absent."""
    return Rule(
        "spec",
        f"self.{field} == oldSelf.{field}",
        f"{field} cannot be changed: create another entity and set forwardTo of this one to it",
        field,
    )


def _without(field: str, message: str, path: str = "spec") -> Rule:
    return Rule(path, f"!has(self.{field})", message, field)


def _same_owner(advice: str) -> Rule:
    return Rule(
        "spec.owner",
        "self.name == oldSelf.name && has(self.__namespace__) == has(oldSelf.__namespace__)"
        " && (!has(self.__namespace__) || self.__namespace__ == oldSelf.__namespace__)",
        f"owner cannot be changed: {advice}",
    )


MOVE: Final = "create another resource and move the messages by forwardTo"
OWNER: Final = (_same_owner(MOVE), _unchanged("entityName", MOVE))
STORED: Final = (
    Rule(
        "spec",
        "!(self.requiresSession && has(self.forwardTo))",
        "an entity with sessions cannot forward its messages: leave out forwardTo, or set"
        " requiresSession to false",
        "forwardTo",
    ),
)
NAME_ON_THE_BUS: Final = "(has(self.spec.entityName) ? self.spec.entityName : self.metadata.name)"
ENTITY_NAME_PARTS: Final = Rule(
    "spec",
    "!has(self.entityName) || (!self.entityName.contains('//')"
    " && !self.entityName.lowerAscii().contains('/subscriptions/'))",
    "entityName has no empty part and does not look like the path of a subscription",
    "entityName",
)


def _not_itself(field: str) -> Rule:
    return Rule(
        "",
        f"!has(self.spec.{field})"
        f" || self.spec.{field}.lowerAscii() != {NAME_ON_THE_BUS}.lowerAscii()",
        f"{field} names the queue itself: name another queue or topic",
        f"spec.{field}",
    )


def _not_its_topic(field: str) -> Rule:
    return Rule(
        "spec",
        f"!has(self.{field}) || self.{field}.lowerAscii() != self.owner.name.lowerAscii()",
        f"{field} names the subscription's own topic: name another queue or topic",
        field,
    )


OVERRIDES: Final[dict[str, dict[str, Any]]] = {
    # The tier decides the default: 256 in Standard, where it cannot be set, 1024 in Premium.
    "maxMessageSizeInKilobytes": {"minimum": 1024, "default": None},
    # CEL cannot see maps of values without a type, and these have several.
    "correlationFilter": {"minProperties": 1},
    "properties": {"minProperties": 1},
    "maxSizeInMegabytes": {"minimum": None, "maximum": None, "enum": list(PREMIUM_SIZES_MB)},
    "sources": {"minItems": 1, "maxItems": MAX_SOURCES},
    "sinks": {"minItems": 1, "maxItems": MAX_SINKS},
}
"""Fields whose schema is stricter than their model, which knows the tier -> words of the schema;
None: the word is left out."""

STANDARD_PARTITIONS: Final = LIMITS[Sku.STANDARD].partition_count
PARTITIONS: Final = (
    f"(self.sku.name != 'Premium' ? {STANDARD_PARTITIONS} : has(self.premiumMessagingPartitions)"
    f" ? self.premiumMessagingPartitions : {STANDARD_PARTITIONS})"
)
"""Of a Premium namespace that does not say its number it is known later: 1, or 16 if it was a
Standard one."""

OPERATOR_SPEC: Final = "spec.operatorSpec"
STORE: Final = f"{OPERATOR_SPEC}.storage.stores[]"
NAMESPACE_RULES: Final = (
    Rule(
        "",
        f"has(self.spec.entityName) || self.metadata.name.matches('^{NAMESPACE_NAME.pattern}$')",
        "the name of a bus has 6 to 50 letters, digits and hyphens, begins with a letter and does"
        " not end with a hyphen: set spec.entityName",
        "spec.entityName",
    ),
    _unchanged("entityName", "create another Namespace"),
    _unchanged(
        "premiumMessagingPartitions",
        "the number of partitions is fixed when the bus is created; create another Namespace",
    ),
    Rule(
        "spec",
        "!has(self.premiumMessagingPartitions) || self.sku.name == 'Premium'",
        "only Premium can set its partitions; Basic and Standard have 16: leave the field out",
        "premiumMessagingPartitions",
    ),
    Rule(
        "spec.sku",
        "oldSelf.name != 'Premium' || self.name == 'Premium'",
        "Premium cannot be left: create another Namespace",
        "name",
    ),
    Rule(
        "spec.sku",
        "!has(self.tier) || self.tier == self.name",
        "tier must equal the sku's name: leave it out",
        "tier",
    ),
    Rule(
        "spec.sku",
        "!has(self.capacity) || self.name == 'Premium'",
        "only Premium has a capacity: leave the field out",
        "capacity",
    ),
    Rule(
        "spec",
        "!self.disableLocalAuth",
        "signing in without a key is not available yet: leave the field out",
        "disableLocalAuth",
    ),
    _without("alternateName", "an alternate name is not available yet: leave the field out"),
    Rule(
        "spec",
        f"self.operatorSpec.brokers <= {PARTITIONS}",
        "set at most one broker for each partition",
        "operatorSpec.brokers",
    ),
    Rule(
        "spec",
        f"size(self.operatorSpec.storage.stores) <= {PARTITIONS}",
        "set at most one store for each partition",
        "operatorSpec.storage.stores",
    ),
    Rule(
        f"{OPERATOR_SPEC}.allowedNamespaces",
        "has(self.selector) == (self.from == 'Selector')",
        "set selector together with from: Selector, and only then",
        "selector",
    ),
    Rule(
        f"{OPERATOR_SPEC}.allowedNamespaces.selector.matchExpressions[]",
        "(has(self.values) && size(self.values) > 0) == (self.operator in ['In', 'NotIn'])",
        "In and NotIn need values; Exists and DoesNotExist have none",
        "values",
    ),
    Rule(
        f"{OPERATOR_SPEC}.storage",
        "self.stores.map(store, store.name) == oldSelf.stores.map(store, store.name)",
        "number, names and order of stores are fixed when the bus is created: create another"
        " Namespace",
        "stores",
    ),
    Rule(STORE, "has(self.postgres) != has(self.managed)", "set either postgres or managed"),
    Rule(
        STORE,
        "has(self.managed) == has(oldSelf.managed)",
        "a store stays managed or not: create another Namespace and move the messages",
    ),
    Rule(
        f"{STORE}.managed",
        "quantity(self.size).compareTo(quantity(oldSelf.size)) >= 0",
        "a volume cannot shrink: set the former size or more",
        "size",
    ),
    Rule(
        f"{STORE}.managed",
        "has(self.storageClassName) == has(oldSelf.storageClassName)"
        " && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
        "the storage class of a volume cannot be changed: create another Namespace",
        "storageClassName",
    ),
    Rule(
        f"{OPERATOR_SPEC}.podTemplate.env[]",
        "!(has(self.value) && has(self.valueFrom))",
        "set either value or valueFrom",
    ),
    Rule(
        f"{OPERATOR_SPEC}.podTemplate.env[].valueFrom",
        "has(self.secretKeyRef) != has(self.configMapKeyRef)",
        "set either secretKeyRef or configMapKeyRef",
    ),
    Rule(
        f"{OPERATOR_SPEC}.service",
        "!has(self.loadBalancerClass) || self.type == 'LoadBalancer'",
        "loadBalancerClass needs type: LoadBalancer",
        "loadBalancerClass",
    ),
    Rule(
        f"{OPERATOR_SPEC}.tls",
        "!(has(self.secretName) && has(self.issuerRef))",
        "set either secretName or issuerRef",
    ),
)
FILTER_RULES: Final = (
    Rule(
        "spec.rules[]",
        "has(self.filterType) && self.filterType in ['TrueFilter', 'FalseFilter']"
        " ? !has(self.correlationFilter)"
        " : has(self.sqlFilter) != has(self.correlationFilter)",
        "set either sqlFilter or correlationFilter; TrueFilter and FalseFilter need neither",
    ),
    Rule(
        "spec.rules[]",
        "!has(self.filterType) || (self.filterType != 'SqlFilter' || has(self.sqlFilter))"
        " && (self.filterType != 'CorrelationFilter' || has(self.correlationFilter))",
        "filterType must name the filter that the rule has: leave it out",
        "filterType",
    ),
    Rule(
        "spec.rules[]",
        "!has(self.filterType) || !has(self.sqlFilter)"
        " || self.filterType != 'TrueFilter' && self.filterType != 'FalseFilter'"
        " || self.sqlFilter.sqlExpression == (self.filterType == 'TrueFilter' ? '1=1' : '1=0')",
        "a TrueFilter has no other filter than 1=1, a FalseFilter no other than 1=0: leave out"
        " sqlFilter",
        "sqlFilter",
    ),
)


# --- rules of pipelines -------------------------------------------------------------------------

FOLDER: Final = "an absolute path of a folder, such as /lake/orders"
ANOTHER_PIPELINE: Final = "create another Pipeline"
UNLIMITED: Final = (
    "self.limits.maxMessagesPerTrigger == 0"
    f" && self.limits.maxBytesPerTrigger == {DEFAULT_BYTES_PER_TRIGGER}"
    f" && self.limits.maxAttempts == {DEFAULT_ATTEMPTS}"
)
"""Limits are those that the API server fills in."""

IN_A_VOLUME: Final = (
    f"!has(s.table) || s.table.path.startsWith('{S3}') || has(self.volumes)"
    " && self.volumes.exists(v, (s.table.path + '/').startsWith(v.mountPath + '/'))"
)


def _is_folder(field: str) -> str:
    """Return the condition of a folder: below the root, without `..`, no address of a store."""
    return (
        f"self.{field}.startsWith('/') && !self.{field}.contains('://')"
        f" && !self.{field}.matches('(^|/)[.][.](/|$)')"
        f" && self.{field}.matches('/([^/.]|[.][^/.]|[.][.][^/])')"
    )


def _folder(path: str, field: str, unless: str = "") -> Rule:
    """Return a rule for a folder."""
    return Rule(path, f"{unless}{_is_folder(field)}", FOLDER, field)


def _table(path: str) -> tuple[Rule, ...]:
    """Return the rules for a table: where it lies, and what one of Iceberg has."""
    is_prefix = f"self.path.matches('^{S3}{BUCKET}(/+{S3_NAME})+/*$')"
    is_clean = "!self.path.matches('/[.]+(/|$)')"
    return (
        Rule(
            path,
            f"self.path.startsWith('{S3}') ? {is_prefix} && {is_clean} : {_is_folder('path')}",
            f"{FOLDER}, or a bucket and a prefix, such as s3://lake/orders",
            "path",
        ),
        Rule(
            path,
            "has(self.name) == (self.format == 'iceberg')"
            " && has(self.catalog) == (self.format == 'iceberg')",
            "a table of iceberg has a name, such as shop.orders, and a catalog, and no other has",
        ),
    )


def _read_by(source: str) -> str:
    """Return an expression for what a source reads, and how."""
    names = ("queue", "topic", "subscription", "readerGroup", "from", "to")
    shown = ", ".join(f"has(s.{name}) ? s.{name} : ''" for name in names)
    table = "has(s.table) ? s.table.format + s.table.path : ''"
    return f"{source}.map(s, [s.mode, s.subQueue, {shown}, {table}])"


def _bounded(source: str) -> str:
    """Return an expression for whether a source has an end, and no reader group."""
    return f"(has({source}.table) || {source}.mode == 'history')"


def _dead_letter(condition: str, message: str) -> Rule:
    """Return a rule for the sources `x` that sinks of dead letters name."""
    expression = f"self.sinks.all(s, !has(s.deadLetter) || self.sources.exists(x, {condition}))"
    return Rule("spec", expression, message, "sinks")


PIPELINE_RULES: Final = (
    Rule("spec", "has(self.owner)", "name the Namespace of the bus in owner", "owner"),
    _same_owner(ANOTHER_PIPELINE),
    Rule(
        "spec",
        f"{_read_by('self.sources')} == {_read_by('oldSelf.sources')}",
        "entity, table, mode, reader group and times of a source cannot be changed:"
        f" {ANOTHER_PIPELINE}",
        "sources",
    ),
    Rule(
        "spec.sources[]",
        "has(self.topic) == has(self.subscription)"
        " && [has(self.queue), has(self.topic), has(self.table)].filter(x, x).size() == 1",
        "name a queue, or a topic and its subscription, or a table",
    ),
    Rule(
        "spec.sources[]",
        "!has(self.table) || self.mode == 'tap' && self.subQueue == 'main'",
        "a table has neither mode nor subQueue: leave them out",
    ),
    Rule(
        "spec.sources[]",
        f"!{_bounded('self')} || !has(self.readerGroup)",
        "history and tables have no reader group: leave out readerGroup",
        "readerGroup",
    ),
    Rule(
        "spec.sources[]",
        f"{_bounded('self')} || !has(self.from) && !has(self.to)",
        "from and to are for mode: history, and for a table",
    ),
    Rule(
        "spec.sources[]",
        "!has(self.from) || !has(self.to) || timestamp(self.from) < timestamp(self.to)",
        "to must be later than from",
        "to",
    ),
    *_table("spec.sources[].table"),
    Rule(
        "spec.sources[]",
        f"!{_bounded('self')} || !has(self.watermark)",
        "history and tables are one batch: leave out watermark",
        "watermark",
    ),
    Rule(
        "spec.sources[]",
        "has(self.watermark) || !has(self.deduplicate) || self.deduplicate.size() == 0",
        "deduplicate needs a watermark: how long columns are remembered",
        "deduplicate",
    ),
    Rule(
        "spec",
        "self.sources.all(s, self.sources.exists_one(x, x.name == s.name))",
        "two sources have one name: choose another one",
        "sources",
    ),
    Rule(
        "spec",
        f"self.sources.size() == 1 || !self.sources.exists(s, {_bounded('s')})",
        "a source of history or of a table is the only one: remove the others",
        "sources",
    ),
    Rule(
        "spec",
        "!self.sources.exists(s, has(s.watermark)) || !has(self.transform)"
        " || !has(self.transform.python)",
        "a function sees one batch at a time: write sql, or remove the watermark",
        "transform",
    ),
    Rule(
        "spec",
        f"self.sources.exists(s, {_bounded('s')}) != has(self.checkpoint)",
        "a source with a reader group needs a checkpoint; history and tables have none",
        "checkpoint",
    ),
    Rule(
        "spec",
        f"!self.sources.exists(s, {_bounded('s')}) || has(self.trigger.once)",
        "a source of history or of a table is read once: write once: true",
        "trigger",
    ),
    Rule(
        "spec",
        f"!self.sources.exists(s, {_bounded('s')})"
        " || self.sinks.all(s, has(s.queue) || has(s.topic))",
        "rows of history and of tables can be sent to queues and topics only",
        "sinks",
    ),
    Rule(
        "spec",
        f"!self.sources.exists(s, {_bounded('s')}) || {UNLIMITED}",
        "a source of history or of a table is one batch: leave out limits, or set a rate",
        "limits",
    ),
    Rule(
        "spec.lookups[]",
        "has(self.parquet) != has(self.delta)",
        "name one table: parquet or delta, with its folder",
    ),
    Rule("spec.transform", "has(self.sql) != has(self.python)", "write either sql or python"),
    Rule(
        "spec.transform",
        f"!has(self.sql) || self.sql.all(name, name.matches('{VIEW_NAME}'))",
        "names of outputs have small letters, digits and _, and begin with a letter",
        "sql",
    ),
    Rule(
        "spec.sinks[]",
        "[has(self.queue), has(self.topic), has(self.deadLetter), has(self.table)]"
        ".filter(is_there, is_there).size() == 1",
        "name one target: a queue, a topic, a table, or the source for deadLetter",
    ),
    Rule(
        "spec.sinks[]",
        "!has(self.rate) || has(self.queue) || has(self.topic)",
        "only a queue or topic has a rate",
        "rate",
    ),
    _dead_letter("x.name == s.deadLetter", "deadLetter names the source"),
    _dead_letter(
        "x.name != s.deadLetter || x.mode == 'drain'",
        "only a drained source has deadLetter: set its mode to drain",
    ),
    _dead_letter(
        "x.name != s.deadLetter || x.subQueue == 'main'",
        "messages of this source are dead letters already: leave out deadLetter",
    ),
    Rule(
        "spec.sinks[].table",
        "self.partitionBy in [[], ['date'], ['date', 'hour']]",
        "partitionBy is [date, hour], [date] or []",
        "partitionBy",
    ),
    Rule(
        "spec.trigger",
        "[has(self.continuous), has(self.schedule), has(self.once)]"
        ".filter(is_there, is_there).size() == 1",
        "write one of continuous: PT1S, schedule: '*/5 * * * *', once: true",
    ),
    Rule(
        "spec.trigger",
        f"!has(self.schedule) || self.schedule.matches('^{CRON_FIELD}( +{CRON_FIELD}){{4}}$')",
        "five fields: minute, hour, day, month and weekday in UTC, such as */5 * * * *",
        "schedule",
    ),
    _folder("spec.checkpoint", "path"),
    *_table("spec.sinks[].table"),
    _folder("spec.volumes[]", "mountPath"),
    _folder("spec.lookups[]", "parquet", unless="!has(self.parquet) || "),
    _folder("spec.lookups[]", "delta", unless="!has(self.delta) || "),
    Rule(
        "spec",
        f"self.sinks.all(s, {IN_A_VOLUME}) && self.sources.all(s, {IN_A_VOLUME})",
        "a table without a volume would go with its pod: name a claim in volumes whose mountPath is"
        " above the table's path",
        "volumes",
    ),
    Rule(
        "spec.runtime",
        f"quantity(self.memory).compareTo(quantity('{LEAST_MEMORY_MIB}Mi')) >= 0",
        f"memory must be at least {LEAST_MEMORY_MIB // 1_024}Gi",
        "memory",
    ),
    Rule(
        "spec.runtime.executor",
        f"quantity(self.memory).compareTo(quantity('{LEAST_MEMORY_MIB}Mi')) >= 0",
        f"memory must be at least {LEAST_MEMORY_MIB // 1_024}Gi",
        "memory",
    ),
)


# --- kinds --------------------------------------------------------------------------------------

KINDS: Final = (
    Kind(
        "Namespace",
        "busnamespaces",
        "sbns",
        NamespaceDocument,
        NamespaceSpec,
        NamespaceStatus,
        (
            *READY,
            Column("SKU", ".spec.sku.name"),
            Column("Partitions", ".status.readyPartitions", "integer"),
            Column("Brokers", ".status.readyBrokers", "integer"),
            Column("Version", ".status.version", priority=1),
            Column("Endpoint", ".status.serviceBusEndpoint", priority=1),
            MESSAGE,
            AGE,
        ),
        NAMESPACE_RULES,
        has_scale=True,
    ),
    Kind(
        "Queue",
        "queues",
        "sbq",
        QueueDocument,
        QueueSpec,
        QueueStatus,
        (
            *READY,
            Column("Bus", ".spec.owner.name"),
            STATUS,
            *MESSAGES,
            Column("Session", ".spec.requiresSession", "boolean", 1),
            Column("Lock", ".spec.lockDuration", priority=1),
            Column("TTL", ".spec.defaultMessageTimeToLive", priority=1),
            MESSAGE,
            AGE,
        ),
        (
            *OWNER,
            ENTITY_NAME_PARTS,
            _fixed("requiresSession"),
            _fixed("requiresDuplicateDetection"),
            _fixed("enablePartitioning"),
            *STORED,
            _not_itself("forwardTo"),
            _not_itself("forwardDeadLetteredMessagesTo"),
        ),
    ),
    Kind(
        "Topic",
        "topics",
        "sbt",
        TopicDocument,
        TopicSpec,
        TopicStatus,
        (
            *READY,
            Column("Bus", ".spec.owner.name"),
            STATUS,
            Column("Subs", ".status.subscriptionCount", "integer"),
            Column("Size", ".status.sizeInBytes", "integer", 1),
            MESSAGE,
            AGE,
        ),
        (
            *OWNER,
            ENTITY_NAME_PARTS,
            _fixed("requiresDuplicateDetection"),
            _fixed("enablePartitioning"),
            _without(
                "history",
                "a topic stores no messages: give its subscriptions a history",
                OPERATOR_SPEC,
            ),
        ),
    ),
    Kind(
        "Subscription",
        "subscriptions",
        "sbsub",
        SubscriptionDocument,
        SubscriptionSpec,
        SubscriptionStatus,
        (
            *READY,
            Column("Topic", ".spec.owner.name"),
            STATUS,
            *MESSAGES,
            Column("Rules", ".status.ruleCount", "integer", 1),
            Column("ForwardTo", ".spec.forwardTo", priority=1),
            MESSAGE,
            AGE,
        ),
        (
            *OWNER,
            _fixed("requiresSession"),
            *STORED,
            _not_its_topic("forwardTo"),
            _not_its_topic("forwardDeadLetteredMessagesTo"),
            Rule(
                "",
                "has(self.spec.entityName) || self.metadata.name.size() <= 50",
                "the name of a subscription has at most 50 characters: set spec.entityName",
                "spec.entityName",
            ),
            Rule(
                "spec",
                "!self.isClientAffine",
                "subscriptions of one client are not available yet: leave the field out",
                "isClientAffine",
            ),
            _without(
                "clientAffineProperties",
                "subscriptions of one client are not available yet: leave the field out",
            ),
            *FILTER_RULES,
        ),
    ),
    Kind(
        "Pipeline",
        "pipelines",
        "sbpipe",
        PipelineDocument,
        PipelineSpec,
        PipelineStatus,
        (
            *READY,
            Column("Bus", ".spec.owner.name"),
            Column("Lag", ".status.lagMessages", "integer"),
            Column("Lag (s)", ".status.lagSeconds", "integer"),
            Column("Group", ".status.readerGroup", priority=1),
            Column("Batch", ".status.lastBatch.number", "integer", 1),
            Column("Suspended", ".spec.suspend", "boolean", 1),
            MESSAGE,
            AGE,
        ),
        PIPELINE_RULES,
    ),
)
