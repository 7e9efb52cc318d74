"""`make demo-pipeline` as a user runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.dev_bus import ROOT

COMMAND = [sys.executable, str(ROOT / "examples" / "demo_pipeline.py")]


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs java on PATH")
def test_the_demo_of_pipelines_passes() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout.endswith("demo passed\n")


def test_the_demo_says_that_java_is_missing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=60, check=False,
        env=environment | {"PATH": "/nonexistent"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ("the demo of pipelines needs Java 17 or 21: install it, see README.md\n")
