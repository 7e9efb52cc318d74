"""Rows of a planned range: every message once, the same bytes again, and never fewer rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from struct import pack
from typing import Any

import aiohttp
import pyarrow as pa
import pytest
from aiohttp import web
from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage

from postbus.broker import bulk as bulk_access
from postbus.contract.bulk import ReaderGroup
from postbus.edge.bulk.handler import WRITE_BYTES
from postbus.entity.commands import (
    DeleteBySequence,
    Enqueue,
    Enqueued,
    MessagesHandled,
    ResendBySequence,
    SubQueue,
)
from postbus.message.sections import slice_message
from postbus.store import bulk_reads
from tests.edge.bulk.bulk_client import (
    LAST_CHUNK,
    BulkClient,
    bodies_of,
    fields_of,
    group_of,
    nothing_is_held,
    problem_of,
    reaped,
    rest_of,
    streamed,
)
from tests.edge.bus_thread import BusThread
from tests.edge.http_client import HttpClient

DLQ = "/$DeadLetterQueue"


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)
    await nothing_is_held(bus)


async def send(http: HttpClient, queue: str, *bodies: str, **broker: object) -> None:
    for body in bodies:
        assert (await http.send(queue, body, broker or None)).status == 201


async def planned(bulk: BulkClient, *, start: object = "earliest") -> ReaderGroup:
    """Create a group and plan to read everything."""
    await bulk.create(start=start)
    return await bulk.plan_all(await bulk.claim())


# --- whatever happens to its messages -------------------------------------------------------------


async def complete(http: HttpClient, queue: str) -> None:
    locked = await http.lock(queue)
    assert (await http.call("DELETE", locked.path)).status == 200


async def take(http: HttpClient, queue: str) -> None:
    assert (await http.take(queue)).status == 200


async def dead_letter(http: HttpClient, queue: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, _dead_letter, http.bus, queue)


def _dead_letter(bus: BusThread, queue: str) -> None:
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        [message] = receiver.receive_messages(max_wait_time=5)
        receiver.dead_letter_message(message, reason="NoUse", error_description="x" * 1_000)


async def defer(http: HttpClient, queue: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, _defer, http.bus, queue)


def _defer(bus: BusThread, queue: str) -> None:
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        [message] = receiver.receive_messages(max_wait_time=5)
        receiver.defer_message(message)


async def abandon(http: HttpClient, queue: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, _abandon, http.bus, queue)


def _abandon(bus: BusThread, queue: str) -> None:
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        [message] = receiver.receive_messages(max_wait_time=5)
        receiver.abandon_message(message)


async def expire(http: HttpClient, queue: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, http.bus.advance, 120_000)
    assert (await http.lock(queue)).status in (201, 204)


async def purge(http: HttpClient, queue: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, _purge, http.bus, queue)


def _purge(bus: BusThread, queue: str) -> None:
    entry = bus._directory.find(queue)
    assert entry is not None
    command = DeleteBySequence(entry.entity_no, SubQueue.ACTIVE, [1, 2, 3])
    done = bus.run(bus._hosts[entry.home_partition].call(command))
    assert isinstance(done, MessagesHandled)
    assert sorted(done.done) == [1, 2, 3]


async def forward(http: HttpClient, queue: str) -> None:
    target = http.bus.queue()
    change = http.bus.change
    await asyncio.get_running_loop().run_in_executor(None, lambda: change(queue, forwardTo=target))
    for _ in range(3):
        assert (await http.take(target, 5)).status == 200


async def reload(http: HttpClient, queue: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, http.bus.reload, queue)


@pytest.mark.slow
@pytest.mark.parametrize(
    "happens", [complete, take, dead_letter, defer, abandon, expire, purge, forward, reload]
)
async def test_a_planned_range_is_the_same_bytes_whatever_happens_to_its_messages(
    http: HttpClient, happens: Any
) -> None:
    queue = http.bus.queue()
    await send(http, queue, "one", "two", "three", TimeToLive=60)
    bulk = BulkClient(http, queue)
    group = await planned(bulk)
    before = await streamed(bulk, group)
    assert bodies_of(table_of_bytes(before[0])) == [b"one", b"two", b"three"]
    await happens(http, queue)
    await reaped(http.bus)
    assert await streamed(bulk, group) == before
    await reload(http, queue)
    await reaped(http.bus)
    assert await streamed(bulk, group) == before


def table_of_bytes(stream: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.ipc.open_stream(stream).read_all().to_pylist()
    return rows


async def test_messages_are_read_by_everyone_who_asks(http: HttpClient) -> None:
    queue = http.bus.queue()
    bulk = BulkClient(http, queue)
    await bulk.create("first")
    await bulk.create("second")
    await send(http, queue, "one")
    await take(http, queue)
    for name in ("first", "second"):
        group = await bulk.plan_all(await bulk.claim(name))
        assert bodies_of(await bulk.read(group)) == [b"one"]
        await bulk.post("settle", name, epoch=group.epoch, number=group.plan.number)
        await reaped(http.bus)


@pytest.mark.slow
@pytest.mark.parametrize("is_partitioned", [False, True])
async def test_every_message_is_read_once_while_others_send_receive_and_delete(
    http: HttpClient, is_partitioned: bool
) -> None:
    queue = http.bus.queue(enablePartitioning=is_partitioned)
    bulk = BulkClient(http, queue)
    await bulk.create()
    found: list[bytes] = []
    sending = asyncio.Event()

    async def send_some(sender: int) -> None:
        for n in range(40):
            await send(http, queue, f"{sender} {n}")

    async def take_some() -> None:
        while not sending.is_set():
            assert (await http.take(queue)).status in (200, 204)

    async def delete_some() -> None:
        while not sending.is_set():
            await reaped(http.bus)

    async def read_all() -> None:
        group = await bulk.claim()
        is_last = False
        while not is_last:
            is_last = sending.is_set()
            group = await bulk.plan_all(group)
            if not group.plan.is_settled:
                found.extend(bodies_of(await bulk.read(group)))
                number = group.plan.number
                assert (await bulk.post("settle", epoch=group.epoch, number=number)).status == 200

    others = [asyncio.create_task(work()) for work in (take_some, take_some, delete_some, read_all)]
    await asyncio.gather(*(send_some(sender) for sender in range(6)))
    sending.set()
    await asyncio.gather(*others)
    assert sorted(found) == sorted(f"{k} {n}".encode() for k in range(6) for n in range(40))


async def test_a_group_begins_with_live_messages_below_what_was_deleted(http: HttpClient) -> None:
    queue = http.bus.queue()
    await send(http, queue, "a", "b", "c")
    for _ in "abc":
        await dead_letter(http, queue)
    bulk = BulkClient(http, queue, "deadLetter")
    group = await planned(bulk)
    assert (await bulk.post("settle", epoch=group.epoch, number=group.plan.number)).status == 200
    await asyncio.get_running_loop().run_in_executor(None, _delete_dead, http.bus, queue, 2)
    await reaped(http.bus)
    await bulk.create("late", "earliest")
    late = await bulk.plan_all(await bulk.claim("late"))
    assert bodies_of(await bulk.read(late)) == [b"a", b"c"]
    assert (await bulk.post("reset", start="earliest")).status == 200
    again = await bulk.plan_all(await bulk.claim())
    assert bodies_of(await bulk.read(again)) == [b"a", b"c"]
    # What is deleted from now on is missing for who reads it again.
    for which in (again, late):
        settled = await bulk.post("settle", which.name, epoch=which.epoch, number=which.plan.number)
        assert settled.status == 200
    await asyncio.get_running_loop().run_in_executor(None, _delete_dead, http.bus, queue, 3)
    await reaped(http.bus)
    [(partition, (first, end))] = again.plan.ranges.items()
    assert problem_of(await bulk.stream(partition, first, end, again.epoch)) == (410, "DataLoss")


def _delete_dead(bus: BusThread, queue: str, number: int) -> None:
    entry = bus._directory.find(queue)
    assert entry is not None
    command = DeleteBySequence(entry.entity_no, SubQueue.DEAD_LETTER, [number])
    done = bus.run(bus._hosts[entry.home_partition].call(command))
    assert isinstance(done, MessagesHandled)
    assert list(done.done) == [number]


# --- missing rows are told ------------------------------------------------------------------------


async def test_rows_that_were_deleted_are_told_also_when_their_block_is_forgotten(
    http: HttpClient,
) -> None:
    queue = http.bus.queue()
    bulk = BulkClient(http, queue)
    old = await planned(bulk)
    await send(http, queue, *[f"m{n}" for n in range(300)])  # the first block has 256 keys
    group = await bulk.plan_all(old)
    [(partition, (first, end))] = group.plan.ranges.items()
    for _ in range(256):
        await take(http, queue)
    await bulk.post("settle", epoch=group.epoch, number=group.plan.number)
    await reaped(http.bus)
    assert problem_of(await bulk.stream(partition, first, end, group.epoch)) == (410, "DataLoss")
    await reload(http, queue)
    assert problem_of(await bulk.stream(partition, first, end, group.epoch)) == (410, "DataLoss")


async def delete_entity(bulk: BulkClient) -> None:
    delete = bulk.http.bus.delete
    await asyncio.get_running_loop().run_in_executor(None, delete, bulk.entity)


async def drop_group(bulk: BulkClient) -> None:
    assert (await bulk.call("DELETE", "groups/lake")).status == 204


async def settle_and_plan(bulk: BulkClient) -> None:
    await bulk.plan_all(group := await bulk.claim())
    await bulk.post("settle", epoch=group.epoch, number=group.plan.number)


async def reset_to_the_end(bulk: BulkClient) -> None:
    assert (await bulk.post("reset", start="latest")).status == 200


async def claim_again(bulk: BulkClient) -> None:
    await bulk.claim(reader="another")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happens", "is_cut"),
    [
        (delete_entity, True),
        (drop_group, True),
        (settle_and_plan, True),
        (reset_to_the_end, True),
        (claim_again, False),
    ],
)
async def test_a_stream_is_whole_or_cut(
    http: HttpClient, queue: str, happens: Callable[[BulkClient], Any], is_cut: bool
) -> None:
    """Its rows were completed, and are deleted when no group needs them any more."""
    bulk = BulkClient(http, queue)
    await bulk.create()
    for _ in range(90):
        assert (await http.send(queue, b"x" * 200_000)).status == 201
    group = await bulk.plan_all(await bulk.claim())
    for _ in range(90):
        await take(http, queue)
    [(partition, (first, end))] = group.plan.ranges.items()
    at = (
        f"/{queue}/$bulk/rows?group=lake&epoch={group.epoch}&partition={partition}"
        f"&from={first}&to={end}"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", http.bus.port, limit=4_096)
    writer.write(f"GET {at} HTTP/1.1\r\n".encode() + fields_of(http))
    await reader.readuntil(b"\r\n\r\n")
    await happens(bulk)
    await reaped(http.bus)
    assert (await rest_of(reader)).endswith(LAST_CHUNK) is not is_cut
    writer.close()


async def test_a_paused_reader_of_a_dropped_group_is_refused_by_the_next_one_of_its_name(
    http: HttpClient, queue: str
) -> None:
    bulk = BulkClient(http, queue)
    await send(http, queue, "one")
    paused = await planned(bulk)
    assert (await bulk.call("DELETE", "groups/lake")).status == 204
    again = await planned(bulk)
    while again.epoch < paused.epoch:
        again = await bulk.claim()
    answer = await bulk.post("settle", epoch=paused.epoch, number=again.plan.number)
    assert problem_of(answer) == (409, "Fenced")


async def test_an_entity_that_is_created_again_has_no_groups_and_another_generation(
    http: HttpClient, queue: str
) -> None:
    bulk = BulkClient(http, queue)
    await send(http, queue, "one")
    group = await planned(bulk)
    [(partition, (first, end))] = group.plan.ranges.items()
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, http.bus.delete, queue)
    assert problem_of(await bulk.post("claim")) == (404, "EntityNotFound")
    await loop.run_in_executor(None, http.bus.queue, queue)
    assert problem_of(await bulk.post("claim")) == (404, "GroupNotFound")
    refused = await bulk.stream(partition, first, end, group.epoch)
    assert refused.status in (400, 404), "it may have another partition"
    again = group_of(await bulk.create())
    assert again.generation != group.generation
    assert again.epoch > group.epoch


# --- other places ---------------------------------------------------------------------------------


async def test_sessions_are_read_in_order_of_arrival(http: HttpClient) -> None:
    queue = http.bus.queue(requiresSession=True)
    for n in range(6):
        await send(http, queue, f"m{n}", SessionId=f"s{n % 2}")
    bulk = BulkClient(http, queue)
    group = await planned(bulk)
    assert bodies_of(await bulk.read(group)) == [f"m{n}".encode() for n in range(6)]


async def test_a_scheduled_message_is_read_when_it_is_active(http: HttpClient) -> None:
    queue = http.bus.queue()
    bulk = BulkClient(http, queue)
    await bulk.create()
    due = (http.bus.now() + timedelta(minutes=5)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    await send(http, queue, "later", ScheduledEnqueueTimeUtc=due)
    await send(http, queue, "now")
    group = await bulk.plan_all(await bulk.claim())
    assert bodies_of(await bulk.read(group)) == [b"now"]
    await asyncio.get_running_loop().run_in_executor(None, http.bus.advance, 600_000)
    group = await bulk.plan_all(group)
    [row] = await bulk.read(group)
    assert bodies_of([row]) == [b"later"]
    assert (await http.take(queue)).broker["SequenceNumber"] == 2
    assert (await http.take(queue)).broker["SequenceNumber"] == row["sequence_number"]


async def test_dead_letters_keep_their_numbers_and_a_time_finds_all_of_them(
    http: HttpClient, queue: str
) -> None:
    await send(http, queue, "first")
    await asyncio.get_running_loop().run_in_executor(None, http.bus.advance, 60_000)
    since = http.bus.now().isoformat()
    await send(http, queue, "second")
    locked = await http.lock(queue)
    await dead_letter(http, queue)
    assert (await http.call("PUT", locked.path)).status == 200
    await dead_letter(http, queue)
    bulk = BulkClient(http, queue, "deadLetter")
    group = await planned(bulk)
    rows = await bulk.read(group)
    assert [row["sequence_number"] for row in rows] == [2, 1]
    assert bodies_of(rows) == [b"second", b"first"]
    before = await streamed(bulk, group)
    await take(http, queue + DLQ)
    await asyncio.get_running_loop().run_in_executor(None, _resend, http.bus, queue, 1)
    assert (await http.take(queue, 5)).body == b"first"
    await reaped(http.bus)
    assert await streamed(bulk, group) == before
    await bulk.create("since", since)
    assert bodies_of(await bulk.read(await bulk.plan_all(await bulk.claim("since"))))[:1] == [
        b"second"
    ]


def _resend(bus: BusThread, queue: str, number: int) -> None:
    entry = bus._directory.find(queue)
    assert entry is not None
    resent = ResendBySequence(entry.entity_no, SubQueue.DEAD_LETTER, [number], entry.entity_no)
    done = bus.run(bus._hosts[entry.home_partition].call(resent))
    assert isinstance(done, MessagesHandled)
    assert list(done.done) == [number]


async def test_a_subscription_reads_bodies_that_it_shares(http: HttpClient) -> None:
    topic = http.bus.topic()
    for name in ("a", "b"):
        http.bus.subscription(topic, name)
    bulk = BulkClient(http, f"{topic}/Subscriptions/a")
    await bulk.create()
    body = "shared " * 2_000
    await send(http, topic, body)
    group = await bulk.plan_all(await bulk.claim())
    before = await streamed(bulk, group)
    for name in ("a", "b"):
        await take(http, f"{topic}/Subscriptions/{name}")
    await reaped(http.bus)
    assert await streamed(bulk, group) == before
    [row] = await bulk.read(group)
    assert row["body"].endswith(body.encode())


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_bodies_of_any_size_and_none_come_whole(http: HttpClient, queue: str) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    sizes = [0, 1, 255, 256, 8_191, 8_192, 8_193, 100_000, 250_000, 0, 3]
    for size in sizes:
        await send(http, queue, "x" * size)
    properties = {f"p{n}": '"' + "v" * 30_000 + '"' for n in range(2)}
    assert (await http.send(queue, "many", headers=properties)).status == 201
    rows = await bulk.read(await bulk.plan_all(await bulk.claim()))
    assert len(rows) == len(sizes) + 1
    for size, row in zip(sizes, rows, strict=False):
        assert (row["body"] or b"").count(b"x") == size
        assert row["application_properties"] is None
    assert len(rows[-1]["application_properties"]) > 60_000


@pytest.mark.slow
async def test_bodies_of_every_kind_come_as_they_were_sent(http: HttpClient, queue: str) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    await asyncio.get_running_loop().run_in_executor(None, _send_kinds, http.bus, queue)
    rows = await bulk.read(await bulk.plan_all(await bulk.claim()))
    assert [row["body"][:3] for row in rows] == [b"\0Su", b"\0Su", b"\0Sw"]
    assert [row["application_properties"] is None for row in rows] == [True, False, True]


def _send_kinds(bus: BusThread, queue: str) -> None:
    with bus.client() as client, client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage(b""))
        sender.send_messages(ServiceBusMessage(b"x", application_properties={"a": 1}))
        sender.send_messages(AmqpAnnotatedMessage(value_body={"a": [1, None]}))


@pytest.mark.parametrize("chunk_bytes", [1, 99, 100, 101, 1_000, 10_000])
@pytest.mark.parametrize("max_rows", [1, 7, 4_096])
async def test_no_limit_of_a_chunk_loses_or_doubles_a_row(
    http: HttpClient,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
    max_rows: int,
) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    members = [{"Body": "x" * (50 * (n % 3))} for n in range(20)]
    assert (await http.send_batch(queue, members)).status == 201
    group = await bulk.plan_all(await bulk.claim())
    whole = await bulk.read(group)
    monkeypatch.setattr(bulk_reads, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(bulk_reads, "MAX_CHUNK_ROWS", max_rows)
    monkeypatch.setattr(bulk_access, "FIRST_ROWS", max_rows)
    assert await bulk.read(group) == whole
    assert [row["sequence_number"] for row in whole] == list(range(1, 21))


@pytest.mark.slow
async def test_a_body_of_100_mb_is_read_in_pieces(
    premium_bus: BusThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow reader has its time for each piece."""
    sizes: list[int] = []
    write = web.StreamResponse.write

    async def measured(answer: web.StreamResponse, data: bytes | memoryview) -> None:
        sizes.append(len(data))
        await write(answer, data)

    monkeypatch.setattr(web.StreamResponse, "write", measured)
    queue = premium_bus.queue(max_message_size_in_kilobytes=102_400)
    body = b"0123456789" * 10_000_000
    async with aiohttp.ClientSession() as session:
        http = HttpClient(premium_bus, session)
        bulk = BulkClient(http, queue)
        await bulk.create()
        await asyncio.get_running_loop().run_in_executor(
            None, _store_large, premium_bus, queue, body
        )
        group = await bulk.plan_all(await bulk.claim())
        rows = await bulk.read(group)
        assert [len(row["body"]) for row in rows] == [10, 8 + len(body), 11]
        assert rows[1]["body"].endswith(body)
        first, end = group.plan.ranges[0]
        chosen = await bulk.stream(0, first, end, group.epoch, columns="position")
        assert len(chosen.body) < 10_000
    assert max(sizes) == WRITE_BYTES
    await nothing_is_held(premium_bus)


def _store_large(bus: BusThread, queue: str, body: bytes) -> None:
    entry = bus._directory.find(queue)
    assert entry is not None
    for each in (b"small", body, b"behind"):
        head = b"\xa0" + bytes([len(each)]) if len(each) < 256 else b"\xb0" + pack(">I", len(each))
        envelope = slice_message(b"\x00\x53\x75" + head + each)
        done = bus.run(bus._hosts[0].call(Enqueue(entry.entity_no, [envelope])))
        assert isinstance(done, Enqueued)
        assert done.refusals is None


async def test_groups_over_http_are_created_once_by_two_at_once(
    http: HttpClient, queue: str
) -> None:
    bulk = BulkClient(http, queue)
    answers = await asyncio.gather(*(bulk.create(start="latest") for _ in range(8)))
    assert {answer.status for answer in answers} <= {200, 201}
    assert len({str(group_of(answer).plan) for answer in answers}) == 1
    assert len({group_of(answer).epoch for answer in answers}) == 1
