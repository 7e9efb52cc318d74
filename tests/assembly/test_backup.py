"""The backup guide, tried: its own commands copy a bus in use into a new server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient

from postbus.assembly.bus import Bus
from postbus.contract.entities import NamespaceProperties, QueueProperties, Right
from postbus.manifests.reader import BusDefinition, QueueDefinition, RuleDefinition, RuleKeys
from postbus.process.data_directory import DataDirectory
from postbus.process.embedded import EmbeddedPostgres, find_binaries
from postbus.process.settings import Settings
from tests.conftest import dsn_of, make_database

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "backup.md"
DEFINITION = BusDefinition(
    "test-bus",
    NamespaceProperties(),
    (RuleDefinition("root", frozenset(Right), RuleKeys("first", "second")),),
    (QueueDefinition("orders", QueueProperties(), ()),),
)
LATER = timedelta(hours=1)


def command_of_guide(program: str) -> str:
    """Return the shell block of the guide that starts with `program`."""
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"{program} ")]
    return str(block)


def run_command(program: str, folder: Path, major: int, **variables: str) -> None:
    binaries = find_binaries(major)
    assert binaries is not None
    done = subprocess.run(
        ["sh", "-ec", command_of_guide(program)],
        cwd=folder,
        env={"PATH": f"{binaries}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="postbus-test-") as name:
        yield Path(name)


def copy_keys(backup: Path, new: Path) -> None:
    """Put back the files beside the database that the guide names."""
    new.mkdir(mode=0o700)
    shutil.copy(backup / "sealing.key", new)


@asynccontextmanager
async def client_of_bus(folder: Path, stores: str) -> AsyncIterator[ServiceBusClient]:
    """Run a bus on a Postgres and lend a client of it."""
    settings = Settings.model_validate(
        {
            "stores": stores,
            "port": 0,
            "tls_port": 0,
            "http_port": 0,
            "metrics_port": 0,
            "control_port": 0,
            "grace_s": 1.0,
        }
    )
    with DataDirectory(folder) as data:
        bus = Bus(settings, DEFINITION, data, is_embedded=False)
        try:
            await bus.start()
            ((_, address),) = bus.connection_strings()
            async with ServiceBusClient.from_connection_string(address, retry_total=0) as client:
                yield client
        finally:
            await bus.stop()


async def epoch_of(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        (schema,) = await connection.fetch(
            "select nspname from pg_namespace where nspname ~ '^partition_' and exists "
            "(select from pg_class where relnamespace = pg_namespace.oid and relname = 'owner') "
            "and nspname = 'partition_' || (select home_partition from postbus.catalog)"
        )
        return int(await connection.fetchval(f"select epoch from {schema['nspname']}.owner"))
    finally:
        await connection.close()


async def receive(
    client: ServiceBusClient, count: int, sub_queue: ServiceBusSubQueue | None = None
) -> list[ServiceBusReceivedMessage]:
    """Receive and complete exactly `count` messages."""
    received: list[ServiceBusReceivedMessage] = []
    async with client.get_queue_receiver("orders", sub_queue=sub_queue) as receiver:
        while len(received) < count:
            messages = await receiver.receive_messages(count - len(received), max_wait_time=10)
            assert messages, f"{len(received)} of {count} arrived"
            for message in messages:
                await receiver.complete_message(message)
            received += messages
        if sub_queue is not None:
            assert await receiver.peek_messages(10) == []
    return received


async def test_backup_of_a_bus_in_use_is_restored(
    folder: Path, postgres_server: EmbeddedPostgres, database: str
) -> None:
    major = int((postgres_server.folder / "data" / "PG_VERSION").read_text())
    async with (
        client_of_bus(folder / "old", database) as client,
        client.get_queue_sender("orders") as sender,
        client.get_queue_receiver("orders") as receiver,
    ):
        for body in ("done", "deferred", "dead", "locked", "free"):
            await sender.send_messages(ServiceBusMessage(body))
        await sender.schedule_messages(ServiceBusMessage("later"), datetime.now(UTC) + LATER)
        held: dict[str, ServiceBusReceivedMessage] = {}
        while len(held) < 4:
            for message in await receiver.receive_messages(4 - len(held), max_wait_time=10):
                held[str(message)] = message
        await receiver.complete_message(held["done"])
        await receiver.defer_message(held["deferred"])
        await receiver.dead_letter_message(held["dead"], reason="why")
        highest = max(message.sequence_number or 0 for message in held.values()) + 1  # "free"
        run_command("pg_dump", folder, major, POSTBUS_STORES=database)
        epoch = await epoch_of(database)

    server = EmbeddedPostgres(folder / "new-postgres", major=major)
    server.start()
    try:
        make_database(server, "restored")
        restored = dsn_of(server, "restored")
        run_command("pg_restore", folder, major, NEW_STORES=restored)
        assert await epoch_of(restored) == epoch
        copy_keys(folder / "old", folder / "new")
        async with client_of_bus(folder / "new", restored) as client:
            async with client.get_queue_sender("orders") as sender:
                await sender.send_messages(ServiceBusMessage("new"))
            async with client.get_queue_receiver("orders") as receiver:
                shown = sorted(str(message) for message in await receiver.peek_messages(10))
                assert shown == ["deferred", "free", "later", "locked", "new"]
                number = held["deferred"].sequence_number
                assert number is not None
                (deferred,) = await receiver.receive_deferred_messages(number)
                assert str(deferred) == "deferred"
                await receiver.complete_message(deferred)
            messages = await receive(client, 3)
            assert [str(message) for message in messages] == ["locked", "free", "new"]
            assert (messages[-1].sequence_number or 0) > highest
            (dead,) = await receive(client, 1, ServiceBusSubQueue.DEAD_LETTER)
            assert (str(dead), dead.dead_letter_reason) == ("dead", "why")
        assert await epoch_of(restored) > epoch
    finally:
        server.stop()
