"""Conditions keep their transition times, and abnormal ones are present only while True."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from postbus_operator.conditions import MAX_MESSAGE, Conditions

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
FORMER = [
    {
        "type": "Ready",
        "status": "True",
        "reason": "Ready",
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-11-23T09:00:00Z",
    }
]


def test_the_transition_time_stays_while_the_status_stays() -> None:
    found = Conditions(FORMER, 2, NOON)
    found.set("Ready", "True", "Degraded", "one broker of two answers")
    (ready,) = found.all()
    assert ready.last_transition_time == "2026-11-23T09:00:00Z"
    assert (ready.reason, ready.observed_generation) == ("Degraded", 2)


def test_the_transition_time_is_now_when_the_status_flips() -> None:
    found = Conditions(FORMER, 1, NOON)
    found.set("Ready", "False", "Provisioning", "waits for the broker")
    assert found.all()[0].last_transition_time == "2026-11-23T12:00:00Z"


def test_equal_observations_at_different_times_are_equal() -> None:
    first, second = (Conditions(FORMER, 1, NOON + timedelta(hours=each)) for each in (0, 1))
    for each in (first, second):
        each.set("Ready", "True", "Ready", "")
    assert first.all() == second.all()


def test_a_condition_out_of_the_ordinary_is_present_only_while_true() -> None:
    found = Conditions((), 1, NOON)
    found.set("Stalled", "False", "Accepted", "")
    found.set("Valid", "False", "InvalidFilter", "mend the filter")
    found.set("Reconciling", "True", "Retrying", "the bus does not answer")
    found.set("Ready", "False", "Invalid", "mend the filter")
    assert [each.type for each in found.all()] == ["Ready", "Reconciling", "Valid"]


def test_a_message_is_cut_to_what_the_schema_takes() -> None:
    found = Conditions((), 1, NOON)
    found.set("Valid", "False", "InvalidFilter", "x" * (MAX_MESSAGE + 1))
    assert len(found.all()[0].message) == MAX_MESSAGE
