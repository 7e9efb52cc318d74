"""A tap that passes its limits lets go of its oldest rows, or is shown (ADR 42)."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from postbus.entity.commands import SubQueue
from postbus.entity.group_commands import Cursor, GroupKind, Limits
from postbus.entity.outcomes import PutCursor
from postbus.store import pinned as pinned_module
from postbus.store.bulk_reads import BulkReader
from postbus.store.errors import Connection
from postbus.store.pinned import (
    ROW_BYTES,
    SAMPLE_KEYS,
    WINDOWS,
    Pinned,
    Row,
    first_kept,
    pinned_of,
    windows_over,
)
from postbus.store.postgres import Store
from postbus.store.upkeep_limits import UpkeepLimits
from tests.store.driving import NOW_MS, Driven, block, connected, driven, insert, outcome, reload
from tests.store.test_taps import (
    ACTIVE,
    DEAD,
    DEAD_KEY,
    RETENTION_MS,
    define,
    low,
    reap,
    settle,
    start,
    stored,
)

DAY_MS = 86_400_000


def tap(
    settled: int, limits: Limits, name: str = "lake", sub_queue: SubQueue = ACTIVE, *,
    is_placed: bool = False,
) -> PutCursor:  # fmt: skip
    cursor = Cursor(GroupKind.TAP, 1, "driver", settled, None, limits=limits)
    return PutCursor(1, sub_queue, name, cursor, is_placed)


def pinned(it: Driven, name: str = "lake", sub_queue: SubQueue = ACTIVE) -> Pinned:
    found = it.journal.pinned((1, sub_queue, name))
    assert found is not None
    return found


async def row_bytes(look: Connection, row_key: int = 1) -> int:
    """Return what a row of the tests counts."""
    sql = "select octet_length(envelope) + octet_length(body) from message where row_key = $1"
    return int(await look.fetchval(sql, row_key)) + ROW_BYTES


async def group_low(store: Store, sub_queue: SubQueue = ACTIVE, name: str = "lake") -> int:
    """Return the position from which on nothing is missing for a reader of the group."""
    return await BulkReader(store, 0).low_mark(1, sub_queue, name)


# --- on Postgres ----------------------------------------------------------------------------------


async def test_beyond_its_bytes_a_tap_lets_go_of_its_oldest_rows(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it)
        limits = Limits(max_bytes=2 * await row_bytes(look) + 1, drops=True)
        await it.commit(outcome(mutations=[tap(0, limits)]))
        await it.commit(outcome(mutations=[settle(1, 2)]))
        await reap(it)
        assert await stored(look) == [1, 2, 3, 4, 5, 6], "two rows are within the limit"
        assert await group_low(store) == 0
        await it.commit(outcome(mutations=[settle(3, 4, 6)]))
        await reap(it)
        assert await stored(look) == [4, 5, 6], "row 5 is live, 4 and 6 are within the limit"
        assert await group_low(store) == await low(look) == 4
        assert pinned(it).has_lost
        assert pinned(it).is_over
        assert pinned(it).kept_bytes == 2 * await row_bytes(look, 4)


async def test_beyond_its_age_a_tap_lets_go_of_rows_that_are_old_enough(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(0, Limits(max_age_ms=DAY_MS, drops=True)))
        await it.commit(outcome(mutations=[settle(1, 2), settle(3, at_ms=NOW_MS + 10)]))
        await reap(it, NOW_MS + DAY_MS)
        assert await stored(look) == [1, 2, 3, 4, 5, 6], "no row is older than a day"
        await reap(it, NOW_MS + DAY_MS + 1)
        assert await stored(look) == [3, 4, 5, 6]
        assert await group_low(store) == 3
        await reap(it, NOW_MS + DAY_MS + 11)
        assert await stored(look) == [4, 5, 6], "live rows stay"


async def test_a_row_goes_not_before_its_time_for_an_older_one_behind_it(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(0, Limits(max_age_ms=DAY_MS, drops=True)))
        await it.commit(outcome(mutations=[settle(2), settle(1, at_ms=NOW_MS + 10)]))
        await reap(it, NOW_MS + DAY_MS + 5)
        assert await stored(look) == [1, 2, 3, 4, 5, 6]
        assert pinned(it).is_over
        await reap(it, NOW_MS + DAY_MS + 11)
        assert await stored(look) == [3, 4, 5, 6]


async def test_a_tap_that_fails_at_its_limits_keeps_all_and_is_shown(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(0, Limits(max_bytes=1)), tap(0, Limits(max_age_ms=DAY_MS), "aged"))
        await reap(it)
        assert not pinned(it).is_over
        assert pinned(it) == Pinned(6, NOW_MS, 0, None, has_lost=False, is_over=False)
        await it.commit(outcome(mutations=[settle(1, 2, 3)]))
        await reap(it, NOW_MS + DAY_MS)
        assert (pinned(it).is_over, pinned(it, "aged").is_over) == (True, False)
        await reap(it, NOW_MS + DAY_MS + 1)
        assert pinned(it, "aged").is_over
        assert pinned(it, "aged").kept_bytes == 3 * await row_bytes(look)
        assert await stored(look) == [1, 2, 3, 4, 5, 6]
        assert await group_low(store) == 0
        await it.commit(outcome(mutations=[tap(4, Limits(max_bytes=1))]))
        await it.commit(outcome(mutations=[tap(4, Limits(max_age_ms=DAY_MS), "aged")]))
        await reap(it, NOW_MS + DAY_MS + 1)
        assert not pinned(it).is_over
        assert not pinned(it, "aged").is_over


async def test_what_one_tap_lets_go_of_stays_for_the_others(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(0, Limits(max_bytes=1, drops=True)), tap(0, Limits(), "other"))
        await it.commit(outcome(mutations=[settle(1, 2, 3)]))
        await reap(it)
        assert await stored(look) == [1, 2, 3, 4, 5, 6]
        assert await group_low(store) == 0, "nothing is missing yet"
        await it.commit(outcome(mutations=[tap(3, Limits(), "other")]))
        await reap(it)
        assert await stored(look) == [3, 4, 5, 6]
        assert (await group_low(store), await group_low(store, name="other")) == (3, 3)


async def test_a_history_keeps_rows_that_a_tap_lets_go_of(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(0, Limits(max_bytes=1, drops=True)), retention_ms=RETENTION_MS)
        await it.commit(outcome(mutations=[settle(1, 2)]))
        await reap(it)
        assert await stored(look) == [1, 2, 3, 4, 5, 6]
        assert pinned(it).kept_bytes == 0, "the history keeps them, too"
        await reap(it, NOW_MS + RETENTION_MS + 1)
        assert await stored(look) == [3, 4, 5, 6]


async def test_a_loss_below_the_mark_of_the_placement_is_told(store: Store, database: str) -> None:
    """Dead letters leave in any order: the mark may be above all that the group has to read."""
    async with driven(store) as it, connected(database) as look:
        dead = block(DEAD_KEY, 256, DEAD)
        before = tap(0, Limits(), "before", DEAD)
        await it.commit(outcome(mutations=[define(), before, dead]))
        await it.commit(outcome([insert(DEAD_KEY + at) for at in range(4)]))
        await it.commit(outcome(mutations=[settle(DEAD_KEY + 3)]))
        await it.commit(outcome(mutations=[tap(DEAD_KEY + 4, Limits(), "before", DEAD)]))
        await reap(it)
        assert await low(look, DEAD) == DEAD_KEY + 4
        limits = Limits(max_bytes=1, drops=True)
        await it.commit(outcome(mutations=[tap(0, limits, sub_queue=DEAD, is_placed=True)]))
        assert await group_low(store, DEAD) == 0, "what was deleted before is no loss"
        await it.commit(outcome(mutations=[settle(DEAD_KEY + 1)]))
        await reap(it)
        assert await stored(look) == [DEAD_KEY, DEAD_KEY + 2]
        assert await group_low(store, DEAD) == DEAD_KEY + 4
        assert pinned(it, sub_queue=DEAD).has_lost
        await it.commit(outcome(mutations=[tap(0, limits, sub_queue=DEAD, is_placed=True)]))
        await reap(it)
        assert await group_low(store, DEAD) == 0, "a reset accepts the loss"
        assert not pinned(it, sub_queue=DEAD).has_lost


async def test_a_group_that_is_placed_anew_keeps_what_is_left(store: Store, database: str) -> None:
    limits = Limits(max_bytes=1, drops=True)
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(0, limits))
        await it.commit(outcome(mutations=[settle(3)]))
        await reap(it)
        assert await stored(look) == [1, 2, 4, 5, 6]
        await it.commit(outcome(mutations=[tap(0, Limits(), is_placed=True)]))
        await it.commit(outcome(mutations=[settle(1, 2)]))
        await reap(it)
        assert await stored(look) == [1, 2, 4, 5, 6]
        assert await group_low(store) == 0


async def test_limits_survive_a_reload_and_hold_again(store: Store, database: str) -> None:
    limits = Limits(max_bytes=1, max_age_ms=DAY_MS, drops=True, parts=1)
    async with driven(store) as it:
        await start(it, tap(0, limits), tap(0, Limits(max_age_ms=7), "other"))
        await it.commit(outcome(mutations=[tap(9, Limits(), "other")]))
    assert (await reload(store)).cursors == [tap(0, limits), tap(9, Limits(), "other")]
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[settle(1, 2)]))
        await reap(it)
        assert await stored(look) == [3, 4, 5, 6]
    async with driven(store) as it, connected(database) as look:
        await reap(it)
        assert pinned(it).has_lost, "a restart does not forget the loss"
        assert await group_low(store) == 3


async def test_partitions_divide_the_bytes_of_a_group(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it)
        limits = Limits(max_bytes=4 * await row_bytes(look), drops=True, parts=2)
        await it.commit(outcome(mutations=[tap(0, limits), settle(1, 2, 3, 4)]))
        await reap(it)
        assert await stored(look) == [3, 4, 5, 6]


@pytest.mark.slow
async def test_a_long_tap_is_read_in_part_and_comes_down_to_its_limit(database: str) -> None:
    store = Store(database, upkeep_limits=UpkeepLimits(reap_rows=500))
    count = 3 * SAMPLE_KEYS
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[define()]))
        for first in range(1, count, 1_000):
            keys = range(first, min(first + 1_000, count + 1))
            await it.commit(outcome([insert(key) for key in keys]))
            await it.commit(outcome(mutations=[settle(*keys)]))
        size_bytes = await row_bytes(look)
        await it.commit(outcome(mutations=[tap(0, Limits())]))
        await reap(it)
        assert pinned(it).unread == pytest.approx(count, rel=0.03)
        assert pinned(it).kept_bytes == pytest.approx(count * size_bytes, rel=0.03)
        limits = Limits(max_bytes=SAMPLE_KEYS // 2 * size_bytes, drops=True)
        await it.commit(outcome(mutations=[tap(0, limits)]))
        await reap(it)
        left = await stored(look)
        assert left == list(range(count + 1 - len(left), count + 1))
        assert len(left) == pytest.approx(SAMPLE_KEYS // 2, rel=0.1)
    await store.close()


async def test_a_tap_that_is_placed_again_during_a_look_releases_nothing(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_bytes=1, drops=True)
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(0, limits))
        await it.commit(outcome(mutations=[settle(1, 2)]))
        sampled = pinned_module._sampled

        async def with_reset(*arguments: Any) -> list[Row]:
            found = await sampled(*arguments)
            monkeypatch.undo()
            await it.commit(outcome(mutations=[tap(0, limits, is_placed=True)]))
            return found

        monkeypatch.setattr(pinned_module, "_sampled", with_reset)
        await it.journal.upkeep(NOW_MS)
        assert await stored(look) == [1, 2, 3, 4, 5, 6]
        await reap(it)
        assert await stored(look) == [3, 4, 5, 6], "the next look sees the new place"


async def test_looks_are_bounded_in_time_and_go_on_with_the_rest(database: str) -> None:
    store = Store(database, upkeep_limits=UpkeepLimits(look_s=0.0))
    async with driven(store) as it:
        names = [f"tap-{number}" for number in range(3)]
        await start(it, *(tap(0, Limits(), name) for name in names))
        for expected in (1, 2, 3):
            await it.journal.upkeep(NOW_MS)
            known = [name for name in names if it.journal.pinned((1, ACTIVE, name)) is not None]
            assert len(known) == expected
        await it.commit(outcome(mutations=[tap(0, Limits(), "new")]))
        await it.journal.upkeep(NOW_MS)
        assert it.journal.pinned((1, ACTIVE, "new")) is None, "the rest of a round comes first"
    await store.close()


# --- pure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_windows_lie_in_their_ranges_and_stand_for_all_keys(seed: int) -> None:
    random = Random(seed)
    ranges, at = [], 0
    for _ in range(random.randint(0, 40)):
        at += random.randint(0, 1_000)
        size = random.choice([1, 7, 256, 65_536])
        ranges.append((at, at + size))
        at += size
    total = sum(end - first for first, end in ranges)
    windows = windows_over(ranges)
    for window, after in zip(windows, [*windows[1:], None], strict=True):
        assert any(first <= window.first < window.end <= end for first, end in ranges)
        assert after is None or window.first < after.first
    assert sum(each.end - each.first for each in windows) <= SAMPLE_KEYS
    stood_for = sum((each.end - each.first) * each.weight for each in windows)
    assert stood_for == pytest.approx(total)
    if ranges:
        assert windows[0].first == ranges[0][0], "the oldest row is read"
    assert total <= SAMPLE_KEYS or len(windows) == WINDOWS


@pytest.mark.parametrize("period", [2, 10, 100, 125, 200, 1_000, 12_500, 25_000])
def test_messages_that_come_in_rounds_are_not_all_taken_for_the_same(period: int) -> None:
    total = 800_000
    found = sum(
        sum(key % period for key in range(window.first, window.end)) * window.weight
        for window in windows_over([(0, total)])
    )
    assert found == pytest.approx(total * (period - 1) / 2, rel=0.06)


def rows(*settled_ms: int | None, size_bytes: int = 10, weight: float = 1.0) -> list[Row]:
    return [Row(key, key, at, size_bytes, weight) for key, at in enumerate(settled_ms, 1)]


@pytest.mark.parametrize(
    ("found", "limits", "expected"),
    [
        (rows(), Limits(0, 0, drops=True), None),
        (rows(None, None), Limits(0, 0, drops=True), None),
        (rows(5, None, 5), Limits(20, None, drops=True), None),
        (rows(5, None, 5), Limits(19, None, drops=True), 3),
        (rows(5, None, 5), Limits(9, None, drops=True), 4),
        (rows(5, None, 5), Limits(20, None, drops=True, parts=2), 3),
        (rows(5, 5, weight=3.0), Limits(59, None, drops=True), 2),
        (rows(5, 5, 6), Limits(None, 4, drops=True), 3),
        (rows(5, 5, 6), Limits(None, 5, drops=True), None),
        (rows(6, 5, 6), Limits(None, 4, drops=True), None),
        (rows(5, 6, 6), Limits(10, 4, drops=True), 3),
        (rows(5, 6, 6), Limits(20, 3, drops=True), 4),
        (rows(5), Limits(None, None, drops=True), None),
    ],
)
def test_a_tap_lets_go_by_position_up_to_both_limits(
    found: list[Row], limits: Limits, expected: int | None
) -> None:
    assert first_kept(found, limits, now_ms=10) == expected


def test_an_estimate_weighs_what_was_read() -> None:
    found = [Row(1, 70, None, 10, 4.0), Row(9, 80, 90, 20, 2.5), Row(12, 81, 85, 20, 2.0)]
    assert pinned_of(found, Limits(), 100, has_lost=False) == Pinned(
        8, 70, 90, 85, has_lost=False, is_over=False
    )
    assert pinned_of(found, Limits(max_age_ms=14), 100, has_lost=False).is_over
    assert not pinned_of(found, Limits(max_bytes=90), 100, has_lost=False).is_over
