"""The mark of the program that keeps a definition: who sets it, and that nobody loses it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from azure.servicebus.management import ServiceBusAdministrationClient

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import Caller, ControlledBus, controlled_bus, path_of

pytestmark = pytest.mark.slow

MARK = "postbus.dev/shop/orders 6f1c"


def by(path: str, mark: str) -> str:
    return f"{path}?managed-by={quote(mark)}"


def mark_of(api: Caller, path: str) -> Any:
    return api.get(path).body["managedBy"]


@pytest.mark.parametrize("kind", ["queues", "topics", "subscriptions"])
def test_mark_is_set_kept_changed_and_removed(api: Caller, name: str, kind: str) -> None:
    path = path_of("topics", name, "subscriptions", "s") if kind == "subscriptions" else ""
    if path:
        api.put(path_of("topics", name), {})
    path = path or path_of(kind, name)
    created = api.put(by(path, MARK), {})
    assert created.status == 201
    assert mark_of(api, path) == MARK
    same = api.put(by(path, MARK), {})
    assert (same.status, same.body["version"]) == (200, created.body["version"])
    api.put(path, {"userMetadata": "changed by somebody else"})
    assert mark_of(api, path) == MARK
    other = api.put(by(path, "other"), {})
    assert other.body["version"] > created.body["version"]
    assert other.body["appliedHash"] == created.body["appliedHash"]
    assert mark_of(api, path) == "other"
    api.put(by(path, ""), {})
    assert mark_of(api, path) == ""


def test_entity_without_a_mark_has_none(api: Caller, name: str) -> None:
    api.put(path_of("queues", name), {})
    assert mark_of(api, path_of("queues", name)) == ""


def test_lists_have_the_mark(api: Caller, name: str) -> None:
    api.put(by(path_of("queues", name), MARK), {})
    found = [each for each in api.get("/v1/queues?top=1000").body["items"] if each["name"] == name]
    assert [each["managedBy"] for each in found] == [MARK]


def test_update_over_the_administration_api_keeps_the_mark(
    running: ControlledBus, api: Caller, name: str
) -> None:
    path = path_of("queues", name)
    api.put(by(path, MARK), {})
    host = dict(running.bus.summary())["http"].partition("://")[2]
    endpoint = running.connection_string.split(";")[0]
    text = running.connection_string.replace(endpoint, f"Endpoint=sb://{host}")
    trusted = {"connection_verify": str(running.bus.authority_file)}
    with ServiceBusAdministrationClient.from_connection_string(text, **trusted) as administration:
        queue = administration.get_queue(name)
        queue.max_delivery_count = 3
        administration.update_queue(queue)
    assert api.get(path).body["properties"]["maxDeliveryCount"] == 3
    assert mark_of(api, path) == MARK


def test_tombstone_has_the_mark_and_a_restored_entity_gets_it_back(api: Caller, name: str) -> None:
    path = path_of("queues", name)
    number = api.put(by(path, MARK), {}).body["entityId"]
    since = api.get("/v1/tombstones").body["version"]
    api.delete(f"{path}?policy=Retain")
    [tombstone] = api.get(f"/v1/tombstones?since={since}").body["items"]
    assert tombstone["managedBy"] == MARK
    api.put(path, {})
    assert mark_of(api, path) == ""
    api.delete(path)
    api.post(f"/v1/deleted/{number}/restore")
    assert mark_of(api, path) == MARK


def test_changes_have_mark_hash_and_reason(api: Caller, name: str) -> None:
    since = latest(api)
    path = path_of("queues", name)
    put = api.put(by(path, MARK), {}).body
    [change] = api.get(f"/v1/changes?since={since}").body["items"]
    assert (change["change"], change["managedBy"]) == ("put", MARK)
    assert (change["appliedHash"], change["reason"]) == (put["appliedHash"], None)
    api.delete(f"{path}?policy=Retain")
    [change] = api.get(f"/v1/changes?since={put['version']}").body["items"]
    assert (change["change"], change["managedBy"]) == ("deleted", MARK)
    assert (change["appliedHash"], change["reason"]) == (None, "requested")
    assert change["restorableUntil"] is not None


def latest(api: Caller) -> int:
    version, items = 0, [{}]
    while items:
        answer = api.get(f"/v1/changes?since={version}").body
        version, items = answer["version"], answer["items"]
    return version


def test_mark_survives_a_restart(postgres_server: EmbeddedPostgres, tmp_path: Any) -> None:
    make_database(postgres_server, "managed_by_again", template=TEMPLATE)
    queue, rule = path_of("queues", "orders"), "/v1/authorization-rules/reader"
    with controlled_bus(dsn_of(postgres_server, "managed_by_again"), tmp_path) as bus:
        bus.caller.put(by(queue, MARK), {})
        bus.caller.put(by(rule, MARK), {"rights": ["Listen"]})
    with controlled_bus(dsn_of(postgres_server, "managed_by_again"), tmp_path) as bus:
        assert mark_of(bus.caller, queue) == MARK
        assert mark_of(bus.caller, rule) == MARK


@pytest.mark.parametrize("scope", ["namespace", "queues", "topics"])
def test_authorization_rule_has_a_mark(api: Caller, name: str, scope: str) -> None:
    if scope != "namespace":
        api.put(path_of(scope, name), {})
    base = (
        "/v1/authorization-rules"
        if scope == "namespace"
        else f"{path_of(scope, name)}/authorization-rules"
    )
    path = f"{base}/{name}"
    put = api.put(by(path, MARK), {"rights": ["Send"]})
    assert (put.status, put.body["managedBy"]) == (201, MARK)
    api.put(path, {"rights": ["Listen"]})
    assert mark_of(api, path) == MARK
    api.put(f"{base}/another", {"rights": ["Listen"]})
    assert mark_of(api, path) == MARK
    assert [each["managedBy"] for each in api.get(base).body["items"] if each["name"] == name] == [
        MARK
    ]
    api.put(by(path, ""), {"rights": ["Listen"]})
    assert mark_of(api, path) == ""
    api.delete(f"{base}/another")


@pytest.mark.parametrize("mark", ["x" * 513, "a\x00b", "a\nb", "é"])
def test_invalid_mark_is_refused(api: Caller, name: str, mark: str) -> None:
    refused = api.put(by(path_of("queues", name), mark), {})
    assert refused.status == 400
    assert "managed-by: must have at most 512 printable ASCII characters" in refused.body["detail"]
    assert api.get(path_of("queues", name)).status == 404


def test_parameter_without_a_list_of_values_occurs_once(api: Caller) -> None:
    refused = api.get("/v1/audit?entity=a&entity=b")
    assert refused.status == 400
    assert "entity: must occur once" in refused.body["detail"]
