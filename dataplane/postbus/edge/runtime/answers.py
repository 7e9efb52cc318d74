"""Responses with messages for HTTP clients: deliveries to headers, BrokerProperties and bodies.

Pure translation for the runtime API. No part of a message is omitted: properties that no header can
hold are in the JSON of `Postbus-Properties`. An unreadable section is omitted alone.
"""

from __future__ import annotations

import json
from typing import Final
from urllib.parse import quote

from postbus.edge.runtime.messages import (
    BROKER_PROPERTIES,
    MORE_PROPERTIES,
    TOKEN,
    is_own_header,
)
from postbus.edge.runtime.values import format_property, http_date, is_plain, json_form
from postbus.entity.commands import Delivery
from postbus.message.codec import DecodeError, Described, Value, decode_value
from postbus.message.delivery import token_to_uuid
from postbus.message.envelope import Envelope
from postbus.message.fields import Field, MessageFields
from postbus.message.sections import DATA, FOOTER, VALUE

DEFAULT_TYPE: Final = "application/octet-stream"

_TEXTS: Final = (
    ("CorrelationId", Field.CORRELATION_ID),
    ("Label", Field.SUBJECT),
    ("MessageId", Field.MESSAGE_ID),
    ("ReplyTo", Field.REPLY_TO),
    ("ReplyToSessionId", Field.REPLY_TO_GROUP_ID),
    ("SessionId", Field.GROUP_ID),
    ("To", Field.TO),
)
_CODES: Final = {
    "amqp:data:binary": DATA,
    "amqp:amqp-value:*": VALUE,
    "amqp:footer:map": FOOTER,
}


def headers_of(delivery: Delivery, *, is_locked: bool) -> dict[str, str]:
    """Return the headers of a delivery, without `Location`."""
    fields = MessageFields(delivery.envelope)
    system = _system(fields)
    broker = _broker_properties(delivery, system, is_locked=is_locked)
    headers: dict[str, str] = {}
    kind = system[Field.CONTENT_TYPE]
    if isinstance(kind, str) and is_plain(kind):
        headers["Content-Type"] = kind
    else:
        headers["Content-Type"] = DEFAULT_TYPE
        if kind:
            broker["ContentType"] = json_form(kind)
    headers[BROKER_PROPERTIES] = json.dumps(broker, separators=(",", ":"))
    more: dict[str, object] = {}
    taken: set[str] = set()
    for name, value in _application(fields).items():
        text = None if is_own_header(name) else format_property(value)
        if text is None or name.lower() in taken or not TOKEN.fullmatch(name):
            more[name] = json_form(value)
        else:
            headers[name] = text
            taken.add(name.lower())
    if more:
        headers[MORE_PROPERTIES] = json.dumps(more, separators=(",", ":"))
    return headers


def location_path(path: str, delivery: Delivery) -> str:
    """Return the address for completing, unlocking and renewing; `path` is the entity's."""
    message_id = _text(_system(MessageFields(delivery.envelope))[Field.MESSAGE_ID])
    if not message_id or message_id in (".", ".."):
        message_id = str(delivery.sequence)
    return (
        f"/{quote(path, safe='/$')}/messages/{quote(message_id, safe='')}"
        f"/{token_to_uuid(delivery.lock_token)}"
    )


def body_of(envelope: Envelope) -> bytes:
    """Return a body: data as it is, a text in UTF-8, any other value as JSON."""
    section = envelope.body
    if section[:4] == b"\x00\x53\x75\xa0" and len(section) == 5 + section[4]:
        return section[5:]
    if section[:4] == b"\x00\x53\x75\xb0" and len(section) == 8 + int.from_bytes(
        section[4:8], "big"
    ):
        return section[8:]
    try:
        return _any_body(section)
    except DecodeError:
        return section


def _any_body(section: bytes) -> bytes:
    """Return the value of a body's sections, which are all of one kind."""
    pos, end = 0, len(section)
    data: list[bytes] = []
    rows: list[Value] = []
    while pos < end:
        value, pos = decode_value(section, pos, end)
        if not isinstance(value, Described):
            raise DecodeError("section without a descriptor")
        code = _CODES.get(value.descriptor, value.descriptor)
        if code == DATA and isinstance(value.value, bytes):
            data.append(value.value)
        elif code == VALUE:
            return _value_body(value.value)
        elif code != FOOTER:
            rows += value.value if isinstance(value.value, list) else [value.value]
    return json.dumps(json_form(rows)).encode() if rows else b"".join(data)


def _value_body(value: Value) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return bytes(value)
    return value.encode() if isinstance(value, str) else json.dumps(json_form(value)).encode()


def _broker_properties(
    delivery: Delivery, system: list[Value], *, is_locked: bool
) -> dict[str, object]:
    envelope = delivery.envelope
    broker: dict[str, object] = {
        "DeliveryCount": delivery.delivery_count + 1,
        "EnqueuedSequenceNumber": envelope.origin_sequence or 0,
        "EnqueuedTimeUtc": http_date(delivery.enqueued_ms),
        "SequenceNumber": delivery.sequence,
        "State": "Active",
    }
    if is_locked:
        broker["LockToken"] = str(token_to_uuid(delivery.lock_token))
        broker["LockedUntilUtc"] = http_date(delivery.locked_until_ms)
    for name, field in _TEXTS:
        value = system[field]
        if value is not None:
            broker[name] = _text(value)
    if delivery.ttl_ms is not None:
        broker["TimeToLive"] = delivery.ttl_ms / 1_000
    if envelope.scheduled_ms is not None:
        broker["ScheduledEnqueueTimeUtc"] = http_date(envelope.scheduled_ms)
    for name, key in (
        ("PartitionKey", envelope.partition_key),
        ("ViaPartitionKey", envelope.via_partition_key),
        ("DeadLetterSource", envelope.dead_letter_source),
    ):
        if key is not None:
            broker[name] = key.decode()
    return broker


def _text(value: Value) -> str | None:
    if value is None:
        return None
    return value.hex() if isinstance(value, bytes) else str(value)


def _system(fields: MessageFields) -> list[Value]:
    try:
        return fields.system
    except DecodeError:
        return [None] * (Field.REPLY_TO_GROUP_ID + 1)


def _application(fields: MessageFields) -> dict[str, Value]:
    try:
        return fields.application
    except DecodeError:
        return {}
