"""AMQP values: byte vectors of every constructor, round trips, hostile input."""

from __future__ import annotations

import struct
import tracemalloc
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.message.codec import (
    MAX_DEPTH,
    MAX_ODD_KEYS,
    MAX_WIDTHLESS_ITEMS,
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    DecodeError,
    Described,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    Ubyte,
    Uint,
    Ulong,
    Ushort,
    decode_value,
    encode_value,
    skip_value,
)

ID = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
LONG_BYTES = bytes(range(256))
LONG_TEXT = "é" * 128

SMALLEST: list[tuple[str, Any]] = [
    ("40", None),
    ("41", True),
    ("42", False),
    ("43", Uint(0)),
    ("45", []),
    ("50ff", Ubyte(255)),
    ("51ff", Byte(-1)),
    ("5201", Uint(1)),
    ("52ff", Uint(255)),
    ("5300", Ulong(0)),
    ("53ff", Ulong(255)),
    ("5480", Int(-128)),
    ("547f", Int(127)),
    ("5580", -128),
    ("557f", 127),
    ("60ffff", Ushort(65535)),
    ("618000", Short(-32768)),
    ("7000000100", Uint(256)),
    ("70ffffffff", Uint(2**32 - 1)),
    ("7100000080", Int(128)),
    ("7180000000", Int(-(2**31))),
    ("723fc00000", Float(1.5)),
    ("730001f600", Char("😀")),
    ("7401020304", Decimal32(b"\1\2\3\4")),
    ("800000000000000100", Ulong(256)),
    ("80ffffffffffffffff", Ulong(2**64 - 1)),
    ("810000000000000080", 128),
    ("818000000000000000", -(2**63)),
    ("823ff8000000000000", 1.5),
    ("83ffffffffffffffff", Timestamp(-1)),
    ("840102030405060708", Decimal64(b"\1\2\3\4\5\6\7\x08")),
    ("94" + "07" * 16, Decimal128(b"\7" * 16)),
    ("98" + ID.hex, ID),
    ("a000", b""),
    ("a003010203", b"\1\2\3"),
    ("b000000100" + LONG_BYTES.hex(), LONG_BYTES),
    ("a102c3a9", "é"),
    ("b100000100" + LONG_TEXT.encode().hex(), LONG_TEXT),
    ("a30161", Symbol("a")),
    ("b300000100" + "61" * 256, Symbol("a" * 256)),
    ("005324" + "45", Described(Ulong(0x24), [])),
    ("00a30178" + "40", Described(Symbol("x"), None)),
]


def compound(code: int, body: bytes, count: int) -> bytes:
    if code & 0x10:
        return bytes((code,)) + struct.pack(">II", len(body) + 4, count) + body
    return bytes((code, len(body) + 1, count)) + body


COMPOUNDS: list[tuple[bytes, Any]] = [
    (compound(0xC0, b"\x55\x01", 1), [1]),
    (compound(0xC1, b"", 0), {}),
    (compound(0xC1, b"\xa1\x01a\x41", 2), {"a": True}),
    (compound(0xE0, b"\x52\x01", 1), Array(0x52, [Uint(1)])),
    (compound(0xE0, b"\xa3\x01a\x01b", 2), Array(0xA3, [Symbol("a"), Symbol("b")])),
    (compound(0xE0, b"\x40", 0), Array(0x40, [])),
    (compound(0xE0, b"\x40", 3), Array(0x40, [None] * 3)),
    (compound(0xE0, b"\x00\x53\x01\x56\x01\x00", 2), Array(0x56, [True, False], Ulong(1))),
    (compound(0xE0, b"\xc0\x01\x00\x03\x01\x55\x01", 2), Array(0xC0, [[], [1]])),
    (
        compound(0xE0, b"\xd0" + struct.pack(">II", 4, 0) + struct.pack(">IIBB", 6, 1, 0x55, 1), 2),
        Array(0xD0, [[], [1]]),
    ),
    (compound(0xE0, b"\xc1\x03\x02\x40\x40", 1), Array(0xC1, [{None: None}])),
    (compound(0xD0, b"\x40" * 256, 256), [None] * 256),
    (compound(0xD0, b"\x40" * 255, 255), [None] * 255),
    (compound(0xC0, b"\x40" * 254, 254), [None] * 254),
    (compound(0xD1, (b"\x53\x01" + b"\xa0\xff" + b"x" * 255), 2), {Ulong(1): b"x" * 255}),
    (compound(0xF0, b"\xb0" + struct.pack(">I", 300) + b"y" * 300, 1), Array(0xB0, [b"y" * 300])),
]

VECTORS = [(bytes.fromhex(text), value) for text, value in SMALLEST] + COMPOUNDS

LONGER_FORMS: list[tuple[str, Any]] = [
    ("5600", False),
    ("5601", True),
    ("44", Ulong(0)),
    ("5200", Uint(0)),
    ("7000000001", Uint(1)),
    ("7100000001", Int(1)),
    ("800000000000000001", Ulong(1)),
    ("810000000000000001", 1),
    ("b0000000" + "0161", b"a"),
    ("b1000000" + "0161", "a"),
    ("b3000000" + "0161", Symbol("a")),
    ("c00100", []),
    ("d00000000400000000", []),
    ("d10000000400000000", {}),
    ("f0000000050000000040", Array(0x40, [])),
]


def short_id(value: object) -> str:
    """Name a parameter in a few printable characters, the same ones in every process."""
    if isinstance(value, bytes):
        return value[:12].hex()
    return f"{value:02x}" if type(value) is int and value >= 0 else type(value).__name__


def same(left: Any, right: Any) -> bool:
    """Equal values of equal AMQP types, all the way down."""
    if type(left) is not type(right):
        return False
    match left:
        case list():
            return len(left) == len(right) and all(map(same, left, right))
        case dict():
            return same([*left, *left.values()], [*right, *right.values()])
        case Described():
            return same(left.descriptor, right.descriptor) and same(left.value, right.value)
        case Array():
            head = left.code == right.code and same(left.descriptor, right.descriptor)
            return head and same(left.items, right.items)
        case float():
            return struct.pack(">d", left) == struct.pack(">d", right)
        case _:
            return bool(left == right)


@pytest.mark.parametrize(("encoded", "value"), VECTORS, ids=short_id)
def test_value_has_one_smallest_encoding(encoded: bytes, value: Any) -> None:
    assert encode_value(value).hex() == encoded.hex()
    decoded, end = decode_value(encoded)
    assert same(decoded, value)
    assert end == len(encoded)
    assert skip_value(encoded, 0, len(encoded)) == len(encoded)


@pytest.mark.parametrize(("text", "value"), LONGER_FORMS)
def test_longer_forms_are_understood(text: str, value: Any) -> None:
    encoded = bytes.fromhex(text)
    decoded, end = decode_value(b"\x40" + encoded + b"\x40", 1)
    assert same(decoded, value)
    assert end == len(encoded) + 1
    assert skip_value(encoded + b"\x40", 0, len(encoded) + 1) == len(encoded)


@pytest.mark.parametrize(("encoded", "value"), VECTORS, ids=short_id)
def test_every_cut_of_a_value_is_an_error(encoded: bytes, value: Any) -> None:
    for size in range(len(encoded)):
        with pytest.raises(DecodeError):
            decode_value(encoded[:size])
        with pytest.raises(DecodeError):
            skip_value(encoded[:size], 0, size)
        with pytest.raises(DecodeError):  # the container ends, the buffer does not
            decode_value(encoded, 0, size)


@pytest.mark.parametrize(
    "text",
    [
        "01", "3f", "46", "57", "62", "75", "85", "99", "aa", "a20100", "b200000000", "c2020000",
        "d20000000400000000", "e2020040", "ff0000000400000000",
        "5602", "73" + "00110000", "730000d800", "a101ff", "a10180", "a301e9",
        "c000", "d00000000300000000", "c0025541", "c00301", "c0010140", "c0024041" + "00",
        "c1020140", "c10302" + "4540", "c1" + "0702" + "c00201" + "40" + "4040",
        "e000", "e00100", "e0030140ff", "e00300" + "0040" + "", "e0030101" + "40", "e002ff52",
        "00", "0053", "005324", "0000",
    ],
)  # fmt: skip
def test_malformed_value_is_an_error(text: str) -> None:
    with pytest.raises(DecodeError):
        decode_value(bytes.fromhex(text))


def test_map_key_that_is_a_compound_is_an_error() -> None:
    with pytest.raises(DecodeError, match="compound"):
        decode_value(compound(0xC1, b"\x45\x40", 2))


# --- round trips ---------------------------------------------------------------------------------

INTEGERS: list[tuple[type, int, int]] = [
    (Ubyte, 0, 2**8 - 1), (Ushort, 0, 2**16 - 1), (Uint, 0, 2**32 - 1), (Ulong, 0, 2**64 - 1),
    (Byte, -(2**7), 2**7 - 1), (Short, -(2**15), 2**15 - 1), (Int, -(2**31), 2**31 - 1),
    (int, -(2**63), 2**63 - 1), (Timestamp, -(2**63), 2**63 - 1),
]  # fmt: skip

KEYS = st.one_of(
    st.text(max_size=300),
    st.text(st.characters(max_codepoint=127), max_size=300).map(Symbol),
    st.integers(0, 2**64 - 1).map(Ulong),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    *[st.integers(low, high).map(kind) for kind, low, high in INTEGERS],
    st.floats(),
    st.floats(width=32).map(Float),
    st.characters(codec="utf-8").map(Char),
    st.binary(min_size=4, max_size=4).map(Decimal32),
    st.binary(min_size=8, max_size=8).map(Decimal64),
    st.binary(min_size=16, max_size=16).map(Decimal128),
    st.uuids(),
    st.binary(max_size=300),
    KEYS,
)
ARRAYS = st.one_of(
    st.builds(Array, st.just(0xB1), st.lists(st.text(max_size=5), max_size=300)),
    st.builds(Array, st.just(0x71), st.lists(st.integers(-9, 9).map(Int), max_size=99)),
    st.builds(
        Array, st.just(0xB0), st.lists(st.binary(max_size=9)), st.integers(0, 999).map(Ulong)
    ),
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(KEYS, inner, max_size=5),
        st.builds(Described, KEYS, inner),
        st.builds(Array, st.just(0xD0), st.lists(st.lists(inner, max_size=3), max_size=3)),
    ),
    max_leaves=20,
)


@given(VALUES)
def test_round_trip_keeps_value_and_type(value: Any) -> None:
    encoded = encode_value(value)
    decoded, end = decode_value(encoded)
    assert end == len(encoded) == skip_value(encoded, 0, len(encoded))
    assert same(decoded, value)
    assert encode_value(decoded) == encoded


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_value_or_a_decode_error(data: bytes) -> None:
    for work in (lambda: decode_value(data)[1], lambda: skip_value(data, 0, len(data))):
        try:
            end = work()
        except DecodeError:
            continue
        assert 0 < end <= len(data)


@given(VALUES, st.data())
def test_damaged_values_give_a_value_or_a_decode_error(value: Any, data: st.DataObject) -> None:
    damaged = bytearray(encode_value(value))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, end = decode_value(bytes(damaged))
    except DecodeError:
        return
    assert end <= len(damaged)


# --- bombs ---------------------------------------------------------------------------------------


def peak_bytes_of(data: bytes) -> int:
    tracemalloc.start()
    try:
        decode_value(data)
    except DecodeError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("item", [0x40, 0x41, 0x42, 0x43, 0x44, 0x45])
def test_array_of_endless_widthless_items_allocates_no_memory(item: int) -> None:
    assert peak_bytes_of(b"\xf0" + struct.pack(">IIB", 5, 2**32 - 1, item)) < 10_000


@pytest.mark.parametrize("code", [0xD0, 0xD1, 0xF0])
def test_endless_count_allocates_no_memory(code: int) -> None:
    assert peak_bytes_of(bytes((code,)) + struct.pack(">II", 8, 2**32 - 2) + b"\x70" * 4) < 10_000


def test_endless_size_allocates_no_memory() -> None:
    for code in (0xB0, 0xB1, 0xB3, 0xD0, 0xD1, 0xF0):
        assert peak_bytes_of(bytes((code,)) + b"\xff" * 4 + b"abcd") < 10_000


def test_many_small_bombs_cost_a_small_multiple_of_their_length() -> None:
    bomb = bytes((0xE0, 2, MAX_WIDTHLESS_ITEMS, 0x40))
    data = compound(0xD0, bomb * 10_000, 10_000)
    assert peak_bytes_of(data) < 120 * len(data)
    with pytest.raises(DecodeError):
        decode_value(bytes((0xE0, 2, MAX_WIDTHLESS_ITEMS + 1, 0x40)))


def nested(layers: int) -> bytes:
    data = b"\x40"
    for _ in range(layers):
        data = compound(0xD0, data, 1)
    return data


def test_depth_is_limited() -> None:
    decode_value(nested(MAX_DEPTH))
    with pytest.raises(DecodeError, match="deep"):
        decode_value(nested(MAX_DEPTH + 1))
    described = b"\x00\x53\x00" * (MAX_DEPTH + 1) + b"\x40"
    with pytest.raises(DecodeError, match="deep"):
        decode_value(described)
    with pytest.raises(DecodeError, match="deep"):
        skip_value(described, 0, len(described))
    with pytest.raises(DecodeError, match="deep"):
        decode_value(b"\x00" * 10_000)
    # an array nests too, and so does its descriptor
    inner = compound(0xF0, b"\x00" + nested(MAX_DEPTH) + b"\x40", 0)
    with pytest.raises(DecodeError, match="deep"):
        decode_value(inner)


def test_large_map_with_keys_that_may_be_made_to_collide_is_an_error() -> None:
    modulus = 2**61 - 1
    keys = [uuid.UUID(int=number * modulus) for number in range(MAX_ODD_KEYS + 1)]
    assert len({hash(key) for key in keys}) == 1
    with pytest.raises(DecodeError, match="keys"):
        decode_value(encode_value(dict.fromkeys(keys)))
    few = dict.fromkeys(keys[:MAX_ODD_KEYS])
    assert decode_value(encode_value(few))[0] == few
    texts = {f"k{number}": number for number in range(1_000)}
    assert decode_value(encode_value(texts))[0] == texts


# --- encoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        object(), (), {1, 2}, Ubyte(256), Ubyte(-1), Ushort(-1), Ushort(2**16), Uint(-1),
        Uint(2**32), Ulong(-1), Ulong(2**64), Byte(128), Short(2**15), Int(2**31), 2**63,
        Timestamp(2**63), Float(1e300), Char(""), Char("ab"), Symbol("é"), "\ud800",
        Decimal32(b"123"), Decimal64(b""), Decimal128(b"1"), [object()], {"a": object()},
        Described(Ulong(1), object()), Array(0x50, [Ubyte(256)]), Array(0xA1, ["x" * 256]),
        Array(0xC0, [["x" * 256]]), Array(0x74, [Decimal32(b"1")]), Array(0xC0, [1]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_without_amqp_type_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_value(value)


ONE_OF_EACH: list[tuple[int, Any]] = [
    (0x40, None), (0x41, True), (0x42, False), (0x43, Uint(0)), (0x44, Ulong(0)), (0x45, []),
    (0x50, Ubyte(1)), (0x51, Byte(-1)), (0x52, Uint(1)), (0x53, Ulong(1)), (0x54, Int(-1)),
    (0x55, -1), (0x56, True), (0x56, False), (0x60, Ushort(1)), (0x61, Short(-1)),
    (0x70, Uint(1)), (0x71, Int(-1)), (0x72, Float(0.5)), (0x73, Char("c")),
    (0x74, Decimal32(b"1234")), (0x80, Ulong(1)), (0x81, -1), (0x82, 0.5), (0x83, Timestamp(1)),
    (0x84, Decimal64(b"12345678")), (0x94, Decimal128(b"1" * 16)), (0x98, ID), (0xA0, b"b"),
    (0xA1, "s"), (0xA3, Symbol("y")), (0xB0, b"b"), (0xB1, "s"), (0xB3, Symbol("y")),
    (0xC0, [1]), (0xC1, {"k": 1}), (0xD0, ["x" * 300]), (0xD1, {"k": 1}),
    (0xE0, Array(0x50, [Ubyte(7)])), (0xF0, Array(0x50, [Ubyte(7)])),
]  # fmt: skip


@pytest.mark.parametrize(("code", "item"), ONE_OF_EACH, ids=short_id)
def test_array_of_each_constructor_round_trips(code: int, item: Any) -> None:
    for descriptor in (None, Symbol("d")):
        array = Array(code, [item, item], descriptor)
        assert same(decode_value(encode_value(array))[0], array)


def test_symbols_are_an_array() -> None:
    assert encode_value(Array(0xA3, [Symbol("a"), Symbol("b")])) == b"\xe0\x06\x02\xa3\x01a\x01b"


def test_described_and_array_compare_by_type_and_value() -> None:
    assert Described(Ulong(1), []) == Described(Ulong(1), [])
    assert Described(Ulong(1), Uint(1)) != Described(Ulong(1), Int(1))
    assert Described(Ulong(1), None) != Array(0x40, [])
    assert Array(0x40, []) != Array(0x41, [])
    assert Array(0x40, []) != []
    assert Array(0xA1, ["x"]) == Array(0xA1, ["x"])
    keys = {Described(Symbol("d"), Ulong(1)), Described(Symbol("d"), Ulong(2)), Array(0x40, [])}
    assert len(keys | {Described(Symbol("d"), Ulong(1))}) == 3
    assert repr(Described(Ulong(1), "x")) == "Described(1, 'x')"
    assert repr(Array(0x40, [])) == "Array(0x40, [], None)"
