"""One of two databases is restored to an earlier moment: later messages are forwarded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from postbus.process.embedded import EmbeddedPostgres
from postbus.store.postgres import Store
from tests.broker.partition.test_shipping import arrived, named, put
from tests.broker.partition_rig import Bus, message, running
from tests.conftest import dsn_of, make_database, run_psql

pytestmark = pytest.mark.slow

FIRST, SECOND, BACKUP = "restore_first", "restore_second", "restore_backup"
TARGET, SOURCE = named(0, "target"), named(1, "source")


@pytest.fixture
def server(postgres_server: EmbeddedPostgres) -> Iterator[EmbeddedPostgres]:
    for name in (FIRST, SECOND):
        make_database(postgres_server, name)
    yield postgres_server
    for name in (FIRST, SECOND, BACKUP):
        run_psql(postgres_server, f"drop database if exists {name} with (force)")


@asynccontextmanager
async def bus_on(server: EmbeddedPostgres) -> AsyncIterator[Bus]:
    """Run a bus with the catalog and TARGET in the first database, SOURCE in the second."""
    stores = [Store(dsn_of(server, name)) for name in (FIRST, SECOND)]
    async with running(*stores) as bus:
        yield bus
    for store in stores:
        await store.close()


def copy_database(server: EmbeddedPostgres, source: str, copy: str) -> None:
    run_psql(server, f"drop database if exists {copy} with (force)")
    make_database(server, copy, template=source)


async def send(bus: Bus, *bodies: str) -> None:
    await bus.sent(bus.address(SOURCE), *map(message, bodies))


async def test_messages_of_a_restored_source_are_not_skipped_as_forwarded(
    server: EmbeddedPostgres,
) -> None:
    async with bus_on(server) as bus:
        await put(bus, TARGET)
        await put(bus, SOURCE, forward_to=TARGET)
        await send(bus, "1", "2")
        assert await arrived(bus, TARGET, 2) == ["1", "2"]
    copy_database(server, SECOND, BACKUP)
    async with bus_on(server) as bus:
        await send(bus, *"345")
        assert await arrived(bus, TARGET, 5) == [*"12345"]
    copy_database(server, BACKUP, SECOND)
    async with bus_on(server) as bus:
        await send(bus, *"67")
        assert await arrived(bus, TARGET, 7) == [*"1234567"]
