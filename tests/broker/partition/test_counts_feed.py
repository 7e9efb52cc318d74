"""The feed of changed counts: idle partitions cost nothing, no change is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from postbus.broker.administration import Administration, EntityRuntime
from postbus.contract.entities import QueueProperties
from postbus.entity.commands import Enqueued, ReceiveMode, Refused
from postbus.entity.counts import Counts
from postbus.store.postgres import Store
from tests.broker.administration_rig import administered
from tests.broker.partition_rig import Bus, message
from tests.broker.putting import put_queue
from tests.store.driving import wait_until

pytestmark = pytest.mark.slow


class CountedLooks:
    """Notes the entities that are counted in each partition."""

    def __init__(self, bus: Bus) -> None:
        self.entities: list[int] = []
        for host in bus.hosts:
            host.counts = self._noting(host.counts)  # type: ignore[method-assign]

    def _noting(self, counts):  # type: ignore[no-untyped-def]
        def count(entity_no: int) -> Counts | None:
            self.entities.append(entity_no)
            found: Counts | None = counts(entity_no)
            return found

        return count


async def make_queues(bus: Bus, count: int) -> list[str]:
    names = [f"queue-{number}" for number in range(count)]
    for name in names:
        await put_queue(bus.directory, name, QueueProperties())
    return names


async def follow(
    administration: Administration, known: dict[str, EntityRuntime], cursor: str, top: int = 1000
) -> str:
    """Take over all changes since a cursor, as a caller does; return the next cursor."""
    while True:
        page = await administration.runtime_since(cursor, top)
        if page.starts_over and cursor != "0":
            known.clear()
        known |= {each.name: each for each in page.items}
        cursor = page.cursor
        if page.is_end:
            return cursor


async def test_only_partitions_with_commits_are_looked_at(store: Store) -> None:
    async with administered(store) as (administration, bus):
        names = await make_queues(bus, 20)
        known: dict[str, EntityRuntime] = {}
        cursor = await follow(administration, known, "0")
        assert set(known) == set(names)
        looks, reads = CountedLooks(bus), [host.counters.reads for host in bus.hosts]
        for _ in range(3):
            assert await follow(administration, {}, cursor) == cursor
        assert looks.entities == []
        address = bus.address(names[0])
        await bus.sent(address, message("a"))
        changed: dict[str, EntityRuntime] = {}
        cursor = await follow(administration, changed, cursor)
        assert list(changed) == [names[0]]
        homes = {bus.address(name).entity_no: bus.address(name).partition_id for name in names}
        assert {homes[each] for each in looks.entities} == {address.partition_id}
        assert len(looks.entities) < len(names)
        assert [host.counters.reads for host in bus.hosts] == reads


async def test_callers_at_the_same_time_share_a_look(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.broker.partition.counts_feed.COUNTS_AT_ONCE", 1)
    async with administered(store) as (administration, bus):
        names = await make_queues(bus, 20)
        end = await follow(administration, {}, "0")
        await bus.sent(bus.address(names[0]), message("a"))
        feed, look_count = administration.counts_feed, 0
        look_once = feed._look_once

        async def counted_look() -> None:
            nonlocal look_count
            look_count += 1
            await look_once()

        feed._look_once = counted_look  # type: ignore[method-assign]
        pages = await asyncio.gather(*(administration.runtime_since(end, 7) for _ in range(50)))
        assert look_count == 2  # that of the first, and one for all who came during it
        assert {page.cursor for page in pages} == {pages[0].cursor}
        assert [[each.name for each in page.items] for page in pages] == [[names[0]]] * 50


@pytest.mark.parametrize("seed", range(3))
async def test_no_change_is_lost_under_traffic_and_reloads(store: Store, seed: int) -> None:
    random = Random(seed)
    async with administered(store) as (administration, bus):
        names = await make_queues(bus, 12)
        spread = await bus.put_spread_queue()
        addresses = [*(bus.address(name) for name in names), spread]
        known: dict[str, EntityRuntime] = {}
        cursor, is_over = "0", False

        async def work() -> None:
            for step in range(60):
                address = random.choice(addresses)
                reply = await bus.send(address, *(message("x") for _ in range(3)))
                assert isinstance(reply, Enqueued | Refused)
                if random.random() < 0.4 and address is not spread:
                    consumer, _ = await bus.consume(address, 2, ReceiveMode.RECEIVE_AND_DELETE)
                    bus.router.unregister_sink(address.partition_id, consumer)
                if step % 20 == 10:
                    bus.hosts[random.randrange(len(bus.hosts))].interrupt(0.05)

        async def keep_following() -> None:
            nonlocal cursor
            while not is_over:
                cursor = await follow(administration, known, cursor, top=random.randint(1, 5))
                await asyncio.sleep(0)

        following = asyncio.ensure_future(keep_following())
        await work()
        is_over = True
        await following

        async def knows_all() -> bool:
            """A change whose commit is in flight is listed after it."""
            nonlocal cursor
            if not all(host.is_loaded for host in bus.hosts):
                return False
            cursor = await follow(administration, known, cursor)
            for name in (*names, "q"):
                now = replace(await administration.runtime(name), accessed_ms=0)
                if not known[name].is_known or replace(known[name].runtime, accessed_ms=0) != now:
                    return False
            return True

        await wait_until(knows_all)
