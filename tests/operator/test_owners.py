"""Who may have entities on a bus."""

from __future__ import annotations

import pytest

from postbus_operator.entities.owners import admits

NOBODY_KEEPS_OUT = [
    {},
    {"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["test"]}]},
    {"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]},
]


@pytest.mark.parametrize("selector", NOBODY_KEEPS_OUT)
def test_a_selector_admits_no_namespace_whose_labels_are_unknown(selector: dict) -> None:
    """An operator without rights in the whole cluster cannot read them."""
    allowed = {"from": "Selector", "selector": selector}
    own = {"kubernetes.io/metadata.name": "team"}
    assert admits(allowed, "team", "shop", lambda _: own)
    assert not admits(allowed, "team", "shop", lambda _: {})
    assert admits(allowed, "shop", "shop", lambda _: {})
