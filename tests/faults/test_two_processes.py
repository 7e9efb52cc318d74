"""A few rounds of two brokers that take over from each other under load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.two_processes import Verb, steps_of


def test_a_seed_names_the_events_of_a_round() -> None:
    assert steps_of(1) == steps_of(1) != steps_of(2)
    assert {step.verb for seed in range(20) for step in steps_of(seed)} == set(Verb)


@pytest.mark.slow
def test_two_processes_that_swap_roles_violate_no_invariant() -> None:
    command = [sys.executable, "-m", "tests.faults.two_processes", "--rounds", "3", "--seed", "28"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout[-6_000:] + result.stderr[-2_000:]
    assert "violations 0" in result.stdout
