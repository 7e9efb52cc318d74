"""Keys of resources on a real API server and a real bus, with clients of the Python SDK."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import ServiceBusAuthenticationError

from postbus_operator.annotations import ROTATE
from postbus_operator.bus.control_client import Access, BusControl
from postbus_operator.bus.session import BusSession
from postbus_operator.bus.synced_keys import KeysResult
from postbus_operator.context import Buses, Context
from postbus_operator.keys.leaving import leave_secrets
from postbus_operator.keys.sync import sync_keys
from postbus_operator.kube.cache import Cache
from postbus_operator.kube.resource_types import RESOURCES, SECRETS
from postbus_operator.objects import Key, Resource
from postbus_operator.settings import Settings
from tests.edge.control.control_bus import ControlledBus, controlled_bus
from tests.kube.api_server import ROOT, ApiError, ApiServer
from tests.kube.clients import api_of, configuration_of
from tests.kube.guides import GUIDES, apply, blocks, languages, run
from tests.operator.live_bus import leads

NUMBERS = itertools.count(1)
KEY = base64.b64encode(b"k" * 32).decode()
OTHER_KEY = base64.b64encode(b"o" * 32).decode()
APP = {"name": "app", "rights": ["Send", "Listen"]}
READER = {"name": "reader", "rights": ["Listen"]}
QUEUE = {"owner": {"name": "shop"}, "authorizationRules": [APP]}
TOPIC = {"owner": {"name": "shop"}, "authorizationRules": [READER]}
PAGE = "kubernetes-keys.md"


@dataclass
class Keys:
    """A cluster namespace with the resources of one bus, and the operator's part for keys."""

    server: ApiServer
    bus: ControlledBus
    namespace: str
    context: Context
    session: BusSession
    now: datetime = datetime(2026, 11, 23, 12, tzinfo=UTC)
    results: list[KeysResult] = field(default_factory=list)

    def put(self, kind: str, spec: dict[str, Any], name: str = "orders") -> Resource:
        """Apply a resource, and show it to the operator."""
        wanted = {
            "apiVersion": "postbus.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        }
        self.server.apply(RESOURCES[kind].path(self.namespace, name), wanted)
        return self.seen(kind, name)

    def seen(self, kind: str, name: str = "orders") -> Resource:
        shown = self.server.request("GET", RESOURCES[kind].path(self.namespace, name))
        self.context.cache.observe({"apiVersion": "postbus.dev/v1alpha1", "kind": kind} | shown)
        found = self.context.cache.get(Key(kind, self.namespace, name))
        assert found is not None
        return found

    async def sync(self, kind: str = "Queue", name: str = "orders") -> KeysResult:
        resource = await asyncio.to_thread(self.seen, kind, name)
        bus = await asyncio.to_thread(self.seen, "Namespace", "shop")
        result = await sync_keys(self.context, self.session, bus, resource)
        self.results.append(result)
        return result

    def annotate(self, kind: str, text: str | None, name: str = "orders") -> None:
        self.server.request(
            "PATCH",
            RESOURCES[kind].path(self.namespace, name),
            {"metadata": {"annotations": {ROTATE: text}}},
            "application/merge-patch+json",
        )

    def put_secret(self, name: str, **data: str) -> None:
        self.server.apply(
            SECRETS.path(self.namespace, name),
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": self.namespace},
                "stringData": data,
            },
        )

    def secret(self, name: str) -> dict[str, str] | None:
        try:
            found = self.server.request("GET", SECRETS.path(self.namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return {key: base64.b64decode(text).decode() for key, text in found["data"].items()}

    def version(self, name: str) -> str:
        found = self.server.request("GET", SECRETS.path(self.namespace, name))
        return str(found["metadata"]["resourceVersion"])

    def rules(self, entity: str = "/queues/orders") -> dict[str, Any]:
        answer = self.bus.caller.get(f"/v1{entity}/authorization-rules?keys=true").body
        return {item["name"]: item for item in answer["items"]}

    def client(self, connection: str) -> ServiceBusClient:
        """Return a client with a Secret's connection string, but for the address."""
        _, _, rest = connection.partition(";")
        endpoint, _, _ = self.bus.connection_string.partition(";")
        text = f"{endpoint};{rest};UseDevelopmentEmulator=true"
        return ServiceBusClient.from_connection_string(text, retry_total=0)


@pytest.fixture(scope="module")
def namespaces(server: ApiServer) -> Iterator[str]:
    def made() -> Iterator[str]:
        for number in NUMBERS:
            name = f"keys-{number}"
            server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
            yield name

    return made()


@asynccontextmanager
async def operated(
    server: ApiServer, bus: ControlledBus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Keys]:
    cache = Cache()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(api_of(await configuration_of(server, monkeypatch)))
        monkeypatch.setattr(api, "_on_object", cache.observe)

        async def read_access() -> Access:
            return Access(bus.caller.address, bus.caller.token)

        control = BusControl(read_access, 1, leads)
        stack.push_async_callback(control.close)
        session = BusSession(control, lambda paths: None)
        keys: Keys
        context = Context(
            settings=Settings(),
            api=api,
            cache=cache,
            buses=cast(Buses, None),
            epoch=1,
            now=lambda: keys.now,
            wake=lambda key, pause_s: None,
        )
        keys = Keys(server, bus, namespace, context, session)
        keys.put("Namespace", {"entityName": "shop-bus"}, "shop")
        yield keys


@pytest.fixture
async def keys(
    server: ApiServer,
    namespaces: Iterator[str],
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Keys]:
    with controlled_bus(database, tmp_path / "data", None) as bus:
        bus.caller.put("/v1/queues/orders", {})
        async with operated(server, bus, next(namespaces), monkeypatch) as found:
            yield found


async def test_a_namespace_without_rules_has_a_secret_for_everything(keys: Keys) -> None:
    result = await keys.sync("Namespace", "shop")
    assert result.condition == ("True", "Synced", "written: shop-bus-root")
    assert result.binding is not None
    assert result.binding.name == "shop-bus-root"
    text = keys.secret("shop-bus-root")
    assert text is not None
    rule = keys.rules("")["RootManageSharedAccessKey"]
    assert (text["primaryKey"], text["secondaryKey"]) == (rule["primaryKey"], rule["secondaryKey"])
    assert text["host"] == f"shop.{keys.namespace}.svc.cluster.local"
    async with keys.client(text["connectionString"]) as client:
        await client.get_queue_sender("orders").send_messages(ServiceBusMessage("hello"))
        async with client.get_queue_receiver("orders") as receiver:
            (message,) = await receiver.receive_messages(max_wait_time=20)
            await receiver.complete_message(message)
    assert str(message) == "hello"


async def test_a_queue_that_was_lost_has_the_keys_of_its_secrets_again(keys: Keys) -> None:
    """Clients go on with the connection strings that they have."""
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [APP]})
    await keys.sync()
    version, rule = keys.version("orders-queue-app"), keys.rules()["app"]
    keys.bus.caller.delete("/v1/queues/orders")
    keys.bus.caller.put("/v1/queues/orders", {})
    await keys.session.catch_up()
    assert "AuthorizationRuleCreated" in {each.reason for each in (await keys.sync()).events}
    for name in ("primaryKey", "secondaryKey"):
        assert keys.rules()["app"][name] == rule[name]
    assert keys.version("orders-queue-app") == version


async def test_an_exported_value_is_no_key_of_a_queue_that_was_lost(keys: Keys) -> None:
    exported = {"endpoint": {"name": "orders-queue-app", "key": "primaryKey"}}
    rules = {"authorizationRules": [APP], "operatorSpec": {"secrets": exported}}
    keys.put("Queue", {"owner": {"name": "shop"}, **rules})
    await keys.sync()
    keys.bus.caller.delete("/v1/queues/orders")
    keys.bus.caller.put("/v1/queues/orders", {})
    await keys.session.catch_up()
    await keys.sync()
    assert not keys.rules()["app"]["primaryKey"].startswith("sb:")


async def test_a_second_look_changes_nothing_and_asks_the_bus_nothing(keys: Keys) -> None:
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [APP]})
    first = await keys.sync()
    assert [each.reason for each in first.events] == ["AuthorizationRuleCreated"]
    before = keys.version("orders-queue-app"), keys.rules()
    keys.session.control = cast(BusControl, None)
    again = await keys.sync()
    assert again.events == ()
    assert again.condition == first.condition
    assert (keys.version("orders-queue-app"), keys.rules()) == before


async def test_rules_of_a_namespace_are_read_again_after_each_change_of_the_bus(
    keys: Keys,
) -> None:
    await keys.sync("Namespace", "shop")
    await keys.session.catch_up()
    await keys.sync("Namespace", "shop")
    control = keys.session.control
    keys.session.control = cast(BusControl, None)
    await keys.sync("Namespace", "shop")
    keys.session.control = control
    path = "/v1/authorization-rules/RootManageSharedAccessKey"
    keys.bus.caller.put(path, {"rights": ["Listen"]})
    await keys.session.catch_up()
    await keys.sync("Namespace", "shop")
    rule = keys.rules("")["RootManageSharedAccessKey"]
    assert set(rule["rights"]) == {"Manage", "Send", "Listen"}


async def test_an_entity_without_rules_asks_the_bus_nothing(keys: Keys) -> None:
    keys.put("Queue", {"owner": {"name": "shop"}})
    keys.session.control = cast(BusControl, None)
    resource = keys.seen("Queue")
    bus = keys.seen("Namespace", "shop")
    assert await sync_keys(keys.context, keys.session, bus, resource, is_new=True) == KeysResult()


async def test_a_rule_that_left_the_spec_goes_with_its_secret_and_foreign_rules_stay(
    keys: Keys,
) -> None:
    spec = {"owner": {"name": "shop"}, "authorizationRules": [APP]}
    keys.put("Queue", spec)
    await keys.sync()
    keys.bus.caller.put("/v1/queues/orders/authorization-rules/theirs", {"rights": ["Send"]})
    keys.put("Queue", spec | {"authorizationRules": [{"name": "theirs", "rights": ["Manage"]}]})
    result = await keys.sync()
    assert set(keys.rules()) == {"theirs"}
    assert keys.rules()["theirs"]["rights"] == ["Send"]
    assert keys.secret("orders-queue-app") is None
    assert keys.secret("orders-queue-theirs") is None
    assert result.condition is not None
    assert result.condition[:2] == ("False", "NameTaken")
    assert [each.reason for each in result.events] == ["AuthorizationRuleDeleted"]


async def test_the_users_secret_is_followed(keys: Keys) -> None:
    rule = APP | {"secretName": "mine"}
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [rule]})
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[:2] == ("False", "SourceMissing")
    assert keys.rules() == {}
    keys.put_secret("mine", primaryKey=KEY)
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[1] == "Synced"
    assert result.observed_secret_version == keys.version("mine")
    assert keys.rules()["app"]["primaryKey"] == KEY
    secondary = keys.rules()["app"]["secondaryKey"]
    keys.put_secret("mine", primaryKey=OTHER_KEY)
    result = await keys.sync()
    assert [each.reason for each in result.events] == ["KeysChanged"]
    assert result.observed_secret_version == keys.version("mine")
    assert keys.rules()["app"]["primaryKey"] == OTHER_KEY
    assert keys.rules()["app"]["secondaryKey"] == secondary
    written = keys.secret("orders-queue-app")
    assert written is not None
    assert written["password"] == OTHER_KEY
    keys.server.request("DELETE", SECRETS.path(keys.namespace, "mine"))
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[1] == "SourceMissing"
    assert keys.rules()["app"]["primaryKey"] == OTHER_KEY


async def test_a_secret_of_another_cluster_namespace_cannot_be_named(keys: Keys) -> None:
    other = f"{keys.namespace}-other"
    keys.server.request("POST", "/api/v1/namespaces", {"metadata": {"name": other}})
    metadata = {"name": "mine", "namespace": other}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    keys.server.apply(SECRETS.path(other, "mine"), body | {"stringData": {"primaryKey": KEY}})
    rule = APP | {"secretName": "mine"}
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [rule]})
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[:2] == ("False", "SourceMissing")


async def test_a_foreign_secret_of_the_same_name_is_left_alone(keys: Keys) -> None:
    keys.put_secret("orders-queue-app", theirs="value")
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [APP]})
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[:2] == ("False", "NameTaken")
    assert result.binding is None
    assert keys.secret("orders-queue-app") == {"theirs": "value"}
    keys.server.request("DELETE", SECRETS.path(keys.namespace, "orders-queue-app"))
    assert (await keys.sync()).binding is not None


async def test_a_secret_stays_with_its_entity_and_the_next_resource_takes_it_over(
    keys: Keys,
) -> None:
    spec = {"owner": {"name": "shop"}, "authorizationRules": [APP, READER]}
    path = SECRETS.path(keys.namespace, "orders-queue-app")
    keys.put("Queue", spec)
    await keys.sync()
    assert len(keys.server.request("GET", path)["metadata"]["ownerReferences"]) == 1
    keys.put("Queue", spec | {"operatorSpec": {"deletionPolicy": "Retain"}})
    await keys.sync()
    left = keys.server.request("GET", path)
    assert "ownerReferences" not in left["metadata"]
    former = keys.seen("Queue")
    keys.server.request("DELETE", RESOURCES["Queue"].path(keys.namespace, "orders"))
    resource = keys.put("Queue", spec | {"authorizationRules": [APP]})
    assert resource.uid != former.uid
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[1] == "Synced"
    taken = keys.server.request("GET", path)
    assert taken["metadata"]["uid"] == left["metadata"]["uid"]
    assert taken["data"] == left["data"]
    assert [each["uid"] for each in taken["metadata"]["ownerReferences"]] == [resource.uid]
    assert keys.secret("orders-queue-reader") is None


async def test_a_secret_that_stays_keeps_the_owner_that_somebody_else_added(keys: Keys) -> None:
    """The cache has not seen it: a list that is replaced blindly would lose it."""
    queue = keys.put("Queue", QUEUE)
    await keys.sync()
    path = SECRETS.path(keys.namespace, "orders-queue-app")
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": "uid-of-other"}
    owners = [*keys.server.request("GET", path)["metadata"]["ownerReferences"], other]
    change = {"metadata": {"ownerReferences": owners}}
    keys.server.request("PATCH", path, change, "application/merge-patch+json")
    await leave_secrets(keys.context, queue)
    [left] = keys.server.request("GET", path)["metadata"]["ownerReferences"]
    assert left["name"] == "other"


async def test_what_is_remembered_of_resources_that_are_gone_is_dropped(keys: Keys) -> None:
    queue = keys.put("Queue", QUEUE)
    await keys.sync()
    [(known, remembered)] = keys.session.synced_keys.items()
    for number in range(3):
        gone = Key("Queue", keys.namespace, f"gone-{number}")
        keys.session.synced_keys[gone] = remembered
    keys.put("Queue", QUEUE | {"maxDeliveryCount": 3})
    await keys.sync()
    assert list(keys.session.synced_keys) == [known] == [queue.key]


async def test_a_changed_or_deleted_secret_is_written_again(keys: Keys) -> None:
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [APP]})
    await keys.sync()
    path = SECRETS.path(keys.namespace, "orders-queue-app")
    before = keys.secret("orders-queue-app")
    changed = keys.server.request(
        "PATCH", path, {"stringData": {"password": "x"}}, "application/merge-patch+json"
    )
    keys.context.cache.observe(changed)
    await keys.sync()
    assert keys.secret("orders-queue-app") == before
    found = keys.server.request("GET", path)
    keys.server.request("DELETE", path)
    found["metadata"]["resourceVersion"] = str(int(found["metadata"]["resourceVersion"]) + 1)
    keys.context.cache.forget({"apiVersion": "v1", "kind": "Secret"} | found)
    await keys.sync()
    assert keys.secret("orders-queue-app") == before


async def test_chosen_secrets_are_written_and_removed(keys: Keys) -> None:
    chosen = {"secrets": {"primaryConnectionString": {"name": "bus-access", "key": "url"}}}
    spec = {"owner": {"name": "shop"}, "authorizationRules": [APP]}
    keys.put("Queue", spec | {"operatorSpec": chosen})
    await keys.sync()
    text = keys.secret("bus-access")
    assert text is not None
    assert text.keys() == {"url"}
    keys.put("Queue", spec)
    await keys.sync()
    assert keys.secret("bus-access") is None
    assert keys.secret("orders-queue-app") is not None


# --- rotation -----------------------------------------------------------------------------------


class Clients:
    """Connects again and again with the Secret's connection string, sends and receives."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.used: list[str] = []

    async def run(self) -> None:
        while True:
            await self.once()

    async def once(self) -> None:
        secret = await asyncio.to_thread(self.keys.secret, "orders-queue-app")
        assert secret is not None
        await asyncio.sleep(0)  # a rotation step may come between
        async with self.keys.client(secret["connectionString"]) as client:
            text = f"message {len(self.used)}"
            async with client.get_queue_sender("orders") as sender:
                await sender.send_messages(ServiceBusMessage(text))
            async with client.get_queue_receiver("orders") as receiver:
                (message,) = await receiver.receive_messages(max_wait_time=20)
                await receiver.complete_message(message)
        assert str(message) == text
        self.used.append(secret["password"])

    async def wait_for_rounds(self) -> None:
        """Return when two more rounds have ended."""
        wanted = len(self.used) + 2
        while len(self.used) < wanted:
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_clients_that_read_the_secret_again_are_never_refused(keys: Keys) -> None:
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [APP]})
    await keys.sync()
    clients = Clients(keys)
    before = keys.rules()["app"]
    running = asyncio.create_task(clients.run())
    await clients.wait_for_rounds()
    keys.annotate("Queue", "primary")
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[:2] == ("True", "Rotating")
    assert result.retry_s == 300
    assert keys.rules()["app"] == before
    await clients.wait_for_rounds()
    keys.now += timedelta(seconds=299)
    assert (await keys.sync()).retry_s == 1
    assert keys.rules()["app"] == before
    keys.now += timedelta(seconds=1)
    result = await keys.sync()
    assert [each.reason for each in result.events] == ["KeysRotated"]
    assert result.condition is not None
    assert result.condition[1] == "Synced"
    after = keys.rules()["app"]
    assert after["primaryKey"] != before["primaryKey"]
    assert after["secondaryKey"] == before["secondaryKey"]
    assert ROTATE not in keys.seen("Queue").annotations
    await clients.wait_for_rounds()
    assert not running.done(), running
    running.cancel()
    in_order = [each for each, _ in itertools.groupby(clients.used)]
    assert in_order == [before["primaryKey"], before["secondaryKey"], after["primaryKey"]]
    assert (await keys.sync()).events == ()
    former = f"Endpoint=sb://x/;SharedAccessKeyName=app;SharedAccessKey={before['primaryKey']}"
    async with keys.client(f"{former};EntityPath=orders") as client:
        with pytest.raises(ServiceBusAuthenticationError):
            await client.get_queue_sender("orders").send_messages(ServiceBusMessage("refused"))


async def test_the_pause_of_a_rotation_begins_when_the_last_secret_hides_the_key(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [APP, READER]})
    await keys.sync()
    before = keys.rules()
    keys.annotate("Queue", "primary")
    api = keys.context.api
    apply, written = api.apply, []

    async def crash_after_the_first(wanted: dict[str, Any]) -> object:
        if written:
            raise RuntimeError("killed")
        written.append(wanted["metadata"]["name"])
        return await apply(wanted)

    with monkeypatch.context() as patched:
        patched.setattr(api, "apply", crash_after_the_first)
        with pytest.raises(RuntimeError):
            await keys.sync()
    assert written == ["orders-queue-app"]
    keys.now += timedelta(seconds=300)
    assert (await keys.sync()).retry_s == 300
    assert keys.rules() == before
    keys.now += timedelta(seconds=300)
    assert [each.reason for each in (await keys.sync()).events] == ["KeysRotated"]


async def test_a_request_that_comes_during_a_rotation_is_kept(keys: Keys) -> None:
    keys.put("Queue", QUEUE)
    await keys.sync()
    keys.annotate("Queue", "primary")
    await keys.sync()
    keys.now += timedelta(seconds=300)
    bus, former = keys.seen("Namespace", "shop"), keys.seen("Queue")
    keys.annotate("Queue", "secondary")
    result = await sync_keys(keys.context, keys.session, bus, former)
    assert [each.reason for each in result.events] == ["KeysRotated"]
    assert keys.seen("Queue").annotations[ROTATE] == "secondary"


async def test_a_rotation_that_is_taken_back_shows_the_key_again(keys: Keys) -> None:
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [APP]})
    await keys.sync()
    before = keys.secret("orders-queue-app")
    keys.annotate("Queue", "secondary")
    await keys.sync()
    assert keys.secret("orders-queue-app") != before
    keys.annotate("Queue", None)
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[1] == "Synced"
    assert keys.secret("orders-queue-app") == before


async def test_a_rotation_without_keys_of_the_bus_ends_with_an_event(keys: Keys) -> None:
    keys.put_secret("mine", primaryKey=KEY)
    rule = APP | {"secretName": "mine"}
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [rule]})
    await keys.sync()
    keys.annotate("Queue", "primary")
    result = await keys.sync()
    assert [each.reason for each in result.events] == ["NothingToRotate"]
    assert ROTATE not in keys.seen("Queue").annotations
    assert keys.rules()["app"]["primaryKey"] == KEY


async def test_a_crash_before_the_secrets_show_the_new_key_is_made_up_for(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": [APP]})
    await keys.sync()
    keys.annotate("Queue", "primary")
    await keys.sync()
    keys.now += timedelta(seconds=300)

    async def crash(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(keys.context.api, "apply", crash)
        with pytest.raises(RuntimeError):
            await keys.sync()
    rule, hidden = keys.rules()["app"], keys.secret("orders-queue-app")
    assert hidden is not None
    assert hidden["primaryKey"] == rule["secondaryKey"]
    await keys.sync()
    shown = keys.secret("orders-queue-app")
    assert shown is not None
    assert shown["primaryKey"] == rule["primaryKey"] == keys.rules()["app"]["primaryKey"]


# --- nothing of it leaks ------------------------------------------------------------------------


async def test_no_key_is_in_logs_events_conditions_errors_or_memory(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys.put_secret("mine", primaryKey=KEY, secondaryKey=OTHER_KEY)
    keys.put_secret("broken", primaryKey=f"{KEY};")
    keys.put_secret("orders-queue-taken", theirs="value")
    rules = [
        APP,
        APP | {"name": "users", "secretName": "mine"},
        APP | {"name": "broken", "secretName": "broken"},
        APP | {"name": "missing", "secretName": "missing"},
        APP | {"name": "taken"},
    ]
    keys.put("Queue", {"owner": {"name": "shop"}, "authorizationRules": rules})
    await keys.sync()
    keys.annotate("Queue", "primary")
    await keys.sync()
    keys.now += timedelta(seconds=300)
    before = keys.rules()
    await keys.sync()
    await keys.sync("Namespace", "shop")
    errors = []
    for name in ("app", "no such queue"):
        with pytest.raises(Exception) as caught:
            await keys.session.control.ask(
                "PUT",
                f"/v1/queues/{name}/authorization-rules/x",
                {"rights": ["Bad"], "primaryKey": KEY},
            )
        errors.append(f"{caught.value!r} {caught.value}")
    found = [*before.values(), *keys.rules().values(), *keys.rules("").values()]
    texts = {rule[key] for rule in found for key in ("primaryKey", "secondaryKey")}
    shown = "\n".join(
        [
            repr(keys.results),
            repr(keys.session.synced_keys),
            repr(vars(keys.context.cache)),
            *errors,
            *(f"{record.getMessage()} {record.__dict__}" for record in caplog.records),
        ]
    )
    assert len(texts) >= 8
    for key in (*texts, KEY, OTHER_KEY):
        packed = base64.b64encode(key.encode()).decode()
        assert key not in shown
        assert packed not in shown


# --- the guide ----------------------------------------------------------------------------------


async def test_the_guide_about_keys_works_as_written(keys: Keys) -> None:
    assert languages(PAGE) == {"sh", "yaml"}
    described, chosen = blocks(PAGE, "yaml")
    own_keys, rotation, one_secret = (
        each.replace("--namespace shop", f"--namespace {keys.namespace}")
        for each in blocks(PAGE, "sh")
    )
    apply(keys.server, described, keys.namespace)
    keys.bus.caller.put("/v1/topics/events", {})
    keys.put("Topic", TOPIC, "events")
    for key in (("Namespace", "shop"), ("Queue", "orders"), ("Topic", "events")):
        assert (await keys.sync(*key)).binding is not None
    for name in ("shop-bus-root", "orders-queue-worker", "events-topic-reader"):
        assert f"`{name}`" in (GUIDES / PAGE).read_text(encoding="utf-8")
        assert keys.secret(name) is not None
    found = keys.secret("orders-queue-worker")
    assert found is not None
    table = (GUIDES / PAGE).read_text(encoding="utf-8").partition("## Contents")[2]
    named = set(re.findall(r"`([\w.]+)`", table.partition("The type of the Secret")[0]))
    assert found.keys() <= named - {"EntityPath"} <= {*found, "ca.crt"}
    apply(keys.server, chosen, keys.namespace)
    await keys.sync()
    assert keys.secret("orders-access") == {"SERVICEBUS_CONNECTION": found["connectionString"]}
    run(keys.server, own_keys)
    await keys.sync()
    assert keys.rules()["worker"]["primaryKey"] == keys.secret("orders-keys")["primaryKey"]
    keys.server.request("DELETE", RESOURCES["Queue"].path(keys.namespace, "orders"))
    apply(keys.server, described, keys.namespace)
    run(keys.server, rotation)
    result = await keys.sync()
    assert result.condition is not None
    assert result.condition[1] == "Rotating"
    keys.now += timedelta(seconds=300)
    assert [each.reason for each in (await keys.sync()).events] == ["KeysRotated"]
    run(keys.server, one_secret)
    rules = run(keys.server, f"kubectl --namespace {keys.namespace} get role orders-keys -o yaml")
    assert "orders-queue-worker" in rules


def test_the_guide_has_the_reasons_of_the_condition() -> None:
    sources = sorted((ROOT / "operator" / "postbus_operator" / "keys").glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    given = set(re.findall(r'Problem\(\s*"(\w+)"', text))
    given |= set(re.findall(r'\("(?:True|False)", "(\w+)"', text))
    page = (GUIDES / PAGE).read_text(encoding="utf-8")
    assert given == set(re.findall(r"^\| (?:True|False), `(\w+)`", page, re.MULTILINE))
