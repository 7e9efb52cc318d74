"""Conditions of a resource, computed whole by one writer.

A condition whose status stays keeps its `lastTransitionTime`, so that a status that means the same
is equal, and is not written. Those of `ABNORMAL` say that something is out of the ordinary: they
are present only while they are True, as kstatus expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from postbus_operator.redaction import redacted
from postbus_operator.status import Condition

ConditionStatus = Literal["True", "False", "Unknown"]

ABNORMAL: Final = frozenset(
    {
        "Reconciling",
        "Stalled",
        "Drifted",
        "Lagging",
        "Fenced",
        "DataLoss",
        "StaleCheckpoint",
        "DeletionBlocked",
    }
)
"""Types that are present only while they are True."""

MAX_MESSAGE: Final = 4_096


class Conditions:
    """The conditions of one observation. Types that are not set are dropped."""

    def __init__(self, former: Sequence[Mapping[str, Any]], generation: int, now: datetime) -> None:
        """`former`: those of the resource's status; `generation`: that of the observed spec."""
        self._former = {each["type"]: each for each in former}
        self._generation = generation
        self._now = now
        self._found: dict[str, Condition] = {}

    def set(self, type: str, status: ConditionStatus, reason: str, message: str) -> None:
        """Set a condition; the message ends with the user's next step, if there is one.

        Whatever it quotes, a password or key in it is hidden: everybody may read a status.
        """
        before = self._former.get(type)
        is_same = before is not None and before["status"] == status
        if before is None or before.get("message") != message:  # what is shown hides them already
            message = redacted(message)[:MAX_MESSAGE]
        self._found[type] = Condition(
            type=type,
            status=status,
            observed_generation=self._generation,
            last_transition_time=before["lastTransitionTime"]
            if before is not None and is_same
            else timestamp(self._now),
            reason=reason,
            message=message,
        )

    def keep_former(self) -> None:
        """Keep all former conditions as they are; what was not looked at has its old generation."""
        for each in self._former.values():
            self._found[each["type"]] = Condition.model_validate(each)

    def status_of(self, type: str) -> ConditionStatus | None:
        """Return the status of a condition that is set."""
        found = self._found.get(type)
        return None if found is None else found.status

    def all(self) -> tuple[Condition, ...]:
        """Return the conditions: Ready first, the others by type."""
        shown = [
            each
            for each in self._found.values()
            if each.type not in ABNORMAL or each.status == "True"
        ]
        return tuple(sorted(shown, key=lambda each: (each.type != "Ready", each.type)))


def timestamp(moment: datetime) -> str:
    """Return a time as Kubernetes writes it, in seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
