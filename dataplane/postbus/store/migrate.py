"""Makes tables and brings older ones up to date.

`schema.sql` and `partition.sql` are what a new database gets; `migrations/` holds the steps an old
one takes, append-only, numbered through both scopes: `NNNN_{pre,post}_what.sql`, first line
`-- scope: store` or `-- scope: partition`. A `pre` step leaves brokers of the version before
working, a `post` step needs them gone. All run under one lock, each scope in one transaction.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from postbus.store.errors import Connection, SchemaTooNew

MIGRATION_LOCK: Final = 0x506F_7374_6275_73  # "Postbus"; session locks of partitions have two keys
LOCK_MS: Final = 10_000
"""How long making tables waits for others that do; one that is paused is ended by the server."""
STEP_NAME: Final = re.compile(r"(\d{4})_(pre|post)_(\w+)\.sql")


class Migration(NamedTuple):
    """One file of `migrations/`. `scope`: "store" or "partition"."""

    number: int
    name: str
    scope: str
    sql: str


@cache
def all_migrations() -> tuple[Migration, ...]:
    """Return every step in order."""
    steps = []
    for file in (resources.files("postbus.store") / "migrations").iterdir():
        match = STEP_NAME.fullmatch(file.name)
        if match is None:
            continue
        sql = file.read_text(encoding="utf-8")
        scope = sql.split("\n", 1)[0].removeprefix("-- scope: ").strip()
        assert scope in ("store", "partition"), file.name
        steps.append(Migration(int(match[1]), file.name, scope, sql))
    return tuple(sorted(steps))


def steps_after(number: int, scope: str) -> list[Migration]:
    return [step for step in all_migrations() if step.scope == scope and step.number > number]


def newest(scope: str) -> int:
    """Return the version of a scope's tables that this code works with."""
    return max(step.number for step in all_migrations() if step.scope == scope)


def schema_of(partition_id: int) -> str:
    """Return the name of a partition's schema; it needs no quotes."""
    return f"partition_{int(partition_id)}"


async def prepare_store(connection: Connection) -> None:
    """Create or migrate the database-wide tables; raises SchemaTooNew."""
    async with connection.transaction():
        await _take_lock(connection)
        if not await connection.fetchval(HAS_TABLE, "postbus", "migration"):
            await connection.execute(_text("schema.sql"))
            await connection.execute(FIRST_ROWS)
            done = steps_after(0, "store")
        else:
            version = await connection.fetchval("select max(number) from postbus.migration")
            refuse_newer(version, "store")
            done = steps_after(version, "store")
            for step in done:
                await connection.execute(step.sql)
        await connection.executemany(RECORD_STEP, [(step.number, step.name) for step in done])


async def _take_lock(connection: Connection) -> None:
    """Let nobody else make tables until this transaction ends."""
    await connection.execute(f"set local lock_timeout = {LOCK_MS}")
    await connection.execute("select pg_advisory_xact_lock($1)", MIGRATION_LOCK)


FIRST_ROWS: Final = """
insert into postbus.store default values;
insert into postbus.catalog_version (version, next_entity_no) values (0, 1);
"""
HAS_TABLE: Final = """
select exists (
    select from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = $1 and c.relname = $2
)
"""
RECORD_STEP: Final = "insert into postbus.migration (number, name) values ($1, $2)"


async def prepare_partition(connection: Connection, partition_id: int) -> None:
    """Create the tables of a partition that has none; leaves search_path as it was."""
    schema = schema_of(partition_id)
    if await connection.fetchval(HAS_TABLE, schema, "owner"):
        return
    async with connection.transaction():
        await _take_lock(connection)
        if await connection.fetchval(HAS_TABLE, schema, "owner"):
            return
        await connection.execute(f"create schema if not exists {schema}")
        await connection.execute(f"set local search_path = {schema}")
        await connection.execute(_text("partition.sql"))
        await connection.execute(
            "insert into owner (schema_version) values ($1)", newest("partition")
        )


async def partition_holds_anything(connection: Connection, partition_id: int) -> bool:
    """Say whether an entity lives in a partition, or left rows behind."""
    schema = schema_of(partition_id)
    if not await connection.fetchval(HAS_TABLE, schema, "owner"):
        return False
    return bool(await connection.fetchval(HOLDS_ANYTHING.format(schema)))


HOLDS_ANYTHING: Final = """
select exists (select from {0}.entity) or exists (select from {0}.message)
    or exists (select from {0}.session) or exists (select from {0}.seen)
"""


async def migrate_partition(connection: Connection, version: int) -> None:
    """Bring the partition in `search_path` up to date; only its owner calls this."""
    steps = steps_after(version, "partition")
    if not steps:
        return
    async with connection.transaction():
        await connection.execute("set local statement_timeout = 0")  # it may rewrite a table
        for step in steps:
            await connection.execute(step.sql)
        await connection.execute("update owner set schema_version = $1", steps[-1].number)


def refuse_newer(version: int, scope: str) -> None:
    """Raise SchemaTooNew when tables are of a version this code does not know (D17)."""
    if version > newest(scope):
        raise SchemaTooNew(
            f"the {scope} tables have version {version}, this Postbus knows {newest(scope)}; "
            "run the newer version"
        )


@cache
def _text(name: str) -> str:
    return (resources.files("postbus.store") / name).read_text(encoding="utf-8")
