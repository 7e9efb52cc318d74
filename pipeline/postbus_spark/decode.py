"""Decodes stored rows to columns of messages, in executors.

Only what the schema names is decoded. Clients send what they like: a part that cannot be decoded is
null, and the column `is_malformed` says so; nothing that a message holds raises an error.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from postbus.message.codec import DecodeError, Value, decode_value, encode_map, skip_value
from postbus.message.delivery import MAX_EXPIRY_MS
from postbus.message.envelope import Envelope
from postbus.message.fields import Field
from postbus.message.ids import id_text
from postbus.message.patch import (
    DEAD_LETTER_DESCRIPTION,
    DEAD_LETTER_REASON,
)
from postbus.message.rows import UnknownRowFormat, unpack_envelope
from postbus.message.sections import DATA, FOOTER, SECTION_NAMES, SEQUENCE, VALUE
from postbus_spark.errors import UnknownRows
from postbus_spark.values import checked_text, json_of, plain_of, text_of

if TYPE_CHECKING:
    import pyarrow as pa

    from postbus_spark.usual import Usual

Blob: TypeAlias = bytes | None
Lists: TypeAlias = dict[str, list[Any]]

MAX_SECTIONS: Final = 100_000
"""Maximum number of sections of a body. Our choice: clients write one."""

UNREADABLE: Final = (IndexError, OverflowError, TypeError, ValueError, struct.error)
"""What decoders raise for bytes that are no message."""

_FIELDS: Final = {
    "correlation_id": Field.CORRELATION_ID,
    "subject": Field.SUBJECT,
    "to": Field.TO,
    "reply_to": Field.REPLY_TO,
    "reply_to_session_id": Field.REPLY_TO_GROUP_ID,
    "content_type": Field.CONTENT_TYPE,
}
_OF_ENVELOPE: Final = frozenset({
    "expires_at", "message_id", "session_id", "partition_key", "time_to_live_ms",
    "dead_letter_source",
})  # fmt: skip
_OF_PROPERTIES: Final = frozenset({
    "application_properties", "application_properties_json", "dead_letter_reason",
    "dead_letter_error_description",
})  # fmt: skip
_OF_BODY: Final = frozenset({"body", "body_type"})
_BINARY: Final = frozenset({"envelope", "application_properties", "body"})
PRESENT: Final = {
    "delivery_count": "delivery_count",
    "state": "state",
    "settled_time": "settled_ms",
    "settlement": "settlement",
}
"""Columns that change later, of the modes without a reader group -> their stored columns."""


class Place(NamedTuple):
    """Where rows are from."""

    entity: str
    sub_queue: str
    partition: int


class Decoder:
    """Decodes record batches of stored columns to record batches of one schema."""

    def __init__(self, schema: pa.Schema, place: Place, *, has_present: bool = False) -> None:
        """Take columns of `schema.COLUMNS` in any order.

        `has_present`: the bus sends what changes later, which is null otherwise.
        """
        self._schema = schema
        self._place = place
        self._names = frozenset(schema.names)
        self._has_present = has_present
        self._is_checked = "is_malformed" in self._names
        self._is_raw = "amqp" in self._names
        self._fields = {name: field for name, field in _FIELDS.items() if self._needs({name})}
        self._has_envelope = self._needs(_OF_ENVELOPE | _FIELDS.keys())
        self._has_properties = self._needs(_OF_PROPERTIES)
        self._has_body = self._needs(_OF_BODY)

    def _needs(self, names: Set[str]) -> bool:
        """Return whether some of these columns are decoded: all are for `is_malformed`."""
        return self._is_checked or not self._names.isdisjoint(names)

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """Return the stored columns that are needed."""
        wanted = {
            "position": True,
            "sequence_number": "sequence_number" in self._names,
            "enqueued_ms": not self._names.isdisjoint({"enqueued_time", "expires_at"}),
            "envelope": self._has_envelope or self._is_raw,
            "application_properties": self._has_properties or self._is_raw,
            "body": self._has_body or self._is_raw,
        }
        if self._has_present:
            wanted |= {stored: name in self._names for name, stored in PRESENT.items()}
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    def decode(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages of stored rows. Raises `UnknownRows` for a newer format only."""
        import pyarrow as pa

        count = rows.num_rows
        usual = self._usual(rows)
        if usual is None or 2 * np.count_nonzero(usual.is_usual) <= count:
            return self._decode_each(rows)  # to put both together costs more
        arrays = [self._array(field, rows, usual.columns, count) for field in self._schema]
        if usual.is_usual.all():
            return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        others = self._decode_each(rows.filter(pa.array(~usual.is_usual)))
        places = np.arange(count)
        places[~usual.is_usual] = count + np.arange(others.num_rows)
        every = zip(arrays, others.columns, strict=True)
        mixed = [pa.concat_arrays(each).take(pa.array(places)) for each in every]
        return pa.RecordBatch.from_arrays(mixed, schema=self._schema)

    def _usual(self, rows: pa.RecordBatch) -> Usual | None:
        """Return the columns of all rows that are of the usual form, None if there may be none."""
        import pyarrow as pa

        from postbus_spark.usual import Usual, read_bodies, read_envelopes, read_maps

        stored = [name for name in self.stored_columns if name in _BINARY]
        is_binary = all(rows.column(name).type == pa.binary() for name in stored)
        if not is_binary or self._is_raw or "application_properties_json" in self._names:
            return None
        found: list[Usual] = []
        try:
            if self._has_envelope:
                times = rows.column("enqueued_ms") if "expires_at" in self._names else None
                found.append(read_envelopes(rows.column("envelope"), times, self._fields))
            if self._has_properties:
                sections = rows.column("application_properties")
                found.append(read_maps(sections, self._map_type))
            if self._has_body:
                found.append(read_bodies(rows.column("body")))
        except pa.ArrowInvalid:  # some text is not UTF-8
            return None
        is_usual = np.ones(rows.num_rows, np.bool_)
        columns = {"is_malformed": pa.array(np.zeros(rows.num_rows, np.bool_))}
        for each in found:
            is_usual &= each.is_usual
            columns |= each.columns
        return Usual(is_usual, columns)

    @property
    def _map_type(self) -> pa.DataType:
        import pyarrow as pa

        name = "application_properties"
        if name in self._names:
            return self._schema.field(name).type
        return pa.map_(pa.string(), pa.string())

    def _decode_each(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages of stored rows, row by row."""
        import pyarrow as pa

        count = rows.num_rows
        broken = bytearray(count)
        lists: Lists = {}
        stored = {
            name: rows.column(name).to_pylist() for name in self.stored_columns if name in _BINARY
        }
        envelopes = _envelopes(stored.get("envelope", ()), broken)
        if self._has_envelope:
            self._add_envelopes(envelopes, rows, lists, broken)
        if self._has_properties:
            self._add_properties(stored["application_properties"], lists, broken)
        if self._has_body:
            bodies = stored["body"]
            read = [_caught(read_body, body, broken, row) for row, body in enumerate(bodies)]
            lists["body"] = [None if each is None else each[1] for each in read]
            lists["body_type"] = [None if each is None else each[0] for each in read]
        if self._is_raw:
            lists["amqp"] = self._raw(envelopes, stored, broken)
        lists["is_malformed"] = [each != 0 for each in broken]
        arrays = [self._array(field, rows, lists, count) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(
        self,
        field: pa.Field,
        rows: pa.RecordBatch,
        lists: Mapping[str, list[Any] | pa.Array],
        count: int,
    ) -> pa.Array:
        import pyarrow as pa

        name = field.name
        if name in self._place._fields:
            return pa.repeat(pa.scalar(getattr(self._place, name), field.type), count)
        if name in {"position", "sequence_number"}:
            return rows.column(name).cast(field.type)
        if name in PRESENT and not self._has_present:
            return pa.nulls(count, field.type)
        if name in {"enqueued_time", "settled_time"}:
            times = rows.column("enqueued_ms" if name == "enqueued_time" else PRESENT[name])
            return times.cast(pa.timestamp("ms", "UTC")).cast(field.type)
        if name in PRESENT:
            return rows.column(PRESENT[name]).cast(field.type)
        given = lists[name]
        if not isinstance(given, list):
            return given if given.type == field.type else given.cast(field.type)
        if name == "application_properties":
            return _map_array(given, field.type)
        if name == "expires_at":
            times = pa.array(given, pa.int64())
            return times.cast(pa.timestamp("ms", "UTC")).cast(field.type)
        return pa.array(given, field.type)

    def _raw(
        self, envelopes: Sequence[Envelope | None], stored: Lists, broken: bytearray
    ) -> list[Blob]:
        """Return messages as AMQP has them; None if the envelope cannot be read."""
        rests = zip(stored["application_properties"], stored["body"], strict=True)
        heads = [
            None if each is None else _caught(encode_sent, each, broken, row)
            for row, each in enumerate(envelopes)
        ]
        return [
            None if head is None else head + (section or b"") + (body or b"")
            for head, (section, body) in zip(heads, rests, strict=True)
        ]

    # --- envelope -------------------------------------------------------------------------------

    def _add_envelopes(
        self,
        envelopes: Sequence[Envelope | None],
        rows: pa.RecordBatch,
        lists: Lists,
        broken: bytearray,
    ) -> None:
        names = self._names
        readers: dict[str, Callable[[Envelope], str | None]] = {
            "message_id": _message_id,
            "session_id": _session_id,
            "partition_key": _partition_key,
            "dead_letter_source": _dead_letter_source,
        }
        for name, read in readers.items():
            if self._needs({name}):
                lists[name] = [
                    None if each is None else _caught(read, each, broken, row)
                    for row, each in enumerate(envelopes)
                ]
        lives = [None if each is None else each.ttl_ms for each in envelopes]
        lists["time_to_live_ms"] = lives
        if "expires_at" in names:
            enqueued = rows.column("enqueued_ms").to_pylist()
            lists["expires_at"] = [
                None if ttl_ms is None else min(max(time_ms + ttl_ms, 0), MAX_EXPIRY_MS)
                for time_ms, ttl_ms in zip(enqueued, lives, strict=True)
            ]
        if self._fields:
            self._add_fields(envelopes, lists, broken)

    def _add_fields(
        self, envelopes: Sequence[Envelope | None], lists: Lists, broken: bytearray
    ) -> None:
        """Decode the fields of properties sections."""
        wanted = {int(field): lists.setdefault(name, []) for name, field in self._fields.items()}
        last = max(wanted)
        for row, envelope in enumerate(envelopes):
            found = {} if envelope is None else _fields_of(envelope.properties, wanted, last)
            if found.pop(_IS_BROKEN, None):
                broken[row] = 1
            for field, texts in wanted.items():
                texts.append(found.get(field))

    # --- application properties -----------------------------------------------------------------

    def _add_properties(self, sections: Sequence[Blob], lists: Lists, broken: bytearray) -> None:
        names = self._names
        as_map: list[dict[str, str | None] | None] = []
        as_json: list[str | None] = []
        reasons: list[str | None] = []
        descriptions: list[str | None] = []
        for row, section in enumerate(sections):
            values, is_broken = read_properties(section)
            if is_broken:
                broken[row] = 1
            texts: dict[str, str | None] = {}
            if values is not None:
                texts = {name: text_of(plain) for name, plain in values.items()}
            as_map.append(None if values is None else texts)
            reasons.append(texts.get(DEAD_LETTER_REASON))
            descriptions.append(texts.get(DEAD_LETTER_DESCRIPTION))
            if "application_properties_json" in names:
                as_json.append(None if values is None else json_of(values))
        lists["application_properties"] = as_map
        lists["application_properties_json"] = as_json
        lists["dead_letter_reason"] = reasons
        lists["dead_letter_error_description"] = descriptions


def _caught(read: Callable[[Any], Any], given: Any, broken: bytearray, row: int) -> Any:
    """Return what a reader returns; None if it cannot read, which is noted."""
    try:
        return read(given)
    except UNREADABLE:
        broken[row] = 1
        return None


def _envelopes(blobs: Sequence[bytes], broken: bytearray) -> list[Envelope | None]:
    found: list[Envelope | None] = []
    for row, blob in enumerate(blobs):
        try:
            found.append(unpack_envelope(blob, None, None))
        except UnknownRowFormat:
            raise UnknownRows(
                "a message was stored by a newer version of the bus: use the version of the"
                " connector that belongs to it"
            ) from None
        except UNREADABLE:
            broken[row] = 1
            found.append(None)
    return found


def _message_id(envelope: Envelope) -> str | None:
    return None if envelope.message_id is None else checked_text(id_text(envelope.message_id))


def _session_id(envelope: Envelope) -> str | None:
    return None if envelope.session_id is None else envelope.session_id.decode()


def _partition_key(envelope: Envelope) -> str | None:
    return None if envelope.partition_key is None else envelope.partition_key.decode()


def _dead_letter_source(envelope: Envelope) -> str | None:
    source = envelope.dead_letter_source
    return None if source is None else source.decode()


# --- properties section -------------------------------------------------------------------------

_IS_BROKEN: Final = -1


def _fields_of(section: bytes, wanted: Mapping[int, object], last: int) -> dict[int, Any]:
    """Return the text of wanted fields by place; with `_IS_BROKEN` if some cannot be read."""
    found: dict[int, Any] = {}
    try:
        count, pos = _opened(section, 0xC0, 0xD0)
        end = len(section)
        for place in range(min(count, last + 1)):
            code = section[pos]
            if code == 0x40:
                pos += 1
                continue
            after = pos + 2 + section[pos + 1] if code == 0xA1 else skip_value(section, pos, end)
            if after > end:
                raise DecodeError("value is cut off")
            if place in wanted:
                try:
                    found[place] = _field_text(section, pos, after, place)
                except UNREADABLE:
                    found[_IS_BROKEN] = True
            pos = after
    except UNREADABLE:
        found[_IS_BROKEN] = True
    return found


def _field_text(section: bytes, pos: int, end: int, place: int) -> str:
    if section[pos] == 0xA1:
        return section[pos + 2 : end].decode()
    value, _ = decode_value(section, pos, end)
    if isinstance(value, str):
        return checked_text(value)
    if place == Field.CORRELATION_ID:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, int | uuid.UUID):
            return str(value)
    raise DecodeError("field is no text")


def _opened(section: bytes, short: int, long: int) -> tuple[int, int]:
    """Return the number of items of a section's list or map, and where they begin."""
    if not section:
        return 0, 0
    pos = 3 if section[:2] == b"\x00\x53" else skip_value(section, 1, len(section))
    code = section[pos]
    if code == short:
        return section[pos + 2], pos + 3
    if code == long:
        return int.from_bytes(section[pos + 5 : pos + 9], "big"), pos + 9
    if code == 0x45 and short == 0xC0:
        return 0, pos + 1
    raise DecodeError("section is of the wrong type")


# --- application properties ---------------------------------------------------------------------


def read_properties(section: Blob) -> tuple[dict[str, Any] | None, bool]:
    """Return name -> value as JSON has it, and whether something could not be read.

    A value that cannot be read is None, one with an unreadable name is left out; the whole is None
    if its entries cannot be told apart. Without the section: an empty map.
    """
    if not section:
        return {}, False
    values: dict[str, Any] = {}
    is_broken = False
    try:
        count, pos = _opened(section, 0xC1, 0xD1)
        if count % 2:
            return None, True
        end = len(section)
        for _ in range(count // 2):
            value_at = skip_value(section, pos, end)
            after = skip_value(section, value_at, end)
            try:
                name = _plain_at(section, pos, value_at)
                if not isinstance(name, str):
                    raise DecodeError("name is no text")
                values[name] = None
                values[name] = _plain_at(section, value_at, after)
            except UNREADABLE:
                is_broken = True
            pos = after
        return values, is_broken or pos != end
    except UNREADABLE:
        return None, True


def _plain_at(section: bytes, pos: int, end: int) -> Any:
    if section[pos] == 0xA1:
        return section[pos + 2 : end].decode()
    value, _ = decode_value(section, pos, end)
    return plain_of(value)


def _map_array(maps: Sequence[dict[str, str | None] | None], map_type: pa.DataType) -> pa.Array:
    import pyarrow as pa

    offsets: list[int | None] = []
    keys: list[str] = []
    values: list[str | None] = []
    for each in maps:
        offsets.append(None if each is None else len(keys))
        if each:
            keys += each
            values += each.values()
    offsets.append(len(keys))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(keys, map_type.key_type),
        pa.array(values, map_type.item_type),
        type=map_type,
    )


# --- body ---------------------------------------------------------------------------------------

_KINDS: Final = {DATA: "data", VALUE: "value", SEQUENCE: "sequence"}


def read_body(body: Blob) -> tuple[str | None, Blob]:
    """Return the type and the content of a body; None twice if there is none.

    Data sections are joined. A value that is text or binary is its octets, others are JSON; a
    sequence is a JSON array. Raises one of `UNREADABLE`.
    """
    if not body:
        return None, None
    if body[:3] == b"\x00\x53\x75":  # one section of data, as nearly all clients send
        if body[3] == 0xA0 and len(body) == 5 + body[4]:
            return "data", body[5:]
        if body[3] == 0xB0 and len(body) == 8 + int.from_bytes(body[4:8], "big"):
            return "data", body[8:]
    kind = 0
    parts: list[Value] = []
    for code, value in _sections(body):
        if code == FOOTER:
            continue
        if kind not in (0, code) or code not in _KINDS or len(parts) == MAX_SECTIONS:
            raise DecodeError("body is no body")
        kind = code
        parts.append(value)
    return _KINDS.get(kind), _content(kind, parts)


def _content(kind: int, parts: Sequence[Value]) -> Blob:
    if kind == DATA:
        if not all(type(part) is bytes for part in parts):
            raise DecodeError("data is no binary")
        return b"".join(parts)
    if kind == SEQUENCE:
        if not all(isinstance(part, list) for part in parts):
            raise DecodeError("sequence is no list")
        return json_of([plain_of(item) for part in parts for item in part]).encode()
    if len(parts) != 1:
        if not parts:  # nothing but a footer
            return None
        raise DecodeError("more than one value")
    value = parts[0]
    if value is None or type(value) is bytes:
        return value
    plain = plain_of(value)
    return (plain if isinstance(value, str) else json_of(plain)).encode()


def _sections(body: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the code and value of each section; of a footer None."""
    pos, end = 0, len(body)
    while pos < end:
        if body[pos] != 0x00:
            raise DecodeError("section without a descriptor")
        descriptor, content = decode_value(body, pos + 1, end)
        code = SECTION_NAMES.get(descriptor, 0) if isinstance(descriptor, str) else int(descriptor)
        after = skip_value(body, content, end)
        value = None
        if code != FOOTER:
            value, _ = decode_value(body, content, after)
        yield code, value
        pos = after


# --- the whole message --------------------------------------------------------------------------


def encode_sent(envelope: Envelope) -> bytes:
    """Return header, annotations and properties as the sender's message had them.

    Without the annotations that a broker adds: they would not be the sender's.
    """
    ttl_ms = envelope.ttl_ms
    fields = [
        b"\x41" if envelope.is_durable else b"\x42",
        b"\x40" if envelope.priority is None else bytes((0x50, envelope.priority)),
        b"\x40" if ttl_ms is None else b"\x70" + min(ttl_ms, 0xFFFF_FFFF).to_bytes(4, "big"),
    ]
    header = b"".join(fields)
    parts = [b"\x00\x53\x70\xc0", bytes((len(header) + 1, len(fields))), header]
    annotations = envelope.delivery_annotations
    if annotations:
        count = int.from_bytes(annotations[:4], "big") // 2
        parts += [b"\x00\x53\x71", encode_map(annotations[4:], count)]
    if envelope.annotation_count:
        entries = encode_map(envelope.annotations, envelope.annotation_count)
        parts += [b"\x00\x53\x72", entries]
    parts.append(envelope.properties)
    return b"".join(parts)
