"""Connections of a store: a paused, disconnected or slow one does not block another."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import uvloop

from postbus.contract.entities import Sku
from postbus.entity.outcomes import SettleRows, Settling
from postbus.store import connections as connections_module
from postbus.store import postgres as postgres_module
from postbus.store.addresses import Address, Addresses
from postbus.store.beats import _living
from postbus.store.errors import Connection, StoreError, StoreUnavailable
from postbus.store.namespace import NamespaceStore
from postbus.store.postgres import Store
from tests.store.driving import driven, insert, open_driven, outcome, wait_until
from tests.store.relay import Relay, relaying

SIDE = "postbus side"
COMMIT = b"COMMIT;\0"


async def test_a_broker_paused_while_it_reaps_delays_no_claim(database: str) -> None:
    """Its transaction only lacks the COMMIT; the claim terminates it."""
    async with relaying(database) as (relay, dsn):
        paused, other = Store(dsn), Store(database)
        async with driven(paused) as it:
            await it.commit(outcome([insert(1)]), outcome(mutations=[settled(1)]))
            relay.pause_at = SIDE, COMMIT
            reaping = asyncio.create_task(it.journal.upkeep(2_000_000_000_000))
            await relay.paused.wait()
            _living.clear()  # as if it were another process, and killed
            async with asyncio.timeout(2.0):
                claimed = await open_driven(other)
            await claimed.journal.close()
            reaping.cancel()
            it.journal.abandon()
        await paused.close()
        await other.close()


def settled(row_key: int) -> SettleRows:
    return SettleRows(1, [row_key], Settling.COMPLETED, 1)


@pytest.mark.slow
async def test_a_start_paused_in_a_transaction_delays_another_briefly(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = {"idle_in_transaction_session_timeout": "500"}
    monkeypatch.setattr(
        connections_module, "SERVER_SETTINGS", connections_module.SERVER_SETTINGS | idle
    )
    async with relaying(database) as (relay, dsn):
        paused, other = Store(dsn), Store(database)
        await paused.open()
        relay.pause_at = SIDE, COMMIT
        recording = asyncio.create_task(NamespaceStore(paused).shape(Sku.PREMIUM, 1))
        await relay.paused.wait()
        async with asyncio.timeout(5.0):
            await NamespaceStore(other).shape(Sku.PREMIUM, 1)
        recording.cancel()
        await paused.close()
        await other.close()


async def test_a_partition_is_claimed_while_other_work_of_the_store_takes_long(
    store: Store,
) -> None:
    await store.open()
    async with store.aside(), store.vacuuming(), asyncio.timeout(5.0), driven(store) as it:
        await it.commit(outcome([insert(1)]))


async def test_silently_lost_database_fails_side_connections_within_seconds(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_module, "SIDE_S", 0.2)
    monkeypatch.setattr(postgres_module, "READ_S", 0.2)
    monkeypatch.setattr(connections_module, "CONNECT_S", 0.5)
    async with relaying(database) as (relay, dsn):
        store = Store(dsn)
        await store.open()
        for lend in (store.aside, store.reading):
            relay.is_silent = False
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await ask(lend, relay)
            with pytest.raises(StoreUnavailable):  # and again, by a connection that is not made
                await ask(lend, relay)
            assert time.monotonic() - started < 5.0
            relay.is_silent = False
            async with lend() as connection:
                assert await connection.fetchval("select 1") == 1
        await store.close()


async def test_a_use_that_is_cancelled_ends_so_though_the_rollback_fails(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that goes on after its cancellation would delay a stop."""
    monkeypatch.setattr(postgres_module, "SIDE_S", 0.2)
    async with relaying(database) as (relay, dsn):
        store = Store(dsn)
        await store.open()
        used = asyncio.create_task(ask(store.aside, relay))
        async with asyncio.timeout(5.0):
            while not relay.is_silent:
                await asyncio.sleep(0)
        used.cancel()
        with pytest.raises(asyncio.CancelledError):
            await used
        relay.is_silent = False
        async with store.aside() as connection:
            assert await connection.fetchval("select 1") == 1
        await store.close()


async def ask(lend: Callable[[], AbstractAsyncContextManager[Connection]], relay: Relay) -> None:
    async with lend() as connection, connection.transaction():
        relay.is_silent = True
        await connection.fetchval("select 1")


async def test_both_sides_of_a_connection_detect_a_lost_peer(database: str) -> None:
    async with relaying(database, over_tcp=True) as (_, dsn):
        store = Store(dsn)
        writer = await store.connect_writer(0)
        try:
            for lend in (lent(writer), store.aside(), store.reading(), store.vacuuming()):
                async with lend as connection:
                    driven: Any = connection
                    found = driven._transport.get_extra_info("socket")
                    assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
                    options.append(socket.TCP_USER_TIMEOUT)
                    values = [found.getsockopt(socket.IPPROTO_TCP, option) for option in options]
                    assert values == [3, 1, 3, 6_000]
                    names = connections_module.SERVER_SETTINGS
                    sources = await connection.fetch(
                        "select name, source from pg_settings where name = any ($1)", list(names)
                    )
                    assert {row["name"]: row["source"] for row in sources} == dict.fromkeys(
                        names, "client"
                    )
        finally:
            writer.terminate()
            await store.close()


@asynccontextmanager
async def lent(connection: Connection) -> AsyncIterator[Connection]:
    yield connection


async def test_a_transaction_of_a_cancelled_task_does_not_affect_the_next(
    database: str,
) -> None:
    """Cancelled at each step of a transaction; others see the commit of the next one."""
    store, other = Store(database), Store(database)
    await store.open()
    async with store.aside() as connection:
        await connection.execute("create table written (number integer)")
    for steps in range(40):
        cut_short = asyncio.create_task(write(store, -1))
        for _ in range(steps):
            await asyncio.sleep(0)
        cut_short.cancel()
        await asyncio.wait({cut_short})
        await write(store, steps)
        async with other.aside() as connection:
            seen = await connection.fetch("select number from written where number >= 0")
        assert {row["number"] for row in seen} == set(range(steps + 1))
    await store.close()
    await other.close()


async def write(store: Store, number: int) -> None:
    async with store.aside() as connection, connection.transaction():
        await connection.execute("insert into written values ($1)", number)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("target", ["db..internal", "x" * 64, "127.0.0.1:99999", "db%00", "db\0"])
def test_a_host_or_port_that_is_none_is_an_error_of_the_store(
    target: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def open_store() -> None:
        with pytest.raises(StoreError, match=r"host or port$|gaierror|refused") as caught:
            await Store(f"postgresql://bus:hidden@{target}/bus").open()
        assert "hidden" not in str(caught.value)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(open_store())


async def test_a_dropped_connection_is_an_error_of_the_store(database: str) -> None:
    """Dropped before each call of the event loop: also between two steps of the driver."""
    shared = connections_module.SharedConnection(
        lambda: connections_module.connect(database, "dropped", {})
    )

    async def read() -> None:
        async with shared.use() as connection:
            for number in range(3):
                await connection.fetch("select $1::integer", number)

    is_dropped = False
    for steps in itertools.count():
        await read()
        reading = asyncio.create_task(read())
        for _ in range(steps):
            await asyncio.sleep(0)
        shared.drop()
        await asyncio.wait({reading})
        if reading.exception() is None and is_dropped:
            break
        is_dropped = is_dropped or reading.exception() is not None
        assert isinstance(reading.exception(), StoreUnavailable | None)
    await shared.close()


async def test_an_address_that_changes_while_it_is_checked_is_not_used(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with relaying(database) as (former, through), relaying(database) as (_, now_through):
        addresses = Addresses([database], lambda: addresses.dsns)
        store = Store(Address(addresses, 0))
        await store.open()
        addresses.dsns = [through]
        check = store._check_server

        async def change(connection: Connection) -> None:
            monkeypatch.undo()
            addresses.dsns = [now_through]
            await store.sample_clock_ms()  # uses the new address
            await check(connection)

        monkeypatch.setattr(store, "_check_server", change)
        with pytest.raises(StoreUnavailable, match="changed meanwhile"):
            await store.connect_writer(0)
        await wait_until(lambda: asyncio.sleep(0, former.open_count == 0))
        await store.close()
