"""Reads without a reader group: what is live, and what a history keeps, as they are now."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from azure.servicebus import ServiceBusMessage

from postbus.contract.bulk import PRESENT_COLUMNS, ReadableRanges
from postbus.message.codec import Value
from postbus.store import browse_rows
from tests.edge.bulk.bulk_client import (
    LAST_CHUNK,
    BulkClient,
    bodies_of,
    fields_of,
    nothing_is_held,
    problem_of,
    reaped,
    rest_of,
    table_of,
)
from tests.edge.bus_thread import BusThread
from tests.edge.hostile_client import HostileClient
from tests.edge.hostile_client import settle as settle_over_amqp
from tests.edge.http_client import HttpClient

HISTORY = {"history": {"retention": "P7D"}}
ALL = ",".join(("position", "sequence_number", "enqueued_ms", "body", *PRESENT_COLUMNS))
Rows = list[dict[str, Any]]


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)
    await nothing_is_held(bus)


@pytest.fixture
def kept(bus: BusThread) -> str:
    """A queue with a history."""
    return bus.queue(historyRetention="P7D")


class Browser:
    """A reader without a group."""

    def __init__(
        self, http: HttpClient, entity: str, mode: str, sub_queue: str = "main", **times: int
    ) -> None:
        self.client = BulkClient(http, entity, sub_queue)
        self.query = f"mode={mode}&subQueue={sub_queue}"
        self.times = "".join(f"&{name}={value}" for name, value in times.items())

    async def ranges(self, splits: int = 1) -> ReadableRanges:
        answer = await self.client.call("GET", f"ranges?{self.query}&splits={splits}")
        assert answer.status == 200, answer.body
        return ReadableRanges.model_validate_json(answer.body)

    async def rows(self, columns: str = ALL, splits: int = 1) -> Rows:
        rows: Rows = []
        for each in (await self.ranges(splits)).partitions:
            bounds = [each.low, *each.splits, each.next_position]
            for first, end in pairwise(bounds):
                rows += await self.part(each.partition, first, end, columns)
        return rows

    async def part(self, partition: int, first: int, end: int, columns: str = ALL) -> Rows:
        range_of = f"partition={partition}&from={first}&to={end}{self.times}"
        answer = await self.client.call("GET", f"rows?{self.query}&{range_of}&columns={columns}")
        assert answer.status == 200, answer.body
        rows: Rows = table_of(answer).to_pylist()
        return rows

    async def bodies(self) -> list[bytes]:
        return bodies_of(await self.rows("body"))


async def send(http: HttpClient, queue: str, *bodies: str, **broker: object) -> None:
    for body in bodies:
        assert (await http.send(queue, body, broker or None)).status == 201


async def sdk(http: HttpClient, act: Any, *arguments: object) -> None:
    await asyncio.get_running_loop().run_in_executor(None, act, http.bus, *arguments)


def settle(bus: BusThread, queue: str, verbs: list[str]) -> None:
    """Receive messages in order, and do one thing with each."""
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        for verb in verbs:
            [message] = receiver.receive_messages(max_wait_time=5)
            if verb == "dead_letter":
                receiver.dead_letter_message(message, reason="NoPrice", error_description="sku 7")
            else:
                getattr(receiver, f"{verb}_message")(message)


def schedule(bus: BusThread, queue: str, body: str, delay: timedelta) -> None:
    with bus.client() as client, client.get_queue_sender(queue) as sender:
        sender.schedule_messages(ServiceBusMessage(body), bus.now() + delay)


# --- peek -----------------------------------------------------------------------------------------


async def test_a_peek_shows_what_is_live_with_its_state_and_changes_nothing(
    http: HttpClient, kept: str
) -> None:
    await send(http, kept, "completed", "deferred", "locked", "active")
    await sdk(http, settle, kept, ["complete", "defer"])
    assert (await http.lock(kept)).status == 201
    await sdk(http, schedule, kept, "scheduled", timedelta(hours=1))
    before = http.bus.counts(kept)
    peek = Browser(http, kept, "peek")
    rows = await peek.rows()
    assert bodies_of(rows) == [b"deferred", b"locked", b"active", b"scheduled"]
    assert [row["state"] for row in rows] == ["deferred", "active", "active", "scheduled"]
    assert [row["sequence_number"] for row in rows] == [2, 3, 4, 5]
    assert {(row["settled_ms"], row["settlement"]) for row in rows} == {(None, None)}
    again = await peek.rows()
    for row in rows + again:
        row.pop("delivery_count")  # that of the lock may arrive between the two
    assert again == rows
    assert http.bus.counts(kept) == before


async def test_a_peek_counts_deliveries_and_a_lock_that_is_held(
    http: HttpClient, queue: str
) -> None:
    await send(http, queue, "thrice", "never")
    for _ in range(2):
        await sdk(http, settle, queue, ["abandon"])
    assert (await http.lock(queue)).status == 201
    await wait_for_deliveries(Browser(http, queue, "peek"), [3, 0])


async def wait_for_deliveries(peek: Browser, counts: list[int]) -> None:
    """Wait until the last delivery is recorded, which is after its message has left (ADR 19)."""
    async with asyncio.timeout(30):
        while [row["delivery_count"] for row in await peek.rows()] != counts:
            pass


async def test_a_peek_shows_dead_letters_with_their_reasons_and_deliveries(
    http: HttpClient, queue: str
) -> None:
    await send(http, queue, "one", "two", "three")
    await sdk(http, settle, queue, ["abandon", "dead_letter", "dead_letter"])
    rows = await Browser(http, queue, "peek", "deadLetter").rows(f"application_properties,{ALL}")
    assert bodies_of(rows) == [b"one", b"two"]
    shown = [(row["sequence_number"], row["delivery_count"]) for row in rows]
    assert shown == [(1, 1), (2, 0)]
    assert shown == await asyncio.to_thread(peeked_dead_letters, http.bus, queue)
    assert all(b"NoPrice" in row["application_properties"] for row in rows)
    assert [row["state"] for row in rows] == ["active", "active"]
    assert await Browser(http, queue, "peek").bodies() == [b"three"]


async def test_a_peek_shows_properties_that_a_receiver_has_changed(
    http: HttpClient, queue: str
) -> None:
    await send(http, queue, "one")
    await sdk(http, abandon_with, queue, {"attempt": "failed here"})
    [row] = await Browser(http, queue, "peek").rows("application_properties,body")
    assert b"failed here" in row["application_properties"]


def abandon_with(bus: BusThread, queue: str, changes: dict[str, Value]) -> None:
    with HostileClient(bus) as hostile:
        [transfer] = hostile.receive(queue, 1, handle=50)
        token = uuid.UUID(bytes_le=bytes(transfer.fields[2]))
        more = {"disposition-status": "abandoned", "properties-to-modify": changes}
        assert settle_over_amqp(hostile, queue, token, **more) == (200, "")


def peeked_dead_letters(bus: BusThread, queue: str) -> list[tuple[int, int]]:
    with (
        bus.client() as client,
        client.get_queue_receiver(queue, sub_queue="deadletter") as receiver,
    ):
        messages = receiver.peek_messages(10)
    return [(each.sequence_number or 0, each.delivery_count or 0) for each in messages]


async def test_a_peek_passes_over_kept_messages_in_bounded_steps(
    http: HttpClient, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browse_rows, "SCAN_ROWS", 3)
    await send(http, kept, *(f"m{n}" for n in range(12)))
    await sdk(http, settle, kept, ["complete"] * 5 + ["defer"] + ["complete"] * 5)
    peek = Browser(http, kept, "peek")
    [found] = (await peek.ranges()).partitions
    answer = await peek.client.call(
        "GET",
        f"rows?{peek.query}&partition={found.partition}&from={found.low}&to={found.next_position}",
    )
    assert bodies_of(table_of(answer).to_pylist()) == [b"m5", b"m11"]
    assert await peek.bodies() == [b"m5", b"m11"]


async def test_a_peek_leaves_out_what_is_marked_as_settled(http: HttpClient, kept: str) -> None:
    count = 600
    for _ in range(3):
        await sdk(http, send_many, kept, count // 3)
    await sdk(http, take, kept, count)
    await send(http, kept, "live")
    peek, history = Browser(http, kept, "peek"), Browser(http, kept, "history")
    await asyncio.to_thread(http.bus.reload, kept)
    assert http.bus.counts(kept).active == 1
    await reaped(http.bus)
    [live] = (await peek.ranges()).partitions
    [all_of_it] = (await history.ranges()).partitions
    assert live.low > all_of_it.low + 256, "the first block is marked"
    assert await peek.bodies() == [b"live"]
    assert len(await history.bodies()) == count + 1


def send_many(bus: BusThread, queue: str, count: int) -> None:
    with bus.client() as client, client.get_queue_sender(queue) as sender:
        sender.send_messages([ServiceBusMessage(b"%d" % number) for number in range(count)])


def take(bus: BusThread, queue: str, count: int) -> None:
    with (
        bus.client() as client,
        client.get_queue_receiver(queue, receive_mode="receiveanddelete") as receiver,
    ):
        while count:
            messages = receiver.receive_messages(count, max_wait_time=5)
            assert messages
            count -= len(messages)


# --- history --------------------------------------------------------------------------------------


async def test_a_history_says_how_and_when_each_message_was_settled(
    http: HttpClient, kept: str
) -> None:
    await send(http, kept, "completed", "dead", "deferred")
    await sdk(http, settle, kept, ["complete", "dead_letter", "defer"])
    await send(http, kept, "taken")
    await sdk(http, take, kept, 1)
    await send(http, kept, "expired", TimeToLive=60)
    await send(http, kept, "live")
    await sdk(http, expire, kept)
    history = Browser(http, kept, "history")
    rows = await history.rows()
    shown = {bodies_of([row])[0].decode(): (row["settlement"], row["state"]) for row in rows}
    assert shown == {
        "completed": ("completed", None),
        "dead": ("deadLettered", None),
        "deferred": (None, "deferred"),
        "taken": ("receivedAndDeleted", None),
        "expired": ("expired", None),
        "live": (None, "active"),
    }
    for row in rows:
        assert (row["settled_ms"] is None) == (row["settlement"] is None)
        assert (row["delivery_count"] is None) == (row["state"] is None)
        assert row["settled_ms"] is None or row["settled_ms"] >= row["enqueued_ms"]
    dead = await Browser(http, kept, "history", "deadLetter").rows()
    assert [(bodies_of([row])[0], row["settlement"]) for row in dead] == [(b"dead", None)]


def expire(bus: BusThread, queue: str) -> None:
    bus.advance(120_000)
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        [message] = receiver.receive_messages(max_wait_time=5)
        receiver.abandon_message(message)


async def test_a_history_of_a_time_range_begins_with_its_time_and_ends_before_the_next(
    http: HttpClient, kept: str
) -> None:
    for body in ("one", "two", "three", "four"):
        await send(http, kept, body)
        await sdk(http, advance, 3_600_000)
    times = [row["enqueued_ms"] for row in await Browser(http, kept, "history").rows()]
    between = Browser(http, kept, "history", enqueuedFrom=times[1], enqueuedTo=times[3])
    assert await between.bodies() == [b"two", b"three"]
    for from_ms, to_ms, bodies in (
        (times[3], times[3] + 1, [b"four"]),
        (times[3] + 1, times[3] + 1, []),
        (0, times[0], []),
        (0, times[0] + 1, [b"one"]),
    ):
        some = Browser(http, kept, "history", enqueuedFrom=from_ms, enqueuedTo=to_ms)
        assert await some.bodies() == bodies


def advance(bus: BusThread, ms: int) -> None:
    bus.advance(ms)


async def test_a_history_of_dead_letters_finds_times_in_any_order(
    http: HttpClient, kept: str
) -> None:
    await send(http, kept, "old")
    await sdk(http, advance, 3_600_000)
    await send(http, kept, "new")
    await sdk(http, settle, kept, ["defer", "dead_letter"])
    await sdk(http, dead_letter_deferred, kept, 1)
    rows = await Browser(http, kept, "history", "deadLetter").rows()
    assert bodies_of(rows) == [b"new", b"old"]
    old_ms = rows[1]["enqueued_ms"]
    old = Browser(http, kept, "history", "deadLetter", enqueuedFrom=0, enqueuedTo=old_ms + 1)
    assert await old.bodies() == [b"old"]


def dead_letter_deferred(bus: BusThread, queue: str, number: int) -> None:
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        [message] = receiver.receive_deferred_messages(number)
        receiver.dead_letter_message(message, reason="Late")


async def test_a_history_without_a_retention_is_what_is_live_or_kept_for_a_group(
    http: HttpClient, queue: str
) -> None:
    await send(http, queue, "gone", "live")
    await sdk(http, settle, queue, ["complete"])
    history = Browser(http, queue, "history")
    assert await history.bodies() == [b"live"]
    await history.client.create()
    await sdk(http, settle, queue, ["complete"])
    assert [row["settlement"] for row in await history.rows()] == ["completed"]


# --- shapes of entities and messages --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["peek", "history"])
@pytest.mark.parametrize("splits", [1, 5])
async def test_each_message_of_a_partitioned_queue_comes_once(
    http: HttpClient, mode: str, splits: int
) -> None:
    queue = http.bus.queue(enablePartitioning=True)
    await sdk(http, schedule, queue, "scheduled", timedelta(hours=1))
    sent = {f"m{n}" for n in range(60)}
    await send(http, queue, *sent)
    rows = await Browser(http, queue, mode).rows(splits=splits)
    bodies = [body.decode() for body in bodies_of(rows)]
    assert len(bodies) == len(set(bodies))
    assert set(bodies) == sent | ({"scheduled"} if mode == "peek" else set())
    assert len({row["sequence_number"] for row in rows}) == len(rows)


@pytest.mark.parametrize("mode", ["peek", "history"])
async def test_a_queue_with_sessions_is_read_whole(http: HttpClient, mode: str) -> None:
    queue = http.bus.queue(requiresSession=True)
    await send(http, queue, "a1", "a2", SessionId="a")
    await send(http, queue, "b1", SessionId="b")
    assert await Browser(http, queue, mode).bodies() == [b"a1", b"a2", b"b1"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["peek", "history"])
async def test_large_and_shared_bodies(http: HttpClient, mode: str) -> None:
    topic = http.bus.topic()
    for name in ("first", "second"):
        http.bus.subscription(topic, name)
    big = "x" * 200_000
    for body in ("small", big, "y" * 20_000, big):
        assert (await http.send(topic, body)).status == 201
    for name in ("first", "second"):
        rows = await Browser(http, f"{topic}/Subscriptions/{name}", mode).rows()
        assert len(rows[0]["body"]) < 20
        assert [row["body"].endswith(b"x" * 1_000) for row in rows] == [False, True, False, True]
    without = await Browser(http, f"{topic}/Subscriptions/first", mode).rows("position,state")
    assert [sorted(row) for row in without] == [["position", "state"]] * 4


async def test_columns_that_never_change_are_what_a_group_reads(
    http: HttpClient, queue: str
) -> None:
    await send(http, queue, "one", "two", Label="x")
    client = BulkClient(http, queue)
    await client.create()
    group = await client.plan_all(await client.claim())
    peek = Browser(http, queue, "peek")
    [found] = (await peek.ranges()).partitions
    answer = await client.call(
        "GET",
        f"rows?{peek.query}&partition={found.partition}&from={found.low}&to={found.next_position}",
    )
    assert table_of(answer).to_pylist() == await client.read(group)


async def test_an_empty_queue_has_no_rows(http: HttpClient, queue: str) -> None:
    for mode in ("peek", "history"):
        for sub_queue in ("main", "deadLetter", "transferDeadLetter"):
            assert await Browser(http, queue, mode, sub_queue).rows() == []


# --- when it fails --------------------------------------------------------------------------------


RANGE = "partition=0&from=0&to=9"


@pytest.mark.parametrize(
    ("request_line", "words"),
    [
        ("ranges?mode=tap", "mode: must be one of peek, history"),
        ("ranges?mode=Peek", "mode: must be one of"),
        ("ranges?mode=", "mode: must be one of"),
        ("ranges?mode=peek&mode=history", "occurs twice"),
        ("ranges?mode=peek&group=lake", "name one or the other"),
        ("ranges?mode=history&enqueuedFrom=1", "enqueuedFrom: is not a parameter"),
        (f"rows?mode=history&group=lake&{RANGE}", "name one or the other"),
        (f"rows?mode=peek&epoch=1&{RANGE}", "name one or the other"),
        (f"rows?mode=peek&enqueuedFrom=1&{RANGE}", "belong to mode=history"),
        (f"rows?enqueuedTo=1&{RANGE}", "belong to mode=history"),
        (f"rows?group=lake&epoch=1&enqueuedTo=1&{RANGE}", "belong to mode=history"),
        (f"rows?mode=history&enqueuedFrom=-1&{RANGE}", "enqueuedFrom: must be a number"),
        (f"rows?mode=history&enqueuedTo={2**63}&{RANGE}", "enqueuedTo: must be a number"),
        (f"rows?mode=history&enqueuedFrom=2&enqueuedTo=1&{RANGE}", "is before enqueuedFrom"),
        ("rows?mode=peek&partition=0&from=10&to=9", "ends before it begins"),
        ("rows?mode=peek&partition=9&from=0&to=9", "no partition 9"),
        ("rows?mode=peek&partition=0&from=0", "to: must be a number"),
        (f"rows?mode=peek&columns=how&{RANGE}", "'how' is none of"),
        (f"rows?group=lake&epoch=1&columns=state&{RANGE}", "name a mode"),
    ],
)
async def test_a_mode_or_a_range_that_does_not_fit_is_refused(
    http: HttpClient, queue: str, request_line: str, words: str
) -> None:
    client = BulkClient(http, queue)
    own = (await client.ranges()).partitions[0].partition
    answer = await client.call("GET", request_line.replace("partition=0", f"partition={own}"))
    assert problem_of(answer) == (400, "InvalidRequest")
    assert words in answer.body.decode()


@pytest.mark.parametrize("mode", ["peek", "history"])
async def test_ranges_end_where_the_next_message_will_be(
    http: HttpClient, queue: str, mode: str
) -> None:
    await send(http, queue, "one")
    browser = Browser(http, queue, mode)
    [found] = (await browser.ranges()).partitions
    [tapped] = (await browser.client.ranges()).partitions
    assert found.next_position == tapped.next_position
    await send(http, queue, "two")
    rows = await browser.part(found.partition, found.low, found.next_position)
    assert bodies_of(rows) == [b"one"]


async def test_a_range_may_reach_beyond_what_is_there(http: HttpClient, queue: str) -> None:
    await send(http, queue, "one")
    history = Browser(http, queue, "history")
    own = (await history.ranges()).partitions[0].partition
    assert bodies_of(await history.part(own, 0, 2**63 - 1)) == [b"one"]


async def test_a_topic_is_refused_and_an_entity_that_is_not_there(http: HttpClient) -> None:
    for entity, status, words in (
        (http.bus.topic(), 409, "read it through a subscription"),
        ("nowhere", 404, "there is no nowhere"),
    ):
        answer = await BulkClient(http, entity).call("GET", "ranges?mode=peek")
        assert answer.status == status
        assert words in answer.body.decode()


@pytest.mark.slow
async def test_a_stream_breaks_off_when_its_entity_is_deleted(http: HttpClient, kept: str) -> None:
    browser, reader, writer = await begun(http, kept, "history", count=60)
    await asyncio.to_thread(http.bus.delete, kept)
    assert not (await rest_of(reader)).endswith(LAST_CHUNK)
    writer.close()
    answer = await browser.client.call("GET", f"ranges?{browser.query}")
    assert problem_of(answer) == (404, "EntityNotFound")


@pytest.mark.slow
async def test_a_reader_that_stops_gives_its_place_back(http: HttpClient, queue: str) -> None:
    peek, _, writer = await begun(http, queue, "peek", count=30)
    writer.transport.abort()
    await nothing_is_held(http.bus)
    assert len(await peek.rows("position")) == 30


async def begun(
    http: HttpClient, queue: str, mode: str, count: int
) -> tuple[Browser, asyncio.StreamReader, asyncio.StreamWriter]:
    """Send messages of 200 kB, and begin to read them through a small window."""
    for _ in range(count):
        await send(http, queue, "x" * 200_000)
    browser = Browser(http, queue, mode)
    [found] = (await browser.ranges()).partitions
    range_of = f"partition={found.partition}&from={found.low}&to={found.next_position}"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", http.bus.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4_096)
    target = f"/{queue}/$bulk/rows?{browser.query}&{range_of}"
    writer.write(f"GET {target} HTTP/1.1\r\n".encode() + fields_of(http))
    await reader.readexactly(1_000)
    return browser, reader, writer
