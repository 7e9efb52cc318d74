"""Resources that are to be looked at, each once: what is woken twice is looked at once.

Pure: the time is an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Final

from postbus_operator.objects import Key

MIN_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0


def parts_of(keys: Sequence[Key], count: int) -> Iterator[Sequence[Key]]:
    """Yield keys in so many parts of equal size, one more or less."""
    for number in range(count):
        yield keys[len(keys) * number // count : len(keys) * (number + 1) // count]


class WorkQueue:
    """Keys with the time of their next look.

    A key is never taken twice at the same time: one that is woken while it is being looked at waits
    until `done`, since what woke it may have come too late for that look.
    """

    def __init__(self, rng: random.Random) -> None:
        """`rng` spreads the pauses after failures, so that they do not end together."""
        self._rng = rng
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0
        self._running: dict[Key, float | None] = {}
        self._failures: dict[Key, int] = {}

    def wake(self, key: Key, due: float) -> None:
        """Have a key looked at, not later than `due`."""
        if key in self._running:
            again = self._running[key]
            self._running[key] = due if again is None else min(again, due)
        elif due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._count += 1
            heapq.heappush(self._heap, (due, self._count, key))

    def take(self, now: float) -> tuple[Key, float] | None:
        """Return a key that is due, and the seconds that it has waited; it runs until `done`."""
        due = self.next_due()
        if due is None or due > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._running[key] = None
        return key, now - due

    def done(self, key: Key, again: float | None = None) -> None:
        """End a look; `again`: when to look the next time without being woken."""
        woken = self._running.pop(key)
        for due in (woken, again):
            if due is not None:
                self.wake(key, due)

    def pause_after_failure(self, key: Key) -> float:
        """Return the seconds until the next attempt: longer with each failure in a row."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        longest = min(MAX_PAUSE_S, MIN_PAUSE_S * 2.0 ** min(failures + 1, 10))
        return self._rng.uniform(max(MIN_PAUSE_S, longest / 2), longest)

    def failures(self, key: Key) -> int:
        """Return the number of failures in a row."""
        return self._failures.get(key, 0)

    def forget_failures(self, key: Key) -> None:
        """Begin again with short pauses: a look succeeded, or the resource is gone."""
        self._failures.pop(key, None)

    def is_running(self, key: Key) -> bool:
        """Return whether a key is being looked at."""
        return key in self._running

    def next_due(self) -> float | None:
        """Return the earliest time at which a key that does not run is due."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def waiting(self, now: float) -> int:
        """Return the number of keys that are due and do not run."""
        return sum(due <= now for due in self._due.values())

    @property
    def running(self) -> int:
        """Return the number of keys that are being looked at."""
        return len(self._running)
