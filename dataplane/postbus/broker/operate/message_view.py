"""A stored message as a tool shows it: plain values, ready for JSON.

Made by `message_operations` of what a peek tells; nothing here asks or changes anything.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from postbus.entity.commands import Death, MessageState, PeekedMessage, SubQueue
from postbus.message.body import BodyKind, read_body
from postbus.message.codec import DecodeError, Described, Timestamp, Value
from postbus.message.envelope import Envelope
from postbus.message.fields import PROPERTY_FIELDS, Field, MessageFields
from postbus.message.ids import id_text
from postbus.message.patch import DEAD_LETTER_DESCRIPTION, DEAD_LETTER_REASON

Plain: TypeAlias = str | int | float | bool | None

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class MessageView:
    """One message. Times are milliseconds since the epoch, None where there is none.

    `state`: active, scheduled or deferred, also in a dead-letter queue. `expires_ms`: None for what
    never expires, as dead letters. `death` is None of what died before deaths were recorded.
    `application_properties` are plain values: a time is ISO 8601 text, binary is base64. `body`
    holds at most as many bytes as were asked for, None when none were; `body_bytes` says how many
    there are. `is_malformed`: some properties could not be read.
    """

    sequence_number: int
    sub_queue: SubQueue
    state: MessageState
    message_id: str | None
    session_id: str | None
    partition_key: str | None
    correlation_id: str | None
    subject: str | None
    content_type: str | None
    to: str | None
    reply_to: str | None
    reply_to_session_id: str | None
    enqueued_ms: int
    scheduled_ms: int | None
    expires_ms: int | None
    ttl_ms: int | None
    delivery_count: int
    size_bytes: int
    enqueued_sequence_number: int | None
    dead_letter_reason: str | None
    dead_letter_description: str | None
    dead_letter_source: str | None
    death: Death | None
    application_properties: Mapping[str, Plain]
    body_kind: BodyKind
    body_bytes: int
    body: bytes | None
    is_malformed: bool


def view_of(
    peeked: PeekedMessage,
    sub_queue: SubQueue,
    *,
    default_ttl_ms: int | None = None,
    body_bytes: int = 0,
) -> MessageView:
    """Return what a tool shows; `default_ttl_ms` is that of the entity, None never."""
    envelope = peeked.envelope
    fields = MessageFields(envelope, peeked.enqueued_ms)
    is_malformed = False
    try:
        system = fields.system
    except DecodeError:
        is_malformed, system = True, [None] * PROPERTY_FIELDS
    try:
        application = fields.application
    except DecodeError:
        is_malformed, application = True, {}
    ttl_ms = default_ttl_ms if envelope.ttl_ms is None else envelope.ttl_ms
    is_dead = sub_queue in (SubQueue.DEAD_LETTER, SubQueue.TRANSFER_DEAD_LETTER)
    expires_ms = None if ttl_ms is None or is_dead else peeked.enqueued_ms + ttl_ms
    kind, content = read_body(envelope.body)
    return MessageView(
        sequence_number=peeked.sequence,
        sub_queue=sub_queue,
        state=peeked.state,
        message_id=None if envelope.message_id is None else id_text(envelope.message_id),
        session_id=_text(envelope.session_id),
        partition_key=_text(envelope.partition_key),
        correlation_id=_shown(system[Field.CORRELATION_ID]),
        subject=_shown(system[Field.SUBJECT]),
        content_type=_shown(system[Field.CONTENT_TYPE]),
        to=_shown(system[Field.TO]),
        reply_to=_shown(system[Field.REPLY_TO]),
        reply_to_session_id=_shown(system[Field.REPLY_TO_GROUP_ID]),
        enqueued_ms=peeked.enqueued_ms,
        scheduled_ms=envelope.scheduled_ms,
        expires_ms=expires_ms,
        ttl_ms=ttl_ms,
        delivery_count=peeked.delivery_count,
        size_bytes=envelope.size_bytes,
        enqueued_sequence_number=envelope.origin_sequence,
        dead_letter_reason=_shown(application.get(DEAD_LETTER_REASON)),
        dead_letter_description=_shown(application.get(DEAD_LETTER_DESCRIPTION)),
        dead_letter_source=_text(envelope.dead_letter_source),
        death=peeked.death,
        application_properties={name: plain(value) for name, value in application.items()},
        body_kind=kind,
        body_bytes=len(content),
        body=content[:body_bytes] if body_bytes else None,
        is_malformed=is_malformed,
    )


def death_of(envelope: Envelope) -> tuple[str | None, str | None, str | None]:
    """Return reason and description of a dead letter, and its message id, as a view has them."""
    try:
        application = MessageFields(envelope).application
    except DecodeError:
        application = {}
    return (
        _shown(application.get(DEAD_LETTER_REASON)),
        _shown(application.get(DEAD_LETTER_DESCRIPTION)),
        None if envelope.message_id is None else id_text(envelope.message_id),
    )


def plain(value: Value) -> Plain:
    """Return an AMQP value as JSON can hold it."""
    if isinstance(value, Timestamp):
        try:
            moment = _EPOCH + timedelta(milliseconds=int(value))
        except OverflowError:
            return int(value)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Described):
        return plain(value.value)
    return str(value)


def _shown(value: Value) -> str | None:
    return None if value is None else str(plain(value))


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="replace")
