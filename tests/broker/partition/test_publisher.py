"""The publisher of a partition: each message once, at its pace, whatever fails on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from postbus.broker.address import Address
from postbus.broker.partition.host import Host
from postbus.broker.partition.publisher import CHUNK_MESSAGES, SENDING_CHUNKS, Publisher
from postbus.broker.partition.shipper import ForwardDestination
from postbus.contract.entities import QueueProperties
from postbus.entity.commands import Arrive, PeekedMessage, Refusal, Refused
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from postbus.store.publishing import PublishingStore, WriterState
from tests.broker.partition_rig import Bus, manual_clock, running
from tests.broker.putting import put_queue
from tests.edge.bulk.writer_client import message, sequence


@pytest.fixture
async def bus(store: Store) -> AsyncIterator[Bus]:
    async with running(store, partition_count=1, clock=manual_clock()) as made:
        await made.load()
        await put_queue(made.directory, "q", QueueProperties())
        yield made


class Wire:
    """The way to a host, on which the n-th answer can be lost or a command be refused."""

    def __init__(self, host: Host) -> None:
        self.pass_on: Callable[[Any], Awaitable[Any]] = host.call
        self.count = 0
        self.lost: set[int] = set()
        self.refused: dict[int, Refused] = {}
        self.sizes: list[int] = []

    async def call(self, command: Any) -> Any:
        assert isinstance(command, Arrive)
        self.count += 1
        number = self.count
        self.sizes.append(len(command.messages))
        if number in self.refused:
            return self.refused[number]
        reply = await self.pass_on(command)
        return Refused(Refusal.UNKNOWN) if number in self.lost else reply


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    async def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        if duration_s < 3_000:  # not the sweeper
            self.now_s += duration_s
            await asyncio.sleep(0)
        else:
            await asyncio.Event().wait()


class Rig:
    """A publisher beside the partition's own, which is not asked."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        find: Callable[[int], Any] | None = None,
        others: Sequence[Wire] = (),
    ) -> None:
        self.bus = bus
        self.address: Address = bus.address("q")
        self.host = bus.hosts[0]
        self.wire = Wire(self.host)
        self.time = Clock()
        self.store = PublishingStore(store, 0)
        self.publisher = Publisher(
            self.host,
            self.store,
            [self.wire, *others],
            find or (lambda number: ForwardDestination(number, 0, False, False)),
            self.time.sleep,
            lambda: self.time.now_s,
        )

    @property
    def epoch(self) -> int:
        assert self.host.epoch is not None
        return self.host.epoch

    async def stage(self, stage_no: int, first: int, count: int, writer: str = "w") -> None:
        data = sequence([message(b"%d" % n) for n in range(first, first + count)])
        await self.store.add(
            self.epoch, stage_no, self.address.entity_no, writer, self.host.clock(),
            message_count=count, size_bytes=count * 100, data=data,
        )  # fmt: skip

    async def publish(
        self, batch: int, *stages: int, rate: int | None = None, writer: str = "w"
    ) -> None:
        decided = await self.store.publish(
            self.epoch, self.address.entity_no, writer, batch, stages, rate, self.host.clock()
        )
        assert isinstance(decided, WriterState), decided

    async def sent(self, writer: str = "w") -> None:
        """Send until the batch has arrived."""
        await self.publisher.refresh()
        batch = self.publisher.batch(self.address.entity_no, writer)
        assert batch is not None
        try:
            async with asyncio.timeout(30):
                await batch.done.wait()
        except TimeoutError:
            self.publisher.drop()  # the bus waits for it
            raise

    async def bodies(self) -> list[int]:
        found: list[PeekedMessage] = []
        while page := await self.bus.peek(self.address, found[-1].sequence + 1 if found else 0):
            found += page
        return [int(each.envelope.body[8:]) for each in found]


async def test_messages_whose_answers_are_lost_arrive_once(bus: Bus, store: Store) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 600)
    await rig.stage(2, 600, 10)
    await rig.publish(1, 1, 2)
    rig.wire.lost = {1, 3, 4}
    rig.wire.refused = {6: Refused(Refusal.QUOTA_EXCEEDED, "full")}
    await rig.sent()
    assert await rig.bodies() == list(range(610))
    assert max(rig.wire.sizes) == CHUNK_MESSAGES
    assert await rig.store.held_bytes(rig.address.entity_no) == (0, 0)
    assert await rig.store.publications() == []


async def test_batch_begins_again_at_its_first_stage_and_skips_what_arrived(
    bus: Bus, store: Store
) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 300)
    await rig.publish(1, 1)
    stopped = asyncio.Event()

    async def stop_after_the_first(command: Any) -> Any:
        if len(command.numbers) == CHUNK_MESSAGES:
            await rig.host.call(command)
            stopped.set()
        await asyncio.Event().wait()

    rig.wire.call = stop_after_the_first  # type: ignore[method-assign]
    await rig.publisher.refresh()
    await stopped.wait()
    rig.publisher.drop()
    assert len(await rig.bodies()) == CHUNK_MESSAGES
    again = Rig(bus, store)
    await again.sent()
    assert await again.bodies() == list(range(300))


async def test_chunk_is_sent_while_the_one_before_is_committed(bus: Bus, store: Store) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 5 * CHUNK_MESSAGES)
    await rig.publish(1, 1)
    under_way, most = 0, 0

    async def call(command: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await rig.host.call(command)
        finally:
            under_way -= 1

    rig.wire.pass_on = call
    await rig.sent()
    assert most == SENDING_CHUNKS
    assert await rig.bodies() == list(range(5 * CHUNK_MESSAGES))


@pytest.mark.parametrize("refused", range(1, 5))
@pytest.mark.parametrize("detail", ["", "full"])
async def test_chunk_behind_a_refused_one_is_sent_again_after_it(
    bus: Bus, store: Store, refused: int, detail: str
) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 4 * CHUNK_MESSAGES)
    await rig.publish(1, 1)
    rig.wire.refused = {refused: Refused(Refusal.QUOTA_EXCEEDED, detail)}
    await rig.sent()
    assert await rig.bodies() == list(range(4 * CHUNK_MESSAGES))


async def test_chunk_waits_for_the_one_before_also_when_an_earlier_one_is_repeated(
    bus: Bus, store: Store
) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 3 * CHUNK_MESSAGES)
    await rig.publish(1, 1)
    third_was_sent = asyncio.Event()

    async def refuse_the_second_late(command: Any) -> Any:
        call = rig.wire.count
        if call == 2:
            await third_was_sent.wait()
            return Refused(Refusal.BUSY)
        reply = await rig.host.call(command)
        if call == 4:
            third_was_sent.set()
        return reply

    rig.wire.lost = {1}
    rig.wire.pass_on = refuse_the_second_late
    await rig.sent()
    assert await rig.bodies() == list(range(3 * CHUNK_MESSAGES))


async def test_chunk_that_arrives_in_part_is_completed_before_the_next_one(
    bus: Bus, store: Store
) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 2 * CHUNK_MESSAGES)
    await rig.publish(1, 1)

    async def cut_the_first(command: Any) -> Any:
        if len(rig.wire.sizes) == 1:
            del command.numbers[100:], command.messages[100:]
        return await rig.host.call(command)

    rig.wire.pass_on = cut_the_first
    await rig.sent()
    assert rig.wire.sizes == [256, 256, 156, 256]
    assert await rig.bodies() == list(range(2 * CHUNK_MESSAGES))


async def test_failed_chunk_ends_the_one_behind_it(bus: Bus, store: Store) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 3 * CHUNK_MESSAGES)
    await rig.publish(1, 1)
    failures = [RuntimeError("broken")]

    async def fail_once(command: Any) -> Any:
        if failures:
            raise failures.pop()
        return await rig.host.call(command)

    rig.wire.pass_on = fail_once
    await rig.sent()
    assert await rig.bodies() == list(range(3 * CHUNK_MESSAGES))


async def test_chunks_for_several_partitions_arrive_once(store: Store) -> None:
    count = 8 * CHUNK_MESSAGES
    async with running(store, partition_count=2, clock=manual_clock()) as bus:
        await bus.load()
        await bus.put_spread_queue()
        other = Wire(bus.hosts[1])
        place = ForwardDestination(bus.address("q").entity_no, 0, True, False)
        rig = Rig(bus, store, lambda _: place, [other])
        await rig.stage(1, 0, count)
        await rig.publish(1, 1)
        rig.wire.refused = {2: Refused(Refusal.BUSY), 7: Refused(Refusal.BUSY)}
        other.refused = {1: Refused(Refusal.BUSY), 6: Refused(Refusal.BUSY)}
        await rig.sent()
        assert sorted(await rig.bodies()) == list(range(count))
        assert min(len(wire.sizes) for wire in (rig.wire, other)) > 8


async def test_one_chunk_at_a_time_is_sent_where_the_second_one_is_too_early(
    bus: Bus, store: Store
) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 6 * CHUNK_MESSAGES)
    await rig.publish(1, 1)
    lock = asyncio.Lock()

    async def refuse_the_second(command: Any) -> Any:
        if lock.locked():
            return Refused(Refusal.BUSY)
        async with lock:
            return await rig.host.call(command)

    rig.wire.pass_on = refuse_the_second
    await rig.sent()
    assert len(rig.wire.sizes) == 7
    assert await rig.bodies() == list(range(6 * CHUNK_MESSAGES))


async def test_rate_is_kept_from_the_first_chunk_on(bus: Bus, store: Store) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 500)
    await rig.publish(1, 1, rate=100)
    await rig.sent()
    assert set(rig.wire.sizes) == {10}
    pauses = [each for each in rig.time.slept if each]
    assert len(pauses) == 49
    assert sum(pauses) == pytest.approx(4.9)
    assert await rig.bodies() == list(range(500))


async def test_slow_rate_sends_single_messages(bus: Bus, store: Store) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 3)
    await rig.publish(1, 1, rate=2)
    await rig.sent()
    assert rig.wire.sizes == [1, 1, 1]
    assert sum(rig.time.slept) == pytest.approx(1.0)


async def test_waiting_batch_does_not_hold_up_that_of_another_writer(
    bus: Bus, store: Store
) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 2, "full")
    await rig.stage(2, 2, 2, "other")
    await rig.publish(1, 1, writer="full")
    await rig.publish(1, 2, writer="other")

    async def call(command: Any) -> Any:
        if command.source_partition == -1:
            return Refused(Refusal.QUOTA_EXCEEDED, "the queue is full")
        return await rig.host.call(command)

    rig.wire.call = call  # type: ignore[method-assign]
    await rig.sent("other")
    assert await rig.bodies() == [2, 3]
    waiting = rig.publisher.batch(rig.address.entity_no, "full")
    assert waiting is not None
    assert waiting.waits_for == "quota-exceeded: the queue is full"
    rig.publisher.drop()


async def test_batch_of_a_deleted_entity_ends_when_its_stages_are_gone(
    bus: Bus, store: Store
) -> None:
    found: list[ForwardDestination] = []
    rig = Rig(bus, store, lambda _: found[0] if found else None)
    await rig.stage(1, 0, 2)
    await rig.publish(1, 1)
    await bus.directory.delete("q")
    await rig.sent()
    assert await rig.store.held_bytes(rig.address.entity_no) == (0, 0)
    assert await rig.store.writer(rig.address.entity_no, "w") is None


async def test_batches_are_looked_for_until_the_store_answers(bus: Bus, store: Store) -> None:
    rig = Rig(bus, store)
    await rig.stage(1, 0, 2)
    await rig.publish(1, 1)
    publications, failures = rig.store.publications, [StoreUnavailable("away")] * 3

    async def fail() -> Any:
        if failures:
            raise failures.pop()
        return await publications()

    rig.store.publications = fail  # type: ignore[method-assign]
    rig.publisher.look()
    async with asyncio.timeout(30):
        while bus.counts(rig.address).active < 2:
            await asyncio.sleep(0)
    assert not failures
    rig.publisher.drop()
