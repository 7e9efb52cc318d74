"""HTTP of the data ports: dispatch of requests, limits of their cost, and errors.

`port_multiplexer` hands connections over. The server chooses the handler (administration, runtime,
bulk, WebSocket, health) and does not interpret requests. A handler refuses with `HttpRefused`; any
other exception is an error of ours.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from aiohttp import web

from postbus.broker.access.own_names import OwnNames
from postbus.edge.access.admission import Admission
from postbus.edge.web.authorization import ADMISSION, HttpRefused, error_answer
from postbus.edge.web.http_listener import MAX_HEAD_BYTES, PROTOCOL_LOG, HttpConnection

logger = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 16 << 10
MAX_FIELD_BYTES: Final = 64 << 10
"""Size of a header. A custom property may have 32 KiB, BrokerProperties all the rest."""

MAX_FIELDS: Final = 128

BODY_S: Final = 60.0
"""Time for a body to arrive."""

UNAUTHENTICATED_S: Final = 20.0
"""Time that a connection may be unauthenticated; the same over AMQP."""

QUIET_S: Final = 75.0
"""Time that a connection may be without a request, or a later head may take. Pools of clients try a
connection that was quiet for a minute."""

LINGER_S: Final = 2.0
"""Time to wait for the unread rest of a body, so that the client sees the response."""

NAMES_SETTING: Final = "POSTBUS_TLS_NAMES"
WEBSOCKET_PATH: Final = "/$servicebus/websocket"
MESSAGES: Final = re.compile(r"/messages(/head|/[^/]+/[^/]+)?/?$", re.IGNORECASE)
CLOSE: Final = {"Connection": "close"}
ADMINISTRATION: Final = "administration"
RUNTIME: Final = "runtime"
WEBSOCKET: Final = "websocket"
BULK: Final = "bulk"
BULK_PATH: Final = re.compile(r"/\$bulk(/|$)", re.IGNORECASE)
HEALTH: Final = "health"
HEALTHY: Final = {"status": "healthy", "message": "Service is healthy."}
UNHEALTHY: Final = {
    "status": "unhealthy",
    "message": "Service is starting or stopping, or its store does not answer.",
}


class HttpHandler(Protocol):
    """Answers requests of one kind."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; raises `HttpRefused`."""
        ...


async def _always() -> bool:
    return True


class _Server(web.Server):
    """Keeps the admission of each connection."""

    admission_control: dict[web.RequestHandler, Admission]
    patience: dict[web.RequestHandler, asyncio.TimerHandle]

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        **limits: Any,
    ) -> None:
        # a waiting receive ends with its client
        super().__init__(handler, handler_cancellation=True)
        self._limits = limits
        self.admission_control = {}
        self.patience = {}

    def __call__(self) -> HttpConnection:
        return HttpConnection(self, loop=asyncio.get_running_loop(), **self._limits)

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        admission = self.admission_control.pop(handler, None)
        if admission is not None:
            admission.release(handler)
        patience = self.patience.pop(handler, None)
        if patience is not None:
            patience.cancel()


class HttpServer:
    """All HTTP clients of this broker."""

    def __init__(
        self,
        namespace: str,
        *,
        administration: HttpHandler | None = None,
        runtime: HttpHandler | None = None,
        websocket: HttpHandler | None = None,
        bulk: HttpHandler | None = None,
        is_healthy: Callable[[], Awaitable[bool]] = _always,
        names: OwnNames | None = None,
    ) -> None:
        """Make the server; a handler that is None answers 404. Call it with a running loop.

        `names`: on loopback, the host names of the bus in requests and origins; a browser of this
        machine sends requests of other pages too.
        """
        self._names = names
        self._namespace = namespace
        self._handlers = {
            ADMINISTRATION: administration,
            RUNTIME: runtime,
            WEBSOCKET: websocket,
            BULK: bulk,
        }
        self._is_healthy = is_healthy
        self.accepted_count = 0
        self.answers: Counter[tuple[str, int]] = Counter()
        """Responses sent: (API, status) -> count."""
        self._server = _Server(
            self._handle,
            access_log=None,
            logger=PROTOCOL_LOG,
            keepalive_timeout=QUIET_S,
            lingering_time=LINGER_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_FIELDS,
            auto_decompress=False,
        )

    @property
    def connection_count(self) -> int:
        return len(self._server.connections)

    def welcome(self, transport: asyncio.Transport, first: bytes, admission: Admission) -> None:
        """Take over a connection that began with `first`."""
        self.accepted_count += 1
        protocol = self._server()
        self._server.admission_control[protocol] = admission
        admission.hold(protocol, transport.abort)
        protocol.is_unauthenticated = lambda: not admission.is_authenticated
        loop = asyncio.get_running_loop()
        self._server.patience[protocol] = loop.call_later(UNAUTHENTICATED_S, self._leave, protocol)
        transport.pause_reading()  # the loop switches its way of reading at the next start
        transport.set_protocol(protocol)
        transport.resume_reading()
        protocol.connection_made(transport)
        protocol.data_received(first)

    def _leave(self, protocol: HttpConnection) -> None:
        """Disconnect a client that has not authenticated in time."""
        if protocol.is_unauthenticated():
            protocol.leave()

    async def stop(self, grace_s: float) -> None:
        """Answer requests in flight for at most `grace_s`, then disconnect."""
        self._server.pre_shutdown()
        await self._server.shutdown(grace_s)

    def abort(self) -> None:
        """Cut all connections."""
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    # --- requests -------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (admission := self._server.admission_control.get(request.protocol)) is not None:
            request[ADMISSION] = admission
        api = _api_of(request)
        answer = await self._answer_or_refuse(api, request)
        self.answers[api, answer.status] += 1
        return answer

    async def _answer_or_refuse(self, api: str, request: web.BaseRequest) -> web.StreamResponse:
        try:
            _check_head(request)
            if self._names is not None:
                _check_origin(request, self._names)
            return await self._answer(api, request)
        except HttpRefused as error:
            refused = error.with_traceback(None)  # it refers to this frame, which refers to it
        except web.HTTPException as error:  # raised by aiohttp for an unreadable body
            refused = HttpRefused(error.status, error.reason)
        except ConnectionError:
            return web.Response()  # the client has disconnected
        except Exception:
            logger.exception("handling a request failed", extra={"method": request.method})
            refused = HttpRefused(500, "This is an error of Postbus; please report it.")
        admission = request.get(ADMISSION)
        is_logged = admission is None or admission.is_refusal_logged(refused.refusal, request.path)
        answer = error_answer(refused, self._namespace, request.path, is_logged=is_logged)
        if refused.headers.items() >= CLOSE.items():
            answer.force_close()
        return answer

    async def _answer(self, api: str, request: web.BaseRequest) -> web.StreamResponse:
        if api == HEALTH:
            return await self._answer_health()
        handler = self._handlers[api]
        if handler is None:
            text = (
                f"Nothing answers {request.method} {request.path} here. Use AMQP, or GET /health."
            )
            raise HttpRefused(404, text)
        return await handler.handle(request)

    async def _answer_health(self) -> web.Response:
        is_healthy = await self._is_healthy()
        return web.Response(
            text=json.dumps(HEALTHY if is_healthy else UNHEALTHY),
            status=200 if is_healthy else 503,
            content_type="application/json",
        )


def _api_of(request: web.BaseRequest) -> str:
    """Return the API of a request."""
    path = request.path
    if path.lower().rstrip("/") == WEBSOCKET_PATH:
        return WEBSOCKET
    if path == "/health" and "Authorization" not in request.headers:
        return HEALTH
    if BULK_PATH.search(request.raw_path.partition("?")[0]):
        return BULK
    return RUNTIME if _is_about_messages(request) else ADMINISTRATION


async def read_limited(
    request: web.BaseRequest,
    max_bytes: int,
    too_large_status: int = 413,
    count: Callable[[int], None] = lambda _: None,
) -> bytes:
    """Return the body; raises `HttpRefused` above `max_bytes`, and 408 when it takes too long.

    `count` is called with the number of bytes received so far, after each read, and may raise too.
    """
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise HttpRefused(415, f"Send the body without encoding: {encoding} is not supported.")
    too_large = HttpRefused(too_large_status, f"The body is larger than {max_bytes} bytes.")
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(BODY_S):
            while part := await request.content.readany():
                size_bytes += len(part)
                if size_bytes > max_bytes:
                    raise too_large
                count(len(part))
                parts.append(part)
    except TimeoutError:
        raise HttpRefused(408, f"The body was not complete after {BODY_S:.0f} seconds.") from None
    return b"".join(parts)


def _check_head(request: web.BaseRequest) -> None:
    """Raise `HttpRefused` for heads that are too large or that proxies may read differently."""
    codings = ",".join(request.headers.getall("Transfer-Encoding", []))
    if request.version < (1, 0) or (codings and request.version < (1, 1)):
        raise HttpRefused(400, "Use HTTP/1.1; chunked bodies require it.", CLOSE)
    if codings and codings.strip().lower() != "chunked":
        raise HttpRefused(501, "The only supported transfer encoding is chunked.", CLOSE)
    size_bytes = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size_bytes + len(request.raw_path) > MAX_HEAD_BYTES:
        raise HttpRefused(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes together.")


def _check_origin(request: web.BaseRequest, names: OwnNames) -> None:
    """Raise `HttpRefused` for requests of pages of other hosts, or to a host name that is not ours.

    A page may open a WebSocket to any host, and its browser sends the page's origin; a host name
    that resolves to loopback (DNS rebinding) makes the bus part of the page.
    """
    host = request.headers.get("Host")
    if host is not None and not names.include(host):
        text = f"This bus is not called {host}: dial localhost, or add the name to {NAMES_SETTING}."
        raise HttpRefused(403, text, CLOSE)
    for origin in request.headers.getall("Origin", []):
        if not names.include(origin.partition("://")[2]):
            text = f"Pages of {origin} may not use this bus; {NAMES_SETTING} adds a host."
            raise HttpRefused(403, text, CLOSE)


def _is_about_messages(request: web.BaseRequest) -> bool:
    """Return whether a request is for messages of an entity, not for its definition.

    `PUT /orders/messages` creates an entity of that name: only a POST sends. A message id may have
    percent-encoded slashes: the path is used as received.
    """
    found = MESSAGES.search(request.raw_path.partition("?")[0])
    if found is None or found.start() == 0 or request.method == "GET":
        return False
    return bool(found[1]) or request.method == "POST"
