"""Readers that go on where a read has ended, and the proof that the checker would notice a gap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.slow


def run_reads(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults.group_reads", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=FOLDER.parents[1]
    )


def test_readers_miss_no_message_of_commits_in_flight() -> None:
    result = run_reads()
    assert result.returncode == 0, result.stdout + result.stderr[-3_000:]
    assert "violations 0" in result.stdout


def test_checker_catches_a_broker_that_answers_the_next_position_from_the_tables() -> None:
    """A reader must look while commits are in the wrong order: a run without that is repeated.

    A reader that plans misses nothing even then: its plan is a commit behind those in flight.
    """
    broken = ("--broker", str(FOLDER / "sql_answers.py"))
    runs = (run_reads(*broken, "--seed", str(seed)) for seed in range(1, 4))
    result = next((run for run in runs if run.returncode), None)
    assert result is not None
    assert result.returncode == 1, result.stdout + result.stderr[-3_000:]
    assert "batches: " in result.stdout
    assert "accepted messages are lost" in result.stdout
    assert "violations 1\n" in result.stdout
