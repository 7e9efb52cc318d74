"""Resources and what the bus has: prune and restore, drift, adoption, claims, owners."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Final

import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.management import QueueProperties
from e2e.tests.bus import Bus
from e2e.tests.cluster import Space, wait_for
from e2e.tests.figures import record
from e2e.tests.manifests import queue

RELEASED_S: Final = 10.0
READY: Final = ("True", "Ready")


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"q-{uuid.uuid4().hex[:6]}"


def found_on(bus: Bus, name: str) -> QueueProperties | None:
    with bus.administration() as administration:
        try:
            return administration.get_queue(name)
        except ResourceNotFoundError:
            return None


def make(bus: Bus, name: str, **spec: Any) -> str:
    bus.space.apply(queue(name, bus.name, **spec))
    reference = f"sbq/{name}"
    bus.space.wait_ready(reference)
    return reference


def entity_id(bus: Bus, reference: str) -> int:
    found: int = bus.space.get(reference)["status"]["entityId"]
    return found


# --- prune and restore --------------------------------------------------------------------------


def test_queue_with_messages_stays_on_the_bus_and_returns_to_its_resource(
    shared: Bus, name: str
) -> None:
    reference = make(shared, name)
    first = entity_id(shared, reference)
    shared.send(name, "one", "two")
    record("queue with messages deleted", shared.space.delete(reference), RELEASED_S)
    shared.space.wait_event(name, "EntityKept")
    assert found_on(shared, name)
    make(shared, name)
    assert entity_id(shared, reference) == first
    assert shared.texts(name, 2) == ["one", "two"]


def test_empty_queue_is_deleted_with_its_resource(shared: Bus, name: str) -> None:
    reference = make(shared, name)
    record("empty queue deleted", shared.space.delete(reference), RELEASED_S)
    assert found_on(shared, name) is None


def test_pruned_queue_returns_with_its_messages(shared: Bus, name: str) -> None:
    reference = make(shared, name, operatorSpec={"deletionPolicy": "Delete"})
    first = entity_id(shared, reference)
    shared.send(name, "kept")
    shared.space.delete(reference)
    assert found_on(shared, name) is None
    make(shared, name, operatorSpec={"deletionPolicy": "Delete"})
    shared.space.wait_event(name, "Restored")
    assert entity_id(shared, reference) == first
    assert shared.texts(name, 1) == ["kept"]


def test_resource_may_start_empty_instead(shared: Bus, name: str) -> None:
    reference = make(shared, name, operatorSpec={"deletionPolicy": "Delete"})
    first = entity_id(shared, reference)
    shared.send(name, "left")
    shared.space.delete(reference)
    manifest = queue(name, shared.name)
    manifest["metadata"]["annotations"] = {"postbus.dev/start-empty": "true"}
    shared.space.apply(manifest)
    shared.space.wait_ready(reference)
    assert entity_id(shared, reference) != first
    found = found_on(shared, name)
    assert found is not None
    with shared.administration() as administration:
        assert administration.get_queue_runtime_properties(name).total_message_count == 0


@pytest.mark.parametrize(
    "policy", [{"deletionPolicy": "Retain"}, {"reconcilePolicy": "DetachOnDelete"}]
)
def test_retained_queue_stays_though_it_is_empty(
    shared: Bus, name: str, policy: dict[str, str]
) -> None:
    reference = make(shared, name, operatorSpec=policy)
    shared.space.delete(reference)
    assert found_on(shared, name)


def test_protected_queue_waits_until_its_protection_ends(shared: Bus, name: str) -> None:
    reference = make(shared, name, operatorSpec={"deletionProtection": True})
    shared.space.start_deletion(reference)
    shared.space.wait_condition(reference, "DeletionBlocked", "True", "Protected")
    assert found_on(shared, name)
    shared.space.patch(reference, {"spec": {"operatorSpec": {"deletionProtection": False}}})
    shared.space.wait("delete", reference, limit_s=RELEASED_S)
    assert found_on(shared, name) is None


# --- drift and adoption -------------------------------------------------------------------------


def test_queue_changed_on_the_bus_is_corrected(shared: Bus, name: str) -> None:
    reference = make(shared, name, maxDeliveryCount=7)
    with shared.administration() as administration:
        properties = administration.get_queue(name)
        properties.max_delivery_count = 3
        administration.update_queue(properties)
    wait_for(lambda: found_on(shared, name), lambda found: found and found.max_delivery_count == 7)
    shared.space.wait_event(name, "DriftCorrected")
    assert shared.space.condition(reference, "Ready") == READY


def test_observed_queue_is_left_as_it_is(shared: Bus, name: str) -> None:
    reference = f"sbq/{name}"
    observed = {"reconcilePolicy": "Observe"}
    shared.space.apply(queue(name, shared.name, operatorSpec=observed, maxDeliveryCount=7))
    with shared.administration() as administration:
        administration.create_queue(name, max_delivery_count=3)
    shared.space.wait_ready(reference)
    shared.space.wait_condition(reference, "Drifted", "True", "ObserveOnly")
    found = found_on(shared, name)
    assert found
    assert found.max_delivery_count == 3


def test_queue_deleted_on_the_bus_is_made_again(shared: Bus, name: str) -> None:
    rules = [{"name": "app", "rights": ["Send"]}]
    reference = make(shared, name, authorizationRules=rules)
    secret = f"{name}-queue-app"
    before = shared.secret(secret)["primaryKey"]
    first = entity_id(shared, reference)
    with shared.administration() as administration:
        administration.delete_queue(name)
    shared.space.wait_event(name, "EntityLost")
    wait_for(lambda: entity_id(shared, reference), lambda found: found != first)
    shared.space.wait_ready(reference)
    assert shared.secret(secret)["primaryKey"] == before
    shared.send(name, "after")
    assert shared.texts(name, 1) == ["after"]


def test_queue_made_at_run_time_is_adopted_with_its_messages(shared: Bus, name: str) -> None:
    with shared.administration() as administration:
        administration.create_queue(name)
    shared.send(name, "before")
    make(shared, name)
    shared.space.wait_event(name, "Adopted")
    assert shared.texts(name, 1) == ["before"]


def test_queue_that_differs_is_adopted_only_if_the_resource_says_so(shared: Bus, name: str) -> None:
    with shared.administration() as administration:
        administration.create_queue(name, max_delivery_count=3)
    reference = f"sbq/{name}"
    shared.space.apply(queue(name, shared.name))
    shared.space.wait_condition(reference, "Ready", "False", "OwnedByOther")
    shared.space.wait_condition(reference, "Ready", "False", "OwnedByOther")
    found = found_on(shared, name)
    assert found
    assert found.max_delivery_count == 3
    shared.space.patch(reference, {"spec": {"operatorSpec": {"adopt": "Always"}}})
    shared.space.wait_ready(reference)
    found = found_on(shared, name)
    assert found
    assert found.max_delivery_count == 10


# --- claims and owners --------------------------------------------------------------------------


def test_second_claim_of_a_queue_waits_for_the_first_one(shared: Bus, name: str) -> None:
    first = make(shared, name)
    second = f"sbq/{name}-too"
    shared.space.apply(queue(f"{name}-too", shared.name, entityName=name))
    shared.space.wait_condition(second, "Ready", "False", "OwnedByOther")
    assert shared.space.condition(first, "Ready") == READY
    shared.space.delete(first)
    shared.space.wait_ready(second)
    assert found_on(shared, name)


def test_queue_may_come_before_its_bus(space: Space) -> None:
    space.apply(queue("early", "e2e-bus"))
    space.wait_condition("sbq/early", "OwnerResolved", "False", "NotFound")
    bus = Bus.make(space, "e2e-bus")
    try:
        bus.wait_ready()
        space.wait_ready("sbq/early")
        bus.send("early", "first")
        assert bus.texts("early", 1) == ["first"]
    finally:
        bus.end()


@pytest.fixture
def tenant(operator: None) -> Iterator[Space]:
    """A cluster namespace of somebody else."""
    made = Space.make("tenant")
    try:
        yield made
    finally:
        made.close()


def test_other_cluster_namespace_needs_to_be_allowed(shared: Bus, tenant: Space, name: str) -> None:
    owner = {"name": shared.name, "namespace": shared.space.name}
    rules = [{"name": "app", "rights": ["Send", "Listen"]}]
    foreign = queue(name, shared.name, authorizationRules=rules)
    foreign["spec"]["owner"] = owner
    reference = f"sbq/{name}"
    tenant.apply(foreign)
    tenant.wait_condition(reference, "OwnerResolved", "False", "NotPermitted")
    assert found_on(shared, name) is None

    selector = {"from": "Selector", "selector": {"matchLabels": {"team": name}}}
    allow(shared, selector)
    tenant.kubectl("label", "namespace", tenant.name, f"team={name}")
    tenant.wait_ready(reference)
    with shared.sdk(f"{name}-queue-app", tenant) as client, client.get_queue_sender(name) as sender:
        sender.send_messages(ServiceBusMessage("hello"))
    assert shared.texts(name, 1) == ["hello"]

    tenant.kubectl("label", "namespace", tenant.name, "team-")
    tenant.wait_condition(reference, "OwnerResolved", "False", "NotPermitted")
    allow(shared, {"from": "All", "selector": None})
    tenant.wait_ready(reference)
    allow(shared, {"from": "Same"})
    tenant.wait_condition(reference, "OwnerResolved", "False", "NotPermitted")
    tenant.delete(reference, limit_s=RELEASED_S)


def allow(bus: Bus, whom: dict[str, Any]) -> None:
    change = {"spec": {"operatorSpec": {"allowedNamespaces": whom}}}
    bus.space.patch(f"sbns/{bus.name}", change)
