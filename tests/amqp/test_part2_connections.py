"""AMQP 1.0 part 2, 2.2 to 2.4: headers, frames, open, close, idle time-out."""

from __future__ import annotations

import struct

import pytest

from postbus.amqp import conditions
from postbus.amqp.conditions import AmqpConnectionError
from postbus.amqp.events import ConnectionClosed, ConnectionOpened
from postbus.amqp.limits import Limits
from postbus.message.codec import Described, Symbol, Uint, Ulong, Ushort, encode_value
from tests.amqp.wire import (
    AMQP_HEADER,
    ATTACH,
    BEGIN,
    CLOSE,
    END,
    OPEN,
    SASL_HEADER,
    Client,
    error_of,
    frame,
    performative,
)

EMPTY = b"\x00\x00\x00\x08\x02\x00\x00\x00"


def test_open_is_answered_with_the_full_list() -> None:
    client = Client(Limits(max_frame_bytes=65_536, channel_max=99, idle_timeout_ms=240_000))
    client.authenticate()
    events = client.send(
        OPEN, "me", "bus.example", Uint(4_096), Ushort(7), Uint(60_000), None, None, None, None,
        {Symbol("product"): "x"},
    )  # fmt: skip
    assert events == [ConnectionOpened("me", "bus.example", {"product": "x"})]
    reply = client.reply(OPEN)
    body = (
        b"\xa1\x07postbus" + b"\x40" + b"\x70\x00\x01\x00\x00" + b"\x60\x00\x63"
        + b"\x70\x00\x03\xa9\x80" + b"\x40" * 5
    )  # fmt: skip
    head = b"\x00\x53\x10\xc0" + bytes((len(body) + 1, 10))
    assert reply.raw == frame(0, head + body)


def test_open_without_optional_fields_is_enough() -> None:
    client = Client(Limits(idle_timeout_ms=0)).authenticate()
    assert client.send(OPEN, "") == [ConnectionOpened("", None, {})]
    assert client.reply(OPEN).fields[4] is None


@pytest.mark.parametrize("form", ["ulong", "symbol"])
def test_open_with_another_form_of_descriptor(form: str) -> None:
    descriptor = b"\x80" + struct.pack(">Q", 0x10)
    if form == "symbol":
        descriptor = encode_value(Symbol("amqp:open:list"))
    client = Client().authenticate()
    client.feed(frame(0, b"\x00" + descriptor + encode_value(["me"])))
    assert client.events == [ConnectionOpened("me", None, {})]


def test_close_is_answered_and_reported() -> None:
    client = Client().open()
    error = Described(Ulong(0x1D), [Symbol("a:b"), "because", None])
    client.send(CLOSE, error)
    (closed,) = client.events
    assert isinstance(closed, ConnectionClosed)
    assert closed.error is not None
    assert (closed.error.condition, closed.error.description) == ("a:b", "because")
    assert client.reply(CLOSE).raw == frame(0, b"\x00\x53\x18\xc0\x02\x01\x40")
    assert client.engine.is_closed


def test_close_without_error() -> None:
    client = Client().open()
    assert client.send(CLOSE) == [ConnectionClosed(None)]


def test_our_close_has_condition_and_description_and_is_the_last_frame() -> None:
    client = Client().open()
    session = client.begin()
    incoming, outgoing = client.sender(), client.receiver()
    outgoing.send(b"t" * 16, (b"m",), is_settled=False)
    client.engine.data_to_send()
    client.engine.close(AmqpConnectionError(conditions.CONNECTION_FORCED, "bye"))
    reply = client.reply(CLOSE)
    text = b"\xa3\x16amqp:connection:forced\xa1\x03bye\x40"
    inner = b"\x00\x53\x1d\xc0" + bytes((len(text) + 1, 3)) + text
    assert reply.raw == frame(0, b"\x00\x53\x18\xc0" + bytes((len(inner) + 1, 1)) + inner)
    client.engine.close()
    assert session.is_ended
    assert not outgoing.is_attached
    incoming.grant(5)
    incoming.settle(0, 0, None)  # type: ignore[arg-type]
    incoming.detach()
    outgoing.send(b"t" * 16, (b"m",), is_settled=False)
    outgoing.drained()
    outgoing.echo_flow()
    session.end()
    assert client.engine.data_to_send() == []
    assert client.engine.sessions == {}
    assert client.send(CLOSE) == []
    assert client.engine.tick(10**9) == []


def test_close_before_open_writes_no_frame() -> None:
    client = Client()
    client.engine.close(AmqpConnectionError(conditions.CONNECTION_FORCED, "bye"))
    assert client.engine.data_to_send() == []


# --- frames --------------------------------------------------------------------------------------


def test_every_fragmentation_is_the_same() -> None:
    stream = (
        SASL_HEADER
        + frame(0, performative(0x41, Symbol("ANONYMOUS")), 1)
        + AMQP_HEADER
        + frame(0, performative(OPEN, "me"))
        + EMPTY
        + frame(3, performative(BEGIN, None, Uint(0), Uint(9), Uint(9)))
        + frame(0, performative(CLOSE))
    )
    for step in (1, 2, 5, 8, 13, len(stream)):
        client = Client()
        kinds = []
        for pos in range(0, len(stream), step):
            for event in client.feed(stream[pos : pos + step]):
                kinds.append(type(event).__name__)
                if kinds[-1] == "SaslInitReceived":
                    client.engine.accept_sasl()
                    kinds += [type(each).__name__ for each in client.feed(b"")]
        assert kinds == ["SaslInitReceived", "ConnectionOpened", "SessionBegun", "ConnectionClosed"]


def test_extended_frame_header_is_skipped() -> None:
    client = Client().authenticate()
    body = performative(OPEN, "me")
    client.feed(struct.pack(">IBBH", len(body) + 12, 3, 0, 0) + b"\xff" * 4 + body)
    assert client.events == [ConnectionOpened("me", None, {})]


@pytest.mark.parametrize(
    ("head", "condition"),
    [
        (b"\x00\x00\x00\x07\x02\x00\x00\x00", conditions.FRAMING_ERROR),
        (b"\x00\x00\x00\x08\x01\x00\x00\x00", conditions.FRAMING_ERROR),
        (b"\x00\x00\x00\x08\x03\x00\x00\x00", conditions.FRAMING_ERROR),
        (b"\x00\x01\x00\x01\x02\x00\x00\x00", conditions.FRAMING_ERROR),
        (b"\xff\xff\xff\xff\x02\x00\x00\x00", conditions.FRAMING_ERROR),
        (b"\x00\x00\x00\x08\x02\x02\x00\x00", conditions.FRAMING_ERROR),
        (b"\x00\x00\x00\x08\x02\x01\x00\x00", conditions.FRAMING_ERROR),
        (b"\x00\x00\x00\x09\x02\x00\x00\x00\x40", conditions.NOT_IMPLEMENTED),
        (b"\x00\x00\x00\x09\x02\x00\x00\x00\x00", conditions.DECODE_ERROR),
        (frame(0, performative(0x99)), conditions.NOT_IMPLEMENTED),
        (frame(0, performative(0x41, Symbol("x"))), conditions.NOT_ALLOWED),
        (frame(0, b"\x00\x53\x11\x40"), conditions.DECODE_ERROR),
        (frame(0, b"\x41\x53\x14\x40\x40"), conditions.NOT_IMPLEMENTED),
        (frame(0, performative(CLOSE, None, None)), conditions.DECODE_ERROR),
        (frame(0, performative(OPEN, "again")), conditions.ILLEGAL_STATE),
        (frame(9, performative(ATTACH, "x", Uint(0), False)), conditions.NOT_ALLOWED),
        (frame(9, performative(END)), conditions.NOT_ALLOWED),
        (frame(0, performative(BEGIN, None, None, Uint(1), Uint(1))), conditions.DECODE_ERROR),
        (frame(0, performative(BEGIN, None, Uint(1), True, Uint(1))), conditions.DECODE_ERROR),
        (frame(0, performative(BEGIN, None, Uint(1), "1", Uint(1))), conditions.DECODE_ERROR),
    ],
    ids=lambda each: each.hex() if isinstance(each, bytes) else each,
)
def test_violation_closes_with_a_condition(head: bytes, condition: str) -> None:
    client = Client().open()
    if condition == conditions.NOT_ALLOWED and head[10:11] == b"\x41":
        client.begin()
    client.feed(head)
    client.expect_closed(condition)


@pytest.mark.parametrize(
    ("fields", "condition"),
    [
        ((None,), conditions.INVALID_FIELD),
        ((Uint(1),), conditions.INVALID_FIELD),
        (("me", None, Uint(511)), conditions.INVALID_FIELD),
        (("me", None, "big"), conditions.DECODE_ERROR),
        (("me", None, None, Uint(70_000)), conditions.DECODE_ERROR),
        (("me", None, None, None, "x"), conditions.DECODE_ERROR),
    ],
)
def test_bad_open_is_answered_with_open_and_close(
    fields: tuple[object, ...], condition: str
) -> None:
    client = Client().authenticate()
    client.send(OPEN, *fields)
    client.unread = b"".join(client.engine.data_to_send())
    data = client.unread
    client.expect_closed(condition)
    client.unread = data
    opened, closed = client.replies()
    assert (opened.code, closed.code) == (OPEN, CLOSE)
    assert len(opened.fields) == 10
    assert error_of(closed.fields[0])[0] == condition


@pytest.mark.parametrize("code", [BEGIN, CLOSE, END, ATTACH])
def test_first_frame_must_be_open(code: int) -> None:
    client = Client().authenticate()
    client.send(code, None, Uint(0), Uint(0)) if code in (BEGIN, ATTACH) else client.send(code)
    client.expect_closed(conditions.ILLEGAL_STATE)


def test_small_frames_of_the_peer_are_kept() -> None:
    client = Client().open(max_frame_bytes=512)
    client.begin()
    link = client.receiver()
    link.send(b"t" * 16, (b"x" * 2_000,), is_settled=True)
    link.send(b"t" * 32, (b"",), is_settled=True)
    replies = client.replies()
    assert all(len(each.raw) <= 512 for each in replies)
    assert b"".join(each.payload for each in replies) == b"x" * 2_000


# --- idle time-out -------------------------------------------------------------------------------


def test_silent_peer_is_closed_after_the_idle_timeout() -> None:
    client = Client(Limits(idle_timeout_ms=1_000)).open()
    assert client.engine.tick(client.now_ms + 999) == []
    client.now_ms += 999
    client.feed(EMPTY)
    assert client.events == []
    assert client.engine.tick(client.now_ms + 999) == []
    client.events = client.engine.tick(client.now_ms + 1_000)
    client.expect_closed(conditions.RESOURCE_LIMIT_EXCEEDED)


def test_silent_peer_without_an_open_is_closed() -> None:
    client = Client(Limits(idle_timeout_ms=1_000))
    assert client.engine.tick(5_000) == []
    (closed,) = client.engine.tick(6_000)
    assert isinstance(closed, ConnectionClosed)
    assert client.engine.data_to_send() == []


def test_heartbeats_come_at_half_of_the_peers_idle_timeout() -> None:
    client = Client(Limits(idle_timeout_ms=0)).open(idle_ms=600)
    engine = client.engine
    assert engine.tick_interval_ms == 150
    engine.tick(1_000)
    engine.data_to_send()
    written_at = []
    for now_ms in range(1_000, 3_000, 100):
        assert engine.tick(now_ms) == []
        if data := b"".join(engine.data_to_send()):
            assert data == EMPTY
            written_at.append(now_ms)
    assert written_at == [1_300, 1_600, 1_900, 2_200, 2_500, 2_800]


def test_other_frames_stand_for_heartbeats() -> None:
    client = Client().open(idle_ms=600)
    session = client.begin()
    client.engine.tick(1_000)
    client.engine.data_to_send()
    session.write_flow()
    client.engine.data_to_send()
    client.engine.tick(1_290)
    client.engine.tick(1_580)
    assert client.engine.data_to_send() == []
    client.engine.tick(1_590)
    assert client.engine.data_to_send() == [EMPTY]


def test_tick_interval_has_bounds() -> None:
    assert Client(Limits(idle_timeout_ms=0)).engine.tick_interval_ms == 15_000
    assert Client(Limits(idle_timeout_ms=4)).engine.tick_interval_ms == 100
    assert Client(Limits(idle_timeout_ms=240_000)).engine.tick_interval_ms == 60_000


def test_out_bytes_counts_pending_bytes() -> None:
    client = Client().open()
    client.begin()
    link = client.receiver()
    assert client.engine.out_bytes == 0
    link.send(b"t" * 16, (b"ab", b"c"), is_settled=True)
    link.send(b"t", (b"abc",), is_settled=True)
    waiting = client.engine.out_bytes
    assert waiting == len(b"".join(client.engine.data_to_send()))
    assert client.engine.out_bytes == 0
