"""Comparison of the status that is there and the one that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from postbus_operator.status import ResourceStatus

Json = Mapping[str, Any]


def status_json(status: ResourceStatus) -> dict[str, Any]:
    """Return a status as the API server has it: without empty fields."""
    return _pruned(status.model_dump(mode="json", by_alias=True, exclude_none=True))


def is_same(before: Json, wanted: Json) -> bool:
    """Return whether two statuses mean the same: times of unchanged conditions do not count."""
    return before == wanted or _meaning(before) == _meaning(wanted)


def _meaning(status: Json) -> dict[str, Any]:
    pruned = _pruned(status)
    conditions = {
        each["type"]: {name: value for name, value in each.items() if name != "lastTransitionTime"}
        for each in pruned.pop("conditions", ())
    }
    return pruned | ({"conditions": conditions} if conditions else {})


def _pruned(value: Json) -> dict[str, Any]:
    """Return a copy without None, empty lists and empty objects, at any depth."""
    kept = {name: _pruned_value(each) for name, each in value.items()}
    return {name: each for name, each in kept.items() if each not in (None, [], {})}


def _pruned_value(value: Any) -> Any:
    # The order counts: most values are texts, and isinstance of Mapping is dear.
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list):
        return [_pruned_value(each) for each in value]
    return _pruned(value) if isinstance(value, Mapping) else value
