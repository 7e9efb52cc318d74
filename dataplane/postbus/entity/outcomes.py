"""What a command did: effects for the host, mutations for the journal.

Effects are what the host must do once the mutations are durable; mutations are what the tables
must become. Plain data; only `partition_state` makes it, host and journal read it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from postbus.contract import QueueProperties
from postbus.entity.commands import Delivery, Refusal, Reply, SubQueue
from postbus.message.envelope import Envelope

# --- effects ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Deliver:
    """Hand these to a consumer; entity and sub-queue are named so that they can be given back."""

    consumer_id: int
    entity_no: int
    sub_queue: SubQueue
    deliveries: list[Delivery]


@dataclass(slots=True)
class EndConsumer:
    """The consumer was removed by the broker: entity dropped or receiving disabled."""

    consumer_id: int
    refusal: Refusal


@dataclass(slots=True)
class Fetch:
    """Read these rows and hand them back with `SupplyRows`; at most one a sub-queue is open."""

    entity_no: int
    sub_queue: SubQueue
    row_keys: list[int]


Effect: TypeAlias = Deliver | EndConsumer | Fetch


# --- mutations ----------------------------------------------------------------------------------


class InsertMessage(NamedTuple):
    """A new row; the only mutation of the hot path besides a plain delete."""

    row_key: int
    enqueued_ms: int
    envelope: Envelope


class ReserveBlock(NamedTuple):
    """Row keys [first_key, first_key + size) belong to one sub-queue (D2).

    In ACTIVE the key's offset gives the sequence number; elsewhere `first_sequence` is 0 and the
    number lies in `kept` or `due`.
    """

    first_key: int
    size: int
    entity_no: int
    sub_queue: SubQueue
    first_sequence: int


class PatchMessage(NamedTuple):
    """Upsert of `patch(row_key)`: a deferred mark, a count, replaced application properties.

    None keeps what the row said before; `application_properties` is a whole section.
    """

    row_key: int
    is_deferred: bool | None
    delivery_count: int | None
    application_properties: bytes | None


class MoveMessage(NamedTuple):
    """Delete under the old key, insert under the new one, patch folded in (D4).

    `enqueued_ms` None keeps the stored one; `application_properties` None keeps what the row or
    its patch said. `kept` of the new key gets `sequence` and `delivery_count`, except when the new
    key lies in ACTIVE (activation), where the key gives the number.
    """

    row_key: int
    new_row_key: int
    entity_no: int
    to_sub_queue: SubQueue
    sequence: int
    delivery_count: int
    enqueued_ms: int | None
    application_properties: bytes | None


class PutDue(NamedTuple):
    """A scheduled row: when it becomes active and the number that names it until then."""

    row_key: int
    entity_no: int
    due_ms: int
    sequence: int


class RecordAcquired(NamedTuple):
    """Attempts made so far on rows, the latest record of a row wins (D6)."""

    row_keys: list[int]
    attempts: list[int]


class PutDefinition(NamedTuple):
    entity_no: int
    name: str
    properties: QueueProperties
    catalog_version: int
    next_sequence: int


class DropDefinition(NamedTuple):
    entity_no: int
    catalog_version: int


class RecordSize(NamedTuple):
    """Checkpoint of an entity's size in bytes and its live count at that moment (D18)."""

    entity_no: int
    size_bytes: int
    message_count: int


Mutation: TypeAlias = (
    ReserveBlock
    | PatchMessage
    | MoveMessage
    | PutDue
    | RecordAcquired
    | PutDefinition
    | DropDefinition
    | RecordSize
)


@dataclass(slots=True)
class Outcome:
    """What one command did.

    `reply` and `effects` may be told only after `inserts`, `deletes` and `mutations` are durable,
    and after every earlier outcome of the partition was told. `inserts` and `deletes` alone are a
    plain batch and may overlap another commit (D20); with `mutations`, or when
    `touches_uncommitted` is set (it deletes a row that an earlier outcome of this life inserted and
    that may not be committed yet), the outcome is a barrier. The rule is conservative: a row of
    this life counts as uncommitted unless it was enqueued before the `applied_ms` that the host
    handed to `PartitionState.mark_committed` last. A settlement never sets it: who holds a lock
    token got it after the commit of the row.
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
    """The command was not applied: it needs rows that are not in memory (D7).

    The host reads them on the read connection and applies the same command again, the rows as
    `found`. `row_keys`: exactly these. `ranges`: (first_key, end_key, limit) in key order.
    `numbers`: (entity_no, sub_queue, from_sequence, limit) in order of the kept number.
    """

    row_keys: list[int] = field(default_factory=list)
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    numbers: list[tuple[int, SubQueue, int, int]] = field(default_factory=list)


# --- loading ------------------------------------------------------------------------------------


@dataclass(slots=True)
class LoadedEntity:
    """An entity as the tables have it. `size_bytes`: checkpoint scaled to the live count."""

    entity_no: int
    name: str
    properties: QueueProperties
    size_bytes: int


@dataclass(slots=True)
class LoadedPartition:
    """Everything a partition remembers after a reload; no message bodies.

    `keys`: live row keys of each block's sub-queue in key order, deferred ones included.
    `next_sequence`: entity -> first number never reserved. `deferred`: row key -> number.
    `due`: scheduled rows. `attempts`: row key -> attempts recorded last (D6). `next_row_key`: the
    first key never reserved. `is_clean`: the writer before stopped in order.
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
    is_clean: bool = False
