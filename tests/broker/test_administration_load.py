"""Definitions change while clients send and receive: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from random import Random
from typing import Any, Final

import pytest

from postbus.broker.address import Address
from postbus.broker.administration import Administration, PutMode
from postbus.contract.entities import (
    EntityStatus,
    QueueProperties,
    RuleProperties,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    AddConsumer,
    Delivery,
    Disposition,
    Done,
    Enqueued,
    ReceiveMode,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    Settle,
    Settled,
    SubQueue,
)
from postbus.store.postgres import Store
from tests.broker.administration_rig import administered
from tests.broker.partition_rig import Bus, RecordingSink, message
from tests.broker.putting import EXISTING, NEW, a_queue, a_subscription, a_topic
from tests.store.driving import wait_until

pytestmark = pytest.mark.slow

CHANGES: Final = 60
BURST: Final = 4
WAYS: Final = (
    *([Disposition.COMPLETE] * 6),
    Disposition.ABANDON,
    Disposition.ABANDON,
    Disposition.DEAD_LETTER,
    Disposition.DEFER,
)
EXPECTED_OF_SENDERS: Final = {
    Refusal.SEND_DISABLED,
    Refusal.ENTITY_DISABLED,
    Refusal.BUSY,
}


class Receiver(RecordingSink):
    """Settles deliveries in all ways; records completed messages."""

    def __init__(self, bus: Bus, queue: Address, completed: Counter[str], random: Random) -> None:
        super().__init__()
        self._bus = bus
        self._queue = queue
        self._completed = completed
        self._random = random
        self.open = 0

    def deliver(self, deliveries: list[Delivery]) -> None:
        super().deliver(deliveries)
        for delivery in deliveries:
            self._settle(delivery)

    def _settle(self, delivery: Delivery) -> None:
        way = self._random.choice(WAYS)
        body = delivery.envelope.body.decode()
        self.open += 1

        def settled(reply: Reply) -> None:
            self.open -= 1
            if isinstance(reply, Settled) and reply.lost is None:
                self._completed[body] += way is Disposition.COMPLETE
            elif isinstance(reply, Refused):  # it stays, with and without a deletion of the entity
                assert reply.refusal in (Refusal.LOCK_LOST, Refusal.ENTITY_DISABLED), reply

        queue = self._queue
        command = Settle(queue.entity_no, SubQueue.ACTIVE, [delivery.lock_token], way)
        self._bus.router.submit(queue.partition_id, command, settled)


class Load:
    """Senders and receivers of a queue or topic, until `stop`."""

    def __init__(self, bus: Bus, seed: int) -> None:
        self._bus = bus
        self._random = Random(seed)
        self._numbers = itertools.count()
        self._is_over = False
        self.accepted: list[str] = []
        self.refused: list[str] = []
        self.completed: Counter[str] = Counter()
        self.why_refused: Counter[Refusal] = Counter()
        self.ended = 0

    def stop(self) -> None:
        self._is_over = True

    async def send(self, path: str) -> None:
        address = self._bus.address(path)
        while not self._is_over:
            bodies = [f"{path}-{next(self._numbers)}" for _ in range(BURST)]
            reply = await self._bus.send(address, *(message(body) for body in bodies))
            if isinstance(reply, Enqueued):
                assert reply.refusals is None
                self.accepted += bodies
            else:
                assert isinstance(reply, Refused)
                assert reply.refusal in EXPECTED_OF_SENDERS, reply
                self.why_refused[reply.refusal] += 1
                self.refused += bodies
                await wait_a_moment()

    async def receive(self, path: str) -> None:
        """Receive until the load is over; an ended receiver is opened again."""
        bus, address = self._bus, self._bus.address(path)
        while not self._is_over:
            sink = Receiver(bus, address, self.completed, self._random)
            consumer_id = bus.router.new_consumer_id()
            bus.router.register_sink(address.partition_id, consumer_id, sink)
            add = AddConsumer(
                address.entity_no, SubQueue.ACTIVE, consumer_id, ReceiveMode.PEEK_LOCK
            )
            if isinstance(await bus.call(address, add), Done):
                limit = 0
                while not (self._is_over or sink.refusals):
                    if limit - len(sink.deliveries) < 10:
                        limit += 20
                        await bus.call(address, SetDemand(consumer_id, limit))
                    await wait_a_moment()
                self.ended += bool(sink.refusals)
            else:
                await wait_a_moment()
            await bus.call(address, RemoveConsumer(consumer_id))
            await wait_until(lambda sink=sink: _is_quiet(sink))
            bus.router.unregister_sink(address.partition_id, consumer_id)


async def _is_quiet(sink: Receiver) -> bool:
    return not sink.open


async def wait_a_moment() -> None:
    await asyncio.sleep(0.002)


def some_queue(random: Random, is_partitioned: bool) -> QueueProperties:
    """Return a definition with other values of all changeable properties."""
    status = random.choice([*EntityStatus, EntityStatus.ACTIVE, EntityStatus.ACTIVE])
    return QueueProperties(
        status=status,
        lock_duration_ms=random.choice([5_000, 30_000, 300_000]),
        max_delivery_count=random.randint(1, 10),
        forward_to=random.choice([None, None, "target"]),
        forward_dead_lettered_messages_to=random.choice([None, "dead"]),
        enable_partitioning=is_partitioned,
        user_metadata=str(random.random()),
    )


async def found_in(bus: Bus, *paths: str) -> Counter[str]:
    """Return the bodies of all messages in entities, in any state."""
    found: Counter[str] = Counter()
    for path in paths:
        for below in ("", "/$deadletterqueue", "/$transfer/$deadletterqueue"):
            messages = await bus.peek_all(bus.address(path + below))
            found.update(each.envelope.body.decode() for each in messages)
    return found


async def no_message_in_transfer(administration: Administration, *paths: str) -> None:
    async def is_there() -> bool:
        return not any([(await administration.runtime(path)).transfer for path in paths])

    await wait_until(is_there)


@pytest.mark.parametrize("is_partitioned", [False, True])
async def test_a_queue_is_changed_under_load(store: Store, is_partitioned: bool) -> None:
    random = Random(7)
    async with administered(store, partition_count=3) as (administration, bus):
        for name in ("target", "dead"):
            await administration.put(a_queue(name, QueueProperties()), NEW)
        plain = QueueProperties(enable_partitioning=is_partitioned)
        await administration.put(a_queue("q", plain), NEW)
        load = Load(bus, seed=8)
        work = [asyncio.create_task(each) for each in (
            load.send("q"), load.send("q"), load.receive("q"), load.receive("q"),
        )]  # fmt: skip
        for _ in range(CHANGES):
            wanted = some_queue(random, is_partitioned)
            changed = await administration.put(a_queue("q", wanted), EXISTING)
            assert changed.properties == wanted
            await wait_a_moment()
        await administration.put(a_queue("q", plain), EXISTING)
        enough = len(load.accepted) + 20
        await wait_until(lambda: _has_sent(load, enough))
        load.stop()
        await asyncio.gather(*work)
        await no_message_in_transfer(administration, "q", "target", "dead")
        lying = await found_in(bus, "q", "target", "dead")
    assert set(load.why_refused) >= {Refusal.SEND_DISABLED, Refusal.ENTITY_DISABLED}
    assert load.ended, "no receiver was ended by a change"
    assert sum(load.completed.values()) > 20
    everything = load.completed + lying
    assert everything == Counter(load.accepted)
    assert not set(load.refused) & set(everything)


async def _has_sent(load: Load, count: int) -> bool:
    return len(load.accepted) >= count


def rule(name: str, text: str) -> RuleProperties:
    return RuleProperties(name=name, sql_filter=SqlFilter(sql_expression=text))


EVERYTHING: Final[tuple[tuple[RuleProperties, ...], ...]] = (
    (rule("$Default", "1=1"),),
    (rule("a", "color = 'red'"), rule("b", "color is null")),
    (rule("a", "sys.SessionId is null"), rule("b", "1=0"), rule("c", "x = 1 or not x = 1 or 1=1")),
)
"""Different rules that each select every message of the test."""


async def test_rules_and_subscriptions_are_changed_under_load(store: Store) -> None:
    random = Random(9)
    async with administered(store, partition_count=3) as (administration, bus):
        await administration.put(a_queue("target", QueueProperties()), NEW)
        await administration.put(a_topic("t", TopicProperties()), NEW)
        for name in ("all", "some", "away"):
            await administration.put(a_subscription("t", name, SubscriptionProperties()), NEW)
        load = Load(bus, seed=10)
        work = [asyncio.create_task(each) for each in (load.send("t"), load.send("t"))]
        for number in range(CHANGES):
            await administration.put(
                a_subscription(
                    "t",
                    "all",
                    SubscriptionProperties(max_delivery_count=random.randint(1, 9)),
                    EVERYTHING[number % len(EVERYTHING)],
                ),
                EXISTING,
            )
            path, mode = "t/Subscriptions/some", PutMode.ANY
            await administration.put_rule(path, rule("n", f"1={number % 2}"), mode=mode)
            if number == 1:
                await administration.delete_rule(path, "$Default")
            forward_to = random.choice([None, "target"])
            away = SubscriptionProperties(forward_to=forward_to, user_metadata=str(number))
            await administration.put(a_subscription("t", "away", away), EXISTING)
            await wait_a_moment()
        load.stop()
        await asyncio.gather(*work)
        paths = ("t/Subscriptions/away", "target")
        await no_message_in_transfer(administration, *paths)
        everything: Any = Counter(load.accepted)
        assert len(everything) > 100
        assert await found_in(bus, "t/Subscriptions/all") == everything
        assert await found_in(bus, *paths) == everything
        some = await found_in(bus, "t/Subscriptions/some")
    assert 0 < sum(some.values()) < len(everything)
    assert max(some.values()) == 1
    assert load.refused == []
