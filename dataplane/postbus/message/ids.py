"""Message ids as text: one normal form for every AMQP type.

Duplicate detection and the choice of a partition compare ids by it, so that they agree on which
messages are copies of each other.
"""

from __future__ import annotations

import uuid

from postbus.message.codec import decode_value


def id_text(message_id: bytes) -> str:
    """Return the text of an encoded message id, as `Envelope.message_id` holds it.

    A string as it is, a uuid hyphenated in lower case, an ulong in decimal, binary in lower-case
    hexadecimal: what SDKs show. Ids of different types with the same text are the same id.
    """
    if message_id[0] == 0xA1:  # a short string, what nearly all clients send
        return message_id[2:].decode()
    value, _ = decode_value(message_id)
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, str | int | uuid.UUID) else repr(value)
