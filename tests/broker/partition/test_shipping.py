"""Forwards between partitions with real hosts: every message arrives once despite failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from postbus.broker.catalog.directory import home_of
from postbus.broker.placement import partition_of_key
from postbus.entity.commands import (
    Arrive,
    Command,
    Disposition,
    Enqueue,
    Refusal,
    Refused,
    Reply,
    SetDemand,
    Settle,
    Settled,
    SubQueue,
    Transact,
    Transacted,
)
from postbus.store.postgres import Store
from tests.broker.partition.test_host import until
from tests.broker.partition_rig import (
    Bus,
    keys_for,
    message,
    partitions_of,
    refusal_of,
    running,
    spread,
    wait_for_too_many,
)
from tests.broker.putting import put_queue
from tests.store.driving import connected, wait_until

pytestmark = pytest.mark.slow

Call = Callable[[Command], Awaitable[Reply]]


def named(partition_id: int, stem: str = "q", partition_count: int = 4) -> str:
    """Return a name with this home partition."""
    names = (f"{stem}{n}" for n in range(1_000))
    return next(name for name in names if home_of(name, partition_count) == partition_id)


async def put(bus: Bus, name: str, *, is_spread: bool = False, **properties: object) -> None:
    await put_queue(bus.directory, name, spread(enable_partitioning=is_spread, **properties))


async def bodies_of(bus: Bus, path: str) -> list[str]:
    return [each.envelope.body.decode() for each in await bus.peek_all(bus.address(path))]


async def arrived(bus: Bus, path: str, count: int) -> list[str]:
    """Wait for `count` committed messages and return the bodies."""

    async def are_there() -> bool:
        return len(await bodies_of(bus, path)) >= count

    await wait_until(are_there)
    await wait_for_too_many()
    return await bodies_of(bus, path)


@pytest.mark.behaviour("S200", "S201", "S202", "S205", "S238")
@pytest.mark.parametrize("is_source_spread", [False, True])
@pytest.mark.parametrize("is_target_spread", [False, True])
async def test_forwarded_messages_arrive_once_in_the_partition_of_their_key(
    store: Store, is_source_spread: bool, is_target_spread: bool
) -> None:
    async with running(store) as bus:
        source, target = named(0), named(3)
        await put(bus, target, is_spread=is_target_spread)
        await put(bus, source, is_spread=is_source_spread, forward_to=target.upper())
        keys = keys_for(4)
        sent = [message(f"k{n}", key=keys[n % 4]) for n in range(40)]
        sent += [message(f"s{n}", session=keys[n % 4]) for n in range(8)]
        sent += [message(f"n{n}") for n in range(150)]
        await bus.sent(bus.address(source), *sent)
        found = await arrived(bus, target, len(sent))
        assert sorted(found) == sorted(each.body.decode() for each in sent)
        assert await bodies_of(bus, source) == []
        if not is_target_spread:
            return
        for each in await bus.peek_all(bus.address(target)):
            key = each.envelope.session_id or each.envelope.partition_key
            if key is not None:
                assert each.sequence >> 48 == partition_of_key(key, 4)
        places = {each.sequence >> 48 for each in await bus.peek_all(bus.address(target))}
        assert places == {0, 1, 2, 3}


async def test_order_is_kept_from_one_partition_to_another(store: Store) -> None:
    async with running(store) as bus:
        source, target = named(0), named(1)
        await put(bus, target)
        await put(bus, source, forward_to=target)
        address = bus.address(source)
        for n in range(0, 300, 10):
            await bus.sent(address, *(message(str(n + k)) for k in range(10)))
        assert await arrived(bus, target, 300) == [str(n) for n in range(300)]


async def test_a_reload_of_either_side_loses_and_duplicates_no_message(store: Store) -> None:
    async with running(store) as bus:
        source, target = named(0), named(1)
        await put(bus, target, is_spread=True)
        await put(bus, source, forward_to=target)
        await bus.load()
        address = bus.address(source)
        accepted: list[str] = []

        async def send(worker: int) -> None:
            for n in range(40):
                body = f"{worker}-{n}"
                if not isinstance(await bus.send(address, message(body)), Refused):
                    accepted.append(body)

        sending = asyncio.gather(*(send(worker) for worker in range(5)))
        for n in range(8):
            await wait_for_too_many()
            bus.hosts[n % 4].interrupt(0.05)
        await sending
        found = await arrived(bus, target, len(accepted))
        assert len(found) == len(set(found))
        assert set(accepted) <= set(found)


async def test_an_unavailable_target_delays_no_other(store: Store) -> None:
    async with running(store) as bus:
        first, second = named(1, "t"), named(2, "t")
        await put(bus, first)
        await put(bus, second)
        sources = [named(0, "a"), named(0, "b")]
        for source, target in zip(sources, (first, second), strict=True):
            await put(bus, source, forward_to=target)
        await bus.load()
        bus.hosts[1].interrupt(1.0)
        await bus.sent(bus.address(sources[0]), message("slow"))
        await bus.sent(bus.address(sources[1]), message("fast"))
        assert await arrived(bus, second, 1) == ["fast"]
        assert not bus.hosts[1].is_loaded
        await until(lambda: bus.hosts[1].is_loaded)
        assert await arrived(bus, first, 1) == ["slow"]


async def test_a_reload_of_the_source_drops_its_shipments(store: Store) -> None:
    async with running(store) as bus:
        source, target = named(0), named(1)
        await put(bus, target)
        await put(bus, source, forward_to=target)
        await bus.load()
        bus.hosts[1].interrupt(1.5)
        await bus.sent(bus.address(source), *(message(str(n)) for n in range(3)))
        shipper = bus.hosts[0]._shipper
        assert shipper is not None
        await until(lambda: len(shipper._tasks) == 1)
        (old,) = shipper._tasks
        bus.hosts[0].interrupt(0.05)
        await until(lambda: len(shipper._tasks) == 1 and old not in shipper._tasks)
        assert old.cancelled()
        assert not bus.hosts[1].is_loaded
        await until(lambda: bus.hosts[1].is_loaded)
        assert await arrived(bus, target, 3) == ["0", "1", "2"]


@pytest.mark.behaviour("S288", "S289")
@pytest.mark.parametrize("trouble", ["disabled", "deleted"])
async def test_permanent_refusals_of_the_target_are_kept_at_the_source(
    store: Store, trouble: str
) -> None:
    async with running(store) as bus:
        source, target = named(0), named(1)
        await put(bus, target)
        await put(bus, source, forward_to=target)
        await bus.load()
        if trouble == "disabled":
            await put(bus, target, status="Disabled")
        else:
            await bus.directory.delete(target)
        await bus.sent(bus.address(source), *(message(str(n)) for n in range(5)))
        assert await arrived(bus, f"{source}/$Transfer/$DeadLetterQueue", 5) == list("01234")
        await put(bus, target)  # bound by name: recreated, it gets later messages
        await bus.sent(bus.address(source), message("late"))
        assert await arrived(bus, target, 1) == ["late"]


@pytest.mark.behaviour("S205", "S289")
@pytest.mark.parametrize("is_spread", [False, True])
@pytest.mark.parametrize("is_made_again", [False, True])
async def test_messages_stored_by_a_retained_target_are_there_once_after_a_restore(
    store: Store, is_spread: bool, is_made_again: bool
) -> None:
    source, target = named(0), named(1)
    async with running(store) as bus:
        await put(bus, target, is_spread=is_spread)
        await put(bus, source, forward_to=target)
        await bus.load()
        kept_no = bus.address(target).entity_no
        heard = []
        for host in bus.hosts:
            call = host.call

            async def deaf(command: Command, call: Call = call) -> Reply:
                reply = await call(command)
                if not isinstance(command, Arrive):
                    return reply
                heard.append(reply)
                return await asyncio.get_running_loop().create_future()  # the process dies

            host.call = deaf  # type: ignore[method-assign]
        await bus.sent(bus.address(source), *(message(str(n)) for n in range(5)))
        await until(lambda: len(heard) == (4 if is_spread else 1))
        await bus.directory.retain(target, bus.hosts[0].clock() + 1_000_000)
        if is_made_again:
            await put(bus, target, is_spread=is_spread)
    async with running(store) as bus:
        await bus.load()
        await bus.sent(bus.address(source), message("late"))
        late = target if is_made_again else f"{source}/$Transfer/$DeadLetterQueue"
        assert await arrived(bus, late, 1) == ["late"]
        if is_made_again:
            await bus.directory.delete(target)
        await bus.directory.restore(kept_no)
        assert sorted(await arrived(bus, target, 5)) == list("01234")


async def test_dead_letters_are_forwarded_to_their_target(store: Store) -> None:
    async with running(store) as bus:
        source, target = named(0), named(1)
        await put(bus, target)
        await put(bus, source, forward_dead_lettered_messages_to=target)
        address = bus.address(source)
        await bus.sent(address, message("poison"))
        _, sink = await bus.consume(address, 1)
        await until(lambda: len(sink.deliveries) == 1)
        tokens = [sink.deliveries[0].lock_token]
        settle = Settle(
            address.entity_no, SubQueue.ACTIVE, tokens, Disposition.DEAD_LETTER, "why", "so"
        )
        assert await bus.call(address, settle) == Settled()
        assert await arrived(bus, target, 1) == ["poison"]
        (found,) = await bus.peek(bus.address(target))
        assert found.envelope.dead_letter_source == source.encode()
        assert b"why" in found.envelope.application_properties


@pytest.mark.behaviour("S189", "S233")
async def test_a_transaction_settles_here_and_sends_there(store: Store) -> None:
    async with running(store) as bus:
        source, target, other = named(0), named(1), named(2)
        await put(bus, source, is_spread=True)
        await put(bus, target)
        await put(bus, other, is_spread=True)
        address, there = bus.address(source), bus.address(target)
        key = keys_for(4)[3]
        await bus.sent(address, message("work", key=key))
        consumer_id, sink = await bus.consume(address, 1)
        await until(lambda: len(sink.deliveries) == 1)
        tokens = [sink.deliveries[0].lock_token]
        complete = Settle(address.entity_no, SubQueue.ACTIVE, tokens, Disposition.COMPLETE)
        work = Transact(
            [
                Enqueue(there.entity_no, [message("done")], is_atomic=True),
                Enqueue(bus.address(other).entity_no, [message("log", key="x")], is_atomic=True),
                Enqueue(address.entity_no, [message("next", key=key)], is_atomic=True),
                complete,
            ]
        )
        assert isinstance(await bus.call(there, work), Transacted)
        assert await arrived(bus, target, 1) == ["done"]
        assert await arrived(bus, other, 1) == ["log"]
        assert await bodies_of(bus, source) == ["next"]
        reply = await bus.call(there, work)  # the lock is gone: nothing of it happens
        assert refusal_of(reply) is Refusal.LOCK_LOST
        await bus.call(address, SetDemand(consumer_id, 2))
        await until(lambda: len(sink.deliveries) == 2)
        await wait_for_too_many(0.1)
        assert await bodies_of(bus, target) == ["done"]
        assert await bodies_of(bus, source) == ["next"]


@pytest.mark.behaviour("S189", "S190", "S191", "S233")
async def test_a_transaction_with_one_key_is_one_commit_in_its_partition(
    store: Store, database: str
) -> None:
    async with running(store) as bus, connected(database) as look:
        await put(bus, "spread", is_spread=True)
        address = bus.address("spread")
        await bus.load()
        key = keys_for(3)[2]
        work = Transact(
            [Enqueue(address.entity_no, [message(f"{n}", key=key)], True) for n in range(3)]
        )
        reply = await bus.call(address, work)
        assert isinstance(reply, Transacted)
        numbers = [number for each in reply.replies for number in each.sequence_numbers]
        assert partitions_of(numbers) == [2, 2, 2]
        commits = await look.fetchval("select count(distinct xmin::text) from partition_2.message")
        assert commits == 1
        anywhere = Transact([Enqueue(address.entity_no, [message("keyless")], True)])
        assert isinstance(await bus.call(address, anywhere), Transacted)
        bus.hosts[0].interrupt(5)
        bus.hosts[1].interrupt(5)
        for _ in range(4):  # not to those that are unavailable
            assert isinstance(await bus.call(address, anywhere, 2), Transacted)
