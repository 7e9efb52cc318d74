"""A checkpoint goes on exactly where the group is; batches are cut to their limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.contract.bulk import PartitionRange, ReaderGroup, ShownPlan
from postbus_spark import guard
from postbus_spark.errors import BusRestored, StaleCheckpoint
from postbus_spark.limits import divided, limited_ends, widest


def group(ranges: dict[int, tuple[int, int]], *, is_settled: bool = False) -> ReaderGroup:
    plan = ShownPlan(number=4, ranges=ranges, attempts=1, is_settled=is_settled)
    return ReaderGroup(
        entity="orders", sub_queue="main", name="lake", kind="tap", generation="g", epoch=3,
        reader="", plan=plan,
    )  # fmt: skip


PLANNED = group({0: (10, 20), 1: (5, 5)})
SETTLED = group({0: (10, 20), 1: (5, 5)}, is_settled=True)


def test_without_a_checkpoint_the_unsettled_plan_is_first() -> None:
    assert guard.starts_of(PLANNED.plan) == {0: 10, 1: 5}
    assert guard.repeated_end(PLANNED.plan, {0: 10, 1: 5}) == {0: 20, 1: 5}
    assert guard.starts_of(SETTLED.plan) == {0: 20, 1: 5}
    assert guard.repeated_end(SETTLED.plan, {0: 10, 1: 5}) is None


@pytest.mark.parametrize("found", [PLANNED, SETTLED])
def test_a_checkpoint_goes_on_where_the_plan_ends(found: ReaderGroup) -> None:
    guard.check_place(found, {0: 20, 1: 5})
    assert guard.repeated_end(found.plan, {0: 20, 1: 5}) is None


def test_a_checkpoint_may_repeat_the_unsettled_plan() -> None:
    guard.check_place(PLANNED, {0: 10, 1: 5})


@pytest.mark.parametrize(
    ("found", "positions", "error"),
    [
        (SETTLED, {0: 10, 1: 5}, StaleCheckpoint),
        (PLANNED, {0: 9, 1: 5}, StaleCheckpoint),
        (PLANNED, {0: 15, 1: 5}, StaleCheckpoint),
        (PLANNED, {0: 20, 1: 4}, StaleCheckpoint),
        (PLANNED, {0: 21, 1: 5}, BusRestored),
        (PLANNED, {0: 20, 1: 6}, BusRestored),
    ],
)
def test_other_places_are_refused_with_the_way_out(
    found: ReaderGroup, positions: dict[int, int], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"plan 4 of the reader group lake ends at \d+.*empty"):
        guard.check_place(found, positions)


# --- limits ---------------------------------------------------------------------------------------


def found(
    partition: int, low: int, end: int, splits: tuple[int, ...] = (), size: int = 100
) -> PartitionRange:
    return PartitionRange(
        partition=partition, low=low, next_position=end, messages=0, average_bytes=size,
        splits=splits,
    )  # fmt: skip


def test_a_dense_range_is_cut_exactly() -> None:
    ranges = [found(0, 0, 1_000, (250, 500, 750))]
    assert widest({0: 100}, ranges) == (900, 90_000)
    assert limited_ends({0: 100}, {0: 1_000}, ranges, 300, 0) == {0: 400}
    assert limited_ends({0: 100}, {0: 1_000}, ranges, 0, 5_000) == {0: 150}
    assert limited_ends({0: 100}, {0: 1_000}, ranges, 0, 1) == {0: 101}
    assert limited_ends({0: 100}, {0: 120}, ranges, 300, 0) == {0: 120}


def test_a_gap_costs_no_empty_batches() -> None:
    """250 messages before 10,000 positions of other entities, and 750 behind."""
    ranges = [found(0, 0, 11_000, (10_250, 10_500, 10_750))]
    assert limited_ends({0: 0}, {0: 11_000}, ranges, 100, 0) == {0: 10_250}
    assert limited_ends({0: 10_250}, {0: 11_000}, ranges, 100, 0) == {0: 10_350}


def test_partitions_share_a_limit_by_what_they_have() -> None:
    ranges = [found(0, 0, 900, (300, 600)), found(1, 0, 100, (50,)), found(2, 50, 50)]
    starts, ends = {0: 0, 1: 0, 2: 50}, {0: 900, 1: 100, 2: 50}
    assert limited_ends(starts, ends, ranges, 100, 0) == {0: 90, 1: 10, 2: 50}
    assert limited_ends(starts, ends, ranges, 1, 0) == {0: 1, 1: 0, 2: 50}
    assert limited_ends(starts, ends, ranges, 0, 0) == ends


def test_positions_without_messages_are_passed_at_once() -> None:
    """A partition that got none yet has a far position all the same."""
    ranges = [found(0, 0, 100, (50,)), found(1, 0, 2**40)]
    starts, ends = {0: 0, 1: 0}, {0: 100, 1: 2**40}
    assert limited_ends(starts, ends, ranges, 10, 0) == {0: 10, 1: 2**40}
    assert limited_ends({0: 100, 1: 0}, ends, ranges, 10, 0) == ends


def test_a_few_messages_in_a_wide_range_are_counted_exactly() -> None:
    """Three messages at 500, 501 and 9,000, divided by 8."""
    ranges = [found(0, 0, 10_000, (500, 500, 500, 501, 501, 9_000, 9_000))]
    ends = {0: 10_000}
    assert limited_ends({0: 0}, ends, ranges, 1, 0) == {0: 501}
    assert limited_ends({0: 501}, ends, ranges, 1, 0) == {0: 9_000}
    assert limited_ends({0: 9_000}, ends, ranges, 1, 0) == {0: 10_000}
    assert limited_ends({0: 0}, ends, ranges, 2, 0) == {0: 9_000}


def test_tasks_have_as_many_messages_each_wherever_the_gaps_are() -> None:
    """Blocks of other entities lie before this one's and between them."""
    blocks = [at + number * 100 for at in (10**12, 10**15) for number in range(32)]
    end = blocks[-1] + 100
    tasks = divided({0: (0, end)}, 4, [found(0, 0, end, tuple(blocks))])
    messages = [range(block, block + 100) for block in blocks]
    sizes = [
        sum(len(range(max(first, each.start), min(last, each.stop))) for each in messages)
        for _, first, last in tasks
    ]
    assert len(sizes) == 4
    assert sum(sizes) == 6_400
    assert all(1_400 <= size <= 1_800 for size in sizes)


RANGES = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@given(RANGES, st.integers(1, 90), st.integers(0, 9_000), st.integers(2, 16), st.integers(0, 100))
def test_batches_of_dense_ranges_keep_their_limits_and_end(
    sizes: list[int], most: int, most_bytes: int, parts: int, skipped: int
) -> None:
    ranges = [
        found(number, 7, 7 + size, tuple(7 + size * part // parts for part in range(1, parts)))
        for number, size in enumerate(sizes)
    ]
    positions = {number: 7 + min(skipped, size) for number, size in enumerate(sizes)}
    ends = {number: 7 + size for number, size in enumerate(sizes)}
    for _ in range(sum(sizes) + 1):
        if positions == ends:
            return
        after = limited_ends(positions, ends, ranges, most, most_bytes)
        read = {number: after[number] - position for number, position in positions.items()}
        assert min(read.values()) >= 0
        assert 0 < sum(read.values()) <= most
        assert not most_bytes or sum(read.values()) * 100 <= max(most_bytes, 100)
        positions = after
    pytest.fail("the batches come to no end")


@given(
    st.dictionaries(
        st.integers(0, 3), st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1
    ),
    st.integers(1, 20),
    st.lists(st.integers(0, 100)),
)
def test_tasks_cover_a_range_once(
    drawn: dict[int, tuple[int, int]], count: int, splits: list[int]
) -> None:
    ranges = {number: (first, first + width) for number, (first, width) in drawn.items()}
    places = [found(number, 0, 100, tuple(sorted(splits))) for number in ranges]
    tasks = divided(ranges, count, places if splits else ())
    assert all(first < end for _, first, end in tasks)
    covered = [(number, each) for number, first, end in tasks for each in range(first, end)]
    assert covered == [
        (number, each) for number in sorted(ranges) for each in range(*ranges[number])
    ]
    width = len(covered)
    assert len(tasks) >= min(count, width) or splits or not width
