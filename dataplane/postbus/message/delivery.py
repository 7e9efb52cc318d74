"""Encoder of deliveries: header and annotations before the bare message as received.

Called by the edge once for each delivery. Also converts between the two forms of a lock token.
Source: AMQP 1.0 part 3, 3.2.1 and 3.2.3; the annotations of Service Bus.
"""

from __future__ import annotations

import struct
import uuid
from typing import Final

from postbus.message.codec import DecodeError, encode_items, encode_map, skip_value
from postbus.message.envelope import Envelope

MAX_UINT: Final = 0xFFFF_FFFF

MAX_EXPIRY_MS: Final = 253_402_214_399_999
"""Latest expiry that is sent, the end of 9999-12-30: the cap of the .NET SDK, since times of
clients end with that year."""


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

_ANNOTATIONS: Final = b"\x00\x53\x72\xc1"
_NO_TOKEN: Final = b"\x00\x53\x71\xc1\x01\x00" + _ANNOTATIONS
"""Delivery annotations without an entry."""

_TOKEN: Final = b"\x00\x53\x71\xc1\x24\x02" + LOCK_TOKEN + b"\x98"
"""Delivery annotations up to the octets of the lock token, which is a uuid."""

_GUID: Final = struct.Struct("<IHH8s").unpack
"""Parts of a delivery tag: the first three numbers of a .NET GUID are little-endian, unlike a
uuid's."""

# The usual prefixes: a header with a delivery count below 256, then short annotations. The map's
# size octet counts the octet of the count, then 8 octets and a name for each annotation.
_UNLOCKED_BYTES: Final = len(_SEQUENCE_LONG) + len(_ENQUEUED_TIMESTAMP) + 17
_LOCKED_BYTES: Final = _UNLOCKED_BYTES + len(_LOCKED_TIMESTAMP) + 8
_NUMBERED: Final = f"BB{len(_SEQUENCE_LONG)}sq{len(_ENQUEUED_TIMESTAMP)}sq"
_WITHOUT_TOKEN: Final = f"B{len(_NO_TOKEN)}s" + _NUMBERED
_WITH_TOKEN: Final = f"B{len(_TOKEN)}sIHH8s4s" + _NUMBERED + f"{len(_LOCKED_TIMESTAMP)}sq"
_UNLOCKED: Final = struct.Struct(">11s" + _WITHOUT_TOKEN).pack
_LOCKED: Final = struct.Struct(">11s" + _WITH_TOKEN).pack
_UNLOCKED_TTL: Final = struct.Struct(">9sI2s" + _WITHOUT_TOKEN).pack
_LOCKED_TTL: Final = struct.Struct(">9sI2s" + _WITH_TOKEN).pack

MOST_ANNOTATION_BYTES: Final = 255 - _LOCKED_BYTES
"""Maximum size of the client's annotations in a usual prefix."""

_HEADERS: Final = {
    True: b"\x00\x53\x70\xc0\x07\x05\x41\x40\x40\x42\x52",
    False: b"\x00\x53\x70\xc0\x07\x05\x42\x40\x40\x42\x52",
}
_TTL_HEADERS: Final = {
    True: b"\x00\x53\x70\xc0\x0b\x05\x41\x40\x70",
    False: b"\x00\x53\x70\xc0\x0b\x05\x42\x40\x70",
}
_AFTER_TTL: Final = b"\x42\x52"


def encode_prefix(  # positional on purpose: keyword-only arguments bind slower
    envelope: Envelope,
    sequence: int,
    enqueued_ms: int,
    delivery_count: int,
    ttl_ms: int | None,
    locked_until_ms: int | None,
    lock_token: bytes | None,
    state: int | None = None,
) -> bytes:
    """Return the sections before `properties`.

    `ttl_ms` None: no TTL; `locked_until_ms` None: no such annotation; `lock_token` is a delivery
    tag, b"" in receive-and-delete; None for a message that is not delivered, whose delivery
    annotations stay the sender's. Only locked messages have a lock token.
    """
    annotations, count = envelope.annotations, envelope.annotation_count
    if envelope.origin_sequence is not None or envelope.hop_count:
        annotations, count = _with_origin(envelope)
    if (
        delivery_count > 255
        or envelope.priority is not None
        or state is not None
        or lock_token is None
        or envelope.delivery_annotations
        or len(annotations) > MOST_ANNOTATION_BYTES
    ):
        return _any_prefix(
            envelope, sequence, enqueued_ms, delivery_count, ttl_ms, locked_until_ms, state,
            lock_token, annotations, count,
        )  # fmt: skip
    size = len(annotations)
    octets = 6 + 2 * count if size else 6
    if ttl_ms is None:
        header = _HEADERS[envelope.is_durable]
        if locked_until_ms is not None:
            first, second, third, rest = _GUID(lock_token)
            prefix = _LOCKED(
                header, delivery_count, _TOKEN, first, second, third, rest,
                _ANNOTATIONS, _LOCKED_BYTES + size, octets,
                _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
                _LOCKED_TIMESTAMP, locked_until_ms,
            )  # fmt: skip
        else:
            prefix = _UNLOCKED(
                header, delivery_count, _NO_TOKEN, _UNLOCKED_BYTES + size, octets - 2,
                _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
            )  # fmt: skip
    else:
        header = _TTL_HEADERS[envelope.is_durable]
        ttl_ms = min(ttl_ms, MAX_UINT)
        if locked_until_ms is not None:
            first, second, third, rest = _GUID(lock_token)
            prefix = _LOCKED_TTL(
                header, ttl_ms, _AFTER_TTL, delivery_count, _TOKEN, first, second, third, rest,
                _ANNOTATIONS, _LOCKED_BYTES + size, octets,
                _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
                _LOCKED_TIMESTAMP, locked_until_ms,
            )  # fmt: skip
        else:
            prefix = _UNLOCKED_TTL(
                header, ttl_ms, _AFTER_TTL, delivery_count, _NO_TOKEN,
                _UNLOCKED_BYTES + size, octets - 2,
                _SEQUENCE_LONG, sequence, _ENQUEUED_TIMESTAMP, enqueued_ms,
            )  # fmt: skip
    return prefix + annotations if size else prefix


def with_times(properties: bytes, enqueued_ms: int, ttl_ms: int) -> bytes:
    """Return the properties section with expiry and creation time, from which clients compute the
    TTL.

    A section that cannot be decoded is returned as it is. Source: Azure's AMQP guide,
    "absolute-expiry-time: ignored on input, authoritative on output".
    """
    times = _TIMES(0x83, min(enqueued_ms + ttl_ms, MAX_EXPIRY_MS), 0x83, enqueued_ms)
    if not properties:
        return _LIST8 + _NO_OTHERS + times
    size = len(properties)
    if size < _SHORT_BYTES and properties.startswith(_LIST8):
        count = properties[5]
        if count <= 8:
            octets = size + 21 - count
            return _LIST8 + bytes((octets, 10)) + properties[6:] + _NULLS[: 8 - count] + times
        if properties[6] == 0xA1:
            pos = properties[7] + 8
            if (
                properties.startswith(_SEVEN_NULLS, pos)
                and properties[pos + 16 : pos + 17] == b"\x83"
            ):
                return properties[: pos + 7] + times + properties[pos + 25 :]
    try:
        return _with_any_times(properties, times)
    except (DecodeError, IndexError):
        return properties


def _with_any_times(properties: bytes, times: bytes) -> bytes:
    end = len(properties)
    pos = skip_value(properties, 1, end)
    if properties[pos] == 0xC0:
        count, pos = properties[pos + 2], pos + 3
    elif properties[pos] == 0xD0:
        count, pos = int.from_bytes(properties[pos + 5 : pos + 9], "big"), pos + 9
    else:  # an empty list: `slice_message` accepts no third form
        return _LIST8 + _NO_OTHERS + times
    first = pos
    for _ in range(min(count, 8)):
        pos = skip_value(properties, pos, end)
    after = pos
    for _ in range(min(count, 10) - 8):
        after = skip_value(properties, after, end)
    items = properties[first:pos] + _NULLS[: max(8 - count, 0)] + times + properties[after:]
    return _PROPERTIES + encode_items(items, max(count, 10))


_TIMES: Final = struct.Struct(">BqBq").pack
_PROPERTIES: Final = b"\x00\x53\x73"
_LIST8: Final = _PROPERTIES + b"\xc0"
_NULLS: Final = b"\x40" * 8
_NO_OTHERS: Final = b"\x1b\x0a" + _NULLS
_SEVEN_NULLS: Final = b"\x40" * 7 + b"\x83"
"""Properties between message id and creation time, as SDKs write them with a TTL."""

_SHORT_BYTES: Final = 234
"""Maximum size of a list that stays short with eight nulls and two times added."""


def _with_origin(envelope: Envelope) -> tuple[bytes, int]:
    """Return the client's annotations and their count, with the annotations of the message's
    origin.
    """
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
    delivery_annotations = envelope.delivery_annotations
    if lock_token is not None or delivery_annotations:
        pairs = delivery_annotations[4:]
        octets = int.from_bytes(delivery_annotations[:4], "big")
        if lock_token:
            pairs = LOCK_TOKEN + b"\x98" + token_to_uuid(lock_token).bytes + pairs
            octets += 2
        parts += [b"\x00\x53\x71", encode_map(pairs, octets // 2)]
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
    """Return an encoded message, as management responses embed it."""
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
    properties = envelope.properties
    if ttl_ms is not None:
        properties = with_times(properties, enqueued_ms, ttl_ms)
    return prefix + properties + envelope.application_properties + envelope.body


def token_to_uuid(lock_token: bytes) -> uuid.UUID:
    """Return the management form of a delivery tag, which is a .NET little-endian GUID."""
    return uuid.UUID(bytes_le=lock_token)


def uuid_to_token(value: uuid.UUID) -> bytes:
    """Return the delivery tag of a management lock token."""
    return value.bytes_le
