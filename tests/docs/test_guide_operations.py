"""The operations guide: a bus runs with its unit, its settings and its SQL."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import yaml

from postbus.cli.failures import Exit
from postbus.process.embedded import EmbeddedPostgres
from postbus.process.settings import Settings
from postbus.store.errors import (
    FULL_STATES,
    MISCONFIGURED_STATES,
    UNAVAILABLE_STATES,
    StoreError,
    StoreMisconfigured,
    as_store_error,
)
from tests.conftest import run_psql
from tests.dev_bus import FREE_PORTS, LIMIT_S, ROOT, environment
from tests.docs.test_docs import FENCE, check_postbus, check_variable

PAGE = ROOT / "docs" / "guides" / "operations.md"
TROUBLE = ROOT / "docs" / "guides" / "troubleshooting.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [(found[1], found[2]) for found in FENCE.finditer(TEXT)]


def unit() -> configparser.ConfigParser:
    (text,) = (text for language, text in BLOCKS if language == "ini")
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    return parser


def settings_file() -> dict[str, str]:
    (text,) = (text for _, text in BLOCKS if text.startswith("POSTBUS_STORES="))
    return dict(line.split("=", 1) for line in text.splitlines())


def statements() -> list[str]:
    (text,) = (text for language, text in BLOCKS if language == "sql")
    return [each.strip() for each in text.split(";") if each.strip()]


def test_variables_of_the_settings_file_exist() -> None:
    for name in settings_file():
        check_variable(name)


def test_commands_of_the_page_exist() -> None:
    for language, text in BLOCKS:
        for line in text.splitlines():
            words = shlex.split(line)
            if language == "sh" and words[:1] == ["postbus"]:
                check_postbus(words[1:])


def test_the_unit_runs_a_command_that_exists() -> None:
    service = unit()["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program.endswith("/bin/postbus")
    check_postbus(arguments)
    assert float(service["TimeoutStopSec"]) >= Settings().grace_s + 30


def test_the_unit_does_not_restart_after_permanent_errors() -> None:
    codes = unit()["Service"]["RestartPreventExitStatus"].split()
    lasting = (Exit.USAGE, Exit.SETTINGS, Exit.MANIFESTS, Exit.REPLACED)
    assert codes == [str(code.value) for code in lasting]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    (text,) = (text for language, text in BLOCKS if language == "ini")
    path = tmp_path / "postbus.service"
    path.write_text(text.replace("/opt/postbus/bin/postbus", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line for line in done.stderr.splitlines() if "postbus.service" in line]
    assert found == []


@contextmanager
def service_manager(folder: Path) -> Iterator[tuple[str, socket.socket]]:
    """Listen as systemd does."""
    path = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        listening.settimeout(LIMIT_S)
        yield str(path), listening


def next_of(listening: socket.socket, *wanted: str) -> str:
    """Return the next of some assignments, skipping other values."""
    while True:
        for line in listening.recv(4_096).decode().splitlines():
            if line in wanted:
                return line


@pytest.mark.slow
def test_a_bus_runs_on_the_database_of_the_page_as_a_service(
    server_folder: Path, postgres_server: EmbeddedPostgres
) -> None:
    folder = server_folder / "service"
    (folder / "manifests").mkdir(parents=True)
    for name in ("namespace.yaml", "queues.yaml"):
        shutil.copy(ROOT / "examples" / name, folder / "manifests")
    stores = urlsplit(postgres_server.dsn)._replace(netloc="bus:secret@", path="/bus").geturl()
    command = [sys.executable, "-m", "postbus", "serve", str(folder / "manifests")]
    command += ["--data", str(folder / "bus"), *FREE_PORTS, "--unsafe"]
    try:
        for statement in statements():
            run_psql(postgres_server, statement)
        with service_manager(folder) as (address, listening):
            variables = environment(POSTBUS_STORES=stores, NOTIFY_SOCKET=address)
            process = subprocess.Popen(
                command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                assert next_of(listening, "READY=1", "STOPPING=1") == "READY=1"
                process.send_signal(signal.SIGTERM)
                assert next_of(listening, "STOPPING=1") == "STOPPING=1"
                assert process.wait(LIMIT_S) == 0
            finally:
                process.kill()
                process.wait()
    finally:
        run_psql(postgres_server, "drop database if exists bus with (force)")
        run_psql(postgres_server, "drop role if exists bus")


def test_every_alert_has_a_section_of_its_runbook() -> None:
    content = yaml.safe_load((ROOT / "docs/alerts.yaml").read_text(encoding="utf-8"))
    rules = [rule for group in content["groups"] for rule in group["rules"]]
    headings = re.findall(r"^## (Postbus\w+)$", TROUBLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules]
    for rule in rules:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / page) == TROUBLE
        assert anchor == rule["alert"].lower()


def test_the_table_of_starts_has_the_decisions_of_the_code() -> None:
    """Its rows are tried in tests/assembly/test_start_decisions.py."""
    rows = re.findall(r"^\| (.+) \| (.*) \| (.+) \| (.+) \|$", TROUBLE.read_text(), re.MULTILINE)
    decided = {
        state.replace("…", "000"): with_stores
        for _, states, with_stores, _ in rows
        for state in re.findall(r"`(\w{2}(?:\w{3}|…))`", states)
    }
    for state, decision in decided.items():
        error = as_store_error(asyncpg.PostgresError.new({"C": state, "M": "no"}))
        is_lasting = isinstance(error, StoreMisconfigured)
        assert isinstance(error, StoreError), state
        assert decision == ("ends: 6" if is_lasting else "waits"), state
    assert decided.keys() >= MISCONFIGURED_STATES | FULL_STATES | UNAVAILABLE_STATES
