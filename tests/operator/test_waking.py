"""A change wakes those whose state depends on it, and nobody else."""

from __future__ import annotations

from postbus_operator.kube.cache import Cache
from postbus_operator.kube.waking import concerned, is_own_write
from tests.operator.objects import condition, entity, shown

READY = {"conditions": [condition("Ready", "True", "Ready")]}
NOT_READY = {"conditions": [condition("Ready", "False", "Degraded")]}


def bus(version: int = 1, /, status: dict = READY, **parts) -> dict:
    return shown("Namespace", "bus", version, spec=parts.pop("spec", {}), status=status, **parts)


def cache_of(*objects: dict) -> Cache:
    cache = Cache()
    for each in objects:
        cache.observe(each)
    return cache


def woken(cache: Cache, found: dict, *, is_gone: bool = False) -> list[str]:
    change = cache.forget(found) if is_gone else cache.observe(found)
    assert change is not None
    return sorted(key.name for key in concerned(cache, change, lambda name: f"{name}-child"))


def shop() -> Cache:
    return cache_of(
        bus(),
        entity("Queue", "orders"),
        entity("Topic", "events"),
        entity("Subscription", "large", owner="events"),
        entity("Queue", "other", owner="another"),
    )


def test_a_bus_that_becomes_ready_wakes_all_below_it() -> None:
    assert woken(shop(), bus(2, NOT_READY)) == ["bus", "events", "large", "orders"]


def test_a_bus_whose_counts_change_wakes_itself_only() -> None:
    status = READY | {"entityCounts": {"queues": 2}, "readyBrokers": 1}
    assert woken(shop(), bus(2, status)) == ["bus"]


def test_a_bus_that_goes_or_comes_back_wakes_all_below_it() -> None:
    cache = shop()
    deleting = {"deletionTimestamp": "2026-11-23T10:00:00Z"}
    assert "large" in woken(cache, bus(2, metadata=deleting))
    assert "large" in woken(cache, bus(3), is_gone=True)
    assert "large" in woken(cache, bus(4, metadata={"uid": "another"}))


def test_a_bus_that_admits_other_namespaces_wakes_all_below_it() -> None:
    spec = {"operatorSpec": {"allowedNamespaces": {"from": "All"}}}
    assert "large" in woken(shop(), bus(2, spec=spec))


def test_a_topic_wakes_its_subscriptions() -> None:
    changed = entity("Topic", "events", 2, metadata={"uid": "another"})
    assert woken(shop(), changed) == ["events", "large"]


def test_an_entity_wakes_those_that_forward_to_it_when_it_comes_and_goes() -> None:
    cache = cache_of(bus(), entity("Queue", "orders", forwardTo="audit"))
    assert woken(cache, entity("Queue", "audit")) == ["audit", "orders"]
    assert woken(cache, entity("Queue", "audit", 2) | {"status": {"messageCount": 1}}) == ["audit"]
    assert woken(cache, entity("Queue", "audit", 3), is_gone=True) == ["audit", "orders"]


def test_an_entity_that_goes_wakes_the_next_claimant() -> None:
    cache = cache_of(entity("Queue", "a", entityName="orders"), entity("Queue", "orders"))
    assert woken(cache, entity("Queue", "orders", 2), is_gone=True) == ["a", "orders"]


def test_an_entity_that_goes_wakes_an_owner_that_waits_for_it() -> None:
    deleting = {"deletionTimestamp": "2026-11-23T10:00:00Z"}
    cache = cache_of(bus(metadata=deleting), entity("Queue", "orders"))
    assert woken(cache, entity("Queue", "orders", 2), is_gone=True) == ["bus", "orders"]


def test_a_child_wakes_its_owner_or_the_bus_of_its_label() -> None:
    owner = {"apiVersion": "postbus.dev/v1alpha1", "kind": "Namespace", "name": "bus"}
    foreign = {"apiVersion": "apps/v1", "kind": "Namespace", "name": "bus"}
    cache = shop()
    owned = shown("StatefulSet", "x", metadata={"ownerReferences": [owner]})
    assert woken(cache, owned) == ["bus"]
    labelled = shown("StatefulSet", "y", metadata={"labels": {"postbus.dev/bus": "bus-child"}})
    assert woken(cache, labelled) == ["bus"]
    assert woken(cache, shown("StatefulSet", "y", 2), is_gone=True) == ["bus"]
    left = {"annotations": {"postbus.dev/resource": "Namespace/shop/bus"}}
    assert woken(cache, shown("Secret", "left", metadata=left)) == ["bus"]
    assert woken(cache, shown("StatefulSet", "z", metadata={"ownerReferences": [foreign]})) == []


def test_a_secret_wakes_those_that_name_it_when_its_values_change() -> None:
    spec = {"authorizationRules": [{"name": "app", "secretName": "keys"}]}
    cache = cache_of(shown("Queue", "orders", spec={"owner": {"name": "bus"}} | spec))
    assert woken(cache, shown("Secret", "keys", data={"a": "MQ=="})) == ["orders"]
    assert woken(cache, shown("Secret", "keys", 2, data={"a": "MQ=="})) == []
    assert woken(cache, shown("Secret", "keys", 3, data={"a": "Mg=="})) == ["orders"]
    assert woken(cache, shown("Secret", "keys", 4), is_gone=True) == ["orders"]


def test_labels_of_a_namespace_of_the_cluster_wake_the_resources_in_it() -> None:
    def team(version: int, **labels: str) -> dict:
        metadata = {"name": "shop", "resourceVersion": str(version), "labels": labels}
        return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}

    cache = shop()
    assert "orders" in woken(cache, team(1, tier="gold"))
    assert woken(cache, team(2, tier="gold")) == []
    assert "orders" in woken(cache, team(3))


def test_a_write_of_status_or_finalizers_is_told_apart_from_a_change_by_others() -> None:
    cache = cache_of(entity("Queue", "orders"))
    own = entity("Queue", "orders", 2, metadata={"finalizers": ["postbus.dev/finalizer"]})
    assert is_own_write(cache.observe(own | {"status": {"messageCount": 1}}))
    for version, metadata in enumerate(
        (
            {"generation": 2},
            {"generation": 2, "annotations": {"postbus.dev/paused": "true"}},
            {"deletionTimestamp": "2026-11-23T10:00:00Z"},
        ),
        3,
    ):
        assert not is_own_write(
            cache.observe(entity("Queue", "orders", version, metadata=metadata))
        )
    assert not is_own_write(cache.forget(entity("Queue", "orders", 9)))
