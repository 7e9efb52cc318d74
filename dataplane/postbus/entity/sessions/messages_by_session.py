"""The active messages of an entity that requires sessions, divided by session.

A session is open (`SessionMessages`) while a receiver holds it or messages of it are loaded.
Otherwise it is `dormant`: an array of keys. A session without messages and holder is not kept.
`session_queue` decides which receiver gets an available session. An open session reports to this
module which rows it needs and when it is free.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Final

from postbus.entity.commands import StoredRow, SubQueue
from postbus.entity.outcomes import Fetch
from postbus.entity.queues import paging
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.entity.queues.sub_queue import SubQueueState
from postbus.entity.sessions.session_messages import SESSION_BYTES, SessionMessages
from postbus.entity.sessions.session_states import SessionStates
from postbus.entity.window import MESSAGE_OVERHEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from postbus.entity.entity_state import EntityState
    from postbus.entity.outcomes import LoadedPartition
    from postbus.entity.partition_context import PartitionContext
    from postbus.message.envelope import Envelope

IDLE_SESSIONS: Final = 10_000
"""Maximum number of open sessions of an entity without a holder; others are kept as keys. Our
choice."""

SPARE_SESSIONS: Final = 1_000
"""Number of empty objects kept for reuse: making one costs as much as ten messages."""

SESSION_FETCH_KEYS: Final = 64
"""Rows read for a session while others wait for theirs."""

ORPHANS: Final = 64
"""Number of stale entries in the order of available sessions from which it is cleaned."""


class MessagesBySession(SubQueueState):
    """See the module's docstring. Its own queues stay empty: every message is in its session.

    `open_sessions` has all open sessions, `held` those with a holder in the order their locks
    expire, `idle` those that may be closed, the latest last. `available` is the order in which
    sessions are granted. Every session with available messages and no holder has an entry; an
    entry may be stale.
    """

    __slots__ = (
        "_asked",
        "_below",
        "_below_key",
        "_hungry",
        "_is_supplying",
        "_orphans",
        "_spare",
        "available",
        "dormant",
        "dormant_deferred",
        "held",
        "idle",
        "open_sessions",
        "states",
    )

    def __init__(self, entity: EntityState, context: PartitionContext, next_sequence: int) -> None:
        super().__init__(entity, SubQueue.ACTIVE, context, next_sequence)
        self.open_sessions: dict[bytes, SessionMessages] = {}
        self.held: dict[SessionMessages, None] = {}
        self.idle: dict[SessionMessages, None] = {}
        self.dormant: dict[bytes, array[int]] = {}
        self.dormant_deferred: dict[bytes, dict[int, int]] = {}
        self.available: deque[bytes] = deque()
        self.states = SessionStates(entity, context)
        self._orphans = 0
        self._spare: list[SessionMessages] = []
        self._hungry: deque[SessionMessages] = deque()
        self._asked: list[SessionMessages] = []
        self._below: list[bytes] = []  # the sessions that a drain removes messages of next
        self._below_key = 0
        self._is_supplying = False

    def load(self, loaded: LoadedPartition) -> None:
        """Take over loaded sessions, the oldest first."""
        entity_no = self.entity.entity_no
        deferred = loaded.deferred.get((entity_no, SubQueue.ACTIVE), {})
        sessions = loaded.sessions.get(entity_no, {})
        for session_id, keys in sorted(sessions.items(), key=lambda item: item[1][:1]):
            self.ledger.restore(len(keys))
            if deferred and not deferred.keys().isdisjoint(keys):
                self.dormant_deferred[session_id] = {
                    deferred[key]: key for key in keys if key in deferred
                }
                keys = array("q", (key for key in keys if key not in deferred))
            self.dormant[session_id] = keys
            if keys:
                self.available.append(session_id)
        self.states.load(loaded.session_states.get(entity_no, {}))

    # --- arrivals ---------------------------------------------------------------------------------

    def distribute(
        self,
        envelopes: list[Envelope],
        arrived: list[QueuedMessage],
        total_bytes: int,
        is_shared: bool,
    ) -> None:
        """Add new messages to their sessions, then deliver to holders."""
        assert not is_shared, "sessions have no bodies in common"
        window = self.context.window
        count = len(arrived)
        touched: dict[SessionMessages, None] = {}
        if not window.has_room(count, total_bytes + count * SESSION_BYTES, is_wanted=False):
            for message in arrived:
                self._take_short_of_room(message, touched)
        else:
            self.ledger.load_all(envelopes, total_bytes)
            find: Callable[[bytes | None], SessionMessages | None]
            find = self.open_sessions.get  # type: ignore[assignment]
            for envelope, message in zip(envelopes, arrived, strict=True):
                session = find(envelope.session_id)
                if session is None or not session.order.append_ready(message):
                    session = self._take_aside(message)
                    if session is None:
                        continue
                if session.is_queued:
                    continue
                if session.waiting:
                    touched[session] = None
                elif session.holder is None:
                    session.is_queued = True
                    self.available.append(session.session_id)
        for session in touched:
            session.pump()

    def _take_aside(self, message: QueuedMessage) -> SessionMessages | None:
        """Append a loaded message to a session that is dormant or has a backlog."""
        envelope = message.envelope
        assert envelope is not None
        session_id = envelope.session_id
        assert session_id is not None
        session = self.open_sessions.get(session_id)
        if session is None and session_id not in self.dormant and len(self.idle) < IDLE_SESSIONS:
            session = self.open_session(session_id)
            self._make_idle(session)
        if session is None:
            self._take_key(session_id, message.row_key)
        elif session.order.append_ready(message):
            return session
        else:
            session.order.append_keys([message.row_key])
        self.ledger.unload(envelope)
        return session

    def _take_short_of_room(
        self, message: QueuedMessage, touched: dict[SessionMessages, None]
    ) -> None:
        envelope = message.envelope
        assert envelope is not None
        session_id = envelope.session_id
        assert session_id is not None
        session = self.open_sessions.get(session_id)
        if session is None:
            window = self.context.window
            needed_bytes = envelope.size_bytes + MESSAGE_OVERHEAD_BYTES + SESSION_BYTES
            if (
                session_id in self.dormant
                or len(self.idle) >= IDLE_SESSIONS
                or window.room_bytes(is_wanted=False) < needed_bytes
            ):
                self._take_key(session_id, message.row_key)
                return
            session = self.open_session(session_id)
            self._make_idle(session)
        session.take_short_of_room(message)
        if session.waiting:
            touched[session] = None
        else:
            self._queue_up(session)

    def append_key(
        self, row_key: int, grown_bytes: int = 0, *, session_id: bytes | None = None
    ) -> None:
        """Append a message that was moved here; its row is read when a receiver wants it."""
        assert session_id is not None
        self.ledger.store(1, grown_bytes)
        session = self.open_sessions.get(session_id)
        if session is None:
            self._take_key(session_id, row_key)
        else:
            session.order.append_keys([row_key])
            if session.waiting:
                self.context.resumed[session.pump] = None
            else:
                self._queue_up(session)

    def _take_key(self, session_id: bytes, row_key: int) -> None:
        keys = self.dormant.get(session_id)
        if keys is None:
            keys = self.dormant[session_id] = array("q")
        if not keys:
            self.available.append(session_id)
        keys.append(row_key)

    # --- open sessions ----------------------------------------------------------------------------

    def open_session(self, session_id: bytes) -> SessionMessages:
        """Open a session with its keys."""
        session = self._spare.pop() if self._spare else SessionMessages(self)
        session.session_id = session_id
        session.is_queued = False
        self.open_sessions[session_id] = session
        keys = self.dormant.pop(session_id, None)
        if keys is not None:
            session.order.restore(keys)
            session.is_queued = bool(keys)
            session.deferred = self.dormant_deferred.pop(session_id, session.deferred)
        return session

    def put_away(self, session: SessionMessages) -> None:
        """Keep a session without a holder as it is, as keys, or not at all."""
        assert session.holder is None
        if session.is_empty:
            if session.is_queued:
                self._note_orphan()
            self._forget(session)
            return
        self._queue_up(session)
        if session.doomed or session.locks or session in self.idle:
            return
        window = self.context.window
        if (
            session.order.front_count
            and len(self.idle) < IDLE_SESSIONS
            and window.room_bytes(is_wanted=False) >= SESSION_BYTES
        ):
            self._make_idle(session)
        else:
            self._reduce(session)

    def _queue_up(self, session: SessionMessages) -> None:
        if session.holder is None and not session.is_queued and session.is_available:
            session.is_queued = True
            self.available.append(session.session_id)

    def _make_idle(self, session: SessionMessages) -> None:
        self.idle[session] = None
        self.context.window.add(0, SESSION_BYTES)

    def _leave_idle(self, session: SessionMessages) -> None:
        del self.idle[session]
        self.context.window.remove(0, SESSION_BYTES)

    def _forget(self, session: SessionMessages) -> None:
        if session in self.idle:
            self._leave_idle(session)
        del self.open_sessions[session.session_id]
        session.fetch_keys = None
        if len(self._spare) < SPARE_SESSIONS:
            self._spare.append(session)

    def _reduce(self, session: SessionMessages) -> None:
        """Keep only the keys of a session without a holder."""
        assert session.holder is None
        assert not session.locks
        self.dormant[session.session_id] = session.unload_all()
        if session.deferred:
            self.dormant_deferred[session.session_id] = session.deferred
            session.deferred = {}
        self._forget(session)

    def _note_orphan(self) -> None:
        """Count a stale entry; remove all of them when they are the larger part."""
        self._orphans += 1
        if self._orphans > ORPHANS and self._orphans > len(self.available) // 2:
            self.available = deque(
                session_id
                for session_id in dict.fromkeys(self.available)
                if (session.is_queued if (session := self.open_sessions.get(session_id)) else None)
                or self.dormant.get(session_id)
            )
            self._orphans = 0

    # --- paging -----------------------------------------------------------------------------------

    def want(self, session: SessionMessages) -> None:
        """Read rows for a session, now or with the next read."""
        if not session.is_hungry:
            session.is_hungry = True
            self._hungry.append(session)
        if not self._asked and not self._is_supplying:
            self._ask_next()

    def _ask_next(self) -> None:
        """Read for all sessions that want rows, each a share."""
        hungry = self._hungry
        row_keys: list[int] = []
        most = paging.readable(self.entity, paging.FETCH_KEYS)
        share = max(most // (len(hungry) or 1), SESSION_FETCH_KEYS)
        while hungry and len(row_keys) < most:
            session = hungry.popleft()
            session.is_hungry = False
            wanted = paging.keys_wanted(session, min(share, most - len(row_keys)))
            if wanted:
                session.fetch_keys = wanted
                self._asked.append(session)
                row_keys += wanted
        if row_keys:
            self.context.outcome.effects.append(
                Fetch(self.entity.entity_no, self.kind, sorted(row_keys))
            )

    def supply(self, rows: Iterable[StoredRow]) -> None:
        """Pass the rows of a read to the sessions that requested them."""
        by_key = {row.row_key: row for row in rows}
        asked = self._asked
        self._asked = []
        self._is_supplying = True
        for session in asked:
            paging.supply(
                session, [by_key[key] for key in sorted(session.fetch_keys or ()) if key in by_key]
            )
            if session.holder is None and self.open_sessions.get(session.session_id) is session:
                self.put_away(session)
        self._is_supplying = False
        self._ask_next()

    def make_room(self, wanted_bytes: int) -> None:
        """Unload messages without a waiting receiver: of held sessions, then the latest idle."""
        self.states.trim(0)
        for session in self.held:
            SubQueueState.make_room(session, wanted_bytes)
        window = self.context.window
        while self.idle and window.room_bytes(is_wanted=True) < wanted_bytes:
            self._reduce(next(reversed(self.idle)))

    # --- reader groups ----------------------------------------------------------------------------

    def lowest_held(self) -> int | None:
        """Return the lowest key of a message that a receiver has, or that is about to leave."""
        held = (
            session.lowest_held()
            for session in self.open_sessions.values()
            if session.locks or session.doomed
        )
        return min((row_key for row_key in held if row_key is not None), default=None)

    def deferred_count(self) -> int:
        """Return the number of deferred messages."""
        return sum(len(each) for each in self.dormant_deferred.values()) + sum(
            session.deferred_count()
            for session in self.open_sessions.values()
            if session.deferred or session.locks
        )

    def remove_below(self, end_key: int, limit: int) -> int:
        """Complete messages below a key, at most `limit`, one session after the other."""
        if not self._below or self._below_key != end_key:
            self._below_key, self._below = end_key, self._sessions_below(end_key)
        below, left = self._below, limit
        while below and left:
            session_id = below[-1]
            session = self.open_sessions.get(session_id)
            if session is None and session_id in self.dormant:
                session = self.open_session(session_id)
            if session is None:
                below.pop()
                continue
            left -= session.remove_below(end_key, left)
            oldest = session.order.oldest()
            if oldest is None or oldest[0] >= end_key:
                below.pop()
            if session.holder is None:
                self.put_away(session)
        return limit - left

    def _sessions_below(self, end_key: int) -> list[bytes]:
        """Return the sessions with messages below a key. Looks at all sessions."""
        below = [name for name, keys in self.dormant.items() if keys and keys[0] < end_key]
        below += [
            session.session_id
            for session in self.open_sessions.values()
            if (oldest := session.order.oldest()) is not None and oldest[0] < end_key
        ]
        return below

    # --- holders, the matter of `SessionQueue` ----------------------------------------------------

    def release(self, session: SessionMessages, *, is_failed: bool) -> None:
        """End the hold of a session; locked messages return, as failed or as undelivered."""
        raise NotImplementedError

    def expire(self, session: SessionMessages) -> None:
        """End the holder whose lock has run out."""
        raise NotImplementedError

    # --- for the partition ------------------------------------------------------------------------

    def clear(self) -> None:
        for session in list(self.idle):
            self._leave_idle(session)
        for session in self.open_sessions.values():
            session.clear()
        self.open_sessions.clear()
        self.held.clear()
        self.dormant.clear()
        self.dormant_deferred.clear()
        self._below.clear()
        self.available.clear()
        self.states.clear()
        super().clear()

    def unrecorded(self) -> Iterator[tuple[QueuedMessage, int]]:
        for session in self.open_sessions.values():
            yield from session.unrecorded()

    def row_keys(self) -> array[int]:
        keys = array("q")
        for session in self.open_sessions.values():
            keys.extend(session.row_keys())
        for dormant in self.dormant.values():
            keys.extend(dormant)
        for deferred in self.dormant_deferred.values():
            keys.extend(deferred.values())
        return keys
