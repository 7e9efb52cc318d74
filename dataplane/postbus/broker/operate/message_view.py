"""A stored message as tools show it: the body of the control API, with plain values.

Made by `message_operations` from the result of a peek. Pure.
"""

from __future__ import annotations

import base64
import math
from datetime import UTC, datetime, timedelta
from typing import Final

from postbus.contract.bodies import SubQueueName
from postbus.contract.control_messages import Plain, ShownMessage, StateName
from postbus.entity.commands import MessageState, PeekedMessage, SubQueue
from postbus.message.body import read_body
from postbus.message.codec import DecodeError, Described, Timestamp, Value
from postbus.message.envelope import Envelope
from postbus.message.fields import PROPERTY_FIELDS, Field, MessageFields
from postbus.message.ids import id_text
from postbus.message.patch import DEAD_LETTER_DESCRIPTION, DEAD_LETTER_REASON

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

SUB_QUEUE_NAMES: Final[dict[SubQueue, SubQueueName]] = {
    SubQueue.ACTIVE: "main",
    SubQueue.DEAD_LETTER: "deadLetter",
    SubQueue.TRANSFER_DEAD_LETTER: "transferDeadLetter",
}
"""The sub-queues that a client can name."""


def _name_of(state: MessageState) -> StateName:
    match state:
        case MessageState.ACTIVE:
            return "active"
        case MessageState.DEFERRED:
            return "deferred"
        case MessageState.SCHEDULED:
            return "scheduled"


STATE_NAMES: Final = {each: _name_of(each) for each in MessageState}
FIRST_MS: Final = -62_135_596_800_000
LAST_MS: Final = 253_402_300_799_999
"""The end of the calendar, years 1 to 9999; other times are not shown."""


def view_of(
    peeked: PeekedMessage,
    sub_queue: SubQueue,
    *,
    default_ttl_ms: int | None = None,
    body_bytes: int = 0,
) -> ShownMessage:
    """Return a message as tools show it; `default_ttl_ms` is that of the entity, None: never
    expires.

    The body is truncated to `body_bytes`, and None for 0. Dead letters never expire. Death is
    unknown for messages dead-lettered before deaths were recorded.
    """
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
    try:
        resends = fields.resends
    except DecodeError:
        is_malformed, resends = True, 0
    ttl_ms = default_ttl_ms if envelope.ttl_ms is None else envelope.ttl_ms
    is_dead = sub_queue in (SubQueue.DEAD_LETTER, SubQueue.TRANSFER_DEAD_LETTER)
    expires_ms = None if ttl_ms is None or is_dead else peeked.enqueued_ms + ttl_ms
    kind, content = read_body(envelope.body)
    body = base64.b64encode(content[:body_bytes]).decode("ascii") if body_bytes else None
    death, receiver = peeked.death, None if peeked.death is None else peeked.death.receiver
    enqueued_at = moment_of(peeked.enqueued_ms)
    assert enqueued_at is not None
    return ShownMessage(
        sequence_number=peeked.sequence,
        sub_queue=SUB_QUEUE_NAMES[sub_queue],
        state=STATE_NAMES[peeked.state],
        message_id=None if envelope.message_id is None else id_text(envelope.message_id),
        session_id=_text(envelope.session_id),
        partition_key=_text(envelope.partition_key),
        correlation_id=_shown(system[Field.CORRELATION_ID]),
        subject=_shown(system[Field.SUBJECT]),
        content_type=_shown(system[Field.CONTENT_TYPE]),
        to=_shown(system[Field.TO]),
        reply_to=_shown(system[Field.REPLY_TO]),
        reply_to_session_id=_shown(system[Field.REPLY_TO_GROUP_ID]),
        enqueued_at=enqueued_at,
        scheduled_at=moment_of(envelope.scheduled_ms),
        expires_at=moment_of(expires_ms),
        time_to_live=ttl_ms,
        delivery_count=peeked.delivery_count,
        size_in_bytes=envelope.size_bytes,
        enqueued_sequence_number=envelope.origin_sequence,
        dead_letter_reason=_shown(application.get(DEAD_LETTER_REASON)),
        dead_letter_description=_shown(application.get(DEAD_LETTER_DESCRIPTION)),
        dead_letter_source=_text(envelope.dead_letter_source),
        dead_lettered_at=None if death is None else moment_of(death.at_ms),
        dead_letter_deliveries=None if death is None else death.deliveries,
        resends=resends,
        dead_letter_link=None if receiver is None else receiver.link,
        dead_letter_client=None if receiver is None else receiver.client,
        application_properties={name: plain(value) for name, value in application.items()},
        body_kind=str(kind.value),
        body_bytes=len(content),
        body_base64=body,
        is_malformed=is_malformed,
    )


def death_of(envelope: Envelope) -> tuple[str | None, str | None, str | None]:
    """Return reason and description of a dead letter, and its message id, as in a view."""
    try:
        application = MessageFields(envelope).application
    except DecodeError:
        application = {}
    return (
        _shown(application.get(DEAD_LETTER_REASON)),
        _shown(application.get(DEAD_LETTER_DESCRIPTION)),
        None if envelope.message_id is None else id_text(envelope.message_id),
    )


def moment_of(value_ms: int | None) -> datetime | None:
    """Return the calendar time for milliseconds since the epoch, None outside of the calendar."""
    if value_ms is None or not FIRST_MS <= value_ms <= LAST_MS:
        return None
    return datetime.fromtimestamp(value_ms / 1_000, UTC)


def plain(value: Value) -> Plain:
    """Convert an AMQP value to JSON values."""
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
