"""Deletes of one transaction of a partition are bounded by their bytes (ADR 20).

A commit that takes longer than the writers' statement timeout costs a reload of its partition, and
the duration of a delete depends on the bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import (
    DropDefinition,
    ForgetIds,
    InsertMessage,
    MoveMessage,
    Mutation,
    Outcome,
    PatchMessage,
    PutDefinition,
    PutSessionState,
    RecordAcquired,
    SettleRows,
    Settling,
    ShareBody,
)
from postbus.store import sweep as sweep_module
from postbus.store import upkeep as upkeep_module
from postbus.store.batch import BATCH_BYTES, INLINE_BODY_BYTES, extra_bytes
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store
from postbus.store.upkeep_limits import UpkeepLimits
from tests.store.driving import (
    NOW_MS,
    Driven,
    block,
    connected,
    definition,
    driven,
    envelope,
    insert,
    open_driven,
    outcome,
    wait_until,
)

LARGE = 300_000
CHUNK = 1 << 20
COUNT = 40
COUNTING = """
create table deleted (transaction_id xid8, table_name text, bytes bigint, writer text);
create function note_deleted() returns trigger language plpgsql as $$
begin
    execute format(
        'insert into partition_0.deleted select pg_current_xact_id(), %L, '
        'coalesce(sum(octet_length(%I)), 0), current_setting(''application_name'') from gone',
        tg_table_name, tg_argv[0]
    );
    return null;
end
$$;
"""
COLUMNS = {"body": "data", "session": "state", "seen": "digests"}


@dataclass
class Deleted:
    """Bytes that each transaction deleted: commits of the journal, and those beside them."""

    commits: list[int]
    beside: list[int]


Look: TypeAlias = Callable[[], Awaitable[Deleted]]


@asynccontextmanager
async def counting(database: str) -> AsyncIterator[Look]:
    """Count the deletes of each transaction; yield a function that returns `Deleted`."""
    async with connected(database) as look:
        await look.execute(COUNTING)
        for table, column in COLUMNS.items():
            await look.execute(
                f"create trigger noted after delete on {table} referencing old table as gone "
                f"for each statement execute function note_deleted('{column}')"
            )

        async def deleted() -> Deleted:
            rows = await look.fetch(
                "select writer like 'postbus writer%' as is_commit, sum(bytes)::bigint as bytes "
                "from deleted group by transaction_id, 1 having sum(bytes) > 0"
            )
            return Deleted(
                [row["bytes"] for row in rows if row["is_commit"]],
                [row["bytes"] for row in rows if not row["is_commit"]],
            )

        yield deleted


def publish(row_keys: list[int], size: int = LARGE) -> Outcome:
    shared = envelope(bytes(size))
    rows = [InsertMessage(key, NOW_MS, shared) for key in row_keys]
    return outcome(rows, mutations=[ShareBody(row_keys)])


async def settled_at_once(it: Driven) -> None:
    await it.commit(*(outcome([insert(key, bytes(LARGE))]) for key in range(1, COUNT + 1)))
    await it.commit(outcome(deletes=list(range(1, COUNT + 1))))


async def settled_by_all_sharers(it: Driven) -> None:
    await it.commit(*(publish([key, key + 100]) for key in range(1, COUNT + 1)))
    await it.commit(outcome(deletes=list(range(1, COUNT + 1))))
    await it.commit(outcome(deletes=list(range(101, COUNT + 101))))
    await it.commit(outcome([insert(500)]))


async def dead_lettered_and_settled(it: Driven) -> None:
    await it.commit(*(outcome([insert(key, bytes(LARGE))]) for key in range(1, COUNT + 1)))
    moves: list[Mutation] = [
        MoveMessage(key, 5_000 + key, 1, SubQueue.DEAD_LETTER, key, 0, None, None)
        for key in range(1, COUNT + 1)
    ]
    await it.commit(outcome(mutations=[block(5_000, 256, SubQueue.DEAD_LETTER), *moves]))
    await it.commit(outcome(deletes=list(range(5_001, 5_001 + COUNT))))


async def kept_for_a_while(it: Driven) -> None:
    history = QueueProperties(history_retention_ms=60_000)
    await it.commit(
        outcome(mutations=[PutDefinition(1, "orders", EntityKind.QUEUE, history, 4, 1)])
    )
    keys = list(range(1, COUNT + 1))
    await it.commit(*(outcome([insert(key, bytes(LARGE))]) for key in keys))
    await it.commit(
        outcome(mutations=[SettleRows(1, keys, Settling.COMPLETED, NOW_MS - 3_600_000)])
    )


WAYS = [settled_at_once, settled_by_all_sharers, dead_lettered_and_settled, kept_for_a_while]


@pytest.mark.parametrize("die", WAYS, ids=lambda way: way.__name__)
async def test_large_bodies_are_deleted_outside_commits_in_bounded_steps(
    store: Store, database: str, die: Callable[[Driven], Awaitable[None]]
) -> None:
    async with driven(store) as it, counting(database) as deleted:
        await die(it)
        await it.journal.upkeep(NOW_MS)
        gone = await deleted()
    assert gone.commits == []
    assert sum(gone.beside) == COUNT * LARGE
    assert max(gone.beside) <= sweep_module.SWEEP_BYTES + CHUNK


async def test_bodies_left_by_a_crash_are_deleted_in_bounded_steps(
    store: Store, database: str
) -> None:
    it = await open_driven(store)
    await it.commit(outcome(mutations=[definition(), block()]))
    await settled_at_once(it)
    it.journal.abandon()
    async with counting(database) as deleted, driven(store) as again:
        assert (await deleted()).commits == []
        await again.journal.upkeep(NOW_MS)
        gone = await deleted()
    assert gone.commits == []
    assert sum(gone.beside) == COUNT * LARGE
    assert max(gone.beside) <= sweep_module.SWEEP_BYTES + CHUNK


async def test_many_dead_bodies_do_not_wait_for_the_upkeep(store: Store, database: str) -> None:
    async with driven(store) as it, counting(database) as deleted:
        count = sweep_module.SWEEP_AT
        size = INLINE_BODY_BYTES + 1
        await it.commit(*(outcome([insert(key, bytes(size))]) for key in range(1, count + 1)))
        await it.commit(outcome(deletes=list(range(1, count + 1))))

        async def are_gone() -> bool:
            return sum((await deleted()).beside) == count * size

        await wait_until(are_gone)


async def test_removal_that_fails_waits_for_the_upkeep(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each commit of an outage would try it again, and log it."""
    tries: list[int] = []

    async def fail(*_: object) -> int:
        tries.append(1)
        raise StoreUnavailable("no room")

    async with driven(store) as it, counting(database) as deleted:
        keys = range(1, sweep_module.SWEEP_AT + 1)
        await it.commit(*(outcome([insert(key, bytes(LARGE))]) for key in keys))
        with monkeypatch.context() as away:
            away.setattr(upkeep_module, "sweep_some", fail)
            await it.commit(outcome(deletes=list(keys)))

            async def was_tried() -> bool:
                return bool(tries)

            await wait_until(was_tried)
            for key in range(1_001, 1_006):
                await it.commit(outcome([insert(key)]))
        assert len(tries) == 1
        await it.journal.upkeep(NOW_MS)
        assert sum((await deleted()).beside) == len(keys) * LARGE


async def test_body_above_the_deletion_limit_is_deleted_in_parts(
    store: Store, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remaining part is found again after a crash."""
    monkeypatch.setattr(sweep_module, "SWEEP_BYTES", CHUNK)
    it = await open_driven(store)
    async with counting(database) as deleted, connected(database) as look:
        await it.commit(outcome(mutations=[definition(), block()]))
        await it.commit(outcome([insert(1, bytes(5 * CHUNK))]), publish([2, 3], 5 * CHUNK))
        await it.commit(outcome(deletes=[1, 2, 3]))
        bodies = it.journal._sides.bodies
        assert await sweep_module.sweep_some(store, 0, it.journal.epoch, bodies) == 0
        it.journal.abandon()
        async with driven(store) as again:
            await again.journal.upkeep(NOW_MS)
        gone = await deleted()
        assert gone.beside == [CHUNK] * 10
        for table in ("body", "shared", "staged"):
            assert await look.fetchval(f"select count(*) from {table}") == 0, table


async def test_small_shared_bodies_are_deleted_by_the_next_commit(
    store: Store, database: str
) -> None:
    async with driven(store) as it, counting(database) as deleted:
        for size in (INLINE_BODY_BYTES, INLINE_BODY_BYTES + 1):
            await it.commit(publish([size, size + 10_000], size))
            await it.commit(outcome(deletes=[size, size + 10_000]))
        await it.commit(publish([1, 2]))
        assert await deleted() == Deleted([INLINE_BODY_BYTES], [])


async def test_session_states_of_a_dropped_queue_are_deleted_in_bounded_steps(
    store: Store, database: str
) -> None:
    async with driven(store) as it, counting(database) as deleted:
        states = [
            PutSessionState(1, b"%d" % number, bytes(LARGE), NOW_MS) for number in range(COUNT)
        ]
        await it.commit(*(outcome(mutations=[state]) for state in states))
        await it.commit(outcome(mutations=[DropDefinition(1, 9)]))
        await it.journal.upkeep(NOW_MS)
        gone = await deleted()
    assert gone.commits == []
    assert sum(gone.beside) == COUNT * LARGE
    assert max(gone.beside) <= UpkeepLimits().reap_state_bytes + LARGE


@pytest.mark.slow
async def test_a_commit_deletes_a_bounded_number_of_forgotten_ids(
    store: Store, database: str
) -> None:
    rows, size = 12_000, 160
    async with driven(store) as it, counting(database) as deleted, connected(database) as look:
        await look.execute(
            "insert into seen (entity_no, first_ms, last_ms, digests) "
            f"select 1, n, n, decode(repeat('00', {size}), 'hex') from generate_series(1, {rows}) n"
        )
        await it.commit(outcome(mutations=[ForgetIds(1, rows + 1)]))
        assert (await deleted()).commits == [1_000 * size]
        await it.journal.upkeep(NOW_MS)
        gone = await deleted()
    assert sum(gone.commits + gone.beside) == rows * size
    assert max(gone.beside) <= UpkeepLimits().reap_ids * size


async def test_folding_takes_records_until_they_name_enough_rows(
    store: Store, database: str
) -> None:
    store.upkeep_limits = UpkeepLimits(fold_rows=10, fold_keys=100)
    async with driven(store) as it, connected(database) as look:
        await it.commit(outcome(insert(key) for key in range(1, 51)))
        keys = list(range(1, 51))
        for number in range(1, 12):
            await it.commit(outcome(mutations=[RecordAcquired(keys, [number] * 50)]))

        async def is_folded() -> bool:
            return await look.fetchval("select count(*) from acquired") < 11

        await wait_until(is_folded)
        assert await look.fetchval("select count(*) from acquired") == 9
        [row] = await it.journal.read_rows([1])
        assert row.delivery_count == 2


def test_bytes_of_moves_and_attempts_count_in_a_commit() -> None:
    properties = bytes(BATCH_BYTES // 2)
    move = MoveMessage(1, 2, 1, SubQueue.DEAD_LETTER, 1, 0, None, properties)
    patch = PatchMessage(3, None, 1, properties)
    keys = list(range(1_000))
    attempted = RecordAcquired(keys, keys)
    assert extra_bytes(outcome(mutations=[move, patch])) == BATCH_BYTES
    assert extra_bytes(outcome(mutations=[move._replace(application_properties=None)])) == 0
    assert extra_bytes(outcome(mutations=[attempted])) == 12_000
