"""Answers of nodes wait for a client that reads; requests are checked before their bodies."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus.broker.access.authz import KeyRule
from postbus.edge.amqp import requests
from postbus.message.codec import (
    Described,
    Int,
    Symbol,
    Uint,
    Ulong,
    Value,
    decode_value,
    encode_value,
)
from tests.edge.amqp.test_links import fill, request_endpoint, wait_until
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import DETACH, TRANSFER, RawClient, described, frame, message
from tests.edge.test_hostile_input import peak_bytes

ROOT = RULES[0]
MIB = 1 << 20
REQUESTS, ANSWERS = 20, 21
HELD_BYTES = requests.MAX_ANSWER_BYTES


@pytest.fixture
def raw(bus: BusThread) -> Iterator[RawClient]:
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        yield client


def request(operation: str, body: bytes) -> bytes:
    properties = {"operation": f"com.microsoft:{operation}"}
    return (
        encode_value(described(0x73, "id", None, None, None, "answers"))
        + encode_value(Described(Ulong(0x74), properties))
        + b"\x00\x53\x77"
        + body
    )


PEEK = request(
    "peek-message",
    encode_value({Symbol("from-sequence-number"): 1, Symbol("message-count"): Int(100)}),
)


def attach_node(raw: RawClient, queue: str) -> None:
    raw.attach_sender(f"{queue}/$management", handle=REQUESTS)
    raw.attach_receiver(f"{queue}/$management", handle=ANSWERS)


def answer(raw: RawClient) -> tuple[int, dict[str, Value]]:
    """Read one response; return its status and its properties."""
    payload = b""
    while True:
        part = raw.expect(TRANSFER)
        payload += part.payload
        if not part.fields[5]:
            break
    _, at = decode_value(payload)
    found, _ = decode_value(payload, at)
    return int(found.value["statusCode"]), found.value


@pytest.mark.slow
@pytest.mark.parametrize("is_credit_late", [False, True])
def test_answers_wait_for_a_client_that_reads(
    bus: BusThread, raw: RawClient, queue: str, *, is_credit_late: bool
) -> None:
    """300 requests of 145 bytes for a megabyte each, before any answer is read."""
    raw.attach_sender(queue)
    body = message(b"x" * 240_000)
    for number in range(5):
        raw.write(raw.transfer(number, body[:60_000], more=True))
        raw.write(raw.transfer(number, body[60_000:120_000], more=True))
        raw.write(raw.transfer(number, body[120_000:180_000], more=True))
        raw.write(raw.transfer(number, body[180_000:]))
    raw.dispositions(5)
    attach_node(raw, queue)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    peeks = [raw.transfer(n, PEEK, handle=REQUESTS, settled=True) for n in range(5, 305)]
    credit = raw.flow(1_000, handle=ANSWERS)
    if is_credit_late:
        raw.write(*peeks)
        wait_until(bus, lambda: request_endpoint(bus, queue)._link.delivery_count == 300)
        raw.write(credit)
    else:
        raw.write(credit, *peeks)
    assert {answer(raw)[0] for _ in range(300)} == {200}
    assert peak_bytes() - before < 32 * MIB
    connection = request_endpoint(bus, queue)._connection
    assert connection.large_answers == connection.held_answer_bytes == 0
    assert connection.inflight.unanswered.used == 0


def test_unanswered_requests_are_forgotten_with_their_link(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    fill(raw, queue, 1, size=50_000)
    attach_node(raw, queue)
    endpoint = request_endpoint(bus, queue)
    held = HELD_BYTES // 50_000 + 1
    raw.write(*[raw.transfer(n, PEEK, handle=REQUESTS, settled=True) for n in range(1, 80)])
    wait_until(
        bus, lambda: endpoint._link.delivery_count == 79 and len(endpoint._waiting) == 79 - held
    )
    assert bus.listener.inflight.unanswered.used == (79 - held) * len(PEEK)
    raw.write(frame(DETACH, Uint(REQUESTS), True))
    raw.expect(DETACH)
    assert bus.listener.inflight.unanswered.used == 0


def lists(count: int) -> bytes:
    """The encoded map {x: [[], [], …]}: a byte for each list."""
    items = b"\xd0" + struct.pack(">II", count + 4, count) + b"\x45" * count
    body = encode_value("x") + items
    return b"\xd1" + struct.pack(">II", len(body) + 4, 2) + body


def ask(raw: RawClient, payload: bytes) -> tuple[int, dict[str, Value]]:
    steps = range(0, len(payload), 60_000)
    for at in steps:
        more = at + 60_000 < len(payload)
        piece = payload[at : at + 60_000]
        raw.write(raw.transfer(9, piece, handle=REQUESTS, settled=True, more=more))
    return answer(raw)


@pytest.mark.parametrize("rule", RULES[:2], ids=["with the right", "without it"])
def test_body_of_many_values_takes_bounded_memory(
    bus: BusThread, queue: str, rule: KeyRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of empty lists is 72 MB on the heap. Without the right it is not even read."""
    decoded: list[int] = []

    def noted(buf: bytes, *args: Any, **kwargs: Any) -> tuple[Value, int]:
        decoded.append(len(buf))
        return decode_value(buf, *args, **kwargs)

    monkeypatch.setattr(requests, "decode_value", noted)
    with RawClient(bus.port, rule.name, rule.keys.primary) as raw:
        attach_node(raw, queue)
        raw.write(raw.flow(10, handle=ANSWERS))
        body = lists(900_000)
        tracemalloc.start()
        status, properties = ask(raw, request("peek-message", body))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    is_allowed = rule is RULES[0]
    assert status == (400 if is_allowed else 401)
    assert ("too many values" in str(properties["statusDescription"])) is is_allowed
    assert (max(decoded) > 900_000) is is_allowed
    assert peak < 12 * MIB


def test_only_messages_make_a_request_large(bus: BusThread, raw: RawClient, queue: str) -> None:
    attach_node(raw, queue)
    raw.write(raw.flow(10, handle=ANSWERS))
    filling = encode_value({"filling": b"x" * (1_100 << 10), "sequence-numbers": [1]})
    status, properties = ask(raw, request("receive-by-sequence-number", filling))
    assert (status, properties["errorCondition"]) == (400, "com.microsoft:argument-error")
    assert f"{requests.REQUEST_BYTES} bytes" in str(properties["statusDescription"])
    bodies = [{"message": message(b"x" * 200_000)} for _ in range(6)]
    assert ask(raw, request("schedule-message", encode_value({"messages": bodies})))[0] in {
        200,
        403,
    }
