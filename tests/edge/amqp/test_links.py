"""Demand, drain, unsettled deliveries and idleness of links, seen at the socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage

from postbus.edge.access.shares import Limit, Shares
from postbus.edge.amqp import idleness, requests
from postbus.edge.amqp.demand_window import DemandLimits
from postbus.edge.amqp.idleness import Idleness
from postbus.edge.amqp.receiver_links import ReceiverEndpoint
from postbus.edge.amqp.requests import RequestEndpoint
from postbus.entity.commands import (
    Command,
    Enqueue,
    Reply,
    SetDemand,
)
from postbus.message.codec import Described, Ulong, encode_value
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import (
    ACCEPTED,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    TRANSFER,
    RawClient,
    described,
    frame,
    message,
)

ROOT = RULES[0]


@pytest.fixture
def raw(bus: BusThread) -> Iterator[RawClient]:
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        yield client


def fill(raw: RawClient, queue: str, count: int, size: int = 1, handle: int = 0) -> None:
    raw.attach_sender(queue, handle)
    body = message(b"x" * size)
    for start in range(0, count, 50):
        ids = range(start, min(start + 50, count))
        raw.write(*[raw.transfer(n, body, handle=handle) for n in ids])
        raw.dispositions(len(ids))


def settlement(first: int, last: int | None = None, *, settled: bool = False) -> bytes:
    return frame(DISPOSITION, True, first, last, settled, described(ACCEPTED))


def receiver_endpoints(bus: BusThread) -> list[ReceiverEndpoint]:
    connections = [each._connection for each in bus.listener._connections]
    endpoints = [
        endpoint
        for each in connections
        if each is not None
        for endpoint in each._endpoints.values()
    ]
    return [endpoint for endpoint in endpoints if isinstance(endpoint, ReceiverEndpoint)]


def wait_until(bus: BusThread, is_so: Callable[[], bool]) -> None:
    """Wait until something is so in the loop of the bus."""

    async def look() -> None:
        async with asyncio.timeout(10):
            while not is_so():
                await asyncio.sleep(0.001)

    bus.run(look())


async def some_rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def is_drain(command: Command) -> bool:
    return isinstance(command, SetDemand) and command.is_drain


class HeldBack:
    """Holds back drains, or other commands, like a busy partition."""

    def __init__(
        self,
        bus: BusThread,
        monkeypatch: pytest.MonkeyPatch,
        is_held: Callable[[Command], bool] = is_drain,
    ) -> None:
        self.held: list[Callable[[], None]] = []
        submit = bus.router.submit

        def hold(
            partition_id: int, command: Command, on_reply: Callable[[Reply], None] | None = None
        ) -> None:
            if is_held(command):
                self.held.append(lambda: submit(partition_id, command, on_reply))
            else:
                submit(partition_id, command, on_reply)

        monkeypatch.setattr(bus.router, "submit", hold)

    async def let_go(self) -> None:
        held, self.held = self.held, []
        for each in held:
            each()


# --- drain --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_drain_waits_for_a_client_that_does_not_read(
    bus: BusThread, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a drain means "no more messages"; it must not come while some wait."""
    monkeypatch.setattr(bus.listener, "demand_limits", DemandLimits(drain_s=10.0))
    queue = bus.queue()
    fill(raw, queue, 400, 50_000)
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as slow:
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        slow.attach_receiver(queue)
        slow.write(slow.flow(1_000, window=100_000))
        (endpoint,) = receiver_endpoints(bus)
        connection: Any = endpoint.connection
        wait_until(bus, lambda: connection.is_paused and endpoint._window.is_in_step(credit=0))
        slow.write(slow.flow(1_000, window=100_000, drain=True))
        wait_until(bus, lambda: endpoint._link.is_draining or endpoint._link.credit == 0)
        bus.run(some_rounds())
        assert endpoint._link.is_draining
        for _ in range(400):
            assert slow.read().code == TRANSFER
        answer = slow.read()
        assert answer.code == FLOW
        assert (answer.fields[5], answer.fields[6], answer.fields[8]) == (1_000, 0, True)


def test_late_drain_is_answered_and_the_link_goes_on(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(raw, queue, 5)
    raw.attach_receiver(queue)
    partition = HeldBack(bus, monkeypatch)
    raw.write(raw.flow(3, drain=True))
    answer = raw.read()
    assert (answer.code, answer.fields[5], answer.fields[6]) == (FLOW, 3, 0)
    assert len(partition.held) == 1
    raw.write(raw.flow(2, count=3))
    for _ in range(2):
        assert raw.read().code == TRANSFER
    bus.run(partition.let_go())  # messages delivered now have no credit and are returned
    raw.write(raw.flow(3, count=5))
    for _ in range(3):
        assert raw.read().code == TRANSFER
    assert raw.is_silent_until(END, frame(END))


def test_drain_after_one_that_the_client_gave_up_is_answered_in_time(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.attach_receiver(queue)
    partition = HeldBack(bus, monkeypatch)
    raw.write(raw.flow(3, drain=True))
    wait_until(bus, lambda: len(partition.held) == 1)
    raw.write(raw.flow(3))
    (endpoint,) = receiver_endpoints(bus)
    wait_until(bus, lambda: endpoint._window.drain_due_s is None)
    raw.write(raw.flow(3, drain=True))
    answer = raw.read()
    assert (answer.code, answer.fields[5], answer.fields[6]) == (FLOW, 3, 0)


def test_drain_under_way_waits_for_a_client_that_stops_reading(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(raw, queue, 5)
    raw.attach_receiver(queue)
    (endpoint,) = receiver_endpoints(bus)
    connection: Any = endpoint.connection

    def stops_reading(command: Command) -> bool:
        if is_drain(command):
            connection.set_paused(True)
        return is_drain(command)

    partition = HeldBack(bus, monkeypatch, stops_reading)
    raw.write(raw.flow(5, drain=True))
    wait_until(bus, lambda: len(partition.held) == 1)
    first_due_s = endpoint._window.drain_due_s
    wait_until(bus, lambda: endpoint._window.drain_due_s != first_due_s)

    async def go_on() -> None:
        assert endpoint._link.is_draining
        connection.set_paused(False)
        await partition.let_go()

    bus.run(go_on())
    assert [raw.read().code for _ in range(6)] == [TRANSFER] * 5 + [FLOW]


def test_late_drain_of_a_partition_takes_no_later_demand_away(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.attach_receiver(queue)
    partition = HeldBack(bus, monkeypatch)
    raw.write(raw.flow(3, drain=True))
    assert raw.read().code == FLOW
    raw.write(raw.flow(5, count=3))
    (endpoint,) = receiver_endpoints(bus)
    wait_until(bus, lambda: endpoint._window.is_in_step(credit=5))
    bus.run(partition.let_go())
    raw.attach_sender(queue)
    raw.write(*[raw.transfer(n, message(b"x"), settled=True) for n in range(5)])
    for _ in range(5):
        assert raw.expect(TRANSFER)


@pytest.mark.parametrize("refusal", ["busy", "not-applied"])
def test_refused_demand_is_requested_again(
    bus: BusThread,
    raw: RawClient,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
) -> None:
    raw.attach_receiver(queue)
    bus.refuse_next(monkeypatch, refusal, SetDemand)
    raw.write(raw.flow(2))
    raw.attach_sender(queue)
    raw.write(*[raw.transfer(n, message(b"x"), settled=True) for n in range(2)])
    for _ in range(2):
        assert raw.expect(TRANSFER)


# --- deleted entities ---------------------------------------------------------------------------


def test_links_of_a_deleted_queue_are_detached_at_once(
    bus: BusThread, raw: RawClient, queue: str
) -> None:
    other = bus.queue()
    raw.attach_sender(queue)
    raw.attach_receiver(queue)
    raw.attach_sender(other, 2)
    bus.delete(queue)
    ends = {int(end.fields[0]): end.fields[2] for end in (raw.expect(DETACH), raw.expect(DETACH))}
    assert set(ends) == {0, 1}
    assert {str(error.value[0]) for error in ends.values()} == {"amqp:not-found"}
    raw.write(*[frame(DETACH, handle, True) for handle in ends])
    bus.queue(queue)
    raw.attach_sender(queue, 3)
    for handle in (2, 3):
        raw.write(raw.transfer(handle, message(b"x"), handle=handle))
    assert raw.dispositions(2) == {2: ACCEPTED, 3: ACCEPTED}
    assert not [each for each in bus.router._watchers.values() if len(each) > 1]


def test_links_that_ended_are_not_watched(bus: BusThread, queue: str) -> None:
    before = len(bus.router._watchers)
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        client.attach_sender(queue)
        assert len(bus.router._watchers) == before + 1
    wait_until(bus, lambda: len(bus.router._watchers) <= before)


# --- requests -----------------------------------------------------------------------------------


def scheduling(raw: RawClient, queue: str, count: int) -> list[bytes]:
    """Open links to the management node and return requests to schedule a message."""
    node = f"{queue}/$management"
    raw.attach_receiver(node, 21)
    raw.attach_sender(node, 20)
    properties = {"operation": "com.microsoft:schedule-message"}
    body = {"messages": [{"message": message(b"x" * 1_000)}]}
    payload = (
        encode_value(described(0x73, "id", None, None, None, "answers"))
        + encode_value(Described(Ulong(0x74), properties))
        + encode_value(Described(Ulong(0x77), body))
    )
    return [raw.transfer(n, payload, handle=20, settled=True) for n in range(count)]


def is_enqueue(command: Command) -> bool:
    return isinstance(command, Enqueue)


def request_endpoint(bus: BusThread, queue: str) -> RequestEndpoint:
    connections = [each._connection for each in bus.listener._connections]
    endpoints = [
        endpoint
        for each in connections
        if each is not None
        for endpoint in each._endpoints.values()
    ]
    (found,) = [
        each for each in endpoints if isinstance(each, RequestEndpoint) and queue in each.path
    ]
    return found


def test_requests_without_an_answer_hold_credit_and_count_as_bytes_taken_in(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(bus, lambda: bus.listener.inflight.unanswered.used == 0)
    partition = HeldBack(bus, monkeypatch, is_enqueue)
    raw.write(*scheduling(raw, queue, 80), raw.flow(80, handle=21))
    wait_until(bus, lambda: len(partition.held) == 80)
    endpoint = request_endpoint(bus, queue)
    assert endpoint._link.credit == 20
    assert bus.listener.inflight.unanswered.used > 80_000
    bus.run(partition.let_go())
    for _ in range(80):
        assert raw.expect(TRANSFER)
    wait_until(bus, lambda: endpoint._link.credit >= 50)
    assert bus.listener.inflight.unanswered.used == 0
    assert bus.counts(queue).scheduled == 0
    assert bus.counts(queue).active == 80


def test_too_many_requests_are_refused_as_busy(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_OPEN_REQUESTS", 10)
    partition = HeldBack(bus, monkeypatch, is_enqueue)
    raw.write(*scheduling(raw, queue, 12), raw.flow(12, handle=21))
    wait_until(bus, lambda: len(partition.held) == 10)
    bus.run(some_rounds())
    assert len(partition.held) == 10
    bus.run(partition.let_go())
    for _ in range(10):
        assert raw.expect(TRANSFER)


def test_schedules_are_refused_when_too_many_bytes_are_in_flight(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus.listener.inflight, "unanswered", Shares(Limit(0)))
    raw.write(*scheduling(raw, queue, 1), raw.flow(1, handle=21))
    assert b"server-busy" in raw.expect(TRANSFER).payload


# --- unsettled deliveries -----------------------------------------------------------------------


@pytest.fixture
def few(bus: BusThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[RawClient]:
    """Yield a client with links of at most ten unsettled deliveries."""
    monkeypatch.setattr(bus.listener, "demand_limits", DemandLimits(max_unsettled=10))
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as client:
        yield client


def test_too_many_unsettled_deliveries_pause_their_link_alone(
    bus: BusThread, few: RawClient, queue: str
) -> None:
    other = bus.queue()
    fill(few, queue, 25)
    fill(few, other, 5, handle=7)
    few.attach_receiver(queue, 1)
    few.attach_receiver(other, 2)
    few.write(few.flow(100, handle=1))
    first = [few.expect(TRANSFER) for _ in range(10)]
    few.write(few.flow(100, handle=2))
    assert {few.expect(TRANSFER).fields[0] for _ in range(5)} == {3}
    ids = [int(each.fields[1]) for each in first]
    few.write(settlement(ids[0], ids[-1]))
    assert few.read().code == DISPOSITION
    again = [few.read() for _ in range(10)]  # nothing else of the client is needed
    assert {(each.code, each.fields[0]) for each in again} == {(TRANSFER, 2)}
    few.write(settlement(int(again[0].fields[1]), int(again[-1].fields[1]), settled=True))
    assert {few.read().code for _ in range(5)} == {TRANSFER}
    assert few.is_silent_until(END, frame(END))


def test_drain_of_a_link_with_too_many_unsettled_deliveries_is_answered(
    few: RawClient, queue: str
) -> None:
    """A client that waits for the drain before it settles must not wait for ever."""
    fill(few, queue, 25)
    few.attach_receiver(queue)
    few.write(few.flow(100, drain=True))
    for _ in range(10):
        assert few.read().code == TRANSFER
    answer = few.read()
    assert (answer.code, answer.fields[5], answer.fields[6]) == (FLOW, 100, 0)


def test_receive_and_delete_has_no_unsettled_deliveries(few: RawClient, queue: str) -> None:
    fill(few, queue, 25)
    few.attach_receiver(queue, mode=1)
    few.write(few.flow(100))
    for _ in range(25):
        assert few.read().code == TRANSFER


# --- idle links ---------------------------------------------------------------------------------


def test_idleness_counts_from_the_check_after_the_last_use() -> None:
    one = Idleness()
    assert not one.is_over(1_000)
    assert not one.is_over(600_999)
    one.is_used = True
    assert not one.is_over(601_000)
    assert not one.is_over(1_200_999)
    assert one.is_over(1_201_000)


def test_idle_links_are_detached_and_others_stay(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idleness, "LINK_IDLE_MS", 100_000)  # below the connection's idle timeout
    raw.attach_sender(queue, 0, "idle-sender")
    raw.attach_sender(queue, 1)
    raw.attach_receiver(queue, 2)
    raw.attach_receiver(queue, 3)
    raw.attach_sender("$cbs", 4)
    raw.write(raw.flow(5, handle=2), raw.flow(5, handle=3))  # credit alone is no use
    wait_until(
        bus, lambda: sum(endpoint._link.credit for endpoint in receiver_endpoints(bus)) == 10
    )
    bus.look_in(16)
    raw.write(raw.transfer(0, b"refused", handle=1, settled=True), raw.flow(6, handle=3))
    wait_until(
        bus, lambda: sum(endpoint._link.credit for endpoint in receiver_endpoints(bus)) == 11
    )
    bus.look_in(130)
    detached = [raw.expect(DETACH) for _ in range(2)]
    for each, kind, handle in zip(detached, ("Publisher", "Consumer"), (0, 2), strict=True):
        assert (each.fields[0], each.fields[1]) == (handle, True)
        condition, description = each.fields[2].value[:2]
        assert str(condition) == "amqp:link:detach-forced"
        assert f"AmqpMessage{kind}.IdleTimerExpired: Idle timeout: 00:01:40." in description
        assert "TrackingId:" in description
    assert "The link 'idle-sender' is force detached." in detached[0].fields[2].value[1]
    raw.write(frame(DETACH, 0, True), frame(DETACH, 2, True))
    raw.write(raw.transfer(1, message(b"x"), handle=1))
    assert raw.read().code in (DISPOSITION, TRANSFER)


def test_a_failed_idle_check_ends_its_connection_alone(
    bus: BusThread, raw: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.attach_receiver(queue)
    with RawClient(bus.port, ROOT.name, ROOT.keys.primary) as other:
        other.attach_sender(queue)
        (endpoint,) = receiver_endpoints(bus)
        monkeypatch.setattr(endpoint, "idleness", "no such thing")
        bus.look_in(16)
        wait_until(bus, lambda: not receiver_endpoints(bus))
        other.write(other.transfer(0, message(b"x")))
        assert other.dispositions(1) == {0: ACCEPTED}
    assert len(bus.log.errors()) == 1
    bus.log.records.clear()


@pytest.mark.slow
def test_sdk_resumes_after_idle_minutes(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idleness, "LINK_IDLE_MS", 100_000)
    with (
        bus.client(retry_total=3, retry_backoff_factor=0.01) as client,
        client.get_queue_sender(queue) as sender,
        client.get_queue_receiver(queue) as receiver,
    ):
        sender.send_messages(ServiceBusMessage("one"))
        (message,) = receiver.receive_messages(1, max_wait_time=10)
        bus.look_in(16)
        bus.look_in(130)
        sender.send_messages(ServiceBusMessage("two"))
        (other,) = receiver.receive_messages(1, max_wait_time=10)
        receiver.complete_message(other)
        receiver.complete_message(message)  # by its token: the link it came on is gone
    assert bus.counts(queue).active == 0


@pytest.mark.slow
def test_a_client_that_ignores_its_credit_gets_an_outcome_for_every_message(
    bus: BusThread, queue: str
) -> None:
    """More wait for their commit than there is credit: none is granted, and nothing breaks."""
    count = 12_000
    rule = RULES[0]
    with RawClient(bus.port, rule.name, rule.keys.primary) as client:
        client.attach_sender(queue)
        client.write(
            *[client.transfer(number, message(b""), settled=False) for number in range(count)]
        )
        outcomes = client.dispositions(count)
    assert len(outcomes) == count
    assert outcomes[0] == ACCEPTED
