"""Who may write a partition: take-over, release, epochs, proofs of ownership (D9)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import asyncpg
import pytest

from postbus.entity.commands import Refusal, SubQueue
from postbus.store import claim as claim_module
from postbus.store.claim import LOCK_CLASS, Slot, claim_partition, take_slot
from postbus.store.postgres import Fenced, SchemaTooNew, Store, StoreUnavailable
from tests.store.driving import (
    Driven,
    block,
    connected,
    definition,
    driven,
    insert,
    open_driven,
    outcome,
    reload,
    wait_until,
)

SILENT = "update owner set heartbeat_ms = heartbeat_ms - 5001"


async def test_epoch_grows_with_each_claim(store: Store) -> None:
    assert [(await reload(store)).epoch for _ in range(3)] == [1, 2, 3]


async def test_another_broker_waits_while_the_owner_is_alive(store: Store) -> None:
    async with driven(store) as it:
        with pytest.raises(Fenced, match="broker-0"):
            await open_driven(store, "broker-1")
        await it.commit(outcome([insert(1)]))


async def test_another_broker_claims_at_once_after_a_release(store: Store) -> None:
    async with driven(store):
        pass
    loaded = await reload(store, "broker-1")
    assert (loaded.epoch, loaded.is_clean) == (2, True)


async def test_another_broker_claims_after_five_seconds_of_silence(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome([insert(1)]))
        await look.execute(SILENT)
        loaded = await reload(store, "broker-1")
        assert (loaded.epoch, loaded.is_clean) == (2, False)
        assert list(loaded.keys[1, SubQueue.ACTIVE]) == [1]
        it.journal.submit(outcome([insert(2)]), "late")
        await it.seen.wait_failed()
        assert it.seen.told == [None]
        assert it.seen.failed == [("late", Refusal.NOT_APPLIED)]  # its connection was ended before
    assert list((await reload(store)).keys[1, SubQueue.ACTIVE]) == [1]


async def test_same_broker_claims_at_once_and_ends_its_former_self(store: Store) -> None:
    async with driven(store) as old, driven(store) as new:
        assert new.loaded.epoch == 2
        old.journal.submit(outcome([insert(1)]), "old")
        await old.seen.wait_failed()
        await new.commit(outcome([insert(1)]))


async def test_second_writer_of_a_former_owner_is_fenced(store: Store) -> None:
    async with driven(store) as it:
        connection = await store.connect_writer(0)
        with pytest.raises(Fenced):
            await take_slot(connection, 0, Slot.SECOND_WRITER, it.journal.epoch - 1)
        await connection.close()


async def test_two_brokers_that_claim_at_once_end_with_one_owner(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may end each other's connections, but never both own it."""
    monkeypatch.setattr(claim_module, "LOCK_MS", 200)
    tries = await asyncio.gather(
        *(open_driven(store, f"broker-{number}") for number in range(4)), return_exceptions=True
    )
    owners = [found for found in tries if isinstance(found, Driven)]
    assert all(isinstance(found, Driven | StoreUnavailable) for found in tries)
    alive = []
    for owner in owners:
        owner.journal.submit(outcome(mutations=[definition(), block()]), None)
        await owner.seen.wait_for(lambda seen=owner.seen: bool(seen.told or seen.errors))
        if owner.seen.told:
            alive.append(owner)
    assert len(alive) <= 1
    for owner in owners:
        await owner.journal.close()
    async with connected(database) as look:
        await look.execute(SILENT)
    assert (await reload(store, "broker-9")).epoch >= 2


@pytest.mark.slow
async def test_heartbeat_proves_ownership_each_second_when_idle(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        before = it.journal.confirmed_at
        beaten = await look.fetchval("select heartbeat_ms from owner")

        async def is_beaten() -> bool:
            return bool(await look.fetchval("select heartbeat_ms from owner") > beaten)

        await wait_until(is_beaten)
        assert before < it.journal.confirmed_at <= time.monotonic()


@pytest.mark.slow
async def test_owner_that_finds_another_epoch_steps_down(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await look.execute("update owner set epoch = epoch + 1")
        assert isinstance(await it.seen.wait_failed(), Fenced)


async def test_commit_confirms_ownership(store: Store) -> None:
    async with driven(store) as it:
        started = time.monotonic()
        await it.commit(outcome([insert(1)]))
        assert it.journal.confirmed_at >= started


async def test_clock_never_tells_less_than_what_was_persisted(store: Store) -> None:
    ahead_ms = 4_000_000_000_000
    async with driven(store) as it:
        assert abs(await it.journal.sample_clock_ms() - time.time() * 1_000) < 60_000
        await it.commit(outcome([insert(1, enqueued_ms=ahead_ms)]))
        assert await it.journal.sample_clock_ms() == ahead_ms
    async with driven(store) as it:
        assert await it.journal.sample_clock_ms() == ahead_ms


async def test_newer_tables_are_not_claimed(store: Store, database: str) -> None:
    async with connected(database) as look:
        await look.execute("update owner set schema_version = 9999")
    with pytest.raises(SchemaTooNew):
        await open_driven(store)


async def test_claim_waits_for_a_former_writer_that_does_not_end(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting lock stands for a backend that cannot be ended: nothing is claimed."""
    monkeypatch.setattr(claim_module, "LOCK_MS", 100)
    monkeypatch.setattr(claim_module, "END_HOLDERS", "select $1::int, $2::int, $3::text")
    async with connected(database) as other:
        await other.execute(
            "select pg_advisory_lock($1, $2)", LOCK_CLASS | 0, int(Slot.SECOND_WRITER)
        )
        connection = await store.connect_writer(0)
        with pytest.raises(StoreUnavailable):
            await claim_partition(connection, 0, "broker-0")
        await connection.close()
        assert await other.fetchval("select epoch from owner") == 0


OTHER_PROCESS = """
import asyncio, sys
from postbus.store.journal import Journal
from postbus.store.postgres import Store

async def main():
    journal, loaded = await Journal.open(
        Store(sys.argv[1]), 0, sys.argv[2], on_committed=print, on_failed=print
    )
    print(loaded.epoch, flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_partition_of_a_killed_process_is_claimed_by_the_same_broker(
    store: Store, database: str
) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS, database, "broker-0"]
    with subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert await asyncio.to_thread(other.stdout.readline) == "1\n"
        with pytest.raises(Fenced):
            await open_driven(store, "broker-1")
        other.kill()
        assert (await reload(store)).epoch == 2
    async with connected(database) as look:
        locks = await look.fetchval(
            "select count(*) from pg_locks where locktype = 'advisory' and database = "
            "(select oid from pg_database where datname = current_database())"
        )
        assert locks == 0


async def test_store_that_is_not_there_is_unavailable(database: str) -> None:
    gone = Store(database.replace("host=", "host=/nowhere"))
    with pytest.raises(StoreUnavailable):
        await open_driven(gone)


async def test_claim_of_a_stranger_without_tables_creates_them(store: Store) -> None:
    connection = await store.connect_writer(5)
    with pytest.raises(asyncpg.UndefinedTableError):
        await claim_partition(connection, 5, "broker-0")
    await connection.close()
    await store.create_partition(5)
    await store.create_partition(5)
    connection = await store.connect_writer(5)
    assert (await claim_partition(connection, 5, "broker-0")).epoch == 1
    await connection.close()
