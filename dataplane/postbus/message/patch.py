"""Changes of application properties (modified outcomes, dead-letter reasons) and their limits.

Called by the entity when it settles and accepts, and by the edge for a message without an id. Other
parts of a message never change.
"""

from __future__ import annotations

import struct
from typing import Final

from postbus.message.codec import (
    Array,
    DecodeError,
    Described,
    decode_value,
    encode_items,
    encode_map,
    encode_value,
    skip_value,
)
from postbus.message.envelope import Envelope

DEAD_LETTER_REASON: Final = "DeadLetterReason"
DEAD_LETTER_DESCRIPTION: Final = "DeadLetterErrorDescription"
DEAD_LETTER_SOURCE: Final = "DeadLetterSource"

MAX_PROPERTY_BYTES: Final = 32 * 1024
MAX_PROPERTIES_BYTES: Final = 64 * 1024
MAX_ID_CHARS: Final = 128
TWO_KEYS: Final = "The partition key differs from the session id."

_DESCRIPTOR: Final = b"\x00\x53\x74"
_PROPERTIES: Final = b"\x00\x53\x73"
_CONSTRUCTOR_BYTES: Final = 5
_U32: Final = struct.Struct(">I").unpack_from


class PropertiesTooLarge(ValueError):
    """The application properties would exceed their limit."""


def merge_properties(
    section: bytes, changes: dict[str, object], limit_bytes: int = MAX_PROPERTIES_BYTES
) -> bytes:
    """Return the section with `changes` set; unchanged properties are copied as bytes, in order.

    A changed property keeps its place, new ones follow at the end; b"" is a message without the
    section. Raises `PropertiesTooLarge`, `DecodeError` for a malformed section, and `TypeError` for
    a value that is not a simple AMQP value.
    """
    for value in changes.values():
        if isinstance(value, list | dict | Array | Described):
            raise TypeError("an application property is a simple value")
    changed = {
        name: encode_value(str(name)) + encode_value(value) for name, value in changes.items()
    }
    merged: list[bytes] = []
    for name, entry, _ in _entries(section):
        if name is None or name not in changes:
            merged.append(entry)
        elif name in changed:
            merged.append(changed.pop(name))
    merged += changed.values()
    result = _DESCRIPTOR + encode_map(b"".join(merged), len(merged))
    if len(result) > limit_bytes:
        raise PropertiesTooLarge(PropertiesTooLarge.__doc__)
    return result


def give_message_id(envelope: Envelope, message_id: bytes) -> None:
    """Set the id of a message without one; its other fields are copied as bytes.

    `message_id` is an encoded value of less than 250 bytes.
    """
    section = envelope.properties
    items, count = b"", 0
    if section:
        pos = skip_value(section, 1, len(section))
        code = section[pos]
        if code == 0xC0:
            items, count = section[pos + 3 :], section[pos + 2]
        elif code == 0xD0:
            items, count = section[pos + 9 :], _U32(section, pos + 5)[0]
    # Without an id the list is empty or begins with a null of one octet.
    envelope.properties = _PROPERTIES + encode_items(message_id + items[1:], max(count, 1))
    envelope.message_id = message_id
    envelope.size_bytes += len(envelope.properties) - len(section)


def check_properties(envelope: Envelope) -> str | None:
    """Return an error if a message's properties exceed their limits, else None.

    Decodes them only if their sizes make a violation possible.
    """
    if len(envelope.properties) > MAX_ID_CHARS:
        message_id = envelope.message_id
        if message_id is not None and _id_length(message_id) > MAX_ID_CHARS:
            return f"The message id is longer than {MAX_ID_CHARS} characters."
        if len(envelope.properties) > MAX_PROPERTIES_BYTES:
            return f"The properties are larger than {MAX_PROPERTIES_BYTES} bytes."
    if envelope.session_id is not None and _is_long(envelope.session_id):
        return f"The session id is longer than {MAX_ID_CHARS} characters."
    for key in (envelope.partition_key, envelope.via_partition_key):
        if key is not None and _is_long(key):
            return f"The partition key is longer than {MAX_ID_CHARS} characters."
    if (
        envelope.session_id is not None
        and envelope.partition_key is not None
        and envelope.session_id != envelope.partition_key
    ):
        return TWO_KEYS
    section = envelope.application_properties
    if len(section) > MAX_PROPERTY_BYTES:
        if len(section) + len(envelope.properties) > MAX_PROPERTIES_BYTES:
            return f"All properties together are larger than {MAX_PROPERTIES_BYTES} bytes."
        try:
            entries = _entries(section)
        except DecodeError:
            return "The application properties are malformed."
        for name, _, value_bytes in entries:
            if value_bytes > MAX_PROPERTY_BYTES + _CONSTRUCTOR_BYTES:
                shown = (name or "")[:MAX_ID_CHARS]
                return f"The property '{shown}' is larger than {MAX_PROPERTY_BYTES} bytes."
    return None


def _is_long(key: bytes) -> bool:
    return len(key) > MAX_ID_CHARS and len(key.decode(errors="replace")) > MAX_ID_CHARS


def _id_length(message_id: bytes) -> int:
    """Return the number of characters of a string id, or of octets of a binary one."""
    data = message_id[2:] if message_id[0] in (0xA0, 0xA1) else message_id[5:]
    return len(data) if message_id[0] in (0xA0, 0xB0) else len(data.decode(errors="replace"))


def _entries(section: bytes) -> list[tuple[str | None, bytes, int]]:
    """Return for each entry: name (None: not a string), encoded key and value, size of the
    value.
    """
    if not section:
        return []
    pos = skip_value(section, 1, len(section))
    end = skip_value(section, pos, len(section))
    code = section[pos]
    if code == 0xC1 and pos + 3 <= end:
        count, pos = section[pos + 2], pos + 3
    elif code == 0xD1 and pos + 9 <= end:
        count, pos = _U32(section, pos + 5)[0], pos + 9
    else:
        raise DecodeError("application properties are not a map")
    if count % 2:
        raise DecodeError("map with a key without a value")
    found: list[tuple[str | None, bytes, int]] = []
    for _ in range(count // 2):
        name, value_at = decode_value(section, pos, end)
        after = skip_value(section, value_at, end)
        entry = section[pos:after]
        found.append((name if isinstance(name, str) else None, entry, after - value_at))
        pos = after
    if pos != end:
        raise DecodeError("map is longer than its entries")
    return found


def with_properties(envelope: Envelope, section: bytes) -> Envelope:
    """Copy an envelope with other application properties and its new size."""
    fields = {name: getattr(envelope, name) for name in Envelope.__slots__}
    fields["application_properties"] = section
    fields["size_bytes"] += len(section) - len(envelope.application_properties)
    return Envelope(**fields)
