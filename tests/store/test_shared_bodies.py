"""Bodies shared by several rows: stored once, never lost, never left behind (ADR 7)."""

from __future__ import annotations

import struct

import asyncpg
import pytest

from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import (
    DropDefinition,
    InsertMessage,
    MoveMessage,
    Outcome,
    ReserveBlock,
    ShareBody,
)
from postbus.message.envelope import Envelope
from postbus.store.journal import Journal
from postbus.store.postgres import Store
from postbus.store.shared import REMOVED_AT_ONCE, BodyCounts
from postbus.store.staging import stage_bodies
from tests.store.driving import (
    HELD_MS,
    NOW_MS,
    Driven,
    block,
    connected,
    definition,
    driven,
    envelope,
    holding,
    insert,
    open_driven,
    outcome,
    wait_until,
)

BODIES = [b"small", bytes(20_000), bytes(3 << 20)]
SECOND_KEY = 2_000_000
SECOND_BLOCK = ReserveBlock(SECOND_KEY, 65_536, 1, SubQueue.ACTIVE, 1_000_001)
DEAD_KEY = 3_000_000
DEAD_BLOCK = block(DEAD_KEY, 256, SubQueue.DEAD_LETTER)
OUTBOX_KEY = 4_000_000
OUTBOX_BLOCK = ReserveBlock(OUTBOX_KEY, 256, 0, SubQueue.OUTBOX, 0)
BLOCKS = [SECOND_BLOCK, DEAD_BLOCK, OUTBOX_BLOCK]
TABLES = ("message", "body", "shared", "embodied", "staged", "kept", "outbound")


def publish(row_keys: list[int], body: bytes = b"hello", enqueued_ms: int = NOW_MS) -> Outcome:
    """Return the outcome of a topic: one envelope in several rows."""
    shared = envelope(body, application_properties=b"app")
    rows = [InsertMessage(key, enqueued_ms, shared) for key in row_keys]
    return outcome(rows, mutations=[ShareBody(row_keys)])


def dead_letter(row_key: int, new_key: int) -> MoveMessage:
    return MoveMessage(row_key, new_key, 1, SubQueue.DEAD_LETTER, row_key, 3, None, None)


async def counts(look: asyncpg.Connection[asyncpg.Record]) -> dict[str, int]:
    """Return table -> number of rows, without empty tables; `body` counts bodies, not chunks."""
    found = {table: await look.fetchval(f"select count(*) from {table}") for table in TABLES}
    found["body"] = await look.fetchval("select count(distinct body_id) from body")
    return {table: count for table, count in found.items() if count}


async def swept(journal: Journal[object], look: asyncpg.Connection[asyncpg.Record]) -> bool:
    """Run the upkeep and return whether all tables are empty."""
    await journal.upkeep(NOW_MS)
    return not await counts(look)


async def assert_empties(
    it: Driven, look: asyncpg.Connection[asyncpg.Record], row_keys: list[int]
) -> None:
    await it.commit(outcome(deletes=row_keys))

    async def is_empty() -> bool:
        return await swept(it.journal, look)

    await wait_until(is_empty)


@pytest.mark.parametrize("body", BODIES, ids=len)
async def test_body_is_stored_once_and_read_by_every_row(
    store: Store, database: str, body: bytes
) -> None:
    keys = [1, SECOND_KEY, SECOND_KEY + 1]
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[*BLOCKS]))
        await it.commit(publish(keys, body))
        assert await counts(look) == {"message": 3, "body": 1, "shared": 1}
        assert await look.fetchval("select sum(octet_length(data)) from body") == len(body)
        rows = await it.journal.read_rows(keys)
        assert [row.envelope.body for row in rows] == [body] * 3
        assert [row.envelope.application_properties for row in rows] == [b"app"] * 3
        await it.commit(outcome(deletes=keys[:1]))
        await it.commit(outcome(deletes=keys[1:2]))
        [row] = await it.journal.read_rows(keys)
        assert row.envelope.body == body
        await assert_empties(it, look, keys[2:])


async def test_later_commits_remove_small_bodies_without_references(
    store: Store, database: str
) -> None:
    body = BODIES[0]
    async with driven(store) as it, connected(database) as look:
        await it.commit(publish([1, 2], body), publish([3, 4], body), publish([5, 6], body))
        await it.commit(outcome(deletes=[1, 2]))
        await it.commit(outcome(deletes=[3, 4, 5]))
        assert (await counts(look))["body"] == 2
        await it.commit(publish([7, 8], body))
        assert await counts(look) == {"message": 3, "body": 2, "shared": 2}
        [row, *_] = await it.journal.read_rows([6])
        assert row.envelope.body == body


async def test_counts_survive_a_reload(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[*BLOCKS]))
        await it.commit(*(publish([key, key + 100, SECOND_KEY + key]) for key in range(1, 51)))
        await it.commit(outcome(deletes=list(range(1, 26))))
        await it.commit(outcome(mutations=[dead_letter(101, DEAD_KEY)]))
    for deleted in (range(26, 51), range(102, 151), range(SECOND_KEY + 1, SECOND_KEY + 26)):
        async with driven(store) as it, connected(database) as look:
            await it.commit(outcome(deletes=list(deleted)))
            left = await it.journal.read_range(0, DEAD_KEY + 256, 1_000)
            assert {row.envelope.body for row in left} == {b"hello"}
            assert len(left) == await look.fetchval("select count(*) from message")
            assert await look.fetchval("select count(*) from shared") >= 25
    async with driven(store) as it, connected(database) as look:
        await assert_empties(it, look, [*range(SECOND_KEY + 26, SECOND_KEY + 51), DEAD_KEY])


def test_many_bodies_at_once_are_removed_by_several_commits() -> None:
    bodies = BodyCounts()
    body_ids = list(range(1, 2 * REMOVED_AT_ONCE + 2))
    for body_id in body_ids:
        bodies.add(body_id, 1, 1, len(body_ids))
    bodies.release(struct.pack(f">{len(body_ids)}q", *body_ids))
    parts = [bodies.take_dead() for _ in range(4)]
    assert [len(part) for part in parts] == [REMOVED_AT_ONCE, REMOVED_AT_ONCE, 1, 0]
    assert [body_id for part in parts for body_id in part] == body_ids


async def test_bodies_that_outlived_their_entity_require_another_load(
    store: Store, database: str
) -> None:
    it = await open_driven(store)
    async with connected(database) as look:
        await it.commit(outcome(mutations=[definition(), block()]), publish([1, 2]))
        await it.commit(outcome([insert(3, BODIES[2])]))
        await stage_bodies(store, 0, it.journal.epoch, [(4, BODIES[2])])  # no commit comes
        await it.commit(outcome(deletes=[1, 2, 3], mutations=[DropDefinition(1, 4)]))
        assert await counts(look) == {"body": 3, "shared": 1, "staged": 1}
        it.journal.abandon()
        assert await store.holds_anything(0)
        again = await open_driven(store)
        await again.journal.upkeep(NOW_MS)
        assert await counts(look) == {}
        await again.journal.close()
        assert not await store.holds_anything(0)


async def test_bodies_left_by_a_crash_are_deleted_after_the_next_load(
    store: Store, database: str
) -> None:
    it = await open_driven(store)
    async with connected(database) as look:
        await it.commit(outcome(mutations=[definition(), block()]), publish([1, 2]))
        await it.commit(outcome([insert(3, BODIES[1]), insert(4, BODIES[2])]))
        await it.commit(outcome(deletes=[1, 2, 3, 4]))
        assert await counts(look) == {"body": 3, "shared": 1}
        it.journal.abandon()
        async with driven(store) as again:
            await again.journal.upkeep(NOW_MS)
            assert await counts(look) == {}


@pytest.mark.parametrize("body", BODIES, ids=len)
async def test_shared_body_follows_its_rows(store: Store, database: str, body: bytes) -> None:
    """Dead-lettered, into the outbox, back into ACTIVE, over a reload each time."""
    async with driven(store) as it:
        await it.commit(outcome(mutations=[*BLOCKS]))
        await it.commit(publish([1, 2, 3], body))
        await it.commit(outcome(mutations=[dead_letter(1, DEAD_KEY)]), outcome(deletes=[2]))
    moves = [
        MoveMessage(DEAD_KEY, OUTBOX_KEY, 0, SubQueue.OUTBOX, 1, 3, None, None),
        MoveMessage(OUTBOX_KEY, 10, 1, SubQueue.ACTIVE, 10, 0, None, None),
        dead_letter(10, DEAD_KEY + 1),
        dead_letter(3, DEAD_KEY + 2),
    ]
    for move in moves:
        async with driven(store) as it:
            await it.commit(outcome(mutations=[move]))
            [row] = await it.journal.read_rows([move.new_row_key])
            assert row.envelope.body == body
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(deletes=[DEAD_KEY + 2]))
        [row] = await it.journal.read_rows([DEAD_KEY + 1])
        assert row.envelope.body == body
        await assert_empties(it, look, [DEAD_KEY + 1])


async def test_shared_body_moves_twice_without_a_reload(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[*BLOCKS]))
        await it.commit(publish([1, 2]))
        await it.commit(outcome(mutations=[dead_letter(1, DEAD_KEY)]))
        back = MoveMessage(DEAD_KEY, 10, 1, SubQueue.ACTIVE, 10, 0, None, None)
        await it.commit(outcome(mutations=[back]))
        await it.commit(outcome(deletes=[2]))
        assert await counts(look) == {"message": 1, "body": 1, "shared": 1, "embodied": 1}
        await assert_empties(it, look, [10])


async def test_rows_received_at_once_do_not_count(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(mutations=[*BLOCKS]))
        for keys, passing in (([1, 2, 3], [1]), ([4, 5], [4, 5]), ([6, 7], [7])):
            one = publish(keys)
            one.deletes += passing
            await it.commit(one)
        assert await counts(look) == {"message": 3, "body": 2, "shared": 2}
        [first, *_, last] = await it.journal.read_rows([2, 3, 6])
        assert (first.envelope.body, last.envelope.body) == (b"hello", b"hello")
        await assert_empties(it, look, [2, 3, 6])


async def test_unshared_large_bodies_lie_beside_shared_ones(store: Store, database: str) -> None:
    large = bytes(50_000)
    async with driven(store) as it, connected(database) as look:
        both = publish([1, 2], large)
        both.inserts += [insert(3, large), insert(4, b"small")]
        await it.commit(both, outcome([insert(5, large)]))
        assert await counts(look) == {"message": 5, "body": 3, "shared": 1}
        rows = await it.journal.read_rows([1, 2, 3, 4, 5])
        assert [len(row.envelope.body) for row in rows] == [50_000, 50_000, 50_000, 5, 50_000]
        await it.commit(outcome(deletes=[1, 3]))
        await it.journal.upkeep(NOW_MS)
        assert await counts(look) == {"message": 3, "body": 2, "shared": 1}
        await assert_empties(it, look, [2, 4, 5])


async def test_copies_with_envelopes_of_their_own_share_the_body(store: Store) -> None:
    rows = [
        InsertMessage(1, NOW_MS, envelope(b"hello")),
        InsertMessage(2, NOW_MS, Envelope(body=b"hello", size_bytes=5, ttl_ms=1_000)),
    ]
    async with driven(store) as it:
        await it.commit(outcome(rows, mutations=[ShareBody([1, 2])]))
        first, second = await it.journal.read_rows([1, 2])
    assert (first.envelope.ttl_ms, second.envelope.ttl_ms) == (None, 1_000)
    assert (first.envelope.body, second.envelope.body) == (b"hello", b"hello")


async def test_shared_body_counts_once_against_the_bytes_of_a_commit(store: Store) -> None:
    async with driven(store) as it:
        body = bytes(300_000)
        await it.commit(*(publish(list(range(n, n + 100)), body) for n in range(100, 400, 100)))
        assert it.seen.batches == [3]
        assert it.journal.queued_bytes == 0


# --- two commits in flight ------------------------------------------------------------------------


async def test_publishes_and_deletes_of_their_rows_overlap(store: Store, database: str) -> None:
    """The last two references are released by two commits in flight, the later one first."""
    async with driven(store) as it, holding(database) as hold, connected(database) as look:
        await it.commit(publish([1, 2]))
        held = outcome([insert(50, enqueued_ms=HELD_MS)], [1])
        it.journal.submit(held, "first")
        await hold.wait_held()
        filling = [insert(key) for key in range(100, 250)]
        it.journal.submit(outcome(filling, [2]), "second")

        async def is_second_done() -> bool:
            return bool(await look.fetchval("select count(*) = 1 from message where row_key = 100"))

        await wait_until(is_second_done)
        assert await counts(look) == {"message": 151, "body": 1, "shared": 1}
        await it.journal.upkeep(NOW_MS)
        [row] = await it.journal.read_rows([1])
        assert row.envelope.body == b"hello"
        await hold.end()
        await it.seen.wait_released(3)
        await assert_empties(it, look, [50, *range(100, 250)])


async def test_publish_overlaps_a_commit_in_flight(store: Store, database: str) -> None:
    async with driven(store) as it, holding(database) as hold, connected(database) as look:
        it.journal.submit(outcome([insert(50, enqueued_ms=HELD_MS)]), "first")
        await hold.wait_held()
        it.journal.submit(publish(list(range(100, 250))), "second")

        async def is_second_done() -> bool:
            return (await counts(look)).get("message") == 150

        await wait_until(is_second_done)
        assert await counts(look) == {"message": 150, "body": 1, "shared": 1}
        await hold.end()
        await it.seen.wait_released(2)
        assert await counts(look) == {"message": 151, "body": 1, "shared": 1}


async def test_body_is_not_lost_when_the_first_of_two_commits_fails(
    store: Store, database: str
) -> None:
    it = await open_driven(store)
    async with holding(database) as hold, connected(database) as look:
        await it.commit(outcome(mutations=[definition(), block()]), publish([1, 2]))
        it.journal.submit(outcome([insert(50, enqueued_ms=HELD_MS)], [1]), "first")
        [pid] = await hold.wait_held()
        it.journal.submit(outcome([insert(key) for key in range(100, 250)], [2]), "second")

        async def is_second_done() -> bool:
            return bool(await look.fetchval("select count(*) = 1 from message where row_key = 100"))

        await wait_until(is_second_done)
        await look.execute("select pg_terminate_backend($1)", pid)
        await it.seen.wait_failed()
        await hold.end()
    async with driven(store) as again, connected(database) as look:
        [row] = await again.journal.read_rows([1])
        assert row.envelope.body == b"hello"
        await assert_empties(again, look, [1, *range(100, 250)])
