"""Input that is wrong on purpose: the documented error, for the message or the link alone.

Every test ends by using another link of the same connection: it has to go on as if nothing were.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.message.codec import (
    Array,
    Described,
    Int,
    Ulong,
    Value,
    encode_value,
)
from tests.edge.bus_thread import BusThread
from tests.edge.hostile_client import RETRYABLE, HostileClient, settle
from tests.edge.raw_client import (
    DISPOSITION,
    FLOW,
    REJECTED,
    message,
)
from tests.edge.sdk.sdk_steps import path_of, total

pytestmark = pytest.mark.slow


@pytest.fixture
def hostile(bus: BusThread) -> Iterator[HostileClient]:
    with HostileClient(bus) as opened:
        yield opened
        opened.check()


# --- rules ----------------------------------------------------------------------------------------

BAD_SQL = [
    " ",
    "a =",
    "= 1",
    "a = = 1",
    "a == 1",
    "(a = 1",
    "a = 1)",
    "a = 'x",
    "a LIKE",
    "a LIKE 'x' ESCAPE 'ab'",
    "a IN ()",
    "a IN (1,",
    "a IS",
    "NOT",
    "AND",
    "a = 1 AND",
    "a = 1; DROP TABLE message",
    "SELECT 1",
    "no_function(a) = 1",
    "EXISTS(1)",
    "a = @",
    "[a = 1",
    '"a = 1',
    "a = 1e",
    "a\0 = 1",
    "a \x7f = 1",
    "\u2603",
    "a = 1\n\n  AND AND b = 2",
]

BAD_DESCRIPTIONS: list[Value] = [
    None,
    "text",
    7,
    [],
    {},
    {"sql-filter": None},
    {"sql-filter": "1=1"},
    {"sql-filter": {}},
    {"sql-filter": {"expression": None}},
    {"sql-filter": {"expression": 7}},
    {"sql-filter": {"expression": ""}},
    {"sql-filter": {"expression": "a" * 1_025}},
    {"sql-filter": {"expression": "1=1"}, "correlation-filter": {"label": "x"}},
    {"correlation-filter": {}},
    {"correlation-filter": "x"},
    {"correlation-filter": {"properties": []}},
    {"correlation-filter": {"properties": {"k": [1]}}},
    {"correlation-filter": {"properties": {"k": {"n": 1}}}},
    {"correlation-filter": {"properties": {"k": float("nan")}}},
    {"no-such-filter": {}},
    {"sql-filter": {"expression": "1=1"}, "sql-rule-action": {"expression": "SET"}},
    {"sql-filter": {"expression": "1=1"}, "sql-rule-action": {"expression": "DROP a"}},
    {"sql-filter": {"expression": "1=1"}, "sql-rule-action": {"expression": "SET a = 1;" * 33}},
    {"sql-filter": {"expression": "1=1"}, "sql-rule-action": 7},
]

TRUE: dict[str, Value] = {"sql-filter": {"expression": "1=1"}}


class RuleTarget:
    """A subscription under attack by its rules."""

    def __init__(self, bus: BusThread, hostile: HostileClient) -> None:
        self.topic = bus.topic()
        bus.subscription(self.topic)
        self.path = path_of(self.topic)
        self._bus, self._hostile = bus, hostile
        hostile.attach_sender(self.topic, 50)
        self._published = 0

    def add(self, description: Value, name: Value = "hostile") -> tuple[int, str, Value]:
        body: dict[str, Value] = {"rule-name": name, "rule-description": description}
        return self._hostile.ask(self.path, "add-rule", body)

    def check(self, rules: int = 1) -> None:
        """Check the number of rules and that publishing works."""
        _, _, found = self._hostile.ask(self.path, "enumerate-rules", {"top": 100, "skip": 0})
        assert len(found["rules"]) == rules
        assert self._hostile.send_bytes(message(b"m"), 50) is None
        self._published += 1
        assert total(self._bus, self.path).active == self._published


@pytest.fixture
def target(bus: BusThread, hostile: HostileClient) -> RuleTarget:
    return RuleTarget(bus, hostile)


def test_invalid_filters_are_refused_with_a_reason(target: RuleTarget) -> None:
    for text in BAD_SQL:
        status, name, text_of_error = target.add({"sql-filter": {"expression": text}})
        assert status == 400, (text, status, text_of_error)
        assert name not in RETRYABLE
        assert "line" in text_of_error, (text, text_of_error)
        assert "column" in text_of_error, (text, text_of_error)
    assert "line 3" in text_of_error
    target.check()


def test_filters_at_the_edge_of_the_grammar_do_not_harm_others(target: RuleTarget) -> None:
    """Legal or not: they are answered, and a rule that is taken can be evaluated and removed."""
    for text in (
        "(" * 500 + "1=1" + ")" * 500,
        "NOT " * 250 + "1=1",
        "1" + "+1" * 500 + "=501",
        "-" * 1_000 + "1=1",
        "a LIKE '" + "%a" * 400 + "b'",
        "a LIKE '" + "_%" * 400 + "'",
        "1=1" + " AND 1=1" * 100,
        "a IN (" + ",".join("1" for _ in range(480)) + ")",
        "a = 99999999999999999999999999999999999",
        "1 = 1e999",
        "a = '" + "\u00e4" * 1_000 + "'",
    ):
        status, _, text_of_error = target.add({"sql-filter": {"expression": text}})
        assert status in {200, 400}, (text, text_of_error)
        target.check(2 if status == 200 else 1)
        if status == 200:
            status, _, _ = target._hostile.ask(target.path, "remove-rule", {"rule-name": "hostile"})
            assert status == 200


@pytest.mark.parametrize("description", BAD_DESCRIPTIONS, ids=lambda each: repr(each)[:70])
def test_invalid_rule_descriptions_are_refused(target: RuleTarget, description: Value) -> None:
    status, name, text_of_error = target.add(description)
    assert status == 400, text_of_error
    assert name not in RETRYABLE
    target.check()


def test_invalid_rule_names_are_refused(target: RuleTarget) -> None:
    for name in (None, "", 7, [], {}, "a/b", "x" * 51, "a\0b", "\ud7ff", "a b", "$Other"):
        status, _, text_of_error = target.add(TRUE, name)
        assert status == 400, (name, text_of_error)
    assert target.add(TRUE, "$Default")[0] == 409
    assert target.add(TRUE, "x" * 50)[0] == 200
    target.check(rules=2)


def test_huge_correlation_filters(target: RuleTarget) -> None:
    """There is no limit of its own; accepted ones work, others are refused quickly."""
    taken = 1
    for number, properties in enumerate(
        (
            {f"key{number}": "value" for number in range(30_000)},
            {"key": "v" * 1_000_000},
            {"k" * 1_000_000: 1},
        )
    ):
        description = {"correlation-filter": {"properties": properties}}
        status, name, text_of_error = target.add(description, f"huge{number}")
        assert status in {200, 400, 403}, (number, status)
        assert name not in RETRYABLE
        taken += status == 200
        assert status == 200 or len(text_of_error) < 10_000
    target.check(taken)


def test_a_request_that_is_too_large_ends_its_link_at_most(
    target: RuleTarget, hostile: HostileClient
) -> None:
    node = f"{target.path}/$management"
    hostile.attach_sender(node, 60)
    delivery_id = hostile.next_id()
    piece = b"\0\x53\x77\xb1" + struct.pack(">I", 40_000_000) + b"x" * 60_000
    for number in range(600):
        hostile.write(hostile.transfer(delivery_id, piece, handle=60, more=number < 599))
    text_of_error = hostile.read()
    while text_of_error.code == FLOW:
        text_of_error = hostile.read()
    error = (
        text_of_error.fields[4].value[0]
        if text_of_error.code == DISPOSITION
        else text_of_error.fields[2]
    )
    assert str(error.value[0]) == "amqp:link:message-size-exceeded"
    target.check()


# --- properties of messages -----------------------------------------------------------------------


def section(payload: bytes) -> bytes:
    """Put bytes where the map of application properties belongs, and a body behind it."""
    return b"\0\x53\x74" + payload + message(b"m")


def map32(count: int, payload: bytes, size: int | None = None) -> bytes:
    return b"\xd1" + struct.pack(">II", len(payload) + 4 if size is None else size, count) + payload


KEY, ONE = encode_value("k"), encode_value(1)
NESTED = b"\xc0\x04\x02\xa1\x01k" * 40  # each a map with too large a count

BROKEN = {
    "odd count": map32(3, KEY + ONE + KEY),
    "count too high": map32(200, KEY + ONE),
    "four billion entries": map32(0xFFFF_FFFE, KEY + ONE),
    "size beyond the message": map32(2, KEY + ONE, size=5_000),
    "size of 300 MB": map32(2, KEY + ONE, size=300 << 20),
    "size of 4 GB": map32(2, KEY + ONE, size=0xFFFF_FFFF),
    "size of nothing": map32(2, KEY + ONE, size=0),
    "cut short": b"\xd1\0\0",
    "no map": encode_value("text"),
    "a list": encode_value([1, 2]),
}
"""Sections with unclear ends, or that are not maps: not a message at all."""

ROTTEN = {
    "count too low": map32(2, KEY + ONE + KEY + ONE),
    "key not UTF-8": map32(2, b"\xa1\x02\xff\xfe" + ONE),
    "value not UTF-8": map32(2, KEY + b"\xa1\x02\xff\xfe"),
    "surrogate in a key": map32(2, b"\xa1\x03\xed\xa0\x80" + ONE),
    "symbol not ASCII": map32(2, KEY + b"\xa3\x02\xc3\xa4"),
    "string of 4 GB": map32(2, KEY + b"\xb1\xff\xff\xff\xff"),
    "four billion nulls": map32(2, KEY + b"\xf0" + struct.pack(">II", 5, 0xFFFF_FFFF) + b"\x40"),
    "unknown code": map32(2, KEY + b"\x99"),
    "deep": map32(2, KEY + NESTED),
    "described for ever": map32(2, KEY + b"\0" * 5_000),
}
"""Maps with invalid contents."""

DUBIOUS = {
    "nested map": map32(2, KEY + encode_value({"a": 1})),
    "list": map32(2, KEY + encode_value([1, 2])),
    "array": map32(2, KEY + encode_value(Array(0x71, [Int(1), Int(2)]))),
    "described": map32(2, KEY + encode_value(Described(Ulong(7), "x"))),
    "key twice": map32(4, KEY + ONE + KEY + ONE),
    "number as a key": map32(2, ONE + ONE),
    "null as a key": map32(2, b"\x40" + ONE),
    "list as a key": map32(2, encode_value([1]) + ONE),
    "map as a key": map32(2, encode_value({"a": 1}) + ONE),
    "empty key": map32(2, encode_value("") + ONE),
    "NUL in a key": map32(2, encode_value("a\0b") + ONE),
    "5,000 entries": map32(10_000, b"".join(encode_value(f"{n}") + ONE for n in range(5_000))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_property_maps_are_refused(
    bus: BusThread, hostile: HostileClient, queue: str, name: str
) -> None:
    topic = bus.topic()
    bus.subscription(topic)
    for path, handle in ((queue, 50), (topic, 51)):
        hostile.attach_sender(path, handle)
        assert hostile.send_bytes(section(BROKEN[name]), handle) == "amqp:decode-error"
        assert hostile.send_bytes(message(b"good"), handle) is None
    assert total(bus, queue).active == total(bus, path_of(topic)).active == 1


def test_dubious_property_maps_are_refused_or_delivered_as_they_are(
    bus: BusThread, hostile: HostileClient, queue: str
) -> None:
    hostile.attach_sender(queue, 50)
    hostile.attach_receiver(queue, 51, mode=1)
    taken = 0
    for name, payload in DUBIOUS.items():
        if hostile.send_bytes(section(payload), 50) is None:
            hostile.write(hostile.flow(1, handle=51, count=taken))
            taken += 1
            assert payload in hostile.answer(), name
    assert total(bus, queue).active == 0


@pytest.mark.parametrize("name", [*ROTTEN, *DUBIOUS])
def test_odd_property_maps_are_refused_or_stored_unread(
    bus: BusThread, hostile: HostileClient, queue: str, name: str
) -> None:
    """A queue may store what it need not read; a later reader gets an answer too.

    It is delivered as it is, browsed, dead-lettered with a reason and read from there.
    """
    payload = {**ROTTEN, **DUBIOUS}[name]
    hostile.attach_sender(queue, 50)
    if hostile.send_bytes(section(payload), 50) is not None:
        assert total(bus, queue).active == 0
        return
    body: dict[str, Value] = {"from-sequence-number": 0, "message-count": 5}
    assert hostile.ask(queue, "peek-message", body)[0] == 200
    (taken,) = hostile.receive(queue, 1, handle=51)
    assert payload in taken.payload
    token = uuid.UUID(bytes_le=bytes(taken.fields[2]))
    text_of_error = settle(
        hostile, queue, token, **{"disposition-status": "suspended", "deadletter-reason": "why"}
    )
    assert text_of_error[0] in {200, 400}
    counts = total(bus, queue)
    assert counts.active + counts.dead_letter == 1
    if text_of_error[0] == 200:
        assert counts.dead_letter == 1
        hostile.receive(f"{queue}/$DeadLetterQueue", 1, handle=52)
    bus.reload(queue)
    assert hostile.send_bytes(message(b"good"), 50) is None
    assert hostile.ask(queue, "peek-message", body)[0] == 200


@pytest.mark.parametrize("name", [*ROTTEN, *DUBIOUS])
def test_odd_property_maps_and_filters(
    bus: BusThread, hostile: HostileClient, target: RuleTarget, name: str
) -> None:
    """Rules that read, change and remove properties have an answer; siblings get their copies."""
    filters = [
        "k > 1 OR k LIKE 'x' OR k IS NULL",
        "EXISTS(k)",
        "1=1",
    ]
    for number, text in enumerate(filters):
        rule: dict[str, Value] = {
            "sql-filter": {"expression": text},
            "sql-rule-action": {"expression": "SET k = k + 1; REMOVE j; SET sys.Label = 'x'"},
        }
        assert target.add(rule, f"rule{number}")[0] == 200
    bus.subscription(target.topic, "sibling")
    if hostile.send_bytes(section({**ROTTEN, **DUBIOUS}[name]), 50) is not None:
        assert total(bus, target.topic).size_bytes == 0
    else:
        assert total(bus, path_of(target.topic, "sibling")).active == 1
        counts = total(bus, target.path)
        assert counts.active + counts.dead_letter >= 1
    before = total(bus, path_of(target.topic, "sibling")).active
    assert hostile.send_bytes(message(b"good"), 50) is None
    assert total(bus, path_of(target.topic, "sibling")).active == before + 1


def test_limits_of_properties(bus: BusThread, hostile: HostileClient, queue: str) -> None:
    hostile.attach_sender(queue, 50)
    too_large = "amqp:link:message-size-exceeded"

    def of(*sizes: int) -> bytes:
        values = {f"{number:03}": "v" * size for number, size in enumerate(sizes)}
        return section(encode_value(values))

    assert hostile.send_bytes(of(32_000), 50) is None
    assert hostile.send_bytes(of(32_800), 50) == too_large
    assert hostile.send_bytes(of(32_000, 31_000), 50) is None
    assert hostile.send_bytes(of(32_000, 32_000, 3_000), 50) == too_large
    assert total(bus, queue).active == 2


def peak_bytes() -> int:
    """Return the highest resident size since it was last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_300_mb_of_properties_in_many_frames(
    bus: BusThread, hostile: HostileClient, queue: str
) -> None:
    hostile.attach_sender(queue, 50)
    size = 300 << 20
    head = b"\0\x53\x74\xd1" + struct.pack(">II", size, 2) + KEY + b"\xb1"
    piece = b"x" * 60_000
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    delivery_id = hostile.next_id()
    hostile.write(
        hostile.transfer(delivery_id, head + struct.pack(">I", size), handle=50, more=True)
    )
    for _ in range(size // len(piece)):
        hostile.write(hostile.transfer(delivery_id, piece, handle=50, more=True))
    hostile.write(hostile.transfer(delivery_id, piece, handle=50))
    text_of_error = hostile.read()
    while text_of_error.code == FLOW:
        text_of_error = hostile.read()
    error = (
        text_of_error.fields[4].value[0]
        if text_of_error.code == DISPOSITION
        else text_of_error.fields[2]
    )
    assert str(error.value[0]) == "amqp:link:message-size-exceeded"
    assert peak_bytes() - before < 32 << 20
    assert total(bus, queue).active == 0


def test_many_messages_of_too_many_properties(
    bus: BusThread, hostile: HostileClient, queue: str
) -> None:
    """100 MB of them, each refused, none kept."""
    hostile.attach_sender(queue, 50)
    payload = section(encode_value({f"{number}": "v" * 32_000 for number in range(3)}))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    for _ in range(100):
        ids = [hostile.next_id() for _ in range(10)]
        for each in ids:
            hostile.write(
                hostile.transfer(each, payload[:60_000], handle=50, more=True),
                hostile.transfer(each, payload[60_000:], handle=50),
            )
        assert set(hostile.dispositions(10).values()) == {REJECTED}
    assert peak_bytes() - before < 48 << 20
    assert total(bus, queue).active == 0


def test_batches_of_broken_messages(bus: BusThread, hostile: HostileClient, queue: str) -> None:
    """One member that is no message refuses the whole batch."""
    hostile.attach_sender(queue, 50)
    good = message(b"good")
    for bad in (b"\xff", section(BROKEN["size of 4 GB"]), good[:-3]):
        batch = b"".join(encode_value(Described(Ulong(0x75), each)) for each in (good, bad, good))
        delivery_id = hostile.next_id()
        hostile.write(hostile.transfer(delivery_id, batch, handle=50, message_format=0x8001_3700))
        assert int(hostile.state_of(delivery_id).descriptor) == REJECTED, bad
    assert total(bus, queue).active == 0
