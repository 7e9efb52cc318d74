"""One bus a run, fresh queues a test; see bus_thread.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop
from azure.servicebus import ServiceBusClient

from postbus.contract.entities import LIMITS, Sku
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.bus_thread import BusThread


@pytest.fixture(scope="session")
def running_bus(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BusThread]:
    make_database(postgres_server, "edge", template=TEMPLATE)
    bus = BusThread(dsn_of(postgres_server, "edge"), tls=tmp_path_factory.mktemp("tls"))
    bus.start()
    yield bus
    bus.stop()


@pytest.fixture(scope="session")
def premium_bus(postgres_server: EmbeddedPostgres) -> Iterator[BusThread]:
    """A bus with messages of up to 100 MB."""
    make_database(postgres_server, "edge_premium", template=TEMPLATE)
    bus = BusThread(dsn_of(postgres_server, "edge_premium"), LIMITS[Sku.PREMIUM])
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
def queue(bus: BusThread) -> str:
    return bus.queue()


@pytest.fixture
def client(bus: BusThread) -> Iterator[ServiceBusClient]:
    with bus.client() as opened:
        yield opened


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Both event loops: they switch protocols and speak TLS in different ways."""
    with asyncio.Runner(loop_factory=request.param) as made:
        yield made
