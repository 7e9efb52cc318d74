"""Encodes a message on its way out: header and annotations before the bare message as received.

The edge calls it once for each delivery. Also the two forms of a lock token.
Source: AMQP 1.0 part 3, 3.2.1 and 3.2.3; the annotations of Service Bus.
"""

from __future__ import annotations

import struct
import uuid
from typing import Final

from postbus.message.codec import encode_map
from postbus.message.envelope import Envelope

MAX_UINT: Final = 0xFFFF_FFFF


def _symbol(name: bytes) -> bytes:
    return b"\xa3" + len(name).to_bytes(1, "big") + name


SEQUENCE_NUMBER: Final = _symbol(b"x-opt-sequence-number")
ENQUEUED_TIME: Final = _symbol(b"x-opt-enqueued-time")
LOCKED_UNTIL: Final = _symbol(b"x-opt-locked-until")
ORIGIN_SEQUENCE: Final = _symbol(b"x-opt-enqueue-sequence-number")
DEAD_LETTER_SOURCE: Final = _symbol(b"x-opt-deadletter-source")
MESSAGE_STATE: Final = _symbol(b"x-opt-message-state")
LOCK_TOKEN: Final = _symbol(b"x-opt-lock-token")

_SEQUENCE_LONG: Final = SEQUENCE_NUMBER + b"\x81"
_ORIGIN_LONG: Final = ORIGIN_SEQUENCE + b"\x81"
_SOURCE_STRING: Final = DEAD_LETTER_SOURCE + b"\xb1"
_ENQUEUED_TIMESTAMP: Final = ENQUEUED_TIME + b"\x83"
_LOCKED_TIMESTAMP: Final = LOCKED_UNTIL + b"\x83"
_I64: Final = struct.Struct(">q").pack
_U32: Final = struct.Struct(">I").pack

_ANNOTATED: Final = f"B4sBB{len(_SEQUENCE_LONG)}sq{len(_ENQUEUED_TIMESTAMP)}sq"
_LOCKED_FORM: Final = f"{len(_LOCKED_TIMESTAMP)}sq"
_ANNOTATIONS: Final = b"\x00\x53\x72\xc1"

# The usual prefixes: a header with a delivery count below 256, then a short annotations map. Its
# size octet counts the octet of the count, then 8 octets and a name for each annotation.
_UNLOCKED_BYTES: Final = len(_SEQUENCE_LONG) + len(_ENQUEUED_TIMESTAMP) + 17
_LOCKED_BYTES: Final = _UNLOCKED_BYTES + len(_LOCKED_TIMESTAMP) + 8
_UNLOCKED: Final = struct.Struct(">11s" + _ANNOTATED).pack
_LOCKED: Final = struct.Struct(">11s" + _ANNOTATED + _LOCKED_FORM).pack
_UNLOCKED_TTL: Final = struct.Struct(">9sI2s" + _ANNOTATED).pack
_LOCKED_TTL: Final = struct.Struct(">9sI2s" + _ANNOTATED + _LOCKED_FORM).pack

_HEADERS: Final = {
    True: b"\x00\x53\x70\xc0\x07\x05\x41\x40\x40\x42\x52",
    False: b"\x00\x53\x70\xc0\x07\x05\x42\x40\x40\x42\x52",
}
_TTL_HEADERS: Final = {
    True: b"\x00\x53\x70\xc0\x0b\x05\x41\x40\x70",
    False: b"\x00\x53\x70\xc0\x0b\x05\x42\x40\x70",
}
_AFTER_TTL: Final = b"\x42\x52"


def encode_prefix(
    envelope: Envelope,
    *,
    sequence: int,
    enqueued_ms: int,
    delivery_count: int,
    ttl_ms: int | None,
    locked_until_ms: int | None,
    state: int | None = None,
    lock_token: bytes | None = None,
) -> bytes:
    """Return everything that comes before `properties`.

    `ttl_ms` is the one to tell (None: none); `locked_until_ms` None leaves the annotation out;
    `lock_token` (a delivery tag) adds it as a delivery annotation, for deferred messages.
    """
    annotations, count = envelope.annotations, envelope.annotation_count
    if envelope.origin_sequence is not None or envelope.hop_count:
        annotations, count = _with_origin(envelope)
    if (
        delivery_count > 255
        or envelope.priority is not None
        or state is not None
        or lock_token is not None
        or len(annotations) > 255 - _LOCKED_BYTES
    ):
        return _any_prefix(
            envelope,
            sequence,
            enqueued_ms,
            delivery_count,
            ttl_ms,
            locked_until_ms,
            state,
            lock_token,
            annotations,
            count,
        )
    size = len(annotations)
    octets = 6 + 2 * count if size else 6
    if ttl_ms is None:
        header = _HEADERS[envelope.is_durable]
        if locked_until_ms is not None:
            prefix = _LOCKED(
                header, delivery_count, _ANNOTATIONS, _LOCKED_BYTES + size, octets,
                _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
                _LOCKED_TIMESTAMP, locked_until_ms,
            )  # fmt: skip
        else:
            prefix = _UNLOCKED(
                header, delivery_count, _ANNOTATIONS, _UNLOCKED_BYTES + size, octets - 2,
                _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
            )  # fmt: skip
    else:
        header = _TTL_HEADERS[envelope.is_durable]
        ttl_ms = min(ttl_ms, MAX_UINT)
        if locked_until_ms is not None:
            prefix = _LOCKED_TTL(
                header, ttl_ms, _AFTER_TTL, delivery_count,
                _ANNOTATIONS, _LOCKED_BYTES + size, octets,
                _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
                _LOCKED_TIMESTAMP, locked_until_ms,
            )  # fmt: skip
        else:
            prefix = _UNLOCKED_TTL(
                header, ttl_ms, _AFTER_TTL, delivery_count,
                _ANNOTATIONS, _UNLOCKED_BYTES + size, octets - 2,
                _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
            )  # fmt: skip
    return prefix + annotations if size else prefix


def _with_origin(envelope: Envelope) -> tuple[bytes, int]:
    """Return the client's annotations and their count with what tells where it came from."""
    annotations, count = envelope.annotations, envelope.annotation_count
    if envelope.dead_letter_source is not None:
        source = envelope.dead_letter_source
        annotations = _SOURCE_STRING + _U32(len(source)) + source + annotations
        count += 1
    if envelope.origin_sequence is not None:
        annotations = _ORIGIN_LONG + _I64(envelope.origin_sequence) + annotations
        count += 1
    return annotations, count


def _any_prefix(
    envelope: Envelope,
    sequence: int,
    enqueued_ms: int,
    delivery_count: int,
    ttl_ms: int | None,
    locked_until_ms: int | None,
    state: int | None,
    lock_token: bytes | None,
    annotations: bytes,
    annotation_count: int,
) -> bytes:
    header = [
        b"\x41" if envelope.is_durable else b"\x42",
        b"\x40" if envelope.priority is None else b"\x50" + envelope.priority.to_bytes(1, "big"),
        b"\x40" if ttl_ms is None else b"\x70" + _U32(min(ttl_ms, MAX_UINT)),
        b"\x42",
        b"\x70" + _U32(min(delivery_count, MAX_UINT)),
    ]
    fields = b"".join(header)
    parts = [b"\x00\x53\x70\xc0", bytes((len(fields) + 1, 5)), fields]
    if lock_token is not None:
        entry = LOCK_TOKEN + b"\x98" + token_to_uuid(lock_token).bytes
        parts += [b"\x00\x53\x71", encode_map(entry, 1)]
    entries = [_SEQUENCE_LONG, _I64(sequence), _ENQUEUED_TIMESTAMP, _I64(enqueued_ms)]
    count = 2 + annotation_count
    if locked_until_ms is not None:
        entries += [_LOCKED_TIMESTAMP, _I64(locked_until_ms)]
        count += 1
    if state is not None:
        entries += [MESSAGE_STATE, b"\x54", state.to_bytes(1, "big")]
        count += 1
    entries.append(annotations)
    parts += [b"\x00\x53\x72", encode_map(b"".join(entries), count)]
    return b"".join(parts)


def encode_message(
    envelope: Envelope,
    *,
    sequence: int,
    enqueued_ms: int,
    delivery_count: int,
    ttl_ms: int | None,
    locked_until_ms: int | None = None,
    state: int | None = None,
    lock_token: bytes | None = None,
) -> bytes:
    """Return a whole message, as management responses embed it."""
    prefix = encode_prefix(
        envelope,
        sequence=sequence,
        enqueued_ms=enqueued_ms,
        delivery_count=delivery_count,
        ttl_ms=ttl_ms,
        locked_until_ms=locked_until_ms,
        state=state,
        lock_token=lock_token,
    )
    return prefix + envelope.properties + envelope.application_properties + envelope.body


def token_to_uuid(lock_token: bytes) -> uuid.UUID:
    """Return the management form of a delivery tag, which is a .NET little-endian GUID."""
    return uuid.UUID(bytes_le=lock_token)


def uuid_to_token(value: uuid.UUID) -> bytes:
    """Return the delivery tag of a management lock token."""
    return value.bytes_le
