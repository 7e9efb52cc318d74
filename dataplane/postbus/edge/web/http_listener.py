"""Shared HTTP connections of bounded cost, and ports beside those of the bus.

`http_server` has the data ports; metrics and the control API listen with `HttpListener`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

from aiohttp import StreamReader, web

from postbus.edge.web.aiohttp_internals import AiohttpConnection, MalformedRequest

QUIET_S: Final = 75.0
"""Time that a connection may be without a request, or a head may take."""

HANDSHAKE_S: Final = 10.0
"""Time for a client's TLS handshake."""

STOP_S: Final = 1.0
"""Time for requests to end when a port is closed."""

MAX_HEAD_BYTES: Final = 64 << 10
"""Request line and headers together; custom properties of a message are headers."""

MAX_CONNECTIONS: Final = 200
"""Connections of one port beside the bus. Our choice: a few scrapers, operators and people."""

SERVER: Final = "Postbus"
"""Name of the server in responses: without version or components."""

TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"Server: Postbus\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


class HttpConnection(AiohttpConnection):
    """One HTTP client: limits the head of each request, which the parser does not."""

    __slots__ = ("_body", "_head_bytes", "is_unauthenticated")

    def __init__(self, server: web.Server, **limits: Any) -> None:
        super().__init__(server, **limits)
        self._body: StreamReader | None = None
        self._head_bytes = 0
        self.is_unauthenticated: Callable[[], bool] = _never
        """Returns True until the client has presented a key: it may have one request at a time."""

    @property
    def is_idle(self) -> bool:
        """True if no request waits or is being answered."""
        return not (self.is_answering or self.has_waiting_requests)

    def data_received(self, data: bytes) -> None:
        """Take bytes; answer a client whose head is too long with an error, and disconnect it."""
        is_head = self._body is None or self._body.is_eof()
        if (
            data
            and is_head
            and not self.is_idle
            and not self.is_upgraded
            and self.is_unauthenticated()
        ):
            self.close()  # when the previous request is answered; this one is not read
            self._count_head(data)
            return
        head_count = self.head_count
        super().data_received(data)
        if self.head_count != head_count:
            self._head_bytes = 0
            if self.has_waiting_requests:
                self._body = self.newest_body
        elif is_head and not self.is_upgraded:
            self._count_head(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the client."""
        super().connection_lost(exc)
        self._body = None
        self.is_unauthenticated = _never

    def leave(self) -> None:
        """Disconnect after the responses to all requests."""
        if self.is_idle:
            self.force_close()
        else:
            self.close()

    def _count_head(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def _refuse_head(self) -> None:
        if self.transport is not None:
            if self.is_idle:
                self.transport.write(TOO_LARGE)
            self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response with our server name."""
        if not resp.prepared:
            resp.headers["Server"] = SERVER
        return await super().finish_response(request, resp, start_time)


class HttpListener:
    """One port with an application behind it; start it once."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self.port = 0

    async def start(
        self, app: web.Application, host: str, port: int, context: ssl.SSLContext | None = None
    ) -> None:
        """Listen, on any free port for 0; raises OSError when the port cannot be used."""
        self._runner = web.AppRunner(app, shutdown_timeout=STOP_S)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None

        def welcome() -> HttpConnection:
            _make_room(server)
            return HttpConnection(
                server,
                loop=asyncio.get_running_loop(),
                access_log=None,
                logger=PROTOCOL_LOG,
                keepalive_timeout=QUIET_S,
            )

        limit = HANDSHAKE_S if context is not None else None
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                welcome, host, port, ssl=context, ssl_handshake_timeout=limit
            )
        except BaseException:
            await self.stop()
            raise
        self.port = int(self._listening.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening; may be called twice."""
        runner, self._runner = self._runner, None
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()
        if runner is not None:
            await runner.cleanup()


def _never() -> bool:
    return False


def _make_room(server: web.Server) -> None:
    """Disconnect the client that has been idle for longest when there are too many."""
    connections = server.connections
    if len(connections) < MAX_CONNECTIONS:
        return
    for connection in connections:
        if not isinstance(connection, HttpConnection) or not connection.is_answering:
            connection.force_close()
            return
    connections[0].force_close()


def is_ours(record: logging.LogRecord) -> bool:
    """Keep errors of clients out of the log: they were answered, and may contain a secret."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, MalformedRequest)


PROTOCOL_LOG: Final = logging.getLogger(f"{__name__}.protocol")
"""Logger of aiohttp for input that it cannot parse; it shows the line in question."""

PROTOCOL_LOG.addFilter(is_ours)
