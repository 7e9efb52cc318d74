"""Decoding has a heap budget: the size of values is counted before they are created."""

from __future__ import annotations

import struct
import tracemalloc
import uuid

import pytest

from postbus.message.codec import (
    Array,
    DecodeError,
    Described,
    Symbol,
    Ulong,
    Value,
    decode_value,
    encode_value,
)

BUDGET = 128 << 10


def list32(items: bytes, count: int) -> bytes:
    return b"\xd0" + struct.pack(">II", len(items) + 4, count) + items


def nested(depth: int, width: int) -> bytes:
    """Lists of lists, as many on each level."""
    value = b"\x45"
    for _ in range(depth):
        value = list32(value * width, width)
    return value


def map32(count: int) -> bytes:
    pairs = b"".join(b"\xa1\x04%04d\x40" % number for number in range(count))
    return b"\xd1" + struct.pack(">II", len(pairs) + 4, count * 2) + pairs


COSTLY = {
    "empty lists": list32(b"\x45" * 50_000, 50_000),
    "lists of lists": nested(4, 10),
    "maps": list32(b"\xc1\x04\x02\xa1\x00\x40" * 5_000, 5_000),
    "one map": map32(3_000),
    "maps of nothing": list32(b"\xc1\x01\x00" * 10_000, 10_000),
    "described": list32(b"\x00\x44\x45" * 10_000, 10_000),
    "arrays": list32(b"\xe0\x02\x00\x40" * 10_000, 10_000),
    "array of bytes": b"\xf0" + struct.pack(">II", 50_005, 50_000) + b"\x50" + b"\1" * 50_000,
    "uuids": b"\xf0" + struct.pack(">II", 5 + 32_000, 2_000) + b"\x98" + b"\1" * 32_000,
    "array of lists": b"\xf0" + struct.pack(">II", 5 + 10_000, 5_000) + b"\xc0" + b"\1\0" * 5_000,
    "short texts": list32(b"\xa1\x01\xff" * 10_000, 10_000).replace(b"\xff", b"x"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_values_above_the_budget_are_not_made(name: str) -> None:
    tracemalloc.start()
    with pytest.raises(DecodeError, match="too many values"):
        decode_value(COSTLY[name], max_heap_bytes=BUDGET)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BUDGET * 5 // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", COSTLY)
def test_values_within_their_budget_take_no_more(name: str) -> None:
    """The budget is exact: accepted values use at most the counted heap."""
    low, high = 0, 1 << 24
    while high - low > 1 << 13:  # the least budget that is enough
        middle = (low + high) // 2
        try:
            decode_value(COSTLY[name], max_heap_bytes=middle)
        except DecodeError:
            low = middle
        else:
            high = middle
    tracemalloc.start()
    value, _ = decode_value(COSTLY[name], max_heap_bytes=high)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert value is not None
    assert held < high * 5 // 4


@pytest.mark.parametrize(
    "value",
    [
        [uuid.uuid4()] * 10_000,
        Array(0x98, [uuid.uuid4()] * 10_000),
        {f"{number:04}": "value" for number in range(5_000)},
        Described(Ulong(1), [Symbol("x")] * 1_000),
        "x" * 5_000_000,
    ],
    ids=["lock tokens", "array of tokens", "properties", "fields", "text"],
)
def test_values_of_clients_fit(value: Value) -> None:
    assert decode_value(encode_value(value), max_heap_bytes=2 << 20)[0] == value
