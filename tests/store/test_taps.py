"""Settled rows stay until every tap of their sub-queue has read them (ADR 42)."""

from __future__ import annotations

from random import Random

import pytest

from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import SubQueue
from postbus.entity.group_commands import Cursor, GroupKind, Plan
from postbus.entity.outcomes import (
    DropCursor,
    DropDefinition,
    PutCursor,
    PutDefinition,
    SettleRows,
    Settling,
)
from postbus.store.errors import Connection
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
)

ACTIVE, DEAD = SubQueue.ACTIVE, SubQueue.DEAD_LETTER
RETENTION_MS = 60_000
DEAD_KEY = 2_000_000
"""The first key of the block of dead letters here."""


def define(retention_ms: int | None = None) -> PutDefinition:
    properties = QueueProperties(history_retention_ms=retention_ms)
    return PutDefinition(1, "orders", EntityKind.QUEUE, properties, 3, 1)


def tap(settled: int, name: str = "lake", sub_queue: SubQueue = ACTIVE) -> PutCursor:
    return PutCursor(1, sub_queue, name, Cursor(GroupKind.TAP, 1, "driver", settled, None))


def settle(*row_keys: int, at_ms: int = NOW_MS) -> SettleRows:
    return SettleRows(1, list(row_keys), Settling.COMPLETED, at_ms)


async def start(it: Driven, *mutations: PutCursor, retention_ms: int | None = None) -> None:
    """Store the rows 1 to 6."""
    await it.commit(outcome(mutations=[define(retention_ms), *mutations]))
    await it.commit(outcome([insert(key) for key in range(1, 7)]))


async def stored(look: Connection) -> list[int]:
    rows = await look.fetch("select row_key from message order by row_key")
    return [row["row_key"] for row in rows]


async def low(look: Connection, sub_queue: SubQueue = ACTIVE) -> int:
    sql = "select coalesce(max(low), 0) from low_mark where entity_no = 1 and sub_queue = $1"
    return int(await look.fetchval(sql, int(sub_queue)))


async def reap(it: Driven, now_ms: int = NOW_MS) -> None:
    while await it.journal.upkeep(now_ms):
        pass


async def test_rows_stay_until_the_slowest_tap_has_read_them(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(3), tap(5, "slow-start"))
        await it.commit(outcome(mutations=[settle(1, 2, 3, 4, 6)]))
        await reap(it)
        assert await stored(look) == [3, 4, 5, 6]
        assert await low(look) == 3
        await it.commit(outcome(mutations=[tap(6)]))
        await reap(it)
        assert await stored(look) == [5, 6], "row 4 is below both cursors, row 5 is live"
        await it.commit(outcome(mutations=[settle(5)]))
        await reap(it)
        assert await stored(look) == [5, 6], "the other tap has not read row 5"
        await it.commit(outcome(mutations=[tap(7), tap(7, "slow-start")]))
        await reap(it)
        assert await stored(look) == []
        assert await low(look) == 7


async def test_a_row_that_is_settled_below_all_cursors_is_deleted(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(5))
        await reap(it)
        await it.commit(outcome(mutations=[settle(4)]))
        await reap(it)
        assert await stored(look) == [1, 2, 3, 5, 6]
        await it.commit(outcome(mutations=[settle(2)]))
        await reap(it)
        assert await stored(look) == [1, 3, 5, 6]


async def test_rows_of_a_dropped_tap_are_deleted(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(1))
        await it.commit(outcome(mutations=[settle(1, 2, 3)]))
        await reap(it)
        assert await stored(look) == [1, 2, 3, 4, 5, 6]
        await it.commit(outcome(mutations=[DropCursor(1, ACTIVE, "lake")]))
        await reap(it)
        assert await stored(look) == [4, 5, 6]


async def test_a_history_and_a_tap_both_keep_rows(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(4), retention_ms=RETENTION_MS)
        await it.commit(outcome(mutations=[settle(1, 5), settle(2, at_ms=NOW_MS + 10)]))
        await reap(it)
        assert await stored(look) == [1, 2, 3, 4, 5, 6], "the history has not ended"
        await reap(it, NOW_MS + RETENTION_MS + 5)
        assert await stored(look) == [2, 3, 4, 5, 6]
        await reap(it, NOW_MS + RETENTION_MS + 20)
        assert await stored(look) == [3, 4, 5, 6], "the tap has not read row 5"
        await it.commit(outcome(mutations=[tap(7)]))
        await reap(it, NOW_MS + RETENTION_MS + 20)
        assert await stored(look) == [3, 4, 6]


async def test_a_tap_keeps_rows_of_its_own_sub_queue_only(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        dead = block(DEAD_KEY, 256, DEAD)
        await it.commit(outcome(mutations=[define(), tap(0), dead]))
        await it.commit(outcome([insert(1), insert(DEAD_KEY), insert(DEAD_KEY + 1)]))
        await it.commit(outcome(mutations=[settle(1, DEAD_KEY)]))
        await reap(it)
        assert await stored(look) == [1, DEAD_KEY + 1]
        assert (await low(look), await low(look, DEAD)) == (0, DEAD_KEY + 1)
        await it.commit(outcome(mutations=[tap(DEAD_KEY, "dead", DEAD)]))
        await it.commit(outcome(mutations=[settle(DEAD_KEY + 1)]))
        await reap(it)
        assert await stored(look) == [1, DEAD_KEY + 1]


async def test_groups_and_what_they_keep_survive_a_reload(store: Store, database: str) -> None:
    plan = Plan(7, {0: (3, 5)}, epoch=2, attempts=1, is_settled=False)
    planned = PutCursor(1, ACTIVE, "lake", Cursor(GroupKind.TAP, 2, "driver", 3, plan))
    async with driven(store) as it:
        await start(it, tap(1), tap(2, "gone"))
        await it.commit(outcome(mutations=[planned, DropCursor(1, ACTIVE, "gone")]))
        await it.commit(outcome(mutations=[settle(1, 2, 3, 4)]))
    loaded = await reload(store)
    assert loaded.cursors == [planned]
    async with driven(store) as it, connected(database) as look:
        await reap(it)
        assert await stored(look) == [3, 4, 5, 6]


async def test_what_a_former_version_may_have_deleted_is_missing(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(0))
        blocks_end = await look.fetchval("select max(first_key + size) from block")
    async with driven(store), connected(database) as look:
        assert await low(look) == 0
        await look.execute("update owner set protocol_version = 2")
    async with driven(store), connected(database) as look:
        assert await low(look) == blocks_end


async def test_a_deleted_entity_leaves_neither_groups_nor_marks(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(3))
        await it.commit(outcome(mutations=[settle(1, 2, 4)]))
        await reap(it)
        await it.commit(outcome(mutations=[DropDefinition(1, 4)]))
        await reap(it)
        for table in ("reader_group", "low_mark", "settled"):
            assert await look.fetchval(f"select count(*) from {table}") == 0, table


async def test_a_cursor_that_rises_in_small_steps_deletes_in_chunks(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[define(), tap(0)]))
        await it.commit(outcome([insert(key) for key in range(1, 201)]))
        await it.commit(outcome(mutations=[settle(*range(1, 201))]))
        for end in (1, 2, 77, 150, 201):
            await it.commit(outcome(mutations=[tap(end)]))
            await reap(it)
            assert await stored(look) == list(range(end, 201))
            assert await low(look) == (end if end > 1 else 0)


async def test_a_history_that_ends_leaves_no_row_that_taps_have_read(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(4), retention_ms=RETENTION_MS)
        await it.commit(outcome(mutations=[settle(1, 2, 5)]))
        await reap(it)
        assert await stored(look) == [1, 2, 3, 4, 5, 6], "the history has not ended"
        await it.commit(outcome(mutations=[define()]))
        await reap(it)
        assert await stored(look) == [3, 4, 5, 6]


async def test_a_tap_that_comes_while_rows_are_deleted_keeps_the_rest(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(database, upkeep_limits=UpkeepLimits(reap_rows=2))
    async with driven(store) as it, connected(database) as look:
        await start(it)
        await it.commit(outcome(mutations=[settle(1, 2, 3, 4, 5, 6)]))
        settled = it.journal._upkeep._settled
        chunk = settled._reap_chunk

        async def with_tap(*arguments: object) -> object:
            found = await chunk(*arguments)  # type: ignore[arg-type]
            settled._taps.put(tap(3))
            return found

        monkeypatch.setattr(settled, "_reap_chunk", with_tap)
        await it.journal.upkeep(NOW_MS)
        assert await stored(look) == [3, 4, 5, 6]
        assert await low(look) == 3
    await store.close()


async def test_a_tap_that_comes_while_rows_of_another_are_deleted_keeps_the_rest(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(database, upkeep_limits=UpkeepLimits(reap_rows=2))
    async with driven(store) as it, connected(database) as look:
        await start(it, tap(DEAD_KEY, "dead", DEAD))
        await it.commit(outcome(mutations=[settle(1, 2, 3, 4, 5, 6)]))
        settled = it.journal._upkeep._settled
        chunk = settled._reap_chunk

        async def with_tap(*arguments: object) -> object:
            found = await chunk(*arguments)  # type: ignore[arg-type]
            settled._taps.put(tap(3))
            return found

        monkeypatch.setattr(settled, "_reap_chunk", with_tap)
        await reap(it)
        assert await stored(look) == [3, 4, 5, 6]
        assert await low(look) == 3
        settled._taps.put(tap(5))
        await reap(it)
        assert await stored(look) == [5, 6], "its rows are not forgotten"
    await store.close()


class Model:
    """A settled row goes when it is old and below all cursors, and not before."""

    def __init__(self, retention_ms: int | None) -> None:
        self.retention_ms = retention_ms
        self.kept = set(range(1, 41))
        self.settled_ms: dict[int, int] = {}
        self.cursors = {"lake": 0}
        self.now_ms = NOW_MS

    def reap(self) -> None:
        before_ms = self.now_ms + 1 - (0 if self.retention_ms is None else self.retention_ms + 1)
        self.kept -= {
            key
            for key, at_ms in self.settled_ms.items()
            if at_ms < before_ms and key < min(self.cursors.values())
        }

    @property
    def low(self) -> int:
        return max(set(range(1, 41)) - self.kept, default=-1) + 1


@pytest.mark.slow
@pytest.mark.parametrize("retention_ms", [None, RETENTION_MS], ids=["tap", "tap-and-history"])
@pytest.mark.parametrize("seed", range(6))
async def test_no_row_is_deleted_too_early_and_none_is_forgotten(
    store: Store, database: str, seed: int, retention_ms: int | None
) -> None:
    random, model = Random(seed), Model(retention_ms)
    async with driven(store) as it:
        await it.commit(outcome(mutations=[define(retention_ms), tap(0)]))
        await it.commit(outcome([insert(key) for key in range(1, 41)]))
    for _ in range(6):  # lives of the partition
        async with driven(store) as it, connected(database) as look:
            for _ in range(12):
                await step(it, model, random)
            model.now_ms += random.choice([0, RETENTION_MS // 2])
            await reap(it, model.now_ms)
            model.reap()
            assert set(await stored(look)) == model.kept
            assert await low(look) == model.low


async def step(it: Driven, model: Model, random: Random) -> None:
    match random.randrange(8):
        case 0 | 1 | 2 | 3:
            left = sorted(model.kept - model.settled_ms.keys())
            chosen = random.sample(left, min(len(left), random.randint(1, 4)))
            if chosen:
                model.settled_ms |= dict.fromkeys(chosen, model.now_ms)
                await it.commit(outcome(mutations=[settle(*chosen, at_ms=model.now_ms)]))
        case 4 | 5:
            name = random.choice(["lake", "other"])
            end = min(model.cursors.get(name, 0) + random.randint(0, 8), 41)
            model.cursors[name] = end
            await it.commit(outcome(mutations=[tap(end, name)]))
        case 6 if len(model.cursors) > 1:
            name = random.choice(sorted(model.cursors))
            del model.cursors[name]
            await it.commit(outcome(mutations=[DropCursor(1, ACTIVE, name)]))
        case _:
            model.now_ms += random.choice([1, 100, RETENTION_MS // 4])
            await reap(it, model.now_ms)
            model.reap()
