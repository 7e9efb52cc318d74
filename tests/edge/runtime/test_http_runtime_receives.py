"""The consumer of an HTTP receive, and a partition with answers at a late or bad moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from postbus.broker.address import Address
from postbus.broker.router import Router
from postbus.contract.entities import EntityKind, QueueProperties
from postbus.edge.runtime import receives as http_runtime_receives
from postbus.edge.runtime.receives import Receives
from postbus.entity.commands import (
    AddConsumer,
    Command,
    Delivery,
    DemandSet,
    Disposition,
    Done,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    Settle,
    SubQueue,
)
from postbus.message.envelope import Envelope

ADDRESS = Address(0, 5, SubQueue.ACTIVE, "orders", EntityKind.QUEUE, QueueProperties())
BODY = Envelope()


def delivery(number: int) -> Delivery:
    return Delivery(number.to_bytes(16, "big"), 0, number, 0, 0, None, BODY)


class Partition:
    """Takes commands as a router does; the test answers them."""

    def __init__(self) -> None:
        self.commands: list[tuple[Command, Callable[[Reply], None] | None]] = []
        self.sinks: dict[int, http_runtime_receives._Consumer] = {}
        self._ids = iter(range(1, 100))

    def new_consumer_id(self) -> int:
        return next(self._ids)

    def register_sink(
        self, _: int, consumer_id: int, sink: http_runtime_receives._Consumer
    ) -> None:
        self.sinks[consumer_id] = sink

    def unregister_sink(self, _: int, consumer_id: int) -> None:
        self.sinks.pop(consumer_id, None)

    def submit(
        self, _: int, command: Command, on_reply: Callable[[Reply], None] | None = None
    ) -> None:
        self.commands.append((command, on_reply))

    def next(self, kind: type[Command], reply: Reply | None = None) -> Command:
        """Return the next command, which is of a kind, and answer it."""
        command, on_reply = self.commands.pop(0)
        assert isinstance(command, kind), command
        if reply is not None and on_reply is not None:
            on_reply(reply)
        return command


class Receiving:
    """One connection that receives."""

    def __init__(self) -> None:
        self.partition = Partition()
        self.receives = Receives(cast("Router", self.partition), 2)

    async def start(
        self, timeout_s: float = 30, connection: object = "c"
    ) -> asyncio.Task[Delivery | Refused | None]:
        task = asyncio.create_task(self.receives.take(ADDRESS, timeout_s, connection))
        await asyncio.sleep(0)
        return task

    @property
    def sink(self) -> http_runtime_receives._Consumer:
        (sink,) = self.partition.sinks.values()
        return sink


@pytest.fixture
async def rig() -> Receiving:
    return Receiving()


async def test_a_kept_consumer_asks_for_one_more_each_time(rig: Receiving) -> None:
    partition = rig.partition
    task = await rig.start()
    partition.next(AddConsumer, Done())
    assert cast("SetDemand", partition.next(SetDemand, DemandSet(0))).limit == 1
    rig.sink.deliver([delivery(1)])
    assert await task == delivery(1)
    task = await rig.start()
    assert cast("SetDemand", partition.next(SetDemand)).limit == 2
    rig.sink.deliver([delivery(2)])
    assert await task == delivery(2)
    assert partition.commands == []


async def test_an_answer_to_an_earlier_receive_ends_no_later_one(rig: Receiving) -> None:
    partition = rig.partition
    task = await rig.start(0)
    partition.next(AddConsumer, Done())
    _, answer_late = partition.commands.pop(0)
    rig.sink.deliver([delivery(1)])
    assert await task == delivery(1)
    task = await rig.start(0)
    assert answer_late is not None
    answer_late(DemandSet(1))
    await asyncio.sleep(0)
    assert not task.done()
    partition.next(SetDemand, DemandSet(1))
    assert await task is None


async def test_a_delivery_without_a_waiting_receive_is_given_back(rig: Receiving) -> None:
    partition = rig.partition
    task = await rig.start(0)
    partition.next(AddConsumer, Done())
    partition.next(SetDemand, DemandSet(0))
    assert await task is None
    rig.sink.deliver([delivery(1), delivery(2)])
    assert partition.commands == []  # not while the partition works
    await asyncio.sleep(0)
    settle = cast("Settle", partition.next(Settle))
    assert settle.disposition is Disposition.RELEASE
    assert settle.lock_tokens == [delivery(1).lock_token, delivery(2).lock_token]
    await rig.start()
    assert cast("SetDemand", partition.next(SetDemand)).limit == 3


async def test_a_disconnect_at_the_moment_of_delivery_releases_the_message(rig: Receiving) -> None:
    partition = rig.partition
    task = await rig.start()
    partition.next(AddConsumer, Done())
    partition.next(SetDemand)
    rig.sink.deliver([delivery(1)])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cast("Settle", partition.next(Settle)).lock_tokens == [delivery(1).lock_token]
    partition.next(RemoveConsumer)
    assert partition.sinks == {}


async def test_a_partition_that_is_away_is_asked_again(
    rig: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_runtime_receives, "REPEAT_S", 0)
    partition = rig.partition
    task = await rig.start()
    away = Refused(Refusal.NOT_APPLIED)
    partition.next(AddConsumer, away)
    partition.next(SetDemand, Refused(Refusal.ENTITY_NOT_FOUND))  # it has no such consumer
    await wait_for_commands(partition, 3)
    partition.next(RemoveConsumer)
    partition.next(AddConsumer, Done())
    partition.next(SetDemand, Refused(Refusal.BUSY))
    await wait_for_commands(partition, 1)
    partition.next(SetDemand, DemandSet(0))
    rig.sink.deliver([delivery(1)])
    assert await task == delivery(1)


async def wait_for_commands(partition: Partition, count: int) -> None:
    async with asyncio.timeout(10):
        while len(partition.commands) < count:
            await asyncio.sleep(0.001)


async def test_no_message_is_answered_only_by_a_partition_that_answers(
    rig: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_runtime_receives, "LAST_LOOK_S", 0.01)
    silent = await (await rig.start(0.001))
    assert isinstance(silent, Refused)
    assert silent.refusal is Refusal.BUSY
    rig.partition.commands.clear()
    task = await rig.start(0.001)
    rig.partition.next(AddConsumer, Done())
    assert await task is None  # it is there, but cannot look just now


async def test_the_last_check_finds_available_messages(
    rig: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = rig.partition
    task = await rig.start(0.001)
    partition.next(AddConsumer, Done())
    assert not cast("SetDemand", partition.next(SetDemand, DemandSet(0))).is_drain
    await wait_for_commands(partition, 1)
    command, answer = partition.commands.pop(0)
    assert cast("SetDemand", command).is_drain
    rig.sink.deliver([delivery(1)])
    assert answer is not None
    answer(DemandSet(1))
    assert await task == delivery(1)


async def test_an_idle_kept_consumer_survives_an_end_and_a_reload(rig: Receiving) -> None:
    partition = rig.partition
    for happen in ("reset", "ended"):
        task = await rig.start(0)
        partition.next(AddConsumer, Done())
        partition.next(SetDemand, DemandSet(0))
        assert await task is None
        sink = rig.sink
        if happen == "reset":
            sink.reset()
        else:
            sink.ended(Refused(Refusal.RECEIVE_DISABLED))
        assert partition.commands == []
        task = await rig.start(0)
        partition.next(RemoveConsumer)
        partition.next(AddConsumer, Refused(Refusal.ENTITY_NOT_FOUND))
        refused = await task
        assert isinstance(refused, Refused)
        partition.commands.clear()


async def test_receives_are_counted(rig: Receiving) -> None:
    tasks = [await rig.start(connection=n) for n in range(2)]
    third = await rig.receives.take(ADDRESS, 30)
    assert isinstance(third, Refused)
    assert third.refusal is Refusal.BUSY
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert rig.receives._waiting == {}
    assert rig.partition.sinks == {}


async def test_a_stop_ends_all_waiting(rig: Receiving) -> None:
    task = await rig.start()
    rig.receives.stop()
    assert await task == http_runtime_receives.STOPPING
    assert await rig.receives.take(ADDRESS, 30) == http_runtime_receives.STOPPING
    assert rig.partition.sinks == {}
