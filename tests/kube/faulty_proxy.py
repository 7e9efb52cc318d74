"""An HTTP proxy before the API server, or the control API of a bus, that fails as a test says.

It runs in the event loop of the test. Bodies and streams pass through unchanged, watches too.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import web
from kubernetes.aio.client import Configuration

WRITES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
OWN_HEADERS: Final = {"host", "transfer-encoding", "content-length", "connection"}
REASONS: Final = {
    409: "Conflict", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
    503: "ServiceUnavailable",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """A request as rules see it. `number`: its place among the writes, from 1; 0: a read."""

    method: str
    path: str
    query: str
    number: int

    @property
    def is_watch(self) -> bool:
        return "watch=true" in self.query


Answer = Callable[[web.Request], Any]
"""Makes an answer instead of the server, or raises."""


def status(code: int, **headers: str) -> Answer:
    """Return what answers with an error as the API server writes it."""
    said = {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
        "reason": REASONS[code], "message": f"the test says {code}",
    }  # fmt: skip

    async def answer(request: web.Request) -> web.Response:
        return web.Response(
            status=code, body=json.dumps(said), content_type="application/json", headers=headers
        )

    return answer


async def no_answer(request: web.Request) -> web.Response:
    """Leave a request without an answer until its client gives up."""
    await asyncio.Event().wait()
    raise AssertionError


async def broken_off(request: web.Request) -> web.Response:
    """End the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    raise ConnectionResetError


@dataclass
class FaultyProxy:
    """`instead` answers for a request; `after` is called when the server has answered a write."""

    url: str = ""
    instead: Callable[[Request], Answer | None] = lambda request: None
    after: Callable[[Request], None] = lambda request: None
    watches_speak: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set watches say nothing, those that are open, too."""

    writes: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)

    async def handle(self, request: web.Request, upstream: aiohttp.ClientSession) -> Any:
        """Pass a request on, or fail."""
        is_write = request.method in WRITES
        number = len(self.writes) + 1 if is_write else 0
        seen = Request(request.method, request.path, request.query_string, number)
        if is_write:
            self.writes.append(seen)
        instead = self.instead(seen)
        if instead is not None:
            self.failed.append(seen)
            return await instead(request)
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in OWN_HEADERS
        }
        body = await request.read() or None
        async with upstream.request(
            request.method, request.rel_url, headers=headers, data=body, allow_redirects=False
        ) as found:
            if seen.is_watch:
                return await self._pass_watch(request, found)
            data = await found.read()
        if is_write:
            self.after(seen)
        kept = {
            name: value for name, value in found.headers.items() if name.lower() not in OWN_HEADERS
        }
        return web.Response(status=found.status, body=data, headers=kept)

    async def _pass_watch(self, request: web.Request, found: aiohttp.ClientResponse) -> Any:
        answer = web.StreamResponse(status=found.status)
        answer.content_type = "application/json"
        await answer.prepare(request)
        async for data in found.content.iter_any():
            await self.watches_speak.wait()
            await answer.write(data)
        await answer.write_eof()
        return answer


@asynccontextmanager
async def faulty_proxy(
    target: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[FaultyProxy]:
    """Run a proxy before an address."""
    proxy = FaultyProxy()
    proxy.watches_speak.set()
    unlimited = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else True)
    async with aiohttp.ClientSession(
        target, connector=connector, timeout=unlimited, auto_decompress=False
    ) as upstream:

        async def handle(request: web.Request) -> Any:
            return await proxy.handle(request, upstream)

        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        proxy.url = f"http://127.0.0.1:{port}"
        try:
            yield proxy
        finally:
            await runner.cleanup()


@asynccontextmanager
async def proxied(
    configuration: Configuration,
) -> AsyncIterator[tuple[FaultyProxy, Configuration]]:
    """Run a proxy before the API server of a configuration; return one that leads to it."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    async with faulty_proxy(configuration.host, tls) as proxy:
        through = Configuration(host=proxy.url)
        through.api_key = configuration.api_key
        through.api_key_prefix = configuration.api_key_prefix
        through.refresh_api_key_hook = configuration.refresh_api_key_hook
        through.connection_pool_maxsize = configuration.connection_pool_maxsize
        yield proxy, through
