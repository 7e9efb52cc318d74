"""A few kills while everything is used at once, and the proof that the checker would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run_kills(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults.mixed_kills", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=420, check=False, cwd=FOLDER.parents[1]
    )


@pytest.mark.slow
@pytest.mark.behaviour("S3", "S61", "S62", "S115", "S167", "S189", "S251")
def test_kills_violate_no_invariant() -> None:
    """Broker, Postgres, and the broker while it loads."""
    result = run_kills("--kills", "3", "--messages", "1500")
    assert result.returncode == 0, result.stdout[-4_000:]
    assert "violations 0" in result.stdout


@pytest.mark.slow
def test_checker_catches_a_broker_that_answers_before_the_commit() -> None:
    broken = str(FOLDER / "early_answers.py")
    result = run_kills(
        "--kills", "3", "--messages", "1500", "--commit-delay-ms", "50", "--broker", broken
    )
    assert result.returncode == 1, result.stdout[-4_000:]
    assert "accepted and nowhere" in result.stdout
