"""AMQP over WebSocket: the handshake, then frames around the stream of an AMQP connection.

The HTTP server hands the connection over: from the handshake on the socket belongs to a
`WebSocketTransport`, which is the transport of an ordinary AMQP connection. Limits, idle times and
shutdown are those of TCP.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
from typing import Any, Final

from aiohttp import web

from postbus.edge.access.admission import Admission
from postbus.edge.amqp.listener import READ_BYTES, AmqpListener, AmqpTransport
from postbus.edge.amqp.websocket_frames import (
    NORMAL,
    FrameReader,
    WebSocketError,
    binary_frames,
    close_frame,
    pong_frame,
)
from postbus.edge.web.aiohttp_internals import AiohttpConnection
from postbus.edge.web.authorization import ADMISSION, HttpRefused

logger = logging.getLogger(__name__)

VERSION: Final = "13"
KEY_BYTES: Final = 16
GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SUBPROTOCOLS: Final = {"amqpwsb10": "AMQPWSB10", "amqp": "amqp"}
"""Lower-case name -> name in the answer; the first is that of Azure's SDKs, the other of OASIS."""

CLOSE_S: Final = 1.0
"""Time for a client to answer our close frame."""


class WebSocketHandler:
    """Answers requests to `/$servicebus/websocket`."""

    def __init__(self, amqp: AmqpListener) -> None:
        self._amqp = amqp

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Switch the connection to AMQP; raise `HttpRefused` for a wrong handshake."""
        subprotocol = _agree(request)
        key = request.headers.get("Sec-WebSocket-Key", "")
        protocol, transport = request.protocol, request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError
        assert isinstance(protocol, AiohttpConnection)
        admission = request[ADMISSION]
        transport.write(
            (
                "HTTP/1.1 101 Switching Protocols\r\n"
                "Upgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Accept: {accept_key(key)}\r\n"
                f"Sec-WebSocket-Protocol: {subprotocol}\r\n\r\n"
            ).encode()
        )
        made = WebSocketTransport(transport, self._amqp, admission)
        made.begin(protocol.detach())
        return web.Response()  # no response: the socket is handed over


class WebSocketTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """Protocol of a socket, transport of an AMQP connection."""

    def __init__(
        self, transport: asyncio.Transport, amqp: AmqpListener, admission: Admission
    ) -> None:
        super().__init__()
        self._admission = admission
        admission.hold(self, self.abort)
        self._transport = transport
        self._amqp = amqp
        self._reader = FrameReader(amqp.max_buffered_bytes)
        self._protocol: AmqpTransport | None = None
        self._is_closing = False
        self._patience: asyncio.TimerHandle | None = None

    def begin(self, early: bytes) -> None:
        """Take the socket over; `early` came with the handshake."""
        self._transport.pause_reading()  # the loop switches its way of reading at the next start
        self._transport.set_protocol(self)
        self._transport.resume_reading()
        self._amqp.welcome(self, b"", self._admission)
        if early:
            self._receive(early, is_burst=False)

    # --- called by the event loop ---------------------------------------------------------------

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._amqp.buffer_for(self._admission)

    def buffer_updated(self, size_bytes: int) -> None:
        data = bytes(self._amqp.read_buffer[:size_bytes])
        self._receive(data, is_burst=size_bytes == READ_BYTES)

    def _receive(self, data: bytes, *, is_burst: bool) -> None:
        try:
            received = self._reader.receive(data)
        except WebSocketError as error:
            if self._admission.is_refusal_logged():
                logger.info("websocket closed", extra={"code": error.code, "why": str(error)})
            self._end(error.code, str(error))
            return
        if received.payload and self._protocol is not None and not self._is_closing:
            self._protocol.receive(received.payload, is_burst=is_burst)
        if received.close_code is not None:
            self._end(received.close_code)
        elif received.ping is not None and not self._is_closing:
            self._transport.write(pong_frame(received.ping))
            if self._transport.get_write_buffer_size() > self._amqp.max_buffered_bytes:
                self.abort()

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(exc)

    def _end(self, code: int, reason: str = "") -> None:
        """Answer the client's close frame, or close because of its error, and disconnect."""
        if not self._is_closing:
            self._is_closing = True
            self._transport.write(close_frame(code, reason))
        self._transport.close()

    # --- called by the AMQP connection ----------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, AmqpTransport)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self if self._protocol is None else self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._transport.write(binary_frames(bytes(data)))

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Send a close frame and wait a moment for the answer."""
        if self.is_closing():
            return
        self._is_closing = True
        self._transport.write(close_frame(NORMAL))
        self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(CLOSE_S, self._transport.close)

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()


def accept_key(key: str) -> str:
    """Return the proof that the handshake was understood (RFC 6455, 4.2.2)."""
    return base64.b64encode(hashlib.sha1(key.encode() + GUID).digest()).decode()


def _agree(request: web.BaseRequest) -> str:
    """Check the handshake and return the subprotocol; raises `HttpRefused`."""
    headers = request.headers
    connection = {each.strip().lower() for each in headers.get("Connection", "").split(",")}
    is_upgrade = headers.get("Upgrade", "").lower() == "websocket" and "upgrade" in connection
    if request.method != "GET" or not is_upgrade or request.version < (1, 1):
        text = (
            "This path is for WebSocket: send GET with Upgrade: websocket and Connection: Upgrade."
        )
        raise HttpRefused(426, text, {"Upgrade": "websocket", "Connection": "Upgrade"})
    if headers.get("Sec-WebSocket-Version") != VERSION:
        text = "Only version 13 of WebSocket is supported."
        raise HttpRefused(426, text, {"Sec-WebSocket-Version": VERSION})
    try:
        key = base64.b64decode(headers.get("Sec-WebSocket-Key", ""), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES or request.can_read_body:
        raise HttpRefused(400, "Sec-WebSocket-Key is 16 bytes in base64, and there is no body.")
    offered = [
        each.strip().lower()
        for line in headers.getall("Sec-WebSocket-Protocol", [])
        for each in line.split(",")
    ]
    for each in offered:
        if each in SUBPROTOCOLS:
            return SUBPROTOCOLS[each]
    raise HttpRefused(400, "Offer the subprotocol AMQPWSB10 or amqp.")
