"""The body of a message as somebody reads it: its bytes without the sections around them.

For people and for filters of tools; deliveries carry the sections as they came.
"""

from __future__ import annotations

from enum import Enum

from postbus.message.codec import DecodeError, Described, decode_value
from postbus.message.sections import DATA, FOOTER, SEQUENCE, VALUE


class BodyKind(Enum):
    """Which of the three kinds of AMQP bodies a message has."""

    NONE = "none"
    DATA = "data"
    VALUE = "value"
    SEQUENCE = "sequence"
    MALFORMED = "malformed"


_NAMES = {"amqp:data:binary": DATA, "amqp:amqp-sequence:list": SEQUENCE, "amqp:amqp-value:*": VALUE}


def read_body(body: bytes) -> tuple[BodyKind, bytes]:
    """Return the kind and the content of an envelope's body.

    Data sections are put together; a value or a sequence is its text in UTF-8, binary as it is. Of
    a body that is malformed the content is all of it.
    """
    kind = BodyKind.NONE
    parts: list[bytes] = []
    pos = 0
    try:
        while pos < len(body):
            section, pos = decode_value(body, pos, len(body))
            if not isinstance(section, Described):
                return BodyKind.MALFORMED, body
            code = _NAMES.get(str(section.descriptor), section.descriptor)
            if code == DATA:
                kind = BodyKind.DATA
                parts.append(bytes(section.value))
            elif code in (VALUE, SEQUENCE):
                kind = BodyKind.VALUE if code == VALUE else BodyKind.SEQUENCE
                value = section.value
                parts.append(value if isinstance(value, bytes) else str(value).encode())
            elif code != FOOTER:
                return BodyKind.MALFORMED, body
    except (DecodeError, TypeError, UnicodeEncodeError):
        return BodyKind.MALFORMED, body
    return kind, b"".join(parts)
