"""Bodies of the bulk API: reader groups with the ranges that they read, and writers.

Paths are below `/{entity}/$bulk/` on the port for messages. Rows are not JSON: `columns` of an
Arrow stream, as `ROW_COLUMNS` lists them. Positions are opaque: they order the messages of a
sub-queue in one partition, and ranges are half-open. Source: ADR 42.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import AwareDatetime, Field, field_validator, model_validator

from postbus.contract.bodies import Body, ResponseBody, SubQueueName
from postbus.contract.durations import MAX_DURATION_MS, DurationMs, DurationRange

GROUP_NAME: Final = r"^[a-z0-9][a-z0-9._-]{0,127}$"
"""Tokens are for paths, and paths are compared in lower case."""

MAX_POSITION: Final = 2**63 - 1
MAX_PARTITIONS: Final = 64
MAX_READER_CHARS: Final = 200

LEAST_PINNED_BYTES: Final = 1 << 20
MOST_PINNED_BYTES: Final = 1 << 50
LEAST_PINNED_MS: Final = 60_000
"""Limits are checked about every ten seconds. Our choice: so that a number of megabytes, given for
one of bytes, is refused."""

ROW_FORMAT: Final = "1"
"""Version of the stored columns, in the schema's metadata under `ROW_FORMAT_KEY`."""
ROW_FORMAT_KEY: Final = "postbus.row_format"
ENTITY_KEY: Final = "postbus.entity"
GENERATION_KEY: Final = "postbus.generation"
PARTITION_KEY: Final = "postbus.partition"

ROW_COLUMNS: Final = (
    "position",
    "sequence_number",
    "enqueued_ms",
    "envelope",
    "application_properties",
    "body",
)
"""Columns of a stream of rows, in this order; a reader may choose some of them.

`position`, `sequence_number` and `enqueued_ms` (milliseconds since the epoch) are int64; the others
binary: `envelope` as `message.rows` packs it, the others whole AMQP sections, null when absent.
"""

PRESENT_COLUMNS: Final = ("delivery_count", "state", "settled_ms", "settlement")
"""Columns behind these, of rows that are read in a mode, if they are named: what changes later.

A live row has `delivery_count`, int64, as it is on disk, and its `state`: `active`, `deferred` or
`scheduled`. One that is kept has `settled_ms`, int64, and `settlement`. The others are null.
"""
BrowseMode = Literal["peek", "history"]


class Selection(NamedTuple):
    """Rows that are read without a reader group: live ones, or those of a history, too.

    The latter are enqueued in [from_ms, to_ms), milliseconds since the epoch.
    """

    is_history: bool = False
    from_ms: int = 0
    to_ms: int = MAX_POSITION


Position = Annotated[int, Field(ge=0, le=MAX_POSITION)]
PartitionNumber = Annotated[int, Field(ge=0, lt=MAX_PARTITIONS)]
Positions = Annotated[
    dict[PartitionNumber, Position], Field(min_length=1, max_length=MAX_PARTITIONS)
]
RangesByPartition = Annotated[
    dict[PartitionNumber, tuple[Position, Position]],
    Field(min_length=1, max_length=MAX_PARTITIONS),
]
Start = Literal["earliest", "latest"]
GroupKindName = Literal["tap", "drain"]
MAX_REJECTED: Final = 1_000
"""Messages of one request."""
MAX_REASON_CHARS: Final = 4_096
MAX_STAGE_BYTES: Final = 4 << 20
"""Bytes of a request that stages messages; a larger message may be alone in one."""
MAX_STAGED: Final = 4_096
"""Messages of one request that stages some. Our choice: 4 MiB of messages of 1 KiB; each request is
a commit."""
MAX_STAGES: Final = 65_536
"""Stages of one batch."""
MAX_RATE: Final = 1_000_000
OnPinLimit = Literal["fail", "drop"]


# --- requests -----------------------------------------------------------------------------------


class GroupRequest(Body):
    """The part that all requests for a reader group have."""

    sub_queue: SubQueueName = "main"


class PinLimited(Body):
    """Limits of what a group keeps: messages that receivers have settled and it has not.

    `max_pinned_bytes`: estimated bytes of them on disk, of all partitions; `max_pinned_age`: time
    since the first was settled. Beyond one, with `onPinLimit` `drop` the oldest are deleted, and
    the group's reader is refused with DataLoss; with `fail`, or without it, nothing is deleted:
    list, metrics and alert show the group. A request that names one of the three replaces all of
    an existing group; null removes a limit.
    """

    max_pinned_bytes: (
        Annotated[int, Field(strict=True, ge=LEAST_PINNED_BYTES, le=MOST_PINNED_BYTES)] | None
    ) = None
    max_pinned_age_ms: (
        Annotated[DurationMs, DurationRange(LEAST_PINNED_MS, MAX_DURATION_MS)] | None
    ) = Field(None, alias="maxPinnedAge")
    on_pin_limit: OnPinLimit | None = None

    @property
    def names_limits(self) -> bool:
        """True if the request names limits, or null for one."""
        return not self.model_fields_set.isdisjoint(PinLimited.model_fields)

    @property
    def has_limit(self) -> bool:
        return self.max_pinned_bytes is not None or self.max_pinned_age_ms is not None

    @model_validator(mode="after")
    def _has_a_limit_to_act_on(self) -> Self:
        if self.on_pin_limit is not None and not self.has_limit:
            raise ValueError("onPinLimit needs maxPinnedBytes or maxPinnedAge")
        return self


class PutReaderGroup(GroupRequest, PinLimited):
    """A reader group to create.

    A `tap` reads beside receivers. A `drain` reads instead of them: they are refused, and messages
    leave when the group has settled them. `start`: `earliest` begins with the oldest message that
    is there, `latest` behind the newest, a time with the messages enqueued from then on; omitted,
    a tap begins with `latest`, and a drain always with `earliest`. An existing group stays where it
    is, and gets the limits of this request if it names some; only a tap has limits.
    """

    kind: GroupKindName = "tap"
    start: Start | AwareDatetime | None = None


class ResetReaderGroup(GroupRequest):
    """A new place for an existing group; its reader is refused from then on."""

    start: Start | AwareDatetime | Positions


class ClaimReaderGroup(GroupRequest):
    """A claim. `reader` is who claims, for people: the refusal of an earlier reader names it."""

    reader: str = Field("", max_length=MAX_READER_CHARS)


class PlanRanges(GroupRequest):
    """Ranges to read, one of each partition, from the ends of the last plan on."""

    epoch: int = Field(ge=0, le=MAX_POSITION)
    ranges: RangesByPartition


class SettlePlan(GroupRequest):
    """The number of a plan that is processed."""

    epoch: int = Field(ge=0, le=MAX_POSITION)
    number: int = Field(ge=0, le=MAX_POSITION)


class RejectMessages(GroupRequest):
    """Messages of the planned range of a partition that go to the dead-letter queue.

    They leave with their range: until then it is read as before, and the request may be repeated.
    """

    epoch: int = Field(ge=0, le=MAX_POSITION)
    partition: PartitionNumber
    positions: tuple[Position, ...] = Field(min_length=1, max_length=MAX_REJECTED)
    reason: str = Field(min_length=1, max_length=MAX_REASON_CHARS)
    description: str = Field("", max_length=MAX_REASON_CHARS)


Batch = Annotated[int, Field(ge=0, le=MAX_POSITION)]
Stages = Annotated[tuple[Position, ...], Field(max_length=MAX_STAGES)]


class PublishBatch(Body):
    """Stages of a writer that become its batch, in this order.

    Batches of a writer rise. `rate`: messages per second at most; null: as fast as they are stored.
    A batch may have no stage.
    """

    batch: Batch
    stages: Stages
    rate: int | None = Field(None, ge=1, le=MAX_RATE)

    @field_validator("stages")
    @classmethod
    def _once(cls, stages: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(stages)) < len(stages):
            raise ValueError("names a stage twice")
        return stages


class AbortStages(Body):
    """Stages of a writer that are not published and are not needed any more."""

    stages: Stages


# --- responses ----------------------------------------------------------------------------------


class ShownPlan(ResponseBody):
    """A plan. `attempts`: readers that planned it, each after its own claim."""

    number: int
    ranges: dict[int, tuple[int, int]]
    attempts: int
    is_settled: bool


class ShownLimits(ResponseBody):
    """Limits of a group as in `PinLimited`; null: none."""

    max_pinned_bytes: int | None = None
    max_pinned_age_ms: DurationMs | None = Field(None, alias="maxPinnedAge")
    on_pin_limit: OnPinLimit | None = None


class ReaderGroup(ShownLimits):
    """A reader group: its last claim and its plan.

    The next plan begins at the ends of this one's ranges. `created`: by this request.
    """

    entity: str
    sub_queue: SubQueueName
    name: str
    kind: GroupKindName
    generation: str
    epoch: int
    reader: str
    plan: ShownPlan
    created: bool = False


class PartitionRange(ResponseBody):
    """The readable part of one partition.

    `low`: the position from which on no message is missing, for the group if one was named: what
    was deleted before it was placed is not. `next_position`: the one behind the last message; for
    a drain the first one that a receiver has locked, if that is lower. `splits`: positions between
    them that divide the messages into about equal parts. `messages`: messages that are not settled,
    an estimate of what a read from `low` finds at least. `deferred`: those of them that are
    deferred, which a drain leaves out.

    In a mode `low` is where the first message may be, and a scheduled message may have a position
    behind those of all others.
    """

    partition: int
    low: int
    next_position: int
    messages: int
    deferred: int = 0
    average_bytes: int
    splits: tuple[int, ...]


class ReadableRanges(ResponseBody):
    """The readable parts of an entity's sub-queue, and a group if one was named.

    `generation` changes when the entity is deleted and created again: positions of another
    generation mean nothing.
    """

    entity: str
    sub_queue: SubQueueName
    generation: str
    partitions: tuple[PartitionRange, ...]
    group: ReaderGroup | None = None


class RejectedMessages(ResponseBody):
    """The number of messages that this request has dead-lettered.

    `refused`: why others cannot be, by position; those that were rejected before are in neither.
    """

    rejected: int
    refused: dict[int, str]


class StagedMessages(ResponseBody):
    """Messages that were stored invisibly. `stage` names them; `bytes` is their size for quotas."""

    stage: int
    messages: int
    bytes: int


class PublishedBatch(ResponseBody):
    """The last batch of a writer.

    `left`: messages that are still to arrive. `waits_for`: why they cannot at present, "" if they
    can. From this answer on all of them are accepted, whatever happens to the writer.
    """

    writer: str
    batch: int
    messages: int
    left: int
    is_done: bool
    waits_for: str


class AbortedStages(ResponseBody):
    """The number of stages that were removed."""

    aborted: int


class BulkProblem(ResponseBody):
    """A refusal. `code` is for programs, `detail` for people: it says what to do."""

    code: Literal[
        "InvalidRequest",
        "EntityNotFound",
        "GroupNotFound",
        "Fenced",
        "StaleCheckpoint",
        "BusRestored",
        "DataLoss",
        "NotAllowed",
        "QuotaExceeded",
        "Unavailable",
        "StaleWriter",
        "StagesGone",
        "WriterBusy",
        "WriterNotFound",
        "MessageTooLarge",
        "TooManyReaders",
    ]
    detail: str
