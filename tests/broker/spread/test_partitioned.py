"""Entities over several partitions: sends, receives, settlements, peeks as with one partition."""

from __future__ import annotations

import asyncio
import time
import uuid
from itertools import pairwise

import pytest

from postbus.broker.partition.host import Host
from postbus.broker.spread.partitioned import BURST
from postbus.contract.entities import (
    RuleProperties,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    Cancelled,
    CancelScheduled,
    CheckLocks,
    Command,
    DeferredReceived,
    DeleteMessages,
    DemandSet,
    Disposition,
    Done,
    Enqueue,
    Enqueued,
    LocksRenewed,
    LoseLocks,
    MessageState,
    OnReply,
    ReceiveDeferred,
    ReceiveMode,
    Refusal,
    Refused,
    RemoveConsumer,
    RenewLocks,
    Reply,
    SetDemand,
    Settle,
    Settled,
    SubQueue,
)
from postbus.store.postgres import Store
from tests.broker.administration_rig import administered
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
from tests.broker.putting import put_queue, put_subscription, put_topic
from tests.store.driving import connected

pytestmark = pytest.mark.slow

ACTIVE = SubQueue.ACTIVE
HOUR_MS = 3_600_000


def note_commands(host: Host, noted: list[int]) -> None:
    """Record each command that reaches a partition from now on."""
    submit = host.submit

    def noting(command: Command, on_reply: OnReply | None = None) -> None:
        noted.append(host.partition_id)
        submit(command, on_reply)

    host.submit = noting


# --- sending --------------------------------------------------------------------------------------


@pytest.mark.behaviour("S178", "S222")
async def test_messages_without_key_rotate_over_partitions(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        numbers = [(await bus.sent(queue, message(message_id="same")))[0] for _ in range(8)]
        assert sorted(partitions_of(numbers)) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(set(numbers)) == 8
        burst = await bus.sent(queue, *(message(str(n)) for n in range(2 * BURST + 2)))
        places = partitions_of(burst)
        assert sum(a != b for a, b in pairwise(places)) == 2  # one commit for each burst
        assert places[0] != places[BURST] != places[-1]
        assert len(await bus.peek_all(queue)) == 8 + len(burst)


@pytest.mark.behaviour("S166", "S167", "S168", "S170", "S171", "S195", "S222", "S229")
async def test_a_key_keeps_its_partition_across_restarts(store: Store) -> None:
    keys = keys_for(4)
    for _ in range(2):
        async with running(store) as bus:
            if bus.directory.find("q") is None:
                queue = await bus.put_spread_queue()
            for place, key in enumerate(keys):
                numbers = await bus.sent(queue, message(key=key), message(key=key, message_id="m"))
                numbers += await bus.sent(
                    queue, message(session=key), message(session=key, key=key)
                )
                assert set(partitions_of(numbers)) == {place}
                assert numbers == sorted(numbers)


async def test_replies_of_mixed_keys_keep_the_order_of_the_messages(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        keys = keys_for(4)
        wrong = message("wrong", session="s", key="other")
        sent = [message(key=keys[n % 4]) for n in range(8)]
        sent[5:5] = [message(), wrong]
        reply = await bus.send(queue, *sent)
        assert isinstance(reply, Enqueued)
        assert list(reply.refusals or ()) == [6]
        assert reply.sequence_numbers[6] == 0
        places = partitions_of(reply.sequence_numbers)
        assert places[:5] + places[7:] == [0, 1, 2, 3, 0, 1, 2, 3]
        assert isinstance(await bus.send(queue), Enqueued)


@pytest.mark.behaviour("S171", "S172", "S230")
async def test_a_session_with_another_partition_key_is_refused(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        good, bad = message(session="s", key="s"), message(session="s", key="k")
        assert refusal_of(await bus.send(queue, bad)) is Refusal.NOT_ALLOWED
        assert refusal_of(await bus.send(queue, good, bad, is_atomic=True)) is Refusal.NOT_ALLOWED
        reply = await bus.send(queue, bad, good, bad)
        assert isinstance(reply, Enqueued)
        assert {n: each.refusal for n, each in (reply.refusals or {}).items()} == {
            0: Refusal.NOT_ALLOWED,
            2: Refusal.NOT_ALLOWED,
        }
        assert [each.sequence for each in await bus.peek_all(queue)] == reply.sequence_numbers[1:2]


async def test_a_batch_is_in_one_partition_or_nowhere(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        keys = keys_for(2)
        many = [message(str(n)) for n in range(BURST + 1)]
        for batch in ([message(key=keys[1])] * 2, many):
            reply = await bus.send(queue, *batch, is_atomic=True)
            assert isinstance(reply, Enqueued)
            assert len(set(partitions_of(reply.sequence_numbers))) == 1
        for batch in ([message(key=keys[0]), message(key=keys[1])], [message(), message(key="k")]):
            assert refusal_of(await bus.send(queue, *batch, is_atomic=True)) is Refusal.NOT_ALLOWED
        counts = bus.counts(queue)
        assert counts.active == 2 + len(many)


@pytest.mark.behaviour("S13")
async def test_a_later_send_may_be_answered_first(store: Store, database: str) -> None:
    async with running(store) as bus, connected(database) as other:
        queue = await bus.put_spread_queue()
        await bus.load()
        slow, fast = keys_for(2)
        await bus.sent(queue, message(key=slow), message(key=fast))
        answered: list[str] = []
        async with other.transaction():
            await other.execute("lock table partition_0.message in share mode")
            for key in (slow, fast):
                command = Enqueue(queue.entity_no, [message(key, key=key)])
                bus.router.submit(-1, command, lambda reply, key=key: answered.append(key))
            await until(lambda: answered == [fast])
        await until(lambda: answered == [fast, slow])


REFUSING = """
create function partition_0.refuse() returns trigger language plpgsql as $$
begin
    {what};
    return new;
end
$$;
create trigger refuse before insert on partition_0.message
for each row execute function partition_0.refuse();
"""


@pytest.mark.behaviour("S182", "S183", "S184", "S228")
async def test_a_message_certainly_not_stored_goes_to_another_partition(
    store: Store, database: str
) -> None:
    async with running(store) as bus, connected(database) as other:
        queue = await bus.put_spread_queue()
        await bus.load()
        await other.execute(REFUSING.format(what="raise exception 'no' using errcode = '23514'"))
        began = time.monotonic()
        numbers: list[int] = []
        for n in range(8):
            numbers += await bus.sent(queue, message(str(n)))
        numbers += await bus.sent(queue, *(message(f"burst-{n}") for n in range(4 * BURST)))
        assert time.monotonic() - began < 15
        assert set(partitions_of(numbers)) == {1, 2, 3}
        assert len(await bus.peek_all(queue)) == len(numbers)
        keyed = await bus.send(queue, message(key=keys_for(1)[0]))
        assert refusal_of(keyed) is Refusal.NOT_APPLIED


@pytest.mark.behaviour("S182")
async def test_a_message_that_may_be_stored_goes_to_no_other_partition(
    store: Store, database: str
) -> None:
    async with running(store) as bus, connected(database) as other:
        queue = await bus.put_spread_queue()
        await bus.load()
        lost = "perform pg_terminate_backend(pg_backend_pid())"  # as if it was lost on the way
        await other.execute(REFUSING.format(what=lost))
        replies = [await bus.send(queue, message(str(n))) for n in range(4)]
        refused = [each for each in replies if isinstance(each, Refused)]
        assert [each.refusal for each in refused] == [Refusal.UNKNOWN]


@pytest.mark.behaviour("S188")
async def test_counts_are_the_sum_over_all_partitions(store: Store) -> None:
    async with administered(store) as (administration, bus):
        await put_queue(bus.directory, "q", spread())
        await put_queue(bus.directory, "plain", spread(enable_partitioning=False))
        queue, plain = bus.address("q"), bus.address("plain")
        for n in range(6):
            await bus.sent(queue, message(str(n)))
        later_ms = bus.hosts[0].clock() + HOUR_MS
        await bus.sent(queue, message(scheduled_ms=later_ms), message(key="k"))
        await bus.sent(plain, message())
        counts = await administration.runtime("q")
        assert (counts.active, counts.scheduled, counts.size_bytes) == (7, 1, 800)
        assert (await administration.runtime("plain")).active == 1


# --- receiving ------------------------------------------------------------------------------------


@pytest.mark.behaviour("S156", "S225")
async def test_a_receiver_gets_messages_of_all_partitions(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        consumer_id, sink = await bus.consume(queue, 20)
        for n in range(8):  # to one that waits
            await bus.sent(queue, message(str(n)))
        await until(lambda: len(sink.deliveries) == 8)
        await bus.call(queue, SetDemand(consumer_id, 8))
        for n in range(8, 16):  # to one that comes later
            await bus.sent(queue, message(str(n)))
        assert len(sink.deliveries) == 8
        await bus.call(queue, SetDemand(consumer_id, 16))
        await until(lambda: len(sink.deliveries) == 16)
        assert sorted(sink.bodies, key=int) == [str(n) for n in range(16)]


@pytest.mark.parametrize("mode", list(ReceiveMode))
async def test_a_receiver_never_gets_more_than_its_demand(store: Store, mode: ReceiveMode) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        for n in range(20):
            await bus.sent(queue, message(str(n)))
        consumer_id, sink = await bus.consume(queue, mode=mode)
        for limit in (1, 2, 7, 8, 13):
            await bus.call(queue, SetDemand(consumer_id, limit))
            await until(lambda limit=limit: len(sink.deliveries) >= limit)
            await asyncio.gather(*(bus.sent(queue, message("more")) for _ in range(4)))
            assert len(sink.deliveries) == limit
        counts = bus.counts(queue)
        taken = 13 if mode is ReceiveMode.RECEIVE_AND_DELETE else 0
        assert counts.active == 40 - taken


@pytest.mark.behaviour("S156")
async def test_messages_taken_by_another_receiver_do_not_bind_credit(store: Store) -> None:
    """Each message is hinted to all receivers; a receiver that is late must get the next hint."""
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        consumers = [await bus.consume(queue, 1) for _ in range(5)]
        for n in range(40):
            await bus.sent(queue, message(str(n)))
            await until(
                lambda n=n: sum(len(sink.deliveries) for _, sink in consumers) == min(n + 1, 5)
            )
            if n >= 4:
                break
        assert [len(sink.deliveries) for _, sink in consumers] == [1] * 5
        for n in range(5, 40):
            consumer_id, sink = consumers[n % 5]
            await bus.call(queue, SetDemand(consumer_id, len(sink.deliveries) + 1))
            await bus.sent(queue, message(str(n)))
            await until(lambda n=n: sum(len(sink.deliveries) for _, sink in consumers) == n + 1)


async def test_credit_is_shared_fairly_over_partitions(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        for key in keys_for(4):
            await bus.sent(queue, *(message(key=key) for _ in range(100)))
        consumer_id, sink = await bus.consume(queue)
        limit = 40
        await bus.call(queue, SetDemand(consumer_id, limit))
        await until(lambda: len(sink.deliveries) == 40)
        places = partitions_of([each.sequence for each in sink.deliveries])
        assert [places.count(partition_id) for partition_id in range(4)] == [10] * 4
        for _ in range(8):
            limit += 20
            await bus.call(queue, SetDemand(consumer_id, limit))
            await until(lambda: len(sink.deliveries) >= limit)  # noqa: B023 - called at once
        places = partitions_of([each.sequence for each in sink.deliveries])
        assert all(40 <= places.count(partition_id) <= 60 for partition_id in range(4))
        for partition_id in range(4):
            mine = [
                each.sequence for each in sink.deliveries if each.sequence >> 48 == partition_id
            ]
            assert mine == sorted(mine)


@pytest.mark.parametrize("disposition", [Disposition.ABANDON, Disposition.RELEASE])
async def test_a_message_that_comes_back_is_found_again(
    store: Store, disposition: Disposition
) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        _, first = await bus.consume(queue, 1)
        _, second = await bus.consume(queue)
        await bus.sent(queue, message("again"))
        await until(lambda: len(first.deliveries) == 1)
        third_id, third = await bus.consume(queue, 1)
        tokens = [first.deliveries[0].lock_token]
        settle = Settle(queue.entity_no, ACTIVE, tokens, disposition)
        assert await bus.call(queue, settle) == Settled()
        await until(lambda: len(third.deliveries) == 1)
        assert third.deliveries[0].delivery_count == (disposition is Disposition.ABANDON)
        assert (third.bodies, second.bodies) == (["again"], [])
        await bus.call(queue, RemoveConsumer(third_id))


@pytest.mark.behaviour("S157", "S158", "S207", "S224")
async def test_surplus_is_remembered_and_never_taken(store: Store) -> None:
    """The front end records which partitions have more; messages stay free for others (ADR 24)."""
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        for n in range(8):
            await bus.sent(queue, message(str(n)))
        consumer_id, sink = await bus.consume(queue, 1)
        await until(lambda: len(sink.deliveries) == 1)
        noted: list[int] = []
        for host in bus.hosts:
            note_commands(host, noted)
        await bus.call(queue, SetDemand(consumer_id, 2))
        assert len(sink.deliveries) == 2  # at once
        assert len(noted) == 1  # one partition got the request, not all
        _, other = await bus.consume(queue, 20)
        await until(lambda: len(other.deliveries) == 6)
        bus.router.unregister_sink(queue.partition_id, consumer_id)
        await bus.call(queue, RemoveConsumer(consumer_id))
        assert sorted(sink.bodies + other.bodies) == [str(n) for n in range(8)]


@pytest.mark.behaviour("S209", "S210")
async def test_messages_locked_by_another_client_come_when_its_locks_end(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        tokens, _ = await locked(bus, 6)
        consumer_id, sink = await bus.consume(queue)
        assert await bus.drain(queue, consumer_id, 10) == 0
        assert len(await bus.peek_all(queue)) == 6
        await bus.call(queue, SetDemand(consumer_id, 10))
        noted: list[int] = []
        for host in bus.hosts:
            note_commands(host, noted)
        await wait_for_too_many(0.25)
        assert (noted, sink.deliveries) == ([], [])  # locked messages are not requested
        assert await bus.call(queue, LoseLocks(queue.entity_no)) == Done()
        await until(lambda: len(sink.deliveries) == 6)
        assert {each.delivery_count for each in sink.deliveries} == {1}
        assert not {each.lock_token for each in sink.deliveries} & set(tokens)


@pytest.mark.behaviour("S179")
async def test_a_message_does_not_wait_for_earlier_ones_of_another_partition(
    store: Store,
) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        sent = {(await bus.sent(queue, message(str(n))))[0]: str(n) for n in range(12)}
        (slow,) = partitions_of([next(iter(sent))])
        held_back: list[tuple[Command, OnReply | None]] = []
        host = bus.hosts[slow]
        submit = host.submit

        def hold_back(command: Command, on_reply: OnReply | None = None) -> None:
            held_back.append((command, on_reply))

        host.submit = hold_back
        try:
            _, sink = await bus.consume(queue, 12)
            await until(lambda: len(sink.deliveries) == 9)
            assert "0" not in sink.bodies  # a later message has arrived
        finally:
            host.submit = submit
            for call in held_back:
                submit(*call)
        await until(lambda: len(sink.deliveries) == 12)
        assert sorted(sink.bodies, key=int) == list(sent.values())
        for place in range(4):  # in each of them the order is kept
            there = [each.sequence for each in sink.deliveries if each.sequence >> 48 == place]
            assert there == sorted(there)
            assert len(there) == 3


async def test_demand_of_a_partition_is_free_again_when_it_reloads(
    store: Store,
) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        _, sink = await bus.consume(queue, 1)
        (key,) = keys_for(1)
        host = bus.hosts[0]
        submit = host.submit
        noted: list[Command] = []

        def ask_and_fail(command: Command, on_reply: OnReply | None = None) -> None:
            if isinstance(command, SetDemand) and command.is_drain:
                host.submit = submit
                submit(Enqueue(queue.entity_no, [message("unknown", key=key)]))
                submit(command, on_reply)  # its answer waits for the commit, which fails
                host.interrupt(0.01)
                noted.append(command)
            else:
                submit(command, on_reply)

        host.submit = ask_and_fail
        await bus.sent(queue, message("first", key=key))
        await until(lambda: sink.bodies == ["first"])
        assert len(noted) == 1


async def test_a_drain_takes_available_messages_and_ends(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        consumer_id, sink = await bus.consume(queue)
        began = time.monotonic()
        assert await bus.drain(queue, consumer_id, 5) == 0
        assert time.monotonic() - began < 0.2
        for n in range(7):
            await bus.sent(queue, message(str(n)))
        assert await bus.drain(queue, consumer_id, 5) == 5
        assert await bus.drain(queue, consumer_id, 20) == 7
        assert sorted(sink.bodies) == [str(n) for n in range(7)]
        await bus.sent(queue, message("late"))
        await wait_for_too_many()
        assert len(sink.deliveries) == 7  # the limit fell to the delivered messages


async def test_a_drain_does_not_wait_for_a_slow_partition(store: Store, database: str) -> None:
    async with running(store) as bus, connected(database) as other:
        queue = await bus.put_spread_queue()
        await bus.load()
        slow, fast = keys_for(2)
        mode = ReceiveMode.RECEIVE_AND_DELETE
        consumer_id, sink = await bus.consume(queue, mode=mode)
        await bus.sent(queue, message("slow", key=slow), message("fast", key=fast))
        async with other.transaction():
            await other.execute("lock table partition_0.message in share mode")
            began = time.monotonic()
            assert await bus.drain(queue, consumer_id, 5) == 1
            assert time.monotonic() - began < 0.2
            assert sink.bodies == ["fast"]
        await until(lambda: len(sink.deliveries) == 2)  # it was deleted, so it must come


async def test_a_drain_is_not_cut_short_by_the_one_before(store: Store, database: str) -> None:
    async with running(store) as bus, connected(database) as other:
        queue = await bus.put_spread_queue()
        await bus.load()
        slow, fast = keys_for(2)
        mode = ReceiveMode.RECEIVE_AND_DELETE
        consumer_id, sink = await bus.consume(queue, mode=mode)
        await bus.sent(queue, message("slow", key=slow))
        async with other.transaction():
            await other.execute("lock table partition_0.message in share mode")
            first: list[Reply] = []
            drain = SetDemand(consumer_id, 1, is_drain=True)
            bus.router.submit(queue.partition_id, drain, first.append)
            await bus.sent(queue, message("fast", key=fast))
            assert not first
            assert await bus.drain(queue, consumer_id, 5) == 1
            assert first == [DemandSet(0)]
            assert sink.bodies == ["fast"]
        await until(lambda: len(sink.deliveries) == 2)


async def test_a_busy_partition_is_asked_for_hints_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.broker.partition.waiting.WAITING_LIMIT", 1)  # none for hints
    monkeypatch.setattr("postbus.broker.spread.consumers.RETRY_S", 0.05)
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        _, sink = await bus.consume(queue, 10)
        monkeypatch.setattr("postbus.broker.partition.waiting.WAITING_LIMIT", 100)
        await bus.load()
        await bus.sent(queue, *[message(str(n)) for n in range(4)])
        await until(lambda: len(sink.deliveries) == 4)


async def test_a_removed_receiver_gets_no_message(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        consumer_id, sink = await bus.consume(queue, 5)
        bus.router.unregister_sink(queue.partition_id, consumer_id)
        assert await bus.call(queue, RemoveConsumer(consumer_id)) == Done()
        reply = await bus.call(queue, SetDemand(consumer_id, 9))
        assert refusal_of(reply) is Refusal.ENTITY_NOT_FOUND
        _, other = await bus.consume(queue, 5)
        for n in range(4):
            await bus.sent(queue, message(str(n)))
        await until(lambda: len(other.deliveries) == 4)
        assert sink.deliveries == []


async def test_a_reloaded_partition_gets_its_demand_again(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        consumer_id, sink = await bus.consume(queue, 10)
        keys = keys_for(2)
        await bus.sent(queue, message("0", key=keys[0]), message("1", key=keys[1]))
        await until(lambda: len(sink.deliveries) == 2)
        bus.hosts[0].interrupt(0.3)
        await until(lambda: not bus.hosts[0].is_loaded)
        await bus.sent(queue, message("2", key=keys[1]))
        await until(lambda: "2" in sink.bodies)
        await until(lambda: sink.bodies.count("0") == 2)  # its lock went with the memory
        assert sink.resets == 0
        tokens = [each.lock_token for each in sink.deliveries]
        first, last = (n for n, body in enumerate(sink.bodies) if body == "0")
        reply = await bus.call(queue, Settle(queue.entity_no, ACTIVE, tokens, Disposition.COMPLETE))
        assert reply == Settled([first])
        assert last > first
        assert await bus.drain(queue, consumer_id, 20) == 4


async def test_the_end_of_an_entity_ends_its_receivers_once(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        await bus.load()
        _, sink = await bus.consume(queue, 10)
        await bus.directory.delete("q")
        assert sink.refusals == [Refusal.ENTITY_NOT_FOUND]
        consumer_id, late = await bus.consume(queue)
        assert late.refusals == []  # the reply contained it
        reply = await bus.call(queue, SetDemand(consumer_id, 1))
        assert refusal_of(reply) is Refusal.ENTITY_NOT_FOUND


# --- settling -------------------------------------------------------------------------------------


async def locked(bus: Bus, count: int) -> tuple[list[bytes], list[int]]:
    """Fill the queue `q` and lock all of it; returns tokens and numbers."""
    queue = bus.address("q")
    for n in range(count):
        await bus.sent(queue, message(str(n)))
    _, sink = await bus.consume(queue, count)
    await until(lambda: len(sink.deliveries) == count)
    return (
        [each.lock_token for each in sink.deliveries],
        [each.sequence for each in sink.deliveries],
    )


@pytest.mark.behaviour("S225")
async def test_tokens_of_several_partitions_are_settled_at_once(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        tokens, _ = await locked(bus, 8)
        unknown = bytes(8) + b"\x00\x02" + bytes(6)
        nowhere = bytes(8) + b"\x01\x00" + bytes(6)
        requested = [tokens[0], unknown, tokens[1], nowhere, tokens[2], tokens[3]]
        check = CheckLocks(queue.entity_no, ACTIVE, requested)
        assert await bus.call(queue, check) == Settled([1, 3])
        settle = Settle(queue.entity_no, ACTIVE, requested, Disposition.COMPLETE)
        assert await bus.call(queue, settle) == Settled([1, 3])
        assert await bus.call(queue, settle) == Settled(list(range(6)))
        dead = Settle(queue.entity_no, ACTIVE, tokens[4:], Disposition.DEAD_LETTER, "why", "so")
        assert await bus.call(queue, dead) == Settled()
        counts = bus.counts(queue)
        assert (counts.active, counts.dead_letter) == (0, 4)
        again = Settle(queue.entity_no, SubQueue.DEAD_LETTER, tokens, Disposition.DEAD_LETTER)
        assert refusal_of(await bus.call(queue, again)) is Refusal.NOT_ALLOWED


async def test_locks_are_renewed_in_the_requested_order_or_refused(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        tokens, _ = await locked(bus, 6)
        reply = await bus.call(queue, RenewLocks(queue.entity_no, ACTIVE, tokens))
        assert isinstance(reply, LocksRenewed)
        assert len(reply.locked_until_ms) == 6
        assert min(reply.locked_until_ms) > bus.hosts[0].clock() + 50_000
        for wrong in (bytes(16), b"\xff" * 16):
            lost = await bus.call(queue, RenewLocks(queue.entity_no, ACTIVE, [*tokens, wrong]))
            assert refusal_of(lost) is Refusal.LOCK_LOST


# --- by number ------------------------------------------------------------------------------------


@pytest.mark.behaviour("S161", "S162", "S164", "S165")
async def test_a_peek_reads_the_partitions_one_after_another(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        keys = keys_for(4)
        sent: list[int] = []
        for place in (3, 1, 3, 1, 1, 3, 1):
            sent += await bus.sent(queue, message(str(place), key=keys[place]))
        first = await bus.peek(queue)
        assert [each.envelope.body for each in first] == [b"1"] * 4  # the lowest that has any
        assert [each.sequence for each in first] == [(1 << 48) + n for n in range(1, 5)]
        found = await bus.peek_all(queue)
        assert [each.sequence for each in found] == sorted(sent)
        assert await bus.peek(queue, 4 << 48) == []
        assert [each.sequence for each in await bus.peek(queue, (1 << 48) + 4)] == [(1 << 48) + 4]
        assert (await bus.peek(queue, -5))[0].sequence == (1 << 48) + 1


@pytest.mark.behaviour("S155")
async def test_deferred_messages_of_several_partitions_are_received_together(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        tokens, numbers = await locked(bus, 4)
        assert len(set(partitions_of(numbers))) == 4
        defer = Settle(queue.entity_no, ACTIVE, tokens, Disposition.DEFER)
        assert await bus.call(queue, defer) == Settled()

        async def take(wanted: list[int], mode: ReceiveMode = ReceiveMode.PEEK_LOCK) -> Reply:
            return await bus.call(queue, ReceiveDeferred(queue.entity_no, ACTIVE, wanted, mode))

        for missing in (numbers[0] + 1, 77 << 48, -1):
            reply = await take([*numbers, missing])
            assert refusal_of(reply) is Refusal.MESSAGE_NOT_FOUND
        requested = [numbers[2], numbers[0], numbers[3]]
        reply = await take(requested)  # none of them is locked by the failed requests
        assert isinstance(reply, DeferredReceived)
        assert [each.sequence for each in reply.deliveries] == requested
        assert [each.delivery_count for each in reply.deliveries] == [0, 0, 0]
        assert all(each.lock_token for each in reply.deliveries)
        back = [each.lock_token for each in reply.deliveries]
        release = Settle(queue.entity_no, ACTIVE, back, Disposition.RELEASE)
        assert await bus.call(queue, release) == Settled()
        states = [each.state for each in await bus.peek_all(queue)]
        assert states == [MessageState.DEFERRED] * 4
        reply = await take(numbers, ReceiveMode.RECEIVE_AND_DELETE)
        assert isinstance(reply, DeferredReceived)
        assert [each.sequence for each in reply.deliveries] == numbers
        assert [each.lock_token for each in reply.deliveries] == [b""] * 4
        assert await bus.peek_all(queue) == []


@pytest.mark.behaviour("S155")
async def test_scheduled_messages_are_cancelled_in_their_partitions(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        later_ms = bus.hosts[0].clock() + HOUR_MS
        numbers: list[int] = []
        for n in range(5):
            numbers += await bus.sent(queue, message(str(n), scheduled_ms=later_ms))
        assert len(set(partitions_of(numbers))) == 4
        cancel = CancelScheduled(queue.entity_no, numbers[:4])
        assert await bus.call(queue, cancel) == Cancelled()
        left = await bus.peek_all(queue)
        assert [each.sequence for each in left] == numbers[4:]
        assert refusal_of(await bus.call(queue, cancel)) is Refusal.MESSAGE_NOT_FOUND
        nowhere = CancelScheduled(queue.entity_no, [99 << 48])
        assert refusal_of(await bus.call(queue, nowhere)) is Refusal.MESSAGE_NOT_FOUND


async def test_a_batch_delete_is_refused(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        await bus.sent(queue, message())
        command = DeleteMessages(queue.entity_no, ACTIVE, 10, bus.hosts[0].clock())
        assert refusal_of(await bus.call(queue, command)) is Refusal.NOT_ALLOWED
        assert len(await bus.peek(queue)) == 1


async def test_demand_is_answered_with_the_number_of_deliveries(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue()
        consumer_id, _ = await bus.consume(queue)
        assert await bus.call(queue, SetDemand(consumer_id, 3)) == DemandSet(0)


# --- topics and duplicates ------------------------------------------------------------------------


@pytest.mark.behaviour("S174", "S231")
async def test_duplicates_share_a_partition_and_one_is_kept(store: Store) -> None:
    async with running(store) as bus:
        queue = await bus.put_spread_queue(requires_duplicate_detection=True)
        for n in range(40):
            (first,) = await bus.sent(queue, message("first", message_id=f"id-{n}"))
            assert first > 0
            assert await bus.sent(queue, message("copy", message_id=f"id-{n}")) == [0]
        found = await bus.peek_all(queue)
        assert [each.envelope.body for each in found] == [b"first"] * 40
        assert len({each.sequence >> 48 for each in found}) == 4
        counted = uuid.UUID(int=7)
        await bus.sent(queue, message(message_id=counted))
        assert await bus.sent(queue, message(message_id=str(counted))) == [0]  # the same text


@pytest.mark.behaviour("S223", "S219", "S155")
async def test_a_subscription_receives_from_all_partitions_of_its_topic(store: Store) -> None:
    async with running(store) as bus:
        topic_of = TopicProperties.model_validate({"enable_partitioning": True})
        await put_topic(bus.directory, "news", topic_of)
        await put_subscription(bus.directory, "news", "all", SubscriptionProperties())
        none = RuleProperties(
            name="none", sql_filter=SqlFilter(sql_expression="1=0"), filter_type="SqlFilter"
        )
        await put_subscription(bus.directory, "news", "none", SubscriptionProperties(), [none])
        topic, everything = bus.address("news"), bus.address("NEWS/subscriptions/ALL")
        assert (topic.is_partitioned, everything.is_partitioned) == (True, True)
        consumer_id, sink = await bus.consume(everything, 20)
        for n in range(8):
            await bus.sent(topic, message(str(n)))
        await bus.sent(topic, *(message(key, key=key) for key in keys_for(4)))
        await until(lambda: len(sink.deliveries) == 12)
        numbers = [each.sequence for each in sink.deliveries]
        assert set(partitions_of(numbers)) == {0, 1, 2, 3}
        assert len(set(numbers)) == 12
        tokens = [each.lock_token for each in sink.deliveries]
        settle = Settle(everything.entity_no, ACTIVE, tokens, Disposition.COMPLETE)
        assert await bus.call(everything, settle) == Settled()
        assert await bus.drain(everything, consumer_id, 40) == 12
        assert await bus.peek_all(bus.address("news/Subscriptions/none")) == []
