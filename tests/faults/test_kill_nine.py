"""Three kills of broker and Postgres under load, and the proof that the checker would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SLOW = ("--kinds", "broker,postgres", "--commit-delay-ms", "50")


def run_kills(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults.kill_nine", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=420, check=False, cwd=FOLDER.parents[1]
    )


@pytest.mark.slow
@pytest.mark.behaviour("S2", "S3", "S47", "S61", "S62")
def test_kills_lose_and_duplicate_no_message() -> None:
    """Broker, Postgres, broker: while it loads, during VACUUM and while it pages."""
    result = run_kills("--kills", "3", "--messages", "6000", "--kinds", "load,vacuum,paging")
    assert result.returncode == 0, result.stdout[-3_000:]
    assert "problems 0" in result.stdout


@pytest.mark.slow
def test_checker_catches_a_broker_that_answers_before_the_commit() -> None:
    """Needs enough messages for all kills: after most are sent, a kill finds no early answer.

    Each kill meets one with some luck only, so a run without any is repeated.
    """
    broken = ("--broker", str(FOLDER / "early_answers.py"))
    runs = (
        run_kills("--kills", "4", "--messages", "16000", *SLOW, *broken, "--seed", str(seed))
        for seed in range(1, 4)
    )
    result = next((run for run in runs if run.returncode), None)
    assert result is not None
    assert result.returncode == 1, result.stdout[-3_000:]
    assert "I1:" in result.stdout or "I2:" in result.stdout
