"""Input that is wrong on purpose: the documented error, for the message or the link alone.

Every test ends by using another link of the same connection: it has to go on as if nothing were.
"""

from __future__ import annotations

import contextlib
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.message.codec import (
    Array,
    Described,
    Int,
    Symbol,
    Timestamp,
    Ubyte,
    Uint,
    Ulong,
    Value,
    decode_value,
    encode_value,
)
from tests.edge.bus_thread import BusThread
from tests.edge.raw_client import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    FLOW,
    MODIFIED,
    REJECTED,
    TRANSFER,
    described,
    frame,
    message,
)
from tests.edge.sdk_steps import path_of, total
from tests.edge.test_transactions import (
    COORDINATOR,
    DECLARE,
    DISCHARGE,
    TRANSACTIONAL,
    TransactionClient,
    complete,
    condition,
)

pytestmark = pytest.mark.slow

FILTER = Symbol("com.microsoft:session-filter")
RETRYABLE = {"com.microsoft:server-busy", "com.microsoft:timeout", "amqp:internal-error"}
WITNESS, ANSWERS, REQUESTS = 0, 100, 200


class HostileClient(TransactionClient):
    """Asks wrong things on links of its own, beside one link that behaves."""

    def __init__(self, bus: BusThread) -> None:
        super().__init__(bus)
        self._bus = bus
        self._nodes: list[str] = []
        self.witness = bus.queue()
        self.attach_sender(self.witness, WITNESS)
        self._sent = 0

    def check(self) -> None:
        """Show that the connection and its other links go on."""
        delivery_id = self.next_id()
        self.write(self.transfer(delivery_id, message(b"witness"), handle=WITNESS))
        assert int(self.state_of(delivery_id).descriptor) == ACCEPTED
        self._sent += 1
        assert self._bus.counts(self.witness).active == self._sent

    def ask(
        self, path: str, operation: str, body: Value, **properties: Value
    ) -> tuple[int, str, Value]:
        """Send a management request; return status, condition or text, and body."""
        if path not in self._nodes:
            self._nodes.append(path)
            number = self._nodes.index(path)
            node = f"{path}/$management"
            self.attach_receiver(node, ANSWERS + number)
            self.attach_sender(node, REQUESTS + number)
            self.write(self.flow(10_000, handle=ANSWERS + number))
        number = self._nodes.index(path)
        said = {"operation": f"com.microsoft:{operation}", **properties}
        payload = (
            encode_value(described(0x73, "id", None, None, None, "answers"))
            + encode_value(Described(Ulong(0x74), said))
            + encode_value(Described(Ulong(0x77), body))
        )
        delivery_id, handle = self.next_id(), REQUESTS + number
        self.write_in_frames(delivery_id, payload, handle, settled=True)
        answer = self.answer()
        _, at = decode_value(answer)
        found, at = decode_value(answer, at)
        body, _ = decode_value(answer, at)
        status = int(found.value["statusCode"])
        if status >= 300:
            assert isinstance(found.value["errorCondition"], Symbol)
            assert "TrackingId" in found.value["statusDescription"]
            return status, str(found.value["errorCondition"]), found.value["statusDescription"]
        return status, "", body.value

    def write_in_frames(
        self, delivery_id: int, payload: bytes, handle: int, *, settled: bool = False
    ) -> None:
        ends = range(30_000, len(payload) + 30_000, 30_000)
        for end in ends:
            piece, more = payload[end - 30_000 : end], end < len(payload)
            self.write(self.transfer(delivery_id, piece, handle=handle, settled=settled, more=more))

    def answer(self) -> bytes:
        """Read one whole message."""
        payload = b""
        while True:
            part = self.expect(TRANSFER)
            payload += part.payload
            if not part.fields[5]:
                return payload

    def send_bytes(self, payload: bytes, handle: int) -> str | None:
        """Send a message; return what it was refused with, None when it was accepted."""
        delivery_id = self.next_id()
        self.write_in_frames(delivery_id, payload, handle)
        state = self.state_of(delivery_id)
        if int(state.descriptor) == ACCEPTED:
            return None
        assert int(state.descriptor) == REJECTED
        name, text, _ = state.value[0].value
        assert "TrackingId" in text
        assert str(name) not in RETRYABLE
        return str(name)


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
    """A subscription whose rules are attacked."""

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
        """Show that there are so many rules and that publishing works."""
        _, _, found = self._hostile.ask(self.path, "enumerate-rules", {"top": 100, "skip": 0})
        assert len(found["rules"]) == rules
        assert self._hostile.send_bytes(message(b"m"), 50) is None
        self._published += 1
        assert total(self._bus, self.path).active == self._published


@pytest.fixture
def target(bus: BusThread, hostile: HostileClient) -> RuleTarget:
    return RuleTarget(bus, hostile)


def test_bad_filters_are_explained(target: RuleTarget) -> None:
    for text in BAD_SQL:
        status, name, told = target.add({"sql-filter": {"expression": text}})
        assert status == 400, (text, status, told)
        assert name not in RETRYABLE
        assert "line" in told, (text, told)
        assert "column" in told, (text, told)
    assert "line 3" in told
    target.check()


def test_filters_at_the_edge_of_the_grammar_harm_nobody(target: RuleTarget) -> None:
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
        status, _, told = target.add({"sql-filter": {"expression": text}})
        assert status in {200, 400}, (text, told)
        target.check(2 if status == 200 else 1)
        if status == 200:
            status, _, _ = target._hostile.ask(target.path, "remove-rule", {"rule-name": "hostile"})
            assert status == 200


@pytest.mark.parametrize("description", BAD_DESCRIPTIONS, ids=lambda each: repr(each)[:70])
def test_descriptions_that_are_none(target: RuleTarget, description: Value) -> None:
    status, name, told = target.add(description)
    assert status == 400, told
    assert name not in RETRYABLE
    target.check()


def test_rule_names_that_are_none(target: RuleTarget) -> None:
    for name in (None, "", 7, [], {}, "a/b", "x" * 51, "a\0b", "\ud7ff", "a b", "$Other"):
        status, _, told = target.add(TRUE, name)
        assert status == 400, (name, told)
    assert target.add(TRUE, "$Default")[0] == 409
    assert target.add(TRUE, "x" * 50)[0] == 200
    target.check(rules=2)


def test_huge_correlation_filters(target: RuleTarget) -> None:
    """There is no limit of its own; what is taken works, what is not is refused shortly."""
    taken = 1
    for number, properties in enumerate(
        (
            {f"key{number}": "value" for number in range(30_000)},
            {"key": "v" * 1_000_000},
            {"k" * 1_000_000: 1},
        )
    ):
        description = {"correlation-filter": {"properties": properties}}
        status, name, told = target.add(description, f"huge{number}")
        assert status in {200, 400, 403}, (number, status)
        assert name not in RETRYABLE
        taken += status == 200
        assert status == 200 or len(told) < 10_000
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
    told = hostile.read()
    while told.code == FLOW:
        told = hostile.read()
    error = told.fields[4].value[0] if told.code == DISPOSITION else told.fields[2]
    assert str(error.value[0]) == "amqp:link:message-size-exceeded"
    target.check()


# --- properties of messages -----------------------------------------------------------------------


def section(payload: bytes) -> bytes:
    """Put bytes where the map of application properties belongs, and a body behind it."""
    return b"\0\x53\x74" + payload + message(b"m")


def map32(count: int, payload: bytes, size: int | None = None) -> bytes:
    return b"\xd1" + struct.pack(">II", len(payload) + 4 if size is None else size, count) + payload


KEY, ONE = encode_value("k"), encode_value(1)
NESTED = b"\xc0\x04\x02\xa1\x01k" * 40  # each a map that says it holds more

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
"""Sections that cannot be told from what follows, or that are no maps: no message at all."""

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
"""Maps whose inside is wrong."""

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
def test_odd_property_maps_are_refused_or_harm_nobody(
    bus: BusThread, hostile: HostileClient, queue: str, name: str
) -> None:
    """A queue may take what it need not read; whoever reads it later has an answer too.

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
    told = settle(
        hostile, queue, token, **{"disposition-status": "suspended", "deadletter-reason": "why"}
    )
    assert told[0] in {200, 400}
    counts = total(bus, queue)
    assert counts.active + counts.dead_letter == 1
    if told[0] == 200:
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
    told = hostile.read()
    while told.code == FLOW:
        told = hostile.read()
    error = told.fields[4].value[0] if told.code == DISPOSITION else told.fields[2]
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


# --- transactions ---------------------------------------------------------------------------------


def test_wrong_transaction_ids(bus: BusThread, hostile: HostileClient, queue: str) -> None:
    hostile.attach_sender(queue, 50)
    unknown = "amqp:transaction:unknown-id"
    with TransactionClient(bus) as other:
        foreign = other.declare()
        for wrong in (b"", b"x", b"x" * 32, b"x" * 33, b"x" * 50_000, foreign):
            too_large = len(wrong) > 1_000
            told = condition(hostile.discharge(wrong))
            assert told == ("amqp:link:message-size-exceeded" if too_large else unknown)
            assert condition(hostile.send_in(wrong, message(b"m"), handle=50)) == unknown
        assert int(other.discharge(foreign).descriptor) == ACCEPTED
    used = hostile.declare()
    assert int(hostile.discharge(used).descriptor) == ACCEPTED
    assert condition(hostile.discharge(used)) == unknown
    assert condition(hostile.send_in(used, message(b"m"), handle=50)) == unknown
    assert total(bus, queue).active == 0


@pytest.mark.parametrize(
    "wrong", [None, "text", 7, [], {}, uuid.UUID(int=7)], ids=lambda each: repr(each)[:20]
)
def test_transaction_ids_of_wrong_types(
    bus: BusThread, hostile: HostileClient, queue: str, wrong: Value
) -> None:
    hostile.attach_sender(queue, 50)
    assert condition(hostile.request(DISCHARGE, wrong, False)) not in RETRYABLE
    delivery_id = hostile.next_id()
    hostile.write(
        frame(
            TRANSFER, Uint(50), Uint(delivery_id), b"tag", Uint(0), False, False, None,
            described(TRANSACTIONAL, wrong, None), payload=message(b"m"),
        )
    )  # fmt: skip
    assert condition(hostile.state_of(delivery_id)) not in RETRYABLE
    assert int(hostile.request(DECLARE, None).descriptor) == 0x33
    assert total(bus, queue).active == 0


def test_odd_requests_to_the_coordinator(hostile: HostileClient) -> None:
    mine = hostile.declare()
    for odd in (described(DISCHARGE), described(DECLARE, mine, mine), described(0x99)):
        body = encode_value(Described(Ulong(0x77), odd))
        delivery_id = hostile.next_id()
        hostile.write(hostile.transfer(delivery_id, body, handle=COORDINATOR))
        assert condition(hostile.state_of(delivery_id)) not in RETRYABLE
    assert int(hostile.request(DECLARE, None).descriptor) == 0x33


def test_a_foreign_transaction_does_not_settle(
    bus: BusThread, hostile: HostileClient, queue: str
) -> None:
    hostile.attach_sender(queue, 50)
    assert hostile.send_bytes(message(b"m"), 50) is None
    (taken,) = hostile.receive(queue, 1, handle=51)
    with TransactionClient(bus) as other:
        foreign = other.declare()
        refused = hostile.settle_in(foreign, int(taken.fields[1]), complete())
        assert condition(refused) == "amqp:transaction:unknown-id"
        other.discharge(foreign)
    assert total(bus, queue).active == 1


def test_very_many_transactions_are_open(hostile: HostileClient) -> None:
    """A client may forget to discharge: it is told at some point, or all of them work."""
    opened: list[bytes] = []
    for _ in range(2_000):
        state = hostile.request(DECLARE, None)
        if int(state.descriptor) == REJECTED:
            assert condition(state)
            break
        opened.append(bytes(state.value[0]))
    assert len(set(opened)) == len(opened) > 0
    assert int(hostile.discharge(opened[0]).descriptor) == ACCEPTED


# --- settlements ----------------------------------------------------------------------------------


class Locked:
    """A queue with one locked message, and its token."""

    def __init__(self, bus: BusThread, hostile: HostileClient, handle: int = 50) -> None:
        self.queue = bus.queue()
        hostile.attach_sender(self.queue, handle)
        assert hostile.send_bytes(message(b"m"), handle) is None
        (self.frame,) = hostile.receive(self.queue, 1, handle=handle + 1)
        self.delivery_id = int(self.frame.fields[1])
        self.token = uuid.UUID(bytes_le=bytes(self.frame.fields[2]))


def settle(hostile: HostileClient, path: str, *tokens: Value, **said: Value) -> tuple[int, str]:
    body = {"disposition-status": "completed", "lock-tokens": list(tokens), **said}
    status, name, _ = hostile.ask(path, "update-disposition", body)
    return status, name


LOST = (410, "com.microsoft:message-lock-lost")


def test_foreign_and_stale_tokens(bus: BusThread, hostile: HostileClient) -> None:
    one, two = Locked(bus, hostile, 50), Locked(bus, hostile, 60)
    assert settle(hostile, one.queue, two.token) == LOST
    assert settle(hostile, one.queue, uuid.uuid4()) == LOST
    assert settle(hostile, one.queue, uuid.UUID(int=0)) == LOST
    assert settle(hostile, one.queue, uuid.UUID(int=(1 << 128) - 1)) == LOST
    assert settle(hostile, one.queue, *(uuid.uuid4() for _ in range(3_000))) == LOST
    assert settle(hostile, f"{one.queue}/$DeadLetterQueue", one.token) == LOST
    assert hostile.ask(one.queue, "renew-lock", {"lock-tokens": [two.token]})[:2] == LOST
    assert hostile.ask(one.queue, "renew-lock", {"lock-tokens": [one.token, two.token]})[0] == 410
    assert total(bus, one.queue).active == total(bus, two.queue).active == 1
    assert settle(hostile, one.queue, one.token) == (200, "")
    assert settle(hostile, one.queue, one.token) == LOST
    bus.advance(61_000)
    assert settle(hostile, two.queue, two.token) == LOST
    bus.reload(two.queue)
    assert settle(hostile, two.queue, two.token) == LOST
    assert (total(bus, one.queue).active, total(bus, two.queue).active) == (0, 1)


def test_tokens_that_are_none(bus: BusThread, hostile: HostileClient) -> None:
    locked = Locked(bus, hostile)
    for tokens in (None, "text", 7, {}, ["text"], [7], [None], [b"x" * 16], [[locked.token]]):
        for operation in ("update-disposition", "renew-lock"):
            body = {"disposition-status": "completed", "lock-tokens": tokens}
            status, name, told = hostile.ask(locked.queue, operation, body)
            assert status == 400, (tokens, told)
            assert name not in RETRYABLE
    for status_text in (None, 7, "", "COMPLETE ", "odd", b"completed", ["completed"]):
        body = {"disposition-status": status_text, "lock-tokens": [locked.token]}
        assert hostile.ask(locked.queue, "update-disposition", body)[0] == 400, status_text
    assert settle(hostile, locked.queue, locked.token) == (200, "")


@pytest.mark.parametrize(
    "changes",
    ["text", 7, [1], {7: 1}, {"k": [1]}, {"k": "v" * 70_000}, {"k" * 70_000: 1}],
    ids=lambda each: repr(each)[:20],
)
def test_odd_changes_of_properties_at_a_settlement(
    bus: BusThread, hostile: HostileClient, changes: Value
) -> None:
    locked = Locked(bus, hostile)
    body: dict[str, Value] = {
        "disposition-status": "abandoned",
        "lock-tokens": [locked.token],
        "properties-to-modify": changes,
    }
    status, name, told = hostile.ask(locked.queue, "update-disposition", body)
    assert status in {400, 403}, told
    assert name not in RETRYABLE
    assert settle(hostile, locked.queue, locked.token) == (200, "")
    assert total(bus, locked.queue).active == 0


def test_reasons_that_are_too_long(bus: BusThread, hostile: HostileClient) -> None:
    locked = Locked(bus, hostile)
    status, _ = settle(
        hostile, locked.queue, locked.token,
        **{"disposition-status": "suspended", "deadletter-reason": "r" * 300_000},
    )  # fmt: skip
    assert status in {200, 400, 403}
    counts = total(bus, locked.queue)
    assert counts.active + counts.dead_letter == 1


def test_dispositions_of_deliveries_that_never_were(bus: BusThread, hostile: HostileClient) -> None:
    locked = Locked(bus, hostile)
    first = locked.delivery_id
    for low, high in (
        (first + 1, first + 1),
        (first + 1, first + 100_000),
        (first + 2, (first + (1 << 31) - 5) & 0xFFFF_FFFF),
    ):
        hostile.write(frame(DISPOSITION, True, Uint(low), Uint(high), True, described(ACCEPTED)))
        hostile.check()
    assert total(bus, locked.queue).active == 1
    hostile.write(frame(DISPOSITION, True, Uint(first), None, False, described(ACCEPTED)))
    assert int(hostile.state_of(first).descriptor) == ACCEPTED
    hostile.write(frame(DISPOSITION, True, Uint(first), None, False, described(ACCEPTED)))
    assert condition(hostile.state_of(first)) == "com.microsoft:message-lock-lost"
    assert total(bus, locked.queue).active == 0


def test_odd_outcomes(bus: BusThread, hostile: HostileClient) -> None:
    """An outcome nobody knows, or one with odd fields, loses no message."""
    for state in (
        described(0x99),
        described(MODIFIED, "yes", 7, [1]),
        described(REJECTED, "text"),
        described(REJECTED, described(0x1D, Symbol("odd"), "t" * 50_000, {Symbol("k"): "v"})),
        described(ACCEPTED, 1, 2, 3),
        described(TRANSACTIONAL),
    ):
        with HostileClient(bus) as mine:
            locked = Locked(bus, mine)
            mine.write(frame(DISPOSITION, True, Uint(locked.delivery_id), None, False, state))
            mine.socket.settimeout(1.0)
            with contextlib.suppress(TimeoutError, AssertionError):
                mine.read()
        counts = total(bus, locked.queue)
        settled = int(state.descriptor) == ACCEPTED
        assert counts.active + counts.dead_letter == 1 or (settled and counts.active == 0), state


# --- sessions -------------------------------------------------------------------------------------


def in_session(session_id: Value, body: bytes = b"m", key: Value = None) -> bytes:
    annotations = {} if key is None else {Symbol("x-opt-partition-key"): key}
    return (
        encode_value(Described(Ulong(0x72), annotations))
        + encode_value(described(0x73, *[None] * 10, session_id))
        + encode_value(Described(Ulong(0x75), body))
    )


@pytest.mark.parametrize("is_spread", [False, True])
def test_ids_of_128_and_129_characters(
    bus: BusThread, hostile: HostileClient, is_spread: bool
) -> None:
    sessions = bus.queue(requires_session=True, enable_partitioning=is_spread)
    plain = bus.queue(enable_partitioning=is_spread)
    hostile.attach_sender(sessions, 50)
    hostile.attach_sender(plain, 51)
    for longest in ("s" * 128, "\u00e4" * 128):
        assert hostile.send_bytes(in_session(longest), 50) is None
        assert hostile.send_bytes(in_session(longest + "ss"), 50) is not None
        assert hostile.send_bytes(in_session(None, key=longest), 51) is None
        assert hostile.send_bytes(in_session(None, key=longest + "ss"), 51) is not None
        with_id = encode_value(described(0x73, longest)) + message(b"m")
        assert hostile.send_bytes(with_id, 51) is None
        too_long = encode_value(described(0x73, longest + "ss")) + message(b"m")
        assert hostile.send_bytes(too_long, 51) is not None
    assert hostile.send_bytes(in_session("s" * 100_000), 50) is not None
    assert hostile.attach_receiver(sessions, 60, filters={FILTER: "s" * 128}).fields[5] is not None
    attached = hostile.attach_receiver(sessions, 61, filters={FILTER: "s" * 129})
    assert attached.fields[5] is None
    assert str(hostile.expect(DETACH).fields[2].value[0]) not in RETRYABLE
    assert total(bus, sessions).active == 3
    assert total(bus, plain).active == 6


WRONG_FILTERS: list[Value] = [
    7,
    True,
    b"binary",
    ["s"],
    {"s": 1},
    uuid.UUID(int=7),
    Timestamp(1),
    Described(Ulong(0x99), "s"),
    Described(Ulong(0x0000_0013_7000_000C), 7),
    Described(Ulong(0x0000_0013_7000_000E), ["s", uuid.UUID(int=7)]),
    "s" * 50_000,
]


@pytest.mark.parametrize("value", WRONG_FILTERS, ids=lambda each: repr(each)[:40])
def test_session_filters_of_wrong_types(
    bus: BusThread, hostile: HostileClient, value: Value
) -> None:
    queue = bus.queue(requires_session=True)
    attached = hostile.attach_receiver(queue, 70, filters={FILTER: value})
    assert attached.fields[5] is None
    assert str(hostile.expect(DETACH).fields[2].value[0]) not in RETRYABLE
    hostile.check()
    assert hostile.attach_receiver(queue, 69, filters={FILTER: "s"}).fields[5] is not None


def test_filters_nobody_knows_select_nothing_away(
    bus: BusThread, hostile: HostileClient, queue: str
) -> None:
    """They are refused, or ignored and not echoed; never a receiver that gets the wrong things."""
    unknown = Described(Symbol("apache.org:selector-filter:string"), "color = 'red'")
    attached = hostile.attach_receiver(
        queue, 70, filters={Symbol("apache.org:selector-filter:string"): unknown}
    )
    if attached.fields[5] is None:
        assert str(hostile.expect(DETACH).fields[2].value[0]) not in RETRYABLE


def test_session_requests_that_are_wrong(bus: BusThread, hostile: HostileClient) -> None:
    queue = bus.queue(requires_session=True)
    hostile.attach_sender(queue, 50)
    assert hostile.send_bytes(in_session("s"), 50) is None
    hostile.attach_receiver(queue, 60, filters={FILTER: "s"})
    lost = (410, "com.microsoft:session-lock-lost")
    for other in ("other", "", "s" * 128):
        assert hostile.ask(queue, "get-session-state", {"session-id": other})[:2] == lost
        assert hostile.ask(queue, "renew-session-lock", {"session-id": other})[:2] == lost
    for wrong in (None, 7, b"s", [], "s" * 129):
        for operation in ("get-session-state", "set-session-state", "renew-session-lock"):
            body: dict[str, Value] = {"session-id": wrong, "session-state": b"x"}
            status, name, told = hostile.ask(queue, operation, body)
            assert status in {400, 410}, (operation, wrong, told)
            assert name not in RETRYABLE
    for state in ("text", 7, [], {}):
        body = {"session-id": "s", "session-state": state}
        assert hostile.ask(queue, "set-session-state", body)[0] == 400, state
    limit = 256 * 1024
    body = {"session-id": "s", "session-state": b"x" * (limit + 1)}
    status, name, _ = hostile.ask(queue, "set-session-state", body)
    assert (status, name) == (403, "amqp:link:message-size-exceeded")
    body = {"session-id": "s", "session-state": b"x" * limit}
    assert hostile.ask(queue, "set-session-state", body)[0] == 200
    _, _, found = hostile.ask(queue, "get-session-state", {"session-id": "s"})
    assert found["session-state"] == b"x" * limit


def test_a_session_held_by_another_connection_is_not_ours(
    bus: BusThread, hostile: HostileClient
) -> None:
    queue = bus.queue(requires_session=True)
    hostile.attach_sender(queue, 50)
    assert hostile.send_bytes(in_session("s"), 50) is None
    with TransactionClient(bus) as holder:
        holder.attach_receiver(queue, 1, filters={FILTER: "s"})
        holder.write(holder.flow(1))
        taken = holder.expect(TRANSFER)
        token = uuid.UUID(bytes_le=bytes(taken.fields[2]))
        refused = hostile.attach_receiver(queue, 60, filters={FILTER: "s"})
        assert refused.fields[5] is None
        error = hostile.expect(DETACH).fields[2].value[0]
        assert str(error) == "com.microsoft:session-cannot-be-locked"
        for operation in ("get-session-state", "renew-session-lock"):
            assert hostile.ask(queue, operation, {"session-id": "s"})[0] == 410
        assert hostile.ask(queue, "renew-lock", {"lock-tokens": [token]})[0] in {400, 410}
        assert total(bus, queue).active == 1
        delivery_id = Uint(int(taken.fields[1]))
        holder.write(frame(DISPOSITION, True, delivery_id, None, False, described(ACCEPTED)))
        assert int(holder.state_of(int(delivery_id)).descriptor) == ACCEPTED
    assert total(bus, queue).active == 0


# --- requests -------------------------------------------------------------------------------------

WRONG_REQUESTS: list[tuple[str, Value]] = [
    ("peek-message", {"from-sequence-number": -1, "message-count": -1}),
    ("peek-message", {"from-sequence-number": "1", "message-count": 1}),
    ("peek-message", {"from-sequence-number": 1, "message-count": "many"}),
    ("peek-message", {"from-sequence-number": 1, "message-count": 1, "session-id": 7}),
    ("receive-by-sequence-number", {"sequence-numbers": "1"}),
    ("receive-by-sequence-number", {"sequence-numbers": ["1"]}),
    ("receive-by-sequence-number", {"sequence-numbers": [1], "receiver-settle-mode": Uint(9)}),
    ("cancel-scheduled-message", {"sequence-numbers": [None]}),
    ("cancel-scheduled-message", {}),
    ("schedule-message", {}),
    ("schedule-message", {"messages": "text"}),
    ("schedule-message", {"messages": [7]}),
    ("schedule-message", {"messages": [{}]}),
    ("schedule-message", {"messages": [{"message": "text"}]}),
    ("batch-delete-messages", {"message-count": -1}),
    ("batch-delete-messages", {"message-count": "1"}),
    ("get-message-sessions", {"skip": -1, "top": -1, "last-updated-time": Timestamp(0)}),
    ("get-message-sessions", {"skip": "0", "top": 1}),
    ("enumerate-rules", {"top": "x"}),
    ("add-rule", {}),
    ("remove-rule", {}),
    ("peek-message", None),
    ("peek-message", "text"),
    ("peek-message", [1, 2]),
    ("peek-message", {1: 2}),
]


@pytest.mark.parametrize(("operation", "body"), WRONG_REQUESTS, ids=lambda each: repr(each)[:60])
def test_wrong_requests_are_answered(
    bus: BusThread, hostile: HostileClient, queue: str, operation: str, body: Value
) -> None:
    hostile.attach_sender(queue, 50)
    assert hostile.send_bytes(message(b"m"), 50) is None
    status, name, told = hostile.ask(queue, operation, body)
    assert 400 <= status < 500, told
    assert name not in RETRYABLE
    assert total(bus, queue).active == 1


def test_unknown_operations_are_answered(hostile: HostileClient, queue: str) -> None:
    for operation in ("", "no-such-thing", "x" * 50_000, "peek-message\0"):
        status, name, _ = hostile.ask(queue, operation, {})
        assert (status, name) == (501, "amqp:not-implemented"), operation


def test_large_numbers_in_requests(bus: BusThread, hostile: HostileClient, queue: str) -> None:
    hostile.attach_sender(queue, 50)
    assert hostile.send_bytes(message(b"m"), 50) is None
    largest = (1 << 63) - 1
    body: dict[str, Value] = {"from-sequence-number": largest, "message-count": 5}
    assert hostile.ask(queue, "peek-message", body)[0] in {200, 204}
    body = {"from-sequence-number": 0, "message-count": (1 << 31) - 1}
    status, _, found = hostile.ask(queue, "peek-message", body)
    assert status == 200
    assert len(found["messages"]) == 1
    many = {"sequence-numbers": list(range(1, 50_001))}
    assert hostile.ask(queue, "cancel-scheduled-message", many)[0] in {400, 404}
    assert hostile.ask(queue, "receive-by-sequence-number", many)[0] in {400, 404}
    for number in (0, -1, largest, -largest - 1):
        for operation in ("cancel-scheduled-message", "receive-by-sequence-number"):
            assert hostile.ask(queue, operation, {"sequence-numbers": [number]})[0] == 404
    assert total(bus, queue).active == 1


def test_attaches_to_odd_addresses(hostile: HostileClient) -> None:
    addresses = [
        "",
        "/",
        "a//b",
        "x" * 300,
        "x" * 50_000,
        "\0",
        "a\nb",
        "%ff%fe",
        "../../etc",
        "$cbs/$management",
        "$management",
        "q/$DeadLetterQueue/$DeadLetterQueue",
        "topic/Subscriptions/",
    ]
    for number, address in enumerate(addresses):
        for attach, terminus in ((hostile.attach_sender, 6), (hostile.attach_receiver, 5)):
            attached = attach(address, 300 + 2 * number + terminus % 2)
            if attached.fields[terminus] is None:
                error = hostile.expect(DETACH).fields[2]
                assert str(error.value[0]) not in RETRYABLE, address[:40]
    hostile.check()


def test_odd_termini(hostile: HostileClient, queue: str) -> None:
    for number, target in enumerate(
        (None, described(0x29), described(0x29, 7), described(0x29, None, *[None] * 3, True))
    ):
        hostile.write(
            frame(
                ATTACH, f"odd{number}", Uint(400 + number), False, Ubyte(0), Ubyte(0),
                described(0x28, "here"), target, None, None, Uint(0),
            )
        )  # fmt: skip
        told = hostile.expect(ATTACH)
        assert told.fields[6] is None
        assert str(hostile.expect(DETACH).fields[2].value[0]) not in RETRYABLE
    hostile.check()
