"""Definitions over the control API: a real bus, a real store, plain HTTP."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from postbus.contract.control import SubscriptionDefinition, applied_hash
from postbus.contract.entities import QueueProperties, SubscriptionProperties
from tests.edge.control.control_bus import WAIT_S, Caller, ControlledBus, path_of

pytestmark = pytest.mark.slow

SQL_RULE = {"name": "big", "sqlFilter": {"sqlExpression": "size > 10"}}
RED_RULE = {"name": "red", "correlationFilter": {"properties": {"colour": "red"}}}


# --- queues and topics --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["queues", "topics"])
def test_put_creates_then_updates_then_is_idempotent(api: Caller, name: str, kind: str) -> None:
    path = path_of(kind, name)
    created = api.put(path, {"defaultMessageTimeToLive": "PT1H"})
    assert (created.status, created.body["created"]) == (201, True)
    assert created.headers["ETag"] == f'"{created.body["version"]}"'
    assert set(created.body["acknowledged"]) == {str(number) for number in range(16)}
    home = min(created.body["acknowledged"].values())
    assert home >= created.body["version"]
    again = api.put(path, {"defaultMessageTimeToLive": "PT60M"})
    same = ("entityId", "appliedHash", "version")
    assert (again.status, again.body["created"]) == (200, False)
    assert [again.body[each] for each in same] == [created.body[each] for each in same]
    changed = api.put(path, {"defaultMessageTimeToLive": "PT2H"})
    assert changed.status == 200
    assert changed.body["entityId"] == created.body["entityId"]
    assert changed.body["version"] > created.body["version"]
    assert changed.body["appliedHash"] != created.body["appliedHash"]
    response = api.get(path)
    assert response.status == 200
    assert response.headers["ETag"] == f'"{changed.body["version"]}"'
    assert response.body["properties"]["defaultMessageTimeToLive"] == "PT2H"
    assert response.body["appliedHash"] == changed.body["appliedHash"]
    back = api.put(path, response.body["properties"])
    assert (back.status, back.body["version"]) == (200, changed.body["version"])
    whole = api.put(path, {})  # a whole definition: omitted properties have their defaults
    assert api.get(path).body["properties"]["defaultMessageTimeToLive"].startswith("P10675199D")
    assert whole.body["appliedHash"] not in {
        created.body["appliedHash"],
        changed.body["appliedHash"],
    }


def test_unlikely_values_give_warnings_with_the_entity(api: Caller, name: str) -> None:
    path = path_of("queues", name)
    api.put(path, {})
    assert api.get(path).body["warnings"] == []
    assert api.put(path, {"forwardTo": name.upper()}).status == 200
    assert api.get(path).body["properties"]["forwardTo"] == name.upper()
    (warning,) = api.get(path).body["warnings"]
    assert warning.startswith("forwardTo: forwarding loop")
    api.put(path, {})


def test_hash_is_that_of_the_definition_in_any_process(api: Caller, name: str) -> None:
    body = {"lockDuration": "PT90S", "maxDeliveryCount": 3}
    put = api.put(path_of("queues", name), body)
    known = QueueProperties.model_validate_json(json.dumps(body))
    assert put.body["appliedHash"] == applied_hash(known)
    assert re.fullmatch(r"[0-9a-f]{64}", applied_hash(known))
    assert applied_hash(known.model_copy(update={"max_delivery_count": 4})) != applied_hash(known)
    other = api.put(path_of("queues", f"{name}-again"), {**body, "lockDuration": "PT1M30S"})
    assert other.body["appliedHash"] == put.body["appliedHash"]


def test_hash_of_a_subscription_ignores_the_order_of_its_rules() -> None:
    rules = [SQL_RULE, RED_RULE]
    hashes = {
        applied_hash(SubscriptionDefinition.model_validate({"rules": ordered}))
        for ordered in (rules, rules[::-1])
    }
    assert len(hashes) == 1
    split = SubscriptionDefinition.model_validate({"rules": rules})
    assert split.rules is not None
    assert applied_hash(SubscriptionProperties(), split.rules) in hashes
    assert applied_hash(SubscriptionProperties()) not in hashes


def test_names_keep_their_case_and_slashes(api: Caller, name: str) -> None:
    path = path_of("queues", f"Shop/{name}/Orders")
    assert "%2F" in path
    assert api.put(path, {}).status == 201
    assert api.put(path.lower().replace("%2f", "%2F"), {}).status == 200
    assert api.get(path.lower().replace("%2f", "%2f")).body["name"] == f"Shop/{name}/Orders"
    assert api.get(f"/v1/queues/Shop/{name}/Orders").status == 404
    assert api.get(path_of("queues", f"/Shop/{name}/Orders")).status == 404
    assert api.delete(path).status == 200
    assert api.get(path).status == 404


def test_a_queue_is_no_topic(api: Caller, name: str) -> None:
    assert api.put(path_of("queues", name), {}).status == 201
    clash = api.put(path_of("topics", name), {})
    assert (clash.status, clash.kind) == (409, "already-exists")
    for path in (path_of("topics", name), path_of("topics", name, "runtime")):
        assert api.get(path).status == 404
    assert api.delete(path_of("topics", name)).status == 404
    assert api.get(path_of("queues", name)).status == 200


def test_immutable_properties_are_kept(api: Caller, name: str) -> None:
    api.put(path_of("queues", name), {"requiresSession": True})
    response = api.put(path_of("queues", name), {"requiresSession": False})
    assert (response.status, response.kind) == (409, "immutable")
    assert "requiresSession" in response.body["detail"]
    assert api.get(path_of("queues", name)).body["properties"]["requiresSession"] is True


def test_lists_are_paged_by_name(api: Caller) -> None:
    wanted = [f"page-{number:02}" for number in range(7)]
    for each in reversed(wanted):
        api.put(path_of("queues", each), {})
    found: list[str] = []
    path: str | None = "/v1/queues?top=3"
    while path is not None:
        page = api.get(path).body
        assert len(page["items"]) <= 3
        found += [each["name"] for each in page["items"]]
        skip = page["nextSkip"]
        path = None if skip is None else f"/v1/queues?skip={skip}&top=3"
    assert found == sorted(found, key=str.lower)
    assert [each for each in found if each.startswith("page-")] == wanted
    exact = api.get(f"/v1/queues?top={len(found)}").body
    assert (len(exact["items"]), exact["nextSkip"]) == (len(found), None)
    assert api.get("/v1/queues?skip=100000").body == {"items": [], "nextSkip": None}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("top=0", "top"),
        ("top=1001", "top"),
        ("skip=-1", "skip"),
        ("skip=one", "skip"),
        ("skip=1&skip=2", "skip"),
        ("skip=" + "9" * 30, "skip"),
        ("page=1", "page"),
        ("top=%D9%A1", "top"),  # a digit of another script
    ],
)
def test_wrong_pages_are_refused(api: Caller, query: str, field: str) -> None:
    response = api.get(f"/v1/queues?{query}")
    assert (response.status, response.kind) == (400, "invalid")
    assert {each["field"] for each in response.body["problems"]} == {field}


# --- subscriptions and rules --------------------------------------------------------------------


def test_subscription_is_put_with_its_rules(api: Caller, name: str) -> None:
    api.put(path_of("topics", name), {})
    path = path_of("topics", name, "subscriptions", "all")
    assert api.put(path, {}).status == 201
    response = api.get(path).body
    assert (response["name"], response["topic"], response["path"]) == (
        "all",
        name,
        f"{name}/Subscriptions/all",
    )
    assert [rule["name"] for rule in response["properties"]["rules"]] == ["$Default"]
    put = api.put(path, {"maxDeliveryCount": 2, "rules": [SQL_RULE, RED_RULE]})
    assert put.status == 200
    response = api.get(path).body
    assert {rule["name"] for rule in response["properties"]["rules"]} == {"big", "red"}
    assert response["properties"]["maxDeliveryCount"] == 2
    again = api.put(path, {"maxDeliveryCount": 2, "rules": [RED_RULE, SQL_RULE]})
    assert again.body["appliedHash"] == put.body["appliedHash"]
    back = api.put(path, response["properties"])
    assert back.body["appliedHash"] == put.body["appliedHash"]
    kept = api.put(path, {"maxDeliveryCount": 3})
    assert kept.status == 200
    rules = api.get(f"{path}/rules").body["items"]
    assert [rule["name"] for rule in rules] == ["big", "red"]
    assert api.put(path, {"rules": []}).status == 200
    assert api.get(f"{path}/rules").body["items"] == []
    listed = api.get(path_of("topics", name, "subscriptions")).body["items"]
    assert [each["name"] for each in listed] == ["all"]


def test_rules_are_put_and_deleted_one_by_one(api: Caller, name: str) -> None:
    api.put(path_of("topics", name), {})
    path = path_of("topics", name, "subscriptions", "some")
    api.put(path, {"rules": []})
    created = api.put(f"{path}/rules/big", SQL_RULE)
    assert (created.status, created.body["created"]) == (201, True)
    again = api.put(f"{path}/rules/BIG", SQL_RULE | {"name": "BIG"})
    assert again.status == 200
    changed = api.put(
        f"{path}/rules/big", {"name": "big", "sqlFilter": {"sqlExpression": "size > 11"}}
    )
    assert (changed.status, changed.body["created"]) == (200, False)
    assert changed.body["appliedHash"] != created.body["appliedHash"]
    response = api.get(f"{path}/rules/big").body
    assert response["properties"]["sqlFilter"]["sqlExpression"] == "size > 11"
    gone = api.delete(f"{path}/rules/big")
    assert (gone.status, gone.body["created"]) == (200, False)
    assert api.get(f"{path}/rules/big").status == 404
    assert api.delete(f"{path}/rules/big").status == 404


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"name": "other", "sqlFilter": {"sqlExpression": "1=1"}}, "as in the path"),
        ({"name": "bad", "sqlFilter": {"sqlExpression": "size >"}}, "bad"),
        ({"name": "bad"}, "either a sqlFilter or a correlationFilter"),
        ({"name": "bad", "correlationFilter": {}}, "at least one"),
        ({"name": "bad", "sqlFilter": {"sqlExpression": "x" * 1025}}, "1024"),
        ({"name": "bad", "correlationFilter": {"label": "x" * 66_000}}, "65536 are allowed"),
    ],
)
def test_wrong_rules_are_refused(api: Caller, name: str, rule: object, words: str) -> None:
    api.put(path_of("topics", name), {})
    path = path_of("topics", name, "subscriptions", "some")
    api.put(path, {})
    response = api.put(f"{path}/rules/bad", rule)
    assert (response.status, words in response.body["detail"]) == (400, True)
    assert [each["name"] for each in api.get(f"{path}/rules").body["items"]] == ["$Default"]


@pytest.mark.slow
def test_rules_of_a_subscription_are_limited_together(api: Caller, name: str) -> None:
    api.put(path_of("topics", name), {})
    path = path_of("topics", name, "subscriptions", "some")
    rules = [
        {"name": f"r{number}", "correlationFilter": {"label": "x" * 65_000}} for number in range(17)
    ]
    response = api.put(path, {"rules": rules})
    assert (response.status, "1048576 are allowed" in response.body["detail"]) == (403, True)
    assert api.put(path, {"rules": rules[:16]}).status == 201
    one = {"name": "r16", "correlationFilter": {"label": "x" * 10_000}}
    assert api.put(f"{path}/rules/r16", one).status == 403


def test_subscription_without_its_topic_is_refused(api: Caller, name: str) -> None:
    path = path_of("topics", name, "subscriptions", "some")
    assert api.put(path, {}).status == 404
    assert api.get(path).status == 404
    assert api.get(path_of("topics", name, "subscriptions")).status == 404
    assert api.put(f"{path}/rules/big", SQL_RULE).status == 404


# --- conditions ---------------------------------------------------------------------------------


def test_if_match_refuses_an_outdated_version(api: Caller, name: str) -> None:
    path = path_of("queues", name)
    first = api.put(path, {}).headers["ETag"]
    second = api.put(path, {"maxDeliveryCount": 5}, headers={"If-Match": first})
    assert second.status == 200
    for method, body in (("PUT", {"maxDeliveryCount": 6}), ("DELETE", None)):
        late = api.call(method, path, body, headers={"If-Match": first})
        assert (late.status, late.kind) == (412, "version-differs")
        assert late.body["detail"] == (
            f"the queue {name} has the version {second.headers['ETag']}, but If-Match names"
            " another: read it again and repeat"
        )
    assert api.get(path).body["properties"]["maxDeliveryCount"] == 5
    either = f'"1", {second.headers["ETag"]}'
    assert api.put(path, {}, headers={"If-Match": either}).status == 200
    assert api.delete(path, headers={"If-Match": "*"}).status == 200
    assert api.put(path, {}, headers={"If-Match": first}).status == 412
    assert api.put(path, {}, headers={"If-Match": "*"}).status == 412
    assert api.get(path).status == 404
    nowhere = api.put(path_of("queues", "k<"), {}, headers={"If-Match": first})
    assert nowhere.status == 400, "a name that cannot be is refused before a version that is not"


def test_if_none_match_creates_only(api: Caller, name: str) -> None:
    path, new = path_of("queues", name), {"If-None-Match": "*"}
    assert api.put(path, {}, headers=new).status == 201
    response = api.put(path, {"maxDeliveryCount": 5}, headers=new)
    assert (response.status, response.kind) == (412, "already-exists")
    assert api.get(path).body["properties"]["maxDeliveryCount"] == 10


@pytest.mark.parametrize(
    "headers",
    [
        {"If-Match": ""},
        {"If-None-Match": ""},
        {"If-Match": "1"},
        {"If-Match": 'W/"1"'},
        {"If-Match": '"one"'},
        {"If-Match": '"1",'},
        {"If-None-Match": '"1"'},
        {"If-None-Match": "*", "If-Match": "*"},
    ],
)
def test_invalid_conditions_are_refused(api: Caller, name: str, headers: dict[str, str]) -> None:
    response = api.put(path_of("queues", name), {}, headers=headers)
    assert (response.status, response.kind) == (400, "invalid")
    assert api.get(path_of("queues", name)).status == 404


# --- counts -------------------------------------------------------------------------------------


def wait_for_rates(api: Caller, path: str) -> dict[str, Any]:
    """Return the runtime information of an entity once its rates are known, after a second."""
    until = time.monotonic() + 10.0
    while True:
        found: dict[str, Any] = api.get(path).body
        if found["rates"] is not None or time.monotonic() > until:
            return found
        time.sleep(0.05)


def test_counts_are_exact_at_rest(running: ControlledBus, name: str) -> None:
    api = running.caller
    api.put(path_of("topics", name), {})
    subscription = path_of("topics", name, "subscriptions", "all")
    api.put(subscription, {})
    api.put(path_of("queues", f"{name}-q"), {})
    later = datetime.now(UTC) + timedelta(days=300)
    with ServiceBusClient.from_connection_string(running.connection_string) as client:
        with client.get_topic_sender(name) as sender:
            sender.send_messages([ServiceBusMessage("one"), ServiceBusMessage("two")])
        with client.get_queue_sender(f"{name}-q") as sender:
            sender.send_messages([ServiceBusMessage(str(number)) for number in range(3)])
            sender.schedule_messages(ServiceBusMessage("later"), later)
        with client.get_queue_receiver(f"{name}-q") as receiver:
            receiver.dead_letter_message(receiver.receive_messages(1, max_wait_time=10)[0])
    response = wait_for_rates(api, f"{path_of('queues', f'{name}-q')}/runtime")
    assert response["countDetails"] == {
        "activeMessageCount": 2,
        "deadLetterMessageCount": 1,
        "scheduledMessageCount": 1,
        "transferMessageCount": 0,
        "transferDeadLetterMessageCount": 0,
    }
    assert (response["messageCount"], response["availability"]) == (4, "Available")
    assert 0 <= response["oldestMessageAgeSeconds"] < 600
    assert response["rates"]["incoming"] > response["rates"]["completed"] == 0
    assert response["sizeInBytes"] > 0
    assert api.get(f"{subscription}/runtime").body["messageCount"] == 2
    topic = api.get(f"{path_of('topics', name)}/runtime").body
    assert topic["subscriptionCount"] == 1
    assert api.get(f"{path_of('queues', 'nobody')}/runtime").status == 404


@pytest.mark.parametrize("kind", ["queues", "rules", "authorization-rules"])
def test_one_of_concurrent_puts_creates_the_entity(api: Caller, name: str, kind: str) -> None:
    path, body = path_of("queues", name), {}
    if kind == "rules":
        api.put(path_of("topics", name), {})
        subscription = path_of("topics", name, "subscriptions", "all")
        api.put(subscription, {})
        path, body = f"{subscription}/rules/mine", {"name": "mine", "sqlFilter": SQL}
    elif kind == "authorization-rules":
        api.put(path, {})
        path, body = f"{path}/authorization-rules/mine", {"rights": ["Send"], **KEYS}
    with ThreadPoolExecutor(8) as pool:
        response = list(pool.map(lambda _: api.put(path, body), range(8)))
    assert sorted(each.status for each in response) == [200] * 7 + [201]
    if kind != "authorization-rules":
        assert [each.body["created"] for each in response] == [
            each.status == 201 for each in response
        ]


SQL = {"sqlExpression": "1 = 1"}
KEYS = {"primaryKey": "first" * 4, "secondaryKey": "second" * 4}


# --- the namespace ------------------------------------------------------------------------------


def test_namespace_is_read_and_replaced(api: Caller) -> None:
    response = api.get("/v1/namespace")
    assert (response.body["name"], response.body["partitionCount"]) == ("test-bus", 16)
    same = api.put("/v1/namespace", response.body["properties"])
    assert (same.status, same.body["appliedHash"]) == (200, response.body["appliedHash"])
    assert same.body["version"] == response.body["version"]
    wanted = {**response.body["properties"], "tags": {"team": "shop"}}
    changed = api.put("/v1/namespace", wanted)
    assert (changed.status, changed.body["entityId"], changed.body["created"]) == (200, 0, False)
    version = changed.body["version"]
    assert version > response.body["version"]
    assert changed.body["acknowledged"] == {str(each): version for each in range(16)}
    again = api.get("/v1/namespace")
    assert again.body["properties"] == wanted
    assert again.body["appliedHash"] == changed.body["appliedHash"] != response.body["appliedHash"]
    assert again.headers["ETag"] == changed.headers["ETag"] == f'"{version}"'
    assert api.put("/v1/namespace", wanted).body["version"] == version
    assert api.put("/v1/namespace", {}).body["appliedHash"] == response.body["appliedHash"]


@pytest.mark.behaviour("S149")
def test_a_namespace_is_partitioned_for_life(api: Caller) -> None:
    before = api.get("/v1/namespace").body
    partitioned = {"sku": {"name": "Premium"}, "premiumMessagingPartitions": 2}
    refused = api.put("/v1/namespace", partitioned)
    assert (refused.status, refused.kind) == (409, "immutable")
    assert "premiumMessagingPartitions: the namespace has 16" in refused.body["detail"]
    assert api.get("/v1/namespace").body == before


def test_changes_of_immutable_properties_of_the_namespace_are_refused_by_name(api: Caller) -> None:
    before = api.get("/v1/namespace").body
    rules = {"authorizationRules": [{"name": "a", "rights": ["Send"]}]}
    refused = api.put("/v1/namespace", rules | {"minimumTlsVersion": "1.3"})
    assert (refused.status, refused.kind) == (409, "immutable")
    assert "authorizationRules" in refused.body["detail"]
    old = api.put("/v1/namespace", {}, headers={"If-Match": '"0"'})
    assert (old.status, old.kind) == (412, "version-differs")
    assert old.body["detail"].endswith('", but If-Match names another: read it again')
    new = api.put("/v1/namespace", {}, headers={"If-None-Match": "*"})
    assert (new.status, new.kind) == (412, "already-exists")
    assert new.body["detail"] == "the namespace exists"
    wrong = api.put("/v1/namespace", {"softDelete": {"retention": "PT1S"}})
    assert (wrong.status, wrong.kind) == (400, "invalid")
    assert api.get("/v1/namespace").body == before


def test_status_names_the_broker_and_its_partitions(api: Caller) -> None:
    response = api.get("/v1/status").body
    assert (response["program"], response["protocol"], response["namespace"]) == (
        "postbus",
        1,
        "test-bus",
    )
    assert (response["isReady"], response["isDevelopment"], response["troubles"]) == (
        True,
        True,
        [],
    )
    assert [each["partition"] for each in response["partitions"]] == list(range(16))
    assert {each["trouble"] for each in response["partitions"]} == {None}


def test_partition_in_trouble_is_named(running: ControlledBus, name: str) -> None:
    api = running.caller
    api.put(path_of("queues", name), {})
    (home,) = api.get(path_of("queues", name)).body["partitions"]
    api.post("/v1/faults/store-outage", {"duration": "PT1S", "partition": home})
    counting = threading.Thread(target=api.get, args=[f"{path_of('queues', name)}/runtime"])
    counting.start()  # loads the partition, when it can
    deadline = time.monotonic() + WAIT_S
    seen: set[str] = set()
    while time.monotonic() < deadline:
        response = api.get("/v1/status").body
        trouble = response["partitions"][home]["trouble"]
        assert response["troubles"] == ([] if trouble is None else [f"partition {home}: {trouble}"])
        seen |= {trouble} if trouble else set()
        if seen and trouble is None:
            break
    counting.join()
    assert seen
    assert trouble is None
