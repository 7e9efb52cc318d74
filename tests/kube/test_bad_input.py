"""Bad input on a real API server with a real broker: condition, event and metric of each, while the
rest goes on.

What the API server itself refuses has no resource that could say so: test_crds.py. Databases that
are not as a bus needs them: test_store_troubles.py.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import queue
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import aiohttp
import pytest
import yaml
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from kubernetes.aio.client import Configuration

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.bus.access import open_sessions
from postbus_operator.certificates import leaf_data, new_authority
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.kube.resource_types import (
    PODS,
    RESOURCES,
    SECRETS,
    STATEFUL_SETS,
    VOLUME_CLAIMS,
)
from postbus_operator.namespaces.reconciler import NamespaceReconciler
from postbus_operator.running.health import HealthServer
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of
from tests.kube.api_server import OPERATOR, OPERATOR_TOKEN, ApiError, ApiServer, api_server
from tests.kube.clients import configuration_of
from tests.kube.conftest import CRDS, DEFINITIONS, wait_until_established
from tests.kube.operator_run import Run, eventually, leading
from tests.kube.shop import MERGE, PERIODS, Shop

pytestmark = pytest.mark.slow

NUMBERS: Final = itertools.count(1)
ENTITIES: Final = ("Queue", "Topic", "Subscription")
NEXT_STEP: Final = re.compile(
    r"\b(set|correct|create|delete|replace|add|change|leave|load|see|label|give|remove|make|use)\b"
)
"""A word of what to do."""


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "kube_bad_input", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("broker")
    with controlled_bus(dsn_of(postgres_server, "kube_bad_input"), folder) as bus:
        yield bus


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """What may pass by itself is an event after a second."""
    with pytest.MonkeyPatch.context() as patch:
        name = "postbus_operator.running.condition_events.PATIENCE"
        patch.setattr(name, timedelta(seconds=1))
        yield


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster namespace with a ready bus and a queue with a message, another one without a bus,
    and the operator of both.
    """

    shop: Shop
    foreign: Shop
    run: Run
    metrics_url: str

    def make_bus(self, name: str, **operator: Any) -> None:
        self.shop.make("Namespace", name, operatorSpec=operator)

    def make_secret(self, name: str, **data: bytes) -> None:
        """Apply a Secret that wakes the bus which names it."""
        texts = {
            key.replace("_", "."): base64.b64encode(each).decode() for key, each in data.items()
        }
        labels = {"postbus.dev/watch": "true"}
        metadata = {"name": name, "labels": labels}
        wanted = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": texts}
        self.shop.server.apply(SECRETS.path(self.shop.name, name), wanted)

    async def is_shown(
        self, kind: str, name: str, condition: tuple[str, str, str], said: str
    ) -> str:
        """Wait for a condition (type, status, reason), its Event and its metric; return its text.

        `said`: a part of the message.
        """
        type, _, reason = condition

        def found() -> Any:
            for each in self.shop.get(kind, name)["status"]["conditions"]:
                if (each["type"], each["status"], each["reason"]) == condition:
                    return each if said in each["message"] else None
            return None

        shown = await eventually(found, f"{kind} {name}: {condition}, {said}")
        text: str = shown["message"]
        assert NEXT_STEP.search(text), text

        def event() -> Any:
            return [
                each
                for each in self.shop.events()
                if (each["regarding"]["kind"], each["regarding"]["name"]) == (kind, name)
                and each["type"] == "Warning"
                and each["note"] == text[:1_024]
            ]

        await eventually(event, f"an event of {kind} {name}: {text}")
        labels = f'condition="{type}",kind="{kind}",reason="{reason}"'
        async with aiohttp.ClientSession() as session, session.get(self.metrics_url) as answer:
            assert f"postbus_operator_conditions{{{labels}}}" in await answer.text()
        return text

    async def is_going_on(self) -> None:
        """Check that the ready bus serves, its messages are there, and new resources are made."""
        shop = self.shop
        name = f"later-{next(NUMBERS)}"
        shop.make("Queue", name)
        await eventually(partial(shop.is_ready, "Queue", name), name)
        for kind, each in (("Namespace", "bus"), ("Queue", "orders")):
            assert shop.is_ready(kind, each), shop.get(kind, each)["status"]
        await asyncio.to_thread(peek, shop.running, shop.entity("orders"))


def peek(running: ControlledBus, name: str) -> None:
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_receiver(name) as receiver:
        assert [str(each) for each in receiver.peek_messages(5)] == ["kept"]


def send(running: ControlledBus, name: str) -> None:
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_sender(name) as sender:
        sender.send_messages(ServiceBusMessage("kept"))


def say_ready(shop: Shop, name: str) -> bool:
    """Write what the controller and the nodes report of pods that run."""
    path = STATEFUL_SETS.path(shop.name, name)
    generation = shop.server.request("GET", path)["metadata"]["generation"]
    status = {
        "replicas": 1, "readyReplicas": 1, "currentRevision": "a", "updateRevision": "a",
        "observedGeneration": generation,
    }  # fmt: skip
    shop.server.request("PATCH", f"{path}/status", {"status": status}, MERGE)
    return True


@asynccontextmanager
async def operator(
    configuration: Configuration, shop: Shop, foreign: Shop
) -> AsyncIterator[Cluster]:
    """Lead with all reconcilers in two cluster namespaces."""
    async with leading(
        configuration,
        {"Namespace": NamespaceReconciler(), **dict.fromkeys(ENTITIES, reconcile_entity)},
        open_sessions=partial(open_sessions, periods=PERIODS),
        control_url=lambda bus: shop.running.caller.address,
        namespaces=(shop.name, foreign.name),
        image="postbus:dev",
        store_image="postbus-store:dev",
    ) as run:
        health = HealthServer(run.health, run.metrics, silence_s=600)
        async with health.run("127.0.0.1", 0) as port:
            yield Cluster(shop, foreign, run, f"http://127.0.0.1:{port}/metrics")


@asynccontextmanager
async def working(server: ApiServer, running: ControlledBus) -> AsyncIterator[Cluster]:
    """Run an operator whose bus is ready."""
    shop, foreign = Shop(server, running), Shop(server, running)
    with pytest.MonkeyPatch.context() as patch:
        configuration = await configuration_of(server, patch)
    async with operator(configuration, shop, foreign) as cluster:
        shop.make("Namespace", "bus")
        for name in ("bus-store-main", "bus-broker"):
            await eventually(partial(say_ready, shop, name), name)
        shop.make("Queue", "orders")
        await eventually(partial(shop.is_ready, "Namespace", "bus"), "the bus is ready")
        await eventually(partial(shop.is_ready, "Queue", "orders"), "the queue is ready")
        await asyncio.to_thread(send, running, shop.entity("orders"))
        yield cluster


@pytest.fixture(scope="module")
def worked_on(server: ApiServer, running: ControlledBus) -> Iterator[Cluster]:
    """One operator for all tests, in a thread: an event loop of pytest ends with its test."""
    found: queue.Queue[Cluster | BaseException] = queue.Queue()
    stop, loop = asyncio.Event(), asyncio.new_event_loop()

    async def work() -> None:
        async with working(server, running) as cluster:
            found.put(cluster)
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(work())
        except BaseException as error:  # noqa: BLE001  # raised by the fixture
            found.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    first = found.get()
    if isinstance(first, BaseException):
        raise first
    yield first
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.fixture
async def cluster(worked_on: Cluster) -> AsyncIterator[Cluster]:
    yield worked_on
    await worked_on.is_going_on()


# --- queues, topics and subscriptions -----------------------------------------------------------


async def test_what_the_tier_lacks_is_shown(cluster: Cluster) -> None:
    cluster.shop.make("Queue", "large", maxMessageSizeInKilobytes=2_048)
    await cluster.is_shown("Queue", "large", ("Valid", "False", "SkuUnsupported"), "higher tier")
    assert cluster.shop.condition("Queue", "large", "Stalled") == ("True", "SkuUnsupported")
    cluster.shop.change("Queue", "large", spec={"maxMessageSizeInKilobytes": None})
    await eventually(lambda: cluster.shop.is_ready("Queue", "large"))


def rule(name: str, sql: str) -> dict[str, Any]:
    return {"name": name, "filterType": "SqlFilter", "sqlFilter": {"sqlExpression": sql}}


async def test_rules_above_the_quota_are_shown(cluster: Cluster) -> None:
    """A topic has up to 2,000 SQL rules."""
    shop = cluster.shop
    shop.make("Topic", "full")
    await eventually(partial(shop.is_ready, "Topic", "full"))
    path = path_of("topics", shop.entity("full"), "subscriptions", "others")
    rules = [rule(f"r{number}", "1 = 1") for number in range(2_000)]
    answer = await asyncio.to_thread(shop.running.caller.put, path, {"rules": rules})
    assert answer.status == 201, answer
    shop.make("Subscription", "last", owner={"name": "full"}, rules=rules[:1])
    condition = ("Valid", "False", "QuotaExceeded")
    await cluster.is_shown("Subscription", "last", condition, "2000")
    await asyncio.to_thread(shop.running.caller.put, path, {"rules": rules[:1]})
    shop.change("Subscription", "last", spec={"rules": rules[:2]})
    await eventually(partial(shop.is_ready, "Subscription", "last"))


async def test_a_hundred_rules_of_1024_characters_are_used(cluster: Cluster) -> None:
    shop = cluster.shop
    shop.make("Topic", "events-3")
    sql = "color = '" + "x" * (1_024 - len("color = ''")) + "'"
    assert len(sql) == 1_024
    rules = [rule(f"r{number}", sql) for number in range(100)]
    shop.make("Subscription", "all-3", owner={"name": "events-3"}, rules=rules)
    await eventually(lambda: shop.is_ready("Subscription", "all-3"))
    assert shop.get("Subscription", "all-3")["status"]["ruleCount"] == 100


async def test_a_circle_of_forwards_is_shown(cluster: Cluster) -> None:
    shop = cluster.shop
    shop.make("Queue", "forwards", forwardTo=shop.entity("backwards"))
    shop.make("Queue", "backwards", forwardTo=shop.entity("forwards"))

    def warned() -> list[str]:
        return [
            each
            for each in ("forwards", "backwards")
            if shop.condition("Queue", each, "Valid") == ("True", "ForwardCycle")
        ]

    [name, *_] = await eventually(warned)
    await cluster.is_shown("Queue", name, ("Valid", "True", "ForwardCycle"), "loop")


async def test_bad_sql_is_shown(cluster: Cluster) -> None:
    shop = cluster.shop
    shop.make("Topic", "events-5")
    rules = [rule("good", "color = 'blue'"), rule("bad", "color = = 'blue'")]
    shop.make("Subscription", "all-5", owner={"name": "events-5"}, rules=rules)
    condition = ("Valid", "False", "InvalidFilter")
    await cluster.is_shown("Subscription", "all-5", condition, "rule bad: ")
    shop.change("Subscription", "all-5", spec={"rules": rules[:1]})
    await eventually(lambda: shop.is_ready("Subscription", "all-5"))


async def test_an_unknown_owner_is_shown(cluster: Cluster) -> None:
    shop = cluster.shop
    shop.make("Queue", "lost", owner={"name": "typo"})
    await cluster.is_shown("Queue", "lost", ("OwnerResolved", "False", "NotFound"), "spec.owner")
    shop.make("Subscription", "lost", owner={"name": "news"})
    condition = ("OwnerResolved", "False", "NotFound")
    await cluster.is_shown("Subscription", "lost", condition, "news")
    assert shop.condition("Queue", "lost") == ("False", "OwnerNotReady")


async def test_a_cluster_namespace_that_is_not_admitted_is_shown(cluster: Cluster) -> None:
    owner = {"name": "bus", "namespace": cluster.shop.name}
    cluster.foreign.make("Queue", "guest", owner=owner)
    condition = ("OwnerResolved", "False", "NotPermitted")
    beside = replace(cluster, shop=cluster.foreign)
    await beside.is_shown("Queue", "guest", condition, "allowedNamespaces")


async def test_a_second_claim_is_shown(cluster: Cluster) -> None:
    shop = cluster.shop
    shop.make("Queue", "again", entityName=shop.entity("orders"))
    condition = ("Ready", "False", "OwnedByOther")
    await cluster.is_shown("Queue", "again", condition, f"{shop.name}/orders has the entity")


async def test_a_missing_target_is_shown(cluster: Cluster) -> None:
    shop = cluster.shop
    shop.make("Queue", "source", forwardTo=shop.entity("target"))
    condition = ("ForwardTargetsResolved", "False", "TargetNotFound")
    await cluster.is_shown("Queue", "source", condition, "create it")
    assert shop.is_ready("Queue", "source")
    shop.make("Queue", "target")
    resolved = ("True", "Resolved")
    await eventually(
        lambda: shop.condition("Queue", "source", "ForwardTargetsResolved") == resolved
    )


async def test_secrets_of_keys_that_are_wrong_are_shown(cluster: Cluster) -> None:
    shop = cluster.shop
    rules = [{"name": "app", "rights": ["Send"], "secretName": "mine"}]
    shop.make("Queue", "keyed", authorizationRules=rules)
    missing = ("SecretsSynced", "False", "SourceMissing")
    await cluster.is_shown("Queue", "keyed", missing, "Secret mine")
    cluster.make_secret("mine", password=b"x")
    await cluster.is_shown("Queue", "keyed", missing, "primaryKey")
    cluster.make_secret("mine", primaryKey=b"not a key!", secondaryKey=b"\xff\xfe")
    wrong = ("SecretsSynced", "False", "SourceInvalid")
    text = await cluster.is_shown("Queue", "keyed", wrong, "mine")
    assert "not a key" not in text
    key = base64.b64encode(b"k" * 32)
    cluster.make_secret("mine", primaryKey=key, secondaryKey=key[::-1].lstrip(b"=") + b"=")
    synced = ("True", "Synced")
    await eventually(lambda: shop.condition("Queue", "keyed", "SecretsSynced") == synced)


async def test_the_longest_names_are_used(cluster: Cluster) -> None:
    """A resource's name has up to 253 characters, an entity's up to 260."""
    shop = cluster.shop
    long = "n" * 253
    rules = [{"name": "app", "rights": ["Send"]}]
    entity_name = f"{shop.name}/" + "e" * (260 - len(shop.name) - 1)
    shop.make("Queue", long, entityName=entity_name, authorizationRules=rules)
    await eventually(lambda: shop.is_ready("Queue", long))
    secret = shop.get("Queue", long)["status"]["binding"]["name"]
    data = shop.server.request("GET", SECRETS.path(shop.name, secret))["data"]
    assert any(
        f"EntityPath={entity_name}" in base64.b64decode(each).decode() for each in data.values()
    )
    owner = {"name": "typo"}
    shop.make("Queue", f"{long[:-1]}x", owner=owner, entityName="other")
    condition = ("OwnerResolved", "False", "NotFound")
    await cluster.is_shown("Queue", f"{long[:-1]}x", condition, "typo")


# --- buses --------------------------------------------------------------------------------------


def external(**postgres: Any) -> dict[str, Any]:
    reference = {"secretRef": {"name": "db"}} | postgres
    return {"storage": {"stores": [{"name": "main", "postgres": reference}]}}


DSN: Final = b"postgresql://user:hidden@db.example.org/shop"


async def test_secrets_of_a_database_that_are_wrong_are_shown(cluster: Cluster) -> None:
    cluster.make_bus("bus-11", **external(caSecretRef={"name": "db-ca"}))
    missing = ("SecretsSynced", "False", "SourceMissing")
    await cluster.is_shown("Namespace", "bus-11", missing, "Secret db is missing")
    cluster.make_secret("db", uri=DSN)
    await cluster.is_shown("Namespace", "bus-11", missing, "no key dsn")
    cluster.make_secret("db", dsn=DSN.replace(b"postgresql://", b""))
    stalled = ("Stalled", "True", "SecretInvalid")
    text = await cluster.is_shown("Namespace", "bus-11", stalled, "is not one address")
    assert "hidden" not in text
    cluster.make_secret("db", dsn=DSN)
    await cluster.is_shown("Namespace", "bus-11", missing, "Secret db-ca is missing")
    cluster.make_secret("db-ca", ca_crt=b"garbage")
    await cluster.is_shown("Namespace", "bus-11", stalled, "not a certificate")
    old = new_authority("db", datetime.now(UTC) - timedelta(days=4_000))
    cluster.make_secret("db-ca", ca_crt=old.bundle)
    await cluster.is_shown("Namespace", "bus-11", stalled, "expired at")
    cluster.make_secret("db-ca", ca_crt=new_authority("db", datetime.now(UTC)).bundle)
    await eventually(lambda: cluster.shop.condition("Namespace", "bus-11", "Stalled") == ("", ""))


async def test_a_garbage_certificate_is_shown(cluster: Cluster) -> None:
    cluster.make_bus("bus-12", tls={"secretName": "pair"})
    missing = ("SecretsSynced", "False", "SourceMissing")
    await cluster.is_shown("Namespace", "bus-12", missing, "Secret pair is missing")
    cluster.make_secret("pair", tls_crt=b"garbage", tls_key=b"garbage")
    stalled = ("Stalled", "True", "SecretInvalid")
    await cluster.is_shown("Namespace", "bus-12", stalled, "Secret pair")
    now = datetime.now(UTC)
    made = leaf_data(new_authority("pair", now), ["bus.example.org"], now, None)
    cluster.make_secret("pair", tls_crt=made["tls.crt"], tls_key=made["tls.key"])
    await eventually(lambda: cluster.shop.condition("Namespace", "bus-12", "Stalled") == ("", ""))


async def test_more_brokers_than_partitions_are_shown(cluster: Cluster) -> None:
    cluster.make_bus("bus-13", brokers=16)
    condition = ("Valid", "False", "BrokersUnsupported")
    await cluster.is_shown("Namespace", "bus-13", condition, "operatorSpec.brokers")
    cluster.shop.change("Namespace", "bus-13", spec={"operatorSpec": {"brokers": 1}})
    valid = partial(cluster.shop.condition, "Namespace", "bus-13", "Valid")
    await eventually(lambda: valid() == ("True", "Accepted"))


async def test_a_volume_that_nobody_makes_is_shown(cluster: Cluster) -> None:
    """There is no default storage class."""
    shop = cluster.shop
    cluster.make_bus("bus-14")
    path = STATEFUL_SETS.path(shop.name, "bus-14-store-main")
    store = await eventually(lambda: shop.server.request("GET", path))
    [template] = store["spec"]["volumeClaimTemplates"]
    metadata = {"name": "data-bus-14-store-main-0", "labels": template["metadata"]["labels"]}
    claim = {"metadata": metadata, "spec": template["spec"]}
    shop.server.request("POST", VOLUME_CLAIMS.path(shop.name), claim)
    condition = ("StorageReady", "False", "Unreachable")
    await cluster.is_shown("Namespace", "bus-14", condition, "set storageClassName")


async def test_a_missing_image_is_shown(cluster: Cluster) -> None:
    shop = cluster.shop
    cluster.make_bus("bus-15", image="postbus:missing")
    await eventually(partial(say_ready, shop, "bus-15-store-main"))
    path = STATEFUL_SETS.path(shop.name, "bus-15-broker")
    broker = await eventually(lambda: shop.server.request("GET", path))
    template = broker["spec"]["template"]
    metadata = {"name": "bus-15-broker-0", "labels": template["metadata"]["labels"]}
    pod = {"metadata": metadata, "spec": template["spec"]}
    shop.server.request("POST", PODS.path(shop.name), pod)
    container = {
        "name": "broker", "image": "postbus:missing", "imageID": "", "ready": False,
        "restartCount": 0, "state": {"waiting": {"reason": "ErrImageNeverPull"}},
    }  # fmt: skip
    path = PODS.path(shop.name, "bus-15-broker-0", "status")
    shop.server.request("PATCH", path, {"status": {"containerStatuses": [container]}}, MERGE)
    condition = ("PartitionsReady", "False", "PodNotStarting")
    text = await cluster.is_shown("Namespace", "bus-15", condition, "image postbus:missing")
    assert "load it" in text


# --- rights -------------------------------------------------------------------------------------


async def test_a_right_that_the_operator_lacks_is_shown(
    server: ApiServer, running: ControlledBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write everything but StatefulSets."""
    shop, foreign = Shop(server, running), Shop(server, running)
    for each in (shop, foreign):
        allow_all_but_stateful_sets(server, each.name)
    configuration = await configuration_of(server, monkeypatch, OPERATOR_TOKEN)
    async with operator(configuration, shop, foreign) as cluster:
        shop.make("Namespace", "bus")
        condition = ("Stalled", "True", "Forbidden")
        await cluster.is_shown("Namespace", "bus", condition, "StatefulSet bus-store-main")
        assert cluster.run.value("api_requests_total", verb="apply", code="403") > 0
        shop.make("Queue", "orders", owner={"name": "other"})
        await eventually(lambda: shop.condition("Queue", "orders") == ("False", "OwnerNotReady"))


def allow_all_but_stateful_sets(server: ApiServer, namespace: str) -> None:
    everything = {"apiGroups": ["*"], "resources": ["*"]}
    readable = {**everything, "verbs": ["get", "list", "watch"]}
    groups = ["", "events.k8s.io", "networking.k8s.io", "policy", "postbus.dev"]
    writable = {"apiGroups": groups, "resources": ["*"], "verbs": ["*"]}
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    role = {"metadata": {"name": "operator"}, "rules": [readable, writable]}
    server.request("POST", f"{rbac}/roles", role)
    group = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "operator"},
        "subjects": [{"kind": "User", "name": OPERATOR}],
    }
    server.request("POST", f"{rbac}/rolebindings", binding)


# --- definitions --------------------------------------------------------------------------------


async def test_definitions_of_a_version_before_are_enough(
    running: ControlledBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they do not have is refused by name, or missing in the status."""
    with api_server() as server:
        install_definitions_without(server, spec="userMetadata", status="entityId")
        configuration = await configuration_of(server, monkeypatch)
        shop, foreign = Shop(server, running), Shop(server, running)
        async with operator(configuration, shop, foreign) as cluster:
            shop.make("Namespace", "bus")
            for name in ("bus-store-main", "bus-broker"):
                await eventually(partial(say_ready, shop, name), name)
            shop.make("Queue", "orders")
            await eventually(partial(shop.is_ready, "Queue", "orders"))
            before = shop.get("Queue", "orders")
            assert "entityId" not in before["status"]
            wanted = {key: before[key] for key in ("apiVersion", "kind")}
            wanted |= {"metadata": {"name": "orders"}, "spec": {"userMetadata": "new"}}
            with pytest.raises(ApiError, match="userMetadata: field not declared in schema"):
                server.apply(RESOURCES["Queue"].path(shop.name, "orders"), wanted)
            looks = cluster.run.looked_at("orders")
            shop.change("Queue", "orders", metadata={"annotations": {"look": "now"}})
            await eventually(lambda: cluster.run.looked_at("orders") > looks)
            assert shop.get("Queue", "orders")["status"] == before["status"]


def install_definitions_without(server: ApiServer, spec: str, status: str) -> None:
    """Install definitions that lack a field of spec and status, as former ones do."""
    names = []
    for path in sorted(CRDS.glob("*.yaml")):
        wanted = yaml.safe_load(path.read_text())
        for version in wanted["spec"]["versions"]:
            fields = version["schema"]["openAPIV3Schema"]["properties"]
            fields["spec"]["properties"].pop(spec, None)
            fields["status"]["properties"].pop(status, None)
        names.append(wanted["metadata"]["name"])
        server.apply(f"{DEFINITIONS}/{names[-1]}", wanted)
    for each in names:
        wait_until_established(server, each)
