"""The listeners without a bus, for requests that do not reach the router; on both event loops."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from postbus.broker.access.authz import Authorizer
from postbus.broker.router import Router
from postbus.contract.entities import LIMITS, Sku
from postbus.edge.access.admission import AdmissionControl
from postbus.edge.amqp.listener import AmqpListener
from postbus.edge.amqp.subscription_rules import SubscriptionRules
from postbus.edge.amqp.websocket import WebSocketHandler
from postbus.edge.port_multiplexer import PortMultiplexer
from postbus.edge.web.http_server import HttpHandler, HttpServer
from tests.edge.bus_thread import RULES

HOST = "127.0.0.1"
AMQP_HEADER = b"AMQP\x03\x01\x00\x00"
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"


@asynccontextmanager
async def front(
    *,
    max_connections: int = 100,
    runtime: HttpHandler | None = None,
    admission_control: AdmissionControl | None = None,
) -> AsyncIterator[PortMultiplexer]:
    """The listeners without a bus: nothing here reaches the router."""
    async with asyncio.TaskGroup() as tasks:
        rules = cast(SubscriptionRules, None)
        router = cast(Router, None)
        amqp = AmqpListener(router, rules, Authorizer(RULES), LIMITS[Sku.STANDARD], tasks)
        websocket = WebSocketHandler(amqp)
        http = HttpServer("test-bus", runtime=runtime, websocket=websocket)
        opened = PortMultiplexer(
            amqp, http, tasks, max_connections=max_connections, admission_control=admission_control
        )
        yield opened
        await opened.close()
        await amqp.stop(1.0)
        await http.stop(1.0)
        assert opened.connection_count == len(opened.admission_control) == 0


async def wait_a_moment() -> None:
    """Let written bytes arrive separately."""
    await asyncio.sleep(0.01)


async def wait_until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.01)


async def answers_amqp(port: int, tls: ssl.SSLContext | None = None, *, step: int = 8) -> bool:
    """Send a protocol header in pieces of a size; return whether the broker answers it."""
    reader, writer = await asyncio.open_connection(HOST, port, ssl=tls)
    for start in range(0, 8, step):
        writer.write(AMQP_HEADER[start : start + step])
        await wait_a_moment()
    async with asyncio.timeout(5):
        found = await reader.readexactly(8)
    writer.close()
    return found == AMQP_HEADER


async def answers_http(
    port: int, tls: ssl.SSLContext | None = None, *, step: int = len(GET_HEALTH)
) -> bool:
    reader, writer = await asyncio.open_connection(HOST, port, ssl=tls)
    for start in range(0, len(GET_HEALTH), step):
        writer.write(GET_HEALTH[start : start + step])
        await wait_a_moment()
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read(1_000)
    writer.close()
    healthy = {"status": "healthy", "message": "Service is healthy."}
    return head.startswith(b"HTTP/1.1 200 ") and json.loads(body) == healthy


async def hangs_up(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(5):
        try:
            while await reader.read(65_536):
                pass
        except (ConnectionError, ssl.SSLError):
            pass
    return True
