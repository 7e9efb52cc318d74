"""Conditions that are out of the ordinary, as metrics show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from postbus_operator.conditions import ABNORMAL
from postbus_operator.objects import Key, Resource
from postbus_operator.running.condition_events import WARNED

SUMMARIES: Final = ABNORMAL | {"Ready"}
"""Types that alerts ask for: each resource out of the ordinary has one of them, or is in use and
has a warning."""


class AbnormalCondition(NamedTuple):
    """A Ready that is not True, another one that is False or a warning, or one that is present only
    while it is True.
    """

    resource: Key
    type: str
    reason: str
    start: float
    """Begin of its present status, seconds since 1970."""


def abnormal_conditions(resources: Iterable[Resource]) -> list[AbnormalCondition]:
    """Return those of all resources: the oldest first."""
    found = [
        AbnormalCondition(
            resource.key,
            each["type"],
            each["reason"],
            datetime.fromisoformat(each["lastTransitionTime"]).timestamp(),
        )
        for resource in resources
        for each in resource.status.get("conditions", ())
        if _is_abnormal(each)
    ]
    return sorted(found, key=lambda each: (each.start, each.resource, each.type))


def _is_abnormal(condition: Mapping[str, Any]) -> bool:
    type, status = condition["type"], condition["status"]
    if type in ABNORMAL:
        return bool(status == "True")
    if type == "Ready":
        return bool(status != "True")
    return bool(status == "False") or condition["reason"] == WARNED
