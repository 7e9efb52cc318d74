"""Files of a table, as executors write them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postbus_spark.errors import InvalidSchema
from postbus_spark.lake import files
from postbus_spark.lake.files import TableJob, period_of, write_files
from postbus_spark.lake.layout import HOUR_MS, StagedFile

START = datetime(2026, 1, 31, 8, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("position", pa.int64()),
        ("enqueued_time", pa.timestamp("us", "UTC")),
        ("sku", pa.string()),
    ]
)


def rows(partition: int, *positions: int, hours: float = 0) -> pa.RecordBatch:
    made: list[dict[str, Any]] = [
        {
            "partition": partition,
            "position": position,
            "enqueued_time": START + timedelta(hours=hours, milliseconds=position),
            "sku": f"s{position}",
        }
        for position in positions
    ]
    return pa.RecordBatch.from_pylist(made, schema=SCHEMA)


def written(folder: Path, *batches: pa.RecordBatch, period_ms: int | None = HOUR_MS) -> Any:
    job = TableJob("priced", str(folder), period_ms, {0: (0, 100), 1: (0, 100)})
    return [StagedFile(**row) for made in write_files(job, batches) for row in made.to_pylist()]


def test_each_partition_and_hour_has_one_file(tmp_path: Path) -> None:
    found = written(
        tmp_path, rows(0, 1, 2), rows(0, 5), rows(0, 7, 8, hours=1), rows(1, 1, hours=1)
    )
    hour_ms = int(START.timestamp() * 1000)
    assert [(each.partition, each.first, each.last, each.rows) for each in found] == [
        (0, 1, 5, 3), (0, 7, 8, 2), (1, 1, 1, 1),
    ]  # fmt: skip
    assert [each.period_ms - hour_ms for each in found] == [0, HOUR_MS, HOUR_MS]
    first = found[0]
    assert (first.first_enqueued_ms, first.last_enqueued_ms) == (hour_ms + 1, hour_ms + 5)
    assert pq.read_table(first.staged)["sku"].to_pylist() == ["s1", "s2", "s5"]
    content = Path(first.staged).read_bytes()
    assert (first.size_bytes, first.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_batch_of_several_hours_is_divided(tmp_path: Path) -> None:
    both = pa.Table.from_batches([rows(0, 1), rows(0, 2, hours=1), rows(1, 3)])
    [batch] = both.combine_chunks().to_batches()
    assert [each.rows for each in written(tmp_path, batch)] == [1, 1, 1]
    assert [each.rows for each in written(tmp_path, batch, period_ms=None)] == [2, 1]


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    assert written(tmp_path) == written(tmp_path, rows(0)) == []
    assert list(tmp_path.iterdir()) == []


def test_many_rows_make_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GROUP_ROWS", 4)
    [file] = written(tmp_path, *(rows(0, 2 * each, 2 * each + 1) for each in range(5)))
    assert pq.ParquetFile(file.staged).metadata.num_row_groups == 3
    assert file.rows == 10


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (rows(0, 100), r"positions 100 to 100 in partition 0, and the batch is \[0, 100\)"),
        (rows(2, 1), "in partition 2"),
        (
            rows(0, 1).set_column(1, SCHEMA.field(1), pa.array([None], pa.int64())),
            "whose position is null",
        ),
    ],
)
def test_rows_of_other_places_are_refused(tmp_path: Path, batch: pa.RecordBatch, text: str) -> None:
    with pytest.raises(InvalidSchema, match=text):
        written(tmp_path, batch)


def test_times_before_1970_have_an_hour(tmp_path: Path) -> None:
    [file] = written(tmp_path, rows(0, 0, hours=-1_000_000.5))
    assert file.period_ms % HOUR_MS == 0
    assert file.period_ms <= file.first_enqueued_ms < file.period_ms + HOUR_MS


def test_folders_decide_how_much_a_file_spans() -> None:
    assert period_of(("date", "hour")) == HOUR_MS
    assert period_of(("date",)) == 24 * HOUR_MS
    assert period_of(()) is None
