from __future__ import annotations

import re
import tomllib
from typing import Literal

import pytest

from tests.behaviour_report import CATALOG, ROOT, BehaviourReport

FINISHED = {"queues", "messaging", "protocols"}
"""Themes of docs/behaviours.toml that have no right to an open promise."""


def report(
    test: str, outcome: Literal["passed", "failed", "skipped"], *numbers: str, when: str = "call"
) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=test,
        location=("x.py", 1, "x"),
        keywords={},
        outcome=outcome,
        longrepr=None,
        when=when,  # type: ignore[arg-type]
        user_properties=[("behaviour", number) for number in numbers],
    )


def test_passing_test_shows_its_behaviours() -> None:
    collected = BehaviourReport()
    collected.pytest_runtest_logreport(report("tests/a/test_x.py::test_y[1]", "passed", "S1", "S2"))
    assert collected.shown() == {
        "S1": {"tests/a/test_x.py::test_y"},
        "S2": {"tests/a/test_x.py::test_y"},
    }
    assert (
        "| S1 | an unsettled send is answered accepted | `a/test_x::test_y` |" in collected.page()
    )


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
@pytest.mark.parametrize("when", ["setup", "call", "teardown"])
def test_failed_or_skipped_test_takes_the_behaviour_away(
    outcome: Literal["failed", "skipped"], when: str
) -> None:
    collected = BehaviourReport()
    collected.pytest_runtest_logreport(report("tests/test_x.py::test_a", "passed", "S1"))
    collected.pytest_runtest_logreport(report("tests/test_x.py::test_b", outcome, "S1", when=when))
    assert collected.shown() == {}
    assert "| S1 | an unsettled send is answered accepted | *queues* |" in collected.page()


def test_expected_failure_shows_no_behaviour() -> None:
    collected = BehaviourReport()
    expected = report("tests/test_x.py::test_a", "passed", "S1")
    expected.wasxfail = "later"
    collected.pytest_runtest_logreport(expected)
    assert collected.shown() == {}


def test_setup_alone_shows_no_behaviour() -> None:
    collected = BehaviourReport()
    collected.pytest_runtest_logreport(report("tests/x.py::test_a", "passed", "S1", when="setup"))
    assert collected.shown() == {}


def test_every_behaviour_of_the_finished_themes_has_a_test() -> None:
    """The page shows whether those tests pass."""
    catalog = tomllib.loads(CATALOG.read_text(encoding="utf-8"))
    del catalog["themes"]
    promised = {
        number
        for part in catalog.values()
        for number, promise in part.items()
        if number != "title" and promise[0] in FINISHED
    }
    marked = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for mark in re.findall(r"mark\.behaviour\(([^)]*)\)", path.read_text(encoding="utf-8")):
            marked.update(re.findall(r"S\d+", mark))
    assert promised - marked == set()
