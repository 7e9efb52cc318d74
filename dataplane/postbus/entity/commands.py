"""Commands to a partition, and its replies.

Commands are imperatives, replies are facts that the host releases after the commit. Everything here
is plain data: edge, host and a peer stream carry it, only `partition_state` interprets it. Commands
are vectors where the message path needs it: one `Enqueue` or `Settle` holds a burst of one link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple, TypeAlias

from postbus.contract.entities import EntityKind, EntityProperties, RuleProperties
from postbus.entity.expects import Expects, R
from postbus.entity.group_commands import (
    CursorAt,
    GroupCommand,
    GroupDropped,
    GroupsListed,
    RangesListed,
    RowsRejected,
)
from postbus.message.envelope import Envelope


class SubQueue(IntEnum):
    """Sub-queues of an entity; the value is stored with each block of row keys."""

    ACTIVE = 0
    DEAD_LETTER = 1
    SCHEDULED = 2
    TRANSFER_DEAD_LETTER = 3
    OUTBOX = 4


class ReceiveMode(IntEnum):
    """Receive modes of consumers."""

    PEEK_LOCK = 0
    RECEIVE_AND_DELETE = 1


class MessageState(IntEnum):
    """Value of the annotation `x-opt-message-state`."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2


class Disposition(IntEnum):
    """Decision of the holder of a lock."""

    COMPLETE = 0
    ABANDON = 1
    RELEASE = 2
    DEFER = 3
    DEAD_LETTER = 4


class Refusal(Enum):
    """Expected refusals: values, not exceptions. Each protocol has one function of all of them."""

    ENTITY_NOT_FOUND = "entity-not-found"
    ENTITY_DISABLED = "entity-disabled"
    SEND_DISABLED = "send-disabled"
    RECEIVE_DISABLED = "receive-disabled"
    QUOTA_EXCEEDED = "quota-exceeded"
    STORE_FULL = "store-full"
    MESSAGE_TOO_LARGE = "message-too-large"
    PROPERTIES_TOO_LARGE = "properties-too-large"
    MESSAGE_MALFORMED = "message-malformed"
    ARGUMENT_OUT_OF_RANGE = "argument-out-of-range"
    LOCK_LOST = "lock-lost"
    SESSION_LOCK_LOST = "session-lock-lost"
    SESSION_CANNOT_BE_LOCKED = "session-cannot-be-locked"
    SESSION_REQUIRED = "session-required"  # a receiver without session, or a message without id
    SESSION_NOT_SUPPORTED = "session-not-supported"
    HOPS_EXCEEDED = "hops-exceeded"
    PUBLISH_TOO_LARGE = "publish-too-large"
    ALREADY_EXISTS = "already-exists"
    MESSAGE_NOT_FOUND = "message-not-found"
    MESSAGE_LOCKED = "message-locked"  # selected by an operator while a receiver has it
    NOT_ALLOWED = "not-allowed"
    CONFLICT = "conflict"  # the definition does not have the expected version
    NOT_EMPTY = "not-empty"  # an entity that is to be deleted if empty
    GROUP_NOT_FOUND = "group-not-found"
    GROUP_FENCED = "group-fenced"  # a newer reader claimed the group
    STALE_CHECKPOINT = "stale-checkpoint"  # a reader goes on before the end of the last plan
    BUS_RESTORED = "bus-restored"  # a reader goes on behind what the bus has
    NOT_APPLIED = "not-applied"  # definitely not stored; safe to repeat (ADR 2)
    UNKNOWN = "unknown"  # the commit's result is not known (ADR 2)
    BUSY = "busy"


# --- rows ---------------------------------------------------------------------------------------


class StoredRow(NamedTuple):
    """A row of `message` with its columns in side tables.

    `sequence` is the number in `kept` or `due`, None in ACTIVE, where the block determines it.
    `delivery_count` is the greatest of `kept`, `patch` and 0; the attempts of `acquired` are in
    memory. The patch's application properties are already folded into the envelope. `death` is None
    for other messages, and for dead letters from before deaths were recorded.
    """

    row_key: int
    enqueued_ms: int
    sequence: int | None
    delivery_count: int
    is_deferred: bool
    envelope: Envelope
    death: Death | None = None


# --- replies ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Refused:
    """The whole command was refused. `detail` completes the message for people."""

    refusal: Refusal
    detail: str = ""


@dataclass(slots=True)
class Enqueued:
    """`sequence_numbers[i]` belongs to message i; `refusals` maps an index to its refusal."""

    sequence_numbers: list[int]
    refusals: dict[int, Refused] | None = None


@dataclass(slots=True)
class SendsChecked:
    """`index`: the first message that would be refused, and why; None if none would."""

    index: int | None
    refused: Refused | None


@dataclass(slots=True)
class Settled:
    """`lost` are the indexes of tokens whose lock was no longer held; None if all were held."""

    lost: list[int] | None = None


@dataclass(slots=True)
class LocksRenewed:
    locked_until_ms: list[int]


@dataclass(slots=True)
class DemandSet:
    """`delivered`: deliveries made to the consumer since it was added."""

    delivered: int


@dataclass(slots=True)
class Peeked:
    messages: list[PeekedMessage]


@dataclass(slots=True)
class DeferredReceived:
    deliveries: list[Delivery]


@dataclass(slots=True)
class MessagesDeleted:
    count: int


@dataclass(slots=True)
class MessagesHandled:
    """Results for messages selected by number.

    `done`: number -> its number at the target, 0 if it has none. `left`: numbers to request again,
    not examined because messages are large.
    """

    done: dict[int, int]
    refused: dict[int, Refused]
    left: list[int]


@dataclass(slots=True)
class Cancelled:
    pass


@dataclass(slots=True)
class SessionRenewed:
    locked_until_ms: int


@dataclass(slots=True)
class SessionState:
    """None: never set, or removed."""

    state: bytes | None


@dataclass(slots=True)
class SessionsListed:
    session_ids: list[bytes]


@dataclass(slots=True)
class Transacted:
    """`replies[i]` belongs to operation i."""

    replies: list[Enqueued | Settled]


@dataclass(slots=True)
class Arrived:
    """`count` of the messages are stored, now or earlier; `refused` says why the next is not."""

    count: int
    refused: Refused | None = None


@dataclass(slots=True)
class Frozen:
    last_used_ms: int


@dataclass(slots=True)
class Done:
    """The command took effect; there is nothing to return."""


Reply: TypeAlias = (
    Refused
    | Enqueued
    | Settled
    | LocksRenewed
    | DemandSet
    | Peeked
    | DeferredReceived
    | MessagesDeleted
    | MessagesHandled
    | Cancelled
    | SessionRenewed
    | SessionState
    | SessionsListed
    | Transacted
    | Arrived
    | Frozen
    | CursorAt
    | GroupDropped
    | GroupsListed
    | RangesListed
    | RowsRejected
    | SendsChecked
    | Done
)


class PeekedMessage(NamedTuple):
    sequence: int
    enqueued_ms: int
    delivery_count: int
    state: MessageState
    envelope: Envelope
    death: Death | None = None


class Delivery(NamedTuple):
    """One acquisition. `lock_token` is b"" in receive-and-delete; 16 bytes otherwise (ADR 23)."""

    lock_token: bytes
    locked_until_ms: int
    sequence: int
    enqueued_ms: int
    delivery_count: int  # earlier failed deliveries, 0 on the first
    ttl_ms: int | None  # the effective one, None if the message never expires
    envelope: Envelope


# --- commands -----------------------------------------------------------------------------------

OnReply: TypeAlias = Callable[[R | Refused], None]
"""Called once with the reply to a command, on the event loop, perhaps before the submitting
function returns: a caller sets its own state before it submits a command."""


@dataclass(slots=True)
class Enqueue(Expects[Enqueued]):
    """Store messages in order. `is_atomic`: all or none (a batch); else each for itself.

    `via`: name of their target, reached through this entity's outbox (send-via); None stores them
    here. Only inside a `Transact`. `is_resent`: an operator resends them, so that none is a
    duplicate, and a subscription accepts its own. `numbers`: reserved numbers of scheduled
    messages. Only inside a `Transact`.
    """

    entity_no: int
    messages: list[Envelope]
    is_atomic: bool = False
    via: str | None = None
    is_resent: bool = False
    numbers: list[int] | None = None


@dataclass(slots=True)
class ReserveNumbers(Expects[Enqueued]):
    """Reserve numbers for messages that a transaction schedules.

    Nothing is stored; the numbers stay used if the transaction does not commit.
    """

    entity_no: int
    messages: list[Envelope]


@dataclass(slots=True)
class CancelScheduled(Expects[Cancelled]):
    entity_no: int
    sequence_numbers: list[int]


class Receiver(NamedTuple):
    """A receiver as shown to people: the name of its link and its network address."""

    link: str
    client: str


class Death(NamedTuple):
    """The circumstances in which a message became a dead letter.

    `deliveries`: number of deliveries until then. `receiver`: its last receiver, None if it had
    none: it expired, a filter failed, a forward was refused, a lock was lost with the broker.
    """

    at_ms: int
    deliveries: int = 0
    receiver: Receiver | None = None


@dataclass(slots=True)
class AddConsumer(Expects[Done]):
    """Register a receiver. `consumer_id` is unique in the process and never reused."""

    entity_no: int
    sub_queue: SubQueue
    consumer_id: int
    mode: ReceiveMode
    receiver: Receiver | None = None


@dataclass(slots=True)
class AcceptSession(Expects[Done]):
    """Register a receiver of one session; `session_id` None takes the next available one.

    The effect `SessionGranted` follows the reply at once or, for the next available one, when there
    is one. `RemoveConsumer` withdraws it, or gives the session back.
    """

    entity_no: int
    consumer_id: int
    mode: ReceiveMode
    session_id: bytes | None
    receiver: Receiver | None = None


@dataclass(slots=True)
class SetDemand(Expects[DemandSet]):
    """Allow deliveries up to `limit`, counted since the consumer was added (absolute, ADR 24).

    `is_drain`: deliver available messages up to `limit`, then lower the limit to the number of
    deliveries; the reply `DemandSet` follows them. `wants_hint`: when the limit is used up and
    messages are available, now or later, send the effect `Available` once.
    """

    consumer_id: int
    limit: int
    is_drain: bool = False
    wants_hint: bool = False


@dataclass(slots=True)
class RemoveConsumer(Expects[Done]):
    """Forget a receiver. Its locks live on until they expire.

    A session that it holds is free at once; unsettled messages of it return with their count
    unchanged.
    """

    consumer_id: int


@dataclass(slots=True)
class Settle(Expects[Settled]):
    """Settle locked messages. The reply names the tokens that were not held any more.

    `properties` are changes to application properties, values as `message.codec` decodes them;
    reason and description only with DEAD_LETTER.
    """

    entity_no: int
    sub_queue: SubQueue
    lock_tokens: list[bytes]
    disposition: Disposition
    reason: str | None = None
    description: str | None = None
    properties: dict[str, object] | None = None
    session_id: bytes | None = None


@dataclass(slots=True)
class CompleteSessions(Expects[Settled]):
    """Complete messages of several sessions of an entity, which arrived on several links.

    `parts` are session ids with lock tokens. The reply counts its indexes over all tokens.
    """

    entity_no: int
    parts: list[tuple[bytes, list[bytes]]]


@dataclass(slots=True)
class RenewLocks(Expects[LocksRenewed]):
    """All or none: else `Refused(LOCK_LOST)`. Not for session entities."""

    entity_no: int
    sub_queue: SubQueue
    lock_tokens: list[bytes]


@dataclass(slots=True)
class LoseLocks(Expects[Done]):
    """End all message locks of an entity now: a fault for tests."""

    entity_no: int


@dataclass(slots=True)
class Peek(Expects[Peeked]):
    """Browse from a number upward, any state. The reply may hold fewer than `limit`.

    `session_id` limits it to one session, `state` to one state; it needs no lock.
    """

    entity_no: int
    sub_queue: SubQueue
    from_sequence: int
    limit: int
    max_bytes: int
    session_id: bytes | None = None
    state: MessageState | None = None


@dataclass(slots=True)
class ReceiveDeferred(Expects[DeferredReceived]):
    """All or none: else `Refused(MESSAGE_NOT_FOUND)`.

    In a session entity `session_id` and the `consumer_id` that holds it are required.
    """

    entity_no: int
    sub_queue: SubQueue
    sequence_numbers: list[int]
    mode: ReceiveMode
    session_id: bytes | None = None
    consumer_id: int | None = None


@dataclass(slots=True)
class DeleteMessages(Expects[MessagesDeleted]):
    """Delete the oldest unlocked messages enqueued at or before an instant (batch delete).

    None: those that exist now.
    """

    entity_no: int
    sub_queue: SubQueue
    limit: int
    enqueued_before_ms: int | None
    session_id: bytes | None = None


@dataclass(slots=True)
class DeleteBySequence(Expects[MessagesHandled]):
    """Delete messages by number, in any state but locked."""

    entity_no: int
    sub_queue: SubQueue
    sequence_numbers: list[int]


@dataclass(frozen=True, slots=True)
class MessageEdit:
    """Changes to messages that are resent; everything else is kept.

    `body` becomes one data section. `fields`: name as in `message_operations.EDITABLE` -> text, or
    None, which removes it. `properties`: application properties to set, values as `message.codec`
    decodes them.
    """

    body: bytes | None = None
    fields: Mapping[str, str | None] = field(default_factory=dict)
    properties: Mapping[str, object] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


@dataclass(slots=True)
class ResendBySequence(Expects[MessagesHandled]):
    """Resend dead letters, by number, in this order; each leaves its queue in the same commit.

    `target_no` names an entity of this partition, `target` one that is reached through the outbox.
    Messages that a target here refuses stay where they are, as do those that were resent
    `max_resends` times before; None: however often.
    """

    entity_no: int
    sub_queue: SubQueue
    sequence_numbers: list[int]
    target_no: int | None
    target: str | None = None
    edit: MessageEdit | None = None
    max_resends: int | None = None


@dataclass(slots=True)
class RenewSession(Expects[SessionRenewed]):
    """Extend the lock of a session, or `Refused(SESSION_LOCK_LOST)`."""

    entity_no: int
    session_id: bytes
    consumer_id: int


@dataclass(slots=True)
class GetSessionState(Expects[SessionState]):
    """Read the state of a held session, or `Refused(SESSION_LOCK_LOST)`."""

    entity_no: int
    session_id: bytes
    consumer_id: int


@dataclass(slots=True)
class SetSessionState(Expects[Done]):
    """Replace the state of a held session, None removes it."""

    entity_no: int
    session_id: bytes
    consumer_id: int
    state: bytes | None


@dataclass(slots=True)
class ListSessions(Expects[SessionsListed]):
    """List ids in byte order.

    `updated_after_ms` None: sessions with messages or a state; else those whose state changed
    after that time.
    """

    entity_no: int
    updated_after_ms: int | None
    skip: int
    top: int


@dataclass(slots=True)
class Transact(Expects[Transacted]):
    """Do all of it in one commit or nothing (ADR 21); refused with the first refusal.

    All named locks must be held; `Refused(LOCK_LOST)` or `SESSION_LOCK_LOST` if one does not.
    """

    operations: list[Enqueue | Settle]


@dataclass(slots=True)
class CheckLocks(Expects[Settled]):
    """Check which locks are held, for a settlement that waits in a transaction."""

    entity_no: int
    sub_queue: SubQueue
    lock_tokens: list[bytes]
    session_id: bytes | None = None


@dataclass(slots=True)
class Arrive(Expects[Arrived]):
    """Store messages from the outbox of a partition for an entity here, each number once.

    `numbers` rise and belong to `messages`; numbers at or below the last one stored from that
    source are skipped. Stops before the first message that is refused. `resent`: numbers of
    messages that were resent by an operator. `after`: a number of that source which must be stored
    already: else the command before was refused, and nothing is stored.
    """

    source_partition: int
    entity_no: int
    numbers: list[int]
    messages: list[Envelope]
    resent: frozenset[int] = frozenset()
    after: int = 0


@dataclass(slots=True)
class CheckSends(Expects[SendsChecked]):
    """Check messages as an `Enqueue` does, without storing them.

    `waiting_bytes`: what is staged for the entity already, and counts as if it were stored.
    """

    entity_no: int
    messages: list[Envelope]
    waiting_bytes: int


@dataclass(slots=True)
class NotePublication(Expects[Done]):
    """Note that messages of a writer are to arrive, or that they have (ADR 45).

    Meanwhile the entity is neither empty nor idle.
    """

    entity_no: int
    writer: str
    is_open: bool


@dataclass(slots=True)
class Shipped(Expects[Done]):
    """The answer to an effect `Ship`: these numbers arrived, or were refused permanently."""

    target: str
    arrived: list[int]
    refused: dict[int, Refused]


@dataclass(slots=True)
class Freeze(Expects[Frozen]):
    """Refuse commands for an entity until it is dropped or thawed, for at most 2 s (ADR 27).

    `Refused(BUSY)` unless it has been idle. What comes meanwhile is refused as
    busy. `if_empty`: not whether it was used counts, but whether it holds a message, of its own, in
    a subscription or on the way out; the refusal is NOT_EMPTY then.
    """

    entity_no: int
    if_empty: bool = False


@dataclass(slots=True)
class Hold(Expects[Frozen]):
    """Keep an entity frozen until it is dropped or thawed, without a time limit (ADR 27).

    `Refused(BUSY)` when it is not frozen any more. `is_decided`: freeze it then,
    for its deletion may be durable and this partition was loaded since.
    """

    entity_no: int
    is_decided: bool = False


@dataclass(slots=True)
class Thaw(Expects[Done]):
    entity_no: int


@dataclass(slots=True)
class PutEntity(Expects[Done]):
    """Create an entity in this partition or replace its definition.

    `topic_no` and `rules` belong to subscriptions; a topic is put before its subscriptions.
    `is_partitioned`: sequence numbers contain the partition's id, the size limit is a share.
    `is_retained`: it is deleted for clients, and disabled in `properties`; its consumers end with
    ENTITY_NOT_FOUND.
    """

    entity_no: int
    name: str
    kind: EntityKind
    properties: EntityProperties
    catalog_version: int
    topic_no: int | None = None
    rules: tuple[RuleProperties, ...] = ()
    is_partitioned: bool = False
    is_retained: bool = False


@dataclass(slots=True)
class DropEntity(Expects[Done]):
    """Forget an entity; its consumers end with ENTITY_NOT_FOUND, its rows are deleted in chunks."""

    entity_no: int
    catalog_version: int


@dataclass(slots=True)
class SupplyRows(Expects[Done]):
    """Rows that the host read for an effect `Fetch`, in key order. A key without a row is an
    error.
    """

    entity_no: int
    sub_queue: SubQueue
    rows: list[StoredRow]


@dataclass(slots=True)
class Tick(Expects[Done]):
    """A timer is due: expire locks, activate schedules, journal outstanding acquisitions."""


@dataclass(slots=True)
class Quiesce(Expects[Done]):
    """Clean stop: journal every acquisition that is outstanding and the sizes (ADR 19, ADR 37)."""


MessageCommand: TypeAlias = Enqueue | Transact | Arrive | CheckSends | ResendBySequence
"""Commands that bring messages: refused while the store is full or behind."""
SettleCommand: TypeAlias = Settle | CompleteSessions
"""Commands that settle locked messages; `Transact` contains some too."""
OtherCommand: TypeAlias = (
    CancelScheduled
    | AddConsumer
    | SetDemand
    | RemoveConsumer
    | RenewLocks
    | LoseLocks
    | Peek
    | ReceiveDeferred
    | DeleteMessages
    | DeleteBySequence
    | AcceptSession
    | RenewSession
    | GetSessionState
    | SetSessionState
    | ListSessions
    | CheckLocks
    | ReserveNumbers
    | NotePublication
    | Shipped
    | Freeze
    | Hold
    | Thaw
    | PutEntity
    | DropEntity
    | SupplyRows
    | Tick
    | Quiesce
    | GroupCommand
)
Command: TypeAlias = MessageCommand | SettleCommand | OtherCommand
