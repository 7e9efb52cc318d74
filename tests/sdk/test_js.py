"""The official JavaScript SDK, unmodified."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.sdk.coverage import keep, read_calls
from tests.sdk.suites import program_of_the_page, run_suite

pytestmark = pytest.mark.sdk

PROJECT = Path(__file__).with_name("js")
CLIENT = "@azure/service-bus"


@pytest.fixture(scope="module")
def node() -> str:
    node, npm = shutil.which("node"), shutil.which("npm")
    assert node is not None, "install Node.js of version 20 or later"
    assert npm is not None, "install npm"
    subprocess.run([npm, "ci", "--no-audit", "--no-fund"], check=True, cwd=PROJECT)
    return node


def test_javascript(postgres_server: EmbeddedPostgres, node: str, tmp_path: Path) -> None:
    command = [node, "--test", "--test-concurrency=1", "--test-reporter=spec"]
    for transport in ("tls", "websocket"):
        variables = {
            "POSTBUS_TRANSPORT": transport,
            "POSTBUS_COVERAGE": str(tmp_path),
            "POSTBUS_FIRST_STEPS": program_of_the_page("js"),
        }
        run_suite(postgres_server, f"js_{transport}", command, PROJECT, variables)
    package = PROJECT / "node_modules" / CLIENT / "package.json"
    version = json.loads(package.read_text())["version"]
    keep(CLIENT, version, read_calls(tmp_path.glob("*.json")))
