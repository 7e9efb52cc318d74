"""The order of a host's replies: after the commit, in order, while ownership is confirmed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest

from postbus.broker.partition.clock import EntityClock
from postbus.broker.partition.host import Host
from postbus.broker.partition.ownership import HostStatus
from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    Delivery,
    DemandSet,
    Disposition,
    Enqueue,
    Enqueued,
    Peek,
    Peeked,
    Refusal,
    Refused,
    Reply,
    SetDemand,
    Settle,
    Settled,
    SubQueue,
    Tick,
    Transact,
    Transacted,
)
from postbus.entity.queues import dedup
from postbus.entity.window import WindowBudget
from postbus.message.codec import encode_value
from postbus.message.envelope import Envelope
from postbus.store.catalog import CatalogStore
from postbus.store.errors import StoreFull
from postbus.store.incarnation import boottime_s
from postbus.store.postgres import Store
from tests.broker.owner import directory_of
from tests.broker.partition.test_host import Sink, add, message, until
from tests.broker.putting import put_queue
from tests.store.driving import connected, wait_until

pytestmark = pytest.mark.slow


REFUSING = """
create function partition_0.refuse() returns trigger language plpgsql as $$
begin
    raise exception 'refused' using errcode = '23514';
end
$$;
create trigger refuse before insert on partition_0.message
for each row execute function partition_0.refuse();
"""


@asynccontextmanager
async def served(
    store: Store,
    *,
    budget: WindowBudget | None = None,
    monotonic_s: Callable[[], float] = boottime_s,
) -> AsyncIterator[tuple[Host, int]]:
    """Run a host of partition 0 with one queue; yields it and the queue's number."""
    directory = directory_of(CatalogStore(store), 1)
    await directory.load()
    entry = directory.find("orders") or await put_queue(directory, "orders", QueueProperties())
    clock = EntityClock(
        lambda: time.monotonic_ns() // 1_000_000, lambda: time.time_ns() // 1_000_000
    )
    async with asyncio.TaskGroup() as tasks:
        host = Host(
            partition_id=0,
            store=store,
            directory=directory,
            clock=clock,
            budget=budget or WindowBudget(1 << 26),
            new_seed=lambda: 1,
            tasks=tasks,
            monotonic_s=monotonic_s,
        )
        try:
            yield host, entry.entity_no
        finally:
            await host.stop()


class Log(Sink):
    """A sink that writes into the same list as the replies."""

    def __init__(self, seen: list[object]) -> None:
        super().__init__()
        self.seen = seen

    def deliver(self, deliveries: list[Delivery]) -> None:
        super().deliver(deliveries)
        self.seen += [f"delivery {delivery.sequence}" for delivery in deliveries]


class Ticking(Log):
    """A sink that submits a command while it takes deliveries."""

    def __init__(self, seen: list[object], host: Host) -> None:
        super().__init__(seen)
        self.host = host

    def deliver(self, deliveries: list[Delivery]) -> None:
        self.host.submit(Tick(), lambda _: self.seen.append("tick"))
        super().deliver(deliveries)


async def wait_blocked(database: str) -> int:
    """Return the backend of the writer once its commit waits for a lock."""
    async with connected(database) as look:

        async def is_blocked() -> object:
            return await look.fetchval(BLOCKED)

        await wait_until(is_blocked)
        pid = await look.fetchval(BLOCKED)
    assert isinstance(pid, int)
    return pid


BLOCKED = (
    "select pid from pg_stat_activity where application_name = 'postbus writer 0' "
    "and datname = current_database() and wait_event_type = 'Lock'"
)
CUT = (
    "select pg_terminate_backend(pid) from pg_stat_activity "
    "where application_name = 'postbus writer 0' and datname = current_database()"
)


def named(message_id: str) -> Envelope:
    envelope = message()
    envelope.message_id = encode_value(message_id)
    return envelope


def refusals(replies: list[Reply]) -> list[Refusal | None]:
    return [reply.refusal if isinstance(reply, Refused) else None for reply in replies]


@pytest.mark.behaviour("S2")
async def test_replies_are_released_after_their_commit_in_order(
    store: Store, database: str
) -> None:
    seen: list[object] = []
    async with served(store) as (host, entity_no), connected(database) as other:
        sink = Log(seen)
        await add(host, entity_no, 1, sink)
        await host.call(Enqueue(entity_no, [message()]))
        await until(lambda: len(sink.deliveries) == 1)
        token = sink.deliveries[0].lock_token
        seen.clear()
        async with other.transaction():
            await other.execute("lock table partition_0.message in exclusive mode")
            host.submit(Enqueue(entity_no, [message()]), seen.append)
            settle = Settle(entity_no, SubQueue.ACTIVE, [token], Disposition.COMPLETE)
            host.submit(settle, seen.append)
            host.submit(Tick(), lambda _: seen.append("tick"))
            host.submit(Enqueue(entity_no, [message()]), seen.append)
            await wait_blocked(database)
            assert seen == []
        await until(lambda: len(seen) >= 6)
        assert seen == [
            "delivery 2",
            Enqueued([2]),
            Settled(),
            "tick",
            "delivery 3",
            Enqueued([3]),
        ]


async def test_commands_without_a_commit_are_answered_before_submit_returns(
    store: Store,
) -> None:
    seen: list[object] = []
    async with served(store) as (host, entity_no):
        await host.call(Enqueue(entity_no, [message()]))
        await add(host, entity_no, 1, Log(seen), limit=0)
        host.submit(SetDemand(1, 10), seen.append)
        assert seen == ["delivery 1", DemandSet(1)]


async def test_commands_of_a_sink_are_answered_after_the_call_of_the_sink(store: Store) -> None:
    seen: list[object] = []
    async with served(store) as (host, entity_no):
        await host.call(Enqueue(entity_no, [message()]))
        await add(host, entity_no, 1, Ticking(seen, host), limit=0)
        host.submit(SetDemand(1, 10), seen.append)
        assert seen == ["delivery 1", DemandSet(1), "tick"]


async def test_a_broken_state_is_reported_to_all_waiting_callers(
    store: Store, database: str
) -> None:
    async with served(store) as (host, entity_no), connected(database) as holder:
        await host.call(Enqueue(entity_no, [message()]))
        replies: list[Reply] = []
        async with holder.transaction():
            await holder.execute("lock table partition_0.message in share mode")
            host.submit(Enqueue(entity_no, [message()]), replies.append)
            await wait_blocked(database)
            host.submit(Enqueue(entity_no, [message()]), replies.append)
            host.submit(object(), replies.append)  # what it does not know
            expected = [Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.NOT_APPLIED]
            assert refusals(replies) == expected
        assert host.reload_count == 1
        assert isinstance(await host.call(Enqueue(entity_no, [message()])), Enqueued)


async def test_a_commit_refused_by_the_server_is_not_applied(store: Store, database: str) -> None:
    async with served(store) as (host, entity_no), connected(database) as other:
        assert isinstance(await host.call(Enqueue(entity_no, [message()])), Enqueued)
        await other.execute(REFUSING)
        refused = await host.call(Enqueue(entity_no, [message()]))
        assert isinstance(refused, Refused)
        assert refused.refusal is Refusal.NOT_APPLIED
        await other.execute("drop trigger refuse on partition_0.message")
        await until(lambda: host.is_loaded)
        sink = Sink()
        await add(host, entity_no, 1, sink)
        assert isinstance(await host.call(Enqueue(entity_no, [message()])), Enqueued)
        await until(lambda: len(sink.deliveries) == 2)
        assert await other.fetchval("select count(*) from message") == 2


async def test_a_commit_on_a_cut_connection_is_unknown(store: Store, database: str) -> None:
    replies: list[Reply] = []
    async with served(store) as (host, entity_no), connected(database) as other:
        sink = Sink()
        await host.call(Enqueue(entity_no, [message()]))
        await add(host, entity_no, 1, sink)
        await until(lambda: len(sink.deliveries) == 1)
        token = sink.deliveries[0].lock_token
        async with other.transaction():
            await other.execute("lock table partition_0.message in exclusive mode")
            settle = Settle(entity_no, SubQueue.ACTIVE, [token], Disposition.COMPLETE)
            host.submit(settle, replies.append)
            pid = await wait_blocked(database)
            await other.execute("select pg_terminate_backend($1)", pid)
            await until(lambda: bool(replies))
        assert refusals(replies) == [Refusal.UNKNOWN]
        assert await host.call(Tick()) is not None
        after = Sink()
        await add(host, entity_no, 2, after)
        await until(lambda: len(after.deliveries) == 1)
        assert after.deliveries[0].sequence == sink.deliveries[0].sequence
        assert (sink.resets, len(sink.deliveries), host.reload_count) == (1, 1, 1)


async def wait_stored(other: asyncpg.Connection[asyncpg.Record], count: int) -> None:
    async def is_stored() -> object:
        return await other.fetchval("select count(*) from message") == count

    await wait_until(is_stored)


async def test_a_commit_is_not_released_until_a_beat_confirms_ownership(
    store: Store, database: str
) -> None:
    fixed: list[float] = []
    replies: list[Reply] = []

    def monotonic_s() -> float:
        return fixed[0] if fixed else boottime_s()

    async with (
        served(store, monotonic_s=monotonic_s) as (host, entity_no),
        connected(database) as other,
    ):
        await host.call(Tick())
        fixed.append(boottime_s() + 3.8)
        host.submit(Enqueue(entity_no, [message()]), replies.append)
        await wait_stored(other, 1)
        host.submit(Tick(), replies.append)
        assert replies == []
        await until(lambda: len(replies) == 2)
        assert boottime_s() > fixed[0] - 3.0
        assert replies[0] == Enqueued([1])
        assert host.reload_count == 0
        fixed.clear()


@pytest.mark.parametrize(
    ("ahead_s", "logged"),
    [
        (0.0, (logging.ERROR, "partition state failed")),
        (100.0, (logging.WARNING, "partition may belong to another broker")),
    ],
)
async def test_a_broken_state_is_no_bug_while_ownership_is_not_confirmed(
    store: Store,
    ahead_s: float,
    logged: tuple[int, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A broker that was paused reads rows that its successor has changed."""
    now_ahead_s = 0.0
    async with served(store, monotonic_s=lambda: boottime_s() + now_ahead_s) as (host, _):
        await host.call(Tick())
        now_ahead_s = ahead_s
        replies: list[Reply] = []
        host.submit(object(), replies.append)
        await until(lambda: bool(replies))
        assert refusals(replies) == [Refusal.NOT_APPLIED]
        now_ahead_s = 0.0
    assert logged in [(record.levelno, record.message) for record in caplog.records]


async def test_outcomes_held_when_the_journal_fails_are_unknown(
    store: Store, database: str
) -> None:
    ahead_s = 0.0
    replies: list[Reply] = []
    async with (
        served(store, monotonic_s=lambda: boottime_s() + ahead_s) as (host, entity_no),
        connected(database) as other,
    ):
        await host.call(Tick())
        ahead_s = 100.0
        host.submit(Enqueue(entity_no, [message()]), replies.append)
        await wait_stored(other, 1)
        assert replies == []
        await other.execute(CUT)
        await until(lambda: bool(replies))
        ahead_s = 0.0
        assert refusals(replies) == [Refusal.UNKNOWN]
        sink = Sink()
        await add(host, entity_no, 1, sink)
        await until(lambda: len(sink.deliveries) == 1)
        assert len(replies) == 1


async def test_later_sends_do_not_overtake_an_id_lookup(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "RECENT_IDS", 2)
    directory = directory_of(CatalogStore(store), 1)
    await directory.load()
    await put_queue(directory, "orders", QueueProperties(requires_duplicate_detection=True))
    async with served(store) as (host, entity_no):
        for n in range(20):
            await host.call(Enqueue(entity_no, [named(f"old {n}")]))
    async with served(store) as (host, entity_no):  # only the latest ids are in memory now
        replies: list[Reply] = []
        for names in (["old 0", "a"], ["b"], ["old 1", "c"], ["d"]):
            host.submit(Enqueue(entity_no, [named(name) for name in names]), replies.append)
        await until(lambda: len(replies) == 4)
        assert refusals(replies) == [None] * 4
        reply = await host.call(Peek(entity_no, SubQueue.ACTIVE, 21, 100, 1 << 20))
        assert isinstance(reply, Peeked)
        ids = [each.envelope.message_id for each in reply.messages]
        assert ids == [encode_value(name) for name in "abcd"]


async def test_a_reload_answers_commands_that_wait_for_an_id_lookup(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "RECENT_IDS", 2)
    directory = directory_of(CatalogStore(store), 1)
    await directory.load()
    await put_queue(directory, "orders", QueueProperties(requires_duplicate_detection=True))
    async with served(store) as (host, entity_no):
        for n in range(3):
            await host.call(Enqueue(entity_no, [named(f"old {n}")]))
    async with served(store) as (host, entity_no), connected(database) as holder:
        await host.call(Tick())
        replies: list[Reply] = []
        late: list[Reply] = []
        async with holder.transaction():
            await holder.execute("lock table partition_0.seen in access exclusive mode")
            host.submit(Enqueue(entity_no, [named("old 0"), named("a")]), late.append)
            host.submit(Enqueue(entity_no, [named("b")]), replies.append)
            await asyncio.sleep(0)
            assert replies == []
            host.interrupt(0.0)
            assert refusals(replies) == [Refusal.NOT_APPLIED]
        await until(lambda: bool(late))
        assert refusals(late) == [Refusal.NOT_APPLIED]
        assert isinstance(await host.call(Enqueue(entity_no, [named("c")])), Enqueued)


async def test_messages_of_a_transaction_are_refused_like_others(store: Store) -> None:
    async with served(store) as (host, entity_no):
        sink = Sink()
        await add(host, entity_no, 1, sink)
        await host.call(Enqueue(entity_no, [message()]))
        await until(lambda: bool(sink.deliveries))
        host._disk_reserve.note_failure(StoreFull("no space left on device"))
        for via in (None, "away"):
            sending = Transact([Enqueue(entity_no, [message()], via=via)])
            assert refusals([await host.call(sending)]) == [Refusal.STORE_FULL]
        (taken,) = sink.deliveries
        settling = Settle(entity_no, SubQueue.ACTIVE, [taken.lock_token], Disposition.COMPLETE)
        assert isinstance(await host.call(Transact([settling])), Transacted)


async def test_no_command_is_applied_during_a_handover(store: Store, database: str) -> None:
    """Its last commit is in flight; a receiver would get messages that the next owner delivers."""
    async with served(store) as (host, entity_no), connected(database) as look:
        sink = Sink()
        await host.call(Enqueue(entity_no, [message()]))
        await add(host, entity_no, 1, sink, limit=1)
        await until(lambda: len(sink.deliveries) == 1)
        await look.execute("begin; lock table acquired in exclusive mode")
        stopping = asyncio.create_task(host.stop())
        replies: list[Reply] = []
        await until(lambda: host.status is HostStatus.CLOSED)
        host.submit(Enqueue(entity_no, [message()]), replies.append)
        assert refusals(replies) == [Refusal.NOT_APPLIED]
        assert not stopping.done()
        await look.execute("rollback")
        await stopping
        assert await look.fetchval("select count(*) from message") == 1
        assert await look.fetchval("select is_released from owner")
