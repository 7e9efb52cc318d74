"""Outcome of a look that ended with an error: what the status says about it, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from postbus_operator.conditions import Conditions
from postbus_operator.crds import KINDS
from postbus_operator.objects import Resource
from postbus_operator.outcome import (
    BackendUnavailable,
    DependencyMissing,
    Event,
    Outcome,
    SpecInvalid,
    StillConnecting,
)
from postbus_operator.redaction import redacted
from postbus_operator.status import ResourceStatus

DEPENDENCY_RETRY_S: Final = 30.0
"""Seconds until a missing object is looked for without its event."""

CONNECTING_RETRY_S: Final = 5.0
"""Seconds until the next look at what an operator that has just begun knows nothing of."""

PATIENT_FAILURES: Final = 3
"""Failures in a row before a ready resource is shown as unknown: restarts of a broker are short."""

STATUSES: Final = {kind.name: kind.status for kind in KINDS}


def outcome_of_failure(
    resource: Resource, error: Exception, *, failures: int, now: datetime
) -> Outcome:
    """Return the outcome of a look that raised an error; `failures`: those in a row, this included.

    Conditions that were not looked at stay as they are. The finalizer stays, unless a deletion is
    forced. Without `retry_s` the worker chooses the pause.
    """
    if isinstance(error, StillConnecting) and _is_shown(resource):
        return Outcome(None, has_finalizer=True, retry_s=CONNECTING_RETRY_S)
    text = redacted(str(error))
    conditions = Conditions(resource.status.get("conditions", ()), resource.generation, now)
    conditions.keep_former()
    retry_s: float | None = None
    events: tuple[Event, ...] = ()
    match error:
        case SpecInvalid():
            conditions.set("Valid", "False", error.reason, text)
            conditions.set("Ready", "False", "Invalid", text)
            conditions.set("Reconciling", "False", "Stalled", "")
            conditions.set("Stalled", "True", error.reason, text)
            events = (Event("Warning", error.reason, text),)
        case DependencyMissing():
            is_owner = error.condition == "OwnerResolved"
            conditions.set(error.condition, "False", error.reason, text)
            ready = "OwnerNotReady" if is_owner else "Provisioning"
            conditions.set("Ready", "False", ready, text)
            waits = "WaitingForOwner" if is_owner else "Retrying"
            conditions.set("Reconciling", "True", waits, text)
            conditions.set("Stalled", "False", "Waiting", "")
            retry_s = DEPENDENCY_RETRY_S
        case BackendUnavailable():
            _show_retry(conditions, resource, text, failures)
        case _:
            message = f"{type(error).__name__}: {text}"
            _show_retry(conditions, resource, message, failures)
            events = (Event("Warning", "ReconcileFailed", message),)
    if resource.is_deleting:
        conditions.set("DeletionBlocked", "True", "BackendUnavailable", text)
    status = former_status(resource).model_copy(
        update={"conditions": conditions.all(), "observed_generation": resource.generation}
    )
    is_forced = resource.is_deleting and resource.is_released_by_force
    return Outcome(status, has_finalizer=not is_forced, retry_s=retry_s, events=events)


def former_status(resource: Resource) -> ResourceStatus:
    """Return the status as it is; fields that this version does not know are left out."""
    model = STATUSES[resource.key.kind]
    known = {field.alias for field in model.model_fields.values()}
    shown = {name: value for name, value in resource.status.items() if name in known}
    try:
        return model.model_validate(shown)
    except ValidationError as error:
        bad = {problem["loc"][0] for problem in error.errors()}
        return model.model_validate({k: v for k, v in shown.items() if k not in bad})


def _is_shown(resource: Resource) -> bool:
    """Return whether the status says of the present spec whether it is ready."""
    return (
        not resource.is_deleting
        and resource.status.get("observedGeneration") == resource.generation
        and any(each["type"] == "Ready" for each in resource.status.get("conditions", ()))
    )


def _show_retry(conditions: Conditions, resource: Resource, message: str, failures: int) -> None:
    conditions.set("Reconciling", "True", "Retrying", message)
    conditions.set("Stalled", "False", "Retrying", "")
    if failures >= PATIENT_FAILURES or not _is_ready(resource.status):
        conditions.set("Ready", "Unknown", "BackendUnavailable", message)


def _is_ready(status: Mapping[str, Any]) -> bool:
    return any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in status.get("conditions", ())
    )
