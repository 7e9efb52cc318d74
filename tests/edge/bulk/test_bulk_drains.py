"""A group that drains a queue: instead of receivers, each message once, and rejects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import aiohttp
import pytest
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusMessage,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import ServiceBusError

from postbus.contract.bulk import ReaderGroup, RejectedMessages
from postbus.entity.group_commands import DropGroup
from tests.edge.bulk.bulk_client import (
    BulkClient,
    bodies_of,
    group_of,
    handler_of,
    nothing_is_held,
    problem_of,
    reaped,
    streamed,
    wait_until,
)
from tests.edge.bus_thread import BusThread
from tests.edge.http_client import Answer, HttpClient


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)
    await nothing_is_held(bus)


async def send(http: HttpClient, queue: str, *bodies: str, **broker: object) -> None:
    for body in bodies:
        assert (await http.send(queue, body, broker or None)).status == 201


async def drained(http: HttpClient, queue: str, sub_queue: str = "main") -> BulkClient:
    bulk = BulkClient(http, queue, sub_queue)
    created = await bulk.create(kind="drain")
    assert (created.status, group_of(created).kind) == (201, "drain")
    return bulk


async def planned(bulk: BulkClient) -> ReaderGroup:
    return await bulk.plan_all(await bulk.claim())


async def reject(
    bulk: BulkClient, group: ReaderGroup, rows: list[dict[str, object]], **more: object
) -> Answer:
    [partition] = group.plan.ranges
    return await bulk.post(
        "reject", epoch=group.epoch, partition=partition,
        positions=[row["position"] for row in rows], **{"reason": "NoPrice", **more},
    )  # fmt: skip


async def settle(bulk: BulkClient, group: ReaderGroup) -> None:
    answer = await bulk.post("settle", epoch=group.epoch, number=group.plan.number)
    assert answer.status == 200, answer.body


async def test_a_drain_reads_and_settles_instead_of_receivers(http: HttpClient, queue: str) -> None:
    await send(http, queue, "one", "two", "three")
    bulk = await drained(http, queue)
    group = await planned(bulk)
    assert bodies_of(await bulk.read(group)) == [b"one", b"two", b"three"]
    before = await streamed(bulk, group)
    await asyncio.get_running_loop().run_in_executor(None, http.bus.reload, queue)
    again = await bulk.claim()
    assert await streamed(bulk, again) == before
    await settle(bulk, again)
    await wait_until(lambda: http.bus.counts(queue).active == 0)
    [(partition, (first, end))] = again.plan.ranges.items()
    refused = await bulk.stream(partition, first, end, again.epoch)
    assert problem_of(refused) == (409, "StaleCheckpoint")
    await send(http, queue, "four")
    refused = await bulk.stream(partition, end, end + 1, again.epoch)
    assert problem_of(refused) == (409, "NotAllowed"), "it was not planned"
    assert bodies_of(await bulk.read(await bulk.plan_all(again))) == [b"four"]


def _attach(bus: BusThread, queue: str) -> str:
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        return _refusal_of(receiver)


def _refusal_of(receiver: ServiceBusReceiver) -> str:
    with pytest.raises(ServiceBusError) as caught:
        receiver.receive_messages(max_wait_time=5)
    return str(caught.value)


async def test_receivers_are_refused_with_the_name_of_the_group(
    http: HttpClient, queue: str
) -> None:
    run = asyncio.get_running_loop().run_in_executor
    await send(http, queue, "one", "two")
    locked = await http.lock(queue)
    bulk = await drained(http, queue)
    assert "lake drains the messages" in await run(None, _attach, http.bus, queue)
    assert (await http.take(queue)).status == 400
    group = await planned(bulk)
    assert await bulk.read(group) == [], "a receiver has the first message"
    assert (await http.call("PUT", locked.path)).status == 200
    group = await bulk.plan_all(group)
    assert bodies_of(await bulk.read(group)) == [b"one", b"two"]
    other = await bulk.create("other", kind="drain")
    assert problem_of(other) == (409, "NotAllowed")
    assert "lake" in other.body.decode()
    await settle(bulk, group)
    await send(http, queue, "three")
    while (await bulk.call("DELETE", "groups/lake")).status == 503:
        await reaped(http.bus)
    assert (await http.take(queue)).body == b"three"


async def test_rejected_messages_are_dead_letters_with_their_reason(
    http: HttpClient, queue: str
) -> None:
    await send(http, queue, "one", "two", "three")
    bulk = await drained(http, queue)
    group = await planned(bulk)
    before = await streamed(bulk, group)
    _, second, third = await bulk.read(group)
    answer = await reject(bulk, group, [second], description="not in the list")
    assert answer.status == 200, answer.body
    assert RejectedMessages.model_validate_json(answer.body).rejected == 1
    answer = await reject(bulk, group, [second, third], reason="Other")
    assert RejectedMessages.model_validate_json(answer.body).rejected == 1
    assert await streamed(bulk, group) == before
    await reaped(http.bus)
    await asyncio.get_running_loop().run_in_executor(None, http.bus.reload, queue)
    group = await bulk.claim()
    assert await streamed(bulk, group) == before
    assert http.bus.counts(queue).active == 1
    await settle(bulk, group)
    await wait_until(lambda: http.bus.counts(queue).active == 0)
    await reaped(http.bus)
    dead = await asyncio.get_running_loop().run_in_executor(None, _dead, http.bus, queue)
    assert dead == [("two", 2, "NoPrice", "not in the list"), ("three", 3, "Other", "")]


def _dead(bus: BusThread, queue: str) -> list[tuple[str, int | None, str | None, str | None]]:
    with (
        bus.client() as client,
        client.get_queue_receiver(queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver,
    ):
        received = receiver.receive_messages(max_message_count=10, max_wait_time=2)
        return [
            (str(each), each.sequence_number, each.dead_letter_reason,
             each.dead_letter_error_description)
            for each in received
        ]  # fmt: skip


async def test_dead_letters_are_drained(http: HttpClient, queue: str) -> None:
    run = asyncio.get_running_loop().run_in_executor
    await send(http, queue, "one", "two")
    await run(None, _bury, http.bus, queue)
    bulk = await drained(http, queue, "deadLetter")
    group = await planned(bulk)
    rows = await bulk.read(group)
    assert bodies_of(rows) == [b"one", b"two"]
    assert problem_of(await reject(bulk, group, rows)) == (409, "NotAllowed")
    await send(http, queue, "three")
    assert (await http.take(queue)).body == b"three", "the main queue has receivers"
    await settle(bulk, group)
    await wait_until(lambda: http.bus.counts(queue).dead_letter == 0)


def _bury(bus: BusThread, queue: str) -> None:
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        for _ in range(2):
            [message] = receiver.receive_messages(max_wait_time=5)
            receiver.dead_letter_message(message, reason="x")


async def test_deferred_and_scheduled_messages_are_left(http: HttpClient, queue: str) -> None:
    run = asyncio.get_running_loop().run_in_executor
    await send(http, queue, "one", "two")
    await run(None, _defer_first, http.bus, queue)
    later = http.bus.now().timestamp() * 1_000 + 60_000
    await run(None, _schedule, http.bus, queue, later)
    bulk = await drained(http, queue)
    group = await planned(bulk)
    assert bodies_of(await bulk.read(group)) == [b"two"]
    [found] = (await bulk.ranges("lake")).partitions
    assert found.deferred == 1
    await settle(bulk, group)
    await wait_until(lambda: http.bus.counts(queue).active == 1)
    assert http.bus.counts(queue).scheduled == 1


def _defer_first(bus: BusThread, queue: str) -> None:
    with bus.client() as client, client.get_queue_receiver(queue) as receiver:
        [message] = receiver.receive_messages(max_wait_time=5)
        receiver.defer_message(message)


def _schedule(bus: BusThread, queue: str, at_ms: float) -> None:
    with bus.client() as client, client.get_queue_sender(queue) as sender:
        sender.schedule_messages(
            ServiceBusMessage("later"), datetime.fromtimestamp(at_ms / 1_000, UTC)
        )


async def test_sessions_are_drained_in_order_of_arrival(http: HttpClient) -> None:
    queue = http.bus.queue(requiresSession=True)
    for n in range(6):
        await send(http, queue, f"m{n}", SessionId=f"s{n % 2}")
    bulk = await drained(http, queue)
    group = await planned(bulk)
    rows = await bulk.read(group)
    assert bodies_of(rows) == [f"m{n}".encode() for n in range(6)]
    refused = await asyncio.get_running_loop().run_in_executor(None, _accept, http.bus, queue)
    assert "lake drains the messages" in refused
    assert (await reject(bulk, group, rows[:2])).status == 200
    await settle(bulk, group)
    await wait_until(lambda: http.bus.counts(queue).active == 0)
    assert http.bus.counts(queue).dead_letter == 2


def _accept(bus: BusThread, queue: str) -> str:
    with bus.client() as client:
        return _refusal_of(
            client.get_queue_receiver(queue, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=5)
        )


async def test_a_partitioned_queue_is_drained_by_one_plan(http: HttpClient) -> None:
    queue = http.bus.queue(enablePartitioning=True)
    for n in range(40):
        await send(http, queue, f"m{n}", PartitionKey=f"k{n}")
    bulk = await drained(http, queue)
    group = await planned(bulk)
    rows = await bulk.read(group)
    assert sorted(bodies_of(rows)) == sorted(f"m{n}".encode() for n in range(40))
    assert (await http.take(queue)).status == 400
    await settle(bulk, group)
    await wait_until(lambda: http.bus.counts(queue).active == 0)


async def test_a_drain_is_created_again_after_half_of_it_was_dropped(http: HttpClient) -> None:
    queue = http.bus.queue(enablePartitioning=True)
    for n in range(40):
        await send(http, queue, f"m{n}", PartitionKey=f"k{n}")
    bulk = await drained(http, queue)
    group = await planned(bulk)
    await settle(bulk, group)
    while sum(each.messages for each in (await bulk.ranges()).partitions):
        await reaped(http.bus)
    access = handler_of(http.bus)._access
    address = http.bus.run(access.resolve(queue))
    place = (address.entity_no, address.sub_queue)
    http.bus.run(access._call(access._home(address), DropGroup(*place, "lake")))
    await send(http, queue, "later", PartitionKey="k1")
    http.bus.advance(1_000)
    bulk = await drained(http, queue)
    assert bodies_of(await bulk.read(await planned(bulk))) == [b"later"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"positions": []}, "InvalidRequest"),
        ({"positions": list(range(1_001))}, "InvalidRequest"),
        ({"positions": [-1]}, "InvalidRequest"),
        ({"positions": [2**63]}, "InvalidRequest"),
        ({"positions": [2**62]}, "InvalidRequest"),
        ({"partition": 63}, "InvalidRequest"),
        ({"reason": ""}, "InvalidRequest"),
        ({"reason": "x" * 4_097}, "InvalidRequest"),
        ({"epoch": 1}, "Fenced"),
    ],
)
async def test_a_reject_that_is_wrong_is_refused(
    http: HttpClient, queue: str, fields: dict[str, object], code: str
) -> None:
    await send(http, queue, "one")
    bulk = await drained(http, queue)
    group = await planned(bulk)
    [row] = await bulk.read(group)
    [partition] = group.plan.ranges
    body = {
        "epoch": group.epoch, "partition": partition, "positions": [row["position"]],
        "reason": "x", **fields,
    }  # fmt: skip
    assert problem_of(await bulk.post("reject", **body))[1] == code
    assert http.bus.counts(queue).dead_letter == 0


@pytest.mark.parametrize("start", ["latest", "2026-01-31T08:00:00Z"])
async def test_a_drain_begins_with_everything(http: HttpClient, queue: str, start: str) -> None:
    bulk = BulkClient(http, queue)
    assert problem_of(await bulk.create(start=start, kind="drain")) == (400, "InvalidRequest")
    await drained(http, queue)
    assert problem_of(await bulk.post("reset", start="latest")) == (400, "InvalidRequest")
    assert (await bulk.post("reset", start="earliest")).status == 200
