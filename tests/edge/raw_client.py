"""An AMQP client of a few lines: frames as a test writes them, on a blocking socket."""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Any, Self

from postbus.message.codec import (
    Described,
    Symbol,
    Ubyte,
    Uint,
    Ulong,
    decode_value,
    encode_value,
)

OPEN, BEGIN, ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, END, CLOSE = range(0x10, 0x19)
SASL_MECHANISMS, SASL_INIT, SASL_OUTCOME = 0x40, 0x41, 0x44
ACCEPTED, REJECTED, RELEASED, MODIFIED = 0x24, 0x25, 0x26, 0x27
WAIT_S = 10.0


def described(code: int, *fields: Any) -> Described:
    return Described(Ulong(code), list(fields))


def frame(code: int, *fields: Any, payload: bytes = b"", kind: int = 0, channel: int = 0) -> bytes:
    body = encode_value(described(code, *fields)) + payload
    return struct.pack(">IBBH", len(body) + 8, 2, kind, channel) + body


def message(body: bytes, message_id: str | None = None) -> bytes:
    head = b"" if message_id is None else encode_value(described(0x73, message_id))
    return head + encode_value(Described(Ulong(0x75), body))


class Frame:
    """A performative that arrived: its code, fields padded with None, and payload."""

    def __init__(self, code: int, fields: list[Any], payload: bytes) -> None:
        self.code = code
        self.fields = fields + [None] * (16 - len(fields))
        self.payload = payload

    def __repr__(self) -> str:
        return f"Frame({self.code:#x}, {self.fields})"


class RawClient:
    """Opens a connection and one session; the user is a rule, the password its key.

    Without a rule it shows no key.
    """

    def __init__(
        self,
        port: int,
        rule: str,
        key: str,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        stream: Any = None,
    ) -> None:
        """`stream`: an object like a connected socket, used instead of one."""
        self.socket = stream or socket.create_connection((host, port), timeout=WAIT_S)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self._rest = b""
        self.write(b"AMQP\x03\x01\x00\x00")
        assert self._exactly(8) == b"AMQP\x03\x01\x00\x00"
        self.mechanisms = self.expect(SASL_MECHANISMS).fields[0].items
        mechanism = Symbol("PLAIN" if rule else "ANONYMOUS")
        self.write(frame(SASL_INIT, mechanism, f"\0{rule}\0{key}".encode(), kind=1))
        self.outcome = int(self.expect(SASL_OUTCOME).fields[0])
        if self.outcome:
            return
        self.write(b"AMQP\x00\x01\x00\x00")
        assert self._exactly(8) == b"AMQP\x00\x01\x00\x00"
        self.write(frame(OPEN, "raw", "localhost"))
        self.open = self.expect(OPEN)
        self.write(frame(BEGIN, None, Uint(0), Uint(5_000), Uint(5_000)))
        self.begin = self.expect(BEGIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # --- frames ---------------------------------------------------------------------------------

    def write(self, *frames: bytes) -> None:
        """Write frames as one segment."""
        self.socket.sendall(b"".join(frames))

    def read(self) -> Frame:
        """Return the next frame that is not empty."""
        while True:
            size, offset, _, _ = struct.unpack(">IBBH", self._exactly(8))
            body = self._exactly(size - 8)[offset * 4 - 8 :]
            if body:
                value, end = decode_value(body)
                return Frame(int(value.descriptor), value.value, body[end:])

    def expect(self, code: int) -> Frame:
        """Return the next frame of a kind, skipping flows."""
        while True:
            found = self.read()
            if found.code == code:
                return found
            assert found.code == FLOW, found

    def is_silent_until(self, code: int, *probe: bytes) -> bool:
        """Write a probe; return whether its answer is the next frame, apart from flows."""
        self.write(*probe)
        return self.expect(code) is not None

    def is_hung_up(self) -> bool:
        """Wait until the broker closes the socket, ignoring all frames before."""
        while self.socket.recv(65_536):
            pass
        return True

    def _exactly(self, size: int) -> bytes:
        while len(self._rest) < size:
            data = self.socket.recv(65_536)
            assert data, "the broker hung up"
            self._rest += data
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    # --- links ----------------------------------------------------------------------------------

    def attach_sender(self, address: str, handle: int = 0, name: str | None = None) -> Frame:
        target = described(0x29, address)
        self.write(
            frame(
                ATTACH, name or f"sender-{handle}", Uint(handle), False, Ubyte(2), Ubyte(0),
                described(0x28, "here"), target, None, None, Uint(0),
            )
        )  # fmt: skip
        return self.expect(ATTACH)

    def attach_receiver(
        self, address: str, handle: int = 1, *, mode: int = 0, filters: Any = None
    ) -> Frame:
        source = described(0x28, address, *[None] * 6, filters)
        self.write(
            frame(
                ATTACH, f"receiver-{handle}", Uint(handle), True, Ubyte(mode), Ubyte(0),
                source, described(0x29, "here"),
            )
        )  # fmt: skip
        return self.expect(ATTACH)

    def transfer(
        self,
        delivery_id: int,
        payload: bytes,
        *,
        handle: int = 0,
        settled: bool = False,
        more: bool = False,
        message_format: int = 0,
    ) -> bytes:
        tag = delivery_id.to_bytes(4, "big")
        return frame(
            TRANSFER, Uint(handle), Uint(delivery_id), tag, Uint(message_format), settled, more,
            payload=payload,
        )  # fmt: skip

    def flow(
        self, credit: int, *, handle: int = 1, count: int = 0, drain: bool = False,
        window: int = 5_000, next_incoming: int | None = None,
    ) -> bytes:  # fmt: skip
        begin = int(self.begin.fields[1]) if next_incoming is None else next_incoming
        return frame(
            FLOW, Uint(begin), Uint(window), Uint(0), Uint(5_000), Uint(handle), Uint(count),
            Uint(credit), None, drain,
        )  # fmt: skip

    def dispositions(self, count: int) -> dict[int, int]:
        """Read dispositions until `count` deliveries are settled; return id -> outcome's code."""
        outcomes: dict[int, int] = {}
        while len(outcomes) < count:
            fields = self.expect(DISPOSITION).fields
            assert fields[3] is True
            for delivery_id in range(
                fields[1], (fields[1] if fields[2] is None else fields[2]) + 1
            ):
                assert delivery_id not in outcomes
                outcomes[delivery_id] = int(fields[4].descriptor)
        return outcomes
