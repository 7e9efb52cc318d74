"""Parts of blocks, and the ranges outside the settled ones."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from postbus.store.parts import (
    MAX_KEY,
    PARTS,
    all_parts,
    numbers_in,
    part_range,
    parts_between,
    unsettled_ranges,
)

SIZES = st.sampled_from([1, 5, 31, 32, 33, 40, 256, 1_024])


@st.composite
def blocks(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Return (first key, size, marks) in key order, some with gaps before them."""
    found = []
    key = draw(st.integers(0, 3))
    for size in draw(st.lists(SIZES, max_size=6)):
        marks = draw(st.sampled_from([0, all_parts(size)]) | st.integers(0, all_parts(size)))
        found.append((key, size, marks))
        key += size + draw(st.sampled_from([0, 0, 1, 300]))
    return found


@given(SIZES)
def test_parts_cover_a_block_once(size: int) -> None:
    ranges = [part_range(1_000, size, number) for number in numbers_in(all_parts(size))]
    assert ranges[0][0] == 1_000
    assert ranges[-1][1] == 1_000 + size
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(first < end for first, end in ranges)
    assert len(ranges) <= PARTS


@given(SIZES, st.integers(-10, 1_100), st.integers(-10, 1_100))
def test_parts_between_two_keys_are_those_with_keys_there(size: int, low: int, high: int) -> None:
    expected = 0
    for number in numbers_in(all_parts(size)):
        first, end = part_range(50, size, number)
        if max(first, low) < min(end, high):
            expected |= 1 << number
    assert parts_between(50, size, low, high) == expected


@given(blocks())
def test_ranges_have_all_keys_but_those_of_marked_parts(found: list[tuple[int, int, int]]) -> None:
    marked: set[int] = set()
    unmarked: set[int] = set()
    for first_key, size, marks in found:
        for number in numbers_in(all_parts(size)):
            keys = marked if marks >> number & 1 else unmarked
            keys.update(range(*part_range(first_key, size, number)))
    rows, bodies = unsettled_ranges(found)
    for ranges in (rows, bodies):
        assert all(first < end for first, end in ranges)
        assert all(before[1] < after[0] for before, after in pairwise(ranges))
    in_rows = {key for first, end in rows for key in range(first, end)}
    assert unmarked <= in_rows
    assert marked.isdisjoint(in_rows)
    last = max(marked | unmarked, default=0) + 1
    in_bodies = {key for first, end in bodies for key in range(first, min(end, last))}
    assert in_bodies == set(range(last)) - marked
    assert bodies[-1][1] == MAX_KEY
