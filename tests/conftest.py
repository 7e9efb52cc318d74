"""A real Postgres for all tests: one server a run, one database a test.

The server is started once for each worker; a template database with the tables of partition 0 is
cloned for each test.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import settings

from postbus.process.embedded import SUPERUSER, EmbeddedPostgres, find_binaries, major_of
from postbus.store.postgres import Store
from tests.sdk_pauses import shorten_sdk_pauses
from tests.store.driving import make_partition

settings.register_profile("untimed", deadline=None)  # a first import may take seconds
settings.load_profile("untimed")

TEMPLATE = "postbus_template"
KILLS = Path(__file__).parent / "faults"
DATABASE_NUMBERS = itertools.count(1)


def run_elsewhere(work: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run a coroutine to its end in a loop and a thread of its own."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a private folder whose path is short enough for the socket of a server."""
    path = Path(tempfile.mkdtemp(prefix="postbus-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a Postgres: `make test-fast` leaves them out.

    The file of Spark comes first, then those that kill processes, since they take the longest: a
    run of several workers ends when the last one does.
    """
    for item in items:
        if "postgres_server" in getattr(item, "fixturenames", ()):
            item.add_marker("postgres")
    items.sort(
        key=lambda item: (item.get_closest_marker("jvm") is None, KILLS not in item.path.parents)
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt modules and tests from garbage collection: there are a million of their objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _short_sdk_pauses() -> None:
    shorten_sdk_pauses()


@pytest.fixture(autouse=True)
def _no_context_is_left() -> Iterator[None]:
    """A command that runs in this process names its context to those that it imports."""
    yield
    os.environ.pop("POSTBUS_CONTEXT", None)


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    with temporary_folder() as path:
        yield path


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[EmbeddedPostgres]:
    """Run the server of all tests; POSTBUS_TEST_POSTGRES names its major version."""
    with temporary_folder() as folder:
        yield from run_server(folder)


def run_server(folder: Path) -> Iterator[EmbeddedPostgres]:
    major = int(os.environ.get("POSTBUS_TEST_POSTGRES", "16"))
    server = EmbeddedPostgres(folder / "postgres", major=major)
    server.start()
    try:
        make_database(server, TEMPLATE)
        run_elsewhere(lambda: make_tables(dsn_of(server, TEMPLATE)))
        yield server
    finally:
        server.stop()


@pytest.fixture
def database(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    """Return the connection string of a fresh database with the tables of partition 0."""
    name = f"test_{next(DATABASE_NUMBERS)}"
    make_database(postgres_server, name, template=TEMPLATE)
    yield dsn_of(postgres_server, name)
    run_psql(postgres_server, f"drop database {name} with (force)")


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    opened = Store(database)
    yield opened
    await opened.close()


async def make_tables(dsn: str) -> None:
    store = Store(dsn)
    await make_partition(store, 0)
    await store.close()


def dsn_of(server: EmbeddedPostgres, database: str) -> str:
    return server.dsn.replace("@/postgres?", f"@/{database}?")


def make_database(server: EmbeddedPostgres, name: str, template: str = "template0") -> None:
    run_psql(server, f"create database {name} template {template}")


@functools.cache
def psql_of(version: int) -> Path:
    binaries = find_binaries(version)
    assert binaries is not None
    assert major_of(binaries) == version
    return binaries / "psql"


def run_psql(server: EmbeddedPostgres, sql: str) -> str:
    """Run one statement with the client program of the server's own version."""
    version = int((server.folder / "data" / "PG_VERSION").read_text())
    command = [str(psql_of(version)), "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql]
    host = unquote(server.dsn.split("host=")[1])
    command += ["-h", host, "-U", SUPERUSER, "postgres"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
