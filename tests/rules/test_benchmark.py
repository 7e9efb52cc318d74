"""The benchmark of rules runs; its figures are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_benchmark_of_rules_runs() -> None:
    command = [sys.executable, str(ROOT / "bench" / "filters.py"), "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "three terms, decoded" in done.stdout
