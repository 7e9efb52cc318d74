"""The envelope as one column of a row, without application properties and body.

The store packs on insert and unpacks on load; user strings stay bytes (they may hold NUL). Shape:
format octet, flags octet, in format 2 the length and the bytes of the delivery annotations, then
the fields whose flags are set, in their order, then the properties section. The message id is a
field only if the section does not begin with it, so the row of a plain message is two octets and
its properties.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from postbus.message.codec import DecodeError, skip_value
from postbus.message.envelope import LEAST_BYTES, Envelope

FORMAT: Final = 1
ANNOTATED_FORMAT: Final = 2
"""The same after the delivery annotations of the sender, which few messages have."""

DURABLE: Final = 0x01
PRIORITY: Final = 0x02
TTL: Final = 0x04
SCHEDULED: Final = 0x08
ANNOTATIONS: Final = 0x10
KEYS: Final = 0x20
MESSAGE_ID: Final = 0x40
FORWARDED: Final = 0x80
"""Forwarded from another entity: hop count, number there or 0, source of dead letters."""

_I64: Final = struct.Struct(">q")
_U32: Final = struct.Struct(">I")
_I32: Final = struct.Struct(">i")
_LENGTH: Final = struct.Struct(">H")
_ORIGIN: Final = struct.Struct(">Bq")

_ROW: Final = struct.Struct(">hiqiqi")
_BODY_ID: Final = struct.Struct(">iq")
_NULL: Final = b"\xff" * 4
COPY_HEAD: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""Signature, flags and length of an extension. Source: PostgreSQL manual, COPY."""
COPY_TAIL: Final = b"\xff\xff"

PLAIN_HEADS: Final = {True: bytes((FORMAT, DURABLE)), False: bytes((FORMAT, 0))}
"""Durable -> what precedes the properties in a row of nothing else."""

_NO_OTHER_KEYS: Final = b"\xff" * 4

_SECTION: Final = b"\x00\x53\x73"
_LIST8: Final = b"\x00\x53\x73\xc0"
_ID_AT: Final = {0xC0: 6, 0xD0: 12}
"""Position of the first property, by the constructor of the section's list."""


class UnknownRowFormat(ValueError):
    """A row was written by a newer version of Postbus: upgrade the broker."""


def pack_envelope(envelope: Envelope) -> bytes:
    """Return the column value."""
    properties = envelope.properties
    message_id = envelope.message_id
    if (
        (message_id is None or properties.startswith(message_id, 6))
        and envelope.ttl_ms is None
        and envelope.session_id is None
        and not envelope.annotation_count
        and envelope.partition_key is None
        and envelope.priority is None
        and envelope.origin_sequence is None
        and not envelope.hop_count
        and envelope.dead_letter_source is None
        and envelope.scheduled_ms is None
        and envelope.via_partition_key is None
        and not envelope.delivery_annotations
        and (message_id is None or properties.startswith(_LIST8))
    ):
        return PLAIN_HEADS[envelope.is_durable] + properties
    return _pack_fields(envelope)


def _pack_fields(envelope: Envelope) -> bytes:
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
    session_id, partition_key = envelope.session_id, envelope.partition_key
    via_key = envelope.via_partition_key
    if session_id is not None and partition_key is None and via_key is None:
        flags |= KEYS
        parts += [_LENGTH.pack(len(session_id)), session_id, _NO_OTHER_KEYS]
    elif not (session_id is partition_key is via_key is None):
        flags |= KEYS
        for key in (session_id, partition_key, via_key):
            parts.append(_pack_key(key))
    if envelope.message_id != _message_id_of(envelope.properties):
        message_id = envelope.message_id or b""
        flags |= MESSAGE_ID
        parts += [_U32.pack(len(message_id)), message_id]
    origin, source = envelope.origin_sequence, envelope.dead_letter_source
    if envelope.hop_count or origin is not None or source is not None:
        flags |= FORWARDED
        parts += [_ORIGIN.pack(envelope.hop_count, origin or 0), _pack_key(source)]
    parts.append(envelope.properties)
    annotations = envelope.delivery_annotations
    if not annotations:
        return bytes((FORMAT, flags)) + b"".join(parts)
    head = bytes((ANNOTATED_FORMAT, flags)) + _U32.pack(len(annotations)) + annotations
    return head + b"".join(parts)


def pack_rows(rows: Iterable[tuple[int, int, Envelope]]) -> bytes:
    """Return rows of key, enqueued time (ms) and envelope for COPY in Postgres' binary format.

    Columns: both numbers, the packed envelope, application properties and body, which are null if
    they are empty. To be sent between `COPY_HEAD` and `COPY_TAIL`. Raises struct.error if a number
    has more than 64 bits.
    """
    parts: list[bytes] = []
    for row_key, enqueued_ms, envelope in rows:
        blob = pack_envelope(envelope)
        properties, body = envelope.application_properties, envelope.body
        parts += (
            _ROW.pack(5, 8, row_key, 8, enqueued_ms, len(blob)),
            blob,
            _I32.pack(len(properties)) if properties else _NULL,
            properties,
            _I32.pack(len(body)) if body else _NULL,
            body,
        )
    return b"".join(parts)


def pack_copy_columns(
    rows: Sequence[tuple[int, int, Envelope]],
    envelopes: Sequence[bytes],
    bodies: Sequence[bytes | None],
    body_ids: Sequence[int | None],
) -> bytes:
    """Return rows likewise, whose envelopes are packed, with a column of ids of bodies.

    A row has a body, the id of one beside it, or neither.
    """
    parts: list[bytes] = []
    for (row_key, enqueued_ms, envelope), blob, body, body_id in zip(
        rows, envelopes, bodies, body_ids, strict=True
    ):
        properties = envelope.application_properties
        parts += (
            _ROW.pack(6, 8, row_key, 8, enqueued_ms, len(blob)),
            blob,
            _I32.pack(len(properties)) if properties else _NULL,
            properties,
            _NULL if body is None else _I32.pack(len(body)),
            body or b"",
            _NULL if body_id is None else _BODY_ID.pack(8, body_id),
        )
    return b"".join(parts)


def unpack_envelope(
    blob: bytes, application_properties: bytes | None, body: bytes | None
) -> Envelope:
    """Return the envelope of a row. Raises `UnknownRowFormat`."""
    flags, pos = blob[1], _fields_at(blob)
    envelope = Envelope(0, flags & DURABLE != 0)
    if flags & ~DURABLE or pos > 2:
        pos = _unpack_fields(envelope, blob, flags, pos)
    envelope.properties = properties = blob[pos:]
    if not flags & MESSAGE_ID:
        envelope.message_id = _message_id_of(properties)
    size_bytes = len(blob)
    if application_properties is not None:
        envelope.application_properties = application_properties
        size_bytes += len(application_properties)
    if body is not None:
        envelope.body = body
        size_bytes += len(body)
    envelope.size_bytes = max(size_bytes, LEAST_BYTES)
    return envelope


def _unpack_fields(envelope: Envelope, blob: bytes, flags: int, pos: int) -> int:
    """Set the fields before the properties section; return its position."""
    if pos > 2:
        envelope.delivery_annotations = blob[6:pos]
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
        envelope.message_id, pos = blob[pos + 4 : pos + 4 + size] or None, pos + 4 + size
    if flags & FORWARDED:
        envelope.hop_count, origin = _ORIGIN.unpack_from(blob, pos)
        envelope.origin_sequence = origin or None
        envelope.dead_letter_source, pos = _key(blob, pos + _ORIGIN.size)
    return pos


def session_id_of(blob: bytes) -> bytes | None:
    """Return the session id in a column value. Raises `UnknownRowFormat`."""
    pos, flags = _fields_at(blob), blob[1]
    if not flags & KEYS:
        return None
    pos += (flags & PRIORITY != 0) + 8 * ((flags & TTL != 0) + (flags & SCHEDULED != 0))
    if flags & ANNOTATIONS:
        pos += 8 + int(_U32.unpack_from(blob, pos + 4)[0])
    return _key(blob, pos)[0]


def _fields_at(blob: bytes) -> int:
    """Return the position of the first field. Raises `UnknownRowFormat`."""
    if blob[0] == FORMAT:
        return 2
    if blob[0] == ANNOTATED_FORMAT:
        return 6 + int(_U32.unpack_from(blob, 2)[0])
    raise UnknownRowFormat(UnknownRowFormat.__doc__)


def _pack_key(key: bytes | None) -> bytes:
    return _LENGTH.pack(0xFFFF) if key is None else _LENGTH.pack(len(key)) + key


def _key(blob: bytes, pos: int) -> tuple[bytes | None, int]:
    size = _LENGTH.unpack_from(blob, pos)[0]
    pos += 2
    if size == 0xFFFF:
        return None, pos
    return blob[pos : pos + size], pos + size


def _message_id_of(properties: bytes) -> bytes | None:
    """Return the encoded first property, or None."""
    if len(properties) < 7 or not properties.startswith(_SECTION):
        return None
    pos = _ID_AT.get(properties[3])
    if pos is None or pos >= len(properties) or properties[pos] == 0x40:
        return None
    if properties[pos] == 0xA1:
        return properties[pos : pos + 2 + properties[pos + 1]]
    try:
        return properties[pos : skip_value(properties, pos, len(properties))]
    except DecodeError:
        return None
