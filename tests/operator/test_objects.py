"""Resources are read from the JSON of the API server."""

from __future__ import annotations

from typing import Any

from postbus_operator.objects import Key, Resource


def queue(spec: dict[str, Any], **metadata: Any) -> Resource:
    """Return a queue as the API server shows it."""
    shown = {
        "namespace": "shop",
        "name": "orders",
        "uid": "u-1",
        "generation": 3,
        "resourceVersion": "17",
        "creationTimestamp": "2026-11-23T09:00:00Z",
    }
    return Resource.from_object("Queue", {"metadata": shown | metadata, "spec": spec})


def test_the_owner_is_in_the_namespace_of_the_resource_unless_it_names_another() -> None:
    assert queue({"owner": {"name": "bus"}}).owner == Key("Namespace", "shop", "bus")
    other = queue({"owner": {"name": "bus", "namespace": "platform"}})
    assert other.owner == Key("Namespace", "platform", "bus")


def test_the_owner_of_a_subscription_is_its_topic() -> None:
    found = queue({"owner": {"name": "events"}})
    subscription = Resource.from_object(
        "Subscription",
        {
            "metadata": {
                "namespace": "shop",
                "name": "large",
                "uid": "u-2",
                "generation": 1,
                "resourceVersion": "18",
                "creationTimestamp": "2026-11-23T09:00:00Z",
            },
            "spec": found.spec,
        },
    )
    assert subscription.owner == Key("Topic", "shop", "events")


def test_the_name_on_the_bus_is_that_of_the_resource_unless_the_spec_has_one() -> None:
    assert queue({}).entity_name == "orders"
    assert queue({"entityName": "Shop/Orders"}).entity_name == "Shop/Orders"


def test_deletion_finalizer_and_annotations_are_read() -> None:
    found = queue(
        {},
        deletionTimestamp="2026-11-23T10:00:00Z",
        finalizers=["postbus.dev/finalizer"],
        annotations={"postbus.dev/paused": "true", "postbus.dev/force-release": "false"},
    )
    assert found.is_deleting
    assert found.has_finalizer
    assert found.is_paused
    assert not found.is_released_by_force
