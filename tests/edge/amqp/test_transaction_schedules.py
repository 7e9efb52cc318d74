"""Messages that a transaction schedules: numbered at once, there when it commits, else never."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient

from postbus.message.codec import (
    Array,
    Described,
    Int,
    Symbol,
    Timestamp,
    Uint,
    Ulong,
    encode_value,
)
from postbus.message.sections import slice_message
from tests.edge.amqp.test_transactions import TRANSACTIONAL, TransactionClient
from tests.edge.amqp.test_wire import response_parts
from tests.edge.bus_thread import BusThread
from tests.edge.raw_client import ACCEPTED, REJECTED, TRANSFER, described, frame, message

pytestmark = pytest.mark.slow

HOUR_MS = 3_600_000
RESPONSES, REQUESTS = 21, 20


class ScheduleClient(TransactionClient):
    """A client with links to the management node of one entity."""

    def open_node(self, entity: str) -> None:
        self.attach_receiver(f"{entity}/$management", RESPONSES)
        self.attach_sender(f"{entity}/$management", REQUESTS)
        self.write(self.flow(100, handle=RESPONSES))

    def ask(
        self, transaction_id: bytes, operation: str, body: dict[str, Any]
    ) -> tuple[int, dict[Any, Any] | None, str]:
        """Return status, body and description of a request in a transaction."""
        payload = (
            encode_value(described(0x73, "id", None, None, None, "answers"))
            + encode_value(Described(Ulong(0x74), {"operation": f"com.microsoft:{operation}"}))
            + encode_value(Described(Ulong(0x77), body))
        )
        delivery_id = self.next_id()
        state = described(TRANSACTIONAL, transaction_id, None)
        self.write(
            frame(
                TRANSFER, Uint(REQUESTS), Uint(delivery_id), delivery_id.to_bytes(4, "big"),
                Uint(0), True, False, None, state, payload=payload,
            )
        )  # fmt: skip
        _, properties, answer = response_parts(self.expect(TRANSFER))
        assert answer is None or isinstance(answer, dict)
        return int(str(properties["statusCode"])), answer, str(properties["statusDescription"])

    def schedule(
        self, transaction_id: bytes, due_ms: int | None, *names: str, key: str | None = None
    ) -> list[int]:
        entries = [{"message": scheduled(name, due_ms, key)} for name in names]
        status, body, why = self.ask(transaction_id, "schedule-message", {"messages": entries})
        assert status == 200, why
        assert body is not None
        return [int(each) for each in body["sequence-numbers"].items]


def scheduled(name: str, due_ms: int | None, key: str | None = None) -> bytes:
    annotations: dict[Symbol, Any] = {}
    if due_ms is not None:
        annotations[Symbol("x-opt-scheduled-enqueue-time")] = Timestamp(due_ms)
    if key is not None:
        annotations[Symbol("x-opt-partition-key")] = key
    return encode_value(Described(Ulong(0x72), annotations)) + message(name.encode(), name)


@pytest.fixture
def robot(bus: BusThread) -> Iterator[ScheduleClient]:
    with ScheduleClient(bus) as opened:
        yield opened


def later_ms(bus: BusThread) -> int:
    return int(bus.now().timestamp() * 1_000) + HOUR_MS


def peeked(client: ServiceBusClient, queue: str) -> list[tuple[int, str]]:
    with client.get_queue_receiver(queue) as receiver:
        return [(int(each.sequence_number or 0), str(each)) for each in receiver.peek_messages(20)]


def test_a_commit_schedules_under_the_returned_numbers(
    bus: BusThread, robot: ScheduleClient, client: ServiceBusClient, queue: str
) -> None:
    robot.open_node(queue)
    transaction = robot.declare()
    first = robot.schedule(transaction, later_ms(bus), "a", "b")
    assert bus.counts(queue).scheduled == 0
    other = robot.declare()  # has later numbers and is there first
    second = robot.schedule(other, later_ms(bus), "c")
    assert int(robot.discharge(other).descriptor) == ACCEPTED
    assert int(robot.discharge(transaction).descriptor) == ACCEPTED
    expected = [*zip(first, "ab", strict=True), (second[0], "c")]
    assert peeked(client, queue) == expected
    with client.get_queue_sender(queue) as sender:
        sender.cancel_scheduled_messages(first[0])
    bus.reload(queue)
    assert peeked(client, queue) == expected[1:]
    bus.advance(HOUR_MS + 1)
    with client.get_queue_receiver(queue) as receiver:
        found = receiver.receive_messages(2, max_wait_time=5)
        assert [str(each) for each in found] == ["b", "c"]


def test_a_rollback_schedules_no_message_and_uses_up_its_numbers(
    bus: BusThread, robot: ScheduleClient, queue: str
) -> None:
    robot.open_node(queue)
    transaction = robot.declare()
    (number,) = robot.schedule(transaction, later_ms(bus), "a")
    assert int(robot.discharge(transaction, fail=True).descriptor) == ACCEPTED
    assert bus.counts(queue).scheduled == 0
    following = robot.declare()
    assert robot.schedule(following, later_ms(bus), "b") > [number]


def test_a_schedule_commits_with_a_settlement_of_the_same_queue(
    bus: BusThread, robot: ScheduleClient, queue: str
) -> None:
    robot.attach_sender(queue)
    robot.write(robot.transfer(robot.next_id(), message(b"x")))
    robot.dispositions(1)
    (found,) = robot.receive(queue, 1)
    robot.open_node(queue)
    transaction = robot.declare()
    robot.schedule(transaction, later_ms(bus), "a")
    robot.settle_in(transaction, int(found.fields[1]), described(ACCEPTED))
    assert int(robot.discharge(transaction).descriptor) == ACCEPTED
    assert (bus.counts(queue).scheduled, bus.counts(queue).active) == (1, 0)


def test_messages_due_by_the_commit_are_delivered_then(
    bus: BusThread, robot: ScheduleClient, client: ServiceBusClient, queue: str
) -> None:
    robot.open_node(queue)
    transaction = robot.declare()
    robot.schedule(transaction, later_ms(bus) - HOUR_MS + 2_000, "a")
    bus.advance(2_001)
    assert bus.counts(queue).active == 0
    assert int(robot.discharge(transaction).descriptor) == ACCEPTED
    with client.get_queue_receiver(queue) as receiver:
        (received,) = receiver.receive_messages(1, max_wait_time=5)
    assert str(received) == "a"


def test_a_topic_publishes_a_scheduled_message_when_due(
    bus: BusThread, robot: ScheduleClient, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    name = bus.subscription(topic).rpartition("/")[2]
    robot.open_node(topic)
    transaction = robot.declare()
    robot.schedule(transaction, later_ms(bus), "a")
    assert int(robot.discharge(transaction).descriptor) == ACCEPTED
    assert bus.counts(topic).scheduled == 1
    bus.advance(HOUR_MS + 1)
    with client.get_subscription_receiver(topic, name) as receiver:
        (received,) = receiver.receive_messages(1, max_wait_time=5)
    assert str(received) == "a"


@pytest.mark.parametrize("key", ["a", "b", "c"])
def test_a_partitioned_queue_numbers_by_the_partition_of_the_key(
    bus: BusThread, robot: ScheduleClient, client: ServiceBusClient, key: str
) -> None:
    queue = bus.queue(enable_partitioning=True)
    robot.open_node(queue)
    transaction = robot.declare()
    numbers = robot.schedule(transaction, later_ms(bus), "x", "y", key=key)
    assert int(robot.discharge(transaction).descriptor) == ACCEPTED
    assert peeked(client, queue) == [*zip(numbers, "xy", strict=True)]
    keyless = robot.declare()
    entries = {"messages": [{"message": scheduled("z", later_ms(bus))}]}
    status, _, why = robot.ask(keyless, "schedule-message", entries)
    assert (status, "needs a key" in why) == (400, True)


def test_another_entity_is_refused_and_fails_the_transaction(
    bus: BusThread, robot: ScheduleClient, queue: str
) -> None:
    other = bus.queue()
    robot.attach_sender(other)
    robot.open_node(queue)
    transaction = robot.declare()
    robot.send_in(transaction, message(b"x"))
    entries = {"messages": [{"message": scheduled("a", later_ms(bus))}]}
    status, _, why = robot.ask(transaction, "schedule-message", entries)
    assert status == 400
    assert "send the message with a scheduled enqueue time instead" in why
    assert int(robot.discharge(transaction).descriptor) == REJECTED
    assert bus.counts(other).active == 0


def test_a_settlement_of_another_partition_does_not_join_it(
    bus: BusThread, robot: ScheduleClient, queue: str
) -> None:
    """The returned numbers are valid in the partition they were taken in."""
    partitioned = bus.queue(enable_partitioning=True)
    robot.attach_sender(partitioned)
    robot.write(robot.transfer(robot.next_id(), scheduled("x", None, "a")))
    robot.dispositions(1)
    (found,) = robot.receive(partitioned, 1)
    robot.open_node(partitioned)
    key = next(
        key
        for key in "bcdefgh"
        if robot.schedule(robot.declare(), later_ms(bus), "n", key=key)[0] >> 48
        != int(slice_number(found.payload)) >> 48
    )
    transaction = robot.declare()
    robot.schedule(transaction, later_ms(bus), "a", key=key)
    state = robot.settle_in(transaction, int(found.fields[1]), described(ACCEPTED))
    assert int(state.descriptor) == REJECTED
    assert int(robot.discharge(transaction).descriptor) == REJECTED
    assert bus.counts(partitioned).scheduled == 0


def slice_number(payload: bytes) -> int:
    """Return the sequence number of a delivery."""
    at = payload.index(b"x-opt-sequence-number") + len(b"x-opt-sequence-number") + 1
    assert slice_message(payload).message_id is not None
    return int.from_bytes(payload[at : at + 8], "big")


@pytest.mark.parametrize(
    ("operation", "body", "status"),
    [
        ("schedule-message", {"messages": [{"message": scheduled("a", None)}]}, 400),
        ("schedule-message", {"messages": []}, 400),
        ("cancel-scheduled-message", {"sequence-numbers": []}, 501),
    ],
)
def test_a_transaction_refuses_unsupported_operations(
    robot: ScheduleClient, queue: str, operation: str, body: dict[str, Any], status: int
) -> None:
    robot.open_node(queue)
    assert robot.ask(robot.declare(), operation, body)[0] == status
    entries = {"messages": [{"message": scheduled("a", 1)}]}
    assert robot.ask(b"nobody's", "schedule-message", entries)[0] == 410


def test_reads_are_answered_in_a_transaction(
    bus: BusThread, robot: ScheduleClient, queue: str
) -> None:
    robot.attach_sender(queue)
    robot.write(robot.transfer(robot.next_id(), message(b"x")))
    robot.dispositions(1)
    (found,) = robot.receive(queue, 1)
    robot.open_node(queue)
    token = uuid.UUID(bytes_le=bytes(found.fields[2]))
    transaction = robot.declare()
    status, body, why = robot.ask(transaction, "renew-lock", {"lock-tokens": Array(0x98, [token])})
    assert (status, why) == (200, "OK")
    assert body is not None
    peek = {"from-sequence-number": 1, "message-count": Int(1)}
    assert robot.ask(transaction, "peek-message", peek)[0] == 200
    assert int(robot.discharge(transaction).descriptor) == ACCEPTED
