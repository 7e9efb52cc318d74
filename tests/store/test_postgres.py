"""The database: required settings, reconnection, migrations that result in the schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from postbus.contract.entities import RuleProperties
from postbus.process.embedded import EmbeddedPostgres
from postbus.store import postgres as postgres_module
from postbus.store.errors import StoreError
from postbus.store.migrate import (
    FIRST_ROWS,
    all_migrations,
    migrate_partition,
    newest,
    newest_post,
    prepare_store,
)
from postbus.store.postgres import (
    Fenced,
    SchemaTooNew,
    Store,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from tests.conftest import dsn_of, make_database, run_psql
from tests.store.driving import connected, make_partition, wait_until

CATALOG_OF_TABLES = """
select c.relname, c.relkind::text, coalesce(c.reloptions::text, ''),
       a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
       a.attcompression::text, pg_get_expr(d.adbin, d.adrelid), pg_get_indexdef(i.indexrelid),
       (select reloptions::text from pg_class t where t.oid = c.reltoastrelid),
       (select string_agg(pg_get_constraintdef(k.oid), ';' order by k.conname)
        from pg_constraint k where k.conrelid = c.oid)
from pg_class c
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
left join pg_index i on i.indexrelid = c.oid
where c.relnamespace = $1::text::regnamespace
order by c.relname, a.attnum
"""


@pytest.fixture(scope="module")
def careless_server(server_folder: Path) -> Iterator[EmbeddedPostgres]:
    """Run a server with settings that may lose confirmed commits."""
    server = EmbeddedPostgres(
        server_folder / "careless", settings={"fsync": "off", "full_page_writes": "off"}
    )
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
async def test_server_that_may_lose_messages_is_refused(careless_server: EmbeddedPostgres) -> None:
    with pytest.raises(StoreMisconfigured, match=r"fsync=off, full_page_writes=off.*--unsafe"):
        await Store(careless_server.dsn).open()


async def test_server_that_may_lose_messages_is_accepted_when_asked(
    careless_server: EmbeddedPostgres,
) -> None:
    store = Store(careless_server.dsn, unsafe=True)
    await store.open()
    async with store.aside() as connection:
        assert await connection.fetchval("show fsync") == "off"
    await store.close()


async def test_asynchronous_commit_by_default_is_refused(
    postgres_server: EmbeddedPostgres, database: str
) -> None:
    name = database.split("@/")[1].split("?", maxsplit=1)[0]
    run_psql(postgres_server, f"alter database {name} set synchronous_commit = off")
    with pytest.raises(StoreMisconfigured, match="synchronous_commit=off"):
        await Store(database).open()


async def test_old_server_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_module, "MIN_SERVER_VERSION", 990_000)
    with pytest.raises(StoreMisconfigured, match="too old"):
        await store.open()


async def test_tables_of_a_newer_version_are_refused(store: Store, database: str) -> None:
    async with connected(database) as look:
        await look.execute("insert into postbus.migration (number, name) values (9999, 'x')")
    with pytest.raises(SchemaTooNew, match="9999"):
        await store.open()


async def test_database_is_prepared_once_by_many(postgres_server: EmbeddedPostgres) -> None:
    make_database(postgres_server, "many")
    stores = [Store(dsn_of(postgres_server, "many")) for _ in range(4)]
    await asyncio.gather(*(make_partition(store, 3) for store in stores))
    async with stores[0].reading() as connection:
        assert await connection.fetchval("select count(*) from postbus.store") == 1
        assert await connection.fetchval("select count(*) from partition_3.owner") == 1
    for store in stores:
        await store.close()


async def test_shared_connection_reopens_after_its_backend_was_terminated(
    store: Store, database: str
) -> None:
    before = await store.sample_clock_ms()
    async with connected(database) as look:
        await look.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = 'postbus reader' and datname = current_database()"
        )

    async def answers() -> bool:
        try:
            return await store.sample_clock_ms() >= before
        except StoreUnavailable:  # once, if the news of the end was late
            return False

    await wait_until(answers)
    assert await answers()


async def test_reader_cannot_write(store: Store) -> None:
    with pytest.raises(StoreUnavailable, match="read-only"):
        async with store.reading() as connection:
            await connection.execute("delete from partition_0.message")


async def test_bugs_are_not_called_store_trouble(store: Store) -> None:
    with pytest.raises(asyncpg.UndefinedTableError):
        async with store.reading() as connection:
            await connection.fetch("select * from no_such_table")


@pytest.mark.parametrize(
    "kind", [StoreUnavailable, Fenced, StoreFull, StoreMisconfigured, SchemaTooNew]
)
def test_errors_have_a_default_message(kind: type[StoreError]) -> None:
    assert str(kind()) == kind.__doc__
    assert str(kind("because")) == "because"


async def test_migrations_and_schema_make_equal_tables(store: Store, database: str) -> None:
    await store.open()
    async with connected(database) as look:
        made = [await look.fetch(CATALOG_OF_TABLES, name) for name in ("postbus", "partition_0")]
        await look.execute("drop schema postbus cascade; drop schema partition_0 cascade")
        await look.execute("create schema partition_0")
        for step in all_migrations():
            await look.execute(step.sql)
        grown = [await look.fetch(CATALOG_OF_TABLES, name) for name in ("postbus", "partition_0")]
    assert made[0]
    assert made[1]
    assert [list(map(tuple, rows)) for rows in made] == [list(map(tuple, rows)) for rows in grown]


async def test_rules_of_older_stores_that_are_always_true_become_true_filters(
    store: Store, database: str
) -> None:
    """Before, `1=1` was returned as a true filter, however it was created."""
    (step,) = [each for each in all_migrations() if "fixed_filters" in each.name]

    def stored(name: str, text: str, **more: object) -> dict[str, object]:
        made = {"sqlExpression": text, "compatibilityLevel": 20, "parameters": {}}
        return {"rule": {"name": name, "sqlFilter": made | more}, "created_ms": 5}

    rules = [
        stored("z", "1=1"),
        stored("f", "1=0"),
        stored("s", "1 = 1"),
        stored("p", "1=1", parameters={"@a": 1}),
        {"rule": {"name": "c", "correlationFilter": {"label": "1=1"}}, "created_ms": 6},
    ]
    await store.open()
    async with connected(database) as look:
        await look.execute(
            "insert into postbus.catalog (entity_no, name, kind, definition, home_partition,"
            " version, created_ms, updated_ms, rules)"
            " values (1, 'a', 'subscription', '{}', 0, 1, 0, 0, $1), (2, 'b', 'queue', '{}', 0, 1,"
            " 0, 0, '[]')",
            json.dumps(rules),
        )
        await look.execute(step.sql)
        found = await look.fetch("select rules from postbus.catalog order by entity_no")
    after, none = (json.loads(row["rules"]) for row in found)
    types = [each["rule"].get("filterType") for each in after]
    assert types == ["TrueFilter", "FalseFilter", None, None, None]
    for each in after:
        RuleProperties.model_validate(each["rule"])
        each["rule"].pop("filterType", None)
    assert (after, none) == (rules, [])


def test_migrations_are_numbered_without_gaps() -> None:
    assert [step.number for step in all_migrations()] == [
        number + 1 for number in range(len(all_migrations()))
    ]


async def test_missing_steps_are_applied_to_old_tables(store: Store, database: str) -> None:
    """An old database: only the first rows of both scopes exist."""
    first_store = next(step for step in all_migrations() if step.scope == "store")
    async with connected(database) as look:
        await look.execute("drop schema postbus cascade")
        await look.execute(first_store.sql + FIRST_ROWS)
        await look.execute(
            "insert into postbus.migration (number, name) values ($1, $2)",
            first_store.number,
            first_store.name,
        )
        await prepare_store(look)
        version = await look.fetchval("select max(number) from postbus.migration")
        assert version == newest("store")
        await migrate_partition(look, newest("partition"))
        assert await look.fetchval("select schema_version from owner") == newest_post("partition")
