"""A few rounds of two brokers that take over from each other under load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.history import Left, Loaded, Result, Sent
from tests.faults.network import network_to
from tests.faults.two_processes import Life, Process, Verb, show, steps_of, violations_of
from tests.faults.victims import Broker

ACCEPTED = Sent("plain", "m1", Result.ACCEPTED, 1.0, 1.1)


def test_a_seed_names_the_events_of_a_round() -> None:
    assert steps_of(1) == steps_of(1) != steps_of(2)
    assert {step.verb for seed in range(20) for step in steps_of(seed)} == set(Verb)


def test_messages_of_unseen_places_are_not_reported_as_lost() -> None:
    (lost,) = violations_of([ACCEPTED], [])
    assert (lost.invariant, lost.id) == ("I1", "m1")
    (unseen,) = violations_of([ACCEPTED], ["plain active cannot be seen"])
    assert (unseen.invariant, unseen.what) == ("unseen", "plain active cannot be seen")
    early = Loaded("plain", 1.0, "0", 2), Loaded("plain", 2.0, "1", 1)
    twice = [Left("plain", place, "m1", 1, 0) for place in ("active", "deferred")]
    events = [ACCEPTED, *early, *twice]
    found = violations_of(events, ["once active cannot be seen"])
    assert [each.invariant for each in found] == ["unseen", "I5", "I19"]


def test_a_summary_has_the_violations_and_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    life = Life(28, 3, violations=violations_of([ACCEPTED], []))
    show(life)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "I1 plain m1: accepted and nowhere",
        "violated I1 1",
        "again: python -m tests.faults.two_processes --rounds 3 --seed 28",
    ]


async def test_an_unexpected_exit_is_reported_with_its_reason(tmp_path: Path) -> None:
    program = ["-c", "raise SystemExit('no such module')"]
    async with network_to("postgresql:///bus?host=/none") as (network, dsn):
        process = Process(0, Broker(tmp_path, dsn, program, ""), network, 0, "bus-0", is_over=True)
        process.start()
        assert process.watch is not None
        await process.watch
    assert process.problems == ["process 0 ended with exit code 1: no such module\n"]


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
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2_000:]
    assert "violations 0" in result.stdout
