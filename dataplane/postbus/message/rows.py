"""The envelope as one column of a row: everything but application properties and body.

Shape: format octet 1, flags octet, then the fields the flags name, in their order. A plain message
is two octets and its properties section.
"""

from __future__ import annotations

import struct
from typing import Final

from postbus.message.envelope import Envelope

FORMAT: Final = 1

DURABLE: Final = 0x01
PRIORITY: Final = 0x02
TTL: Final = 0x04
SCHEDULED: Final = 0x08
ANNOTATIONS: Final = 0x10
KEYS: Final = 0x20
MESSAGE_ID: Final = 0x40
HOPS: Final = 0x80

_I64: Final = struct.Struct(">q")
_U32: Final = struct.Struct(">I")
_LENGTH: Final = struct.Struct(">H")

_PLAIN: Final = {True: bytes((FORMAT, DURABLE)), False: bytes((FORMAT, 0))}


class UnknownRowFormat(ValueError):
    """A row was written by a newer version of Postbus: upgrade the broker."""


def pack_envelope(envelope: Envelope) -> bytes:
    """Return the column value."""
    if (
        envelope.message_id is None
        and envelope.ttl_ms is None
        and not envelope.annotation_count
        and envelope.priority is None
        and envelope.session_id is None
        and not envelope.hop_count
    ):
        return _PLAIN[envelope.is_durable] + envelope.properties
    flags = DURABLE if envelope.is_durable else 0
    parts: list[bytes] = []
    if envelope.priority is not None:
        flags |= PRIORITY
        parts.append(envelope.priority.to_bytes(1, "big"))
    if envelope.ttl_ms is not None:
        flags |= TTL
        parts.append(_I64.pack(envelope.ttl_ms))
    if envelope.scheduled_ms is not None:
        flags |= SCHEDULED
        parts.append(_I64.pack(envelope.scheduled_ms))
    if envelope.annotation_count:
        flags |= ANNOTATIONS
        parts += [
            _U32.pack(envelope.annotation_count),
            _U32.pack(len(envelope.annotations)),
            envelope.annotations,
        ]
    keys = (envelope.session_id, envelope.partition_key, envelope.via_partition_key)
    if keys != (None, None, None):
        flags |= KEYS
        for key in keys:
            parts.append(_LENGTH.pack(0xFFFF) if key is None else _LENGTH.pack(len(key)) + key)
    if envelope.message_id is not None:
        flags |= MESSAGE_ID
        parts += [_U32.pack(len(envelope.message_id)), envelope.message_id]
    if envelope.hop_count:
        flags |= HOPS
        parts.append(envelope.hop_count.to_bytes(1, "big"))
    return bytes((FORMAT, flags)) + b"".join(parts) + envelope.properties


def unpack_envelope(
    blob: bytes, application_properties: bytes | None, body: bytes | None
) -> Envelope:
    """Return the envelope of a row. Raises `UnknownRowFormat`."""
    if blob[0] != FORMAT:
        raise UnknownRowFormat(UnknownRowFormat.__doc__)
    flags, pos = blob[1], 2
    envelope = Envelope(is_durable=bool(flags & DURABLE))
    if flags & PRIORITY:
        envelope.priority, pos = blob[pos], pos + 1
    if flags & TTL:
        envelope.ttl_ms, pos = _I64.unpack_from(blob, pos)[0], pos + 8
    if flags & SCHEDULED:
        envelope.scheduled_ms, pos = _I64.unpack_from(blob, pos)[0], pos + 8
    if flags & ANNOTATIONS:
        envelope.annotation_count = _U32.unpack_from(blob, pos)[0]
        size = _U32.unpack_from(blob, pos + 4)[0]
        envelope.annotations, pos = blob[pos + 8 : pos + 8 + size], pos + 8 + size
    if flags & KEYS:
        envelope.session_id, pos = _key(blob, pos)
        envelope.partition_key, pos = _key(blob, pos)
        envelope.via_partition_key, pos = _key(blob, pos)
    if flags & MESSAGE_ID:
        size = _U32.unpack_from(blob, pos)[0]
        envelope.message_id, pos = blob[pos + 4 : pos + 4 + size], pos + 4 + size
    if flags & HOPS:
        envelope.hop_count, pos = blob[pos], pos + 1
    envelope.properties = blob[pos:]
    envelope.application_properties = application_properties or b""
    envelope.body = body or b""
    envelope.size_bytes = len(blob) + len(envelope.application_properties) + len(envelope.body)
    return envelope


def _key(blob: bytes, pos: int) -> tuple[bytes | None, int]:
    size = _LENGTH.unpack_from(blob, pos)[0]
    pos += 2
    if size == 0xFFFF:
        return None, pos
    return blob[pos : pos + size], pos + size
