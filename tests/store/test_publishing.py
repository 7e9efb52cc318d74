"""Stages and writers in the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from postbus.entity.outcomes import DropDefinition
from postbus.store import publishing
from postbus.store.errors import Fenced
from postbus.store.postgres import Store
from postbus.store.publishing import (
    NUMBERS_OF_A_MS,
    PART_BYTES,
    SLOTS,
    STAGE_MS,
    Exhausted,
    Gone,
    Publication,
    PublishingStore,
    Sending,
    Stage,
    Stale,
    WriterState,
)
from tests.store.driving import NOW_MS, Driven, definition, driven, outcome, reload

ORDERS = 1


@dataclass
class Rig:
    """The tables of a partition that is owned."""

    it: Driven
    store: Store
    tables: PublishingStore

    @property
    def epoch(self) -> int:
        return self.it.journal.epoch

    async def stage(
        self, stage_no: int, count: int = 1, writer: str = "w", at_ms: int = NOW_MS,
        data: bytes = b"data",
    ) -> None:  # fmt: skip
        await self.tables.add(
            self.epoch, stage_no, ORDERS, writer, at_ms,
            message_count=count, size_bytes=100 * count, data=data,
        )  # fmt: skip

    async def publish(
        self, batch: int, *stages: int, writer: str = "w", at_ms: int = NOW_MS
    ) -> object:
        return await self.tables.publish(self.epoch, ORDERS, writer, batch, stages, None, at_ms)

    async def arrive(self, *stages: int) -> None:
        for stage_no in stages:
            await self.tables.arrived(self.epoch, stage_no)

    async def count(self, table: str) -> int:
        async with self.store.aside() as connection:
            return int(await connection.fetchval(f"select count(*) from partition_0.{table}"))


@pytest.fixture
async def rig(store: Store) -> AsyncIterator[Rig]:
    async with driven(store) as it:
        await it.commit(outcome(mutations=[definition()]))
        yield Rig(it, store, PublishingStore(store, 0))


async def test_large_stage_comes_back_as_it_was_sent(rig: Rig) -> None:
    data = bytes(range(256)) * (PART_BYTES // 100)
    await rig.stage(1, data=data)
    assert await rig.count("stage_part") == 3
    assert await rig.tables.data(1) == data
    assert await rig.tables.held_bytes(ORDERS) == (1, 100)


async def test_numbers_follow_the_order_of_the_request_and_rise_with_each_batch(rig: Rig) -> None:
    for stage_no, count in ((1, 3), (2, 2), (3, 1)):
        await rig.stage(stage_no, count)
    assert await rig.publish(4, 2, 1) == WriterState(4, 5, 5)
    first = NOW_MS * NUMBERS_OF_A_MS
    stages = [Stage(2, first, 2), Stage(1, first + 2, 3)]
    assert await rig.tables.stages(ORDERS, "w") == stages
    assert await rig.tables.publications() == [Publication(ORDERS, "w", 1, None)]
    await rig.arrive(2)
    assert await rig.tables.writer(ORDERS, "w") == WriterState(4, 5, 3)
    await rig.arrive(1)
    assert await rig.tables.publications() == []
    await rig.publish(5, 3, at_ms=NOW_MS - 60_000)
    assert await rig.tables.stages(ORDERS, "w") == [Stage(3, first + 5, 1)], "the clock went back"


async def test_numbers_after_a_restore_are_above_those_before(rig: Rig) -> None:
    """The store forgets what came after its backup; partitions elsewhere do not."""
    await rig.stage(1, 100)
    await rig.publish(1, 1)
    [before] = await rig.tables.stages(ORDERS, "w")
    await rig.arrive(1)
    assert await rig.tables.forget(rig.epoch, ORDERS, "w")
    await rig.stage(2)
    await rig.publish(1, 2, at_ms=NOW_MS + 1)
    [after] = await rig.tables.stages(ORDERS, "w")
    assert after.first_number > before.first_number + 100


async def test_batch_is_decided_once(rig: Rig) -> None:
    await rig.stage(1, 2)
    await rig.stage(2)
    await rig.publish(1, 1)
    assert await rig.publish(1, 1) == await rig.publish(1) == WriterState(1, 2, 2)
    assert await rig.publish(0, 2) == Stale(1, 2)
    assert await rig.publish(2, 2) == Sending(1, 2)
    await rig.arrive(1)
    assert await rig.publish(2, 1, 2) == Gone([1])
    assert await rig.publish(2, 2, 99) == Gone([99])
    assert await rig.tables.writer(ORDERS, "w") == WriterState(1, 2, 0)
    assert await rig.publish(2, 2) == WriterState(2, 1, 1)
    assert await rig.publish(1) == Stale(2, 1)


async def test_stage_of_another_writer_or_entity_is_gone(rig: Rig) -> None:
    await rig.stage(1, writer="other")
    assert await rig.publish(1, 1) == Gone([1])
    tables = rig.tables
    decided = await tables.publish(rig.epoch, 2, "other", 1, [1], None, NOW_MS)
    assert decided == Gone([1])


async def test_slots_are_reused_and_limited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(SLOTS + 1):
        await rig.stage(n, writer=f"w{n}")
    for n in range(SLOTS):
        assert isinstance(await rig.publish(1, n, writer=f"w{n}"), WriterState)
    assert {each.slot for each in await rig.tables.publications()} == set(range(1, SLOTS + 1))
    last = f"w{SLOTS}"
    assert isinstance(await rig.publish(1, SLOTS, writer=last), Exhausted)
    await rig.arrive(4)
    await rig.publish(1, SLOTS, writer=last)
    assert {each.writer: each.slot for each in await rig.tables.publications()}[last] == 5
    monkeypatch.setattr(publishing, "MAX_WRITERS", SLOTS + 1)
    assert isinstance(await rig.publish(1, writer="one too many"), Exhausted)
    assert isinstance(await rig.publish(2, writer="w4"), WriterState)


async def test_former_owner_changes_nothing(rig: Rig) -> None:
    await rig.stage(1)
    former = rig.epoch - 1
    with pytest.raises(Fenced):
        await rig.tables.publish(former, ORDERS, "w", 1, [1], None, NOW_MS)
    with pytest.raises(Fenced):
        await rig.tables.arrived(former, 1)
    with pytest.raises(Fenced):
        await rig.tables.add(
            former, 2, ORDERS, "w", NOW_MS, message_count=1, size_bytes=1, data=b""
        )
    with pytest.raises(Fenced):
        await rig.tables.abort(former, ORDERS, "w", [1])
    with pytest.raises(Fenced):
        await rig.tables.sweep(former, NOW_MS)
    assert await rig.tables.held_bytes(ORDERS) == (1, 100)
    assert await rig.tables.writer(ORDERS, "w") is None


async def test_sweep_removes_old_stages_that_nobody_published(rig: Rig) -> None:
    await rig.stage(1, at_ms=NOW_MS - STAGE_MS - 1)
    await rig.stage(2, at_ms=NOW_MS - STAGE_MS - 1, writer="published")
    await rig.stage(3, at_ms=NOW_MS - STAGE_MS + 1)
    await rig.publish(1, 2, writer="published")
    assert await rig.tables.sweep(rig.epoch, NOW_MS) == 1
    assert await rig.tables.sweep(rig.epoch, NOW_MS) == 0
    assert (await rig.count("stage"), await rig.count("stage_part")) == (2, 2)
    assert await rig.tables.data(2) == await rig.tables.data(3) == b"data"


async def test_what_writers_have_leaves_with_the_entity(rig: Rig) -> None:
    await rig.stage(1)
    await rig.stage(2)
    await rig.publish(1, 1)
    await rig.it.commit(outcome(mutations=[DropDefinition(ORDERS, 4)]))
    assert await rig.tables.sweep(rig.epoch, NOW_MS) == 2
    counts = [await rig.count(name) for name in ("stage", "stage_part", "writer")]
    assert counts == [0, 0, 0]


async def test_writer_is_not_forgotten_while_its_messages_are_to_arrive(rig: Rig) -> None:
    await rig.stage(1)
    await rig.stage(2)
    await rig.publish(1, 1)
    assert not await rig.tables.forget(rig.epoch, ORDERS, "w")
    await rig.arrive(1)
    assert await rig.tables.forget(rig.epoch, ORDERS, "w")
    assert (await rig.count("stage"), await rig.count("stage_part")) == (0, 0)
    assert not await rig.tables.forget(rig.epoch, ORDERS, "w")


async def test_load_knows_whose_messages_are_to_arrive(rig: Rig) -> None:
    await rig.stage(1)
    await rig.stage(2, writer="staged")
    await rig.publish(1, 1)
    await rig.publish(1, writer="empty")
    assert (await reload(rig.store)).awaited == {ORDERS: ["w"]}
