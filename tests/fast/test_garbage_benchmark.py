"""The benchmark of garbage collections runs; its figures are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from postbus.fast import BUILD

ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_of_garbage_collections_runs() -> None:
    command = [sys.executable, str(ROOT / "bench" / "garbage.py"), "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(BUILD)
    assert "with 100 usual messages" in done.stdout
