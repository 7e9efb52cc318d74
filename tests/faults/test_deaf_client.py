"""A client that grants unlimited credit and never reads: its cost for the broker and others."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database
from tests.edge.raw_client import RawClient, message
from tests.faults.kill_nine import MANIFEST, QUEUE
from tests.faults.test_paused_broker import connect, receive_and_complete
from tests.faults.victims import Broker

pytestmark = pytest.mark.slow

BODY_BYTES = 50_000
COUNT = 3_000
DEAF_CLIENTS = 4
MOST_BYTES = 64 << 20
"""Limit of memory for four such clients; the backlog they request has 150 MB."""


@pytest.fixture
def broker(postgres_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[Broker]:
    make_database(postgres_server, "deaf_client")
    environment = {"POSTBUS_WINDOW_BYTES": str(4 << 20)}  # the backlog itself costs next to nothing
    running = Broker(
        tmp_path, dsn_of(postgres_server, "deaf_client"), ["-m", "postbus"], MANIFEST, environment
    )
    running.start()
    yield running
    running.kill()


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def fill(client: RawClient, first: int, count: int) -> None:
    body = b"x" * BODY_BYTES
    for start in range(first, first + count, 50):
        names = range(start, start + 50)
        client.write(*[client.transfer(name, message(body, str(name))) for name in names])
        assert len(client.dispositions(50)) == 50


def test_deaf_clients_cost_little_and_others_are_served(broker: Broker) -> None:
    with connect(broker) as good, ExitStack() as stack:
        good.attach_sender(QUEUE)
        good.attach_receiver(QUEUE)
        fill(good, 0, COUNT)
        good.write(good.flow(50))
        served = {receive_and_complete(good) for _ in range(50)}
        before_bytes = resident_bytes(broker.process)
        for _ in range(DEAF_CLIENTS):
            deaf = stack.enter_context(connect(broker))
            deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            deaf.attach_receiver(QUEUE)
            deaf.write(deaf.flow(1_000_000, window=1_000_000))
        # Four connections hold some hundred messages; the good one gets a thousand meanwhile.
        for start in range(50, 1_050, 50):
            good.write(good.flow(50, count=start))
            served |= {receive_and_complete(good) for _ in range(50)}
        assert len(served) == 1_050
        fill(good, COUNT, 200)  # sends are taken as ever
        assert resident_bytes(broker.process) - before_bytes < MOST_BYTES
