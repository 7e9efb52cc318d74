"""Reads of ranges: marks, forgotten blocks, dropped entities, and times."""

from __future__ import annotations

from struct import unpack

import pytest

from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import DropDefinition, PutDefinition, SettleRows, Settling
from postbus.store.bulk_reads import (
    CHUNK_BYTES,
    FIRST_ROWS,
    MAX_CHUNK_ROWS,
    NO_ENTITY,
    PART_ROWS,
    Block,
    BulkReader,
    next_limit,
)
from postbus.store.postgres import Store
from tests.store.driving import NOW_MS, block, driven, insert, outcome

ACTIVE, DEAD = SubQueue.ACTIVE, SubQueue.DEAD_LETTER


def define() -> PutDefinition:
    return PutDefinition(1, "orders", EntityKind.QUEUE, QueueProperties(), 3, 1)


async def test_a_dropped_entity_is_noticed_in_the_snapshot_of_the_rows(store: Store) -> None:
    reader = BulkReader(store, 0)
    async with driven(store) as it:
        await it.commit(outcome(mutations=[define()]))
        await it.commit(outcome([insert(key) for key in range(1, 7)]))
        wanted = Block(1, 7, 0)
        whole = await reader.read(1, ACTIVE, wanted, 100, with_properties=True, with_body=True)
        assert (whole.row_count, whole.low) == (6, 0)
        assert await reader.low_mark(1, ACTIVE) == 0
        await it.commit(outcome(mutations=[DropDefinition(1, 4)]))
        rest = await reader.read(1, ACTIVE, wanted, 100, with_properties=True, with_body=True)
        assert rest.low == NO_ENTITY
        assert await reader.low_mark(1, ACTIVE) == NO_ENTITY


async def test_a_time_finds_dead_letters_of_all_blocks(store: Store) -> None:
    """They are in order of their deaths: a block with old messages may follow one with new."""
    reader = BulkReader(store, 0)
    async with driven(store) as it:
        blocks = [block(first, 256, DEAD) for first in (1_000, 2_000, 3_000)]
        await it.commit(outcome(mutations=[define(), *blocks]))
        times = {1_000: 5, 1_001: 50, 2_000: 7, 3_000: 60}
        await it.commit(
            outcome([insert(key, enqueued_ms=NOW_MS + ms) for key, ms in times.items()])
        )
        for ms, position in ((0, 1_000), (8, 1_001), (51, 3_000), (61, 3_001)):
            found = await reader.position_at(1, DEAD, NOW_MS + ms, 3_001)
            assert found == position, ms


@pytest.mark.parametrize(
    ("body_bytes", "count", "measured"), [(10, 300, 1_000), (40_000, 300, 900), (400_000, 12, 100)]
)
async def test_few_rows_are_measured_and_not_read(
    store: Store, body_bytes: int, count: int, measured: int
) -> None:
    """A tap that reads what is settled knows no average size."""
    reader = BulkReader(store, 0)
    async with driven(store) as it:
        await it.commit(outcome(mutations=[define()]))
        await it.commit(outcome([insert(key, bytes(body_bytes)) for key in range(1, count + 1)]))
        first, limit, limits = 1, FIRST_ROWS, 0
        while first <= count:
            limits += limit
            rest = Block(first, count + 1, 0)
            read = await reader.read(1, ACTIVE, rest, limit, with_properties=True, with_body=True)
            assert len(read.bodies) < CHUNK_BYTES + body_bytes
            assert 0 < read.row_count <= limit <= MAX_CHUNK_ROWS
            first = read.last_position + 1
            limit = next_limit(limit, read)
        assert limits <= measured


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
async def test_rows_between_gaps_come_in_order(store: Store, limit: int) -> None:
    """An answer has parts of `PART_ROWS` keys: some begin, some end, and some are a gap."""
    keys = [1, PART_ROWS, PART_ROWS + 1, 3 * PART_ROWS, 3 * PART_ROWS + 1, 1_000, 1_001]
    reader = BulkReader(store, 0)
    async with driven(store) as it:
        await it.commit(outcome(mutations=[define()]))
        await it.commit(outcome([insert(key, b"%d" % key) for key in keys]))
        first, positions, bodies = 1, [], b""
        while True:
            rest = Block(first, 2_000, 0)
            read = await reader.read(1, ACTIVE, rest, limit, with_properties=True, with_body=True)
            if not read.last_position:
                break
            assert read.row_count <= limit
            positions += unpack(f">{read.row_count}q", read.positions)
            bodies += read.bodies
            first = read.last_position + 1
    assert positions == keys
    assert bodies == b"".join(b"%d" % key for key in keys)


async def test_a_drain_goes_on_behind_rows_that_are_left_out(store: Store) -> None:
    reader = BulkReader(store, 0)
    async with driven(store) as it:
        await it.commit(outcome(mutations=[define()]))
        await it.commit(outcome([insert(key) for key in range(1, 11)]))
        settled = SettleRows(1, list(range(1, 6)), Settling.COMPLETED, NOW_MS)
        await it.commit(outcome(mutations=[settled]))
        wanted = Block(1, 11, 0)
        found = []
        for _ in range(3):
            read = await reader.read(
                1, ACTIVE, wanted, 5, is_drain=True, with_properties=True, with_body=True
            )
            found.append((read.row_count, read.last_position))
            wanted = wanted._replace(first=read.last_position + 1)
    assert found == [(0, 5), (5, 10), (0, 0)]
