"""What a resync leaves out: a look that reads what the last one read, which found nothing to do.

A wrong one would hide a difference for good, so any history is tried, and what a look reads is
compared with what is compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus_operator.bus.view import BusView
from postbus_operator.entities.inputs import Inputs, is_current
from postbus_operator.kube.cache import Cache
from postbus_operator.objects import Key
from postbus_operator.running.status_patch import is_same, status_json
from tests.operator.model_bus import ModelBus
from tests.operator.objects import key_secret
from tests.operator.small_cluster import SmallCluster

QUEUE, ARCHIVE = Key("Queue", "shop", "orders"), Key("Queue", "shop", "archive")
TOPIC, SUBSCRIPTION = Key("Topic", "shop", "events"), Key("Subscription", "shop", "audit")
RIVAL = Key("Queue", "yard", "rival")
KEYS = (QUEUE, ARCHIVE, TOPIC, SUBSCRIPTION)
NAMES = ("orders", "archive", "events", "events/Subscriptions/audit")


class World:
    """A bus with a queue that forwards to another one, a topic and its subscription."""

    def __init__(self) -> None:
        self.bus = ModelBus()
        self.cluster = SmallCluster(None, self.bus)
        self.number = 0
        self.cluster.apply("Queue", "archive")
        self.cluster.apply("Queue", "orders", forwardTo="archive")
        self.cluster.apply("Topic", "events")
        self.cluster.apply("Subscription", "audit", owner="events")

    def settle(self) -> None:
        asyncio.run(self.cluster.settle())

    def rest(self) -> None:
        """Look until nothing is written, and once more."""
        self.settle()
        self.settle()

    def is_current(self, key: Key) -> bool:
        """Return whether the resync would leave a look out, as the worker decides."""
        found = self.cluster.outcomes.get(key)
        if found is None or found.is_current is None or found.events or found.retry_s is not None:
            return False
        return found.is_current()

    def look(self, key: Key) -> bool:
        """Look; return whether that did nothing: no write here, nothing on the bus, no Event."""
        cluster = self.cluster
        there, version, deleted = cluster.get(key), self.bus.version, len(cluster.api.deleted)
        asyncio.run(cluster.look(key))
        outcome = cluster.outcomes[key]
        return (
            cluster.exists(key)
            and cluster.get(key) is there
            and outcome.status is not None
            and is_same(there.status, status_json(outcome.status))
            and (outcome.has_finalizer, outcome.delete_resource) == (there.has_finalizer, False)
            and (outcome.retry_s, outcome.events) == (None, ())
            and self.bus.version == version
            and len(cluster.api.deleted) == deleted
        )

    # --- what happens ---------------------------------------------------------------------------

    def next(self) -> int:
        self.number += 1
        return self.number

    def apply(self, key: Key, **spec: Any) -> None:
        if not self.cluster.exists(key) or not self.cluster.get(key).is_deleting:
            owner = "events" if key is SUBSCRIPTION else "bus"
            namespace = {"owner_namespace": "shop"} if key is RIVAL else {}
            self.cluster.apply(
                key.kind, key.name, owner=owner, namespace=key.namespace, **namespace, **spec
            )

    def move_target(self) -> None:
        self.apply(QUEUE, forwardTo=("archive", "events", "nowhere")[self.next() % 3])

    def disable_target(self) -> None:
        self.apply(ARCHIVE, status=("Active", "SendDisabled")[self.next() % 2])

    def rival(self) -> None:
        self.apply(RIVAL, entityName="Orders")

    def admit(self) -> None:
        allowed = {"from": ("All", "Same")[self.next() % 2]}
        self.cluster.apply("Namespace", "bus", operatorSpec={"allowedNamespaces": allowed})

    def show_bus(self) -> None:
        status = ("True", "False")[self.next() % 2]
        self.cluster.show(self.cluster.bus, ("Ready", status, "Ready", "as it is"))

    def secret(self) -> None:
        self.cluster.cache.observe(key_secret("Queue", "orders"))

    def lose_session(self) -> None:
        self.bus.trouble = (None, "no answer")[self.next() % 2]

    def list_again(self) -> None:
        self.bus.list_count += 1
        self.bus.view = BusView()
        asyncio.run(self.bus.catch_up())

    def follow(self) -> None:
        asyncio.run(self.bus.catch_up())


def on_each(action: Callable[[World, Key, str], None]) -> list[Callable[[World], None]]:
    """Return an action on each of the four."""

    def bound(key: Key, name: str) -> Callable[[World], None]:
        return lambda world: action(world, key, name) if world.cluster.exists(key) else None

    return [bound(key, name) for key, name in zip(KEYS, NAMES, strict=True)]


ACTIONS: list[Callable[[World], None]] = [
    World.move_target, World.disable_target, World.rival, World.admit, World.show_bus,
    World.secret, World.lose_session, World.list_again, World.follow, World.follow,
    *on_each(lambda world, key, name: world.bus.change(name, body={"requiresSession": True})),
    *on_each(lambda world, key, name: world.bus.change(name, mark="")),
    *on_each(lambda world, key, name: world.bus.change(name, mark="postbus.dev/queues/a/b/c")),
    *on_each(lambda world, key, name: world.bus.change(name, reason="requested")),
    *on_each(lambda world, key, name: world.bus.count_messages(name, world.next())),
    *on_each(lambda world, key, name: world.cluster.lose_status(key)),
    *on_each(lambda world, key, name: world.cluster.annotate(key, paused="true")),
    *on_each(lambda world, key, name: world.cluster.annotate(key, rotate_keys="primary")),
    *on_each(lambda world, key, name: world.cluster.delete(key)),
    *on_each(lambda world, key, name: world.look(key)),
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=8))
def test_a_look_that_is_left_out_would_have_done_nothing(
    history: list[Callable[[World], None]],
) -> None:
    world = World()
    world.rest()
    assert all(map(world.is_current, KEYS))
    for action in history:
        action(world)
        for key in KEYS:
            if world.is_current(key):
                assert world.look(key), key


@pytest.mark.parametrize(
    ("key", "happens"),
    [
        (QUEUE, lambda world: world.cluster.lose_status(QUEUE)),
        (QUEUE, lambda world: world.apply(QUEUE, forwardTo="archive", maxDeliveryCount=3)),
        (QUEUE, lambda world: world.cluster.annotate(QUEUE, paused="true")),
        (QUEUE, lambda world: world.cluster.annotate(QUEUE, rotate_keys="primary")),
        (QUEUE, lambda world: world.bus.change("orders", body={"lockDuration": "PT9S"})),
        (QUEUE, lambda world: world.bus.change("orders", mark="")),
        (QUEUE, lambda world: world.bus.change("orders", reason="requested")),
        (QUEUE, lambda world: world.bus.change("archive", reason="idle")),
        (QUEUE, lambda world: world.apply(ARCHIVE, status="SendDisabled")),
        (QUEUE, lambda world: world.bus.count_messages("orders", 3)),
        (QUEUE, World.rival),
        (QUEUE, World.secret),
        (QUEUE, World.show_bus),
        (QUEUE, lambda world: setattr(world.bus, "trouble", "no answer")),
        (QUEUE, lambda world: world.cluster.delete(world.cluster.bus)),
        (QUEUE, lambda world: world.cluster.delete(QUEUE)),
        (TOPIC, lambda world: world.bus.change(NAMES[3], reason="requested")),
        (SUBSCRIPTION, lambda world: world.bus.change("events", mark="")),
        (SUBSCRIPTION, lambda world: world.cluster.lose_status(TOPIC)),
        (SUBSCRIPTION, lambda world: world.cluster.delete(TOPIC)),
    ],
)
def test_each_thing_that_a_look_depends_on_asks_for_one(
    key: Key, happens: Callable[[World], None]
) -> None:
    world = World()
    world.rest()
    assert world.is_current(key)
    happens(world)
    world.follow()
    assert not world.is_current(key)


def test_what_others_do_to_others_asks_for_no_look() -> None:
    world = World()
    world.rest()
    world.cluster.apply("Queue", "another")
    world.bus.count_messages("archive", 5)
    world.settle()
    assert all(map(world.is_current, (QUEUE, TOPIC, SUBSCRIPTION)))


# --- what a look reads --------------------------------------------------------------------------

OTHERWISE = {
    "of": "`answering` has the same session",
    "trouble": "`answering` returns no session that has one",
    "tombstones": "a plan reads them only of an entity that is not there",
    "view": "its methods are noted",
}
"""Reads of a look that `is_current` makes in another way."""


class Noted:
    """An object, and what is read of it."""

    def __init__(self, target: Any, noted: set[str]) -> None:
        self._target = target
        self._noted = noted

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if isinstance(found, BusView):
            return Noted(found, self._noted)
        if not callable(found):
            self._noted.add(name)
            return found

        def call(*arguments: Any) -> Any:
            self._noted.add(f"{name}({', '.join(map(str, arguments))})")
            answer = found(*arguments)
            return Noted(answer, self._noted) if isinstance(answer, ModelBus) else answer

        async def call_later(*arguments: Any) -> Any:
            self._noted.add(name)
            return Noted(await found(*arguments), self._noted)

        return call_later if asyncio.iscoroutinefunction(found) else call


@contextmanager
def noted(world: World) -> Iterator[set[str]]:
    """Note what is read of the cache and the bus."""
    found: set[str] = set()
    cache, buses = world.cluster.cache, world.cluster.buses
    world.cluster.cache = Noted(cache, found)  # type: ignore[assignment]
    world.cluster.buses = Noted(buses, found)
    try:
        yield found
    finally:
        world.cluster.cache, world.cluster.buses = cache, buses


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.kind)
def test_a_look_reads_nothing_that_is_not_compared(key: Key) -> None:
    world = World()
    world.admit()
    world.rest()
    with noted(world) as of_a_look:
        asyncio.run(world.cluster.look(key))
        outcome = world.cluster.outcomes[key]
    assert isinstance(world.cluster.cache, Cache)
    with noted(world) as compared:
        check = outcome.is_current
        assert check is not None
        inputs: Inputs = cast(Any, check).args[-1]
        is_current(world.cluster.cache, world.cluster.buses, key, inputs)  # notes its reads
    left = {each for each in of_a_look - compared if each.partition("(")[0] not in OTHERWISE}
    assert left == set()
    assert any(each.startswith("claimants(") for each in of_a_look)
    assert any(each.startswith("find(") for each in of_a_look)
