"""Counters of a partition's commits and reads for metrics, over all its journals."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

COMMIT_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets of commit times. A commit usually takes 2 to 10 ms; after 5 s its
result is reported as unknown (ADR 2)."""


class StoreCounters:
    """Counters of one partition; `commit_counts` has one bucket more than there are bounds."""

    __slots__ = ("commit_counts", "commit_seconds", "read_rows", "reads", "written_rows")

    def __init__(self) -> None:
        self.commit_counts = [0] * (len(COMMIT_BOUNDS_S) + 1)
        self.commit_seconds = 0.0
        self.written_rows = 0
        self.reads = 0
        self.read_rows = 0

    def note_commit(self, seconds: float, rows: int) -> None:
        self.commit_counts[bisect_left(COMMIT_BOUNDS_S, seconds)] += 1
        self.commit_seconds += seconds
        self.written_rows += rows

    def note_read(self, rows: int) -> None:
        self.reads += 1
        self.read_rows += rows
