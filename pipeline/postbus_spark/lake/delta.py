"""Tables of Delta: a commit to its log adds the files of a batch and has their positions.

    date=2026-01-31/hour=08/p000-1200-1399-9f86….parquet   partition, positions, hash of the content
    _delta_log/00000000000000000012.json                    what the commit added, and where it ends

Files get their names before the commit: a reader sees what the log names. The positions are
application transactions, which checkpoints of the log keep. Of two drivers the second one is
refused, since both write the same transactions; commits of other programs are no hindrance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import deltalake
import pyarrow as pa
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, Transaction

from postbus_spark.lake.layout import (
    HASH_DIGITS,
    OWN,
    Batch,
    Mark,
    StagedFile,
    Table,
    TableTaken,
    Verified,
    mark_of,
    periods,
)
from postbus_spark.lake.places import InvalidTable

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

LOG: Final = "_delta_log"
APP: Final = "postbus"
"""The transactions of a mark: `postbus/plan` and so on, and `postbus/0`, where partition 0 ends."""

FORGOTTEN: Final = -1
"""Plan of a table whose positions were forgotten."""

TRIES: Final = 5
"""How often a commit is tried while others commit. Our choice: each begins from what they did."""

COLUMN_MAPPING: Final = "delta.columnMapping.mode"
CONSTRAINTS: Final = "delta.constraints."
RULES: Final = "delta."
"""Metadata of a column: its name in files, an expression, what its values must be."""

PERIOD_TYPES: Final = {"date": "date", "hour": "integer"}
NO_TYPES: Final = re.compile(r'"(interval [^"]*|variant|void)"')
"""Types of Spark that deltalake takes, and that readers of Delta lack or need a feature for."""

NULLABLE: Final = ("nullable", "containsNull", "valueContainsNull")


TRANSACTION_RETENTION: Final = "delta.setTransactionRetentionDuration"
"""With it the log forgets where the table ends."""


class DeltaTable(Table):
    """A folder with a log of Delta."""

    _delta: deltalake.DeltaTable | None = None

    @property
    def version(self) -> int:
        return -1 if self._delta is None else self._delta.version()

    def load(self) -> None:
        self._delta = None
        names = self.place.names()
        if LOG in names:
            try:
                self._delta = self._read()
            except TableNotFoundError:
                pass
            except DeltaError as error:
                raise self._unusable(error) from None
        self.check_folder(is_table=self._delta is not None or self._is_begun())
        self.check_other_format("Delta")
        if self._delta is not None:
            self._check_partitions(self._delta)
            self._check_rules(self._delta)
        self.mark = self._mark()

    def open(self) -> None:
        self.load()
        self.place.check()
        self.sweep()

    def _read(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(str(self.folder), storage_options=self.place.options)

    def _is_begun(self) -> bool:
        """Return whether a driver was killed while it made the table: its log has no entry."""
        names, entries = self.place.names(), self.place.names(LOG)
        is_begun = LOG in names and names <= {OWN, LOG}
        return is_begun and not any(name.endswith(".json") for name in entries)

    def _unusable(self, error: Exception) -> InvalidTable:
        return InvalidTable(
            f"the table {self.folder} cannot be used ({error}): repair its log, or name an empty"
            " folder"
        )

    def _check_partitions(self, delta: deltalake.DeltaTable) -> None:
        found = delta.metadata().partition_columns
        if tuple(found) != self.partition_by:
            raise InvalidTable(
                f"the table {self.folder} is partitioned by [{', '.join(found)}], and partitionBy"
                f" is [{', '.join(self.partition_by)}]: write the one of the table, or name an"
                " empty folder"
            )

    def _check_rules(self, delta: deltalake.DeltaTable) -> None:
        """Raise `InvalidTable` if files must not be added as they are: deltalake would add them."""
        rules = [
            f"{name}: {value}"
            for name, value in delta.metadata().configuration.items()
            if name.startswith(CONSTRAINTS)
            or name == TRANSACTION_RETENTION
            or (name == COLUMN_MAPPING and value != "none")
        ]
        for field in delta.schema().fields:
            rules += [
                f"{field.name} has {name}" for name in field.metadata if name.startswith(RULES)
            ]
            rules += [] if field.nullable else [f"{field.name} is not null"]
        if rules:
            raise InvalidTable(
                f"the table {self.folder} has rules that a pipeline cannot keep"
                f" ({', '.join(sorted(rules))}): remove them, or name an empty folder"
            )

    # --- positions ------------------------------------------------------------------------------

    def _mark(self) -> Mark | None:
        plan, partitions = self._number("plan"), self._number("partitions")
        if plan == FORGOTTEN or partitions == 0:
            return None
        ends = {partition: self._number(str(partition)) for partition in range(partitions)}
        return Mark(
            reader=self._number("reader"),
            generation=self._number("generation"),
            epoch=self._number("epoch"),
            number=plan,
            ranges=self._number("ranges"),
            ends=ends,
        )

    def _number(self, name: str) -> int:
        """Return the last version of a transaction, 0 if there is none."""
        return (self._delta and self._delta.transaction_version(f"{APP}/{name}")) or 0

    # --- columns --------------------------------------------------------------------------------

    def check(self, schema: StructType) -> None:
        self._lacking(schema)

    def _lacking(self, schema: StructType) -> list[deltalake.Field]:
        """Return the columns of an output that the table lacks. Raises `InvalidTable`."""
        wanted = _fields(json.loads(schema.json()))
        known = {} if self._delta is None else _fields(json.loads(self._delta.schema().to_json()))
        names = {name.lower(): name for name in known}
        for name, kind in wanted.items():
            there = names.get(name.lower(), name)
            if there in known and (there, known[there]) != (name, kind):
                raise InvalidTable(
                    f"column {there} of the table {self.folder} is {_shown(known[there])}, and the"
                    f" output has {name} as {_shown(kind)}: cast it, or give it another name"
                )
        try:
            return [_field(name, kind) for name, kind in wanted.items() if name not in known]
        except (DeltaError, ValueError) as error:
            raise InvalidTable(
                f"the table {self.folder} cannot have a column of the output ({error}): cast it"
            ) from None

    def _with_columns(self, schema: StructType) -> deltalake.DeltaTable:
        """Return the table with all columns of an output, made if need be."""
        lacking = self._lacking(schema)
        if self._delta is None:
            folders = [_field(name, PERIOD_TYPES[name]) for name in self.partition_by]
            self._delta = deltalake.DeltaTable.create(
                str(self.folder),
                deltalake.Schema([*lacking, *folders]),
                mode="ignore",
                partition_by=list(self.partition_by),
                storage_options=self.place.options,
            )
        elif lacking:
            self._delta.alter.add_columns(lacking)
        return self._delta

    # --- commits --------------------------------------------------------------------------------

    def commit(self, batch: Batch, schema: StructType, staged: Iterable[StagedFile]) -> None:
        before, first = self.mark, self.version + 1
        wanted = list(staged)
        files: list[AddAction] = []
        for attempt in range(1, TRIES + 1):
            known = self.version
            try:
                delta = self._with_columns(schema)
                if self._mark() != before:
                    raise self.taken()
                if not files:  # the table is there first: a folder with files only is none
                    files = [self._placed(file) for file in wanted]
                    self.place.sync_names(file.path for file in files)
                self._add(delta, mark_of(batch, before), files, first)
                return
            except CommitFailedError as error:
                self.load()
                if self.version == known:
                    raise self._unusable(error) from None
                if attempt == TRIES:
                    raise TableTaken(
                        f"other programs have committed to the table {self.folder} during {TRIES}"
                        f" tries ({error}): start the pipeline again"
                    ) from None
            except DeltaError as error:
                raise self._unusable(error) from None

    def forget(self) -> None:
        if self._delta is not None and self.mark is not None:
            ends = dict.fromkeys(self.mark.ends, 0)
            mark = self.mark._replace(number=FORGOTTEN, ends=ends)
            self._add(self._delta, mark, [], self.version + 1)

    def _placed(self, file: StagedFile) -> AddAction:
        """Give a file its name below the table. A batch that is repeated may find it there."""
        path = self.named(file, file.sha256[:HASH_DIGITS])
        self.place.move(self.staged_path(file), path)
        return AddAction(
            path=path,
            size=file.size_bytes,
            partition_values=self._values(file.period_ms),
            modification_time=self.place.look(path)[1],
            data_change=True,
            stats=json.dumps(_stats(file)),
        )

    def _values(self, period_ms: int | None) -> dict[str, str | None]:
        """Return the values of the columns that are folders."""
        found = periods(period_ms, self.partition_by)
        return {name: str(int(value)) if name == "hour" else value for name, value in found.items()}

    def _add(
        self, delta: deltalake.DeltaTable, mark: Mark, files: list[AddAction], first: int
    ) -> None:
        """Commit files and positions, and bring the log to disk from version `first` on."""
        numbers = {
            "reader": mark.reader,
            "generation": mark.generation,
            "epoch": mark.epoch,
            "plan": mark.number,
            "ranges": mark.ranges,
            "partitions": max(mark.ends, default=-1) + 1,
            **{str(partition): end for partition, end in mark.ends.items()},
        }
        done = [Transaction(f"{APP}/{name}", number) for name, number in numbers.items()]
        delta.create_write_transaction(
            list(files),
            "append",
            delta.schema(),
            list(self.partition_by),
            commit_properties=CommitProperties(app_transactions=done),
        )
        self.load()
        logs = [f"{LOG}/{version:020}.json" for version in range(first, self.version + 1)]
        self.place.sync_files(logs)
        self.place.sync_names(logs)

    # --- verify ---------------------------------------------------------------------------------

    def verified(self) -> Verified:
        """Compare the files of the last version with its log, by size and by the hash in a name."""
        self.load()
        if self._delta is None:
            return Verified(0, 0, 0, [])
        actions = pa.table(self._read().get_add_actions())
        files = actions.to_pylist()
        problems = [
            each for file in files for each in self.differences(file["path"], file["size_bytes"])
        ]
        rows = sum(file["num_records"] or 0 for file in files)
        return Verified(self.version + 1, len(files), rows, sorted(problems))


def _fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of columns as Spark and Delta write them, all of them nullable."""
    return {field["name"]: _nullable(field["type"]) for field in schema["fields"]}


def _nullable(kind: Any) -> Any:
    """Return a type without what it says of nulls and metadata."""
    if not isinstance(kind, dict):
        return kind
    made = {name: _nullable(value) for name, value in kind.items() if name != "metadata"}
    made |= {name: True for name in NULLABLE if name in made}
    if "fields" in made:
        made["fields"] = [{**_nullable(field), "metadata": {}} for field in made["fields"]]
    return made


def _field(name: str, kind: Any) -> deltalake.Field:
    """Return a column of the log. Raises `ValueError` if Delta has no such type."""
    if NO_TYPES.search(json.dumps(kind)):
        raise ValueError(f"{name} is {_shown(kind)}")
    made = {"name": name, "type": kind, "nullable": True, "metadata": {}}
    return deltalake.Field.from_json(json.dumps(made))


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else json.dumps(kind)


def _stats(file: StagedFile) -> dict[str, Any]:
    """Return what readers may know of a file without reading it."""
    if file.partition < 0:
        return {"numRecords": file.rows}
    lows = {"partition": file.partition, "position": file.first}
    highs = {"partition": file.partition, "position": file.last}
    return {
        "numRecords": file.rows,
        "minValues": {**lows, "enqueued_time": _time(file.first_enqueued_ms)},
        "maxValues": {**highs, "enqueued_time": _time(file.last_enqueued_ms + 1)},
        "nullCount": dict.fromkeys((*lows, "enqueued_time"), 0),
    }


def _time(time_ms: int) -> str:
    text = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
