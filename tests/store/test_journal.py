"""Group commit: order, batches, overlap, barriers, replies without a write, large bodies."""

from __future__ import annotations

import asyncio
import os

import pytest

from postbus.entity.commands import Refusal, SubQueue
from postbus.entity.outcomes import InsertMessage, PatchMessage, RecordAcquired
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from tests.store.driving import (
    HELD_MS,
    NOW_MS,
    block,
    connected,
    definition,
    driven,
    envelope,
    holding,
    insert,
    open_driven,
    outcome,
    reload,
    wait_until,
)

COUNT = "select count(*) from message"


async def test_outcomes_submitted_together_are_released_in_order_after_one_commit(
    store: Store,
) -> None:
    async with driven(store) as it:
        for number in range(50):
            it.journal.submit(outcome([insert(1 + number)]), number)
        await it.seen.wait_released(50)
        assert it.seen.released == list(range(50))
        assert it.seen.batches == [50]


async def test_commit_holds_about_four_hundred_rows_and_never_splits_an_outcome(
    store: Store,
) -> None:
    async with driven(store) as it:
        await it.commit(
            outcome([insert(key) for key in range(1, 301)]),
            outcome([insert(key) for key in range(301, 601)]),
            outcome([insert(key) for key in range(1001, 2001)]),
        )
        assert it.seen.batches == [1, 1, 1]


async def test_commit_holds_about_a_megabyte(store: Store) -> None:
    body = os.urandom(8_000)
    async with driven(store) as it:
        await it.commit(*(outcome([insert(1 + number, body)]) for number in range(300)))
        assert max(it.seen.batches) == (1 << 20) // 8_000


async def test_outcomes_submitted_during_a_commit_join_the_next(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold:
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "first")
        await hold.wait_held()
        for key in range(2, 30):
            it.journal.submit(outcome([insert(key)]), key)
        await hold.end()
        await it.seen.wait_released(29)
        assert it.seen.batches == [1, 28]


async def test_second_plain_commit_overlaps_the_first_and_is_released_after_it(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold, connected(database) as look:
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "first")
        await hold.wait_held()
        for key in range(2, 32):
            it.journal.submit(outcome([insert(key)]), key)

        async def is_second_durable() -> bool:
            return bool(await look.fetchval(COUNT) == 30)

        await wait_until(is_second_durable)
        assert it.seen.released == []
        await hold.end()
        await it.seen.wait_released(31)
        assert it.seen.released == ["first", *range(2, 32)]


@pytest.mark.parametrize(("row_count", "other_commits"), [(29, 0), (99, 1)])
async def test_few_waiting_rows_start_no_second_commit(
    store: Store, database: str, row_count: int, other_commits: int
) -> None:
    async with driven(store) as it, holding(database) as hold:
        store.commits_begun += other_commits
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "first")
        await hold.wait_held()
        for key in range(2, row_count + 2):
            it.journal.submit(outcome([insert(key)]), key)
        await hold.wait_held()
        writers = "select count(*) from pg_stat_activity where application_name ~ 'writer'"
        assert await hold.connection.fetchval(f"{writers} and datname = current_database()") == 1
        await hold.end()
        await it.seen.wait_released(row_count + 1)


async def test_a_small_commit_grows_for_some_rounds_while_other_partitions_commit(
    store: Store,
) -> None:
    async with driven(store) as it:
        store.commits_under_way += 2
        for key in (1, 2, 3):
            it.journal.submit(outcome([insert(key)]), key)
            await asyncio.sleep(0)
        await it.seen.wait_released(3)
        assert it.seen.batches == [3]
        it.journal.submit(outcome([insert(key) for key in range(100, 200)]), "large")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        it.journal.submit(outcome([insert(4)]), "later")
        await it.seen.wait_released(5)
        assert it.seen.batches == [3, 1, 1]


async def test_a_small_commit_does_not_wait_while_it_is_alone(store: Store) -> None:
    async with driven(store) as it:
        store.commits_under_way += 1
        it.journal.submit(outcome([insert(1)]), "first")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        it.journal.submit(outcome([insert(2)]), "later")
        await it.seen.wait_released(2)
        assert it.seen.batches == [1, 1]


async def test_commits_under_way_are_counted_until_they_are_durable(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold:
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "held")
        await hold.wait_held()
        assert store.commits_under_way == 1
        await hold.end()
        await it.seen.wait_released(1)
        assert store.commits_under_way == 0


async def test_a_journal_that_fails_while_a_commit_grows_reports_not_applied(
    store: Store,
) -> None:
    async with driven(store) as it:
        store.commits_under_way += 2
        it.journal.submit(outcome([insert(1)]), "lost")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        it.journal.fail(StoreUnavailable("a fault"))
        assert it.seen.failed == [("lost", Refusal.NOT_APPLIED)]
    assert (await reload(store)).keys.get((1, SubQueue.ACTIVE), []) == []


@pytest.mark.parametrize("kind", ["mutation", "touches_uncommitted"])
async def test_barrier_waits_for_the_commit_in_flight(
    store: Store, database: str, kind: str
) -> None:
    async with driven(store) as it, holding(database) as hold, connected(database) as look:
        # Open the second writer first, so that only the barrier keeps it from starting.
        it.journal.submit(outcome([insert(900_000, enqueued_ms=HELD_MS)]), "warm")
        await hold.wait_held()
        it.journal.submit(outcome([insert(900_001 + number) for number in range(100)]), "warm")

        async def has_second_committed() -> bool:
            return bool(await look.fetchval(COUNT) == 100)

        await wait_until(has_second_committed)
        await hold.end()
        await it.seen.wait_released(2)
        await hold.begin()
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "first")
        await hold.wait_held()
        if kind == "mutation":
            barrier = outcome([insert(2)], mutations=[RecordAcquired([900_000], [1])])
        else:
            barrier = outcome([insert(2)], [1], touches_uncommitted=True)
        it.journal.submit(barrier, "barrier")
        it.journal.submit(outcome([insert(10 + number) for number in range(200)]), "after")
        for _ in range(30):
            assert await look.fetchval(COUNT) == 101
        await hold.end()
        await it.seen.wait_released(5)
        assert it.seen.released[2:] == ["first", "barrier", "after"]


async def test_delete_of_a_row_queued_just_before_comes_in_a_later_commit(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(
            outcome([insert(1), insert(2)]), outcome(deletes=[1], touches_uncommitted=True)
        )
        assert it.seen.batches == [1, 1]
    assert list((await reload(store)).keys[1, SubQueue.ACTIVE]) == [2]


async def test_row_that_comes_and_goes_in_one_outcome_is_never_written(store: Store) -> None:
    async with driven(store) as it:
        await it.commit(outcome([insert(1), insert(2)], [1], touches_uncommitted=True))
    assert list((await reload(store)).keys[1, SubQueue.ACTIVE]) == [2]


async def test_patch_and_later_delete_of_a_row_do_not_share_a_commit(
    store: Store, database: str
) -> None:
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome([insert(1)]))
        it.seen.batches.clear()
        await it.commit(
            outcome(mutations=[PatchMessage(1, True, None, None)]), outcome(deletes=[1])
        )
        assert it.seen.batches == [1, 1]
        assert await look.fetchval("select count(*) from patch") == 0


async def test_reply_without_a_write_is_released_after_the_commit_before_it(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold:
        it.journal.submit(outcome([insert(1, enqueued_ms=HELD_MS)]), "write")
        await hold.wait_held()
        it.journal.submit(outcome(), "reply")
        assert not it.journal.is_idle
        await hold.end()
        await it.seen.wait_released(2)
        assert it.seen.released == ["write", "reply"]
        it.journal.submit(outcome(), "alone")
        await it.seen.wait_released(3)


async def test_queued_bytes_count_until_released(store: Store, database: str) -> None:
    async with driven(store) as it, holding(database) as hold:
        it.journal.submit(outcome([insert(1, bytes(5_000), HELD_MS)]), None)
        await hold.wait_held()
        it.journal.submit(outcome([insert(2, bytes(7_000))]), None)
        assert it.journal.queued_bytes == 12_000
        assert not it.journal.is_congested
        for key in range(3, 13):
            it.journal.submit(outcome([insert(key, bytes(5 << 20))]), None)
        assert it.journal.is_congested
        await hold.end()
        await it.seen.wait_released(12)
        assert (it.journal.queued_bytes, it.journal.is_congested) == (0, False)
        assert it.journal.is_idle


@pytest.mark.parametrize("size", [8_192, 8_193, 1 << 20, (1 << 20) + 1, (5 << 20) + 17])
async def test_body_of_any_size_is_read_back(store: Store, database: str, size: int) -> None:
    body = os.urandom(size)
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome([insert(1), insert(2, body), insert(3)]))
        rows = await it.journal.read_rows([3, 2])
        assert [row.row_key for row in rows] == [2, 3]
        assert rows[0].envelope.body == body
        assert await look.fetchval("select count(*) from staged") == 0
        assert await look.fetchval("select count(*) from body") == (
            0 if size <= 8_192 else -(-size >> 20)
        )
        await it.commit(outcome(deletes=[2]))
        await it.journal.upkeep(NOW_MS)
        assert await look.fetchval("select count(*) from body") == 0


async def test_a_row_whose_body_went_during_the_read_is_left_out(
    store: Store, database: str
) -> None:
    """The two are read by two statements: the message was completed between them."""
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome([insert(1), insert(2, bytes(9_000))]))
        await look.execute("delete from body")
        assert [row.row_key for row in await it.journal.read_rows([1, 2])] == [1]


async def test_staged_body_keeps_the_order_of_outcomes(store: Store) -> None:
    async with driven(store) as it:
        it.journal.submit(outcome([insert(1, bytes(3 << 20))]), "large")
        it.journal.submit(outcome([insert(2)]), "small")
        await it.seen.wait_released(2)
        assert it.seen.released == ["large", "small"]


async def test_body_staged_without_its_commit_is_removed_after_the_next_load(
    store: Store, database: str
) -> None:
    async with driven(store) as it, holding(database) as hold:
        it.journal.submit(outcome([InsertMessage(1, HELD_MS, envelope(bytes(2 << 20)))]), None)
        [pid] = await hold.wait_held()
        assert await hold.connection.fetchval("select count(*) from body") == 2
        await hold.connection.execute("select pg_terminate_backend($1)", pid)
        await it.seen.wait_failed()
        async with driven(store) as again:
            await again.journal.upkeep(NOW_MS)
        assert await hold.connection.fetchval("select count(*) from body") == 0
        assert await hold.connection.fetchval("select count(*) from staged") == 0


async def test_one_busy_queue_uses_at_most_four_connections(store: Store, database: str) -> None:
    async with driven(store) as it, connected(database) as look:
        outcomes = [outcome([insert(1 + number)]) for number in range(5_000)]
        await it.commit(*outcomes)
        await it.journal.read_rows([1])
        await it.journal.upkeep(NOW_MS)
        count = await look.fetchval(
            "select count(*) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() "
            "and backend_type = 'client backend'"
        )
        assert count <= 4


async def test_close_commits_queued_outcomes(store: Store) -> None:
    it = await open_driven(store)
    it.journal.submit(outcome(mutations=[definition(), block()]), 1)
    it.journal.submit(outcome([insert(1)]), 2)
    await it.journal.close()
    assert it.seen.released == [1, 2]
    loaded = await reload(store)
    assert list(loaded.keys[1, SubQueue.ACTIVE]) == [1]
