"""Commits of a table: each batch counts once, whoever is killed when."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from postbus_spark.lake.layout import (
    HOUR_MS,
    Batch,
    Commit,
    InvalidTable,
    StagedFile,
    Table,
    TableAhead,
    TableTaken,
)
from postbus_spark.lake.verifying import verified

HOUR = 491_520 * HOUR_MS  # 2026-01-27, midnight UTC
COLUMNS = {"sku": "string", "price": "double"}
FIRST = Batch("orders", "g1", "lake", 100, 1, 1, {0: (0, 10), 1: (50, 60)})
SECOND = FIRST._replace(number=2, ranges={0: (10, 20), 1: (60, 60)})


@pytest.fixture
def table(tmp_path: Path) -> Table:
    made = Table(tmp_path / "table", ("date", "hour"))
    made.open()
    return made


def reopened(table: Table) -> Table:
    again = Table(table.folder, ("date", "hour"))
    again.open()
    return again


def staged(table: Table, batch: Batch, partition: int = 0) -> StagedFile:
    """Write a file as an executor does; its content is no Parquet."""
    first, end = batch.ranges[partition]
    path = table.staging(batch) / f"{partition}-{first}.parquet"
    path.write_bytes(b"rows")
    digest = hashlib.sha256(b"rows").hexdigest()
    return StagedFile(
        str(path), partition, first, end - 1, HOUR, end - first, 4, HOUR, HOUR + 1, digest
    )


def files(table: Table) -> list[str]:
    """Return what other programs see."""
    found = table.folder.rglob("*.parquet")
    paths = [path.relative_to(table.folder).as_posix() for path in found]
    return sorted(path for path in paths if not path.startswith("_"))


def test_files_of_a_commit_are_named_by_hour_partition_and_range(table: Table) -> None:
    table.commit(FIRST, COLUMNS, [staged(table, FIRST), staged(table, FIRST, 1)])
    hour = "date=2026-01-27/hour=00"
    assert files(table) == [f"{hour}/p000-0-9-c1.parquet", f"{hour}/p001-50-59-c1.parquet"]
    last = reopened(table).last
    assert last == table.last
    assert last is not None
    assert last.ends == {0: 10, 1: 60}
    assert [each.rows for each in last.files] == [10, 10]


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
    assert table.last is not None
    assert table.last.ends == {0: 15, 1: 80}


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


def test_the_second_of_two_drivers_cannot_commit(table: Table) -> None:
    other = reopened(table)
    table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    with pytest.raises(TableTaken, match="another driver has committed"):
        other.commit(FIRST._replace(epoch=99), COLUMNS, [])
    assert len(files(table)) == 1
    assert table.versions() == [1]


def test_files_get_their_names_from_the_next_driver(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Table, "_publish", lambda *_: None)
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
    with pytest.raises(InvalidTable, match=r"column price of the table .* is double"):
        table.commit(SECOND, {"price": "decimal(10,2)"}, [])
    table.commit(SECOND, {"sku": "string", "size": "int"}, [])
    assert table.last is not None
    assert table.last.columns == {**COLUMNS, "size": "int"}


def test_a_folder_with_other_files_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidTable, match="has files and is no table"):
        Table(tmp_path).open()
    with pytest.raises(InvalidTable, match="is no folder"):
        Table(tmp_path / "notes.txt").open()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"v": 2}', '{"v": 1, "version": 1}', "null"])
def test_a_damaged_commit_is_named(table: Table, text: str) -> None:
    table.commit(FIRST, COLUMNS, [])
    file = table.folder / "_postbus" / "commits" / "000000000001.json"
    file.write_text(text)
    with pytest.raises(InvalidTable, match=r"000000000001\.json cannot be read"):
        reopened(table)


def test_a_commit_is_read_as_it_was_written() -> None:
    commit = Commit(3, "orders", "g", "lake", 7, 2, {0: (1, 2)}, {0: 2}, COLUMNS)
    assert Commit.of(commit.json()) == commit
    assert json.loads(commit.json())["v"] == 1
    assert Commit.of(replace(commit, ranges=None, ends=None).json()).ends is None


# --- verify ---------------------------------------------------------------------------------------


def test_verify_names_what_differs(table: Table) -> None:
    batch = FIRST._replace(ranges={0: (0, 10), 1: (50, 60)})
    made = [staged(table, batch), staged(table, batch, 1)]
    table.commit(batch, COLUMNS, made)
    table.commit(SECOND._replace(ranges={0: (12, 20), 1: (60, 60)}), COLUMNS, [])
    assert verified(Table(table.folder)).problems[1:] == []
    gone, changed = (table.folder / path for path in files(table))
    gone.unlink()
    changed.write_bytes(b"others")
    (table.folder / "foreign.parquet").write_bytes(b"")
    found = verified(Table(table.folder))
    assert (found.commits, found.files, found.rows) == (2, 2, 20)
    begins, missing, differs, foreign = found.problems
    assert "begins at position 12 of partition 0, and the one before ends at 10" in begins
    assert missing == f"{gone}: No such file or directory"
    assert differs == f"{changed}: its content is not what was committed"
    assert foreign == f"{table.folder}/foreign.parquet: no commit has this file"


def test_a_committed_file_that_is_gone_stops_the_next_driver(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    (table.folder / made.files[0].path).unlink()
    with pytest.raises(InvalidTable, match="is gone: restore it from a backup"):
        reopened(table)
