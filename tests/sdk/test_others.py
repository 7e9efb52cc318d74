"""Clients of Python and the command line that have no suite of their own language."""

from __future__ import annotations

import sys
from pathlib import Path

import certifi
import pytest

from postbus.embedded import EmbeddedPostgres
from tests.sdk.suites import ROOT, run_suite

pytestmark = pytest.mark.sdk

SUITES = Path(__file__).with_name("others")


@pytest.mark.parametrize("client", ["kombu", "proton", "curl", "page"])
def test_client(postgres_server: EmbeddedPostgres, client: str) -> None:
    suite = SUITES / f"suite_{client}.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(suite)]
    # kombu passes no authority on: what it trusts is the file of certifi.
    run_suite(postgres_server, client, command, ROOT, trust_files=(Path(certifi.where()),))
