"""Audit of manual changes: a line for each change over every API, and none that contains a key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.management import ServiceBusAdministrationClient

from postbus.broker.operate.message_operations import MessageOperations, OperationRefused
from postbus.edge.control.audit import VERBS
from postbus.edge.control.routes import ROUTES
from postbus.entity.commands import Refusal, Refused
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.amqp.test_wire import request, response_parts
from tests.edge.control.control_bus import WAIT_S, ControlledBus, controlled_bus, path_of
from tests.edge.raw_client import RawClient

pytestmark = pytest.mark.slow

CI, AUDITOR = "the-token-of-ci-is-long-enough", "the-token-of-an-auditor-too"


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "control_audit", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("audited")
    tokens = folder / "tokens"
    tokens.write_text(f"ci all {CI}\nauditor read {AUDITOR}\n")
    store = dsn_of(postgres_server, "control_audit")
    with controlled_bus(store, folder / "bus", control_token_file=tokens) as bus:
        bus.caller.token = CI
        yield bus


def lines(running: ControlledBus, **filters: object) -> list[dict[str, Any]]:
    """Return lines when all changes have ended in the store, too."""
    query = "&".join(f"{name}={value}" for name, value in {"top": 1_000, **filters}.items())
    deadline_s = time.monotonic() + WAIT_S
    while True:
        response = running.caller.get(f"/v1/audit?{query}", token=AUDITOR)
        assert response.status == 200
        if all(each["outcome"] for each in response.body["items"]):
            return list(response.body["items"])
        assert time.monotonic() < deadline_s


def last(running: ControlledBus, **filters: object) -> tuple[object, ...]:
    """Return the newest line without its number, times and address, which must be this machine."""
    line = lines(running, top=1, **filters)[0]
    assert line["address"] == "127.0.0.1"
    assert line["begunAt"] <= line["endedAt"]
    return tuple(
        line[name] for name in ("caller", "protocol", "verb", "entity", "detail", "outcome")
    )


def test_every_changing_operation_has_a_verb() -> None:
    assert set(VERBS) == {route.operation for route in ROUTES if route.is_change}


def test_changes_of_definitions_are_audited_with_their_caller(running: ControlledBus) -> None:
    api, by_token = running.caller, ("token ci", "control API")
    queue, topic = path_of("queues", "made"), path_of("topics", "news")
    assert api.put(queue, {}).status == 201
    assert last(running) == (*by_token, "put", "made", {}, "done")
    count = len(lines(running))
    assert api.put(queue, {}).status == 200  # as it was
    assert len(lines(running)) == count
    assert api.put(queue, {"maxDeliveryCount": 3}).status == 200
    assert len(lines(running)) == count + 1
    assert api.put(topic, {}).status == 201
    assert api.put(f"{topic}/subscriptions/all", {}).status == 201
    assert last(running) == (*by_token, "put", "news/Subscriptions/all", {}, "done")
    rule = {"name": "r", "sqlFilter": {"sqlExpression": "1=1"}}
    assert api.put(f"{topic}/subscriptions/all/rules/r", rule).status == 201
    assert last(running) == (*by_token, "put rule", "news/Subscriptions/all", {"rule": "r"}, "done")
    assert api.delete(f"{topic}/subscriptions/all/rules/absent").status == 404
    detail = last(running)
    assert detail[2:5] == ("delete rule", "news/Subscriptions/all", {"rule": "absent"})
    assert str(detail[5]).startswith("refused: ")
    gone = api.delete(f"{queue}?policy=Retain").body
    assert last(running) == (*by_token, "delete", "made", {"policy": "Retain"}, "done")
    assert api.post(f"/v1/deleted/{gone['entityId']}/restore").status == 200
    assert last(running) == (*by_token, "restore", "", {"entityId": str(gone["entityId"])}, "done")
    assert api.put("/v1/namespace", {"minimumTlsVersion": "1.3"}).status == 200
    assert last(running) == (*by_token, "put namespace", "", {}, "done")


def test_changes_of_keys_are_audited_without_them(running: ControlledBus) -> None:
    path, key = "/v1/authorization-rules/worker", "a-secret-key-of-a-worker-that-is-long"
    assert running.caller.put(path, {"rights": ["Send"], "primaryKey": key}).status == 201
    detail = {"rule": "worker", "rights": ["Send"]}
    assert last(running)[2:] == ("put authorization rule", "", detail, "done")
    assert running.caller.delete(path).status == 200
    assert last(running)[2:] == ("delete authorization rule", "", {"rule": "worker"}, "done")
    assert key not in str(lines(running))
    assert CI not in str(lines(running))


def test_message_operations_are_audited_with_filter_and_counts(running: ControlledBus) -> None:
    api, queue = running.caller, "by-hand"
    assert api.put(path_of("queues", queue), {}).status == 201
    with ServiceBusClient.from_connection_string(running.connection_string) as client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages(
                [ServiceBusMessage("x", application_properties={"n": n}) for n in range(8)]
            )
        with client.get_queue_receiver(queue) as receiver:
            dead = receiver.receive_messages(3, max_wait_time=10)
            for message in dead:
                receiver.dead_letter_message(message)
    count = len(lines(running))
    where = {"entity": queue, "where": "n >= 5"}
    assert api.post("/v1/messages/purge", {**where, "dryRun": True}).body["matched"] == 3
    assert len(lines(running)) == count
    for _ in range(2):
        assert api.post("/v1/messages/purge", {**where, "count": 1_000}).status == 200
    assert len(lines(running)) == count + 1
    counts = {"matched": 3, "deleted": 3, "refused": 0}
    purged = ("purge messages", queue, {"where": "n >= 5", "counts": counts}, "done")
    assert last(running)[2:] == purged
    assert lines(running, top=1)[0]["calls"] == 2
    numbers = [message.sequence_number for message in dead]
    sent = {"entity": queue, "numbers": numbers[:1], "edit": {"body": "y", "subject": "repaired"}}
    assert api.post("/v1/messages/resend", sent).status == 200
    assert last(running)[2:5] == (
        "edit messages",
        f"{queue}/$DeadLetterQueue",
        {
            "counts": {"resent": 1, "refused": 0},
            "numbers": numbers[:1],
            "edited": ["body", "subject"],
        },
    )
    assert api.post("/v1/messages/resend", {"entity": queue, "numbers": numbers[1:2]}).status == 200
    assert last(running)[2] == "resend messages"
    gone = {"entity": queue, "subQueue": "deadLetter", "numbers": numbers[2:]}
    assert api.post("/v1/messages/delete", gone).status == 200
    assert last(running)[2] == "delete messages"
    before = len(lines(running))
    assert api.post("/v1/messages/peek", {"entity": queue}).status == 200
    assert len(lines(running)) == before


def test_purge_of_unknown_effect_is_audited_as_unknown(
    running: ControlledBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OperationRefused(Refused(Refusal.UNKNOWN, "the store did not answer"))

    monkeypatch.setattr(MessageOperations, "purge", refuse)
    response = running.caller.post("/v1/messages/purge", {"entity": "unsure"})
    assert (response.status, response.body["detail"]) == (503, "the store did not answer")
    assert last(running)[2:] == ("purge messages", "unsure", {}, "unknown")


def test_changes_over_the_administration_of_sdks_are_audited(running: ControlledBus) -> None:
    host = dict(running.bus.summary())["http"].partition("://")[2]
    text = running.connection_string.replace(
        running.connection_string.split(";")[0], f"Endpoint=sb://{host}"
    )
    trusted = {"connection_verify": str(running.bus.authority_file)}
    with ServiceBusAdministrationClient.from_connection_string(text, **trusted) as client:
        client.create_queue("by-sdk")
        caller = ("rule root", "administration")
        assert last(running) == (*caller, "put", "by-sdk", {}, "done")
        client.create_topic("topic-by-sdk")
        client.create_subscription("topic-by-sdk", "s")
        client.create_rule("topic-by-sdk", "s", "r")
        path = "topic-by-sdk/Subscriptions/s"
        assert last(running)[2:] == ("put rule", path, {"rule": "r"}, "done")
        client.delete_rule("topic-by-sdk", "s", "r")
        client.delete_queue("by-sdk")
        assert last(running) == (*caller, "delete", "by-sdk", {}, "done")
        client.delete_topic("topic-by-sdk")


def test_rules_that_listeners_change_are_audited_in_few_lines(running: ControlledBus) -> None:
    topic = path_of("topics", "ruled")
    assert running.caller.put(topic, {}).status == 201
    assert running.caller.put(f"{topic}/subscriptions/s", {}).status == 201
    port = int(dict(running.bus.summary())["amqp"].rpartition(":")[2])
    key = running.connection_string.partition("SharedAccessKey=")[2].partition(";")[0]
    before = len(lines(running))
    for number in range(3):
        with RawClient(port, "root", key) as client:
            body = {
                "rule-name": f"r{number}",
                "rule-description": {"sql-filter": {"expression": "1=1"}},
            }
            fields = {"operation": "com.microsoft:add-rule"}
            node = "ruled/Subscriptions/s/$management"
            assert response_parts(request(client, node, "id", fields, body))[1]["statusCode"] == 200
    assert len(lines(running)) == before + 1
    assert last(running) == (
        "rule root",
        "AMQP",
        "put rule",
        "ruled/Subscriptions/s",
        {"rules": ["r0", "r1", "r2"]},
        "done",
    )


def test_audit_is_paged_and_filtered(running: ControlledBus) -> None:
    for number in range(3):
        assert running.caller.put(path_of("queues", f"page-{number}"), {}).status == 201
    page = running.caller.get("/v1/audit?top=2").body
    assert [each["entity"] for each in page["items"]] == ["page-2", "page-1"]
    following = running.caller.get(f"/v1/audit?top=1&before={page['nextBefore']}").body
    assert [each["entity"] for each in following["items"]] == ["page-0"]
    assert len(lines(running, entity="Page-1")) == 1
    assert lines(running, caller="nobody") == []
    assert running.caller.get("/v1/audit?caller=nobody").body["nextBefore"] is None


def test_changes_of_manifests_at_a_start_are_audited_once(
    postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    make_database(postgres_server, "audit_starts", template=TEMPLATE)
    store = dsn_of(postgres_server, "audit_starts")
    for _ in range(2):  # the second start changes nothing
        with controlled_bus(store, tmp_path / "bus") as bus:
            found = bus.caller.get("/v1/audit").body["items"]
            names = ("caller", "protocol", "verb", "entity", "outcome")
            assert [tuple(each[name] for name in names) for each in reversed(found)] == [
                ("manifests", "start", "put", "declared", "done"),
                ("manifests", "start", "declare authorization rules", "", "done"),
            ]  # fmt: skip
            assert found[0]["detail"]["rules"] == ["root"]
            assert "secret" not in str(found)
            assert found[0]["begunAt"][:4] == time.strftime("%Y", time.gmtime())
