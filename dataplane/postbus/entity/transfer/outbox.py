"""The outbox: forwarded messages, forwarded dead letters and messages sent via an entity.

Each moves into the outbox in the commit that takes it from its entity, with an increasing number
(its row key). At most one `Ship` is open for each target, and its messages are kept until `Shipped`
reports their fate, so that a hop happens exactly once: after a reload everything is offered again
in the same order, and the target skips known numbers. Messages that the target refuses permanently
go to the transfer dead-letter queue of their source. A target is identified by name, whatever its
case.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from postbus.contract.entities import catalog_key
from postbus.entity.commands import Death, Refusal, Refused, Shipped, StoredRow, SubQueue
from postbus.entity.numbering import Numbering
from postbus.entity.outcomes import InsertMessage, MoveMessage, Needs, PutOutbound, RecordSize, Ship
from postbus.entity.queues.dead_letter_reasons import DESCRIPTION, REASON, SYSTEM_PROPERTY_BYTES
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.message.envelope import Envelope
from postbus.message.patch import merge_properties, with_properties

if TYPE_CHECKING:
    from postbus.entity.apply_context import ApplyContext
    from postbus.entity.entity_state import EntityState

OUTBOX_NO: Final = 0
"""The entity number of the rows of a partition's outbox."""

SHIP_MESSAGES: Final = 64
SHIP_BYTES: Final = 1 << 20
"""Maximum messages and bytes of one `Ship`. Our choice: a burst that costs the target one
commit."""

LOADED_MESSAGES: Final = 256
LOADED_BYTES: Final = 1 << 20
"""Bytes of messages not offered yet that a partition keeps in memory, beside the window; other rows
are read by the shipper."""

DEAD: Final = 1
RESENT: Final = 2
"""Marks of a message in a queue: it was dead-lettered before; it was resent by an operator."""

RETRY_MS: Final = 1_000
"""Pause before an offer is repeated to a target that decided nothing. Our choice."""


def _transfer_reason_of(refusal: Refusal) -> tuple[str, str | None] | None:
    match refusal:
        case Refusal.HOPS_EXCEEDED:
            return "MaxTransferHopCountExceeded", None
        case Refusal.ENTITY_NOT_FOUND:
            return (
                "MessagingEntityNotFound",
                "The entity the message was to be transferred to does not exist.",
            )
        case Refusal.ENTITY_DISABLED:
            return (
                "MessagingEntityDisabled",
                "The entity the message was to be transferred to is disabled.",
            )
        case Refusal.SEND_DISABLED:
            return (
                "MessagingEntityDisabled",
                "The entity the message was to be transferred to is disabled for sending.",
            )
        case Refusal.QUOTA_EXCEEDED:
            return (
                "QuotaExceeded",
                "The entity the message was to be transferred to has reached its maximum size.",
            )
        case Refusal.MESSAGE_TOO_LARGE:
            return (
                "MessageSizeExceeded",
                "The message is larger than its transfer destination allows.",
            )
        case Refusal.PROPERTIES_TOO_LARGE:
            return "HeaderSizeExceeded", "The size quota for this stream has been exceeded."
        case Refusal.SESSION_REQUIRED:
            return (
                "Session id is null.",
                "Session enabled entity doesn't allow a message whose session identifier is null.",
            )
        case Refusal.PUBLISH_TOO_LARGE:
            return "PublishTooLarge", "The message has too many copies."
        case (
            Refusal.RECEIVE_DISABLED
            | Refusal.MESSAGE_MALFORMED
            | Refusal.ARGUMENT_OUT_OF_RANGE
            | Refusal.LOCK_LOST
            | Refusal.SESSION_LOCK_LOST
            | Refusal.SESSION_CANNOT_BE_LOCKED
            | Refusal.SESSION_NOT_SUPPORTED
            | Refusal.ALREADY_EXISTS
            | Refusal.MESSAGE_NOT_FOUND
            | Refusal.MESSAGE_LOCKED
            | Refusal.NOT_ALLOWED
            | Refusal.CONFLICT
            | Refusal.NOT_EMPTY
            | Refusal.GROUP_NOT_FOUND
            | Refusal.GROUP_FENCED
            | Refusal.STALE_CHECKPOINT
            | Refusal.BUS_RESTORED
        ):
            return "TransferFailed", None
        case Refusal.STORE_FULL | Refusal.NOT_APPLIED | Refusal.UNKNOWN | Refusal.BUSY:
            return None


_TRANSFER_REASONS: Final = {each: _transfer_reason_of(each) for each in Refusal}
"""Refusal of the target -> reason and description in the transfer dead-letter queue; None: the
message is offered again. The name for the hop limit is Azure's (S263), the others are ours."""


class _TargetQueue:
    """The messages for one target, as parallel arrays; the first `open_count` are on their way."""

    __slots__ = (
        "head",
        "marks",
        "numbers",
        "open_count",
        "retry_ms",
        "sequences",
        "sizes",
        "sources",
        "target",
    )

    def __init__(self, target: str) -> None:
        self.target = target
        self.numbers = array("q")
        self.sources = array("q")
        self.sequences = array("q")
        self.sizes = array("q")  # 0: loaded, its size is not accounted for
        self.marks = bytearray()
        self.head = 0
        self.open_count = 0
        self.retry_ms = 0

    def __len__(self) -> int:
        return len(self.numbers) - self.head

    def add(self, put: PutOutbound, size_bytes: int) -> None:
        self.numbers.append(put.row_key)
        self.sources.append(put.source_no)
        self.sequences.append(put.sequence)
        self.sizes.append(size_bytes)
        self.marks.append(DEAD * put.is_dead_letter | RESENT * put.is_resent)

    def close(self, kept: list[int]) -> None:
        """Remove the open entries except those at these indexes, which stay first."""
        end = write = self.head + self.open_count
        for index in reversed(kept):
            write -= 1
            for column in (self.numbers, self.sources, self.sequences, self.sizes, self.marks):
                column[write] = column[index]
        self.head = write
        self.open_count = 0
        assert write <= end
        if self.head > len(self.numbers) // 2:
            self._cut(range(self.head, len(self.numbers)))

    def remove(self, source_no: int) -> list[int]:
        """Forget the messages of a source that are not on their way; return their numbers."""
        first = self.head + self.open_count
        gone = [
            self.numbers[index]
            for index in range(first, len(self.numbers))
            if self.sources[index] == source_no
        ]
        if gone:
            self._cut(
                [
                    index
                    for index in range(self.head, len(self.numbers))
                    if index < first or self.sources[index] != source_no
                ]
            )
        return gone

    def _cut(self, indexes: Sequence[int]) -> None:
        self.numbers = array("q", (self.numbers[index] for index in indexes))
        self.sources = array("q", (self.sources[index] for index in indexes))
        self.sequences = array("q", (self.sequences[index] for index in indexes))
        self.sizes = array("q", (self.sizes[index] for index in indexes))
        self.marks = bytearray(self.marks[index] for index in indexes)
        self.head = 0


class Outbox:
    """See the module's docstring. `unoffered`: targets to offer messages to after the command."""

    __slots__ = (
        "_context",
        "_entities",
        "_loaded",
        "_loaded_bytes",
        "_numbering",
        "_queues",
        "unoffered",
    )

    entity_no = OUTBOX_NO

    def __init__(self, context: ApplyContext, entities: Mapping[int, EntityState]) -> None:
        self._context = context
        self._entities = entities
        self._numbering = Numbering(self, SubQueue.OUTBOX, 0)
        self._queues: dict[str, _TargetQueue] = {}
        self._loaded: dict[int, Envelope] = {}
        self._loaded_bytes = 0
        self.unoffered: dict[_TargetQueue, None] = {}

    def load(self, rows: Sequence[PutOutbound]) -> array[int]:
        """Take over loaded rows; return those without a source."""
        orphans = array("q")
        for row in rows:
            entity = self._entities.get(row.source_no)
            if entity is None:
                orphans.append(row.row_key)
            else:
                entity.outbound += 1
                self._queue_of(row.target).add(row, 0)
        if self._queues:
            self._context.resumed[self._offer_all] = None
        return orphans

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def recorded_size(self) -> RecordSize:
        raise AssertionError("the outbox has no size of its own")

    # --- coming in --------------------------------------------------------------------------------

    def send(
        self,
        entity: EntityState,
        envelopes: list[Envelope],
        target: str,
        resent: list[int] | None = None,
    ) -> list[int]:
        """Add new messages of an entity; return their sequence numbers there.

        `resent`: the numbers of messages that an operator resends; they keep them.
        """
        context = self._context
        inserts = context.outcome.inserts
        numbers: list[int] = []
        for index, envelope in enumerate(envelopes):
            if resent is None:
                _, sequence = entity.active.numbering.take_one(context)
            else:
                sequence = resent[index]
            row_key, _ = self._numbering.take_one(context)
            inserts.append(InsertMessage(row_key, context.now_ms, envelope))
            put = PutOutbound(
                row_key, entity.entity_no, target, sequence, False, resent is not None
            )
            entity.grow(envelope.size_bytes)
            self._put(entity, put, envelope.size_bytes, envelope)
            numbers.append(sequence)
        return numbers

    def move(
        self,
        entity: EntityState,
        message: QueuedMessage,
        target: str,
        section: bytes | None = None,
        *,
        is_dead_letter: bool = True,
        is_kept: bool = False,
    ) -> None:
        """Add a loaded message that was removed from the order and accounts of its sub-queue.

        `section` replaces its application properties: it is being dead-lettered, and also stays in
        its entity if that has a history. `is_kept`: its row stays for a reader group.
        """
        envelope = message.envelope
        assert envelope is not None
        if section is not None:
            envelope = with_properties(envelope, section)
        row_key = self._move_row(
            message.row_key,
            message.sequence,
            message.failures,
            None,
            section,
            keeps_source=is_kept or (entity.keeps_settled and section is not None),
        )
        entity.grow(envelope.size_bytes)
        put = PutOutbound(row_key, entity.entity_no, target, message.sequence, is_dead_letter)
        self._put(entity, put, envelope.size_bytes, envelope)

    def take_due(
        self, entity: EntityState, row_key: int, sequence: int, due_ms: int, size_bytes: int
    ) -> None:
        """Add a scheduled message that is due; the entity accounts for it already."""
        assert entity.forward_to is not None
        new_key = self._move_row(row_key, sequence, 0, due_ms, None)
        put = PutOutbound(new_key, entity.entity_no, entity.forward_to, sequence, False)
        self._put(entity, put, size_bytes, None)

    def _move_row(
        self,
        row_key: int,
        sequence: int,
        count: int,
        enqueued_ms: int | None,
        section: bytes | None,
        *,
        keeps_source: bool = False,
    ) -> int:
        new_key, _ = self._numbering.take_one(self._context)
        self._context.outcome.mutations.append(
            MoveMessage(
                row_key,
                new_key,
                OUTBOX_NO,
                SubQueue.OUTBOX,
                sequence,
                count,
                enqueued_ms,
                section,
                keeps_source,
            )
        )
        return new_key

    def _put(
        self, entity: EntityState, put: PutOutbound, size_bytes: int, envelope: Envelope | None
    ) -> None:
        self._context.outcome.mutations.append(put)
        entity.outbound += 1
        queue = self._queue_of(put.target)
        queue.add(put, size_bytes)
        self.unoffered[queue] = None
        if (
            envelope is not None
            and len(self._loaded) < LOADED_MESSAGES
            and self._loaded_bytes + size_bytes <= LOADED_BYTES
        ):
            self._loaded[put.row_key] = envelope
            self._loaded_bytes += size_bytes

    def _queue_of(self, target: str) -> _TargetQueue:
        key = catalog_key(target)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _TargetQueue(target)
        return queue

    # --- going out --------------------------------------------------------------------------------

    def offer(self) -> None:
        """Open a `Ship` for each target with new messages that has none."""
        queues, self.unoffered = self.unoffered, {}
        for queue in queues:
            if not queue.open_count and len(queue) and queue.retry_ms <= self._context.now_ms:
                self._open(queue)

    def _offer_all(self) -> None:
        self.unoffered.update(dict.fromkeys(self._queues.values()))

    def _open(self, queue: _TargetQueue) -> None:
        numbers: list[int] = []
        envelopes: list[Envelope | None] = []
        sources: list[bytes | None] = []
        resent: list[int] = []
        total_bytes = 0
        for index in range(queue.head, min(queue.head + SHIP_MESSAGES, len(queue.numbers))):
            entity = self._entities.get(queue.sources[index])
            size_bytes = queue.sizes[index] or (0 if entity is None else entity.average_bytes)
            if numbers and total_bytes + size_bytes > SHIP_BYTES:
                break
            total_bytes += size_bytes
            number = queue.numbers[index]
            numbers.append(number)
            envelopes.append(self._unload(number))
            if queue.marks[index] & RESENT:
                resent.append(number)
            is_named = queue.marks[index] & DEAD and entity is not None
            sources.append(entity.name.encode() if is_named and entity is not None else None)
        queue.open_count = len(numbers)
        self._context.outcome.effects.append(
            Ship(queue.target, numbers, envelopes, sources, frozenset(resent))
        )

    def _unload(self, number: int) -> Envelope | None:
        envelope = self._loaded.pop(number, None)
        if envelope is not None:
            self._loaded_bytes -= envelope.size_bytes
        return envelope

    def _retry(self) -> None:
        for queue in self._queues.values():
            if not queue.open_count and len(queue):
                self.unoffered[queue] = None

    # --- the answer -------------------------------------------------------------------------------

    def shipped(self, command: Shipped, found: Sequence[StoredRow] | None) -> Needs | None:
        """Delete messages that arrived, move those refused permanently, offer the others and later
        ones.
        """
        context = self._context
        queue = self._queue_of(command.target)
        indexes = range(queue.head, queue.head + queue.open_count)
        rows = {row.row_key: row for row in found or ()}
        if found is None:
            wanted = [
                queue.numbers[index] for index in indexes if self._needs_row(queue, index, command)
            ]
            if wanted:
                return Needs(row_keys=wanted)
        arrived = set(command.arrived)
        kept: list[int] = []
        for index in indexes:
            number = queue.numbers[index]
            refused = command.refused.get(number)
            entity = self._entities.get(queue.sources[index])
            if number in arrived or entity is None:
                context.outcome.deletes.append(number)
                if entity is not None:
                    entity.outbound -= 1
                    entity.shrink(queue.sizes[index])
            elif refused is None or _TRANSFER_REASONS[refused.refusal] is None:
                kept.append(index)
            else:
                self._move_to_transfer_dead_letters(queue, index, entity, refused, rows.get(number))
        if kept and len(kept) == queue.open_count:
            queue.retry_ms = context.now_ms + RETRY_MS
            context.set_timer(queue.retry_ms, self._retry)
        queue.close(kept)
        if len(queue):
            self.unoffered[queue] = None
        else:
            del self._queues[catalog_key(command.target)]
        return None

    def _needs_row(self, queue: _TargetQueue, index: int, command: Shipped) -> bool:
        """Return whether the reason must be merged into the properties of a message."""
        refused = command.refused.get(queue.numbers[index])
        return (
            refused is not None
            and _TRANSFER_REASONS[refused.refusal] is not None
            and not queue.marks[index] & DEAD
            and queue.sources[index] in self._entities
        )

    def _move_to_transfer_dead_letters(
        self,
        queue: _TargetQueue,
        index: int,
        entity: EntityState,
        refused: Refused,
        row: StoredRow | None,
    ) -> None:
        """Move to the transfer dead-letter queue. A dead letter keeps the reason it has (S263)."""
        context = self._context
        size_bytes = queue.sizes[index]
        section: bytes | None = None
        if not queue.marks[index] & DEAD:
            assert row is not None, f"row {queue.numbers[index]} of the outbox is not stored"
            section = _with_reason(row.envelope.application_properties, refused, context)
            grown_bytes = len(section) - len(row.envelope.application_properties)
            size_bytes = row.envelope.size_bytes + grown_bytes
        sub = entity.sub_queue(SubQueue.TRANSFER_DEAD_LETTER)
        new_key, _ = sub.numbering.take_one(context)
        context.outcome.mutations.append(
            MoveMessage(
                queue.numbers[index],
                new_key,
                entity.entity_no,
                SubQueue.TRANSFER_DEAD_LETTER,
                queue.sequences[index],
                0,
                None,
                section,
                death=Death(context.now_ms),
            )
        )
        entity.outbound -= 1
        sub.append_key(new_key, size_bytes - queue.sizes[index])

    # --- the source is gone -----------------------------------------------------------------------

    def drop(self, entity_no: int) -> array[int]:
        """Forget the messages of a dropped entity; return the rows to delete.

        Messages on their way are deleted when their fate is known.
        """
        row_keys = array("q")
        for queue in self._queues.values():
            row_keys.extend(queue.remove(entity_no))
        for number in row_keys:
            self._unload(number)
        return row_keys


def _with_reason(section: bytes, refused: Refused, context: ApplyContext) -> bytes:
    texts = _TRANSFER_REASONS[refused.refusal]
    assert texts is not None
    reason, description = texts
    if reason == "TransferFailed":
        description = refused.detail or None
    changes: dict[str, object] = {REASON: reason, DESCRIPTION: description}
    limit_bytes = context.limits.max_header_bytes + SYSTEM_PROPERTY_BYTES
    try:
        return merge_properties(section, changes, limit_bytes)
    except ValueError:  # a malformed map must not keep the message in the outbox for ever
        return merge_properties(b"", changes, limit_bytes)
