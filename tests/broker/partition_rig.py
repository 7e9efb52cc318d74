"""Several partitions with real hosts and a router, as one bus process has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from postbus.assembly.shipping import connect_hosts
from postbus.broker.address import Address
from postbus.broker.catalog.directory import Directory
from postbus.broker.partition.clock import EntityClock, ManualClock
from postbus.broker.partition.host import Host
from postbus.broker.placement import partition_of_key
from postbus.broker.router import Router
from postbus.contract.entities import QueueProperties, Sku, limits_of
from postbus.entity.commands import (
    AddConsumer,
    Command,
    Delivery,
    DemandSet,
    Enqueue,
    Enqueued,
    Peek,
    Peeked,
    PeekedMessage,
    ReceiveMode,
    Refusal,
    Refused,
    Reply,
    SetDemand,
    Tick,
)
from postbus.entity.counts import Counts, sum_of
from postbus.entity.window import WindowBudget
from postbus.message.codec import Value, encode_value
from postbus.message.envelope import Envelope
from postbus.store.catalog import CatalogStore
from postbus.store.postgres import Store
from tests.broker.putting import put_queue

NUMBER_BITS = 48


class RecordingSink:
    """The sink of one consumer, as the edge registers it; records all calls."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.sessions: list[bytes] = []
        self.refusals: list[Refusal] = []
        self.resets = 0

    def deliver(self, deliveries: list[Delivery]) -> None:
        self.deliveries += deliveries

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        self.sessions.append(session_id)

    def available(self, count: int) -> None:
        raise AssertionError("the edge never asks for hints")

    def ended(self, refused: Refused) -> None:
        self.refusals.append(refused.refusal)

    def reset(self) -> None:
        self.resets += 1

    @property
    def bodies(self) -> list[str]:
        return [each.envelope.body.decode() for each in self.deliveries]


@dataclass
class Bus:
    """The parts of a bus between the edge and the store."""

    hosts: list[Host]
    directory: Directory
    router: Router

    def address(self, path: str) -> Address:
        found: list[Address | None] = []
        self.router.resolve(path, found.append)
        assert found[0] is not None
        return found[0]

    async def put_spread_queue(self, **properties: object) -> Address:
        """Create the partitioned queue `q`; return its address."""
        await put_queue(self.directory, "q", spread(**properties))
        return self.address("q")

    async def call(self, address: Address, command: Command, wait_s: float = 20) -> Reply:
        """Submit a command as the edge does and wait for the reply."""
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.router.submit(address.partition_id, command, answered.set_result)
        async with asyncio.timeout(wait_s):
            return await answered

    async def send(self, address: Address, *messages: Envelope, is_atomic: bool = False) -> Reply:
        return await self.call(address, Enqueue(address.entity_no, list(messages), is_atomic))

    async def sent(self, address: Address, *messages: Envelope) -> list[int]:
        """Send and return the numbers; nothing may be refused."""
        reply = await self.send(address, *messages)
        assert isinstance(reply, Enqueued), reply
        assert reply.refusals is None, reply.refusals
        return reply.sequence_numbers

    async def consume(
        self, address: Address, limit: int = 0, mode: ReceiveMode = ReceiveMode.PEEK_LOCK
    ) -> tuple[int, RecordingSink]:
        """Register a receiver with a demand; return its number and its sink."""
        sink, consumer_id = RecordingSink(), self.router.new_consumer_id()
        self.router.register_sink(address.partition_id, consumer_id, sink)
        add = AddConsumer(address.entity_no, address.sub_queue, consumer_id, mode)
        await self.call(address, add)
        if limit:
            await self.call(address, SetDemand(consumer_id, limit))
        return consumer_id, sink

    async def drain(self, address: Address, consumer_id: int, limit: int) -> int:
        reply = await self.call(address, SetDemand(consumer_id, limit, is_drain=True))
        assert isinstance(reply, DemandSet), reply
        return reply.delivered

    async def peek(self, address: Address, first: int = 0, limit: int = 100) -> list[PeekedMessage]:
        command = Peek(address.entity_no, address.sub_queue, first, limit, 1 << 20)
        reply = await self.call(address, command)
        assert isinstance(reply, Peeked), reply
        return reply.messages

    async def peek_all(self, address: Address) -> list[PeekedMessage]:
        """Browse as a client does: continue after the last number until nothing is left."""
        found: list[PeekedMessage] = []
        while page := await self.peek(address, found[-1].sequence + 1 if found else 0, 3):
            found += page
        return found

    def counts(self, address: Address) -> Counts:
        """Return the counts of an entity over its partitions, which must be loaded."""
        found = [host.counts(address.entity_no) for host in self.hosts]
        return sum_of([counts for counts in found if counts is not None])

    def advance(self, duration_ms: int) -> None:
        """Advance entity time, which must be manual, and let the timers of partitions notice."""
        clock = self.hosts[0].clock
        assert isinstance(clock, ManualClock)
        clock.advance(duration_ms)
        for host in self.hosts:
            host.clock_changed()

    async def load(self) -> None:
        """Return when every partition is loaded."""
        await asyncio.gather(*(host.call(Tick()) for host in self.hosts))
        assert all(host.is_loaded for host in self.hosts)


def manual_clock() -> ManualClock:
    return ManualClock(lambda: time.time_ns() // 1_000_000)


@asynccontextmanager
async def running(
    *stores: Store,
    partition_count: int = 4,
    notify: Callable[[Directory], None] = lambda _: None,
    clock: EntityClock | None = None,
) -> AsyncIterator[Bus]:
    """Run a bus with its partitions on these databases in rotation; the first has the catalog."""
    directory = Directory(CatalogStore(stores[0]), limits_of(Sku.STANDARD, partition_count))
    await directory.load()
    notify(directory)
    clock = clock or EntityClock(
        lambda: time.monotonic_ns() // 1_000_000, lambda: time.time_ns() // 1_000_000
    )
    budget = WindowBudget(1 << 26)
    async with asyncio.TaskGroup() as tasks:
        hosts = [
            Host(
                partition_id=partition_id,
                store=stores[partition_id % len(stores)],
                directory=directory,
                clock=clock,
                budget=budget,
                new_seed=lambda: 1,
                tasks=tasks,
            )
            for partition_id in range(partition_count)
        ]
        directory.follow(hosts)
        connect_hosts(hosts, directory, lambda number: stores[number % len(stores)])
        try:
            yield Bus(hosts, directory, Router(hosts, directory))
        finally:
            for host in hosts:
                await host.stop()


def message(
    body: str = "m",
    *,
    key: str | None = None,
    session: str | None = None,
    message_id: Value = None,
    scheduled_ms: int | None = None,
) -> Envelope:
    return Envelope(
        size_bytes=100,
        partition_key=None if key is None else key.encode(),
        session_id=None if session is None else session.encode(),
        message_id=None if message_id is None else encode_value(message_id),
        scheduled_ms=scheduled_ms,
        body=body.encode(),
    )


async def wait_for_too_many(seconds: float = 0.05) -> None:
    """Wait for events that must not happen."""
    await asyncio.sleep(seconds)


def partitions_of(numbers: list[int]) -> list[int]:
    return [number >> NUMBER_BITS for number in numbers]


def spread(**properties: object) -> QueueProperties:
    """Return the properties of a partitioned queue."""
    return QueueProperties.model_validate({"enable_partitioning": True, **properties})


def keys_for(count: int, partition_count: int = 4) -> list[str]:
    """Return a key for each of the first partitions."""
    found: dict[int, str] = {}
    for n in range(1_000):
        found.setdefault(partition_of_key(b"key-%d" % n, partition_count), f"key-{n}")
    return [found[partition_id] for partition_id in range(count)]


def refusal_of(reply: Reply) -> Refusal:
    assert isinstance(reply, Refused), reply
    return reply.refusal
