"""Conditions that are out of the ordinary, as metrics show them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from postbus_operator.conditions import ABNORMAL
from postbus_operator.objects import Key, Resource


class AbnormalCondition(NamedTuple):
    """A Ready that is not True, or another condition that is there only while it is True."""

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
        if (each["type"] == "Ready") != (each["status"] == "True")
        and each["type"] in ABNORMAL | {"Ready"}
    ]
    return sorted(found, key=lambda each: (each.start, each.resource, each.type))
