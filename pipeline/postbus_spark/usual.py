"""Decodes the usual form of stored rows, all rows of a batch at a time.

Nearly all clients send text in short strings and bodies of one data section, and such rows need no
step of Python each. What the functions here do not know is left to `decode`, which decodes every
row, and decides what a row means: both give the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from postbus.message.codec import decode_value
from postbus.message.delivery import MAX_EXPIRY_MS
from postbus.message.fields import Field
from postbus.message.patch import DEAD_LETTER_DESCRIPTION, DEAD_LETTER_REASON
from postbus.message.rows import DURABLE, FORMAT, TTL
from postbus.message.sections import APPLICATION_PROPERTIES, DATA, PROPERTIES
from postbus_spark.values import plain_of, text_of

Integers: TypeAlias = NDArray[np.int64]
Truths: TypeAlias = NDArray[np.bool_]
Columns: TypeAlias = dict[str, pa.Array]

_NULL, _TEXT = 0x40, 0xA1
_LIST8, _LIST32, _MAP8, _MAP32 = 0xC0, 0xD0, 0xC1, 0xD1
_MAX_ITEMS: Final = 64
"""Maximum number of items of a list or map: each one is a step for all rows of a batch."""

_WIDTHS: Final = np.full(256, -1, np.int64)
"""Constructor of a value -> octets behind it, negative if that is not fixed or it is unusual."""
for _width, _codes in {
    0: (_NULL, 0x41, 0x42, 0x43, 0x44),
    1: (0x50, 0x52, 0x53, 0x54, 0x55),
    4: (0x70, 0x71, 0x72),
    8: (0x80, 0x81, 0x82, 0x83),
    16: (0x98,),
}.items():
    _WIDTHS[list(_codes)] = _width
_SIZED8, _SIZED32 = -2, -3
_WIDTHS[[0xA0, _TEXT, 0xA3]] = _SIZED8
_WIDTHS[[0xB0, 0xB1]] = _SIZED32


class Usual(NamedTuple):
    """Columns of rows; those of rows that are not usual mean nothing."""

    is_usual: Truths
    columns: Columns


class _Octets:
    """A column of binary, whose octets are read at one position for each row."""

    def __init__(self, column: pa.Array) -> None:
        self.count = len(column)
        _, offsets, values = column.buffers()
        bounds = np.frombuffer(offsets, np.int32, self.count + 1, column.offset * 4)
        self.starts: Integers = bounds[:-1].astype(np.int64)
        self.ends: Integers = bounds[1:].astype(np.int64)
        if column.null_count:
            is_there = column.is_valid().to_numpy(zero_copy_only=False)
            self.ends = np.where(is_there, self.ends, self.starts)
        self.values = values if values is not None and values.size else pa.py_buffer(b"\x00")
        self._data = np.frombuffer(self.values, np.uint8)

    def at(self, positions: Integers) -> Integers:
        """Return octets; behind the last one some octet."""
        return self._data[np.minimum(positions, len(self._data) - 1)].astype(np.int64)

    def number(self, positions: Integers, width: int = 4) -> Integers:
        """Return numbers of `width` octets in network order."""
        number = np.zeros(len(positions), np.int64)
        for each in range(width):
            number = number << 8 | self.at(positions + each)
        return number

    def octets(self, start: int, end: int) -> bytes:
        return self._data[start:end].tobytes()

    def after(self, codes: Integers, positions: Integers) -> Integers:
        """Return the position behind each value, -1 if that is not known."""
        widths = _WIDTHS[codes]
        after = np.where(widths < 0, -1, positions + 1 + widths)
        if (is_sized := widths == _SIZED8).any():
            after = np.where(is_sized, positions + 2 + self.at(positions + 1), after)
        if (is_sized := widths == _SIZED32).any():
            after = np.where(is_sized, positions + 5 + self.number(positions + 1), after)
        return after

    def section(self, starts: Integers, code: int, short: int, long: int) -> _Section:
        """Return the list or map of a section, which is empty where there is none."""
        form = self.at(starts + 3)
        is_long = form == long
        counts = np.where(is_long, self.number(starts + 8), self.at(starts + 5))
        is_there = starts < self.ends
        is_usual = ~is_there | (
            (self.at(starts) == 0)
            & (self.at(starts + 1) == 0x53)
            & (self.at(starts + 2) == code)
            & (is_long | (form == short))
            & (counts <= _MAX_ITEMS)
        )
        items = np.where(is_there, starts + np.where(is_long, 12, 6), self.ends)
        return _Section(self, items, np.where(is_there & is_usual, counts, 0), is_usual)


class _Section:
    """The items of a section of each row. `is_usual` changes while they are walked over."""

    def __init__(
        self, octets: _Octets, items: Integers, counts: Integers, is_usual: Truths
    ) -> None:
        self.octets = octets
        self.counts = counts
        self.is_usual = is_usual
        self._items = items

    def walk(self) -> Iterator[tuple[Truths, Integers, Integers, Integers]]:
        """Yield for each place which rows have a value there, constructors, starts and ends."""
        positions, ends = self._items, self.octets.ends
        for place in range(int(self.counts.max(initial=0))):
            is_there = self.is_usual & (place < self.counts)
            codes = self.octets.at(positions)
            after = self.octets.after(codes, positions)
            self.is_usual &= ~is_there | ((after > positions) & (after <= ends))
            yield is_there & self.is_usual, codes, positions, after
            positions = np.where(is_there, after, positions)
        self.is_usual &= positions == ends


def texts(octets: _Octets, starts: Integers, ends: Integers, is_there: Truths) -> pa.Array:
    """Return the text between rising positions. Raises `ArrowInvalid` if it is not UTF-8."""
    found = _between(octets, starts, ends, is_there, pa.string())
    found.validate(full=True)
    return found


def _between(
    octets: _Octets, starts: Integers, ends: Integers, is_there: Truths, kind: pa.DataType
) -> pa.Array:
    """Return the octets between rising positions; null where nothing is."""
    count = len(starts)
    if not count:
        return pa.array([], kind)
    ends = np.where(is_there, ends, starts)
    # Each second one of these values is what lies between two others.
    bounds = np.stack([starts, ends], axis=1).ravel().astype(np.int32)
    every = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(bounds), octets.values])
    wanted = np.arange(0, 2 * count, 2)
    return every.take(pa.array(wanted, mask=None if is_there.all() else ~is_there))


# --- envelope -----------------------------------------------------------------------------------


def read_envelopes(
    envelopes: pa.Array, enqueued_ms: pa.Array | None, fields: Mapping[str, Field]
) -> Usual:
    """Return message id, times and these fields of the properties section."""
    octets = _Octets(envelopes)
    starts = octets.starts
    flags = octets.at(starts + 1)
    lives, has_life = octets.number(starts + 2, 8), flags & TTL != 0
    properties = starts + np.where(has_life, 10, 2)
    is_usual = (
        (octets.at(starts) == FORMAT)
        & (flags & ~(DURABLE | TTL) == 0)
        & (properties <= octets.ends)
        & (~has_life | ((lives >= 0) & (lives <= MAX_EXPIRY_MS)))
    )
    section = octets.section(np.minimum(properties, octets.ends), PROPERTIES, _LIST8, _LIST32)
    section.is_usual &= is_usual & (section.counts <= Field.REPLY_TO_GROUP_ID + 1)
    section.counts = np.where(section.is_usual, section.counts, 0)
    places = {int(Field.MESSAGE_ID): "message_id"} | {int(at): name for name, at in fields.items()}
    found: dict[str, tuple[Truths, Integers, Integers]] = {}
    for place, (is_there, codes, begins, ends) in enumerate(section.walk()):
        if place in places:
            is_text = codes == _TEXT
            section.is_usual &= ~is_there | is_text | (codes == _NULL)
            found[places[place]] = is_there & is_text, begins + 2, ends
    columns: Columns = {}
    for name in places.values():
        if name not in found:
            columns[name] = pa.nulls(octets.count, pa.string())
            continue
        is_there, begins, ends = found[name]
        is_there &= section.is_usual
        columns[name] = texts(octets, np.where(is_there, begins, starts), ends, is_there)
    for name in ("session_id", "partition_key", "dead_letter_source"):
        columns[name] = pa.nulls(octets.count, pa.string())
    has_none = None if has_life.all() else ~has_life
    columns["time_to_live_ms"] = pa.array(lives, pa.int64(), mask=has_none)
    if enqueued_ms is not None:
        times = enqueued_ms.to_numpy(zero_copy_only=False) + np.where(
            section.is_usual & has_life, lives, 0
        )
        columns["expires_at"] = pa.array(
            np.clip(times, 0, MAX_EXPIRY_MS), pa.timestamp("ms", "UTC"), mask=has_none
        )
    return Usual(section.is_usual, columns)


# --- application properties ---------------------------------------------------------------------


def read_maps(sections: pa.Array, map_type: pa.DataType) -> Usual:
    """Return application properties, and of these why a message died."""
    octets = _Octets(sections)
    section = octets.section(octets.starts, APPLICATION_PROPERTIES, _MAP8, _MAP32)
    section.is_usual &= section.counts % 2 == 0
    section.counts = np.where(section.is_usual, section.counts, 0)
    walked: list[tuple[Integers, Integers, Integers]] = []
    for place, (is_there, *value) in enumerate(section.walk()):
        codes = value[0]
        is_known = _HAS_TEXT[codes] if place % 2 else codes == _TEXT
        section.is_usual &= ~is_there | is_known
        walked.append((value[0], value[1], value[2]))
    is_usual, counts = section.is_usual, section.counts // 2
    has_entry = np.arange(len(walked) // 2) < counts[:, None]
    names = _names(octets, walked[::2], has_entry & is_usual[:, None])
    if (is_repeated := _has_repeated(names, has_entry & is_usual[:, None])).any():
        is_usual &= ~is_repeated
        names = _names(octets, walked[::2], has_entry & is_usual[:, None])
    is_kept = has_entry & is_usual[:, None]
    values = _values(octets, walked[1::2], is_kept)
    offsets = np.concatenate([[0], np.cumsum(np.where(is_usual, counts, 0))]).astype(np.int32)
    maps = pa.MapArray.from_arrays(
        pa.array(offsets),
        names.dictionary_decode().cast(map_type.key_type),
        values.cast(map_type.item_type),
        type=map_type,
    )
    columns: Columns = {"application_properties": maps}
    for column, name in _DEATHS.items():
        columns[column] = _of_name(names, name, np.nonzero(is_kept)[0], values, octets.count)
    return Usual(is_usual, columns)


_HAS_TEXT: Final = (_WIDTHS >= 0) | np.isin(np.arange(256), (_TEXT, 0xA0, 0xB0))
"""Constructors of values that surely have a text, if they are not cut off."""
_DEATHS: Final = {
    "dead_letter_reason": DEAD_LETTER_REASON,
    "dead_letter_error_description": DEAD_LETTER_DESCRIPTION,
}


def _names(
    octets: _Octets, walked: Sequence[tuple[Integers, ...]], is_kept: Truths
) -> pa.DictionaryArray:
    """Return the names of all entries, row by row."""
    _, starts, ends = _flat(walked, is_kept)
    found = texts(octets, starts + 2, ends, np.ones(len(starts), np.bool_))
    return found.dictionary_encode()


def _has_repeated(names: pa.DictionaryArray, is_kept: Truths) -> Truths:
    """Return which rows have a name twice."""
    numbers = np.broadcast_to(-1 - np.arange(is_kept.shape[1]), is_kept.shape).copy()
    numbers[is_kept] = names.indices.to_numpy()
    numbers.sort(axis=1)
    return np.asarray((numbers[:, 1:] == numbers[:, :-1]).any(axis=1))


def _values(octets: _Octets, walked: Sequence[tuple[Integers, ...]], is_kept: Truths) -> pa.Array:
    """Return the texts of the values of all entries, row by row."""
    codes, starts, ends = _flat(walked, is_kept)
    is_text = codes == _TEXT
    values = texts(octets, starts + 2, ends, is_text)
    is_other = ~is_text & (codes != _NULL)
    if not is_other.any():
        return values
    return pc.replace_with_mask(
        values,
        pa.array(is_other),
        _other_texts(octets, codes[is_other], starts[is_other], ends[is_other]),
    )


def _other_texts(octets: _Octets, codes: Integers, starts: Integers, ends: Integers) -> pa.Array:
    """Return the texts of values that are no text."""
    if np.isin(codes, list(_INTEGERS)).all():
        numbers = np.zeros(len(codes), np.int64)
        for code in np.unique(codes).tolist():
            width, is_signed = _INTEGERS[code]
            places = codes == code
            given = octets.number(starts[places] + 1, width)
            top = 1 << 8 * width - 1 if is_signed and width < 8 else 0
            numbers[places] = (given ^ top) - top
        return pa.array(numbers).cast(pa.string())
    plain = [
        plain_of(decode_value(octets.octets(start, end))[0])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    return pa.array([text_of(each) for each in plain], pa.string())


_INTEGERS: Final = {
    0x43: (0, False), 0x44: (0, False), 0x50: (1, False), 0x52: (1, False), 0x53: (1, False),
    0x54: (1, True), 0x55: (1, True), 0x70: (4, False), 0x71: (4, True), 0x81: (8, True),
}  # fmt: skip
"""Constructors of whole numbers -> octets behind it, and whether the number has a sign."""


def _flat(
    walked: Sequence[tuple[Integers, ...]], is_kept: Truths
) -> tuple[Integers, Integers, Integers]:
    """Return constructors, starts and ends of the values that are kept, row by row."""
    if not walked:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    codes, starts, ends = (np.stack(part, axis=1)[is_kept] for part in zip(*walked, strict=True))
    return codes, starts, ends


def _of_name(
    names: pa.DictionaryArray, name: str, rows: Integers, values: pa.Array, count: int
) -> pa.Array:
    """Return the value of a name in each row. `rows`: the row of each entry."""
    number = pc.index(names.dictionary, name).as_py()
    if number < 0:
        return pa.nulls(count, pa.string())
    entries = np.nonzero(names.indices.to_numpy() == number)[0]
    of_row = np.full(count, -1)
    of_row[rows[entries]] = entries
    return values.take(pa.array(of_row, mask=of_row < 0))


# --- body ---------------------------------------------------------------------------------------


def read_bodies(bodies: pa.Array) -> Usual:
    """Return bodies of one data section, and their type."""
    octets = _Octets(bodies)
    starts, ends = octets.starts, octets.ends
    form = octets.at(starts + 3)
    is_long = form == 0xB0
    contents = starts + np.where(is_long, 8, 5)
    sizes = np.where(is_long, octets.number(starts + 4), octets.at(starts + 4))
    is_data = (
        (octets.at(starts) == 0)
        & (octets.at(starts + 1) == 0x53)
        & (octets.at(starts + 2) == DATA)
        & (is_long | (form == 0xA0))
        & (contents + sizes == ends)
    )
    content = _between(octets, np.where(is_data, contents, starts), ends, is_data, pa.binary())
    kinds = pa.array(np.where(is_data, "data", ""), pa.string(), mask=~is_data)
    return Usual(is_data | (starts == ends), {"body": content, "body_type": kinds})
