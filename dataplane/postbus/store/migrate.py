"""Creation and migration of tables.

`schema.sql` and `partition.sql` create a new database; `migrations/` has the steps for an existing
one, append-only, numbered across both scopes: `NNNN_{pre,post}_what.sql`, first line `-- scope:
store` or `-- scope: partition`. All run under one lock, each scope in one transaction. A `pre` step
keeps brokers of the previous version working: it runs at once, beside brokers that do not know it.
A `post` step waits until these have stopped, by their heartbeats; afterwards such a broker does not
touch the tables (ADR 29).
"""

from __future__ import annotations

import logging
import re
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from postbus.store.errors import Connection, SchemaTooNew

logger = logging.getLogger(__name__)

MIGRATION_LOCK: Final = 0x506F_7374_6275_73  # "Postbus"; session locks of partitions have two keys
LOCK_MS: Final = 10_000
"""Maximum wait of a migration for another one; the server ends one that is paused."""
STEP_NAME: Final = re.compile(r"(\d{4})_(pre|post)_(\w+)\.sql")


class Migration(NamedTuple):
    """One file of `migrations/`. `scope`: "store" or "partition"."""

    number: int
    name: str
    scope: str
    sql: str

    @property
    def is_post(self) -> bool:
        return is_post(self.name)


def is_post(name: str) -> bool:
    """Return whether a step, perhaps of a newer version, waits for older brokers to stop."""
    match = STEP_NAME.fullmatch(name)
    return match is None or match[2] == "post"


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
    """Return the version of a scope's tables that this code uses."""
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
            rows = await connection.fetch("select number, name from postbus.migration")
            posts = [row["number"] for row in rows if is_post(row["name"])]
            refuse_newer(max(posts, default=0), "store")
            applied = {row["number"] for row in rows}
            steps = [step for step in steps_after(0, "store") if step.number not in applied]
            done = await _run(connection, steps)
        await connection.executemany(RECORD_STEP, [(step.number, step.name) for step in done])


async def _take_lock(connection: Connection) -> None:
    """Lock out other migrations until this transaction ends."""
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
    """Create the tables of a partition that has none; leaves search_path unchanged."""
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
        done = {step.number for step in steps_after(0, "partition")}
        await _record_partition(connection, newest_post("partition"), done)


async def partition_holds_anything(connection: Connection, partition_id: int) -> bool:
    """Return whether a partition has entities or rows that they left."""
    schema = schema_of(partition_id)
    if not await connection.fetchval(HAS_TABLE, schema, "owner"):
        return False
    return bool(await connection.fetchval(HOLDS_ANYTHING.format(schema)))


HOLDS_ANYTHING: Final = """
select exists (select from {0}.entity) or exists (select from {0}.message)
    or exists (select from {0}.session) or exists (select from {0}.seen)
    or exists (select from {0}.body) or exists (select from {0}.staged)
"""
"""Bodies are removed after the rows that refer to them; remains of a crash by a later load."""


async def migrate_partition(connection: Connection, version: int) -> int:
    """Migrate the partition in `search_path`; only its owner calls this.

    `version` is the newest `post` step it has taken; the owner's row lists later steps. Returns the
    newest step that its tables have, also one of a later version.
    """
    taken: set[int] = set(await connection.fetchval(TAKEN))
    steps = [step for step in steps_after(version, "partition") if step.number not in taken]
    if steps:
        async with connection.transaction():
            done = await _run(connection, steps)
            version = max([version, *(step.number for step in done if step.is_post)])
            taken |= {step.number for step in done}
            await _record_partition(connection, version, taken)
    return max([version, *taken])


TAKEN: Final = """
select array(select jsonb_array_elements_text(to_jsonb(owner) -> 'taken_steps'))::integer[]
from owner
"""
"""Works without the column, too."""


async def _record_partition(connection: Connection, version: int, taken: set[int]) -> None:
    later = sorted(number for number in taken if number > version)
    await connection.execute(RECORD_PARTITION, version, later)


RECORD_PARTITION: Final = """
insert into owner (schema_version, taken_steps) values ($1, $2)
on conflict (is_only) do update
set schema_version = excluded.schema_version, taken_steps = excluded.taken_steps
"""


async def _run(connection: Connection, steps: list[Migration]) -> list[Migration]:
    """Run steps in order, `post` ones up to the first that a live broker does not know."""
    oldest = await _oldest_known(connection) if any(step.is_post for step in steps) else None
    done = []
    for step in steps:
        if step.is_post and oldest is not None and oldest < step.number:
            logger.info("a step waits for older brokers to stop", extra={"step": step.name})
            continue
        await connection.execute(step.sql)
        done.append(step)
    return done


async def _oldest_known(connection: Connection) -> int | None:
    """Return the newest step that every live broker knows; None if there is no live broker."""
    if not await connection.fetchval(HAS_TABLE, "postbus", "broker"):
        return None
    oldest: int | None = await connection.fetchval(OLDEST_KNOWN)
    return oldest


OLDEST_KNOWN: Final = "select min(schema_version) from postbus.broker where ended_by is null"


def refuse_newer(version: int, scope: str) -> None:
    """Raise SchemaTooNew when tables took a `post` step that this code does not know (ADR 29)."""
    if version > newest(scope):
        raise SchemaTooNew(
            f"the {scope} tables have version {version}, this Postbus knows {newest(scope)}; "
            "run the newer version"
        )


def newest_post(scope: str) -> int:
    """Return the last `post` step of a scope, 0 if there is none."""
    return max((each.number for each in steps_after(0, scope) if each.is_post), default=0)


@cache
def _text(name: str) -> str:
    return (resources.files("postbus.store") / name).read_text(encoding="utf-8")
