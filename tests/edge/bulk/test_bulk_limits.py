"""Limits of reader groups over HTTP: what is beyond them is deleted and told, or shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from postbus.broker.bulk import BulkAccess, ListedGroup
from postbus.contract.bulk import LEAST_PINNED_BYTES, MOST_PINNED_BYTES
from postbus.entity.window import WindowBudget
from postbus.process.group_metrics import GroupSample
from postbus.process.sampling import Sampler
from postbus.store.pinned import ROW_BYTES
from tests.edge.bulk.bulk_client import (
    BulkClient,
    group_of,
    handler_of,
    problem_of,
    reaped,
)
from tests.edge.bus_thread import BusThread
from tests.edge.http_client import HttpClient

SIZE_BYTES = 200_000
DAY_MS = 86_400_000


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)


async def listed(http: HttpClient, queue: str) -> ListedGroup:
    """Return the group of a queue as it is listed."""
    access: BulkAccess = handler_of(http.bus)._access
    found, _ = await asyncio.get_running_loop().run_in_executor(
        None, lambda: http.bus.run(access.list_groups())
    )
    [group] = [each for each in found if each.address.name == queue]
    return group


async def settled(http: HttpClient, queue: str, count: int) -> list[bytes]:
    """Send messages and complete them; return their bodies."""
    bodies = [bytes([number]) * SIZE_BYTES for number in range(count)]
    for body in bodies:
        assert (await http.send(queue, body)).status == 201
    for _ in bodies:
        assert (await http.take(queue)).status == 200
    await reaped(http.bus)
    return bodies


async def put(http: HttpClient, queue: str, **fields: object) -> dict[str, object]:
    answer = await BulkClient(http, queue).call("PUT", "groups/lake", fields)
    assert answer.status in (200, 201), answer.body
    shown = json.loads(answer.body)
    return {name: shown[name] for name in ("maxPinnedBytes", "maxPinnedAge", "onPinLimit")}


async def read_all(bulk: BulkClient) -> list[bytes]:
    """Return the data of all messages that a group has not read."""
    rows = await bulk.read(await bulk.plan_all(await bulk.claim()))
    return [row["body"][-SIZE_BYTES:] for row in rows]


async def test_a_group_that_drops_loses_its_oldest_messages_and_says_so(
    http: HttpClient, queue: str
) -> None:
    limits = await put(http, queue, maxPinnedBytes=LEAST_PINNED_BYTES, onPinLimit="drop")
    assert limits == {
        "maxPinnedBytes": LEAST_PINNED_BYTES,
        "maxPinnedAge": None,
        "onPinLimit": "drop",
    }
    bulk = BulkClient(http, queue)
    bodies = await settled(http, queue, 7)
    group = await bulk.plan_all(await bulk.claim())
    [(partition, (first, end))] = group.plan.ranges.items()
    answer = await bulk.stream(partition, first, end, group.epoch)
    assert problem_of(answer) == (410, "DataLoss")
    found = await listed(http, queue)
    assert found.pinned is not None
    assert (found.pinned.has_lost, found.pinned.is_over) == (True, True)
    assert 5 * SIZE_BYTES < found.pinned.kept_bytes <= LEAST_PINNED_BYTES
    assert (await bulk.post("reset", start="earliest")).status == 200
    assert await read_all(bulk) == bodies[2:], "no more than needed is deleted"
    await reaped(http.bus)
    found = await listed(http, queue)
    assert found.pinned is not None
    assert not found.pinned.is_over


async def test_a_group_that_fails_keeps_all_messages_and_is_shown(
    http: HttpClient, queue: str
) -> None:
    await put(http, queue, start="earliest", maxPinnedBytes=LEAST_PINNED_BYTES)
    bodies = await settled(http, queue, 6)
    found = await listed(http, queue)
    assert found.pinned is not None
    assert (found.pinned.is_over, found.pinned.has_lost) == (True, False)
    assert found.pinned.kept_bytes > 6 * SIZE_BYTES
    bulk = BulkClient(http, queue)
    assert await read_all(bulk) == bodies
    group = group_of(await bulk.call("GET", "groups/lake"))
    settle = await bulk.post("settle", epoch=group.epoch, number=group.plan.number)
    assert settle.status == 200
    await reaped(http.bus)
    found = await listed(http, queue)
    assert found.pinned is not None
    assert (found.pinned.kept_bytes, found.pinned.is_over, found.lag_s) == (0, False, 0)


async def test_a_group_that_is_beyond_its_age_lets_go(http: HttpClient, queue: str) -> None:
    await put(http, queue, maxPinnedAge="P1D", onPinLimit="drop")
    await settled(http, queue, 2)
    http.bus.advance(DAY_MS + 1)
    await settled(http, queue, 1)
    found = await listed(http, queue)
    assert found.pinned is not None
    assert (found.pinned.unread, found.pinned.has_lost) == (1, True)
    bulk = BulkClient(http, queue)
    group = await bulk.plan_all(await bulk.claim())
    [(partition, (first, end))] = group.plan.ranges.items()
    answer = await bulk.stream(partition, first, end, group.epoch)
    assert problem_of(answer) == (410, "DataLoss")


async def test_the_lag_of_a_group_is_the_age_of_its_first_message(
    http: HttpClient, queue: str
) -> None:
    await put(http, queue)
    assert (await http.send(queue, "first")).status == 201
    http.bus.advance(60_000)
    assert (await http.send(queue, "second")).status == 201
    await reaped(http.bus)
    found = await listed(http, queue)
    assert found.pinned is not None
    assert (found.unread, found.pinned.unread, found.pinned.kept_bytes) == (2, 2, 0)
    assert found.lag_s is not None
    assert 60 <= found.lag_s < 120


async def test_a_scrape_shows_groups_as_they_were_at_the_last_look(http: HttpClient) -> None:
    bus, queue = http.bus, http.bus.queue(enable_partitioning=True)
    await put(http, queue, start="earliest", maxPinnedBytes=LEAST_PINNED_BYTES * 16)
    for _ in range(8):
        assert (await http.send(queue, "kept")).status == 201
        assert (await http.take(queue, 5)).status == 200
    bus.advance(60_000)
    bulk = BulkClient(http, queue)
    group = await bulk.plan_all(await bulk.claim())
    await reaped(bus)

    async def scrape() -> list[GroupSample]:
        sampler = Sampler(bus._hosts, [], bus.clock, WindowBudget(1), lambda _: None)
        sampler.directory = bus._directory
        await sampler.prepare()
        return [each for each in sampler.sample().groups if each.entity == queue]

    [found] = await asyncio.get_running_loop().run_in_executor(None, lambda: bus.run(scrape()))
    assert (found.kind, found.entity, found.sub_queue, found.name) == (
        "queue", queue, "main", "lake",
    )  # fmt: skip
    assert (found.unread, found.epoch, found.attempts, found.is_over) == (8, group.epoch, 1, False)
    assert 8 * ROW_BYTES < found.kept_bytes < 8_000
    assert found.oldest_ms is not None
    assert 60_000 <= bus.clock() - found.oldest_ms < 120_000


async def test_limits_change_with_a_request_that_names_some_and_survive_a_reload(
    http: HttpClient, queue: str
) -> None:
    none = {"maxPinnedBytes": None, "maxPinnedAge": None, "onPinLimit": None}
    both = {"maxPinnedBytes": 5_000_000, "maxPinnedAge": "P7DT1H", "onPinLimit": "fail"}
    assert await put(http, queue) == none
    assert await put(http, queue, maxPinnedBytes=5_000_000, maxPinnedAge="P7DT1H") == both
    bulk = BulkClient(http, queue)
    before = await bulk.claim()
    for _ in range(2):
        assert await put(http, queue) == both, "a request without limits keeps them"
        await asyncio.get_running_loop().run_in_executor(None, http.bus.reload, queue)
    shown = group_of(await bulk.call("GET", "groups/lake"))
    assert (shown.epoch, shown.plan) == (before.epoch, before.plan), "the group has not moved"
    assert shown.max_pinned_age_ms == 7 * DAY_MS + 3_600_000
    other = {"maxPinnedBytes": None, "maxPinnedAge": "PT1H", "onPinLimit": "drop"}
    assert await put(http, queue, maxPinnedAge="PT1H", onPinLimit="drop") == other
    assert await put(http, queue, maxPinnedBytes=None) == none, "null removes limits"


async def test_the_partitions_of_a_queue_divide_the_bytes(http: HttpClient) -> None:
    queue = http.bus.queue(enable_partitioning=True)
    await put(http, queue, maxPinnedBytes=LEAST_PINNED_BYTES)
    found = await listed(http, queue)
    limits = found.group.cursor.limits
    assert limits.parts == len(found.group.plan.ranges) > 1
    assert limits.max_bytes == LEAST_PINNED_BYTES


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"maxPinnedBytes": -1}', "maxPinnedBytes"),
        ('{"maxPinnedBytes": 0}', "maxPinnedBytes"),
        (f'{{"maxPinnedBytes": {LEAST_PINNED_BYTES - 1}}}', "1048576"),
        (f'{{"maxPinnedBytes": {MOST_PINNED_BYTES + 1}}}', "maxPinnedBytes"),
        ('{"maxPinnedBytes": %s}' % ("9" * 400), "maxPinnedBytes"),
        ('{"maxPinnedBytes": %s}' % ("9" * 5_000), ""),
        ('{"maxPinnedBytes": 1e300}', "maxPinnedBytes"),
        ('{"maxPinnedBytes": 1e999}', ""),
        ('{"maxPinnedBytes": NaN}', ""),
        ('{"maxPinnedBytes": 2000000.5}', "maxPinnedBytes"),
        ('{"maxPinnedBytes": "2000000"}', "maxPinnedBytes"),
        ('{"maxPinnedBytes": "1 GiB"}', "maxPinnedBytes"),
        ('{"maxPinnedBytes": true}', "maxPinnedBytes"),
        ('{"maxPinnedBytes": [2000000]}', "maxPinnedBytes"),
        ('{"maxPinnedAge": 3600}', "maxPinnedAge"),
        ('{"maxPinnedAge": "PT59S"}', "at least PT1M"),
        ('{"maxPinnedAge": "-P1D"}', "maxPinnedAge"),
        ('{"maxPinnedAge": "P"}', "maxPinnedAge"),
        ('{"maxPinnedAge": "1 day"}', "maxPinnedAge"),
        ('{"maxPinnedAge": "P%sD"}' % ("9" * 5_000), "maxPinnedAge"),
        ('{"maxPinnedAge": "P\\u0661D"}', "maxPinnedAge"),
        ('{"maxPinnedAge": "P1D\\n"}', "maxPinnedAge"),
        ('{"maxPinnedAge": {}}', "maxPinnedAge"),
        ('{"maxPinnedAge": "P1D", "onPinLimit": "Drop"}', "onPinLimit"),
        ('{"onPinLimit": "fail"}', "needs maxPinnedBytes or maxPinnedAge"),
        ('{"maxPinnedAge": "P1D", "onPinLimit": 1}', "onPinLimit"),
        ('{"onPinLimit": "drop"}', "needs maxPinnedBytes or maxPinnedAge"),
        ('{"maxPinnedBytes": null, "onPinLimit": "drop"}', "needs maxPinnedBytes"),
        ('{"max_pinned_bytes": 2000000}', "max_pinned_bytes"),
        ('{"maxPinnedRows": 2}', "maxPinnedRows"),
    ],
    ids=lambda each: each[:60],
)
async def test_wrong_limits_are_refused_by_name(
    http: HttpClient, queue: str, body: str, words: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await http.call("PUT", f"/{queue}/$bulk/groups/lake", body, headers)
    assert problem_of(answer) == (400, "InvalidRequest")
    assert words in json.loads(answer.body)["detail"]
    missing = await BulkClient(http, queue).call("GET", "groups/lake")
    assert problem_of(missing) == (404, "GroupNotFound")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"maxPinnedBytes": MOST_PINNED_BYTES}, MOST_PINNED_BYTES),
        ({"maxPinnedAge": "P99999999D"}, None),
    ],
    ids=["bytes", "age"],
)
async def test_the_largest_limits_are_never_passed(
    http: HttpClient, queue: str, body: dict[str, object], shown: int | None
) -> None:
    assert (await put(http, queue, **body, onPinLimit="drop"))["maxPinnedBytes"] == shown
    await settled(http, queue, 1)
    assert len(await read_all(BulkClient(http, queue))) == 1
