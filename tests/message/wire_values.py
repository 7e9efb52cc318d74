"""Values and encoded messages for the tests of this folder, and equality of values."""

from __future__ import annotations

import struct
import uuid
from pathlib import Path

from hypothesis import strategies as st

from postbus.message.codec import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
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
    Value,
    encode_value,
)

CORPUS = Path(__file__).parent / "corpus"


def captured(name: str) -> bytes:
    """Return a message as a client's library encoded it (azure-servicebus 7.15, Proton 0.40)."""
    return bytes.fromhex((CORPUS / f"{name}.hex").read_text())


def all_captured() -> dict[str, bytes]:
    return {path.stem: captured(path.stem) for path in sorted(CORPUS.glob("*.hex"))}


def section(code: int, value: Value) -> bytes:
    """Encode a section of a message."""
    return encode_value(Described(Ulong(code), value))


def properties(**fields: Value) -> bytes:
    """Encode a properties section; trailing nulls are left out."""
    values = [fields.pop(name, None) for name in PROPERTY_NAMES]
    assert not fields
    while values and values[-1] is None:
        values.pop()
    return section(0x73, values)


PROPERTY_NAMES = (
    "message_id",
    "user_id",
    "to",
    "subject",
    "reply_to",
    "correlation_id",
    "content_type",
    "content_encoding",
    "absolute_expiry_time",
    "creation_time",
    "group_id",
    "group_sequence",
    "reply_to_group_id",
)

BODY = section(0x75, b"body")


def same(left: Value, right: Value) -> bool:
    """Compare values with their AMQP types, so that Uint(1), 1 and True differ."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, Described):
        return same(left.descriptor, right.descriptor) and same(left.value, right.value)
    if isinstance(left, Array):
        return (
            left.code == right.code
            and same(left.descriptor, right.descriptor)
            and same(left.items, right.items)
        )
    if isinstance(left, float):  # not a number is the same as itself
        return struct.pack(">d", left) == struct.pack(">d", right)
    return bool(left == right)


def numbers(low: int, high: int, kind: type[int]) -> st.SearchStrategy[int]:
    return st.integers(low, high).map(kind)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
SYMBOLS = st.text(st.characters(max_codepoint=127), max_size=300).map(Symbol)

SCALARS: dict[int, st.SearchStrategy[Value]] = {
    0x50: numbers(0, 2**8 - 1, Ubyte),
    0x51: numbers(-(2**7), 2**7 - 1, Byte),
    0x60: numbers(0, 2**16 - 1, Ushort),
    0x61: numbers(-(2**15), 2**15 - 1, Short),
    0x70: numbers(0, 2**32 - 1, Uint),
    0x71: numbers(-(2**31), 2**31 - 1, Int),
    0x72: st.floats(width=32).map(Float),
    0x73: st.characters(exclude_categories=["Cs"]).map(Char),
    0x74: st.binary(min_size=4, max_size=4).map(Decimal32),
    0x80: numbers(0, 2**64 - 1, Ulong),
    0x81: st.integers(-(2**63), 2**63 - 1),
    0x82: st.floats(),
    0x83: numbers(-(2**63), 2**63 - 1, Timestamp),
    0x84: st.binary(min_size=8, max_size=8).map(Decimal64),
    0x94: st.binary(min_size=16, max_size=16).map(Decimal128),
    0x98: st.uuids().map(lambda value: uuid.UUID(bytes=value.bytes)),
    0x56: st.booleans(),
    0x40: st.none(),
    0xB0: st.binary(max_size=300),
    0xB1: TEXTS,
    0xB3: SYMBOLS,
}

ANY_SCALAR = st.one_of(*SCALARS.values())


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    code = draw(st.sampled_from(sorted(SCALARS)))
    items = draw(st.lists(SCALARS[code], max_size=5))
    descriptor = draw(st.none() | SYMBOLS)
    return Array(code, items, descriptor)


VALUES = st.recursive(
    ANY_SCALAR | arrays(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(TEXTS, inner, max_size=5)
        | st.builds(Described, SYMBOLS | SCALARS[0x80], inner)
    ),
    max_leaves=12,
)

MESSAGE_IDS = TEXTS | st.binary(max_size=40) | SCALARS[0x80] | SCALARS[0x98]
TIMES = SCALARS[0x83]
PROPERTY_VALUES: dict[str, st.SearchStrategy[Value]] = {
    "message_id": MESSAGE_IDS,
    "user_id": st.binary(max_size=20),
    "to": TEXTS,
    "subject": TEXTS,
    "reply_to": TEXTS,
    "correlation_id": MESSAGE_IDS,
    "content_type": SYMBOLS,
    "content_encoding": SYMBOLS,
    "absolute_expiry_time": TIMES,
    "creation_time": TIMES,
    "group_id": TEXTS,
    "group_sequence": SCALARS[0x70],
    "reply_to_group_id": TEXTS,
}

BODIES = st.one_of(
    st.lists(st.binary(max_size=300).map(lambda data: section(0x75, data)), max_size=3).map(
        b"".join
    ),
    st.lists(st.lists(ANY_SCALAR, max_size=3).map(lambda row: section(0x76, row)), max_size=3).map(
        b"".join
    ),
    VALUES.map(lambda value: section(0x77, value)),
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Draw an encoded message with any of the sections."""
    parts = []
    if draw(st.booleans()):
        header = [
            draw(st.none() | st.booleans()),
            draw(st.none() | SCALARS[0x50]),
            draw(st.none() | SCALARS[0x70]),
            draw(st.none() | st.booleans()),
            draw(st.none() | SCALARS[0x70]),
        ]
        parts.append(section(0x70, header[: draw(st.integers(0, 5))]))
    if draw(st.booleans()):
        parts.append(section(0x71, draw(st.dictionaries(SYMBOLS, ANY_SCALAR, max_size=3))))
    if draw(st.booleans()):
        names = SYMBOLS.filter(
            lambda name: not name.startswith("x-opt-")
        )  # have types of their own
        parts.append(section(0x72, draw(st.dictionaries(names, VALUES, max_size=4))))
    if draw(st.booleans()):
        fields = draw(st.fixed_dictionaries({}, optional=PROPERTY_VALUES))
        parts.append(properties(**fields))
    if draw(st.booleans()):
        parts.append(section(0x74, draw(st.dictionaries(TEXTS, ANY_SCALAR, max_size=5))))
    parts.append(draw(BODIES))
    if draw(st.booleans()):
        parts.append(section(0x78, {Symbol("f"): draw(ANY_SCALAR)}))
    return b"".join(parts)
