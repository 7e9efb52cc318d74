"""Types of properties between HTTP and AMQP, both ways; by the official SDK."""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.amqp import (
    AmqpAnnotatedMessage,
    AmqpMessageBodyType,
)

from postbus.edge.runtime.answers import body_of, headers_of
from postbus.edge.runtime.messages import BadMessage, make_message, single_message
from postbus.edge.runtime.values import (
    format_property,
    parse_instant,
    parse_property,
    parse_time_span,
)
from postbus.entity.commands import Delivery
from postbus.message.codec import (
    Described,
    Float,
    Int,
    Symbol,
    Timestamp,
    Ulong,
    Value,
    encode_list,
    encode_value,
)
from postbus.message.envelope import Envelope
from postbus.message.fields import MessageFields
from postbus.message.sections import slice_message
from tests.edge.bus_thread import BusThread
from tests.edge.http_client import HttpClient, token_of, url_of

WHEN_MS = 1_893_456_000_000
WHEN = "Tue, 01 Jan 2030 00:00:00 GMT"


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)


# --- values ---------------------------------------------------------------------------------------

PROPERTIES: list[tuple[str, Value]] = [
    ('"text"', "text"),
    ('""', ""),
    ('"say \\"hi\\""', 'say "hi"'),
    ('"C:\\new"', "C:\\new"),
    ('"back\\\\"', "back\\\\"),
    ('"12"', "12"),
    ('"wörd €"', "wörd €"),
    ("0", Int(0)),
    ("-2147483648", Int(-(2**31))),
    ("2147483648", 2**31),
    ("-9223372036854775808", -(2**63)),
    ("18446744073709551615", Ulong(2**64 - 1)),
    ("0.5", 0.5),
    ("-1e+300", -1e300),
    ("5.0", 5.0),
    ("true", True),
    ("false", False),
    (f'"{WHEN}"', Timestamp(WHEN_MS)),
    (WHEN, WHEN),
]


@pytest.mark.parametrize(("text", "value"), PROPERTIES, ids=[text for text, _ in PROPERTIES])
def test_header_texts_convert_to_values_and_back(text: str, value: Value) -> None:
    parsed = parse_property(text)
    assert (parsed, type(parsed)) == (value, type(value))
    assert format_property(value) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("High", "High"),
        ("12345,ABC", "12345,ABC"),
        ("+7", Int(7)),
        ("TRUE", True),
        ("99999999999999999999", 1e20),
        (".5", 0.5),
        ("1e999", float("inf")),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",) * 2,
        ('"', '"'),
        ('"half', '"half'),
        ("nan", "nan"),
        ("1_000", "1_000"),
        ("٣", "٣"),
        ('"Tue, 32 Jan 2030 00:00:00 GMT"', "Tue, 32 Jan 2030 00:00:00 GMT"),
    ],
)
def test_further_values_of_headers(text: str, value: Value) -> None:
    parsed = parse_property(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    "value",
    [None, b"bytes", "line\nbreak", "nul\0", float("nan"), [1], {"a": 1}, Timestamp(-1),
     Timestamp(2**62), Described(Symbol("com.microsoft:timespan"), 5)],
)  # fmt: skip
def test_values_without_a_header_text_are_recognized(value: Value) -> None:
    assert format_property(value) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:01:30", 90), ("0.00:00:40", 40), ("10.01:02:03.5", 867_723.5), ("23:59:59", 86_399),
     ("24:00:00", None), ("00:60:00", None), ("90", None), ("-00:00:01", None), ("", None)],
)  # fmt: skip
def test_time_spans(text: str, seconds: float | None) -> None:
    assert parse_time_span(text) == seconds


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [(WHEN, WHEN_MS), ("2030-01-01T00:00:00Z", WHEN_MS), ("2030-01-01T00:00:00", WHEN_MS),
     ("2030-01-01T01:00:00.250+01:00", WHEN_MS + 250), ("soon", None), ("", None),
     ("Tue, 01 Jan 0000 00:00:00 GMT", None), ("0001-01-01T00:00:00+14:00", -62_135_647_200_000)],
)  # fmt: skip
def test_instants(text: str, at_ms: int | None) -> None:
    assert parse_instant(text) == at_ms


# --- messages in both directions ------------------------------------------------------------------

BROKER = {
    "MessageId": "id-1",
    "CorrelationId": "together",
    "Label": "subject",
    "ReplyTo": "answers",
    "ReplyToSessionId": "r",
    "To": "somewhere",
    "TimeToLive": 3_600,
    "PartitionKey": "key",
}
CUSTOM = {
    "Text": '"say \\"hi\\""',
    "bare": "High",
    "whole": "7",
    "large": "5000000000",
    "half": "0.5",
    "yes": "true",
    "When": f'"{WHEN}"',
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}


async def test_amqp_reads_messages_sent_over_http(http: HttpClient, queue: str) -> None:
    headers = {**CUSTOM, "Content-Type": "text/plain; charset=utf-8", "X-Forwarded-For": "::1"}
    sent = await http.send(queue, "wörd", BROKER, headers)
    assert sent.status == 201, sent.detail
    with http.bus.client() as client:
        receiver = client.get_queue_receiver(queue, max_wait_time=5)
        with receiver:
            (message,) = receiver.receive_messages()
            assert b"".join(message.body) == "wörd".encode()
            assert message.raw_amqp_message.body_type is AmqpMessageBodyType.DATA
            assert message.application_properties == {
                b"Text": b'say "hi"',
                b"bare": b"High",
                b"whole": 7,
                b"large": 5_000_000_000,
                b"half": 0.5,
                b"yes": True,
                b"When": WHEN_MS,
                b"traceparent": CUSTOM["traceparent"].encode(),
            }
            assert message.content_type == "text/plain; charset=utf-8"
            properties = {
                "MessageId": message.message_id,
                "CorrelationId": message.correlation_id,
                "Label": message.subject,
                "ReplyTo": message.reply_to,
                "ReplyToSessionId": message.reply_to_session_id,
                "To": message.to,
                "TimeToLive": message.time_to_live.total_seconds(),
                "PartitionKey": message.partition_key,
            }
            assert properties == BROKER
            assert message.delivery_count == 0
            receiver.complete_message(message)


async def test_http_reads_messages_sent_over_amqp(http: HttpClient, queue: str) -> None:
    stamp = datetime(2030, 1, 1, tzinfo=UTC)
    an_id = uuid.uuid4()
    message = ServiceBusMessage(
        "wörd",
        application_properties={
            "text": 'say "hi"', "whole": 7, "half": 0.5, "yes": True, "when": stamp, "id": an_id,
            "two words": "x", "Date": "mine", "line": "a\nb", "TEXT": "other",
        },
        message_id="id-1", correlation_id="together", subject="sübject", reply_to="answers",
        to="somewhere", content_type="text/plain", time_to_live=timedelta(hours=1),
        partition_key="key",
    )  # fmt: skip
    with http.bus.client() as client, client.get_queue_sender(queue) as sender:
        sender.send_messages(message)
    taken = await http.take(queue)
    assert (taken.status, taken.body) == (200, "wörd".encode())
    assert taken.headers["Content-Type"] == "text/plain"
    names = ("text", "whole", "half", "yes", "when", "id")
    assert [taken.headers[name] for name in names] == [
        '"say \\"hi\\""', "7", "0.5", "true", f'"{WHEN}"', f'"{an_id}"',
    ]  # fmt: skip
    assert json.loads(taken.headers["Postbus-Properties"]) == {
        "two words": "x", "Date": "mine", "line": "a\nb", "TEXT": "other",
    }  # fmt: skip
    broker = taken.broker
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} [\d:]{8} GMT", broker.pop("EnqueuedTimeUtc"))
    assert broker == {
        "CorrelationId": "together", "DeliveryCount": 1, "EnqueuedSequenceNumber": 0,
        "Label": "sübject", "MessageId": "id-1", "PartitionKey": "key", "ReplyTo": "answers",
        "SequenceNumber": 1, "State": "Active", "TimeToLive": 3_600.0, "To": "somewhere",
    }  # fmt: skip


BODIES: list[tuple[dict[str, Any], bytes]] = [
    ({"value_body": "text"}, b"text"),
    ({"value_body": None}, b""),
    ({"value_body": {"a": [1, True, "x"]}}, b'{"a": [1, true, "x"]}'),
    ({"sequence_body": [[1, "a"], [2]]}, b'[1, "a", 2]'),
    ({"data_body": [b"one", b"two"]}, b"onetwo"),
]


async def test_bodies_of_other_kinds(http: HttpClient, queue: str) -> None:
    with http.bus.client() as client, client.get_queue_sender(queue) as sender:
        for parts, _ in BODIES:
            sender.send_messages(AmqpAnnotatedMessage(**parts))
    assert [(await http.take(queue)).body for _ in BODIES] == [body for _, body in BODIES]


async def test_a_message_received_over_one_protocol_is_settled_over_the_other(
    http: HttpClient, queue: str
) -> None:
    """Locks, counts and dead letters are those of the entity for every protocol."""
    await http.send(queue, "shared")
    with http.bus.client() as client, client.get_queue_receiver(queue) as receiver:
        (message,) = receiver.receive_messages(max_wait_time=5)
        assert (await http.lock(queue)).status == 204
        at = f"/{queue}/messages/{message.sequence_number}/{message.lock_token}"
        assert (await http.call("PUT", at)).status == 200
        (message,) = receiver.receive_messages(max_wait_time=5)
        assert message.delivery_count == 1
        receiver.dead_letter_message(message, reason="why", error_description="be\ncause")
    dead = await http.take(f"{queue}/$DeadLetterQueue")
    assert (dead.body, dead.headers["DeadLetterReason"]) == (b"shared", '"why"')
    more = json.loads(dead.headers["Postbus-Properties"])
    assert more == {"DeadLetterErrorDescription": "be\ncause"}


async def test_properties_no_header_names_are_sent_as_json(http: HttpClient, queue: str) -> None:
    more = {"two words": "x", "Host": "mine", "line": "a\nb", "null": None, "when": WHEN}
    await http.send(queue, headers={"Postbus-Properties": json.dumps(more), "plain": "1"})
    with http.bus.client() as client:
        (message,) = take_all(client, queue)
    assert message.application_properties == {
        b"two words": b"x", b"Host": b"mine", b"line": b"a\nb", b"null": None, b"when": WHEN_MS,
        b"plain": 1,
    }  # fmt: skip


def take_all(client: ServiceBusClient, queue: str) -> list[Any]:
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client.get_queue_receiver(queue, receive_mode=mode, max_wait_time=1) as receiver:
        return list(receiver)


async def test_a_message_without_an_id_gets_one(http: HttpClient, queue: str) -> None:
    await http.send(queue, "a")
    await http.send(queue, "b")
    ids = {(await http.take(queue)).broker["MessageId"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch(r"[0-9a-f]{32}", each) for each in ids)


def test_a_life_longer_than_the_header_is_kept() -> None:
    hundred_days = make_message({"TimeToLive": 100 * 86_400}, {}, b"")
    assert hundred_days.ttl_ms == 8_640_000_000
    assert make_message({"TimeToLive": 1e300}, {}, b"").ttl_ms == 922_337_203_685_477
    assert make_message({"TimeToLive": 0.0001}, {}, b"").ttl_ms == 1
    assert make_message({"TimeToLive": "00:00:02"}, {}, b"").ttl_ms == 2_000
    assert make_message({"TimeToLive": None}, {}, b"").ttl_ms is None


# --- messages that are strange ------------------------------------------------------------------


def delivery_of(envelope: Envelope) -> Delivery:
    return Delivery(bytes(16), 0, 7, 0, 0, None, envelope)


def test_unreadable_sections_are_left_out_alone() -> None:
    envelope = Envelope(
        properties=b"\x00\x53\x73\xc0\x02\x05\x99",
        application_properties=b"\x00\x53\x74\xc1\x02\x02\x99",
        body=b"\x00\x53\x77\x99",
    )
    headers = headers_of(delivery_of(envelope), is_locked=True)
    assert json.loads(headers["BrokerProperties"])["SequenceNumber"] == 7
    assert body_of(envelope) == b"\x00\x53\x77\x99"


def test_a_content_type_unfit_for_a_header_is_given_in_json() -> None:
    fields = [b"\x40"] * 6 + [encode_value(Symbol("text/x\r\nEvil: 1"))]
    envelope = slice_message(b"\x00\x53\x73" + encode_list(fields))
    headers = headers_of(delivery_of(envelope), is_locked=False)
    assert headers["Content-Type"] == "application/octet-stream"
    assert json.loads(headers["BrokerProperties"])["ContentType"] == "text/x\r\nEvil: 1"


@pytest.mark.parametrize(
    ("message_id", "text"),
    [(Ulong(5), "5"), (uuid.UUID(int=1), str(uuid.UUID(int=1))), (b"\x01\xff", "01ff")],
)
def test_ids_of_every_type_are_texts(message_id: Value, text: str) -> None:
    fields = [encode_value(message_id), *[b"\x40"] * 4, encode_value(message_id)]
    envelope = slice_message(b"\x00\x53\x73" + encode_list(fields))
    broker = json.loads(headers_of(delivery_of(envelope), is_locked=False)["BrokerProperties"])
    assert (broker["MessageId"], broker["CorrelationId"]) == (text, text)


def test_values_of_other_types_are_given_too() -> None:
    assert format_property(Float(0.5)) == "0.5"
    custom = {"raw": b"\x00\xff", "span": Described(Symbol("com.microsoft:timespan"), 5)}
    headers = headers_of(delivery_of(make_message({}, custom, b"")), is_locked=False)
    assert json.loads(headers["Postbus-Properties"]) == {"raw": "AP8=", "span": 5}


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        ("[]", "BrokerProperties must be a JSON object"),
        ("{", "not valid JSON"),
        ('{"TimeToLive": NaN}', "NaN"),
        ("[" * 100_000, "nested too deeply"),
        ('{"Label": 5}', "Label must be a text"),
        ('{"MessageId": {"a": 1}}', "MessageId must be a text"),
        ('{"TimeToLive": 0}', "greater than zero"),
        ('{"TimeToLive": -1.5}', "greater than zero"),
        ('{"TimeToLive": true}', "number of seconds"),
        ('{"TimeToLive": "soon"}', "number of seconds"),
        ('{"TimeToLiveTimeSpan": [1]}', "TimeToLiveTimeSpan must be a number"),
        ('{"ScheduledEnqueueTimeUtc": "tomorrow"}', "ScheduledEnqueueTimeUtc must be a date"),
        ('{"SessionId": "' + "s" * 129 + '"}', "longer than 128"),
        ('{"SessionId": "a", "PartitionKey": "b"}', "must be the same"),
        ('{"Label": "\\ud800"}', "characters that are not allowed"),
        ('{"TimeToLive": ' + "9" * 5_000 + "}", "not valid JSON"),
    ],
)
def test_broker_properties_that_are_refused(broker: str, words: str) -> None:
    with pytest.raises(BadMessage) as refused:
        single_message([("BrokerProperties", broker)], None, b"")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('{"a": [1]}', "'a' must be a text, a number"),
        ('{"a": ' + "9" * 400 + "}", "too large"),
        ('{"\\ud800": 1}', "name of a property"),
        ('"text"', "JSON object"),
    ],
)
def test_properties_that_are_refused(more: str, words: str) -> None:
    with pytest.raises(BadMessage) as refused:
        single_message([("Postbus-Properties", more)], None, b"")
    assert words in str(refused.value)


def test_a_content_type_of_other_letters_is_refused() -> None:
    with pytest.raises(BadMessage, match="Content-Type"):
        single_message([], "text/wörd", b"")


def test_every_property_can_be_sent_as_it_was_received() -> None:
    custom: dict[str, Value] = {f"p{n}": value for n, (_, value) in enumerate(PROPERTIES)}
    first = make_message({"MessageId": "m", "Label": 'a"b\\c'}, custom, b"x", "text/plain")
    headers = headers_of(delivery_of(first), is_locked=False)
    again = single_message(headers.items(), headers["Content-Type"], body_of(first))
    assert again.properties == first.properties
    assert MessageFields(again).application == MessageFields(first).application


async def test_every_broker_property_comes_back(http: HttpClient) -> None:
    """One message and one of a batch, with all that may be set and some that may not."""
    queue = http.bus.queue(lockDuration="PT45S")
    due = http.bus.now() - timedelta(seconds=5)
    sent = {
        "CorrelationId": "c",
        "SessionId": "s",
        "MessageId": "m",
        "Label": "l",
        "ReplyTo": "r",
        "ReplyToSessionId": "rs",
        "TimeToLive": 12.5,
        "To": "t",
        "ScheduledEnqueueTimeUtc": format_datetime(due, usegmt=True),
        "PartitionKey": "s",
        "ViaPartitionKey": "v",
    }
    ignored = {"ForcePersistence": True, "DeliveryCount": 7, "SequenceNumber": 9, "Unknown": {}}
    headers = {"x-ms-retrypolicy": "NoRetry"}
    assert (await http.send(queue, "one", {**sent, **ignored}, headers)).status == 201
    member = {"Body": "two", "BrokerProperties": {**sent, **ignored, "TimeToLive": None}}
    member["BrokerProperties"]["TimeToLiveTimeSpan"] = "00:00:12.5"
    assert (await http.send_batch(queue, [member])).status == 201
    for number, body in ((1, b"one"), (2, b"two")):
        before = http.bus.now()
        locked = await http.lock(queue, timeout_s=20)
        assert (locked.status, locked.body) == (201, body)
        assert not [name for name in locked.headers if name.lower().startswith("x-ms")]
        broker = locked.broker
        until = parsedate_to_datetime(broker.pop("LockedUntilUtc"))
        assert timedelta(seconds=44) <= until - before.replace(microsecond=0)
        assert until - before < timedelta(seconds=60)
        assert parsedate_to_datetime(broker.pop("EnqueuedTimeUtc")) <= before
        assert locked.headers["Location"].endswith(f"/{queue}/messages/m/{broker.pop('LockToken')}")
        counts = {"DeliveryCount": 1, "SequenceNumber": number, "EnqueuedSequenceNumber": 0}
        assert broker == {**sent, **counts, "State": "Active"}
        assert (await http.call("DELETE", locked.path)).status == 200


# --- curl -----------------------------------------------------------------------------------------


def curl(bus: BusThread, *arguments: str) -> tuple[int, dict[str, str], bytes]:
    """Run the real one; return status, headers by lower-case name and body."""
    done = subprocess.run(
        ["curl", "-sS", "-i", "-H", f"Authorization: {token_of(bus)}", *arguments],
        capture_output=True, timeout=30, check=True,
    )  # fmt: skip
    head, _, body = done.stdout.partition(b"\r\n\r\n")
    if head.endswith(b"100 Continue"):
        head, _, body = body.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in headers.items()}, body


def test_curl_sends_receives_and_settles(bus: BusThread, queue: str, tmp_path: Path) -> None:
    at = f"{url_of(bus)}/{queue}/messages"
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 800)
    sent = curl(bus, at, "--data-binary", f"@{large}", "-H", 'kind: "bytes"')
    assert sent[0] == 201
    status, headers, body = curl(bus, "-X", "POST", f"{at}/head?timeout=5")
    assert (status, body == large.read_bytes(), headers["kind"]) == (201, True, '"bytes"')
    for method, expected in (("POST", 200), ("PUT", 200), ("DELETE", 404)):
        assert curl(bus, "-X", method, headers["location"])[0] == expected
    status, _, body = curl(bus, "-X", "DELETE", f"{at}/head")
    assert (status, len(body)) == (200, 204_800)
    assert curl(bus, "-X", "DELETE", f"{at}/head?timeout=0")[0] == 204


def test_curl_gets_100_continue(bus: BusThread, queue: str, tmp_path: Path) -> None:
    """A client that waits for `100 Continue` gets it, and sends nothing that is too large."""
    at = f"{url_of(bus)}/{queue}/messages"
    body, larger = tmp_path / "body", tmp_path / "larger"
    body.write_bytes(b"x" * 200_000)
    larger.write_bytes(b"x" * 2_000_000)
    wait = ("-H", "Expect: 100-continue", "--expect100-timeout", "25")
    assert curl(bus, at, *wait, "--data-binary", f"@{body}")[0] == 201
    assert curl(bus, at, *wait, "--data-binary", f"@{larger}")[0] == 403
