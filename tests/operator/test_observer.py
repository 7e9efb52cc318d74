"""Lists and events reach the cache, and what a list lacks leaves it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from postbus_operator.kube.cache import Cache
from postbus_operator.kube.observer import Observer
from postbus_operator.kube.resource_types import RESOURCES, STATEFUL_SETS
from postbus_operator.kube.watches import Watch, Watches, watches_of
from postbus_operator.objects import Key
from tests.operator.objects import condition, entity, shown

QUEUES = Watch(RESOURCES["Queue"], "shop")
SETS = Watch(STATEFUL_SETS, "shop")
ORDERS = Key("Queue", "shop", "orders")


@dataclass
class Rig:
    """An observer of two watches, at a time that the test sets."""

    now: float = 100.0
    cache: Cache = field(default_factory=Cache)
    woken: list[Key] = field(default_factory=list)
    running: set[Key] = field(default_factory=set)
    completed: int = 0

    def __post_init__(self) -> None:
        self.watches = Watches([QUEUES, SETS], self.now)
        self.observer = Observer(
            self.cache,
            self.watches,
            wake=lambda key, delay_s=0.0: self.woken.append(key),
            is_running=self.running.__contains__,
            on_complete=self.complete,
            child_name=lambda name: name,
            now=lambda: self.now,
        )

    def complete(self) -> None:
        self.completed += 1

    def listed(
        self, watch: Watch, version: int, *items: dict, token: str = "", after: str = ""
    ) -> None:
        query = {"limit": "500"} | ({"continue": after} if after else {})
        metadata = {"resourceVersion": str(version)} | ({"continue": token} if token else {})
        self.observer.listed(watch, query, {"metadata": metadata, "items": list(items)})

    def taken(self) -> list[str]:
        names = sorted({key.name for key in self.woken})
        self.woken.clear()
        return names


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_work_begins_when_the_last_page_of_the_last_list_is_there(rig: Rig) -> None:
    rig.listed(SETS, 5)
    rig.listed(QUEUES, 5, entity("Queue", "a", 1), token="next")
    assert (rig.completed, rig.watches.unlisted) == (0, [QUEUES])
    rig.listed(QUEUES, 5, entity("Queue", "b", 2), after="next")
    assert (rig.completed, rig.watches.is_complete) == (1, True)
    assert rig.taken() == ["a", "b"]


def test_items_of_a_list_get_the_type_that_the_list_has(rig: Rig) -> None:
    item = entity("Queue", "orders")
    del item["apiVersion"], item["kind"]
    rig.listed(QUEUES, 5, item)
    assert rig.cache.get(ORDERS) is not None


def test_a_second_list_drops_what_is_gone_and_wakes_it(rig: Rig) -> None:
    """kopf lists again after an interruption, and tells nobody what is missing."""
    rig.listed(QUEUES, 5, entity("Queue", "orders", 1), entity("Queue", "audit", 2))
    rig.listed(SETS, 5)
    rig.taken()
    rig.observer.event("ADDED", entity("Queue", "newer", 12))
    rig.listed(QUEUES, 9, entity("Queue", "audit", 2))
    assert rig.cache.get(ORDERS) is None
    assert rig.taken() == ["newer", "orders"]
    assert rig.cache.get(Key("Queue", "shop", "newer")) is not None


def test_a_list_that_begins_again_forgets_its_first_pages(rig: Rig) -> None:
    rig.listed(QUEUES, 5, entity("Queue", "orders", 1), token="expires")
    rig.listed(QUEUES, 9, entity("Queue", "audit", 2))
    assert rig.cache.get(ORDERS) is None


def test_an_object_of_another_namespace_stays(rig: Rig) -> None:
    rig.observer.event("ADDED", entity("Queue", "elsewhere", 1, namespace="other"))
    rig.listed(QUEUES, 9)
    assert rig.cache.count("Queue") == 1


def test_a_child_that_is_gone_wakes_its_bus(rig: Rig) -> None:
    rig.cache.observe(shown("Namespace", "bus", spec={}))
    labels = {"labels": {"postbus.dev/bus": "bus"}}
    rig.listed(SETS, 5, shown("StatefulSet", "bus-broker", 3, metadata=labels))
    assert rig.taken() == ["bus"]
    rig.listed(SETS, 9)
    assert rig.taken() == ["bus"]


def test_the_event_of_a_write_on_its_way_wakes_nobody(rig: Rig) -> None:
    """But a status that somebody else has changed does."""
    rig.observer.event("ADDED", entity("Queue", "orders", 1))
    rig.taken()
    rig.running.add(ORDERS)
    rig.observer.event("MODIFIED", entity("Queue", "orders", 2) | {"status": {"messageCount": 1}})
    assert rig.taken() == []
    rig.running.clear()
    rig.observer.event("MODIFIED", entity("Queue", "orders", 3) | {"status": {}})
    assert rig.taken() == ["orders"]


def test_an_own_write_wakes_others_only(rig: Rig) -> None:
    rig.observer.event("ADDED", shown("Namespace", "bus", spec={}))
    rig.observer.event("ADDED", entity("Queue", "orders", 2))
    rig.taken()
    ready = {"conditions": [condition("Ready", "True", "Ready")]}
    written = shown("Namespace", "bus", 3, spec={}, status=ready)
    rig.observer.written(written)
    assert rig.taken() == ["orders"]
    rig.observer.event("MODIFIED", written)
    assert rig.taken() == []


@pytest.mark.parametrize(
    "change", [{"deletionTimestamp": "2026-01-01T00:00:00Z"}, {"generation": 2}]
)
def test_what_others_changed_before_an_own_write_wakes_the_resource(
    rig: Rig, change: dict[str, object]
) -> None:
    """The answer to the write comes first: the event of the change is older than it."""
    rig.observer.event("ADDED", entity("Queue", "orders", 1))
    rig.running.add(ORDERS)
    rig.taken()
    changed = entity("Queue", "orders", 2)
    changed["metadata"] |= change
    written = changed | {"status": {"messageCount": 1}}
    written["metadata"] = changed["metadata"] | {"resourceVersion": "3"}
    rig.observer.written(written)
    assert rig.taken() == ["orders"]
    rig.observer.event("MODIFIED", changed)
    rig.observer.event("MODIFIED", written)
    assert rig.taken() == []


def test_a_status_of_a_child_that_an_own_write_shows_wakes_its_bus(rig: Rig) -> None:
    rig.cache.observe(shown("Namespace", "bus", spec={}))
    labels = {"labels": {"postbus.dev/bus": "bus"}}
    rig.observer.written(shown("StatefulSet", "bus-broker", 3, metadata=labels))
    rig.observer.event("MODIFIED", shown("StatefulSet", "bus-broker", 3, metadata=labels))
    assert rig.taken() == []
    ready = shown("StatefulSet", "bus-broker", 4, metadata=labels, status={"readyReplicas": 1})
    rig.observer.written(ready)
    assert rig.taken() == ["bus"]
    rig.observer.event("MODIFIED", ready)
    assert rig.taken() == []


def test_a_deletion_wakes_the_resource_and_ages_are_measured(rig: Rig) -> None:
    rig.observer.event("ADDED", entity("Queue", "orders", 1))
    rig.observer.event("DELETED", entity("Queue", "orders", 2))
    assert rig.taken() == ["orders"]
    rig.now = 130.0
    rig.observer.heard(QUEUES)
    rig.now = 190.0
    assert rig.watches.ages(rig.now) == {QUEUES: 60.0, SETS: 90.0}


def test_watches_of_namespaces_need_no_rights_in_the_cluster() -> None:
    named = watches_of(("a", "b"))
    assert {each.namespace for each in named} == {"a", "b"}
    assert "namespaces" not in {each.type.plural for each in named}
    everywhere = watches_of(())
    assert {each.namespace for each in everywhere} == {None}
    assert len(everywhere) == len(named) / 2 + 1
    watches = Watches(named, 0.0)
    assert watches.at("/apis/postbus.dev/v1alpha1/namespaces/a/queues") in named
    assert watches.at("/apis/postbus.dev/v1alpha1/queues") is None
