"""Kind Pipeline: messages of sources, transformed by Spark, to entities, tables, dead letters.

The runner `postbus-pipeline` and the operator read these models. What one field alone cannot show
is checked by `pipeline_checks`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema, model_validator

from postbus.contract.bodies import SubQueueName
from postbus.contract.bulk import GROUP_NAME, MAX_RATE, GroupKindName
from postbus.contract.durations import DurationMs, DurationRange
from postbus.contract.entities import (
    DAY_MS,
    DnsName,
    EntityName,
    Model,
    SubscriptionName,
    subscription_path,
)
from postbus.contract.resources import Metadata, Owner

MALFORMED: Final = "malformed"
"""The output of messages whose bodies do not have the declared schema."""

DEFAULT_BYTES_PER_TRIGGER: Final = 256 << 20
MAX_SINKS: Final = 100
MAX_SOURCES: Final = 10
"""Our choice: Spark keeps a process of Python for each."""

MAX_LOOKUPS: Final = 20
DEFAULT_ATTEMPTS: Final = 5
"""Our choice: enough for a lake that is full for some minutes, when a supervisor restarts."""

MAX_EXECUTORS: Final = 100

LEAST_MEMORY_MIB: Final = 1_024
"""A driver that waits needs about 700 MiB: the JVM, Python, and a worker of Python."""

MEMORY_UNITS: Final = {"Mi": 1, "Gi": 1_024}

CRON_FIELDS: Final = 5
CRON_FIELD: Final = r"(?:[0-9*,/-]|[A-Za-z]{3})+"
"""A field of a schedule, as Kubernetes has them: numbers, names, lists, ranges and steps."""

UTC_TIME: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,3})?Z$"


def _folder(path: str) -> str:
    """Return an absolute path of a folder, or raise ValueError."""
    if "://" in path:
        raise ValueError("only a folder of a file system can be used, such as /lake/orders")
    if not path.startswith("/") or "\x00" in path or ".." in path.split("/"):
        raise ValueError("an absolute path of a folder, such as /lake/orders")
    folder = "/" + "/".join(part for part in path.split("/") if part not in {"", "."})
    if folder == "/":
        raise ValueError("a folder below the root, such as /lake/orders")
    return folder


def _place(path: str) -> str:
    """Return a folder, or a prefix of a bucket, or raise ValueError."""
    if not path.startswith(S3):
        if "://" in path:
            raise ValueError("a folder, such as /lake/orders, or s3://bucket/orders")
        return _folder(path)
    bucket, _, prefix = path.removeprefix(S3).partition("/")
    parts = [part for part in prefix.split("/") if part]
    if not re.fullmatch(BUCKET, bucket) or not parts or not all(map(_is_plain, parts)):
        raise ValueError("a bucket and a prefix of letters, digits and ._=-: s3://lake/orders")
    return "/".join([f"{S3}{bucket}", *parts])


def _is_plain(name: str) -> bool:
    """Return whether a name means the same to all libraries of S3, without an escape."""
    return re.fullmatch(S3_NAME, name) is not None and set(name) != {"."}


S3: Final = "s3://"
BUCKET: Final = "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
S3_NAME: Final = "[A-Za-z0-9._=-]+"
TablePath = Annotated[
    str, StringConstraints(min_length=1, max_length=1_000), AfterValidator(_place)
]
"""A folder, or a prefix of a bucket of S3."""

Folder = Annotated[str, StringConstraints(min_length=1, max_length=1_000), AfterValidator(_folder)]
SQLITE: Final = "sqlite:///"
TABLE_NAME: Final = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+$"
"""A table of a catalog with its namespace, such as shop.orders."""

VIEW_NAME: Final = r"^[a-z][a-z0-9_]{0,62}$"
ViewName = Annotated[str, StringConstraints(max_length=63, pattern=VIEW_NAME)]
"""Name of a source, a lookup or an output: a view in SQL."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=100_000, strip_whitespace=True)]
WORD: Final = "[A-Za-z_][A-Za-z0-9_]*"
ModuleName = Annotated[str, StringConstraints(max_length=500, pattern=rf"^{WORD}(\.{WORD})*$")]
FunctionName = Annotated[str, StringConstraints(max_length=200, pattern=rf"^{WORD}$")]


def _utc(text: str) -> str:
    """Return a time in UTC as it is, or raise ValueError."""
    if not re.fullmatch(UTC_TIME, text):
        raise ValueError("a time in UTC, such as 2026-01-31T08:00:00Z")
    time_ms(text)
    return text


def time_ms(text: str) -> int:
    """Return a time in milliseconds since the epoch. Raises ValueError."""
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


TIME_SCHEMA: Final = {"type": "string", "pattern": UTC_TIME, "maxLength": 24}
UtcTime = Annotated[str, AfterValidator(_utc), WithJsonSchema(TIME_SCHEMA)]


# --- sources ------------------------------------------------------------------------------------


class Body(Model):
    """The content of bodies: `json` is their schema in Spark's SQL, such as `sku string`."""

    json_schema: Text = Field(alias="json")


def _catalog_uri(text: str) -> str:
    """Return the address of a catalog, or raise ValueError."""
    if text.startswith(SQLITE):
        return SQLITE + _folder(text.removeprefix(SQLITE))
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
        raise ValueError(
            "a REST catalog, such as https://catalog.shop/api, or a file with SQLite, such as"
            " sqlite:////lake/catalog.db"
        )
    if "@" in text:
        raise ValueError(
            "no user and password: they belong into PYICEBERG_CATALOG__POSTBUS__CREDENTIAL of the"
            " environment"
        )
    return text


class Catalog(Model):
    """The catalog of a table of Iceberg: REST, or a file with SQLite.

    `warehouse`: the one of a REST catalog that has several. Credentials are pyiceberg's own
    settings in the environment, for the catalog `postbus`.
    """

    uri: Annotated[
        str, StringConstraints(min_length=1, max_length=1_000), AfterValidator(_catalog_uri)
    ]
    warehouse: Annotated[str, StringConstraints(min_length=1, max_length=1_000)] | None = None

    @property
    def folder(self) -> str | None:
        """The folder of the file, None of a REST catalog."""
        if not self.uri.startswith(SQLITE):
            return None
        return self.uri.removeprefix(SQLITE).rpartition("/")[0] or "/"


class TablePlace(Model):
    """A table of a pipeline. One of Iceberg has a `name` in a `catalog` besides."""

    format: Literal["parquet", "delta", "iceberg"]
    path: TablePath
    name: Annotated[str, StringConstraints(max_length=255, pattern=TABLE_NAME)] | None = None
    catalog: Catalog | None = None

    @model_validator(mode="after")
    def _has_catalog_of_iceberg(self) -> Self:
        is_named = (self.name is not None, self.catalog is not None)
        if self.format == "iceberg" and not all(is_named):
            raise ValueError("a table of iceberg needs a name, such as shop.orders, and a catalog")
        if self.format != "iceberg" and any(is_named):
            raise ValueError(f"a table of {self.format} has neither name nor catalog")
        return self


COLUMN_PATH: Final = rf"^{WORD}(\.{WORD})*$"
ColumnPath = Annotated[str, StringConstraints(max_length=200, pattern=COLUMN_PATH)]
"""A column of messages, or a field of their bodies, such as `body.placed`."""


class Watermark(Model):
    """The delay of rows, by a column of times: what is later than `delay` may be left out."""

    column: ColumnPath
    delay_ms: Annotated[DurationMs, DurationRange(0, 90 * DAY_MS)] = Field(alias="delay")


class Source(Model):
    """Messages of a queue, of a topic's subscription or of a table, as a view.

    `watermark`: queries may keep state between batches. `deduplicate`: of messages with the same
    values of these columns, the first one within the watermark's delay is read.

    `mode`: `tap` reads beside receivers, `drain` instead of them; the reader group must be of this
    kind. Without `readerGroup` the group has the pipeline's name. `history` and a table have an end
    and no group; `from` and `to` limit them to messages that were enqueued in [from, to).
    """

    name: ViewName
    queue: EntityName | None = None
    topic: EntityName | None = None
    subscription: SubscriptionName | None = None
    table: TablePlace | None = None
    sub_queue: SubQueueName = Field("main", alias="subQueue")
    mode: Literal["tap", "drain", "history"] = "tap"
    reader_group: Annotated[str, StringConstraints(pattern=GROUP_NAME)] | None = Field(
        None, alias="readerGroup"
    )
    from_time: UtcTime | None = Field(None, alias="from")
    to_time: UtcTime | None = Field(None, alias="to")
    body: Body | None = None
    watermark: Watermark | None = None
    deduplicate: tuple[ColumnPath, ...] = Field((), max_length=10)

    @model_validator(mode="after")
    def _names_one_origin(self) -> Self:
        has_queue = self.queue is not None
        has_topic = self.topic is not None
        has_table = self.table is not None
        if has_topic != (self.subscription is not None) or has_queue + has_topic + has_table != 1:
            raise ValueError("name a queue, or a topic and its subscription, or a table")
        if self.table is not None and (self.mode != "tap" or self.sub_queue != "main"):
            raise ValueError("a table has neither mode nor subQueue: leave them out")
        if self.is_bounded and self.reader_group is not None:
            raise ValueError("history and tables have no reader group: leave out readerGroup")
        if not self.is_bounded and (self.from_time, self.to_time) != (None, None):
            raise ValueError("from and to are for mode: history, and for a table")
        if self.from_time and self.to_time and time_ms(self.from_time) >= time_ms(self.to_time):
            raise ValueError("to must be later than from")
        if self.is_bounded and self.watermark is not None:
            raise ValueError("history and tables are one batch: leave out watermark")
        if self.deduplicate and self.watermark is None:
            raise ValueError("deduplicate needs a watermark: how long columns are remembered")
        return self

    @property
    def group_kind(self) -> GroupKindName | None:
        """The kind of its reader group; None: it has none."""
        return None if self.table is not None or self.mode == "history" else self.mode

    @property
    def is_bounded(self) -> bool:
        """True of a source with an end, which has no reader group."""
        return self.group_kind is None

    @property
    def entity(self) -> str:
        """The path of the queue or subscription; "" of a table."""
        if self.topic is None:
            return self.queue or ""
        return subscription_path(self.topic, self.subscription or "")


class Lookup(Model):
    """Rows of a table, as a view beside the source: a folder of Parquet, or a table of Delta."""

    name: ViewName
    parquet: Folder | None = None
    delta: Folder | None = None

    @model_validator(mode="after")
    def _has_one_table(self) -> Self:
        if (self.parquet is None) == (self.delta is None):
            raise ValueError("name one table: parquet or delta, with its folder")
        return self

    @property
    def folder(self) -> str:
        """The folder of the table."""
        return self.parquet or self.delta or ""


# --- transformation -----------------------------------------------------------------------------


class PythonFunction(Model):
    """A function of the frames of a batch, by name of their view, that returns those of outputs."""

    module: ModuleName
    function: FunctionName


class Transform(Model):
    """Outputs by name: queries of Spark's SQL in their order, or what a function returns."""

    sql: dict[ViewName, Text] | None = Field(None, min_length=1, max_length=100)
    python: PythonFunction | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if (self.sql is None) == (self.python is None):
            raise ValueError("write either sql or python")
        return self


# --- sinks --------------------------------------------------------------------------------------


class LakeTable(TablePlace):
    """A table of a sink. `partitionBy`: folders by the time when messages were enqueued."""

    partition_by: tuple[Literal["date", "hour"], ...] = Field(
        ("date", "hour"), alias="partitionBy", max_length=2
    )

    @model_validator(mode="after")
    def _has_hours_of_dates(self) -> Self:
        if self.partition_by not in {(), ("date",), ("date", "hour")}:
            raise ValueError("partitionBy is [date, hour], [date] or []")
        return self


class Sink(Model):
    """A target for the rows of an output or a source. `deadLetter` names the source.

    `rate`: most messages per second of a queue or topic.
    """

    origin: ViewName = Field(alias="from")
    queue: EntityName | None = None
    topic: EntityName | None = None
    dead_letter: ViewName | None = Field(None, alias="deadLetter")
    table: LakeTable | None = None
    rate: int | None = Field(None, ge=1, le=MAX_RATE)

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        targets = (self.queue, self.topic, self.dead_letter, self.table)
        if sum(target is not None for target in targets) != 1:
            raise ValueError(
                "name one target: a queue, a topic, a table, or the source for deadLetter"
            )
        if self.rate is not None and self.entity is None:
            raise ValueError("only a queue or topic has a rate")
        return self

    @property
    def entity(self) -> str | None:
        """The queue or topic that gets the rows as messages."""
        return self.queue or self.topic


# --- trigger, limits, checkpoint ------------------------------------------------------------------


def _schedule(text: str) -> str:
    """Return the five fields of a schedule, or raise ValueError."""
    fields = text.split()
    if len(fields) != CRON_FIELDS or not all(re.fullmatch(CRON_FIELD, each) for each in fields):
        raise ValueError(
            "five fields: minute, hour, day, month and weekday in UTC, such as */5 * * * *"
        )
    return " ".join(fields)


class Trigger(Model):
    """The time between the beginnings of batches, the times of runs, or `once` for one run.

    A run ends with what is there. `schedule`: the five fields of cron, in UTC.
    """

    continuous_ms: Annotated[DurationMs, DurationRange(100, DAY_MS)] | None = Field(
        None, alias="continuous"
    )
    schedule: (
        Annotated[str, StringConstraints(max_length=200), AfterValidator(_schedule)] | None
    ) = None
    once: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = (self.continuous_ms, self.schedule, self.once)
        if sum(each is not None for each in given) != 1:
            raise ValueError("write one of continuous: PT1S, schedule: '*/5 * * * *', once: true")
        return self


class Limits(Model):
    """Upper bounds of a batch; 0 messages or bytes: any number. `maxAttempts`: of one batch."""

    max_messages_per_trigger: int = Field(0, ge=0, le=2**53, alias="maxMessagesPerTrigger")
    max_bytes_per_trigger: int = Field(
        DEFAULT_BYTES_PER_TRIGGER, ge=0, le=2**53, alias="maxBytesPerTrigger"
    )
    max_attempts: int = Field(DEFAULT_ATTEMPTS, ge=1, le=1_000, alias="maxAttempts")


class Checkpoint(Model):
    """The folder of Spark's notes; one pipeline has it alone."""

    path: Folder


# --- on Kubernetes ------------------------------------------------------------------------------


def _memory(text: str) -> str:
    if _mib(text) < LEAST_MEMORY_MIB:
        raise ValueError(f"must be at least {LEAST_MEMORY_MIB // 1_024}Gi")
    return text


def _mib(text: str) -> int:
    return int(text[:-2]) * MEMORY_UNITS[text[-2:]]


Memory = Annotated[
    str,
    StringConstraints(max_length=10, pattern=r"^[1-9][0-9]*(Mi|Gi)$"),
    AfterValidator(_memory),
]
CORES_REQUEST: Final = r"^[1-9][0-9]{0,5}m?$"


class SecretName(Model):
    """A Secret of the pipeline's cluster namespace."""

    name: DnsName


class EnvironmentSource(Model):
    """Variables of the pods: each key of a Secret is one, such as AWS_ACCESS_KEY_ID."""

    secret_ref: SecretName = Field(alias="secretRef")


class PodSize(Model):
    """Cores of Spark in a pod, and memory of Java and Python."""

    cores: int = Field(2, ge=1, le=128)
    memory: Memory = "2Gi"

    @property
    def memory_mib(self) -> int:
        """The memory in MiB."""
        return _mib(self.memory)


class Executor(PodSize):
    """A pod that reads, transforms and writes; its tasks at a time are its cores.

    `coreRequest`: cores that its node reserves, by default as many.
    """

    cores: int = Field(1, ge=1, le=128)
    core_request: Annotated[str, StringConstraints(pattern=CORES_REQUEST)] | None = Field(
        None, alias="coreRequest"
    )


class Runtime(PodSize):
    """The pod that runs a pipeline, its image and environment, and pods beside it that do its work.

    `executors`: without any, the first pod does the work, with as many tasks at a time as it has
    cores. With some, it plans and commits.
    """

    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    executors: int = Field(0, ge=0, le=MAX_EXECUTORS)
    executor: Executor = Executor()
    env_from: tuple[EnvironmentSource, ...] = Field((), alias="envFrom", max_length=16)


class Volume(Model):
    """A PersistentVolumeClaim of the pipeline's cluster namespace, and its folder in the pod."""

    claim_name: DnsName = Field(alias="claimName")
    mount_path: Folder = Field(alias="mountPath")

    def has(self, path: str) -> bool:
        """Return whether a folder lies in the volume."""
        return f"{path}/".startswith(f"{self.mount_path}/")


class PipelineOperatorSpec(Model):
    """`operatorSpec` of a Pipeline. Delete: its reader group goes with it. `maxLag`: see status."""

    deletion_policy: Literal["Delete", "Retain"] = Field("Delete", alias="deletionPolicy")
    max_lag_ms: Annotated[DurationMs, DurationRange(60_000, 90 * DAY_MS)] | None = Field(
        None, alias="maxLag"
    )


# --- the document -------------------------------------------------------------------------------


def _several(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ValueError(f"name 1 to {MAX_SOURCES} sources")
    return sources


def _some(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    if not 1 <= len(sinks) <= MAX_SINKS:
        raise ValueError(f"name 1 to {MAX_SINKS} sinks")
    return sinks


class PipelineSpec(Model):
    """`spec` of kind Pipeline. `suspend` and what follows are for Kubernetes alone."""

    owner: Owner | None = None
    sources: Annotated[tuple[Source, ...], AfterValidator(_several)]
    lookups: tuple[Lookup, ...] = Field((), max_length=MAX_LOOKUPS)
    transform: Transform | None = None
    sinks: Annotated[tuple[Sink, ...], AfterValidator(_some)]
    trigger: Trigger
    limits: Limits = Limits()
    checkpoint: Checkpoint | None = None
    suspend: bool = False
    runtime: Runtime = Runtime()
    volumes: tuple[Volume, ...] = Field((), max_length=16)
    operator_spec: PipelineOperatorSpec = Field(PipelineOperatorSpec(), alias="operatorSpec")

    @property
    def source(self) -> Source:
        """The first source; one with an end is the only one."""
        return self.sources[0]

    @property
    def is_stateful(self) -> bool:
        """True if queries keep state between batches: a source has a watermark."""
        return any(source.watermark is not None for source in self.sources)

    @property
    def has_places(self) -> bool:
        """True if partition and position say which message a row is of."""
        return len(self.sources) == 1 and not self.is_stateful


class PipelineDocument(Model):
    """A document of kind Pipeline."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Pipeline"]
    metadata: Metadata
    spec: PipelineSpec

    def group_of(self, source: Source) -> str:
        """Return the name of a source's reader group."""
        return source.reader_group or self.metadata.name

    @property
    def group(self) -> str:
        """The name under which batches are numbered: of the only group, or of the pipeline."""
        return self.metadata.name if len(self.spec.sources) > 1 else self.group_of(self.spec.source)

    def writer(self, sink: Sink) -> str:
        """Return the name under which batches of a sink are published, at its entity."""
        return f"{self.group}.{sink.origin}"
