"""Two versions on one store: migrations of the newer one leave the older one working.

The newer version is this one with more steps, which only these tests know.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from uuid import uuid4

import asyncpg
import pytest

from postbus.store import beats, migrate
from postbus.store.errors import SchemaTooNew
from postbus.store.incarnation import Broker, Process
from postbus.store.migrate import Migration, all_migrations
from postbus.store.postgres import Store
from postbus.store.rivals import Rivals
from tests.store.driving import connected, insert, open_driven, outcome

pytestmark = pytest.mark.slow

KEYS = itertools.count(1)
BASE = all_migrations()
PRE = (
    Migration(9001, "9001_pre_more.sql", "store", "alter table postbus.store add more int"),
    Migration(9002, "9002_pre_more.sql", "partition", "alter table owner add more int"),
)
POST = (
    Migration(9003, "9003_post_less.sql", "store", "alter table postbus.store drop more"),
    Migration(9004, "9004_post_less.sql", "partition", "alter table owner drop more"),
)
LATER = (Migration(9005, "9005_pre_late.sql", "partition", "alter table owner add late int"),)
LIVES = """
insert into postbus.broker (
    incarnation, broker_name, host, pid, boot_id, pid_namespace, started_ticks, data_lock,
    schema_version
)
values (gen_random_uuid(), 'older', '', 1, '', '', 1, '', 9000)
"""


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes this process one of a version with more steps."""

    def know(*steps: Migration) -> None:
        for module in (migrate, beats):
            monkeypatch.setattr(module, "all_migrations", lambda: (*BASE, *steps))

    return know


async def work(database: str) -> int:
    """Start, claim and load partition 0, commit a message, release it; return its version."""
    store = Store(database)
    try:
        it = await open_driven(store)
        await it.commit(outcome([insert(next(KEYS))]))
        await it.journal.close()
        return it.journal.schema_version
    finally:
        await store.close()


async def columns(look: asyncpg.Connection[asyncpg.Record], table: str) -> set[str]:
    sql = "select attname from pg_attribute where attrelid = $1::text::regclass and attnum > 0"
    rows = await look.fetch(f"{sql} and not attisdropped", table)
    return {row["attname"] for row in rows} & {"more", "late"}


async def test_the_version_before_works_beside_tables_that_are_only_pre_ahead(
    database: str, become: Callable[..., None]
) -> None:
    before = await work(database)
    assert before < 9000
    become(*PRE)
    assert await work(database) == 9002
    become()
    assert await work(database) == 9002
    become(*PRE)
    assert await work(database) == 9002  # and takes no step twice
    async with connected(database) as look:
        assert await columns(look, "postbus.store") == {"more"}
        assert await columns(look, "partition_0.owner") == {"more"}
        assert await look.fetchval("select count(*) from partition_0.message") == 4


async def test_a_post_step_waits_until_the_version_before_is_gone(
    database: str, become: Callable[..., None]
) -> None:
    become(*PRE)
    await work(database)
    async with connected(database) as look:
        await look.execute(LIVES)
        become(*PRE, *POST, *LATER)
        await work(database)
        assert await columns(look, "postbus.store") == {"more"}
        assert await columns(look, "partition_0.owner") == {"more", "late"}
        become()
        await work(database)  # the older one takes the partition over
        await look.execute("update postbus.broker set ended_by = 'a test'")
        become(*PRE, *POST, *LATER)
        await work(database)
        assert await columns(look, "postbus.store") == set()
        assert await columns(look, "partition_0.owner") == {"late"}
        assert await work(database) == 9005


@pytest.mark.parametrize("scope", ["store", "partition"])
async def test_the_version_before_leaves_tables_alone_that_took_a_post_step(
    database: str, become: Callable[..., None], scope: str
) -> None:
    become(*PRE, *(step for step in POST if step.scope == scope))
    await work(database)
    become()
    with pytest.raises(SchemaTooNew, match="run the newer version"):
        await work(database)


BEAT_BEFORE_REQUESTS = """
update postbus.broker set beat = beat + 1, persisted_ms = greatest(persisted_ms, $2)
where incarnation = $1 and ended_by is null returning incarnation, beat, ended_by
"""


async def test_the_version_before_beats_on_while_its_store_learns_of_requests(
    database: str,
) -> None:
    lives = "insert into postbus.broker values ($1, 'older', '', 1, '', '', 1, '', 21)"
    identity = uuid4()
    async with connected(database) as look:
        await look.execute("alter table postbus.broker drop column asked_by")
        await look.execute("delete from postbus.migration where name like '%_asked.sql'")
        await look.execute(lives, identity)
        beat = await look.prepare(BEAT_BEFORE_REQUESTS)
        assert await beat.fetchval(identity, 0) == identity
        await work(database)
        assert await beat.fetchval(identity, 0) == identity
        store = Store(database)
        rivals = Rivals(store, Broker("older", Process("here", 2)))
        (rival,) = await rivals.ask_to_end()
        assert (await beat.fetchrow(identity, 0))["beat"] == 3
        assert await rivals.outwait([rival], 0.0) == [rival]  # it does not hear, and goes on
        await store.close()


BEFORE_INCARNATIONS = 14
"""The last step of the version that knew no incarnations of brokers."""


async def test_a_store_of_the_version_without_incarnations_is_taken_over(database: str) -> None:
    steps = [step for step in BASE if step.number <= BEFORE_INCARNATIONS]
    async with connected(database) as look:
        await look.execute("drop schema if exists postbus cascade")
        await look.execute("drop schema if exists partition_0 cascade")
        await look.execute("create schema partition_0")
        for step in steps:
            await look.execute(step.sql)
        await look.execute(migrate.FIRST_ROWS)
        stored = [(step.number, step.name) for step in steps if step.scope == "store"]
        await look.executemany(migrate.RECORD_STEP, stored)
        version = max(step.number for step in steps if step.scope == "partition")
        await look.execute("insert into owner (schema_version) values ($1)", version)
        await look.execute("update owner set broker_name = 'broker-0', is_released = true")
    await work(database)
    async with connected(database) as look:
        assert await look.fetchval("select count(*) from message") == 1
