"""A password of the database changes under load: the file is read again, nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.exceptions import ServiceBusError

from postbus.assembly.bus import Bus
from postbus.process.data_directory import DataDirectory
from postbus.process.embedded import EmbeddedPostgres
from postbus.process.settings import Settings
from postbus.store import connections
from tests.assembly.stores_rig import Database, Mount, ask_for_passwords
from tests.broker.brokers_rig import PORTS, client_of, definition
from tests.broker.partition.test_host import until
from tests.store.relay import relaying

pytestmark = pytest.mark.slow

HERE, THERE = "invoices", "letters"
"""Queues with partitions in the first and in the second of two databases."""


@pytest.fixture(scope="module")
def servers(server_folder: Path) -> Iterator[list[EmbeddedPostgres]]:
    made = [EmbeddedPostgres(server_folder / f"scram-{n}", major=16) for n in range(2)]
    for server in made:
        server.start()
        ask_for_passwords(server)
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def databases(servers: list[EmbeddedPostgres]) -> list[Database]:
    return [Database(server) for server in servers]


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    (tmp_path / "mount").mkdir()
    return Mount(tmp_path / "mount")


@asynccontextmanager
async def running(folder: Path, mount: Mount) -> AsyncIterator[Bus]:
    values = dict.fromkeys(PORTS, 0) | {"stores_file": mount.file, "grace_s": 1.0}
    with DataDirectory(folder / "bus") as data:
        bus = Bus(Settings.model_validate(values), definition(HERE, THERE), data, is_embedded=False)
        await bus.start()
        try:
            yield bus
        finally:
            await bus.stop()


class Load:
    """Clients that send to each queue as fast as they are answered, and what was accepted."""

    def __init__(self, bus: Bus) -> None:
        self.accepted: dict[str, list[str]] = {HERE: [], THERE: []}
        self.refusals = dict.fromkeys(self.accepted, 0)
        self.is_over = False
        """Set before the cancellation, which `wait_for` of Python 3.11 may swallow in the SDK."""
        self._bus = bus

    async def send(self, queue: str) -> None:
        for number in itertools.count():
            async with client_of(self._bus) as client, client.get_queue_sender(queue) as sender:
                try:
                    for attempt in itertools.count():
                        if self.is_over:
                            return
                        body = f"{number}.{attempt}"
                        await sender.send_messages(ServiceBusMessage(body))
                        self.accepted[queue].append(body)
                except ServiceBusError:
                    self.refusals[queue] += 1

    async def progress(self, *queues: str, count: int = 50) -> None:
        """Wait until more messages were accepted in each of the queues."""
        before = {queue: len(self.accepted[queue]) for queue in queues or self.accepted}
        await until(lambda: all(len(self.accepted[q]) >= n + count for q, n in before.items()))


@asynccontextmanager
async def loaded(bus: Bus) -> AsyncIterator[Load]:
    """Send meanwhile; then check that every accepted message is there."""
    load = Load(bus)
    sending = [asyncio.create_task(load.send(queue)) for queue in (HERE, THERE)]
    try:
        await load.progress()
        yield load
        await load.progress()
    finally:
        load.is_over = True
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    for queue, accepted in load.accepted.items():
        assert set(accepted) <= await drained(bus, queue)


async def drained(bus: Bus, queue: str) -> set[str]:
    bodies: set[str] = set()
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    async with (
        client_of(bus) as client,
        client.get_queue_receiver(queue, receive_mode=mode) as receiver,
    ):
        while messages := await receiver.receive_messages(500, max_wait_time=2):
            bodies |= {str(message) for message in messages}
    return bodies


def shown(bus: Bus) -> str:
    return "\n".join(bus.readiness.troubles())


async def test_a_changed_password_needs_no_restart(
    databases: list[Database],
    mount: Mount,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "postbus")
    database = databases[0]
    mount.write("# the only one", database.dsn)
    async with running(tmp_path, mount) as bus, loaded(bus) as load:
        # The file changes before it is needed.
        database.change_password()
        mount.write(database.dsn)
        await load.progress()
        assert load.refusals == {HERE: 0, THERE: 0}  # connections outlive their password
        database.end_connections()
        await load.progress()
        await until(lambda: not shown(bus))
        # The file changes too late, first to something unusable.
        database.change_password()
        database.end_connections()
        waiting = r'InvalidPasswordError: .*user "bus"; waiting for another address in POSTBUS_S'
        await until(lambda: re.search(waiting, shown(bus)))
        mount.write(database.dsn, database.dsn)
        await until(lambda: "number of addresses: 2 instead of 1; list all" in shown(bus))
        mount.write("bus:hidden@db")
        await until(lambda: "line 1 is not one address" in shown(bus))
        assert "bus:hidden" not in shown(bus)
        mount.write("postgresql://bus:hidden0@db..internal/bus")
        await until(lambda: "no valid host or port; waiting for another address" in shown(bus))
        mount.write(database.dsn)
        await load.progress()
        await until(lambda: not shown(bus))
    problems = [r for r in caplog.records if "file of addresses" in r.message]
    assert {record.levelno for record in problems} == {logging.ERROR}
    assert not [r for r in caplog.records if re.search(r"hidden\d", f"{vars(r)}{r.exc_text}")]


async def test_one_of_two_databases_changes_its_password(
    databases: list[Database], mount: Mount, tmp_path: Path
) -> None:
    mount.write(*(database.dsn for database in databases))
    async with running(tmp_path, mount) as bus, loaded(bus) as load:
        databases[1].change_password()
        databases[1].end_connections()
        await until(lambda: "POSTBUS_STORES_FILE" in shown(bus))
        await load.progress(HERE)
        mount.write(*(database.dsn for database in databases))
        await load.progress(THERE)
        await until(lambda: not shown(bus))
        assert load.refusals[HERE] == 0
        assert load.refusals[THERE] > 0


async def test_a_database_moves_with_all_connections(
    databases: list[Database], mount: Mount, tmp_path: Path
) -> None:
    database = databases[0]
    async with relaying(database.dsn) as (relay, through):
        mount.write(through)
        async with running(tmp_path, mount) as bus, loaded(bus):
            assert relay.open_count > 2
            database.change_password()
            mount.write(database.dsn)
            database.end_connections("postbus beat")  # only its next connection is refused
            await until(lambda: relay.open_count == 0)


async def test_an_address_of_another_store_is_not_used(
    databases: list[Database],
    mount: Mount,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database, other = databases
    monkeypatch.setattr(connections, "CONNECT_S", 0.5)
    mount.write(database.dsn)
    async with running(tmp_path, mount) as bus, loaded(bus) as load:
        database.change_password()
        mount.write(other.dsn)
        database.end_connections()
        await until(lambda: "the new address leads to another store: correct it" in shown(bus))
        mount.write(database.dsn)
        await load.progress()
        await until(lambda: not shown(bus))
    connection = await asyncpg.connect(other.dsn)
    schemas = "select count(*) from pg_namespace where nspname like 'partition%' or nspname = $1"
    assert await connection.fetchval(schemas, "postbus") == 0
    await connection.close()
