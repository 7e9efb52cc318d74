"""Idle deletion of entities of resources, on a real broker with a clock of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.objects import Key
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of
from tests.operator.live_bus import WAIT_S, advance, wait_until
from tests.operator.small_cluster import SmallCluster, small_cluster

pytestmark = pytest.mark.slow

READY = ("True", "Ready")
IDLE = ("Unknown", "AutoDeletedOnIdle")
ARGO = {"argocd.argoproj.io/instance": "shop"}


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "operator_idle", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("operator")
    with controlled_bus(dsn_of(postgres_server, "operator_idle"), folder) as bus:
        yield bus


@pytest.fixture
async def cluster(running: ControlledBus) -> AsyncIterator[SmallCluster]:
    for each in running.caller.get("/v1/queues?top=1000").body["items"]:
        running.caller.delete(path_of("queues", each["name"]))
    async with small_cluster(running) as made:
        yield made


def idle_queue(cluster: SmallCluster, policy: str | None, **more: Any) -> Key:
    """Apply a queue that is deleted after five minutes without use."""
    spec = {"operatorSpec": {"onAutoDelete": policy}} if policy else {}
    more["operatorSpec"] = spec.get("operatorSpec", {}) | more.pop("operator_spec", {})
    return cluster.apply("Queue", "temporary", autoDeleteOnIdle="PT5M", **more)


async def delete_idle(cluster: SmallCluster) -> None:
    """Move the clock until the bus has deleted the queue."""
    caller = cluster.running.caller
    async with asyncio.timeout(WAIT_S):
        while caller.get(path_of("queues", "temporary")).status == 200:
            await advance(caller, "PT6M")


async def let_it_idle(cluster: SmallCluster) -> None:
    """Have the bus delete the queue, and look at everything."""
    await delete_idle(cluster)
    await cluster.settle()


async def test_a_resource_goes_with_its_idle_entity(cluster: SmallCluster) -> None:
    queue = idle_queue(cluster, None)
    await cluster.settle()
    assert cluster.get(queue).status["onAutoDelete"] == "DeleteResource"
    await let_it_idle(cluster)
    assert not cluster.exists(queue)
    assert cluster.reasons() == ["AutoDeletedOnIdle"]


@pytest.mark.behaviour("S123")
async def test_deletion_protection_does_not_hold_idle_deletion_back(cluster: SmallCluster) -> None:
    queue = idle_queue(cluster, None, operator_spec={"deletionProtection": True})
    await cluster.settle()
    cluster.delete(queue)
    await cluster.settle()
    assert cluster.condition(queue, "DeletionBlocked") == ("True", "Protected")
    assert cluster.running.caller.get(path_of("queues", "temporary")).status == 200
    await let_it_idle(cluster)
    assert not cluster.exists(queue)


async def test_a_resource_that_a_tool_keeps_stays_without_entity(cluster: SmallCluster) -> None:
    queue = idle_queue(cluster, None, labels=ARGO)
    await cluster.settle()
    assert cluster.get(queue).status["onAutoDelete"] == "KeepResource"
    await let_it_idle(cluster)
    assert cluster.condition(queue, "Ready") == IDLE
    assert cluster.condition(queue, "Programmed")[0] == "False"
    assert "recreate-requested-at" in cluster.message(queue, "Ready")
    assert "messageCount" not in cluster.get(queue).status
    assert await cluster.settle() == 1
    assert cluster.reasons() == ["AutoDeletedOnIdle"]


async def test_it_stays_deleted_over_restart_lost_status_and_old_feed(
    cluster: SmallCluster,
) -> None:
    queue = idle_queue(cluster, "KeepResource")
    await cluster.settle()
    await let_it_idle(cluster)
    await cluster.restart_operator()
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == IDLE
    cluster.lose_status(queue)
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == IDLE
    session = await cluster.buses.of(cluster.get(cluster.bus))
    assert session is not None
    lists = session.list_count
    session.view.version += 1_000_000
    await wait_until(lambda: session.list_count > lists)
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == IDLE
    assert cluster.running.caller.get(path_of("queues", "temporary")).status == 404


async def test_idle_deletion_while_the_operator_was_away(cluster: SmallCluster) -> None:
    kept = idle_queue(cluster, "KeepResource")
    await cluster.settle()
    await cluster.buses.close()
    await delete_idle(cluster)
    await cluster.restart_operator()
    await cluster.settle()
    assert cluster.condition(kept, "Ready") == IDLE


async def test_a_changed_spec_brings_it_back(cluster: SmallCluster) -> None:
    queue = idle_queue(cluster, "KeepResource")
    await cluster.settle()
    await let_it_idle(cluster)
    idle_queue(cluster, "KeepResource", maxDeliveryCount=7)
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY
    assert cluster.reasons() == ["AutoDeletedOnIdle", "Recreated"]
    await let_it_idle(cluster)
    assert cluster.condition(queue, "Ready") == IDLE


async def test_a_new_request_brings_it_back_once(cluster: SmallCluster) -> None:
    queue = idle_queue(cluster, "KeepResource")
    cluster.annotate(queue, recreate_requested_at="2026-11-01T00:00:00Z")
    await cluster.settle()
    await let_it_idle(cluster)
    assert cluster.condition(queue, "Ready") == IDLE
    cluster.annotate(queue, recreate_requested_at="2026-11-23T12:00:00Z")
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY
    await let_it_idle(cluster)
    assert cluster.condition(queue, "Ready") == IDLE


async def test_recreate_makes_it_again(cluster: SmallCluster) -> None:
    queue = idle_queue(cluster, "Recreate")
    await cluster.settle()
    former = cluster.get(queue).status["entityId"]
    await delete_idle(cluster)
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY
    assert cluster.get(queue).status["entityId"] != former
