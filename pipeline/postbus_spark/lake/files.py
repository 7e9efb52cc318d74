"""Writes the rows of an output as Parquet, in executors: one file for each partition and hour.

Rows come in order of partition, time and position. A file is whole when its row is returned, and
nobody reads it before the driver commits it. Neither the contract nor pydantic is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from io import RawIOBase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from postbus_spark.errors import InvalidSchema
from postbus_spark.lake.layout import HOUR_MS, StagedFile
from postbus_spark.lake.places import new_file

if TYPE_CHECKING:
    import pyarrow as pa

KEYS: Final = ("partition", "position", "enqueued_time")
"""Columns that an output for a table keeps: the place of a row in the source, and its time."""

DAY_MS: Final = 24 * HOUR_MS
PLACELESS: Final = -1
"""Partition of a file whose rows have no place."""

GROUP_ROWS: Final = 131_072
GROUP_BYTES: Final = 32 << 20
"""Size of a row group, by whichever is reached first. Our choice: it is held in memory."""

FILE_SCHEMA: Final = (
    "staged string, partition int, first bigint, last bigint, period_ms bigint, rows bigint,"
    " size_bytes bigint, first_enqueued_ms bigint, last_enqueued_ms bigint, sha256 string"
)
"""Columns of what a task returns: `StagedFile`."""


class TableJob(NamedTuple):
    """What a task needs. `period_ms`: an hour or a day, None for files without a time.

    `ranges`: the batch, in which positions must lie; None: rows have no place.
    """

    output: str
    folder: str
    period_ms: int | None
    ranges: Mapping[int, tuple[int, int]] | None

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that no row may lack."""
        if self.ranges is not None:
            return KEYS
        return KEYS[2:] if self.period_ms else ()


def period_of(partition_by: Iterable[str]) -> int | None:
    """Return the milliseconds that a file may span, None for any number."""
    names = set(partition_by)
    if "hour" in names:
        return HOUR_MS
    return DAY_MS if names else None


def write_files(job: TableJob, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task; yield a row of `FILE_SCHEMA` for each file."""
    writer: _FileWriter | None = None
    for batch in batches:
        for key, part in _parts(job, batch):
            if writer is not None and writer.key != key:
                yield writer.close()
                writer = None
            if writer is None:
                writer = _FileWriter(job, key, part.schema)
            writer.add(part)
    if writer is not None:
        yield writer.close()


def capture_files(
    job: TableJob,
    read: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    numbers: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Write the messages of the parts with these numbers, as `read` yields them."""
    return write_files(job, read(numbers))


def _parts(
    job: TableJob, batch: pa.RecordBatch
) -> Iterator[tuple[tuple[int, int | None], pa.RecordBatch]]:
    """Yield the rows of each partition and period, in their order."""
    if not batch.num_rows:
        return
    for name in job.keys:
        if batch.column(name).null_count:
            raise InvalidSchema(
                f"the output {job.output} has rows whose {name} is null: a table needs the place of"
                " each row; keep the columns of the source as they are"
            )
    if not job.keys:
        yield (PLACELESS, None), batch
        return
    times = _milliseconds(batch)
    partitions = times * 0 + PLACELESS
    if job.ranges is not None:
        partitions = batch.column("partition").to_numpy(zero_copy_only=False)
    periods = times // job.period_ms if job.period_ms else times * 0
    changes = (partitions[1:] != partitions[:-1]) | (periods[1:] != periods[:-1])
    bounds = [0, *(int(each) + 1 for each in changes.nonzero()[0]), batch.num_rows]
    for start, end in pairwise(bounds):
        period_ms = int(periods[start]) * job.period_ms if job.period_ms else None
        yield (int(partitions[start]), period_ms), batch.slice(start, end - start)


def _task() -> int:
    """Return the number of the task in its stage."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def _milliseconds(batch: pa.RecordBatch) -> Any:
    import pyarrow as pa

    times = batch.column("enqueued_time").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return times.to_numpy(zero_copy_only=False) // 1000


class _FileWriter:
    """One file of one partition and period."""

    def __init__(self, job: TableJob, key: tuple[int, int | None], schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self.key = key
        self._job = job
        self._path = f"{job.folder}/{uuid4().hex}.parquet"
        self._file = _HashedFile(self._path)
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = self._rows = 0
        self._first = self._last = self._first_ms = self._last_ms = -1

    def add(self, rows: pa.RecordBatch) -> None:
        if self._job.ranges is None:
            self._first, self._last = _task(), self._rows + rows.num_rows
        else:
            self._check_places(rows)
        if self._job.keys:
            times = _milliseconds(rows)
            self._first_ms = (
                min(self._first_ms, int(times.min())) if self._rows else int(times.min())
            )
            self._last_ms = max(self._last_ms, int(times.max()))
        self._rows += rows.num_rows
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if self._waiting_rows >= GROUP_ROWS or self._waiting_bytes >= GROUP_BYTES:
            self._flush()

    def _check_places(self, rows: pa.RecordBatch) -> None:
        positions = rows.column("position").to_numpy(zero_copy_only=False)
        first, last = int(positions.min()), int(positions.max())
        low, end = (self._job.ranges or {}).get(self.key[0], (0, 0))
        if first < low or last >= end:
            raise InvalidSchema(
                f"the output {self._job.output} has positions {first} to {last} in partition"
                f" {self.key[0]}, and the batch is [{low}, {end}): keep the columns partition and"
                " position of the source as they are"
            )
        self._first = min(self._first, first) if self._rows else first
        self._last = max(self._last, last)

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
            self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def close(self) -> pa.RecordBatch:
        """Complete the file on disk; return its row."""
        import pyarrow as pa

        self._flush()
        self._writer.close()
        size_bytes, sha256 = self._file.complete()
        made = StagedFile(
            staged=self._path,
            partition=self.key[0],
            first=self._first,
            last=self._last,
            period_ms=self.key[1],
            rows=self._rows,
            size_bytes=size_bytes,
            first_enqueued_ms=self._first_ms,
            last_enqueued_ms=self._last_ms,
            sha256=sha256,
        )
        return pa.RecordBatch.from_pylist([asdict(made)], schema=_file_schema())


def _file_schema() -> pa.Schema:
    import pyarrow as pa

    types = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64()}
    columns = [column.split() for column in FILE_SCHEMA.split(",")]
    return pa.schema([(name, types[kind]) for name, kind in columns])


class _HashedFile(RawIOBase):
    """A file that is written once from its beginning, with the hash of what was written."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = new_file(path)
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hash.update(view)
        self._size_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size_bytes

    def complete(self) -> tuple[int, str]:
        """Bring the file to disk; return its size and hash."""
        self._file.complete()
        return self._size_bytes, self._hash.hexdigest()
