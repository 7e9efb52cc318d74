"""AMQP 1.0 part 5, 5.3: SASL."""

from __future__ import annotations

import pytest

from postbus.amqp import conditions
from postbus.amqp.events import ConnectionClosed, ConnectionOpened, SaslInitReceived
from postbus.amqp.limits import Limits
from postbus.message.codec import Symbol, encode_value
from tests.amqp.wire import (
    AMQP_HEADER,
    OPEN,
    SASL_HEADER,
    SASL_INIT,
    SASL_MECHANISMS,
    SASL_OUTCOME,
    Client,
    frame,
    performative,
)

INIT = frame(0, performative(SASL_INIT, Symbol("PLAIN"), b"\0user\0key", "bus.example"), 1)


def test_mechanisms_follow_the_header() -> None:
    client = Client()
    assert client.feed(SASL_HEADER) == []
    assert client.header() == SASL_HEADER
    reply = client.reply(SASL_MECHANISMS)
    names = b"\x07MSSBCBS\x05PLAIN\x09ANONYMOUS\x08EXTERNAL"
    array = b"\xe0" + bytes((len(names) + 2, 4)) + b"\xa3" + names
    body = b"\x00\x53\x40\xc0" + bytes((len(array) + 1, 1)) + array
    assert reply.raw == frame(0, body, 1)


def test_one_mechanism_is_an_array_too() -> None:
    client = Client(sasl_mechanisms=("ANONYMOUS",))
    client.feed(SASL_HEADER)
    client.header()
    (offered,) = client.reply(SASL_MECHANISMS).fields
    assert offered.items == ["ANONYMOUS"]


def test_init_is_reported_and_its_acceptance_allows_open() -> None:
    client = Client()
    client.feed(SASL_HEADER + INIT)
    assert client.events == [SaslInitReceived("PLAIN", b"\0user\0key", "bus.example")]
    client.header()
    client.replies()
    client.engine.accept_sasl()
    assert client.reply(SASL_OUTCOME).raw == frame(0, b"\x00\x53\x44\xc0\x03\x01\x50\x00", 1)
    client.feed(AMQP_HEADER)
    assert client.header() == AMQP_HEADER
    assert client.send(OPEN, "me") == [ConnectionOpened("me", None, {})]


def test_init_without_optional_fields() -> None:
    client = Client()
    client.feed(SASL_HEADER + frame(0, performative(SASL_INIT, Symbol("ANONYMOUS")), 1))
    assert client.events == [SaslInitReceived("ANONYMOUS", b"", None)]


def test_everything_may_be_pipelined_behind_the_init() -> None:
    client = Client()
    client.feed(SASL_HEADER + INIT + AMQP_HEADER + frame(0, performative(OPEN, "me")))
    assert [type(each) for each in client.events] == [SaslInitReceived]
    client.engine.accept_sasl()
    assert client.feed(b"") == [ConnectionOpened("me", None, {})]


@pytest.mark.parametrize("code", [1, 4])
def test_sasl_refusal_is_reported_and_ends_the_connection(code: int) -> None:
    client = Client()
    client.feed(SASL_HEADER + INIT + AMQP_HEADER + frame(0, performative(OPEN, "me")))
    client.header()
    client.replies()
    client.engine.refuse_sasl(code)
    assert client.reply(SASL_OUTCOME).raw == frame(
        0, b"\x00\x53\x44\xc0\x03\x01\x50" + bytes((code,)), 1
    )
    assert client.engine.is_closed
    assert client.feed(b"") == []
    assert client.engine.data_to_send() == []


@pytest.mark.parametrize(
    "header",
    [
        b"AMQP\x02\x01\x00\x00",
        b"AMQP\x03\x01\x00\x01",
        b"AMQP\x00\x00\x09\x01",
        b"GET / HT",
        b"\x16\x03\x01\x00\x00\x00\x00\x00",
    ],
)
def test_wrong_first_header_is_answered_with_ours_and_closed(header: bytes) -> None:
    client = Client()
    assert client.feed(header) == [ConnectionClosed(None)]
    assert b"".join(client.engine.data_to_send()) == SASL_HEADER
    assert client.engine.is_closed


def test_the_layer_may_be_left_out_where_anonymous_is_allowed() -> None:
    client = Client()
    opened = ConnectionOpened("me", None, {})
    assert client.feed(AMQP_HEADER + frame(0, performative(OPEN, "me"))) == [opened]
    assert client.header() == AMQP_HEADER


def test_the_layer_may_not_be_left_out_otherwise() -> None:
    client = Client(sasl_mechanisms=("PLAIN",))
    assert client.feed(AMQP_HEADER) == [ConnectionClosed(None)]
    assert b"".join(client.engine.data_to_send()) == SASL_HEADER
    assert client.engine.is_closed


def test_wrong_second_header_is_answered_with_ours_and_closed() -> None:
    client = Client()
    client.feed(SASL_HEADER + INIT)
    client.engine.accept_sasl()
    client.engine.data_to_send()
    assert client.feed(SASL_HEADER) == [ConnectionClosed(None)]
    assert b"".join(client.engine.data_to_send()) == AMQP_HEADER


@pytest.mark.parametrize(
    ("data", "condition"),
    [
        (frame(0, b"", 1), conditions.DECODE_ERROR),
        (frame(0, b"\x00\x53", 1), conditions.DECODE_ERROR),
        (frame(0, performative(SASL_OUTCOME), 1), conditions.FRAMING_ERROR),
        (frame(0, performative(0x42, b"x"), 1), conditions.FRAMING_ERROR),
        (frame(0, encode_value("x"), 1), conditions.FRAMING_ERROR),
        (frame(0, performative(SASL_INIT), 1), conditions.DECODE_ERROR),
        (frame(0, performative(SASL_INIT, Symbol("A"))), conditions.FRAMING_ERROR),
        (frame(0, performative(OPEN, "me")), conditions.FRAMING_ERROR),
    ],
    ids=lambda each: each.hex() if isinstance(each, bytes) else each,
)
def test_violation_before_authentication_closes_without_a_frame(
    data: bytes, condition: str
) -> None:
    client = Client()
    client.feed(SASL_HEADER)
    client.engine.data_to_send()
    client.feed(data)
    (closed,) = client.events
    assert isinstance(closed, ConnectionClosed)
    assert closed.error is not None
    assert closed.error.condition == condition
    assert client.engine.data_to_send() == []
    assert client.engine.is_closed


def test_sasl_frame_after_authentication_closes() -> None:
    client = Client().open()
    client.feed(INIT)
    client.expect_closed(conditions.FRAMING_ERROR)


def test_flood_before_the_outcome_is_cut_off() -> None:
    client = Client(Limits(max_frame_bytes=512))
    client.feed(SASL_HEADER + INIT)
    client.engine.data_to_send()
    for _ in range(512):
        assert client.feed(b"x") == []
    client.feed(b"x")
    (closed,) = client.events
    assert isinstance(closed, ConnectionClosed)
    assert client.engine.is_closed
