"""Two keys on one bus: the use of one does not reduce the share of the other."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from postbus.amqp import conditions
from postbus.broker.access.authz import KeyRule
from postbus.edge.access.admission import LOGGED_REFUSALS_A_SECOND
from postbus.edge.access.inflight_budget import InflightBudget
from postbus.edge.access.shares import UNKNOWN, Limit, Shares
from postbus.edge.amqp import unfinished
from postbus.edge.amqp.transactions import HELD_BYTES
from postbus.entity.commands import Command, Enqueue
from postbus.message.codec import Uint
from postbus.message.sections import BATCH_FORMAT, MAX_MEMBERS
from tests.edge.access.two_keys import goes_on, p99_s, sender_of
from tests.edge.amqp.test_links import HeldBack, wait_until
from tests.edge.amqp.test_transactions import TransactionClient, accepts, condition
from tests.edge.amqp.test_wire import request
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.http_client import token_of, url_of
from tests.edge.raw_client import (
    ACCEPTED,
    DETACH,
    DISPOSITION,
    REJECTED,
    TRANSFER,
    Frame,
    RawClient,
    frame,
    message,
)

ROOT, TENANT = RULES[0], RULES[1]
"""The tenant may only send; the other key is that of all other clients."""

BUSY = conditions.SERVER_BUSY


@pytest.fixture(autouse=True)
def all_is_given_back(bus: BusThread) -> Iterator[None]:
    inflight = bus.listener.inflight
    yield
    found = [inflight.reading, inflight.waiting, inflight.unfinished, inflight.unanswered]
    found += [inflight.links, bus.front.admission_control.of_keys]
    wait_until(bus, lambda: not any(each.used or each._of for each in found))


def connect(bus: BusThread, rule: KeyRule) -> RawClient:
    return RawClient(bus.port, rule.name, rule.keys.primary)


def post_head(bus: BusThread, queue: str, rule: KeyRule, size_bytes: int) -> bytes:
    return (
        f"POST /{queue}/messages HTTP/1.1\r\nHost: here\r\nAuthorization:"
        f" {token_of(bus, rule.name)}\r\nContent-Length: {size_bytes}\r\n\r\n"
    ).encode()


def poster(
    bus: BusThread, client: socket.socket, queue: str, size_bytes: int
) -> Callable[[], None]:
    """Return a function that posts a message and waits until it is stored."""
    request = post_head(bus, queue, ROOT, size_bytes) + bytes(size_bytes)

    def send() -> None:
        client.sendall(request)
        assert client.recv(65_536).startswith(b"HTTP/1.1 201 ")

    return send


def dial(bus: BusThread) -> socket.socket:
    return socket.create_connection(("127.0.0.1", bus.port), timeout=10)


def refused_as(found: Frame) -> str:
    """Return the condition of a rejected delivery, a detach or a close."""
    if found.code == DISPOSITION:
        assert int(found.fields[4].descriptor) == REJECTED
        return str(found.fields[4].value[0].value[0])
    return str(found.fields[2 if found.code == DETACH else 0].value[0])


def put_token(bus: BusThread, client: RawClient, queue: str) -> Frame:
    """Show the tenant's key."""
    properties = {"operation": "put-token", "name": f"{url_of(bus)}/{queue}"}
    return request(client, "$cbs", "id", properties, token_of(bus, TENANT.name))


# --- HTTP bodies --------------------------------------------------------------------------------


@pytest.mark.slow
def test_announced_bodies_take_no_budget(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus.listener.inflight.reading, "limit", Limit(1_000_000))
    with ExitStack() as clients:
        for _ in range(100):
            slow = clients.enter_context(dial(bus))
            slow.sendall(post_head(bus, queue, TENANT, 262_144) + b"x")
        wait_until(bus, lambda: bus.listener.inflight.reading.used == 100)
        poster(bus, clients.enter_context(dial(bus)), queue, 100_000)()  # checks for a 201


@pytest.mark.slow
def test_bodies_of_one_key_leave_budget_for_others(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = bus.listener.inflight.reading
    monkeypatch.setattr(reading, "limit", Limit(400_000))
    with dial(bus) as other, ExitStack() as clients:
        send = poster(bus, other, queue, 10_000)
        undisturbed_s = p99_s(send)
        tenant = [clients.enter_context(dial(bus)) for _ in range(10)]
        for each in tenant[:9]:
            each.sendall(post_head(bus, queue, TENANT, 200_000) + bytes(20_000))
        wait_until(bus, lambda: reading.of(TENANT.name) == 180_000)
        tenant[9].sendall(post_head(bus, queue, TENANT, 200_000) + bytes(40_000))
        assert tenant[9].recv(65_536).startswith(b"HTTP/1.1 429 ")
        assert reading.of(TENANT.name) == 180_000
        assert goes_on(send, undisturbed_s)


# --- transactions -------------------------------------------------------------------------------


@pytest.mark.slow
def test_transactions_of_one_key_leave_budget_for_others(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus.listener.inflight.waiting, "limit", Limit(400_000))
    with (
        TransactionClient(bus) as other,
        TransactionClient(bus, TENANT.name, TENANT.keys.primary) as tenant,
    ):
        other.attach_sender(queue)

        def send() -> None:
            transaction = other.declare()
            assert accepts(other.send_in(transaction, message(b"x" * 20_000)), transaction)
            assert int(other.discharge(transaction).descriptor) == ACCEPTED

        undisturbed_s = p99_s(send)
        tenant.attach_sender(queue)
        open_ones = [tenant.declare() for _ in range(5)]
        for each in open_ones[:4]:
            assert accepts(tenant.send_in(each, message(b"x" * 48_000)), each)
        refused = tenant.send_in(open_ones[4], message(b"x" * 48_000))
        assert condition(refused) == BUSY
        assert goes_on(send, undisturbed_s)


# --- links --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_links_of_one_key_leave_budget_for_others(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = bus.listener.inflight.links
    monkeypatch.setattr(links, "limit", Limit(400_000))
    with connect(bus, ROOT) as other, connect(bus, TENANT) as tenant, ExitStack() as clients:
        for handle in range(150):
            tenant.attach_sender(queue, handle)
            if links.refused_count:
                break
        error = tenant.expect(DETACH).fields[2].value
        assert error[0] == conditions.RESOURCE_LIMIT_EXCEEDED
        assert 50 < handle < 100  # half of the limit, 2 KiB each and their attach
        again = clients.enter_context(connect(bus, TENANT))
        again.attach_sender(queue)
        assert again.expect(DETACH).fields[2].value[0] == conditions.RESOURCE_LIMIT_EXCEEDED
        for handle in range(40):
            other.attach_sender(queue, handle)
        other.write(other.transfer(0, message(b"x"), handle=0))
        assert other.dispositions(1) == {0: ACCEPTED}
        assert links.refused_count == 2
        used = links.of(TENANT.name)
        tenant.write(frame(DETACH, Uint(0), True))
        assert tenant.expect(DETACH).fields[2] is None
        assert links.of(TENANT.name) < used


@pytest.mark.slow
def test_links_from_before_a_key_are_its_own_afterwards(bus: BusThread, queue: str) -> None:
    links = bus.listener.inflight.links
    with RawClient(bus.port, "", "") as client:
        client.attach_sender("$cbs", 7, "early")
        assert links.of(UNKNOWN) > 2_000
        put_token(bus, client, queue)
        wait_until(bus, lambda: links.of(UNKNOWN) == 0)
        assert links.used > 6_000


# --- unfinished deliveries ----------------------------------------------------------------------


def begin_delivery(client: RawClient, queue: str, handle: int, size_bytes: int) -> None:
    client.attach_sender(queue, handle)
    for at in range(0, size_bytes, 50_000):
        piece = bytes(min(50_000, size_bytes - at))
        client.write(client.transfer(handle, piece, handle=handle, more=True))


@pytest.mark.slow
def test_unfinished_deliveries_of_one_key_leave_budget_for_others(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inflight = bus.listener.inflight
    monkeypatch.setattr(inflight.unfinished, "limit", Limit(1_000_000))
    with connect(bus, ROOT) as other, ExitStack() as clients:
        send = sender_of(other, queue, b"x" * 150_000)
        undisturbed_s = p99_s(send)
        for _ in range(2):
            begin_delivery(clients.enter_context(connect(bus, TENANT)), queue, 0, 200_000)
        wait_until(bus, lambda: inflight.unfinished.used == 400_000)
        assert inflight.unanswered.used == 400_000
        third = clients.enter_context(connect(bus, TENANT))
        begin_delivery(third, queue, 0, 40_000)
        begin_delivery(third, queue, 1, 90_000)
        assert refused_as(third.expect(DETACH)) == BUSY
        wait_until(bus, lambda: inflight.unfinished.used == 440_000)  # the largest had to go
        third.write(third.transfer(0, b"rest"))  # the link beside it goes on
        assert third.expect(DISPOSITION)
        assert goes_on(send, undisturbed_s)


def test_unfinished_delivery_before_authentication_counts_for_no_key(
    bus: BusThread, queue: str
) -> None:
    """Then for the key, once it is shown."""
    counted = bus.listener.inflight.unfinished
    with RawClient(bus.port, "", "") as client:
        begin_delivery(client, "$cbs", 1, 20_000)
        wait_until(bus, lambda: counted.of("") == 20_000)
        assert b"Accepted" in put_token(bus, client, queue).payload
        assert (counted.of(""), counted.of(TENANT.name)) == (0, 20_000)


def test_a_delivery_has_its_time(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "DELIVERY_MS", 120_000)
    with connect(bus, TENANT) as client:
        begin_delivery(client, queue, 0, 50_000)
        wait_until(bus, lambda: bus.listener.inflight.unfinished.used == 50_000)
        bus.look_in(100)
        assert bus.listener.inflight.unfinished.used == 50_000
        bus.look_in(121)
        assert refused_as(client.expect(DETACH)) == conditions.TIMEOUT
        assert bus.listener.inflight.unfinished.used == 0


# --- sends that wait for their commit -------------------------------------------------------------


@pytest.mark.slow
def test_unanswered_sends_of_one_key_leave_budget_for_others(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_queue = bus.queue()
    number = bus.run(entity_no(bus, slow_queue))
    inflight = InflightBudget(200_000, 400_000, 0)
    monkeypatch.setattr(bus.listener, "inflight", inflight)

    def is_slow(command: Command) -> bool:
        return isinstance(command, Enqueue) and command.entity_no == number

    partition = HeldBack(bus, monkeypatch, is_slow)
    with connect(bus, ROOT) as other, connect(bus, TENANT) as tenant:
        send = sender_of(other, queue, b"x" * 10_000)
        undisturbed_s = p99_s(send)
        tenant.attach_sender(slow_queue)
        tenant.write(*[tenant.transfer(n, message(b"x" * 50_000)) for n in range(8)])
        assert refused_as(tenant.expect(DISPOSITION)) == BUSY
        assert inflight.is_full(TENANT.name)
        assert inflight.is_over(TENANT.name)
        assert not inflight.is_full(ROOT.name)
        assert not inflight.is_over(ROOT.name)
        assert goes_on(send, undisturbed_s)
        bus.run(partition.let_go())
        wait_until(bus, lambda: inflight.unanswered.used == 0)


async def entity_no(bus: BusThread, name: str) -> int:
    entry = bus._directory.find(name)
    assert entry is not None
    return entry.entity_no


# --- connections --------------------------------------------------------------------------------


def test_one_key_has_not_all_connections(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus.front.admission_control.of_keys, "limit", Limit(10, 0.8))
    with connect(bus, ROOT) as other, ExitStack() as clients:
        send = sender_of(other, queue)
        undisturbed_s = p99_s(send)
        for _ in range(7):
            assert clients.enter_context(connect(bus, TENANT)).outcome == 0
        assert clients.enter_context(connect(bus, TENANT)).outcome == 4
        anonymous = clients.enter_context(RawClient(bus.port, "", ""))
        with pytest.raises(AssertionError) as closed:
            put_token(bus, anonymous, queue)
        assert refused_as(closed.value.args[0]) == BUSY
        http = clients.enter_context(dial(bus))
        http.sendall(post_head(bus, queue, TENANT, 1) + b"x")
        answer = http.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After: 1" in answer
        assert http.recv(1) == b""
        assert clients.enter_context(connect(bus, ROOT)).outcome == 0
        assert goes_on(send, undisturbed_s)
    wait_until(bus, lambda: bus.front.admission_control.of_keys.used == 0)
    with connect(bus, TENANT) as again:
        assert again.outcome == 0


# --- the log ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_refusals_of_one_key_do_not_fill_the_log(
    bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bus.front.admission_control, "_logged", Shares(Limit(LOGGED_REFUSALS_A_SECOND))
    )
    monkeypatch.setattr(bus.front.admission_control, "now_s", lambda: 1_000.0)
    with connect(bus, ROOT) as other, connect(bus, TENANT) as tenant:
        send = sender_of(other, queue)
        undisturbed_s = p99_s(send)
        tenant.attach_sender(queue)
        for start in range(0, 2_000, 500):
            tenant.write(*[tenant.transfer(start + n, b"\x00\x53\x75\xa0") for n in range(500)])
            assert set(tenant.dispositions(500).values()) == {REJECTED}
        logged = [record.getMessage() for record in bus.log.records]
        assert logged.count("refused") == LOGGED_REFUSALS_A_SECOND // 2
        assert logged.count("many requests with one key refused") == 4
        assert goes_on(send, undisturbed_s)
        other.write(other.transfer(1_000, b"\x00\x53\x75\xa0"))
        assert set(other.dispositions(1)) == {1_000}
        assert bus.log.records[-1].getMessage() == "refused"  # of another key, in the same second


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_has_as_many_messages_as_one_over_http(bus: BusThread, queue: str) -> None:
    empty = b"\x00\x53\x75\xa0\x00"
    with connect(bus, TENANT) as client:
        client.attach_sender(queue)
        for count, outcome in ((MAX_MEMBERS + 1, REJECTED), (MAX_MEMBERS, ACCEPTED)):
            for at in range(0, count, 8_000):
                left = count - at
                client.write(
                    client.transfer(
                        count,
                        empty * min(left, 8_000),
                        more=left > 8_000,
                        message_format=BATCH_FORMAT,
                    )
                )
            found = client.expect(DISPOSITION)
            assert int(found.fields[4].descriptor) == outcome
            if outcome == REJECTED:
                assert refused_as(found) == conditions.MESSAGE_SIZE_EXCEEDED
        assert bus.counts(queue).active == MAX_MEMBERS
        assert bus.counts(queue).size_bytes >= 100 * MAX_MEMBERS


def test_quota_counts_a_hundred_bytes_of_each_message(bus: BusThread) -> None:
    """Also after a load, for messages read again."""
    queue = bus.queue()
    with connect(bus, ROOT) as client:
        client.attach_sender(queue)
        payload = b"\x00\x53\x75\xa0\x00"
        client.write(*[client.transfer(n, payload) for n in range(50)])
        client.dispositions(50)
        assert bus.counts(queue).size_bytes >= 5_000
        bus.reload(queue)
        client.attach_receiver(queue, mode=1)
        client.write(client.flow(50))
        for _ in range(50):
            client.expect(TRANSFER)
    assert bus.counts(queue).size_bytes == 0


class HeldEndpoint:
    """Waits for budget, and counts its notifications."""

    granted = 0

    def replenish(self) -> None:
        self.granted += 1


def test_further_bytes_of_a_delivery_grant_no_held_credit() -> None:
    """An account above its share waits, also while one of its deliveries grows."""
    inflight = InflightBudget(soft_bytes=1_000, hard_bytes=10_000, unfinished_bytes=4_000)
    engine = SimpleNamespace(partial_bytes=1_000)
    connection: Any = SimpleNamespace(
        engine=engine, inflight=inflight, account="tenant", links=list
    )
    inflight.take("tenant", 2_400)  # a share by itself, which the delivery exceeds
    counted = unfinished.Unfinished()
    counted.count(connection)
    assert inflight.is_over("tenant")
    endpoint = HeldEndpoint()
    inflight.hold("tenant", endpoint)
    engine.partial_bytes = 1_100
    counted.count(connection)
    assert (endpoint.granted, inflight.unfinished.used, inflight.unanswered.used) == (
        0,
        1_100,
        3_500,
    )
    engine.partial_bytes = 0
    counted.count(connection)
    assert (inflight.unfinished.used, inflight.unanswered.used) == (0, 2_400)


EMPTY = b"\x00\x53\x75\xa0\x00"
"""A message of a data section without a byte."""


@pytest.mark.slow
def test_messages_in_transactions_count_their_memory(bus: BusThread, queue: str) -> None:
    waiting = bus.listener.inflight.waiting
    with TransactionClient(bus) as client:
        client.attach_sender(queue, 1)
        transaction = client.declare()
        for _ in range(20):
            assert accepts(client.send_in(transaction, EMPTY, handle=1), transaction)
        wait_until(bus, lambda: waiting.used >= 20 * HELD_BYTES)
    wait_until(bus, lambda: waiting.used == 0)
