"""Normal form of message ids: text, whatever their AMQP type.

Duplicate detection and the choice of a partition both compare ids in this form.
"""

from __future__ import annotations

import uuid

from postbus.message.codec import decode_value


def id_text(message_id: bytes) -> str:
    """Return the text of an encoded message id, as `Envelope.message_id` holds it.

    A string as it is, a uuid hyphenated in lower case, an ulong in decimal, binary in lower-case
    hexadecimal, as SDKs show them. Ids of different types with the same text are the same id.
    """
    if message_id[0] == 0xA1:  # a short string, as nearly all clients send
        return message_id[2:].decode()
    value, _ = decode_value(message_id)
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, str | int | uuid.UUID) else repr(value)
