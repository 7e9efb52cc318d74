"""Reader groups over HTTP: a tap reads what is sent, whatever receivers do with it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.edge.bulk.bulk_client import (
    BulkClient,
    bodies_of,
    group_of,
    problem_of,
    table_of,
)
from tests.edge.bus_thread import BusThread
from tests.edge.http_client import HttpClient


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)


async def send(http: HttpClient, queue: str, *bodies: str) -> None:
    for body in bodies:
        assert (await http.send(queue, body)).status == 201


async def test_a_tap_reads_messages_that_receivers_have_completed(
    http: HttpClient, queue: str
) -> None:
    bulk = BulkClient(http, queue)
    created = await bulk.create()
    assert created.status == 201
    assert group_of(created).plan.number == 0
    await send(http, queue, "one", "two", "three")
    for _ in range(2):
        assert (await http.take(queue)).status == 200
    claimed = await bulk.claim()
    planned = await bulk.plan_all(claimed)
    assert (planned.plan.number, planned.plan.attempts, planned.plan.is_settled) == (1, 1, False)
    rows = await bulk.read(planned)
    assert bodies_of(rows) == [b"one", b"two", b"three"]
    assert [row["sequence_number"] for row in rows] == [1, 2, 3]
    assert [row["position"] for row in rows] == sorted({row["position"] for row in rows})
    assert http.bus.counts(queue).active == 1


async def test_a_group_is_created_once_and_stays_where_it_is(http: HttpClient, queue: str) -> None:
    bulk = BulkClient(http, queue)
    await send(http, queue, "before")
    first = await bulk.create(start="latest")
    assert first.status == 201
    await send(http, queue, "after")
    again = await bulk.create(start="earliest")
    assert again.status == 200
    assert group_of(again).plan == group_of(first).plan
    rows = await bulk.read(await bulk.plan_all(await bulk.claim()))
    assert bodies_of(rows) == [b"after"]


async def test_the_next_plan_begins_where_the_last_one_ended(http: HttpClient, queue: str) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    group = await bulk.claim()
    read: list[bytes] = []
    for number, bodies in enumerate((["a", "b"], ["c"], ["d", "e", "f"]), start=1):
        await send(http, queue, *bodies)
        group = await bulk.plan_all(group)
        assert group.plan.number == number
        read += bodies_of(await bulk.read(group))
    assert read == [b"a", b"b", b"c", b"d", b"e", b"f"]
    settled = group_of(await bulk.post("settle", epoch=group.epoch, number=group.plan.number))
    assert settled.plan.is_settled


async def test_a_plan_is_read_again_by_the_next_reader_under_its_number(
    http: HttpClient, queue: str
) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    await send(http, queue, "a", "b")
    first = await bulk.plan_all(await bulk.claim(reader="first"))
    rows = await bulk.read(first)
    second = await bulk.claim(reader="second")
    assert second.plan == first.plan
    planned = await bulk.post("plan", epoch=second.epoch, ranges=_ranges(first.plan.ranges))
    assert group_of(planned).plan.number == first.plan.number
    assert group_of(planned).plan.attempts == 2
    assert await bulk.read(group_of(planned)) == rows


async def test_an_earlier_reader_is_refused_with_the_name_of_the_new_one(
    http: HttpClient, queue: str
) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    await send(http, queue, "a")
    first = await bulk.plan_all(await bulk.claim(reader="first"))
    await bulk.claim(reader="driver 2")
    [(partition, (start, end))] = first.plan.ranges.items()
    refused = [
        await bulk.stream(partition, start, end, first.epoch),
        await bulk.post("plan", epoch=first.epoch, ranges=_ranges(first.plan.ranges)),
        await bulk.post("settle", epoch=first.epoch, number=first.plan.number),
    ]
    for answer in refused:
        assert problem_of(answer) == (409, "Fenced")
        assert b"driver 2" in answer.body


async def test_a_checkpoint_that_is_older_or_newer_than_the_group_is_refused(
    http: HttpClient, queue: str
) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    await send(http, queue, "a")
    group = await bulk.plan_all(await bulk.claim())
    [(partition, (start, end))] = group.plan.ranges.items()
    await bulk.post("settle", epoch=group.epoch, number=group.plan.number)
    stale = {partition: (start, end)}
    answer = await bulk.post("plan", epoch=group.epoch, ranges=_ranges(stale))
    assert problem_of(answer) == (409, "StaleCheckpoint")
    for ahead in ((end + 1, end + 1), (end, end + 10_000_000)):
        answer = await bulk.post("plan", epoch=group.epoch, ranges=_ranges({partition: ahead}))
        assert problem_of(answer) == (409, "BusRestored")


async def test_a_group_that_is_dropped_is_gone(http: HttpClient, queue: str) -> None:
    bulk = BulkClient(http, queue)
    assert problem_of(await bulk.post("claim")) == (404, "GroupNotFound")
    await bulk.create()
    assert (await bulk.call("DELETE", "groups/lake")).status == 204
    assert problem_of(await bulk.call("DELETE", "groups/lake")) == (404, "GroupNotFound")
    assert problem_of(await bulk.post("claim")) == (404, "GroupNotFound")


async def test_only_the_chosen_columns_are_sent(http: HttpClient, queue: str) -> None:
    bulk = BulkClient(http, queue)
    await bulk.create()
    await send(http, queue, "a")
    group = await bulk.plan_all(await bulk.claim())
    [(partition, (start, end))] = group.plan.ranges.items()
    answer = await bulk.stream(partition, start, end, group.epoch, columns="body,position")
    assert table_of(answer).column_names == ["position", "body"]
    metadata = table_of(answer).schema.metadata
    assert metadata[b"postbus.row_format"] == b"1"
    assert metadata[b"postbus.entity"] == queue.encode()


def _ranges(ranges: dict[int, tuple[int, int]]) -> dict[str, list[int]]:
    return {str(partition): list(each) for partition, each in ranges.items()}
