"""Tables of Iceberg: a snapshot adds the files of a batch, and has the positions.

    data/date=2026-01-31/hour=08/p000-1200-1399-9f86….parquet   partition, positions, hash
    metadata/00012-….metadata.json                               the table, as its catalog names it

Files get their names before the commit: a reader sees what the snapshot names. The mark is a
property of the table, set by the commit that adds the snapshot, since snapshots expire; the summary
of a snapshot has it too, for people. Of two drivers the second one is refused; commits of other
programs are no hindrance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyiceberg import exceptions, types
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from postbus_spark.lake.layout import (
    HASH_DIGITS,
    OWN,
    Batch,
    CatalogTable,
    Mark,
    StagedFile,
    Table,
    TableTaken,
    Verified,
    mark_of,
)
from postbus_spark.lake.places import InvalidTable, endpoint_url, region

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa
    from pyiceberg.table import Table as IcebergTables
    from pyspark.sql.types import StructType

DATA: Final = "data"
METADATA: Final = "metadata"
MARK: Final = "postbus.mark"
CATALOG: Final = "postbus"
"""Name of the catalog in pyiceberg's own settings: PYICEBERG_CATALOG__POSTBUS__TOKEN."""

SQLITE: Final = "sqlite:///"
TRIES: Final = 5
"""How often a commit is tried while others commit. Our choice: each begins from what they did."""

PROPERTIES: Final = {
    "format-version": "2",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
}
"""A batch makes a manifest and a file of metadata: both would grow without bound."""

PERIODS: Final = {"date": types.DateType(), "hour": types.IntegerType()}
PRIMITIVES: Final[Mapping[str, types.PrimitiveType]] = {
    "boolean": types.BooleanType(),
    "byte": types.IntegerType(),
    "short": types.IntegerType(),
    "integer": types.IntegerType(),
    "long": types.LongType(),
    "float": types.FloatType(),
    "double": types.DoubleType(),
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "date": types.DateType(),
    "timestamp": types.TimestamptzType(),
    "timestamp_ntz": types.TimestampType(),
}
DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")

LATER: Final = (
    exceptions.CommitStateUnknownException,
    exceptions.ServerError,
    exceptions.ServiceUnavailableError,
    exceptions.TooManyRequestsError,
    RequestException,
    SQLAlchemyError,
)
"""Errors of a catalog that does not answer, or whose answer was lost."""

WRONG: Final[tuple[type[Exception], ...]] = (
    FileNotFoundError,
    ValueError,
    *(each for each in vars(exceptions).values() if isinstance(each, type)),
)
"""Errors that another try would meet again; those of pyiceberg have no class in common."""


class Overtaken(Exception):
    """Somebody has committed since the table was read.

    Neither of the errors after which pyiceberg removes the metadata that it has written: a commit
    may have landed although its catalog says that it has not.
    """


class IcebergTable(Table):
    """A folder with the data and metadata of a table that a catalog has."""

    has_period_columns = True
    _table: IcebergTables | None = None

    def __init__(
        self, folder: Path | str, partition_by: Sequence[str], entry: CatalogTable
    ) -> None:
        super().__init__(folder, partition_by)
        self._entry = entry

    @property
    def version(self) -> int:
        """The number of the last snapshot."""
        if self._table is None:
            return 0
        return getattr(self._table.metadata, "last_sequence_number", 0)  # none in format 1

    def load(self) -> None:
        with self._errors():
            self._table = loaded(self._entry)
        self.check_folder(is_table=self._table is not None or self._is_begun())
        self.check_other_format("Iceberg")
        if self._table is not None:
            self._check_table(self._table)
        self.mark = self._mark()

    def open(self) -> None:
        self.load()
        self.sweep()

    def _is_begun(self) -> bool:
        """Return whether a driver was killed while it made the table: no snapshot was written."""
        names, entries = self.place.names(), self.place.names(METADATA)
        is_begun = METADATA in names and names <= {OWN, METADATA}
        return is_begun and not any(name.endswith(".avro") for name in entries)

    def _check_table(self, table: IcebergTables) -> None:
        """Raise `InvalidTable` if the files of a pipeline cannot be those of the table."""
        if (location := table.location().removeprefix("file://").rstrip("/")) != str(self.folder):
            raise InvalidTable(
                f"the table {self._entry.name} of the catalog lies in {location}, and path is"
                f" {self.folder}: write this folder, or another name"
            )
        fields = [
            field.name if isinstance(field.transform, IdentityTransform) else str(field)
            for field in table.spec().fields
        ]
        if tuple(fields) != self.partition_by:
            raise InvalidTable(
                f"the table {self.folder} is partitioned by [{', '.join(fields)}], and partitionBy"
                f" is [{', '.join(self.partition_by)}]: write the one of the table, or name an"
                " empty folder and another table"
            )
        required = sorted(field.name for field in table.schema().fields if field.required)
        if required:
            raise InvalidTable(
                f"the table {self.folder} has rules that a pipeline cannot keep"
                f" ({', '.join(required)} not null): remove them, or name an empty folder and"
                " another table"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Name table and catalog in errors. Raises `InvalidTable`, or `OSError` to try again."""
        with catalog_errors(self._entry, f"the table {self.folder}"):
            yield

    # --- positions ------------------------------------------------------------------------------

    def _mark(self) -> Mark | None:
        text = None if self._table is None else self._table.properties.get(MARK)
        if text is None:
            return None
        try:
            found = dict(json.loads(text))
            ends = {int(partition): int(end) for partition, end in found.pop("ends").items()}
            return Mark(**found, ends=ends)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidTable(
                f"the property {MARK} of the table {self.folder} cannot be read ({error}): remove"
                " it to take what comes next"
            ) from None

    # --- columns --------------------------------------------------------------------------------

    def check(self, schema: StructType) -> None:
        self._lacking(schema)

    def _wanted(self, schema: StructType) -> dict[str, types.IcebergType]:
        """Return the columns of an output, with those of its hours. Raises `InvalidTable`."""
        wanted = {}
        numbers = count(1)
        for field in json.loads(schema.json())["fields"]:
            try:
                wanted[field["name"]] = _iceberg_type(field["type"], numbers)
            except ValueError as error:
                raise InvalidTable(
                    f"the table {self.folder} cannot have a column of the output"
                    f" ({field['name']} is {error}): cast it"
                ) from None
        return {**wanted, **{name: PERIODS[name] for name in self.partition_by}}

    def _lacking(self, schema: StructType) -> dict[str, types.IcebergType]:
        """Return the columns of an output that the table lacks. Raises `InvalidTable`."""
        wanted = self._wanted(schema)
        fields = () if self._table is None else self._table.schema().fields
        known = {field.name.lower(): field for field in fields}
        for name, kind in wanted.items():
            there = known.get(name.lower())
            if there and (there.name, _shape(there.field_type)) != (name, _shape(kind)):
                raise InvalidTable(
                    f"column {there.name} of the table {self.folder} is"
                    f" {_shape(there.field_type)}, and the output has {name} as {_shape(kind)}:"
                    " cast it, or give it another name"
                )
        return {name: kind for name, kind in wanted.items() if name.lower() not in known}

    def _made(self, schema: StructType) -> IcebergTables:
        """Return the table, made if need be."""
        if self._table is None:
            numbers = count(1_000_000)  # top-level columns; the catalog gives all their final ids
            fields = [
                types.NestedField(next(numbers), name, kind, required=False)
                for name, kind in self._wanted(schema).items()
            ]
            ids = {field.name: field.field_id for field in fields}
            spec = PartitionSpec(
                *(
                    PartitionField(ids[name], 1000 + at, IdentityTransform(), name)
                    for at, name in enumerate(self.partition_by)
                )
            )
            self._table = created(self._entry, str(self.folder), Schema(*fields), spec)
            self._check_table(self._table)
        return self._table

    # --- commits --------------------------------------------------------------------------------

    def commit(self, batch: Batch, schema: StructType, staged: Iterable[StagedFile]) -> None:
        before = self.mark
        wanted = mark_of(batch, before)
        files = list(staged)
        placed: list[str] | None = None
        for _ in range(TRIES):
            with self._errors():
                table = self._made(schema)
                if self._mark() == wanted:  # of a try whose answer was lost
                    self.mark = wanted
                    return
                if self._mark() != before:
                    raise self.taken()
                if placed is None:  # the table is there first: a folder with files only is none
                    placed = [self._placed(file) for file in files]
                    self.place.sync_names(placed)
                try:
                    self._add(table, schema, wanted, placed)
                    return
                except Overtaken:
                    self.load()
        raise TableTaken(
            f"other programs have committed to the table {self.folder} during {TRIES} tries: start"
            " the pipeline again"
        )

    def _placed(self, file: StagedFile) -> str:
        """Give a file its name below the table. A batch that is repeated may find it there."""
        path = f"{DATA}/{self.named(file, file.sha256[:HASH_DIGITS])}"
        self.place.move(self.staged_path(file), path)
        return path

    def _add(
        self, table: IcebergTables, schema: StructType, mark: Mark, files: Sequence[str]
    ) -> None:
        """Commit columns, files and positions at once. Raises `Overtaken`."""
        text = json.dumps(mark._asdict())
        paths = [f"{self.folder}/{path}" for path in files]
        if self.mark is None and paths:  # positions were forgotten: the same file may be there
            known = {task.file.file_path for task in table.scan().plan_files()}
            paths = [path for path in paths if path not in known]
        with table.transaction() as transaction:
            if lacking := self._lacking(schema):
                with transaction.update_schema() as update:
                    for name, kind in lacking.items():
                        update.add_column(name, kind)
            transaction.set_properties({MARK: text})
            # Without files, too: the snapshot is what two drivers conflict in.
            transaction.add_files(paths, {MARK: text}, check_duplicate_files=False)
        self._sync(table)
        self.mark = mark

    def _sync(self, table: IcebergTables) -> None:
        """Bring what the commit has written to disk; its catalog does so by itself."""
        snapshot = table.current_snapshot()
        assert snapshot is not None
        manifests = snapshot.manifests(table.io)
        made = [each for each in manifests if each.added_snapshot_id == snapshot.snapshot_id]
        paths = [table.metadata_location, snapshot.manifest_list]
        paths += [each.manifest_path for each in made]
        below = [found for path in paths if (found := self.place.below(path)) is not None]
        self.place.sync_files(below)
        self.place.sync_names(below)

    def forget(self) -> None:
        if self._table is not None and self.mark is not None:
            with self._errors(), self._table.transaction() as transaction:
                transaction.remove_properties(MARK)
            self.mark = None

    # --- verify ---------------------------------------------------------------------------------

    def verified(self) -> Verified:
        """Compare the files of the last snapshot with it, by size and by the hash in a name."""
        self.load()
        if self._table is None:
            return Verified(0, 0, 0, [])
        with self._errors():
            files = [task.file for task in self._table.scan().plan_files()]
        problems = [
            each
            for file in files
            if (path := self.place.below(file.file_path)) is not None
            for each in self.differences(path, file.file_size_in_bytes)
        ]
        rows = sum(file.record_count for file in files)
        return Verified(self.version, len(files), rows, sorted(problems))


# --- catalogs -------------------------------------------------------------------------------------


@contextmanager
def catalog_errors(place: CatalogTable, what: str) -> Iterator[None]:
    """Name a table and its catalog in errors. Raises `InvalidTable`, or `OSError` to try again."""
    try:
        yield
    except LATER as error:
        raise OSError(
            f"the catalog {place.uri} did not answer for {what} ({_line(error)}): try again when it"
            " does"
        ) from None
    except WRONG as error:
        raise InvalidTable(
            f"{what}, {place.name} of the catalog {place.uri}, cannot be used ({_line(error)}):"
            " correct name, catalog or credentials, or repair the table"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[0].split()) if str(error) else type(error).__name__


def loaded(place: CatalogTable) -> IcebergTables | None:
    """Return a table; None if its catalog has none."""
    if place.uri.startswith(SQLITE) and not Path(place.uri.removeprefix(SQLITE)).exists():
        return None
    catalog = _catalog(place)
    try:
        return _once(catalog, catalog.load_table(place.name))
    except exceptions.NoSuchTableError:
        return None


def created(place: CatalogTable, location: str, schema: Schema, spec: PartitionSpec) -> Any:
    """Return a table that is made, unless another driver has made it meanwhile."""
    if place.uri.startswith(SQLITE):
        Path(place.uri.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
    catalog = _catalog(place)
    catalog.create_namespace_if_not_exists(place.name.rpartition(".")[0])
    try:
        table = catalog.create_table(
            place.name, schema, location, spec, properties=dict(PROPERTIES)
        )
    except exceptions.TableAlreadyExistsError:
        table = catalog.load_table(place.name)
    return _once(catalog, table)


def _catalog(place: CatalogTable) -> Catalog:
    given = {
        "uri": place.uri,
        "warehouse": place.warehouse,
        "s3.endpoint": endpoint_url(),
        "s3.region": region(),
    }
    kind = "sql" if place.uri.startswith(SQLITE) else "rest"
    properties = {name: value for name, value in given.items() if value is not None}
    return load_catalog(CATALOG, type=kind, **properties)


def _once(catalog: Catalog, table: IcebergTables) -> IcebergTables:
    """Return a table in whose catalog a conflict ends a commit, with `Overtaken`.

    pyiceberg begins again from what others did, and would add what another driver has added.
    """
    commit = catalog.commit_table

    def commit_once(*given: Any, **named: Any) -> Any:
        try:
            return commit(*given, **named)
        except exceptions.CommitFailedException as error:
            raise Overtaken(str(error)) from error

    catalog.commit_table = commit_once  # type: ignore[method-assign]
    return table


# --- rows -----------------------------------------------------------------------------------------


def read_rows(
    place: CatalogTable, start: datetime | None = None, end: datetime | None = None
) -> pa.Table:
    """Return the rows of a table that were enqueued in [start, end). Raises `InvalidTable`."""
    with catalog_errors(place, "the table"):
        table = loaded(place)
        if table is None:
            raise InvalidTable(f"the catalog {place.uri} has no table {place.name}: correct it")
        times = [
            f"enqueued_time {sign} '{time.isoformat()}'"
            for sign, time in ((">=", start), ("<", end))
            if time is not None
        ]
        return table.scan(" and ".join(times) or "true").to_arrow()


# --- types ----------------------------------------------------------------------------------------


def _iceberg_type(kind: Any, numbers: Iterator[int]) -> types.IcebergType:
    """Return the type of a column that Spark writes as JSON. Raises `ValueError`."""
    if isinstance(kind, str):
        if found := DECIMAL.fullmatch(kind):
            return types.DecimalType(int(found[1]), int(found[2]))
        if kind.startswith(("char(", "varchar(")):
            return types.StringType()
        if kind not in PRIMITIVES:
            raise ValueError(kind)
        return PRIMITIVES[kind]
    if kind["type"] == "struct":
        return types.StructType(
            *(
                types.NestedField(
                    next(numbers),
                    each["name"],
                    _iceberg_type(each["type"], numbers),
                    required=False,
                )
                for each in kind["fields"]
            )
        )
    if kind["type"] == "array":
        element = _iceberg_type(kind["elementType"], numbers)
        return types.ListType(next(numbers), element, element_required=False)
    if kind["type"] != "map":
        raise ValueError(kind["type"])
    key, value = (_iceberg_type(kind[name], numbers) for name in ("keyType", "valueType"))
    return types.MapType(next(numbers), key, next(numbers), value, value_required=False)


def _shape(kind: types.IcebergType) -> str:
    """Return a type without ids, and without what it says of nulls."""
    match kind:
        case types.StructType():
            fields = ", ".join(f"{each.name}: {_shape(each.field_type)}" for each in kind.fields)
            return f"struct<{fields}>"
        case types.ListType():
            return f"list<{_shape(kind.element_type)}>"
        case types.MapType():
            return f"map<{_shape(kind.key_type)}, {_shape(kind.value_type)}>"
        case _:
            return str(kind)
