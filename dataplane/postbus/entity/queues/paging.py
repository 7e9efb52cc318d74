"""Paging: loading and unloading of the messages of a sub-queue, within the budget (ADR 16).

Loading is an effect `Fetch`, answered with `SupplyRows`; it is done in the order of commits, so it
may name rows that are not committed yet. Unloading forgets objects and keeps keys. A sub-queue with
a waiting receiver may always load one message, else a message above the budget would never leave.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

from postbus.entity.commands import StoredRow
from postbus.entity.queues import expiry, locks, runs
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.entity.window import MESSAGE_OVERHEAD_BYTES, WINDOW_MESSAGES
from postbus.message.envelope import Envelope

if TYPE_CHECKING:
    from postbus.entity.entity_state import EntityState
    from postbus.entity.queues.sub_queue import SubQueueState

FETCH_KEYS: Final = 1_000
"""Rows read at a time; measured with Postgres 15: 3 ms, and larger reads gain nothing."""

READ_BYTES: Final = 32 * 1024 * 1024
"""Approximate bytes of one read, which includes bodies. Further rows are left to the next read,
peek, drain or delete. Our choice."""

LOW_WATER: Final = 500
"""Number of loaded messages below which more are fetched: a read takes about as long as delivering
these. Our choice: half a fetch."""

UNLOADED_MESSAGES: Final = 5_000
"""Messages unloaded at a time, which takes 2 ms. Our choice."""


def append_short_of_room(sub: SubQueueState, arrived: list[QueuedMessage]) -> None:
    """Load messages that waiting receivers take at once or that fit; keep the keys of the rest."""
    window, order = sub.context.window, sub.order
    demand = 0
    if sub.waiting and not order.has_absent:
        demand = sum(consumer.limit - consumer.delivered for consumer in sub.waiting)
        demand -= order.front_count
    room_bytes = window.room_bytes(is_wanted=bool(sub.waiting))
    for index, message in enumerate(arrived):
        envelope = message.envelope
        assert envelope is not None
        cost = envelope.size_bytes + MESSAGE_OVERHEAD_BYTES
        if demand <= 0 and (cost > room_bytes or window.count >= WINDOW_MESSAGES):
            order.extend(arrived[:index])
            _append_without_room(sub, arrived[index:])
            return
        sub.ledger.load(envelope)
        room_bytes -= cost
        demand -= 1
    order.extend(arrived)


def _append_without_room(sub: SubQueueState, arrived: list[QueuedMessage]) -> None:
    """Load new messages in place of older ones behind the backlog; if there are none, keep keys."""
    order = sub.order
    envelopes = [message.envelope for message in arrived if message.envelope is not None]
    size_bytes = sum([envelope.size_bytes for envelope in envelopes])
    free_room(sub, order.unload_tail, len(arrived), size_bytes, is_wanted=bool(sub.waiting))
    if order.has_tail:
        order.extend(arrived)
        sub.ledger.load_all(envelopes, size_bytes, is_shared=True)
    else:
        order.append_keys([message.row_key for message in arrived])


# --- unloading ------------------------------------------------------------------------------------


def unload(sub: SubQueueState, message: QueuedMessage) -> None:
    """Drop a message's envelope: it becomes a stub."""
    envelope = message.envelope
    assert envelope is not None
    message.size_bytes = envelope.size_bytes
    message.ttl_ms = envelope.ttl_ms
    message.envelope = None
    sub.ledger.unload(envelope)


def evict_tail(sub: SubQueueState) -> None:
    """Keep only the keys of messages newer than the backlog."""
    _forget(sub, sub.order.unload_tail())


def evict_ready(sub: SubQueueState) -> None:
    """Keep only the keys of the ready messages, in front of the backlog."""
    _forget(sub, sub.order.unload_ready())


def free_room(
    sub: SubQueueState,
    unload: Callable[[int], Collection[QueuedMessage]],
    count: int,
    size_bytes: int,
    *,
    is_wanted: bool = True,
) -> None:
    """Unload messages of the order until `count` others, of `size_bytes` together, have room."""
    window = sub.context.window
    while not window.has_room(count, size_bytes, is_wanted=is_wanted):
        messages = unload(UNLOADED_MESSAGES)
        if not messages:
            return
        _forget(sub, messages)


def _forget(sub: SubQueueState, messages: Collection[QueuedMessage]) -> None:
    sub.ledger.unload_all(
        [message.envelope for message in messages if message.envelope is not None]
    )
    sub.attempts.update(
        [(message.row_key, message.failures) for message in messages if message.failures]
    )


def shed(sub: SubQueueState) -> None:
    """Unload messages of this sub-queue, the least useful first, until it is within the budget."""
    window = sub.context.window
    free_room(sub, sub.order.unload_tail, 0, 0)
    if window.is_over:
        _unload_locked(sub)
    free_room(sub, sub.order.unload_ready, 0, 0)
    if window.is_over:
        for message in sub.order.returned():
            if message.envelope is not None:
                unload(sub, message)
                sub.order.note_unloaded(message)


def _unload_locked(sub: SubQueueState) -> None:
    window = sub.context.window
    for message in reversed(sub.locks.values()):  # the loaded ones are the newest
        if message.envelope is not None:
            unload(sub, message)
            if not window.is_over:
                return


def _relieve(sub: SubQueueState, count: int, size_bytes: int) -> None:
    """Make room for waiting receivers: unload messages without a receiver."""
    window = sub.context.window
    free_room(sub, sub.order.unload_tail, count, size_bytes)
    if not window.has_room(count, size_bytes, is_wanted=True):
        for message in sub.locks.values():
            if message.envelope is not None:
                unload(sub, message)
        for other in sub.context.sub_queues:
            other.make_room(size_bytes + count * MESSAGE_OVERHEAD_BYTES)


# --- loading --------------------------------------------------------------------------------------


def fetch_if_low(sub: SubQueueState) -> None:
    """Fetch rows when there are receivers and few loaded messages."""
    if sub.fetch_keys is None and sub.consumers and sub.order.wants_rows(sub.low_water):
        fetch(sub)


def fetch(sub: SubQueueState) -> None:
    """Request the next rows, unless a fetch is open."""
    if sub.fetch_keys is None:
        sub.ask()


def readable(entity: EntityState, count: int, most_bytes: int = READ_BYTES) -> int:
    """Return how many of `count` messages of the usual size may be read at a time, at least one."""
    return min(count, max(min(most_bytes, READ_BYTES) // (entity.average_bytes or 1), 1))


def keys_wanted(sub: SubQueueState, limit: int) -> list[int]:
    """Return the keys of at most `limit` rows to be read next."""
    order = sub.order
    row_keys = sorted(sub.doomed)[:limit]
    if sub.consumers:
        stub_keys = order.stub_keys(limit - len(row_keys))
        if stub_keys:
            row_keys += stub_keys
            if _affordable(sub, len(row_keys)) < len(row_keys):
                stub_bytes = len(row_keys) * sub.entity.average_bytes
                free_room(sub, order.unload_ready, len(row_keys), stub_bytes)  # these come first
        count = min(limit - len(row_keys), order.backlog_count)
        if count:
            count = min(count, _affordable(sub, count))
            if count <= 0 and not row_keys and sub.waiting and not order.front_count:
                count = 1
            row_keys += order.next_keys(count)
    return row_keys


def _affordable(sub: SubQueueState, count: int) -> int:
    """Return how many messages of the usual size have room, after making some if need be."""
    window = sub.context.window
    is_wanted = bool(sub.waiting)
    average_bytes = sub.entity.average_bytes
    if is_wanted and not window.has_room(count, average_bytes * count, is_wanted=True):
        _relieve(sub, count, average_bytes * count)
    room_bytes = window.room_bytes(is_wanted=is_wanted)
    return min(
        room_bytes // (average_bytes + MESSAGE_OVERHEAD_BYTES), WINDOW_MESSAGES - window.count
    )


def absent_keys(sub: SubQueueState, wanted: int) -> list[int]:
    """Return the keys that must be loaded before the next `wanted` messages can be delivered.

    Not more than may be read at a time.
    """
    if not sub.order.has_absent:
        return []
    row_keys = [
        row_key
        for row_key, message in sub.order.first(wanted)
        if message is None or message.envelope is None
    ]
    return row_keys[: readable(sub.entity, FETCH_KEYS)]


def supply(sub: SubQueueState, rows: Iterable[StoredRow]) -> None:
    """Use the rows of a fetch and deliver up to the receivers' demand.

    The fetch counts as open until all rows were used, so that no other is requested meanwhile.
    """
    by_key = {row[0]: row for row in rows}
    for row_key in set(sub.fetch_keys or ()).difference(by_key):
        assert not sub.order.is_absent(row_key), f"row {row_key} of a message is not stored"
        assert row_key not in sub.doomed, f"row {row_key} of a message is not stored"
    if sub.doomed:
        for row_key in [row_key for row_key in by_key if row_key in sub.doomed]:
            doomed = sub.doomed.pop(row_key)
            load(sub, doomed, by_key.pop(row_key))
            settle_doomed(sub, doomed)
    hand_out(sub, deque(by_key.values()))
    sub.fetch_keys = None
    if sub.waiting:
        fetch_if_low(sub)
    if sub.doomed:
        fetch(sub)
    if sub.context.window.is_over:
        shed(sub)


def hand_out(sub: SubQueueState, rows: deque[StoredRow]) -> None:
    """Load rows and pump in turn: deliveries make room for rows that did not fit before."""
    if _take_run(sub, rows):
        sub.pump()
        return
    while True:
        count = _take_rows(sub, rows)
        sub.pump()
        if not (rows and count and sub.waiting):
            return


def _take_rows(sub: SubQueueState, rows: deque[StoredRow]) -> int:
    """Load, in key order, rows that are wanted, still exist and fit; return their number."""
    window, order = sub.context.window, sub.order
    is_wanted = bool(sub.waiting)
    keys = order.next_keys(len(rows))
    loaded: list[QueuedMessage] = []
    count = 0
    while rows:
        row = rows[0]
        row_key = row.row_key
        is_next = len(loaded) < len(keys) and keys[len(loaded)] == row_key
        stub = None if is_next else order.stub_of(row_key)
        if is_next or stub is not None:
            cost = row.envelope.size_bytes + MESSAGE_OVERHEAD_BYTES
            if window.room_bytes(is_wanted=is_wanted) < cost and not _is_first(sub, row_key):
                break
            count += 1
            if stub is not None:
                load(sub, stub, row)
                order.note_loaded(stub)
            else:
                envelope = sub.context.as_changed(row_key, row.envelope)
                loaded.append(from_row(sub, row, envelope))
                sub.ledger.load(envelope)
        rows.popleft()
    order.load_next(loaded)
    return count


def _take_run(sub: SubQueueState, rows: deque[StoredRow]) -> bool:
    """Load rows together if they are the next ones, fit, and nothing else is known of them."""
    context, window = sub.context, sub.context.window
    row_keys = [row[0] for row in rows]
    failures = [row[3] for row in rows]
    if (
        not row_keys
        or not sub.is_main
        or sub.order.next_keys(len(rows)) != array("q", row_keys)
        or any(failures)
        or not (context.is_unchanged(row_keys) and sub.attempts.keys().isdisjoint(row_keys))
    ):
        return False
    envelopes = [row[5] for row in rows]
    size_bytes = sum([envelope.size_bytes for envelope in envelopes])
    offset = sub.numbering.offset_of(row_keys[0], row_keys[-1])
    if offset is None or not window.has_room(len(rows), size_bytes, is_wanted=bool(sub.waiting)):
        return False
    sub.ledger.load_all(envelopes, size_bytes)
    sub.order.load_next(runs.load(rows, offset))
    rows.clear()
    return True


def load(sub: SubQueueState, stub: QueuedMessage, row: StoredRow) -> None:
    """Set the envelope of a stub from its row."""
    reload(sub, stub, row.envelope)


def reload(sub: SubQueueState, message: QueuedMessage, envelope: Envelope) -> None:
    """Restore the envelope of a message if it was unloaded."""
    if message.envelope is None:
        message.envelope = envelope = sub.context.as_changed(message.row_key, envelope)
        sub.ledger.load(envelope)
        sub.ledger.correct(envelope.size_bytes - message.size_bytes)


def settle_doomed(sub: SubQueueState, message: QueuedMessage) -> None:
    """Continue the removal of messages that were not loaded, by the present definition."""
    if message.failures >= sub.entity.max_delivery_count:
        expiry.exhaust(sub, message)
    else:
        locks.put_back(sub, message)


def from_row(sub: SubQueueState, row: StoredRow, envelope: Envelope) -> QueuedMessage:
    """Make a message of its row and what that holds as it is now.

    The attempts in memory are newer than the row's count.
    """
    row_key = row.row_key
    if sub.is_main:
        sequence = sub.numbering.number_of(row_key)
    else:
        assert row.sequence is not None
        sequence = row.sequence
    message = QueuedMessage(row_key, sequence, row.enqueued_ms, envelope)
    message.failures = sub.attempts.pop(row_key, row.delivery_count)
    message.recorded = message.failures
    return message


def _is_first(sub: SubQueueState, row_key: int) -> bool:
    """Return whether receivers wait for exactly this message: it is loaded whatever the budget."""
    oldest = sub.order.oldest() if sub.waiting else None
    return oldest is not None and oldest[0] == row_key
