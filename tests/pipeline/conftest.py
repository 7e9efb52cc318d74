from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.bus_thread import BusThread
from tests.pipeline.bulk_server import BulkServer
from tests.pipeline.lake import Lake
from tests.pipeline.stored_rows import sdk_row


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BulkServer]:
    """Two partitions with ten and five messages; the environment has the connection string."""
    rows = {
        0: [sdk_row(b"a%d" % number, position=number) for number in range(10)],
        1: [sdk_row(b"b%d" % number, position=100 + number) for number in range(5)],
    }
    with BulkServer(rows).running() as running:
        monkeypatch.setenv("POSTBUS_CONNECTION_STRING", running.connection_string)
        yield running


@pytest.fixture(scope="session")
def running_bus(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BusThread]:
    make_database(postgres_server, "pipeline", template=TEMPLATE)
    dsn, tls = dsn_of(postgres_server, "pipeline"), tmp_path_factory.mktemp("tls")
    bus = BusThread(dsn, tls=tls, has_usual_port=False)
    bus.start()
    yield bus
    bus.stop()


@pytest.fixture
def bus(running_bus: BusThread) -> Iterator[BusThread]:
    """The bus; a test that makes it log an error fails."""
    running_bus.log.records.clear()
    yield running_bus
    running_bus.real_shift_s = 0.0
    assert running_bus.log.errors() == []


@pytest.fixture
def lake(bus: BusThread, tmp_path: Path) -> Lake:
    """A queue with the group `lake`, which begins with its first message."""
    found = Lake(bus, bus.queue(), tmp_path)
    found.create()
    return found
