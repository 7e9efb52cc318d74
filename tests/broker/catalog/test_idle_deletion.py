"""Deletion of idle entities: all partitions agree, or nothing happens (ADR 27)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from postbus.broker.catalog.catalog import caller_epoch
from postbus.broker.catalog.directory import IDLE_AT_ONCE, Directory
from postbus.broker.catalog.idle_deletion import freeze
from postbus.broker.catalog.preconditions import NotWritten
from postbus.broker.partition.clock import ManualClock
from postbus.broker.partition.host import Host
from postbus.contract.entities import (
    QueueProperties,
    Sku,
    SubscriptionProperties,
    TopicProperties,
    limits_of,
)
from postbus.entity import commands
from postbus.entity.commands import (
    AddConsumer,
    Command,
    Done,
    DropEntity,
    Enqueue,
    Enqueued,
    Freeze,
    Hold,
    PutEntity,
    ReceiveMode,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    SubQueue,
    Thaw,
    Tick,
)
from postbus.entity.idle import REPEAT_MS
from postbus.entity.window import WindowBudget
from postbus.message.envelope import Envelope
from postbus.store.caller_epoch import CallerEpochStore
from postbus.store.catalog import CatalogEntry, CatalogPut, CatalogStore, DeletedReason
from postbus.store.catalog_change import CatalogFence
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from tests.broker.partition_rig import manual_clock
from tests.broker.putting import put_queue, put_subscription, put_topic
from tests.store.driving import wait_until

pytestmark = pytest.mark.slow

PARTITIONED = QueueProperties(enable_partitioning=True, auto_delete_on_idle_ms=300_000)
TEMPORARY = QueueProperties(auto_delete_on_idle_ms=300_000)


@dataclass
class Partition:
    """A host that answers a freeze as configured; None: it does not answer."""

    answer: Reply | None = field(default_factory=lambda: commands.Frozen(0))
    is_loaded: bool = True
    reload_count: int = 0
    epoch: int | None = 0
    trouble: str | None = None
    hold_answer: Reply | None = None
    received: list[Command] = field(default_factory=list)

    async def call(self, command: Command) -> Reply:
        self.received.append(command)
        if not isinstance(command, Freeze | Hold):
            return Done()
        if isinstance(command, Hold) and self.hold_answer is not None:
            return self.hold_answer
        if self.answer is None:
            await asyncio.get_running_loop().create_future()
        assert self.answer is not None
        return self.answer

    def kinds(self) -> list[type[Command]]:
        return [type(command) for command in self.received if not isinstance(command, PutEntity)]


BUSY = Refused(Refusal.BUSY, "in use")


async def open_directory(
    store: Store, count: int = 2, catalog: CatalogStore | None = None
) -> tuple[Directory, list[Partition]]:
    directory = Directory(catalog or CatalogStore(store), limits_of(Sku.STANDARD, count))
    await directory.load()
    partitions = [Partition() for _ in range(count)]
    directory.follow(partitions)
    return directory, partitions


async def tombstones(store: Store) -> dict[str, str]:
    async with store.aside() as connection:
        rows = await connection.fetch(
            "select name, deleted_reason from postbus.catalog where is_deleted"
        )
    return {row["name"]: row["deleted_reason"] for row in rows}


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# --- the protocol -------------------------------------------------------------------------------


async def test_deletion_needs_unanimity_and_thaws_all_partitions() -> None:
    cases: list[tuple[list[Reply | None], bool]] = [
        ([commands.Frozen(1), commands.Frozen(2)], True),
        ([commands.Frozen(1), BUSY], False),
        ([commands.Frozen(1), Refused(Refusal.NOT_APPLIED, "loading")], False),
        ([commands.Frozen(1), None], False),
    ]
    for answers, expected in cases:
        hosts = [Partition(answer) for answer in answers]
        async with freeze(hosts, 7, answer_s=0.05) as why_not:
            assert (why_not is None) is expected
        await settle()
        assert [host.kinds() for host in hosts] == [[Freeze, Thaw]] * 2


# --- with the catalog ---------------------------------------------------------------------------


@pytest.mark.behaviour("S117")
async def test_idle_queue_is_deleted_with_a_tombstone(store: Store) -> None:
    directory, partitions = await open_directory(store)
    entry = await put_queue(directory, "orders", TEMPORARY)
    assert await directory.idle(entry.entity_no)
    await settle()
    assert directory.find("orders") is None
    assert await tombstones(store) == {"orders": DeletedReason.IDLE.value}
    assert partitions[entry.home_partition].kinds() == [Freeze, Hold, DropEntity, Thaw]
    assert partitions[1 - entry.home_partition].received == []
    assert not await directory.idle(entry.entity_no)
    again = await put_queue(directory, "orders", TEMPORARY)
    assert again.entity_no > entry.entity_no


async def test_every_partition_of_a_partitioned_entity_must_agree(store: Store) -> None:
    directory, partitions = await open_directory(store)
    entry = await put_queue(directory, "orders", PARTITIONED)
    partitions[1].is_loaded = False  # it may hold a scheduled message: asking loads it
    partitions[1].answer = BUSY
    assert not await directory.idle(entry.entity_no)
    await settle()
    assert directory.find("orders") == entry
    assert [partition.kinds() for partition in partitions] == [[Freeze, Thaw]] * 2
    partitions[1].answer = commands.Frozen(0)
    partitions[1].is_loaded = True
    assert await directory.idle(entry.entity_no)
    await settle()
    deleted = [Freeze, Hold, DropEntity, Thaw]
    assert [partition.kinds()[2:] for partition in partitions] == [deleted] * 2


async def test_a_thawed_partition_prevents_the_deletion(store: Store) -> None:
    directory, partitions = await open_directory(store)
    entry = await put_queue(directory, "orders", PARTITIONED)
    partitions[1].hold_answer = BUSY
    assert not await directory.idle(entry.entity_no)
    await settle()
    assert directory.find("orders") == entry
    assert [partition.kinds() for partition in partitions] == [[Freeze, Hold, Thaw]] * 2
    assert directory.held(0) == directory.held(1) == []


async def test_a_silent_partition_delays_no_other_definition(store: Store) -> None:
    directory, (partition,) = await open_directory(store, 1)
    entry = await put_queue(directory, "orders", TEMPORARY)
    partition.answer = None
    idle = asyncio.ensure_future(directory.idle(entry.entity_no))
    await settle()
    assert not await directory.idle(entry.entity_no)  # one request at a time
    await put_queue(directory, "others", TEMPORARY)
    assert not idle.done()
    idle.cancel()
    with pytest.raises(asyncio.CancelledError):
        await idle
    await settle()
    assert partition.kinds() == [Freeze, Thaw]


async def test_a_definition_put_meanwhile_is_a_use(store: Store) -> None:
    directory, (partition,) = await open_directory(store, 1)
    entry = await put_queue(directory, "orders", TEMPORARY)
    async with directory.catalog._lock:
        put = asyncio.ensure_future(put_queue(directory, "orders", TEMPORARY))
        await settle()
        idle = asyncio.ensure_future(directory.idle(entry.entity_no))
        await settle()
        assert partition.kinds() == [Freeze, Hold]
    assert await put == entry
    assert not await idle
    assert directory.find("orders") == entry
    await settle()
    assert partition.kinds()[-1] is Thaw


@pytest.mark.behaviour("S118", "S119")
async def test_an_idle_topic_is_deleted_with_its_subscriptions_and_a_subscription_alone(
    store: Store,
) -> None:
    directory, partitions = await open_directory(store)
    topic = await put_topic(directory, "events", TopicProperties(auto_delete_on_idle_ms=300_000))
    temporary = SubscriptionProperties(auto_delete_on_idle_ms=300_000)
    one = await put_subscription(directory, "events", "one", temporary)
    two = await put_subscription(directory, "events", "two", SubscriptionProperties())
    assert await directory.idle(one.entity_no)
    assert {entry.name for entry in directory.entries()} == {topic.name, two.name}
    assert await directory.idle(topic.entity_no)
    await settle()
    assert directory.entries() == []
    received = partitions[topic.home_partition].received
    frozen = [command.entity_no for command in received if isinstance(command, Freeze)]
    dropped = [command.entity_no for command in received if isinstance(command, DropEntity)]
    assert frozen == [one.entity_no, topic.entity_no]
    assert dropped == [one.entity_no, two.entity_no, topic.entity_no]
    assert set((await tombstones(store)).values()) == {DeletedReason.IDLE.value}


class LossyCatalog(CatalogStore):
    """The real catalog; on request it loses a deletion or the answer to it."""

    loses_answer = loses_write = False

    async def delete(self, *given: Any) -> int:
        version = 0 if self.loses_write else await super().delete(*given)
        if self.loses_write or self.loses_answer:
            raise StoreUnavailable
        return version


async def test_a_deletion_that_was_lost_leaves_the_entity_and_thaws_it(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory, partitions = await open_directory(store, 1, catalog)
    entry = await put_queue(directory, "orders", TEMPORARY)
    catalog.loses_write = True
    with pytest.raises(NotWritten):
        await directory.idle(entry.entity_no)
    await settle()
    assert directory.find("orders") == entry
    assert partitions[0].kinds() == [Freeze, Hold, Thaw]


async def test_a_deletion_with_a_lost_answer_is_reported_before_the_thaw(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory, partitions = await open_directory(store, 1, catalog)
    entry = await put_queue(directory, "orders", TEMPORARY)
    catalog.loses_answer = True
    assert await directory.idle(entry.entity_no)
    await settle()
    assert partitions[0].kinds() == [Freeze, Hold, DropEntity, Thaw]


async def test_a_new_subscription_is_a_use_of_its_topic(store: Store) -> None:
    directory, _ = await open_directory(store, 1)
    topic = await put_topic(directory, "events", TopicProperties(auto_delete_on_idle_ms=300_000))
    async with directory.catalog._lock:
        put = asyncio.ensure_future(
            put_subscription(directory, "events", "one", SubscriptionProperties())
        )
        await settle()
        idle = asyncio.ensure_future(directory.idle(topic.entity_no))
        await settle()
    assert await put
    assert not await idle
    assert directory.find("events") == topic


async def test_few_entities_are_frozen_at_once(store: Store) -> None:
    directory, (partition,) = await open_directory(store, 1)
    entries = [await put_queue(directory, f"q{n}", TEMPORARY) for n in range(IDLE_AT_ONCE + 3)]
    async with directory.catalog._lock:
        idle = [asyncio.ensure_future(directory.idle(entry.entity_no)) for entry in entries]
        await settle()
        assert partition.kinds() == [Freeze] * IDLE_AT_ONCE + [Hold] * IDLE_AT_ONCE
    assert all(await asyncio.gather(*idle))


class SlowCatalog(CatalogStore):
    """The real catalog; deletions and changes wait until they are released."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.has_begun, self.may_go = asyncio.Event(), asyncio.Event()

    async def delete(self, *given: Any) -> int:
        self.has_begun.set()
        await self.may_go.wait()
        return await super().delete(*given)

    async def put_all(self, puts: Sequence[CatalogPut], fence: CatalogFence) -> list[CatalogEntry]:
        if puts[0].properties != TEMPORARY:
            self.has_begun.set()
            await self.may_go.wait()
        return await super().put_all(puts, fence)


@pytest.mark.parametrize("first", ["idle", "put"])
async def test_a_definition_that_is_being_written_is_a_use(store: Store, first: str) -> None:
    """The result thaws the entity: from then on messages are accepted."""
    catalog = SlowCatalog(store)
    directory, (partition,) = await open_directory(store, 1, catalog)
    entry = await put_queue(directory, "orders", TEMPORARY)
    changed = TEMPORARY.model_copy(update={"max_delivery_count": 3})
    async with directory.catalog._lock:
        put = asyncio.ensure_future(put_queue(directory, "orders", changed))
        await settle()
        idle = []
        if first == "idle":
            idle.append(asyncio.ensure_future(directory.idle(entry.entity_no)))
        await settle()
    await catalog.has_begun.wait()
    idle.append(asyncio.ensure_future(directory.idle(entry.entity_no)))
    await settle()
    assert partition.kinds() == [Freeze, Hold]
    catalog.may_go.set()
    written = await put
    assert not any(await asyncio.gather(*idle))
    assert directory.find("orders") == written


async def test_commands_during_a_deletion_wait_for_its_result(store: Store) -> None:
    catalog = SlowCatalog(store)
    directory, _ = await open_directory(store, 1, catalog)
    entry = await put_queue(directory, "orders", TEMPORARY)
    idle = asyncio.ensure_future(directory.idle(entry.entity_no))
    await catalog.has_begun.wait()
    put = asyncio.ensure_future(put_queue(directory, "orders", TEMPORARY))
    await settle()
    catalog.may_go.set()
    assert await idle
    again = await put
    assert again.entity_no > entry.entity_no


# --- with real partitions -----------------------------------------------------------------------

IDLE_MS = 300_000


class Sink:
    """A receiver that accepts all deliveries."""

    def __init__(self) -> None:
        self.ends: list[Refusal] = []

    def deliver(self, deliveries: list[commands.Delivery]) -> None: ...

    def granted(self, session_id: bytes, locked_until_ms: int) -> None: ...

    def available(self, count: int) -> None: ...

    def ended(self, refused: Refused) -> None:
        self.ends.append(refused.refusal)

    def reset(self) -> None: ...


@dataclass
class Broker:
    """Two partitions over one store; entity time is moved by hand."""

    directory: Directory
    hosts: list[Host]
    clock: ManualClock
    deleted: list[int] = field(default_factory=list)
    """Entities that the catalog and their partitions deleted."""

    async def pass_time(self, duration_ms: int) -> None:
        """Advance entity time in small steps, each when the step before had all its effects.

        Time that passes meanwhile thaws what a deletion froze, which then is not deleted.
        """
        for _ in range(10):
            self.clock.advance(duration_ms // 10)
            for host in self.hosts:
                host.clock_changed()
            for host in self.hosts:
                if host.is_loaded:
                    await host.call(Tick())
            await settle()  # a deletion begins in a task of its own
            await wait_until(self.no_deletion_is_pending)

    async def no_deletion_is_pending(self) -> bool:
        return not self.directory._unused

    async def wait_until_gone(self, entity_no: int) -> None:
        """Wait until the partitions dropped an entity, which they report repeatedly if idle."""

        async def is_gone() -> bool:
            if entity_no not in self.deleted:
                await self.pass_time(REPEAT_MS)
            return entity_no in self.deleted

        await wait_until(is_gone)

    async def hosts_are_loaded(self) -> bool:
        return all(host.is_loaded for host in self.hosts)

    async def is_sent(self, entity_no: int) -> bool:
        return isinstance(await self.send(entity_no), Enqueued)

    async def send(self, entity_no: int, partition_id: int = 0, due_ms: int | None = None) -> Reply:
        body = b"\x00\x53\x75\xa0\x05hello"
        envelope = Envelope(body=body, size_bytes=len(body), scheduled_ms=due_ms)
        return await self.hosts[partition_id].call(Enqueue(entity_no, [envelope]))


@asynccontextmanager
async def running(
    store: Store, is_everything_loaded: bool = True, catalog: CatalogStore | None = None
) -> AsyncIterator[Broker]:
    directory = Directory(catalog or CatalogStore(store), limits_of(Sku.STANDARD, 2))
    await directory.load()
    clock = manual_clock()
    async with asyncio.TaskGroup() as tasks:
        hosts = [
            Host(
                partition_id=partition_id,
                store=store,
                directory=directory,
                clock=clock,
                budget=WindowBudget(1 << 26),
                new_seed=lambda: 1,
                tasks=tasks,
            )
            for partition_id in range(2)
        ]
        directory.follow(hosts)
        try:
            for host in hosts if is_everything_loaded else hosts[:1]:
                assert await host.call(Tick()) == Done()
            broker = Broker(directory, hosts, clock)
            directory.on_deletion(broker.deleted.append)
            yield broker
        finally:
            for host in hosts:
                await host.stop()


@pytest.mark.behaviour("S117", "S125", "S141")
async def test_unused_queue_is_deleted(store: Store) -> None:
    async with running(store) as broker:
        entry = await put_queue(broker.directory, "orders", TEMPORARY)
        for _ in range(3):
            await broker.pass_time(IDLE_MS - 60_000)
            assert isinstance(await broker.send(entry.entity_no, entry.home_partition), Enqueued)
        assert broker.directory.find("orders") == entry
        await broker.pass_time(2 * IDLE_MS)
        await broker.wait_until_gone(entry.entity_no)
        reply = await broker.send(entry.entity_no, entry.home_partition)
        assert isinstance(reply, Refused)
        assert reply.refusal is Refusal.ENTITY_NOT_FOUND
        assert await tombstones(store) == {"orders": "idle"}


async def test_partitioned_queue_stays_while_one_partition_is_used(store: Store) -> None:
    async with running(store) as broker:
        entry = await put_queue(broker.directory, "orders", PARTITIONED)
        for _ in range(3):
            await broker.pass_time(IDLE_MS - 60_000)
            assert isinstance(await broker.send(entry.entity_no, 1), Enqueued)
        assert broker.directory.find("orders") == entry
        await wait_until(lambda: broker.is_sent(entry.entity_no))  # thawed
        await broker.pass_time(3 * IDLE_MS)
        await broker.wait_until_gone(entry.entity_no)


@pytest.mark.parametrize("what", ["reload", "time"])
async def test_an_entity_under_deletion_refuses_commands(store: Store, what: str) -> None:
    catalog = SlowCatalog(store)
    async with running(store, catalog=catalog) as broker:
        entry = await put_queue(broker.directory, "orders", TEMPORARY)
        host = broker.hosts[entry.home_partition]
        broker.clock.advance(2 * IDLE_MS)
        host.clock_changed()
        async with asyncio.timeout(20):
            await catalog.has_begun.wait()
        if what == "reload":
            host.interrupt(0.0)
            assert host.reload_count == 1
        else:
            broker.clock.advance(10 * IDLE_MS)
        reply = await broker.send(entry.entity_no, entry.home_partition)
        assert isinstance(reply, Refused)
        assert reply.refusal is Refusal.BUSY
        catalog.may_go.set()
        await broker.wait_until_gone(entry.entity_no)


class LateHost:
    """A partition that answers when it is released."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.may_go = asyncio.Event()

    @property
    def is_loaded(self) -> bool:
        return self._host.is_loaded

    @property
    def reload_count(self) -> int:
        return self._host.reload_count

    async def call(self, command: Command) -> Reply:
        await self.may_go.wait()
        return await self._host.call(command)


async def test_a_send_between_two_reloads_is_a_use(store: Store) -> None:
    """The partition froze the entity, forgot it, stored a message and is unavailable when asked."""
    async with running(store) as broker:
        entry = await put_queue(broker.directory, "orders", PARTITIONED)
        first, late = broker.hosts[0], LateHost(broker.hosts[1])
        broker.directory.follow([first, late])
        broker.clock.advance(2 * IDLE_MS)
        idle = asyncio.ensure_future(broker.directory.idle(entry.entity_no))
        await settle()
        assert not await broker.is_sent(entry.entity_no)
        first.interrupt(0.0)
        assert await broker.is_sent(entry.entity_no)
        first.interrupt(0.0)
        late.may_go.set()
        assert not await idle
        assert broker.directory.find("orders") == entry


@pytest.mark.behaviour("S129")
async def test_a_scheduled_message_in_a_partition_that_is_not_loaded_is_found(store: Store) -> None:
    async with running(store) as broker:
        entry = await put_queue(broker.directory, "orders", PARTITIONED)
        due_ms = broker.clock() + 100 * IDLE_MS
        assert isinstance(await broker.send(entry.entity_no, 1, due_ms), Enqueued)
    async with running(store, is_everything_loaded=False) as broker:
        await broker.pass_time(2 * IDLE_MS)
        await wait_until(broker.hosts_are_loaded)  # it got the request
        await broker.pass_time(4 * IDLE_MS)
        assert broker.directory.find("orders") == entry


@pytest.mark.behaviour("S118", "S133", "S138")
async def test_a_topic_lives_as_long_as_a_subscription_is_used(store: Store) -> None:
    async with running(store) as broker:
        topic = await put_topic(
            broker.directory, "events", TopicProperties(auto_delete_on_idle_ms=IDLE_MS)
        )
        used = await put_subscription(broker.directory, "events", "used", SubscriptionProperties())
        temporary = SubscriptionProperties(auto_delete_on_idle_ms=IDLE_MS)
        unused = await put_subscription(broker.directory, "events", "unused", temporary)
        host, sink = broker.hosts[topic.home_partition], Sink()
        host.register_sink(1, sink)
        await host.call(AddConsumer(used.entity_no, SubQueue.ACTIVE, 1, ReceiveMode.PEEK_LOCK))
        await host.call(SetDemand(1, 10))
        await broker.pass_time(3 * IDLE_MS)
        await broker.wait_until_gone(unused.entity_no)
        assert broker.directory.entries() == [topic, used]
        await host.call(RemoveConsumer(1))
        await broker.pass_time(2 * IDLE_MS)
        await broker.wait_until_gone(topic.entity_no)
        assert broker.directory.entries() == []


async def test_the_epoch_of_a_caller_does_not_stay_with_a_timer(store: Store) -> None:
    """A request started the timer of its partition; then a caller with a higher epoch came."""
    async with running(store) as broker:
        entry = await put_queue(broker.directory, "orders", TEMPORARY)
        owned = broker.directory.catalog.epoch
        assert owned is not None
        await CallerEpochStore(store).raise_to(6, owned)
        token = caller_epoch.set(5)
        try:
            await broker.pass_time(2 * IDLE_MS)
            await broker.wait_until_gone(entry.entity_no)
        finally:
            caller_epoch.reset(token)
