"""The command line as a process: messages, exit codes, start and stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from postbus.process.data_directory import DataDirectory
from postbus.process.embedded import EmbeddedPostgres
from tests.cli.command_line import CommandLine
from tests.dev_bus import FREE_PORTS, LIMIT_S, ROOT, environment

EXAMPLES = ROOT / "examples"


SHOWN = {"COLUMNS": "200", "POSTBUS_CONTROL_PORT": "0"}
"""Lines are not broken, and a bus meets no other."""


def postbus(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postbus", *arguments],
        env=environment(**{**SHOWN, **variables}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def run_here(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command within this process: enough for all that start no bus."""
    return CommandLine(ROOT).run(*arguments, **{**SHOWN, **variables})


def assert_fails(done: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    """Check for one clear message, the exit code and no traceback."""
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert re.search(words, done.stderr), done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path, unlike `tmp_path`: its server has a socket in it."""
    with tempfile.TemporaryDirectory(prefix="postbus-test-") as name:
        yield Path(name)


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a bus, wait until it prints "ready", and kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "postbus", *arguments],
        env=environment(**{**SHOWN, **variables}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            if line.startswith("ready"):
                break
        else:
            raise AssertionError(process.stderr.read())
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        process.stdout.close()
        process.stderr.close()


# --- without a bus ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", [(), ("dev",), ("serve",), ("check",)])
def test_help_shows_examples_and_exit_codes(command: tuple[str, ...]) -> None:
    done = run_here(*command, "--help")
    assert done.returncode == 0
    assert "postbus dev" in done.stdout or f"postbus {command[0]} " in done.stdout
    assert "Exit codes" in done.stdout


@pytest.mark.slow
def test_examples_are_valid_manifests() -> None:
    done = run_here("check", str(EXAMPLES))
    counts = "3 queues, 1 topic, 3 subscriptions"
    assert (done.returncode, done.stdout) == (0, f"ok example-bus (Standard), {counts}\n")


@pytest.mark.slow
def test_check_warns_of_unlikely_values(tmp_path: Path) -> None:
    for path in EXAMPLES.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    with (tmp_path / "loop.yaml").open("w") as file:
        file.write(LOOP)
    done = run_here("check", str(tmp_path))
    warned, *_ = done.stdout.splitlines()
    circle = "spec.forwardTo: forwarding loop; messages in it will be dead-lettered: loop -> loop"
    assert done.returncode == 0
    assert warned.startswith("warning ")
    assert warned.endswith(f"loop.yaml:8: {circle}")


LOOP = """\
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata:
  name: loop
spec:
  owner:
    name: example-bus
  forwardTo: loop
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dev", "serve", "check"])
def test_wrong_manifest_is_named_with_line_and_field(command: str, folder: Path) -> None:
    path = folder / "bus.yaml"
    text = (EXAMPLES / "queues.yaml").read_text().replace("PT30S", "PT30M")
    path.write_text((EXAMPLES / "namespace.yaml").read_text() + "---\n" + text)
    variables = {"POSTBUS_STORES": "postgresql://localhost:1/x"} if command == "serve" else {}
    run = run_here if command == "check" else postbus
    done = run(command, str(path), **variables)
    assert_fails(done, 4, r"bus\.yaml:\d+: spec\.lockDuration: must be between")


@pytest.mark.slow
def test_invalid_settings_are_refused() -> None:
    assert_fails(postbus("dev", POSTBUS_PORT="many"), 3, "POSTBUS_PORT: input should be a valid")
    assert_fails(postbus("serve"), 3, "POSTBUS_STORES is not set: set it to the URL of a Postgres")
    assert_fails(postbus("dev", "--port", "70000"), 3, "--port: input should be less")
    assert run_here("dev", "--ephemeral", "--data", "x").returncode == 2


@pytest.mark.slow
def test_the_public_emulator_key_is_for_loopback_only(folder: Path) -> None:
    example = str(ROOT / "examples" / "namespace.yaml")
    done = postbus("dev", example, "--data", str(folder / "bus"), "--host", "0.0.0.0", *FREE_PORTS)
    assert_fails(
        done, 3, "host is 0.0.0.0, but the key of .* is the public .*openssl rand -base64 32"
    )


@pytest.mark.slow
def test_data_directory_in_use_is_refused(folder: Path) -> None:
    with DataDirectory(folder / "bus"):
        done = postbus("dev", "--data", str(folder / "bus"), *FREE_PORTS)
    assert_fails(done, 5, f"is in use by process {os.getpid()}")


@pytest.mark.slow
def test_taken_port_is_not_reported_before_the_data_directory(folder: Path) -> None:
    with socket.socket() as taken, DataDirectory(folder / "bus"):
        with suppress(OSError):  # taken by another process: as good
            taken.bind(("127.0.0.1", 9464))
            taken.listen()
        done = postbus("dev", "--data", str(folder / "bus"), "--port", "0")
    assert_fails(done, 5, f"is in use by process {os.getpid()}")
    assert "is taken" not in done.stderr


@pytest.mark.slow
def test_damaged_keys_are_refused(folder: Path) -> None:
    (folder / "keys.json").write_text("{")
    done = postbus("dev", str(ROOT / "examples"), "--data", str(folder), *FREE_PORTS)
    assert_fails(done, 5, r"keys\.json cannot be read")


# --- with a bus ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_cleanly(number: signal.Signals, folder: Path) -> None:
    before = signal.signal(number, signal.SIG_IGN)  # a shell's jobs in the background inherit this
    try:
        with running("dev", "--data", str(folder / "bus"), *FREE_PORTS) as process:
            process.send_signal(number)
            assert process.wait(LIMIT_S) == 0
            assert not (folder / "bus" / "postgres" / "data" / "postmaster.pid").exists()
    finally:
        signal.signal(number, before)


@pytest.mark.slow
def test_ephemeral_bus_leaves_nothing(folder: Path) -> None:
    with running("dev", "--ephemeral", *FREE_PORTS, TMPDIR=str(folder)) as process:
        assert list(folder.glob("postbus-*"))
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    assert list(folder.glob("postbus-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--port", "--tls-port", "--http-port", "--metrics-port"])
def test_port_in_use_is_refused(option: str, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = postbus("dev", "--data", str(folder / "bus"), *FREE_PORTS, option, port)
    assert_fails(done, 5, f"port {port} .*in use")
    assert option != "--port" or "Postgres" not in done.stderr, "nothing is started for it"


@pytest.mark.slow
def test_default_ports_in_use_are_replaced(folder: Path) -> None:
    with (
        running("dev", "--data", str(folder / "a"), "--port", "0"),
        running("dev", "--data", str(folder / "b"), "--port", "0"),
    ):
        first, second = (json.loads((folder / name / "bus.json").read_text()) for name in "ab")
        assert None not in (first["metrics"], second["metrics"])
        assert first["metrics"] != second["metrics"]


@pytest.mark.slow
def test_unusable_certificate_is_refused(folder: Path) -> None:
    (folder / "server.pem").write_text("nothing")
    path = str(folder / "server.pem")
    variables = {"POSTBUS_TLS_CERTIFICATE_FILE": path, "POSTBUS_TLS_KEY_FILE": path}
    done = postbus("dev", "--data", str(folder / "bus"), *FREE_PORTS, **variables)
    assert_fails(done, 5, r"the certificate \S+ with the key \S+ cannot be used: ")


# --- with trouble in Postgres -------------------------------------------------------------------


def execute(dsn: str, *statements: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(dsn)
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    asyncio.run(run())


def served(folder: Path, stores: str) -> subprocess.CompletedProcess[str]:
    return postbus("serve", "--data", str(folder), *FREE_PORTS, POSTBUS_STORES=stores)


@pytest.mark.slow
def test_invalid_database_address_is_refused(folder: Path) -> None:
    assert_fails(served(folder, "db.example.org"), 3, "POSTBUS_STORES: .*postgresql://")


@pytest.mark.slow
def test_missing_database_is_refused(folder: Path, postgres_server: EmbeddedPostgres) -> None:
    done = served(folder, postgres_server.dsn.replace("/postgres?", "/absent?"))
    assert_fails(done, 6, 'database "absent" does not exist')


@pytest.mark.slow
def test_postgres_without_rights_is_refused(folder: Path, database: str) -> None:
    execute(database, "drop role if exists weak", "create role weak login")
    done = served(folder, database.replace("//postbus@", "//weak@"))
    assert_fails(done, 6, "permission denied")


@pytest.fixture
def guarded_server(folder: Path) -> Iterator[EmbeddedPostgres]:
    """Run a server that asks for passwords, with a role `guest`, and does without fsync."""
    server = EmbeddedPostgres(folder / "postgres", settings={"fsync": "off"})
    server.start()
    execute(server.dsn, "create role guest login password 'right'")
    hba = folder / "postgres" / "pg_hba.conf"
    hba.write_text("local all postbus trust\nlocal all all scram-sha-256\n")
    execute(server.dsn, "select pg_reload_conf()")
    yield server
    server.stop()


@pytest.mark.slow
def test_wrong_password_and_missing_fsync_are_refused(
    folder: Path, guarded_server: EmbeddedPostgres
) -> None:
    done = served(folder / "bus", guarded_server.dsn.replace("//postbus@", "//guest:hidden@"))
    assert_fails(done, 6, 'password authentication failed for user "guest"')
    assert "hidden" not in done.stderr + done.stdout
    assert_fails(served(folder / "bus", guarded_server.dsn), 6, "fsync=off.*--unsafe")


PREMIUM = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: local-bus}
spec: {sku: {name: Premium, capacity: 1}, premiumMessagingPartitions: 4}
"""


@pytest.mark.slow
def test_another_number_of_partitions_than_the_stores_is_refused(
    folder: Path, database: str
) -> None:
    arguments = ("serve", "--data", str(folder / "bus"), *FREE_PORTS)
    with running(*arguments, POSTBUS_STORES=database) as process:
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    (folder / "bus.yaml").write_text(PREMIUM)
    done = postbus(*arguments, str(folder / "bus.yaml"), POSTBUS_STORES=database)
    assert_fails(done, 6, "16 partitions, fixed at its creation, not 4.*use a new database")


@pytest.mark.slow
def test_newer_schema_is_refused(folder: Path, database: str) -> None:
    with running("serve", "--data", str(folder), *FREE_PORTS, POSTBUS_STORES=database) as process:
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    execute(database, "insert into postbus.migration (number, name) values (9999, 'later')")
    assert_fails(served(folder, database), 6, "version 9999.*run the newer version")


@pytest.mark.slow
def test_postgres_that_may_lose_messages_is_refused_unless_unsafe(
    folder: Path, database: str
) -> None:
    name = urlsplit(database).path[1:]
    execute(database, f"alter database {name} set synchronous_commit = off")
    assert_fails(served(folder, database), 6, "synchronous_commit=off.*--unsafe")
