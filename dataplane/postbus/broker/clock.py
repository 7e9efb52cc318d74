"""Entity time (D16): database time carried by the monotonic clock.

Locks, TTL and schedules live on this clock. Tokens, TLS and idle timeouts stay on real time.
"""

from __future__ import annotations

from collections.abc import Callable


class EntityClock:
    """Milliseconds since the epoch, never going backwards.

    `monotonic_ms` and `wall_ms` are the machine's clocks; the wall clock only serves until the
    first `observe` of database time.
    """

    def __init__(self, monotonic_ms: Callable[[], int], wall_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self._offset_ms = wall_ms() - monotonic_ms()
        self._floor_ms = 0

    def __call__(self) -> int:
        now_ms = self._monotonic_ms() + self._offset_ms
        if now_ms < self._floor_ms:
            return self._floor_ms
        self._floor_ms = now_ms
        return now_ms

    def observe(self, database_ms: int) -> None:
        """Take a sample of database time; a clock set back only stops ours until it caught up."""
        self._offset_ms = database_ms - self._monotonic_ms()

    def raise_floor(self, persisted_ms: int) -> None:
        """Never tell a time before one that was already persisted."""
        self._floor_ms = max(self._floor_ms, persisted_ms)
