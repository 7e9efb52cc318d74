"""Encodes a message on its way out: header and annotations before the bare message as received.

Also the two forms of a lock token. Source: AMQP 1.0 part 3, 3.2.1 and 3.2.3; the annotations of
Service Bus.
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
MESSAGE_STATE: Final = _symbol(b"x-opt-message-state")
LOCK_TOKEN: Final = _symbol(b"x-opt-lock-token")

_ANNOTATIONS_BYTES: Final = len(SEQUENCE_NUMBER) + len(ENQUEUED_TIME) + len(LOCKED_UNTIL) + 27

_LOCKED: Final = struct.Struct(
    f">11sB3sBBB{len(SEQUENCE_NUMBER) + 1}sq{len(ENQUEUED_TIME) + 1}sq{len(LOCKED_UNTIL) + 1}sq"
)
"""The usual prefix: header with durable and a delivery count below 256, three annotations."""

_HEADERS: Final = {
    is_durable: b"\x00\x53\x70\xc0\x07\x05" + octet + b"\x40\x40\x42\x52"
    for is_durable, octet in ((True, b"\x41"), (False, b"\x42"))
}


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
    if (
        ttl_ms is None
        and locked_until_ms is not None
        and delivery_count < 256
        and envelope.priority is None
        and not envelope.annotations
        and state is None
        and lock_token is None
    ):
        return _LOCKED.pack(
            _HEADERS[envelope.is_durable], delivery_count, b"\x00\x53\x72", 0xC1,
            _ANNOTATIONS_BYTES + 1, 6, _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
            _LOCKED_TIMESTAMP, locked_until_ms,
        )  # fmt: skip
    return _any_prefix(
        envelope, sequence, enqueued_ms, delivery_count, ttl_ms, locked_until_ms, state, lock_token
    )


_SEQUENCE_LONG: Final = SEQUENCE_NUMBER + b"\x81"
_ENQUEUED_TIMESTAMP: Final = ENQUEUED_TIME + b"\x83"
_LOCKED_TIMESTAMP: Final = LOCKED_UNTIL + b"\x83"
_I64: Final = struct.Struct(">q").pack
_U32: Final = struct.Struct(">I").pack


def _any_prefix(
    envelope: Envelope,
    sequence: int,
    enqueued_ms: int,
    delivery_count: int,
    ttl_ms: int | None,
    locked_until_ms: int | None,
    state: int | None,
    lock_token: bytes | None,
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
    count = 2 + envelope.annotation_count
    if locked_until_ms is not None:
        entries += [_LOCKED_TIMESTAMP, _I64(locked_until_ms)]
        count += 1
    if state is not None:
        entries += [MESSAGE_STATE, b"\x54", state.to_bytes(1, "big")]
        count += 1
    entries.append(envelope.annotations)
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
