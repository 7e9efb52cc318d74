"""A table in a folder: files of Parquet, and a log of commits.

    date=2026-01-31/hour=08/p000-1200-1399-c12.parquet   partition, positions, commit
    _postbus/commits/000000000012.json                    what the commit added, and where it ends
    _postbus/staged/1769846400000/8f….parquet             files of batches that are not committed

A commit is a file that appears whole or not at all, under a number that can be taken once: of two
drivers the second one is refused. It has the end position of every partition, so a batch that is
repeated is recognized whatever Spark calls it. Files get their names behind the commit, and a
driver that was killed in between is completed by the next one: what other programs read of a table
is committed. They leave out names that begin with `_`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

from postbus_spark.errors import PostbusSparkError

VERSION: Final = 1
OWN: Final = "_postbus"
COMMIT_NAME: Final = re.compile(r"(\d{12})\.json")
HOUR_MS: Final = 3_600_000


class InvalidTable(PostbusSparkError):
    """A folder is no table of this pipeline, is damaged, or cannot take the rows of an output."""


class TableAhead(PostbusSparkError):
    """A table has what the reader group has not read: one of the two is from a backup."""


class TableTaken(PostbusSparkError):
    """Another driver has committed to a table meanwhile."""


class Batch(NamedTuple):
    """The planned ranges of a reader group, under the number of their plan."""

    entity: str
    generation: str
    group: str
    epoch: int
    number: int
    attempts: int
    ranges: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that an executor wrote. `period_ms`: when the hour or day of its rows begins."""

    staged: str
    partition: int
    first: int
    last: int
    period_ms: int | None
    rows: int
    size_bytes: int
    first_enqueued_ms: int
    last_enqueued_ms: int
    sha256: str


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


class Table:
    """A table as its only driver sees it, from `open` on."""

    def __init__(self, folder: Path, partition_by: Sequence[str] = ()) -> None:
        self.folder = folder
        self._partition_by = tuple(partition_by)
        self._commits = folder / OWN / "commits"
        self._staged = folder / OWN / "staged"
        self.last: Commit | None = None

    def load(self) -> None:
        """Read the last commit and change nothing. Raises `InvalidTable`, `OSError`."""
        if self.folder.exists() and not self.folder.is_dir():
            raise InvalidTable(f"{self.folder} is no folder: name an empty one, or a new one")
        numbers = self.versions()
        if not numbers and self.folder.exists() and set(os.listdir(self.folder)) - {OWN}:
            raise InvalidTable(
                f"the folder {self.folder} has files and is no table: name an empty folder"
            )
        self.last = self.read(numbers[-1]) if numbers else None

    def open(self) -> None:
        """Read the last commit and complete it. Raises `InvalidTable`, `OSError`."""
        self.load()
        if self.last is not None:
            self._publish(self.last)
            self._sweep(self.last.epoch)

    def versions(self) -> list[int]:
        """Return the numbers of all commits."""
        try:
            names = os.listdir(self._commits)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := COMMIT_NAME.fullmatch(name)))

    def read(self, version: int) -> Commit:
        """Return a commit. Raises `InvalidTable`."""
        file = self._commit_file(version)
        try:
            return Commit.of(file.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidTable(
                f"the commit {file} cannot be read ({error}): restore it from a backup"
            ) from None

    def missing(self, batch: Batch) -> dict[int, int] | None:
        """Return from which position on the table lacks rows of a batch; None if it has them.

        Raises `InvalidTable`, `TableAhead`.
        """
        last = self.last
        starts = {number: first for number, (first, _) in batch.ranges.items()}
        if last is None or not last.group:
            return starts
        if (last.entity.lower(), last.group) != (batch.entity.lower(), batch.group):
            raise InvalidTable(
                f"the table {self.folder} has messages that the reader group {last.group} of"
                f" {last.entity} has read: give {batch.group} of {batch.entity} a folder of its own"
            )
        ends, ranges = last.ends or {}, last.ranges
        if last.generation == batch.generation and last.number == batch.number:
            if ranges == batch.ranges:
                return None
        elif last.generation == batch.generation and last.number < batch.number:
            return {number: max(first, ends.get(number, 0)) for number, first in starts.items()}
        raise TableAhead(
            f"the table {self.folder} has plan {last.number} of the reader group {batch.group}, and"
            f" the bus plans {batch.number}: the bus was restored from a backup, or entity or group"
            " were made again. What the table has stays; to go on with what the bus has now,"
            " run `postbus-pipeline reset`, which may add messages a second time"
        )

    def staging(self, batch: Batch) -> Path:
        """Return the folder for files of a batch, made if need be."""
        folder = self._staged / str(batch.epoch)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def merged(self, columns: Mapping[str, str]) -> dict[str, str]:
        """Return the columns of the table with those of an output. Raises `InvalidTable`."""
        known = dict((self.last and self.last.columns) or {})
        for name, kind in columns.items():
            if known.setdefault(name, kind) != kind:
                raise InvalidTable(
                    f"column {name} of the table {self.folder} is {known[name]}, and the output has"
                    f" {kind}: cast it, or give it another name"
                )
        return known

    def commit(
        self, batch: Batch, columns: Mapping[str, str], staged: Iterable[StagedFile]
    ) -> Commit:
        """Add the files of a batch. Raises `TableTaken`, `InvalidTable`, `OSError`."""
        version = 1 if self.last is None else self.last.version + 1
        before = (self.last and self.last.group and self.last.ends) or {}
        ends = {n: max(end, before.get(n, 0)) for n, (_, end) in batch.ranges.items()}
        files = sorted(staged, key=lambda each: (each.partition, each.first))
        made = Commit(
            version=version,
            entity=batch.entity,
            generation=batch.generation,
            group=batch.group,
            epoch=batch.epoch,
            number=batch.number,
            ranges=dict(batch.ranges),
            ends=ends,
            columns=self.merged(columns),
            files=tuple(self._named(version, each) for each in files),
        )
        if made.files:
            _sync_folder(self.staging(batch))
        self._add(made)
        self._publish(made)
        return made

    def forget(self) -> None:
        """Forget where the table ends: it takes whatever comes next. Its files stay."""
        if self.last is not None and self.last.group:
            self._add(
                replace(
                    Commit(version=self.last.version + 1, epoch=self.last.epoch),
                    columns=self.last.columns,
                )
            )

    def _named(self, version: int, file: StagedFile) -> TableFile:
        values = asdict(file)
        period_ms = values.pop("period_ms")
        name = f"p{file.partition:03}-{file.first}-{file.last}-c{version}.parquet"
        folders = folders_of(period_ms, self._partition_by)
        staged = Path(file.staged).relative_to(self.folder).as_posix()
        return TableFile(**{**values, "path": "/".join([*folders, name]), "staged": staged})

    def _add(self, commit: Commit) -> None:
        """Write a commit under its number, which nobody may have taken."""
        self._commits.mkdir(parents=True, exist_ok=True)
        made = self._commits / f".{uuid4().hex}"
        try:
            with made.open("x", encoding="utf-8") as file:
                file.write(commit.json())
                file.flush()
                os.fsync(file.fileno())
            os.link(made, self._commit_file(commit.version))
        except FileExistsError:
            raise TableTaken(
                f"another driver has committed to the table {self.folder}: only one pipeline at a"
                " time writes a table. Start this one again if it is the one that shall go on"
            ) from None
        finally:
            made.unlink(missing_ok=True)
        _sync_folder(self._commits)
        self.last = commit

    def _publish(self, commit: Commit) -> None:
        """Give the files of a commit their names, unless they have them."""
        changed = set()
        for file in commit.files:
            path = self.folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(self.folder / file.staged, path)
            except FileNotFoundError:
                if not path.exists():
                    raise InvalidTable(
                        f"the file {path} of commit {commit.version} is gone: restore it from a"
                        " backup"
                    ) from None
            changed |= {path.parent, *path.parent.parents}
        for folder in changed:
            if folder.is_relative_to(self.folder):
                _sync_folder(folder)

    def _sweep(self, epoch: int) -> None:
        """Remove files of drivers that cannot commit any more: a newer one has."""
        with suppress(FileNotFoundError):
            for folder in self._staged.iterdir():
                if folder.name.isdigit() and int(folder.name) < epoch:
                    shutil.rmtree(folder, ignore_errors=True)

    def _commit_file(self, version: int) -> Path:
        return self._commits / f"{version:012}.json"


def folders_of(period_ms: int | None, partition_by: Sequence[str]) -> list[str]:
    """Return the folders of an hour or day, in Hive's way."""
    if period_ms is None:
        return []
    time = datetime.fromtimestamp(period_ms / 1000, UTC)
    parts = {"date": f"date={time:%Y-%m-%d}", "hour": f"hour={time:%H}"}
    return [parts[name] for name in partition_by]


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
