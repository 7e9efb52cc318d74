from __future__ import annotations

from typing import Literal

import pytest

from tests.behaviour_report import BehaviourReport


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


def test_expected_failure_shows_nothing() -> None:
    collected = BehaviourReport()
    expected = report("tests/test_x.py::test_a", "passed", "S1")
    expected.wasxfail = "later"
    collected.pytest_runtest_logreport(expected)
    assert collected.shown() == {}


def test_setup_alone_shows_nothing() -> None:
    collected = BehaviourReport()
    collected.pytest_runtest_logreport(report("tests/x.py::test_a", "passed", "S1", when="setup"))
    assert collected.shown() == {}
