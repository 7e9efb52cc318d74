"""Session states: bytes that applications store with a session, durable, of limited size.

A state that was set stays in memory until its row is committed, and longer while there is memory
for it; others are read from the store on request. The times of the last changes and the sizes are
always in memory: states count in the size of their entity, and stay until they are cleared, as in
Azure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.entity.apply_context import DONE
from postbus.entity.commands import Refusal, Refused, Reply, SessionState
from postbus.entity.outcomes import Found, Needs, PutSessionState, StoredState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.entity.apply_context import ApplyContext
    from postbus.entity.commands import StoredRow
    from postbus.entity.entity_state import EntityState

KEPT_SHIFT: Final = 4
"""Committed states of an entity may use 1/16 of the window's budget. Our choice."""

KEPT_STATES: Final = 10_000
"""Maximum number of committed states of an entity in memory, cleared ones included."""

ROW_BYTES: Final = 100
"""Size counted for a state besides its bytes and the session's id. Our choice."""


class SessionStates:
    """Session states of one entity. `stored`: session -> time of its last change, and its size.

    Their total size is `state_bytes` of the entity.
    """

    __slots__ = ("_context", "_entity", "_entity_no", "_held", "held_bytes", "stored")

    def __init__(self, entity: EntityState, context: ApplyContext) -> None:
        self._entity = entity
        self._entity_no = entity.entity_no
        self._context = context
        self.stored: dict[bytes, StoredState] = {}
        self._held: dict[bytes, tuple[int, bytes | None]] = {}
        self.held_bytes = 0

    def load(self, stored: dict[bytes, StoredState]) -> None:
        """Take over times and sizes from the tables."""
        self.stored = dict(stored)
        self._entity.state_bytes = sum(
            _counted_bytes(session_id, state.size_bytes) for session_id, state in stored.items()
        )

    def get(self, session_id: bytes, found: Sequence[StoredRow] | None) -> Reply | Needs:
        held = self._held.get(session_id)
        if held is not None:
            return SessionState(held[1])
        if session_id not in self.stored:
            return SessionState(None)
        if not isinstance(found, Found):
            return Needs(states=[(self._entity_no, session_id)])
        return SessionState(found.states.get((self._entity_no, session_id)))

    def set(self, session_id: bytes, state: bytes | None) -> Reply:
        """Set a state; None or no bytes clears it."""
        context = self._context
        state = state or None
        limit_bytes = context.limits.max_session_state_bytes
        if state is not None and len(state) > limit_bytes:
            return Refused(
                Refusal.MESSAGE_TOO_LARGE,
                f"the session state has {len(state)} bytes, {limit_bytes} are allowed",
            )
        known = self.stored.get(session_id)
        grown_bytes = 0 if known is None else -_counted_bytes(session_id, known.size_bytes)
        if state is not None:
            grown_bytes += _counted_bytes(session_id, len(state))
        if not self._entity.keep_state(grown_bytes):
            return Refused(
                Refusal.QUOTA_EXCEEDED,
                "the entity has reached its maximum size, in which the states of sessions count",
            )
        now_ms = context.now_ms
        self._drop(session_id)
        if state is None:
            self.stored.pop(session_id, None)
        else:
            self.stored[session_id] = StoredState(now_ms, len(state))
        self._held[session_id] = (now_ms, state)
        self._account(len(state or b""))
        self.trim(context.window.budget.limit_bytes >> KEPT_SHIFT)
        context.outcome.mutations.append(
            PutSessionState(self._entity_no, session_id, state, now_ms)
        )
        return DONE

    def trim(self, most_bytes: int) -> None:
        """Forget committed states, the oldest first, down to `most_bytes`."""
        committed_ms = self._context.committed_ms
        while self._held:
            session_id, (set_ms, state) = next(iter(self._held.items()))
            if set_ms >= committed_ms or (
                state is not None
                and self.held_bytes <= most_bytes
                and len(self._held) <= KEPT_STATES
            ):
                return
            self._drop(session_id)

    def clear(self) -> None:
        """Forget everything: the entity is dropped."""
        self._account(-self.held_bytes)
        self._held.clear()
        self.stored.clear()
        self._entity.state_bytes = 0

    def _drop(self, session_id: bytes) -> None:
        held = self._held.pop(session_id, None)
        if held is not None:
            self._account(-len(held[1] or b""))

    def _account(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self._context.window.add(0, size_bytes)


def _counted_bytes(session_id: bytes, size_bytes: int) -> int:
    return ROW_BYTES + len(session_id) + size_bytes
