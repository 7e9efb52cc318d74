"""Columns of rows as an Arrow IPC stream.

The store returns each column joined, so that only lengths are summed up here. pyarrow is imported
with the first stream: a broker that serves none does not have it in memory.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from postbus.contract.bulk import ROW_COLUMNS, ROW_FORMAT, ROW_FORMAT_KEY

if TYPE_CHECKING:
    import pyarrow

    from postbus.broker.bulk import RowChunk

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Source: Arrow columnar format, IPC streaming format."""


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
        """Take columns in the order of `ROW_COLUMNS`, and metadata of the schema."""
        import pyarrow as pa

        numbers = {"position", "sequence_number", "enqueued_ms"}
        nullable = {"application_properties", "body"}
        self._columns = [name for name in ROW_COLUMNS if name in columns]
        self._schema = pa.schema(
            [
                pa.field(
                    name,
                    pa.int64() if name in numbers else pa.binary(),
                    nullable=name in nullable,
                )
                for name in self._columns
            ],
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
        case _:
            return _values(columns.body_lengths, columns.bodies, columns.has_body)


def _numbers(sent: bytes) -> pyarrow.Array:
    import pyarrow as pa

    return pa.Array.from_buffers(
        pa.int64(), len(sent) // 8, [None, pa.py_buffer(_native("q", sent))]
    )


def _values(lengths: bytes, values: bytes, present: bytes = b"") -> pyarrow.Array:
    import pyarrow as pa

    count = len(lengths) // 4
    offsets = array("i", accumulate(_native("i", lengths), initial=0))
    validity = None
    if b"\x00" in present:
        flags = pa.Array.from_buffers(pa.uint8(), count, [None, pa.py_buffer(present)])
        validity = flags.cast(pa.bool_()).buffers()[1]
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def _native(code: str, sent: bytes) -> array[int]:
    """Return big-endian numbers as the machine has them."""
    numbers: array[int] = array(code)
    numbers.frombytes(sent)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
