"""The official Go SDK, unmodified; Go's own coverage shows the called methods."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.keys.contents import Endpoint, connection_string
from tests.sdk.coverage import Calls, Methods, keep
from tests.sdk.keeper import HOST
from tests.sdk.suites import program_of_the_page, run_suite

pytestmark = pytest.mark.sdk

PROJECT = Path(__file__).with_name("go")
CLIENT = "azservicebus"
MODULE = "github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
PACKAGES = {MODULE: "azservicebus", f"{MODULE}/admin": "admin"}

FUNCTION = re.compile(r"^func (?:\(\w+ \*?([A-Z]\w*)(?:\[.*?\])?\) )?([A-Z]\w*)[(\[]")
BLOCK = re.compile(r"^(.+)/([^/:]+):(\d+)\.\d+,(\d+)\.\d+ \d+ (\d+)$")
SCALER = ("scaler", "sc4ler=" * 6)
"""Rule and key, as in go/scaler_test.go."""

OF_THE_SDK_ONLY = {"Marshal", "MarshalJSON", "UnmarshalJSON", "MarshalXML", "UnmarshalXML", "Error"}


@pytest.fixture(scope="module")
def go() -> str:
    go = shutil.which("go")
    assert go is not None, "install Go of version 1.25 or later"
    return go


def exported(folder: Path) -> dict[tuple[str, int, int], str]:
    """Return the exported functions of a package: file, first and last line -> name."""
    found = {}
    for file in sorted(folder.glob("*.go")):
        if file.name.endswith("_test.go"):
            continue
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            match = FUNCTION.match(line)
            if match is None or match[2] in OF_THE_SDK_ONLY:
                continue
            last = next(at for at in range(number, len(lines)) if lines[at] == "}") + 1
            found[file.name, number, last] = f"{match[1]}.{match[2]}" if match[1] else match[2]
    return found


def calls_of(profile: Path, folder: Path) -> Methods:
    """Return which exported functions ran; the suite passed, so those that ran worked."""
    blocks = [BLOCK.match(line) for line in profile.read_text().splitlines()[1:]]
    ran = [(each[1], each[2], int(each[3])) for each in blocks if each and each[5] != "0"]
    methods: Methods = {}
    for package, name in PACKAGES.items():
        below = folder / package.removeprefix(MODULE).strip("/")
        for (file, first, last), method in exported(below).items():
            was_run = any(
                (where, which) == (package, file) and first <= line <= last
                for where, which, line in ran
            )
            methods[f"{name}.{method}"] = Calls(was_run, was_run)
    return methods


def scaler_variables() -> dict[str, str]:
    """Return connection strings as the operator writes them into Secrets of a queue and a topic."""
    endpoint = Endpoint(HOST, None)
    return {
        f"POSTBUS_SCALER_OF_{kind}": connection_string(endpoint, entity, *SCALER)
        for kind, entity in (("QUEUE", "scaled"), ("TOPIC", "scaled-topic"))
    }


def test_go(postgres_server: EmbeddedPostgres, go: str, tmp_path: Path) -> None:
    suite, profile = tmp_path / "suite", tmp_path / "profile"
    build = [go, "test", "-c", f"-coverpkg={','.join(PACKAGES)}", "-o", str(suite), "."]
    subprocess.run(build, check=True, cwd=PROJECT)
    listed = [go, "list", "-m", "-json", MODULE]
    module = json.loads(subprocess.run(listed, check=True, cwd=PROJECT, capture_output=True).stdout)
    command = [str(suite), "-test.v", f"-test.coverprofile={profile}"]
    source, first_steps = tmp_path / "first_steps.go", tmp_path / "first_steps"
    source.write_text(program_of_the_page("go"))
    subprocess.run([go, "build", "-o", str(first_steps), str(source)], check=True, cwd=PROJECT)
    for transport in ("tls", "websocket"):
        variables = {
            "POSTBUS_TRANSPORT": transport,
            "POSTBUS_FIRST_STEPS": str(first_steps),
            **scaler_variables(),
        }
        run_suite(postgres_server, f"go_{transport}", command, PROJECT, variables)
    keep(CLIENT, module["Version"], calls_of(profile, Path(module["Dir"])))
