"""The hot frames: read in place exactly as the codec reads them, written as the codec writes."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postbus.amqp import performatives as p
from postbus.amqp.conditions import AmqpConnectionError
from postbus.amqp.events import DeliveriesUpdated, TransferReceived
from postbus.amqp.frames import (
    accepted_disposition,
    frame,
    parse_disposition,
    parse_transfer,
    raw_fields,
    transfer_fields,
)
from postbus.amqp.runs import TRANSFER_BYTES, link_frames
from postbus.message.codec import DecodeError, Described, Symbol, Uint, Ulong, decode_value
from tests.amqp.wire import BASE, SOURCE, TARGET, Client, performative

TRANSFER, DISPOSITION = 0x14, 0x15
UINTS = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1)).map(Uint)
FLAGS = st.sampled_from([None, True, False])
STATES = st.sampled_from([None, *(Described(Ulong(code), []) for code in (0x24, 0x25, 0x26, 0x27))])
NUMBERED = st.one_of(st.none(), UINTS)


def test_single_frame_transfer_byte_for_byte() -> None:
    pack = link_frames(3, 7)
    tag = bytes(range(16))
    expected = (
        b"\x00\x00\x00\x32\x02\x00\x00\x03"  # 50 octets, doff 2, AMQP, channel 3
        b"\x00\x53\x14\xc0\x25\x0b"  # transfer: list8 of 37 octets, 11 fields
        b"\x70\x00\x00\x00\x07\x70\x40\x00\x00\x01"  # handle, delivery-id
        b"\xa0\x10" + tag + b"\x43\x42\x42\x40\x40\x42\x42\x42"
    )
    assert TRANSFER_BYTES == len(expected) == 50
    written = b"".join(pack(0x4000_0001, [tag, tag], [(b"1234", b"5678"), ()], [8, 0], False))
    first, following = written[:58], written[58:]
    assert first == expected[:3] + bytes([len(expected) + 8]) + expected[4:] + b"12345678"
    assert following == expected[:23] + b"\x02" + expected[24:]
    assert pack(1, [tag], [(b"",)], [0], True)[0][-7:-6] == b"\x41"


def test_accepted_disposition_byte_for_byte() -> None:
    assert accepted_disposition(1, True, 5, 0x4000_0006) == (
        b"\x00\x00\x00\x1f\x02\x00\x00\x01\x00\x53\x15\xc0\x12\x06"
        b"\x41\x70\x00\x00\x00\x05\x70\x40\x00\x00\x06\x41\x00\x53\x24\x45\x42"
    )


@given(handle=UINTS, delivery_id=UINTS, tag=st.binary(min_size=16, max_size=16), flag=st.booleans())
def test_template_of_transfer_reads_back(
    handle: int, delivery_id: int, tag: bytes, flag: bool
) -> None:
    written = b"".join(link_frames(1, handle)(delivery_id, [tag], [(b"a", b"bc")], [3], flag))
    assert int.from_bytes(written[:4], "big") == len(written)
    value, end = decode_value(written, 8)
    fields = [handle, delivery_id, tag, 0, flag, False, None, None, False, False, False]
    assert value == Described(Ulong(TRANSFER), fields)
    assert written[end:] == b"abc"


def outcome(parse: Callable[[], Any]) -> Any:
    """Return the result of a parser, or the kind of its refusal."""
    try:
        return parse()
    except (DecodeError, AmqpConnectionError, IndexError, struct.error):
        return "refused"


def by_codec(data: bytes, start: int, end: int) -> Any:
    value, at = decode_value(data, start, end)
    return transfer_fields(p.performative_of(value)[1]), at


@pytest.mark.slow
@settings(max_examples=500)
@given(
    handle=UINTS,
    delivery_id=NUMBERED,
    tag=st.none() | st.binary(max_size=40),
    message_format=st.sampled_from([None, Uint(0), Uint(5), Uint(0x80013700)]),
    rest=st.lists(FLAGS, max_size=2),
    tail=st.lists(st.none() | st.booleans(), max_size=3),
    state=STATES,
    payload=st.binary(max_size=20),
)
@example(Uint(0), Uint(9), b"t" * 33, Uint(0), [False, False], [], None, b"x")
def test_transfers_are_read_as_the_codec_reads_them(
    handle: int,
    delivery_id: int | None,
    tag: bytes | None,
    message_format: int | None,
    rest: list[bool | None],
    tail: list[bool | None],
    state: Any,
    payload: bytes,
) -> None:
    fields = [handle, delivery_id, tag, message_format, *rest]
    if len(rest) == 2 and tail:
        fields += [None, state, *tail]
    body = performative(TRANSFER, *fields) + payload
    # bytes around the frame in the buffer must not matter
    data = b"\xff" * 5 + body + b"\x41" * 60
    fast = outcome(lambda: parse_transfer(data, 5, 5 + len(body)))
    assert fast == outcome(lambda: by_codec(data, 5, 5 + len(body)))
    assert fast == "refused" or data[fast[1] : 5 + len(body)] == payload


@settings(max_examples=300)
@given(body=st.binary(max_size=60), data=st.data())
def test_damaged_transfers_are_read_as_the_codec_reads_them(body: bytes, data: Any) -> None:
    whole = bytearray(performative(TRANSFER, Uint(1), Uint(2), b"tag", Uint(0), False, False))
    for _ in range(data.draw(st.integers(0, 2))):
        whole[data.draw(st.integers(3, len(whole) - 1))] = data.draw(st.integers(0, 255))
    buffer = bytes(whole) + body
    fast = outcome(lambda: parse_transfer(buffer, 0, len(buffer)))
    assert fast == outcome(lambda: by_codec(buffer, 0, len(buffer)))


@pytest.mark.slow
@settings(max_examples=500)
@given(
    role=st.booleans(),
    first=UINTS,
    last=NUMBERED,
    is_settled=FLAGS,
    state=STATES,
    batchable=st.lists(FLAGS, max_size=1),
)
def test_dispositions_are_read_as_the_codec_reads_them(
    role: bool, first: int, last: int | None, is_settled: bool | None, state: Any, batchable: Any
) -> None:
    body = performative(DISPOSITION, role, first, last, is_settled, state, *batchable)
    buffer = b"\x00" * 3 + body + b"\x42" * 30
    fast = parse_disposition(buffer, 3, 3 + len(body))
    if fast is None:
        return  # the codec reads it
    assert role
    assert fast == (first, first if last is None else last, is_settled is True, p.ACCEPTED)
    assert p.decode_state(state) is p.ACCEPTED


@pytest.mark.parametrize("last", [None, Uint(BASE + 9)])
@pytest.mark.parametrize("tail", [[], [False], [None]])
def test_usual_dispositions_are_read_in_place(last: int | None, tail: list[bool | None]) -> None:
    accepted = Described(Ulong(0x24), [])
    body = performative(DISPOSITION, True, Uint(BASE + 2), last, False, accepted, *tail)
    assert parse_disposition(body, 0, len(body)) == (
        BASE + 2,
        BASE + 2 if last is None else BASE + 9,
        False,
        p.ACCEPTED,
    )


def test_raw_fields_are_the_bytes_of_the_peer() -> None:
    odd = b"\x00\x80\x00\x00\x00\x00\x00\x00\x00\x28\xd0\x00\x00\x00\x07\x00\x00\x00\x01\xa1\x01q"
    body = performative(0x12, "n", Uint(0), True, None, None, None, TARGET)
    at = raw_fields(body, 0, len(body), (5, 6))
    assert at[0] == b"\x40"
    assert decode_value(at[1])[0] == TARGET
    fields = b"\xa1\x01n\x43\x41\x40\x40" + odd
    list8 = b"\x00\x53\x12\xc0" + bytes([len(fields) + 1, 6]) + fields
    assert raw_fields(list8, 0, len(list8), (5, 6)) == (odd, b"\x40")
    size, count = struct.pack(">I", len(fields) + 4), struct.pack(">I", 6)
    list32 = b"\x00\xa3\x10amqp:attach:list\xd0" + size + count + fields
    assert raw_fields(list32, 0, len(list32), (5, 6)) == (odd, b"\x40")
    assert raw_fields(b"\x00\x53\x12\x45", 0, 4, (5, 6)) == (b"\x40", b"\x40")
    assert decode_value(list32)[0].descriptor == Symbol("amqp:attach:list")
    assert SOURCE.descriptor == decode_value(odd)[0].descriptor


# --- speed --------------------------------------------------------------------------------------

MESSAGES = 200
SLACK = 8
"""The aims are for a quiet machine; a test run shares its cores. It catches a lost fast path."""


def best_of(run: Callable[[], None], rounds: int = 15) -> float:
    """Return the microseconds one of `MESSAGES` took in the best round."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times) / MESSAGES * 1e6


def test_receiving_a_transfer_takes_microseconds() -> None:
    client = Client().open()
    client.begin()
    client.sender(credit=1_000_000)
    body = b"x" * 1_024
    data = b"".join(
        frame(
            0, performative(TRANSFER, Uint(0), Uint(70_000 + n), b"tag4", Uint(0), False, False)
        ).replace(b"\x00\x00\x00", b"\x00\x00\x04", 1)
        + body
        for n in range(MESSAGES)
    )
    events = client.feed(data)
    assert len(events) == MESSAGES
    assert all(type(each) is TransferReceived and each.payload == body for each in events)
    assert best_of(lambda: client.engine.receive_data(data, 1) and None) < 2.5 * SLACK


def test_sending_takes_microseconds() -> None:
    client = Client().open(1 << 20)
    client.begin(window=1 << 30)
    link = client.receiver(credit=1 << 30)
    link.session.receive_flow([Uint(BASE), Uint(1 << 30), *[None] * 9])
    tags = [n.to_bytes(16, "big") for n in range(MESSAGES)]

    def run() -> None:
        for tag in tags:
            link.send(tag, (tag, tag), is_settled=False)
        client.engine.data_to_send()

    assert best_of(run) < 1.5 * SLACK


def test_dispositions_of_one_read_are_one_event_and_take_microseconds() -> None:
    client = Client().open(1 << 20)
    client.begin(window=1 << 30)
    link = client.receiver(credit=1 << 30)
    times = []
    for _ in range(15):
        first = BASE + link.sent
        for n in range(MESSAGES):
            link.send(n.to_bytes(16, "big"), (b"x",), is_settled=False)
        accepted = Described(Ulong(0x24), [])
        data = b"".join(
            frame(0, performative(DISPOSITION, True, Uint(each), Uint(each), True, accepted))
            for each in range(first, first + MESSAGES)
        )
        began = time.perf_counter()
        events = client.engine.receive_data(data, 1)
        times.append(time.perf_counter() - began)
        (event,) = events
        assert isinstance(event, DeliveriesUpdated)
        assert event.delivery_ids == list(range(first, first + MESSAGES))
        assert event.tags == [n.to_bytes(16, "big") for n in range(MESSAGES)]
    assert min(times) / MESSAGES * 1e6 < 1.0 * SLACK
