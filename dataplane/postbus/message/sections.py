"""Slices an encoded message into an `Envelope` in one pass, and a batch into its members.

Called by the edge once for each message that arrives. Sections are cut out, never re-encoded; only
fields that the broker acts on are decoded. Values that are forwarded are not checked, except bodies
that are values: SDKs decode those before the application gets the message. Source: AMQP 1.0 part 3,
3.2; Service Bus's batch format (message-format 0x80013700).
"""

from __future__ import annotations

import struct
from typing import Final

from postbus.message.codec import DecodeError, Symbol, Ulong, decode_value, skip_value
from postbus.message.envelope import LEAST_BYTES, Envelope
from postbus.message.value_check import MAX_VALUES, check_value

BATCH_FORMAT: Final = 0x8001_3700
"""message-format of a transfer whose data sections each hold an encoded message."""

MAX_MEMBERS: Final = 10_000
"""Maximum number of messages of a batch in any protocol. Our choice: a member can be a few bytes,
and all are one commit, which must not take seconds. Service Bus accepts 4,500, in Premium some
15,000."""

MAX_UINT: Final = 0xFFFF_FFFF

MAX_TTL_MS: Final = 922_337_203_685_477
"""The longest TimeSpan in ms: a longer TTL is stored as this one ("never")."""

HEADER: Final = 0x70
DELIVERY_ANNOTATIONS: Final = 0x71
MESSAGE_ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION_PROPERTIES: Final = 0x74
DATA: Final = 0x75
SEQUENCE: Final = 0x76
VALUE: Final = 0x77
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
"""Annotations that only the broker may set; a client's values are dropped."""

_DURABLE_HEADER: Final = b"\x00\x53\x70\xc0\x02\x01\x41"
"""A header with durable and nothing else."""

_U32: Final = struct.Struct(">I").unpack_from
_I64: Final = struct.Struct(">q").unpack_from


class MalformedMessage(DecodeError):
    """The sections of a message violate AMQP 1.0."""


class TooManyMembers(DecodeError):
    """A batch has more messages than a commit may have."""


def slice_message(
    data: bytes, room: list[int] | None = None, is_body_checked: bool = True
) -> Envelope:
    """Return the parts of an encoded message. Raises `DecodeError` (`MalformedMessage`).

    `room`: remaining number of values in the bodies of a batch; it is updated. `is_body_checked`:
    False if the caller decodes the body, and so checks its values, itself.
    """
    end = len(data)
    envelope = Envelope(max(LEAST_BYTES, end))
    pos = order = 0
    if data.startswith(_DURABLE_HEADER):  # the first section of most clients
        envelope.is_durable = True
        pos, order = len(_DURABLE_HEADER), HEADER
    try:
        while pos < end:
            if data[pos] == 0x00 and data[pos + 1] == 0x53:
                code = data[pos + 2]
                content = pos + 3
            else:
                code, content = _section(data, pos, end)
            if code >= DATA:
                form = data[content]
                if code != DATA:
                    end = _end_of_body(envelope, data, pos, end, room, is_body_checked)
                elif form == 0xA0:
                    if content + 2 + data[content + 1] != end:
                        end = _end_of_body(envelope, data, pos, end, room, is_body_checked)
                elif form != 0xB0 or content + 5 + _U32(data, content + 1)[0] != end:
                    end = _end_of_body(envelope, data, pos, end, room, is_body_checked)
                envelope.body = data[pos:end]
                return envelope
            if code != DELIVERY_ANNOTATIONS:
                if code <= order or code < HEADER:
                    raise MalformedMessage("sections are unknown or out of order")
                order = code
            form = data[content]
            if form == _FORM8[code]:
                after = content + 2 + data[content + 1]
                count = data[content + 2]
                items = content + 3
            elif form == _FORM32[code]:
                after = content + 5 + _U32(data, content + 1)[0]
                count = _U32(data, content + 5)[0]
                items = content + 9
            elif form == 0x45 and _FORM8[code] == 0xC0:
                after = items = content + 1
                count = 0
            else:
                raise MalformedMessage("section is of the wrong type")
            if after > end or items > after or count > after - items:
                raise MalformedMessage("section is cut off")
            if code == PROPERTIES:
                envelope.properties = data[pos:after]
                _read_properties(envelope, data, items, after, count)
            elif count & 1 and code != HEADER:
                raise MalformedMessage("map with a key without a value")
            elif code == APPLICATION_PROPERTIES:
                envelope.application_properties = data[pos:after]
            elif code == HEADER:
                if count:
                    _read_header(envelope, data, items, after, count)
            elif code == MESSAGE_ANNOTATIONS:
                _read_annotations(envelope, data, items, after, count)
            else:
                _read_delivery_annotations(envelope, data, items, after, count)
            pos = after
    except (IndexError, struct.error) as error:
        raise MalformedMessage("the message is cut off") from error
    return envelope


def explode_batch(data: bytes) -> list[Envelope]:
    """Return the members of a batch. Raises `DecodeError`, also if it is empty; `TooManyMembers`.

    The batch's own sections only help a gateway to route it and are ignored.
    """
    members: list[Envelope] = []
    room = [MAX_VALUES]
    pos, end = 0, len(data)
    try:
        while pos < end:
            code, content = _section(data, pos, end)
            after = skip_value(data, content, end)
            if code == DATA:
                form = data[content]
                if form == 0xB0:
                    content += 5
                elif form == 0xA0:
                    content += 2
                else:
                    raise MalformedMessage("a data section is not binary")
                if len(members) == MAX_MEMBERS:
                    raise TooManyMembers(f"A batch may have at most {MAX_MEMBERS:,} messages.")
                members.append(slice_message(data[content:after], room))
            elif code in (SEQUENCE, VALUE):
                raise MalformedMessage("a batch has data sections only")
            pos = after
    except (IndexError, struct.error) as error:
        raise MalformedMessage("the batch is cut off") from error
    if not members:
        raise MalformedMessage("the batch is empty")
    return members


# --- sections -----------------------------------------------------------------------------------


def _section(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """Return the section's code and the start of its value."""
    if data[pos] != 0x00:
        raise MalformedMessage("section without a descriptor")
    if data[pos + 1] == 0x53:
        code, content = data[pos + 2], pos + 3
    else:
        descriptor, content = decode_value(data, pos + 1, end)
        code = 0
        if isinstance(descriptor, Ulong):
            code = descriptor
        elif isinstance(descriptor, Symbol):
            code = SECTION_NAMES.get(descriptor, 0)
    if not HEADER <= code <= FOOTER:
        raise MalformedMessage("unknown section")
    return code, content


SECTION_NAMES: Final = {
    "amqp:header:list": HEADER,
    "amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": SEQUENCE,
    "amqp:amqp-value:*": VALUE,
    "amqp:footer:map": FOOTER,
}
"""Symbolic descriptor of a section -> its code."""

_FORM8: Final = {HEADER: 0xC0, 0x71: 0xC1, 0x72: 0xC1, PROPERTIES: 0xC0, 0x74: 0xC1}
_FORM32: Final = {code: form + 0x10 for code, form in _FORM8.items()}
"""Constructors of the sections before the body: a list or a map, with short or long sizes."""

_BODY_FORMS: Final = {
    DATA: (0xA0, 0xB0),
    SEQUENCE: (0x45, 0xC0, 0xD0),
    FOOTER: (0xC1, 0xD1),
}


def _end_of_body(
    envelope: Envelope,
    data: bytes,
    pos: int,
    end: int,
    room: list[int] | None,
    is_body_checked: bool,
) -> int:
    """Walk the body sections, which are of one kind, and the footer; return their end.

    Delivery annotations may follow: azure-servicebus for Python writes them last.
    """
    kind, left = 0, [MAX_VALUES] if room is None else room
    while pos < end:
        code, content = _section(data, pos, end)
        if code in (VALUE, SEQUENCE) and is_body_checked:
            after, left[0] = check_value(data, content, end, left[0])
        else:
            after = skip_value(data, content, end)
        if code == DELIVERY_ANNOTATIONS and after == end:
            if data[content] == 0xC1:
                items, count = content + 3, data[content + 2]
            elif data[content] == 0xD1:
                items, count = content + 9, _U32(data, content + 5)[0]
            else:
                raise MalformedMessage("section is of the wrong type")
            if count & 1 or count > after - items:
                raise MalformedMessage("section is cut off")
            _read_delivery_annotations(envelope, data, items, after, count)
            return pos
        if code < DATA or kind == FOOTER or (kind and code not in (kind, FOOTER)):
            raise MalformedMessage("body sections are out of order")
        if code == kind == VALUE:
            raise MalformedMessage("more than one amqp-value")
        if code != VALUE and data[content] not in _BODY_FORMS[code]:
            raise MalformedMessage("body section is of the wrong type")
        kind = code
        pos = after
    return pos


def _read_header(envelope: Envelope, data: bytes, pos: int, end: int, count: int) -> None:
    """Decode durable, priority and ttl; null means their defaults."""
    code = data[pos]
    if code == 0x41:
        envelope.is_durable = True
    elif code == 0x56:
        envelope.is_durable = data[pos + 1] == 1
        pos += 1
    elif code != 0x40 and code != 0x42:
        raise MalformedMessage("durable is no boolean")
    pos += 1
    if count > 1:
        code = data[pos]
        if code == 0x50:
            envelope.priority = data[pos + 1]
            pos += 1
        elif code != 0x40:
            raise MalformedMessage("priority is no ubyte")
        pos += 1
    if count > 2:
        code = data[pos]
        if code == 0x70:
            envelope.ttl_ms = _U32(data, pos + 1)[0]
            pos += 4
        elif code == 0x52:
            envelope.ttl_ms = data[pos + 1]
            pos += 1
        elif code == 0x43:
            envelope.ttl_ms = 0
        elif code != 0x40:
            raise MalformedMessage("ttl is no uint")
        pos += 1
    if pos > end:
        raise MalformedMessage("header is cut off")


def _read_annotations(envelope: Envelope, data: bytes, pos: int, end: int, count: int) -> None:
    """Keep the client's entries as bytes, drop the broker's, decode those it acts on."""
    first = pos
    kept: list[bytes] = []
    is_unchanged = True
    for _ in range(count // 2):
        code = data[pos]
        # A string or a four-octet size must not carry a broker's key past the filter.
        if code == 0xA3 or code == 0xA1:
            value_at = pos + 2 + data[pos + 1]
            key = data[pos + 2 : value_at]
        else:
            value_at = skip_value(data, pos, end)
            key = data[pos + 5 : value_at] if code == 0xB3 or code == 0xB1 else b""
        after = skip_value(data, value_at, end)
        if key not in BROKER_ANNOTATIONS:
            entry = data[pos:after]
            if key == b"x-opt-scheduled-enqueue-time":
                envelope.scheduled_ms = _scheduled_ms(data, value_at, after)
            elif key == b"x-opt-partition-key" or key == b"x-opt-via-partition-key":
                at = value_at - pos
                if entry[at] in _BINARIES:
                    # azure-servicebus for Python sends received keys back as it decoded them.
                    entry = entry[:at] + bytes((entry[at] + 1,)) + entry[at + 1 :]
                    is_unchanged = False
                text = _text(entry, at, len(entry))
                if key == b"x-opt-partition-key":
                    envelope.partition_key = text
                else:
                    envelope.via_partition_key = text
            kept.append(entry)
        pos = after
    if pos != end:
        raise MalformedMessage("annotations are longer than their entries")
    envelope.annotation_count = len(kept)
    is_unchanged = is_unchanged and len(kept) * 2 == count
    envelope.annotations = data[first:end] if is_unchanged else b"".join(kept)


_BINARIES: Final = (0xA0, 0xB0)
"""Constructors of binaries; each is followed by that of strings with the same size field."""


def _read_delivery_annotations(
    envelope: Envelope, data: bytes, pos: int, end: int, count: int
) -> None:
    """Keep the client's entries as bytes; lock tokens are the broker's."""
    kept: list[bytes] = []
    for _ in range(count // 2):
        value_at = skip_value(data, pos, end)
        after = skip_value(data, value_at, end)
        if data[pos:value_at] not in _LOCK_TOKEN_KEYS:
            kept.append(data[pos:after])
        pos = after
    if pos != end:
        raise MalformedMessage("annotations are longer than their entries")
    pairs = b"".join(kept)
    envelope.delivery_annotations = (2 * len(kept)).to_bytes(4, "big") + pairs if kept else b""


_LOCK_TOKEN_KEYS: Final = frozenset(
    head + b"x-opt-lock-token"
    for head in (b"\xa3\x10", b"\xa1\x10", b"\xb3\0\0\0\x10", b"\xb1\0\0\0\x10")
)


def _scheduled_ms(data: bytes, pos: int, end: int) -> int | None:
    value, _ = decode_value(data, pos, end)
    if value is None:
        return None
    if data[pos] not in (0x81, 0x83):
        raise MalformedMessage("scheduled enqueue time is no timestamp")
    return int(value)


def _text(data: bytes, pos: int, end: int) -> bytes | None:
    """Return the UTF-8 of a string, None for null."""
    code = data[pos]
    if code == 0xA1:
        pos += 2
    elif code == 0xB1:
        pos += 5
    elif code == 0x40:
        return None
    else:
        raise MalformedMessage("session id or partition key is no string")
    text = data[pos:end]
    if not text.isascii():
        _check_utf8(text)
    return text


def _check_utf8(text: bytes) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage("string is not UTF-8") from error


def _read_properties(envelope: Envelope, data: bytes, pos: int, end: int, count: int) -> None:
    """Decode message-id, group-id and the expiry times; skip the fields after them."""
    if count == 0:
        if pos != end:
            raise MalformedMessage("properties are longer than their fields")
        return
    code = data[pos]
    if code == 0x40:
        after = pos + 1
    elif code == 0xA1:
        after = pos + 2 + data[pos + 1]
        envelope.message_id = data[pos:after]
        if not data[pos + 2 : after].isascii():
            _check_utf8(data[pos + 2 : after])
    else:
        after = _read_unusual_id(envelope, data, pos, end)
    if count > 10 and data.startswith(_NINE_NULLS, after):
        pos = after + 9
        if data[pos] != 0x40:
            after = pos + 2 + data[pos + 1] if data[pos] == 0xA1 else skip_value(data, pos, end)
            envelope.session_id = _text(data, pos, after)
    elif count > 8:
        expiry = creation = None
        index = 1
        while index < count and index < 11:
            pos = after
            code = data[pos]
            if code == 0x40:
                after = pos + 1
            elif code == 0xA1 or code == 0xA3:
                after = pos + 2 + data[pos + 1]
            else:
                after = skip_value(data, pos, end)
            if index == 10:
                envelope.session_id = _text(data, pos, after)
            elif code == 0x83:
                if index == 8:
                    expiry = _I64(data, pos + 1)[0]
                elif index == 9:
                    creation = _I64(data, pos + 1)[0]
            index += 1
        if expiry is not None and creation is not None and envelope.ttl_ms == MAX_UINT:
            # SDKs cap header.ttl there; the difference of the two times is the real TTL.
            envelope.ttl_ms = min(max(expiry - creation, 0), MAX_TTL_MS)
    if after > end:
        raise MalformedMessage("properties are cut off")


_NINE_NULLS: Final = b"\x40" * 9
"""Null properties from user-id to creation-time, as in most messages with a session id, and from
clients that write every field.
"""


def _read_unusual_id(envelope: Envelope, data: bytes, pos: int, end: int) -> int:
    """Decode a message-id that is not a short string; return the position after it."""
    if data[pos] not in (0x44, 0x53, 0x80, 0x98, 0xA0, 0xB0, 0xB1):
        raise MalformedMessage("message-id is no ulong, uuid, binary or string")
    after = skip_value(data, pos, end)
    envelope.message_id = data[pos:after]
    if data[pos] == 0xB1:
        _check_utf8(data[pos + 5 : after])
    return after
