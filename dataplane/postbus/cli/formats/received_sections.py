"""Sections of a received message, which may be malformed.

The bus passes on unchanged the parts that it does not use: text may not be UTF-8, and keys may not
be text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from postbus.message.codec import DecodeError, Symbol, Ulong, decode_value, skip_value
from postbus.message.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    SECTION_NAMES,
    SEQUENCE,
)

REST: Final = "rest"
"""Name for a section that cannot be identified."""

MAX_READ_ITEMS: Final = 10_000
"""Maximum number of keys, values and fields of a malformed section that are read one by one; the
raw section is kept, too. Our choice: a valid section with this number has at least half a
megabyte."""

_NAMES: Final = {code: name for name, code in SECTION_NAMES.items()}
_SHAPES: Final[dict[int, type]] = {
    HEADER: list,
    DELIVERY_ANNOTATIONS: dict,
    MESSAGE_ANNOTATIONS: dict,
    PROPERTIES: list,
    APPLICATION_PROPERTIES: dict,
    DATA: bytes,
    SEQUENCE: list,
    FOOTER: dict,
}
"""Types of sections; an amqp-value can be anything."""

_LISTS: Final = {0xC0: 1, 0xD0: 4}
_MAPS: Final = {0xC1: 1, 0xD1: 4}
_TEXTS: Final = {0xA1: 1, 0xB1: 4, 0xA3: 1, 0xB3: 4}
"""Constructor -> widths of its size and count fields, in octets."""


class ReceivedSections:
    """The sections of a message.

    `values`: code -> decoded values of the sections; of a malformed section the readable parts,
    with replacement characters for invalid text, and bytes for invalid values. `malformed`: AMQP
    name -> bytes of malformed sections.
    """

    def __init__(self, payload: bytes) -> None:
        self.values: dict[int, list[Any]] = {}
        self.malformed: dict[str, bytes] = {}
        at = 0
        while at < len(payload):
            try:
                after = skip_value(payload, at, len(payload))
                code, content_at = _descriptor(payload, at, after)
            except DecodeError:
                self.malformed[REST] = payload[at:]
                return
            self._read(code, payload[at:after], content_at - at)
            at = after

    def first(self, code: int) -> Any:
        """Return the value of a section, an empty list or map if it is missing."""
        found = self.values.get(code)
        return found[0] if found else _SHAPES[code]()

    def _read(self, code: int, encoded: bytes, content_at: int) -> None:
        shape = _SHAPES.get(code, object)
        try:
            value, _ = decode_value(encoded, content_at)
            if isinstance(value, shape):
                self.values.setdefault(code, []).append(value)
                return
        except DecodeError:
            pass
        name = _NAMES[code]
        self.malformed[name] = self.malformed.get(name, b"") + encoded
        if code < DATA:
            items = list(_items(encoded, content_at))
            if shape is list and encoded[content_at] in _LISTS:
                self.values.setdefault(code, []).append(items)
            elif shape is dict and encoded[content_at] in _MAPS:
                pairs = zip(map(_key, items[::2]), items[1::2], strict=False)
                self.values.setdefault(code, []).append(dict(pairs))


def _descriptor(payload: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the code and content of a section; raises `DecodeError` for an unknown one."""
    if payload[at] == 0x00:
        descriptor, content_at = decode_value(payload, at + 1, end)
        code = int(descriptor) if isinstance(descriptor, Ulong) else 0
        if isinstance(descriptor, Symbol):
            code = SECTION_NAMES.get(descriptor, 0)
        if code in _NAMES:
            return code, content_at
    raise DecodeError("unknown section")


def _items(encoded: bytes, at: int) -> Iterator[Any]:
    """Yield the readable items of a list or map, as far as their ends are known."""
    width = _LISTS.get(encoded[at]) or _MAPS.get(encoded[at])
    if width is None:
        return
    at += 1 + 2 * width
    for _ in range(MAX_READ_ITEMS):
        if at >= len(encoded):
            return
        try:
            after = skip_value(encoded, at, len(encoded))
        except DecodeError:
            return
        yield _legible(encoded, at, after)
        at = after


def _legible(encoded: bytes, at: int, after: int) -> Any:
    """Return a decoded value, else text with replacement characters, else its bytes."""
    try:
        return decode_value(encoded, at, after)[0]
    except DecodeError:
        width = _TEXTS.get(encoded[at])
        content = encoded[at:after]
        return content if width is None else content[1 + width :].decode(errors="replace")


def _key(value: Any) -> str:
    """Return a key as text, since a compound key could not be looked up."""
    return value if isinstance(value, str) else repr(value)
