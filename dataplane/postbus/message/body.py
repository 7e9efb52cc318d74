"""The readable body of a message: its bytes without the sections around them.

For people and for filters of tools; deliveries carry the sections as they came.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from postbus.message.codec import DecodeError, decode_value, skip_value
from postbus.message.sections import DATA, FOOTER, SEQUENCE, VALUE


class BodyKind(Enum):
    """The three kinds of AMQP bodies."""

    NONE = "none"
    DATA = "data"
    VALUE = "value"
    SEQUENCE = "sequence"
    MALFORMED = "malformed"


_NAMES = {"amqp:data:binary": DATA, "amqp:amqp-sequence:list": SEQUENCE, "amqp:amqp-value:*": VALUE}
_KINDS: Final[dict[object, BodyKind]] = {
    DATA: BodyKind.DATA,
    VALUE: BodyKind.VALUE,
    SEQUENCE: BodyKind.SEQUENCE,
}

MAX_READ_BYTES: Final = 64 * 1024
"""Most bytes of lists, maps and the like that are read. A megabyte of them would take two seconds,
in which nothing else of the process runs. Our choice: a tenth of one."""

MAX_SECTIONS: Final = 1_000
"""Most sections that are put together. Our choice: clients write one."""

MAX_DESCRIPTOR_BYTES: Final = 64


def read_body(body: bytes) -> tuple[BodyKind, bytes]:
    """Return the kind and the content of an envelope's body.

    Data sections are put together; a value or a sequence is its text in UTF-8, binary as it is. Of
    a body that is malformed, or that would take too long to read, the content is all of it.
    """
    kind = BodyKind.NONE
    parts: list[bytes] = []
    pos = read_bytes = 0
    end = len(body)
    try:
        while pos < end:
            code, content = _section(body, pos)
            after = skip_value(body, content, end)
            if code == FOOTER:
                pos = after
                continue
            kind = _KINDS.get(code, BodyKind.MALFORMED)
            if not _is_scalar(body[content]):
                read_bytes += after - content
            if kind is BodyKind.MALFORMED:
                return kind, body
            if len(parts) == MAX_SECTIONS or read_bytes > MAX_READ_BYTES:
                return kind, body
            value, pos = decode_value(body, content, after)
            if isinstance(value, bytes):
                parts.append(value)
            elif code != DATA:
                parts.append(str(value).encode())
            else:
                return BodyKind.MALFORMED, body
    except (DecodeError, IndexError, UnicodeEncodeError):
        return BodyKind.MALFORMED, body
    return kind, b"".join(parts)


def _section(body: bytes, pos: int) -> tuple[object, int]:
    """Return the code of a section, None for what is none, and where its value starts."""
    if body[pos] != 0x00:
        return None, pos
    content = skip_value(body, pos + 1, min(len(body), pos + MAX_DESCRIPTOR_BYTES))
    descriptor, _ = decode_value(body, pos + 1, content)
    return _NAMES.get(str(descriptor), descriptor), content


def _is_scalar(constructor: int) -> bool:
    """Return whether a value is read in one step at any length: a number, text, binary."""
    return 0x40 <= constructor < 0xC0
