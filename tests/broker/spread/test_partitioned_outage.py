"""A partitioned entity while one of two databases is down, and after it came back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from postbus.broker.partition.ownership import HostStatus
from postbus.entity.commands import (
    AcceptSession,
    Disposition,
    Done,
    Enqueued,
    ReceiveMode,
    Refusal,
    Refused,
    Reply,
    SetDemand,
    Settle,
    Settled,
    SubQueue,
)
from postbus.process.embedded import EmbeddedPostgres
from postbus.store.postgres import Store
from tests.broker.partition.test_host import until
from tests.broker.partition_rig import (
    Bus,
    RecordingSink,
    keys_for,
    message,
    partitions_of,
    running,
    spread,
)
from tests.broker.putting import put_queue
from tests.conftest import dsn_of, make_database
from tests.store.driving import wait_until

pytestmark = pytest.mark.slow

RETRYABLE = {Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.BUSY}
HEALTHY, DOWN = (0, 2), (1, 3)
"""Partitions of the first and of the second database."""


@pytest.fixture(scope="module")
def second_server(server_folder: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(server_folder / "second", major=16)
    server.start()
    yield server
    server.stop()


NUMBERS = itertools.count(1)


class Outage:
    """Stops and starts the second database server."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server

    async def begin(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def end(self, bus: Bus) -> None:
        """Return when every partition is loaded again without a request."""
        await asyncio.to_thread(self._server.start)

        async def is_back() -> bool:
            return all(host.is_loaded and host.trouble is None for host in bus.hosts)

        await wait_until(is_back)


@pytest.fixture
async def outage(second_server: EmbeddedPostgres) -> AsyncIterator[Outage]:
    yield Outage(second_server)
    await asyncio.to_thread(second_server.start)


@pytest.fixture
async def second_store(second_server: EmbeddedPostgres, outage: Outage) -> AsyncIterator[Store]:
    name = f"second_{next(NUMBERS)}"
    make_database(second_server, name)
    store = Store(dsn_of(second_server, name))
    yield store
    await store.close()


async def wait_for_noticed_outage(bus: Bus) -> None:
    """Return when the partitions of the second database know that it is unavailable."""
    await until(lambda: all(bus.hosts[each].trouble is not None for each in DOWN))


def refusal_of(reply: Reply) -> Refusal | None:
    return reply.refusal if isinstance(reply, Refused) else None


def lost_of(tokens: list[bytes]) -> Reply:
    """Return the reply that none of the locks is held."""
    if len(tokens) == 1:
        return Settled([0])
    return Refused(Refusal.LOCK_LOST)


@pytest.mark.behaviour("S154", "S182", "S183", "S184", "S226", "S228", "S239")
async def test_messages_without_key_go_to_available_partitions(
    store: Store, second_store: Store, outage: Outage
) -> None:
    async with running(store, second_store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        _, sink = await bus.consume(queue, 1_000)
        await bus.sent(queue, *(message(f"before-{key}", key=key) for key in keys_for(4)))
        await until(lambda: len(sink.deliveries) == 4)
        await outage.begin()
        began = time.monotonic()
        for n in range(40):  # at once, before the outage is noticed
            reply = await bus.send(queue, message(str(n)))
            if refusal_of(reply) is Refusal.UNKNOWN:  # the commit that noticed; clients repeat it
                reply = await bus.send(queue, message(str(n)))
            assert isinstance(reply, Enqueued)
            assert set(partitions_of(reply.sequence_numbers)) <= set(HEALTHY)
        assert time.monotonic() - began < 15
        await until(lambda: len(sink.deliveries) == 44)
        await wait_for_noticed_outage(bus)
        began = time.monotonic()
        await bus.sent(queue, *(message(f"burst-{n}") for n in range(300)))
        assert time.monotonic() - began < 2
        await outage.end(bus)
        numbers = [(await bus.sent(queue, message()))[0] for _ in range(8)]
        assert sorted(partitions_of(numbers)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.behaviour("S181", "S185", "S227")
async def test_only_messages_with_a_key_of_a_lost_partition_fail(
    store: Store, second_store: Store, outage: Outage
) -> None:
    async with running(store, second_store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        keys = keys_for(4)
        consumer_id, sink = await bus.consume(queue)
        await bus.sent(queue, *(message(f"kept-{key}", key=key) for key in keys))
        await outage.begin()
        replies = [await bus.send(queue, message(f"new-{key}", key=key)) for key in keys]
        for place in DOWN:
            assert refusal_of(replies[place]) in RETRYABLE
        for place in HEALTHY:
            assert isinstance(replies[place], Enqueued)
        await wait_for_noticed_outage(bus)
        await until(lambda: all(bus.hosts[each]._recovery.wait_s > 2 for each in DOWN))
        began = time.monotonic()
        reply = await bus.send(queue, *(message(f"again-{key}", key=key) for key in keys))
        assert isinstance(reply, Enqueued)
        assert sorted(reply.refusals or ()) == list(DOWN)
        assert {each.refusal for each in (reply.refusals or {}).values()} <= RETRYABLE
        assert time.monotonic() - began < 1  # those that can be stored do not wait for the others

        began = time.monotonic()
        assert await bus.drain(queue, consumer_id, 100) == 6
        assert time.monotonic() - began < 0.2
        peeked = {each.envelope.body.decode() for each in await bus.peek_all(queue)}
        assert peeked == set(sink.bodies)
        tokens = [each.lock_token for each in sink.deliveries]
        settle = Settle(queue.entity_no, SubQueue.ACTIVE, tokens, Disposition.COMPLETE)
        assert await bus.call(queue, settle) == Settled()
        gone = [bytes(8) + bytes([0, place]) + bytes(6) for place in DOWN]
        for tokens in (gone[:1], gone):  # no lock outlives its partition's memory: answered at once
            settle = Settle(queue.entity_no, SubQueue.ACTIVE, tokens, Disposition.COMPLETE)
            assert await bus.call(queue, settle, 0.5) == lost_of(tokens)

        await bus.call(queue, SetDemand(consumer_id, 100))
        await outage.end(bus)
        await until(lambda: len(sink.deliveries) >= 8)
        kept = {f"kept-{keys[place]}" for place in DOWN}
        assert kept <= set(sink.bodies)
        unknown = {f"new-{keys[each]}" for each in DOWN}  # whose answer may have been "unknown"
        assert set(sink.bodies[6:]) <= kept | unknown
        assert isinstance(await bus.send(queue, message(key=keys[1])), Enqueued)
        assert sink.resets == 0


@pytest.mark.behaviour("S181", "S182")
async def test_an_outage_under_traffic_loses_and_duplicates_no_message(
    store: Store, second_store: Store, outage: Outage
) -> None:
    async with running(store, second_store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        keys = [None, *keys_for(4)]
        replies: dict[str, Reply] = {}

        async def send(worker: int) -> None:
            for n in range(60):
                body = f"{worker}-{n}"
                replies[body] = await bus.send(queue, message(body, key=keys[worker % 5]))

        sending = asyncio.gather(*(send(worker) for worker in range(20)))
        await until(lambda: len(replies) > 200)
        await outage.begin()
        await sending
        assert {refusal_of(each) for each in replies.values()} - {None} <= RETRYABLE
        await outage.end(bus)
        bodies = [each.envelope.body.decode() for each in await bus.peek_all(queue)]
        assert len(bodies) == len(set(bodies))
        accepted = {body for body, reply in replies.items() if isinstance(reply, Enqueued)}
        unknown = {body for body, each in replies.items() if refusal_of(each) is Refusal.UNKNOWN}
        assert accepted <= set(bodies)
        assert set(bodies) - accepted <= unknown
        for worker in (2, 4):  # the keys of the partitions that were lost
            assert any(body not in bodies for body in replies if body.startswith(f"{worker}-"))


@pytest.mark.behaviour("S186")
async def test_a_partition_applies_definitions_changed_during_its_outage(
    store: Store, second_store: Store, outage: Outage
) -> None:
    async with running(store, second_store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        await outage.begin()
        await wait_for_noticed_outage(bus)
        await put_queue(bus.directory, "q", spread(status="SendDisabled"))
        await put_queue(bus.directory, "young", spread())
        young = bus.address("young")
        await bus.sent(young, message())
        await outage.end(bus)
        for key in keys_for(4):
            assert refusal_of(await bus.send(queue, message(key=key))) is Refusal.SEND_DISABLED
            await bus.sent(young, message(key=key))


@pytest.mark.behaviour("S185")
async def test_sessions_of_healthy_partitions_continue(
    store: Store, second_store: Store, outage: Outage
) -> None:
    async with running(store, second_store) as bus:
        queue = await bus.put_spread_queue(requires_session=True)
        await bus.load()
        sessions = keys_for(4)
        await bus.sent(queue, *(message(each, session=each) for each in sessions))
        await outage.begin()
        await wait_for_noticed_outage(bus)

        async def accept(session: str | None) -> tuple[Reply, RecordingSink]:
            sink, consumer_id = RecordingSink(), bus.router.new_consumer_id()
            bus.router.register_sink(queue.partition_id, consumer_id, sink)
            wanted = None if session is None else session.encode()
            command = AcceptSession(queue.entity_no, consumer_id, ReceiveMode.PEEK_LOCK, wanted)
            reply = await bus.call(queue, command)
            if isinstance(reply, Done):
                await bus.call(queue, SetDemand(consumer_id, 1))
            return reply, sink

        for place in HEALTHY:
            reply, sink = await accept(sessions[place] if place else None)
            assert reply == Done()
            await until(lambda sink=sink: len(sink.deliveries) == 1)
            assert sink.sessions[0].decode() in (sessions[0], sessions[2])
        assert refusal_of((await accept(sessions[1]))[0]) in RETRYABLE
        _, next_one = await accept(None)  # waits: none is left that can be had
        assert next_one.sessions == []
        await outage.end(bus)
        await until(lambda: len(next_one.sessions) == 1)
        assert next_one.sessions[0].decode() in (sessions[1], sessions[3])
        assert all(host.status is HostStatus.ACTIVE for host in bus.hosts)
