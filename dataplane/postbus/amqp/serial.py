"""Serial numbers of 32 bits, as delivery ids and delivery-counts are: they wrap (RFC 1982)."""

from __future__ import annotations

from typing import Final

SERIAL: Final = 1 << 32

MAX_UNKNOWN: Final = 1_024
"""Unknown deliveries answered in one go: some clients make a list of the range."""


def gaps_of(first: int, last: int, known: list[int]) -> list[tuple[int, int]]:
    """Return the ranges between `first` and `last` that are not known, of a bounded length."""
    size = (last - first) % SERIAL + 1
    if not known:
        return [(first, (first + min(size, MAX_UNKNOWN) - 1) % SERIAL)]
    if size > MAX_UNKNOWN:
        return []
    gaps: list[tuple[int, int]] = []
    start = first
    for delivery_id in [*known, (last + 1) % SERIAL]:
        if delivery_id != start:
            gaps.append((start, (delivery_id - 1) % SERIAL))
        start = (delivery_id + 1) % SERIAL
    return gaps
