"""Where a table lies: a folder that all executors share, or a prefix of a bucket of S3.

Endpoint, region and credentials of S3 come from the usual variables of the environment, AWS_….
Neither the contract nor pydantic is imported here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from postbus_spark.errors import PostbusSparkError

if TYPE_CHECKING:
    from obstore.store import S3Store

S3: Final = "s3://"
CHUNK_BYTES: Final = 1 << 20
OPTIONS: Final = {"aws_conditional_put": "etag"}
"""Settings of deltalake and obstore: a name is taken once."""

PATIENCE_S: Final = 120
"""How long a request to S3 is tried. Our choice: most restarts and fail-overs are shorter."""

FIRST_PAUSE_S: Final = 2
LONGEST_PAUSE_S: Final = 15
TRIES: Final = 60
"""More than fit into the patience, with two seconds between them at least."""

REFUSED: Final = re.compile(r"\b(401 Unauthorized|403 Forbidden)\b")
"""What an answer to a list has in its text only."""


class InvalidTable(PostbusSparkError):
    """A folder is no table of this pipeline, is damaged, or cannot take the rows of an output."""


class TableUnavailable(PostbusSparkError, OSError):
    """The disk or the S3 of a table has failed, is full or is away: a later attempt may succeed."""


class NewFile(Protocol):
    """A file that is written once, and is there whole after `complete`, or not at all."""

    def write(self, data: memoryview, /) -> object:
        """Append data."""

    def complete(self) -> None:
        """Bring the file to disk."""


class Place(ABC):
    """A folder. Paths are below it, names of files with folders."""

    shown: Path | str
    """Its name for people, and for other libraries."""

    options: dict[str, str] | None = None
    """Settings for deltalake."""

    @abstractmethod
    def names(self, below: str = "") -> set[str]:
        """Return the names in a folder, none if it is not there. Raises `InvalidTable`."""

    @abstractmethod
    def paths(self) -> Iterator[str]:
        """Yield the paths of all files."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a file."""

    @abstractmethod
    def look(self, path: str) -> tuple[int, int]:
        """Return the size of a file in bytes, and when it was written, in ms since 1970."""

    @abstractmethod
    def sha256(self, path: str) -> str:
        """Return the hash of a file's content."""

    @abstractmethod
    def add(self, path: str, data: bytes) -> None:
        """Write a file under a name that can be taken once. Raises `FileExistsError`."""

    @abstractmethod
    def move(self, old: str, new: str) -> None:
        """Give a file another name; one of this name has the same content."""

    @abstractmethod
    def remove(self, below: str) -> None:
        """Remove a folder with its files."""

    @abstractmethod
    def folder(self, below: str) -> str:
        """Return a folder for `new_file`, made if need be."""

    @abstractmethod
    def check(self) -> None:
        """Raise `InvalidTable` unless a name can be taken once."""

    @abstractmethod
    def sync_files(self, paths: Iterable[str]) -> None:
        """Bring the content of files to disk."""

    @abstractmethod
    def sync_names(self, paths: Iterable[str]) -> None:
        """Bring the names of files to disk, with those of the folders between."""

    def below(self, path: str) -> str | None:
        """Return the path of a file that another library names; None if it lies elsewhere."""
        found = path.removeprefix("file://").removeprefix(f"{self.shown}/")
        return None if found in {path, path.removeprefix("file://")} else found


def place_at(path: str) -> Place:
    """Return a folder, or a prefix of a bucket."""
    return Bucket(path) if path.startswith(S3) else Folder(Path(path))


def new_file(path: str) -> NewFile:
    """Return a file to write, in a folder of `Place.folder`."""
    if not path.startswith(S3):
        return _LocalFile(path)
    folder, _, name = path.rpartition("/")
    return _Upload(Bucket(folder), name)


class Folder(Place):
    """A folder of a file system, with hard links."""

    def __init__(self, folder: Path) -> None:
        self.shown = self._top = folder

    def names(self, below: str = "") -> set[str]:
        try:
            return set(os.listdir(self._top / below))
        except FileNotFoundError:
            return set()
        except NotADirectoryError:
            raise InvalidTable(
                f"{self._top / below} is no folder: name an empty one, or a new one"
            ) from None

    def paths(self) -> Iterator[str]:
        for top, _, names in os.walk(self._top):
            for name in names:
                yield (Path(top) / name).relative_to(self._top).as_posix()

    def read(self, path: str) -> bytes:
        return (self._top / path).read_bytes()

    def look(self, path: str) -> tuple[int, int]:
        found = (self._top / path).stat()
        return found.st_size, found.st_mtime_ns // 1_000_000

    def sha256(self, path: str) -> str:
        digest = hashlib.sha256()
        with (self._top / path).open("rb") as opened:
            while data := opened.read(CHUNK_BYTES):
                digest.update(data)
        return digest.hexdigest()

    def add(self, path: str, data: bytes) -> None:
        place = self._top / path
        place.parent.mkdir(parents=True, exist_ok=True)
        made = place.parent / f".{uuid4().hex}"
        try:
            with made.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(made, place)
        finally:
            made.unlink(missing_ok=True)
        _sync(place.parent)

    def move(self, old: str, new: str) -> None:
        place = self._top / new
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._top / old, place)

    def remove(self, below: str) -> None:
        shutil.rmtree(self._top / below, ignore_errors=True)

    def folder(self, below: str) -> str:
        made = self._top / below
        made.mkdir(parents=True, exist_ok=True)
        return str(made)

    def check(self) -> None:
        """Links take a name once."""

    def sync_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            _sync(self._top / path)

    def sync_names(self, paths: Iterable[str]) -> None:
        changed: set[Path] = set()
        for path in paths:
            parent = (self._top / path).parent
            changed |= {parent, *parent.parents}
        for folder in changed:
            if folder.is_relative_to(self._top):
                _sync(folder)


def _sync(path: Path) -> None:
    """Bring the content of a file, or the names in a folder, to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class _LocalFile:
    def __init__(self, path: str) -> None:
        self._path = path
        with self._errors():
            self._file = Path(path).open("xb")  # noqa: SIM115 - `complete` closes it

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Name the file in errors. Raises `TableUnavailable`."""
        try:
            yield
        except OSError as error:
            raise TableUnavailable(
                f"the file {self._path} cannot be written ({error.strerror}): make room, or mount"
                " the folder so that all executors can write"
            ) from None

    def write(self, data: memoryview, /) -> object:
        with self._errors():
            return self._file.write(data)

    def complete(self) -> None:
        with self._errors():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


# --- S3 -------------------------------------------------------------------------------------------


class Bucket(Place):
    """A prefix of a bucket."""

    def __init__(self, url: str) -> None:
        """`url`: s3://bucket/prefix."""
        self.shown = self._url = url
        self.options = {
            **OPTIONS, **_surroundings(), "max_retries": str(TRIES),
            "retry_timeout": f"{PATIENCE_S}s", "backoff_config.base": "2",
            "backoff_config.init_backoff": f"{FIRST_PAUSE_S}s",
            "backoff_config.max_backoff": f"{LONGEST_PAUSE_S}s",
        }  # fmt: skip
        self.bucket, _, prefix = url.removeprefix(S3).partition("/")
        self.store = _store(self.bucket, prefix)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Name the bucket in errors. Raises `InvalidTable`, `TableUnavailable`."""
        from obstore import exceptions

        try:
            yield
        except exceptions.AlreadyExistsError:
            raise FileExistsError(self._url) from None
        except (OSError, exceptions.BaseError) as error:
            text = str(error)
            if "NoSuchBucket" in text:
                raise InvalidTable(
                    f"there is no bucket {self.bucket} for {self._url}: make it, or correct the"
                    " path"
                ) from None
            if isinstance(error, FileNotFoundError):
                raise
            if isinstance(error, exceptions.PermissionDeniedError) or REFUSED.search(text):
                raise InvalidTable(
                    f"S3 refuses {self._url} ({_line(error)}): correct the credentials in the"
                    " environment, or give them the rights to list, read, write and delete"
                ) from None
            raise TableUnavailable(
                f"S3 has failed for {self._url} ({_line(error)}): try again"
            ) from None

    def names(self, below: str = "") -> set[str]:
        import obstore

        prefix = f"{below}/" if below else ""
        with self.errors():
            found = obstore.list_with_delimiter(self.store, prefix or None)
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return {path.rstrip("/").rpartition("/")[2] for path in paths}

    def paths(self) -> Iterator[str]:
        import obstore

        with self.errors():
            for chunk in obstore.list(self.store):
                yield from (each["path"] for each in chunk)

    def read(self, path: str) -> bytes:
        import obstore

        with self.errors():
            return bytes(obstore.get(self.store, path).bytes())

    def look(self, path: str) -> tuple[int, int]:
        import obstore

        with self.errors():
            found = obstore.head(self.store, path)
        return found["size"], round(found["last_modified"].timestamp() * 1_000)

    def sha256(self, path: str) -> str:
        import obstore

        digest = hashlib.sha256()
        with self.errors():
            for chunk in obstore.get(self.store, path).stream(min_chunk_size=CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def add(self, path: str, data: bytes) -> None:
        import obstore

        with self.errors():
            obstore.put(self.store, path, data, mode="create")

    def move(self, old: str, new: str) -> None:
        import obstore

        with self.errors():
            obstore.copy(self.store, old, new)
            obstore.delete(self.store, old)

    def remove(self, below: str) -> None:
        import obstore

        with self.errors():
            for chunk in obstore.list(self.store, f"{below}/"):
                obstore.delete(self.store, [each["path"] for each in chunk])

    def folder(self, below: str) -> str:
        return f"{self._url}/{below}"

    def check(self) -> None:
        path = f"_postbus/checks/{uuid4().hex}"
        self.add(path, b"")
        try:
            with suppress(FileExistsError):
                self.add(path, b"")
                raise InvalidTable(
                    f"the S3 of {self._url} lets a name be taken twice (it ignores If-None-Match),"
                    " so two drivers could overwrite each other: use a version that has conditional"
                    " writes, or a table of iceberg, which takes turns in its catalog"
                )
        finally:
            self.remove("_postbus/checks")

    def sync_files(self, paths: Iterable[str]) -> None:
        """S3 keeps what it has answered for."""

    def sync_names(self, paths: Iterable[str]) -> None:
        """S3 keeps what it has answered for."""


class _Upload:
    """An object that S3 has once its upload is complete."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        import obstore

        self._bucket = bucket
        self._writer: Any = obstore.open_writer(bucket.store, name)

    def write(self, data: memoryview, /) -> object:
        with self._bucket.errors():
            return self._writer.write(bytes(data))

    def complete(self) -> None:
        with self._bucket.errors():
            self._writer.close()


def _store(bucket: str, prefix: str) -> S3Store:
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    config: Any = {**OPTIONS, **_surroundings()}
    pauses: Any = {
        "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
        "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
        "base": 2,
    }
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=config,
        client_options=options,
        retry_config={
            "backoff": pauses,
            "max_retries": TRIES,
            "retry_timeout": timedelta(seconds=PATIENCE_S),
        },
    )


def _surroundings() -> dict[str, str]:
    """Return what the libraries do not find by themselves: the region, and an endpoint of HTTP."""
    found = {"aws_region": region()}
    if endpoint := endpoint_url():
        found |= {"aws_endpoint": endpoint, "aws_allow_http": "true"}
    return found


def endpoint_url() -> str | None:
    """Return the address of an S3 that is not Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def region() -> str:
    """Return the region of buckets."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[0].split())[:500] if str(error) else ""
