"""`postbus send` and `postbus receive` as processes, against a bus that `postbus dev` runs."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient

from postbus.cli.failures import InputError
from postbus.cli.formats.message_json import (
    decode_json_message,
    encode_json_message,
    read_property,
    read_value,
    shown_value,
)
from postbus.message import codec
from postbus.process.local_bus import bus_of_data_directory
from tests.cli.command_line import CommandLine, folder_with_bus
from tests.dev_bus import LIMIT_S

QUEUE = "queue.1"
MANIFEST = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: example-bus}
spec:
  authorizationRules:
    - {name: RootManageSharedAccessKey, rights: [Manage]}
"""
for name, spec in (("queue.1", ""), ("sessions", ", requiresSession: true"), ("orders/eu", "")):
    MANIFEST += f"""
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {{name: {name.replace("/", "-")}}}
spec: {{owner: {{name: example-bus}}, entityName: {name}{spec}}}
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Run a bus in a folder until the module's tests are done."""
    path = tmp_path_factory.mktemp("bus") / "bus.yaml"
    path.write_text(MANIFEST)
    with folder_with_bus(str(path)) as bus:
        yield bus


def connection_string(user: CommandLine) -> str:
    found = bus_of_data_directory(user.folder / ".postbus")
    assert found is not None
    assert found.connection_string is not None
    return found.connection_string


@pytest.mark.slow
def test_empty_list_of_restorable_entities_is_reported(user: CommandLine) -> None:
    assert user.ok("get", "deleted") == "no restorable entities\n"
    assert user.json("get", "deleted") == []


# --- JSON and AMQP ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("region=eu", "region", "eu"),
        ("region=", "region", ""),
        ("a=b=c", "a", "b=c"),
        ("amount:int=7", "amount", codec.Int(7)),
        ("amount:long=7", "amount", 7),
        ("paid:bool=true", "paid", True),
        ("rate:double=0.5", "rate", 0.5),
        ("at:timestamp=1970-01-01T00:00:01Z", "at", codec.Timestamp(1000)),
        ("id:uuid=00000000-0000-0000-0000-000000000001", "id", uuid.UUID(int=1)),
        ("raw:binary=AAE=", "raw", b"\0\1"),
        ("urn:x:string=y", "urn:x", "y"),
    ],
)
def test_property_is_text_or_of_the_type_that_is_named(text: str, name: str, value: object) -> None:
    found = read_property(text)
    assert (found, type(found[1])) == ((name, value), type(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "=x",
        "n:int=x",
        "n:int=99999999999",
        "n:integer=7",
        "b:bool=2",
        "u:uuid=1",
        "t:timestamp=1",
    ],
)
def test_invalid_property_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        read_property(text)


@pytest.mark.parametrize(
    "value",
    [
        "text", "", 0, -(2**63), 2**63 - 1, 0.5, True, None, codec.Int(7), codec.Ubyte(255),
        codec.Ulong(2**64 - 1), codec.Float(0.5), codec.Char("ü"), codec.Symbol("s"), b"\0\xff",
        codec.Timestamp(1_700_000_000_123), uuid.UUID(int=7),
    ],
)  # fmt: skip
def test_values_keep_their_amqp_type_in_json(value: object) -> None:
    again = read_value("x", json.loads(json.dumps(shown_value(value))))
    assert (again, type(again)) == (value, type(value))


WHOLE: dict[str, Any] = {
    "messageId": "order-1",
    "to": "somewhere",
    "subject": "placed",
    "replyTo": "answers",
    "correlationId": "together",
    "contentType": "application/json",
    "contentEncoding": "utf-8",
    "sessionId": "customer-7",
    "replyToSessionId": "customer-8",
    "timeToLive": "P1D",
    "partitionKey": "customer-7",
    "scheduledEnqueueTime": "2040-01-31T12:00:00.250Z",
    "applicationProperties": {"region": "eu", "amount": {"type": "int", "value": 7}},
    "body": "wörld",
}


def test_message_is_the_same_json_after_amqp() -> None:
    assert decode_json_message(encode_json_message(WHOLE, 0)) == WHOLE
    for body in ({"bodyBase64": "AP8="}, {"bodyValue": [1, "a", {"b": True}]}, {"body": ""}):
        message: dict[str, Any] = {"messageId": "1", **body}
        if "bodyValue" in message:
            continue
        assert decode_json_message(encode_json_message(message, 0)) == message
    assert decode_json_message(encode_json_message({"bodyValue": 7}, 0)) == {"bodyValue": 7}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"bodies": "x"},
            "unknown field bodies; the fields of a message are applicationProperties, body",
        ),
        ({"body": "x", "bodyBase64": "eA=="}, "one body, not body and bodyBase64"),
        ({"bodyBase64": "x"}, "bodyBase64: not valid base64"),
        ({"messageId": 7}, "messageId: must be text"),
        ({"timeToLive": "5m"}, "timeToLive: use an ISO 8601 duration"),
        ({"timeToLive": "PT0S"}, "timeToLive: use an ISO 8601 duration"),
        ({"scheduledEnqueueTime": "tomorrow"}, "use a time such as 2030"),
        ({"scheduledEnqueueTime": "2030-01-31T12:00:00"}, "add a time zone"),
        ({"applicationProperties": []}, "applicationProperties: must be an object"),
        ({"applicationProperties": {"a": [1]}}, "a: must be text, a number"),
        ({"applicationProperties": {"a": {"type": "money", "value": 1}}}, "unknown type money"),
        ({"applicationProperties": {"a": 2**70}}, "cannot be encoded"),
    ],
)
def test_message_with_a_mistake_is_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        encode_json_message(message, 0)


# --- sending and receiving ----------------------------------------------------------------------


@pytest.mark.slow
def test_all_send_options_arrive(user: CommandLine) -> None:
    user.ok(
        "send", QUEUE, "hello", "--id", "1", "--subject", "placed", "--content-type", "text/plain",
        "--correlation-id", "c", "--reply-to", "r", "--ttl", "1h", "-p", "region=eu",
        "-p", "amount:int=7",
    )  # fmt: skip
    with (
        ServiceBusClient.from_connection_string(connection_string(user)) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        (peeked,) = receiver.peek_messages(10)
        assert str(peeked) == "hello"
        assert peeked.application_properties == {b"region": b"eu", b"amount": 7}
    (received,) = user.lines("receive", QUEUE)
    for name in ("enqueuedTime", "lockedUntil"):
        assert abs((datetime.now(UTC) - datetime.fromisoformat(received.pop(name))).days) <= 1
    assert received.pop("sequenceNumber") >= 1
    assert received == {
        "messageId": "1",
        "subject": "placed",
        "replyTo": "r",
        "correlationId": "c",
        "contentType": "text/plain",
        "timeToLive": "PT1H",
        "deliveryCount": 1,
        "applicationProperties": {"region": "eu", "amount": {"type": "int", "value": 7}},
        "body": "hello",
    }
    assert user.lines("receive", QUEUE, "--wait", "0.3") == []


@pytest.mark.slow
def test_received_messages_can_be_resent_from_a_file(user: CommandLine) -> None:
    lines = [json.dumps({"body": f"m{n}", "applicationProperties": {"n": n}}) for n in range(3)]
    (user.folder / "m.jsonl").write_text("\n".join(lines) + "\n\n")
    assert user.ok("send", QUEUE, "--file", "m.jsonl") == f"sent 3 messages to {QUEUE}\n"
    received = user.ok("receive", QUEUE, "--count", "0", "--wait", "0.5")
    assert (
        user.ok("send", "orders/eu", "-f", "-", stdin=received) == "sent 3 messages to orders/eu\n"
    )
    array = json.dumps(user.lines("receive", "orders/eu", "-n", "3"))
    (user.folder / "m.json").write_text(array)
    user.ok("send", QUEUE, "--file", "m.json", "--property", "again:bool=true")
    again = user.lines("receive", QUEUE, "-n", "3")
    assert [each["body"] for each in again] == ["m0", "m1", "m2"]
    assert again[2]["applicationProperties"] == {"n": 2, "again": True}


@pytest.mark.slow
def test_bodies_from_standard_input_and_lines_of_text(user: CommandLine) -> None:
    user.ok("send", QUEUE, stdin="one\ntwo\n")
    user.ok("send", QUEUE, stdin=b"\xff\x00")
    user.ok("send", QUEUE, "--file", "-", "--lines", stdin='{"a": 1}\n\nlast')
    received = user.lines("receive", QUEUE, "-n", "5")
    shown = [each.get("body", each.get("bodyBase64")) for each in received]
    assert shown == ["one\ntwo", "/wA=", '{"a": 1}', "", "last"]


@pytest.mark.slow
def test_many_are_sent_and_received_in_order(user: CommandLine) -> None:
    numbers = "".join(f"{n}\n" for n in range(200))
    assert "sent 1000 messages" in user.ok(
        "send", QUEUE, "--file", "-", "--lines", "--repeat", "5", stdin=numbers
    )
    received = user.lines("receive", QUEUE, "--count", "0", "--wait", "1")
    assert [each["body"] for each in received] == [str(n) for n in range(200)] * 5


@pytest.mark.slow
def test_messages_refused_as_busy_are_retried(user: CommandLine) -> None:
    user.ok("fault", "store-outage", "2s")
    assert user.ok("send", QUEUE, "patient", "--repeat", "700") == f"sent 700 messages to {QUEUE}\n"
    assert len(user.lines("receive", QUEUE, "--count", "0", "--wait", "0.5")) == 700


@pytest.mark.slow
@pytest.mark.behaviour("S84")
def test_scheduled_message_arrives_when_due(user: CommandLine) -> None:
    user.ok("send", QUEUE, "later", "--schedule", "1h")
    assert user.lines("receive", QUEUE, "--wait", "0.3") == []
    with (
        ServiceBusClient.from_connection_string(connection_string(user)) as client,
        client.get_queue_receiver(QUEUE) as receiver,
        client.get_queue_sender(QUEUE) as sender,
    ):
        (waiting,) = receiver.peek_messages(10)
        assert waiting.sequence_number is not None
        assert waiting.scheduled_enqueue_time_utc is not None
        left = waiting.scheduled_enqueue_time_utc - datetime.now(UTC)
        assert 3_000 < left.total_seconds() <= 3_600
        sender.cancel_scheduled_messages(waiting.sequence_number)


@pytest.mark.slow
def test_received_messages_are_settled_as_requested(user: CommandLine) -> None:
    user.ok("send", QUEUE, "one")
    (first,) = user.lines("receive", QUEUE, "--abandon")
    (held,) = user.lines("receive", QUEUE, "--peek-lock", "0.2")
    (dead,) = user.lines(
        "receive", QUEUE, "--to-dead-letter", "--reason", "no price", "--description", "of 7"
    )
    counts = [each["deliveryCount"] for each in (first, held, dead)]
    assert counts == [1, 2, 2], "what was only held is given back uncounted"
    assert user.lines("receive", QUEUE, "--wait", "0.3") == []
    (letter,) = user.lines("receive", f"{QUEUE}/$DeadLetterQueue", "--complete")
    assert letter["applicationProperties"] == {
        "DeadLetterReason": "no price",
        "DeadLetterErrorDescription": "of 7",
    }


@pytest.mark.slow
def test_receive_without_messages_is_reported(user: CommandLine) -> None:
    done = user.run("receive", QUEUE, "--wait", "0.1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "postbus: no message arrived within 0.1 s\n"


@pytest.mark.slow
def test_messages_of_a_session_are_sent_and_received(user: CommandLine) -> None:
    for session in ("a", "b"):
        user.ok("send", "sessions", f"of {session}", "--session", session)
    assert user.lines("receive", "sessions", "--session", "b")[0]["body"] == "of b"
    (received,) = user.lines("receive", "sessions", "--session", "")
    assert (received["sessionId"], received["body"]) == ("a", "of a")
    user.fails("receive", "sessions", "--session", "", "--wait", "0.5", code=1, says="")
    user.fails("receive", "sessions", code=7, says="session")
    user.fails("send", "sessions", "x", code=7, says="session")


@pytest.mark.slow
def test_amqp_conditions_are_shown_unchanged(user: CommandLine) -> None:
    """`:link:` is no picture of a chain."""
    user.fails(
        "send", QUEUE, code=7, says=r"\(amqp:link:message-size-exceeded\)", stdin="x" * 300_000
    )


@pytest.mark.slow
def test_closed_pipe_loses_no_message(user: CommandLine) -> None:
    user.ok("send", QUEUE, "x", "--repeat", "20")
    receiving = subprocess.Popen(
        [sys.executable, "-m", "postbus", "receive", QUEUE, "--count", "0", "--wait", "2"],
        cwd=user.folder,
        env=user.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert receiving.stdout is not None
    assert receiving.stderr is not None
    receiving.stdout.close()  # without a reader the first line fails
    error = receiving.stderr.read().decode()
    receiving.stderr.close()
    assert (receiving.wait(LIMIT_S), error) == (1, "")
    received = user.lines("receive", QUEUE, "--count", "0", "--wait", "1")
    assert [each["deliveryCount"] for each in received] == [1] * 20


AS_BACKGROUND_JOB = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("launcher", [[], [sys.executable, "-c", AS_BACKGROUND_JOB]])
def test_interrupt_releases_locked_messages(
    user: CommandLine, number: signal.Signals, launcher: list[str]
) -> None:
    user.ok("send", QUEUE, "held")
    receiving = subprocess.Popen(
        [*launcher, sys.executable, "-m", "postbus", "receive", QUEUE, "--peek-lock", "100"],
        cwd=user.folder,
        env=user.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert receiving.stdout is not None
    assert receiving.stdout.readline()
    receiving.send_signal(number)
    _, error = receiving.communicate(timeout=LIMIT_S)
    assert (receiving.returncode, error.decode()) == (130, "postbus: interrupted\n")
    assert user.lines("receive", QUEUE, "--wait", "3")[0]["deliveryCount"] == 1


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_bad_input(user: CommandLine) -> None:
    user.fails("send", QUEUE, "x", "-p", "a", code=4, says="a: use name=text or name:type=value")
    user.fails(
        "send", QUEUE, "x", "--file", "y", code=2, says="use either a text or --file, not both"
    )
    user.fails("send", QUEUE, "x", "--lines", code=2, says="--lines needs --file")
    user.fails("send", QUEUE, "--file", "absent", code=4, says="absent: no such file")
    user.fails("send", QUEUE, "x", "--schedule", "soon", code=4, says="soon: use a time such as")
    user.fails("receive", QUEUE, "--complete", "--abandon", code=2, says="use only one of")
    user.fails("receive", QUEUE, "--reason", "x", code=2, says="need --to-dead-letter")
    for entity in ("nobody", "nobody/$DeadLetterQueue"):
        user.fails("receive", entity, code=7, says="'nobody.* could not be found")
    user.fails("send", "nobody", "x", code=7, says="'nobody' could not be found")


@pytest.mark.slow
def test_error_in_a_file_reports_the_messages_sent_before_it(user: CommandLine) -> None:
    lines = '{"body": "good"}\nbad\n{"body": "never"}\n'
    says = "standard input:2: invalid JSON.*--lines.*1 message was sent before that"
    user.fails("send", QUEUE, "--file", "-", stdin=lines, code=4, says=says)
    received = user.lines("receive", QUEUE, "--count", "0", "--wait", "0.5")
    assert [each["body"] for each in received] == ["good"]


@pytest.mark.slow
def test_messages_stored_behind_a_refused_one_are_counted(user: CommandLine) -> None:
    lines = [
        json.dumps({"body": str(n), "sessionId": "s"} if n != 1 else {"body": "1"})
        for n in range(9)
    ]
    (user.folder / "gap.jsonl").write_text("\n".join(lines))
    says = "8 messages were sent, some of them behind it"
    user.fails("send", "sessions", "--file", "gap.jsonl", code=7, says=says)
    taken = user.lines("receive", "sessions", "--session", "s", "--count", "0", "--wait", "0.5")
    assert [each["body"] for each in taken] == list("02345678")


@pytest.mark.slow
def test_too_large_message_is_refused_by_the_command(user: CommandLine) -> None:
    user.fails("send", QUEUE, stdin="x" * 300_000, code=7, says="size")
    assert user.lines("receive", QUEUE, "--wait", "0.3") == []


@pytest.mark.slow
def test_wrong_keys_and_missing_rights_are_reported(user: CommandLine) -> None:
    good = connection_string(user)
    bad = good.replace("SharedAccessKey=", "SharedAccessKey=geheim")
    variables = {"POSTBUS_CONNECTION_STRING": bad}
    error = user.fails("send", QUEUE, "x", code=7, says="refuses the key", **variables)
    assert "geheim" not in error
    user.fails(
        "send", QUEUE, "x", code=3, says="no connection string", POSTBUS_CONNECTION_STRING="geheim"
    )
    nobody = CommandLine(user.folder / "config")
    nobody.folder.mkdir(exist_ok=True)
    nobody.fails("send", QUEUE, "x", code=3, says="POSTBUS_CONNECTION_STRING")
    nobody.ok("send", QUEUE, "x", POSTBUS_CONNECTION_STRING=good)
    assert len(user.lines("receive", QUEUE)) == 1


@pytest.mark.slow
def test_signature_takes_the_place_of_a_key(user: CommandLine) -> None:
    endpoint = connection_string(user).partition(";")[0]
    token = user.ok("token", "orders/eu").strip()
    text = f"{endpoint};SharedAccessSignature={token};UseDevelopmentEmulator=true"
    variables = {"POSTBUS_CONNECTION_STRING": text}
    user.ok("send", "orders/eu", "signed", **variables)
    user.fails("send", QUEUE, "x", code=7, says="signed for another resource", **variables)
    variables["POSTBUS_CONNECTION_STRING"] = text.replace("sig=", "sig=A")
    error = user.fails("send", "orders/eu", "x", code=7, says="refuses the signature", **variables)
    assert token not in error
    assert user.lines("receive", "orders/eu", "--wait", "20")[0]["body"] == "signed"
    assert user.lines("receive", "orders/eu", "--wait", "0.3") == []


@pytest.mark.slow
def test_messaging_commands_fail_without_a_bus(tmp_path: Path) -> None:
    user = CommandLine(tmp_path)
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        endpoint = f"Endpoint=sb://127.0.0.1:{bound.getsockname()[1]}"
        text = f"{endpoint};SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true"
        variables = {"POSTBUS_CONNECTION_STRING": text}
        for command in (("send", QUEUE, "x"), ("receive", QUEUE)):
            user.fails(*command, code=7, says="no bus answers at 127.0.0.1", **variables)


@pytest.mark.slow
def test_tls_trusts_the_authority_of_the_context_only(user: CommandLine) -> None:
    found = re.search(r"amqps://localhost:(\d+)", user.announced)
    assert found is not None
    text = connection_string(user).replace(";UseDevelopmentEmulator=true", "")
    text = text.replace(text.partition(";")[0], f"Endpoint=sb://localhost:{found[1]}")
    nobody = CommandLine(user.folder / "config")
    nobody.folder.mkdir(exist_ok=True)
    variables = {"POSTBUS_CONNECTION_STRING": text}
    nobody.fails("send", QUEUE, "x", code=7, says="is not trusted.*--ca-file", **variables)
    user.ok("send", QUEUE, "x", **variables)
    assert len(user.lines("receive", QUEUE)) == 1
    plain = text.replace(found[1], re.search(r"amqp://localhost:(\d+)", user.announced)[1])
    user.fails("send", QUEUE, "x", code=7, says="", POSTBUS_CONNECTION_STRING=plain)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["send", "receive"])
def test_help_shows_examples_and_exit_codes(user: CommandLine, command: str) -> None:
    shown = user.ok(command, "--help")
    assert f"postbus {command} orders" in shown
    assert "Exit codes" in shown
