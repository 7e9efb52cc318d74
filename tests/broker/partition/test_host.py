"""The host of a partition with the real journal and a real Postgres: order, failures, stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from postbus.broker.partition.clock import EntityClock
from postbus.broker.partition.host import Host
from postbus.broker.partition.ownership import HostStatus
from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    AddConsumer,
    Delivery,
    Done,
    Enqueue,
    Enqueued,
    ReceiveMode,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    SubQueue,
    Tick,
)
from postbus.entity.window import WindowBudget
from postbus.message.envelope import Envelope
from postbus.store.catalog import CatalogStore
from postbus.store.postgres import Store
from tests.broker.owner import directory_of
from tests.broker.putting import put_queue
from tests.store.driving import connected, wait_until

pytestmark = pytest.mark.slow


class Sink:
    """Records the deliveries of an endpoint; raises on request."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.deliveries: list[Delivery] = []
        self.resets = 0

    def deliver(self, deliveries: list[Delivery]) -> None:
        self.deliveries += deliveries
        self._break()

    def ended(self, refused: Refused) -> None:
        self._break()

    def reset(self) -> None:
        self.resets += 1
        self._break()

    def _break(self) -> None:
        if self.is_broken:
            raise RuntimeError("broken sink")


@asynccontextmanager
async def hosted(store: Store) -> AsyncIterator[tuple[Host, int]]:
    """Run a host of partition 0 with one queue; yields it and the queue's number."""
    directory = directory_of(CatalogStore(store), 1)
    await directory.load()
    entry = await put_queue(directory, "orders", QueueProperties())
    clock = EntityClock(
        lambda: time.monotonic_ns() // 1_000_000, lambda: time.time_ns() // 1_000_000
    )
    async with asyncio.TaskGroup() as tasks:
        host = Host(
            partition_id=0,
            store=store,
            directory=directory,
            clock=clock,
            budget=WindowBudget(1 << 26),
            new_seed=lambda: 1,
            tasks=tasks,
        )
        try:
            yield host, entry.entity_no
        finally:
            await host.stop()


def message() -> Envelope:
    body = b"\x00\x53\x75\xa0\x05hello"
    return Envelope(body=body, size_bytes=len(body))


async def add(host: Host, entity_no: int, consumer_id: int, sink: Sink, limit: int = 10) -> None:
    host.register_sink(consumer_id, sink)
    mode = ReceiveMode.PEEK_LOCK
    await host.call(AddConsumer(entity_no, SubQueue.ACTIVE, consumer_id, mode))
    await host.call(SetDemand(consumer_id, limit))


def broken(_: Reply) -> None:
    raise RuntimeError("broken receiver")


async def until(is_true: Callable[[], bool]) -> None:
    async def look() -> bool:
        return is_true()

    await wait_until(look)


async def test_broken_receivers_do_not_affect_others(store: Store) -> None:
    async with hosted(store) as (host, entity_no):
        await add(host, entity_no, 1, Sink(is_broken=True))
        replies: list[Reply] = []
        host.submit(Enqueue(entity_no, [message()]), broken)
        for _ in range(3):
            host.submit(Enqueue(entity_no, [message()]), replies.append)
        await until(lambda: len(replies) == 3)
        numbers = [r.sequence_numbers for r in replies if isinstance(r, Enqueued)]
        assert numbers == [[2], [3], [4]]
        assert host.reload_count == 0


async def test_a_reload_resets_every_sink_once(store: Store, database: str) -> None:
    async with hosted(store) as (host, entity_no), connected(database) as look:
        sinks = [Sink(is_broken=True), Sink()]
        for consumer_id, sink in enumerate(sinks, 1):
            await add(host, entity_no, consumer_id, sink)
        await look.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = 'postbus writer 0' and datname = current_database()"
        )
        await until(lambda: host.reload_count == 1)
        assert await host.call(Tick()) == Done()
        assert [sink.resets for sink in sinks] == [1, 1]


@pytest.mark.behaviour("S2")
async def test_no_reply_is_released_before_the_commit(store: Store, database: str) -> None:
    async with hosted(store) as (host, entity_no), connected(database) as other:
        sink = Sink()
        await add(host, entity_no, 1, sink)
        await host.call(Enqueue(entity_no, [message()]))
        await until(lambda: len(sink.deliveries) == 1)
        replies: list[Reply] = []

        async def is_held_up() -> bool:
            waiting = await other.fetchval(
                "select count(*) from pg_locks where not granted and mode = 'RowExclusiveLock' "
                "and database = (select oid from pg_database where datname = current_database())"
            )
            return bool(waiting)

        async with other.transaction():
            await other.execute("lock table message in share mode")
            host.submit(Enqueue(entity_no, [message()]), replies.append)
            await wait_until(is_held_up)
            assert replies == []
            assert len(sink.deliveries) == 1
        await until(lambda: len(sink.deliveries) == 2)
        assert [type(reply) for reply in replies] == [Enqueued]


async def test_a_consumer_removed_while_the_partition_loads_is_not_added(store: Store) -> None:
    async with hosted(store) as (host, entity_no):
        sink = Sink()
        host.register_sink(1, sink)
        replies: list[Reply] = []
        mode = ReceiveMode.PEEK_LOCK
        host.submit(AddConsumer(entity_no, SubQueue.ACTIVE, 1, mode), replies.append)
        host.submit(SetDemand(1, 10), replies.append)
        host.submit(RemoveConsumer(1), replies.append)
        await host.call(Enqueue(entity_no, [message()]))
        refusals = [r.refusal if isinstance(r, Refused) else None for r in replies]
        assert refusals == [None, Refusal.NOT_APPLIED, Refusal.NOT_APPLIED]
        assert sink.deliveries == []


async def test_a_missing_database_is_reported_and_retried_and_a_stop_is_prompt(
    store: Store, database: str
) -> None:
    missing = Store(database.replace("/test_", "/missing_"))
    async with hosted(store) as (host, _):
        host._store = missing
        host.claim()
        await until(lambda: host.trouble is not None and host._recovery.wait_s > 2)
        assert "does not exist" in (host.trouble or "")
        assert host.status is HostStatus.LOADING
        began = time.monotonic()
        await host.stop()
        await until(lambda: not any(t.get_name() == "load-0" for t in asyncio.all_tasks()))
        assert time.monotonic() - began < 1
    await missing.close()
