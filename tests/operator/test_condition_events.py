"""Events for conditions: at once, or once a condition has had time to pass by itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from postbus_operator.conditions import timestamp
from postbus_operator.outcome import Event
from postbus_operator.running.condition_events import PATIENCE, report
from postbus_operator.status import Condition

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def condition(type: str, status: str, reason: str, message: str = "mend it") -> Condition:
    return Condition(
        type=type,
        status=status,
        last_transition_time=timestamp(NOON),
        reason=reason,
        message=message,
    )


@pytest.mark.parametrize(
    ("type", "status", "reason"),
    [
        ("Stalled", "True", "NameTaken"),
        ("Valid", "False", "InvalidFilter"),
        ("Valid", "True", "ForwardCycle"),
        ("Ready", "False", "OwnedByOther"),
        ("OwnerResolved", "False", "NotPermitted"),
        ("StorageReady", "False", "AuthFailed"),
        ("StorageReady", "False", "StoreFull"),
        ("Fenced", "True", "Fenced"),
        ("DataLoss", "True", "MessagesDropped"),
        ("StaleCheckpoint", "True", "BusRestored"),
    ],
)
def test_what_only_a_person_ends_is_reported_at_once(type: str, status: str, reason: str) -> None:
    found = report([condition(type, status, reason)], (), NOON)
    assert found == ((Event("Warning", reason, "mend it"),), None)


@pytest.mark.parametrize(
    ("type", "status", "reason"),
    [
        ("OwnerResolved", "False", "NotFound"),
        ("StorageReady", "False", "Unreachable"),
        ("SecretsSynced", "False", "SourceMissing"),
        ("ForwardTargetsResolved", "False", "TargetNotFound"),
        ("PartitionsReady", "False", "PodNotStarting"),
        ("DeletionBlocked", "True", "Protected"),
    ],
)
def test_what_may_pass_by_itself_is_reported_later(type: str, status: str, reason: str) -> None:
    given = [condition(type, status, reason)]
    early = NOON + PATIENCE / 3
    assert report(given, (), early) == ((), (NOON + PATIENCE - early).total_seconds())
    event = Event("Warning", reason, "mend it")
    assert report(given, (), NOON + PATIENCE) == ((event,), None)
    assert report(given, (), NOON + timedelta(days=1)) == ((event,), None)


@pytest.mark.parametrize(
    ("type", "status", "reason"),
    [
        ("Ready", "True", "Ready"),
        ("Ready", "False", "Provisioning"),
        ("Ready", "Unknown", "BackendUnavailable"),
        ("Valid", "Unknown", "Unknown"),
        ("StorageReady", "Unknown", "Unreachable"),
        ("PartitionsReady", "False", "NoneReady"),
        ("Reconciling", "True", "Creating"),
    ],
)
def test_what_needs_nobody_is_not_reported(type: str, status: str, reason: str) -> None:
    assert report([condition(type, status, reason)], (), NOON + PATIENCE) == ((), None)


def test_a_message_is_said_once() -> None:
    stalled = condition("Stalled", "True", "ImmutableFieldChanged")
    both = [condition("Valid", "False", "InvalidSpec"), stalled]
    event = Event("Warning", "ImmutableFieldChanged", "mend it")
    assert report(both, (), NOON).events == (event,)
    assert report(both, (event,), NOON).events == ()
