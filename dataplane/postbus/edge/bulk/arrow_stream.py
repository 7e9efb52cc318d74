"""Columns of rows as an Arrow IPC stream.

The store returns each column joined, so that only lengths are summed up here. pyarrow is imported
with the first stream: a broker that serves none does not have it in memory.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from postbus.contract.bulk import PRESENT_COLUMNS, ROW_COLUMNS, ROW_FORMAT, ROW_FORMAT_KEY

if TYPE_CHECKING:
    import pyarrow

    from postbus.broker.row_chunks import RowChunk

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Source: Arrow columnar format, IPC streaming format."""

NEGATED: Final = bytes.maketrans(b"\x00\x01", b"\x01\x00")


def is_available() -> bool:
    """Return whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def load_arrow() -> None:
    """Import pyarrow: the first time takes long, so not in the event loop."""
    import pyarrow as pa
    import pyarrow.compute as pc

    assert pa.__version__
    assert pc.add


class ArrowStream:
    """Encodes the chunks of one stream."""

    def __init__(self, columns: Sequence[str], metadata: Mapping[str, str]) -> None:
        """Take names of `ROW_COLUMNS` and `PRESENT_COLUMNS`, and metadata of the schema."""
        import pyarrow as pa

        types = dict.fromkeys(ROW_COLUMNS, pa.binary()) | {
            "position": pa.int64(),
            "sequence_number": pa.int64(),
            "enqueued_ms": pa.int64(),
            "delivery_count": pa.int64(),
            "state": pa.string(),
            "settled_ms": pa.int64(),
            "settlement": pa.string(),
        }
        nullable = {"application_properties", "body", *PRESENT_COLUMNS}
        self._columns = [name for name in ROW_COLUMNS + PRESENT_COLUMNS if name in columns]
        self._schema = pa.schema(
            [pa.field(name, types[name], nullable=name in nullable) for name in self._columns],
            metadata={ROW_FORMAT_KEY: ROW_FORMAT, **metadata},
        )

    def head(self) -> memoryview:
        """Return the message that begins the stream."""
        return memoryview(self._schema.serialize())

    def batch(self, chunk: RowChunk) -> memoryview:
        """Return the message of a chunk."""
        import pyarrow as pa

        arrays = [_array(name, chunk) for name in self._columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        return memoryview(batch.serialize())


def _array(name: str, chunk: RowChunk) -> pyarrow.Array:
    columns = chunk.columns
    match name:
        case "position":
            return _numbers(columns.positions)
        case "sequence_number" if columns.sequences:
            return _numbers(columns.sequences)
        case "sequence_number":
            import pyarrow.compute as pc

            # `pa.scalar` imports pandas where it is installed, in the event loop: 0.4 s.
            offset = _numbers(chunk.offset.to_bytes(8, "big", signed=True))[0]
            return pc.add(_numbers(columns.positions), offset)
        case "enqueued_ms":
            return _numbers(columns.enqueued_ms)
        case "envelope":
            return _values(columns.envelope_lengths, columns.envelopes)
        case "application_properties":
            return _values(columns.property_lengths, columns.properties, columns.has_properties)
        case "body":
            return _values(columns.body_lengths, columns.bodies, columns.has_body)
        case _:
            return _present(name, chunk)


def _present(name: str, chunk: RowChunk) -> pyarrow.Array:
    import pyarrow as pa

    present = chunk.present
    assert present is not None
    is_settled = present.is_settled
    is_live = is_settled.translate(NEGATED)
    match name:
        case "delivery_count":
            return _numbers(present.delivery_counts, is_live)
        case "state":
            return _values(present.state_lengths, present.states, is_live, pa.string())
        case "settled_ms":
            return _numbers(present.settled_ms, is_settled)
        case _:
            return _values(present.settlement_lengths, present.settlements, is_settled, pa.string())


def _numbers(sent: bytes, is_valid: bytes = b"") -> pyarrow.Array:
    import pyarrow as pa

    count = len(sent) // 8
    buffers = [_validity(is_valid, count), pa.py_buffer(_native("q", sent))]
    return pa.Array.from_buffers(pa.int64(), count, buffers)


def _values(
    lengths: bytes, values: bytes, is_valid: bytes = b"", kind: pyarrow.DataType | None = None
) -> pyarrow.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    count = len(lengths) // 4
    steps = [None, pa.py_buffer(_native("i", bytes(4) + lengths))]
    offsets = pc.cumulative_sum(pa.Array.from_buffers(pa.int32(), count + 1, steps))
    buffers = [_validity(is_valid, count), offsets.buffers()[1], pa.py_buffer(values)]
    return pa.Array.from_buffers(kind or pa.binary(), count, buffers)


def _validity(is_valid: bytes, count: int) -> pyarrow.Buffer | None:
    """Return the bits of a byte for each row; None if all are set."""
    import pyarrow as pa

    if b"\x00" not in is_valid:
        return None
    flags = pa.Array.from_buffers(pa.uint8(), count, [None, pa.py_buffer(is_valid)])
    return flags.cast(pa.bool_()).buffers()[1]


def _native(code: str, sent: bytes) -> array[int]:
    """Return big-endian numbers as the machine has them."""
    numbers: array[int] = array(code)
    numbers.frombytes(sent)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
