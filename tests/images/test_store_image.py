"""The program of the store image, on Debian's Postgres: start, Secrets, refusals, stop."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import asyncpg
import pytest

from postbus.edge.certificates import ensure_certificate
from postbus.store.postgres import Store
from store_image.postbus_store import (
    BINARIES,
    MAJOR,
    RESERVE_BYTES,
    ROOM_BYTES,
    UNUSABLE,
    Volume,
    buffer_bytes,
    is_verifier_of,
    scram_verifier,
)
from tests.ports import free_ports

SOURCE = Path(__file__).resolve().parent.parent.parent / "operator" / "store_image"
LIMIT_S = 60.0
PASSWORD = "first-password"

needs_postgres = pytest.mark.skipif(
    not (BINARIES / "postgres").exists(), reason=f"Debian's postgresql-{MAJOR} is not installed"
)


def account() -> tuple[int, int]:
    """Return the user that runs the server: Postgres refuses root."""
    if os.geteuid():
        return os.geteuid(), os.getegid()
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


class StorePod:
    """Folders as a pod mounts them, and the processes that tests start on them."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.volume, self.sockets = top / "volume", top / "run"
        self.tls, self.auth = top / "tls", top / "auth"
        self.data = self.volume / str(MAJOR) / "data"
        [self.port] = free_ports(1)
        self.log = top / "log"
        self.uid, self.gid = account()
        for folder in (self.volume, self.sockets, self.tls, self.auth):
            folder.mkdir()
        # Others than the owner of a checkout may not be able to read it.
        shutil.copytree(SOURCE, top / "image", ignore=shutil.ignore_patterns("__pycache__"))
        self.use_certificate("first")
        self.set_password(PASSWORD)
        self.wrapper: list[str] = []
        """Command that runs another one in surroundings of its own."""
        self.become: list[str] = []
        """The same for the account."""
        if os.geteuid() == 0:
            self.become = [
                "setpriv",
                f"--reuid={self.uid}",
                f"--regid={self.gid}",
                "--clear-groups",
            ]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._give()

    def _give(self) -> None:
        if os.geteuid() == 0:
            for parent, folders, files in os.walk(self.top):
                for name in (".", *folders, *files):
                    os.chown(Path(parent, name), self.uid, self.gid)

    def use_certificate(self, name: str) -> None:
        """Install the certificate of an authority; files change in one step, as in a Secret."""
        made = ensure_certificate(self.top / "authorities" / name)
        for source, target in ((made.certificate_file, "tls.crt"), (made.key_file, "tls.key")):
            self.install(source.read_bytes(), self.tls / target)

    def set_password(self, text: str) -> None:
        self.install(text.encode(), self.auth / "password")

    def install(self, content: bytes, target: Path) -> None:
        made = target.with_suffix(".new")
        made.write_bytes(content)
        made.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(made, self.uid, self.gid)
        made.replace(target)

    # --- processes --------------------------------------------------------------------------------

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable if os.geteuid() else "/usr/bin/python3",
            str(self.top / "image" / "postbus_store.py"),
            "--max-connections=20", "--shared-buffers=16MB",
            f"--volume={self.volume}", f"--tls-folder={self.tls}", f"--auth-folder={self.auth}",
            f"--socket-folder={self.sockets}", "--listen-addresses=127.0.0.1",
            f"--port={self.port}", "--poll-s=0.1", *more,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*self.wrapper, *self.become, *command],
                cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def started(self) -> subprocess.Popen[bytes]:
        (self.sockets / "prepared").unlink(missing_ok=True)  # of one that was killed
        process = self.start()
        self.wait_until(lambda: self.is_prepared or process.poll() is not None)
        assert process.poll() is None, self.logged
        return process

    def stopped(self, process: subprocess.Popen[bytes]) -> int:
        process.terminate()
        return process.wait(LIMIT_S)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                self.stopped(process)

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not is_true():
            assert time.monotonic() < end, self.logged
            time.sleep(0.02)

    @contextmanager
    def other_process(self) -> Iterator[int]:
        """Run a process of the same user; yield its number."""
        with subprocess.Popen([*self.become, "sleep", "600"]) as other:
            yield other.pid
            other.kill()

    # --- observations -----------------------------------------------------------------------------

    @property
    def is_prepared(self) -> bool:
        return (self.sockets / "prepared").exists()

    @property
    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def control_data(self) -> str:
        return subprocess.run(
            [BINARIES / "pg_controldata", self.data], capture_output=True, text=True, check=True
        ).stdout

    @property
    def postmaster(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def trusting(self, name: str = "first") -> ssl.SSLContext:
        made = ensure_certificate(self.top / "authorities" / name)
        return ssl.create_default_context(cafile=made.authority_file)

    async def connect(
        self, password: str = PASSWORD, authority: str = "first", **options: object
    ) -> asyncpg.Connection:
        return await asyncpg.connect(
            **{
                "host": "localhost", "port": self.port, "user": "postbus", "password": password,
                "database": "postbus", "ssl": self.trusting(authority), "timeout": LIMIT_S,
                **options,
            }
        )  # fmt: skip

    async def accepts(self, password: str = PASSWORD, authority: str = "first") -> bool:
        try:
            connection = await self.connect(password, authority)
        except (asyncpg.PostgresError, OSError):
            return False
        await connection.close()
        return True

    async def wait_executed(self, statement: str) -> object:
        """Return the value of a statement, which is repeated while the server recovers."""
        end = time.monotonic() + LIMIT_S
        while True:
            try:
                connection = await self.connect()
                value = await connection.fetchval(statement)
                await connection.close()
                return value
            except (asyncpg.PostgresError, OSError):
                assert time.monotonic() < end, self.logged
                await asyncio.sleep(0.02)

    async def wait_accepts(self, password: str = PASSWORD, authority: str = "first") -> None:
        end = time.monotonic() + LIMIT_S
        while not await self.accepts(password, authority):
            assert time.monotonic() < end, self.logged
            await asyncio.sleep(0.02)


@contextmanager
def new_pod() -> Iterator[StorePod]:
    folder = Path(tempfile.mkdtemp(prefix="postbus-store-"))
    folder.chmod(0o755)
    pod = StorePod(folder)
    try:
        yield pod
    finally:
        pod.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pod() -> Iterator[StorePod]:
    with new_pod() as made:
        yield made


@pytest.fixture(scope="module")
def running() -> Iterator[StorePod]:
    """A store that runs for the tests which leave it as it is."""
    with new_pod() as made:
        made.started()
        yield made


# --- what it serves -----------------------------------------------------------------------------


@needs_postgres
@pytest.mark.slow
async def test_a_bus_accepts_the_store(running: StorePod) -> None:
    """It makes its tables there, and finds a server that loses nothing."""
    authority = ensure_certificate(running.top / "authorities" / "first").authority_file
    dsn = (
        f"postgresql://postbus:{PASSWORD}@localhost:{running.port}/postbus"
        f"?sslmode=verify-full&sslrootcert={authority}"
    )
    store = Store(dsn)
    await store.open()
    await store.close()


@needs_postgres
@pytest.mark.slow
async def test_server_is_durable_and_compares_bytes(running: StorePod) -> None:
    connection = await running.connect()
    settings = {
        name: await connection.fetchval(f"show {name}")
        for name in (
            "fsync", "full_page_writes", "synchronous_commit", "data_checksums",
            "server_encoding", "max_connections", "shared_buffers", "password_encryption",
        )
    }  # fmt: skip
    assert settings == {
        "fsync": "on", "full_page_writes": "on", "synchronous_commit": "on",
        "data_checksums": "on", "server_encoding": "UTF8", "max_connections": "20",
        "shared_buffers": "16MB", "password_encryption": "scram-sha-256",
    }  # fmt: skip
    row = await connection.fetchrow(
        "select datcollate, datctype, pg_get_userbyid(datdba) as owner, rolsuper, rolcreaterole"
        " from pg_database, pg_roles where datname = 'postbus' and rolname = 'postbus'"
    )
    assert tuple(row) == ("C", "C", "postbus", False, False)
    await connection.close()


@needs_postgres
@pytest.mark.slow
async def test_network_needs_tls_the_password_and_the_role_of_the_bus(running: StorePod) -> None:
    assert not await running.accepts("wrong")
    with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError, match="no encryption"):
        await running.connect(ssl=False)
    with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError, match="no pg_hba"):
        await running.connect(user="postgres")
    with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError, match="no pg_hba"):
        await running.connect(database="postgres")
    assert (running.sockets / f".s.PGSQL.{running.port}").stat().st_mode & 0o777 == 0o700


# --- start --------------------------------------------------------------------------------------


@needs_postgres
@pytest.mark.slow
async def test_remains_of_a_killed_first_start_and_of_the_file_system_do_not_matter(
    pod: StorePod,
) -> None:
    (pod.volume / "lost+found").mkdir(mode=0o000)
    making = pod.data.with_name("data.making")
    making.mkdir(parents=True)
    (making / "PG_VERSION").write_text("15\n")
    pod._give()
    pod.started()
    assert await pod.accepts()
    assert not making.exists()


@needs_postgres
@pytest.mark.slow
async def test_the_first_start_refuses_no_login(pod: StorePod) -> None:
    """A bus waits for a server that is away, but not for one that does not know it."""
    process = pod.start()
    while process.poll() is None:
        try:
            connection = await pod.connect()
        except (asyncpg.CannotConnectNowError, OSError):
            await asyncio.sleep(0)
        else:
            await connection.close()
            break
    assert process.poll() is None, pod.logged


@needs_postgres
@pytest.mark.slow
def test_data_of_another_major_version_is_left_alone(pod: StorePod) -> None:
    former = pod.volume / "14" / "data"
    former.mkdir(parents=True)
    (former / "PG_VERSION").write_text("14\n")
    pod._give()
    assert pod.start().wait(LIMIT_S) == UNUSABLE
    (line,) = pod.logged.splitlines()
    assert f"{former} was made by Postgres 14, this image runs 15" in line
    assert "pg_upgrade" in line
    assert not pod.data.exists()


@needs_postgres
@pytest.mark.slow
async def test_a_group_that_fs_group_gave_all_rights_does_not_matter(pod: StorePod) -> None:
    """Postgres refuses a folder that its group may write."""
    pod.stopped(pod.started())
    pod.data.chmod(0o2770)
    pod.started()
    assert await pod.accepts()


@needs_postgres
@pytest.mark.slow
async def test_a_killed_server_recovers_although_its_number_is_taken(pod: StorePod) -> None:
    """A new container has few numbers: that of the former server soon belongs to another."""
    process = pod.started()
    connection = await pod.connect()
    await connection.execute("create table kept as select 7 as value")
    connection.terminate()
    os.kill(pod.postmaster, signal.SIGKILL)
    assert process.wait(LIMIT_S) != 0
    with pod.other_process() as number:
        for path in (pod.data / "postmaster.pid", pod.sockets / f".s.PGSQL.{pod.port}.lock"):
            _, _, rest = path.read_text().partition("\n")
            path.write_text(f"{number}\n{rest}")
        pod.started()
    connection = await pod.connect()
    assert await connection.fetchval("select value from kept") == 7
    await connection.close()


@needs_postgres
@pytest.mark.slow
async def test_a_second_pod_on_the_volume_waits_until_the_first_ends(pod: StorePod) -> None:
    first = pod.started()
    second = pod.start()
    pod.wait_until(lambda: "waiting: another server uses" in pod.logged)
    assert await pod.accepts()
    third = pod.start()
    pod.wait_until(lambda: pod.logged.count("waiting: another server uses") == 2)
    assert pod.stopped(third) == 0
    assert pod.stopped(first) == 0
    pod.wait_until(lambda: pod.is_prepared)
    assert await pod.accepts()
    assert second.poll() is None


@needs_postgres
@pytest.mark.slow
async def test_stop_during_the_first_start_leaves_no_part_of_a_cluster(pod: StorePod) -> None:
    process = pod.start()
    pod.wait_until(lambda: "making a cluster" in pod.logged)
    assert pod.stopped(process) == 0
    assert not pod.data.exists() or "starting PostgreSQL" in pod.logged  # the stop came too late
    pod.started()
    assert await pod.accepts()


@needs_postgres
@pytest.mark.slow
def test_a_volume_that_cannot_be_written_is_named(pod: StorePod) -> None:
    pod.volume.chmod(0o500)
    assert pod.start().wait(LIMIT_S) == UNUSABLE
    assert f"mount a volume at {pod.volume} that user {pod.uid} may write" in pod.logged


@needs_postgres
@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "no password"), (b"\xff", "cannot be read"), ("käse".encode(), "printable ASCII")],
)
def test_a_password_that_no_client_could_send_is_refused(
    pod: StorePod, content: bytes, complaint: str
) -> None:
    pod.install(content, pod.auth / "password")
    assert pod.start().wait(LIMIT_S) == UNUSABLE
    assert complaint in pod.logged


@needs_postgres
@pytest.mark.slow
def test_a_key_of_another_certificate_is_refused(pod: StorePod) -> None:
    other = ensure_certificate(pod.top / "authorities" / "other")
    pod.install(other.key_file.read_bytes(), pod.tls / "tls.key")
    assert pod.start().wait(LIMIT_S) == UNUSABLE
    assert "tls.crt and tls.key cannot be used" in pod.logged


# --- while it runs ------------------------------------------------------------------------------


@needs_postgres
@pytest.mark.slow
async def test_a_changed_password_needs_no_restart(pod: StorePod) -> None:
    pod.started()
    connection = await pod.connect()
    pod.set_password("second")
    await pod.wait_accepts("second")
    assert not await pod.accepts()
    assert await connection.fetchval("select 1") == 1
    await connection.close()
    assert "second" not in pod.logged
    assert PASSWORD not in pod.logged


@needs_postgres
@pytest.mark.slow
async def test_a_password_that_changed_while_the_store_was_away_is_set_at_the_start(
    pod: StorePod,
) -> None:
    pod.stopped(pod.started())
    pod.set_password("second\n")
    pod.started()
    assert await pod.accepts("second")
    assert not await pod.accepts()


@needs_postgres
@pytest.mark.slow
async def test_a_changed_certificate_needs_no_restart(pod: StorePod) -> None:
    pod.started()
    connection = await pod.connect()
    pod.use_certificate("second")
    await pod.wait_accepts(authority="second")
    assert await connection.fetchval("select 1") == 1
    await connection.close()


@needs_postgres
@pytest.mark.slow
async def test_garbage_in_a_secret_leaves_the_former_one_in_use(pod: StorePod) -> None:
    pod.started()
    pod.install(b"garbage", pod.tls / "tls.crt")
    pod.install(b"", pod.auth / "password")
    pod.wait_until(lambda: "cannot be used" in pod.logged and "has no password" in pod.logged)
    assert await pod.accepts()
    pod.use_certificate("second")
    await pod.wait_accepts(authority="second")
    assert pod.logged.count("cannot be used") == 1


@needs_postgres
@pytest.mark.slow
async def test_stop_ends_sessions_and_shuts_down_in_order(pod: StorePod) -> None:
    process = pod.started()
    connection = await pod.connect()
    assert pod.stopped(process) == 0
    assert not pod.is_prepared
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await connection.fetchval("select 1")
    assert re.search(r"cluster state: +shut down$", pod.control_data(), re.MULTILINE)


@needs_postgres
@pytest.mark.slow
def test_a_start_that_changes_nothing_writes_nothing(pod: StorePod) -> None:
    """A full volume must not keep receivers from their messages."""
    pod.stopped(pod.started())
    pod.stopped(pod.started())
    assert "the password has changed" not in pod.logged


@needs_postgres
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a small volume is mounted by root only")
async def test_a_full_volume_refuses_rows_and_loses_none(pod: StorePod) -> None:
    """Postgres ends in panic when its log finds no room; the reserve lets it recover each time."""
    mount = f"mount -t tmpfs -o size=300m,mode=777 tmpfs {pod.volume}"
    pod.wrapper = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    process = pod.started()
    await pod.wait_executed("create table rows (number bigint, filler text)")
    stored = 0
    for _ in range(3):
        await pod.wait_accepts()
        connection = await pod.connect()
        with suppress(asyncpg.PostgresError, OSError):
            while True:
                await connection.execute(
                    "insert into rows select g, repeat('x', 900) from generate_series(1, 2000) g"
                )
                stored += 2000
        connection.terminate()
        assert await pod.wait_executed("select count(*) from rows") == stored
    assert stored > 50_000
    assert process.poll() is None
    await pod.wait_executed("drop table rows")
    await pod.wait_executed("create table more as select 1")


# --- without a server ---------------------------------------------------------------------------


def test_verifier_is_the_one_of_the_standard() -> None:
    """Salt and password of RFC 7677; the keys as Postgres makes them."""
    verifier = scram_verifier("pencil", b"[m\x99h\x9d\x125\x8e\xec\xa0K\x14\x126\xfa\x81")
    assert verifier.startswith("SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$")
    assert is_verifier_of("pencil", verifier)
    assert not is_verifier_of("pencils", verifier)
    assert not is_verifier_of("pencil", "md5d41d8cd98f00b204e9800998ecf8427e")
    assert not is_verifier_of("pencil", "-")


class SmallVolume(Volume):
    """A volume whose free space a test sets."""

    free = 0

    def free_bytes(self) -> int:
        return self.free


def test_reserve_takes_the_room_there_is_and_is_given_back_when_the_volume_is_full(
    tmp_path: Path,
) -> None:
    volume = SmallVolume(tmp_path)
    volume.make_home()
    volume.free = ROOM_BYTES
    volume.fill_reserve()
    assert not volume.reserve.exists()
    volume.free = ROOM_BYTES + 5_000_000
    volume.fill_reserve()
    assert volume.reserve.stat().st_size == 5_000_000
    volume.free = 10 * RESERVE_BYTES
    volume.fill_reserve()
    assert volume.reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    volume.free = RESERVE_BYTES
    assert not volume.release_reserve()
    assert volume.reserve.stat().st_size == RESERVE_BYTES
    volume.free = RESERVE_BYTES - 1
    assert volume.release_reserve()
    assert not volume.reserve.exists()
    assert not volume.release_reserve()


@pytest.mark.parametrize(
    ("limit", "buffers"),
    [
        ("1073741824\n", 256 << 20),
        ("67108864\n", 32 << 20),
        ("1099511627776\n", 4 << 30),
        ("max\n", 256 << 20),
        ("9223372036854771712\n", 256 << 20),
    ],
    ids=["1Gi", "64Mi", "1Ti", "none", "none in version 1"],
)
def test_buffers_are_a_quarter_of_the_memory_limit(
    tmp_path: Path, limit: str, buffers: int
) -> None:
    (tmp_path / "limit").write_text(limit)
    assert buffer_bytes([tmp_path / "missing", tmp_path / "limit"]) == buffers
    assert buffer_bytes([tmp_path / "missing"]) == 256 << 20


def test_data_moved_by_pg_upgrade_is_used_although_the_former_is_still_there(
    tmp_path: Path,
) -> None:
    for major in (14, 15):
        (tmp_path / str(major) / "data").mkdir(parents=True)
        (tmp_path / str(major) / "data" / "PG_VERSION").write_text(f"{major}\n")
    Volume(tmp_path).check_version()
