"""Counts of events by source; a count ends after a minute without events.

For log entries and answers that summarize. The size of the table is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

QUIET_S: Final = 60.0
"""A burst is over after this time without another event."""

MAX_SOURCES: Final = 10_000
"""Sources remembered; the one without events for longest is forgotten first."""


@dataclass(slots=True)
class _Burst:
    count: int
    last_s: float


class Bursts:
    """Counts by source. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._bursts: OrderedDict[str, _Burst] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bursts)

    def note(self, source: str, now_s: float) -> int:
        """Count an event and return the count of its source's burst."""
        burst = self._bursts.get(source)
        if burst is None or now_s - burst.last_s >= QUIET_S:
            burst = self._bursts[source] = _Burst(0, now_s)
        burst.count += 1
        burst.last_s = now_s
        self._bursts.move_to_end(source)
        if len(self._bursts) > MAX_SOURCES:
            self._bursts.popitem(last=False)
        return burst.count

    def clear(self) -> None:
        """Forget all counts."""
        self._bursts.clear()


def is_power_of_ten(count: int) -> bool:
    """Return whether a count deserves a log entry: 1, 10, 100, 1,000 and so on."""
    return str(count).strip("0") == "1"
