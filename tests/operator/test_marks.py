"""Marks of what belongs to a resource."""

from __future__ import annotations

import pytest

from postbus_operator.bus.marks import Mark, mark_of, read_mark
from postbus_operator.objects import Key, Resource
from tests.operator.objects import entity


@pytest.mark.parametrize("kind", ["Queue", "Topic", "Subscription"])
def test_a_mark_names_the_resource_and_is_read_back(kind: str) -> None:
    resource = Resource.from_object(kind, entity(kind, "orders.eu"))
    plural = f"{kind.lower()}s"
    assert mark_of(resource) == f"postbus.dev/{plural}/shop/orders.eu/uid-of-orders.eu"
    assert read_mark(mark_of(resource)) == Mark(Key(kind, "shop", "orders.eu"), resource.uid)


def test_the_longest_mark_is_one_that_the_bus_keeps() -> None:
    metadata = {"uid": "0" * 36}
    found = entity("Subscription", "n" * 253, namespace="s" * 63, metadata=metadata)
    assert len(mark_of(Resource.from_object("Subscription", found))) <= 512


@pytest.mark.parametrize(
    "text", ["", "terraform shop", "postbus.dev/queues/shop/orders", "postbus.dev/pods/a/b/c"]
)
def test_other_marks_name_no_resource(text: str) -> None:
    assert read_mark(text) is None
