"""Entity time (ADR 28): database time carried by the monotonic clock, one clock for each database.

Locks, TTL and schedules live on this clock. Tokens, TLS and idle timeouts stay on real time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

SKEW_MS = 1_000
"""Maximum difference between clocks of correctly configured machines."""


class ClockMode(StrEnum):
    """Modes of entity time."""

    WALL = "wall"
    MANUAL = "manual"


class EntityClock:
    """Milliseconds since the epoch, never going backwards from the first sample on.

    `monotonic_ms` and `wall_ms` are the machine's clocks; the wall clock only serves until the
    first `observe` of database time, and nothing is decided by it.
    """

    mode = ClockMode.WALL

    def __init__(self, monotonic_ms: Callable[[], int], wall_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self._offset_ms = wall_ms() - monotonic_ms()
        self._floor_ms = 0
        self._is_sampled = False

    def __call__(self) -> int:
        now_ms = self._monotonic_ms() + self._offset_ms
        if now_ms < self._floor_ms:
            return self._floor_ms
        self._floor_ms = now_ms
        return now_ms

    def observe(self, database_ms: int) -> None:
        """Take a sample of database time; if it was set back, ours stops until it catches up.

        A sample may be the time that a partition persisted last. A sample of another partition that
        follows immediately, before the time was read, does not undo it.
        """
        self._offset_ms = database_ms - self._monotonic_ms()
        if not self._is_sampled:  # earlier readings of the wall clock do not hold time up
            self._is_sampled, self._floor_ms = True, 0
        self.raise_floor(database_ms)

    def raise_floor(self, persisted_ms: int) -> None:
        """Never return a time before one that was already persisted."""
        self._floor_ms = max(self._floor_ms, persisted_ms)


class ManualClock(EntityClock):
    """Wall time plus an offset that only grows, for tests of applications.

    It advances with the wall clock and is never behind it: an SDK does not settle a lock that is
    expired by its own clock. After a restart it continues after the persisted times.
    """

    mode = ClockMode.MANUAL

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        super().__init__(wall_ms, wall_ms)
        self._offset_ms = 0

    @property
    def offset_ms(self) -> int:
        """Milliseconds by which entity time is ahead of the wall clock."""
        return self._offset_ms

    def advance(self, duration_ms: int) -> None:
        """Advance time at once; the caller must notify owners of timers."""
        assert duration_ms >= 0
        self._offset_ms += duration_ms

    def observe(self, database_ms: int) -> None:
        """Continue from a later sample, which was persisted before a restart, after an advance.

        Rounding and clocks of other machines do not advance the clock.
        """
        if database_ms - self() > SKEW_MS:
            self._offset_ms = database_ms - self._monotonic_ms()
        else:
            self.raise_floor(database_ms)
