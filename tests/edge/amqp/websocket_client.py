"""A WebSocket client of a few lines: frames as a test writes them, and a stream for RawClient."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import struct

BINARY, TEXT, CLOSE, PING, PONG = 2, 1, 8, 9, 10
WAIT_S = 10.0


def masked(
    opcode: int, payload: bytes, *, flags: int = 0x80, mask: bytes = b"\x01\x02\xfe\x80"
) -> bytes:
    """Return a frame of a client."""
    size = len(payload)
    head = bytes((flags | opcode, 0x80 | (size if size < 126 else 126 if size < 65_536 else 127)))
    if size >= 126:
        head += struct.pack(">H" if size < 65_536 else ">Q", size)
    body = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return head + mask + body


def request(
    port: int,
    *,
    subprotocol: str | None = "AMQPWSB10",
    path: str = "/$servicebus/websocket",
    **headers: str,
) -> bytes:
    """Return a handshake; a header given as "" is left out, `_` becomes `-`."""
    fields = {
        "Host": f"localhost:{port}",
        "Upgrade": "websocket",
        "Connection": "keep-alive, Upgrade",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": subprotocol or "",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}" for name, value in fields.items() if value]
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()


class WebSocketClient:
    """Shakes hands; `sendall` and `recv` are those of a socket, `step` bytes to a frame."""

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        *,
        early: bytes = b"",
        step: int = 65_535,
        subprotocol: str = "AMQPWSB10",
    ) -> None:
        self.step = step
        self.socket = socket.create_connection((host, port), timeout=WAIT_S)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self._rest = b""
        self.socket.sendall(request(port, subprotocol=subprotocol) + early)
        while b"\r\n\r\n" not in self._rest:
            self._fill()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        self.head = head.decode()

    def sendall(self, data: bytes) -> None:
        frames = [
            masked(BINARY, data[at : at + self.step]) for at in range(0, len(data), self.step)
        ]
        self.socket.sendall(b"".join(frames))

    def recv(self, _size: int) -> bytes:
        """Return the payload of the next frame, b"" when the broker closes."""
        try:
            opcode, payload = self.read()
        except ConnectionError:
            return b""
        if opcode == CLOSE:
            return b""
        assert opcode == BINARY
        return payload

    def read(self) -> tuple[int, bytes]:
        """Return the next frame."""
        while len(self._rest) < 2:
            self._fill()
        assert self._rest[0] & 0xF0 == 0x80
        size, head = self._rest[1], 2
        assert size < 128, "a server does not mask"
        if size >= 126:
            head = 4 if size == 126 else 10
            while len(self._rest) < head:
                self._fill()
            size = int.from_bytes(self._rest[2:head], "big")
        while len(self._rest) < head + size:
            self._fill()
        opcode, payload = self._rest[0] & 15, self._rest[head : head + size]
        self._rest = self._rest[head + size :]
        return opcode, payload

    def close_code(self) -> int:
        """Return the close code of the broker, skipping the stream; it disconnects afterwards."""
        while True:
            opcode, payload = self.read()
            if opcode == CLOSE:
                break
        assert self.socket.recv(1) == b""
        return int.from_bytes(payload[:2], "big")

    def close(self) -> None:
        self.socket.close()

    def _fill(self) -> None:
        data = self.socket.recv(65_536)
        if not data:
            raise ConnectionError("the broker hung up")
        self._rest += data
