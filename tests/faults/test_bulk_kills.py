"""A reader group outlives brokers that are killed: its plan, its number and its bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from postbus.contract.bulk import ReaderGroup
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database
from tests.edge.bulk.bulk_client import BulkClient, bodies_of, group_of, streamed
from tests.edge.bulk.writer_client import WriterClient, message
from tests.edge.bus_thread import BusThread, sas_token
from tests.edge.http_client import HttpClient, url_of
from tests.faults.kill_nine import MANIFEST, QUEUE
from tests.faults.victims import KEY, Broker, wait_for_port

LIVES = 4
COUNT = 30
PART = 900
"""Messages of a stage: a broker is busy with three for some commits."""
EVER_S = 4_000_000_000
DLQ = "/$DeadLetterQueue"


@pytest.mark.slow
async def test_a_plan_is_read_again_in_the_next_life_of_the_broker(
    postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    make_database(postgres_server, "bulk_kills")
    broker = Broker(tmp_path, dsn_of(postgres_server, "bulk_kills"), ["-m", "postbus"], MANIFEST)
    found: list[bytes] = []
    before: list[bytes] = []
    planned: ReaderGroup | None = None
    try:
        for life in range(LIVES):
            broker.start()
            await wait_for_port(broker.port)
            async with aiohttp.ClientSession() as session:
                http = client_of(broker, session)
                bulk = BulkClient(http, QUEUE)
                created = await bulk.create()
                assert created.status == (201 if life == 0 else 200), created.body
                group = await bulk.claim(reader=f"life {life}")
                if planned is not None:
                    assert (group.plan, group.epoch > planned.epoch) == (planned.plan, True)
                    assert await streamed(bulk, group) == before
                    found += bodies_of(await bulk.read(group))
                await send_and_take(http, life)
                planned = await bulk.plan_all(group)
                assert planned.plan.number == life + 1
                before = await streamed(bulk, planned)
                await kill_during(broker, bulk, planned)
        broker.start()
        await wait_for_port(broker.port)
        async with aiohttp.ClientSession() as session:
            bulk = BulkClient(client_of(broker, session), QUEUE)
            group = await bulk.claim()
            found += bodies_of(await bulk.read(group))
            settled = await bulk.post("settle", epoch=group.epoch, number=group.plan.number)
            assert group_of(settled).plan.is_settled
        assert found == [f"{life} {n}".encode() for life in range(LIVES) for n in range(COUNT)]
    finally:
        broker.kill()


@pytest.mark.slow
async def test_a_drain_goes_on_in_the_next_life_of_the_broker(
    postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Each message is read, and is a dead letter once or gone, whatever was under way."""
    make_database(postgres_server, "drain_kills")
    broker = Broker(tmp_path, dsn_of(postgres_server, "drain_kills"), ["-m", "postbus"], MANIFEST)
    found: list[bytes] = []
    before: list[bytes] = []
    try:
        for life in range(LIVES + 1):
            broker.start()
            await wait_for_port(broker.port)
            async with aiohttp.ClientSession() as session:
                http = client_of(broker, session)
                bulk = BulkClient(http, QUEUE)
                await bulk.create(kind="drain")
                group = await bulk.claim(reader=f"life {life}")
                if life:
                    assert await streamed(bulk, group) == before
                    found += bodies_of(await bulk.read(group))
                    await reject_some(bulk, group)
                if life < LIVES:
                    for n in range(COUNT):
                        assert (await http.send(QUEUE, f"{life} {n}")).status == 201
                    group = await bulk.plan_all(group)
                    before = await streamed(bulk, group)
                    under_way = [
                        asyncio.create_task(reject_some(bulk, group)),
                        asyncio.create_task(bulk.plan_all(group)),
                    ]
                    await under_way[0] if life % 2 else await asyncio.sleep(0)
                    await asyncio.to_thread(broker.kill)
                    await asyncio.gather(*under_way, return_exceptions=True)
                else:
                    await bulk.post("settle", epoch=group.epoch, number=group.plan.number)
                    while (await bulk.call("DELETE", "groups/lake")).status == 503:
                        await asyncio.sleep(0)
                    assert (await http.take(QUEUE)).status == 204
                    dead = [(await http.take(QUEUE + DLQ)).body for _ in range(LIVES * 3)]
                    assert (await http.take(QUEUE + DLQ)).status == 204
        sent = [f"{life} {n}".encode() for life in range(LIVES) for n in range(COUNT)]
        assert found == sent
        assert sorted(dead) == sorted(body for body in sent if body.endswith(b"3"))
    finally:
        broker.kill()


async def reject_some(bulk: BulkClient, group: ReaderGroup) -> None:
    rows = [row for row in await bulk.read(group) if row["body"].endswith(b"3")]
    [partition] = group.plan.ranges
    rejected = await bulk.post(
        "reject", epoch=group.epoch, partition=partition, reason="NoPrice",
        positions=[row["position"] for row in rows],
    )  # fmt: skip
    assert rejected.status == 200, rejected.body


@pytest.mark.slow
async def test_a_batch_is_sent_once_by_brokers_that_are_killed(
    postgres_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    """A writer repeats what was not answered; another life of the broker sends the rest."""
    make_database(postgres_server, "writer_kills")
    broker = Broker(tmp_path, dsn_of(postgres_server, "writer_kills"), ["-m", "postbus"], MANIFEST)
    try:
        for life in range(2 * LIVES):
            broker.start()
            await wait_for_port(broker.port)
            async with aiohttp.ClientSession() as session:
                writer = WriterClient(client_of(broker, session), QUEUE)
                if life:
                    assert (await batch_of(writer, life - 1))["isDone"]
                stages = [await writer.stage(*messages_of(life, part)) for part in range(3)]
                under_way = asyncio.create_task(writer.publish_raw(life, stages))
                match life % 4:
                    case 0:
                        await under_way
                    case 1:
                        await wait_for_batch(writer, life, left=3 * PART)
                    case 2:
                        await asyncio.sleep(0)
                    case 3:
                        await wait_for_batch(writer, life, left=3 * PART - 1)
                await asyncio.to_thread(broker.kill)
                await asyncio.gather(under_way, return_exceptions=True)
        broker.start()
        await wait_for_port(broker.port)
        async with aiohttp.ClientSession() as session:
            http = client_of(broker, session)
            assert (await batch_of(WriterClient(http, QUEUE), 2 * LIVES - 1))["isDone"]
            bulk = BulkClient(http, QUEUE)
            await bulk.create()
            rows = await bulk.read(await bulk.plan_all(await bulk.claim()))
        assert [row["body"][8:] for row in rows] == [
            f"{life} {part} {n}".encode()
            for life in range(2 * LIVES)
            for part in range(3)
            for n in range(PART)
        ]
    finally:
        broker.kill()


async def wait_for_batch(writer: WriterClient, batch: int, left: int) -> None:
    """Wait until a batch is decided and at most `left` messages of it are still to arrive."""
    async with asyncio.timeout(30):
        while True:
            shown = json.loads((await writer.call("GET")).body)
            if shown.get("batch") == batch and shown["left"] <= left:
                return


def messages_of(life: int, part: int) -> list[bytes]:
    return [message(f"{life} {part} {n}".encode()) for n in range(PART)]


async def batch_of(writer: WriterClient, life: int) -> dict[str, Any]:
    """Publish a batch that may have been published, and wait until it has arrived."""
    stages = [await writer.stage(*messages_of(life, part)) for part in range(3)]
    while not (published := await writer.publish(life, *stages))["isDone"]:
        pass
    return published


def client_of(broker: Broker, session: aiohttp.ClientSession) -> HttpClient:
    at = cast("BusThread", SimpleNamespace(port=broker.port))
    http = HttpClient(at, session)
    http.token = sas_token(f"{url_of(at)}/", "RootManageSharedAccessKey", KEY, EVER_S)
    return http


async def send_and_take(http: HttpClient, life: int) -> None:
    """Send messages; receivers take half of them."""
    for n in range(COUNT):
        assert (await http.send(QUEUE, f"{life} {n}")).status == 201
    for _ in range(COUNT // 2):
        assert (await http.take(QUEUE)).status == 200


async def kill_during(broker: Broker, bulk: BulkClient, group: ReaderGroup) -> None:
    """Kill while the plan is planned again, read and settled as an old reader would."""
    ranges = {str(partition): list(each) for partition, each in group.plan.ranges.items()}
    under_way = [
        asyncio.create_task(bulk.post("plan", epoch=group.epoch, ranges=ranges)),
        asyncio.create_task(streamed(bulk, group)),
        asyncio.create_task(bulk.post("settle", epoch=group.epoch - 1, number=group.plan.number)),
    ]
    await asyncio.sleep(0)
    await asyncio.to_thread(broker.kill)
    await asyncio.gather(*under_way, return_exceptions=True)
