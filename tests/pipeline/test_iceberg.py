"""Tables of Iceberg beside other programs, and the catalogs that have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyiceberg.catalog
import pytest
from pyiceberg import exceptions
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DayTimeIntervalType,
    MapType,
    StringType,
    StructType,
    VarcharType,
)

from postbus_spark.jobs.failures import ExitCode, exit_code
from postbus_spark.lake import iceberg as iceberg_module
from postbus_spark.lake.iceberg import IcebergTable, loaded, read_rows
from postbus_spark.lake.layout import CatalogTable, TableTaken
from postbus_spark.lake.places import Folder, InvalidTable
from tests.pipeline.rest_catalog import RestCatalog
from tests.pipeline.test_tables import (
    COLUMNS,
    FIRST,
    HOUR,
    PARTITION_BY,
    SECOND,
    files,
    opened,
    orders,
    place_of,
    reopened,
    staged,
)


@pytest.fixture
def iceberg(tmp_path: Path) -> IcebergTable:
    return opened(IcebergTable, tmp_path / "table")


@pytest.fixture
def rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RestCatalog]:
    give_token(monkeypatch, "secret")
    with RestCatalog(tmp_path / "rest", "secret").running() as running:
        yield running


def give_token(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """Set the environment, which pyiceberg reads when it is imported."""
    monkeypatch.setenv("PYICEBERG_CATALOG__POSTBUS__TOKEN", token)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())


def of_rest(rest: RestCatalog, folder: Path) -> IcebergTable:
    found = IcebergTable(folder, PARTITION_BY, CatalogTable(rest.uri, "shop.orders", None))
    found.open()
    return found


def foreign(table: IcebergTable) -> Any:
    """Return the table as another program sees it."""
    [place] = [place_of(table.folder)]
    return SqlCatalog("postbus", uri=place.uri).load_table(place.name)


def test_other_programs_commit_to_a_table_too(
    iceberg: IcebergTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They append and add columns after the driver has read the table, before it commits."""
    iceberg.commit(FIRST, COLUMNS, [])
    add = IcebergTable._add

    def append(table: Any) -> None:
        table.append(orders(price=[1.0]).select(["sku", "price", "date", "hour"]))

    def add_column(table: Any) -> None:
        with table.update_schema() as update:
            update.add_column("size", iceberg_module.PRIMITIVES["string"])

    for number, change in enumerate((append, add_column), 2):

        def late(*given: Any, change: Any = change) -> None:
            monkeypatch.setattr(IcebergTable, "_add", add)
            change(foreign(iceberg))
            add(*given)

        monkeypatch.setattr(IcebergTable, "_add", late)
        batch = FIRST._replace(number=number, ranges={0: (10 * number, 10 * number + 5)})
        iceberg.commit(batch, COLUMNS, [staged(iceberg, batch)])
    assert len(files(iceberg)) == 3
    again = reopened(iceberg)
    assert again.mark == iceberg.mark
    assert again.verified().problems == []
    with pytest.raises(InvalidTable, match="column size of the table"):
        again.check(StructType().add("size", "integer"))


def test_a_driver_that_commits_between_look_and_commit_ends_the_other(
    iceberg: IcebergTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyiceberg by itself would add the files of both."""
    iceberg.commit(FIRST, COLUMNS, [])
    add = IcebergTable._add
    newer = SECOND._replace(epoch=101)

    def late(*given: Any) -> None:
        monkeypatch.setattr(IcebergTable, "_add", add)
        other = reopened(iceberg)
        other.commit(newer, COLUMNS, [staged(other, newer)])
        add(*given)

    monkeypatch.setattr(IcebergTable, "_add", late)
    with pytest.raises(TableTaken, match="another driver has committed"):
        iceberg.commit(SECOND, COLUMNS, [staged(iceberg, SECOND)])
    assert len(files(iceberg)) == 1
    assert reopened(iceberg).mark.epoch == 101


def test_a_driver_that_others_always_overtake_gives_up(
    iceberg: IcebergTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*_: Any) -> None:
        raise iceberg_module.Overtaken("a concurrent commit")

    iceberg.commit(FIRST, COLUMNS, [])
    monkeypatch.setattr(IcebergTable, "_add", overtaken)
    with pytest.raises(TableTaken, match="other programs have committed"):
        iceberg.commit(SECOND, COLUMNS, [])


@pytest.mark.parametrize("point", ["created", "_placed", "sync_names", "_add", "_sync"])
def test_a_driver_killed_in_the_first_batch_is_followed_by_another(
    iceberg: IcebergTable, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        if point == "created":
            (iceberg.folder / "metadata").mkdir()
        raise RuntimeError("killed")

    of = {"created": iceberg_module, "sync_names": Folder}.get(point, IcebergTable)
    with monkeypatch.context() as patched:
        patched.setattr(of, point, killed)
        with pytest.raises(RuntimeError, match="killed"):
            iceberg.commit(FIRST, COLUMNS, [staged(iceberg, FIRST)])
    following = reopened(iceberg)
    if point == "_sync":
        assert following.missing(FIRST) is None
    else:
        assert following.missing(FIRST) is not None
        following.commit(FIRST, COLUMNS, [staged(following, FIRST)])
    assert following.verified() == (1, 1, 10, [])


def test_positions_outlive_the_snapshots_that_had_them(iceberg: IcebergTable) -> None:
    iceberg.commit(FIRST, COLUMNS, [staged(iceberg, FIRST)])
    other = foreign(iceberg)
    other.append(orders(price=[1.0]).select(["sku", "price", "date", "hour"]))
    other.maintenance.expire_snapshots().older_than(datetime.now(UTC).replace(year=2100)).commit()
    assert len(foreign(iceberg).snapshots()) == 1
    assert reopened(iceberg).missing(FIRST) is None


def test_a_snapshot_says_where_it_ends(iceberg: IcebergTable) -> None:
    iceberg.commit(FIRST, COLUMNS, [staged(iceberg, FIRST)])
    iceberg.commit(SECOND, COLUMNS, [staged(iceberg, SECOND)])
    marks = [json.loads(each.summary["postbus.mark"]) for each in foreign(iceberg).snapshots()]
    assert [mark["ends"] for mark in marks] == [{"0": 10, "1": 60}, {"0": 20, "1": 60}]


def test_a_file_is_added_once_after_positions_were_forgotten(iceberg: IcebergTable) -> None:
    iceberg.commit(FIRST, COLUMNS, [staged(iceberg, FIRST)])
    iceberg.forget()
    again = reopened(iceberg)
    again.commit(FIRST._replace(number=7), COLUMNS, [staged(again, FIRST)])
    assert again.verified() == (2, 1, 10, [])


# --- columns --------------------------------------------------------------------------------------


def test_a_column_of_another_case_is_refused(iceberg: IcebergTable) -> None:
    iceberg.commit(FIRST, COLUMNS, [])
    with pytest.raises(InvalidTable, match=r"column sku .* has SKU as string"):
        iceberg.check(StructType().add("SKU", "string"))


def test_a_column_that_iceberg_has_no_type_for_is_refused(iceberg: IcebergTable) -> None:
    nested = StructType().add("lengths", ArrayType(DayTimeIntervalType()))
    with pytest.raises(InvalidTable, match=r"cannot have a column .*lengths is interval"):
        iceberg.check(nested)


def test_nested_columns_are_written_and_may_be_null_or_not(iceberg: IcebergTable) -> None:
    def nested(is_null: bool) -> StructType:
        size = StructType().add("cm", "decimal(10,2)", nullable=is_null)
        sizes = ArrayType(size, is_null)
        texts = MapType(StringType(), StringType(), is_null)
        made = StructType.fromJson(COLUMNS.jsonValue()).add("sizes", sizes, nullable=is_null)
        return made.add("texts", texts).add("tiny", ByteType()).add("short", VarcharType(5))

    size = pa.struct([("cm", pa.decimal128(10, 2))])
    columns = {
        "sizes": pa.array(10 * [[{"cm": None}]], pa.list_(size)),
        "texts": pa.array(10 * [[("a", "b")]], pa.map_(pa.string(), pa.string())),
        "tiny": pa.array(10 * [1], pa.int8()),
        "short": pa.array(10 * ["abc"]),
    }
    iceberg.commit(FIRST, nested(False), [staged(iceberg, FIRST, **columns)])
    again = reopened(iceberg)
    again.check(nested(True))
    second = {name: values.take(pa.array(range(10))) for name, values in columns.items()}
    again.commit(SECOND, nested(True), [staged(again, SECOND, **second)])
    row = read_rows(place_of(iceberg.folder)).to_pylist()[0]
    assert (row["sizes"], row["texts"], row["tiny"]) == ([{"cm": None}], [("a", "b")], 1)
    with pytest.raises(
        InvalidTable, match=r"column sizes .* is list<struct<cm: decimal\(10, 2\)>>"
    ):
        again.check(StructType().add("sizes", ArrayType(StringType())))


def test_rows_of_a_time_are_read(iceberg: IcebergTable) -> None:
    schema = StructType.fromJson(COLUMNS.jsonValue()).add("enqueued_time", "timestamp")
    start_s = HOUR // 1000
    times = pa.array(
        [(start_s + each) * 1_000_000 for each in range(10)], pa.timestamp("us", "UTC")
    )
    iceberg.commit(FIRST, schema, [staged(iceberg, FIRST, enqueued_time=times)])
    place = place_of(iceberg.folder)
    start, end = (datetime.fromtimestamp(start_s + each, UTC) for each in (2, 5))
    assert read_rows(place, start, end).num_rows == 3
    assert read_rows(place, start).num_rows == 8
    assert read_rows(place).num_rows == 10
    with pytest.raises(InvalidTable, match=r"has no table shop\.none: correct it"):
        read_rows(place._replace(name="shop.none"))


# --- tables of others -----------------------------------------------------------------------------


def test_a_table_that_is_there_is_taken_as_it_is(iceberg: IcebergTable) -> None:
    iceberg.commit(FIRST, COLUMNS, [staged(iceberg, FIRST)])
    with foreign(iceberg).transaction() as transaction:
        transaction.remove_properties("postbus.mark")
    again = reopened(iceberg)
    assert again.missing(FIRST) == {0: 0, 1: 50}
    place, elsewhere = place_of(iceberg.folder), iceberg.folder / "elsewhere"
    with pytest.raises(InvalidTable, match=r"by \[date, hour\], and .* is \[date\]"):
        IcebergTable(iceberg.folder, ["date"], place).open()
    with pytest.raises(InvalidTable, match=r"of the catalog lies in .*, and path is .*elsewhere"):
        IcebergTable(elsewhere, PARTITION_BY, place).open()
    with foreign(iceberg).update_schema(allow_incompatible_changes=True) as update:
        update.make_column_optional("sku")
        update.add_column("id", iceberg_module.PRIMITIVES["long"], required=True)
    with pytest.raises(InvalidTable, match=r"cannot keep \(id not null\)"):
        reopened(iceberg)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"number": 1}', '{"ends": {}}', '{"ends": 1}'])
def test_a_mark_that_cannot_be_read_is_named(iceberg: IcebergTable, text: str) -> None:
    iceberg.commit(FIRST, COLUMNS, [])
    with foreign(iceberg).transaction() as transaction:
        transaction.set_properties({"postbus.mark": text})
    with pytest.raises(InvalidTable, match=r"the property postbus\.mark .* cannot be read"):
        reopened(iceberg)


@pytest.mark.parametrize("content", [b"{", b"{}", None])
def test_damaged_metadata_is_named(iceberg: IcebergTable, content: bytes | None) -> None:
    iceberg.commit(FIRST, COLUMNS, [])
    file = Path(foreign(iceberg).metadata_location)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(
        InvalidTable, match=r"table/.*|shop\.orders of the catalog .*: correct name"
    ):
        reopened(iceberg)


# --- catalogs -------------------------------------------------------------------------------------


def test_a_rest_catalog_gets_its_token_from_the_environment(
    rest: RestCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = of_rest(rest, tmp_path / "table")
    table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    again = of_rest(rest, tmp_path / "table")
    assert again.missing(FIRST) is None
    again.commit(SECOND, COLUMNS, [staged(again, SECOND)])
    with pytest.raises(TableTaken):
        table.commit(SECOND._replace(epoch=99), COLUMNS, [])
    assert again.verified() == (2, 2, 20, [])
    give_token(monkeypatch, "wrong")
    with pytest.raises(
        InvalidTable, match=r"no such token.*: correct name, catalog or credentials"
    ):
        of_rest(rest, tmp_path / "table")


def test_a_commit_whose_answer_was_lost_counts_once(rest: RestCatalog, tmp_path: Path) -> None:
    table = of_rest(rest, tmp_path / "table")
    table.commit(FIRST, COLUMNS, [staged(table, FIRST)])
    rest.lost = 1
    with pytest.raises(OSError, match=r"did not answer for the table .*: try again") as failed:
        table.commit(SECOND, COLUMNS, [staged(table, SECOND)])
    assert exit_code(failed.value) is ExitCode.RETRY
    again = of_rest(rest, tmp_path / "table")
    assert again.missing(SECOND) is None
    assert again.verified() == (2, 2, 20, [])


def test_a_commit_that_landed_and_was_reported_as_failed_counts_once(
    iceberg: IcebergTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    iceberg.commit(FIRST, COLUMNS, [staged(iceberg, FIRST)])
    commit_table = SqlCatalog.commit_table

    def landed(*given: Any) -> None:
        monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
        commit_table(*given)
        raise exceptions.CommitFailedException("of a request that the transport repeated")

    monkeypatch.setattr(SqlCatalog, "commit_table", landed)
    iceberg.commit(SECOND, COLUMNS, [staged(iceberg, SECOND)])
    assert reopened(iceberg).missing(SECOND) is None
    assert iceberg.verified() == (2, 2, 20, [])


def test_a_catalog_that_does_not_answer_is_asked_by_another_run(tmp_path: Path) -> None:
    place = CatalogTable("http://127.0.0.1:1", "shop.orders", None)
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1 did not answer for the table"):
        IcebergTable(tmp_path / "table", PARTITION_BY, place).open()


def test_a_look_at_a_table_makes_no_catalog(iceberg: IcebergTable, tmp_path: Path) -> None:
    iceberg.load()
    assert iceberg.verified() == (0, 0, 0, [])
    assert list(tmp_path.iterdir()) == []
    assert loaded(place_of(iceberg.folder)) is None
