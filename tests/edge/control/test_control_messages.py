"""Messages by hand over the control API."""

from __future__ import annotations

import base64
import itertools
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSubQueue

from postbus.message.codec import Described, Symbol, Timestamp, Ulong, encode_value
from tests.edge.control.control_bus import Caller, ControlledBus, path_of
from tests.edge.raw_client import ACCEPTED, RawClient, message

pytestmark = pytest.mark.slow

PEEK, DELETE, PURGE, RESEND = (
    f"/v1/messages/{each}" for each in ("peek", "delete", "purge", "resend")
)


def send(running: ControlledBus, queue: str, *messages: ServiceBusMessage) -> None:
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_sender(queue) as sender:
        for message in messages:
            sender.send_messages(message)


def kill(running: ControlledBus, queue: str, *bodies: str) -> None:
    """Send messages and dead-letter them."""
    send(running, queue, *(ServiceBusMessage(body, message_id=f"id-{body}") for body in bodies))
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_receiver(queue, max_wait_time=10) as receiver:
        for message in itertools.islice(receiver, len(bodies)):
            receiver.dead_letter_message(message, reason="bad", error_description="it is")


def bodies(response: Any) -> list[str]:
    return [base64.b64decode(each["bodyBase64"]).decode() for each in response["messages"]]


def test_peek_shows_all_messages(running: ControlledBus, queue: str) -> None:
    api = running.caller
    later = datetime.now(UTC) + timedelta(days=1)
    properties = {"size": 7, "big": 2**30, "text": "wörd", "half": 0.5, "yes": True}
    message = ServiceBusMessage(
        "hello",
        message_id="one",
        subject="greeting",
        content_type="text/plain",
        time_to_live=timedelta(hours=1),
        application_properties=properties,
    )
    send(running, queue, message, ServiceBusMessage("later", scheduled_enqueue_time_utc=later))
    response = api.post(PEEK, {"entity": queue, "bodyBytes": 100}).body
    assert bodies(response) == ["hello", "later"]
    assert (response["isEnd"], response["lookedAt"], response["away"]) == (True, 2, [])
    first, second = response["messages"]
    assert (first["state"], second["state"]) == ("active", "scheduled")
    assert (first["messageId"], first["subject"], first["timeToLive"]) == (
        "one",
        "greeting",
        "PT1H",
    )
    assert first["applicationProperties"] == properties
    assert datetime.fromisoformat(second["scheduledAt"]) - later < timedelta(seconds=1)
    assert second["expiresAt"] is None
    plain = api.post(PEEK, {"entity": queue}).body["messages"][0]
    assert (plain["bodyBase64"], plain["bodyBytes"]) == (None, 5)
    only = api.post(PEEK, {"entity": queue, "state": "scheduled"}).body["messages"]
    assert [each["sequenceNumber"] for each in only] == [2]


@pytest.mark.parametrize("due_ms", [-(2**63), -62_135_596_800_001, 2**63 - 1])
def test_a_time_beyond_the_calendar_hides_no_message(
    running: ControlledBus, queue: str, due_ms: int
) -> None:
    port = int(running.connection_string.partition("localhost:")[2].partition(";")[0])
    found = re.search(
        "SharedAccessKeyName=(.*?);SharedAccessKey=(.*?)(;|$)", running.connection_string
    )
    assert found is not None
    with RawClient(port, found[1], found[2]) as client:
        client.attach_sender(queue)
        annotations = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(due_ms)}
        payload = encode_value(Described(Ulong(0x72), annotations)) + message(b"odd")
        client.write(client.transfer(0, payload))
        assert client.dispositions(1) == {0: ACCEPTED}
    shown = running.caller.post(PEEK, {"entity": queue, "bodyBytes": 9})
    assert (shown.status, bodies(shown.body)) == (200, ["odd"])
    assert shown.body["messages"][0]["scheduledAt"] is None


def test_peek_filters_and_pages(running: ControlledBus, queue: str) -> None:
    messages = [
        ServiceBusMessage(str(number), application_properties={"size": number})
        for number in range(10)
    ]
    send(running, queue, *messages)
    fields = {"entity": queue, "where": "size >= 3", "count": 4, "bodyBytes": 9}
    first = running.caller.post(PEEK, fields).body
    assert bodies(first) == ["3", "4", "5", "6"]
    rest = running.caller.post(PEEK, {**fields, "fromNumber": first["nextNumber"]}).body
    assert bodies(rest) == ["7", "8", "9"]
    assert rest["isEnd"] is True


def test_delete_by_number(running: ControlledBus, queue: str) -> None:
    send(running, queue, *(ServiceBusMessage(str(number)) for number in range(4)))
    response = running.caller.post(DELETE, {"entity": queue, "numbers": [2, 4, 77]}).body
    assert response["numbers"] == [2, 4]
    assert [(each["number"], each["reason"]) for each in response["refused"]] == [
        (77, "message-not-found")
    ]
    left = running.caller.post(PEEK, {"entity": queue, "bodyBytes": 9}).body
    assert bodies(left) == ["0", "2"]


def test_purge_by_filter_after_a_dry_run(running: ControlledBus, queue: str) -> None:
    messages = [
        ServiceBusMessage(str(number), application_properties={"odd": number % 2 == 1})
        for number in range(6)
    ]
    send(running, queue, *messages)
    fields = {"entity": queue, "where": "odd = true"}
    dry = running.caller.post(PURGE, {**fields, "dryRun": True}).body
    assert (dry["matched"], dry["deleted"]) == (3, 0)
    wet = running.caller.post(PURGE, fields).body
    assert (wet["matched"], wet["deleted"], wet["isEnd"]) == (3, 3, True)
    left = running.caller.post(PEEK, {"entity": queue, "bodyBytes": 9}).body
    assert bodies(left) == ["0", "2", "4"]


def test_dead_letters_are_sent_again_as_they_are_and_edited(
    running: ControlledBus, queue: str
) -> None:
    api = running.caller
    kill(running, queue, "one", "two", "three")
    dead = {"entity": queue, "subQueue": "deadLetter"}
    shown = api.post(PEEK, dead).body["messages"]
    assert {(each["deadLetterReason"], each["subQueue"]) for each in shown} == {
        ("bad", "deadLetter")
    }
    numbers = [each["sequenceNumber"] for each in shown]
    edit = {"body": "repaired", "subject": "now", "messageId": None, "properties": {"by": "hand"}}
    response = api.post(RESEND, {"entity": queue, "numbers": numbers[:1], "edit": edit}).body
    assert (response["refused"], response["forwarded"], len(response["resent"])) == ([], [], 1)
    raw = {"bodyBase64": base64.b64encode(b"\xff\x00").decode()}
    response = api.post(RESEND, {"entity": queue, "numbers": numbers[1:2], "edit": raw}).body
    assert len(response["resent"]) == 1
    response = api.post(RESEND, {"entity": queue, "numbers": numbers}).body
    assert [each["number"] for each in response["refused"]] == numbers[:2]
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client, client.get_queue_receiver(queue, max_wait_time=10) as receiver:
        found = list(itertools.islice(receiver, 3))
        assert [b"".join(each.body) for each in found] == [b"repaired", b"\xff\x00", b"three"]
        assert (found[0].subject, found[0].message_id) == ("now", None)
        assert found[0].application_properties == {b"by": b"hand"}
        assert found[2].message_id == "id-three"
        for message in found:
            receiver.complete_message(message)
    assert api.post(PEEK, dead).body["messages"] == []


def test_dead_letters_of_a_subscription_go_to_its_topic_or_elsewhere(
    running: ControlledBus, queue: str
) -> None:
    api = running.caller
    topic = f"topic-of-{queue}"
    api.put(path_of("topics", topic), {})
    api.put(path_of("topics", topic, "subscriptions", "all"), {})
    client = ServiceBusClient.from_connection_string(running.connection_string)
    with client:
        with client.get_topic_sender(topic) as sender:
            sender.send_messages([ServiceBusMessage("one"), ServiceBusMessage("two")])
        with client.get_subscription_receiver(topic, "all", max_wait_time=10) as receiver:
            for message in itertools.islice(receiver, 2):
                receiver.dead_letter_message(message)
        entity = f"{topic}/Subscriptions/all"
        shown = api.post(PEEK, {"entity": entity, "subQueue": "deadLetter"}).body["messages"]
        first, second = (each["sequenceNumber"] for each in shown)
        assert api.post(RESEND, {"entity": entity, "numbers": [first]}).status == 200
        response = api.post(RESEND, {"entity": entity, "numbers": [second], "to": queue}).body
        assert len(response["resent"]) + len(response["forwarded"]) == 1
        with client.get_subscription_receiver(topic, "all", max_wait_time=10) as receiver:
            assert str(next(receiver)) == "one"
        with client.get_queue_receiver(queue, max_wait_time=10) as receiver:
            assert str(next(receiver)) == "two"
        dead = ServiceBusSubQueue.DEAD_LETTER
        with client.get_subscription_receiver(topic, "all", sub_queue=dead) as receiver:
            assert receiver.peek_messages() == []


ONE = {"entity": "declared", "numbers": [1]}
REFUSED: list[tuple[str, dict[str, object], int, str]] = [
    (PEEK, {"entity": "nobody"}, 404, "nobody"),
    (PEEK, {"entity": "declared", "where": "size >"}, 400, ""),
    (PEEK, {"entity": "declared", "count": 0}, 400, "count"),
    (PEEK, {"entity": "declared", "count": 251}, 400, "count"),
    (PEEK, {"entity": "declared", "bodyBytes": 2**21}, 400, "bodyBytes"),
    (PEEK, {"entity": "declared", "state": "dead"}, 400, "state"),
    (PEEK, {"entity": "declared", "subQueue": "outbox"}, 400, "subQueue"),
    (PEEK, {"entity": ""}, 400, "entity"),
    (PEEK, {}, 400, "entity"),
    (DELETE, {**ONE, "numbers": []}, 400, "numbers"),
    (DELETE, {**ONE, "numbers": [-1]}, 400, "numbers.0"),
    (DELETE, {**ONE, "numbers": [2**63]}, 400, "numbers.0"),
    (DELETE, {**ONE, "numbers": ["1"]}, 400, "numbers.0"),
    (DELETE, {**ONE, "numbers": list(range(251))}, 400, "numbers"),
    (PURGE, {"entity": "declared", "dryRun": "yes"}, 400, "dryRun"),
    (RESEND, {**ONE, "subQueue": "main"}, 409, "dead letters"),
    (RESEND, {**ONE, "to": "nobody"}, 404, "nobody"),
    (RESEND, {**ONE, "edit": {"body": "x", "bodyBase64": "eA=="}}, 400, "exclude"),
    (RESEND, {**ONE, "edit": {"bodyBase64": "x"}}, 400, "bodyBase64"),
    (RESEND, {**ONE, "edit": {"properties": {"n": 2**63}}}, 400, "64 bits"),
    (RESEND, {**ONE, "edit": {"properties": {"n": [1]}}}, 400, "edit"),
    (RESEND, {**ONE, "edit": {"ttl": 1}}, 400, "edit.ttl"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
def test_wrong_message_operations_are_refused(
    api: Caller, path: str, body: dict[str, object], status: int, words: str
) -> None:
    response = api.post(path, body)
    assert (response.status, words in response.body["detail"]) == (status, True), response.body
