"""Frames of WebSocket, server side: bytes to a stream and back (RFC 6455, 5). No I/O.

The payload of binary messages is one stream, as their boundaries mean nothing to AMQP. Bytes are
passed on as they arrive: a frame is never collected, whatever its length, so no buffer grows.
Frames of clients are masked, those of a server are not. No extension is supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postbus.edge.web.aiohttp_internals import unmask

MAX_FRAME_BYTES: Final = 65_535
"""Payload of one written frame: longer ones need a longer head, and some clients collect a frame
before they look at it."""

MAX_CONTROL_BYTES: Final = 125
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10

NORMAL: Final = 1000
PROTOCOL_ERROR: Final = 1002
UNSUPPORTED_DATA: Final = 1003
INVALID_DATA: Final = 1007
TOO_BIG: Final = 1009
RESERVED_CODES: Final = frozenset({1004, 1005, 1006})
LAST_NAMED_CODE: Final = 1014


class WebSocketError(Exception):
    """The client violated the protocol; the code and the text go into the close frame."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


@dataclass(slots=True)
class ReceivedFrames:
    """Result of received bytes.

    `payload` is the stream before a close frame. `ping` is the payload of the last ping, which
    alone needs an answer; `close_code` is 0 for a close frame without a code.
    """

    payload: bytes = b""
    ping: bytes | None = None
    close_code: int | None = None


class FrameReader:
    """Reads the frames of one client."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._rest = b""
        self._mask = b""
        self._left_bytes = 0  # of the current frame
        self._message_bytes = 0  # of the message so far
        self._is_in_message = False  # more frames of it will come
        self._is_closed = False

    def receive(self, data: bytes) -> ReceivedFrames:
        """Take bytes; raises `WebSocketError`. Bytes after a close frame are ignored."""
        received = ReceivedFrames()
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        parts: list[bytearray] = []
        while at < end and not self._is_closed:
            if self._left_bytes:
                part = bytearray(data[at : at + self._left_bytes])
                at += len(part)
                unmask(self._mask, part)
                parts.append(part)
                self._left_bytes -= len(part)
                if self._left_bytes and len(part) % 4:
                    turn = len(part) % 4
                    self._mask = self._mask[turn:] + self._mask[:turn]
                continue
            used = self._begin_frame(data, at, received)
            if not used:
                break
            at += used
        self._rest = b"" if self._is_closed else data[at:]
        received.payload = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        return received

    def _begin_frame(self, data: bytes, at: int, received: ReceivedFrames) -> int:
        """Read a head, and the whole of a control frame; return how many bytes, 0 for too few."""
        available = len(data) - at
        if available < 2:
            return 0
        opcode, size = data[at] & 0x0F, data[at + 1] & 0x7F
        if data[at] & 0x70:
            raise WebSocketError(PROTOCOL_ERROR, "no extension was agreed on")
        if not data[at + 1] & 0x80:
            raise WebSocketError(PROTOCOL_ERROR, "frames of a client are masked")
        is_last = bool(data[at] & 0x80)
        if opcode >= CLOSE:
            return self._read_control(data, at, opcode, size, is_last, received)
        self._check_order(opcode)
        head = 6
        if size == 126:
            head = 8
        elif size == 127:
            head = 14
        if available < head:
            return 0
        if head > 6:
            size = int.from_bytes(data[at + 2 : at + head - 4], "big")
        self._message_bytes = size + (self._message_bytes if self._is_in_message else 0)
        if self._message_bytes > self._max_message_bytes:
            text = f"a message may have {self._max_message_bytes} bytes"
            raise WebSocketError(TOO_BIG, text)
        self._is_in_message = not is_last
        self._left_bytes = size
        self._mask = data[at + head - 4 : at + head]
        return head

    def _check_order(self, opcode: int) -> None:
        if opcode == TEXT:
            raise WebSocketError(UNSUPPORTED_DATA, "AMQP is sent in binary frames")
        if opcode not in {CONTINUATION, BINARY}:
            raise WebSocketError(PROTOCOL_ERROR, f"opcode {opcode} is reserved")
        if (opcode == CONTINUATION) is not self._is_in_message:
            raise WebSocketError(PROTOCOL_ERROR, "the frames of a message are out of order")

    def _read_control(
        self, data: bytes, at: int, opcode: int, size: int, is_last: bool, received: ReceivedFrames
    ) -> int:
        if opcode > PONG:
            raise WebSocketError(PROTOCOL_ERROR, f"opcode {opcode} is reserved")
        if not is_last or size > MAX_CONTROL_BYTES:
            raise WebSocketError(PROTOCOL_ERROR, "a control frame is short and whole")
        used = 6 + size
        if len(data) - at < used:
            return 0
        payload = bytearray(data[at + 6 : at + used])
        unmask(data[at + 2 : at + 6], payload)
        if opcode == PING:
            received.ping = bytes(payload)
        elif opcode == CLOSE:
            received.close_code = _close_code(payload)
            self._is_closed = True
        return used


def _close_code(payload: bytearray) -> int:
    """Return the code of a close frame, 0 without one; raises `WebSocketError`."""
    if not payload:
        return 0
    code = int.from_bytes(payload[:2], "big")
    is_named = NORMAL <= code <= LAST_NAMED_CODE and code not in RESERVED_CODES
    if len(payload) == 1 or not (is_named or 3000 <= code <= 4999):
        raise WebSocketError(PROTOCOL_ERROR, "the close frame has no valid code")
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        raise WebSocketError(INVALID_DATA, "the close frame's reason is not UTF-8") from None
    return code


def binary_frames(data: bytes) -> bytes:
    """Return frames that carry a piece of the stream."""
    size = len(data)
    if size <= MAX_CONTROL_BYTES:
        return b"".join((bytes((0x80 | BINARY, size)), data))
    if size <= MAX_FRAME_BYTES:
        return b"".join((b"\x82\x7e", size.to_bytes(2, "big"), data))
    parts = range(0, size, MAX_FRAME_BYTES)
    return b"".join([binary_frames(data[at : at + MAX_FRAME_BYTES]) for at in parts])


def pong_frame(payload: bytes) -> bytes:
    """Return the answer to a ping."""
    return bytes((0x80 | PONG, len(payload))) + payload


def close_frame(code: int, reason: str = "") -> bytes:
    """Return a close frame; without a code it is empty."""
    payload = code.to_bytes(2, "big") + reason.encode()[: MAX_CONTROL_BYTES - 2] if code else b""
    return bytes((0x80 | CLOSE, len(payload))) + payload
