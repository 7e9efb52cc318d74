"""Reading and removing messages out of order: peek, deferred ones by number, batch delete.

Rows that are not in memory are requested through `Needs`. Memory decides what exists: a row whose
key is not in memory is being deleted by an outcome in flight; a key without a row is not committed
yet.
"""

from __future__ import annotations

from array import array
from heapq import nsmallest
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeAlias

from postbus.entity.commands import (
    DeferredReceived,
    DeleteMessages,
    Delivery,
    MessagesDeleted,
    MessageState,
    Peek,
    Peeked,
    PeekedMessage,
    ReceiveDeferred,
    ReceiveMode,
    Refusal,
    Refused,
    StoredRow,
)
from postbus.entity.outcomes import Found, Needs, RecordAcquired, Settling
from postbus.entity.queues import expiry, locks, paging
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.message.patch import with_properties

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from postbus.entity.apply_context import ApplyContext
    from postbus.entity.queues.active_messages import FromNumber
    from postbus.entity.queues.sub_queue import SubQueueState

SCAN_KEYS = 1_000
"""Number of backlog keys that a batch delete looks at beyond its limit (ADR 20)."""

PEEK_READ_FACTOR = 4
"""Factor by which a peek reads more than fits its reply, in case the first messages are small."""

Entry: TypeAlias = tuple[int, int, MessageState, QueuedMessage | None]
"""(number, row key, state, the message if it is an object)."""


# --- peek -----------------------------------------------------------------------------------------


def peek(
    sub: SubQueueState,
    scheduled: FromNumber,
    command: Peek,
    found: Sequence[StoredRow] | None,
) -> Peeked | Needs:
    """List messages of any state by number, without changing anything."""
    if not sub.is_main and command.state is not MessageState.DEFERRED:
        return _peek_kept(sub, command, found)
    limit = paging.readable(sub.entity, command.limit, PEEK_READ_FACTOR * command.max_bytes)
    entries = entries_from(sub, command.from_sequence, limit, command.state)
    if sub.is_main:
        entries += scheduled_entries(scheduled, command.from_sequence, limit, command.state)
    entries.sort(key=number_of_entry)
    return peeked(sub, entries[:limit], command, found)


def peeked(
    sub: SubQueueState,
    entries: list[Entry],
    command: Peek,
    found: Sequence[StoredRow] | None,
) -> Peeked | Needs:
    """Return the reply with the listed entries, in order of number."""
    absent = [entry[1] for entry in entries if entry[3] is None or entry[3].envelope is None]
    if absent and found is None:
        return Needs(row_keys=absent)
    rows = {row.row_key: row for row in found or ()}
    messages: list[PeekedMessage] = []
    total_bytes = 0
    for sequence, row_key, state, message in entries:
        if message is not None and message.envelope is not None:
            peeked = PeekedMessage(
                sequence, message.enqueued_ms, message.failures, state, message.envelope
            )
        else:
            row = rows.get(row_key)
            if row is None:
                if not messages and isinstance(found, Found) and row_key not in found.row_keys:
                    return Needs(row_keys=absent)  # all messages that were read have left meanwhile
                break  # not committed yet; later ones must not overtake it
            count = sub.attempts.get(row_key, row.delivery_count)
            if message is not None:
                count = message.failures
            envelope = sub.context.as_changed(row_key, row.envelope)
            peeked = PeekedMessage(sequence, row.enqueued_ms, count, state, envelope, row.death)
        total_bytes += peeked.envelope.size_bytes
        if messages and total_bytes > command.max_bytes:
            break
        messages.append(peeked)
    return Peeked(messages)


def entries_from(
    sub: SubQueueState, from_sequence: int, limit: int, state: MessageState | None = None
) -> list[Entry]:
    """Return at least the first `limit` messages of the main queue, in no order.

    `state` None is any. Deferred ones alone may be asked for in every sub-queue.
    """
    entries: list[Entry] = []
    if state is None or state is MessageState.ACTIVE:
        entries += _in_order_from(sub, from_sequence, limit)
    if state is not MessageState.SCHEDULED:
        unordered = (entry for entry in _entries_out_of_order(sub) if entry[0] >= from_sequence)
        wanted = (entry for entry in unordered if state is None or entry[2] is state)
        entries += nsmallest(limit, wanted, key=number_of_entry)
        if state is not MessageState.ACTIVE:
            entries += _deferred_from(sub, from_sequence, limit)
    return entries


def _in_order_from(sub: SubQueueState, from_sequence: int, limit: int) -> list[Entry]:
    active = MessageState.ACTIVE
    number_of = sub.numbering.number_of
    return [
        (number_of(row_key) if message is None else message.sequence, row_key, active, message)
        for row_key, message in sub.order.first(limit, sub.numbering.key_from(from_sequence))
    ]


def _entries_out_of_order(sub: SubQueueState) -> Iterator[Entry]:
    active, deferred = MessageState.ACTIVE, MessageState.DEFERRED
    for message in out_of_order(sub):
        state = deferred if message.is_deferred else active
        yield message.sequence, message.row_key, state, message


def _deferred_from(sub: SubQueueState, from_sequence: int, limit: int) -> list[Entry]:
    """Return the first `limit` deferred messages; there may be a million, in no order."""
    deferred = sub.deferred
    first = nsmallest(limit, [number for number in deferred if number >= from_sequence])
    return [(number, deferred[number], MessageState.DEFERRED, None) for number in first]


def scheduled_entries(
    scheduled: FromNumber,
    from_sequence: int,
    limit: int,
    state: MessageState | None = None,
) -> list[Entry]:
    """Return the first `limit` scheduled messages in order of number, none of another state."""
    if state is not None and state is not MessageState.SCHEDULED:
        return []
    return [
        (sequence, row_key, MessageState.SCHEDULED, None)
        for sequence, row_key in islice(scheduled(from_sequence), limit)
    ]


def number_of_entry(entry: Entry) -> int:
    return entry[0]


def out_of_order(sub: SubQueueState) -> Iterator[QueuedMessage]:
    """Yield the messages that are locked or about to be dead-lettered."""
    return chain(sub.locks.values(), sub.doomed.values())


def _peek_kept(
    sub: SubQueueState, command: Peek, found: Sequence[StoredRow] | None
) -> Peeked | Needs:
    """Peek in a sub-queue whose numbers are stored beside the row: the tables have the order."""
    if command.state is MessageState.SCHEDULED:
        return Peeked([])
    entity_no = sub.entity.entity_no
    limit = paging.readable(sub.entity, command.limit, PEEK_READ_FACTOR * command.max_bytes)
    if found is None:
        return Needs(numbers=[(entity_no, sub.kind, command.from_sequence, limit)])
    objects = {
        message.row_key: message for message in chain(sub.order.messages(), out_of_order(sub))
    }
    messages: list[PeekedMessage] = []
    total_bytes = 0
    for row in found:
        message = objects.get(row.row_key)
        assert row.sequence is not None
        is_deferred = sub.deferred.get(row.sequence) == row.row_key
        if message is None and not is_deferred and not sub.order.is_absent(row.row_key):
            continue
        if message is not None:
            is_deferred = message.is_deferred
        if is_deferred and command.state is MessageState.ACTIVE:
            continue
        envelope = sub.context.as_changed(row.row_key, row.envelope)
        total_bytes += envelope.size_bytes
        if messages and total_bytes > command.max_bytes:
            break
        count = sub.attempts.get(row.row_key, row.delivery_count)
        if message is not None:
            count = message.failures
        state = MessageState.DEFERRED if is_deferred else MessageState.ACTIVE
        messages.append(
            PeekedMessage(row.sequence, row.enqueued_ms, count, state, envelope, row.death)
        )
    if not messages and found and found[-1].sequence is not None:  # none of these exists any more
        return Needs(numbers=[(entity_no, sub.kind, found[-1].sequence + 1, limit)])
    return Peeked(messages)


# --- deferred messages ----------------------------------------------------------------------------


def receive_deferred(
    sub: SubQueueState, command: ReceiveDeferred, found: Sequence[StoredRow] | None
) -> DeferredReceived | Refused | Needs:
    """Deliver deferred messages by number, all or none. Expired ones expire now."""
    row_keys: list[int] = []
    for sequence in dict.fromkeys(command.sequence_numbers):
        row_key = sub.deferred.get(sequence)
        if row_key is None:
            return Refused(
                Refusal.MESSAGE_NOT_FOUND, f"no deferred message has the number {sequence}"
            )
        row_keys.append(row_key)
    if paging.readable(sub.entity, len(row_keys)) < len(row_keys):
        return Refused(
            Refusal.ARGUMENT_OUT_OF_RANGE, "so many large messages must be asked for in parts"
        )
    if found is None and row_keys:
        return Needs(row_keys=row_keys)
    rows = {row.row_key: row for row in found or ()}
    if not all(row_key in rows for row_key in row_keys):
        return Refused(Refusal.MESSAGE_NOT_FOUND, "a message is gone")
    size_bytes = sum([row.envelope.size_bytes for row in rows.values()])
    if size_bytes > paging.READ_BYTES and len(row_keys) > 1:
        return Refused(
            Refusal.ARGUMENT_OUT_OF_RANGE,
            f"the messages have {size_bytes} bytes, one answer has room for {paging.READ_BYTES}:"
            " ask for fewer at a time",
        )
    messages = [
        _from_deferred(sub, sequence, rows[row_key])
        for sequence, row_key in zip(dict.fromkeys(command.sequence_numbers), row_keys, strict=True)
    ]
    expired = [message for message in messages if expiry.is_expired(sub, message)]
    for message in expired:
        _take_deferred(sub, message)
        expiry.expire(sub, message)
    if expired:
        return Refused(Refusal.MESSAGE_NOT_FOUND, "a deferred message has expired")
    for message in messages:
        _take_deferred(sub, message)
    if command.mode is ReceiveMode.RECEIVE_AND_DELETE:
        deliveries = [_delivery(sub, message, b"", 0) for message in messages]
        for message in messages:
            sub.remove(message, Settling.RECEIVED)
        return DeferredReceived(deliveries)
    return DeferredReceived(_lock_deferred(sub, messages))


def _from_deferred(sub: SubQueueState, sequence: int, row: StoredRow) -> QueuedMessage:
    envelope = sub.context.as_changed(row.row_key, row.envelope)
    section = sub.deferred_sections.get(row.row_key)
    if section is not None:  # the row may not have the patch yet
        envelope = with_properties(envelope, section)
    message = QueuedMessage(row.row_key, sequence, row.enqueued_ms, envelope)
    message.is_deferred = True
    message.failures = sub.attempts.get(row.row_key, row.delivery_count)
    message.recorded = message.failures
    return message


def _take_deferred(sub: SubQueueState, message: QueuedMessage) -> None:
    assert message.envelope is not None
    del sub.deferred[message.sequence]
    sub.attempts.pop(message.row_key, None)
    sub.deferred_sections.pop(message.row_key, None)
    sub.ledger.load(message.envelope)


def _lock_deferred(sub: SubQueueState, messages: list[QueuedMessage]) -> list[Delivery]:
    context = sub.context
    until_ms = sub.session_until_ms or context.now_ms + sub.entity.lock_duration_ms
    row_keys: list[int] = []
    attempts: list[int] = []
    deliveries: list[Delivery] = []
    for message in messages:
        token = context.random.randbytes(8) + context.token_suffix
        deliveries.append(_delivery(sub, message, token, until_ms))
        message.token = token
        message.locked_until_ms = until_ms
        sub.locks[token] = message
        if sub.is_main:
            message.recorded = message.failures + 1
            row_keys.append(message.row_key)
            attempts.append(message.recorded)
    if row_keys:
        context.outcome.mutations.append(RecordAcquired(row_keys, attempts))
    if messages:
        locks.watch(sub, until_ms)
    if context.window.is_over:
        sub.shed()
    return deliveries


def _delivery(sub: SubQueueState, message: QueuedMessage, token: bytes, until_ms: int) -> Delivery:
    envelope = message.envelope
    assert envelope is not None
    ttl_ms = envelope.ttl_ms
    if sub.is_main:
        ttl_ms = expiry.effective_ttl_ms(sub.entity, ttl_ms)
    return Delivery(
        token,
        until_ms,
        message.sequence,
        message.enqueued_ms,
        message.failures,
        ttl_ms,
        envelope,
    )


# --- batch delete ---------------------------------------------------------------------------------


def delete_messages(
    sub: SubQueueState, command: DeleteMessages, found: Sequence[StoredRow] | None
) -> MessagesDeleted | Needs:
    """Delete the oldest messages that are neither locked nor deferred."""
    limit = min(command.limit, sub.context.limits.max_delete_count)
    bound_ms = bound_of(command, sub.context)
    in_front = sum(message.enqueued_ms <= bound_ms for message in sub.order.front())
    scan = array("q")
    if in_front < limit:
        scan = sub.order.next_keys(paging.readable(sub.entity, limit - in_front + SCAN_KEYS))
    if scan and found is None:
        return Needs(row_keys=list(scan))
    deleted = _delete_in_front(sub, limit, bound_ms)
    if scan:
        deleted += _delete_paged(sub, scan, found or (), limit - deleted, bound_ms)
        deleted += _delete_in_front(sub, limit - deleted, bound_ms)  # the tail, if none is left
    return MessagesDeleted(deleted)


def bound_of(command: DeleteMessages, context: ApplyContext) -> int:
    """Return the enqueued time of the last message that may be deleted."""
    bound_ms = command.enqueued_before_ms
    return context.now_ms if bound_ms is None else bound_ms


def _delete_in_front(sub: SubQueueState, limit: int, bound_ms: int) -> int:
    old = (message for message in sub.order.front() if message.enqueued_ms <= bound_ms)
    chosen = list(islice(old, limit))
    sub.order.cut({message.row_key for message in chosen})
    for message in chosen:
        sub.remove(message, Settling.PURGED)
    return len(chosen)


def _delete_paged(
    sub: SubQueueState,
    scan: array[int],
    found: Sequence[StoredRow],
    limit: int,
    bound_ms: int,
) -> int:
    """Delete messages with only their key in memory; rows that are not committed yet stay."""
    rows = {row.row_key: row for row in found}
    old = (rows[row_key] for row_key in scan if row_key in rows)
    chosen = list(islice((row for row in old if row.enqueued_ms <= bound_ms), limit))
    sub.order.cut({row.row_key for row in chosen})
    for row in chosen:
        sub.settle_row(row.row_key, row.enqueued_ms, Settling.PURGED)
        sub.attempts.pop(row.row_key, None)
        sub.ledger.leave_unloaded(row.envelope.size_bytes)
    return len(chosen)
