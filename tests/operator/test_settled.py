"""The worker leaves a look out at the resync alone, and only while the last one left nothing."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any, cast

import pytest

from postbus_operator.context import Context
from postbus_operator.kube.event_posting import EventPoster
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import Event, Outcome
from postbus_operator.reconcile import RECONCILERS
from postbus_operator.running.work_queue import WorkQueue
from postbus_operator.running.worker import Worker
from tests.operator.model_bus import ModelBus
from tests.operator.small_cluster import SmallCluster


class Posted:
    """Notes Events."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    async def post(self, _resource: Resource, event: Event) -> None:
        self.reasons.append(event.reason)


class Rig:
    """A worker with real reconcilers; resources are settled by the cluster, which writes."""

    def __init__(self) -> None:
        self.bus = ModelBus()
        self.cluster = SmallCluster(None, self.bus)
        self.posted = Posted()
        self.results: list[str] = []
        self.reconcilers = dict(RECONCILERS)
        self.worker = Worker(
            self.cluster.context(),
            self.reconcilers,
            WorkQueue(random.Random(1)),
            cast(EventPoster, self.posted),
            lambda kind, result: self.results.append(result),
        )

    async def look(self, key: Key) -> float | None:
        """Look once as the worker does, after all has been written."""
        await self.cluster.settle()
        return await self.worker.look(key)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_look_that_left_nothing_to_do_settles_its_resource(rig: Rig) -> None:
    queue = rig.cluster.apply("Queue", "orders")
    assert not rig.worker.is_settled(queue)
    assert await rig.look(queue) is None
    assert rig.worker.is_settled(queue)
    assert rig.results == ["done", "unchanged"]


async def test_what_is_woken_is_looked_at_though_it_is_settled(rig: Rig) -> None:
    queue = rig.cluster.apply("Queue", "orders")
    await rig.look(queue)
    assert rig.worker.is_settled(queue)
    await rig.worker.look(queue)
    assert rig.results == ["done", "unchanged", "done"]


async def test_drift_that_woke_nobody_is_found_by_the_resync(rig: Rig) -> None:
    queue = rig.cluster.apply("Queue", "orders", maxDeliveryCount=3)
    await rig.look(queue)
    rig.bus.change("orders", body={"maxDeliveryCount": 9})
    await rig.bus.catch_up()
    assert not rig.worker.is_settled(queue)
    await rig.worker.look(queue)
    live = rig.bus.live("orders")
    assert live is not None
    assert live.body == {"maxDeliveryCount": 3}


async def test_a_deleted_resource_is_not_settled(rig: Rig) -> None:
    queue = rig.cluster.apply("Queue", "orders")
    await rig.look(queue)
    rig.cluster.delete(queue)
    assert not rig.worker.is_settled(queue)


async def test_a_condition_that_is_to_be_reported_is_looked_at_until_it_passes(rig: Rig) -> None:
    queue = rig.cluster.apply("Queue", "orders", forwardTo="nowhere")
    due_s = await rig.look(queue)
    assert due_s is not None
    assert not rig.worker.is_settled(queue)
    rig.cluster.now += timedelta(seconds=due_s)
    assert await rig.worker.look(queue) is None
    assert rig.posted.reasons == ["TargetNotFound"]
    assert not rig.worker.is_settled(queue)  # its Event is posted again each hour
    rig.cluster.apply("Queue", "nowhere")
    await rig.look(queue)
    assert rig.worker.is_settled(queue)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Queue", {"operatorSpec": {"reconcilePolicy": "Observe"}}),
        ("Subscription", {"owner": "nowhere"}),
    ],
)
async def test_what_only_a_request_can_tell_is_looked_at(
    rig: Rig, kind: str, spec: dict[str, Any]
) -> None:
    key = rig.cluster.apply(kind, "orders", **spec)
    await rig.look(key)
    assert not rig.worker.is_settled(key)


async def test_a_change_between_the_start_of_a_look_and_its_reads_is_not_missed(rig: Rig) -> None:
    """The look goes on with the resource that it began with."""
    queue = rig.cluster.apply("Queue", "orders")
    await rig.look(queue)
    reconcile = rig.reconcilers["Queue"]

    async def later(context: Context, resource: Resource) -> Outcome:
        rig.cluster.apply("Queue", "orders", maxDeliveryCount=3)
        return await reconcile(context, resource)

    rig.reconcilers["Queue"] = later
    await rig.worker.look(queue)
    assert not rig.worker.is_settled(queue)


async def test_a_comparison_that_fails_is_a_look(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = rig.cluster.apply("Queue", "orders")
    await rig.look(queue)

    def fail(*_: Any) -> None:
        raise ValueError("of the test")

    monkeypatch.setattr(rig.cluster.cache, "get", fail)
    assert not rig.worker.is_settled(queue)
    assert "not compared" in caplog.text


async def test_a_refused_look_is_repeated(rig: Rig) -> None:
    queue = rig.cluster.apply("Queue", "orders")
    await rig.look(queue)
    rig.bus.trouble = "no answer"
    assert await rig.worker.look(queue) is not None
    rig.bus.trouble = None
    assert not rig.worker.is_settled(queue)
