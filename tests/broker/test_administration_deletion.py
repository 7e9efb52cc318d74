"""Deletion if empty, retained deletion, restore, and their reports (ADR 27)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from postbus.broker.address import Address
from postbus.broker.administration import (
    Administration,
    DeletePolicy,
    Tombstone,
    WantedEntity,
)
from postbus.broker.catalog import change_feed
from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.contract.entities import (
    DAY_MS,
    EntityKind,
    EntityStatus,
    QueueProperties,
    RuleProperties,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.contract.namespace import NamespaceDefinition
from postbus.entity.commands import (
    AcceptSession,
    Command,
    DeferredReceived,
    Disposition,
    Done,
    Enqueued,
    GetSessionState,
    Hold,
    Peek,
    ReceiveDeferred,
    ReceiveMode,
    Refusal,
    Refused,
    Reply,
    SessionState,
    SetSessionState,
    Settle,
    Settled,
    SubQueue,
)
from postbus.store.catalog import CatalogEntry, CatalogStore, DeletedReason
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from tests.broker.administration_rig import administered, refusal_of
from tests.broker.partition.test_host import until
from tests.broker.partition_rig import Bus, RecordingSink, manual_clock, message, spread
from tests.broker.putting import EXISTING, NEW, a_queue, a_subscription, a_topic
from tests.store.driving import connected, wait_until

pytestmark = pytest.mark.slow

IF_EMPTY, RETAIN = DeletePolicy.DELETE_IF_EMPTY, DeletePolicy.RETAIN
QUEUE, TOPIC, SUBSCRIPTION = QueueProperties(), TopicProperties(), SubscriptionProperties()
HOUR_MS = 3_600_000


def rule(name: str, text: str = "1=1") -> RuleProperties:
    return RuleProperties(name=name, sql_filter=SqlFilter(sql_expression=text))


async def rows_of(database: str, partition_count: int = 4) -> int:
    """Return the number of message rows in all partitions."""
    count = 0
    async with connected(database) as look:
        for number in range(partition_count):
            if await look.fetchval(f"select to_regclass('partition_{number}.message') is not null"):
                count += await look.fetchval(f"select count(*) from partition_{number}.message")
    return count


# --- if empty -----------------------------------------------------------------------------------


@pytest.mark.parametrize("properties", [QUEUE, spread()])
async def test_only_an_empty_queue_is_deleted_if_empty(
    store: Store, properties: QueueProperties
) -> None:
    async with administered(store) as (administration, bus):
        await administration.put(a_queue("q", properties), NEW)
        queue = bus.address("q")
        await bus.sent(queue, message("x"))
        consumer, sink = await bus.consume(queue, 1, ReceiveMode.PEEK_LOCK)
        await until(lambda: len(sink.deliveries) == 1)
        with pytest.raises(DirectoryRefusal, match="q holds 1 message") as caught:
            await administration.delete("q", policy=IF_EMPTY)  # it is locked, and there
        assert caught.value.refused.refusal is Refusal.NOT_EMPTY
        assert administration.find("q") is not None
        reply = await bus.call(
            queue,
            Settle(
                queue.entity_no,
                SubQueue.ACTIVE,
                [sink.deliveries[0].lock_token],
                Disposition.COMPLETE,
            ),
        )
        assert isinstance(reply, Settled)
        await administration.delete("Q", policy=IF_EMPTY)
        assert administration.find("q") is None
        assert sink.refusals == [Refusal.ENTITY_NOT_FOUND]
        missing = administration.delete("q", policy=IF_EMPTY)
        assert await refusal_of(missing) is Refusal.ENTITY_NOT_FOUND
        del consumer


async def test_scheduled_dead_and_outbound_messages_make_an_entity_not_empty(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await administration.put(a_queue("scheduled", QUEUE), NEW)
        far_ms = bus.hosts[0].clock() + HOUR_MS
        await bus.sent(bus.address("scheduled"), message("x", scheduled_ms=far_ms))
        await administration.put(a_topic("t", TOPIC), NEW)
        await administration.put(a_subscription("t", "s", SUBSCRIPTION), NEW)
        await bus.sent(bus.address("t"), message("x"))
        for path in ("scheduled", "t", "t/Subscriptions/s"):
            refused = administration.delete(path, policy=IF_EMPTY)
            assert await refusal_of(refused) is Refusal.NOT_EMPTY


async def test_a_subscription_with_new_copies_is_not_deleted_as_empty(store: Store) -> None:
    async with administered(store, partition_count=1) as (administration, bus):
        await administration.put(a_topic("t", TOPIC), NEW)
        await administration.put(a_subscription("t", "s", SUBSCRIPTION), NEW)
        call = bus.hosts[0].call

        async def publish_before_hold(command: Command) -> Reply:
            if isinstance(command, Hold):
                await bus.sent(bus.address("t"), message("x"))
            return await call(command)

        bus.hosts[0].call = publish_before_hold  # type: ignore[method-assign]
        refused = administration.delete("t/Subscriptions/s", policy=IF_EMPTY)
        assert await refusal_of(refused) is Refusal.NOT_EMPTY
        assert (await administration.runtime("t/Subscriptions/s")).active == 1


async def test_accepted_messages_are_never_deleted_as_empty(store: Store) -> None:
    """A sender continues while the deletion is requested repeatedly."""
    async with administered(store) as (administration, bus):
        for round_number in range(10):
            name = f"q{round_number}"
            await administration.put(a_queue(name, spread()), NEW)
            queue = bus.address(name)
            accepted: list[int] = []

            async def send(queue: Any = queue, accepted: list[int] = accepted) -> None:
                for n in range(30):
                    reply = await bus.send(queue, message(f"{n}"))
                    if isinstance(reply, Enqueued):
                        accepted += reply.sequence_numbers
                    else:
                        assert isinstance(reply, Refused)
                        assert reply.refusal in (Refusal.BUSY, Refusal.ENTITY_NOT_FOUND)

            sending = asyncio.create_task(send())
            for _ in range(round_number):
                await asyncio.sleep(0)
            with suppress(DirectoryRefusal):
                await administration.delete(name, policy=IF_EMPTY)
            await sending
            if administration.find(name) is None:
                assert accepted == []
            else:
                assert len(await bus.peek_all(queue)) == len(accepted) > 0


async def test_a_partition_without_an_answer_prevents_the_deletion(store: Store) -> None:
    async with administered(store, loading_s=0.2) as (administration, bus):
        await administration.put(a_queue("q", spread()), NEW)
        bus.hosts[3].interrupt(60)
        refused = administration.delete("q", policy=IF_EMPTY)
        assert await refusal_of(refused) is Refusal.NOT_APPLIED
        assert administration.find("q") is not None


# --- deleted and kept ---------------------------------------------------------------------------


async def filled(bus: Bus, name: str) -> dict[str, int]:
    """Fill a queue in every way; return body -> number of active messages."""
    queue = bus.address(name)
    await bus.sent(queue, *(message(f"{n}") for n in range(6)))
    await bus.sent(queue, message("later", scheduled_ms=bus.hosts[0].clock() + HOUR_MS))
    _, sink = await bus.consume(queue, 2, ReceiveMode.PEEK_LOCK)
    await until(lambda: len(sink.deliveries) == 2)
    for delivery, disposition in zip(
        sink.deliveries, (Disposition.DEAD_LETTER, Disposition.DEFER), strict=True
    ):
        settle = Settle(queue.entity_no, SubQueue.ACTIVE, [delivery.lock_token], disposition)
        assert isinstance(await bus.call(queue, settle), Settled)
    return {each.envelope.body.decode(): each.sequence for each in await bus.peek_all(queue)}


@pytest.mark.parametrize("properties", [QUEUE, spread()])
@pytest.mark.parametrize("restart", ["none", "deleted", "restored", "both"])
async def test_a_retained_queue_comes_back_as_it_was(
    store: Store, properties: QueueProperties, restart: str
) -> None:
    async with administered(store) as (administration, bus):
        made = await administration.put(a_queue("Orders", properties), NEW)
        held = await filled(bus, "orders")
        counts = await administration.runtime("orders")
        _, sink = await bus.consume(bus.address("orders"), 0, ReceiveMode.PEEK_LOCK)
        await administration.delete("orders", policy=RETAIN)
        assert sink.refusals == [Refusal.ENTITY_NOT_FOUND]
        assert administration.find("orders") is None
        assert administration.listed(EntityKind.QUEUE) == []
        assert await refusal_of(administration.runtime("orders")) is Refusal.ENTITY_NOT_FOUND
        again = await administration.put(a_queue("orders", properties), NEW)
        assert again.entity_no != made.entity_no
        assert (await administration.runtime("orders")).active == 0
        taken = administration.restore(made.entity_no)
        assert await refusal_of(taken) is Refusal.ALREADY_EXISTS
        await administration.delete("orders", policy=IF_EMPTY)
        if restart in ("none", "restored"):
            await administration.restore(made.entity_no)
    async with administered(store) as (administration, bus):
        if restart == "deleted":
            await bus.load()
        if restart in ("deleted", "both"):
            assert administration.find("orders") is None
            await administration.restore(made.entity_no)
        found = administration.find("orders")
        assert found is not None
        assert (found.name, found.entity_no, found.created_ms, found.properties) == (
            made.name,
            made.entity_no,
            made.created_ms,
            made.properties,
        )
        after = await administration.runtime("orders")
        assert (after.active, after.dead_letter, after.scheduled) == (
            counts.active,
            counts.dead_letter,
            counts.scheduled,
        )
        queue = bus.address("orders")
        assert held == {
            each.envelope.body.decode(): each.sequence for each in await bus.peek_all(queue)
        }
        assert min(await bus.sent(queue, message("new"))) not in held.values()
        reply = await bus.call(
            queue,
            ReceiveDeferred(
                queue.entity_no, SubQueue.ACTIVE, [held["1"]], ReceiveMode.RECEIVE_AND_DELETE
            ),
        )
        assert isinstance(reply, DeferredReceived)
        gone = administration.restore(made.entity_no)
        assert await refusal_of(gone) is Refusal.ENTITY_NOT_FOUND


async def test_a_retained_queue_refuses_senders_and_receivers(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await administration.put(a_queue("target", QUEUE), NEW)
        await administration.put(a_queue("q", QUEUE), NEW)
        stale = bus.address("q")
        await bus.sent(stale, message("1"))
        await administration.delete("q", policy=RETAIN)
        for _ in range(2):
            reply = await bus.send(stale, message("2"))
            assert isinstance(reply, Refused)
            reply = await bus.call(stale, _peek(stale.entity_no))
            assert isinstance(reply, Refused)
            home = bus.hosts[bus.directory.homes_of(_stored(bus.directory, stale.entity_no))[0]]
            home.interrupt(0.01)
            await until(lambda host=home: host.is_loaded)


def _peek(entity_no: int) -> Peek:
    return Peek(entity_no, SubQueue.ACTIVE, 0, 10, 1 << 20)


def _stored(directory: Directory, entity_no: int) -> CatalogEntry:
    found = directory._entries.stored_numbered(entity_no)
    assert found is not None
    return found


async def accepted(bus: Bus, queue: Address, session_id: bytes) -> int:
    """Take a session; return the number of its receiver."""
    sink, consumer_id = RecordingSink(), bus.router.new_consumer_id()
    bus.router.register_sink(queue.partition_id, consumer_id, sink)
    mode = ReceiveMode.PEEK_LOCK
    await bus.call(queue, AcceptSession(queue.entity_no, consumer_id, mode, session_id))
    await until(lambda: sink.sessions == [session_id])
    return consumer_id


async def test_sessions_and_their_states_come_back(store: Store) -> None:
    async with administered(store) as (administration, bus):
        made = await administration.put(a_queue("q", QueueProperties(requires_session=True)), NEW)
        queue = bus.address("q")
        await bus.sent(queue, message("1", session="a"), message("2", session="b"))
        consumer = await accepted(bus, queue, b"a")
        state = SetSessionState(queue.entity_no, b"a", consumer, b"state")
        assert isinstance(await bus.call(queue, state), Done)
        await administration.delete("q", policy=RETAIN)
        await administration.restore(made.entity_no)
        consumer = await accepted(bus, queue, b"a")
        reply = await bus.call(queue, GetSessionState(queue.entity_no, b"a", consumer))
        assert reply == SessionState(b"state")
        assert (await administration.runtime("q")).active == 2


@pytest.mark.parametrize("restart", [False, True])
async def test_ids_of_duplicate_detection_come_back(store: Store, restart: bool) -> None:
    detecting = QueueProperties(requires_duplicate_detection=True)

    async def check(administration: Administration, bus: Bus) -> None:
        await administration.restore(made.entity_no)
        new = (message("a", message_id="a"), message("c", message_id="c"))
        await bus.sent(bus.address("q"), *new)
        assert (await administration.runtime("q")).active == 3

    async with administered(store) as (administration, bus):
        made = await administration.put(a_queue("q", detecting), NEW)
        old = (message("a", message_id="a"), message("b", message_id="b"))
        await bus.sent(bus.address("q"), *old)
        await administration.delete("q", policy=RETAIN)
        await administration.put(a_queue("q", detecting), NEW)
        await bus.sent(bus.address("q"), message("a", message_id="a"))
        assert (await administration.runtime("q")).active == 1
        await administration.delete("q")
        if not restart:
            await check(administration, bus)
    if restart:
        async with administered(store) as (administration, bus):
            await check(administration, bus)


async def test_due_messages_are_forwarded_when_their_queue_is_restored(store: Store) -> None:
    clock = manual_clock()
    async with administered(store, clock=clock) as (administration, bus):
        await administration.put(a_queue("target", QUEUE), NEW)
        forwarding = QueueProperties(forward_to="target")
        made = await administration.put(a_queue("q", forwarding), NEW)
        await bus.sent(bus.address("q"), message("later", scheduled_ms=clock() + HOUR_MS))
        await administration.delete("q", policy=RETAIN)
        bus.advance(HOUR_MS)
        await until(lambda: _scheduled(bus, made.entity_no) == 0)
        assert (await administration.runtime("target")).active == 0
    async with administered(store, clock=clock) as (administration, bus):
        await administration.restore(made.entity_no)
        assert (await administration.runtime("q")).scheduled == 0

        async def is_there() -> bool:
            return (await administration.runtime("target")).active == 1

        await wait_until(is_there)
        assert (await administration.runtime("q")).active == 0


async def test_a_topic_comes_back_with_the_subscriptions_that_went_with_it(store: Store) -> None:
    clock = manual_clock()
    async with administered(store, clock=clock) as (administration, bus):
        topic = await administration.put(a_topic("t", TOPIC), NEW)
        kept = await administration.put(
            a_subscription("t", "kept", SUBSCRIPTION, [rule("one", "n = 1"), rule("two")]), NEW
        )
        closed = SubscriptionProperties(status=EntityStatus.DISABLED)
        await administration.put(a_subscription("t", "closed", closed), NEW)
        earlier = await administration.put(a_subscription("t", "earlier", SUBSCRIPTION), NEW)
        await bus.sent(bus.address("t"), message("x"))
        await bus.sent(bus.address("t"), message("due", scheduled_ms=clock() + HOUR_MS))
        await administration.delete("t/subscriptions/earlier", policy=RETAIN)
        await bus.sent(bus.address("t"), message("y"))
        await administration.delete("t", policy=RETAIN)
        assert administration.listed(EntityKind.SUBSCRIPTION) == []
        for refused in (kept.entity_no, earlier.entity_no):
            assert await refusal_of(administration.restore(refused)) is Refusal.NOT_ALLOWED
        home = bus.hosts[topic.partitions[0]]
        bus.advance(HOUR_MS)
        await until(lambda: _scheduled(bus, topic.entity_no) == 0)  # due messages are not lost
        assert home.is_loaded
        restored = await administration.restore(topic.entity_no)
        assert restored.name == "t"
        subscriptions = administration.listed(EntityKind.SUBSCRIPTION, "t")
        assert [each.properties for each in subscriptions] == [closed, kept.properties]
        assert (subscriptions[1].entity_no, subscriptions[1].rules) == (kept.entity_no, kept.rules)
        assert (await administration.runtime("t/Subscriptions/closed")).active == 0
        assert (
            await administration.runtime("t/Subscriptions/kept")
        ).active == 3  # x, y, and the due message
        await administration.restore(earlier.entity_no)
        assert (await administration.runtime("t/Subscriptions/earlier")).active == 1
        await bus.sent(bus.address("t"), message("z"))
        assert (await administration.runtime("t/Subscriptions/earlier")).active == 2


def _scheduled(bus: Bus, entity_no: int) -> int:
    counts = [host.counts(entity_no) for host in bus.hosts]
    return sum(each.scheduled for each in counts if each is not None)


async def test_a_topic_deleted_for_good_takes_retained_subscriptions_along(
    store: Store, database: str
) -> None:
    async with administered(store) as (administration, bus):
        await administration.put(a_topic("t", TOPIC), NEW)
        made = await administration.put(a_subscription("t", "s", SUBSCRIPTION), NEW)
        await bus.sent(bus.address("t"), message("x"))
        await administration.delete("t/Subscriptions/s", policy=RETAIN)
        assert await rows_of(database) == 1
        await administration.delete("t")
        assert await refusal_of(administration.restore(made.entity_no)) is Refusal.ENTITY_NOT_FOUND
        await wait_until(lambda: _has_no_rows(database))


async def _has_no_rows(database: str) -> bool:
    return await rows_of(database) == 0


async def test_partitions_learn_of_many_subscriptions_in_few_commits(store: Store) -> None:
    """A change of a topic with two thousand of them does not delay others for minutes."""
    async with administered(store, partition_count=1) as (administration, bus):
        made = await administration.put(a_topic("t", TOPIC), NEW)
        await bus.load()
        wanted = [
            WantedEntity(EntityKind.SUBSCRIPTION, f"s{n}", SUBSCRIPTION, "t") for n in range(250)
        ]
        for work in (
            administration.put_all(wanted),
            administration.delete("t", policy=RETAIN),
            administration.restore(made.entity_no),
            administration.delete("t"),
        ):
            before = sum(bus.hosts[0].counters.commit_counts)
            await work
            assert sum(bus.hosts[0].counters.commit_counts) - before < 30
            state = bus.hosts[0].state
            assert state is not None
            assert state.catalog_version == administration.version
            assert administration.acknowledged() == {0: administration.version}


async def test_a_restore_requires_its_forward_target(store: Store) -> None:
    async with administered(store) as (administration, _):
        await administration.put(a_queue("target", QUEUE), NEW)
        made = await administration.put(a_queue("q", QueueProperties(forward_to="target")), NEW)
        await administration.delete("q", policy=RETAIN)
        await administration.delete("target")
        with pytest.raises(DirectoryRefusal, match="no queue or topic target"):
            await administration.restore(made.entity_no)
        await administration.put(a_queue("target", QUEUE), NEW)
        assert (await administration.restore(made.entity_no)).properties == made.properties


async def test_queues_that_dead_letter_into_each_other_are_restored(store: Store) -> None:
    async with administered(store) as (administration, _):
        numbers = {}
        for name, target in (("a", None), ("b", "a"), ("a", "b")):
            wanted = QueueProperties(forward_dead_lettered_messages_to=target)
            mode = EXISTING if name in numbers else NEW
            numbers[name] = (await administration.put(a_queue(name, wanted), mode)).entity_no
        for name in numbers:
            await administration.delete(name, policy=RETAIN)
        for name, number in numbers.items():
            assert (await administration.restore(number)).name == name
        await administration.delete("b", policy=RETAIN)
        await administration.delete("a")
        with pytest.raises(DirectoryRefusal, match="no queue or topic a"):
            await administration.restore(numbers["b"])


async def test_the_retention_ends(store: Store, database: str) -> None:
    ahead_ms = 0

    def now_ms() -> int:
        return bus.hosts[0].clock() + ahead_ms

    declared = NamespaceDefinition.model_validate({"softDelete": {"retention": "P1D"}})
    async with administered(store, now_ms=lambda: now_ms(), declared=declared) as (
        administration,
        bus,
    ):
        made = await administration.put(a_queue("q", spread()), NEW)
        await bus.sent(bus.address("q"), *(message(f"{n}") for n in range(8)))
        await administration.delete("q", policy=RETAIN)
        await administration.reap()
        (stone,) = await administration.tombstones(0)
        assert stone.restorable_until_ms is not None
        assert abs(stone.restorable_until_ms - stone.deleted_ms - DAY_MS) < HOUR_MS
        assert await rows_of(database) == 8
        ahead_ms = DAY_MS + HOUR_MS
        await administration.reap()
        (stone,) = await administration.tombstones(0)
        assert stone.restorable_until_ms is None
        assert await refusal_of(administration.restore(made.entity_no)) is Refusal.ENTITY_NOT_FOUND
        await wait_until(lambda: _has_no_rows(database))
        ahead_ms = 101 * DAY_MS
        await administration.reap()
        assert await administration.tombstones(0) == []


async def test_a_moved_clock_does_not_shorten_the_retention(store: Store) -> None:
    clock = manual_clock()
    async with administered(store, clock=clock) as (administration, _):
        clock.advance(50 * DAY_MS)
        made = await administration.put(a_queue("q", QUEUE), NEW)
        await administration.delete("q", policy=RETAIN)
        clock.advance(6 * DAY_MS)
        await administration.reap()
        assert (await administration.restore(made.entity_no)).name == "q"
        await administration.delete("q", policy=RETAIN)
        clock.advance(7 * DAY_MS)
        await administration.reap()
        assert await refusal_of(administration.restore(made.entity_no)) is Refusal.ENTITY_NOT_FOUND


async def test_retained_entities_count_against_the_limit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with administered(store) as (administration, bus):
        limits = bus.directory.limits
        monkeypatch.setattr(bus.directory, "limits", replace(limits, max_entity_count=2))
        for name in ("a", "b"):
            await administration.put(a_queue(name, QUEUE), NEW)
            await administration.delete(name, policy=RETAIN)
        await administration.put(a_queue("c", QUEUE), NEW)
        refused = administration.delete("c", policy=RETAIN)
        assert await refusal_of(refused) is Refusal.QUOTA_EXCEEDED


# --- crashes ------------------------------------------------------------------------------------


class LossyCatalog(CatalogStore):
    """The real catalog; on request it loses a write or the answer to it."""

    loses = ""

    async def _lose(self, write: Callable[[], Any]) -> Any:
        if self.loses == "write":
            raise StoreUnavailable
        result = await write()
        if self.loses == "answer":
            raise StoreUnavailable
        return result

    async def retain(self, *given: Any) -> list[CatalogEntry]:
        return await self._lose(lambda: CatalogStore.retain(self, *given))

    async def restore(self, *given: Any) -> list[CatalogEntry]:
        return await self._lose(lambda: CatalogStore.restore(self, *given))


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_lost_answers_are_found_in_the_tables(store: Store, is_loaded: bool) -> None:
    async with administered(store) as (administration, bus):
        catalog = LossyCatalog(store)
        bus.directory.catalog.store = catalog
        made = await administration.put(a_topic("t", TOPIC), NEW)
        await administration.put(a_subscription("t", "s", SUBSCRIPTION), NEW)
        if is_loaded:
            await bus.sent(bus.address("t"), message("x"))
        for loses in ("write", "answer"):
            catalog.loses = loses
            if loses == "write":
                refused = administration.delete("t", policy=RETAIN)
                assert await refusal_of(refused) is Refusal.NOT_APPLIED
                assert administration.find("t/Subscriptions/s") is not None
            else:
                await administration.delete("t", policy=RETAIN)
                assert administration.find("t/Subscriptions/s") is None
        for loses in ("write", "answer"):
            catalog.loses = loses
            if loses == "write":
                refused = administration.restore(made.entity_no)
                assert await refusal_of(refused) is Refusal.NOT_APPLIED
                assert administration.find("t") is None
            else:
                assert (await administration.restore(made.entity_no)).name == "t"
        await bus.sent(bus.address("t"), message("y"))
        found = await administration.runtime("t/Subscriptions/s")
        assert found.active == (2 if is_loaded else 1)


SLEEPING = {"Disabled", "ReceiveDisabled"}


def statuses(bus: Bus) -> list[str]:
    """Return the status of each stored entity in the partitions' own copies."""
    found = []
    for host in bus.hosts:
        state = host._state
        assert state is not None
        for entry in bus.directory.catalog.entries_of(host.partition_id):
            entity = state.entities.get(entry.entity_no)
            assert entity is not None
            found.append(entity.properties.status.value)
    return found


@pytest.mark.parametrize("reached", range(5))
@pytest.mark.parametrize("step", ["retain", "restore"])
async def test_a_crash_between_any_two_steps_is_repaired(
    store: Store, reached: int, step: str
) -> None:
    """The catalog has it, and some partitions and entities learned of it before the crash."""
    async with administered(store) as (administration, bus):
        properties = TopicProperties(enable_partitioning=True)
        made = await administration.put(a_topic("t", properties), NEW)
        for name in ("a", "b"):
            await administration.put(a_subscription("t", name, SUBSCRIPTION), NEW)
        await bus.load()
        await bus.sent(bus.address("t"), *(message(f"{n}") for n in range(8)))
        if step == "restore":
            await administration.delete("t", policy=RETAIN)
        left = reached

        def crash(host: Any) -> None:
            call = host.call

            async def calling(command: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    await asyncio.get_running_loop().create_future()  # it never learns of it
                return await call(command)

            host.call = calling

        calls = [host.call for host in bus.hosts]
        for host in bus.hosts:
            crash(host)
        work = (
            administration.delete("t", policy=RETAIN)
            if step == "retain"
            else administration.restore(made.entity_no)
        )
        changing = asyncio.create_task(work)
        await until(lambda: left < 0)
        changing.cancel()
        for host, call in zip(bus.hosts, calls, strict=True):
            host.call = call  # type: ignore[method-assign]
        for task in asyncio.all_tasks():
            if "ChangeTasks.run" in str(task.get_coro()):
                task.cancel()
    async with administered(store) as (administration, bus):
        await bus.load()
        await until(lambda: set(statuses(bus)) == ({"Active"} if step == "restore" else SLEEPING))
        if step == "retain":
            assert administration.find("t") is None
            assert administration.find("t/Subscriptions/a") is None
            await administration.restore(made.entity_no)
            assert set(statuses(bus)) == {"Active"}
        for name in ("a", "b"):
            assert (await administration.runtime(f"t/Subscriptions/{name}")).active == 8
        await bus.sent(bus.address("t"), *(message(f"{n}") for n in range(8)))
        for name in ("a", "b"):
            assert (await administration.runtime(f"t/Subscriptions/{name}")).active == 16


# --- the feed -----------------------------------------------------------------------------------


async def test_the_feed_returns_changes_and_waits_for_more(store: Store) -> None:
    async with administered(store) as (administration, bus):
        assert await administration.changes(0) == (0, [])
        made = await administration.put(a_queue("a", QUEUE), NEW)
        await administration.put(a_queue("b", QUEUE), NEW)
        await administration.put(a_queue("a", QueueProperties(max_delivery_count=3)), EXISTING)
        version, found = await administration.changes(0)
        assert version == 3
        assert [(each.version, each.name, each.tombstone) for each in found] == [
            (2, "b", None),
            (3, "a", None),
        ]
        waiting = asyncio.create_task(administration.changes(version, wait_s=20))
        await asyncio.sleep(0)
        assert not waiting.done()
        await administration.delete("a")
        version, [change] = await waiting
        assert change.tombstone is not None
        assert (version, change.name, change.tombstone.entity_no) == (4, "a", made.entity_no)
        assert await administration.changes(4, wait_s=0.01) == (4, [])
        with pytest.raises(DirectoryRefusal, match="list everything again"):
            await administration.changes(5)
    async with administered(store) as (administration, bus):
        version, found = await administration.changes(2)
        assert (version, [each.name for each in found]) == (4, ["a"])
        await administration.delete("b")
        async with store.aside() as connection:
            await connection.execute("update postbus.catalog set updated_ms = 0")
        await administration.reap()
        with pytest.raises(DirectoryRefusal, match="list everything again"):
            await administration.changes(3)
        assert await administration.changes(0) == (5, [])
        del bus


async def test_a_list_from_zero_continues_beyond_forgotten_tombstones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "MOST", 2)
    async with administered(store) as (administration, bus):
        for name in "abcd":
            await administration.put(a_queue(name, QUEUE), NEW)
        await administration.put(a_queue("gone", QUEUE), NEW)
        await administration.delete("gone")
        async with store.aside() as connection:
            await connection.execute("update postbus.catalog set updated_ms = 0 where is_deleted")
        begun = administration.version
        version, found = await administration.changes(0)
        assert (version, [each.name for each in found]) == (2, ["a", "b"])
        await administration.reap()
        with pytest.raises(DirectoryRefusal, match="list everything again"):
            await administration.changes(version)
        version, found = await administration.changes(version, begun=begun)
        assert (version, [each.name for each in found]) == (6, ["c", "d"])
        await administration.delete("a")
        async with store.aside() as connection:
            await connection.execute("update postbus.catalog set updated_ms = 0 where is_deleted")
        await administration.reap()
        with pytest.raises(DirectoryRefusal, match="list everything again"):
            await administration.changes(2, begun=begun)
        del bus


async def test_tombstones_have_reason_and_end_of_restorability(store: Store) -> None:
    async with administered(store) as (administration, bus):
        idle = QueueProperties(auto_delete_on_idle_ms=300_000)
        await administration.put(a_queue("Idle", idle), NEW)
        await administration.put(a_topic("t", TOPIC), NEW)
        await administration.put(a_subscription("t", "s", SUBSCRIPTION), NEW)
        entry = bus.directory.find("idle")
        assert entry is not None
        await bus.directory._delete(entry, DeletedReason.IDLE)
        await administration.delete("t", policy=RETAIN)
        stones = await administration.tombstones(0)
        assert [(each.name, each.kind, each.reason) for each in stones] == [
            ("Idle", EntityKind.QUEUE, DeletedReason.IDLE),
            ("t", EntityKind.TOPIC, DeletedReason.REQUESTED),
            ("t/Subscriptions/s", EntityKind.SUBSCRIPTION, DeletedReason.REQUESTED),
        ]
        assert [each.restorable_until_ms is None for each in stones] == [True, False, False]
        assert await administration.tombstones(stones[0].version) == stones[1:]
        assert await administration.tombstones(0, top=1) == stones[:1]
        assert all(isinstance(each, Tombstone) for each in stones)
