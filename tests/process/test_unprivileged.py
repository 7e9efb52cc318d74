"""Postgres refuses root; root runs it unprivileged, in any folder, closed to others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from postbus.process.embedded import DEFAULT_MAJOR, EmbeddedPostgres, find_binaries
from postbus.process.unprivileged import run_as
from tests.conftest import run_psql
from tests.store import confined

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up"),
]

USE_SERVER = """
import os, socket, struct, sys
from urllib.parse import unquote
from postbus.process.embedded import EmbeddedError, EmbeddedPostgres
from tests.conftest import run_psql
server = EmbeddedPostgres(sys.argv[1])
try:
    server.start()
except EmbeddedError as error:
    print(error)
    sys.exit(1)
try:
    print(run_psql(server, "select current_user"))
    account = os.stat(f"{sys.argv[1]}/data").st_uid
    print(account, flush=True)
    address = unquote(server.dsn.split("host=")[1]) + "/.s.PGSQL.5432"
    child = os.fork()
    if not child:  # another program of the account
        try:
            os.setgid(account)
            os.setuid(account)
            said = b"user\\0postbus\\0database\\0postgres\\0\\0"
            client = socket.socket(socket.AF_UNIX)
            client.connect(address)
            client.sendall(struct.pack(">ii", len(said) + 8, 196608) + said)
            answer = client.recv(1000).decode(errors="replace")
            print(answer.replace("\\0", "\\n"), flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
finally:
    server.stop()
"""

CHOOSE = """
import pathlib, sys
from postbus.process.unprivileged import run_as
program = pathlib.Path(sys.argv[1])
print("shared" if run_as(program, program).is_shared else "own")
"""

CHOOSE_WITH_FORK_HANDLER = """
import os, pathlib, sys, threading
from postbus.process.embedded import DEFAULT_MAJOR, find_binaries
from postbus.process.unprivileged import run_as
program = find_binaries(DEFAULT_MAJOR) / "postgres"
pause = threading.Event()
os.register_at_fork(
    after_in_child=lambda: threading.Thread(target=pause.wait, daemon=True).start()
)
way = run_as(program, pathlib.Path(sys.argv[1]))
print("shared" if way.is_shared else "own")
"""


@pytest.fixture
def folder(server_folder: Path, tmp_path: Path) -> Path:
    """Return a folder below one that only root may enter."""
    assert server_folder.stat().st_mode & 0o077 == 0
    return server_folder / tmp_path.name


def run_in(kind: str, program: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, confined.__file__, kind, sys.executable, "-c", program, str(path)]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == confined.CANNOT:
        pytest.skip("this machine lets no such root be made")
    return done


def used_in(kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_in(kind, USE_SERVER, folder)


@pytest.fixture
def _namespaces(folder: Path) -> None:
    binaries = find_binaries(DEFAULT_MAJOR)
    assert binaries is not None
    if run_as(binaries / "postgres", folder).is_shared:
        pytest.skip("this machine makes no user namespaces, as in a chroot")


@pytest.mark.usefixtures("_namespaces")
def test_in_a_namespace_files_stay_those_of_root(folder: Path) -> None:
    server = EmbeddedPostgres(folder)
    server.start()
    try:
        assert run_psql(server, "select current_user") == "postbus"
        assert (folder / "data").stat().st_uid == 0
    finally:
        server.stop()


@pytest.mark.usefixtures("_namespaces")
def test_fork_handlers_that_start_threads_keep_no_namespace_away(folder: Path) -> None:
    """OpenTelemetry has one; the kernel refuses a namespace to a process with threads."""
    command = [sys.executable, "-c", CHOOSE_WITH_FORK_HANDLER, str(folder)]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "own\n", done


def test_without_namespaces_the_account_reaches_a_closed_folder_and_is_not_trusted(
    folder: Path,
) -> None:
    folder.parent.chmod(0o711)  # so that another program of the account comes as far as the socket
    try:
        done = used_in("container", folder)
    finally:
        folder.parent.chmod(0o700)
    user, owner, *answer = done.stdout.splitlines()
    assert (user, owner != "0") == ("postbus", True), done
    assert 'MPeer authentication failed for user "postbus"' in answer, done


def test_without_namespaces_a_program_may_be_closed_to_others(folder: Path) -> None:
    """Installed with umask 077, as root's files often are; initdb asks access(2)."""
    folder.mkdir()
    program = folder / "postgres"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    done = run_in("container", CHOOSE, program)
    assert done.stdout == "shared\n", done


def test_data_follows_from_one_way_to_the_other(folder: Path) -> None:
    assert used_in("container", folder).returncode == 0
    server = EmbeddedPostgres(folder)
    server.start()
    try:
        assert run_psql(server, "select current_user") == "postbus"
        assert {each.stat().st_uid for each in folder.rglob("*")} == {0}
    finally:
        server.stop()
    assert used_in("container", folder).stdout.splitlines()[0] == "postbus"


def test_folder_of_another_user_is_reached_too(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 1234, 1234)
    server = EmbeddedPostgres(folder / "bus")
    server.start()
    try:
        assert run_psql(server, "select 1") == "1"
        assert (folder / "bus" / "data").stat().st_uid not in {0, 1234}
    finally:
        server.stop()


def test_root_that_cannot_change_its_user_gets_instructions(folder: Path) -> None:
    done = used_in("lone", folder)
    assert done.returncode == 1
    assert "--user 1000" in done.stdout
    assert "POSTBUS_STORES" in done.stdout


def test_a_program_that_cannot_be_run_is_named(folder: Path) -> None:
    with pytest.raises(Exception, match="/nowhere is closed to it"):
        run_as(Path("/nowhere"), folder)
