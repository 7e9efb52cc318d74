"""Memory and resources of a connection are released at its end, in every state."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from postbus.amqp.connection import Connection
from postbus.amqp.link import Link
from postbus.amqp.session import Session
from postbus.edge.access.admission import Admission
from postbus.edge.amqp.connection import AmqpConnection
from postbus.edge.amqp.listener import AmqpTransport
from postbus.edge.amqp.websocket import WebSocketTransport
from postbus.edge.port_multiplexer import Arrival
from postbus.edge.web.http_listener import HttpConnection
from tests.dev_bus import running_dev_bus
from tests.edge.front_rig import HOST, front, wait_until
from tests.edge.hung_up import STATES, State, hang_up

HELD = (
    AmqpConnection, AmqpTransport, Arrival, Connection, HttpConnection, Link, Session, Admission,
    WebSocketTransport,
)  # fmt: skip
"""The types of objects that form connections."""

CONNECTIONS = 500
WARM_UP = 50
KEPT_BYTES = 8 << 20


class NeverAnswers:
    """Messages over HTTP, while an answer is late."""

    async def handle(self, _request: web.BaseRequest) -> web.StreamResponse:
        return await asyncio.get_running_loop().create_future()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Disable the garbage collector and ignore remains of other tests."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    """Count the objects that form connections."""
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, HELD))


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.usefixtures("without_collector")
def test_connections_leave_no_reference_cycles(runner: asyncio.Runner, state: State) -> None:
    async def run() -> Counter[str]:
        async with front(runtime=NeverAnswers()) as listeners:
            port = await listeners.listen(HOST, 0)
            sent = state(port)
            for _ in range(3):
                await asyncio.to_thread(hang_up, port, sent)
            await wait_until(lambda: listeners.connection_count == 0)
            with suppress(TimeoutError):  # cancelled tasks take an iteration to end
                async with asyncio.timeout(1):
                    await wait_until(lambda: not alive())
            return alive()

    assert runner.run(run()) == Counter()


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) << 10


@pytest.mark.slow
def test_memory_returns_to_its_level_after_thousands_of_disconnects() -> None:
    with running_dev_bus() as bus:
        port = urlsplit(bus.http).port
        assert port is not None
        sent = {name: state(port) for name, state in STATES.items()}
        for each in sent.values():
            for _ in range(WARM_UP):
                hang_up(port, each)
        before = resident_bytes(bus.pid)
        grown = {}
        for name, each in sent.items():
            for _ in range(CONNECTIONS):
                hang_up(port, each)
            grown[name] = resident_bytes(bus.pid) - before
        assert max(grown.values()) < KEPT_BYTES, grown
