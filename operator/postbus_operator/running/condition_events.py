"""Events for conditions that ask for a person. Pure.

What no other object can mend is reported at once. Resources and Secrets may come in any order, and
pods need time to start: a condition that may pass by itself is reported after `PATIENCE`.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from postbus_operator.outcome import Event
from postbus_operator.status import Condition

PATIENCE: Final = timedelta(seconds=30)
"""Time in which a condition may pass by itself. Our choice: a bus starts in 15 s."""

WAITING: Final = frozenset(
    {
        "EntitiesResolved",
        "ForwardTargetsResolved",
        "OwnerResolved",
        "SecretsSynced",
        "StorageReady",
    }
)
"""Types that other objects may mend while they are False."""

DEFINITE: Final = frozenset(
    {"NotPermitted", "AuthFailed", "Misconfigured", "SchemaTooNew", "StoreFull"}
)
"""Reasons of these that nothing but a change by a person ends."""

NOT_STARTING: Final = "PodNotStarting"
"""Reason of PartitionsReady for what no database has to do with, such as a missing image."""

WARNED: Final = "ForwardCycle"
"""Reason of a spec that is accepted with a warning."""


class Report(NamedTuple):
    """Events, and the seconds until a condition that may pass by itself is due; None: none is."""

    events: tuple[Event, ...]
    due_s: float | None


def report(conditions: Collection[Condition], said: Collection[Event], now: datetime) -> Report:
    """Return what to say of conditions beside the events of the look.

    The same conditions give the same events at each look: they are posted once an hour.
    """
    found = {each.type: each for each in conditions}
    stalled = found.get("Stalled")
    known = {each.message for each in said}
    events: list[Event] = []
    pauses: list[float] = []
    for each in conditions:
        is_stall = each.type == "Stalled"
        if stalled is not None and not is_stall and each.message == stalled.message:
            continue
        left_s = _seconds_left(each, now)
        if left_s is None or each.message in known:
            continue
        if left_s > 0:
            pauses.append(left_s)
        else:
            known.add(each.message)
            events.append(Event("Warning", each.reason, each.message))
    return Report(tuple(events), min(pauses, default=None))


def _seconds_left(condition: Condition, now: datetime) -> float | None:
    """Return the seconds until a condition is reported; None: it needs nobody."""
    match condition.type, condition.status:
        case ("Stalled", "True") | ("Valid", "False"):
            return 0.0
        case ("Valid", "True"):
            return 0.0 if condition.reason == WARNED else None
        case ("Ready", "False"):
            return 0.0 if condition.reason == "OwnedByOther" else None
        case (type, "False") if type in WAITING:
            if condition.reason in DEFINITE:
                return 0.0
        case ("PartitionsReady", "False") if condition.reason == NOT_STARTING:
            pass
        case ("Fenced" | "DataLoss" | "StaleCheckpoint", "True"):
            return 0.0
        case ("DeletionBlocked", "True"):
            pass
        case _:
            return None
    since = datetime.fromisoformat(condition.last_transition_time)
    return max(0.0, (since + PATIENCE - now).total_seconds())
