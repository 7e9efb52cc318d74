"""Outcomes of commands: effects for the host, mutations for the journal.

Effects are actions of the host once the mutations are durable; mutations are changes of the tables.
Plain data, made by `partition_state` and read by host and journal. Effects and mutations are final,
so that a chain of `type(x) is …` can end with `assert_never`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias, final

from postbus.contract.entities import EntityKind, EntityProperties, RuleProperties
from postbus.entity.commands import Death, Delivery, Refusal, Reply, StoredRow, SubQueue
from postbus.entity.group_commands import Cursor
from postbus.message.envelope import Envelope

# --- effects ------------------------------------------------------------------------------------


@final
@dataclass(slots=True)
class Deliver:
    """Deliver messages to a consumer; with entity and sub-queue, so that they can be released."""

    consumer_id: int
    entity_no: int
    sub_queue: SubQueue
    deliveries: list[Delivery]


@final
@dataclass(slots=True)
class EndConsumer:
    """The consumer was removed by the broker: entity dropped or receiving disabled."""

    consumer_id: int
    refusal: Refusal


@final
@dataclass(slots=True)
class Fetch:
    """Read these rows and return them with `SupplyRows`; at most one is open for a sub-queue."""

    entity_no: int
    sub_queue: SubQueue
    row_keys: list[int]


@final
@dataclass(slots=True)
class SessionGranted:
    """A receiver holds a session from now on."""

    consumer_id: int
    session_id: bytes
    locked_until_ms: int


@final
@dataclass(slots=True)
class Available:
    """Number of messages available to a consumer that requested a hint; sent once (ADR 24)."""

    consumer_id: int
    count: int


@final
@dataclass(slots=True)
class Ship:
    """Send these to an entity by name, in order; answered with `Shipped`.

    At most one is open for a target; target names are case-insensitive. `envelopes[i]` None: its
    row must be read. `sources[i]`: name (UTF-8) of the entity that dead-lettered the message, None
    when it was not. `resent`: numbers of messages that were resent by an operator.
    """

    target: str
    numbers: list[int]
    envelopes: list[Envelope | None]
    sources: list[bytes | None]
    resent: frozenset[int] = frozenset()


@final
@dataclass(slots=True)
class Idle:
    """An entity has not been used for its `AutoDeleteOnIdle`; the catalog decides (ADR 27)."""

    entity_no: int


Effect: TypeAlias = Deliver | EndConsumer | Fetch | SessionGranted | Available | Ship | Idle


# --- mutations ----------------------------------------------------------------------------------


class InsertMessage(NamedTuple):
    """A new row; the only mutation of the hot path beside a plain delete."""

    row_key: int
    enqueued_ms: int
    envelope: Envelope


@final
class ReserveBlock(NamedTuple):
    """Row keys [first_key, first_key + size) belong to one sub-queue (ADR 15).

    In ACTIVE the key's offset determines the sequence number; elsewhere `first_sequence` is 0 and
    the number is in `kept` or `due`.
    """

    first_key: int
    size: int
    entity_no: int
    sub_queue: SubQueue
    first_sequence: int


@final
class PatchMessage(NamedTuple):
    """Upsert of `patch(row_key)`: a deferred mark, a count, replaced application properties.

    None keeps what the row said before; `application_properties` is a whole section.
    """

    row_key: int
    is_deferred: bool | None
    delivery_count: int | None
    application_properties: bytes | None


@final
class MoveMessage(NamedTuple):
    """Delete under the old key, insert under the new one, patch folded in (ADR 17).

    With `keeps_source` the old row stays as it is: a `SettleRows` of the same outcome names it.
    `enqueued_ms` None keeps the stored one; `application_properties` None keeps what the row or its
    patch said. `kept` of the new key gets `sequence` and `delivery_count`, except when the new key
    is in ACTIVE (activation), where the key determines the number. `death` of a message that
    becomes a dead letter by this.
    """

    row_key: int
    new_row_key: int
    entity_no: int
    to_sub_queue: SubQueue
    sequence: int
    delivery_count: int
    enqueued_ms: int | None
    application_properties: bytes | None
    keeps_source: bool = False
    death: Death | None = None


class Settling(IntEnum):
    """Reason why a retained row is no longer live; the value is that of its column."""

    COMPLETED = 1
    RECEIVED = 2
    EXPIRED = 3
    PURGED = 4
    DEAD_LETTERED = 5
    RESENT = 6
    FORWARDED = 7
    REJECTED = 8
    """By a drain, which still reads the row with its range."""


@final
class SettleRows(NamedTuple):
    """Rows that stay in the tables for the retention of their entity, but are not live (ADR 18).

    Replaces a delete, also for rows whose commit is in flight: it only adds rows.
    """

    entity_no: int
    row_keys: list[int]
    how: Settling
    settled_ms: int


@final
class PutDue(NamedTuple):
    """A scheduled row: time of its activation, and its number until then."""

    row_key: int
    entity_no: int
    due_ms: int
    sequence: int


@final
class PutKept(NamedTuple):
    """The number of a row that this outcome inserts outside ACTIVE."""

    row_key: int
    entity_no: int
    sub_queue: SubQueue
    sequence: int
    delivery_count: int
    death: Death | None = None


@final
class RecordAcquired(NamedTuple):
    """Attempts made so far on rows, the latest record of a row wins (ADR 19)."""

    row_keys: list[int]
    attempts: list[int]


@final
class PutDefinition(NamedTuple):
    """The partition's copy of a definition; fields as in `PutEntity`."""

    entity_no: int
    name: str
    kind: EntityKind
    properties: EntityProperties
    catalog_version: int
    next_sequence: int
    topic_no: int | None = None
    rules: tuple[RuleProperties, ...] = ()
    is_partitioned: bool = False


@final
class DropDefinition(NamedTuple):
    entity_no: int
    catalog_version: int


@final
class RecordSize(NamedTuple):
    """Checkpoint of an entity's size in bytes and its live count at that moment (ADR 37)."""

    entity_no: int
    size_bytes: int
    message_count: int


@final
class RecordUse(NamedTuple):
    """Time of the last use of an entity, coarse and never too early (ADR 27)."""

    entity_no: int
    last_used_ms: int


@final
class PutSessionState(NamedTuple):
    """Upsert of a session's state; None deletes the row."""

    entity_no: int
    session_id: bytes
    state: bytes | None
    updated_ms: int


@final
class RecordIds(NamedTuple):
    """Ids that duplicate detection has seen: 16 bytes each, one row a commit (ADR 26)."""

    entity_no: int
    seen_ms: int
    digests: bytes


@final
class ForgetIds(NamedTuple):
    """Ids of an entity seen before a time left the window; the entity is gone when it is None."""

    entity_no: int
    before_ms: int | None


@final
class ShareBody(NamedTuple):
    """Rows inserted by this outcome that share a body, which is stored once (ADR 7)."""

    row_keys: list[int]


@final
class PutOutbound(NamedTuple):
    """A row of the outbox: its target and its source.

    The row's key is its number. `source_no` and `sequence` name it in the transfer dead-letter
    queue; `is_dead_letter`: it was dead-lettered in its source before. `is_resent`: an operator
    resent it, so that it is no duplicate of itself.
    """

    row_key: int
    source_no: int
    target: str
    sequence: int
    is_dead_letter: bool
    is_resent: bool = False


@final
class PutInbound(NamedTuple):
    """The last number that arrived for an entity from a partition's outbox."""

    source_partition: int
    entity_no: int
    last_number: int


@final
class PutCursor(NamedTuple):
    """Upsert of a reader group's cursor in this partition.

    `is_placed`: the group begins there, with what is left: what was deleted before is no loss.
    """

    entity_no: int
    sub_queue: SubQueue
    name: str
    cursor: Cursor
    is_placed: bool = False


@final
class DropCursor(NamedTuple):
    entity_no: int
    sub_queue: SubQueue
    name: str


Mutation: TypeAlias = (
    RecordUse
    | PutCursor
    | DropCursor
    | PutSessionState
    | RecordIds
    | ForgetIds
    | ShareBody
    | PutOutbound
    | PutInbound
    | PutKept
    | ReserveBlock
    | PatchMessage
    | MoveMessage
    | SettleRows
    | PutDue
    | RecordAcquired
    | PutDefinition
    | DropDefinition
    | RecordSize
)


@dataclass(slots=True)
class Outcome:
    """The outcome of one command.

    `reply` and `effects` may be released only after `inserts`, `deletes` and `mutations` are
    durable, and after every earlier outcome of the partition was released. `inserts` and `deletes`
    alone are a plain batch and may overlap another commit (ADR 32); with `mutations`, or when
    `touches_uncommitted` is set (it deletes a row that an earlier outcome of this life inserted and
    that may not be committed yet), the outcome is a barrier. The rule is conservative: a row of
    this life counts as uncommitted unless it was enqueued before the `applied_ms` that the host
    passed to `PartitionState.mark_committed` last, and so was the last one that counts as enqueued
    before it was stored. A settlement never sets it: the holder of a lock token got it after the
    commit of the row. An outcome never moves a row it inserts (`own_rows`).
    """

    reply: Reply
    inserts: list[InsertMessage] = field(default_factory=list)
    deletes: list[int] = field(default_factory=list)
    mutations: list[Mutation] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    touches_uncommitted: bool = False
    applied_ms: int = 0


@dataclass(slots=True)
class Needs:
    """The command was not applied: it needs rows that are not in memory (ADR 20).

    The host reads them on the read connection and applies the same command again, the rows as
    `found`. `row_keys`: exactly these. `ranges`: (first_key, end_key, limit) in key order.
    `numbers`: (entity_no, sub_queue, from_sequence, limit) in order of the kept number. `named`:
    (entity_no, sub_queue, numbers), exactly these. What is not a row comes in `Found`: `states`:
    (entity_no, session_id); `ids`: (entity_no, digest) that may have been seen between two times in
    milliseconds.
    """

    row_keys: list[int] = field(default_factory=list)
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    numbers: list[tuple[int, SubQueue, int, int]] = field(default_factory=list)
    named: list[tuple[int, SubQueue, list[int]]] = field(default_factory=list)
    states: list[tuple[int, bytes]] = field(default_factory=list)
    ids: list[tuple[int, bytes, int, int]] = field(default_factory=list)


class Found(list[StoredRow]):
    """The answer to `Needs`: rows, session states and seen ids.

    `row_keys`: the requested keys; one without a row was deleted, or is not stored yet. `states`:
    (entity_no, session_id) -> state, absent when there is none. `seen`: (entity_no, digest) of ids
    that were seen.
    """

    row_keys: frozenset[int]
    states: dict[tuple[int, bytes], bytes]
    seen: set[tuple[int, bytes]]

    def __init__(self, row_keys: Iterable[int] = ()) -> None:
        super().__init__()
        self.row_keys = frozenset(row_keys)
        self.states = {}
        self.seen = set()


# --- loading ------------------------------------------------------------------------------------


@dataclass(slots=True)
class LoadedEntity:
    """An entity in the tables. `size_bytes`: checkpoint scaled to the live count.

    `catalog_version`: that of the definition.
    """

    entity_no: int
    name: str
    kind: EntityKind
    properties: EntityProperties
    size_bytes: int
    topic_no: int | None = None
    rules: tuple[RuleProperties, ...] = ()
    is_partitioned: bool = False
    last_used_ms: int = 0
    catalog_version: int = 0


class StoredState(NamedTuple):
    """Time of the last change of a session's state, and its size."""

    changed_ms: int
    size_bytes: int


KEYS_OF_A_MS: Final = 1 << 16
MAX_FIRST_KEY: Final = 1 << 61
"""Half of the range of keys: the year 3084, or a clock that was set wrong."""


@dataclass(slots=True)
class LoadedPartition:
    """The state of a partition in the tables, without messages.

    `keys`: live row keys of each block's sub-queue in key order, deferred ones included.
    `next_sequence`: entity -> first number never reserved. `deferred`: row key -> number.
    `due`: scheduled rows. `attempts`: row key -> attempts recorded (ADR 19). `next_row_key`: the
    first key never reserved. `sessions`: entity ->
    session -> its row keys in ACTIVE, in key order, of entities that require sessions; these are
    in `keys` too. `session_states`: entity -> session -> its state, without the bytes. `outbox` is
    in order of number. `awaited`: entity -> writers whose messages are still to arrive.
    """

    epoch: int
    catalog_version: int
    next_row_key: int
    entities: list[LoadedEntity] = field(default_factory=list)
    blocks: list[ReserveBlock] = field(default_factory=list)
    keys: dict[tuple[int, SubQueue], array[int]] = field(default_factory=dict)
    next_sequence: dict[int, int] = field(default_factory=dict)
    deferred: dict[tuple[int, SubQueue], dict[int, int]] = field(default_factory=dict)
    due: list[PutDue] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    sessions: dict[int, dict[bytes, array[int]]] = field(default_factory=dict)
    session_states: dict[int, dict[bytes, StoredState]] = field(default_factory=dict)
    seen: list[RecordIds] = field(default_factory=list)
    outbox: list[PutOutbound] = field(default_factory=list)
    inbound: list[PutInbound] = field(default_factory=list)
    awaited: dict[int, list[str]] = field(default_factory=dict)
    cursors: list[PutCursor] = field(default_factory=list)

    def begin_at(self, now_ms: int) -> None:
        """Set the first key above those of all former lives, even if their rows are deleted.

        Outboxes and readers by key compare keys with those of former lives. A database that was
        restored to an earlier moment does not know the keys it assigned later, so keys follow time.
        """
        first_key = min(now_ms * KEYS_OF_A_MS, MAX_FIRST_KEY)
        self.next_row_key = max(self.next_row_key, first_key)
