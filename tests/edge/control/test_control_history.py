"""Deletion with a policy, tombstones, restores and the feed of changes over the control API."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError

from tests.edge.control.control_bus import WAIT_S, Caller, ControlledBus, ControlResponse, path_of

pytestmark = pytest.mark.slow


def send(running: ControlledBus, queue: str, *bodies: str) -> None:
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage(body) for body in bodies])


def received(running: ControlledBus, queue: str, count: int) -> list[str]:
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_receiver(queue, max_wait_time=10) as receiver:
        found = []
        for message in itertools.islice(receiver, count):
            receiver.complete_message(message)
            found.append(str(message))
        return found


def count_of(api: Caller, queue: str) -> int:
    return int(api.get(f"{path_of('queues', queue)}/runtime").body["messageCount"])


# --- policies -----------------------------------------------------------------------------------


def test_delete_removes_the_messages(running: ControlledBus, name: str) -> None:
    api, path = running.caller, path_of("queues", name)
    first = api.put(path, {})
    send(running, name, "one")
    gone = api.delete(path)
    assert gone.status == 200
    assert (gone.body["entityId"], gone.body["restorable"]) == (first.body["entityId"], False)
    assert gone.body["version"] > first.body["version"]
    assert api.delete(path).status == 404
    again = api.put(path, {})
    assert (again.status, again.body["created"]) == (201, True)
    assert again.body["entityId"] > first.body["entityId"]
    assert count_of(api, name) == 0


def test_delete_if_empty_keeps_an_entity_with_messages(running: ControlledBus, name: str) -> None:
    api, path = running.caller, path_of("queues", name)
    api.put(path, {})
    send(running, name, "one")
    held = api.delete(f"{path}?policy=DeleteIfEmpty")
    assert (held.status, held.kind) == (409, "not-empty")
    assert received(running, name, 1) == ["one"]
    assert api.delete(f"{path}?policy=DeleteIfEmpty").status == 200
    assert api.get(path).status == 404


@pytest.mark.parametrize("policy", ["delete", "Keep", "", "Delete&policy=Retain"])
def test_unknown_policies_delete_no_entity(api: Caller, name: str, policy: str) -> None:
    api.put(path_of("queues", name), {})
    response = api.delete(f"{path_of('queues', name)}?policy={policy}")
    assert (response.status, response.body["problems"][0]["field"]) == (400, "policy")
    assert api.get(path_of("queues", name)).status == 200


def test_retained_messages_come_back(running: ControlledBus, name: str) -> None:
    api, path = running.caller, path_of("queues", name)
    put = api.put(path, {"maxDeliveryCount": 4})
    send(running, name, "one", "two")
    gone = api.delete(f"{path}?policy=Retain")
    assert (gone.status, gone.body["restorable"]) == (200, True)
    assert api.get(path).status == 404
    number = gone.body["entityId"]
    stone = tombstone_of(api, number)
    assert (stone["name"], stone["kind"], stone["reason"]) == (name, "queue", "requested")
    assert datetime.fromisoformat(stone["restorableUntil"]) > datetime.now(UTC) + timedelta(days=1)
    back = api.post(f"/v1/deleted/{number}/restore")
    assert (back.status, back.body["entityId"]) == (200, number)
    assert back.body["appliedHash"] == put.body["appliedHash"]
    assert received(running, name, 2) == ["one", "two"]
    assert api.post(f"/v1/deleted/{number}/restore").status == 404


def test_recreated_entities_block_a_restore(running: ControlledBus, name: str) -> None:
    api, path = running.caller, path_of("queues", name)
    api.put(path, {})
    send(running, name, "old")
    number = api.delete(f"{path}?policy=Retain").body["entityId"]
    assert api.put(path, {}).status == 201
    assert count_of(api, name) == 0
    response = api.post(f"/v1/deleted/{number}/restore")
    assert (response.status, response.kind) == (409, "already-exists")
    assert api.delete(path).status == 200
    assert api.post(f"/v1/deleted/{number}/restore").status == 200
    assert received(running, name, 1) == ["old"]


def test_topic_comes_back_with_its_subscriptions_and_rights(
    running: ControlledBus, name: str
) -> None:
    api = running.caller
    api.put(path_of("topics", name), {})
    subscription = path_of("topics", name, "subscriptions", "all")
    api.put(subscription, {})
    rule = path_of("topics", name, "authorization-rules", "sender")
    api.put(rule, {"rights": ["Send"], "primaryKey": "a key of its own and long"})
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_topic_sender(name) as sender:
        sender.send_messages(ServiceBusMessage("one"))
    number = api.delete(f"{path_of('topics', name)}?policy=Retain").body["entityId"]
    assert (api.get(subscription).status, api.get(rule).status) == (404, 404)
    assert api.post(f"/v1/deleted/{number}/restore").status == 200
    assert api.get(f"{subscription}/runtime").body["messageCount"] == 1
    assert api.get(f"{rule}?keys=true").body["primaryKey"] == "a key of its own and long"


def test_keys_of_a_queue_open_it_again_when_it_comes_back(
    running: ControlledBus, name: str
) -> None:
    api = running.caller
    api.put(path_of("queues", name), {})
    rule = path_of("queues", name, "authorization-rules", "sender")
    api.put(rule, {"rights": ["Send"], "primaryKey": "a key of its own and long"})
    endpoint = running.connection_string.split(";")[0]
    theirs = f"{endpoint};SharedAccessKeyName=sender;SharedAccessKey=a key of its own and long"
    if "UseDevelopmentEmulator" in running.connection_string:
        theirs += ";UseDevelopmentEmulator=true"

    def send_with_the_key() -> None:
        client = ServiceBusClient.from_connection_string(theirs, retry_total=0)
        with client, client.get_queue_sender(name) as sender:
            sender.send_messages(ServiceBusMessage("one"))

    send_with_the_key()
    number = api.delete(f"{path_of('queues', name)}?policy=Retain").body["entityId"]
    api.put(path_of("queues", name), {})
    with pytest.raises(ServiceBusError):
        send_with_the_key()
    assert count_of(api, name) == 0
    api.delete(path_of("queues", name))
    api.post(f"/v1/deleted/{number}/restore")
    send_with_the_key()
    assert count_of(api, name) == 2


@pytest.mark.parametrize("number", ["0", "1", "999999999", "9" * 30, "-1", "one", "%D9%A1"])
def test_other_entities_cannot_be_restored(api: Caller, number: str) -> None:
    assert api.post(f"/v1/deleted/{number}/restore").status == 404


def tombstone_of(api: Caller, number: int) -> dict[str, object]:
    (found,) = [
        each for each in api.get("/v1/tombstones").body["items"] if each["entityId"] == number
    ]
    return dict(found)


def test_tombstones_are_asked_from_a_version(api: Caller, name: str) -> None:
    before = api.get("/v1/tombstones").body["version"]
    api.put(path_of("queues", name), {})
    number = api.delete(path_of("queues", name)).body["entityId"]
    response = api.get(f"/v1/tombstones?since={before}").body
    assert [each["entityId"] for each in response["items"]] == [number]
    assert response["items"][0]["restorableUntil"] is None
    assert api.get(f"/v1/tombstones?since={response['version']}").body["items"] == []


def test_idle_deletion_leaves_a_tombstone(api: Caller, name: str) -> None:
    api.put(path_of("queues", name), {"autoDeleteOnIdle": "PT5M"})
    number = api.get(path_of("queues", name)).body["entityId"]
    api.get(f"{path_of('queues', name)}/runtime")  # loads its partition
    since = api.get("/v1/tombstones").body["version"]
    api.post("/v1/clock/advance", {"duration": "PT10M"})
    deadline = time.monotonic() + WAIT_S
    while not (found := api.get(f"/v1/tombstones?since={since}").body["items"]):
        assert time.monotonic() < deadline
    assert [(each["entityId"], each["reason"]) for each in found] == [(number, "idle")]


# --- changes ------------------------------------------------------------------------------------


def test_changes_are_listed_since_a_version(api: Caller, name: str) -> None:
    since = api.get("/v1/changes").body["version"]
    nothing = {"version": since, "items": [], "countsCursor": None}
    assert api.get(f"/v1/changes?since={since}").body == nothing
    number = api.put(path_of("queues", name), {}).body["entityId"]
    response = api.get(f"/v1/changes?since={since}").body
    (change,) = response["items"]
    assert (change["entityId"], change["name"], change["kind"]) == (number, name, "queue")
    assert (change["change"], change["version"]) == ("put", response["version"])
    api.delete(path_of("queues", name))
    (change,) = api.get(f"/v1/changes?since={response['version']}").body["items"]
    assert (change["entityId"], change["change"]) == (number, "deleted")


def test_a_request_waits_for_a_change(api: Caller, name: str) -> None:
    since = api.get("/v1/changes").body["version"]
    response: list[ControlResponse] = []
    asking = threading.Thread(
        target=lambda: response.append(api.get(f"/v1/changes?since={since}&wait=60"))
    )
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    begun = time.monotonic()
    api.put(path_of("queues", name), {})
    asking.join(WAIT_S)
    assert time.monotonic() - begun < 10
    assert [each["name"] for each in response[0].body["items"]] == [name]
    assert response[0].body["countsCursor"] is None


def test_a_wait_without_a_change_times_out(api: Caller) -> None:
    since, cursor = api.get("/v1/changes").body["version"], counts_cursor(api)
    begun = time.monotonic()
    response = api.get(f"/v1/changes?since={since}&wait=1")
    assert time.monotonic() - begun >= 1
    assert response.body == {"version": since, "items": [], "countsCursor": cursor}


def counts_cursor(api: Caller) -> str:
    """Return the cursor behind all counts."""
    cursor, is_end = "0", False
    while not is_end:
        page = api.get(f"/v1/runtime?since={cursor}").body
        cursor, is_end = page["cursor"], page["isEnd"]
    return str(cursor)


def test_a_wait_without_a_change_says_whether_counts_have_moved(
    running: ControlledBus, api: Caller, name: str
) -> None:
    api.put(path_of("queues", name), {})
    known = counts_cursor(api)
    since = api.get("/v1/changes").body["version"]
    assert api.get(f"/v1/changes?since={since}&wait=1").body["countsCursor"] == known
    send(running, name, "a")
    moved = api.get(f"/v1/changes?since={since}&wait=1").body["countsCursor"]
    assert moved != known
    page = api.get(f"/v1/runtime?since={known}").body
    assert ([each["name"] for each in page["items"]], page["cursor"]) == ([name], moved)


def test_versions_from_the_future_are_too_old_as_well(api: Caller) -> None:
    """They come from another store, before a backup was brought back."""
    response = api.get(f"/v1/changes?since={2**60}")
    assert (response.status, response.kind) == (410, "too-old")
    assert api.get(f"/v1/tombstones?since={2**60}").status == 410
