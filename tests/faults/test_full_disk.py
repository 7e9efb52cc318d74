"""A full disk with the official SDK: errors, receives that continue, and recovery."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusReceiver, ServiceBusSender
from azure.servicebus.exceptions import ServiceBusQuotaExceededError

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, run_psql
from tests.edge.bus_thread import BusThread

pytestmark = pytest.mark.slow

DISK_MIB = 40
SPARE_BYTES = 600_000
"""Space left for the bus when the rest of the disk is used."""


class SmallDisk:
    """A separate file system for the tables; the log of Postgres is elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Use almost all space."""
        state = os.statvfs(self.folder)
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - SPARE_BYTES)

    def free(self) -> None:
        self._filler.unlink()

    def drop_catalog_cache(self) -> None:
        """Remove the file that each new connection to the database reads, or must write.

        Postgres does it itself when a system table changes, as after its VACUUM.
        """
        caches = list(self.folder.rglob("pg_internal.init"))
        assert caches
        for each in caches:
            each.unlink()


@pytest.fixture
def disk(postgres_server: EmbeddedPostgres, server_folder: Path) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = server_folder / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=755", "postbus", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        owner = (postgres_server.folder / "data").stat()
        tables = folder / "tables"
        tables.mkdir(mode=0o700)
        os.chown(tables, owner.st_uid, owner.st_gid)
        run_psql(postgres_server, f"create tablespace small location '{tables}'")
        run_psql(postgres_server, f"create database full_disk template {TEMPLATE} tablespace small")
        yield SmallDisk(folder)
    finally:
        run_psql(postgres_server, "drop database if exists full_disk with (force)")
        run_psql(postgres_server, "drop tablespace if exists small")
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.fixture
def bus(postgres_server: EmbeddedPostgres, disk: SmallDisk) -> Iterator[BusThread]:
    running = BusThread(dsn_of(postgres_server, "full_disk"))
    running.start()
    yield running
    running.stop()


def send_until_refused(sender: ServiceBusSender, first: int, count: int) -> int:
    """Send messages numbered from `first`; return the number accepted before a refusal."""
    for number in range(first, first + count):
        try:
            sender.send_messages(ServiceBusMessage(os.urandom(4_000), message_id=str(number)))
        except ServiceBusQuotaExceededError:
            return number - first
    return count


def receive_and_complete(
    receiver: ServiceBusReceiver, count: int, wait_s: float = 15.0
) -> list[int]:
    """Receive and complete; return the numbers of the messages.

    A partition that failed some times takes up to five seconds to come back.
    """
    numbers: list[int] = []
    while len(numbers) < count:
        found = receiver.receive_messages(count - len(numbers), max_wait_time=wait_s)
        assert found, f"{len(numbers)} of {count} came"
        for each in found:
            receiver.complete_message(each)
            numbers.append(int(each.message_id))
    return numbers


@pytest.mark.behaviour("S2", "S47", "S48")
def test_full_disk_refuses_sends_serves_receivers_and_loses_no_message(
    bus: BusThread, disk: SmallDisk
) -> None:
    queue = bus.queue()
    with (
        bus.client() as client,
        client.get_queue_sender(queue) as sender,
        client.get_queue_receiver(queue) as receiver,
    ):
        count = send_until_refused(sender, 0, 20)
        assert count == 20
        bus.reload(queue)
        completed = receive_and_complete(receiver, 5)
        disk.fill()
        count += send_until_refused(sender, count, 2_000)
        assert 20 < count < 2_020
        for _ in range(2):  # refused before a commit is tried, with a reason
            reloads = bus.reload_count(queue)
            assert send_until_refused(sender, count, 1) == 0
            assert bus.reload_count(queue) == reloads
        completed += receive_and_complete(receiver, 10)
        disk.free()
        sent = 0
        while not sent:  # until the bus has looked again
            sent = send_until_refused(sender, count, 20)
        count += sent
        completed += receive_and_complete(receiver, count - len(completed))
        assert sorted(completed) == list(range(count))
        assert count > 40
    assert bus.counts(queue).active == 0


@pytest.mark.behaviour("S2", "S47")
@pytest.mark.parametrize("has_catalog_cache", [True, False])
def test_full_disk_lets_receivers_continue_without_earlier_redeliveries(
    bus: BusThread, disk: SmallDisk, has_catalog_cache: bool
) -> None:
    queue = bus.queue()
    with (
        bus.client() as client,
        client.get_queue_sender(queue) as sender,
        client.get_queue_receiver(queue) as receiver,
    ):
        assert send_until_refused(sender, 0, 20) == 20
        disk.fill()
        if not has_catalog_cache:
            disk.drop_catalog_cache()
        send_until_refused(sender, 20, 2_000)
        assert send_until_refused(sender, 20, 1) == 0
        assert len(receive_and_complete(receiver, 10, wait_s=3.0)) == 10
