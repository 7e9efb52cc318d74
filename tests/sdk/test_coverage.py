"""Counting of calls: several processes are added up, and methods that never worked are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk import coverage
from tests.sdk.coverage import Calls, read_calls

ROOT = Path(__file__).resolve().parents[2]
TEST = """
import asyncio
from azure.servicebus import ServiceBusClient, aio
SAID = "Endpoint=sb://localhost;SharedAccessKeyName=name;SharedAccessKey=key"

def test_a_client():
    client = ServiceBusClient.from_connection_string(SAID)
    client.get_queue_sender("orders")
    asyncio.run(aio.ServiceBusClient.from_connection_string(SAID).close())
"""
BROKEN = """
import pytest
from azure.core.exceptions import ServiceRequestError
from azure.servicebus import ServiceBusClient
from azure.servicebus.management import ServiceBusAdministrationClient
NOBODY_LISTENS = "Endpoint=sb://localhost:1;SharedAccessKeyName=name;SharedAccessKey=key"

def test_calls_that_fail():
    with pytest.raises(ValueError):
        ServiceBusClient.from_connection_string("nothing")
    asked = ServiceBusAdministrationClient.from_connection_string(NOBODY_LISTENS, retry_total=0)
    with pytest.raises(ServiceRequestError):
        list(asked.list_queues())
"""


def counted(folder: Path, *flags: str) -> tuple[set[str], coverage.Methods]:
    """Run the tests of a folder with the plugin; return the files it wrote and their sum."""
    written = folder / "calls"
    written.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.sdk.python_calls"]
    command += ["--rootdir", str(folder), "-c", "/dev/null", "-p", "xdist.plugin"]
    done = subprocess.run(
        [*command, "--calls", str(written), *flags, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # each takes time to load
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = list(written.glob("*"))
    return {file.name for file in files}, read_calls(files)


@pytest.mark.slow
def test_calls_of_several_workers_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TEST)
    (tmp_path / "test_b.py").write_text(TEST + BROKEN)
    files, methods = counted(tmp_path, "--numprocesses", "2", "--dist", "loadfile")
    assert files == {"gw0.json", "gw1.json"}
    assert methods["ServiceBusClient.from_connection_string"] == Calls(3, 2)
    assert methods["ServiceBusClient.get_queue_sender"] == Calls(2, 2)
    assert methods["aio.ServiceBusClient.close"] == Calls(2, 2)
    assert methods["ServiceBusAdministrationClient.list_queues"] == Calls(1, 0)
    assert methods["ServiceBusClient.close"] == Calls(0, 0)


@pytest.mark.slow
def test_one_process_writes_one_file(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TEST)
    files, methods = counted(tmp_path)
    assert files == {"alone.json"}
    assert methods["ServiceBusClient.get_queue_sender"] == Calls(1, 1)


def test_unexplained_and_needlessly_explained_methods_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, "HERE", tmp_path)
    monkeypatch.setattr(coverage, "RESULTS", tmp_path / "results")
    (tmp_path / "reasons.toml").write_text('[client]\n"A.tried*" = "why"\n')
    works, fails = Calls(2, 1), Calls(2, 0)
    coverage.keep("client", "1", {"A.good": works, "A.triedInVain": fails})
    with pytest.raises(AssertionError, match=r"nothing: \['A\.new'\]"):
        coverage.keep("client", "1", {"A.new": Calls(0, 0), "A.triedInVain": fails})
    with pytest.raises(AssertionError, match=r"explains what works: \['A\.triedInVain'\]"):
        coverage.keep("client", "1", {"A.triedInVain": works})
    with pytest.raises(AssertionError, match=r"explains what is not there: \['A\.tried\*'\]"):
        coverage.keep("client", "1", {"A.good": works})
