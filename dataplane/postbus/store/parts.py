"""Parts of blocks, and the ranges of keys outside the settled ones (ADR 44).

A block has up to 32 parts of equal size. `settled_parts` has a bit for each: no row in it is live,
and no live row refers to a body with an id in it, now or later. Pure; called by load and upkeep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

PARTS: Final = 32
MAX_KEY: Final = (1 << 63) - 1
GRANULE_BITS: Final = 11
"""Keys in a part of the largest blocks, as a power of two."""

Ranges: TypeAlias = list[tuple[int, int]]
"""First keys and ends, in order."""


def keys_of_part(size: int) -> int:
    """Return the number of keys in each part but the last."""
    return -(-size // PARTS)


def all_parts(size: int) -> int:
    """Return the bits of all parts of a block."""
    return (1 << -(-size // keys_of_part(size))) - 1


def parts_between(first_key: int, size: int, low: int, high: int) -> int:
    """Return the bits of the parts of a block that have keys in [low, high)."""
    low, high = max(low - first_key, 0), min(high - first_key, size)
    if low >= high:
        return 0
    width = keys_of_part(size)
    return (1 << (high - 1) // width + 1) - (1 << low // width)


def part_range(first_key: int, size: int, number: int) -> tuple[int, int]:
    """Return first key and end of a part."""
    width = keys_of_part(size)
    return first_key + number * width, first_key + min((number + 1) * width, size)


def numbers_in(parts: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while parts:
        lowest = parts & -parts
        yield lowest.bit_length() - 1
        parts ^= lowest


def unsettled_ranges(blocks: Iterable[tuple[int, int, int]]) -> tuple[Ranges, Ranges]:
    """Return the ranges in which live rows may lie, and those of the bodies they may refer to.

    `blocks`: (first_key, size, settled_parts) in key order. Rows lie in blocks only; bodies also
    where a block was that lost its rows.
    """
    rows: Ranges = []
    bodies: Ranges = []
    bodies_from = 0
    is_apart = True
    for first_key, size, settled in blocks:
        for first, end, is_settled in _runs(first_key, size, settled):
            if is_settled:
                if first > bodies_from:
                    bodies.append((bodies_from, first))
                bodies_from = end
            elif is_apart:
                rows.append((first, end))
            else:
                rows[-1] = (rows[-1][0], end)
            is_apart = is_settled
    bodies.append((bodies_from, MAX_KEY))
    return rows, bodies


def _runs(first_key: int, size: int, settled: int) -> Iterator[tuple[int, int, bool]]:
    """Yield runs of parts with the same bit as (first key, end, bit)."""
    every = all_parts(size)
    if settled in (0, every):
        yield first_key, first_key + size, settled != 0
        return
    run: tuple[int, int, bool] | None = None
    for number in range(every.bit_length()):
        first, end = part_range(first_key, size, number)
        is_settled = bool(settled >> number & 1)
        if run is None:
            run = first, end, is_settled
        elif run[2] == is_settled:
            run = run[0], end, is_settled
        else:
            yield run
            run = first, end, is_settled
    assert run is not None
    yield run
