"""What a tenant of one cluster namespace tries on the bus of another; docs/guides/security.md."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pytest

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.objects import Key
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of
from tests.named_tests import named_tests, names_in
from tests.operator.small_cluster import SmallCluster, small_cluster

pytestmark = pytest.mark.slow

READY: Final = ("True", "Ready")
NOT_PERMITTED: Final = ("False", "NotPermitted")
FOREIGN: Final = {"owner_namespace": "shop", "namespace": "team"}
ALWAYS: Final = {"operatorSpec": {"adopt": "Always", "deletionPolicy": "Delete"}}


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "operator_tenants", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("tenants")
    with controlled_bus(dsn_of(postgres_server, "operator_tenants"), folder) as bus:
        yield bus


@pytest.fixture
async def cluster(running: ControlledBus) -> AsyncIterator[SmallCluster]:
    """A bus with the queue `orders` and the topic `events` of its own cluster namespace."""
    for kind in ("queues", "topics"):
        for each in running.caller.get(f"/v1/{kind}?top=1000").body["items"]:
            running.caller.delete(path_of(kind, each["name"]))
    async with small_cluster(running) as made:
        made.apply("Queue", "orders", maxDeliveryCount=3)
        made.apply("Topic", "events")
        await made.settle()
        yield made


def state_of(cluster: SmallCluster) -> Any:
    """Return everything that the bus has, and its version."""
    caller = cluster.running.caller
    version = caller.get("/v1/namespace").body["version"]
    return version, caller.get("/v1/queues").body, caller.get("/v1/topics").body


async def is_refused(cluster: SmallCluster, kind: str, name: str, **spec: Any) -> Key:
    """Check that a resource of the tenant changes nothing and is shown nothing; return its key."""
    before = state_of(cluster)
    tried = cluster.apply(kind, name, **FOREIGN, **spec)
    await cluster.settle()
    assert cluster.condition(tried, "OwnerResolved") == NOT_PERMITTED
    assert state_of(cluster) == before
    assert not cluster.get(tried).status.keys() & {"entityId", "countDetails", "messageCount"}
    return tried


async def test_a_tenant_makes_no_entity_on_a_bus_that_does_not_admit_it(
    cluster: SmallCluster,
) -> None:
    await is_refused(cluster, "Queue", "extra")
    await is_refused(cluster, "Topic", "more")


async def test_a_tenant_adds_no_subscription_to_a_foreign_topic(cluster: SmallCluster) -> None:
    """It would get a copy of each message."""
    await is_refused(cluster, "Subscription", "copies", owner="events")


async def test_a_tenant_forwards_into_no_foreign_bus(cluster: SmallCluster) -> None:
    await is_refused(cluster, "Queue", "source", forwardTo="orders")
    await is_refused(cluster, "Queue", "orders", forwardDeadLetteredMessagesTo="events")


async def test_a_tenant_takes_no_foreign_entity(cluster: SmallCluster) -> None:
    await is_refused(cluster, "Queue", "orders", **ALWAYS)


async def test_a_tenant_reads_no_foreign_entity(cluster: SmallCluster) -> None:
    await is_refused(cluster, "Queue", "orders", operatorSpec={"reconcilePolicy": "Observe"})


async def test_a_tenant_deletes_no_foreign_entity(cluster: SmallCluster) -> None:
    tried = await is_refused(cluster, "Queue", "orders", **ALWAYS)
    before = state_of(cluster)
    cluster.delete(tried)
    await cluster.settle()
    assert not cluster.exists(tried)
    assert state_of(cluster) == before


async def test_an_admitted_tenant_takes_and_deletes_no_entity_of_another_resource(
    cluster: SmallCluster,
) -> None:
    cluster.apply("Namespace", "bus", operatorSpec={"allowedNamespaces": {"from": "All"}})
    await cluster.settle()
    before = state_of(cluster)
    tried = cluster.apply("Queue", "orders", **FOREIGN, **ALWAYS)
    await cluster.settle()
    assert cluster.condition(tried, "Ready") == ("False", "OwnedByOther")
    cluster.delete(tried)
    await cluster.settle()
    assert state_of(cluster) == before
    assert cluster.condition(Key("Queue", "shop", "orders"), "Ready") == READY


def test_each_attempt_of_the_guide_has_its_test() -> None:
    found = named_tests("docs/guides/security.md")
    assert len(found) >= 15
    here = names_in("tests/operator/test_tenants.py")
    here.remove("test_each_attempt_of_the_guide_has_its_test")
    assert here <= {name for _, name in found}
