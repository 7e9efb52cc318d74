"""A status is written only when it means something else, and then whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postbus_operator.running.status_patch import is_same, replacement, status_json
from postbus_operator.status import Condition, EntityCounts, NamespaceStatus

READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Ready",
    "message": "",
    "lastTransitionTime": "2026-11-23T09:00:00Z",
}


def merged(there, patch):
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    made = dict(there) if isinstance(there, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), value)
    return made


VALUES = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner),
    max_leaves=8,
)
STATUSES = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), VALUES)


@given(STATUSES, STATUSES)
def test_the_patch_leaves_exactly_the_wanted_status(before, wanted) -> None:
    assert merged(before, replacement(before, wanted)) == wanted


@given(STATUSES, STATUSES, STATUSES)
def test_a_patch_of_an_outdated_view_leaves_all_that_is_wanted(before, seen, wanted) -> None:
    """Fields that the view lacks stay until the next look; those that are wanted are right."""
    patched = merged(before, replacement(seen, wanted))
    plain = {name: value for name, value in wanted.items() if not isinstance(value, dict)}
    assert plain.items() <= patched.items()


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
