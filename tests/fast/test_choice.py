"""The build in use is the one that POSTBUS_ACCELERATE names."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from postbus import fast
from postbus.amqp import runs as frame_runs
from postbus.cli.failures import Exit
from postbus.entity.queues import runs as queue_runs
from postbus.message import runs as message_runs
from tests.dev_bus import ROOT, environment
from tests.fast.twins import REASON


def test_required_functions_in_c_are_in_use() -> None:
    """`make test-accelerated` sets `require`: without this its tests would pass in Python alone."""
    if os.environ.get("POSTBUS_ACCELERATE") == "require":
        assert fast.IS_ACCELERATED
        from postbus.fast import _runs

        assert Path(_runs.__file__).parent == Path(fast.__file__).parent
    users = (
        vars(frame_runs)["IS_ACCELERATED"],
        message_runs.in_c is not None,
        queue_runs.in_c is not None,
    )
    assert users == (fast.IS_ACCELERATED,) * 3


def test_each_function_in_c_names_its_twin() -> None:
    source = (Path(fast.__file__).parent / "_runs.pyx").read_text()
    begin = r"^ *def ([a-z]\w+)\("  # not the constructors
    called = rf'{begin}[^"]*"""Do [a-z ]*`([\w.]+)`'
    functions = re.findall(called, source, re.MULTILINE)
    names = re.findall(begin, source, re.MULTILINE)
    assert [name for name, _ in functions] == names
    assert [twin for _, twin in functions if not is_there(f"postbus.{twin}")] == []


def is_there(name: str) -> bool:
    """Return whether a module, or a class in it, has this name."""
    owner, _, last = name.rpartition(".")
    try:
        found = importlib.import_module(owner)
    except ModuleNotFoundError:
        above, _, kind = owner.rpartition(".")
        found = getattr(importlib.import_module(above), kind)
    return hasattr(found, last)


# --- installations without functions in C, or with old ones --------------------------------------


def copy_of(folder: Path, *, pattern: str) -> dict[str, str]:
    """Copy the packages of the broker without some files; return an environment that uses them."""
    shutil.copytree(
        ROOT / "dataplane", folder / "dataplane", ignore=shutil.ignore_patterns("*.pyc", pattern)
    )
    return {**environment(), "PYTHONPATH": str(folder / "dataplane")}


@pytest.mark.slow
def test_a_broker_does_not_start_without_required_functions(tmp_path: Path) -> None:
    variables = copy_of(tmp_path, pattern="_runs.*.so")
    command = [sys.executable, "-m", "postbus", "dev", "--data", str(tmp_path / "data")]
    result = subprocess.run(
        command,
        env={**variables, "POSTBUS_ACCELERATE": "require"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == Exit.MACHINE
    assert "make accelerate" in result.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.skipif(not fast.IS_ACCELERATED, reason=REASON)
def test_compiled_functions_of_another_version_are_not_used(tmp_path: Path) -> None:
    variables = copy_of(tmp_path, pattern="nothing")
    program = "from postbus import fast; print(fast.BUILD, fast.IS_OUTDATED)"
    for source, expected in (("", "accelerated False"), ("# another", "pure Python True")):
        with (tmp_path / "dataplane" / "postbus" / "fast" / "_runs.pyx").open("a") as file:
            file.write(source)
        command = [sys.executable, "-c", program]
        assert subprocess.check_output(command, env=variables, text=True).strip() == expected
