"""AMQP 1.0 values: every primitive, list, map, array and described type, in and out.

Source: AMQP 1.0 part 1. Before anything is allocated, sizes and counts are checked against the
available bytes, and the heap size of values against a budget. An `int` is an AMQP long, a `float` a
double; every other width has a class of its own, so values keep their type.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import Any, Final, TypeAlias

MAX_DEPTH: Final = 32
"""Maximum nesting of compounds. Our choice: SDKs need 6, proton's own tests 8."""

MAX_WIDTHLESS_ITEMS: Final = 128
"""Maximum number of array items without payload (null, true, uint0, list0) in a value.

They cost the sender nothing, so they are not bounded by a size. Our choice: no SDK sends such an
array, booleans are sent as 0x56.
"""

MAX_ODD_KEYS: Final = 256
"""Maximum number of keys of a map that are neither strings nor binary.

Hashes of numbers and uuids are predictable: a map of colliding keys takes quadratic time. Our
choice: SDKs use strings and symbols as keys only.
"""

MAX_HEAP_BYTES: Final = 16 << 20
"""Default heap limit of the values of one decoding: some 170,000 values.

Bytes on the wire are no bound: an empty list takes one there and 72 on the heap. Frames, requests
and keys have lower limits. Our choice: bodies that people read are smaller.
"""

VALUE_BYTES: Final = 96
"""Heap size charged for an item: an empty list with its slot takes 64, a uuid 116. The lengths of
text and binary are not charged: they take no more than on the wire."""

COMPOUND_BYTES: Final = 64
MAP_BYTES: Final = 256
"""Heap sizes charged for a list, an array or a described value, and for a map, without their
items."""

Value: TypeAlias = Any


class DecodeError(ValueError):
    """The bytes are not a valid AMQP value."""


class Ubyte(int):
    __slots__ = ()


class Ushort(int):
    __slots__ = ()


class Uint(int):
    __slots__ = ()


class Ulong(int):
    __slots__ = ()


class Byte(int):
    __slots__ = ()


class Short(int):
    __slots__ = ()


class Int(int):
    __slots__ = ()


class Timestamp(int):
    """Milliseconds since the epoch."""

    __slots__ = ()


class Float(float):
    """An IEEE 754 binary32."""

    __slots__ = ()


class Char(str):
    __slots__ = ()


class Symbol(str):
    __slots__ = ()


class Decimal32(bytes):
    __slots__ = ()


class Decimal64(bytes):
    __slots__ = ()


class Decimal128(bytes):
    __slots__ = ()


TIME_SPAN: Final = "com.microsoft:timespan"
DATE_TIME_OFFSET: Final = "com.microsoft:datetime-offset"
"""Descriptors of durations and times of .NET and Java: numbers of ticks of 100 ns, for a time since
the year 1 in UTC. Source: azure-amqp's encoding of .NET's types."""


class Described:
    """A value with a descriptor (usually Ulong or Symbol)."""

    __slots__ = ("descriptor", "value")

    def __init__(self, descriptor: Value, value: Value) -> None:
        self.descriptor = descriptor
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Described):
            return NotImplemented
        return (self.descriptor, self.value) == (other.descriptor, other.value) and type(
            self.value
        ) is type(other.value)

    def __hash__(self) -> int:
        return hash((Described, self.descriptor))

    def __repr__(self) -> str:
        return f"Described({self.descriptor!r}, {self.value!r})"


class Array:
    """Items of one type. `code` is the constructor of the items."""

    __slots__ = ("code", "descriptor", "items")

    def __init__(self, code: int, items: list[Value], descriptor: Value = None) -> None:
        self.code = code
        self.items = items
        self.descriptor = descriptor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (self.code, self.items, self.descriptor) == (
            other.code,
            other.items,
            other.descriptor,
        )

    def __hash__(self) -> int:
        return hash((Array, self.code, len(self.items)))

    def __repr__(self) -> str:
        return f"Array({self.code:#x}, {self.items!r}, {self.descriptor!r})"


# --- decoding -----------------------------------------------------------------------------------

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_F32 = struct.Struct(">f")
_F64 = struct.Struct(">d")
_I8 = struct.Struct(">b")


def _char(buf: bytes, pos: int) -> Char:
    (code,) = _U32.unpack_from(buf, pos)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise DecodeError("char outside of Unicode")
    return Char(chr(code))


_Reader: TypeAlias = Callable[[bytes, int], Value]

_FIXED: Final[dict[int, tuple[int, _Reader]]] = {
    0x40: (0, lambda _buf, _pos: None),
    0x41: (0, lambda _buf, _pos: True),
    0x42: (0, lambda _buf, _pos: False),
    0x43: (0, lambda _buf, _pos: Uint(0)),
    0x44: (0, lambda _buf, _pos: Ulong(0)),
    0x45: (0, lambda _buf, _pos: []),
    0x50: (1, lambda buf, pos: Ubyte(buf[pos])),
    0x51: (1, lambda buf, pos: Byte(_I8.unpack_from(buf, pos)[0])),
    0x52: (1, lambda buf, pos: Uint(buf[pos])),
    0x53: (1, lambda buf, pos: Ulong(buf[pos])),
    0x54: (1, lambda buf, pos: Int(_I8.unpack_from(buf, pos)[0])),
    0x55: (1, lambda buf, pos: int(_I8.unpack_from(buf, pos)[0])),
    0x56: (1, lambda buf, pos: _boolean(buf[pos])),
    0x60: (2, lambda buf, pos: Ushort(_U16.unpack_from(buf, pos)[0])),
    0x61: (2, lambda buf, pos: Short(_I16.unpack_from(buf, pos)[0])),
    0x70: (4, lambda buf, pos: Uint(_U32.unpack_from(buf, pos)[0])),
    0x71: (4, lambda buf, pos: Int(_I32.unpack_from(buf, pos)[0])),
    0x72: (4, lambda buf, pos: Float(_F32.unpack_from(buf, pos)[0])),
    0x73: (4, _char),
    0x74: (4, lambda buf, pos: Decimal32(buf[pos : pos + 4])),
    0x80: (8, lambda buf, pos: Ulong(_U64.unpack_from(buf, pos)[0])),
    0x81: (8, lambda buf, pos: int(_I64.unpack_from(buf, pos)[0])),
    0x82: (8, lambda buf, pos: float(_F64.unpack_from(buf, pos)[0])),
    0x83: (8, lambda buf, pos: Timestamp(_I64.unpack_from(buf, pos)[0])),
    0x84: (8, lambda buf, pos: Decimal64(buf[pos : pos + 8])),
    0x94: (16, lambda buf, pos: Decimal128(buf[pos : pos + 16])),
    0x98: (16, lambda buf, pos: uuid.UUID(bytes=bytes(buf[pos : pos + 16]))),
}


def _boolean(octet: int) -> bool:
    if octet > 1:
        raise DecodeError("boolean is neither 0 nor 1")
    return octet == 1


def decode_value(
    buf: bytes,
    pos: int = 0,
    end: int | None = None,
    depth: int = MAX_DEPTH,
    *,
    max_heap_bytes: int = MAX_HEAP_BYTES,
) -> tuple[Value, int]:
    """Return the value at `pos` and the position after it. Raises `DecodeError` only.

    `max_heap_bytes`: limit of the objects that are allocated, without the bytes of text and binary.
    """
    if end is None or end > len(buf):
        end = len(buf)
    return _value(buf, pos, end, depth, [MAX_WIDTHLESS_ITEMS, max_heap_bytes])


def skip_value(buf: bytes, pos: int, end: int) -> int:
    """Return the position after the value at `pos` without looking into compounds."""
    if pos >= end:
        raise DecodeError("value is cut off")
    width = _WIDTH_BY_CODE[buf[pos]]
    if width >= 0:
        after = pos + 1 + width
    elif width == _DESCRIBED:
        return _skip_described(buf, pos, end)
    else:
        after = _bounds(buf[pos], buf, pos + 1, end)[1]
    if after > end:
        raise DecodeError("value is cut off")
    return after


def _skip_described(buf: bytes, pos: int, end: int) -> int:
    """Skip a constructor 0x00, whose descriptor and value may be described in turn."""
    pending, nested = 1, 0
    while pending:
        if pos < end and buf[pos] == 0x00:
            nested += 1
            if nested > MAX_DEPTH:
                raise DecodeError("nested too deeply")
            pos += 1
            pending += 1
        else:
            pos = skip_value(buf, pos, end)
            pending -= 1
    return pos


def _value(buf: bytes, pos: int, end: int, depth: int, room: list[int]) -> tuple[Value, int]:
    """Decode a value. `room`: remaining widthless items of arrays, and remaining heap bytes."""
    if pos >= end:
        raise DecodeError("value is cut off")
    code = buf[pos]
    if code == 0x00:
        if depth <= 0:
            raise DecodeError("nested too deeply")
        _charge(room, COMPOUND_BYTES)
        descriptor, pos = _value(buf, pos + 1, end, depth - 1, room)
        value, pos = _value(buf, pos, end, depth - 1, room)
        return Described(descriptor, value), pos
    return _payload(code, buf, pos + 1, end, depth, room)


def _payload(
    code: int, buf: bytes, pos: int, end: int, depth: int, room: list[int]
) -> tuple[Value, int]:
    """Decode the value after the constructor `code`."""
    fixed = _FIXED.get(code)
    if fixed is not None:
        after = pos + fixed[0]
        if after > end:
            raise DecodeError("value is cut off")
        return fixed[1](buf, pos), after
    start, after = _bounds(code, buf, pos, end)
    if code in (0xA1, 0xB1):
        return _text(buf, start, after), after
    if code in (0xA3, 0xB3):
        return _symbol(buf, start, after), after
    if code in (0xA0, 0xB0):
        return bytes(buf[start:after]), after
    if depth <= 0:
        raise DecodeError("nested too deeply")
    width = 1 if code in (0xC0, 0xC1, 0xE0) else 4
    if start + width > after:
        raise DecodeError("compound without a count")
    count = buf[start] if width == 1 else _U32.unpack_from(buf, start)[0]
    start += width
    if code in (0xC0, 0xD0):
        return _items(buf, start, after, count, depth - 1, room), after
    if code in (0xC1, 0xD1):
        return _pairs(buf, start, after, count, depth - 1, room), after
    return _array(buf, start, after, count, depth - 1, room), after


def _charge(room: list[int], size_bytes: int) -> None:
    """Charge for the heap size of values before they are allocated."""
    room[1] -= size_bytes
    if room[1] < 0:
        raise DecodeError("too many values")


def _bounds(code: int, buf: bytes, pos: int, end: int) -> tuple[int, int]:
    """Return start and end of the content of a variable-width value."""
    width = _WIDTH_BY_CODE[code]
    if width == _SIZE8:
        if pos + 1 > end:
            raise DecodeError("value is cut off")
        start, size = pos + 1, buf[pos]
    elif width == _SIZE32:
        if pos + 4 > end:
            raise DecodeError("value is cut off")
        start, size = pos + 4, _U32.unpack_from(buf, pos)[0]
    else:
        raise DecodeError("unknown constructor")
    if start + size > end:
        raise DecodeError("value is longer than its container")
    return start, start + size


def _text(buf: bytes, start: int, end: int) -> str:
    try:
        return str(buf[start:end], "utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError("string is not UTF-8") from error


def _symbol(buf: bytes, start: int, end: int) -> Symbol:
    try:
        return Symbol(str(buf[start:end], "ascii"))
    except UnicodeDecodeError as error:
        raise DecodeError("symbol is not ASCII") from error


def _items(buf: bytes, pos: int, end: int, count: int, depth: int, room: list[int]) -> list[Value]:
    if count > end - pos:
        raise DecodeError("more items than bytes")
    _charge(room, COMPOUND_BYTES + count * VALUE_BYTES)
    items: list[Value] = []
    for _ in range(count):
        value, pos = _value(buf, pos, end, depth, room)
        items.append(value)
    if pos != end:
        raise DecodeError("compound is longer than its items")
    return items


def _pairs(
    buf: bytes, pos: int, end: int, count: int, depth: int, room: list[int]
) -> dict[Value, Value]:
    if count % 2:
        raise DecodeError("map with a key without a value")
    _charge(room, MAP_BYTES)
    items = _items(buf, pos, end, count, depth, room)
    pairs: dict[Value, Value] = {}
    odd = 0
    for index in range(0, count, 2):
        key = items[index]
        if not isinstance(key, str | bytes):
            if isinstance(key, list | dict | Array | Described):
                raise DecodeError("map key is a compound")
            odd += 1
            if odd > MAX_ODD_KEYS:
                raise DecodeError("too many map keys that are no strings")
        pairs[key] = items[index + 1]
    return pairs


def _array(buf: bytes, pos: int, end: int, count: int, depth: int, room: list[int]) -> Array:
    descriptor: Value = None
    if pos < end and buf[pos] == 0x00:
        descriptor, pos = _value(buf, pos + 1, end, depth, room)
    if pos >= end:
        raise DecodeError("array without a constructor")
    code = buf[pos]
    pos += 1
    width = _WIDTH_BY_CODE[code]
    if width in (_DESCRIBED, _UNKNOWN):
        raise DecodeError("array with an unknown constructor")
    if width == 0:
        room[0] -= count
        if room[0] < 0:
            raise DecodeError("too many items without a payload")
    elif count > (end - pos) // (width if width > 0 else 1):
        raise DecodeError("more items than bytes")
    _charge(room, COMPOUND_BYTES + count * VALUE_BYTES)
    items: list[Value] = []
    for _ in range(count):
        value, pos = _payload(code, buf, pos, end, depth, room)
        items.append(value)
    if pos != end:
        raise DecodeError("array is longer than its items")
    return Array(code, items, descriptor)


_SIZE8: Final = -1
_SIZE32: Final = -2
_DESCRIBED: Final = -3
_UNKNOWN: Final = -4


def _width_of(code: int) -> int:
    if code in _FIXED:
        return _FIXED[code][0]
    if code in (0xA0, 0xA1, 0xA3, 0xC0, 0xC1, 0xE0):
        return _SIZE8
    if code in (0xB0, 0xB1, 0xB3, 0xD0, 0xD1, 0xF0):
        return _SIZE32
    return _DESCRIBED if code == 0x00 else _UNKNOWN


_WIDTH_BY_CODE: Final = tuple(_width_of(code) for code in range(256))
"""Payload octets after each constructor; below zero: the encoding of the size."""


# --- encoding -----------------------------------------------------------------------------------


def encode_value(value: Value) -> bytes:
    """Return the smallest encoding. Raises `TypeError` for values without or outside an AMQP
    type.
    """
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise TypeError(f"no AMQP type for {type(value).__name__}")
    try:
        return encoder(value)
    except (OverflowError, UnicodeEncodeError, struct.error) as error:
        raise TypeError(f"{type(value).__name__} does not fit its AMQP type") from error


def _ranged(
    width: struct.Struct, wide: bytes, small: bytes, low: int, high: int, zero: bytes = b""
) -> Callable[[Any], bytes]:
    """Encoder of an integer with a one-octet form for low..high and possibly a form for zero."""

    def encode(value: int) -> bytes:
        if zero and value == 0:
            return zero
        if low <= value <= high:
            return small + (value & 0xFF).to_bytes(1, "big")
        return wide + width.pack(value)

    return encode


def _variable(short: bytes, long: bytes, encoding: str | None) -> Callable[[Any], bytes]:
    def encode(value: Any) -> bytes:
        data: bytes = value if encoding is None else value.encode(encoding)
        size = len(data)
        if size < 256:
            return short + size.to_bytes(1, "big") + data
        return long + _U32.pack(size) + data

    return encode


def _compound(short: bytes, long: bytes, body: bytes, count: int) -> bytes:
    if len(body) < 255 and count < 256:
        return short + bytes((len(body) + 1, count)) + body
    return long + _U32.pack(len(body) + 4) + _U32.pack(count) + body


def encode_list(fields: list[bytes]) -> bytes:
    """Return a list of values that are already encoded."""
    return encode_items(b"".join(fields), len(fields)) if fields else b"\x45"


def encode_items(items: bytes, count: int) -> bytes:
    """Return a list of `count` values that are already encoded and joined."""
    return _compound(b"\xc0", b"\xd0", items, count)


def encode_map(entries: bytes, count: int) -> bytes:
    """Return a map of encoded keys and values; `count` counts pairs."""
    return _compound(b"\xc1", b"\xd1", entries, count * 2)


def _encode_dict(value: dict[Value, Value]) -> bytes:
    entries = b"".join(encode_value(key) + encode_value(item) for key, item in value.items())
    return encode_map(entries, len(value))


def _encode_described(value: Described) -> bytes:
    return b"\x00" + encode_value(value.descriptor) + encode_value(value.value)


def _encode_array(value: Array) -> bytes:
    constructor = bytes((value.code,))
    if value.descriptor is not None:
        constructor = b"\x00" + encode_value(value.descriptor) + constructor
    try:
        items = b"".join([_bare(value.code, item) for item in value.items])
    except (AttributeError, OverflowError, ValueError, struct.error) as error:
        raise TypeError("array item does not fit the array's constructor") from error
    return _compound(b"\xe0", b"\xf0", constructor + items, len(value.items))


def _bare(code: int, value: Value) -> bytes:
    """Encode an array item: the value under a given constructor, without the constructor."""
    fixed = _WIDTHS.get(code)
    if fixed is not None:
        return fixed(value)
    if _WIDTH_BY_CODE[code] not in (_SIZE8, _SIZE32):
        raise ValueError("unknown constructor")
    full = encode_value(value)
    size_at_most_8 = code >> 4 in (0xA, 0xC, 0xE)
    if full[0] == code:
        return full[1:]
    if full[0] | 0x10 != code and not (full[0] == 0x45 and code in (0xC0, 0xD0)):
        raise ValueError("not of the constructor's type")
    if full[0] == 0x45:
        return b"\x01\x00" if size_at_most_8 else b"\x00\x00\x00\x04\x00\x00\x00\x00"
    # The short form was chosen; widen its size and, of a compound, its count.
    if code >> 4 == 0xB:
        return _U32.pack(full[1]) + full[2:]
    return _U32.pack(full[1] + 3) + _U32.pack(full[2]) + full[3:]


def _only(expected: Value) -> Callable[[Any], bytes]:
    """Encoder of a widthless array item, which has one possible value."""

    def encode(value: Any) -> bytes:
        if value != expected:
            raise ValueError("not the constructor's value")
        return b""

    return encode


def _octets(size: int) -> Callable[[Any], bytes]:
    def encode(value: bytes) -> bytes:
        if len(value) != size:
            raise OverflowError("wrong number of octets")
        return bytes(value)

    return encode


_WIDTHS: Final[dict[int, Callable[[Any], bytes]]] = {
    0x40: _only(None),
    0x41: _only(True),
    0x42: _only(False),
    0x43: _only(0),
    0x44: _only(0),
    0x45: _only([]),
    0x50: lambda value: value.to_bytes(1, "big"),
    0x51: _I8.pack,
    0x52: lambda value: value.to_bytes(1, "big"),
    0x53: lambda value: value.to_bytes(1, "big"),
    0x54: _I8.pack,
    0x55: _I8.pack,
    0x56: lambda value: b"\x01" if value else b"\x00",
    0x60: _U16.pack,
    0x61: _I16.pack,
    0x70: _U32.pack,
    0x71: _I32.pack,
    0x72: _F32.pack,
    0x73: lambda value: _U32.pack(ord(value)),
    0x74: _octets(4),
    0x80: _U64.pack,
    0x81: _I64.pack,
    0x82: _F64.pack,
    0x83: _I64.pack,
    0x84: _octets(8),
    0x94: _octets(16),
    0x98: lambda value: value.bytes,
}

_ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): lambda _value: b"\x40",
    bool: lambda value: b"\x41" if value else b"\x42",
    Ubyte: lambda value: b"\x50" + value.to_bytes(1, "big"),
    Ushort: lambda value: b"\x60" + _U16.pack(value),
    Uint: _ranged(_U32, b"\x70", b"\x52", 0, 255, b"\x43"),
    Ulong: _ranged(_U64, b"\x80", b"\x53", 0, 255),
    Byte: lambda value: b"\x51" + _I8.pack(value),
    Short: lambda value: b"\x61" + _I16.pack(value),
    Int: _ranged(_I32, b"\x71", b"\x54", -128, 127),
    int: _ranged(_I64, b"\x81", b"\x55", -128, 127),
    Float: lambda value: b"\x72" + _F32.pack(value),
    float: lambda value: b"\x82" + _F64.pack(value),
    Char: lambda value: b"\x73" + _U32.pack(ord(value)),
    Timestamp: lambda value: b"\x83" + _I64.pack(value),
    Decimal32: lambda value: b"\x74" + _WIDTHS[0x74](value),
    Decimal64: lambda value: b"\x84" + _WIDTHS[0x84](value),
    Decimal128: lambda value: b"\x94" + _WIDTHS[0x94](value),
    uuid.UUID: lambda value: b"\x98" + value.bytes,
    bytes: _variable(b"\xa0", b"\xb0", None),
    str: _variable(b"\xa1", b"\xb1", "utf-8"),
    Symbol: _variable(b"\xa3", b"\xb3", "ascii"),
    list: lambda value: encode_list([encode_value(item) for item in value]),
    dict: _encode_dict,
    Described: _encode_described,
    Array: _encode_array,
}
