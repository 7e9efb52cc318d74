"""Requests, settlements and links that are wrong on purpose: the documented error, nothing lost.

Every test ends by using another link of the same connection: it has to go on as if nothing were.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import pytest
from azure.servicebus import ServiceBusClient

from postbus.message.codec import (
    Described,
    Symbol,
    Timestamp,
    Ubyte,
    Uint,
    Ulong,
    Value,
    encode_value,
)
from tests.edge.amqp.test_transactions import (
    COORDINATOR,
    DECLARE,
    DISCHARGE,
    TRANSACTIONAL,
    TransactionClient,
    complete,
    condition,
)
from tests.edge.bus_thread import BusThread
from tests.edge.hostile_client import RETRYABLE, HostileClient, settle
from tests.edge.raw_client import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    MODIFIED,
    REJECTED,
    TRANSFER,
    described,
    frame,
    message,
)
from tests.edge.sdk.sdk_steps import total

pytestmark = pytest.mark.slow

FILTER = Symbol("com.microsoft:session-filter")


@pytest.fixture
def hostile(bus: BusThread) -> Iterator[HostileClient]:
    with HostileClient(bus) as opened:
        yield opened
        opened.check()


# --- transactions ---------------------------------------------------------------------------------


def test_wrong_transaction_ids(bus: BusThread, hostile: HostileClient, queue: str) -> None:
    hostile.attach_sender(queue, 50)
    unknown = "amqp:transaction:unknown-id"
    with TransactionClient(bus) as other:
        foreign = other.declare()
        for wrong in (b"", b"x", b"x" * 32, b"x" * 33, b"x" * 50_000, foreign):
            too_large = len(wrong) > 1_000
            description = condition(hostile.discharge(wrong))
            assert description == ("amqp:link:message-size-exceeded" if too_large else unknown)
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
    for odd in (described(DISCHARGE), described(DISCHARGE, None), described(0x99)):
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
    """A client may forget to discharge: it gets an error at some point, or all of them work."""
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


def test_invalid_lock_tokens_are_refused(bus: BusThread, hostile: HostileClient) -> None:
    locked = Locked(bus, hostile)
    for tokens in (None, "text", 7, {}, ["text"], [7], [None], [b"x" * 16], [[locked.token]]):
        for operation in ("update-disposition", "renew-lock"):
            body = {"disposition-status": "completed", "lock-tokens": tokens}
            status, name, description = hostile.ask(locked.queue, operation, body)
            assert status == 400, (tokens, description)
            assert name not in RETRYABLE
    for status_text in (None, 7, "", "COMPLETE ", "odd", b"completed", ["completed"]):
        body = {"disposition-status": status_text, "lock-tokens": [locked.token]}
        assert hostile.ask(locked.queue, "update-disposition", body)[0] == 400, status_text
    assert settle(hostile, locked.queue, locked.token) == (200, "")


@pytest.mark.parametrize(
    "changes",
    ["text", 7, [1], {7: 1}, {"k": [1]}],
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
    status, name, description = hostile.ask(locked.queue, "update-disposition", body)
    assert status in {400, 403}, description
    assert name not in RETRYABLE
    assert settle(hostile, locked.queue, locked.token) == (200, "")
    assert total(bus, locked.queue).active == 0


@pytest.mark.behaviour("S259")
@pytest.mark.parametrize("changes", [{"k": "v" * 70_000}, {"k" * 70_000: 1}], ids=["value", "key"])
def test_changes_that_are_too_large_dead_letter_the_message(
    bus: BusThread, client: ServiceBusClient, hostile: HostileClient, changes: Value
) -> None:
    locked = Locked(bus, hostile)
    body: dict[str, Value] = {
        "disposition-status": "abandoned",
        "lock-tokens": [locked.token],
        "properties-to-modify": changes,
    }
    assert hostile.ask(locked.queue, "update-disposition", body)[0] == 200
    with client.get_queue_receiver(locked.queue, sub_queue="deadletter") as receiver:
        (dead,) = receiver.peek_messages(2)
    assert dead.dead_letter_reason == "HeaderSizeExceeded"
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


def test_dispositions_of_unknown_deliveries_are_harmless(
    bus: BusThread, hostile: HostileClient
) -> None:
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
    """An unknown outcome, or one with odd fields, loses no message."""
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
    assert total(bus, sessions).active == 2
    assert total(bus, plain).active == 4


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


def test_unknown_filters_are_refused_for_good(
    bus: BusThread, hostile: HostileClient, queue: str
) -> None:
    """They are refused: a receiver that ignores its filter would get other messages."""
    unknown = Described(Symbol("apache.org:selector-filter:string"), "color = 'red'")
    attached = hostile.attach_receiver(
        queue, 70, filters={Symbol("apache.org:selector-filter:string"): unknown}
    )
    assert attached.fields[5] is None
    assert str(hostile.expect(DETACH).fields[2].value[0]) not in RETRYABLE
    hostile.check()


def test_wrong_session_requests_are_refused(bus: BusThread, hostile: HostileClient) -> None:
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
            status, name, description = hostile.ask(queue, operation, body)
            assert status in {400, 410}, (operation, wrong, description)
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
    status, name, description = hostile.ask(queue, operation, body)
    assert 400 <= status < 500, description
    assert name not in RETRYABLE
    assert total(bus, queue).active == 1


def test_unknown_operations_are_answered(hostile: HostileClient, queue: str) -> None:
    for operation in ("", "no-such-thing", "x" * 50_000, "peek-message\0"):
        status, name, _ = hostile.ask(queue, operation, {})
        assert (status, name) == (501, "amqp:not-implemented"), operation


def test_messages_to_schedule_share_one_budget_of_values(
    bus: BusThread, hostile: HostileClient, queue: str
) -> None:
    """Each alone is within it; together they would block the event loop."""
    hostile.attach_sender(queue, 50)
    body = encode_value(Described(Ulong(0x77), [1] * 20_000))
    for count, statuses in ((2, {200}), (3, {400})):
        messages: Value = [
            {"message-id": f"{count}-{number}", "message": body} for number in range(count)
        ]
        status, _, description = hostile.ask(queue, "schedule-message", {"messages": messages})
        assert status in statuses, description


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
        description = hostile.expect(ATTACH)
        assert description.fields[6] is None
        assert str(hostile.expect(DETACH).fields[2].value[0]) not in RETRYABLE
    hostile.check()
