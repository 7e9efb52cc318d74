"""What tables of all formats have in common: positions, names of files, and files that wait.

    date=2026-01-31/hour=08/p000-1200-1399-….parquet   partition and positions of the rows
    _postbus/staged/1769846400000/8f….parquet           files of batches that are not committed

The commit of a batch has the end position of every partition, so a batch that is repeated is
recognized whatever Spark calls it. How a commit is made is the format's.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from postbus_spark.errors import PostbusSparkError
from postbus_spark.lake.places import InvalidTable, place_at

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

OWN: Final = "_postbus"
STAGED: Final = f"{OWN}/staged"
HASH_DIGITS: Final = 32
HASHED_NAME: Final = re.compile(rf"p\d+-\d+-\d+-([0-9a-f]{{{HASH_DIGITS}}})\.parquet$")
HOUR_MS: Final = 3_600_000


class TableAhead(PostbusSparkError):
    """A table has what the reader group has not read: one of the two is from a backup."""


class TableTaken(PostbusSparkError):
    """Another driver has committed to a table meanwhile."""


class Batch(NamedTuple):
    """The planned ranges of a reader group, under the number of their plan.

    `has_places`: rows have a partition and a position of the ranges, and files are named by them.
    Otherwise a batch is known by its number alone.
    """

    entity: str
    generation: str
    group: str
    epoch: int
    number: int
    attempts: int
    ranges: Mapping[int, tuple[int, int]]
    has_places: bool = True


class Mark(NamedTuple):
    """The last batch that a table has. `reader`, `generation`, `ranges`: digests of entity and
    group, of the entity's generation, and of what was planned; `ends`: the position that comes next
    in each partition.
    """

    reader: int
    generation: int
    epoch: int
    number: int
    ranges: int
    ends: Mapping[int, int]


class CatalogTable(NamedTuple):
    """A table in a catalog of Iceberg: `uri` of REST, or `sqlite:///` and a file; `name` with its
    namespace.
    """

    uri: str
    name: str
    warehouse: str | None


class Verified(NamedTuple):
    """What was found in a table; `problems` are sentences."""

    commits: int
    files: int
    rows: int
    problems: list[str]


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that an executor wrote. `period_ms`: when the hour or day of its rows begins.

    `partition` -1: its rows have no place; `first` is the number of the task then.
    """

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


class Table(ABC):
    """A table as its only driver sees it, from `open` on."""

    has_period_columns: ClassVar[bool] = False
    """Whether files have the columns that are their folders, too."""

    def __init__(self, folder: Path | str, partition_by: Sequence[str]) -> None:
        """`folder`: one of a file system, or s3://bucket/prefix."""
        self.place = place_at(str(folder))
        self.folder = self.place.shown
        self.partition_by = tuple(partition_by)
        self.mark: Mark | None = None
        """None: the table takes whatever comes next."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The number of the last commit."""

    @abstractmethod
    def load(self) -> None:
        """Read the last commit and change nothing. Raises `InvalidTable`, `OSError`."""

    @abstractmethod
    def open(self) -> None:
        """Load the table, and remove what drivers before have left. Raises as `load`."""

    @abstractmethod
    def check(self, schema: StructType) -> None:
        """Raise `InvalidTable` unless the table has these columns or can get them."""

    @abstractmethod
    def commit(self, batch: Batch, schema: StructType, staged: Iterable[StagedFile]) -> None:
        """Add the files of a batch. Raises `TableTaken`, `InvalidTable`, `OSError`."""

    @abstractmethod
    def forget(self) -> None:
        """Forget where the table ends: it takes whatever comes next. Its files stay."""

    @abstractmethod
    def verified(self) -> Verified:
        """Compare files and commits, and change nothing. Raises `InvalidTable`."""

    def missing(self, batch: Batch) -> dict[int, int] | None:
        """Return from which position on the table lacks rows of a batch; None if it has them.

        Raises `InvalidTable`, `TableAhead`.
        """
        starts = {number: first for number, (first, _) in batch.ranges.items()}
        mark, now = self.mark, mark_of(batch)
        if mark is None:
            return starts
        if mark.reader != now.reader:
            raise InvalidTable(
                f"the table {self.folder} has messages that another reader group has read: give"
                f" {batch.group} of {batch.entity} a folder of its own"
            )
        is_same = mark.generation == now.generation
        if is_same and mark.number == batch.number and mark.ranges == now.ranges:
            return None
        if is_same and mark.number < batch.number:
            return {number: max(at, mark.ends.get(number, 0)) for number, at in starts.items()}
        raise TableAhead(
            f"the table {self.folder} has plan {mark.number} of the reader group {batch.group}, and"
            f" the bus plans {batch.number}: the bus was restored from a backup, or entity or group"
            " were made again. What the table has stays; to go on with what the bus has now,"
            " run `postbus-pipeline reset`, which may add messages a second time"
        )

    def staging(self, batch: Batch) -> str:
        """Return the folder for files of a batch, made if need be."""
        return self.place.folder(f"{STAGED}/{batch.epoch}")

    def sweep(self) -> None:
        """Remove files of drivers that cannot commit any more: a newer one has."""
        if self.mark is None:
            return
        for name in self.place.names(STAGED):
            if name.isdigit() and int(name) < self.mark.epoch:
                self.place.remove(f"{STAGED}/{name}")

    def check_folder(self, *, is_table: bool) -> None:
        """Raise `InvalidTable` unless the folder can be that of a table, or is one."""
        if self.place.names() - {OWN} and not is_table:
            raise InvalidTable(
                f"the folder {self.folder} has files and is no table: name an empty folder"
            )

    def check_other_format(self, wanted: str) -> None:
        """Raise `InvalidTable` if the folder is a table of Parquet."""
        if "commits" in self.place.names(OWN):
            raise InvalidTable(
                f"the table {self.folder} is one of Parquet: name an empty folder for one of"
                f" {wanted}"
            )

    def taken(self) -> TableTaken:
        """Return the error of a driver that another one has overtaken."""
        return TableTaken(
            f"another driver has committed to the table {self.folder}: only one pipeline at a"
            " time writes a table. Start this one again if it is the one that shall go on"
        )

    def named(self, file: StagedFile, unique: str) -> str:
        """Return the path of a file below the table."""
        place = f"p{file.partition:03}" if file.partition >= 0 else "r"
        name = f"{place}-{file.first}-{file.last}-{unique}.parquet"
        return "/".join([*self._folders(file.period_ms), name])

    def _folders(self, period_ms: int | None) -> list[str]:
        values = periods(period_ms, self.partition_by)
        return [f"{name}={value}" for name, value in values.items()]

    def staged_path(self, file: StagedFile) -> str:
        """Return the path of a staged file below the table."""
        return file.staged.removeprefix(f"{self.folder}/")

    def differences(self, path: str, size_bytes: int) -> Iterator[str]:
        """Yield how a file differs from its commit: in size, or from a hash in its name."""
        named = HASHED_NAME.fullmatch(path.rpartition("/")[2])
        try:
            is_same = self.place.look(path)[0] == size_bytes
            if is_same and named is not None:
                is_same = self.place.sha256(path).startswith(named[1])
        except OSError as error:
            yield f"{self.folder}/{path}: {error.strerror or error}"
            return
        if not is_same:
            yield f"{self.folder}/{path}: its content is not what was committed"


def mark_of(batch: Batch, before: Mark | None = None) -> Mark:
    """Return the mark of a batch behind that of another one."""
    ends = before.ends if before is not None else {}
    ranges = sorted(batch.ranges.items())
    return Mark(
        reader=_digest(batch.entity.lower(), batch.group),
        generation=_digest(batch.generation),
        epoch=batch.epoch,
        number=batch.number,
        ranges=_digest(*(f"{n}:{first}-{end}" for n, (first, end) in ranges)),
        ends={n: max(end, ends.get(n, 0)) for n, (_, end) in ranges},
    )


def _digest(*texts: str) -> int:
    """Return 53 bits of a hash: readers of JSON may keep numbers as floats."""
    found = hashlib.sha256("\0".join(texts).encode()).digest()
    return int.from_bytes(found[:8], "big") >> 11


def periods(period_ms: int | None, partition_by: Sequence[str]) -> dict[str, str]:
    """Return the values of an hour or day by the names of its folders, outer ones first."""
    if period_ms is None:
        return {}
    time = datetime.fromtimestamp(period_ms / 1000, UTC)
    values = {"date": f"{time:%Y-%m-%d}", "hour": f"{time:%H}"}
    return {name: values[name] for name in partition_by}
