"""`make` alone: every target in its group, on lines that fit a terminal."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_make_lists_each_target_in_its_group_on_eighty_columns() -> None:
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    groups = [line for line in lines if line and not line.startswith(" ")]
    assert groups == [
        "first", "running", "load and faults", "checks and tests", "written by programs",
    ]  # fmt: skip
    targets = re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in lines if line.startswith("  ")] == targets
    assert all(re.match(r"  \S+ {2,}\S", line) for line in lines if line.startswith("  "))
