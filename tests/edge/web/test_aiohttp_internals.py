"""aiohttp still behaves as edge/web/aiohttp_internals.py expects; on real sockets of both loops."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from postbus.edge.web.aiohttp_internals import AiohttpConnection, MalformedRequest, unmask
from tests.edge.front_rig import HOST, wait_until

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "dataplane" / "postbus"
LOG = logging.getLogger(__name__)

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\n"
UPGRADE = GET[:-2] + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
NO_HTTP = b"\x00\x01 is no request\r\n\r\n"

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(
    answer: Answer,
) -> AsyncIterator[tuple[list[AiohttpConnection], asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve with the bare class; yields its connections and the streams of one client."""
    loop = asyncio.get_running_loop()
    server = web.Server(answer, handler_cancellation=True)
    made: list[AiohttpConnection] = []

    def connect() -> AiohttpConnection:
        made.append(AiohttpConnection(server, loop=loop, access_log=None, logger=LOG))
        return made[-1]

    listening = await loop.create_server(connect, HOST, 0)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(HOST, listening.sockets[0].getsockname()[1])
        yield made, reader, writer
        writer.close()
        listening.close()
        await server.shutdown(1.0)


class Sink(asyncio.Protocol):
    """Collects bytes after a connection was detached."""

    def __init__(self, early: bytes) -> None:
        self.data = early

    def data_received(self, data: bytes) -> None:
        self.data += data


async def accept(_request: web.BaseRequest) -> web.StreamResponse:
    return web.Response()


# --- masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*range(20), 125, 65_535, 1 << 20])
def test_mask_is_undone_in_place(size: int) -> None:
    mask = b"\x01\x02\xfe\x80"
    data = bytearray(at % 251 for at in range(size))
    expected = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
    unmask(mask, data)
    assert data == expected


# --- state of a connection ----------------------------------------------------------------------


def test_requests_that_wait_can_be_seen(runner: asyncio.Runner) -> None:
    async def run() -> None:
        may_end = asyncio.Event()

        async def answer(_request: web.BaseRequest) -> web.StreamResponse:
            await may_end.wait()
            return web.Response()

        async with served(answer) as (made, reader, writer):
            await wait_until(lambda: made)
            connection = made[0]
            assert (connection.is_answering, connection.head_count) == (False, 0)
            assert connection.newest_body is None
            writer.write(GET)
            await wait_until(lambda: connection.is_answering)
            assert (connection.has_waiting_requests, connection.head_count) == (False, 1)
            writer.write(POST)
            await wait_until(lambda: connection.has_waiting_requests)
            body = connection.newest_body
            assert body is not None
            assert (connection.head_count, body.is_eof()) == (2, False)
            writer.write(b"12345")
            await wait_until(body.is_eof)
            assert not connection.is_upgraded
            may_end.set()
            for _ in range(2):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await wait_until(lambda: not connection.is_answering)
            assert not connection.has_waiting_requests

    runner.run(run())


def test_lost_connection_forgets_requests_that_wait(runner: asyncio.Runner) -> None:
    async def run() -> None:
        async def answer(_request: web.BaseRequest) -> web.StreamResponse:
            return await asyncio.get_running_loop().create_future()

        async with served(answer) as (made, _, writer):
            writer.write(GET + GET)
            await wait_until(lambda: made and made[0].has_waiting_requests)
            writer.transport.abort()
            await wait_until(lambda: not made[0].has_waiting_requests)

    runner.run(run())


@pytest.mark.parametrize("sent", [NO_HTTP, UPGRADE + NO_HTTP])
def test_error_of_a_malformed_request_refers_to_no_frames(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    async def run() -> None:
        async with served(accept) as (_, reader, writer):
            writer.write(sent)
            assert b" 400 Bad Request\r\n" in await reader.read()

    with caplog.at_level(logging.DEBUG, LOG.name):
        runner.run(run())
    (logged,) = (each.exc_info for each in caplog.records if each.name == LOG.name)
    assert logged is not None
    assert isinstance(logged[1], MalformedRequest)
    assert logged[2] is None


# --- leaving aiohttp ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 8, 300_000], ids=["nothing", "a header", "more than is read"])
def test_detached_transport_stays_open_and_loses_no_byte(runner: asyncio.Runner, size: int) -> None:
    tail = bytes(at % 251 for at in range(size))

    async def run() -> None:
        sinks: list[Sink] = []

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            connection, transport = request.protocol, request.transport
            assert isinstance(connection, AiohttpConnection)
            assert transport is not None
            assert connection.is_upgraded
            if size > 64 << 10:
                await wait_until(lambda: not transport.is_reading())
            sinks.append(Sink(connection.detach()))
            transport.pause_reading()
            transport.set_protocol(sinks[0])
            transport.resume_reading()
            transport.write(b"hello")
            return web.Response()

        async with served(answer) as (_, reader, writer):
            writer.write(UPGRADE + tail)
            assert await reader.readexactly(5) == b"hello"
            await wait_until(lambda: len(sinks[0].data) >= size)
            writer.write(b"later")
            await wait_until(lambda: sinks[0].data == tail + b"later")

    runner.run(run())


# --- other modules ------------------------------------------------------------------------------


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_other_modules_import_documented_names_of_aiohttp() -> None:
    documented = {"aiohttp", "aiohttp.web"}
    documented |= {f"aiohttp.{name}" for name in aiohttp.__all__}
    documented |= {f"aiohttp.web.{name}" for name in web.__all__}
    imported = {
        (path.name, name)
        for path in PACKAGE.rglob("*.py")
        for name in imported_names(path)
        if name.split(".")[0] == "aiohttp"
    }
    undocumented = {module for module, name in imported if name not in documented}
    assert undocumented == {"aiohttp_internals.py"}


def test_next_minor_version_of_aiohttp_is_not_installed_untried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = (
        each for each in project["optional-dependencies"]["dataplane"] if each.startswith("aiohttp")
    )
    major, minor, _ = aiohttp.__version__.split(".", 2)
    assert re.search(r"<[\d.]+", wanted)[0] == f"<{major}.{int(minor) + 1}"
