"""Ownership of a partition: takeover, release, epochs, proofs (ADR 22)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from postbus.store import beats as beats_module
from postbus.store import claim as claim_module
from postbus.store.beats import CONFIRMATION_S, SILENCE_S
from postbus.store.claim import LOCK_CLASS, Slot, claim_partition, take_slot
from postbus.store.incarnation import Broker, Process, boottime_s
from postbus.store.postgres import Fenced, SchemaTooNew, Store, StoreUnavailable
from tests.store.driving import (
    Driven,
    block,
    connected,
    definition,
    driven,
    insert,
    make_partition,
    open_driven,
    outcome,
    reload,
    wait_until,
)


@pytest.fixture
async def other(database: str) -> AsyncIterator[Store]:
    """Return the store of another broker, on another machine."""
    opened = Store(database, broker=ELSEWHERE)
    yield opened
    await opened.close()


ELSEWHERE = Broker("broker-1", Process("elsewhere", 7))


async def test_epoch_grows_with_each_claim(store: Store) -> None:
    assert [(await reload(store)).epoch for _ in range(3)] == [1, 2, 3]


async def test_another_broker_waits_while_the_owner_is_alive(store: Store, other: Store) -> None:
    async with driven(store) as it:
        with pytest.raises(Fenced, match=r"owned by broker-0, process \d+ on host .*, running"):
            await open_driven(other)
        await it.commit(outcome([insert(1)]))


async def test_another_broker_claims_at_once_after_a_release(store: Store, other: Store) -> None:
    async with driven(store):
        pass
    assert (await reload(other)).epoch == 2


async def test_same_incarnation_claims_at_once_and_ends_its_former_journal(store: Store) -> None:
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
    """They may end each other's connections, but only one owns the partition."""
    monkeypatch.setattr(claim_module, "LOCK_MS", 200)
    machine = Process("elsewhere", 7)
    stores = [Store(database, broker=Broker(f"broker-{at}", machine)) for at in range(4)]
    tries = await asyncio.gather(*(open_driven(each) for each in stores), return_exceptions=True)
    owners = [found for found in tries if isinstance(found, Driven)]
    assert all(isinstance(found, Driven | StoreUnavailable) for found in tries)
    alive = []
    for owner in owners:
        owner.journal.submit(outcome(mutations=[definition(), block()]), None)
        await owner.seen.wait_for(lambda seen=owner.seen: bool(seen.released or seen.errors))
        if owner.seen.released:
            alive.append(owner)
    assert len(alive) <= 1
    for owner in owners:
        await owner.journal.close()
    for each in stores:
        await each.close()
    assert (await reload(store)).epoch >= 2


async def test_clock_is_never_below_the_persisted_time(store: Store) -> None:
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
    """A held lock simulates a backend that cannot be terminated: nothing is claimed."""
    monkeypatch.setattr(claim_module, "LOCK_MS", 100)
    monkeypatch.setattr(claim_module, "END_HOLDERS", "select $1::int, $2::int, $3::uuid")
    async with connected(database) as other:
        await other.execute(
            "select pg_advisory_lock($1, $2)", LOCK_CLASS | 0, int(Slot.SECOND_WRITER)
        )
        connection = await store.connect_writer(0)
        with pytest.raises(StoreUnavailable):
            await claim_partition(connection, 0, store.beats)
        await connection.close()
        assert await other.fetchval("select epoch from owner") == 0


OTHER_PROCESS = """
import asyncio, sys
from postbus.store.journal import Journal
from postbus.store.postgres import Store

async def main():
    journal, loaded = await Journal.open(
        Store(sys.argv[1]), 0, on_committed=print, on_failed=print
    )
    print(loaded.epoch, flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.fixture
def process(database: str) -> Iterator[subprocess.Popen[str]]:
    """Run another process that owns the partition under our name."""
    command = [sys.executable, "-c", OTHER_PROCESS, database]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        yield other
        other.kill()


@pytest.mark.slow
async def test_partition_of_a_killed_process_is_claimed_at_once_by_the_next_of_its_name(
    store: Store, other: Store, database: str, process: subprocess.Popen[str]
) -> None:
    with pytest.raises(Fenced):
        await open_driven(other)
    process.kill()  # and its exit code was not read
    async with asyncio.timeout(CONFIRMATION_S - 1.0):
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


async def test_claim_makes_the_tables_of_a_partition_that_has_none(store: Store) -> None:
    await store.open()
    connection = await store.connect_writer(5)
    assert (await claim_partition(connection, 5, store.beats)).epoch == 1
    await connection.close()
    await make_partition(store, 5)


@pytest.mark.slow
async def test_paused_process_of_our_name_keeps_the_partition_until_its_confirmation_ends(
    store: Store, process: subprocess.Popen[str]
) -> None:
    """The process exists, so nothing proves its end; its last confirmation counts for 3 s."""
    await store.open()
    await store.beats.begin()
    process.send_signal(signal.SIGSTOP)
    started = boottime_s()
    claims: list[Driven] = []

    async def is_claimed() -> bool:
        with suppress(Fenced):
            claims.append(await open_driven(store))
        return bool(claims)

    await wait_until(is_claimed)
    [claimed] = claims
    assert CONFIRMATION_S - 0.1 < boottime_s() - started < SILENCE_S + 2.0
    process.send_signal(signal.SIGCONT)
    await claimed.commit(outcome(mutations=[definition(), block()]))
    await claimed.journal.close()


async def test_broker_of_an_earlier_version_is_outwaited(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its heartbeat in the row of `owner`."""
    monkeypatch.setattr(beats_module, "SILENCE_S", 0.3)
    async with connected(database) as look:
        await look.execute(
            "update owner set is_released = false, broker_name = 'old', heartbeat_ms = 1"
        )
        with pytest.raises(Fenced, match="owned by old, of an earlier version"):
            await open_driven(store)
        store.beats._clock = lambda: boottime_s() + 1.0
        await look.execute("update owner set heartbeat_ms = 2")
        with pytest.raises(Fenced):
            await open_driven(store)
        store.beats._clock = lambda: boottime_s() + 2.0
        assert (await reload(store)).epoch == 1
