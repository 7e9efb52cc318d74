"""A broker is ready while a partition can be used: with a store that stops, and one that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.broker.operate import readiness
from postbus.broker.operate.readiness import Readiness
from postbus.entity.commands import Refused, Tick
from postbus.process.embedded import EmbeddedPostgres
from postbus.store.incarnation import Broker, Process
from postbus.store.postgres import Store
from tests.broker.partition_rig import Bus, running
from tests.conftest import dsn_of
from tests.store.driving import wait_until

pytestmark = pytest.mark.slow


class Time:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def readiness_of(bus: Bus, *stores: Store, monotonic_s: Time | None = None) -> Readiness:
    made = Readiness(bus.hosts, lambda at: stores[at % len(stores)], monotonic_s or Time())
    made.is_open = True
    return made


@pytest.fixture(scope="module")
def server(server_folder: Path) -> Iterator[EmbeddedPostgres]:
    """A separate server, because the tests stop it."""
    made = EmbeddedPostgres(server_folder / "readiness", settings={"fsync": "off"})
    made.start()
    yield made
    made.stop()


async def test_unused_partitions_are_usable_while_their_store_answers(
    server: EmbeddedPostgres,
) -> None:
    store, clock = Store(dsn_of(server, "postgres"), unsafe=True), Time()
    async with running(store) as bus:
        ready = readiness_of(bus, store, monotonic_s=clock)
        assert await ready.is_ready()
        ready.is_open = False
        assert not await ready.is_ready()
        ready.is_open = True
        await asyncio.to_thread(server.stop)
        assert await ready.is_ready()  # an answer holds for a while
        clock.now_s += readiness.FRESH_S
        assert not await ready.is_ready()
        await asyncio.to_thread(server.start)
        clock.now_s += readiness.FRESH_S
        assert await ready.is_ready()
    await store.close()


async def test_a_partition_that_lost_its_store_is_no_longer_usable(
    server: EmbeddedPostgres,
) -> None:
    store, clock = Store(dsn_of(server, "postgres"), unsafe=True), Time()
    async with running(store, partition_count=2) as bus:
        ready = readiness_of(bus, store, monotonic_s=clock)
        await bus.load()
        assert await ready.is_ready()
        await asyncio.to_thread(server.stop)

        async def is_gone() -> bool:
            clock.now_s += readiness.FRESH_S
            return not await ready.is_ready()

        async def is_back() -> bool:
            clock.now_s += readiness.FRESH_S
            return await ready.is_ready() and all(host.is_loaded for host in bus.hosts)

        await wait_until(is_gone)
        await asyncio.to_thread(server.start)
        await wait_until(is_back)
    await store.close()


async def test_one_partition_in_trouble_takes_no_other_away(store: Store) -> None:
    async with running(store, partition_count=2) as bus:
        ready = readiness_of(bus, store)
        bus.hosts[0].interrupt(60)
        loading = asyncio.ensure_future(bus.hosts[0].call(Tick()))

        async def is_in_trouble() -> bool:
            return bus.hosts[0].trouble is not None

        await wait_until(is_in_trouble)
        assert await ready.is_ready()  # the other one was never used, and its store answers
        await bus.hosts[1].call(Tick())
        assert await ready.is_ready()
        await loading


async def test_no_partition_that_can_be_loaded_is_not_ready(store: Store) -> None:
    async with running(store, partition_count=2) as bus:
        ready = readiness_of(bus, store)
        for host in bus.hosts:
            host.interrupt(60)
        await asyncio.gather(*(host.call(Tick()) for host in bus.hosts))

        async def are_in_trouble() -> bool:
            return all(host.trouble is not None for host in bus.hosts)

        await wait_until(are_in_trouble)
        assert not await ready.is_ready()  # although the store answers


async def test_a_store_that_hangs_is_not_waited_for(server: EmbeddedPostgres) -> None:
    store, clock = Store(dsn_of(server, "postgres"), unsafe=True), Time()
    async with running(store) as bus:
        ready = readiness_of(bus, store, monotonic_s=clock)
        await wait_until(ready.is_ready)
        stopped = await _readers(store)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            clock.now_s += readiness.FRESH_S
            async with asyncio.timeout(readiness.PATIENCE_S + 5):  # less than a read may take
                assert not await ready.is_ready()
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        await wait_until(ready.is_ready)
    await store.close()


async def _readers(store: Store) -> list[int]:
    async with store.aside() as connection:
        found = await connection.fetch(
            "select pid from pg_stat_activity where application_name = 'postbus reader'"
        )
    return [row["pid"] for row in found]


async def test_a_stand_by_is_not_ready(store: Store, database: str) -> None:
    """Its unused partitions are available, but the entities of clients are with the owner."""
    elsewhere = Broker("broker-1", Process("elsewhere", 7))
    async with running(store) as owner:
        await owner.hosts[0].call(Tick())
        other = Store(database, broker=elsewhere)
        async with running(other) as bus:
            ready = readiness_of(bus, other)
            assert isinstance(await bus.hosts[0].call(Tick()), Refused)
            assert "waits: owned by broker-0, process" in str(bus.hosts[0].trouble)
            assert not await ready.is_ready()
            await owner.hosts[0].stop()

            async def is_ready() -> bool:
                return bus.hosts[0].is_loaded and await ready.is_ready()

            await wait_until(is_ready)
        await other.close()
