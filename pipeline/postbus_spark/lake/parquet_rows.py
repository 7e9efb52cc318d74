"""Rows of a table of Parquet, read by executors with pyarrow: Spark reads S3 with a jar only.

A table has the files with a name in its folders, and those that a driver has committed last and had
no time to name. A row is read without columns that were added after the look at the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from postbus_spark.lake.layout import OWN
from postbus_spark.lake.parquet import ParquetTable
from postbus_spark.lake.places import InvalidTable, place_at

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from postbus_spark.lake.parquet import Commit
    from postbus_spark.lake.places import Place

BATCH_ROWS: Final = 4_096
"""Rows of a batch for Spark. Our choice: some megabytes with usual bodies."""
MAX_TASKS: Final = 1_000
"""Tasks of a read. Our choice: Spark takes milliseconds for each, and a file may have few rows."""

PERIODS: Final = {"date": "date", "hour": "int"}
"""Columns that are folders, and their types as Spark finds them in names."""
PERIOD: Final = re.compile(r"\b(?:date=(\d{4}-\d\d-\d\d)|hour=(\d\d))/")


class File(NamedTuple):
    """A file of a table: its name, where it was before it had that, values of its folders."""

    path: str
    staged: str | None
    periods: Mapping[str, date | int]


def read_table(
    session: SparkSession, folder: str, start: datetime | None, end: datetime | None
) -> DataFrame:
    """Return the rows of a table. Files of hours outside [start, end) may be left out.

    `folder`: one that all executors have, or s3://bucket/prefix. Raises `InvalidTable`,
    `TableUnavailable`.
    """
    table = ParquetTable(folder, ())
    versions = table.versions()
    if not versions:
        raise InvalidTable(f"{table.folder} is no table of Parquet that a pipeline has written")
    last = table.read(versions[-1])
    found = files_of(table.place.paths(), last)
    names = {name for each in found for name in each.periods}
    periods = {name: kind for name, kind in PERIODS.items() if name in names}
    schema = _schema({**(last.columns or {}), **periods})
    files = files_between(found, start, end)
    if not files:
        return session.createDataFrame([], schema)
    numbers = session.range(0, len(files), 1, min(len(files), MAX_TASKS))
    return numbers.mapInArrow(partial(read_files, folder, files, schema), schema)


def files_of(paths: Iterable[str], last: Commit) -> list[File]:
    """Return the files of a table: those with a name, and the others of its last commit."""
    staged: dict[str, str | None] = {
        path: None for path in paths if path.endswith(".parquet") and not path.startswith(f"{OWN}/")
    }
    for file in last.files:
        staged.setdefault(file.path, file.staged)
    return [File(path, before, _periods(path)) for path, before in sorted(staged.items())]


def _periods(path: str) -> dict[str, date | int]:
    found: dict[str, date | int] = {}
    for day, hour in PERIOD.findall(path):
        if day:
            found["date"] = date.fromisoformat(day)
        else:
            found["hour"] = int(hour)
    return found


def files_between(
    files: Iterable[File], start: datetime | None, end: datetime | None
) -> list[File]:
    """Return the files that can have rows of [start, end), by their folders."""
    return [each for each in files if _may_have(each.periods, start, end)]


def _may_have(
    periods: Mapping[str, date | int], start: datetime | None, end: datetime | None
) -> bool:
    day, hour = periods.get("date"), periods.get("hour")
    if not isinstance(day, date):
        return True
    begin = datetime(day.year, day.month, day.day, hour if isinstance(hour, int) else 0, tzinfo=UTC)
    after = begin + (timedelta(days=1) if hour is None else timedelta(hours=1))
    return (start is None or after > start) and (end is None or begin < end)


def _schema(types: Mapping[str, str]) -> StructType:
    from pyspark.sql.types import StructType

    columns = ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in types.items())
    found = StructType.fromDDL(columns)
    assert isinstance(found, StructType)
    return found


def read_files(
    folder: str, files: Sequence[File], schema: StructType, numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the files that have the numbers in the rows, in an executor."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql.pandas.types import to_arrow_schema

    place, wanted = place_at(folder), to_arrow_schema(schema, timezone="UTC")
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            file = files[number]
            stored = pq.ParquetFile(pa.BufferReader(_content(place, file)))
            for rows in stored.iter_batches(BATCH_ROWS):
                yield _completed(rows, file.periods, wanted)


def _content(place: Place, file: File) -> bytes:
    """Return a file, which a driver may be giving its name. Raises as `Place.read`."""
    if file.staged is not None:
        for path in (file.path, file.staged):
            with suppress(FileNotFoundError):
                return place.read(path)
    return place.read(file.path)


def _completed(
    rows: pa.RecordBatch, periods: Mapping[str, Any], wanted: pa.Schema
) -> pa.RecordBatch:
    """Return rows with all columns of the table: older files lack the newer ones."""
    import pyarrow as pa

    known = set(rows.schema.names)
    arrays = [
        rows.column(field.name).cast(field.type)
        if field.name in known
        else pa.repeat(pa.scalar(periods.get(field.name), field.type), rows.num_rows)
        for field in wanted
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)
