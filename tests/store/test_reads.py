"""Reads of rows with the columns of side tables, and their plans."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from postbus.entity.commands import Death, Receiver, SubQueue
from postbus.message.rows import pack_envelope
from postbus.store.postgres import Store
from postbus.store.reads import BY_KEY, BY_NUMBER, BY_RANGE, BY_RANGES, PAGE_ROWS
from tests.store.driving import NOW_MS, Driven, connected, driven, envelope

Rows = list[tuple[Any, ...]]

SIDES: Final = {
    "patch": "(row_key, is_deferred, delivery_count, application_properties)",
    "due": "(row_key, entity_no, due_ms, sequence)",
    "kept": "(row_key, entity_no, sub_queue, sequence, delivery_count, died_ms, deliveries, link,"
    " client)",
}


@asynccontextmanager
async def stored(
    store: Store, database: str, keys: list[int], sides: dict[str, Rows]
) -> AsyncIterator[Driven]:
    """A partition with these rows, whose bodies are their keys."""
    async with driven(store) as it, connected(database) as look:
        blob = pack_envelope(envelope())
        await look.executemany(
            "insert into message (row_key, enqueued_ms, envelope, body) values ($1, $2, $3, $4)",
            [(key, NOW_MS + key, blob, b"%d" % key) for key in keys],
        )
        for table, rows in sides.items():
            if rows:
                values = ", ".join(f"${index}" for index in range(1, len(rows[0]) + 1))
                await look.executemany(
                    f"insert into {table} {SIDES[table]} values ({values})", rows
                )
        yield it


def some_sides(source: random.Random, keys: list[int]) -> dict[str, Rows]:
    """Return rows of side tables for a few of the keys, and for others beside them."""
    strange = range(max(keys) + 1, max(keys) + 20)

    def chosen() -> list[int]:
        return sorted(source.sample([*keys, *strange], len(keys) // 8))

    patches: Rows = [
        (
            key,
            source.choice((None, True, False)),
            source.choice((None, 0, 7)),
            source.choice((None, b"", b"patched")),
        )
        for key in chosen()
    ]
    deaths: Rows = [(None, None, None, None), (NOW_MS, 3, b"a link", "192.0.2.1")]
    kept: Rows = [
        (key, 1, 1, 10**6 + key, source.choice((0, 3, 9)), *source.choice(deaths))
        for key in chosen()
    ]
    due: Rows = [(key, 1, NOW_MS, 10**9 + key) for key in chosen()]
    return {"patch": patches, "due": due, "kept": kept}


def expected(key: int, sides: dict[str, Rows]) -> tuple[Any, ...]:
    """Return what is read of a key, by the meaning of the tables."""
    found = {name: {row[0]: row[1:] for row in rows}.get(key) for name, rows in sides.items()}
    is_deferred, patched, properties = found["patch"] or (None, None, None)
    sequence = count = death = None
    if found["due"]:
        sequence = found["due"][2]
    if found["kept"]:
        _, _, sequence, count, died_ms, deliveries, _, _ = found["kept"]
        if died_ms is not None:
            death = Death(died_ms, deliveries, Receiver("a link", "192.0.2.1"))
    counts = max(count or 0, patched or 0)
    shown = (key, NOW_MS + key, sequence, counts, bool(is_deferred), b"%d" % key)
    return *shown, properties or b"", death


def seen(rows: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (
            *row[:5],
            row.envelope.body,
            bytes(row.envelope.application_properties),
            row.death,
        )
        for row in rows
    ]


@pytest.mark.parametrize("step", [1, 2], ids=["ranges", "single keys"])
@pytest.mark.parametrize("has_sides", [True, False])
async def test_rows_have_the_columns_of_their_side_tables(
    store: Store, database: str, step: int, has_sides: bool
) -> None:
    """A page is read by ranges of keys or by single keys, and pages may lack any side table."""
    source = random.Random(step)
    keys = [*range(10, 3 * PAGE_ROWS, step), *range(5 * PAGE_ROWS, 5 * PAGE_ROWS + 50, step)]
    sides = some_sides(source, keys) if has_sides else {"patch": [], "due": [], "kept": []}
    async with stored(store, database, keys, sides) as it:
        wanted = [*range(5, 200), *source.sample(keys, len(keys) - 100), 10**7]
        rows = await it.journal.read_rows(wanted)
        assert seen(rows) == [expected(key, sides) for key in sorted({*wanted} & {*keys})]
        rows = await it.journal.read_range(50, 2 * PAGE_ROWS, PAGE_ROWS + 1)
        in_range = [key for key in keys if 50 <= key < 2 * PAGE_ROWS][: PAGE_ROWS + 1]
        assert seen(rows) == [expected(key, sides) for key in in_range]
        rows = await it.journal.read_numbers(1, SubQueue.DEAD_LETTER, 10**6 + 20, PAGE_ROWS)
        dead = [row[0] for row in sides["kept"] if row[0] in keys and row[0] >= 20]
        only_kept = {**sides, "due": []}
        assert seen(rows) == [expected(key, only_kept) for key in dead]


@pytest.mark.parametrize("sql", [BY_KEY, BY_RANGES, BY_RANGE])
async def test_side_tables_are_not_searched_for_each_row(
    store: Store, database: str, sql: str
) -> None:
    """Four searches of an index for each row were most of the time of a read."""
    keys = list(range(1, 3_000))
    arguments = {BY_KEY: [keys[:1_000]], BY_RANGES: [[1], [1_001]], BY_RANGE: [1, 1_001, 1_000]}
    sides: dict[str, Rows] = {"due": [(2_000, 1, NOW_MS, 5)]}
    async with stored(store, database, keys, sides), store.reading() as connection:
        plan = await plan_of(connection, sql, arguments[sql])
        loops = [line for line in plan if "message_pkey" in line]
        assert len(loops) == 1
        assert "rows=1000" in loops[0]
        rest = [line for line in plan if "_pkey" in line and "message_pkey" not in line]
        searches = [line for line in rest if "loops=1000" in line and "settled" not in line]
        assert searches == []
        assert sum("never executed" in line for line in rest) == 3, "one for each side table"


@pytest.mark.parametrize("sql", [BY_KEY, BY_RANGES, BY_RANGE, BY_NUMBER])
async def test_a_plan_of_an_empty_table_reads_by_key(store: Store, database: str, sql: str) -> None:
    """The planner trap: what VACUUM saw must not make a plan that filters all rows."""
    arguments = {
        BY_KEY: [[5_000]],
        BY_RANGES: [[5_000], [5_001]],
        BY_RANGE: [5_000, 5_001, 1],
        BY_NUMBER: [1, 1, 5_000, 1],
    }
    async with driven(store), connected(database) as look:
        await look.execute("vacuum (analyze) message, kept, patch, due, settled")
        await look.execute(
            "insert into message select key, 0, '\\x0000' from generate_series(1, 9000) as key"
        )
        await look.execute(
            "insert into kept select key, 1, 1, key, 0 from generate_series(1, 9000) as key"
        )
        async with store.reading() as connection:
            plan = await plan_of(connection, sql, arguments[sql])
    assert [line for line in plan if "Rows Removed" in line] == []
    assert sum("Index Cond" in line for line in plan) >= sum("message_pkey" in x for x in plan) > 0


async def plan_of(connection: Any, sql: str, arguments: list[Any]) -> list[str]:
    """Return the plan of a statement, and what was done of it."""
    statement = sql.replace("{schema}", "partition_0")
    async with connection.transaction():
        await connection.execute(f"prepare reading as {statement}")
        values = ", ".join(
            f"'{{{','.join(map(str, value))}}}'" if isinstance(value, list) else str(value)
            for value in arguments
        )
        rows = await connection.fetch(f"explain (analyze, timing off) execute reading({values})")
        await connection.execute("deallocate reading")
    return [row[0] for row in rows]
