"""The client's side of byte-level tests: builds frames, reads the engine's answers."""

from __future__ import annotations

import struct
from typing import Any

from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    ConnectionClosed,
    Event,
    LinkAttached,
    SaslInitReceived,
    SessionBegun,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, OutgoingLink
from postbus.amqp.session import Session
from postbus.message.codec import Described, Symbol, Ubyte, Uint, Ulong, decode_value, encode_value

SASL_HEADER = b"AMQP\x03\x01\x00\x00"
AMQP_HEADER = b"AMQP\x00\x01\x00\x00"

OPEN, BEGIN, ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, END, CLOSE = range(0x10, 0x19)
SASL_MECHANISMS, SASL_INIT, SASL_OUTCOME = 0x40, 0x41, 0x44
BASE = 0x4000_0000
"""The engine's first delivery id and next-outgoing-id."""

SOURCE = Described(Ulong(0x28), ["q", *[None] * 10])
TARGET = Described(Ulong(0x29), ["q", *[None] * 6])
ACCEPTED = Described(Ulong(0x24), [])
RELEASED = Described(Ulong(0x26), [])


def frame(channel: int, body: bytes, frame_type: int = 0) -> bytes:
    return struct.pack(">IBBH", len(body) + 8, 2, frame_type, channel) + body


def performative(code: int, *fields: Any) -> bytes:
    return encode_value(Described(Ulong(code), list(fields)))


def uint(value: int | None) -> Uint | None:
    return None if value is None else Uint(value)


def error_of(value: Any) -> tuple[str, str]:
    """Return condition and description of an encoded error with all three fields."""
    assert isinstance(value, Described)
    assert value.descriptor == 0x1D
    condition, description, info = value.value
    assert type(condition) is Symbol
    assert type(description) is str
    assert description
    assert info is None
    return condition, description


class Reply:
    """One frame of the engine."""

    def __init__(self, channel: int, code: int, fields: list[Any], payload: bytes, raw: bytes):
        self.channel = channel
        self.code = code
        self.fields = fields
        self.payload = payload
        self.raw = raw

    def __repr__(self) -> str:
        return f"{self.code:#x}@{self.channel}{self.fields} + {len(self.payload)} bytes"


class Client:
    """Feeds an engine by hand. `events` are those of the last call."""

    def __init__(self, limits: Limits | None = None, **settings: Any) -> None:
        self.engine = Connection(
            container_id="postbus", limits=limits or Limits(), delivery_id_base=BASE, **settings
        )
        self.now_ms = 1_000
        self.events: list[Event] = []
        self.unread = b""

    # --- bytes ----------------------------------------------------------------------------------

    def feed(self, data: bytes) -> list[Event]:
        self.events = [*one_by_one(self.engine.receive_data(data, self.now_ms))]
        return self.events

    def send(self, code: int, *fields: Any, channel: int = 0, payload: bytes = b"") -> list[Event]:
        return self.feed(frame(channel, performative(code, *fields) + payload))

    def header(self) -> bytes:
        """Remove a protocol header from the engine's output."""
        self.unread += b"".join(self.engine.data_to_send())
        head, self.unread = self.unread[:8], self.unread[8:]
        return head

    def replies(self) -> list[Reply]:
        """Take the frames the engine wrote; each performative is checked for its form."""
        data = self.unread + b"".join(self.engine.data_to_send())
        self.unread = b""
        found: list[Reply] = []
        while data:
            size, offset, _, channel = struct.unpack_from(">IBBH", data)
            assert offset == 2
            assert 8 <= size <= len(data)
            body, raw, data = data[8:size], data[:size], data[size:]
            if not body:
                found.append(Reply(channel, 0, [], b"", raw))
                continue
            assert body[:2] == b"\x00\x53"  # Python's client reads the code at octet 2
            value, end = decode_value(body)
            found.append(Reply(channel, value.descriptor, value.value, body[end:], raw))
        return found

    def reply(self, code: int) -> Reply:
        """Take the only frame the engine wrote."""
        (one,) = self.replies()
        assert one.code == code, one
        return one

    # --- ready-made states ----------------------------------------------------------------------

    def authenticate(self) -> Client:
        self.feed(SASL_HEADER)
        self.feed(frame(0, performative(SASL_INIT, Symbol("ANONYMOUS"), b"", "host"), 1))
        assert type(self.events[0]) is SaslInitReceived
        self.engine.accept_sasl()
        self.feed(AMQP_HEADER)
        self.engine.data_to_send()
        return self

    def open(self, max_frame_bytes: int | None = None, idle_ms: int | None = None) -> Client:
        self.authenticate()
        self.send(OPEN, "client", "host", uint(max_frame_bytes), None, uint(idle_ms))
        self.engine.data_to_send()
        return self

    def begin(self, channel: int = 0, window: int = 5_000, handle_max: int = 255) -> Session:
        self.send(
            BEGIN, None, Uint(0), Uint(window), Uint(5_000), Uint(handle_max), channel=channel
        )
        self.engine.data_to_send()
        (event,) = self.events
        assert isinstance(event, SessionBegun)
        return event.session

    def attach(self, name: str, handle: int, *, is_receiver: bool, channel: int = 0) -> Any:
        """Attach; the answer is up to the test."""
        self.send(
            ATTACH, name, Uint(handle), is_receiver, Ubyte(0), Ubyte(is_receiver), SOURCE, TARGET,
            None, None, None if is_receiver else Uint(0), channel=channel,
        )  # fmt: skip
        attached = self.events[-1]
        assert isinstance(attached, LinkAttached)
        return attached.link

    def sender(
        self, name: str = "s", handle: int = 0, *, credit: int = 100, size: int = 1 << 20,
        channel: int = 0,
    ) -> IncomingLink:  # fmt: skip
        """A link on which the client sends, accepted."""
        link = self.attach(name, handle, is_receiver=False, channel=channel)
        assert isinstance(link, IncomingLink)
        link.accept(max_message_bytes=size, credit=credit)
        self.engine.data_to_send()
        return link

    def receiver(
        self, name: str = "r", handle: int = 1, *, credit: int = 100, channel: int = 0
    ) -> OutgoingLink:
        """A link on which the client receives, accepted and with credit."""
        link = self.attach(name, handle, is_receiver=True, channel=channel)
        assert isinstance(link, OutgoingLink)
        link.accept()
        self.flow(handle=handle, credit=credit, channel=channel)
        self.engine.data_to_send()
        return link

    def flow(
        self, *, handle: int | None = None, delivery_count: int | None = None,
        credit: int | None = None, window: int = 5_000, next_incoming: int | None = BASE,
        is_drain: bool = False, is_echo: bool = False, channel: int = 0,
    ) -> list[Event]:  # fmt: skip
        return self.send(
            FLOW, uint(next_incoming), Uint(window), Uint(0), Uint(5_000), uint(handle),
            uint(delivery_count), uint(credit), None, is_drain, is_echo, channel=channel,
        )  # fmt: skip

    def transfer(
        self, delivery_id: int | None, payload: bytes = b"m", *, handle: int = 0,
        tag: bytes | None = b"t", is_settled: bool = False, more: bool = False,
        state: Any = None, is_aborted: bool = False, channel: int = 0,
    ) -> list[Event]:  # fmt: skip
        return self.send(
            TRANSFER, Uint(handle), uint(delivery_id), tag, Uint(0), is_settled, more, None, state,
            False, is_aborted, channel=channel, payload=payload,
        )  # fmt: skip

    def dispose(
        self, first: int, last: int | None = None, *, state: Any = ACCEPTED,
        is_settled: bool = False, channel: int = 0,
    ) -> list[Event]:  # fmt: skip
        return self.send(
            DISPOSITION, True, Uint(first), uint(last), is_settled, state, channel=channel
        )

    # --- expectations ---------------------------------------------------------------------------

    def expect_closed(self, condition: str) -> None:
        """Check that the engine closed with a condition and reported it to its owner."""
        assert self.engine.is_closed
        closed = self.events[-1]
        assert isinstance(closed, ConnectionClosed)
        assert closed.error is not None
        assert closed.error.condition == condition
        last = self.replies()[-1]
        assert last.code == CLOSE
        assert error_of(last.fields[0])[0] == condition
        assert self.feed(b"\xff" * 100) == []
        assert self.engine.data_to_send() == []
