"""Slices an encoded message into an `Envelope` in one pass, and a batch into its members.

Source: AMQP 1.0 part 3, 3.2; Service Bus's batch format (message-format 0x80013700).
"""

from __future__ import annotations

import struct
from typing import Final

from postbus.message.codec import DecodeError, decode_value, skip_value
from postbus.message.envelope import Envelope

BATCH_FORMAT: Final = 0x8001_3700
"""message-format of a transfer whose data sections each hold one encoded message."""

MAX_UINT: Final = 0xFFFF_FFFF

HEADER: Final = 0x70
DELIVERY_ANNOTATIONS: Final = 0x71
MESSAGE_ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION_PROPERTIES: Final = 0x74
DATA: Final = 0x75
FOOTER: Final = 0x78

BROKER_ANNOTATIONS: Final = frozenset(
    {
        b"x-opt-sequence-number",
        b"x-opt-enqueued-time",
        b"x-opt-locked-until",
        b"x-opt-enqueue-sequence-number",
        b"x-opt-message-state",
        b"x-opt-lock-token",
        b"x-opt-deadletter-source",
    }
)
"""Annotations only the broker may set; a client's values are dropped."""

_U32: Final = struct.Struct(">I").unpack_from
_I64: Final = struct.Struct(">q").unpack_from


class MalformedMessage(DecodeError):
    """The sections of a message are not what AMQP 1.0 allows."""


def slice_message(data: bytes) -> Envelope:
    """Return the parts of an encoded message. Raises `DecodeError`."""
    envelope = Envelope(size_bytes=len(data))
    pos, end = 0, len(data)
    order = 0
    try:
        while pos < end:
            if data[pos] != 0x00:
                raise MalformedMessage("section without a descriptor")
            code, content = _section(data, pos, end)
            if code >= DATA:
                _check_body(data, pos, end)
                envelope.body = data[pos:] if pos else data
                break
            if code <= order:
                raise MalformedMessage("sections are out of order")
            order = code
            after = skip_value(data, content, end)
            if code == HEADER:
                _read_header(envelope, data, content, after)
            elif code == MESSAGE_ANNOTATIONS:
                _read_annotations(envelope, data, content, after)
            elif code == PROPERTIES:
                envelope.properties = data[pos:after]
                _read_properties(envelope, data, content, after)
            elif code == APPLICATION_PROPERTIES:
                envelope.application_properties = data[pos:after]
            pos = after
    except (IndexError, struct.error) as error:
        raise MalformedMessage("the message is cut off") from error
    return envelope


def explode_batch(data: bytes) -> list[Envelope]:
    """Return the members of a batch. Raises `DecodeError`, also for an empty batch."""
    members: list[Envelope] = []
    pos, end = 0, len(data)
    try:
        while pos < end:
            code, content = _section(data, pos, end)
            after = skip_value(data, content, end)
            if code == DATA:
                start = content + (2 if data[content] == 0xA0 else 5)
                if data[content] not in (0xA0, 0xB0):
                    raise MalformedMessage("a data section is not binary")
                members.append(slice_message(data[start:after]))
            elif code > DATA and code != FOOTER:
                raise MalformedMessage("a batch has data sections only")
            pos = after
    except (IndexError, struct.error) as error:
        raise MalformedMessage("the batch is cut off") from error
    if not members:
        raise MalformedMessage("the batch is empty")
    return members


# --- sections -----------------------------------------------------------------------------------


def _section(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """Return the section's code and where its value starts."""
    if data[pos] != 0x00:
        raise MalformedMessage("section without a descriptor")
    form = data[pos + 1]
    if form == 0x53:
        return data[pos + 2], pos + 3
    descriptor, content = decode_value(data, pos + 1, end)
    if isinstance(descriptor, int) and HEADER <= descriptor <= FOOTER:
        return int(descriptor), content
    code = _NAMES.get(descriptor) if isinstance(descriptor, str) else None
    if code is None:
        raise MalformedMessage("unknown section")
    return code, content


_NAMES: Final = {
    "amqp:header:list": HEADER,
    "amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": 0x76,
    "amqp:amqp-value:*": 0x77,
    "amqp:footer:map": FOOTER,
}


def _check_body(data: bytes, pos: int, end: int) -> None:
    """Walk the body sections: they must fill the message, of one kind, footer last."""
    kind = 0
    while pos < end:
        code, content = _section(data, pos, end)
        if not DATA <= code <= FOOTER or kind == FOOTER or (kind and code not in (kind, FOOTER)):
            raise MalformedMessage("body sections are out of order")
        if code == kind == 0x77:
            raise MalformedMessage("more than one amqp-value")
        kind = code
        pos = skip_value(data, content, end)


def _list_fields(data: bytes, pos: int) -> tuple[int, int]:
    """Return the number of fields of a list and where the first one starts."""
    code = data[pos]
    if code == 0xC0:
        return data[pos + 2], pos + 3
    if code == 0xD0:
        return _U32(data, pos + 5)[0], pos + 9
    if code == 0x45:
        return 0, pos + 1
    raise MalformedMessage("section is not a list")


def _read_header(envelope: Envelope, data: bytes, pos: int, end: int) -> None:
    count, pos = _list_fields(data, pos)
    if count == 1 and pos + 1 == end:  # durable alone, what most clients send
        envelope.is_durable = data[pos] == 0x41
        return
    values: list[object] = []
    for _ in range(min(count, 3)):
        value, pos = decode_value(data, pos, end)
        values.append(value)
    values += [None] * (3 - len(values))
    durable, priority, ttl = values
    envelope.is_durable = durable is True
    if isinstance(priority, int) and priority is not True and 0 <= priority <= 255:
        envelope.priority = int(priority)
    if isinstance(ttl, int) and ttl is not True:
        envelope.ttl_ms = int(ttl)


def _read_annotations(envelope: Envelope, data: bytes, pos: int, end: int) -> None:
    """Keep the client's entries as bytes, drop the broker's, read the ones it acts on."""
    code = data[pos]
    if code == 0xC1:
        count, pos = data[pos + 2], pos + 3
    elif code == 0xD1:
        count, pos = _U32(data, pos + 5)[0], pos + 9
    else:
        raise MalformedMessage("message annotations are not a map")
    if count % 2:
        raise MalformedMessage("annotation without a value")
    kept: list[bytes] = []
    for _ in range(count // 2):
        value_at = skip_value(data, pos, end)
        after = skip_value(data, value_at, end)
        key = data[pos + 2 : value_at] if data[pos] == 0xA3 else b""
        if key not in BROKER_ANNOTATIONS:
            kept.append(data[pos:after])
            if key == b"x-opt-scheduled-enqueue-time":
                value, _ = decode_value(data, value_at, after)
                envelope.scheduled_ms = int(value) if isinstance(value, int) else None
            elif key == b"x-opt-partition-key":
                envelope.partition_key = _key_text(data, value_at, after)
            elif key == b"x-opt-via-partition-key":
                envelope.via_partition_key = _key_text(data, value_at, after)
        pos = after
    envelope.annotations = b"".join(kept)
    envelope.annotation_count = len(kept)


def _key_text(data: bytes, pos: int, end: int) -> bytes | None:
    value, _ = decode_value(data, pos, end)
    return value.encode() if isinstance(value, str) else None


def _read_properties(envelope: Envelope, data: bytes, pos: int, end: int) -> None:
    """Read message-id, group-id and the expiry times; skip the rest."""
    count, pos = _list_fields(data, pos)
    expiry = creation = None
    for index in range(min(count, 11)):
        after = skip_value(data, pos, end)
        if data[pos] != 0x40:
            if index == 0:
                if data[pos] not in (0x44, 0x53, 0x80, 0x98, 0xA0, 0xA1, 0xB0, 0xB1):
                    raise MalformedMessage("message-id is no ulong, uuid, binary or string")
                envelope.message_id = data[pos:after]
            elif index == 8 and data[pos] == 0x83:
                expiry = _I64(data, pos + 1)[0]
            elif index == 9 and data[pos] == 0x83:
                creation = _I64(data, pos + 1)[0]
            elif index == 10:
                group, _ = decode_value(data, pos, after)
                envelope.session_id = group.encode() if isinstance(group, str) else None
        pos = after
    ttl_ms = envelope.ttl_ms
    # SDKs cap header.ttl at the uint maximum and say the real life in the two times.
    if (ttl_ms is None or ttl_ms == MAX_UINT) and expiry is not None and creation is not None:
        envelope.ttl_ms = max(expiry - creation, 0)
