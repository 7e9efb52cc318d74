"""Frames of WebSocket without sockets, and a short run of the fuzz target."""

from __future__ import annotations

import pytest

from postbus.edge.amqp.websocket_frames import (
    MAX_FRAME_BYTES,
    FrameReader,
    WebSocketError,
    binary_frames,
    close_frame,
    pong_frame,
)
from tests.edge.amqp.fuzz_websocket import run_case
from tests.edge.amqp.websocket_client import BINARY, CLOSE, PING, masked


def test_examples_of_the_standard() -> None:
    hello = bytes.fromhex("82 85 37 fa 21 3d 7f 9f 4d 51 58")  # RFC 6455, 5.7, as binary
    assert FrameReader(10).receive(hello).payload == b"Hello"
    ping = bytes.fromhex("89 85 37 fa 21 3d 7f 9f 4d 51 58")
    assert FrameReader(10).receive(ping).ping == b"Hello"
    assert pong_frame(b"Hello") == bytes.fromhex("8a 05 48 65 6c 6c 6f")
    assert binary_frames(bytes(256))[:4] == bytes.fromhex("82 7e 01 00")


@pytest.mark.parametrize("size", [0, 125, 126, MAX_FRAME_BYTES])
def test_one_frame_while_it_fits(size: int) -> None:
    assert len(binary_frames(bytes(size))) == size + (2 if size < 126 else 4)


def test_long_writes_are_frames_of_limited_length() -> None:
    data = bytes(range(256)) * 1_000
    frames, found = binary_frames(data), b""
    while frames:
        size, head = frames[1], 2
        if size == 126:
            size, head = int.from_bytes(frames[2:4], "big"), 4
        assert frames[0] == 0x82
        found += frames[head : head + size]
        frames = frames[head + size :]
    assert found == data


def test_long_frame_is_passed_on_as_it_comes() -> None:
    reader = FrameReader(1 << 20)
    data = masked(BINARY, bytes(range(256)) * 4_000)
    received = [reader.receive(data[at : at + 1_001]).payload for at in range(0, len(data), 1_001)]
    assert all(received)
    assert b"".join(received) == bytes(range(256)) * 4_000
    assert reader._rest == b""


def test_bytes_after_a_close_frame_are_ignored() -> None:
    reader = FrameReader(100)
    close = masked(CLOSE, b"\x03\xe8")
    received = reader.receive(masked(BINARY, b"before") + close + masked(BINARY, b"behind"))
    assert (received.payload, received.close_code) == (b"before", 1000)
    assert reader.receive(masked(PING, b"x")).ping is None


def test_text_frame_is_refused_at_its_header() -> None:
    with pytest.raises(WebSocketError, match="binary"):
        FrameReader(100).receive(masked(1, b"x" * 1_000)[:2])


def test_close_frame_carries_a_short_reason() -> None:
    assert close_frame(0) == b"\x88\x00"
    assert close_frame(1002, "why")[2:] == b"\x03\xeawhy"
    assert len(close_frame(1002, "x" * 500)) == 127


@pytest.mark.slow
def test_random_frame_streams_are_read_or_refused() -> None:
    for seed in range(300):
        run_case(seed)
