"""Each database keeps the time of its own partitions; a wrong one moves none of the others."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest
from azure.servicebus import ServiceBusReceivedMessage

from postbus.assembly.bus import Bus
from postbus.broker.partition.clock import ClockMode
from postbus.process.data_directory import DataDirectory
from postbus.process.embedded import EmbeddedPostgres
from postbus.process.settings import Settings
from tests.broker.brokers_rig import PORTS, client_of, definition, send
from tests.conftest import dsn_of, make_database, run_psql

pytestmark = pytest.mark.slow

HERE, THERE = "invoices", "letters"
"""Queues with partitions in the first and in the second of two databases."""

HOUR_S = 3_600
LOCK_S = 60
NUMBERS = itertools.count(1)


@pytest.fixture
def dsns(postgres_server: EmbeddedPostgres) -> Iterator[list[str]]:
    names = [f"clocks_{next(NUMBERS)}" for _ in range(2)]
    for name in names:
        make_database(postgres_server, name)
    yield [dsn_of(postgres_server, name) for name in names]
    for name in names:
        run_psql(postgres_server, f"drop database {name} with (force)")


async def set_clock(dsn: str, by_s: int) -> None:
    """Shift the time of a database, like that of a server with a wrong clock."""
    connection = await asyncpg.connect(dsn)
    name = await connection.fetchval("select current_database()")
    await connection.execute(f"""
        create schema wrong;
        create function wrong.clock_timestamp() returns timestamptz language sql volatile
        as 'select pg_catalog.clock_timestamp() + interval ''{by_s} s''';
        alter database {name} set search_path = wrong, pg_catalog, public;
    """)
    await connection.close()


def bus_of(data: DataDirectory, dsns: list[str], mode: ClockMode | None = None) -> Bus:
    settings = Settings.model_validate(
        dict.fromkeys(PORTS, 0) | {"stores": " ".join(dsns), "grace_s": 1.0}
    )
    return Bus(settings, definition(HERE, THERE), data, is_embedded=False, dev_clock=mode)


async def ahead_s(bus: Bus, queue: str) -> tuple[float, float]:
    """Send and lock a message; return how far its two times are ahead."""
    await send(bus, queue, "body")
    async with client_of(bus) as client, client.get_queue_receiver(queue) as receiver:
        (message,) = await receiver.receive_messages(1, max_wait_time=20)
        assert isinstance(message, ServiceBusReceivedMessage)
        now = datetime.now(UTC)
        assert message.enqueued_time_utc is not None
        assert message.locked_until_utc is not None
        return (
            (message.enqueued_time_utc - now).total_seconds(),
            (message.locked_until_utc - now).total_seconds() - LOCK_S,
        )


@pytest.mark.parametrize("wrong_s", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize("which", [0, 1])
async def test_a_database_with_a_wrong_clock_moves_the_time_of_its_own_partitions_only(
    dsns: list[str], wrong_s: int, which: int
) -> None:
    await set_clock(dsns[which], wrong_s)
    with (
        tempfile.TemporaryDirectory(prefix="postbus-test-") as folder,
        DataDirectory(Path(folder) / "bus") as data,
    ):
        bus = bus_of(data, dsns)
        try:
            await bus.start()
            wrong, right = (HERE, THERE) if which == 0 else (THERE, HERE)
            for queue, expected_s in ((right, 0), (wrong, wrong_s)):
                for found_s in await ahead_s(bus, queue):
                    assert abs(found_s - expected_s) < 60, queue
                await send(bus, queue, "waits")
            ages = {each.name: each.oldest_ms for each in (await bus.sample()).entities}
            now_ms = (await bus.sample()).now_ms
            for queue in (HERE, THERE):
                assert ages[queue] is not None
                assert 0 <= now_ms - ages[queue] < 60_000, queue
        finally:
            await bus.stop()


async def test_time_that_is_moved_by_hand_is_one_for_all_databases(dsns: list[str]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="postbus-test-") as folder,
        DataDirectory(Path(folder) / "bus") as data,
    ):
        bus = bus_of(data, dsns, ClockMode.MANUAL)
        try:
            await bus.start()
            assert len({id(host.clock) for host in bus._hosts}) == 1
        finally:
            await bus.stop()
