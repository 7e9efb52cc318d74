"""Deletion in every order: each ends within a limit, and nothing is left waiting.

All buses of this module start together, each in a cluster namespace of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import pytest
from e2e.tests.bus import Bus
from e2e.tests.cluster import LIMIT_S, Space, kubectl, wait_for
from e2e.tests.figures import record
from e2e.tests.manifests import bus as bus_manifest
from e2e.tests.manifests import queue, subscription, topic

NAME: Final = "e2e-bus"
DELETED_S: Final = 10.0
CLUSTER_NAMESPACE_S: Final = 60.0
"""Measured: 12 s until the pods are gone, 16 s until Kubernetes looks at the custom resources
again, which are gone at once then."""

ORDERS: Final = ("bus-first", "entities-first", "secrets-first", "all-at-once", "namespace")
ENTITIES: Final = ("sbq/orders", "sbt/events", "sbsub/all")


@pytest.fixture(scope="module")
def buses(operator: None) -> Iterator[dict[str, Bus]]:
    """A bus with a queue, a topic and a subscription for each order."""
    spaces = {order: Space.make(order) for order in ORDERS}
    buses = {}
    try:
        for order, space in spaces.items():
            buses[order] = Bus.make(space, NAME)
            rules = [{"name": "app", "rights": ["Send", "Listen"]}]
            space.apply(
                queue("orders", NAME, authorizationRules=rules),
                topic("events", NAME),
                subscription("all", "events"),
            )
        for order, space in spaces.items():
            buses[order].wait_ready(3 * LIMIT_S)
            space.wait_ready(*ENTITIES)
        yield buses
    finally:
        for bus in buses.values():
            bus.end()
        for space in spaces.values():
            space.close()


def no_pods(space: Space) -> bool:
    return not space.kubectl("get", "pods", "--output=name")


def test_bus_with_messages_first_then_what_belongs_to_it(buses: dict[str, Bus]) -> None:
    bus = buses["bus-first"]
    space = bus.space
    bus.send("orders", "kept")
    first = space.get("sbq/orders")["status"]["entityId"]
    record("bus deleted before its entities", space.delete(f"sbns/{NAME}"), DELETED_S)
    space.wait_event(NAME, "NotEmpty")
    space.wait_condition("sbq/orders", "OwnerResolved", "False", "NotFound")
    seconds = space.delete("sbsub/all", "sbt/events", limit_s=DELETED_S)
    record("entities deleted after their bus", seconds, DELETED_S)
    wait_for(lambda: no_pods(space), bool)
    space.apply(bus_manifest(NAME))
    bus.wait_ready()
    space.wait_ready("sbq/orders")
    assert space.get("sbq/orders")["status"]["entityId"] == first
    assert bus.texts("orders", 1) == ["kept"]


def test_entities_first_then_their_bus(buses: dict[str, Bus]) -> None:
    space = buses["entities-first"].space
    seconds = space.delete("sbt/events", "sbq/orders", "sbsub/all", limit_s=DELETED_S)
    record("entities deleted before their bus, a topic before its subscription", seconds, DELETED_S)
    record("empty bus deleted", space.delete(f"sbns/{NAME}"), DELETED_S)
    wait_for(lambda: no_pods(space), bool)
    claim = space.get("pvc")["items"]
    assert [each for each in claim if "postbus.dev/purge-at" in each["metadata"]["annotations"]]


def test_secrets_first_then_everything_else(buses: dict[str, Bus]) -> None:
    space = buses["secrets-first"].space
    space.kubectl("delete", "secrets", "--all")
    record("queue deleted without Secrets", space.delete("sbq/orders"), DELETED_S)
    record("bus deleted without Secrets", space.delete(f"sbns/{NAME}"), DELETED_S)
    seconds = space.delete("sbsub/all", "sbt/events", limit_s=DELETED_S)
    record("subscription and topic deleted without Secrets and bus", seconds, DELETED_S)


def test_everything_of_a_namespace_at_once(buses: dict[str, Bus]) -> None:
    space = buses["all-at-once"].space
    record("kubectl delete postbus --all", space.delete("postbus", "--all"), DELETED_S)


def test_cluster_namespace_with_a_bus_that_others_use(buses: dict[str, Bus], space: Space) -> None:
    bus = buses["namespace"]
    change = {"spec": {"operatorSpec": {"allowedNamespaces": {"from": "All"}}}}
    bus.space.patch(f"sbns/{NAME}", change)
    foreign = queue("foreign", NAME)
    foreign["spec"]["owner"]["namespace"] = bus.space.name
    space.apply(foreign)
    space.wait_ready("sbq/foreign")
    start = time.monotonic()
    kubectl("delete", "namespace", bus.space.name, f"--timeout={CLUSTER_NAMESPACE_S:.0f}s")
    record("cluster namespace deleted", time.monotonic() - start, CLUSTER_NAMESPACE_S)
    space.wait_condition("sbq/foreign", "OwnerResolved", "False", "NotFound")
    record("queue deleted after the bus of others", space.delete("sbq/foreign"), DELETED_S)


def test_bus_that_never_started(space: Space) -> None:
    space.apply(bus_manifest(NAME, operator={"image": "postbus:missing"}), queue("orders", NAME))
    space.wait_condition("sbq/orders", "Ready", "Unknown", "BackendUnavailable")
    record("queue of a bus without an image deleted", space.delete("sbq/orders"), DELETED_S)
    record("bus without an image deleted", space.delete(f"sbns/{NAME}"), DELETED_S)


def test_queue_that_waits_for_a_bus_is_deleted(space: Space) -> None:
    space.apply(queue("orders", "missing"))
    space.wait_condition("sbq/orders", "OwnerResolved", "False", "NotFound")
    record("queue without a bus deleted", space.delete("sbq/orders"), DELETED_S)
