"""A start waits for what may pass by itself and ends for what somebody has to repair.

docs/guides/troubleshooting.md has the table; other rows are in `test_start_waits`,
`test_second_process` and `test_belonging`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from postbus.assembly.bus import Bus, BusError
from postbus.cli.failures import Exit
from postbus.contract.entities import NamespaceProperties
from postbus.edge.certificates import ensure_certificate
from postbus.process.data_directory import DataDirectory
from postbus.process.embedded import EmbeddedPostgres
from postbus.process.settings import Settings
from postbus.store import migrate
from postbus.store import postgres as postgres_module
from tests.assembly.stores_rig import Database, Mount, ask_for_passwords
from tests.assembly.test_start_waits import NOWHERE, serving, status_of
from tests.broker.brokers_rig import PORTS, definition, send
from tests.broker.partition.test_host import until
from tests.conftest import dsn_of, run_psql
from tests.dev_bus import LIMIT_S
from tests.store.driving import wait_until
from tests.store.relay import relaying

pytestmark = pytest.mark.slow

QUEUE = "orders"
NEXT_ADDRESS = "; waiting for another address in POSTBUS_STORES_FILE"


@pytest.fixture(scope="module")
def server(server_folder: Path) -> Iterator[EmbeddedPostgres]:
    made = EmbeddedPostgres(server_folder / "decisions", major=16)
    made.start()
    ask_for_passwords(made)
    yield made
    made.stop()


@pytest.fixture
def database(server: EmbeddedPostgres) -> Database:
    return Database(server)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    (tmp_path / "mount").mkdir()
    return Mount(tmp_path / "mount")


class Start:
    """The start of a bus, and the reasons for which it waits."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.reasons: list[str] = []
        self.task = asyncio.create_task(bus.start(self._note))

    def _note(self, step: str) -> None:
        if step.startswith("waiting for the store: "):
            self.reasons.append(step)

    async def waits_for(self, reason: str) -> None:
        """Wait until it waits for this reason, a pattern; it must not end."""
        await until(lambda: self.task.done() or bool(re.search(reason, self._last)))
        assert not self.task.done(), await self.task

    @property
    def _last(self) -> str:
        return self.reasons[-1] if self.reasons else ""

    async def is_ready(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.task), LIMIT_S)
        await send(self.bus, QUEUE, "accepted")

    async def ends_with(self, words: str, *, is_about_store: bool = True) -> None:
        """Wait for its end with a sentence; exit code 6 if it is about the store, else 5."""
        with pytest.raises(BusError, match=words) as caught:
            await asyncio.wait_for(asyncio.shield(self.task), LIMIT_S)
        assert caught.value.is_about_store is is_about_store
        assert "hidden" not in str(caught.value)


@asynccontextmanager
async def starting(folder: Path, address: str | Mount, **more: object) -> AsyncIterator[Start]:
    """Start a bus with an address or a file of addresses; it is stopped afterwards."""
    where = {"stores": address} if isinstance(address, str) else {"stores_file": address.file}
    values = dict.fromkeys(PORTS, 0) | where | {"grace_s": 1.0} | more
    tier = values.pop("tier", NamespaceProperties())
    assert isinstance(tier, NamespaceProperties)
    defined = replace(definition(QUEUE), properties=tier)
    with DataDirectory(folder / "bus") as data:
        start = Start(Bus(Settings.model_validate(values), defined, data, is_embedded=False))
        try:
            yield start
        finally:
            await start.bus.stop()
            await asyncio.wait({start.task})


# --- what may pass by itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (NOWHERE, "ConnectionRefusedError"),
        ("postgresql://me:hidden@postbus.invalid/bus", "gaierror"),
        ("postgresql:///bus?host=/nowhere", "FileNotFoundError"),
    ],
)
async def test_a_database_that_cannot_be_reached_is_waited_for(
    tmp_path: Path, address: str, reason: str
) -> None:
    async with starting(tmp_path, address) as start:
        await start.waits_for(reason)


async def test_a_database_that_is_starting_up_is_waited_for(
    server_folder: Path, tmp_path: Path
) -> None:
    """As a standby that accepts nobody before it is promoted."""
    server = EmbeddedPostgres(server_folder / "starting", major=16, settings={"hot_standby": "off"})
    server.start()
    server.restart()  # with a clean shutdown before it
    data, dsn = server.folder / "data", dsn_of(server, "postgres")
    owner = data.stat()
    for name in ("standby.signal", "promote"):
        (data.parent / name).touch(mode=0o600)
        os.chown(data.parent / name, owner.st_uid, owner.st_gid)
    await asyncio.to_thread(server.stop)
    os.rename(data.parent / "standby.signal", data / "standby.signal")
    coming = asyncio.create_task(asyncio.to_thread(server.start))
    try:
        async with starting(tmp_path, dsn) as start:
            await start.waits_for("the database system is (starting up|not accepting conn)")
            os.rename(data.parent / "promote", data / "promote")
            os.kill(server.pid, signal.SIGUSR1)
            await coming
            await start.is_ready()
    finally:
        await asyncio.gather(coming, return_exceptions=True)
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize(
    "state", ["08006", "25006", "40001", "40P01", "53100", "53200", "53400", "57014", "58030"]
)
async def test_a_temporary_error_of_the_database_is_waited_for(
    database: Database, tmp_path: Path, state: str
) -> None:
    admin = await asyncpg.connect(dsn_of(database.server, database.name))
    raising = f"begin raise exception 'not now' using errcode = '{state}'; end"
    await admin.execute(
        "create function not_now() returns event_trigger language plpgsql as"
        f" $${raising}$$; create event trigger not_now on ddl_command_start"
        " when tag in ('CREATE SCHEMA') execute function not_now()"
    )
    async with starting(tmp_path, database.dsn) as start:
        await start.waits_for("not now")
        await admin.execute("drop event trigger not_now")
        await start.is_ready()
    await admin.close()


async def test_tables_that_another_process_changes_are_waited_for(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_MS", 100)
    other = await asyncpg.connect(database.dsn)
    await other.execute("select pg_advisory_lock($1)", migrate.MIGRATION_LOCK)
    async with starting(tmp_path, database.dsn) as start:
        await start.waits_for("lock timeout")
        await other.close()
        await start.is_ready()


async def test_a_file_of_an_authority_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    address = f"postgresql://me:hidden@127.0.0.1:1/bus?sslmode=verify-full&sslrootcert={file}"
    async with starting(tmp_path, address) as start:
        await start.waits_for(f"sslrootcert {file} cannot be read: no such file")
        file.write_text("not yet")
        await start.waits_for(f"sslrootcert {file} is not a certificate in PEM form")
        shutil.copy(ensure_certificate(tmp_path / "tls").authority_file, file)
        await start.waits_for("ConnectionRefusedError")


# --- what another address may repair --------------------------------------------------------------


def other_password(database: Database) -> str:
    return database.dsn.replace(f":{database.password}@", ":hidden@")


def absent_role(database: Database) -> str:
    return database.dsn.replace("//bus:", "//absent:")


def rejected_role(database: Database) -> str:
    return database.dsn.replace("//bus:", "//rejected:")


def absent_database(database: Database) -> str:
    return database.dsn.replace(f"/{database.name}?", "/absent?")


REFUSED_ADDRESSES = [
    (other_password, 'password authentication failed for user "bus"'),
    (absent_role, 'role "absent" does not exist'),
    (rejected_role, 'pg_hba.conf rejects connection for host .*, user "rejected"'),
    (absent_database, 'database "absent" does not exist'),
]


@pytest.mark.parametrize(("address", "words"), REFUSED_ADDRESSES)
async def test_a_refused_address_ends_a_start(
    database: Database, tmp_path: Path, address: Callable[[Database], str], words: str
) -> None:
    async with starting(tmp_path, address(database)) as start:
        await start.ends_with(words)


@pytest.mark.parametrize(("address", "words"), REFUSED_ADDRESSES)
async def test_a_refused_address_of_a_file_is_waited_for(
    database: Database,
    mount: Mount,
    tmp_path: Path,
    address: Callable[[Database], str],
    words: str,
) -> None:
    mount.write(address(database))
    async with starting(tmp_path, mount) as start:
        await start.waits_for(f"{words}.*{NEXT_ADDRESS}")
        mount.write(database.dsn)
        await start.is_ready()


async def test_a_server_without_tls_is_waited_for_only_with_a_file(
    database: Database, mount: Mount, tmp_path: Path
) -> None:
    async with relaying(database.dsn, over_tcp=True) as (_, through):
        async with starting(tmp_path, f"{through}&sslmode=require") as start:
            await start.ends_with("rejected SSL upgrade")
        mount.write(f"{through}&sslmode=require")
        async with starting(tmp_path, mount) as start:
            await start.waits_for("rejected SSL upgrade" + NEXT_ADDRESS)
            mount.write(database.dsn)
            await start.is_ready()


async def test_an_unknown_authority_is_waited_for_only_with_a_file(
    database: Database, mount: Mount, tmp_path: Path
) -> None:
    files = ensure_certificate(tmp_path / "tls")
    authority = tmp_path / "ca.pem"
    shutil.copy(ensure_certificate(tmp_path / "other").authority_file, authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate_file, files.key_file)
    async with relaying(database.dsn, tls=context) as (_, through):
        address = f"{through}&sslmode=verify-full&sslrootcert={authority}"
        async with starting(tmp_path, address) as start:
            await start.ends_with("certificate verify failed")
        mount.write(address)
        async with starting(tmp_path, mount) as start:
            await start.waits_for(f"certificate verify failed.*{NEXT_ADDRESS}")
            shutil.copy(files.authority_file, authority)  # the address stays
            await start.is_ready()


async def test_serve_waits_for_another_password_and_serves_health(
    database: Database, mount: Mount, tmp_path: Path
) -> None:
    wrong = other_password(database)
    with serving(tmp_path / "first", POSTBUS_STORES=wrong) as (process, _):
        _, logged = await asyncio.to_thread(process.communicate, None, LIMIT_S)
        assert process.returncode == Exit.STORE
        assert 'password authentication failed for user "bus"' in logged
        assert "hidden" not in logged
    mount.write(wrong)
    with serving(tmp_path / "second", POSTBUS_STORES_FILE=str(mount.file)) as (process, url):
        status, text = await answered(url, "waiting for another address in POSTBUS_STORES_FILE")
        assert (status, process.poll()) == (503, None)
        assert "not ready\nwaiting for the store\n" in text
        mount.write(database.dsn)
        assert await answered(url, "ready") == (200, "ready\n")
        process.send_signal(signal.SIGTERM)
        out, logged = await asyncio.to_thread(process.communicate, None, LIMIT_S)
        assert process.returncode == Exit.OK
        assert "hidden" not in out + logged + text
    mount.write(database.dsn, "hidden")
    with serving(tmp_path / "third", POSTBUS_STORES_FILE=str(mount.file)) as (process, _):
        _, logged = await asyncio.to_thread(process.communicate, None, LIMIT_S)
        assert process.returncode == Exit.SETTINGS
        assert "line 2 is not one address" in logged.replace("\n", " ")
        assert "hidden" not in logged


# --- what somebody has to repair ------------------------------------------------------------------


@pytest.mark.parametrize("has_file", [False, True])
async def test_a_missing_right_ends_a_start(
    database: Database, mount: Mount, tmp_path: Path, has_file: bool
) -> None:
    run_psql(database.server, f"alter database {database.name} owner to postbus")
    mount.write(database.dsn)
    async with starting(tmp_path, mount if has_file else database.dsn) as start:
        await start.ends_with(f"permission denied for database {database.name}")


async def test_a_server_that_is_too_old_ends_a_start(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_module, "MIN_SERVER_VERSION", 990_000)
    async with starting(tmp_path, database.dsn) as start:
        await start.ends_with("Postgres 16 is too old")


async def test_a_server_that_may_lose_messages_ends_a_start(
    database: Database, tmp_path: Path
) -> None:
    run_psql(database.server, f"alter database {database.name} set synchronous_commit = off")
    async with starting(tmp_path, database.dsn) as start:
        await start.ends_with("synchronous_commit=off.*--unsafe")


async def test_newer_tables_and_other_partitions_end_a_start(
    database: Database, tmp_path: Path
) -> None:
    async with starting(tmp_path, database.dsn) as start:
        await start.is_ready()
    premium = NamespaceProperties.model_validate(
        {"sku": {"name": "Premium"}, "premiumMessagingPartitions": 4}
    )
    async with starting(tmp_path, database.dsn, tier=premium) as start:
        await start.ends_with("the namespace has 16 partitions, fixed at its creation, not 4")
    connection = await asyncpg.connect(database.dsn)
    await connection.execute("insert into postbus.migration values (9999, '9999_post_x.sql')")
    await connection.close()
    async with starting(tmp_path, database.dsn) as start:
        await start.ends_with("9999")


@pytest.mark.parametrize("key", ["not base64", None])
async def test_an_unreadable_sealing_key_ends_a_start(
    database: Database, tmp_path: Path, key: str | None
) -> None:
    file = tmp_path / "sealing.key"
    if key is not None:
        file.write_text(key)
    async with starting(tmp_path, database.dsn, sealing_key_file=file) as start:
        await start.ends_with("sealing key cannot be used", is_about_store=False)


async def test_a_port_of_health_in_use_ends_a_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with starting(tmp_path, NOWHERE, metrics_port=port) as start:
            await start.ends_with(f"port {port} on 127.0.0.1 is in use", is_about_store=False)


async def answered(url: str, words: str) -> tuple[int, str]:
    """Return the first answer about readiness that ends a line with these words."""
    found: list[tuple[int, str]] = []

    async def is_answered() -> bool:
        answer = await asyncio.to_thread(status_of, f"{url}/readyz")
        found[:] = [] if answer is None else [answer]
        return any(re.search(f"(^|; ){words}$", text, re.MULTILINE) for _, text in found)

    await wait_until(is_answered)
    return found[0]
