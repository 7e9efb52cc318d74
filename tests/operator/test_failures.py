"""An error of a look becomes conditions that say what is wrong and who must act."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from postbus_operator.failures import (
    CONNECTING_RETRY_S,
    DEPENDENCY_RETRY_S,
    outcome_of_failure,
)
from postbus_operator.objects import Resource
from postbus_operator.outcome import (
    BackendUnavailable,
    DependencyMissing,
    Outcome,
    SpecInvalid,
    StillConnecting,
)
from tests.operator.health import check_health
from tests.operator.objects import entity

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


def condition(type: str, status: str, reason: str = "Ready") -> dict:
    return {
        "type": type,
        "status": status,
        "reason": reason,
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-11-23T09:00:00Z",
    }


def queue(*conditions: dict, **metadata) -> Resource:
    found = entity("Queue", "orders", metadata={"generation": 2} | metadata)
    status = {"entityId": "7", "conditions": list(conditions)}
    return Resource.from_object("Queue", found | {"status": status})


def shown(outcome) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in outcome.status.conditions}


def test_a_wrong_spec_is_stalled_and_not_tried_again() -> None:
    error = SpecInvalid("InvalidFilter", "mend the filter")
    found = outcome_of_failure(queue(condition("Reconciling", "True")), error, failures=1, now=NOW)
    assert shown(found) == {
        "Ready": ("False", "Invalid"),
        "Stalled": ("True", "InvalidFilter"),
        "Valid": ("False", "InvalidFilter"),
    }
    assert (found.retry_s, found.has_finalizer) == (None, True)
    assert found.status.observed_generation == 2
    assert [(each.type, each.reason) for each in found.events] == [("Warning", "InvalidFilter")]


def test_a_missing_owner_is_waited_for() -> None:
    error = DependencyMissing("OwnerResolved", "NotFound", "create the Namespace bus")
    found = outcome_of_failure(queue(condition("Stalled", "True")), error, failures=1, now=NOW)
    assert shown(found) == {
        "OwnerResolved": ("False", "NotFound"),
        "Ready": ("False", "OwnerNotReady"),
        "Reconciling": ("True", "WaitingForOwner"),
    }
    assert found.retry_s == DEPENDENCY_RETRY_S


def test_conditions_that_were_not_looked_at_keep_their_generation() -> None:
    error = DependencyMissing("ForwardTargetsResolved", "TargetNotFound", "create it")
    found = outcome_of_failure(
        queue(condition("Programmed", "True", "Applied")), error, failures=1, now=NOW
    )
    generations = {each.type: each.observed_generation for each in found.status.conditions}
    assert generations["Programmed"] == 1
    assert generations["ForwardTargetsResolved"] == 2
    assert found.status.entity_id == "7"


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_ready_resource_is_unknown_after_the_third_silence(failures: int) -> None:
    """A restart of a broker shall not write the status of each of its entities twice."""
    found = outcome_of_failure(
        queue(condition("Ready", "True")),
        BackendUnavailable("the bus does not answer"),
        failures=failures,
        now=NOW,
    )
    expected = ("True", "Ready") if failures < 3 else ("Unknown", "BackendUnavailable")
    assert shown(found)["Ready"] == expected
    assert shown(found)["Reconciling"] == ("True", "Retrying")


def test_a_resource_that_was_never_ready_says_at_once_what_it_waits_for() -> None:
    found = outcome_of_failure(queue(), BackendUnavailable("silence"), failures=1, now=NOW)
    assert shown(found)["Ready"] == ("Unknown", "BackendUnavailable")


def test_a_restart_of_the_operator_says_nothing_new_before_it_reaches_the_bus() -> None:
    """A new leader of 500 buses needs a while for the last one, whose status is true until then."""
    known = queue(condition("Ready", "True"), generation=1)
    known.status["observedGeneration"] = 1
    error = StillConnecting("the operator is connecting to the bus")
    found = outcome_of_failure(known, error, failures=5, now=NOW)
    assert found == Outcome(None, has_finalizer=True, retry_s=CONNECTING_RETRY_S)


@pytest.mark.parametrize(
    "resource",
    [
        pytest.param(queue(generation=1), id="new"),
        pytest.param(queue(condition("Ready", "True")), id="changed"),
        pytest.param(
            queue(condition("Ready", "True"), generation=1, deletionTimestamp=NOW.isoformat()),
            id="deleted",
        ),
    ],
)
def test_what_waits_for_an_answer_says_so_while_the_operator_connects(resource: Resource) -> None:
    resource.status["observedGeneration"] = 1
    found = outcome_of_failure(resource, StillConnecting("connecting"), failures=1, now=NOW)
    assert shown(found)["Reconciling"] == ("True", "Retrying")


def test_an_unexpected_error_is_named_without_its_secrets() -> None:
    error = ValueError("postgresql://postbus:hush@db/postbus")
    found = outcome_of_failure(queue(), error, failures=1, now=NOW)
    (event,) = found.events
    assert event.reason == "ReconcileFailed"
    for text in (event.message, *(each.message for each in found.status.conditions)):
        assert "hush" not in text
        assert "ValueError: postgresql://postbus:***@db/postbus" in text


@pytest.mark.parametrize(
    "error",
    [
        SpecInvalid("InvalidSpec", "password=hush"),
        DependencyMissing("SecretsSynced", "SourceMissing", "postgresql://postbus:hush@db/postbus"),
        BackendUnavailable("no connection to postgresql://postbus:hu@sh@db/postbus"),
        RuntimeError("Authorization: Bearer hush"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_failure_shows_a_secret(error: Exception) -> None:
    found = outcome_of_failure(queue(), error, failures=5, now=NOW)
    for text in (each.message for each in (*found.events, *found.status.conditions)):
        assert "hush" not in text
        assert "sh@db" not in text


def test_a_deletion_that_fails_says_what_blocks_it_unless_it_is_forced() -> None:
    deleting = {"deletionTimestamp": "2026-11-23T10:00:00Z"}
    error = BackendUnavailable("silence")
    found = outcome_of_failure(queue(**deleting), error, failures=1, now=NOW)
    assert shown(found)["DeletionBlocked"] == ("True", "BackendUnavailable")
    assert found.has_finalizer
    forced = queue(**deleting, annotations={"postbus.dev/force-release": "true"})
    assert not outcome_of_failure(forced, error, failures=1, now=NOW).has_finalizer


def test_a_status_of_another_version_of_the_operator_is_no_obstacle() -> None:
    found = entity("Queue", "orders")
    status = {"entityId": "7", "ofLater": 1, "messageCount": "many"}
    resource = Resource.from_object("Queue", found | {"status": status})
    outcome = outcome_of_failure(resource, BackendUnavailable("silence"), failures=1, now=NOW)
    assert outcome.status.entity_id == "7"
    assert outcome.status.message_count is None


FORMER = {
    "new": [],
    "ready": [condition("Ready", "True")],
    "stalled": [
        condition("Ready", "False", "Invalid"),
        condition("Stalled", "True", "InvalidSpec"),
    ],
    "waiting": [
        condition("Ready", "False", "OwnerNotReady"),
        condition("Reconciling", "True", "WaitingForOwner"),
    ],
}
ERRORS = (
    SpecInvalid("InvalidFilter", "mend the filter"),
    DependencyMissing("OwnerResolved", "NotFound", "create the Namespace bus"),
    DependencyMissing("SecretsSynced", "SourceMissing", "create the Secret"),
    BackendUnavailable("the bus does not answer"),
    KeyError("unexpected"),
)


@pytest.mark.parametrize("former", FORMER)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("failures", [1, 5])
@pytest.mark.parametrize("deleted_at", [None, "2026-11-23T11:00:00Z"])
def test_tools_understand_every_failure(
    former: str, error: Exception, failures: int, deleted_at: str | None
) -> None:
    metadata = {} if deleted_at is None else {"deletionTimestamp": deleted_at}
    resource = queue(*FORMER[former], **metadata)
    found = outcome_of_failure(resource, error, failures=failures, now=NOW)
    assert found.status is not None
    status = found.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    check_health({"kind": "Queue", "metadata": {"generation": 2} | metadata, "status": status})
