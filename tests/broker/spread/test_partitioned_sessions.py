"""Sessions of a partitioned entity: each in its partition, one receiver each, any of them next."""

from __future__ import annotations

import asyncio

import pytest

from postbus.entity.commands import (
    AcceptSession,
    AddConsumer,
    Disposition,
    Done,
    Enqueue,
    Enqueued,
    GetSessionState,
    ListSessions,
    Peek,
    Peeked,
    ReceiveMode,
    Refusal,
    RemoveConsumer,
    RenewSession,
    Reply,
    SessionRenewed,
    SessionsListed,
    SessionState,
    SetDemand,
    SetSessionState,
    Settle,
    Settled,
    SubQueue,
)
from postbus.store.postgres import Store
from tests.broker.partition.test_host import until
from tests.broker.partition_rig import (
    Bus,
    RecordingSink,
    keys_for,
    message,
    partitions_of,
    refusal_of,
    running,
    spread,
    wait_for_too_many,
)
from tests.broker.putting import put_queue
from tests.store.driving import connected

pytestmark = pytest.mark.slow

ACTIVE = SubQueue.ACTIVE
LOCK_MODE = ReceiveMode.PEEK_LOCK


async def made(bus: Bus) -> None:
    await put_queue(bus.directory, "q", spread(requires_session=True))
    await bus.load()


def ask(bus: Bus, session: str | None) -> tuple[int, RecordingSink, list[Reply]]:
    """Request a session as an endpoint does; return the consumer, its sink and the replies."""
    queue, sink, replies = bus.address("q"), RecordingSink(), list[Reply]()
    consumer_id = bus.router.new_consumer_id()
    bus.router.register_sink(queue.partition_id, consumer_id, sink)
    wanted = None if session is None else session.encode()
    command = AcceptSession(queue.entity_no, consumer_id, LOCK_MODE, wanted)
    bus.router.submit(queue.partition_id, command, replies.append)
    return consumer_id, sink, replies


async def held(bus: Bus, session: str | None) -> tuple[int, RecordingSink]:
    consumer_id, sink, replies = ask(bus, session)
    await until(lambda: len(sink.sessions) == 1)
    await until(lambda: replies == [Done()])
    return consumer_id, sink


def leave(bus: Bus, consumer_id: int) -> None:
    """Detach as an endpoint does."""
    queue = bus.address("q")
    bus.router.unregister_sink(queue.partition_id, consumer_id)
    bus.router.submit(queue.partition_id, RemoveConsumer(consumer_id))


@pytest.mark.behaviour("S155", "S169", "S229")
async def test_a_session_is_served_in_order_by_its_partition(store: Store) -> None:
    async with running(store) as bus:
        await made(bus)
        queue = bus.address("q")
        for session in keys_for(4):
            numbers = [
                (await bus.sent(queue, message(f"{n}", session=session)))[0] for n in range(5)
            ]
            assert len(set(partitions_of(numbers))) == 1
            consumer_id, sink = await held(bus, session)
            await bus.call(queue, SetDemand(consumer_id, 5))
            await until(lambda sink=sink: len(sink.deliveries) == 5)
            assert sink.bodies == ["0", "1", "2", "3", "4"]
            assert [each.sequence for each in sink.deliveries] == numbers
            again, other, replies = ask(bus, session)
            await until(lambda replies=replies: bool(replies))
            assert refusal_of(replies[0]) is Refusal.SESSION_CANNOT_BE_LOCKED
            assert other.sessions == []
            leave(bus, again)
            key = session.encode()
            tokens = [each.lock_token for each in sink.deliveries]
            settle = Settle(queue.entity_no, ACTIVE, tokens, Disposition.COMPLETE, session_id=key)
            assert await bus.call(queue, settle) == Settled()
            put = SetSessionState(queue.entity_no, key, consumer_id, b"half")
            assert await bus.call(queue, put) == Done()
            get = GetSessionState(queue.entity_no, key, consumer_id)
            assert await bus.call(queue, get) == SessionState(b"half")
            renewed = await bus.call(queue, RenewSession(queue.entity_no, key, consumer_id))
            assert isinstance(renewed, SessionRenewed)
            leave(bus, consumer_id)
            lost = await bus.call(queue, RenewSession(queue.entity_no, key, consumer_id))
            assert refusal_of(lost) is Refusal.SESSION_LOCK_LOST


async def test_the_next_session_comes_from_any_partition(store: Store) -> None:
    async with running(store) as bus:
        await made(bus)
        queue = bus.address("q")
        sessions = [*keys_for(4), "more", "and-more"]
        for session in sessions:
            await bus.sent(queue, message(session, session=session))
        holders = [await held(bus, None) for _ in sessions]
        got = [sink.sessions[0].decode() for _, sink in holders]
        assert sorted(got) == sorted(sessions)
        for (consumer_id, sink), session in zip(holders, got, strict=True):
            await bus.call(queue, SetDemand(consumer_id, 5))
            await until(lambda sink=sink: len(sink.deliveries) == 1)
            assert sink.bodies == [session]


async def test_a_request_for_the_next_session_gets_exactly_one(store: Store) -> None:
    async with running(store) as bus:
        await made(bus)
        queue = bus.address("q")
        waiting = [ask(bus, None) for _ in range(3)]
        await until(lambda: all(replies == [Done()] for _, _, replies in waiting))
        gone_id, gone, _ = waiting.pop(0)
        leave(bus, gone_id)
        sessions = keys_for(4)
        await asyncio.gather(*(bus.sent(queue, message(each, session=each)) for each in sessions))
        await until(lambda: all(len(sink.sessions) == 1 for _, sink, _ in waiting))
        taken = {sink.sessions[0].decode() for _, sink, _ in waiting}
        assert len(taken) == 2
        for session in set(sessions) - taken:  # other granted sessions are free again
            await held(bus, session)
        assert gone.sessions == []
        assert [len(sink.sessions) for _, sink, _ in waiting] == [1, 1]


async def test_grants_that_cross_leave_one_session_held(store: Store, database: str) -> None:
    """All partitions grant at once, behind a blocked commit."""
    async with running(store) as bus, connected(database) as other:
        await made(bus)
        queue = bus.address("q")
        sessions = keys_for(4)
        plain = [message(each, session=each) for each in sessions]
        async with other.transaction():
            for partition_id in range(4):
                await other.execute(f"lock table partition_{partition_id}.message in share mode")
            for each in plain:
                bus.router.submit(queue.partition_id, Enqueue(queue.entity_no, [each]))
            seekers = [ask(bus, None) for _ in range(2)]
            await wait_for_too_many()
            assert [sink.sessions for _, sink, _ in seekers] == [[], []]
        await until(lambda: all(len(sink.sessions) == 1 for _, sink, _ in seekers))
        await wait_for_too_many(0.1)
        assert [len(sink.sessions) for _, sink, _ in seekers] == [1, 1]
        taken = {sink.sessions[0].decode() for _, sink, _ in seekers}
        assert len(taken) == 2
        for session in set(sessions) - taken:
            await held(bus, session)
        for session in taken:
            _, _, replies = ask(bus, session)
            await until(lambda replies=replies: bool(replies))
            assert refusal_of(replies[0]) is Refusal.SESSION_CANNOT_BE_LOCKED


async def test_a_session_of_a_reloaded_partition_is_lost_and_free(store: Store) -> None:
    async with running(store) as bus:
        await made(bus)
        queue = bus.address("q")
        session = keys_for(2)[1]
        await bus.sent(queue, message("1", session=session))
        consumer_id, sink = await held(bus, session)
        bus.hosts[0].interrupt(0.1)
        bus.hosts[1].interrupt(0.1)
        await until(lambda: sink.resets == 1)
        assert consumer_id not in bus.router._partitioned._sinks
        reply = await bus.call(queue, SetDemand(consumer_id, 1))
        assert refusal_of(reply) is Refusal.ENTITY_NOT_FOUND
        await until(lambda: bus.hosts[1].is_loaded)
        _, again = await held(bus, session)
        assert again.sessions == [session.encode()]


async def test_sessions_are_listed_and_browsed_over_all_partitions(store: Store) -> None:
    async with running(store) as bus:
        await made(bus)
        queue = bus.address("q")
        sessions = sorted(f"s-{n:02}" for n in range(20))
        for session in sessions:
            await bus.sent(queue, message(session, session=session))
        listed: list[str] = []
        for skip in (0, 7, 14):
            reply = await bus.call(queue, ListSessions(queue.entity_no, None, skip, 7))
            assert isinstance(reply, SessionsListed)
            listed += [each.decode() for each in reply.session_ids]
        assert listed == sessions
        for session in sessions[:6]:
            peek = Peek(queue.entity_no, ACTIVE, 0, 10, 1 << 20, session.encode())
            reply = await bus.call(queue, peek)
            assert isinstance(reply, Peeked)
            assert [each.envelope.body.decode() for each in reply.messages] == [session]
            peek.from_sequence = reply.messages[-1].sequence + 1
            assert await bus.call(queue, peek) == Peeked([])


async def test_commands_that_need_a_session_are_refused_without(store: Store) -> None:
    async with running(store) as bus:
        await made(bus)
        await put_queue(bus.directory, "plain", spread())
        queue, plain = bus.address("q"), bus.address("plain")
        reply = await bus.send(queue, message())
        assert isinstance(reply, Enqueued)
        assert reply.refusals is not None
        assert reply.refusals[0].refusal is Refusal.SESSION_REQUIRED
        sink, consumer_id = RecordingSink(), bus.router.new_consumer_id()
        bus.router.register_sink(queue.partition_id, consumer_id, sink)
        reply = await bus.call(queue, AddConsumer(queue.entity_no, ACTIVE, consumer_id, LOCK_MODE))
        assert refusal_of(reply) is Refusal.SESSION_REQUIRED
        for session in (None, b"s"):
            consumer_id = bus.router.new_consumer_id()
            bus.router.register_sink(plain.partition_id, consumer_id, sink)
            accept = AcceptSession(plain.entity_no, consumer_id, LOCK_MODE, session)
            reply = await bus.call(plain, accept)
            assert refusal_of(reply) is Refusal.SESSION_NOT_SUPPORTED
        assert (sink.sessions, sink.refusals) == ([], [])


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("is_partitioned", [True, False])
async def test_a_receiver_removed_during_a_load_holds_no_session(
    store: Store, is_partitioned: bool, is_named: bool
) -> None:
    async with running(store) as bus:
        await put_queue(
            bus.directory, "q", spread(requires_session=True, enable_partitioning=is_partitioned)
        )
    async with running(store) as bus:  # nothing of which is loaded
        queue = bus.address("q")
        session = keys_for(2)[1]
        gone_id, gone, replies = ask(bus, session if is_named else None)
        leave(bus, gone_id)
        await bus.load()
        assert [refusal_of(each) for each in replies] == [Refusal.NOT_APPLIED]
        await bus.sent(queue, message(session=session))
        await held(bus, session)
        assert gone.sessions == []


@pytest.mark.parametrize("is_partitioned", [True, False])
async def test_a_session_granted_to_a_gone_receiver_is_free(
    store: Store, is_partitioned: bool
) -> None:
    async with running(store) as bus:
        await put_queue(
            bus.directory, "q", spread(requires_session=True, enable_partitioning=is_partitioned)
        )
        await bus.load()
        queue = bus.address("q")
        consumer_id, gone, replies = ask(bus, None)
        await until(lambda: replies == [Done()])
        bus.router.unregister_sink(queue.partition_id, consumer_id)  # and nothing more
        await bus.sent(queue, message(session="s"))
        await held(bus, "s")
        assert gone.sessions == []
