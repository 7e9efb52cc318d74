"""A namespace is closed only if it is empty, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from postbus.broker.administration import Administration, DeletePolicy, NamespaceNotEmpty
from postbus.broker.partition.closing import Holding
from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    Disposition,
    Enqueued,
    ReceiveMode,
    Refusal,
    Refused,
    Reply,
    Settle,
    Settled,
    SubQueue,
)
from postbus.store.postgres import Store
from tests.broker.administration_rig import administered, refusal_of
from tests.broker.partition_rig import Bus, message
from tests.broker.putting import put_queue

pytestmark = pytest.mark.slow


async def make_queues(bus: Bus, *names: str) -> None:
    for name in names:
        await put_queue(bus.directory, name, QueueProperties())


async def is_open(bus: Bus, name: str) -> bool:
    """Send to a queue; return whether it was accepted."""
    reply = await bus.send(bus.address(name), message("x"))
    if isinstance(reply, Refused):
        assert reply.refusal is Refusal.BUSY
        assert "closed" in reply.detail
    return isinstance(reply, Enqueued)


async def test_an_empty_namespace_is_closed_permanently(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await make_queues(bus, "a", "b")
        await bus.put_spread_queue()
        await administration.close_namespace()
        assert [await is_open(bus, name) for name in ("a", "b", "q")] == [False] * 3
        await administration.close_namespace()
        assert administration.is_closed
        bus.hosts[bus.address("a").partition_id].interrupt(0.01)
        assert not await is_open(bus, "a")


async def test_a_namespace_with_messages_opens_again(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await make_queues(bus, "a", "kept", "Empty")
        await bus.put_spread_queue()
        for _ in range(3):
            assert await is_open(bus, "q")
        assert await is_open(bus, "kept")
        await administration.delete("kept", policy=DeletePolicy.RETAIN)
        with pytest.raises(NamespaceNotEmpty) as caught:
            await administration.close_namespace()
        assert caught.value.first == [("kept", 1), ("q", 3)]
        assert str(caught.value) == "2 entities hold 4 messages: kept (1), q (3)"
        assert not administration.is_closed
        assert await is_open(bus, "Empty")


async def test_sends_that_wait_for_a_commit_are_counted(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await make_queues(bus, "a")
        address = bus.address("a")
        sending = [asyncio.ensure_future(bus.send(address, message("x"))) for _ in range(20)]
        await asyncio.sleep(0)  # they are applied, and no commit has begun
        closing = asyncio.ensure_future(administration.close_namespace())
        accepted = [isinstance(each, Enqueued) for each in await asyncio.gather(*sending)]
        with pytest.raises(NamespaceNotEmpty, match=rf"1 entity holds {sum(accepted)} messages"):
            await closing


async def test_sends_are_refused_from_the_count_to_the_record(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with administered(store) as (administration, bus):
        await make_queues(bus, "a")
        await bus.put_spread_queue()
        namespace = administration._namespace
        put_closed, attempts = namespace.put_closed, []

        async def put_while_sending(decide: Callable[[], bool]) -> None:
            attempts.extend([await is_open(bus, "a"), await is_open(bus, "q")])
            await put_closed(decide)

        monkeypatch.setattr(namespace, "put_closed", put_while_sending)
        await administration.close_namespace()
        assert attempts == [False, False]
        assert (await administration.runtime("a")).active == 0


async def test_a_completion_is_durable_before_the_namespace_is_closed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with administered(store) as (administration, bus):
        await make_queues(bus, "a")
        address = bus.address("a")
        assert await is_open(bus, "a")
        _, sink = await bus.consume(address, 1)
        (delivery,) = sink.deliveries
        closing, namespace = administration._closing, administration._namespace
        settled: list[Reply] = []
        count, put_closed = closing._holdings, namespace.put_closed

        def complete_and_count() -> list[Holding]:
            command = Settle(
                address.entity_no, SubQueue.ACTIVE, [delivery.lock_token], Disposition.COMPLETE
            )
            bus.router.submit(address.partition_id, command, settled.append)
            assert settled == []  # its commit has begun
            return count()

        async def put_after_the_commit(decide: Callable[[], bool]) -> None:
            assert settled == [Settled()]
            await put_closed(decide)

        monkeypatch.setattr(closing, "_holdings", complete_and_count)
        monkeypatch.setattr(namespace, "put_closed", put_after_the_commit)
        await administration.close_namespace()
        assert administration.is_closed


async def test_a_partition_that_is_away_opens_it_again(store: Store) -> None:
    async with administered(store, loading_s=0.2) as (administration, bus):
        await make_queues(bus, "a", "b")
        bus.hosts[bus.address("a").partition_id].interrupt(0.5)
        assert await refusal_of(administration.close_namespace()) is Refusal.NOT_APPLIED
        assert not bus.directory.refuses_sends


async def test_a_reload_between_count_and_record_opens_it_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with administered(store) as (administration, bus):
        await make_queues(bus, "a")
        closing = administration._closing
        settle = closing._settle

        async def settle_and_reload(lives: list[int | None]) -> None:
            await settle(lives)
            bus.hosts[bus.address("a").partition_id].interrupt(0.01)

        monkeypatch.setattr(closing, "_settle", settle_and_reload)
        assert await refusal_of(administration.close_namespace()) is Refusal.NOT_APPLIED
        assert not administration.is_closed
        assert await is_open(bus, "a")


async def test_a_closed_namespace_that_is_not_empty_opens_at_the_next_attempt(
    store: Store,
) -> None:
    """Another broker may have accepted a message in a partition that this one had lost."""
    async with administered(store) as (administration, bus):
        await make_queues(bus, "a")
        assert await is_open(bus, "a")
        with administration._namespace.refusing_sends():
            await administration._namespace.put_closed(lambda: True)
        assert not await is_open(bus, "a")
        with pytest.raises(NamespaceNotEmpty):
            await administration.close_namespace()
        assert not administration.is_closed
        assert await is_open(bus, "a")


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_accepted_is_in_a_closed_namespace(store: Store, seed: int) -> None:
    """Senders, receivers and attempts to close it at the same time."""
    random = Random(seed)
    async with administered(store) as (administration, bus):
        names = ["a", "b", "c"]
        await make_queues(bus, *names)
        await bus.put_spread_queue()
        accepted: set[str] = set()
        sinks = []
        for name in (*names, "q"):
            _, sink = await bus.consume(bus.address(name), 10_000, ReceiveMode.RECEIVE_AND_DELETE)
            sinks.append(sink)

        async def send(number: int) -> None:
            for step in range(40):
                body = f"{number}-{step}"
                reply = await bus.send(bus.address(random.choice([*names, "q"])), message(body))
                if isinstance(reply, Enqueued):
                    accepted.add(body)
                else:
                    assert isinstance(reply, Refused)
                    assert reply.refusal is Refusal.BUSY
                for _ in range(random.choice([1, 5, 200])):
                    await asyncio.sleep(0)

        senders = [asyncio.ensure_future(send(number)) for number in range(4)]
        await keep_closing(administration)
        await asyncio.gather(*senders)
        for name in (*names, "q"):
            assert (await administration.runtime(name)).active == 0
            assert not await is_open(bus, name)
        received = {body for sink in sinks for body in sink.bodies}
        assert accepted == received


async def keep_closing(administration: Administration) -> None:
    while True:
        try:
            await administration.close_namespace()
        except NamespaceNotEmpty:
            await asyncio.sleep(0)
        else:
            return
