#!/usr/bin/env python3
"""Measures the longest commits of a partition against the statement timeout of its writers.

bench/worst_commits.py [--work FOLDER] [--scale 1] [--dsn postgresql://...] [NAME...]

Each row prepares the worst that a partition may meet, takes a checkpoint, so that the first change
of every page goes into the log as a whole, and then commits it. Told are the longest commit, the
log it wrote, and what was left to do beside the commits. Runs on an embedded Postgres below the
folder, which should lie on the disk that matters, or on an empty database of yours.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import asyncpg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dataplane"))

from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import Done, SubQueue
from postbus.entity.outcomes import (
    DropDefinition,
    ForgetIds,
    InsertMessage,
    MoveMessage,
    Mutation,
    Outcome,
    PutDefinition,
    PutSessionState,
    RecordAcquired,
    RecordIds,
    ReserveBlock,
    ShareBody,
)
from postbus.message.envelope import Envelope
from postbus.process.embedded import EmbeddedPostgres
from postbus.store.counters import StoreCounters
from postbus.store.errors import COMMIT_MS
from postbus.store.journal import Journal
from postbus.store.postgres import Store

NOW_MS: Final = 1_700_000_000_000
KIB: Final = 1 << 10
FIRST_DEAD_KEY: Final = 1 << 40
IDLE_TURNS: Final = 2
"""Runs of upkeep without any writes after which a row ends."""

Row = Callable[["Bench"], Awaitable[None]]
ROWS: Final[dict[str, tuple[str, Row]]] = {}


class Longest(StoreCounters):
    """Counters that remember the longest commit."""

    seconds = 0.0

    def note_commit(self, seconds: float, rows: int) -> None:
        self.seconds = max(self.seconds, seconds)
        super().note_commit(seconds, rows)


class Bench:
    """An open partition with one queue."""

    def __init__(self, dsn: str, scale: float) -> None:
        self.counters = Longest()
        self.failure: Exception | None = None
        self._dsn = dsn
        self._scale = scale
        self._store = Store(dsn)
        self._told = 0
        self._changed = asyncio.Event()

    async def open(self) -> None:
        await self._store.open()
        self._look = await asyncpg.connect(self._dsn)
        await self._reopen()
        queue = PutDefinition(
            1, "orders", EntityKind.QUEUE, QueueProperties(), catalog_version=1, next_sequence=1
        )
        blocks = [
            ReserveBlock(1, 10_000_000, 1, SubQueue.ACTIVE, 1),
            ReserveBlock(FIRST_DEAD_KEY, 10_000_000, 1, SubQueue.DEAD_LETTER, 0),
        ]
        await self.commit([outcome(mutations=[queue, *blocks])])

    async def _reopen(self) -> None:
        self.failure = None
        self._journal, _ = await Journal.open(
            self._store,
            0,
            on_committed=self._committed,
            on_failed=self._failed,
            counters=self.counters,
        )

    def _committed(self, entries: list[tuple[Outcome, None]]) -> None:
        self._told += len(entries)
        self._changed.set()

    def _failed(self, _: object, error: Exception) -> None:
        self.failure = error
        self._changed.set()

    def count(self, usual: int) -> int:
        return max(int(usual * self._scale), 1)

    async def commit(self, outcomes: Iterable[Outcome]) -> None:
        """Commit in order, as many at once as the journal takes; stops at a failure."""
        wanted = self._told
        for one in outcomes:
            while self._journal.is_congested and self.failure is None:
                await self._wait()
            if self.failure is not None:
                return
            self._journal.submit(one, None)
            wanted += 1
        while self._told < wanted and self.failure is None:
            await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def upkeep(self) -> tuple[float, int]:
        """Run it until nothing is left; return its seconds and the log it wrote."""
        started, before = time.monotonic(), await self._wal()
        quiet = 0
        while quiet < IDLE_TURNS and self.failure is None:
            at = await self._wal()
            try:
                await self._journal.upkeep(NOW_MS)
            except Exception as error:  # noqa: BLE001 - the row shows it
                self.failure = error
            await asyncio.sleep(0.2)
            await self.commit([outcome()])
            quiet = quiet + 1 if await self._wal() - at < 32 * KIB else 0
        return time.monotonic() - started, await self._wal() - before

    async def worst(self, *outcomes: Outcome) -> None:
        """Commit the outcomes of a row, and print the duration."""
        await self._look.execute("checkpoint")
        self.counters.seconds = 0.0
        before = await self._wal()
        await self.commit(outcomes)
        alone, log = self.counters.seconds, await self._wal() - before
        failure = self.failure
        if failure is None:
            aside_s, aside_log = await self.upkeep()
            failure = self.failure
        if failure is not None:
            print(f"  FAILED: {failure}")
            return
        print(
            f"  {alone:6.2f} s, {alone * 100_000 / COMMIT_MS:3.0f} % of the timeout, "
            f"{log >> 20:5d} MiB of log; upkeep {aside_s:5.1f} s, {aside_log >> 20:5d} MiB, "
            f"longest commit then {self.counters.seconds:.2f} s"
        )

    async def _wal(self) -> int:
        return int(await self._look.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))

    async def close(self) -> None:
        await self._journal.close()
        await self._store.close()
        await self._look.close()


def outcome(
    inserts: Iterable[InsertMessage] = (),
    deletes: Iterable[int] = (),
    mutations: Iterable[Mutation] = (),
    *,
    touches_uncommitted: bool = False,
) -> Outcome:
    return Outcome(Done(), list(inserts), list(deletes), list(mutations), [], touches_uncommitted)


def message(size: int, properties: int = 0) -> Envelope:
    return Envelope(
        body=os.urandom(size),
        application_properties=os.urandom(properties),
        size_bytes=size + properties,
    )


def copies(keys: list[int], size: int) -> Outcome:
    one = message(size)
    rows = [InsertMessage(key, NOW_MS, one) for key in keys]
    return outcome(rows, mutations=[ShareBody(keys)])


def row(name: str, text: str) -> Callable[[Row], Row]:
    def note(work: Row) -> Row:
        ROWS[name] = text, work
        return work

    return note


async def _shared(bench: Bench, count: int, size: int) -> None:
    """Fill with bodies of two copies each; then both go, all at once."""
    await bench.commit(copies([2 * n + 1, 2 * n + 2], size) for n in range(count))
    keys = list(range(1, 2 * count + 1))
    steps = [outcome(deletes=keys[at : at + 400]) for at in range(0, len(keys), 400)]
    await bench.worst(*steps, outcome([InsertMessage(9_000_000, NOW_MS, message(100))]))


async def _own(bench: Bench, count: int, size: int, at_once: int) -> None:
    await bench.commit(outcome([InsertMessage(n + 1, NOW_MS, message(size))]) for n in range(count))
    keys = list(range(1, count + 1))
    await bench.worst(
        *(outcome(deletes=keys[at : at + at_once]) for at in range(0, len(keys), at_once))
    )


@row("shared-small", "20,000 shared bodies of 1 KiB, settled 400 at a time")
async def _(bench: Bench) -> None:
    await _shared(bench, bench.count(20_000), KIB)


@row("shared-255", "4,000 shared bodies of 255 KiB, settled 400 at a time")
async def _(bench: Bench) -> None:
    await _shared(bench, bench.count(4_000), 255 * KIB)


@row("own-255", "4,000 bodies of 255 KiB, 1,000 deleted at a time")
async def _(bench: Bench) -> None:
    await _own(bench, bench.count(4_000), 255 * KIB, 1_000)


@row("own-1024", "2,000 bodies of 1 MiB, 1,000 deleted at a time")
async def _(bench: Bench) -> None:
    await _own(bench, bench.count(2_000), 1024 * KIB, 1_000)


@row("own-64-mb", "30 bodies of 64 MiB, deleted at once")
async def _(bench: Bench) -> None:
    await _own(bench, bench.count(30), 64 << 20, 30)


@row("properties", "1,000 messages with 64 KB of properties dead-lettered at once")
async def _(bench: Bench) -> None:
    count = bench.count(1_000)
    await bench.commit(
        outcome([InsertMessage(n + 1, NOW_MS, message(100, 64_000))]) for n in range(count)
    )
    changed = os.urandom(64_000)
    moves = [
        MoveMessage(n + 1, FIRST_DEAD_KEY + n, 1, SubQueue.DEAD_LETTER, n + 1, 0, None, changed)
        for n in range(count)
    ]
    await bench.worst(outcome(mutations=moves))


@row("copies", "200,000 copies of one burst of publishes")
async def _(bench: Bench) -> None:
    count = bench.count(200_000)
    one = message(1_000)
    rows = [InsertMessage(n + 1, NOW_MS, one) for n in range(count)]
    await bench.worst(outcome(rows, mutations=[ShareBody([one.row_key for one in rows])]))


@row("copies-properties", "a burst of publishes of 64 MiB of properties")
async def _(bench: Bench) -> None:
    count = bench.count(2_048)
    one = message(1_000, 32_000)
    rows = [InsertMessage(n + 1, NOW_MS, one) for n in range(count)]
    await bench.worst(outcome(rows, mutations=[ShareBody([one.row_key for one in rows])]))


@row("transaction", "16 MiB of messages in one transaction")
async def _(bench: Bench) -> None:
    rows = [InsertMessage(n + 1, NOW_MS, message(167_000)) for n in range(100)]
    await bench.worst(outcome(rows))


@row("acquired", "2,000 records of 1,000 second deliveries each are folded")
async def _(bench: Bench) -> None:
    each = 1_000
    count = bench.count(200)
    await bench.commit(
        outcome(InsertMessage(n * each + k + 1, NOW_MS, message(100)) for k in range(each))
        for n in range(count)
    )
    await bench.worst(
        *(
            outcome(
                mutations=[
                    RecordAcquired([(n % count) * each + k + 1 for k in range(each)], [2] * each)
                ]
            )
            for n in range(2_000)
        )
    )


@row("ids", "50,000 rows of seen ids leave the window at once")
async def _(bench: Bench) -> None:
    count = bench.count(50_000)
    await bench.commit(
        outcome(mutations=[RecordIds(1, NOW_MS + 100 * n, os.urandom(6_400))]) for n in range(count)
    )
    await bench.worst(outcome(mutations=[ForgetIds(1, NOW_MS + 100 * count)]))


@row("states", "1,000 session states of 256 KiB go with their queue")
async def _(bench: Bench) -> None:
    count = bench.count(1_000)
    await bench.commit(
        outcome(mutations=[PutSessionState(1, b"session-%d" % n, os.urandom(256 * KIB), NOW_MS)])
        for n in range(count)
    )
    await bench.worst(outcome(mutations=[DropDefinition(1, 2)]))


@asynccontextmanager
async def databases(args: argparse.Namespace) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Lend a maker of empty databases."""
    server = None
    if args.dsn is None:
        shutil.rmtree(args.work / "worst-commits", ignore_errors=True)
        server = EmbeddedPostgres(args.work / "worst-commits")
        await asyncio.to_thread(server.start)
    dsn = args.dsn or server.dsn

    async def fresh() -> str:
        if server is None:
            return str(dsn)
        connection = await asyncpg.connect(dsn)
        await connection.execute("drop database if exists row with (force)")
        await connection.execute("create database row template template0")
        await connection.close()
        return str(dsn).replace("@/postgres?", "@/row?")

    try:
        yield fresh
    finally:
        if server is not None:
            await asyncio.to_thread(server.stop)
            shutil.rmtree(args.work / "worst-commits", ignore_errors=True)


async def main(args: argparse.Namespace) -> None:
    async with databases(args) as fresh:
        for name in args.names or ROWS:
            text, work = ROWS[name]
            print(f"{name}: {text}", flush=True)
            bench = Bench(await fresh(), args.scale)
            await bench.open()
            await work(bench)
            await bench.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *ROWS])
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "work")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dsn")
    asyncio.run(main(parser.parse_args()))
