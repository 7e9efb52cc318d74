"""Where the active messages of an entity that requires sessions lie: divided into lanes.

A session that nobody holds and of which nothing is loaded is `dormant`: an array of keys. One
without messages and holder is not known here at all. Available sessions stand in line. Who gets
them is decided in `session_state`.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Final

from postbus.entity.commands import StoredRow, SubQueue
from postbus.entity.outcomes import Fetch
from postbus.entity.queues import paging
from postbus.entity.queues.queued import QueuedMessage
from postbus.entity.queues.sub_queue import SubQueueState
from postbus.entity.sessions.session_queue import LANE_BYTES, SessionLane
from postbus.entity.sessions.session_values import SessionValues
from postbus.entity.window import MESSAGE_OVERHEAD_BYTES, WINDOW_MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from postbus.entity.outcomes import LoadedPartition
    from postbus.entity.queues.queue_state import QueueState
    from postbus.entity.turn import Turn
    from postbus.message.envelope import Envelope

IDLE_LANES: Final = 10_000
"""Most lanes of an entity that nobody holds; others are kept as keys. Our choice."""

SPARE_LANES: Final = 1_000
"""Empty lanes kept for the next sessions: making one costs as much as ten messages."""

LANE_FETCH_KEYS: Final = 64
"""Rows read for one session when others wait for theirs."""

ORPHANS: Final = 64
"""Entries in the line of available sessions that may be in vain before it is cleaned."""


class SessionPlaces(SubQueueState):
    """See the module's docstring. Its own places stay empty: every message lies in a lane.

    `lanes` holds all lanes, `held` those with a holder in the order their locks expire, `idle`
    those that could be given up, the latest last. `line` is the order of available sessions; an
    entry may be in vain, and every session with available messages and no holder has one.
    """

    __slots__ = (
        "_asked",
        "_hungry",
        "_is_supplying",
        "_orphans",
        "_spare",
        "dormant",
        "dormant_deferred",
        "held",
        "idle",
        "lanes",
        "line",
        "values",
    )

    def __init__(self, entity: QueueState, turn: Turn, next_sequence: int) -> None:
        super().__init__(entity, SubQueue.ACTIVE, turn, next_sequence)
        self.lanes: dict[bytes, SessionLane] = {}
        self.held: dict[SessionLane, None] = {}
        self.idle: dict[SessionLane, None] = {}
        self.dormant: dict[bytes, array[int]] = {}
        self.dormant_deferred: dict[bytes, dict[int, int]] = {}
        self.line: deque[bytes] = deque()
        self.values = SessionValues(entity, turn)
        self._orphans = 0
        self._spare: list[SessionLane] = []
        self._hungry: deque[SessionLane] = deque()
        self._asked: list[SessionLane] = []
        self._is_supplying = False

    def load(self, row_keys: array[int], deferred: dict[int, int]) -> None:
        """Do nothing: the keys come divided, with `load_sessions`."""

    def load_sessions(self, loaded: LoadedPartition) -> None:
        """Take over the sessions of an earlier life, the oldest first in line."""
        entity_no = self.entity.entity_no
        deferred = loaded.deferred.get((entity_no, SubQueue.ACTIVE), {})
        sessions = loaded.sessions.get(entity_no, {})
        for session_id, keys in sorted(sessions.items(), key=lambda item: item[1][:1]):
            self.live += len(keys)
            if deferred and not deferred.keys().isdisjoint(keys):
                self.dormant_deferred[session_id] = {
                    deferred[key]: key for key in keys if key in deferred
                }
                keys = array("q", (key for key in keys if key not in deferred))
            self.dormant[session_id] = keys
            if keys:
                self.line.append(session_id)
        self.values.load(loaded.session_states.get(entity_no, {}))

    # --- arrivals ---------------------------------------------------------------------------------

    def distribute(
        self, envelopes: list[Envelope], arrived: list[QueuedMessage], total_bytes: int
    ) -> None:
        """Put new messages into the lanes of their sessions, then hand out to holders."""
        window = self.turn.window
        count = len(arrived)
        needed_bytes = total_bytes + count * (MESSAGE_OVERHEAD_BYTES + LANE_BYTES)
        touched: dict[SessionLane, None] = {}
        if (
            window.room_bytes(is_wanted=False) < needed_bytes
            or window.count + count > WINDOW_MESSAGES
        ):
            for message in arrived:
                self._take_short_of_room(message, touched)
        else:
            window.add(count, total_bytes)
            find: Callable[[bytes | None], SessionLane | None]
            find = self.lanes.get  # type: ignore[assignment]
            for envelope, message in zip(envelopes, arrived, strict=True):
                lane = find(envelope.session_id)
                if lane is None or lane.backlog:
                    lane = self._take_aside(message)
                    if lane is None:
                        continue
                else:
                    lane.ready.append(message)
                if lane.is_queued:
                    continue
                if lane.waiting:
                    touched[lane] = None
                elif lane.holder is None:
                    lane.is_queued = True
                    self.line.append(lane.session_id)
        for lane in touched:
            lane.pump()

    def _take_aside(self, message: QueuedMessage) -> SessionLane | None:
        """Take a loaded message of a session without lane or with a backlog; return the lane."""
        envelope = message.envelope
        assert envelope is not None
        session_id = envelope.session_id
        assert session_id is not None
        lane = self.lanes.get(session_id)
        if lane is None and session_id not in self.dormant and len(self.idle) < IDLE_LANES:
            lane = self.wake(session_id)
            self._make_idle(lane)
        if lane is None:
            self._take_key(session_id, message.row_key)
        elif lane.backlog_head < len(lane.backlog):
            lane.backlog.append(message.row_key)
        else:
            lane.ready.append(message)
            return lane
        self.turn.window.remove(1, envelope.size_bytes)
        return lane

    def _take_short_of_room(self, message: QueuedMessage, touched: dict[SessionLane, None]) -> None:
        envelope = message.envelope
        assert envelope is not None
        session_id = envelope.session_id
        assert session_id is not None
        lane = self.lanes.get(session_id)
        if lane is None:
            window = self.turn.window
            needed_bytes = envelope.size_bytes + MESSAGE_OVERHEAD_BYTES + LANE_BYTES
            if (
                session_id in self.dormant
                or len(self.idle) >= IDLE_LANES
                or window.room_bytes(is_wanted=False) < needed_bytes
            ):
                self._take_key(session_id, message.row_key)
                return
            lane = self.wake(session_id)
            self._make_idle(lane)
        lane.take_short_of_room(message)
        if lane.waiting:
            touched[lane] = None
        else:
            self._queue_up(lane)

    def take_key(self, session_id: bytes, row_key: int) -> None:
        """Take a message that was moved here; its row is read when somebody wants it."""
        self.live += 1
        lane = self.lanes.get(session_id)
        if lane is None:
            self._take_key(session_id, row_key)
        else:
            lane.backlog.append(row_key)
            if lane.waiting:
                self.turn.resumed[lane.pump] = None
            else:
                self._queue_up(lane)

    def _take_key(self, session_id: bytes, row_key: int) -> None:
        keys = self.dormant.get(session_id)
        if keys is None:
            keys = self.dormant[session_id] = array("q")
        if not keys:
            self.line.append(session_id)
        keys.append(row_key)

    # --- lanes ------------------------------------------------------------------------------------

    def wake(self, session_id: bytes) -> SessionLane:
        """Make the lane of a session that has none, with the keys it has."""
        lane = self._spare.pop() if self._spare else self._make_lane()
        lane.session_id = session_id
        lane.is_queued = False
        self.lanes[session_id] = lane
        keys = self.dormant.pop(session_id, None)
        if keys is not None:
            lane.backlog = keys
            lane.is_queued = bool(keys)
            lane.deferred = self.dormant_deferred.pop(session_id, lane.deferred)
        return lane

    def _make_lane(self) -> SessionLane:
        assert self.sessions is not None
        return SessionLane(self.sessions)

    def rest(self, lane: SessionLane) -> None:
        """Keep a lane that nobody holds as it is, as keys, or not at all."""
        assert lane.holder is None
        if lane.is_empty:
            if lane.is_queued:
                self._note_orphan()
            self._forget(lane)
            return
        self._queue_up(lane)
        if lane.doomed or lane.locks or lane in self.idle:
            return
        window = self.turn.window
        if (
            (lane.ready or lane.returned)
            and len(self.idle) < IDLE_LANES
            and window.room_bytes(is_wanted=False) >= LANE_BYTES
        ):
            self._make_idle(lane)
        else:
            self._reduce(lane)

    def _queue_up(self, lane: SessionLane) -> None:
        if lane.holder is None and not lane.is_queued and lane.is_available:
            lane.is_queued = True
            self.line.append(lane.session_id)

    def _make_idle(self, lane: SessionLane) -> None:
        self.idle[lane] = None
        self.turn.window.add(0, LANE_BYTES)

    def _leave_idle(self, lane: SessionLane) -> None:
        del self.idle[lane]
        self.turn.window.remove(0, LANE_BYTES)

    def _forget(self, lane: SessionLane) -> None:
        if lane in self.idle:
            self._leave_idle(lane)
        del self.lanes[lane.session_id]
        lane.fetch_keys = None
        if lane.backlog:  # used up to its end
            lane.backlog = array("q")
            lane.backlog_head = 0
        if len(self._spare) < SPARE_LANES:
            self._spare.append(lane)

    def _reduce(self, lane: SessionLane) -> None:
        """Keep only the keys of a session that nobody holds."""
        assert lane.holder is None
        assert not lane.locks
        self.dormant[lane.session_id] = lane.unload_all()
        if lane.deferred:
            self.dormant_deferred[lane.session_id] = lane.deferred
            lane.deferred = {}
        self._forget(lane)

    def _note_orphan(self) -> None:
        """Clean the line of sessions that are gone when these are the larger part."""
        self._orphans += 1
        if self._orphans > ORPHANS and self._orphans > len(self.line) // 2:
            self.line = deque(
                session_id
                for session_id in dict.fromkeys(self.line)
                if (lane.is_queued if (lane := self.lanes.get(session_id)) else None)
                or self.dormant.get(session_id)
            )
            self._orphans = 0

    # --- paging -----------------------------------------------------------------------------------

    def want(self, lane: SessionLane) -> None:
        """Read rows for a lane, now or with the next read."""
        if not lane.is_hungry:
            lane.is_hungry = True
            self._hungry.append(lane)
        if not self._asked and not self._is_supplying:
            self._ask_next()

    def _ask_next(self) -> None:
        """Read for all lanes that want rows, each a share."""
        hungry = self._hungry
        row_keys: list[int] = []
        most = paging.readable(self, paging.FETCH_KEYS)
        share = max(most // (len(hungry) or 1), LANE_FETCH_KEYS)
        while hungry and len(row_keys) < most:
            lane = hungry.popleft()
            lane.is_hungry = False
            wanted = paging.keys_wanted(lane, min(share, most - len(row_keys)))
            if wanted:
                lane.fetch_keys = wanted
                self._asked.append(lane)
                row_keys += wanted
        if row_keys:
            self.turn.outcome.effects.append(
                Fetch(self.entity.entity_no, self.kind, sorted(row_keys))
            )

    def supply(self, rows: Iterable[StoredRow]) -> None:
        """Give the rows of a read to the lanes that asked for them."""
        by_key = {row.row_key: row for row in rows}
        asked = self._asked
        self._asked = []
        self._is_supplying = True
        for lane in asked:
            paging.supply(
                lane, [by_key[key] for key in sorted(lane.fetch_keys or ()) if key in by_key]
            )
            if lane.holder is None and self.lanes.get(lane.session_id) is lane:
                self.rest(lane)
        self._is_supplying = False
        self._ask_next()

    def make_room(self, wanted_bytes: int) -> None:
        """Unload what no receiver waits for: of held sessions all, then the latest idle ones."""
        self.values.trim(0)
        for lane in self.held:
            SubQueueState.make_room(lane, wanted_bytes)
        window = self.turn.window
        while self.idle and window.room_bytes(is_wanted=True) < wanted_bytes:
            self._reduce(next(reversed(self.idle)))

    # --- for the partition ------------------------------------------------------------------------

    def clear(self) -> None:
        for lane in list(self.idle):
            self._leave_idle(lane)
        for lane in self.lanes.values():
            lane.clear()
        self.lanes.clear()
        self.held.clear()
        self.dormant.clear()
        self.dormant_deferred.clear()
        self.line.clear()
        self.values.clear()
        super().clear()

    def unrecorded(self) -> Iterator[tuple[QueuedMessage, int]]:
        for lane in self.lanes.values():
            yield from lane.unrecorded()

    def row_keys(self) -> array[int]:
        keys = array("q")
        for lane in self.lanes.values():
            keys.extend(lane.row_keys())
        for dormant in self.dormant.values():
            keys.extend(dormant)
        for deferred in self.dormant_deferred.values():
            keys.extend(deferred.values())
        return keys
