"""Tables of Parquet: files that any program reads, and a log of commits.

    date=2026-01-31/hour=08/p000-1200-1399-c12.parquet   partition, positions, commit
    _postbus/commits/000000000012.json                    what the commit added, and where it ends

A commit is a file that appears whole or not at all, under a number that can be taken once: of two
drivers the second one is refused. Files get their names behind the commit, and a driver that was
killed in between is completed by the next one: what other programs read of a table is committed.
They leave out names that begin with `_`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from postbus_spark.lake.layout import (
    OWN,
    Batch,
    Mark,
    StagedFile,
    Table,
    Verified,
    mark_of,
)
from postbus_spark.lake.places import InvalidTable

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql.types import StructType

VERSION: Final = 1
COMMITS: Final = f"{OWN}/commits"
COMMIT_NAME: Final = re.compile(r"(\d{12})\.json")


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a commit: its path below the table, and where it was before."""

    path: str
    staged: str
    partition: int
    first: int
    last: int
    rows: int
    size_bytes: int
    first_enqueued_ms: int
    last_enqueued_ms: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit added. `columns`: all of the table, name -> type; `ends`: position that comes
    next in each partition. `group` empty: the positions of the table were forgotten.
    """

    version: int
    entity: str = ""
    generation: str = ""
    group: str = ""
    epoch: int = 0
    number: int = 0
    ranges: Mapping[int, tuple[int, int]] | None = None
    ends: Mapping[int, int] | None = None
    columns: Mapping[str, str] | None = None
    files: tuple[TableFile, ...] = ()

    @property
    def mark(self) -> Mark | None:
        """The batch of the commit, None if it has none."""
        if not self.group:
            return None
        ranges = self.ranges or {}
        batch = Batch(self.entity, self.generation, self.group, self.epoch, self.number, 1, ranges)
        return mark_of(batch)._replace(ends=self.ends or {})

    def json(self) -> str:
        return json.dumps({"v": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def of(cls, text: str) -> Commit:
        """Return the commit of its JSON. Raises `ValueError`, `KeyError` or `TypeError`."""
        found: dict[str, Any] = dict(json.loads(text))
        if found.pop("v") != VERSION:
            raise ValueError("it is of a newer version")
        found["files"] = tuple(TableFile(**each) for each in found["files"])
        if found["ranges"] is not None:
            found["ranges"] = {int(key): (a, b) for key, (a, b) in found["ranges"].items()}
            found["ends"] = {int(key): end for key, end in found["ends"].items()}
        return cls(**found)


class ParquetTable(Table):
    """A folder of files with a log of its own."""

    def __init__(self, folder: Path | str, partition_by: Sequence[str]) -> None:
        super().__init__(folder, partition_by)
        self.last: Commit | None = None

    @property
    def version(self) -> int:
        return 0 if self.last is None else self.last.version

    def load(self) -> None:
        numbers = self.versions()
        self.check_folder(is_table=bool(numbers))
        self._set(self.read(numbers[-1]) if numbers else None)

    def open(self) -> None:
        """Complete the last commit, besides."""
        self.load()
        self.place.check()
        if self.last is not None:
            self._publish(self.last)
            self.sweep()

    def versions(self) -> list[int]:
        """Return the numbers of all commits."""
        names = self.place.names(COMMITS)
        return sorted(int(found[1]) for name in names if (found := COMMIT_NAME.fullmatch(name)))

    def read(self, version: int) -> Commit:
        """Return a commit. Raises `InvalidTable`."""
        path = _commit_path(version)
        try:
            return Commit.of(self.place.read(path).decode())
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidTable(
                f"the commit {self.folder}/{path} cannot be read ({error}): restore it from a"
                " backup"
            ) from None

    def check(self, schema: StructType) -> None:
        self._merged(schema)

    def _merged(self, schema: StructType) -> dict[str, str]:
        """Return the columns of the table with those of an output. Raises `InvalidTable`."""
        known = dict((self.last and self.last.columns) or {})
        for field in schema.fields:
            kind = field.dataType.simpleString()
            if known.setdefault(field.name, kind) != kind:
                raise InvalidTable(
                    f"column {field.name} of the table {self.folder} is {known[field.name]}, and"
                    f" the output has {kind}: cast it, or give it another name"
                )
        return known

    def commit(self, batch: Batch, schema: StructType, staged: Iterable[StagedFile]) -> None:
        files = sorted(staged, key=lambda each: (each.partition, each.first))
        version = self.version + 1
        made = Commit(
            version=version,
            entity=batch.entity,
            generation=batch.generation,
            group=batch.group,
            epoch=batch.epoch,
            number=batch.number,
            ranges=dict(batch.ranges),
            ends=mark_of(batch, self.mark).ends,
            columns=self._merged(schema),
            files=tuple(self._file(version, each) for each in files),
        )
        self.place.sync_names(file.staged for file in made.files)
        self._add(made)
        self._publish(made)

    def forget(self) -> None:
        if self.last is not None and self.mark is not None:
            self._add(
                replace(
                    Commit(version=self.last.version + 1, epoch=self.last.epoch),
                    columns=self.last.columns,
                )
            )

    def _set(self, commit: Commit | None) -> None:
        self.last = commit
        self.mark = None if commit is None else commit.mark

    def _file(self, version: int, file: StagedFile) -> TableFile:
        values = asdict(file)
        del values["period_ms"]
        path, staged = self.named(file, f"c{version}"), self.staged_path(file)
        return TableFile(**{**values, "path": path, "staged": staged})

    def _add(self, commit: Commit) -> None:
        """Write a commit under its number, which nobody may have taken."""
        try:
            self.place.add(_commit_path(commit.version), commit.json().encode())
        except FileExistsError:
            raise self.taken() from None
        self._set(commit)

    def _publish(self, commit: Commit) -> None:
        """Give the files of a commit their names, unless they have them."""
        for file in commit.files:
            try:
                self.place.move(file.staged, file.path)
            except FileNotFoundError:
                if not self._exists(file.path):
                    raise InvalidTable(
                        f"the file {self.folder}/{file.path} of commit {commit.version} is gone:"
                        " restore it from a backup"
                    ) from None
        self.place.sync_names(file.path for file in commit.files)

    def _exists(self, path: str) -> bool:
        try:
            self.place.look(path)
        except FileNotFoundError:
            return False
        return True

    # --- verify ---------------------------------------------------------------------------------

    def verified(self) -> Verified:
        """Read all commits and files."""
        self.load()
        files: dict[str, TableFile] = {}
        problems: list[str] = []
        before: Commit | None = None
        versions = self.versions()
        for version in versions:
            commit = self.read(version)
            problems += self._gaps(before, commit)
            files.update((file.path, file) for file in commit.files)
            before = commit
        for file in files.values():
            problems += self._differences(file)
        problems += [
            f"{self.folder}/{path}: no commit has this file"
            for path in sorted(self.place.paths())
            if path.endswith(".parquet") and path not in files and not path.startswith(f"{OWN}/")
        ]
        rows = sum(file.rows for file in files.values())
        return Verified(len(versions), len(files), rows, problems)

    def _gaps(self, before: Commit | None, commit: Commit) -> Iterator[str]:
        """Yield where a commit does not begin at the end of the one before."""
        if before is None or not before.group or not commit.group:
            return
        for number, (first, _) in (commit.ranges or {}).items():
            end = (before.ends or {}).get(number, first)
            if first > end:
                yield (
                    f"{self.folder}: commit {commit.version} begins at position {first} of"
                    f" partition {number}, and the one before ends at {end}: the reader group was"
                    " set forward"
                )

    def _differences(self, file: TableFile) -> Iterator[str]:
        path = file.path
        if not self._exists(path) and self._exists(file.staged):
            path = file.staged  # the next run gives it its name
        try:
            found = self.place.sha256(path)
        except OSError as error:
            yield f"{self.folder}/{path}: {error.strerror or error}"
            return
        if found != file.sha256:
            yield f"{self.folder}/{path}: its content is not what was committed"


def _commit_path(version: int) -> str:
    return f"{COMMITS}/{version:012}.json"
