"""Queues, topics and subscriptions as resources, on a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import Caller, ControlledBus, controlled_bus, path_of
from tests.operator.objects import key_secret
from tests.operator.small_cluster import SmallCluster, small_cluster

pytestmark = pytest.mark.slow

READY = ("True", "Ready")


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "operator_entities", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("operator")
    with controlled_bus(dsn_of(postgres_server, "operator_entities"), folder) as bus:
        yield bus


@pytest.fixture
async def cluster(running: ControlledBus) -> AsyncIterator[SmallCluster]:
    """An empty cluster whose bus has no entities of tests before."""
    for kind in ("queues", "topics"):
        for each in running.caller.get(f"/v1/{kind}?top=1000").body["items"]:
            running.caller.delete(path_of(kind, each["name"]))
    async with small_cluster(running) as made:
        yield made


def properties(api: Caller, *parts: str) -> dict[str, Any]:
    found: dict[str, Any] = api.get(path_of(*parts)).body["properties"]
    return found


def send(running: ControlledBus, entity: str, *bodies: str) -> None:
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_sender(entity) as sender:
        sender.send_messages([ServiceBusMessage(body) for body in bodies])


def received(running: ControlledBus, queue: str, count: int) -> list[str]:
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_receiver(queue, max_wait_time=5) as receiver:
        found = []
        while len(found) < count:
            for each in receiver.receive_messages(count, max_wait_time=5):
                found.append(str(each))
                receiver.complete_message(each)
        return found


async def test_applied_entities_are_ready_with_everything_that_the_bus_says(
    cluster: SmallCluster,
) -> None:
    queue = cluster.apply("Queue", "orders", maxDeliveryCount=3, lockDuration="PT30S")
    topic = cluster.apply("Topic", "events")
    rules = [{"name": "large", "sqlFilter": {"sqlExpression": "amount > 1000"}}]
    subscription = cluster.apply("Subscription", "audit", owner="events", rules=rules)
    await cluster.settle()
    for key in (queue, topic, subscription):
        assert cluster.condition(key, "Ready") == READY, cluster.get(key).status
        assert cluster.condition(key, "Valid") == ("True", "Accepted")
        assert cluster.condition(key, "OwnerResolved") == ("True", "Resolved")
        assert cluster.condition(key, "Programmed") == ("True", "Applied")
        assert cluster.condition(key, "ForwardTargetsResolved") == ("True", "Resolved")
        assert cluster.condition(key, "Reconciling") == ("", "")
        status = cluster.get(key).status
        assert status["observedGeneration"] == 1
        assert status["status"] == "Active"
        assert status["countDetails"]["activeMessageCount"] == 0
        assert status["onAutoDelete"] == "DeleteResource"
    assert cluster.get(topic).status["subscriptionCount"] == 1
    assert cluster.get(subscription).status["ruleCount"] == 1
    found = cluster.running.caller.get(path_of("queues", "orders")).body
    status = cluster.get(queue).status
    assert status["entityId"] == str(found["entityId"])
    assert status["appliedHash"] == found["appliedHash"]
    assert status["partitioned"] is False
    assert (found["properties"]["maxDeliveryCount"], found["managedBy"]) == (
        3,
        f"postbus.dev/queues/shop/orders/{cluster.get(queue).uid}",
    )


async def test_a_second_look_writes_nothing(cluster: SmallCluster) -> None:
    cluster.apply("Queue", "orders", forwardTo="target")
    cluster.apply("Queue", "target")
    await cluster.settle()
    version = cluster.running.caller.get("/v1/namespace").body["version"]
    before = cluster.status_writes
    assert await cluster.settle() == 1
    await cluster.restart_operator()
    assert await cluster.settle() == 1
    assert cluster.status_writes == before
    assert cluster.running.caller.get("/v1/namespace").body["version"] == version


async def test_two_queues_may_dead_letter_into_each_other(cluster: SmallCluster) -> None:
    one = cluster.apply("Queue", "one", forwardDeadLetteredMessagesTo="two")
    await cluster.settle()
    assert cluster.condition(one, "Ready") == READY
    assert cluster.condition(one, "ForwardTargetsResolved") == ("False", "TargetNotFound")
    two = cluster.apply("Queue", "two", forwardDeadLetteredMessagesTo="one")
    await cluster.settle()
    api = cluster.running.caller
    assert properties(api, "queues", "one")["forwardDeadLetteredMessagesTo"] == "two"
    assert properties(api, "queues", "two")["forwardDeadLetteredMessagesTo"] == "one"
    for key in (one, two):
        assert cluster.condition(key, "ForwardTargetsResolved") == ("True", "Resolved")


async def test_a_target_that_appears_during_the_creation_is_not_forgotten(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.settle()
    queue = cluster.apply("Queue", "source", forwardTo="target")
    target = cluster.apply("Queue", "target")
    session = await cluster.buses.of(cluster.get(cluster.bus))
    assert session is not None
    put = session.control.put

    async def put_while_the_target_appears(*arguments: Any) -> Any:
        monkeypatch.undo()
        answer = await put(*arguments)
        await cluster.look(target)
        return answer

    monkeypatch.setattr(session.control, "put", put_while_the_target_appears)
    await cluster.look(queue)
    assert cluster.condition(queue, "ForwardTargetsResolved")[0] == "False"
    await cluster.look(queue)
    assert cluster.condition(queue, "ForwardTargetsResolved") == ("True", "Resolved")
    found = properties(cluster.running.caller, "queues", "source")
    assert found["forwardTo"] == "target"


async def test_a_missing_target_of_a_known_queue_is_shown_and_other_fields_change(
    cluster: SmallCluster,
) -> None:
    cluster.apply("Queue", "target")
    queue = cluster.apply("Queue", "orders", forwardTo="target")
    await cluster.settle()
    cluster.running.caller.delete(path_of("queues", "target"))
    cluster.delete(cluster.get(queue).key._replace(name="target"))
    await cluster.settle()
    assert cluster.condition(queue, "ForwardTargetsResolved") == ("False", "TargetNotFound")
    cluster.apply("Queue", "orders", forwardTo="target", maxDeliveryCount=4)
    await cluster.settle()
    found = properties(cluster.running.caller, "queues", "orders")
    assert (found["maxDeliveryCount"], found["forwardTo"]) == (4, "target")
    cluster.apply("Queue", "target", status="Disabled")
    await cluster.settle()
    assert cluster.condition(queue, "ForwardTargetsResolved") == ("False", "TargetDisabled")


async def test_a_circle_of_forwards_is_accepted_with_a_warning(cluster: SmallCluster) -> None:
    one = cluster.apply("Queue", "one", forwardTo="two")
    cluster.apply("Queue", "two", forwardTo="one")
    await cluster.settle()
    await cluster.settle()
    assert cluster.condition(one, "Valid") == ("True", "ForwardCycle")
    assert "loop" in cluster.message(one, "Valid")


async def test_drift_is_corrected(cluster: SmallCluster) -> None:
    queue = cluster.apply("Queue", "orders", maxDeliveryCount=3)
    await cluster.settle()
    cluster.running.caller.put(path_of("queues", "orders"), {"maxDeliveryCount": 9})
    await cluster.settle()
    assert properties(cluster.running.caller, "queues", "orders")["maxDeliveryCount"] == 3
    assert cluster.reasons() == ["DriftCorrected"]
    assert cluster.condition(queue, "Ready") == READY


async def test_rules_without_a_list_belong_to_the_bus(cluster: SmallCluster) -> None:
    cluster.apply("Topic", "events")
    free = cluster.apply("Subscription", "free", owner="events")
    none = cluster.apply("Subscription", "none", owner="events", rules=[])
    await cluster.settle()
    rule = {"name": "mine", "sqlFilter": {"sqlExpression": "a = 1"}}
    api = cluster.running.caller
    for name in ("free", "none"):
        path = path_of("topics", "events", "subscriptions", name, "rules", "mine")
        assert api.put(path, rule).status == 201
    await cluster.settle()
    free_rules = properties(api, "topics", "events", "subscriptions", "free")["rules"]
    assert sorted(each["name"] for each in free_rules) == ["$Default", "mine"]
    assert properties(api, "topics", "events", "subscriptions", "none")["rules"] == []
    assert cluster.get(free).status["ruleCount"] == 2
    assert cluster.get(none).status["ruleCount"] == 0


@pytest.mark.parametrize(
    ("kind", "spec", "valid", "stalled", "words"),
    [
        ("Queue", {"maxMessageSizeInKilobytes": 2048}, "SkuUnsupported", "SkuUnsupported",
         "can only be changed in Premium"),
        ("Queue", {"maxSizeInMegabytes": 10240}, "SkuUnsupported", "SkuUnsupported", "this tier"),
        ("Subscription", {"rules": [{"name": "r", "sqlFilter": {"sqlExpression": "a >"}}]},
         "InvalidFilter", "InvalidFilter", "rule r"),
    ],
)  # fmt: skip
async def test_what_the_bus_refuses_is_stalled_in_its_words(
    cluster: SmallCluster, kind: str, spec: Any, valid: str, stalled: str, words: str
) -> None:
    cluster.apply("Topic", "events")
    owner = "events" if kind == "Subscription" else "bus"
    key = cluster.apply(kind, "wrong", owner=owner, **spec)
    await cluster.settle()
    assert cluster.condition(key, "Valid") == ("False", valid), cluster.message(key, "Valid")
    assert cluster.condition(key, "Stalled") == ("True", stalled)
    assert cluster.condition(key, "Ready") == ("False", "Invalid")
    assert words in cluster.message(key, "Valid")
    assert cluster.reasons() == [stalled]
    cluster.apply(kind, "wrong", owner=owner)
    await cluster.settle()
    assert cluster.condition(key, "Ready") == READY
    assert cluster.condition(key, "Stalled") == ("", "")


# --- owners and claims --------------------------------------------------------------------------


async def test_entities_may_come_before_their_owner(cluster: SmallCluster) -> None:
    subscription = cluster.apply("Subscription", "audit", owner="events")
    queue = cluster.apply("Queue", "orders", owner="later")
    await cluster.settle()
    assert cluster.condition(subscription, "OwnerResolved") == ("False", "NotFound")
    assert cluster.condition(queue, "Ready") == ("False", "OwnerNotReady")
    assert cluster.condition(queue, "Reconciling") == ("True", "WaitingForOwner")
    cluster.apply("Topic", "events")
    cluster.apply("Namespace", "later")
    await cluster.settle()
    await cluster.settle()
    assert cluster.condition(subscription, "Ready") == READY
    assert cluster.condition(queue, "OwnerResolved") == ("True", "Resolved")


async def test_an_entity_is_not_ready_before_its_bus_and_stays_so_after_it(
    cluster: SmallCluster,
) -> None:
    cluster.show(cluster.bus, ("Ready", "False", "Updating", "pods start"))
    queue = cluster.apply("Queue", "orders")
    await cluster.settle()
    assert cluster.condition(queue, "Programmed") == ("True", "Applied")
    assert cluster.condition(queue, "Ready") == ("False", "OwnerNotReady")
    assert "pods start" in cluster.message(queue, "Ready")
    assert cluster.condition(queue, "Reconciling") == ("True", "WaitingForOwner")
    cluster.show(cluster.bus, ("Ready", "True", "Ready", "the bus takes messages"))
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY
    assert cluster.condition(queue, "Reconciling")[0] != "True"
    cluster.show(cluster.bus, ("Ready", "False", "Updating", "a pod is replaced"))
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY


async def test_a_bus_admits_only_the_namespaces_that_it_names(cluster: SmallCluster) -> None:
    foreign = cluster.apply("Queue", "orders", owner="bus", owner_namespace="shop", namespace="t")
    await cluster.settle()
    assert cluster.condition(foreign, "OwnerResolved") == ("False", "NotPermitted")
    assert "allowedNamespaces" in cluster.message(foreign, "Ready")
    cluster.apply("Namespace", "bus", operatorSpec={"allowedNamespaces": {"from": "All"}})
    await cluster.settle()
    assert cluster.condition(foreign, "Ready") == READY


async def test_a_claim_from_a_namespace_that_is_not_admitted_does_not_count(
    cluster: SmallCluster,
) -> None:
    """Everyone may write the name of a foreign bus: that must not take its entities' names."""
    foreign = cluster.apply(
        "Queue", "first", owner_namespace="shop", namespace="team", entityName="orders"
    )
    own = cluster.apply("Queue", "orders")
    await cluster.settle()
    assert cluster.condition(own, "Ready") == READY
    assert cluster.condition(foreign, "OwnerResolved") == ("False", "NotPermitted")


async def test_the_older_of_two_claims_wins(cluster: SmallCluster) -> None:
    first = cluster.apply("Queue", "first", entityName="orders")
    second = cluster.apply("Topic", "second", entityName="Orders")
    await cluster.settle()
    assert cluster.condition(first, "Ready") == READY
    assert cluster.condition(second, "Ready") == ("False", "OwnedByOther")
    assert "Queue shop/first" in cluster.message(second, "Ready")
    cluster.delete(first)
    await cluster.settle()
    assert not cluster.exists(first)
    assert cluster.condition(second, "Ready") == READY


async def test_a_claim_of_the_same_second_takes_nothing_from_who_has_it(
    cluster: SmallCluster,
) -> None:
    first = cluster.apply("Queue", "first", entityName="orders")
    await cluster.settle()
    cluster.now -= timedelta(seconds=1)
    second = cluster.apply("Queue", "second", entityName="orders")
    await cluster.settle()
    assert cluster.condition(first, "Ready") == READY
    assert cluster.condition(second, "Ready") == ("False", "OwnedByOther")


async def test_an_older_claim_that_is_admitted_later_takes_nothing_from_who_has_it(
    cluster: SmallCluster,
) -> None:
    older = cluster.apply("Queue", "older", owner_namespace="shop", namespace="t", entityName="q")
    holder = cluster.apply("Queue", "holder", entityName="q")
    await cluster.settle()
    cluster.apply("Namespace", "bus", operatorSpec={"allowedNamespaces": {"from": "All"}})
    cluster.lose_status(holder)
    await cluster.settle()
    assert cluster.condition(holder, "Ready") == READY
    assert cluster.condition(older, "Ready") == ("False", "OwnedByOther")
    assert "Queue shop/holder" in cluster.message(older, "Ready")
    cluster.delete(holder)
    await cluster.settle()
    assert cluster.condition(older, "Ready") == READY


async def test_adoption_takes_what_matches_or_anything_or_nothing(cluster: SmallCluster) -> None:
    api = cluster.running.caller
    for name in ("same", "other", "always", "never"):
        api.put(path_of("queues", name), {"maxDeliveryCount": 5})
    same = cluster.apply("Queue", "same", maxDeliveryCount=5)
    other = cluster.apply("Queue", "other", maxDeliveryCount=6)
    adopt: dict[str, Any] = {"adopt": "Always"}
    always = cluster.apply("Queue", "always", maxDeliveryCount=6, operatorSpec=adopt)
    never = cluster.apply("Queue", "never", maxDeliveryCount=5, operatorSpec={"adopt": "Never"})
    await cluster.settle()
    assert cluster.condition(same, "Ready") == READY
    assert cluster.condition(always, "Ready") == READY
    assert cluster.condition(other, "Ready") == ("False", "OwnedByOther")
    assert "maxDeliveryCount is 5, wanted 6" in cluster.message(other, "Ready")
    assert cluster.condition(never, "Ready") == ("False", "OwnedByOther")
    assert properties(api, "queues", "always")["maxDeliveryCount"] == 6
    assert api.get(path_of("queues", "other")).body["managedBy"] == ""
    cluster.delete(other)
    await cluster.settle()
    assert api.get(path_of("queues", "other")).status == 200
    api.delete(path_of("queues", "never"))
    await cluster.settle()
    assert cluster.condition(never, "Ready") == READY


async def test_an_observed_entity_is_compared_and_never_changed(cluster: SmallCluster) -> None:
    api = cluster.running.caller
    observe: dict[str, Any] = {"reconcilePolicy": "Observe"}
    queue = cluster.apply("Queue", "orders", maxDeliveryCount=5, operatorSpec=observe)
    await cluster.settle()
    assert cluster.condition(queue, "Drifted") == ("True", "ObserveOnly")
    assert api.get(path_of("queues", "orders")).status == 404
    api.put(path_of("queues", "orders"), {"maxDeliveryCount": 7})
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY
    assert "maxDeliveryCount is 7, wanted 5" in cluster.message(queue, "Drifted")
    api.put(path_of("queues", "orders"), {"maxDeliveryCount": 5})
    await cluster.settle()
    assert cluster.condition(queue, "Drifted") == ("", "")
    cluster.delete(queue)
    await cluster.settle()
    assert api.get(path_of("queues", "orders")).status == 200


async def test_a_paused_resource_is_left_alone(cluster: SmallCluster) -> None:
    queue = cluster.apply("Queue", "orders", maxDeliveryCount=5)
    await cluster.settle()
    cluster.annotate(queue, paused="true")
    cluster.apply("Queue", "orders", maxDeliveryCount=6)
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == ("True", "Paused")
    assert properties(cluster.running.caller, "queues", "orders")["maxDeliveryCount"] == 5
    cluster.delete(queue)
    await cluster.settle()
    assert cluster.condition(queue, "DeletionBlocked") == ("True", "Paused")
    cluster.annotate(queue, paused="false")
    await cluster.settle()
    assert not cluster.exists(queue)


async def test_a_paused_resource_is_not_in_progress(cluster: SmallCluster) -> None:
    queue = cluster.apply("Queue", "orders", owner="later")
    await cluster.settle()
    assert cluster.condition(queue, "Reconciling") == ("True", "WaitingForOwner")
    cluster.annotate(queue, paused="true")
    await cluster.settle()
    assert cluster.condition(queue, "Reconciling") == ("", "")
    assert cluster.condition(queue, "Ready") == ("False", "Paused")


# --- deletion and restore -----------------------------------------------------------------------


async def test_a_deleted_queue_is_restored_with_its_messages(cluster: SmallCluster) -> None:
    policy = {"deletionPolicy": "Delete"}
    queue = cluster.apply("Queue", "orders", operatorSpec=policy)
    await cluster.settle()
    entity_id = cluster.get(queue).status["entityId"]
    send(cluster.running, "orders", "a", "b")
    cluster.delete(queue)
    await cluster.settle()
    assert not cluster.exists(queue)
    assert cluster.running.caller.get(path_of("queues", "orders")).status == 404
    cluster.apply("Queue", "orders", operatorSpec=policy, maxDeliveryCount=7)
    await cluster.settle()
    assert cluster.get(queue).status["entityId"] == entity_id
    assert "Restored" in cluster.reasons()
    assert properties(cluster.running.caller, "queues", "orders")["maxDeliveryCount"] == 7
    assert sorted(received(cluster.running, "orders", 2)) == ["a", "b"]


async def test_start_empty_restores_nothing(cluster: SmallCluster) -> None:
    policy = {"deletionPolicy": "Delete"}
    queue = cluster.apply("Queue", "orders", operatorSpec=policy)
    await cluster.settle()
    former = cluster.get(queue).status["entityId"]
    send(cluster.running, "orders", "a")
    cluster.delete(queue)
    await cluster.settle()
    annotations = {"postbus.dev/start-empty": "true"}
    cluster.apply("Queue", "orders", operatorSpec=policy, annotations=annotations)
    await cluster.settle()
    assert cluster.get(queue).status["entityId"] != former
    assert cluster.get(queue).status["messageCount"] == 0


async def test_a_restore_that_contradicts_the_spec_is_undone(cluster: SmallCluster) -> None:
    policy = {"deletionPolicy": "Delete"}
    queue = cluster.apply("Queue", "orders", operatorSpec=policy)
    await cluster.settle()
    cluster.delete(queue)
    await cluster.settle()
    cluster.apply("Queue", "orders", operatorSpec=policy, requiresSession=True)
    await cluster.settle()
    assert cluster.condition(queue, "Stalled") == ("True", "ImmutableFieldChanged")
    assert "start-empty" in cluster.message(queue, "Stalled")
    assert cluster.running.caller.get(path_of("queues", "orders")).status == 404
    cluster.annotate(queue, start_empty="true")
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY
    assert properties(cluster.running.caller, "queues", "orders")["requiresSession"] is True


async def test_what_holds_messages_stays_unmanaged(cluster: SmallCluster) -> None:
    queue = cluster.apply("Queue", "orders", maxDeliveryCount=4)
    empty = cluster.apply("Queue", "empty")
    await cluster.settle()
    send(cluster.running, "orders", "a", "b", "c")
    cluster.delete(queue)
    cluster.delete(empty)
    await cluster.settle()
    assert not cluster.exists(queue)
    assert not cluster.exists(empty)
    api = cluster.running.caller
    assert api.get(path_of("queues", "empty")).status == 404
    found = api.get(path_of("queues", "orders")).body
    assert (found["managedBy"], found["properties"]["maxDeliveryCount"]) == ("", 4)
    [(name, event)] = cluster.events
    assert (name, event.reason, event.type) == ("orders", "EntityKept", "Warning")
    assert "3 messages" in event.message
    again = cluster.apply("Queue", "orders", maxDeliveryCount=4)
    await cluster.settle()
    assert cluster.condition(again, "Ready") == READY
    assert len(received(cluster.running, "orders", 3)) == 3


async def test_secrets_of_what_holds_messages_stay(cluster: SmallCluster) -> None:
    queue = cluster.apply("Queue", "orders")
    await cluster.settle()
    send(cluster.running, "orders", "a")
    found = key_secret("Queue", "orders")
    found["metadata"]["ownerReferences"][0]["uid"] = cluster.get(queue).uid
    cluster.cache.observe(found)
    cluster.delete(queue)
    await cluster.settle()
    assert [event.reason for _, event in cluster.events] == ["EntityKept"]
    assert cluster.api.patched == ["orders-key"]


async def test_retain_and_detach_leave_the_entity_alone(cluster: SmallCluster) -> None:
    retained = cluster.apply("Queue", "retained", operatorSpec={"deletionPolicy": "Retain"})
    detach: dict[str, Any] = {"reconcilePolicy": "DetachOnDelete"}
    detached = cluster.apply("Queue", "detached", operatorSpec=detach)
    await cluster.settle()
    api = cluster.running.caller
    version = api.get("/v1/namespace").body["version"]
    assert cluster.get(retained).finalizers == ()
    for key in (retained, detached):
        cluster.delete(key)
    await cluster.settle()
    assert not cluster.exists(retained)
    assert not cluster.exists(detached)
    assert api.get("/v1/namespace").body["version"] == version
    assert api.get(path_of("queues", "retained")).status == 200


async def test_a_topic_is_restored_with_its_subscriptions(cluster: SmallCluster) -> None:
    policy = {"deletionPolicy": "Delete"}
    topic = cluster.apply("Topic", "events", operatorSpec=policy)
    subscription = cluster.apply("Subscription", "audit", owner="events", operatorSpec=policy)
    await cluster.settle()
    send_to = ServiceBusClient.from_connection_string(cluster.running.connection_string)
    with send_to, send_to.get_topic_sender("events") as sender:
        sender.send_messages(ServiceBusMessage("kept"))
    former = cluster.get(subscription).status["entityId"]
    cluster.delete(topic)
    cluster.delete(subscription)
    await cluster.settle()
    assert not cluster.exists(topic)
    assert not cluster.exists(subscription)
    cluster.apply("Subscription", "audit", owner="events", operatorSpec=policy)
    cluster.apply("Topic", "events", operatorSpec=policy)
    await cluster.settle()
    await cluster.settle()
    assert cluster.condition(subscription, "Ready") == READY
    assert cluster.get(subscription).status["entityId"] == former
    counts = path_of("topics", "events", "subscriptions", "audit") + "/runtime"
    assert cluster.running.caller.get(counts).body["messageCount"] == 1


async def test_an_entity_that_somebody_deleted_is_there_again(cluster: SmallCluster) -> None:
    queue = cluster.apply("Queue", "orders")
    await cluster.settle()
    former = cluster.get(queue).status["entityId"]
    send(cluster.running, "orders", "a")
    cluster.running.caller.delete(path_of("queues", "orders") + "?policy=Retain")
    await cluster.settle()
    assert cluster.get(queue).status["entityId"] == former
    assert received(cluster.running, "orders", 1) == ["a"]
    cluster.running.caller.delete(path_of("queues", "orders"))
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY
    assert cluster.get(queue).status["entityId"] != former
    assert cluster.reasons() == ["Restored", "EntityLost"]


async def test_queues_that_dead_letter_into_each_other_are_restored(cluster: SmallCluster) -> None:
    policy = {"deletionPolicy": "Delete"}
    for name, target in (("one", "two"), ("two", "one")):
        cluster.apply("Queue", name, operatorSpec=policy, forwardDeadLetteredMessagesTo=target)
    one = cluster.apply("Queue", "one", operatorSpec=policy, forwardDeadLetteredMessagesTo="two")
    two = one._replace(name="two")
    await cluster.settle()
    former = {key: cluster.get(key).status["entityId"] for key in (one, two)}
    for key in (one, two):
        cluster.delete(key)
    await cluster.settle()
    for name, target in (("one", "two"), ("two", "one")):
        cluster.apply("Queue", name, operatorSpec=policy, forwardDeadLetteredMessagesTo=target)
    await cluster.settle()
    assert {key: cluster.get(key).status["entityId"] for key in (one, two)} == former
    for key in (one, two):
        assert cluster.condition(key, "Ready") == READY
        assert cluster.condition(key, "ForwardTargetsResolved") == ("True", "Resolved")


async def test_a_restore_waits_for_the_target_of_all_messages(cluster: SmallCluster) -> None:
    policy = {"deletionPolicy": "Delete"}
    cluster.apply("Queue", "target", operatorSpec=policy)
    queue = cluster.apply("Queue", "orders", operatorSpec=policy, forwardTo="target")
    await cluster.settle()
    for key in (queue, queue._replace(name="target")):
        cluster.delete(key)
    await cluster.settle()
    cluster.apply("Queue", "orders", operatorSpec=policy, forwardTo="target")
    await cluster.settle()
    assert cluster.condition(queue, "Reconciling") == ("True", "Creating")
    assert "start-empty" in cluster.message(queue, "Ready")
    cluster.apply("Queue", "target", operatorSpec=policy)
    await cluster.settle()
    assert cluster.condition(queue, "Ready") == READY
    assert cluster.reasons() == ["Restored", "Restored"]
