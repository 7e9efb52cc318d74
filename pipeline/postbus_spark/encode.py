"""Encodes columns as AMQP messages, in executors.

Columns are encoded, never rows: Arrow joins the parts of all messages of a batch at once, which
takes about a tenth of the time of a loop in Python. A null is a field that a message does not have.
Source: AMQP 1.0 parts 1 and 3; the annotations and quotas of Service Bus.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from postbus.message.codec import Symbol, Ulong, encode_value
from postbus.message.delivery import MAX_EXPIRY_MS, MAX_UINT
from postbus.message.fields import Field
from postbus.message.patch import MAX_ID_CHARS, MAX_PROPERTIES_BYTES, MAX_PROPERTY_BYTES, TWO_KEYS
from postbus.message.sections import (
    APPLICATION_PROPERTIES,
    MAX_TTL_MS,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
)
from postbus_spark.errors import InvalidRows
from postbus_spark.values import json_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BATCH_BYTES: Final = 64 << 20
"""Rows that are encoded at a time. Our choice: far below the 2 GiB of one array of Arrow, and Spark
sends less unless bodies are large."""

MAX_SHORT: Final = 255

_BINARY: Final = pa.binary()
_EMPTY: Final = pa.scalar(b"", _BINARY)
_NULL: Final = b"\x40"
_TEXTS: Final = {
    "message_id": Field.MESSAGE_ID,
    "to": Field.TO,
    "subject": Field.SUBJECT,
    "reply_to": Field.REPLY_TO,
    "correlation_id": Field.CORRELATION_ID,
    "content_type": Field.CONTENT_TYPE,
    "session_id": Field.GROUP_ID,
    "reply_to_session_id": Field.REPLY_TO_GROUP_ID,
}
_IDS: Final = ("message_id", "session_id", "reply_to_session_id", "partition_key")

_STRING: Final = (0xA1, 0xB1)
_DATA: Final = (0xA0, 0xB0)
_LIST: Final = (0xC0, 0xD0)
_MAP: Final = (0xC1, 0xD1)
"""Constructors with a size of one octet and of four."""

_SCHEDULED: Final = encode_value(Symbol("x-opt-scheduled-enqueue-time")) + b"\x83"
_PARTITION_KEY: Final = encode_value(Symbol("x-opt-partition-key"))


def encode_rows(batch: pa.RecordBatch, first_row: int, now_ms: int) -> Iterator[pa.Array]:
    """Yield arrays of messages, each with its length before it: four octets, then the message.

    Columns are those of `schema.WRITTEN`. `first_row`: number of the first row, for texts of
    errors. Raises `InvalidRows`.
    """
    if batch.nbytes > MAX_BATCH_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from encode_rows(batch.slice(0, half), first_row, now_ms)
        yield from encode_rows(batch.slice(half), first_row + half, now_ms)
    elif batch.num_rows:
        yield _Rows(batch, first_row, now_ms).messages()


class _Rows:
    """The rows of a batch, whose columns become sections."""

    def __init__(self, batch: pa.RecordBatch, first_row: int, now_ms: int) -> None:
        self._columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self._count = batch.num_rows
        self._first_row = first_row
        self._now_ms = now_ms
        self._texts = {
            name: self._text(name, self._columns[name])
            for name in (*_TEXTS, "partition_key")
            if name in self._columns
        }

    def messages(self) -> pa.Array:
        """Return the messages, each with its length before it."""
        self._check_ids()
        properties = self._properties()
        application = self._application_properties()
        self._check_sizes(properties, application)
        sections = [
            each
            for each in (
                self._header(), self._annotations(), properties, application, self._body(),
            )
            if each is not None
        ]  # fmt: skip
        sizes = reduce(np.add, map(_sizes, sections), np.zeros(self._count, np.int64))
        return _joined(_fixed(sizes.astype(">u4")), *sections)

    # --- sections -------------------------------------------------------------------------------

    def _header(self) -> pa.Array | None:
        """Return headers that are durable and have a time to live."""
        lives = self._lives()
        if lives is None:
            return None
        capped = pc.min_element_wise(lives, MAX_UINT, skip_nulls=False)
        octets = _fixed(_integers(capped).astype(">u4"), capped)
        return _or_empty(_joined(b"\x00\x53\x70\xc0\x08\x03\x41\x40\x70", octets))

    def _annotations(self) -> pa.Array | None:
        entries: list[pa.Array] = []
        if "scheduled_enqueue_time" in self._columns:
            times = self._times_ms("scheduled_enqueue_time")
            octets = _fixed(_integers(times).astype(">i8"), times)
            entries.append(_joined(_SCHEDULED, octets))
        if "partition_key" in self._texts:
            key = _headed(self._texts["partition_key"], _STRING)
            entries.append(_joined(_PARTITION_KEY, key))
        if not entries:
            return None
        counts = reduce(np.add, [2 * _mask(each).astype(np.int64) for each in entries])
        content = _joined(*map(_or_empty, entries))
        return _or_empty(_section(MESSAGE_ANNOTATIONS, _MAP, _only(content, counts > 0), counts))

    def _properties(self) -> pa.Array | None:
        fields: dict[Field, pa.Array] = {
            field: _or_null(_headed(self._texts[name], _STRING))
            for name, field in _TEXTS.items()
            if name in self._texts
        }
        fields |= self._expiry()
        if not fields:
            return None
        parts: list[pa.Array | bytes] = []
        after = 0
        for field in sorted(fields):
            parts += [_NULL * (field - after), fields[field]]
            after = field + 1
        return _section(PROPERTIES, _LIST, _joined(*parts), np.full(self._count, after))

    def _expiry(self) -> dict[Field, pa.Array]:
        """Return the times that hold a time to live which the header has no room for."""
        lives = self._lives()
        if lives is None or not pc.any(pc.greater(lives, MAX_UINT)).as_py():
            return {}
        long = pc.if_else(pc.greater(lives, MAX_UINT), lives, None)
        ends = _integers(pc.min_element_wise(pc.add(long, self._now_ms), MAX_EXPIRY_MS))
        begins = np.full(self._count, self._now_ms)
        return {
            field: _or_null(_joined(b"\x83", _fixed(times.astype(">i8"), long)))
            for field, times in ((Field.EXPIRY_TIME, ends), (Field.CREATION_TIME, begins))
        }

    def _application_properties(self) -> pa.Array | None:
        if "application_properties" in self._columns:
            content, counts = self._of_map("application_properties")
        elif "application_properties_json" in self._columns:
            content, counts = self._of_json("application_properties_json")
        else:
            return None
        return _or_empty(_section(APPLICATION_PROPERTIES, _MAP, _only(content, counts > 0), counts))

    def _of_map(self, name: str) -> tuple[pa.Array, NDArray[np.int64]]:
        """Return the entries of each map joined, and the number of keys and values of each."""
        maps = self._columns[name]
        offsets = maps.offsets.to_numpy()
        keys = self._text(name, maps.keys, offsets)
        items = self._text(name, maps.items, offsets)
        if keys.null_count:
            self._fail(name, _row_at(offsets, _first(~_mask(keys))), "a name is null")
        if _max(pc.binary_length(items)) > MAX_PROPERTY_BYTES:
            entry = _first(_integers(pc.binary_length(items)) > MAX_PROPERTY_BYTES)
            self._fail(name, _row_at(offsets, entry), _too_large(keys[entry].as_py().decode()))
        entries = _joined(_headed(keys, _STRING), _or_null(_headed(items, _STRING)))
        ends = np.frombuffer(entries.buffers()[1], np.int32, len(entries) + 1, entries.offset * 4)
        rows = pa.array(ends[offsets], pa.int32()).buffers()[1]
        content = pa.Array.from_buffers(_BINARY, self._count, [None, rows, entries.buffers()[2]])
        mask = _mask(maps)
        return _only(content, mask), np.where(mask, 2 * np.diff(offsets), 0)

    def _of_json(self, name: str) -> tuple[pa.Array, NDArray[np.int64]]:
        contents: list[bytes | None] = []
        counts = np.zeros(self._count, np.int64)
        for row, text in enumerate(self._text(name, self._columns[name]).to_pylist()):
            entries, count = b"", 0
            if text is not None:
                try:
                    entries, count = encode_json_properties(text)
                except (ValueError, TypeError, RecursionError) as error:
                    self._fail(name, row, str(error))
            contents.append(entries)
            counts[row] = 2 * count
        return pa.array(contents, _BINARY), counts

    def _body(self) -> pa.Array | None:
        if "body" not in self._columns:
            return None
        body = self._columns["body"].cast(_BINARY)
        return _or_empty(_joined(b"\x00\x53\x75", _headed(body, _DATA)))

    # --- columns --------------------------------------------------------------------------------

    def _text(
        self, name: str, texts: pa.Array, offsets: NDArray[np.int32] | None = None
    ) -> pa.Array:
        """Return the octets of text. Strings of Spark are not checked when they are cast.

        `offsets`: the first text of each row, if a row may have several.
        """
        octets = texts.cast(_BINARY)
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            entry = next(at for at, each in enumerate(octets) if not _is_text(each.as_py()))
            row = entry if offsets is None else _row_at(offsets, entry)
            self._fail(name, row, "the text is not UTF-8")
        return octets

    def _times_ms(self, name: str) -> pa.Array:
        times = self._columns[name].cast(pa.timestamp("ms", "UTC"), safe=False)
        return times.cast(pa.int64())

    def _lives(self) -> pa.Array | None:
        """Return times to live in milliseconds. Raises `InvalidRows`."""
        if "time_to_live_ms" not in self._columns:
            return None
        lives = self._columns["time_to_live_ms"].cast(pa.int64())
        wrong = pc.or_(pc.less(lives, 0), pc.greater(lives, MAX_TTL_MS))
        if pc.any(wrong).as_py():
            row = _first(_truths(wrong))
            self._fail("time_to_live_ms", row, f"{lives[row]} is not between 0 and {MAX_TTL_MS} ms")
        return lives

    # --- limits ---------------------------------------------------------------------------------

    def _check_ids(self) -> None:
        for name in _IDS:
            octets = self._texts.get(name)
            if octets is None or _max(pc.binary_length(octets)) <= MAX_ID_CHARS:
                continue
            chars = _integers(pc.utf8_length(octets.cast(pa.string())))
            if chars.max() > MAX_ID_CHARS:
                row = _first(chars > MAX_ID_CHARS)
                self._fail(
                    name, row, f"{chars[row]} characters, and it may have at most {MAX_ID_CHARS}"
                )
        if "session_id" in self._texts and "partition_key" in self._texts:
            differ = pc.not_equal(self._texts["session_id"], self._texts["partition_key"])
            if pc.any(differ).as_py():
                self._fail("partition_key", _first(_truths(differ)), TWO_KEYS)

    def _check_sizes(self, properties: pa.Array | None, application: pa.Array | None) -> None:
        sections = [each for each in (properties, application) if each is not None]
        if not sections:
            return
        sizes = reduce(np.add, map(_sizes, sections))
        if sizes.max() > MAX_PROPERTIES_BYTES:
            row = _first(sizes > MAX_PROPERTIES_BYTES)
            name = next((each for each in self._columns if each.startswith("app")), "subject")
            self._fail(
                name, row, f"all properties are {sizes[row]} bytes, and may be at most"
                f" {MAX_PROPERTIES_BYTES}",
            )  # fmt: skip

    def _fail(self, name: str, row: int, text: str) -> None:
        raise InvalidRows(f"column {name} of row {self._first_row + row} of the task: {text}")


# --- application properties of JSON -------------------------------------------------------------


def encode_json_properties(text: bytes) -> tuple[bytes, int]:
    """Return the entries of a JSON object of application properties, and their number.

    A property is a simple value: an array or object becomes its JSON. Raises `ValueError`.
    """
    values = _DECODER.decode(text.decode())
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    parts: list[bytes] = []
    for name, value in values.items():
        try:
            encoded = _encoded_text(value) if type(value) is str else _encoded_plain(value)
            parts += (_encoded_name(name), encoded)
        except (TypeError, UnicodeEncodeError):
            raise ValueError(f"property {name!r} does not fit a type of AMQP") from None
        if len(encoded) > MAX_PROPERTY_BYTES + _LONG_HEAD_BYTES:
            raise ValueError(_too_large(name))
    return b"".join(parts), len(values)


def _encoded_text(text: str) -> bytes:
    data = text.encode()
    size = len(data)
    return _SHORT_TEXTS[size] + data if size <= MAX_SHORT else encode_value(text)


_encoded_name: Final = lru_cache(maxsize=1_024)(_encoded_text)
"""Names of properties are few."""


def _encoded_plain(value: object) -> bytes:
    if isinstance(value, list | dict):
        return encode_value(json_of(value))
    if type(value) is int and value > _MAX_LONG:
        return encode_value(Ulong(value))
    if value in _INFINITE:
        raise TypeError("a number of JSON is too large")
    return encode_value(value)


_LONG_HEAD_BYTES: Final = 5
_SHORT_TEXTS: Final = tuple(bytes((0xA1, size)) for size in range(MAX_SHORT + 1))
_MAX_LONG: Final = 2**63 - 1
_INFINITE: Final = (float("inf"), float("-inf"))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_number)


def _too_large(name: str) -> str:
    return f"property {name[:MAX_ID_CHARS]!r} is larger than {MAX_PROPERTY_BYTES} bytes"


# --- arrays of octets ---------------------------------------------------------------------------


def _joined(*parts: pa.Array | bytes) -> pa.Array:
    """Return the parts of each row joined; null where one is null."""
    scalars = [pa.scalar(part, _BINARY) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, _EMPTY)


def _fixed(numbers: NDArray[Any], like: pa.Array | None = None) -> pa.Array:
    """Return the octets of numbers; null where `like` is null."""
    width = numbers.dtype.itemsize
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * width
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(numbers))]
    octets = pa.Array.from_buffers(_BINARY, len(numbers), buffers)
    return octets if like is None or not like.null_count else _only(octets, _mask(like))


def _headed(
    content: pa.Array, forms: tuple[int, int], counts: NDArray[np.int64] | None = None
) -> pa.Array:
    """Return content behind constructor, size and, of compounds, count; null stays null.

    The size is as short as the content allows.
    """
    short, long = forms
    sizes = _sizes(content)
    is_long = sizes > MAX_SHORT
    if counts is not None:
        is_long = (sizes >= MAX_SHORT) | (counts > MAX_SHORT)
    if not is_long.any():
        return _joined(_heads(short, sizes, counts, np.dtype("u1")), content)
    longs = _heads(long, sizes, counts, np.dtype(">u4"))
    if is_long.all():
        return _joined(longs, content)
    shorts = _heads(short, np.where(is_long, 0, sizes), counts, np.dtype("u1"))
    return _joined(pc.if_else(pa.array(is_long), longs, shorts), content)


def _section(
    code: int, forms: tuple[int, int], items: pa.Array, counts: NDArray[np.int64]
) -> pa.Array:
    """Return sections of lists or maps of these joined items, of which each row has `counts`."""
    return _joined(b"\x00\x53" + bytes((code,)), _headed(items, forms, counts))


def _heads(
    constructor: int,
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64] | None,
    width: np.dtype[Any],
) -> pa.Array:
    """Return constructor, size and count in numbers of a width; the size includes the count."""
    fields = [("constructor", np.dtype("u1")), ("size", width), ("count", width)]
    heads = np.empty(len(sizes), fields if counts is not None else fields[:2])
    heads["constructor"] = constructor
    heads["size"] = sizes if counts is None else sizes + width.itemsize
    if counts is not None:
        heads["count"] = counts.astype(width)
    return _fixed(heads)


def _or_empty(values: pa.Array) -> pa.Array:
    return pc.fill_null(values, _EMPTY)


def _or_null(values: pa.Array) -> pa.Array:
    """Return values with AMQP's null where there are none."""
    return pc.fill_null(values, pa.scalar(_NULL, _BINARY))


def _only(values: pa.Array, mask: NDArray[np.bool_]) -> pa.Array:
    """Return values that are null outside of a mask."""
    return values if mask.all() else pc.if_else(pa.array(mask), values, None)


def _mask(values: pa.Array) -> NDArray[np.bool_]:
    """Return where values are not null."""
    return np.asarray(values.is_valid().to_numpy(zero_copy_only=False))


def _truths(values: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(pc.fill_null(values, False).to_numpy(zero_copy_only=False))


def _integers(values: pa.Array) -> NDArray[np.int64]:
    """Return numbers, 0 for null."""
    return np.asarray(pc.fill_null(values, 0).to_numpy(zero_copy_only=False)).astype(np.int64)


def _sizes(values: pa.Array) -> NDArray[np.int64]:
    return _integers(pc.binary_length(values))


def _max(lengths: pa.Array) -> int:
    return pc.max(lengths).as_py() or 0


def _first(mask: NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))


def _is_text(octets: bytes | None) -> bool:
    try:
        (octets or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _row_at(offsets: NDArray[np.int32], entry: int) -> int:
    """Return the row whose map has an entry."""
    return int(np.searchsorted(offsets, entry, side="right")) - 1
