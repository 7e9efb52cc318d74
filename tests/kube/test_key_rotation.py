"""Keys with the whole operator at work: what wakes it, both steps of a rotation, nothing leaks."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient
from kubernetes.aio.client import Configuration

from postbus_operator.annotations import ROTATE, WATCH_LABEL
from postbus_operator.bus.access import open_sessions
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.kube.resource_types import RESOURCES, SECRETS
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of
from tests.kube.api_server import ApiServer
from tests.kube.clients import configuration_of
from tests.kube.operator_run import Run, eventually, leading
from tests.kube.shop import Shop

pytestmark = pytest.mark.slow

RECONCILERS = dict.fromkeys(("Queue", "Topic", "Subscription"), reconcile_entity)
APP = {"name": "app", "rights": ["Send", "Listen"]}
KEY = base64.b64encode(b"k" * 32).decode()
OTHER_KEY = base64.b64encode(b"o" * 32).decode()
NAME = "orders-queue-app"


@pytest.fixture
def running(database: str, tmp_path: Path) -> Iterator[ControlledBus]:
    with controlled_bus(database, tmp_path / "data", None) as bus:
        yield bus


@pytest.fixture
def shop(server: ApiServer, running: ControlledBus) -> Shop:
    shop = Shop(server, running)
    shop.make("Namespace", "bus")
    return shop


@pytest.fixture
async def configuration(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Configuration:
    return await configuration_of(server, monkeypatch)


@asynccontextmanager
async def operator(configuration: Configuration, shop: Shop) -> AsyncIterator[Run]:
    """Run without resync: it looks when an event wakes it, or at the time it has set."""
    async with leading(
        configuration,
        RECONCILERS,
        open_sessions=open_sessions,
        control_url=lambda bus: shop.running.caller.address,
        rotation_s=2,
        namespaces=shop.name,
    ) as run:
        yield run


def secret(shop: Shop, name: str = NAME) -> dict[str, str]:
    found = shop.server.request("GET", SECRETS.path(shop.name, name))
    return {key: base64.b64decode(text).decode() for key, text in found["data"].items()}


def put_secret(shop: Shop, name: str, key: str) -> None:
    metadata = {"name": name, "namespace": shop.name, "labels": {WATCH_LABEL: "true"}}
    wanted = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    path = SECRETS.path(shop.name, name)
    shop.server.apply(path, wanted | {"stringData": {"primaryKey": key}})


def primary_key(shop: Shop) -> str:
    path = path_of("queues", shop.entity("orders"), "authorization-rules", "app")
    return str(shop.running.caller.get(f"{path}?keys=true").body["primaryKey"])


async def send_and_receive(shop: Shop, text: str) -> str:
    """Connect with what the Secret says now; return the key that was used."""
    found = await asyncio.to_thread(secret, shop)
    endpoint = shop.running.connection_string.partition(";")[0]
    rest = found["connectionString"].partition(";")[2]
    async with ServiceBusClient.from_connection_string(
        f"{endpoint};{rest};UseDevelopmentEmulator=true", retry_total=0
    ) as client:
        await client.get_queue_sender(found["entityPath"]).send_messages(ServiceBusMessage(text))
        async with client.get_queue_receiver(found["entityPath"]) as receiver:
            (message,) = await receiver.receive_messages(max_wait_time=20)
            await receiver.complete_message(message)
    assert str(message) == text
    return found["password"]


async def test_a_rotation_goes_through_both_steps_while_clients_work(
    shop: Shop, configuration: Configuration
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders", authorizationRules=[APP])
        await eventually(lambda: shop.is_ready("Queue", "orders"))
        assert shop.get("Queue", "orders")["status"]["binding"] == {"name": NAME}
        before = primary_key(shop)
        used = [await send_and_receive(shop, "first")]
        shop.change("Queue", "orders", metadata={"annotations": {ROTATE: "primary"}})
        while ROTATE in shop.get("Queue", "orders")["metadata"].get("annotations", {}):
            used.append(await send_and_receive(shop, str(len(used))))
        await eventually(lambda: before != secret(shop)["password"] == primary_key(shop))
        used.append(await send_and_receive(shop, "last"))
        assert used[0] == before
        assert used[-1] == primary_key(shop) != before
        assert len(set(used)) == 3
        assert shop.condition("Queue", "orders", "SecretsSynced") == ("True", "Synced")
        await eventually(lambda: "KeysRotated" in {each["reason"] for each in shop.events()})


async def test_a_labelled_secret_wakes_the_queue_that_names_it(
    shop: Shop, configuration: Configuration
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders", authorizationRules=[APP | {"secretName": "mine"}])
        missing = ("False", "SourceMissing")
        await eventually(lambda: shop.condition("Queue", "orders", "SecretsSynced") == missing)
        put_secret(shop, "mine", KEY)
        await eventually(lambda: secret(shop)["password"] == KEY)
        put_secret(shop, "mine", OTHER_KEY)
        await eventually(lambda: secret(shop)["password"] == OTHER_KEY)
        assert primary_key(shop) == OTHER_KEY
        version = shop.server.request("GET", SECRETS.path(shop.name, "mine"))["metadata"]

        def is_seen() -> bool:
            status = shop.get("Queue", "orders")["status"]
            return bool(status.get("observedSecretVersion") == version["resourceVersion"])

        await eventually(is_seen)


async def test_a_deleted_secret_is_written_again_at_once(
    shop: Shop, configuration: Configuration
) -> None:
    async with operator(configuration, shop):
        shop.make("Queue", "orders", authorizationRules=[APP])
        await eventually(lambda: shop.is_ready("Queue", "orders"))
        before = secret(shop)
        shop.server.request("DELETE", SECRETS.path(shop.name, NAME))
        assert await eventually(lambda: secret(shop)) == before


async def test_no_key_leaves_the_secrets(
    shop: Shop, configuration: Configuration, caplog: pytest.LogCaptureFixture
) -> None:
    async with operator(configuration, shop) as run:
        caplog.set_level(logging.DEBUG)
        put_secret(shop, "mine", KEY)
        put_secret(shop, "broken", f"{KEY};")
        rules = [APP, *(APP | {"name": name, "secretName": name} for name in ("mine", "broken"))]
        shop.make("Queue", "orders", authorizationRules=rules)
        invalid = ("False", "SourceInvalid")
        await eventually(lambda: shop.condition("Queue", "orders", "SecretsSynced") == invalid)
        put_secret(shop, "broken", OTHER_KEY)
        await eventually(lambda: shop.condition("Queue", "orders", "SecretsSynced")[1] == "Synced")
        shop.change("Queue", "orders", metadata={"annotations": {ROTATE: "primary"}})
        former = primary_key(shop)
        await eventually(lambda: primary_key(shop) != former)
        await eventually(lambda: "KeysRotated" in {each["reason"] for each in shop.events()})
        shown: list[Any] = [shop.events(), run.looks]
        shown += [
            shop.server.request("GET", RESOURCES[kind].path(shop.name))
            for kind in ("Queue", "Namespace")
        ]
        shown.append(shop.running.caller.get("/v1/audit").body)
        shown += [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
        text = re.sub(r"\\+", "", json.dumps(shown, default=repr))
        keys = {KEY, OTHER_KEY, former, primary_key(shop), secret(shop)["secondaryKey"]}
        assert len(keys) == 5
        for key in keys:
            assert key not in text
            assert base64.b64encode(key.encode()).decode() not in text
