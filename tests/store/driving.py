"""Shared by the tests of the store: outcomes to commit, a recorder, ways to block a commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg

from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import Done, Refusal, SubQueue
from postbus.entity.outcomes import (
    InsertMessage,
    LoadedPartition,
    Mutation,
    Outcome,
    PutDefinition,
    ReserveBlock,
)
from postbus.message.envelope import Envelope
from postbus.store.journal import Journal
from postbus.store.migrate import prepare_partition
from postbus.store.postgres import Store

NOW_MS = 1_700_000_000_000
HELD_MS = 1
"""`enqueued_ms` of rows with a commit that a test blocks."""
POISON_MS = 2
"""`enqueued_ms` of rows that the server refuses."""
HOLD_LOCK = 4711


def envelope(body: bytes = b"\x00\x53\x75\xa0\x05hello", **parts: bytes) -> Envelope:
    size_bytes = len(body) + sum(map(len, parts.values()))
    return Envelope(body=body, size_bytes=size_bytes, **parts)  # type: ignore[arg-type]


def insert(row_key: int, body: bytes | None = None, enqueued_ms: int = NOW_MS) -> InsertMessage:
    content = b"\x00\x53\x75\xa0\x04%04d" % (row_key % 10_000) if body is None else body
    return InsertMessage(row_key, enqueued_ms, envelope(content))


def outcome(
    inserts: Iterable[InsertMessage] = (),
    deletes: Iterable[int] = (),
    mutations: Iterable[Mutation] = (),
    *,
    touches_uncommitted: bool = False,
) -> Outcome:
    return Outcome(Done(), list(inserts), list(deletes), list(mutations), [], touches_uncommitted)


def definition(entity_no: int = 1, name: str = "orders") -> PutDefinition:
    return PutDefinition(
        entity_no, name, EntityKind.QUEUE, QueueProperties(), catalog_version=3, next_sequence=1
    )


def block(
    first_key: int = 1,
    size: int = 1_000_000,
    sub_queue: SubQueue = SubQueue.ACTIVE,
    first_sequence: int = 1,
) -> ReserveBlock:
    sequence = first_sequence if sub_queue is SubQueue.ACTIVE else 0
    return ReserveBlock(first_key, size, 1, sub_queue, sequence)


@dataclass
class Recorder:
    """Replaces the host: records the results that the journal releases."""

    released: list[object] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    failed: list[tuple[object, Refusal]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def committed(self, entries: list[tuple[Outcome, object]]) -> None:
        self.released += [parked for _, parked in entries]
        self.batches.append(len(entries))
        self.changed.set()

    def on_failed(self, entries: list[tuple[Outcome, object, Refusal]], error: Exception) -> None:
        self.failed += [(parked, refusal) for _, parked, refusal in entries]
        self.errors.append(error)
        self.changed.set()

    async def wait_for(self, is_true: Callable[[], bool], limit_s: float = 20.0) -> None:
        async with asyncio.timeout(limit_s):
            while not is_true():
                self.changed.clear()
                await self.changed.wait()

    async def wait_released(self, count: int) -> None:
        await self.wait_for(lambda: len(self.released) >= count or bool(self.errors))
        assert self.errors == []

    async def wait_failed(self) -> Exception:
        await self.wait_for(lambda: bool(self.errors))
        return self.errors[0]


@dataclass
class Driven:
    """An open journal with its recorder."""

    journal: Journal[object]
    loaded: LoadedPartition
    seen: Recorder

    async def commit(self, *outcomes: Outcome) -> None:
        """Submit outcomes together and wait until all are released."""
        wanted = len(self.seen.released) + len(outcomes)
        for one in outcomes:
            self.journal.submit(one, None)
        await self.seen.wait_released(wanted)


async def make_partition(store: Store, partition_id: int) -> None:
    """Create the tables of a partition unless they exist, as its first claim does."""
    await store.open()
    connection = await store.connect_writer(partition_id)
    try:
        await prepare_partition(connection, partition_id)
    finally:
        await connection.close()


async def open_driven(store: Store, *, one_by_one: bool = False) -> Driven:
    seen = Recorder()
    journal, loaded = await Journal.open(
        store,
        0,
        on_committed=seen.committed,
        on_failed=seen.on_failed,
        one_by_one=one_by_one,
    )
    return Driven(journal, loaded, seen)


@asynccontextmanager
async def driven(store: Store, *, one_by_one: bool = False) -> AsyncIterator[Driven]:
    """Open a journal on partition 0 with a queue and a block; close it at the end."""
    opened = await open_driven(store, one_by_one=one_by_one)
    if not opened.loaded.entities:
        await opened.commit(outcome(mutations=[definition(), block()]))
        opened.seen.released.clear()
        opened.seen.batches.clear()
    try:
        yield opened
    finally:
        await opened.journal.close()


async def reload(store: Store) -> LoadedPartition:
    """Return the state in the tables, loaded by another claim."""
    opened = await open_driven(store)
    await opened.journal.close()
    return opened.loaded


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(dsn, server_settings={"search_path": "partition_0"})
    try:
        yield connection
    finally:
        await connection.close(timeout=5)


async def wait_until(is_true: Callable[[], Awaitable[object]], limit_s: float = 20.0) -> None:
    """Poll until a condition outside this process holds."""
    deadline = time.monotonic() + limit_s
    while not await is_true():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


TRIGGERS = f"""
create function partition_0.hold() returns trigger language plpgsql as $$
begin
    if new.enqueued_ms = {POISON_MS} then
        raise exception 'refused' using errcode = coalesce(
            nullif(current_setting('postbus.refuse_with', true), ''), '23514'
        );
    end if;
    perform pg_advisory_xact_lock({HOLD_LOCK});
    return new;
end
$$;
create trigger hold before insert on partition_0.message for each row
when (new.enqueued_ms in ({HELD_MS}, {POISON_MS})) execute function partition_0.hold();
"""


class Hold:
    """Blocks commits that insert a row with HELD_MS."""

    def __init__(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self.connection = connection

    async def begin(self) -> None:
        await self.connection.execute("select pg_advisory_lock($1)", HOLD_LOCK)

    async def end(self) -> None:
        await self.connection.execute("select pg_advisory_unlock($1)", HOLD_LOCK)

    async def held_pids(self) -> list[int]:
        """Return the backends that wait for us."""
        rows = await self.connection.fetch(
            "select pid from pg_locks where locktype = 'advisory' and not granted "
            "and objid = $1::int::oid and objsubid = 1",
            HOLD_LOCK,
        )
        return [row["pid"] for row in rows]

    async def wait_held(self, count: int = 1) -> list[int]:
        async def is_held() -> bool:
            return len(await self.held_pids()) >= count

        await wait_until(is_held)
        return await self.held_pids()


@asynccontextmanager
async def holding(dsn: str) -> AsyncIterator[Hold]:
    """Install the triggers and hold commits from now on."""
    async with connected(dsn) as connection:
        await connection.execute(TRIGGERS)
        hold = Hold(connection)
        await hold.begin()
        yield hold
