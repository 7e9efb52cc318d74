"""VACUUM on the broker's own count (ADR 30), folding of acquisitions (ADR 19), planner trap."""

from __future__ import annotations

import time
from itertools import count

import pytest

from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import PatchMessage, RecordAcquired
from postbus.store.postgres import Store
from postbus.store.upkeep_limits import UpkeepLimits
from tests.store.driving import (
    NOW_MS,
    Driven,
    block,
    connected,
    driven,
    insert,
    outcome,
    reload,
    wait_until,
)

VACUUMS = "select vacuum_count from pg_stat_user_tables where relid = 'message'::regclass"
ALL_VISIBLE = "select relallvisible > 0 from pg_class where oid = 'message'::regclass"


async def fill(it: Driven, keys: range, body: bytes = bytes(100)) -> None:
    await it.commit(
        *(
            outcome([insert(key, body) for key in keys[start : start + 100]])
            for start in range(0, len(keys), 100)
        )
    )


async def drain(it: Driven, keys: range) -> None:
    await it.commit(
        *(outcome(deletes=list(keys[start : start + 100])) for start in range(0, len(keys), 100))
    )


async def test_deletes_start_a_vacuum(store: Store, database: str) -> None:
    store.upkeep_limits = UpkeepLimits(vacuum_rows=1_000)
    async with driven(store) as it, connected(database) as look:

        async def was_vacuumed() -> bool:
            return bool(await look.fetchval(VACUUMS))

        await fill(it, range(1, 901))
        await it.journal.upkeep(NOW_MS)
        await drain(it, range(1, 901))
        assert not await was_vacuumed()
        await fill(it, range(1_001, 2_001))
        await wait_until(was_vacuumed)


async def test_pure_backlog_gets_a_visibility_map(store: Store, database: str) -> None:
    store.upkeep_limits = UpkeepLimits(vacuum_rows=1_000)
    async with driven(store) as it, connected(database) as look:
        starts = count(1, 1_000)

        async def is_visible() -> bool:
            """Fill again: a VACUUM beside a transaction of upkeep leaves the map as it is."""
            start = next(starts)
            await fill(it, range(start, start + 1_000))
            return bool(await look.fetchval(ALL_VISIBLE))

        await wait_until(is_visible)


async def test_old_transaction_ids_are_frozen_by_the_broker(store: Store, database: str) -> None:
    store.upkeep_limits = UpkeepLimits(freeze_age=1, age_check_s=0.0)
    async with driven(store) as it, connected(database) as look:
        await fill(it, range(1, 201))
        await it.journal.upkeep(NOW_MS)
        age = "select age(relfrozenxid) from pg_class where oid = 'message'::regclass"
        assert await look.fetchval(age) < 5


async def test_side_tables_are_vacuumed_after_many_changes(store: Store, database: str) -> None:
    store.upkeep_limits = UpkeepLimits(side_rows=100)
    async with driven(store) as it, connected(database) as look:
        await fill(it, range(1, 201))
        marks = [PatchMessage(key, True, None, None) for key in range(1, 201)]
        await it.commit(outcome(mutations=marks))
        await it.journal.upkeep(NOW_MS)

        async def was_vacuumed() -> bool:
            return bool(
                await look.fetchval(
                    "select vacuum_count from pg_stat_user_tables where relid = 'patch'::regclass"
                )
            )

        await wait_until(was_vacuumed)


async def test_old_acquisitions_fold_into_counts(store: Store, database: str) -> None:
    store.upkeep_limits = UpkeepLimits(fold_rows=10)
    async with driven(store) as it, connected(database) as look:
        await fill(it, range(1, 51))
        for number in range(11):
            await it.commit(outcome(mutations=[RecordAcquired([1, 2 + number], [number + 1, 1])]))
        await it.commit(outcome(deletes=[5]))
        await it.journal.upkeep(NOW_MS)

        async def is_folded() -> bool:
            return bool(await look.fetchval("select count(*) from acquired") == 1)

        await wait_until(is_folded)
        rows = await it.journal.read_rows([1, 2, 3, 40])
        assert [row.delivery_count for row in rows] == [10, 1, 1, 0]
        assert await look.fetchval("select count(*) from patch where row_key = 5") == 0
        # The rows have counts in `patch` now, which go with them.
        await it.commit(outcome(deletes=[1, 2]))
        assert await look.fetchval("select count(*) from patch where row_key in (1, 2)") == 0
    assert (await reload(store)).attempts == {12: 1}


@pytest.mark.slow
async def test_a_hundred_thousand_keys_load_quickly(store: Store, database: str) -> None:
    async with driven(store), connected(database) as look:
        await look.execute(
            "insert into message (row_key, enqueued_ms, envelope) "
            "select n, 1, '' from generate_series(1, 100000) n"
        )
        await look.execute("vacuum message")
    started = time.monotonic()
    loaded = await reload(store)
    assert len(loaded.keys[1, SubQueue.ACTIVE]) == 100_000
    assert time.monotonic() - started < 2.0


@pytest.mark.slow
async def test_drain_stays_fast_after_vacuum_saw_an_empty_table(
    store: Store, database: str
) -> None:
    """The planner trap: a plan made for two rows must not filter a hundred thousand."""
    count = 100_000
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[block(1_000_001, 1_000_000, first_sequence=1_000_001)]))

        async def rate(first_key: int) -> float:
            keys = range(first_key, first_key + count)
            await fill(it, keys, b"")
            started = time.monotonic()
            await drain(it, keys)
            return count / (time.monotonic() - started)

        before = await rate(1)
        await look.execute("vacuum (truncate off, index_cleanup on, parallel 0, analyze) message")
        after = await rate(1 + count)
        async with store.reading() as connection:
            plan = await connection.fetch(
                "explain select row_key from partition_0.message "
                "where row_key = any ($1::bigint[])",
                [1],
            )
        assert "Index Cond" in "\n".join(row[0] for row in plan)
        assert after > before / 5, f"{before:.0f}/s before, {after:.0f}/s after"
