"""Entity time (ADR 28): database time carried by the monotonic clock, one clock for each database.

Locks, TTL and schedules live on this clock. Tokens, TLS and idle timeouts stay on real time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

SKEW_MS = 1_000
"""What clocks of machines in good order differ by at most."""


class ClockMode(StrEnum):
    """How entity time goes."""

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
        """Take a sample of database time; a clock set back only stops ours until it caught up.

        A sample may be what a partition persisted last: the one of another partition that follows
        at once, before anybody asked for the time, does not take that back.
        """
        self._offset_ms = database_ms - self._monotonic_ms()
        if not self._is_sampled:  # what somebody was shown of the wall does not hold time up
            self._is_sampled, self._floor_ms = True, 0
        self.raise_floor(database_ms)

    def raise_floor(self, persisted_ms: int) -> None:
        """Never tell a time before one that was already persisted."""
        self._floor_ms = max(self._floor_ms, persisted_ms)


class ManualClock(EntityClock):
    """Wall time plus an offset that only grows, for tests of applications.

    It goes on with the wall and is never behind it: an SDK settles no lock that its own clock
    takes for expired. After a restart it goes on where persisted times left off.
    """

    mode = ClockMode.MANUAL

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        super().__init__(wall_ms, wall_ms)
        self._offset_ms = 0

    @property
    def offset_ms(self) -> int:
        """How far entity time is ahead of the wall."""
        return self._offset_ms

    def advance(self, duration_ms: int) -> None:
        """Let time pass at once; whoever has timers must be told."""
        assert duration_ms >= 0
        self._offset_ms += duration_ms

    def observe(self, database_ms: int) -> None:
        """Go on from a sample that is ahead of us: an earlier life was moved and persisted it.

        Rounding and clocks of other machines do not move us.
        """
        if database_ms - self() > SKEW_MS:
            self._offset_ms = database_ms - self._monotonic_ms()
        else:
            self.raise_floor(database_ms)
