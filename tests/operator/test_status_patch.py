"""A status is written only when it means something else, and then whole."""

from __future__ import annotations

from postbus_operator.running.status_patch import is_same, status_json
from postbus_operator.status import Condition, EntityCounts, NamespaceStatus

READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Ready",
    "message": "",
    "lastTransitionTime": "2026-11-23T09:00:00Z",
}


def test_empty_fields_are_left_out() -> None:
    status = NamespaceStatus(
        entity_counts=EntityCounts(queues=0, topics=0, subscriptions=0, unmanaged=0),
        conditions=(Condition.model_validate(READY),),
    )
    assert status_json(status) == {
        "entityCounts": {"queues": 0, "topics": 0, "subscriptions": 0, "unmanaged": 0},
        "conditions": [READY],
    }


def test_times_of_unchanged_conditions_and_empty_fields_mean_nothing() -> None:
    later = READY | {"lastTransitionTime": "2026-11-23T10:00:00Z"}
    assert is_same({"conditions": [READY], "partitions": []}, {"conditions": [later]})
    assert not is_same({"conditions": [READY]}, {"conditions": [later | {"status": "False"}]})
    assert not is_same({"conditions": [READY]}, {"conditions": [READY | {"message": "new"}]})
    assert not is_same({"conditions": [READY], "version": "1"}, {"conditions": [READY]})
    assert is_same({}, {"conditions": []})


def test_counts_of_zero_are_not_empty() -> None:
    assert not is_same({"messageCount": 0}, {})
