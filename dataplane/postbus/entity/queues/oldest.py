"""Which message has waited longest for a receiver; asked for metrics, never on the way of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from postbus.entity.queues.sub_queue import SubQueueState

MAX_SESSIONS: Final = 10_000
"""Sessions that are looked through; with more of them the oldest message is not told. Our choice:
a millisecond."""


def oldest(sub: SubQueueState) -> tuple[int, int | None] | None:
    """Return row key and enqueued time of the next available message; None when none is known.

    The time is None when only the key is in memory. Locked and deferred messages do not wait.
    """
    sessions = sub.sessions
    if sessions is None:
        return _front(sub)
    if len(sessions.open_sessions) + len(sessions.dormant) > MAX_SESSIONS:
        return None
    fronts = [_front(session) for session in sessions.open_sessions.values()]
    fronts += [(keys[0], None) for keys in sessions.dormant.values() if keys]
    return min((front for front in fronts if front is not None), default=None)


def _front(sub: SubQueueState) -> tuple[int, int | None] | None:
    if sub.returned:
        row_key, message = sub.returned[0]
        return row_key, message.enqueued_ms
    if sub.ready:
        return sub.ready[0].row_key, sub.ready[0].enqueued_ms
    if sub.backlog_count:
        return sub.backlog[sub.backlog_head], None
    if sub.tail:
        return sub.tail[0].row_key, sub.tail[0].enqueued_ms
    return None
