"""Any order of what people, other programs, idleness and outages do to a queue and its resource.

The reconciler is the real one, the bus is `model_bus`, and its feed lags behind in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from postbus_operator.objects import Key
from tests.operator.model_bus import ModelBus
from tests.operator.small_cluster import SmallCluster

QUEUE = Key("Queue", "shop", "orders")
POLICIES = ("Delete", "DeleteIfEmpty", "Retain")
ON_IDLE = ("KeepResource", "Recreate", "DeleteResource")
READY = ("True", "Ready")
TAKEN = ("False", "OwnedByOther")
IDLE = ("Unknown", "AutoDeletedOnIdle")

Action = Callable[["World"], None]


class World:
    """A queue's resource, its bus, and what the test knows of both."""

    def __init__(self, policy: str, on_idle: str) -> None:
        self.bus = ModelBus()
        self.cluster = SmallCluster(None, self.bus)
        self.spec: dict[str, Any] = {
            "maxDeliveryCount": 11,  # changes lead away from 10, a default that a body leaves out
            "operatorSpec": {"deletionPolicy": policy, "onAutoDelete": on_idle},
        }
        self.requests = 0
        self.apply()

    def apply(self) -> None:
        if not self.cluster.exists(QUEUE) or not self.cluster.get(QUEUE).is_deleting:
            self.cluster.apply("Queue", "orders", **self.spec)

    # --- what happens ---------------------------------------------------------------------------

    def change_spec(self) -> None:
        self.spec["maxDeliveryCount"] += 1
        self.apply()

    def drift(self) -> None:
        self.bus.change("orders", body={"maxDeliveryCount": 1})

    def idle(self) -> None:
        known = self.bus.live("orders")
        if known is not None and not known.messages:
            self.bus.change("orders", reason="idle")

    def delete_on_the_bus(self) -> None:
        self.bus.change("orders", reason="requested")

    def retain_on_the_bus(self) -> None:
        self.bus.change("orders", reason="requested", is_retained=True)

    def send(self) -> None:
        known = self.bus.live("orders")
        if known is not None:
            self.bus._entities[known.number] = known.__class__(
                **{**known.__dict__, "messages": known.messages + 1}
            )

    def remove_mark(self) -> None:
        self.bus.change("orders", mark="")

    def lose_status(self) -> None:
        if self.cluster.exists(QUEUE):
            self.cluster.lose_status(QUEUE)

    def delete(self) -> None:
        if self.cluster.exists(QUEUE):
            self.cluster.delete(QUEUE)

    def request(self) -> None:
        self.requests += 1
        if self.cluster.exists(QUEUE):
            self.cluster.annotate(QUEUE, recreate_requested_at=str(self.requests))

    # --- what the operator does -----------------------------------------------------------------

    def look(self) -> None:
        if self.cluster.exists(QUEUE):
            asyncio.run(self.cluster.look(QUEUE))

    def follow(self) -> None:
        asyncio.run(self.bus.catch_up())

    def settle(self) -> int:
        return asyncio.run(self.cluster.settle())


ACTIONS: list[Action] = [
    World.change_spec, World.drift, World.idle, World.delete_on_the_bus, World.retain_on_the_bus,
    World.send, World.remove_mark, World.lose_status, World.delete, World.apply, World.request,
    World.look, World.look, World.look, World.follow,
]  # fmt: skip
HISTORIES = st.lists(st.sampled_from(ACTIONS), max_size=25)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(POLICIES), st.sampled_from(ON_IDLE), HISTORIES)
def test_any_history_converges_and_a_second_look_does_nothing(
    policy: str, on_idle: str, history: list[Action]
) -> None:
    world = World(policy, on_idle)
    for action in history:
        action(world)
    assert world.settle() <= 4
    before = world.bus.version, world.bus.puts, world.cluster.status_writes
    assert world.settle() == 1
    assert (world.bus.version, world.bus.puts, world.cluster.status_writes) == before
    if not world.cluster.exists(QUEUE):
        return
    live = world.bus.live("orders")
    state = world.cluster.condition(QUEUE, "Ready")
    if state == IDLE:
        assert live is None
        assert on_idle == "KeepResource"
    elif state == TAKEN:  # nothing says any more that it was its own, and the spec is another one
        assert live is not None
        assert live.mark == ""
    else:
        assert state == READY, world.cluster.get(QUEUE).status
        assert live is not None
        assert live.body == {"maxDeliveryCount": world.spec["maxDeliveryCount"]}
        assert world.cluster.get(QUEUE).uid in live.mark


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(POLICIES), st.sampled_from(ON_IDLE), HISTORIES)
def test_a_deletion_always_ends(policy: str, on_idle: str, history: list[Action]) -> None:
    world = World(policy, on_idle)
    for action in history:
        action(world)
    world.delete()
    world.settle()
    assert not world.cluster.exists(QUEUE)


@settings(max_examples=100, deadline=None)
@given(HISTORIES)
def test_messages_are_lost_by_nobody_but_those_who_delete_them(history: list[Action]) -> None:
    """The operator deletes nothing for good that holds a message."""
    world = World("Delete", "KeepResource")
    for action in history:
        if action is not World.delete_on_the_bus:
            action(world)
    world.settle()
    for each in world.bus._entities.values():
        assert each.reason is None or each.is_retained or not each.messages


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([World.look, World.follow, World.lose_status]), max_size=12))
def test_what_was_deleted_as_idle_is_not_made_again(history: list[Action]) -> None:
    world = World("DeleteIfEmpty", "KeepResource")
    world.settle()
    world.idle()
    for action in history:
        action(world)
    world.settle()
    assert world.bus.made == [1]
    assert world.cluster.condition(QUEUE, "Ready") == IDLE
    world.request()
    world.settle()
    assert world.bus.made == [1, 2]
    assert world.cluster.condition(QUEUE, "Ready") == READY
