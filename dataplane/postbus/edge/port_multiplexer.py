"""Ports that clients dial: accepts sockets, detects TLS and AMQP or HTTP, hands connections over.

The protocol of a client is detected from its first bytes, so that one port serves every SDK. Until
then a connection is an arrival and has little time; the number of all connections is limited. Must
never read more than it needs for the decision.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final, cast

from postbus.edge.access.admission import MAX_CONNECTIONS, Admission, AdmissionControl
from postbus.edge.amqp.listener import AmqpListener
from postbus.edge.web.http_listener import MAX_HEAD_BYTES
from postbus.edge.web.http_server import HttpServer

logger = logging.getLogger(__name__)

ARRIVAL_S: Final = 10.0
"""Time for a client's TLS handshake, and again for its first bytes or the head of its first HTTP
request."""

SHUTDOWN_S: Final = 5.0
"""Time for a client to end TLS."""

NO_DESCRIPTORS_S: Final = 1.0
"""Pause when the process has no file descriptor left; clients wait in the backlog."""

BACKLOG: Final = 1_024
TLS_HANDSHAKE: Final = b"\x16"
AMQP: Final = b"AMQP"
END_OF_HEAD: Final = b"\r\n\r\n"


class PortMultiplexer:
    """Listens on any number of ports for one broker. Close it before the servers behind it."""

    def __init__(
        self,
        amqp: AmqpListener,
        http: HttpServer,
        tasks: asyncio.TaskGroup,
        *,
        max_connections: int = MAX_CONNECTIONS,
        admission_control: AdmissionControl | None = None,
    ) -> None:
        self.amqp = amqp
        self.http = http
        self._tasks = tasks
        self._max_connections = max_connections
        self.admission_control = (
            AdmissionControl() if admission_control is None else admission_control
        )
        self._arrivals: set[Arrival] = set()
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self.refused_count = 0
        """Clients refused because there were too many connections."""

        self.failed_count = 0
        """Clients that failed in the TLS handshake or did not send their first bytes in time."""

        self._was_full = False

    async def listen(
        self, host: str, port: int, *, is_plain: bool = True, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen and return the port, a free one for port 0; raises `OSError`.

        With both `is_plain` and a context the first byte of each client decides.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        bound: list[socket.socket] = []
        try:
            for family, address in dict.fromkeys((each[0], each[4]) for each in found):
                listening = socket.create_server(
                    (address[0], port, *address[2:]), family=family, backlog=BACKLOG
                )
                bound.append(listening)
                listening.setblocking(False)
                port = int(listening.getsockname()[1])
        except OSError:
            for listening in bound:
                listening.close()
            raise
        for listening in bound:
            self._sockets.append(listening)
            task = self._tasks.create_task(self._accept(listening, is_plain, tls), name="accept")
            self._accepting.append(task)
        return port

    def resize(self, max_connections: int) -> None:
        """Accept another number of connections; those above it stay."""
        self._max_connections = max_connections
        self.admission_control.resize(max_connections)

    @property
    def connection_count(self) -> int:
        """Return the number of connections of all ports."""
        return len(self._arrivals) + self.amqp.connection_count + self.http.connection_count

    async def close(self) -> None:
        """Stop listening; cut connections that have not sent anything yet."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._accepting.clear()
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()
        for arrival in list(self._arrivals):
            arrival.abort()

    # --- accepting ------------------------------------------------------------------------------

    async def _accept(
        self, listening: socket.socket, is_plain: bool, tls: ssl.SSLContext | None
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listening)
            except ConnectionAbortedError:  # the client has disconnected
                await asyncio.sleep(0)
                continue
            except OSError as error:  # no descriptor left
                logger.warning("cannot accept", extra={"why": str(error)})
                await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            self._take(client, address[0], is_plain, tls)
            del client  # otherwise it is held until the next one comes
            await asyncio.sleep(0)  # a flood of clients must not keep the others waiting

    def _take(
        self, client: socket.socket, address: str, is_plain: bool, tls: ssl.SSLContext | None
    ) -> None:
        """Admit a client, or refuse it."""
        admission = self._admit(address)
        if admission is None:
            self.refused_count += 1
            client.close()
            return
        arrival = Arrival(self, client, admission)
        self._arrivals.add(arrival)
        arrival.task = self._tasks.create_task(arrival.welcome(is_plain, tls), name="arrival")

    def _admit(self, address: str) -> Admission | None:
        """Return the admission of a client, None when it must be refused.

        The first refusal is logged, and the next after there was room.
        """
        is_full = self.connection_count >= self._max_connections
        admission = self.admission_control.admit(address, is_full=is_full)
        if is_full and admission is None and not self._was_full:
            logger.warning("too many connections", extra={"limit": self._max_connections})
        self._was_full = is_full
        return admission

    def forget(self, arrival: Arrival) -> None:
        """Forget an arrival that is gone or handed over."""
        self._arrivals.discard(arrival)


class Arrival(asyncio.BufferedProtocol):
    """A client before its protocol is known."""

    def __init__(
        self, multiplexer: PortMultiplexer, client: socket.socket, admission: Admission
    ) -> None:
        self._multiplexer = multiplexer
        self._admission = admission
        admission.hold(self, self.abort)
        self._client: socket.socket | None = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self._first = b""
        self._patience: asyncio.TimerHandle | None = None

    async def welcome(self, is_plain: bool, tls: ssl.SSLContext | None) -> None:
        """Make the transport: plain, or TLS after its handshake."""
        client = self._client
        assert client is not None
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_plain and tls is not None and not await _begins_with_tls(self._loop, client):
                tls = None
            self._client = None  # from here on the transport owns it
            limits = {"ssl_handshake_timeout": ARRIVAL_S, "ssl_shutdown_timeout": SHUTDOWN_S}
            await self._loop.connect_accepted_socket(
                lambda: self, client, ssl=tls, **(limits if tls is not None else {})
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is one too
            logger.debug("no connection", extra={"why": str(error) or type(error).__name__})
            self._multiplexer.failed_count += 1
            self._leave()
        except asyncio.CancelledError:
            self._leave()
            raise
        except Exception:  # a supervised boundary: one client is lost, not the bus
            logger.exception("accepting a connection failed")
            self._leave()
            if self._transport is None:
                client.close()

    def abort(self) -> None:
        """Cut the connection."""
        self._forget()
        if self._transport is not None:
            self._transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def _forget(self) -> None:
        self._multiplexer.forget(self)
        self._admission.release(self)

    def _leave(self) -> None:
        self._forget()
        if self._client is not None:
            self._client.close()

    # --- called by the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._patience = self._loop.call_later(ARRIVAL_S, self._give_up)

    def _give_up(self) -> None:
        self._multiplexer.failed_count += 1
        self.abort()

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._multiplexer.amqp.read_buffer

    def buffer_updated(self, size_bytes: int) -> None:
        self._first += self._multiplexer.amqp.read_buffer[:size_bytes]
        is_http = speaks_http(self._first)
        if is_http is not None:
            self._hand_over(
                self._multiplexer.http.welcome if is_http else self._multiplexer.amqp.welcome
            )

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._forget()
        self._transport = self.task = None

    def _hand_over(self, welcome: Callable[[asyncio.Transport, bytes, Admission], None]) -> None:
        assert self._transport is not None
        assert self._patience is not None
        self._patience.cancel()
        self._multiplexer.forget(self)
        transport, self._transport, self.task = self._transport, None, None
        welcome(transport, self._first, self._admission)


def speaks_http(first: bytes) -> bool | None:
    """Return the protocol that begins with these bytes: True HTTP with a whole head, False AMQP,
    None unknown yet.

    Bytes of neither protocol are answered by AMQP, as its specification requires (2.2).
    """
    if first[: len(AMQP)] == AMQP[: len(first)]:
        return False if len(first) >= len(AMQP) else None
    if not b"A" <= first[:1] <= b"Z":
        return False
    return True if END_OF_HEAD in first or len(first) > MAX_HEAD_BYTES else None


async def _begins_with_tls(loop: asyncio.AbstractEventLoop, client: socket.socket) -> bool:
    """Peek at the first byte; raises OSError or TimeoutError."""
    client.setblocking(False)
    async with asyncio.timeout(ARRIVAL_S):
        while True:
            try:
                return client.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE
            except BlockingIOError:
                await _readable(loop, client)


async def _readable(loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
    is_readable = asyncio.Event()
    loop.add_reader(client, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(client)
