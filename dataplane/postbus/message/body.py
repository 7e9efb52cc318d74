"""The readable body of a message: its bytes without the sections around them.

For people and for filters of tools; deliveries contain the sections as received.
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
"""Maximum size of lists, maps and other compounds that are decoded. A megabyte would block the
event loop for two seconds. Our choice: a tenth of a second."""

MAX_SECTIONS: Final = 1_000
"""Maximum number of sections that are joined. Our choice: clients write one."""

MAX_DESCRIPTOR_BYTES: Final = 64


def read_body(body: bytes) -> tuple[BodyKind, bytes]:
    """Return the kind and the content of an envelope's body.

    Data sections are joined; a value or a sequence is its text in UTF-8, binary as it is. A body
    that is malformed, or would take too long to decode, is returned as it is.
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
    """Return the code of a section, or None if it is none, and the start of its value."""
    if body[pos] != 0x00:
        return None, pos
    content = skip_value(body, pos + 1, min(len(body), pos + MAX_DESCRIPTOR_BYTES))
    descriptor, _ = decode_value(body, pos + 1, content)
    return _NAMES.get(str(descriptor), descriptor), content


def _is_scalar(constructor: int) -> bool:
    """Return whether a value is decoded in one step whatever its length: a number, text, binary."""
    return 0x40 <= constructor < 0xC0
