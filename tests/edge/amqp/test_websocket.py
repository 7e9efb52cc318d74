"""AMQP over WebSocket on the wire: handshake, frames, closing, limits."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Iterator

import pytest

from postbus.edge.amqp import websocket
from postbus.edge.amqp.websocket import accept_key
from tests.edge.amqp.websocket_client import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    TEXT,
    WebSocketClient,
    masked,
    request,
)
from tests.edge.bus_thread import RULES, TLS_HOST, BusThread
from tests.edge.front_rig import AMQP_HEADER
from tests.edge.raw_client import ACCEPTED, OPEN, TRANSFER, RawClient, message
from tests.edge.raw_client import CLOSE as AMQP_CLOSE
from tests.edge.raw_client import frame as amqp_frame

pytestmark = pytest.mark.slow

ROOT = RULES[0]


@pytest.fixture
def opened(bus: BusThread) -> Iterator[WebSocketClient]:
    """A connection behind the handshake."""
    client = WebSocketClient(bus.port)
    yield client
    client.close()


def amqp(client: WebSocketClient) -> RawClient:
    return RawClient(0, ROOT.name, ROOT.keys.primary, stream=client)


def answer(bus: BusThread, data: bytes) -> str:
    """Send a request and return all that comes until a moment after the answer."""
    with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client:
        client.sendall(data)
        found = b""
        while b"</Error>" not in found and b"101 Switching" not in found:
            part = client.recv(65_536)
            assert part, found
            found += part
    return found.decode()


# --- handshake ----------------------------------------------------------------------------------


def test_key_is_answered_as_the_standard_shows() -> None:
    assert accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize(
    ("offered", "selected"),
    [
        ("AMQPWSB10", "AMQPWSB10"),
        ("amqp", "amqp"),
        ("mqtt, AMQP , AMQPWSB10", "amqp"),
        ("amqpwsb10", "AMQPWSB10"),
    ],
)
def test_one_subprotocol_is_selected(bus: BusThread, offered: str, selected: str) -> None:
    client = WebSocketClient(bus.port, subprotocol=offered)
    assert f"Sec-WebSocket-Protocol: {selected}" in client.head.split("\r\n")
    client.sendall(AMQP_HEADER)
    assert client.recv(8).startswith(AMQP_HEADER)
    client.close()


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"subprotocol": "mqtt"}, 400, "AMQPWSB10 or amqp"),
        ({"subprotocol": None}, 400, "AMQPWSB10 or amqp"),
        ({"Sec_WebSocket_Version": "8"}, 426, "version 13"),
        ({"Sec_WebSocket_Key": "c2hvcnQ="}, 400, "16 bytes"),
        ({"Sec_WebSocket_Key": "?"}, 400, "16 bytes"),
        ({"Upgrade": ""}, 426, "Upgrade: websocket"),
        ({"Connection": "close"}, 426, "Upgrade: websocket"),
        ({"Content_Length": "3"}, 400, "no body"),
    ],
)
def test_wrong_handshake_is_refused(
    bus: BusThread, fields: dict[str, str], status: int, text: str
) -> None:
    found = answer(bus, request(bus.port, **fields))  # type: ignore[arg-type]
    assert found.startswith(f"HTTP/1.1 {status} ")
    assert text in found
    assert f"<Code>{status}</Code>" in found


@pytest.mark.parametrize("path", ["/$servicebus/websocket/", "/$ServiceBus/WebSocket?x=1"])
def test_path_is_found_in_other_spellings(bus: BusThread, path: str) -> None:
    assert "101 Switching" in answer(bus, request(bus.port, path=path))


def test_handshake_may_follow_other_requests(bus: BusThread, queue: str) -> None:
    with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        while not client.recv(65_536).endswith(b"}"):
            pass
        client.sendall(request(bus.port) + masked(BINARY, AMQP_HEADER))
        found = b""
        while AMQP_HEADER not in found:
            found += client.recv(65_536)
    assert re.search(rb"\r\n\r\n\x82.AMQP", found)


# --- the stream ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 7, 65_535, 1 << 20])
def test_boundaries_of_frames_are_ignored(bus: BusThread, queue: str, step: int) -> None:
    client = WebSocketClient(bus.port, step=step)
    body = message(bytes(range(256)) * (2 if step < 10 else 200))
    with amqp(client) as raw:
        raw.attach_sender(queue)
        raw.write(*[raw.transfer(n, body) for n in range(10)])
        assert set(raw.dispositions(10).values()) == {ACCEPTED}
        raw.attach_receiver(queue)
        raw.write(raw.flow(10))
        for _ in range(10):
            assert raw.expect(TRANSFER).payload.endswith(body)
    assert bus.counts(queue).active == 10


def test_large_bursts_pass_through_tls(bus: BusThread, queue: str) -> None:
    context = ssl.create_default_context(cafile=str(bus.authority_file))
    with amqp(WebSocketClient(5671, TLS_HOST, context)) as raw:
        raw.attach_sender(queue)
        body = message(b"x" * 30_000)
        for start in range(0, 300, 50):
            raw.write(*[raw.transfer(start + n, body) for n in range(50)])
            assert set(raw.dispositions(50).values()) == {ACCEPTED}
        raw.attach_receiver(queue)
        raw.write(raw.flow(300))
        for _ in range(300):
            assert len(raw.expect(TRANSFER).payload) > 30_000


def test_bytes_sent_with_the_handshake_are_not_lost(bus: BusThread) -> None:
    early = masked(BINARY, AMQP_HEADER[:3]) + masked(BINARY, AMQP_HEADER[3:])
    client = WebSocketClient(bus.port, early=early)
    assert client.recv(8).startswith(AMQP_HEADER)
    client.close()


def test_message_may_come_in_fragments_with_pings_between(opened: WebSocketClient) -> None:
    opened.socket.sendall(
        masked(BINARY, AMQP_HEADER[:2], flags=0)
        + masked(PING, b"one")
        + masked(PING, b"are you there?")
        + masked(0, b"", flags=0)
        + masked(0, AMQP_HEADER[2:])
    )
    found = dict(opened.read() for _ in range(2))
    assert found[BINARY].startswith(AMQP_HEADER)
    assert found[PONG] == b"are you there?"


def test_unsolicited_pongs_are_ignored(opened: WebSocketClient) -> None:
    opened.socket.sendall(masked(PONG, b"hello") + masked(BINARY, AMQP_HEADER))
    assert opened.recv(8).startswith(AMQP_HEADER)


# --- closing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (masked(TEXT, b"AMQP"), 1003),
        (masked(TEXT, b"AM", flags=0), 1003),
        (masked(BINARY, b"AM", flags=0) + masked(BINARY, b"QP"), 1002),
        (masked(0, b"QP"), 1002),
        (masked(3, b""), 1002),
        (masked(11, b""), 1002),
        (masked(BINARY, b"x", flags=0xC0), 1002),
        (b"\x82\x01x", 1002),
        (masked(PING, b"x" * 126), 1002),
        (masked(PING, b"", flags=0), 1002),
        (masked(CLOSE, b"x"), 1002),
        (masked(CLOSE, (1005).to_bytes(2, "big")), 1002),
        (masked(CLOSE, (2_000).to_bytes(2, "big")), 1002),
        (masked(CLOSE, b"\x03\xe8\xff"), 1007),
        (b"\x82\xff" + (1 << 40).to_bytes(8, "big") + bytes(4), 1009),
    ],
)
def test_breach_of_the_protocol_is_named(opened: WebSocketClient, wrong: bytes, code: int) -> None:
    opened.socket.sendall(wrong)
    assert opened.close_code() == code


def test_fragments_count_together(bus: BusThread, opened: WebSocketClient) -> None:
    size = bus.listener.max_buffered_bytes
    head = b"\x02\xff" + size.to_bytes(8, "big") + bytes(4)
    opened.socket.sendall(b"\x02\xff" + size.to_bytes(8, "big") + bytes(4) + bytes(10))
    opened.socket.sendall(bytes(10))
    opened.close()
    other = WebSocketClient(bus.port)
    other.socket.sendall(masked(BINARY, AMQP_HEADER, flags=0) + b"\x80" + head[1:])
    assert other.close_code() == 1009
    other.close()


@pytest.mark.parametrize("payload", [b"", b"\x03\xe8", b"\x03\xe9bye", b"\x0f\xa0"])
def test_close_frame_is_answered_with_its_code(opened: WebSocketClient, payload: bytes) -> None:
    opened.socket.sendall(masked(CLOSE, payload))
    assert opened.close_code() == int.from_bytes(payload[:2], "big")


def test_broker_closes_both_layers(bus: BusThread) -> None:
    client = WebSocketClient(bus.port)
    raw = amqp(client)
    raw.write(amqp_frame(AMQP_CLOSE))
    assert raw.read().code == AMQP_CLOSE
    assert client.close_code() == 1000


def test_broker_does_not_wait_for_ever_for_a_close_frame(
    bus: BusThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "CLOSE_S", 0.1)
    client = WebSocketClient(bus.port)
    raw = amqp(client)
    raw.write(amqp_frame(AMQP_CLOSE))
    assert raw.is_hung_up()


def test_lost_connection_is_forgotten(bus: BusThread) -> None:
    clients = [WebSocketClient(bus.port) for _ in range(3)]
    for client in clients:
        client.sendall(AMQP_HEADER)
        assert client.recv(8).startswith(AMQP_HEADER)
    assert bus.listener.connection_count >= 3
    wait_until(bus, lambda: bus.http.connection_count == 0)  # each counts once
    for client in clients:
        client.close()
    wait_until(bus, lambda: bus.front.connection_count == 0)


def wait_until(bus: BusThread, is_so: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_so():
            return
        bus.look_in(0)
    assert is_so()


def test_unauthenticated_connection_is_closed_as_over_tcp(bus: BusThread) -> None:
    client = WebSocketClient(bus.port)
    client.sendall(AMQP_HEADER)
    assert client.recv(8).startswith(AMQP_HEADER)
    bus.look_in(21)
    assert client.close_code() == 1000


def test_wrong_amqp_is_answered_as_over_tcp(opened: WebSocketClient) -> None:
    opened.sendall(b"GET / HTTP/1.1\r\n\r\n")
    found = b""
    while part := opened.recv(0):
        found += part
    assert found.startswith(b"AMQP")
    assert OPEN not in found
