"""The Python SDK: its methods that the tests of the edge call, counted while they run."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.coverage import keep, read_calls

ROOT = Path(__file__).resolve().parents[2]
CLIENT = "azure-servicebus"
LIMIT_S = 1_800


@pytest.mark.sdk
def test_every_public_method_is_called_and_works(tmp_path: Path) -> None:
    """`make test` runs the same tests; here they are counted."""
    modules = sorted(str(path) for path in (ROOT / "tests/edge/sdk").glob("test_sdk_*.py"))
    assert modules  # without any, pytest would run everything
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.sdk.python_calls"]
    # A file's tests stay together because they share a bus; clients mostly sleep.
    command += ["--numprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    subprocess.run(
        [*command, "--calls", str(tmp_path), *modules], cwd=ROOT, check=True, timeout=LIMIT_S
    )
    keep(CLIENT, importlib.metadata.version(CLIENT), read_calls(tmp_path.glob("*.json")))
