"""Check that clients can decode an encoded value, without building it.

Bodies that are values are checked once, when they are sent: the receivers of a truncated one would
repeatedly get an error of their SDK instead of the message. Source: AMQP 1.0 part 1, 1.6.
"""

from __future__ import annotations

import struct
from typing import Final

from postbus.message.codec import (
    MAX_DEPTH,
    MAX_WIDTHLESS_ITEMS,
    DecodeError,
    decode_value,
    skip_value,
)

MAX_VALUES: Final = 50_000
"""Maximum number of values in the bodies of a delivery. Our choice: they are checked in one
iteration of the event loop, some 20 ms. An array of numbers is one value of any length."""

_LIST, _MAP, _DESCRIBED, _DESCRIBED_KEY = range(4)
_COMPOUNDS: Final = {0x45: _LIST, 0xC0: _LIST, 0xD0: _LIST, 0xC1: _MAP, 0xD1: _MAP}
_ARRAYS: Final = frozenset({0xE0, 0xF0})
_TEXTS: Final = {0xA1: (2, "utf-8"), 0xB1: (5, "utf-8"), 0xA3: (2, "ascii"), 0xB3: (5, "ascii")}
_U32: Final = struct.Struct(">I").unpack_from


def check_value(data: bytes, pos: int, end: int, room: int = MAX_VALUES) -> tuple[int, int]:
    """Return the position after the value at `pos`, and the remaining number of values.

    Raises `DecodeError` for malformed values, and above `room` values.
    """
    open_: list[tuple[int, int, int]] = []  # enclosing compounds: kind, items left, end
    while True:
        room -= 1
        if room < 0:
            raise DecodeError(f"the body has more than {MAX_VALUES} values: send it as data")
        inner_end = open_[-1][2] if open_ else end
        if pos >= inner_end:
            raise DecodeError("value is cut off")
        code = data[pos]
        is_key = bool(open_) and _is_key(*open_[-1][:2])
        if code == 0x00:
            if len(open_) >= MAX_DEPTH:
                raise DecodeError("nested too deeply")
            open_.append((_DESCRIBED_KEY if is_key else _DESCRIBED, 2, inner_end))
            pos += 1
            continue
        after = skip_value(data, pos, inner_end)
        kind = _COMPOUNDS.get(code)
        if is_key and (kind is not None or code in _ARRAYS):
            raise DecodeError("map key is a compound")
        if kind is not None and code != 0x45:
            pos, count = _begin(data, pos, after, code)
            if len(open_) >= MAX_DEPTH:
                raise DecodeError("nested too deeply")
            if kind == _MAP and count % 2:
                raise DecodeError("map with a key without a value")
            open_.append((kind, count, after))
            if count:
                continue
        elif code in _ARRAYS:
            room = _check_array(data, pos, after, room)
            pos = after
        else:
            if code in _TEXTS:
                _check_text(data, pos, after, code)
            elif code in (0x56, 0x73):  # a boolean, a character
                decode_value(data, pos, after)
            pos = after
        pos = _close(open_, pos)
        if not open_:
            return pos, room


def _close(open_: list[tuple[int, int, int]], pos: int) -> int:
    """Count a value that ended, and the compounds that end with it."""
    while open_:
        kind, left, end = open_.pop()
        left -= 1
        if left > 0:
            open_.append((kind, left, end))
            return pos
        if kind in (_LIST, _MAP) and pos != end:
            raise DecodeError("compound is longer than its items")
    return pos


def _is_key(kind: int, left: int) -> bool:
    """Return whether the next item is a key of a map, or the value of a described one."""
    return left % 2 == 0 if kind == _MAP else kind == _DESCRIBED_KEY and left == 1


def _begin(data: bytes, pos: int, after: int, code: int) -> tuple[int, int]:
    """Return the start of the items of a list or map, and their number."""
    is_short = code in (0xC0, 0xC1)
    start = pos + (3 if is_short else 9)
    if start > after:
        raise DecodeError("compound without a count")
    count = data[pos + 2] if is_short else _U32(data, pos + 5)[0]
    if count > after - start:
        raise DecodeError("more items than bytes")
    return start, count


def _check_array(data: bytes, pos: int, after: int, room: int) -> int:
    """Check an array by decoding it; return the remaining number of values.

    Numbers have a fixed width and are skipped. Other items may have items in turn.
    """
    start = pos + (3 if data[pos] == 0xE0 else 9)
    if start >= after:
        raise DecodeError("array without a constructor")
    count = data[pos + 2] if data[pos] == 0xE0 else _U32(data, pos + 5)[0]
    width = _WIDTHS.get(data[start])
    if width is not None:
        if count * width != after - start - 1:
            raise DecodeError("array is longer than its items")
        return room
    room -= after - start
    if data[start] not in _PAID:  # maximum number of items that take no octets
        room -= MAX_WIDTHLESS_ITEMS
    if room < 0:
        raise DecodeError(f"the body has more than {MAX_VALUES} values: send it as data")
    decode_value(data, pos, after)
    return room


_PAID: Final = frozenset({*_TEXTS, 0xA0, 0xB0, 0x56, 0x73})
"""Constructors whose items each take octets: texts, binaries, booleans, characters."""

_WIDTHS: Final = {
    **dict.fromkeys((0x50, 0x51, 0x52, 0x53, 0x54, 0x55), 1),
    **dict.fromkeys((0x60, 0x61), 2),
    **dict.fromkeys((0x70, 0x71, 0x72, 0x74), 4),
    **dict.fromkeys((0x80, 0x81, 0x82, 0x83, 0x84), 8),
    **dict.fromkeys((0x94, 0x98), 16),
}
"""Octets of numbers, timestamps and uuids: any content can be decoded."""


def _check_text(data: bytes, pos: int, after: int, code: int) -> None:
    head, encoding = _TEXTS[code]
    try:
        str(data[pos + head : after], encoding)
    except UnicodeDecodeError as error:
        raise DecodeError(f"text is not {encoding.upper()}") from error
