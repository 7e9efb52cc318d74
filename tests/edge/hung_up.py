"""States in which an unauthenticated client disconnects: one function for each state of each
protocol.

Shape of a state: (port) -> the bytes to send, in one piece or in several. Between them the test
awaits that the broker took a handshake or a link. At the end the broker disconnects too.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

from postbus.message.codec import Described, Symbol, Uint, Ulong, encode_value
from tests.edge.amqp.websocket_client import BINARY, masked, request
from tests.edge.raw_client import ATTACH, BEGIN, OPEN, SASL_INIT, TRANSFER, WAIT_S, described, frame

Sent: TypeAlias = bytes | tuple[bytes, ...]
State: TypeAlias = Callable[[int], Sent]

SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"
AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
PIECE_BYTES: Final = 25_000
ATTACHED: Final = b"$cbs"


def sasl(_port: int) -> bytes:
    """Half of a SASL init."""
    init = frame(SASL_INIT, Symbol("PLAIN"), b"\0" * 10_000, kind=1)
    return SASL_HEADER + init[: len(init) // 2]


def opened(_port: int) -> bytes:
    """An open connection with a session."""
    begin = frame(BEGIN, None, Uint(0), Uint(5_000), Uint(5_000))
    return AMQP_HEADER + frame(OPEN, "c" * 10_000, "localhost") + begin


def attach(handle: int, *, properties: bytes | None = None) -> bytes:
    """A link to the node that takes tokens; `properties` are encoded."""
    fields = [
        "l" * 1_000 + str(handle), Uint(handle), False, None, None,
        described(0x28, "here"), described(0x29, "$cbs"), None, None, Uint(0), None, None, None,
    ]  # fmt: skip
    if properties is None:
        return frame(ATTACH, *fields)
    body = b"".join(map(encode_value, fields)) + properties
    listed = b"\x00\x53\x12\xd0" + struct.pack(">II", len(body) + 4, 14) + body
    return struct.pack(">IBBH", len(listed) + 8, 2, 0, 0) + listed


def transfer(handle: int, *, more: bool) -> bytes:
    fields = (Uint(handle), Uint(handle), b"tag", Uint(0), False, more)
    return frame(TRANSFER, *fields, payload=b"\0" * PIECE_BYTES)


def half_a_transfer(port: int) -> tuple[bytes, bytes]:
    """Messages of several frames without the last one."""
    handles = range(2)
    links = opened(port) + b"".join(map(attach, handles))
    return links, b"".join(transfer(handle, more=True) for handle in handles)


def refused_tokens(port: int) -> tuple[bytes, bytes]:
    """Wrong tokens with delayed answers."""
    fields = {"operation": "put-token", "name": f"amqp://localhost:{port}/q"}
    body = [
        described(0x73, "id"),
        Described(Ulong(0x74), fields),
        Described(Ulong(0x77), "t" * 9_999),
    ]
    payload = b"".join(map(encode_value, body))
    tokens = [
        frame(TRANSFER, Uint(0), Uint(number), b"tag", Uint(0), True, False, payload=payload)
        for number in range(8)
    ]
    return opened(port) + attach(0), b"".join(tokens)


def half_a_frame(port: int) -> bytes:
    """A transfer without its end."""
    return opened(port) + attach(0) + transfer(0, more=True)[:-100]


def nested_lists(count: int) -> bytes:
    """The encoded map {x: [[], [], …]}: a byte for each list."""
    items = b"\xd0" + struct.pack(">II", count + 4, count) + b"\x45" * count
    body = encode_value(Symbol("x")) + items
    return b"\xd1" + struct.pack(">II", len(body) + 4, 2) + body


def nested_properties(port: int) -> bytes:
    """Links with properties of many values."""
    links = [attach(handle, properties=nested_lists(500)) for handle in range(4)]
    return opened(port) + b"".join(links)


def too_many_values(port: int) -> bytes:
    """A link with properties of more values than any client needs."""
    return opened(port) + attach(0, properties=nested_lists(61_000))


def half_a_head(port: int) -> bytes:
    """An HTTP request without the end of its head."""
    return f"GET /q HTTP/1.1\r\nHost: localhost:{port}\r\n".encode() + b"x: " + b"y" * 30_000


def heads(port: int) -> bytes:
    """Requests with a wrong token, one behind the other."""
    lines = f"GET /q HTTP/1.1\r\nHost: localhost:{port}\r\nAuthorization: none\r\n"
    return (lines.encode() + b"x: " + b"y" * 10_000 + b"\r\n\r\n") * 32


def no_head(port: int) -> bytes:
    """Bytes that begin like HTTP and are not."""
    return half_a_head(port) + b"\0" * 10_000 + b"\r\n\r\n"


def half_a_body(port: int) -> bytes:
    """A message with a wrong token and without its end."""
    lines = f"POST /q/messages HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: 100000\r\n\r\n"
    return lines.encode() + b"b" * 50_000


def mid_upgrade(port: int) -> bytes:
    """Half of a handshake."""
    return request(port, cookie="c" * 10_000)[:-2]


def early_frame(port: int) -> bytes:
    """Bytes that a client sends before the answer to its WebSocket handshake."""
    return request(port) + masked(BINARY, half_a_frame(port))


def websocket_frame(port: int) -> tuple[bytes, bytes]:
    """Half of a WebSocket frame."""
    return request(port), masked(BINARY, half_a_frame(port))[:-10_000]


def websocket_transfer(port: int) -> tuple[bytes, bytes, bytes]:
    """Half a message behind a handshake."""
    links, transfers = half_a_transfer(port)
    return request(port), masked(BINARY, links), masked(BINARY, transfers)


STATES: Final[dict[str, State]] = {
    each.__name__: each
    for each in (
        sasl, opened, refused_tokens, half_a_transfer, half_a_frame, nested_properties,
        too_many_values, half_a_head, no_head, heads, half_a_body, mid_upgrade, early_frame,
        websocket_frame, websocket_transfer,
    )
}  # fmt: skip


def end_stream(client: socket.socket) -> None:
    """End the stream; the broker may have disconnected meanwhile."""
    try:
        client.shutdown(socket.SHUT_WR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise


def hang_up(port: int, sent: Sent) -> None:
    """Dial, send, end the stream, and wait until the broker has ended it too."""
    first, *more = (sent,) if isinstance(sent, bytes) else sent
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client,
        suppress(ConnectionError),  # a broker may disconnect before it has read everything
    ):
        client.sendall(first)
        answer = b""
        for piece in more:
            awaited = b"HTTP/1.1 101 " if first.startswith(b"GET ") else ATTACHED
            while awaited not in answer:  # of two links that came at once the answers do too
                data = client.recv(65_536)
                assert data, answer[-200:]
                answer += data
            client.sendall(piece)
            first = piece
        end_stream(client)
        while client.recv(65_536):
            pass
