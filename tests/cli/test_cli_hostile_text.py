"""Hostile contents of messages neither break the command line nor control the terminal."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from postbus.cli.client.amqp_session import connected
from postbus.cli.client.connection_strings import read_connection_string
from postbus.cli.formats.message_json import decode_json_message, encode_json_message, read_value
from postbus.cli.formats.output import as_json, as_yaml, as_yaml_documents
from postbus.message.codec import Array, Described, Symbol, Ulong, encode_list, encode_value
from postbus.process.local_bus import bus_of_data_directory
from tests.cli.command_line import CommandLine, folder_with_bus

NO_TEXT = b"\xa1\x02\xff\xfe"
NO_SYMBOL = b"\xa3\x02\xff\xfe"
LIST_AS_KEY = b"\xc1\x04\x02\x45\xa1\x00"
REPLACED = "\N{REPLACEMENT CHARACTER}" * 2
OUTCOMES = ("complete", "abandon", "to-dead-letter")
MANIFEST = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: example-bus}
spec:
  authorizationRules:
    - {name: RootManageSharedAccessKey, rights: [Manage]}
"""
for _name in ("hostile", *OUTCOMES):
    MANIFEST += f"""
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {{name: {_name}}}
spec: {{owner: {{name: example-bus}}}}
"""
BODY = b"\x00\x53\x75\xa0\x04body"
HOSTILE = "\x1b]0;x\x07\u202e\x9b2J\u2028\U000e0041 \n\t\"'é日本: #"
"""A terminal's title and a command in C1, a change of direction, a tag, and harmless text."""


def section(code: int, content: bytes) -> bytes:
    return b"\x00\x53" + bytes([code]) + content


def properties(subject: bytes, content_type: bytes = b"\x40") -> bytes:
    fields = [b"\xa1\x01m", b"\x40", b"\x40", subject, b"\x40", b"\x40", content_type]
    return section(0x73, encode_list(fields))


def application(key: bytes, value: bytes) -> bytes:
    entries = b"\xa1\x01n\x54\x07" + key + value
    return section(0x74, b"\xc1" + bytes([len(entries) + 1, 4]) + entries)


MALFORMED: dict[str, tuple[bytes, str, dict[str, Any]]] = {
    "subject": (
        properties(NO_TEXT) + BODY,
        "amqp:properties:list",
        {"messageId": "m", "subject": REPLACED, "body": "body"},
    ),
    "symbol": (
        properties(b"\x40", NO_SYMBOL) + BODY,
        "amqp:properties:list",
        {"messageId": "m", "contentType": REPLACED, "body": "body"},
    ),
    "key": (
        application(NO_TEXT, b"\xa1\x01x") + BODY,
        "amqp:application-properties:map",
        {
            "applicationProperties": {"n": {"type": "int", "value": 7}, REPLACED: "x"},
            "body": "body",
        },
    ),
    "value": (
        application(b"\xa1\x01a", NO_TEXT) + BODY,
        "amqp:application-properties:map",
        {
            "applicationProperties": {"n": {"type": "int", "value": 7}, "a": REPLACED},
            "body": "body",
        },
    ),
    "char": (
        application(b"\xa1\x01a", b"\x73\xff\xff\xff\xff") + BODY,
        "amqp:application-properties:map",
        {
            "applicationProperties": {
                "n": {"type": "int", "value": 7},
                "a": {"type": "binary", "value": "c/////8="},
            },
            "body": "body",
        },
    ),
    "annotation": (
        section(0x72, b"\xc1\x07\x02" + NO_SYMBOL + b"\x54\x01") + BODY,
        "amqp:message-annotations:map",
        {"body": "body"},
    ),
    "footer": (BODY + section(0x78, LIST_AS_KEY), "amqp:footer:map", {"body": "body"}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_message_shows_readable_sections_and_raw_bytes_of_the_rest(name: str) -> None:
    payload, broken, readable = MALFORMED[name]
    decoded = decode_json_message(payload)
    sections = decoded.pop("malformedSections")
    assert decoded.pop("isMalformed") is True
    assert decoded == readable
    assert list(sections) == [broken]
    assert base64.b64decode(sections[broken]) in payload


def test_unknown_and_oversized_sections_are_shown_as_raw_bytes() -> None:
    for rest in (b"", b"\x00", b"\xa0\x05x", section(0x99, b"\x40"), section(0x75, b"\xb0\xff")):
        decoded = decode_json_message(properties(b"\x40") + rest)
        assert decoded["messageId"] == "m"
        assert decoded.get("malformedSections", {"rest": ""}) == {
            "rest": base64.b64encode(rest).decode()
        }
    many = section(0x74, b"\xd1" + struct.pack(">II", 600_004, 600_000) + b"\xa1\x00" * 300_000)
    decoded = decode_json_message(many)
    assert list(decoded["malformedSections"]) == ["amqp:application-properties:map"]
    sequence = section(
        0x76, b"\xd0" + struct.pack(">II", 1_000_004, 1_000_000) + b"\x40" * 1_000_000
    )
    decoded = decode_json_message(sequence)
    assert (list(decoded["malformedSections"]), "body" in decoded) == (
        ["amqp:amqp-sequence:list"],
        False,
    )


def test_section_may_be_named_instead_of_numbered() -> None:
    named = encode_value(Described(Symbol("amqp:data:binary"), b"x"))
    assert decode_json_message(named) == {"body": "x"}


def test_no_message_breaks_the_command_line() -> None:
    rng = random.Random(7)
    whole = (
        encode_value(Described(Ulong(0x70), [True, None, 7, None, 2]))
        + encode_json_message(
            {
                "messageId": "m",
                "subject": "s",
                "partitionKey": "k",
                "scheduledEnqueueTime": "2040-01-31T12:00:00Z",
                "applicationProperties": {"a": 1, "b": 0.5, "c": {"type": "char", "value": "x"}},
                "bodyValue": {"type": "symbol", "value": "x"},
            },
            0,
        )
        + encode_value(Described(Ulong(0x78), {Symbol("x"): Array(0xA3, [Symbol("y")])}))
    )
    for _ in range(2_000):
        broken = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        decoded = decode_json_message(bytes(broken[: rng.randint(1, len(broken))]))
        assert as_json(json.loads(as_json(decoded), parse_constant=pytest.fail)).isprintable()


@pytest.mark.parametrize("number", [float("inf"), float("-inf")])
def test_numbers_outside_json_are_shown_with_their_type(number: float) -> None:
    payload = encode_value(Described(Ulong(0x77), number))
    shown = json.loads(as_json(decode_json_message(payload)), parse_constant=pytest.fail)
    assert read_value("bodyValue", shown["bodyValue"]) == number


def test_json_and_yaml_contain_no_terminal_control_characters() -> None:
    value = {"plain": "é日本", HOSTILE: [HOSTILE, {"a": HOSTILE}], "long": f"{HOSTILE} " * 40}
    for text in (as_json(value), as_json(value, indent=2), as_yaml(value)):
        assert text.replace("\n", "").isprintable()
        assert "é日本" in text
    assert json.loads(as_json(value)) == json.loads(as_json(value, indent=2)) == value
    assert yaml.safe_load(as_yaml(value)) == value
    assert list(yaml.safe_load_all(as_yaml_documents([value, "\u202e"]))) == [value, "\u202e"]


# --- against a bus ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Run a bus in a folder until the module's tests are done."""
    path = tmp_path_factory.mktemp("bus") / "bus.yaml"
    path.write_text(MANIFEST)
    with folder_with_bus(str(path)) as bus:
        yield bus


def send_raw(user: CommandLine, queue: str, *payloads: bytes) -> None:
    """Send messages as they are."""
    found = bus_of_data_directory(user.folder / ".postbus")
    assert found is not None
    assert found.connection_string is not None
    endpoint = read_connection_string(found.connection_string)

    async def work() -> None:
        async with connected(endpoint, queue) as session:
            sender = await session.sender(queue)
            for payload in payloads:
                await sender.send(payload)

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_malformed_messages_are_received_like_all_others(user: CommandLine, outcome: str) -> None:
    payloads = [payload for payload, _, _ in MALFORMED.values()]
    send_raw(user, outcome, *payloads, section(0x75, b"\xa0\x04good"))
    count = len(payloads) + 1
    received = user.lines("receive", outcome, "--count", str(count), f"--{outcome}")
    assert [each["body"] for each in received] == ["body"] * len(payloads) + ["good"]
    assert [each.get("isMalformed", False) for each in received] == [True] * len(payloads) + [False]
    if outcome == "complete":
        assert user.lines("receive", outcome, "--wait", "0.3") == []
        return
    left = f"{outcome}/$DeadLetterQueue" if outcome == "to-dead-letter" else outcome
    assert len(user.lines("receive", left, "--count", str(count))) == count


@pytest.mark.slow
def test_control_characters_of_clients_never_reach_a_terminal(user: CommandLine) -> None:
    send_raw(user, "hostile", properties(NO_TEXT) + BODY)
    (peeked,) = user.ok("peek", "hostile", "-o", "json").splitlines()
    assert json.loads(peeked)["isMalformed"] is True
    user.ok("purge", "hostile", "--yes")
    message = {"subject": HOSTILE, "messageId": HOSTILE, "body": HOSTILE}
    user.ok("send", "hostile", "--file", "-", stdin=json.dumps(message))
    shown = user.ok("peek", "hostile", "-o", "json") + user.ok("peek", "hostile", "-o", "yaml")
    shown += user.ok("peek", "hostile", "--bodies")
    dead = ("--to-dead-letter", "--reason", HOSTILE, "--description", HOSTILE)
    shown += user.ok("receive", "hostile", *dead)
    for what in (("list", "hostile"), ("summary", "hostile"), ("list", "hostile", "--bodies")):
        for output in ("json", "yaml", "table"):
            shown += user.ok("dlq", *what, "-o", output)
    assert [each for each in shown if not each.isprintable() and each not in "\n\t"] == []
