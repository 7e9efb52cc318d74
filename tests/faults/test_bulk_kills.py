"""A reader group outlives brokers that are killed: its plan, its number and its bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest

from postbus.contract.bulk import ReaderGroup
from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import dsn_of, make_database
from tests.edge.bulk.bulk_client import BulkClient, bodies_of, group_of, streamed
from tests.edge.bus_thread import BusThread, sas_token
from tests.edge.http_client import HttpClient, url_of
from tests.faults.kill_nine import MANIFEST, QUEUE
from tests.faults.victims import KEY, Broker, wait_for_port

LIVES = 4
COUNT = 30
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
