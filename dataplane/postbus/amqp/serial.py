"""Serial numbers of 32 bits for delivery ids and delivery-counts: they wrap (RFC 1982)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import Final

SERIAL: Final = 1 << 32

MAX_UNKNOWN: Final = 1_024
"""Maximum number of unknown deliveries answered at once: some clients expand the range to a
list."""


def gaps_of(first: int, last: int, known: list[int]) -> list[tuple[int, int]]:
    """Return the unknown ranges between `first` and `last`, of a bounded length."""
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


def known_between(unsettled: Collection[int], first: int, last: int) -> list[int]:
    """Return the ids of a range that are unsettled, in order.

    `unsettled` keeps the order of sending and finds an id in constant time: the keys of a dict.
    """
    count = (last - first) % SERIAL + 1
    if count <= len(unsettled):
        steps = ((first + step) % SERIAL for step in range(count))
        return [each for each in steps if each in unsettled]
    ids = list(unsettled)
    if not ids:
        return ids
    oldest = ids[0]

    def age(delivery_id: int) -> int:
        return (delivery_id - oldest) % SERIAL

    if (last - first) % SERIAL >= SERIAL // 2:  # no range in serial arithmetic
        return [each for each in ids if first <= each <= last]
    low, high = age(first), age(last)
    if high >= SERIAL // 2:
        return []
    start = 0 if low >= SERIAL // 2 else bisect_left(ids, low, key=age)
    return ids[start : bisect_left(ids, high + 1, key=age)]
