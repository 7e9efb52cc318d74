"""Tables on S3: what holds in a folder holds in a bucket."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import deltalake
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postbus_spark.jobs.failures import ExitCode, exit_code
from postbus_spark.lake.delta import DeltaTable
from postbus_spark.lake.files import TableJob, write_files
from postbus_spark.lake.iceberg import IcebergTable, read_rows
from postbus_spark.lake.layout import HOUR_MS, CatalogTable, StagedFile, Table, TableTaken
from postbus_spark.lake.parquet import ParquetTable
from postbus_spark.lake.places import Bucket, InvalidTable
from tests.pipeline.s3_server import running_s3
from tests.pipeline.test_tables import COLUMNS, FIRST, HOUR, PARTITION_BY, SECOND

pytestmark = pytest.mark.thorough

URL = "s3://lake/shop/orders"
PLACES = COLUMNS.fromJson(COLUMNS.jsonValue())
for name, kind in (("partition", "integer"), ("position", "long"), ("enqueued_time", "timestamp")):
    PLACES.add(name, kind)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with running_s3("lake") as environment:
        yield environment


@pytest.fixture
def s3(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The bucket, empty."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket("s3://lake")
    yield bucket
    for chunk in obstore.list(bucket.store):
        obstore.delete(bucket.store, [each["path"] for each in chunk])


@pytest.fixture(params=[ParquetTable, DeltaTable, IcebergTable])
def table(request: pytest.FixtureRequest, s3: Bucket, tmp_path: Path) -> Table:
    return opened(request.param, tmp_path)


def opened(kind: Any, tmp_path: Path) -> Any:
    more = [place_of(tmp_path)] if kind is IcebergTable else []
    made = kind(URL, PARTITION_BY, *more)
    made.open()
    return made


def place_of(tmp_path: Path) -> CatalogTable:
    return CatalogTable(f"sqlite:///{tmp_path}/lake.db", "shop.orders", None)


def written(table: Table, batch: Any) -> list[StagedFile]:
    """Write the files of partition 0 as an executor does."""
    first, end = batch.ranges[0]
    count = end - first
    columns: dict[str, Any] = {
        "sku": count * ["apple"],
        "price": count * [0.5],
        "partition": pa.array(count * [0], pa.int32()),
        "position": pa.array(range(first, end), pa.int64()),
        "enqueued_time": pa.array(count * [HOUR * 1000], pa.timestamp("us", "UTC")),
    }
    if table.has_period_columns:
        columns["date"] = pa.array(count * [date(2026, 1, 27)])
        columns["hour"] = pa.array(count * [0], pa.int32())
    job = TableJob("priced", table.staging(batch), HOUR_MS, dict(batch.ranges))
    made = write_files(job, pa.table(columns).to_batches())
    return [StagedFile(**row) for each in made for row in each.to_pylist()]


def positions(table: Table, tmp_path: Path) -> list[int]:
    """Return what other programs read."""
    if isinstance(table, IcebergTable):
        rows = read_rows(place_of(tmp_path))
    elif isinstance(table, DeltaTable):
        rows = deltalake.DeltaTable(URL, storage_options=table.place.options).to_pyarrow_table()
    else:
        bucket = Bucket(URL)
        names = [path for path in bucket.paths() if path.startswith("date=")]
        found = [pq.read_table(pa.BufferReader(bucket.read(name))) for name in names]
        rows = pa.concat_tables(found) if found else pa.table({"position": []})
    return sorted(rows["position"].to_pylist())


def test_a_batch_is_in_the_table_once(table: Table, tmp_path: Path) -> None:
    table.commit(FIRST, PLACES, written(table, FIRST))
    assert table.missing(FIRST) is None
    again = opened(type(table), tmp_path)
    assert again.missing(FIRST._replace(epoch=200, attempts=2)) is None
    again.commit(SECOND, PLACES, written(again, SECOND))
    assert positions(again, tmp_path) == [*range(20)]
    found = opened(type(table), tmp_path).verified()
    assert (found.files, found.rows, found.problems) == (2, 20, [])


def test_the_second_of_two_drivers_cannot_commit(table: Table, tmp_path: Path) -> None:
    table.commit(FIRST, PLACES, written(table, FIRST))
    other = opened(type(table), tmp_path)
    table.commit(SECOND, PLACES, written(table, SECOND))
    with pytest.raises(TableTaken):
        other.commit(SECOND._replace(epoch=99), PLACES, written(other, SECOND._replace(epoch=99)))
    assert positions(table, tmp_path) == [*range(20)]


def test_files_of_a_killed_driver_are_never_seen_and_swept(table: Table, tmp_path: Path) -> None:
    written(table, FIRST)
    again = opened(type(table), tmp_path)
    newer = FIRST._replace(epoch=101)
    again.commit(newer, PLACES, written(again, newer))
    opened(type(table), tmp_path)
    assert positions(table, tmp_path) == [*range(10)]
    assert again.place.names("_postbus/staged") <= {"101"}


def test_files_get_their_names_from_the_next_driver(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(ParquetTable, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(ParquetTable, "_publish", lambda *_: None)
        table.commit(FIRST, PLACES, written(table, FIRST))
    assert positions(table, tmp_path) == []
    opened(ParquetTable, tmp_path)
    assert positions(table, tmp_path) == [*range(10)]


def test_verify_names_what_differs(table: Table, tmp_path: Path) -> None:
    table.commit(FIRST, PLACES, written(table, FIRST))
    [path] = [each for each in table.place.paths() if each.endswith(".parquet")]
    obstore.put(Bucket(URL).store, path, b"swor")
    assert table.verified().problems == [f"{URL}/{path}: its content is not what was committed"]
    obstore.delete(Bucket(URL).store, path)
    [problem] = table.verified().problems
    assert problem.startswith(f"{URL}/{path}: ")


def test_a_file_is_whole_or_not_there(s3: Bucket, tmp_path: Path) -> None:
    table = opened(ParquetTable, tmp_path)
    job = TableJob("priced", table.staging(FIRST), HOUR_MS, dict(FIRST.ranges))
    time = datetime.fromtimestamp(HOUR / 1000, UTC)
    noise = [hashlib.sha256(b"%d" % each).digest() * 200_000 for each in range(2)]
    columns = {
        "partition": pa.array([0, 0], pa.int32()), "position": [0, 1],
        "enqueued_time": pa.array([time, time], pa.timestamp("us", "UTC")), "body": noise,
    }  # fmt: skip
    files = write_files(job, pa.table(columns).to_batches())
    assert table.place.names("_postbus/staged") == set()
    [made] = [row for each in files for row in each.to_pylist()]
    assert table.place.look(table.staged_path(StagedFile(**made)))[0] == made["size_bytes"]


@pytest.mark.parametrize("kind", [ParquetTable, DeltaTable])
def test_an_s3_that_lets_a_name_be_taken_twice_is_refused(
    s3: Bucket, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda store, path, data, mode: put(store, path, data))
    with pytest.raises(InvalidTable, match=r"ignores If-None-Match.*: use a version that has"):
        opened(kind, tmp_path)
    assert s3.names("shop/orders/_postbus/checks") == set()


@pytest.mark.parametrize("kind", [ParquetTable, DeltaTable, IcebergTable])
def test_a_bucket_that_is_not_there_is_named(
    s3: Bucket, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.pipeline.test_s3.URL", "s3://none/orders")
    with pytest.raises(InvalidTable, match="there is no bucket none") as failed:
        opened(kind, tmp_path)
    assert exit_code(failed.value) is ExitCode.CONFIGURATION


def test_wrong_credentials_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_s3("lake", INITIAL_NO_AUTH_ACTION_COUNT="1") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InvalidTable, match="correct the credentials in the environment"):
            opened(DeltaTable, tmp_path)
