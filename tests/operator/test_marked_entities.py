"""Marks of entities: a resource takes, extends and releases what has its own, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.bus.control_client import Access
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of
from tests.operator.small_cluster import SmallCluster, small_cluster

pytestmark = pytest.mark.slow

READY = ("True", "Ready")
TAKEN = ("False", "OwnedByOther")
ORDERS = path_of("queues", "orders")


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "operator_marked", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("marked")
    with controlled_bus(dsn_of(postgres_server, "operator_marked"), folder) as bus:
        yield bus


@pytest.fixture
async def cluster(running: ControlledBus) -> AsyncIterator[SmallCluster]:
    """An empty cluster whose bus has no entities of tests before."""
    for kind in ("queues", "topics"):
        for each in running.caller.get(f"/v1/{kind}?top=1000").body["items"]:
            running.caller.delete(path_of(kind, each["name"]))
    async with small_cluster(running) as made:
        yield made


@pytest.mark.parametrize(
    ("suffix", "ready"), [("", TAKEN), ("-of-former", READY)], ids=["living", "former"]
)
async def test_an_entity_is_taken_back_unless_its_mark_is_of_a_living_resource(
    cluster: SmallCluster, suffix: str, ready: tuple[str, str]
) -> None:
    other = cluster.apply("Queue", "other")
    queue = cluster.apply("Queue", "orders")
    await cluster.settle()
    mark = f"postbus.dev/queues/shop/other/{cluster.get(other).uid}{suffix}"
    api = cluster.running.caller
    assert api.put(f"{ORDERS}?managed-by={mark}", {"maxDeliveryCount": 3}).status == 200
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == ready
    assert (api.get(ORDERS).body["managedBy"] == mark) is (ready == TAKEN)


async def test_a_subscription_waits_until_the_topic_is_that_of_its_owner(
    cluster: SmallCluster,
) -> None:
    """Below a topic of somebody else it would get a copy of each message."""
    api = cluster.running.caller
    path = path_of("topics", "events", "subscriptions", "billing")
    api.put(path_of("topics", "events"), {})
    topic = cluster.apply("Topic", "events", operatorSpec={"adopt": "Never"})
    subscription = cluster.apply("Subscription", "billing", owner="events")
    await cluster.settle()
    assert cluster.condition(topic, "Ready") == TAKEN
    assert cluster.condition(subscription, "OwnerResolved") == ("False", "NotFound")
    assert api.get(path).status == 404
    cluster.apply("Topic", "events", operatorSpec={"adopt": "Always"})
    await cluster.settle()
    assert cluster.condition(subscription, "Ready") == READY
    assert api.get(path).status == 200


async def test_a_deletion_waits_for_a_bus_that_has_not_answered_yet(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new leader knows no entity before its first list: what exists must not look like gone."""

    async def no_access(bus: Resource) -> Access:
        raise BackendUnavailable("there is no Secret bus-control-token")

    queue = cluster.apply("Queue", "orders")
    await cluster.settle()
    api = cluster.running.caller
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "_read_access", no_access)
        await cluster.restart_operator()
        cluster.delete(queue)
        await cluster.look(queue)
    assert cluster.condition(queue, "DeletionBlocked") == ("True", "BackendUnavailable")
    assert api.get(ORDERS).status == 200
    await cluster.restart_operator()
    await cluster.settle()
    assert not cluster.exists(queue)
    assert api.get(ORDERS).status == 404
