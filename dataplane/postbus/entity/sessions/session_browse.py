"""Peek, batch delete and listing over the sessions of an entity.

The first messages over all sessions are in the sessions with the lowest keys: only these are
searched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from heapq import nsmallest
from itertools import chain
from typing import TYPE_CHECKING

from postbus.entity.commands import (
    DeleteMessages,
    ListSessions,
    MessagesDeleted,
    MessageState,
    Peek,
    Peeked,
    SessionsListed,
    StoredRow,
)
from postbus.entity.outcomes import Needs
from postbus.entity.queues import browse, paging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.entity.queues.active_messages import FromNumber
    from postbus.entity.sessions.messages_by_session import MessagesBySession
    from postbus.entity.sessions.session_messages import SessionMessages


# --- peek -----------------------------------------------------------------------------------------


def peek(
    queue: MessagesBySession,
    scheduled: FromNumber,
    command: Peek,
    found: Sequence[StoredRow] | None,
) -> Peeked | Needs:
    """List messages of one session or of all by number, scheduled ones only of all."""
    start = command.from_sequence
    most_bytes = browse.PEEK_READ_FACTOR * command.max_bytes
    limit = paging.readable(queue.entity, command.limit, most_bytes)
    if command.session_id is not None:
        entries = _entries_of(queue, command.session_id, command, limit)
    else:
        entries = browse.scheduled_entries(scheduled, start, limit, command.state)
        for session_id in _first_sessions(queue, command, limit):
            entries += _entries_of(queue, session_id, command, limit)
    entries.sort(key=browse.number_of_entry)
    return browse.peeked(queue, entries[:limit], command, found)


def _first_sessions(queue: MessagesBySession, command: Peek, limit: int) -> set[bytes]:
    """Return the sessions among which the first `limit` messages of the wanted state are."""
    state = command.state
    sessions: set[bytes] = set()
    if state is MessageState.SCHEDULED:
        return sessions
    if state is not MessageState.ACTIVE:
        sessions.update(queue.dormant_deferred)
    if state is MessageState.DEFERRED:
        sessions.update(
            name
            for name, session in queue.open_sessions.items()
            if session.deferred or session.locks
        )
        return sessions
    first_key = queue.numbering.key_from(command.from_sequence)
    heads = [
        (keys[bisect_left(keys, first_key)], session_id)
        for session_id, keys in queue.dormant.items()
        if keys and keys[-1] >= first_key
    ]
    for session_id, session in queue.open_sessions.items():
        head = _head(session, first_key, has_deferred=state is None)
        if head is not None:
            heads.append((head, session_id))
    sessions.update(session_id for _, session_id in nsmallest(limit, heads))
    return sessions


def _head(session: SessionMessages, first_key: int, *, has_deferred: bool) -> int | None:
    """Return the lowest key of a session that is not below `first_key`, deferred ones or not."""
    lowest_key = session.order.lowest_key(first_key)
    heads = [] if lowest_key is None else [lowest_key]
    if session.locks or session.deferred or session.doomed:
        others = chain(
            (
                message.row_key
                for message in browse.out_of_order(session)
                if has_deferred or not message.is_deferred
            ),
            session.deferred.values() if has_deferred else (),
        )
        heads += [row_key for row_key in others if row_key >= first_key]
    return min(heads, default=None)


def _entries_of(
    queue: MessagesBySession, session_id: bytes, command: Peek, limit: int
) -> list[browse.Entry]:
    from_sequence, state = command.from_sequence, command.state
    session = queue.open_sessions.get(session_id)
    if session is not None:
        return browse.entries_from(session, from_sequence, limit, state)
    if session_id not in queue.dormant:
        return []
    session = queue.open_session(session_id)
    entries = browse.entries_from(session, from_sequence, limit, state)
    queue.put_away(session)
    return entries


# --- batch delete ---------------------------------------------------------------------------------


def delete_messages(
    queue: MessagesBySession, command: DeleteMessages, found: Sequence[StoredRow] | None
) -> MessagesDeleted | Needs:
    """Delete the oldest messages of a session, or of all, that are neither locked nor deferred."""
    if command.session_id is not None:
        return _delete_in(queue, command.session_id, command, found)
    limit = min(command.limit, queue.context.limits.max_delete_count)
    oldest = _oldest(queue, paging.readable(queue.entity, limit + browse.SCAN_KEYS))
    absent = [row_key for row_key, _, enqueued_ms in oldest if enqueued_ms is None]
    if absent and found is None:
        return Needs(row_keys=absent)
    times = {row.row_key: row.enqueued_ms for row in found or ()}
    counts: Counter[bytes] = Counter()
    bound_ms = browse.bound_of(command, queue.context)
    for row_key, session_id, enqueued_ms in oldest:
        time_ms = times.get(row_key) if enqueued_ms is None else enqueued_ms
        if time_ms is not None and time_ms <= bound_ms:
            counts[session_id] += 1
            limit -= 1
            if not limit:
                break
    deleted = 0
    for session_id, count in counts.items():
        part = _delete_in(queue, session_id, replace(command, limit=count), found or ())
        assert isinstance(part, MessagesDeleted)
        deleted += part.count
    return MessagesDeleted(deleted)


def _delete_in(
    queue: MessagesBySession,
    session_id: bytes,
    command: DeleteMessages,
    found: Sequence[StoredRow] | None,
) -> MessagesDeleted | Needs:
    session = queue.open_sessions.get(session_id)
    if session is None:
        if session_id not in queue.dormant:
            return MessagesDeleted(0)
        session = queue.open_session(session_id)
    reply = browse.delete_messages(session, command, found)
    if session.holder is None:
        queue.put_away(session)
    return reply


def _oldest(queue: MessagesBySession, limit: int) -> list[tuple[int, bytes, int | None]]:
    """Return the first available messages. Shape: (row key, session, enqueued time if loaded)."""
    entries: list[tuple[int, bytes, int | None]] = []
    for session_id, session in queue.open_sessions.items():
        entries += [
            (row_key, session_id, None if message is None else message.enqueued_ms)
            for row_key, message in session.order.first(limit)
        ]
    heads = nsmallest(limit, ((keys[0], name) for name, keys in queue.dormant.items() if keys))
    for _, session_id in heads:
        entries += [(key, session_id, None) for key in queue.dormant[session_id][:limit]]
    return nsmallest(limit, entries, key=lambda entry: entry[0])


# --- listing --------------------------------------------------------------------------------------


def list_sessions(queue: MessagesBySession, command: ListSessions) -> SessionsListed:
    """List sessions with messages or a state, or those whose state changed after a time."""
    stored = queue.states.stored
    names: set[bytes]
    if command.updated_after_ms is not None:
        after_ms = command.updated_after_ms
        names = {name for name, state in stored.items() if state.changed_ms > after_ms}
    else:
        names = set(stored)
        names.update(queue.dormant)
        names.update(name for name, session in queue.open_sessions.items() if not session.is_empty)
    end = command.skip + command.top
    return SessionsListed(nsmallest(end, names)[command.skip :])
