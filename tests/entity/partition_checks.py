"""Invariants between any two commands, checked in the memory of a partition.

Every message is in one place, places are in order, the window's accounts are exact, open and
available sessions are listed as such, and nothing is kept of a dropped entity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from postbus.entity.partition_state import PartitionState
from postbus.entity.queues.message_order import MessageOrder
from postbus.entity.queues.sub_queue import SubQueueState
from postbus.entity.sessions.session_messages import SESSION_BYTES, SessionMessages
from postbus.entity.sessions.session_queue import SessionQueue
from postbus.entity.window import MESSAGE_OVERHEAD_BYTES
from postbus.message.envelope import SharedBody


def check_partition(state: PartitionState) -> None:
    """Assert the invariants between any two commands."""
    window = state._context.window
    count = used = 0
    shared: Counter[SharedBody | None] = Counter()
    places: list[SubQueueState] = []
    for sub in state._context.sub_queues:
        assert isinstance(sub, SubQueueState)
        places.append(sub)
        if isinstance(sub, SessionQueue):
            used += check_sessions(sub)
            places += sub.open_sessions.values()
    for sub in places:
        loaded = [
            queued
            for queued in (
                *sub.order.messages(),
                *sub.locks.values(),
                *sub.doomed.values(),
            )
            if queued.envelope is not None
        ]
        count += len(loaded)
        used += sum(queued.envelope.size_bytes for queued in loaded if queued.envelope)
        shared.update(queued.envelope.shared for queued in loaded if queued.envelope)
        _check_places(sub)
    for body, holders in shared.items():
        if body is not None:
            assert body.holders == holders
            used -= body.size_bytes * (holders - 1)
    assert window.count == count
    assert window.used_bytes == used + count * MESSAGE_OVERHEAD_BYTES
    assert window.budget.used_bytes >= window.used_bytes
    assert not window.is_over, "the budget is exceeded"
    kept = {entity_no for _, entity_no in state._inbox._last_numbers}
    kept |= state._idle.trackers.keys() | state._idle._frozen.keys()
    assert kept <= state.entities.keys(), "something of a dropped entity is kept"


def check_sessions(queue: SessionQueue) -> int:
    """Assert the invariants of open and available sessions; return their bytes of the window."""
    is_serving = queue._serve in queue.context.resumed
    for session_id, session in queue.open_sessions.items():
        assert session.session_id == session_id
        assert session_id not in queue.dormant
        assert (session.holder is not None) is (session in queue.held)
        assert not (session in queue.held and session in queue.idle)
        assert session in queue.held or session in queue.idle or session.doomed, (
            "an open session without reason"
        )
        assert session in queue.held or not session.locks
        assert not session.order._tail
        assert list(session.consumers.values()) == (
            [] if session.holder is None else [session.holder]
        )
        if session.holder is not None:
            assert session.holder.session is session
            assert not session.is_queued
            assert queue.consumers[session.holder.consumer_id] is session.holder
            assert all(
                m.locked_until_ms == session.session_until_ms for m in session.locks.values()
            )
        elif session.is_available:
            assert session.is_queued
            assert is_serving or not queue.waiters
        assert not session.is_queued or session_id in queue.available
    for session_id, keys in queue.dormant.items():
        assert list(keys) == sorted(keys)
        assert not keys or session_id in queue.available
        assert not keys or is_serving or not queue.waiters
        assert keys or queue.dormant_deferred[session_id]
    holders = [session.holder for session in queue.held]
    assert len(queue.consumers) == len(holders) + len(queue.waiters)
    assert queue.waiters.keys() <= queue.consumers.keys()
    return len(queue.idle) * SESSION_BYTES + queue.states.held_bytes


def _deferred_keys(sub: SubQueueState) -> Iterator[int]:
    yield from sub.deferred.values()
    if isinstance(sub, SessionQueue):
        for session in sub.open_sessions.values():
            yield from session.deferred.values()
        for dormant in sub.dormant_deferred.values():
            yield from dormant.values()


def check_order(order: MessageOrder) -> None:
    """Assert the invariant of an order."""
    returned = sorted(key for key, _ in order._returned)
    ready = [queued.row_key for queued in order._ready]
    backlog = list(order._backlog[order._head :])
    tail = [queued.row_key for queued in order._tail]
    keys = returned + ready + backlog + tail
    assert keys == sorted(set(keys))
    assert backlog or not (tail or order._backlog or order._head)
    assert order._head <= len(order._backlog) // 2, "keys that were used are kept"
    assert all(row_key == queued.row_key for row_key, queued in order._returned)
    assert all(queued.envelope is not None for queued in (*order._ready, *order._tail))
    stubs = {key: queued for key, queued in order._returned if queued.envelope is None}
    assert stubs == order._stubs


def _check_places(sub: SubQueueState) -> None:
    check_order(sub.order)
    keys = Counter(sub.row_keys())
    assert all(times == 1 for times in keys.values()), "a message is in two places"
    assert len(keys) == sub.live or isinstance(sub, SessionMessages)
    if not isinstance(sub, SessionMessages):
        assert sub.attempts.keys() <= keys.keys(), "attempts of what is gone are kept"
        deferred = set(_deferred_keys(sub))
        assert sub.deferred_sections.keys() <= deferred, "properties of what is gone are kept"
    assert all(queued.token is None for queued in sub.order.messages())
    assert all(token == queued.token for token, queued in sub.locks.items())
    assert [c.is_waiting for c in sub.waiting] == [True] * len(sub.waiting)
    if not isinstance(sub, SessionQueue):
        assert all(
            consumer.is_waiting is (consumer.limit > consumer.delivered)
            for consumer in sub.consumers.values()
        )
