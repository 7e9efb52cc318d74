"""A few kills of pipelines, and the proof that the checker would notice what is wrong."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.pipeline_driver import has_java

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.skipif(not has_java(), reason="Spark needs java on PATH")


def run_kills(*options: str, program: str = "pipeline_kills") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.faults.{program}", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=1_800, check=False, cwd=FOLDER.parents[1]
    )


def test_two_kills_of_a_drain_lose_and_repeat_nothing() -> None:
    result = run_kills("--kills", "2", "--seed", "3")
    assert result.returncode == 0, result.stdout[-4_000:]
    assert "violations 0" in result.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scenario",
    ["drain", "capture", "capture --format delta", "capture --format iceberg", "state"],
)
def test_each_order_has_its_effects_once(scenario: str) -> None:
    result = run_kills("--scenario", *scenario.split(), "--kills", "6")
    assert result.returncode == 0, result.stdout[-4_000:]
    assert "violations 0" in result.stdout


@pytest.mark.thorough
def test_each_message_of_a_replay_arrives_once() -> None:
    result = run_kills("--kills", "4", program="replay_kills")
    assert result.returncode == 0, result.stdout[-4_000:]
    assert "violations 0" in result.stdout


@pytest.mark.thorough
def test_each_chosen_dead_letter_is_resent_once() -> None:
    result = run_kills("--kills", "6", "--letters", "3000", program="resend_kills")
    assert result.returncode == 0, result.stdout[-4_000:]
    assert "3000 resent" in result.stdout
    assert "violations 0" in result.stdout


@pytest.mark.thorough
def test_a_flawed_replay_is_caught() -> None:
    flawed = f"{FOLDER / 'flawed_pipeline.py'} forgets"
    result = run_kills("--kills", "1", "--seed", "17", "--pipeline", flawed, program="replay_kills")
    assert result.returncode == 1, result.stdout[-4_000:]
    assert "are there twice" in result.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--pipeline '{} settles'", "accepted orders are lost"),
        ("--pipeline '{} forgets'", "target: "),
        ("--pipeline '{} untrimmed'", "table: "),
        ("--pipeline '{} stateless' --scenario state", "a start was not refused with StateLost"),
    ],
)
def test_what_is_flawed_is_caught(options: str, problem: str) -> None:
    flawed = shlex.split(options.format(FOLDER / "flawed_pipeline.py"))
    result = run_kills(*flawed, "--kills", "8", "--seed", "5")
    assert result.returncode == 1, result.stdout[-4_000:]
    assert problem in result.stdout
