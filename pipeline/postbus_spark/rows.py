"""Reads the stored rows of a range, in an executor.

A range that breaks off goes on behind its last row: rows that a group reads are always the same,
and their positions rise. So a reader gets every row once, or an error, whatever happens to
connections. A mode reads what is there when it comes to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPResponse
from io import RawIOBase
from json import loads
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, urlencode

from postbus_spark.errors import DataLoss, EntityRecreated, UnknownRows
from postbus_spark.transport import TRANSIENT, Bus, Patience, answer, call

if TYPE_CHECKING:
    import pyarrow as pa

POSITION: Final = "position"
END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Source: Arrow columnar format, IPC streaming format."""

LOG: Final = logging.getLogger("postbus_spark")


class RowRange(NamedTuple):
    """A range of a partition, with all that reading it takes; it travels to an executor.

    `metadata`: what the schema of the stream must have. `generation_key`: the one of these that
    changes when the entity is created again. `selection`: parameters of a mode, which reads without
    group and epoch.
    """

    bus: Bus
    entity: str
    sub_queue: str
    group: str
    partition: int
    first: int
    end: int
    epoch: int
    token: str
    metadata: Mapping[str, str]
    generation_key: str
    is_data_loss_fatal: bool
    selection: Mapping[str, str | int] | None = None

    def __repr__(self) -> str:
        """Return the range without its token: Spark writes partitions into logs."""
        return f"RowRange({self.entity} {self.partition}: [{self.first}, {self.end}))"

    def path(self) -> str:
        return bulk_path(self.entity, "rows")


def bulk_path(entity: str, *parts: str) -> str:
    """Return the path of a request, whatever the entity is called."""
    return "/".join(["", quote(entity), "$bulk", *(quote(part, safe="") for part in parts)])


class BrokenStream(OSError):
    """A stream of rows ended before its end."""


def read_rows(
    wanted: RowRange, columns: Sequence[str], patience: Patience | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range in order, in batches of about 1 MiB, with their positions.

    Raises `BulkError`, `UnknownRows`, `Unavailable`.
    """
    import pyarrow as pa

    patience = patience or Patience(f"reading {wanted!r} of {wanted.bus.url}")
    position = wanted.first
    while position < wanted.end:
        try:
            for batch in _one_answer(wanted, columns, position):
                patience.progressed()
                if batch.num_rows:  # else the bus is still looking, in a mode
                    position = _last_position(batch, position, wanted) + 1
                    yield batch
            return
        except DataLoss:
            if wanted.is_data_loss_fatal:
                raise
            position = _low_of(wanted, position)
        except (*TRANSIENT, pa.ArrowInvalid) as error:
            patience.wait(error)


def _one_answer(
    wanted: RowRange, columns: Sequence[str], position: int
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    names = [POSITION, *(name for name in columns if name != POSITION)]
    query = {
        "partition": wanted.partition,
        "from": position,
        "to": wanted.end,
        **(wanted.selection or {"group": wanted.group, "epoch": wanted.epoch}),
        "subQueue": wanted.sub_queue,
        "columns": ",".join(names),
    }
    target = f"{wanted.path()}?{urlencode(query, safe=',')}"
    with answer(wanted.bus, "GET", target, wanted.token) as response:
        source = _Source(response)
        with pa.ipc.open_stream(source) as stream:
            _check_metadata(wanted, stream.schema)
            while True:
                source.forget()
                try:
                    batch = stream.read_next_batch()
                except StopIteration:
                    break
                yield batch
        source.check_end()


class _Source(RawIOBase):
    """An answer as a file for Arrow, which takes the end of a file for the end of the stream."""

    def __init__(self, response: HTTPResponse) -> None:
        super().__init__()
        self._response = response
        self._tail = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._response.read(size)
        self._tail = data if len(data) >= 8 else (self._tail + data)[-8:]
        return data

    def forget(self) -> None:
        """Forget what was read: the marker is no part of a batch."""
        self._tail = b""

    def check_end(self) -> None:
        """Raise `BrokenStream` if the stream ended without its marker, or the answer goes on."""
        if self._tail != END_OF_STREAM or self._response.read(1):
            raise BrokenStream("the stream of rows broke off")


def _check_metadata(wanted: RowRange, schema: pa.Schema) -> None:
    metadata = schema.metadata or {}
    for name, value in wanted.metadata.items():
        sent = metadata.get(name.encode(), b"").decode(errors="replace")
        if sent == value:
            continue
        if name == wanted.generation_key:
            raise EntityRecreated(f"{wanted.entity} was deleted and created again")
        raise UnknownRows(
            f"the bus sends rows with {name} {sent or 'missing'}, and this connector knows {value}:"
            " use the version of the connector that belongs to the bus"
        )


def _last_position(batch: pa.RecordBatch, position: int, wanted: RowRange) -> int:
    """Return the last position of a batch. Raises `UnknownRows` if one is not in its range."""
    positions = batch.column(POSITION).to_numpy()
    first, last = int(positions[0]), int(positions[-1])
    if first < position or last >= wanted.end or not (positions[1:] > positions[:-1]).all():
        raise UnknownRows(
            f"the bus sent positions {first} to {last} of partition {wanted.partition}, which are"
            f" not in order between {position} and {wanted.end}"
        )
    return last


def _low_of(wanted: RowRange, position: int) -> int:
    """Return where reading goes on when messages below are gone."""
    query = {"group": wanted.group, "subQueue": wanted.sub_queue, "splits": 1}
    target = f"{bulk_path(wanted.entity, 'ranges')}?{urlencode(query)}"
    found = loads(call(wanted.bus, "GET", target, wanted.token))
    lows: dict[int, int] = {each["partition"]: each["low"] for each in found["partitions"]}
    low = max(position + 1, min(lows.get(wanted.partition, wanted.end), wanted.end))
    LOG.warning(
        "messages of %s are gone, partition %s is read from position %s on instead of %s",
        wanted.entity, wanted.partition, low, position,
    )  # fmt: skip
    return low
