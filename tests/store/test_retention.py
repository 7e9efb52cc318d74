"""Settled rows stay for the retention of their entity: not live, then deleted (ADR 18)."""

from __future__ import annotations

import asyncio

import pytest

from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import (
    DropDefinition,
    InsertMessage,
    MoveMessage,
    Outcome,
    PatchMessage,
    PutDefinition,
    RecordAcquired,
    RecordIds,
    ReserveBlock,
    SettleRows,
    Settling,
    ShareBody,
)
from postbus.store import retention as retention_module
from postbus.store.errors import Connection, Fenced
from postbus.store.pinned import BY_INDEX
from postbus.store.postgres import Store
from postbus.store.upkeep_limits import UpkeepLimits
from tests.store.driving import (
    HELD_MS,
    NOW_MS,
    Driven,
    block,
    connected,
    driven,
    envelope,
    holding,
    insert,
    open_driven,
    outcome,
    reload,
    wait_until,
)

RETENTION_MS = 60_000
LATER_MS = NOW_MS + RETENTION_MS + 1
DEAD_KEY = 2_000_000
DEAD_BLOCK = block(DEAD_KEY, 256, SubQueue.DEAD_LETTER)
BODIES = [bytes(5), bytes(10_240), bytes(1_572_864)]
TABLES = ("message", "settled", "body", "shared", "embodied", "staged", "kept", "patch")


def define(retention_ms: int | None = RETENTION_MS) -> PutDefinition:
    properties = QueueProperties(history_retention_ms=retention_ms)
    return PutDefinition(1, "orders", EntityKind.QUEUE, properties, 3, 1)


def settled(
    row_keys: list[int], how: Settling = Settling.COMPLETED, settled_ms: int = NOW_MS
) -> SettleRows:
    return SettleRows(1, row_keys, how, settled_ms)


def settle(row_keys: list[int]) -> Outcome:
    return outcome(mutations=[settled(row_keys)])


def dead_letter(row_key: int, new_key: int) -> Outcome:
    """Return the outcome of dead-lettering in an entity with a history."""
    copy = MoveMessage(row_key, new_key, 1, SubQueue.DEAD_LETTER, row_key, 3, None, b"why", True)
    return outcome(mutations=[settled([row_key], Settling.DEAD_LETTERED), copy])


async def start(it: Driven, *mutations: ReserveBlock) -> None:
    await it.commit(outcome(mutations=[define(), *mutations]))


async def counts(look: Connection) -> dict[str, int]:
    """Return table -> number of rows, without empty tables; `body` counts bodies, not chunks."""
    found = {table: await look.fetchval(f"select count(*) from {table}") for table in TABLES}
    found["body"] = await look.fetchval("select count(distinct body_id) from body")
    return {table: count for table, count in found.items() if count}


async def settled_keys(look: Connection) -> list[int]:
    rows = await look.fetch("select row_key from settled order by row_key")
    return [row["row_key"] for row in rows]


async def assert_empties(it: Driven, look: Connection) -> None:
    """Run the upkeep until no row is left in any table."""

    async def is_empty() -> bool:
        await it.journal.upkeep(LATER_MS)
        return not await counts(look)

    await wait_until(is_empty)


async def test_settled_rows_stay_and_are_not_live(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await it.commit(outcome([insert(key) for key in range(1, 7)]))
        await it.commit(
            outcome(mutations=[settled([2, 3]), settled([5], Settling.PURGED, NOW_MS + 7)])
        )
        assert [tuple(row) for row in await look.fetch("select * from settled order by 1")] == [
            (2, 1, Settling.COMPLETED, NOW_MS),
            (3, 1, Settling.COMPLETED, NOW_MS),
            (5, 1, Settling.PURGED, NOW_MS + 7),
        ]
        assert [row.row_key for row in await it.journal.read_range(0, 100, 100)] == [1, 4, 6]
        assert [row.row_key for row in await it.journal.read_range(0, 100, 2)] == [1, 4]
    loaded = await reload(store)
    assert list(loaded.keys[1, SubQueue.ACTIVE]) == [1, 4, 6]


async def test_pages_of_keys_leave_settled_rows_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.store.load.PAGE_KEYS", 3)
    async with driven(store) as it:
        await start(it)
        await it.commit(outcome([insert(key) for key in range(1, 31)]))
        await it.commit(settle([key for key in range(1, 31) if key % 4]))
    assert list((await reload(store)).keys[1, SubQueue.ACTIVE]) == [4, 8, 12, 16, 20, 24, 28]


async def test_one_commit_settles_beside_everything_else(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await it.commit(outcome([insert(key) for key in range(1, 5)]))
        await it.commit(
            outcome([insert(10), insert(11)], [1], [settled([10])]),
            outcome(
                [insert(12)],
                mutations=[
                    RecordAcquired([3], [2]),
                    ReserveBlock(3_000_000, 256, 1, SubQueue.ACTIVE, 3_000_001),
                    RecordIds(1, NOW_MS, bytes(16)),
                    settled([2, 11]),
                ],
            ),
        )
        assert await settled_keys(look) == [2, 10, 11]
        assert await look.fetchval("select count(*) from seen") == 1
    loaded = await reload(store)
    assert list(loaded.keys[1, SubQueue.ACTIVE]) == [3, 4, 12]
    assert loaded.attempts == {3: 2}
    assert loaded.next_row_key == 3_000_256


async def test_rows_are_settled_while_their_commit_is_under_way(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it)
        async with holding(database) as hold:
            it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), None)
            await hold.wait_held()
            # More than a hundred rows, so that the second commit does not wait for the first.
            it.journal.submit(
                outcome([insert(key) for key in range(2, 200)], mutations=[settled([1, 2])]), None
            )

            async def is_there() -> bool:
                return await settled_keys(look) == [1, 2]

            await wait_until(is_there)
            released = len(it.seen.released)  # before the first of them can be released
            await hold.end()
            await it.seen.wait_released(released + 2)
    assert (await reload(store)).keys[1, SubQueue.ACTIVE][0] == 3


async def test_large_settlements_make_commits_of_their_own(store: Store) -> None:
    async with driven(store) as it:
        await start(it)
        for first in range(1, 1_001, 250):
            await it.commit(outcome([insert(key) for key in range(first, first + 250)]))
        it.seen.batches.clear()
        await it.commit(
            *(settle(list(range(first, first + 250))) for first in range(1, 1_001, 250))
        )
        assert len(it.seen.batches) == 4


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reaped_first", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("body", BODIES, ids=len)
async def test_a_dead_letter_leaves_its_row_behind(
    store: Store, database: str, body: bytes, is_shared: bool, is_reaped_first: bool
) -> None:
    """Whichever row is deleted first, the other one keeps the body, also after a load."""
    async with driven(store) as it, connected(database) as look:
        await start(it, DEAD_BLOCK)
        keys = [1, 2] if is_shared else [1]
        rows = [InsertMessage(key, NOW_MS, envelope(body)) for key in keys]
        await it.commit(outcome(rows, mutations=[ShareBody(keys)] if is_shared else []))
        await it.commit(dead_letter(1, DEAD_KEY))
        for row in await it.journal.read_rows([1, DEAD_KEY]):
            assert row.envelope.body == body
            assert row.envelope.application_properties == (b"why" if row.row_key > 1 else b"")
        if len(body) > 8_192 or is_shared:
            assert (await counts(look))["body"] == 1
        if is_shared:
            await it.commit(outcome(deletes=[2]))
        [row] = await it.journal.read_numbers(1, SubQueue.DEAD_LETTER, 0, 10)
        assert (row.row_key, row.sequence, row.delivery_count) == (DEAD_KEY, 1, 3)
    async with driven(store) as it, connected(database) as look:
        live = {place: list(found) for place, found in it.loaded.keys.items() if found}
        assert live == {(1, SubQueue.DEAD_LETTER): [DEAD_KEY]}
        if is_reaped_first:
            await it.journal.upkeep(LATER_MS)
            [row] = await it.journal.read_rows([1, DEAD_KEY])
            assert (row.row_key, row.envelope.body) == (DEAD_KEY, body)
            await it.commit(outcome(deletes=[DEAD_KEY]))
        else:
            await it.commit(outcome(deletes=[DEAD_KEY]))
            await it.journal.upkeep(NOW_MS)
            [row] = await it.journal.read_rows([1, DEAD_KEY])
            assert (row.row_key, row.envelope.body) == (1, body)
        await assert_empties(it, look)


@pytest.mark.parametrize("body", BODIES, ids=len)
async def test_copies_are_counted_without_a_load(store: Store, database: str, body: bytes) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, DEAD_BLOCK)
        await it.commit(outcome([insert(key, body) for key in (1, 2)]))
        await it.commit(dead_letter(1, DEAD_KEY), dead_letter(2, DEAD_KEY + 1))
        await it.commit(outcome(mutations=[settled([DEAD_KEY])]))  # completed as a dead letter
        assert await settled_keys(look) == [1, 2, DEAD_KEY]
        [row] = await it.journal.read_numbers(1, SubQueue.DEAD_LETTER, 0, 1)
        assert (row.row_key, row.envelope.body) == (DEAD_KEY + 1, body)
        await it.commit(outcome(deletes=[DEAD_KEY + 1]))
        await it.journal.upkeep(NOW_MS)
        assert [row.envelope.body for row in await it.journal.read_rows([1, 2])] == [body] * 2
        await assert_empties(it, look)


async def test_a_copy_of_a_moved_row_has_the_body_too(store: Store, database: str) -> None:
    """An activated row's body has the row's former key, and `embodied` has it already."""
    body = BODIES[1]
    async with driven(store) as it, connected(database) as look:
        scheduled = block(3_000_000, 256, SubQueue.SCHEDULED)
        await start(it, DEAD_BLOCK, scheduled)
        await it.commit(outcome([insert(3_000_000, body)]))
        activation = MoveMessage(3_000_000, 5, 1, SubQueue.ACTIVE, 5, 0, NOW_MS, None)
        await it.commit(outcome(mutations=[activation]))
        await it.commit(dead_letter(5, DEAD_KEY))
        assert [r.envelope.body for r in await it.journal.read_rows([5, DEAD_KEY])] == [body] * 2
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(deletes=[DEAD_KEY]))
        [row] = await it.journal.read_rows([5])
        assert row.envelope.body == body
        await assert_empties(it, look)


async def test_patches_move_along_and_stay(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, DEAD_BLOCK)
        await it.commit(outcome([insert(1), insert(2)]))
        await it.commit(outcome(mutations=[PatchMessage(1, True, 4, b"new")]))
        await it.commit(
            outcome(mutations=[PatchMessage(2, None, 1, b"last"), settled([2])]),
            dead_letter(1, DEAD_KEY),
        )
        rows = await it.journal.read_rows([1, 2, DEAD_KEY])
        assert [row.envelope.application_properties for row in rows] == [b"new", b"last", b"why"]
        assert [row.delivery_count for row in rows] == [4, 1, 3]
        assert not it.journal._sides.keys  # they cost memory while they are live only
    async with driven(store) as it, connected(database) as look:
        assert not it.journal._sides.keys
        assert not it.loaded.deferred
        await it.commit(outcome(deletes=[DEAD_KEY]))
        await assert_empties(it, look)


@pytest.mark.parametrize("body", BODIES, ids=len)
async def test_settled_copies_of_a_publish_keep_its_body(
    store: Store, database: str, body: bytes
) -> None:
    def publish(keys: list[int]) -> list[InsertMessage]:
        return [InsertMessage(key, NOW_MS, envelope(body)) for key in keys]

    async with driven(store) as it, connected(database) as look:
        await start(it)
        await it.commit(outcome(publish([1, 2, 3]), mutations=[ShareBody([1, 2, 3])]))
        await it.commit(
            outcome(publish([4, 5]), [3], [ShareBody([4, 5]), settled([1, 4])]),
        )
        assert (await counts(look))["body"] == 2
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(deletes=[2, 5]))
        await it.journal.upkeep(NOW_MS)
        assert [row.envelope.body for row in await it.journal.read_rows([1, 4])] == [body] * 2
        await assert_empties(it, look)


# --- loading --------------------------------------------------------------------------------------


async def test_blocks_of_settled_rows_are_remembered(store: Store, database: str) -> None:
    """They determine the entity and the number of a row."""
    async with driven(store) as it, connected(database) as look:
        await start(it)
        for number in range(3):  # the first and the second will be empty but for settled rows
            first_key = 3_000_000 + number * 256
            new = ReserveBlock(first_key, 256, 1, SubQueue.ACTIVE, 2_000_000 + number * 256)
            await it.commit(outcome(mutations=[new]))
        await it.commit(outcome([insert(3_000_000), insert(3_000_256)]))
        await it.commit(settle([3_000_000]), outcome(deletes=[3_000_256]))
        firsts = "select first_key from block where first_key >= 3000000 order by 1"
        await reload(store)
        assert [row[0] for row in await look.fetch(firsts)] == [3_000_000, 3_000_512]


async def test_bodies_of_settled_rows_cost_no_memory(store: Store, database: str) -> None:
    async with driven(store) as it:
        await start(it)
        await it.commit(outcome([insert(key, BODIES[1]) for key in (1, 2)]))
        await it.commit(settle([1]))
        assert it.journal._sides.keys == {2}
    async with driven(store) as it, connected(database) as look:
        assert it.journal._sides.keys == {2}
        await it.commit(outcome(deletes=[2]))
        await assert_empties(it, look)


async def test_folded_counts_of_settled_rows_cost_no_memory(store: Store, database: str) -> None:
    store.upkeep_limits = UpkeepLimits(fold_rows=1)
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await it.commit(outcome([insert(key) for key in (1, 2)]))
        await it.commit(outcome(mutations=[RecordAcquired([1, 2], [1, 1])]))
        await it.commit(outcome(mutations=[RecordAcquired([2], [2])]))
        await it.commit(settle([1]))
        await it.journal.upkeep(NOW_MS)

        async def is_folded() -> bool:
            return bool(await look.fetchval("select count(*) from acquired") == 1)

        await wait_until(is_folded)
        assert await look.fetchval("select count(*) from patch") == 2
        assert it.journal._sides.keys == {2}
    assert (await reload(store)).attempts == {2: 2}


# --- the reaper -----------------------------------------------------------------------------------


async def fill_and_settle(it: Driven, count: int = 10) -> None:
    """Settle `count` rows, each a millisecond after the previous one."""
    await it.commit(outcome([insert(key) for key in range(1, count + 1)]))
    mutations = [settled([key], settled_ms=NOW_MS + key) for key in range(1, count + 1)]
    await it.commit(outcome(mutations=mutations))


async def test_only_expired_rows_are_deleted(store: Store, database: str) -> None:
    store.upkeep_limits = UpkeepLimits(reap_rows=3)
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await it.commit(outcome([insert(100)]))
        await fill_and_settle(it)
        await it.journal.upkeep(NOW_MS + RETENTION_MS)
        assert await settled_keys(look) == list(range(1, 11))
        await it.journal.upkeep(NOW_MS + 9 + RETENTION_MS)
        assert await settled_keys(look) == [9, 10]
        assert await counts(look) == {"message": 3, "settled": 2}
    async with driven(store) as it, connected(database) as look:
        await it.journal.upkeep(NOW_MS + 10 + RETENTION_MS)
        assert await settled_keys(look) == [10]
        await it.journal.upkeep(LATER_MS + 10)
        assert await counts(look) == {"message": 1}


@pytest.mark.parametrize("is_dropped", [True, False])
@pytest.mark.parametrize("is_loaded", [True, False])
async def test_without_a_history_all_settled_rows_are_deleted(
    store: Store, database: str, is_dropped: bool, is_loaded: bool
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await fill_and_settle(it)
        change = DropDefinition(1, 4) if is_dropped else define(None)
        await it.commit(outcome(mutations=[change]))
        if not is_loaded:
            await it.journal.upkeep(NOW_MS + 10)
            assert await counts(look) == {}
    if is_loaded:
        opened = await open_driven(store)
        async with connected(database) as look:
            assert await counts(look) == {"message": 10, "settled": 10}
            await opened.journal.upkeep(NOW_MS + 10)
            assert await counts(look) == {}
        await opened.journal.close()


@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_history_that_begins_while_the_old_one_goes_is_kept(
    store: Store, database: str, is_at_once: bool
) -> None:
    """It ends again, too: the next run finds its rows."""
    store.upkeep_limits = UpkeepLimits(reap_rows=3)
    async with driven(store) as it, connected(database) as look, connected(database) as other:
        await start(it)
        await fill_and_settle(it)
        await it.commit(outcome([insert(key) for key in range(20, 25)]))
        await it.commit(outcome(mutations=[define(None)]))
        async with other.transaction():
            await other.execute("select from settled where row_key = 1 for update")
            reaping = asyncio.ensure_future(it.journal.upkeep(NOW_MS + 10))

            async def is_waiting() -> bool:
                return bool(await look.fetchval("select count(*) from pg_locks where not granted"))

            await wait_until(is_waiting)
            await it.commit(outcome(mutations=[define()]))
            await it.commit(outcome(mutations=[settled([*range(20, 25)], settled_ms=NOW_MS + 11)]))
            if is_at_once:
                await it.commit(outcome(mutations=[define(None)]))
        await reaping
        kept = range(20, 25) if is_at_once else [*range(4, 11), *range(20, 25)]
        assert await settled_keys(look) == list(kept)
        await it.journal.upkeep(LATER_MS + 11)
        assert await counts(look) == {}


async def test_rows_settled_in_the_future_are_deleted_when_it_is_past(
    store: Store, database: str
) -> None:
    """Clocks are corrected occasionally."""
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await fill_and_settle(it)
        await it.commit(outcome(mutations=[define(None)]))
        await it.journal.upkeep(NOW_MS + 5)
        assert await settled_keys(look) == [6, 7, 8, 9, 10]
        await it.journal.upkeep(NOW_MS + 10)
        assert await counts(look) == {}


async def test_a_longer_retention_applies_to_settled_rows(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await fill_and_settle(it)
        await it.commit(outcome(mutations=[define(2 * RETENTION_MS)]))
        await it.journal.upkeep(LATER_MS + 10)
        assert len(await settled_keys(look)) == 10
        await it.journal.upkeep(LATER_MS + 10 + RETENTION_MS)
        assert await counts(look) == {}


async def test_a_former_owner_reaps_no_row(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await fill_and_settle(it)
        await look.execute("update owner set epoch = epoch + 1")
        with pytest.raises(Fenced):
            await it.journal.upkeep(LATER_MS + 10)
        assert await counts(look) == {"message": 10, "settled": 10}
        await look.execute("update owner set epoch = epoch - 1")


async def test_a_run_ends_in_time_and_reports_that_rows_are_left(
    store: Store, database: str
) -> None:
    store.upkeep_limits = UpkeepLimits(reap_s=-1.0)
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await fill_and_settle(it)
        assert await it.journal.upkeep(LATER_MS + 10)
        assert len(await settled_keys(look)) == 10
    store.upkeep_limits = UpkeepLimits()
    async with driven(store) as it, connected(database) as look:
        assert not await it.journal.upkeep(LATER_MS + 10)
        assert await settled_keys(look) == []


async def test_chunks_come_from_the_index(store: Store, database: str) -> None:
    """Sorting all old rows for each chunk would take quadratic time."""
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await look.execute("insert into settled select n, 1, 1, n from generate_series(1, 20000) n")
        sql = retention_module.REAP
        for number, value in enumerate(("1", "30000", "10", "0"), start=1):
            sql = sql.replace(f"${number}", value)
        async with look.transaction():
            await look.execute(BY_INDEX)
            plan = "\n".join(row[0] for row in await look.fetch(f"explain {sql}"))
        assert "Index Scan using settled_time" in plan
        assert "Sort" not in plan


async def test_reaped_rows_bring_a_vacuum(store: Store, database: str) -> None:
    vacuums = """
        select sum(vacuum_count) from pg_stat_user_tables
        where relid in ('message'::regclass, 'settled'::regclass)
    """
    async with driven(store) as it:
        await start(it)
        await fill_and_settle(it, 100)
    store.upkeep_limits = UpkeepLimits(vacuum_rows=100)
    async with driven(store) as it, connected(database) as look:
        await it.journal.upkeep(NOW_MS + 99 + RETENTION_MS)
        assert await settled_keys(look) == [99, 100]
        assert not await look.fetchval(vacuums)
        await it.journal.upkeep(LATER_MS + 100)

        async def were_vacuumed() -> bool:
            return bool(await look.fetchval(vacuums) == 2)

        await wait_until(were_vacuumed)
