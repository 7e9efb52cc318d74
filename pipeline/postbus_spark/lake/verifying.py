"""Compares the files of a table with its commits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from postbus_spark.lake.layout import OWN, Commit, Table, TableFile

CHUNK_BYTES: Final = 1 << 20


class Verified(NamedTuple):
    """What was found; `problems` are sentences."""

    commits: int
    files: int
    rows: int
    problems: list[str]


def verified(table: Table) -> Verified:
    """Read all commits and files of a table. Raises `InvalidTable`."""
    table.load()
    files: dict[str, TableFile] = {}
    problems: list[str] = []
    before: Commit | None = None
    versions = table.versions()
    for version in versions:
        commit = table.read(version)
        problems += _gaps(table, before, commit)
        files.update((file.path, file) for file in commit.files)
        before = commit
    for file in files.values():
        problems += _differences(table.folder, file)
    problems += [
        f"{table.folder / path}: no commit has this file"
        for path in _parquet_files(table.folder)
        if path not in files
    ]
    rows = sum(file.rows for file in files.values())
    return Verified(len(versions), len(files), rows, problems)


def _gaps(table: Table, before: Commit | None, commit: Commit) -> Iterator[str]:
    """Yield where a commit does not begin at the end of the one before."""
    if before is None or not before.group or not commit.group:
        return
    for number, (first, _) in (commit.ranges or {}).items():
        end = (before.ends or {}).get(number, first)
        if first > end:
            yield (
                f"{table.folder}: commit {commit.version} begins at position {first} of partition"
                f" {number}, and the one before ends at {end}: the reader group was set forward"
            )


def _differences(folder: Path, file: TableFile) -> Iterator[str]:
    path = folder / file.path
    if not path.exists() and (folder / file.staged).exists():
        path = folder / file.staged  # the next run gives it its name
    digest = hashlib.sha256()
    try:
        with path.open("rb") as opened:
            while data := opened.read(CHUNK_BYTES):
                digest.update(data)
    except OSError as error:
        yield f"{path}: {error.strerror or error}"
        return
    if digest.hexdigest() != file.sha256:
        yield f"{path}: its content is not what was committed"


def _parquet_files(folder: Path) -> Iterator[str]:
    for top, below, names in os.walk(folder):
        below[:] = [name for name in below if name != OWN]
        for name in names:
            if name.endswith(".parquet"):
                yield (Path(top) / name).relative_to(folder).as_posix()
