"""Commits of tables of all formats: each batch counts once, whoever is killed when."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import date
from itertools import permutations
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import CommitFailedError, DeltaError
from pyspark.sql.types import ArrayType, DayTimeIntervalType, StructType

from postbus_spark.lake.delta import DeltaTable
from postbus_spark.lake.iceberg import IcebergTable, loaded
from postbus_spark.lake.layout import (
    HOUR_MS,
    Batch,
    CatalogTable,
    StagedFile,
    Table,
    TableAhead,
    TableTaken,
)
from postbus_spark.lake.parquet import Commit, ParquetTable
from postbus_spark.lake.places import Folder, InvalidTable

HOUR = 491_520 * HOUR_MS  # 2026-01-27, midnight UTC
COLUMNS = StructType().add("sku", "string").add("price", "double")
FIRST = Batch("orders", "g1", "lake", 100, 1, 1, {0: (0, 10), 1: (50, 60)})
SECOND = FIRST._replace(number=2, ranges={0: (10, 20), 1: (60, 60)})


PARTITION_BY = ("date", "hour")


@pytest.fixture(params=[ParquetTable, DeltaTable, IcebergTable])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    return opened(request.param, tmp_path / "table")


@pytest.fixture
def parquet(tmp_path: Path) -> ParquetTable:
    return opened(ParquetTable, tmp_path / "table")


@pytest.fixture
def delta(tmp_path: Path) -> DeltaTable:
    return opened(DeltaTable, tmp_path / "table")


@pytest.fixture
def iceberg(tmp_path: Path) -> IcebergTable:
    return opened(IcebergTable, tmp_path / "table")


def opened(kind: Any, folder: Path) -> Any:
    more = [place_of(folder)] if kind is IcebergTable else []
    made = kind(folder, PARTITION_BY, *more)
    made.open()
    return made


def place_of(folder: Path) -> CatalogTable:
    return CatalogTable(f"sqlite:///{folder.parent}/catalog/lake.db", "shop.orders", None)


def reopened(table: Table) -> Any:
    return opened(type(table), table.folder)


def staged(table: Table, batch: Batch, partition: int = 0, **more: Any) -> StagedFile:
    """Write a file as an executor does."""
    first, end = batch.ranges[partition]
    path = Path(table.staging(batch)) / f"{partition}-{first}.parquet"
    rows = end - first
    columns: dict[str, Any] = {"sku": rows * ["apple"], "price": rows * [0.5], **more}
    if table.has_period_columns:
        columns["date"] = pa.array(rows * [date(2026, 1, 27)])
        columns["hour"] = pa.array(rows * [0], pa.int32())
    pq.write_table(pa.table(columns), path)
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return StagedFile(
        str(path), partition, first, end - 1, HOUR, rows, len(content), HOUR, HOUR + 1, digest
    )


def files(table: Table) -> list[str]:
    """Return what other programs see."""
    if isinstance(table, DeltaTable):
        if not deltalake.DeltaTable.is_deltatable(str(table.folder)):
            return []
        paths = deltalake.DeltaTable(table.folder).file_uris()
    elif isinstance(table, IcebergTable):
        found = loaded(place_of(table.folder))
        paths = [] if found is None else [task.file.file_path for task in found.scan().plan_files()]
    else:
        paths = [str(path) for path in table.folder.rglob("*.parquet")]
    found = [Path(path).relative_to(table.folder).as_posix() for path in paths]
    return sorted(path for path in found if not path.startswith("_"))


def ranges_of(table: Table) -> list[str]:
    """Return the names of files without what makes them unique."""
    return [path.removeprefix("data/").rpartition("-")[0] for path in files(table)]


def test_files_of_a_commit_are_named_by_hour_partition_and_range(table: Table) -> None:
    table.commit(FIRST, COLUMNS, [staged(table, FIRST), staged(table, FIRST, 1)])
    hour = "date=2026-01-27/hour=00"
    assert ranges_of(table) == [f"{hour}/p000-0-9", f"{hour}/p001-50-59"]
    again = reopened(table)
    assert again.mark == table.mark
    assert again.version == table.version == 1
    assert again.mark.ends == {0: 10, 1: 60}
    assert again.verified() == (table.verified().commits, 2, 20, [])


def test_a_batch_that_is_repeated_is_in_the_table(table: Table) -> None:
    assert table.missing(FIRST) == {0: 0, 1: 50}
    table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    assert table.missing(FIRST._replace(epoch=200, attempts=2)) is None
    assert table.missing(SECOND) == {0: 10, 1: 60}
    assert reopened(table).missing(FIRST) is None


def test_what_a_group_reads_again_is_left_out(table: Table) -> None:
    table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    again = FIRST._replace(number=5, ranges={0: (4, 15), 1: (70, 80)})
    assert table.missing(again) == {0: 10, 1: 70}
    table.commit(again, COLUMNS, [])
    assert reopened(table).mark.ends == {0: 15, 1: 80}


@pytest.mark.parametrize(
    "batch",
    [
        FIRST._replace(number=1),
        SECOND._replace(ranges={0: (10, 19), 1: (60, 60)}),
        SECOND._replace(generation="g2", number=9),
    ],
    ids=["lower number", "other range", "other generation"],
)
def test_a_bus_that_was_restored_is_refused_instead_of_losing_messages(
    table: Table, batch: Batch
) -> None:
    table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    table.commit(SECOND, COLUMNS, [staged(table, SECOND)])
    with pytest.raises(TableAhead, match="postbus-pipeline reset"):
        table.missing(batch)
    table.forget()
    assert reopened(table).missing(batch) == {n: first for n, (first, _) in batch.ranges.items()}


def test_a_table_of_another_pipeline_is_refused(table: Table) -> None:
    table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    with pytest.raises(InvalidTable, match="give other of orders a folder of its own"):
        table.missing(SECOND._replace(group="other"))


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("column", ["sku", "size"])
def test_the_second_of_two_drivers_cannot_commit(table: Table, is_new: bool, column: str) -> None:
    batch = FIRST if is_new else SECOND
    if not is_new:
        table.commit(FIRST, COLUMNS, [])
    other = reopened(table)
    table.commit(batch, COLUMNS, [staged(table, batch)])
    with pytest.raises(TableTaken, match="another driver has committed"):
        other.commit(
            batch._replace(epoch=99),
            StructType().add(column, "string"),
            [staged(other, batch._replace(epoch=99))],
        )
    assert len(files(table)) == 1
    assert reopened(table).mark == table.mark


def test_files_get_their_names_from_the_next_driver(
    parquet: ParquetTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = parquet
    with monkeypatch.context() as patched:
        patched.setattr(ParquetTable, "_publish", lambda *_: None)
        table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    assert files(table) == []
    assert [path.name for path in (table.folder / "_postbus" / "commits").iterdir()] == [
        "000000000001.json"
    ]
    again = reopened(table)
    assert len(files(table)) == 1
    assert again.missing(FIRST) is None
    reopened(table)


def test_files_that_no_commit_has_are_never_seen_and_swept_later(table: Table) -> None:
    staged(table, FIRST)
    again = reopened(table)
    assert files(table) == []
    newer = FIRST._replace(epoch=101)
    again.commit(newer, COLUMNS, [staged(again, newer)])
    reopened(table)
    left = list((table.folder / "_postbus" / "staged").iterdir())
    assert [folder.name for folder in left] == ["101"]


def test_columns_are_added_and_never_retyped(table: Table) -> None:
    table.commit(FIRST, COLUMNS, [])
    retyped = StructType().add("price", "decimal(10,2)")
    for attempt in (table.check, lambda schema: table.commit(SECOND, schema, [])):
        with pytest.raises(InvalidTable, match=r"column price of the table .* is double"):
            attempt(retyped)
    table.commit(SECOND, StructType().add("sku", "string").add("size", "integer"), [])
    with pytest.raises(InvalidTable, match=r"column size of the table .* is int"):
        reopened(table).check(StructType().add("size", "string"))


@pytest.mark.parametrize("kind", [ParquetTable, DeltaTable, IcebergTable])
def test_a_folder_with_other_files_is_no_table(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidTable, match="has files and is no table"):
        opened(kind, tmp_path)
    with pytest.raises(InvalidTable, match="is no folder"):
        opened(kind, tmp_path / "notes.txt")


@pytest.mark.parametrize("kinds", [*permutations([ParquetTable, DeltaTable, IcebergTable], 2)])
def test_a_table_has_one_format(tmp_path: Path, kinds: Any) -> None:
    first, second = kinds
    opened(first, tmp_path / "table").commit(FIRST, COLUMNS, [])
    with pytest.raises(InvalidTable, match="name an empty folder"):
        opened(second, tmp_path / "table")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"v": 2}', '{"v": 1, "version": 1}', "null"])
def test_a_damaged_commit_is_named(parquet: ParquetTable, text: str) -> None:
    table = parquet
    table.commit(FIRST, COLUMNS, [])
    file = table.folder / "_postbus" / "commits" / "000000000001.json"
    file.write_text(text)
    with pytest.raises(InvalidTable, match=r"000000000001\.json cannot be read"):
        reopened(table)


def test_a_commit_is_read_as_it_was_written() -> None:
    commit = Commit(3, "orders", "g", "lake", 7, 2, {0: (1, 2)}, {0: 2}, {"sku": "string"})
    assert Commit.of(commit.json()) == commit
    assert json.loads(commit.json())["v"] == 1
    assert Commit.of(replace(commit, ranges=None, ends=None).json()).ends is None


# --- Delta ----------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_log_keeps_the_positions(delta: DeltaTable) -> None:
    delta.commit(FIRST, COLUMNS, [staged(delta, FIRST)])
    deltalake.DeltaTable(delta.folder).create_checkpoint()
    for entry in (delta.folder / "_delta_log").glob("*.json"):
        entry.unlink()
    assert reopened(delta).mark == delta.mark
    assert reopened(delta).missing(FIRST) is None


def orders(**columns: Any) -> pa.Table:
    day, hour = pa.array([date(2026, 1, 27)]), pa.array([0], pa.int32())
    return pa.table({"sku": ["other"], **columns, "date": day, "hour": hour})


def test_other_programs_commit_to_a_table_of_delta_too(
    delta: DeltaTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They append and add columns after the driver has read the table, before it commits."""
    delta.commit(FIRST, COLUMNS, [])
    add = DeltaTable._add
    for rows in (orders(), orders(size=["xl"])):

        def late(*given: Any, rows: pa.Table = rows) -> None:
            monkeypatch.setattr(DeltaTable, "_add", add)
            deltalake.write_deltalake(delta.folder, rows, mode="append", schema_mode="merge")
            add(*given)

        monkeypatch.setattr(DeltaTable, "_add", late)
        number = delta.mark.number + 1
        batch = FIRST._replace(number=number, ranges={0: (10 * number, 10 * number + 5)})
        delta.commit(batch, COLUMNS, [staged(delta, batch)])
    assert len(files(delta)) == 4
    again = reopened(delta)
    assert again.mark == delta.mark
    with pytest.raises(InvalidTable, match="column size of the table"):
        again.check(StructType().add("size", "integer"))


def test_a_driver_that_others_always_overtake_gives_up(
    delta: DeltaTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*_: Any) -> None:
        other = deltalake.DeltaTable(delta.folder)
        other.alter.set_table_properties({"delta.logRetentionDuration": "interval 30 days"})
        raise CommitFailedError("a concurrent transaction")

    delta.commit(FIRST, COLUMNS, [])
    monkeypatch.setattr(DeltaTable, "_add", overtaken)
    with pytest.raises(TableTaken, match="other programs have committed"):
        delta.commit(SECOND, COLUMNS, [])


def test_a_commit_that_is_refused_without_another_one_is_no_race(
    delta: DeltaTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As deltalake does for a feature of the table that it cannot write."""

    def refused(*_: Any) -> None:
        raise CommitFailedError("Unsupported table features required")

    delta.commit(FIRST, COLUMNS, [])
    monkeypatch.setattr(DeltaTable, "_add", refused)
    with pytest.raises(InvalidTable, match="Unsupported table features"):
        delta.commit(SECOND, COLUMNS, [])


@pytest.mark.parametrize("point", ["create", "_placed", "sync_names", "_add"])
def test_a_driver_killed_in_the_first_batch_is_followed_by_another(
    delta: DeltaTable, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        if point == "create":
            (delta.folder / "_delta_log").mkdir()
        raise RuntimeError("killed")

    of = {"create": deltalake.DeltaTable, "sync_names": Folder}.get(point, DeltaTable)
    with monkeypatch.context() as patched:
        patched.setattr(of, point, killed)
        with pytest.raises(RuntimeError, match="killed"):
            delta.commit(FIRST, COLUMNS, [staged(delta, FIRST)])
    following = DeltaTable(delta.folder, delta.partition_by)
    following.open()
    assert following.missing(FIRST) is not None
    following.commit(FIRST, COLUMNS, [staged(following, FIRST)])
    assert following.verified().problems == []
    assert following.verified().rows == 10


def test_vacuum_removes_files_of_a_killed_driver(
    delta: DeltaTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    delta.commit(FIRST, COLUMNS, [staged(delta, FIRST)])
    monkeypatch.setattr(DeltaTable, "_add", killed)
    with pytest.raises(RuntimeError, match="killed"):
        delta.commit(SECOND, COLUMNS, [staged(delta, SECOND)])
    waiting = Path(staged(delta, SECOND).staged)
    assert len(files(delta)) == 1
    gone = deltalake.DeltaTable(delta.folder).vacuum(
        retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True
    )
    assert [Path(path).name.partition("-")[2][:5] for path in gone] == ["10-19"]
    assert waiting.exists()
    assert delta.verified().problems == []


def test_a_table_of_delta_that_is_there_is_taken_as_it_is(delta: DeltaTable) -> None:
    deltalake.write_deltalake(delta.folder, orders(), partition_by=["date", "hour"])
    again = reopened(delta)
    assert again.missing(FIRST) == {0: 0, 1: 50}
    again.commit(FIRST, COLUMNS, [staged(again, FIRST)])
    assert len(files(delta)) == 2
    with pytest.raises(InvalidTable, match=r"partitioned by \[date, hour\], and .* is \[date\]"):
        DeltaTable(delta.folder, ["date"]).open()


SKU = deltalake.Field("sku", "string")


@pytest.mark.parametrize(
    ("field", "configuration", "text"),
    [
        (SKU, {"delta.columnMapping.mode": "name"}, "delta.columnMapping.mode: name"),
        (SKU, {"delta.constraints.known": "sku > ''"}, "delta.constraints.known: sku > ''"),
        (
            deltalake.Field("sku", "string", metadata={"delta.generationExpression": "a"}),
            {},
            "sku has delta.generationExpression",
        ),
        (deltalake.Field("sku", "string", nullable=False), {}, "sku is not null"),
    ],
)
def test_a_table_with_rules_for_its_rows_is_refused(
    tmp_path: Path, field: deltalake.Field, configuration: dict[str, str], text: str
) -> None:
    deltalake.DeltaTable.create(
        tmp_path,
        deltalake.Schema([field]),
        configuration=configuration,
        raise_if_key_not_exists=False,
    )
    with pytest.raises(InvalidTable, match="rules that a pipeline cannot keep") as refused:
        DeltaTable(tmp_path, []).open()
    assert text in str(refused.value)


def test_an_error_of_deltalake_names_the_table(
    delta: DeltaTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise DeltaError("a feature that is not supported")

    monkeypatch.setattr(DeltaTable, "_add", refused)
    with pytest.raises(InvalidTable, match=r"cannot be used .a feature that is not supported"):
        delta.commit(FIRST, COLUMNS, [])


def test_a_column_of_another_case_is_refused(delta: DeltaTable) -> None:
    delta.commit(FIRST, COLUMNS, [])
    with pytest.raises(InvalidTable, match=r"column sku .* has SKU as string"):
        delta.check(StructType().add("SKU", "string"))


def test_a_column_that_delta_has_no_type_for_is_refused(delta: DeltaTable) -> None:
    with pytest.raises(InvalidTable, match=r"cannot have a column .*length is interval"):
        delta.check(StructType().add("length", DayTimeIntervalType()))


def test_nested_columns_may_be_null_or_not(delta: DeltaTable) -> None:
    def nested(is_null: bool) -> StructType:
        size = StructType().add("cm", "integer", nullable=is_null)
        return StructType().add("sizes", ArrayType(size, is_null), nullable=is_null)

    delta.commit(FIRST, nested(False), [])
    reopened(delta).check(nested(True))


def test_a_damaged_log_is_named(delta: DeltaTable) -> None:
    delta.commit(FIRST, COLUMNS, [])
    (delta.folder / "_delta_log" / f"{1:020}.json").write_text("{")
    with pytest.raises(InvalidTable, match=r"(?s)cannot be used .*: repair its log"):
        reopened(delta)


def test_readers_skip_files_by_the_positions_in_the_log(delta: DeltaTable) -> None:
    places = StructType().add("position", "long").add("enqueued_time", "timestamp")
    delta.commit(FIRST, places, [staged(delta, FIRST)])
    [file] = pa.table(deltalake.DeltaTable(delta.folder).get_add_actions(flatten=True)).to_pylist()
    assert (file["num_records"], file["min.position"], file["max.position"]) == (10, 0, 9)
    assert (file["partition.date"], file["partition.hour"]) == (date(2026, 1, 27), 0)
    assert file["min.enqueued_time"].timestamp() * 1000 == HOUR
    assert file["max.enqueued_time"].timestamp() * 1000 >= HOUR + 1


# --- verify ---------------------------------------------------------------------------------------


def test_verify_names_what_differs(table: Table) -> None:
    table.commit(FIRST, COLUMNS, [staged(table, FIRST), staged(table, FIRST, 1)])
    gone, changed = (table.folder / path for path in files(table))
    gone.unlink()
    changed.write_bytes(b"swor")
    found = table.verified()
    assert (found.files, found.rows) == (2, 20)
    assert found.problems == [
        f"{gone}: No such file or directory",
        f"{changed}: its content is not what was committed",
    ]


def test_verify_names_gaps_and_files_of_no_commit(parquet: ParquetTable) -> None:
    parquet.commit(FIRST, COLUMNS, [])
    parquet.commit(SECOND._replace(ranges={0: (12, 20), 1: (60, 60)}), COLUMNS, [])
    (parquet.folder / "foreign.parquet").write_bytes(b"")
    gap, foreign = parquet.verified().problems
    assert "begins at position 12 of partition 0, and the one before ends at 10" in gap
    assert foreign == f"{parquet.folder}/foreign.parquet: no commit has this file"


def test_a_committed_file_that_is_gone_stops_the_next_driver(parquet: ParquetTable) -> None:
    parquet.commit(FIRST, COLUMNS, [staged(parquet, FIRST)])
    [path] = files(parquet)
    (parquet.folder / path).unlink()
    with pytest.raises(InvalidTable, match="is gone: restore it from a backup"):
        reopened(parquet)
