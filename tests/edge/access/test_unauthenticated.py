"""Cost limits of unauthenticated clients: time, requests, and heap."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc

import pytest
from aiohttp import web

from postbus.edge.amqp.listener import UNAUTHENTICATED_BYTES, UNAUTHENTICATED_LINKS
from postbus.edge.web import http_server
from tests.edge.front_rig import GET_HEALTH, HOST, front, hangs_up, wait_a_moment, wait_until
from tests.edge.hung_up import (
    PIECE_BYTES,
    attach,
    half_a_head,
    half_a_transfer,
    heads,
    nested_lists,
    opened,
    refused_tokens,
    transfer,
)

MOST_BYTES = 256 << 10
CLIENTS = 20


class Slow:
    """Answers on request, and counts requests."""

    def __init__(self) -> None:
        self.requested = 0
        self.answer = asyncio.Event()

    async def handle(self, _request: web.BaseRequest) -> web.StreamResponse:
        self.requested += 1
        await self.answer.wait()
        return web.Response()


POST = f"POST /q/messages HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n\r\n".encode()


def test_http_client_without_a_key_has_one_request_at_a_time(runner: asyncio.Runner) -> None:
    async def run() -> None:
        slow = Slow()
        async with front(runtime=slow) as listeners:
            port = await listeners.listen(HOST, 0)
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(POST)
            await wait_until(lambda: slow.requested == 1)
            writer.write(POST)
            await wait_a_moment()
            slow.answer.set()
            async with asyncio.timeout(5):
                answered = await reader.read()
            assert answered.count(b"HTTP/1.1 200 ") == slow.requested == 1
            writer.close()

    runner.run(run())


def test_http_client_without_a_key_has_twenty_seconds(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it repeats requests that need no key; a request in flight is answered."""
    assert http_server.UNAUTHENTICATED_S == 20.0
    monkeypatch.setattr(http_server, "UNAUTHENTICATED_S", 0.2)

    async def run() -> None:
        slow = Slow()
        async with front(runtime=slow) as listeners:
            port = await listeners.listen(HOST, 0)
            idle, idle_writer = await asyncio.open_connection(HOST, port)
            idle_writer.write(GET_HEALTH)
            busy, busy_writer = await asyncio.open_connection(HOST, port)
            busy_writer.write(POST)
            assert await hangs_up(idle)
            slow.answer.set()
            assert (await busy.read()).startswith(b"HTTP/1.1 200 ")
            idle_writer.close()
            busy_writer.close()

    runner.run(run())


def waiting_heads(_port: int) -> bytes:
    """Requests behind one that is not answered yet."""
    return POST[:-2] + b"x: " + b"y" * 50_000 + b"\r\n\r\n" + POST * 1_000


def many_links(_port: int) -> bytes:
    return opened(0) + b"".join(map(attach, range(UNAUTHENTICATED_LINKS)))


def many_values(_port: int) -> bytes:
    links = [
        attach(handle, properties=nested_lists(2_000)) for handle in range(UNAUTHENTICATED_LINKS)
    ]
    return opened(0) + b"".join(links)


def long_partial(_port: int) -> tuple[bytes, bytes]:
    count = (UNAUTHENTICATED_BYTES - 20_000) // PIECE_BYTES
    return opened(0) + attach(0), transfer(0, more=True) * count


async def settled_bytes() -> int:
    """Return the allocated memory when it does not change any more."""
    held, before = tracemalloc.get_traced_memory()[0], -1
    while abs(held - before) > 1_000:
        before = held
        for _ in range(10):
            await wait_a_moment()
        held = tracemalloc.get_traced_memory()[0]
    return held


@pytest.mark.slow
@pytest.mark.parametrize(
    "state",
    [
        half_a_head,
        heads,
        waiting_heads,
        half_a_transfer,
        refused_tokens,
        many_links,
        many_values,
        long_partial,
    ],
    ids=lambda state: state.__name__,
)
def test_heap_of_a_client_without_a_key(state) -> None:  # type: ignore[no-untyped-def]
    """Counted over many clients that stay: no more than 256 KiB for each."""

    async def run() -> int:
        slow = Slow()
        held = 0
        async with front(runtime=slow) as listeners:
            port = await listeners.listen(HOST, 0)
            sent = state(port)
            first, *more = (sent,) if isinstance(sent, bytes) else sent
            clients = [socket.create_connection((HOST, port)) for _ in range(CLIENTS)]
            await wait_until(lambda: listeners.connection_count == CLIENTS)
            tracemalloc.start()
            for data in (first, *more):
                for client in clients:
                    await asyncio.to_thread(client.sendall, data)
                held = await settled_bytes()
            tracemalloc.stop()
            for client in clients:
                client.close()
            slow.answer.set()
            await wait_until(lambda: listeners.connection_count == 0)
            return held // CLIENTS

    with asyncio.Runner() as runner:
        held = runner.run(run())
    assert held < MOST_BYTES, held
