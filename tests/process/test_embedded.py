"""The Postgres of our own: one user, one major version, durable, gone with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postbus.process import embedded as embedded_module
from postbus.process.embedded import (
    SOCKET_PATH_BYTES,
    EmbeddedError,
    EmbeddedPostgres,
    ServerInUse,
    VersionMismatch,
    find_binaries,
    major_of,
)
from tests.conftest import run_psql

pytestmark = pytest.mark.slow

REACH_FOLDERS = 1 << 1
"""CAP_DAC_OVERRIDE: all that a server keeps which root started, and only where it has to."""

MAJORS = [major for major in (16, 18) if find_binaries(major) is not None]


@pytest.fixture
def folder(server_folder: Path, tmp_path: Path) -> Path:
    return server_folder / f"embedded-{tmp_path.name}"


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedPostgres]:
    made = EmbeddedPostgres(folder)
    yield made
    made.stop()


def wait_until(is_true: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("major", MAJORS)
def test_server_is_durable_private_and_unprivileged(folder: Path, major: int) -> None:
    server = EmbeddedPostgres(folder, major=major)
    server.start()
    try:
        for name, value in {
            "fsync": "on",
            "full_page_writes": "on",
            "synchronous_commit": "on",
            "data_checksums": "on",
            "listen_addresses": "",
            "server_encoding": "UTF8",
        }.items():
            assert run_psql(server, f"show {name}") == value
        socket_folder = Path(server.dsn.split("host=")[1])
        assert socket_folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "data").stat().st_mode & 0o777 == 0o700
        status = Path(f"/proc/{server.pid}/status").read_text()
        capabilities = int(status.split("CapEff:")[1].split()[0], 16)
        assert capabilities & ~REACH_FOLDERS == 0
    finally:
        server.stop()


@pytest.mark.slow
def test_data_survives_stop_and_start(server: EmbeddedPostgres) -> None:
    server.start()
    run_psql(server, "create table kept (id int)")
    pid = server.pid
    server.stop()
    assert not is_running(pid)
    server.start()
    assert run_psql(server, "select count(*) from kept") == "0"
    assert "was not properly shut down" not in server.log_path.read_text()


@pytest.mark.slow
def test_restart_after_kill_nine_keeps_the_address_and_the_data(server: EmbeddedPostgres) -> None:
    server.start()
    dsn = server.dsn
    run_psql(server, "create table kept (id int)")
    os.kill(server.pid, signal.SIGKILL)
    server.restart()
    assert server.dsn == dsn
    assert run_psql(server, "select count(*) from kept") == "0"


@pytest.mark.slow
def test_second_user_of_a_folder_gets_the_owners_pid(
    server: EmbeddedPostgres, folder: Path
) -> None:
    server.start()
    with pytest.raises(ServerInUse, match=f"process {os.getpid()}"):
        EmbeddedPostgres(folder).start()
    assert run_psql(server, "select 1") == "1"
    server.stop()
    other = EmbeddedPostgres(folder)
    other.start()
    other.stop()


OWNER = """
import sys, time
from postbus.process.embedded import EmbeddedPostgres
server = EmbeddedPostgres(sys.argv[1])
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_server_ends_with_its_owner_and_leaves_the_folder_to_the_next(folder: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
        owner.wait()
        next_one = EmbeddedPostgres(folder)
        next_one.start()  # waits for the old server to leave
    wait_until(lambda: not is_running(pid))
    assert run_psql(next_one, "select 1") == "1"
    next_one.stop()
    assert "was not properly shut down" not in (folder / "server.log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(len(MAJORS) < 2, reason="needs two major versions")
def test_data_of_another_major_version_is_refused_with_the_way_out(folder: Path) -> None:
    first = EmbeddedPostgres(folder, major=MAJORS[0])
    first.start()
    first.stop()
    with pytest.raises(VersionMismatch, match="pg_upgrade"):
        EmbeddedPostgres(folder, major=MAJORS[1]).start()
    same = EmbeddedPostgres(folder)  # follows the data
    same.start()
    same.stop()


@pytest.mark.slow
def test_data_of_a_version_that_is_not_installed_is_refused(
    server: EmbeddedPostgres, folder: Path
) -> None:
    server.start()
    server.stop()
    (folder / "data" / "PG_VERSION").write_text("11\n")
    with pytest.raises(VersionMismatch, match="install postgresql-11"):
        EmbeddedPostgres(folder).start()


def test_missing_binaries_are_named(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match="postgresql-99"):
        EmbeddedPostgres(folder, major=99).start()


@pytest.mark.slow
def test_half_made_cluster_is_made_again(server: EmbeddedPostgres, folder: Path) -> None:
    (folder / "data.making").mkdir(parents=True)
    (folder / "data.making" / "PG_VERSION").write_text("16\n")
    (folder / "lock").touch()
    server.start()
    assert run_psql(server, "select 1") == "1"


@pytest.mark.slow
def test_long_path_gets_a_socket_elsewhere(server_folder: Path, tmp_path: Path) -> None:
    server = EmbeddedPostgres(server_folder / tmp_path.name / ("deep" * 25))
    server.start()
    socket_folder = Path(server.dsn.split("host=")[1])
    assert run_psql(server, "select 1") == "1"
    server.stop()
    assert not socket_folder.exists()


@pytest.mark.slow
def test_server_that_does_not_start_shows_its_log(folder: Path) -> None:
    server = EmbeddedPostgres(folder, settings={"shared_buffers": "nonsense"})
    with pytest.raises(EmbeddedError, match="shared_buffers"):
        server.start()
    with pytest.raises(EmbeddedError, match="not started"):
        _ = server.dsn


def test_unknown_folder_is_left_unchanged(tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "diary").touch()
    with pytest.raises(EmbeddedError, match="not empty"):
        EmbeddedPostgres(strange).start()
    assert [each.name for each in strange.iterdir()] == ["diary"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two words", "Größe, 100%", 'a"b+c&d=e#f'])
def test_folder_may_have_any_name(server_folder: Path, name: str) -> None:
    server = EmbeddedPostgres(server_folder / name)
    server.start()
    assert run_psql(server, "select 1") == "1"
    server.stop()


@pytest.mark.slow
def test_socket_has_a_place_when_the_temporary_folder_is_deep(
    server_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    server = EmbeddedPostgres(server_folder / tmp_path.name / ("deep" * 25))
    server.start()
    assert len(server.dsn.split("host=")[1]) < SOCKET_PATH_BYTES
    assert run_psql(server, "select 1") == "1"
    server.stop()


def test_binaries_print_their_version() -> None:
    binaries = find_binaries(embedded_module.DEFAULT_MAJOR)
    assert binaries is not None
    assert major_of(binaries) == embedded_module.DEFAULT_MAJOR
    with pytest.raises(EmbeddedError):
        major_of(Path("/nowhere"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lock", "server.log", "socket"])
def test_links_in_the_folder_are_not_followed(
    server_folder: Path, tmp_path: Path, name: str
) -> None:
    """The folder may belong to an account that others use, and root writes in it."""
    folder, outside = server_folder / f"links-{tmp_path.name}", tmp_path / "outside"
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    if name == "socket":
        outside.mkdir()
    else:
        outside.write_text("theirs")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises((EmbeddedError, OSError)):
        EmbeddedPostgres(folder).start()
    if name == "socket":
        assert list(outside.iterdir()) == []
    else:
        assert outside.read_text() == "theirs"
