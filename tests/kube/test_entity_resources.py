"""Queues, topics and subscriptions on a real API server, with a real broker behind their bus.

Nobody runs the brokers of a Namespace here: the buses of all cluster namespaces are one broker on
this machine, whose entities have names of their own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from kubernetes.aio.client import Configuration

from postbus.contract.control import MAX_EPOCH
from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.bus.access import open_sessions
from postbus_operator.context import StillLeads
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.kube.resource_types import SECRETS
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of
from tests.kube.api_server import ApiServer
from tests.kube.clients import configuration_of
from tests.kube.operator_run import Run, eventually, leading
from tests.kube.shop import PERIODS, Shop
from tests.operator.live_bus import leads, was_replaced

pytestmark = pytest.mark.slow

RECONCILERS = dict.fromkeys(("Queue", "Topic", "Subscription"), reconcile_entity)
EPOCHS = itertools.count(1)


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "kube_entities", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("broker")
    with controlled_bus(dsn_of(postgres_server, "kube_entities"), folder) as bus:
        yield bus


@pytest.fixture
async def configuration(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Configuration:
    return await configuration_of(server, monkeypatch)


@pytest.fixture
def shop(server: ApiServer, running: ControlledBus) -> Shop:
    return Shop(server, running)


@asynccontextmanager
async def operator(
    configuration: Configuration,
    running: ControlledBus,
    still_leads: StillLeads = leads,
    elsewhere: Mapping[str, ControlledBus] | None = None,
    **settings: Any,
) -> AsyncIterator[Run]:
    """Run an operator; `elsewhere`: brokers of cluster namespaces that have their own."""
    others = elsewhere or {}
    sessions = partial(open_sessions, periods=PERIODS)
    async with leading(
        configuration,
        RECONCILERS,
        open_sessions=sessions,
        control_url=lambda bus: others.get(bus.key.namespace, running).caller.address,
        epoch=next(EPOCHS),
        still_leads=still_leads,
        **settings,
    ) as run:
        yield run


def writes(run: Run) -> float:
    """Return the number of requests that change something."""
    return sum(
        sample.value
        for family in run.metrics._registry.collect()
        for sample in family.samples
        if sample.name == "postbus_operator_api_requests_total"
        and sample.labels["verb"] not in ("get", "list", "watch")
    )


async def test_applied_entities_become_ready_and_a_restart_writes_nothing(
    configuration: Configuration, shop: Shop, running: ControlledBus
) -> None:
    async with operator(configuration, running):
        shop.make("Subscription", "audit", owner={"name": "events"}, forwardTo=shop.entity("late"))
        shop.make("Queue", "orders", maxDeliveryCount=3)
        await eventually(
            lambda: shop.condition("Queue", "orders", "OwnerResolved") == ("False", "NotFound")
        )
        shop.make("Topic", "events")
        shop.make("Namespace", "bus")
        for kind, name in (("Queue", "orders"), ("Topic", "events"), ("Subscription", "audit")):
            await eventually(partial(shop.is_ready, kind, name), name)
        resolved = partial(shop.condition, "Subscription", "audit", "ForwardTargetsResolved")
        assert resolved() == ("False", "TargetNotFound")
        shop.make("Queue", "late")
        await eventually(lambda: resolved() == ("True", "Resolved"))
        await eventually(partial(shop.is_ready, "Queue", "late"))
        await eventually(lambda: shop.get("Topic", "events")["status"]["subscriptionCount"] == 1)
        status = shop.get("Queue", "orders")["status"]
        found = running.caller.get(path_of("queues", shop.entity("orders"))).body
        assert status["entityId"] == str(found["entityId"])
        assert found["properties"]["maxDeliveryCount"] == 3
    before = {name: shop.get("Queue", name) for name in ("orders", "late")}
    version = running.caller.get("/v1/namespace").body["version"]
    # Only here: what other tests left behind is due for events at any time.
    async with operator(configuration, running, namespaces=(shop.name,)) as run:
        keys = [each.key for each in run.looks]
        await eventually(lambda: len({each.key for each in run.looks}) >= 4, str(keys))
        await eventually(lambda: run.looked_at("late") >= 2)  # the second one with counts
        assert {name: shop.get("Queue", name) for name in before} == before
        assert running.caller.get("/v1/namespace").body["version"] == version
        assert writes(run) == 0


async def test_a_bus_is_looked_at_after_its_entities_have_changed(
    configuration: Configuration, shop: Shop, running: ControlledBus
) -> None:
    """Its resource shows how many it has."""
    async with operator(configuration, running, namespaces=(shop.name,)) as run:
        shop.make("Namespace", "bus")
        shop.make("Queue", "orders")
        await eventually(partial(shop.is_ready, "Queue", "orders"))
        before = run.looked_at("bus")
        shop.make("Queue", "late")
        await eventually(lambda: run.looked_at("bus") > before)


KINDS = (("Namespace", "bus"), ("Topic", "events"), ("Subscription", "audit"), ("Queue", "orders"))


async def test_deletion_in_every_order_ends(
    configuration: Configuration, server: ApiServer, running: ControlledBus
) -> None:
    """Every third of 24 orders; in half of them all are deleted at once."""
    orders = list(itertools.permutations(KINDS))[::3]
    shops = [Shop(server, running) for _ in orders]
    async with operator(configuration, running):
        for each in shops:
            each.make("Namespace", "bus")
            each.make("Queue", "orders", operatorSpec={"deletionPolicy": "Delete"})
            each.make("Topic", "events")
            each.make("Subscription", "audit", owner={"name": "events"})
            await asyncio.sleep(0)
        for each in shops:
            for kind, name in KINDS[1:]:
                await eventually(partial(each.is_ready, kind, name), f"{each.name} {name}")
        for number, (each, order) in enumerate(zip(shops, orders, strict=True)):
            for kind, name in order:
                each.delete(kind, name)
                if number % 2:  # each deletion is over before the next
                    await eventually(partial(each.is_gone, kind, name), f"{order} {name}")
        for each, order in zip(shops, orders, strict=True):
            for kind, name in KINDS:
                await eventually(partial(each.is_gone, kind, name), f"{order} {name}")


async def test_deletions_while_the_operator_was_away_and_without_its_secret(
    configuration: Configuration, shop: Shop, running: ControlledBus
) -> None:
    async with operator(configuration, running):
        shop.make("Namespace", "bus")
        shop.make("Queue", "orders")
        shop.make("Topic", "events")
        shop.make("Subscription", "audit", owner={"name": "events"})
        for kind, name in KINDS[1:]:
            await eventually(partial(shop.is_ready, kind, name), name)
    for kind, name in KINDS[1:]:
        shop.delete(kind, name)
        assert not shop.is_gone(kind, name)
    shop.server.request("DELETE", SECRETS.path(shop.name, "bus-control-token"))
    async with operator(configuration, running):
        await eventually(lambda: shop.is_gone("Subscription", "audit"))  # its topic goes
        blocked = partial(shop.condition, "Queue", "orders", "DeletionBlocked")
        await eventually(lambda: blocked() == ("True", "BackendUnavailable"))
        notes = {"annotations": {"postbus.dev/force-release": "true"}}
        shop.change("Queue", "orders", metadata=notes)
        await eventually(lambda: shop.is_gone("Queue", "orders"))
        shop.delete("Namespace", "bus")
        await eventually(lambda: shop.is_gone("Topic", "events"))
    assert running.caller.get(path_of("queues", shop.entity("orders"))).status == 200


async def test_a_queue_with_messages_is_kept_and_an_event_says_how_many(
    configuration: Configuration, shop: Shop, running: ControlledBus
) -> None:
    async with operator(configuration, running):
        shop.make("Namespace", "bus")
        shop.make("Queue", "orders")
        await eventually(lambda: shop.is_ready("Queue", "orders"))
        await asyncio.to_thread(send, running, shop.entity("orders"), "a", "b")
        await eventually(lambda: shop.get("Queue", "orders")["status"]["messageCount"] == 2)
        shop.delete("Queue", "orders")
        await eventually(lambda: shop.is_gone("Queue", "orders"))
        [event] = await eventually(shop.events)
    assert (event["reason"], event["type"]) == ("EntityKept", "Warning")
    assert "2 messages" in event["note"]
    found = running.caller.get(path_of("queues", shop.entity("orders"))).body
    assert found["managedBy"] == ""


async def test_a_later_leader_is_the_only_one_that_changes_the_bus(
    configuration: Configuration, shop: Shop, running: ControlledBus
) -> None:
    async with operator(configuration, running, was_replaced) as former:
        shop.make("Namespace", "bus")
        shop.make("Queue", "orders")
        await eventually(lambda: shop.is_ready("Queue", "orders"))
        later = str(next(EPOCHS))
        path = path_of("queues", shop.entity("of-the-later"))
        running.caller.put(path, {}, headers={"Postbus-Caller-Epoch": later})
        shop.change("Queue", "orders", spec={"maxDeliveryCount": 4})
        await eventually(former.task.done)
        assert "LeadershipLost" in repr(former.task.exception())
    found = running.caller.get(path_of("queues", shop.entity("orders"))).body
    assert found["properties"]["maxDeliveryCount"] == 10


async def test_a_bus_with_a_higher_epoch_stops_nothing_but_itself(
    server: ApiServer,
    configuration: Configuration,
    shop: Shop,
    running: ControlledBus,
    postgres_server: EmbeddedPostgres,
    tmp_path: Path,
) -> None:
    make_database(postgres_server, "kube_entities_moved", template=TEMPLATE)
    with controlled_bus(dsn_of(postgres_server, "kube_entities_moved"), tmp_path) as moved:
        other = Shop(server, moved)
        path = path_of("queues", other.entity("of-another-cluster"))
        moved.caller.put(path, {}, headers={"Postbus-Caller-Epoch": str(MAX_EPOCH)})
        async with operator(configuration, running, elsewhere={other.name: moved}) as run:
            for each in (other, shop):
                each.make("Namespace", "bus")
                each.make("Queue", "orders")
            await eventually(lambda: shop.is_ready("Queue", "orders"))
            await eventually(
                lambda: other.condition("Queue", "orders") == ("Unknown", "BackendUnavailable")
            )
            [message] = [
                each["message"]
                for each in other.get("Queue", "orders")["status"]["conditions"]
                if each["type"] == "Ready"
            ]
            assert "DELETE /v1/caller-epoch" in message
            shop.make("Queue", "later")
            await eventually(lambda: shop.is_ready("Queue", "later"))
            assert not run.task.done()
            moved.caller.delete("/v1/caller-epoch")
            await eventually(lambda: other.is_ready("Queue", "orders"))


def send(running: ControlledBus, queue: str, *bodies: str) -> None:
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage(body) for body in bodies])
