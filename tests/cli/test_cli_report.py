"""`postbus report`: data for support, also of an unresponsive bus, and no secret."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from postbus.cli.commands.report import LOG_BYTES, LOG_LINES, Report
from tests.cli.command_line import CommandLine, folder_with_bus, user_folder

CUSTOM_KEY = "a-custom-key-of-a-secret-1"
MANIFESTS = f"""
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {{name: report-bus}}
spec:
  sku: {{name: Standard}}
  authorizationRules:
    - {{name: RootManageSharedAccessKey, rights: [Manage]}}
    - {{name: given, rights: [Listen], secretName: given}}
---
apiVersion: v1
kind: Secret
metadata: {{name: given}}
stringData: {{primaryKey: {CUSTOM_KEY}}}
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {{name: orders}}
spec:
  owner: {{name: report-bus}}
  authorizationRules:
    - {{name: worker, rights: [Send, Listen]}}
"""
OF_THE_BUS = {"audit", "connections", "entities", "namespace", "status"}
STORES = "postgresql://bus:p/w'd@db-1/bus?sslmode=require postgresql://d/b?user=b&password=p/w'd"


@pytest.fixture(scope="module")
def here() -> Iterator[CommandLine]:
    with user_folder() as folder:
        (folder / "bus.yaml").write_text(MANIFESTS)
        with folder_with_bus(str(folder / "bus.yaml")) as user:
            yield user


def contents(archive: bytes) -> dict[str, str]:
    """Return the text of each file, by its name without the folder."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        for member in packed.getmembers():
            file = packed.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read().decode()
    return found


def secrets_of(user: CommandLine) -> set[str]:
    """Return the secrets of the bus of a folder, and its bare keys."""
    announced = json.loads((user.folder / ".postbus" / "bus.json").read_text())
    token = Path(announced["token_file"]).read_text().split()[-1]
    rules: list[dict[str, Any]] = user.json("keys", "list", "--show")
    rules += user.json("keys", "list", "--show", "--entity", "orders")
    keys = [rule[name] for rule in rules for name in ("primaryKey", "secondaryKey")]
    return {token, announced["connection_string"], *filter(None, keys)}


@pytest.mark.slow
def test_report_is_complete_and_contains_no_secret(here: CommandLine) -> None:
    here.ok("send", "orders", "hello")
    secrets = secrets_of(here)
    assert (len(secrets) >= 6, CUSTOM_KEY in secrets) == (True, True)
    logged = [each.replace(CUSTOM_KEY, f"SharedAccessKey={CUSTOM_KEY}") for each in sorted(secrets)]
    (here.folder / "bus.log").write_text("".join(f"said {each}\n" for each in logged))
    here.ok("report", "found.tar.gz", "--log", "bus.log")
    file = here.folder / "found.tar.gz"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = contents(file.read_bytes())
    assert json.loads(found["about.json"])["missing"] == {}
    of_the_bus = {f"{each}.json" for each in OF_THE_BUS}
    assert set(found) == {*of_the_bus, "about.json", "settings.json", "metrics.txt", "log.txt"}
    (queue,) = json.loads(found["entities.json"])
    assert (queue["name"], queue["runtime"]["messageCount"]) == ("orders", 1)
    assert json.loads(found["status.json"])["isReady"]
    assert "--metrics-port" in json.loads(found["settings.json"])["commandLine"]
    assert json.loads(found["audit.json"])["items"]
    assert "postbus_build_info" in found["metrics.txt"]
    assert len(found["log.txt"].splitlines()) == len(secrets)
    leaked = [(name, each) for name, text in found.items() for each in secrets if each in text]
    assert leaked == []


@contextmanager
def silent_bus(user: CommandLine) -> Iterator[None]:
    """Have a process that is announced as the bus of the folder, logs into a file, and is deaf."""
    with (user.folder / "bus.log").open("wb") as log:
        log.write(b"".join(b"line %d\n" % number for number in range(LOG_LINES + 5)))
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-c", "input()", "postbus", "serve"],
            stdin=subprocess.PIPE,
            stderr=log,
            env={**user.environment(), "POSTBUS_STORES": STORES, "POSTBUS_UNKNOWN": "p/w'd"},
        )
    try:
        (user.folder / ".postbus").mkdir()
        (user.folder / ".postbus" / "bus.json").write_text(
            json.dumps({"bus": "b", "pid": process.pid, "control": "http://127.0.0.1:1"})
        )
        yield
    finally:
        process.communicate(b"\n")


@pytest.mark.slow
def test_report_of_an_unresponsive_bus_has_the_remaining_files() -> None:
    with user_folder() as folder:
        user = CommandLine(folder)
        with silent_bus(user):
            user.ok("report", "found.tar.gz")
        found = contents((folder / "found.tar.gz").read_bytes())
    assert set(found) == {"about.json", "settings.json", "log.txt"}
    missing = json.loads(found["about.json"])["missing"]
    assert {name for name in missing if name.endswith(".json")} == {f"{x}.json" for x in OF_THE_BUS}
    assert "no bus answers at http://127.0.0.1:1" in missing["status.json"]
    assert "--metrics URL" in missing["metrics.txt"]
    settings = json.loads(found["settings.json"])
    settings["variables"].pop("POSTBUS_ACCELERATE", None)  # of the build under test
    assert settings["variables"] == {
        "POSTBUS_STORES": "postgresql://bus:***@db-1/bus?sslmode=require"
        " postgresql://d/b?user=b&password=***"
    }
    assert settings["commandLine"][-2:] == ["postbus", "serve"]
    assert found["log.txt"].splitlines()[:: LOG_LINES - 1] == ["line 5", f"line {LOG_LINES + 4}"]


def test_report_includes_a_piped_log_without_a_bus(tmp_path: Path) -> None:
    user = CommandLine(tmp_path)
    user.ok("report", "found.tar.gz", "--log", "-", stdin="one\ntwo\n", POSTBUS_CONTROL_PORT="1")
    found = contents((tmp_path / "found.tar.gz").read_bytes())
    assert found["log.txt"] == "one\ntwo\n"
    assert (
        "on the machine of the bus" in json.loads(found["about.json"])["missing"]["settings.json"]
    )
    (tmp_path / "taken").mkdir()
    user.fails("report", "taken", code=5, says="taken: Is a directory")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "of Endpoint=sb://h;SharedAccessKey=abc=;X=1",
            "of Endpoint=sb://h;SharedAccessKey=***;X=1",
        ),
        ("Authorization: Bearer abc.d", "Authorization: Bearer ***"),
        ("SharedAccessSignature sr=u&sig=a%2Fb&se=1", "SharedAccessSignature sr=u&sig=***&se=1"),
        ('{"password": "a b", "x": 1}', '{"password": ***, "x": 1}'),
        ("host=db password='a b' user=c", "host=db password=*** user=c"),
        ("key " + "Ab+/" * 10 + "Abc= in use", "key *** in use"),
        ("the token known", "the *** known"),
        ("http://localhost:9464/metrics of orders", "http://localhost:9464/metrics of orders"),
    ],
)
def test_secrets_are_redacted_from_the_report(text: str, clean: str) -> None:
    assert Report(["token"]).without_secrets({"a": [text]}) == {"a": [clean]}


def test_first_partial_line_is_left_out_of_the_log(tmp_path: Path) -> None:
    user = CommandLine(tmp_path)
    (tmp_path / "bus.log").write_bytes(b"SharedAccessKey=" + b"a" * LOG_BYTES + b"\nwhole\n")
    user.ok("report", "found.tar.gz", "--log", "bus.log", POSTBUS_CONTROL_PORT="1")
    assert contents((tmp_path / "found.tar.gz").read_bytes())["log.txt"] == "whole\n"
