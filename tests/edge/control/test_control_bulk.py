"""Answers about many entities at once: totals, subscriptions of all topics, changed counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiveMode

from tests.edge.control.control_bus import WAIT_S, Caller, ControlledBus, controlled_bus, path_of

pytestmark = pytest.mark.slow


def make_topic(api: Caller, topic: str, *subscriptions: str) -> None:
    assert api.put(path_of("topics", topic), {}).status == 201
    for name in subscriptions:
        assert api.put(path_of("topics", topic, "subscriptions", name), {}).status == 201


# --- subscriptions and totals -------------------------------------------------------------------


def test_subscriptions_of_all_topics_are_listed_by_path(api: Caller) -> None:
    make_topic(api, "list-b", "one", "Two")
    make_topic(api, "LIST-a", "three")
    make_topic(api, "list-c")
    found = api.get("/v1/subscriptions").body
    paths = [each["path"] for each in found["items"] if each["topic"].lower().startswith("list-")]
    assert paths == [
        "LIST-a/Subscriptions/three",
        "list-b/Subscriptions/one",
        "list-b/Subscriptions/Two",
    ]
    below = api.get(path_of("topics", "list-b", "subscriptions")).body["items"]
    assert below == [each for each in found["items"] if each["topic"] == "list-b"]
    pages, skip = [], 0
    while skip is not None:
        page = api.get(f"/v1/subscriptions?skip={skip}&top=1").body
        assert len(page["items"]) == 1
        pages += page["items"]
        skip = page["nextSkip"]
    assert pages == found["items"]
    assert api.get("/v1/subscriptions?skip=100000").body == {"items": [], "nextSkip": None}


@pytest.mark.parametrize("query", ["top=0", "top=1001", "top=-1", "top=x", "skip=-1", "topic=a"])
def test_pages_of_all_subscriptions_are_bounded(api: Caller, query: str) -> None:
    refused = api.get(f"/v1/subscriptions?{query}")
    assert (refused.status, refused.kind) == (400, "invalid")


def test_namespace_has_totals_of_its_version(api: Caller) -> None:
    before = api.get("/v1/namespace").body
    make_topic(api, "total", "one", "two")
    mark = "?managed-by=operator"
    assert api.put(path_of("queues", "total-queue") + mark, {}).status == 201
    after = api.get("/v1/namespace").body
    grown = {kind: count - before["entities"][kind] for kind, count in after["entities"].items()}
    assert grown == {"queues": 1, "topics": 1, "subscriptions": 2, "unmanaged": 3}
    assert after["version"] > before["version"]
    assert api.put(path_of("topics", "total") + mark, {}).status == 200
    marked = api.get("/v1/namespace").body["entities"]
    assert marked == after["entities"] | {"unmanaged": after["entities"]["unmanaged"] - 1}
    assert api.delete(path_of("topics", "total")).status == 200
    assert api.delete(path_of("queues", "total-queue") + "?policy=Retain").status == 200
    assert api.get("/v1/namespace").body["entities"] == before["entities"]


# --- changed counts -----------------------------------------------------------------------------


def counts_since(api: Caller, cursor: str, top: int = 1000) -> tuple[dict[str, Any], str]:
    """Return what changed since a cursor, by name, and the cursor behind it."""
    found: dict[str, Any] = {}
    is_end = False
    while not is_end:
        page = api.get(f"/v1/runtime?since={cursor}&top={top}").body
        assert len(page["items"]) <= top
        found |= {each["name"]: each for each in page["items"]}
        cursor, is_end = page["cursor"], page["isEnd"]
    return found, cursor


def send(bus: ControlledBus, path: str, *bodies: str) -> None:
    client = ServiceBusClient.from_connection_string(bus.connection_string)
    with client, client.get_queue_sender(path) as sender:
        sender.send_messages([ServiceBusMessage(body) for body in bodies])


def take(bus: ControlledBus, path: str, count: int) -> None:
    client = ServiceBusClient.from_connection_string(bus.connection_string)
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client, client.get_queue_receiver(path, receive_mode=mode) as receiver:
        left = count
        while left:
            left -= len(receiver.receive_messages(left, max_wait_time=10))


def test_counts_of_changed_entities_come_in_one_answer(running: ControlledBus, api: Caller) -> None:
    make_topic(api, "moves", "one", "two")
    for name in ("moving", "resting"):
        assert api.put(path_of("queues", name), {}).status == 201
    everything, cursor = counts_since(api, "0")
    paths = {"moves/Subscriptions/one", "moves/Subscriptions/two"}
    assert {"declared", "moves", "moving", "resting"} | paths <= set(everything)
    assert everything["moves"]["subscriptionCount"] == 2
    assert everything["moving"]["messageCount"] == 0
    assert counts_since(api, cursor) == ({}, cursor)
    send(running, "moving", "a", "b")
    send(running, "moves", "c")
    found, after = counts_since(api, cursor)
    assert set(found) == {"moves", "moving"} | paths
    assert counts_since(api, cursor) == (found, after)
    assert counts_since(api, after) == ({}, after)
    for kind, name in (("queues", "moving"), ("topics", "moves")):
        alone = api.get(path_of(kind, name, "runtime")).body
        entity = api.get(path_of(kind, name)).body
        assert found[name] == {
            "entityId": entity["entityId"],
            "name": name,
            "kind": kind.rstrip("s"),
            **{field: value for field, value in alone.items() if field in found[name]},
        }
    assert found["moves/Subscriptions/two"]["countDetails"]["activeMessageCount"] == 1


def test_messages_that_came_and_went_are_a_change(running: ControlledBus, api: Caller) -> None:
    assert api.put(path_of("queues", "passing"), {}).status == 201
    _, cursor = counts_since(api, "0")
    send(running, "passing", "a")
    take(running, "passing", 1)
    found, cursor = counts_since(api, cursor)
    assert [(name, each["messageCount"]) for name, each in found.items()] == [("passing", 0)]
    assert api.put(path_of("queues", "passing"), {"maxDeliveryCount": 3}).status == 200
    assert counts_since(api, cursor)[0] == {}  # a definition alone is no change of counts


def test_changes_between_two_pages_are_in_a_later_one(running: ControlledBus, api: Caller) -> None:
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        assert api.put(path_of("queues", name), {}).status == 201
    _, cursor = counts_since(api, "0")
    for name in names:
        send(running, name, "a")
    first = api.get(f"/v1/runtime?since={cursor}&top=2").body
    assert (len(first["items"]), first["isEnd"], first["startsOver"]) == (2, False, False)
    early, late = first["items"][0]["name"], first["items"][1]["name"]
    send(running, early, "b")
    assert api.delete(path_of("queues", late)).status == 200
    rest, _ = counts_since(api, first["cursor"], top=2)
    assert set(rest) == set(names) - {late}
    assert [rest[name]["messageCount"] for name in names if name != late] == [
        2 if name == early else 1 for name in names if name != late
    ]


@pytest.mark.parametrize("cursor", ["0", f"{'0' * 16}.7", f"{'0' * 16}.{'9' * 19}"])
def test_cursor_of_another_run_starts_over(api: Caller, cursor: str) -> None:
    page = api.get(f"/v1/runtime?since={cursor}&top=1").body
    assert (len(page["items"]), page["isEnd"], page["startsOver"]) == (1, False, True)
    everything, end = counts_since(api, cursor)
    assert everything.keys() == counts_since(api, "0")[0].keys()
    beyond = f"{end.partition('.')[0]}.{'9' * 19}"
    assert api.get(f"/v1/runtime?since={beyond}&top=1").body["startsOver"]
    assert not api.get(f"/v1/runtime?since={page['cursor']}").body["startsOver"]


@pytest.mark.parametrize(
    "query",
    [
        "top=0", "top=1001", "top=1e3", "top=99999999999999999999", "since=", "since=-1", "since=1",
        "since=0&since=0", "since=0.1", f"since={'A' * 16}.1", f"since={'a' * 16}.", "skip=1",
        f"since={'a' * 16}.{'1' * 20}", f"since={'0' * 5000}", f"since={'a' * 16}.%D9%A1",
        f"since={'a' * 16}.1%0A",
    ],
)  # fmt: skip
def test_parameters_of_counts_are_bounded(api: Caller, query: str) -> None:
    refused = api.get(f"/v1/runtime?{query}")
    assert (refused.status, refused.kind) == (400, "invalid")


def test_entities_of_a_partition_that_is_away_are_limited(api: Caller) -> None:
    homes: dict[int, str] = {}
    for number in range(6):
        assert api.put(path_of("queues", f"away-{number}"), {}).status == 201
        (home,) = api.get(path_of("queues", f"away-{number}")).body["partitions"]
        homes[home] = f"away-{number}"
    (away, name), *_, (_, other) = homes.items()
    spread = {"enablePartitioning": True}
    assert api.put(path_of("queues", "away-spread"), spread).status == 201
    _, cursor = counts_since(api, "0")
    outage = {"duration": "PT2S", "partition": away}
    assert api.post("/v1/faults/store-outage", outage).status == 200
    found, cursor = counts_until(api, cursor, name)
    assert other not in found
    assert found[name] == {
        **found[name],
        **dict.fromkeys(("messageCount", "countDetails", "sizeInBytes", "accessedAt")),
        "availability": "Limited",
        "unavailablePartitions": [away],
    }
    part = found["away-spread"]
    assert (part["availability"], part["messageCount"]) == ("Limited", 0)
    assert part["unavailablePartitions"] == [away]
    back, _ = counts_until(api, cursor, name)
    assert (back[name]["availability"], back[name]["messageCount"]) == ("Available", 0)
    assert back["away-spread"]["unavailablePartitions"] == []


def counts_until(api: Caller, cursor: str, name: str) -> tuple[dict[str, Any], str]:
    """Ask until the counts of an entity changed; return the last answer."""
    deadline = time.monotonic() + WAIT_S
    found: dict[str, Any] = {}
    while name not in found:
        assert time.monotonic() < deadline
        found, cursor = counts_since(api, cursor)
    return found, cursor


def test_restart_starts_over_with_what_is_stored(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus") as bus:
        assert bus.caller.put(path_of("queues", "other"), {}).status == 201
        send(bus, "declared", "a", "b", "c")
        _, cursor = counts_since(bus.caller, "0")
    with controlled_bus(database, tmp_path / "bus") as bus:
        page = bus.caller.get(f"/v1/runtime?since={cursor}").body
        assert page["startsOver"]
        counts = {each["name"]: each["messageCount"] for each in page["items"]}
        assert counts == {"declared": 3, "other": 0}
