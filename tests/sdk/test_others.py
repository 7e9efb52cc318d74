"""Clients of Python and the command line that have no suite of their own language."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import certifi
import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.sdk.coverage import keep, read_calls
from tests.sdk.suites import ROOT, run_suite

pytestmark = pytest.mark.sdk

SUITES = Path(__file__).with_name("others")
PACKAGES = {"kombu": "kombu", "proton": "python-qpid-proton", "curl": None, "page": None}
"""Suite -> the package whose calls are counted."""


@pytest.mark.parametrize("name", PACKAGES)
def test_client(postgres_server: EmbeddedPostgres, name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    package = PACKAGES[name]
    if package is not None:
        command += ["-p", "tests.sdk.python_calls", "--client", package, "--calls", str(tmp_path)]
    command.append(str(SUITES / f"suite_{name}.py"))
    # kombu passes no authority on: it trusts the file of certifi.
    run_suite(postgres_server, name, command, ROOT, trust_files=(Path(certifi.where()),))
    if package is not None:
        keep(package, version(package), read_calls(tmp_path.glob("*.json")))
