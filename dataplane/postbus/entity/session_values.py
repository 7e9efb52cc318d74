"""What applications keep with their sessions: bytes of their own, durable, of a limited size.

A value set in this life stays in memory until its row is committed, and longer while there is room
for it; others are read when asked for. The times of the last changes are always in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.entity.commands import Refusal, Refused, Reply, SessionState
from postbus.entity.outcomes import Found, Needs, PutSessionState
from postbus.entity.turn import DONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postbus.entity.commands import StoredRow
    from postbus.entity.turn import Turn

KEPT_SHIFT: Final = 4
"""Committed values of an entity may use 1/16 of the window's budget. Our choice."""

KEPT_VALUES: Final = 10_000
"""Most committed values of an entity, whatever their size; one that was removed counts as well."""


class SessionValues:
    """See the module's docstring. `changed_ms`: session -> when its value changed last."""

    __slots__ = ("_entity_no", "_held", "_held_bytes", "_turn", "changed_ms")

    def __init__(self, entity_no: int, turn: Turn) -> None:
        self._entity_no = entity_no
        self._turn = turn
        self.changed_ms: dict[bytes, int] = {}
        self._held: dict[bytes, tuple[int, bytes | None]] = {}
        self._held_bytes = 0

    def load(self, changed_ms: dict[bytes, int]) -> None:
        """Take over the times of an earlier life."""
        self.changed_ms = dict(changed_ms)

    @property
    def held_bytes(self) -> int:
        """What the values in memory take of the window."""
        return self._held_bytes

    def get(self, session_id: bytes, found: Sequence[StoredRow] | None) -> Reply | Needs:
        held = self._held.get(session_id)
        if held is not None:
            return SessionState(held[1])
        if session_id not in self.changed_ms:
            return SessionState(None)
        if not isinstance(found, Found):
            return Needs(states=[(self._entity_no, session_id)])
        return SessionState(found.states.get((self._entity_no, session_id)))

    def set(self, session_id: bytes, state: bytes | None) -> Reply:
        turn = self._turn
        limit_bytes = turn.limits.max_session_state_bytes
        if state is not None and len(state) > limit_bytes:
            return Refused(
                Refusal.MESSAGE_TOO_LARGE,
                f"the session state has {len(state)} bytes, {limit_bytes} are allowed",
            )
        now_ms = turn.now_ms
        self._drop(session_id)
        if state is None:
            self.changed_ms.pop(session_id, None)
        else:
            self.changed_ms[session_id] = now_ms
        self._held[session_id] = (now_ms, state)
        self._account(len(state or b""))
        self.trim(turn.window.budget.limit_bytes >> KEPT_SHIFT)
        turn.outcome.mutations.append(PutSessionState(self._entity_no, session_id, state, now_ms))
        return DONE

    def trim(self, most_bytes: int) -> None:
        """Forget committed values, the oldest first, until so much is left."""
        committed_ms = self._turn.committed_ms
        while self._held:
            session_id, (set_ms, state) = next(iter(self._held.items()))
            if set_ms >= committed_ms or (
                state is not None
                and self._held_bytes <= most_bytes
                and len(self._held) <= KEPT_VALUES
            ):
                return
            self._drop(session_id)

    def clear(self) -> None:
        """Forget everything: the entity is dropped."""
        self._account(-self._held_bytes)
        self._held.clear()
        self.changed_ms.clear()

    def _drop(self, session_id: bytes) -> None:
        held = self._held.pop(session_id, None)
        if held is not None:
            self._account(-len(held[1] or b""))

    def _account(self, size_bytes: int) -> None:
        self._held_bytes += size_bytes
        self._turn.window.add(0, size_bytes)
