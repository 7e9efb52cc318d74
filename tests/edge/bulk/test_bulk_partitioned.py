"""Reader groups of partitioned entities: one home decides, the cursors of all partitions follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from postbus.broker.bulk import BulkAccess, BulkRefused
from postbus.broker.partition.host import Host
from postbus.entity.commands import Refusal, Refused, SubQueue
from postbus.entity.group_commands import ClaimGroup, DropGroup, FollowHome, PlanRange
from postbus.store.errors import StoreUnavailable
from tests.edge.bulk.bulk_client import (
    BulkClient,
    bodies_of,
    group_of,
    handler_of,
    nothing_is_held,
    problem_of,
    reaped,
    streamed,
)
from tests.edge.bus_thread import PARTITION_COUNT, BusThread
from tests.edge.http_client import HttpClient

COUNT = 40


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)
    await nothing_is_held(bus)


@pytest.fixture
def spread(bus: BusThread) -> str:
    return bus.queue(enablePartitioning=True)


async def send(http: HttpClient, queue: str, first: int = 0) -> None:
    for n in range(first, first + COUNT):
        answer = await http.send(queue, f"m{n}", {"PartitionKey": f"key {n % 7}"})
        assert answer.status == 201, answer.body


def expected(first: int = 0) -> set[bytes]:
    return {f"m{n}".encode() for n in range(first, first + COUNT)}


async def test_each_partition_has_a_range_and_each_message_comes_once(
    http: HttpClient, spread: str
) -> None:
    bulk = BulkClient(http, spread)
    created = group_of(await bulk.create())
    assert sorted(created.plan.ranges) == list(range(PARTITION_COUNT))
    await send(http, spread)
    group = await bulk.plan_all(await bulk.claim())
    rows = await bulk.read(group)
    assert len(rows) == COUNT
    assert set(bodies_of(rows)) == expected()
    lengths = [end - first for first, end in group.plan.ranges.values()]
    assert min(lengths) > 0, "the keys are spread"


async def test_planned_ranges_stay_the_same_while_partitions_are_reloaded(
    http: HttpClient, spread: str
) -> None:
    bulk = BulkClient(http, spread)
    await bulk.create()
    await send(http, spread)
    group = await bulk.plan_all(await bulk.claim())
    before = await streamed(bulk, group)
    for _ in range(COUNT):
        assert (await http.take(spread)).status == 200
    await reaped(http.bus)
    for number in range(PARTITION_COUNT):
        await reload_partition(http, number)
        await reaped(http.bus)
        assert await streamed(bulk, group) == before
    claimed = await bulk.claim(reader="next")
    assert claimed.plan == group.plan
    await send(http, spread, COUNT)
    rows = await bulk.read(await bulk.plan_all(claimed))
    assert set(bodies_of(rows)) == expected(COUNT)


async def reload_partition(http: HttpClient, number: int) -> None:
    async def fail() -> None:
        host = http.bus._hosts[number]
        host._recovery.wait_s = 0.0
        if host._journal is not None:
            host._journal.fail(StoreUnavailable("a commit failed, says the test"))

    await asyncio.get_running_loop().run_in_executor(None, lambda: http.bus.run(fail()))


async def test_a_plan_names_all_partitions(http: HttpClient, spread: str) -> None:
    bulk = BulkClient(http, spread)
    await bulk.create()
    group = await bulk.claim()
    for ranges in ({"0": [0, 0]}, {"0": [0, 0], "1": [0, 0], "2": [0, 0]}):
        answer = await bulk.post("plan", epoch=group.epoch, ranges=ranges)
        assert problem_of(answer) == (400, "InvalidRequest")
    answer = await bulk.post("reset", start={"0": 0})
    assert problem_of(answer) == (400, "InvalidRequest")


def fail_next(
    monkeypatch: pytest.MonkeyPatch,
    http: HttpClient,
    kind: type[object],
    *,
    applied: bool,
    skip: int = 0,
) -> None:
    """Let the answer to the next command of a kind be unknown, behind some that are answered."""
    access: BulkAccess = handler_of(http.bus)._access
    call = access._call
    left = skip

    async def failing(host: Host, command: Any) -> object:
        nonlocal left
        if not isinstance(command, kind):
            return await call(host, command)
        left -= 1
        if left >= 0:
            return await call(host, command)
        monkeypatch.setattr(access, "_call", call)
        if applied:
            await call(host, command)
        raise BulkRefused(Refused(Refusal.UNKNOWN, "says the test"))

    monkeypatch.setattr(access, "_call", failing)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("kind", [PlanRange, FollowHome])
async def test_a_plan_whose_answer_was_lost_is_repeated_under_its_number(
    http: HttpClient,
    spread: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[object],
    applied: bool,
) -> None:
    bulk = BulkClient(http, spread)
    await bulk.create()
    await send(http, spread)
    group = await bulk.claim()
    found = await bulk.ranges()
    ranges = {str(each.partition): [0, each.next_position] for each in found.partitions}
    fail_next(monkeypatch, http, kind, applied=applied)
    lost = await bulk.post("plan", epoch=group.epoch, ranges=ranges)
    assert problem_of(lost) == (503, "Unavailable")
    again = await bulk.post("plan", epoch=group.epoch, ranges=ranges)
    assert (again.status, group_of(again).plan.number) == (200, 1)
    assert set(bodies_of(await bulk.read(group_of(again)))) == expected()


@pytest.mark.parametrize("kind", [ClaimGroup, FollowHome])
async def test_a_claim_whose_answer_was_lost_is_repeated(
    http: HttpClient, spread: str, monkeypatch: pytest.MonkeyPatch, kind: type[object]
) -> None:
    bulk = BulkClient(http, spread)
    await bulk.create()
    await send(http, spread)
    fail_next(monkeypatch, http, kind, applied=True)
    assert problem_of(await bulk.post("claim", reader="me")) == (503, "Unavailable")
    group = await bulk.plan_all(await bulk.claim(reader="me"))
    assert set(bodies_of(await bulk.read(group))) == expected()


async def test_of_many_claims_at_once_one_reader_is_left(http: HttpClient, spread: str) -> None:
    bulk = BulkClient(http, spread)
    await bulk.create()
    await send(http, spread)
    answers = await asyncio.gather(*(bulk.post("claim", reader=f"r{n}") for n in range(12)))
    claimed = [group_of(answer) for answer in answers if answer.status == 200]
    assert all(problem_of(each) == (409, "Fenced") for each in answers if each.status != 200)
    assert len({each.epoch for each in claimed}) == len(claimed)
    last = max(claimed, key=lambda each: each.epoch)
    found = await bulk.ranges()
    ranges = {str(each.partition): [0, each.next_position] for each in found.partitions}
    plans = await asyncio.gather(
        *(bulk.post("plan", epoch=each.epoch, ranges=ranges) for each in claimed)
    )
    accepted = [group_of(each) for each in plans if each.status == 200]
    assert [each.epoch for each in accepted] == [last.epoch]
    assert set(bodies_of(await bulk.read(accepted[0]))) == expected()


async def test_creation_dropping_and_claims_at_once_leave_a_group_that_works(
    http: HttpClient, spread: str
) -> None:
    bulk = BulkClient(http, spread)
    for _ in range(5):
        await asyncio.gather(
            *(bulk.create() for _ in range(3)),
            bulk.call("DELETE", "groups/lake"),
            bulk.post("claim", reader="me"),
        )
    await bulk.call("DELETE", "groups/lake")
    assert (await bulk.create()).status == 201
    await send(http, spread)
    group = await bulk.plan_all(await bulk.claim())
    assert set(bodies_of(await bulk.read(group))) == expected()


async def test_a_group_whose_deletion_was_interrupted_is_none(
    http: HttpClient, spread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would go on as if the partition without its cursor had deleted nothing."""
    bulk = BulkClient(http, spread)
    await bulk.create()
    fail_next(monkeypatch, http, DropGroup, applied=False, skip=1)
    assert problem_of(await bulk.call("DELETE", "groups/lake")) == (503, "Unavailable")
    await send(http, spread)
    for _ in range(COUNT):
        assert (await http.take(spread)).status == 200
    await reaped(http.bus)
    assert problem_of(await bulk.call("GET", "groups/lake")) == (404, "GroupNotFound")
    assert (await bulk.call("DELETE", "groups/lake")).status == 204
    assert problem_of(await bulk.call("DELETE", "groups/lake")) == (404, "GroupNotFound")
    assert (await bulk.create()).status == 201


async def test_a_group_that_lost_a_cursor_is_refused(http: HttpClient, spread: str) -> None:
    bulk = BulkClient(http, spread)
    await bulk.create()
    entry = http.bus._directory.find(spread)
    assert entry is not None
    lost = DropGroup(entry.entity_no, SubQueue.ACTIVE, "lake")
    run = http.bus.run
    await asyncio.get_running_loop().run_in_executor(
        None, lambda: run(http.bus._hosts[1].call(lost))
    )
    answer = await bulk.create()
    assert problem_of(answer) == (409, "NotAllowed")
    assert b"drop the group" in answer.body
    assert (await bulk.call("DELETE", "groups/lake")).status == 204
    assert (await bulk.create()).status == 201


@pytest.mark.slow
async def test_without_one_partition_the_others_are_read_and_nothing_is_decided(
    http: HttpClient, spread: str
) -> None:
    bulk = BulkClient(http, spread)
    await bulk.create()
    await send(http, spread)
    group = await bulk.plan_all(await bulk.claim())
    there, away = (group.plan.ranges[number] for number in (0, 1))
    whole = await bulk.stream(0, *there, group.epoch)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, begin_outage, http.bus)
    for answer in (
        await bulk.stream(1, *away, group.epoch),
        await bulk.call("GET", "ranges"),
        await bulk.create("other"),
        await bulk.post("plan", epoch=group.epoch, ranges={"0": there, "1": away}),
    ):
        assert problem_of(answer) == (503, "Unavailable")
        assert int(answer.headers["Retry-After"]) > 0
    assert (await bulk.stream(0, *there, group.epoch)).body == whole.body
    await loop.run_in_executor(None, end_outage, http.bus)
    await wait_for_partitions(bulk)
    again = await bulk.post("plan", epoch=group.epoch, ranges={"0": there, "1": away})
    assert group_of(again).plan == group.plan
    assert set(bodies_of(await bulk.read(group))) == expected()
    assert (await bulk.create("other")).status == 201


async def wait_for_partitions(bulk: BulkClient) -> None:
    async with asyncio.timeout(30):
        while (await bulk.call("GET", "ranges")).status == 503:
            await asyncio.sleep(0.05)


def begin_outage(bus: BusThread) -> None:
    """Stop a partition until `end_outage`, however often other tests have stopped it before."""

    async def begin() -> None:
        host = bus._hosts[1]
        host._recovery._backoff.reset()  # else its first attempt comes in seconds, and calls wait
        host.interrupt(600.0)

    bus.run(begin())


def end_outage(bus: BusThread) -> None:
    async def end() -> None:
        bus._hosts[1]._recovery._interrupted_until = 0.0

    bus.run(end())
