"""The value codec with hostile or unusual input; the vectors are in test_codec.py."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.message.codec import (
    MAX_DEPTH,
    MAX_WIDTHLESS_ITEMS,
    Array,
    DecodeError,
    Symbol,
    Value,
    decode_value,
    encode_list,
    encode_value,
    skip_value,
)
from tests.message.wire_values import VALUES, all_captured, same

CONSTRUCTORS = (
    {0x00, 0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56}
    | {0x60, 0x61, 0x70, 0x71, 0x72, 0x73, 0x74, 0x80, 0x81, 0x82, 0x83, 0x84, 0x94, 0x98}
    | {0xA0, 0xA1, 0xA3, 0xB0, 0xB1, 0xB3, 0xC0, 0xC1, 0xD0, 0xD1, 0xE0, 0xF0}
)


def test_other_constructors_are_refused_alone_and_in_arrays() -> None:
    for code in set(range(256)) - CONSTRUCTORS:
        for data in (bytes((code,)) + bytes(40), bytes((0xE0, 2, 0, code))):
            with pytest.raises(DecodeError):
                decode_value(data)
        with pytest.raises(DecodeError):
            skip_value(bytes((code,)) + bytes(40), 0, 41)


@pytest.mark.parametrize("size", [255, 256, 70_000])
def test_long_values_round_trip(size: int) -> None:
    for value in (b"x" * size, "x" * size, Symbol("x" * size), [None] * size, ["x" * 300] * 3):
        assert same(decode_value(encode_value(value))[0], value)
    numbered = {str(number): number for number in range(size)}
    assert same(decode_value(encode_value(numbered))[0], numbered)
    array = Array(0x81, list(range(size)))
    assert decode_value(encode_value(array))[0] == array


@given(VALUES, st.binary(max_size=5), st.binary(max_size=5))
def test_values_are_found_inside_of_a_buffer(value: Value, before: bytes, behind: bytes) -> None:
    data = encode_value(value)
    buffer = before + data + behind
    start, end = len(before), len(before) + len(data)
    decoded, after = decode_value(buffer, start, end)
    assert same(decoded, value)
    assert after == end == skip_value(buffer, start, end)
    assert decode_value(buffer, start)[1] == end


@given(VALUES)
def test_values_that_are_cut_off_are_refused(value: Value) -> None:
    data = encode_value(value)
    for end in {0, len(data) // 2, len(data) - 1}:
        with pytest.raises(DecodeError):
            decode_value(data, 0, end)
        with pytest.raises(DecodeError):
            decode_value(data[:end])
        with pytest.raises(DecodeError):
            skip_value(data, 0, end)


@given(st.data())
def test_mutated_captures_decode_or_raise_decode_error(data: st.DataObject) -> None:
    octets = bytearray(data.draw(st.sampled_from(list(all_captured().values()))))
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    mutated, pos = bytes(octets), 0
    try:
        while pos < len(mutated):
            value, end = decode_value(mutated, pos)
            assert end == skip_value(mutated, pos, len(mutated))
            assert same(decode_value(encode_value(value))[0], value)
            pos = end
    except DecodeError:
        pass


INVALID = {
    "string is not UTF-8": "a1 02 c328",
    "string holds a surrogate": "a1 03 eda080",
    "string is overlong": "b1 00000002 c0af",
    "symbol is not ASCII": "a3 01 e9",
    "char is a surrogate": "73 0000d800",
    "char is beyond Unicode": "73 00110000",
    "boolean is two": "56 02",
    "map has a key without a value": "c1 02 01 40",
    "map key is a list": "c1 03 02 45 40",
    "map key is a map": "c1 05 02 c1 01 00 40",
    "map key is an array": "c1 06 02 e0 02 00 40 40",
    "map key is described": "c1 06 02 00 53 01 40 40",
    "list is longer than its items": "c0 03 01 40 40",
    "list is shorter than its items": "c0 02 02 40 40",
    "list without a count": "c0 00",
    "list32 with half a count": "d0 00000002 0000",
    "array is longer than its items": "e0 04 01 50 01 02",
    "array without a constructor": "e0 01 00",
    "array ends in its descriptor": "e0 04 00 00 53 01",
    "array of a described constructor twice": "e0 07 00 00 53 01 00 53 01",
    "descriptor without a value": "00 53 70",
    "compound leaves its container": "c0 05 01 c0 04 01 40",
    "size of four octets is cut off": "b0 0000",
    "nothing": "",
}


@pytest.mark.parametrize("octets", INVALID.values(), ids=INVALID.keys())
def test_invalid_values_are_refused(octets: str) -> None:
    with pytest.raises(DecodeError):
        decode_value(bytes.fromhex(octets))


def test_nesting_is_bounded() -> None:
    def nested(depth: int) -> bytes:
        value: Value = None
        for _ in range(depth):
            value = [value]
        return encode_value(value)

    assert decode_value(nested(MAX_DEPTH))
    for data in (
        nested(MAX_DEPTH + 1),
        b"\x00" * 100_000,
        b"\x00\xa3\x00" * 100_000 + b"\x40",
        b"\xe0\x02\x01\xe0" * 60,
    ):
        with pytest.raises(DecodeError):
            decode_value(data)
    with pytest.raises(DecodeError):
        skip_value(b"\x00" * 100_000, 0, 100_000)


def widthless_array(count: int, code: int = 0x45) -> bytes:
    return b"\xf0\x00\x00\x00\x05" + struct.pack(">I", count) + bytes((code,))


BOMBS = {
    "list of 2^32 items": b"\xd0\x00\x00\x00\x05\xff\xff\xff\xff\x40",
    "map of 2^32 items": b"\xd1\x00\x00\x00\x05\xff\xff\xff\xfe\x40",
    "array of 2^32 nulls": widthless_array(2**32 - 1, 0x40),
    "array of 2^32 lists": widthless_array(2**32 - 1),
    "array of 2^32 uints": b"\xf0\x00\x00\x00\x09\xff\xff\xff\xff\x70\x00\x00\x00\x00",
    "binary of 4 GiB": b"\xb0\xff\xff\xff\xff\x00",
    "string of 4 GiB": b"\xb1\xff\xff\xff\xff\x00",
    "list of 4 GiB": b"\xd0\xff\xff\xff\xff\x00\x00\x00\x01\x40",
    "many arrays of many lists": encode_list([widthless_array(MAX_WIDTHLESS_ITEMS)] * 20_000),
    "arrays in an array": (
        b"\xf0"
        + struct.pack(">II", 5 + 4 * 50_000, 50_000)
        + b"\xe0"
        + b"\x02\xff\x45" * 50_000
        + bytes(50_000)
    ),
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_unbacked_counts_and_sizes_allocate_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode_value(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100 * len(data) + 8 * 1024 * 1024


def test_arrays_without_payload_are_counted_over_the_whole_value() -> None:
    half = MAX_WIDTHLESS_ITEMS // 2
    value, _ = decode_value(encode_list([widthless_array(half)] * 2))
    assert [len(array.items) for array in value] == [half, half]
    with pytest.raises(DecodeError):
        decode_value(encode_list([widthless_array(half)] * 2 + [widthless_array(1)]))


MISFITS: list[Value] = [
    Array(0x41, [False]),
    Array(0xA1, [Symbol("x")]),
    Array(0xA3, ["x"]),
    Array(0xC0, [{}]),
    Array(0xC1, [[]]),
    Array(0xD0, [Array(0x50, [])]),
    Array(0x70, ["x"]),
    Array(0x50, [None]),
    Array(0x99, [1]),
    Array(0x00, [1]),
]


@pytest.mark.parametrize("array", MISFITS, ids=repr)
def test_array_item_of_another_type_is_a_type_error(array: Array) -> None:
    with pytest.raises(TypeError):
        encode_value(array)
