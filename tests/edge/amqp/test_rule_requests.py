"""Requests to management nodes with values that are legal AMQP and still need care."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSubQueue

from postbus.message.codec import Described, Symbol, Timestamp, Ulong, Value
from tests.edge.bus_thread import BusThread
from tests.edge.hostile_client import HostileClient
from tests.edge.sdk.sdk_steps import path_of

pytestmark = pytest.mark.slow

LARGEST = Ulong((1 << 64) - 1)


@pytest.fixture
def raw(bus: BusThread) -> Iterator[HostileClient]:
    with HostileClient(bus) as opened:
        yield opened


@pytest.fixture
def path(bus: BusThread) -> str:
    topic = bus.topic()
    bus.subscription(topic)
    return path_of(topic)


def add(raw: HostileClient, path: str, **description: Value) -> int:
    named = {name.replace("_", "-"): value for name, value in description.items()}
    body: dict[str, Value] = {"rule-name": "new", "rule-description": named}
    return raw.ask(path, "add-rule", body)[0]


def listed(raw: HostileClient, path: str) -> dict[str, Value]:
    """Return name -> fields of the filter."""
    _, _, found = raw.ask(path, "enumerate-rules", {"top": 100, "skip": 0})
    rules = [each["rule-description"].value for each in found["rules"]]
    return {name: filter_.value for filter_, _, name, _ in rules}


def test_values_that_the_store_cannot_hold_are_refused(raw: HostileClient, path: str) -> None:
    true = {"expression": "1=1"}
    assert add(raw, path, correlation_filter={"label": "a\0b"}) == 400
    assert add(raw, path, correlation_filter={"properties": {"a": "x\0"}}) == 400
    assert add(raw, path, correlation_filter={"properties": {"a\0": 1}}) == 400
    assert add(raw, path, sql_filter={"expression": "a = 'x\0y'"}) == 400
    assert add(raw, path, sql_filter=true, sql_rule_action={"expression": "SET a = '\0'"}) == 400
    assert list(listed(raw, path)) == ["$Default"]
    assert add(raw, path, sql_filter={"expression": r"a = '\u0000'"}) == 200
    raw.check()


def test_rules_that_are_too_large_are_refused(raw: HostileClient, path: str) -> None:
    assert add(raw, path, correlation_filter={"label": "x" * 66_000}) == 400
    assert add(raw, path, correlation_filter={"properties": {"a": "x" * 66_000}}) == 400
    for number in range(17):
        filter_map: dict[str, Value] = {"correlation-filter": {"label": "x" * 65_000}}
        body: dict[str, Value] = {"rule-name": f"r{number}", "rule-description": filter_map}
        status = raw.ask(path, "add-rule", body)[0]
    assert status == 403
    assert len(listed(raw, path)) == 17  # the 16 that fit, and the first one
    raw.check()


def test_numbers_of_every_width_are_listed(raw: HostileClient, path: str) -> None:
    properties = {"most": LARGEST, "least": -(1 << 63), "one": 1}
    assert add(raw, path, correlation_filter={"properties": properties}) == 200
    assert listed(raw, path)["new"][-1] == properties


def test_true_and_false_filters_differ_from_equal_sql_filters(
    raw: HostileClient, path: str
) -> None:
    wanted: dict[str, tuple[int, Value]] = {
        "true-filter": (7, {}),
        "false-filter": (8, {}),
        "sql-filter": (6, {"expression": "1=1"}),
    }
    for kind, (code, description) in wanted.items():
        body: dict[str, Value] = {"rule-name": "new", "rule-description": {kind: description}}
        assert raw.ask(path, "add-rule", body)[0] == 200
        _, _, found = raw.ask(path, "enumerate-rules", {"top": 100, "skip": 0})
        described = {each["rule-description"].value[2]: each for each in found["rules"]}
        rule = described["new"]["rule-description"].value[0]
        assert rule.descriptor == 0x0000_0013_7000_0000 + code
        assert raw.ask(path, "remove-rule", {"rule-name": "new"})[0] == 200


@pytest.mark.parametrize("action", [None, {}], ids=["null", "empty"])
def test_a_rule_without_an_action_may_have_an_empty_one(
    raw: HostileClient, path: str, action: Value
) -> None:
    """As the Rust client sends it."""
    described: dict[str, Value] = {"correlation-filter": {"label": "a"}, "sql-rule-action": action}
    body: dict[str, Value] = {"rule-name": "new", "rule-description": described}
    assert raw.ask(path, "add-rule", body)[0] == 200
    _, _, found = raw.ask(path, "enumerate-rules", {"top": 100, "skip": 0})
    rules = [each["rule-description"].value for each in found["rules"]]
    (actions,) = [rule[1].value for rule in rules if rule[2] == "new"]
    assert actions == []


def test_times_and_durations_are_compared_with(
    bus: BusThread, raw: HostileClient, path: str
) -> None:
    properties = {
        "at": Timestamp(1_767_225_600_123),
        "for": Described(Symbol("com.microsoft:timespan"), 5_000_000),
        "id": uuid.UUID(int=7),
        "raw": b"\x00\xff",
    }
    assert add(raw, path, correlation_filter={"properties": properties}) == 200
    found = listed(raw, path)["new"][-1]
    assert found == properties
    assert all(type(found[name]) is type(value) for name, value in properties.items())
    topic = path.partition("/")[0]
    before = bus.counts(path).active
    for hour, is_selected in ((2, False), (1, True)):
        at = datetime(2026, 1, 1, hour, 0, 0, 123_000, timezone(timedelta(hours=1)))
        with bus.client() as client, client.get_topic_sender(topic) as sender:
            assert raw.ask(path, "remove-rule", {"rule-name": "new"})[0] == 200
            wanted = {"at": properties["at"]}
            assert add(raw, path, correlation_filter={"properties": wanted}) == 200
            raw.ask(path, "remove-rule", {"rule-name": "$Default"})
            sender.send_messages(ServiceBusMessage("x", application_properties={"at": at}))
        assert bus.counts(path).active == before + is_selected


@pytest.mark.parametrize(
    "value",
    [
        Timestamp(1 << 60),
        Described(Symbol("com.microsoft:timespan"), "PT5M"),
        Described(Symbol("com.example:other"), 5),
        Described(Ulong(5), 5),
        Described(Symbol("com.microsoft:timespan"), True),
        None,
        [1],
        {},
    ],
)
def test_a_filter_that_could_never_match_is_refused(
    raw: HostileClient, path: str, value: Value
) -> None:
    assert add(raw, path, correlation_filter={"properties": {"at": value}}) == 400


def test_rules_are_listed_in_pages(raw: HostileClient, path: str) -> None:
    for name in ("a", "b", "c"):
        body = {"rule-name": name, "rule-description": {"correlation-filter": {"label": name}}}
        assert raw.ask(path, "add-rule", body)[0] == 200
    names: list[str] = []
    for skip in (0, 3):
        status, _, found = raw.ask(path, "enumerate-rules", {"top": 3, "skip": skip})
        assert status == 200
        names += [each["rule-description"].value[2] for each in found["rules"]]
    assert sorted(names) == ["$Default", "a", "b", "c"]
    assert raw.ask(path, "enumerate-rules", {"top": 3, "skip": 4})[0] == 204


def test_bodies_are_left_out_of_peeked_messages(bus: BusThread, raw: HostileClient) -> None:
    """On request of the JavaScript SDK."""
    queue = bus.queue()
    with bus.client() as client, client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("the body", message_id="the id"))
    fields: dict[str, Value] = {"from-sequence-number": 0, "message-count": 5}
    for is_left_out in (False, True):
        body = {**fields, "omit-message-body": is_left_out}
        status, _, found = raw.ask(queue, "peek-message", body)
        (peeked,) = found["messages"]
        assert (status, b"the id" in peeked["message"]) == (200, True)
        assert (b"the body" in peeked["message"]) is not is_left_out


def test_batch_delete_takes_messages_enqueued_before_a_time(
    bus: BusThread, raw: HostileClient
) -> None:
    queue = bus.queue()
    with bus.client() as client, client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage("old")] * 3)
        bus.advance(60_000)
        before = Timestamp(int(bus.now().timestamp() * 1_000) - 30_000)
        sender.send_messages([ServiceBusMessage("new")] * 2)
    body: dict[str, Value] = {"message-count": 500, "enqueued-time-utc": before}
    assert raw.ask(queue, "batch-delete-messages", body)[::2] == (200, {"message-count": 3})
    assert bus.counts(queue).active == 2
    assert raw.ask(queue, "batch-delete-messages", body)[0] == 204


def test_sessions_far_behind_the_last_are_none(bus: BusThread, raw: HostileClient) -> None:
    queue = bus.queue(requires_session=True, enable_partitioning=True)
    body = {"last-updated-time": Timestamp(253_402_300_800_000), "skip": LARGEST, "top": 10}
    assert raw.ask(queue, "get-message-sessions", body)[0] == 204


def test_locks_of_dead_letters_of_a_session_are_renewed(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue(requires_session=True)
    with client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("a", session_id="s"))
    with client.get_queue_receiver(queue, session_id="s") as receiver:
        (taken,) = receiver.receive_messages(1, max_wait_time=5)
        receiver.dead_letter_message(taken)
    dead_letters = ServiceBusSubQueue.DEAD_LETTER
    with client.get_queue_receiver(queue, sub_queue=dead_letters) as receiver:
        (dead,) = receiver.receive_messages(1, max_wait_time=5)
        bus.advance(1_000)
        before = dead.locked_until_utc
        assert receiver.renew_message_lock(dead) > before
        receiver.complete_message(dead)
