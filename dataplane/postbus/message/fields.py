"""The fields of a message as rules see them, decoded once, on first access.

The rules of subscriptions read `MessageFields` and change a `MessageDraft`. The body is never
decoded, and fields that a draft does not change keep their bytes. Source: AMQP 1.0 part 3, 3.2.4,
3.2.5.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from enum import IntEnum
from functools import cached_property
from typing import Final, TypeAlias

from postbus.message.codec import (
    DecodeError,
    Symbol,
    Timestamp,
    Value,
    decode_value,
    encode_list,
    encode_value,
    skip_value,
)
from postbus.message.envelope import LEAST_BYTES, Envelope
from postbus.message.patch import (
    MAX_ID_CHARS,
    MAX_PROPERTIES_BYTES,
    MAX_PROPERTY_BYTES,
    PropertiesTooLarge,
    merge_properties,
)

PROPERTY_FIELDS: Final = 13

_DESCRIPTOR: Final = b"\x00\x53\x73"
_NULL: Final = b"\x40"

_Forms: TypeAlias = tuple[int, int]
_LISTS: Final[_Forms] = (0xC0, 0xD0)
_MAPS: Final[_Forms] = (0xC1, 0xD1)

_SCHEDULED: Final = "x-opt-scheduled-enqueue-time"
_PARTITION_KEY: Final = "x-opt-partition-key"
RESENDS: Final = "x-opt-postbus-resends"
"""Annotation: how often an operator has resent the message as a dead letter. Ours."""

MAX_RESENDS: Final = 1_000_000
"""Highest count that is believed: senders can write the annotation, too."""


class Field(IntEnum):
    """Place of a field in the properties section; `SUBJECT` is Service Bus's label."""

    MESSAGE_ID = 0
    TO = 2
    SUBJECT = 3
    REPLY_TO = 4
    CORRELATION_ID = 5
    CONTENT_TYPE = 6
    EXPIRY_TIME = 8
    CREATION_TIME = 9
    GROUP_ID = 10
    REPLY_TO_GROUP_ID = 12


ID_FIELDS: Final = {
    Field.MESSAGE_ID: "message id",
    Field.GROUP_ID: "session id",
    Field.REPLY_TO_GROUP_ID: "reply-to session id",
}
"""Fields of at most `MAX_ID_CHARS` characters. Source: the quotas of Azure Service Bus."""


class MessageFields:
    """A message as rules see it; reading raises `DecodeError` if a section is malformed.

    `enqueued_ms`: time when the broker received the message. Properties that are set later are
    None.
    """

    sequence: int | None = None
    delivery_count = 0
    dead_letter_source: str | None = None
    steps_left = 500_000
    """Steps that rules may still spend on it; set by routing, others use the default for each
    message."""

    def __init__(self, envelope: Envelope, enqueued_ms: int = 0) -> None:
        self.envelope = envelope
        self.enqueued_ms = enqueued_ms
        self._broken: dict[_Forms, DecodeError] = {}

    @cached_property
    def system(self) -> list[Value]:
        """Return the thirteen fields of the properties section, by `Field`; None: absent.

        Ids are text, as SDKs show them: a uuid in its usual form, a number in decimal.
        """
        section = self.envelope.properties
        values = self._decode(section, _LISTS) if section else []
        values += [None] * (PROPERTY_FIELDS - len(values))
        for field in (Field.MESSAGE_ID, Field.CORRELATION_ID):
            value = values[field]
            if isinstance(value, uuid.UUID | int):
                values[field] = str(value)
        return values

    @cached_property
    def application(self) -> dict[str, Value]:
        """Return name -> value of the application properties."""
        section = self.envelope.application_properties
        if not section:
            return {}
        items = self._decode(section, _MAPS)
        pairs = zip(items[::2], items[1::2], strict=True)
        return {name: value for name, value in pairs if isinstance(name, str)}

    @cached_property
    def folded(self) -> dict[str, Value]:
        """Return the application properties by lower-case name.

        If names differ in case only, the last one is used.
        """
        return {name.lower(): value for name, value in self.application.items()}

    def _decode(self, section: bytes, forms: _Forms) -> list[Value]:
        """Return the items of a section's list or map; a malformed section is decoded once only."""
        if forms in self._broken:
            raise self._broken[forms].with_traceback(None)
        try:
            return _decode_items(section, forms)
        except DecodeError as error:
            self._broken[forms] = error
            raise

    @cached_property
    def ttl_ms(self) -> int | None:
        return self.envelope.ttl_ms

    @cached_property
    def scheduled_ms(self) -> int | None:
        return self.envelope.scheduled_ms

    @cached_property
    def partition_key(self) -> str | None:
        key = self.envelope.partition_key
        return None if key is None else key.decode()

    @cached_property
    def resends(self) -> int:
        """Return how often the message was resent as a dead letter."""
        return _resends(self.envelope.annotations, self.envelope.annotation_count)


class StoredFields(MessageFields):
    """A stored message, with its number and the count of its failed deliveries."""

    def __init__(
        self, envelope: Envelope, enqueued_ms: int, sequence: int, delivery_count: int
    ) -> None:
        super().__init__(envelope, enqueued_ms)
        self.sequence = sequence
        self.delivery_count = delivery_count
        source = envelope.dead_letter_source
        self.dead_letter_source = None if source is None else source.decode(errors="replace")


class MessageDraft(MessageFields):
    """A copy of a message that is being changed; changes can be read immediately."""

    def __init__(self, fields: MessageFields) -> None:
        super().__init__(fields.envelope, fields.enqueued_ms)
        self.steps_left = fields.steps_left
        self.system = list(fields.system)
        self.application = dict(fields.application)
        self.folded = dict(fields.folded)
        self._names = {name.lower(): name for name in self.application}
        self._fields: dict[Field, str | Timestamp | None] = {}
        self._set: dict[str, Value] = {}
        self._removed: set[str] = set()
        self._annotations: dict[str, bytes | None] = {}

    def set_field(self, field: Field, text: str | None) -> None:
        """Set a field of the properties section. Raises `ValueError` if an id is too long."""
        limited = ID_FIELDS.get(field)
        if limited and text is not None and len(text) > MAX_ID_CHARS:
            raise ValueError(f"The {limited} is longer than {MAX_ID_CHARS} characters.")
        self._fields[field] = self.system[field] = text
        if field is Field.GROUP_ID and text is not None and self.partition_key is not None:
            self.set_partition_key(text)

    def set_ttl(self, ttl_ms: int | None) -> None:
        """Set the time to live; without one, the sender's expiry is removed."""
        self.ttl_ms = ttl_ms
        if ttl_ms is None and self.system[Field.EXPIRY_TIME] is not None:
            self._fields[Field.EXPIRY_TIME] = self.system[Field.EXPIRY_TIME] = None

    def set_scheduled(self, scheduled_ms: int | None) -> None:
        self.scheduled_ms = scheduled_ms
        self._annotations[_SCHEDULED] = (
            None if scheduled_ms is None else encode_value(Timestamp(scheduled_ms))
        )

    def set_partition_key(self, key: str | None) -> None:
        """Set the partition key. Raises `ValueError` if it is too long."""
        if key is not None and len(key) > MAX_ID_CHARS:
            raise ValueError(f"The partition key is longer than {MAX_ID_CHARS} characters.")
        self.partition_key = key
        self._annotations[_PARTITION_KEY] = None if key is None else encode_value(key)

    def count_resend(self) -> None:
        """Count that the message is resent as a dead letter."""
        self.resends += 1
        self._annotations[RESENDS] = encode_value(self.resends)

    def set_property(self, name: str, value: Value) -> None:
        """Set an application property; names are case-insensitive."""
        folded = name.lower()
        name = self._names.setdefault(folded, name)
        self.application[name] = self.folded[folded] = self._set[name] = value

    def remove_property(self, name: str) -> None:
        """Remove an application property if it exists; names are case-insensitive."""
        folded = name.lower()
        for known in [known for known in self.application if known.lower() == folded]:
            del self.application[known]
            self._set.pop(known, None)
            self._removed.add(known)
        self.folded.pop(folded, None)
        self._names.pop(folded, None)

    def build(self, spare_bytes: int = 0) -> Envelope:
        """Return the changed message; the properties may be `spare_bytes` over their limit.

        Raises `ValueError` (`PropertiesTooLarge`) if a limit is exceeded, `TypeError` for a value
        that is not a simple AMQP value, `DecodeError` for a malformed section.
        """
        old = self.envelope
        envelope = Envelope(**{name: getattr(old, name) for name in Envelope.__slots__})
        if self._fields:
            envelope.properties = _replace_fields(old.properties, self._fields)
            self._follow_ids(envelope)
        if self._set or self._removed:
            envelope.application_properties = self._merge(old.application_properties, spare_bytes)
        if self._annotations:
            entries, count = _replace_annotations(
                old.annotations, old.annotation_count, self._annotations
            )
            envelope.annotations, envelope.annotation_count = entries, count
        envelope.ttl_ms = self.ttl_ms
        envelope.scheduled_ms = self.scheduled_ms
        envelope.partition_key = None if self.partition_key is None else self.partition_key.encode()
        if None not in (envelope.session_id, envelope.partition_key) and (
            envelope.session_id != envelope.partition_key
        ):
            raise ValueError("The partition key differs from the session id.")
        properties_bytes = len(envelope.properties) + len(envelope.application_properties)
        if properties_bytes > MAX_PROPERTIES_BYTES + spare_bytes:
            raise PropertiesTooLarge("The properties would exceed their limit.")
        size_bytes = (
            old.size_bytes
            + properties_bytes
            - len(old.properties)
            - len(old.application_properties)
            + len(envelope.annotations)
            - len(old.annotations)
        )
        envelope.size_bytes = max(size_bytes, LEAST_BYTES)
        return envelope

    def _follow_ids(self, envelope: Envelope) -> None:
        if Field.MESSAGE_ID in self._fields:
            text = self._fields[Field.MESSAGE_ID]
            envelope.message_id = None if text is None else encode_value(text)
        if Field.GROUP_ID in self._fields:
            text = self._fields[Field.GROUP_ID]
            envelope.session_id = None if text is None else str(text).encode()

    def _merge(self, section: bytes, spare_bytes: int) -> bytes:
        for name, value in self._set.items():
            if isinstance(value, str | bytes) and len(value) > MAX_PROPERTY_BYTES:
                raise PropertiesTooLarge(f"The property '{name}' would exceed its limit.")
        return merge_properties(
            _without(section, self._removed) if self._removed else section,
            self._set,
            MAX_PROPERTIES_BYTES + spare_bytes,
        )


# --- bytes ----------------------------------------------------------------------------------------


def _open(section: bytes, forms: _Forms) -> tuple[int, int]:
    """Return the number of items of a section's list or map, and the start of the first."""
    pos = skip_value(section, 1, len(section))
    code = section[pos : pos + 1]
    if code and code[0] == forms[0] and pos + 3 <= len(section):
        return section[pos + 2], pos + 3
    if code and code[0] == forms[1] and pos + 9 <= len(section):
        return int.from_bytes(section[pos + 5 : pos + 9], "big"), pos + 9
    if code == b"\x45" and forms is _LISTS:
        return 0, pos + 1
    raise DecodeError("section is of the wrong type")


def _decode_items(section: bytes, forms: _Forms) -> list[Value]:
    """Decode the items of a section; the usual types are decoded inline."""
    count, pos = _open(section, forms)
    if forms is _MAPS and count % 2:
        raise DecodeError("map with a key without a value")
    end = len(section)
    items: list[Value] = []
    add = items.append
    try:
        for _ in range(count):
            code = section[pos]
            if code == 0xA1:
                start = pos + 2
                pos = start + section[pos + 1]
                add(str(section[start:pos], "utf-8"))
            elif code == 0x40:
                add(None)
                pos += 1
            else:
                value, pos = decode_value(section, pos, end)
                add(value)
    except (IndexError, UnicodeDecodeError) as error:
        raise DecodeError("section is cut off or no text") from error
    if pos != end:
        raise DecodeError("section is not as long as its items")
    return items


def _split_items(section: bytes, forms: _Forms) -> list[bytes]:
    """Return the encoded items of a section."""
    count, pos = _open(section, forms) if section else (0, 0)
    items: list[bytes] = []
    for _ in range(count):
        after = skip_value(section, pos, len(section))
        items.append(section[pos:after])
        pos = after
    return items


def _replace_fields(section: bytes, changes: dict[Field, str | Timestamp | None]) -> bytes:
    """Return the properties section with some fields changed."""
    fields = _split_items(section, _LISTS)
    fields += [_NULL] * (max(changes) + 1 - len(fields))
    for field, value in changes.items():
        fields[field] = encode_value(value)
    return _DESCRIPTOR + encode_list(fields)


def _without(section: bytes, names: set[str]) -> bytes:
    """Return the application properties without some of them."""
    items = _split_items(section, _MAPS)
    kept: list[bytes] = []
    for key, value in zip(items[::2], items[1::2], strict=True):
        if decode_value(key)[0] not in names:
            kept += (key, value)
    body = b"".join(kept)
    size, count = len(body) + 4, len(kept)
    return b"\x00\x53\x74\xd1" + size.to_bytes(4, "big") + count.to_bytes(4, "big") + body


def _replace_annotations(
    annotations: bytes, count: int, changes: dict[str, bytes | None]
) -> tuple[bytes, int]:
    """Return encoded annotations and their number; a value of None removes an annotation."""
    kept = [
        annotations[start:end]
        for key, start, _, end in _annotations(annotations, count)
        if not isinstance(key, str) or key not in changes
    ]
    for name, value in changes.items():
        if value is not None:
            kept.append(encode_value(Symbol(name)) + value)
    return b"".join(kept), len(kept)


def _resends(annotations: bytes, count: int) -> int:
    """Return the count of resends among encoded annotations, 0 without a valid one."""
    for key, _, value_at, end in _annotations(annotations, count):
        if key == RESENDS:
            value = decode_value(annotations, value_at, end)[0]
            is_count = isinstance(value, int) and not isinstance(value, bool)
            return max(0, min(value, MAX_RESENDS)) if is_count else 0
    return 0


def _annotations(annotations: bytes, count: int) -> Iterator[tuple[Value, int, int, int]]:
    """Yield the key of each pair, and where the pair, its value and what follows begin."""
    pos, end = 0, len(annotations)
    for _ in range(count):
        value_at = skip_value(annotations, pos, end)
        after = skip_value(annotations, value_at, end)
        yield decode_value(annotations, pos, value_at)[0], pos, value_at, after
        pos = after
