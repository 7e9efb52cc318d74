"""Which files of a table of Parquet a replay reads, and what it makes of them; without Spark."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import (
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from postbus_spark.lake.parquet import Commit, TableFile
from postbus_spark.lake.parquet_rows import File, files_between, files_of, read_files

NAMED = "date=2026-01-31/hour=08/p000-1-2-c1.parquet"
STAGED = "_postbus/staged/1/a.parquet"
SCHEMA = StructType(
    [
        StructField("position", LongType()),
        StructField("added", StringType()),
        StructField("date", DateType()),
        StructField("hour", IntegerType()),
    ]
)


def commit(*files: TableFile) -> Commit:
    return Commit(version=1, files=files, columns={"position": "bigint"})


def written(path: Path, **columns: list[int] | list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def rows_of(folder: Path, *files: File) -> list[dict[str, object]]:
    numbers = pa.RecordBatch.from_pydict({"id": list(range(len(files)))})
    batches = list(read_files(str(folder), files, SCHEMA, iter([numbers])))
    return [row for batch in batches for row in batch.to_pylist()]


def test_a_table_has_what_is_named_and_what_its_last_commit_could_not_name() -> None:
    last = TableFile(NAMED, STAGED, 0, 1, 2, 2, 100, 0, 0, "")
    other = "_postbus/staged/1/never-committed.parquet"
    found = files_of(["p000-0-1-c0.parquet", STAGED, other, "_SUCCESS"], commit(last))
    assert [(each.path, each.staged) for each in found] == [
        (NAMED, STAGED),
        ("p000-0-1-c0.parquet", None),
    ]
    assert found[0].periods == {"date": date(2026, 1, 31), "hour": 8}


def test_a_named_file_is_in_a_table_once() -> None:
    last = TableFile(NAMED, STAGED, 0, 1, 2, 2, 100, 0, 0, "")
    assert files_of([NAMED], commit(last)) == [
        File(NAMED, None, {"date": date(2026, 1, 31), "hour": 8})
    ]


@pytest.mark.parametrize(
    ("start", "end", "names"),
    [
        (None, None, ["07", "08", "day", "none"]),
        ("2026-01-31T08:00", None, ["08", "day", "none"]),
        ("2026-01-31T07:59:59", "2026-01-31T08:00", ["07", "day", "none"]),
        ("2026-01-31T08:00", "2026-01-31T08:00:01", ["08", "day", "none"]),
        ("2026-02-01T00:00", None, ["none"]),
        (None, "2026-01-31T00:00", ["none"]),
    ],
)
def test_files_of_other_hours_are_left_out(
    start: str | None, end: str | None, names: list[str]
) -> None:
    day = date(2026, 1, 31)
    files = [
        File("07", None, {"date": day, "hour": 7}),
        File("08", None, {"date": day, "hour": 8}),
        File("day", None, {"date": day}),
        File("none", None, {}),
    ]
    times = [
        None if text is None else datetime.fromisoformat(text).replace(tzinfo=UTC)
        for text in (start, end)
    ]
    assert [each.path for each in files_between(files, *times)] == names


def test_rows_have_all_columns_of_the_table_and_its_folders(tmp_path: Path) -> None:
    written(tmp_path / "old.parquet", position=[1])
    written(tmp_path / NAMED, added=["x"], position=[2])
    periods = {"date": date(2026, 1, 31), "hour": 8}
    assert rows_of(tmp_path, File("old.parquet", None, {}), File(NAMED, None, periods)) == [
        {"position": 1, "added": None, "date": None, "hour": None},
        {"position": 2, "added": "x", "date": date(2026, 1, 31), "hour": 8},
    ]


@pytest.mark.parametrize("there", [NAMED, STAGED])
def test_a_file_is_found_before_and_after_it_has_its_name(tmp_path: Path, there: str) -> None:
    written(tmp_path / there, position=[1])
    [row] = rows_of(tmp_path, File(NAMED, STAGED, {}))
    assert row["position"] == 1


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        rows_of(tmp_path, File(NAMED, STAGED, {}))
