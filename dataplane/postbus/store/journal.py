"""Group commit of one partition: takes outcomes, commits them in order, reports durable ones.

Outcomes that are queued while commits are in flight form the next one. At most two are in flight,
on two connections, and only if both are plain (ADR 32); outcomes are released in order. A journal
claims its partition when it opens and owns it while the broker's beats confirm that (ADR 22). It is
dead after its first failure: it reports each pending outcome as not applied or unknown (ADR 2), and
the host opens another one, whose claim ends our backends first. Called by `broker/partition/host`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Final, Generic, TypeAlias, TypeVar

import asyncpg

from postbus.entity.commands import Refusal, StoredRow, SubQueue
from postbus.entity.outcomes import Found, LoadedPartition, Needs, Outcome
from postbus.store.batch import (
    BATCH_BYTES,
    BATCH_ROWS,
    CROWD_COMMITS,
    GATHER_ROUNDS,
    GATHER_ROWS,
    INLINE_BODY_BYTES,
    OVERLAP_ROWS,
    STAGED_BODY_BYTES,
    Batch,
    SideRows,
    extra_bytes,
    extra_rows,
    is_barrier,
)
from postbus.store.claim import Claim, Slot, claim_partition, release, take_slot
from postbus.store.counters import StoreCounters
from postbus.store.errors import (
    CONNECTION_ERRORS,
    StoreError,
    StoreUnavailable,
    as_store_error,
    meaning_of,
    refusal_of,
)
from postbus.store.load import load_partition
from postbus.store.postgres import Store
from postbus.store.reads import Reader
from postbus.store.staging import bodies_to_stage, stage_bodies
from postbus.store.upkeep import Upkeep
from postbus.store.writer import Writer

logger = logging.getLogger(__name__)

P = TypeVar("P")
OnCommitted: TypeAlias = Callable[[list[tuple[Outcome, P]]], None]
OnFailed: TypeAlias = Callable[[list[tuple[Outcome, P, Refusal]], Exception], None]

QUEUED_BYTES: Final = 32 << 20
QUEUED_ROWS: Final = 50_000
"""The journal is congested above either limit: about half a second of work at full speed."""
ANSWER_S: Final = 5.0
"""Time after which a commit without an answer counts as unknown (ADR 2)."""
WATCH_S: Final = 0.5  # interval of checks for late commits and closed connections
SECOND_WRITER_S: Final = 5.0
"""Pause before a second writer that could not be opened is tried again. Our choice."""
ALONE_S: Final = 10.0
"""Time after a failure in which outcomes are committed one by one. Our choice: long enough for the
client of the failed outcome to repeat it."""


class _Queued(Generic[P]):
    """An outcome that waits for its commit."""

    __slots__ = ("byte_count", "largest_bytes", "outcome", "parked", "row_count", "staging")

    def __init__(
        self, outcome: Outcome, parked: P, row_count: int, byte_count: int, largest_bytes: int
    ) -> None:
        self.outcome = outcome
        self.parked = parked
        self.row_count = row_count
        self.byte_count = byte_count
        self.largest_bytes = largest_bytes  # of its messages
        self.staging: asyncio.Task[None] | None = None


class _Runner(Generic[P]):
    """A writer connection with its task. `wake` is set while the task sleeps."""

    __slots__ = ("slot", "task", "wake", "writer")

    def __init__(self, slot: Slot, writer: Writer) -> None:
        self.slot = slot
        self.writer = writer
        self.task: asyncio.Task[None] | None = None
        self.wake: asyncio.Future[None] | None = None


class Journal(Generic[P]):
    """Commits the outcomes of one claimed partition and reports when they are durable.

    Dead after the first failure: the host calls `abandon` and opens another.
    """

    def __init__(
        self,
        store: Store,
        partition_id: int,
        *,
        on_committed: OnCommitted[P],
        on_failed: OnFailed[P],
        one_by_one: bool,
        claim: Claim,
        sides: SideRows,
        counters: StoreCounters,
    ) -> None:
        """Only `open` calls this."""
        self.partition_id = partition_id
        self.epoch, self.schema_version = claim.epoch, claim.schema_version
        self.queued_bytes = 0
        self.queued_rows = 0
        self._store = store
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._alone_until = time.monotonic() + ALONE_S if one_by_one else 0.0
        self._loop = asyncio.get_running_loop()
        self._counters = counters
        self._reader = Reader(store, partition_id)
        self._sides = sides
        self._upkeep = Upkeep(store, partition_id, claim.epoch, sides)
        self.pinned = self._upkeep.pinned
        self._queue: deque[_Queued[P]] = deque()
        self._in_flight: deque[Batch[P]] = deque()
        self._runners: list[_Runner[P]] = []
        self._is_opening_second = False
        self._is_gathering = False  # a writer will check the queue without being woken
        self._is_sweep_due = False
        self._persisted_ms = claim.persisted_ms
        self._waiting_rows = 0
        self._begun_count = 0
        self._is_beside_others = False  # other partitions began commits since our last one
        self._is_dead = False
        self._error: Exception | None = None
        self._drained: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._look_due = time.monotonic() + WATCH_S
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls,
        store: Store,
        partition_id: int,
        *,
        on_committed: OnCommitted[P],
        on_failed: OnFailed[P],
        on_claimed: Callable[[int], None] = lambda _epoch: None,
        one_by_one: bool = False,
        counters: StoreCounters | None = None,
    ) -> tuple[Journal[P], LoadedPartition]:
        """Claim the partition (ADR 22), load it, start committing.

        Creates the partition's tables at first use. `on_claimed` gets the epoch before the load.
        `one_by_one` commits each outcome alone, so that a refused one fails alone; commits and
        reads are counted in `counters`. Raises StoreUnavailable (retry), its kind Fenced
        (another broker holds the partition), or StoreMisconfigured and its kind SchemaTooNew.
        """
        await store.open()
        connection = await store.connect_writer(partition_id)

        def on_end(_: Exception) -> None:
            connection.terminate()

        store.beats.follow(on_end)
        try:
            claim = await claim_partition(connection, partition_id, store.beats)
            on_claimed(claim.epoch)
            loaded, sides = await load_partition(connection, claim)
            journal = cls(
                store,
                partition_id,
                on_committed=on_committed,
                on_failed=on_failed,
                one_by_one=one_by_one,
                claim=claim,
                sides=sides,
                counters=counters or StoreCounters(),
            )
            await journal._upkeep.note_load(loaded, connection)
            await journal._add_runner(Slot.FIRST_WRITER, Writer(connection, sides))
        except BaseException as error:
            meaning = meaning_of(error, connection)
            connection.terminate()
            if meaning is None or meaning is error:
                raise
            raise meaning from error
        finally:
            store.beats.unfollow(on_end)
        store.beats.follow(journal._end)
        journal._watch = journal._loop.call_later(WATCH_S, journal._look)
        return journal, loaded

    # --- for the host -----------------------------------------------------------------------------

    def submit(self, outcome: Outcome, parked: P) -> None:
        """Queue an outcome for the next commit; never blocks, never raises errors of the store."""
        assert not self._is_dead, "the journal is dead"
        sizes = [insert.envelope.size_bytes for insert in outcome.inserts]
        byte_count = sum(sizes)
        row_count = len(outcome.inserts) + len(outcome.deletes) + len(outcome.mutations)
        if outcome.mutations:
            byte_count += extra_bytes(outcome)
            row_count += extra_rows(outcome)
        # A reply without a write is released right after the last commit in flight.
        if not row_count and self._in_flight and not self._queue and not self._alone_until:
            self._in_flight[-1].entries.append((outcome, parked))
            return
        item = _Queued(outcome, parked, row_count, byte_count, max(sizes, default=0))
        if byte_count > STAGED_BODY_BYTES:
            self._start_staging(item)
        self._queue.append(item)
        self.queued_bytes += byte_count
        self.queued_rows += row_count
        self._waiting_rows += row_count
        if not self._is_gathering and len(self._in_flight) < 2:
            self._kick()

    @property
    def confirmed_at(self) -> float:
        """Last instant at which the partition was certainly ours, in seconds of `boottime_s`."""
        return self._store.beats.confirmed_at

    @property
    def is_idle(self) -> bool:
        """True if nothing is queued, in flight or unreported."""
        return not (self._queue or self._in_flight)

    @property
    def is_congested(self) -> bool:
        """True if the queue is so long that sends must wait."""
        return self.queued_bytes > QUEUED_BYTES or self.queued_rows > QUEUED_ROWS

    async def read_rows(self, row_keys: list[int]) -> list[StoredRow]:
        """Return the rows of these keys in key order; raises StoreUnavailable."""
        return self._noted(await self._reader.read_rows(row_keys))

    async def read_range(self, first_key: int, end_key: int, limit: int) -> list[StoredRow]:
        """Return up to `limit` rows with keys in [first_key, end_key), in key order."""
        return self._noted(await self._reader.read_range(first_key, end_key, limit))

    async def read_numbers(
        self, entity_no: int, sub_queue: SubQueue, from_sequence: int, limit: int
    ) -> list[StoredRow]:
        """Return up to `limit` rows of a sub-queue in order of their kept number."""
        return self._noted(
            await self._reader.read_numbers(entity_no, sub_queue, from_sequence, limit)
        )

    def _noted(self, rows: list[StoredRow]) -> list[StoredRow]:
        self._counters.note_read(len(rows))
        return rows

    async def read_states(self, names: list[tuple[int, bytes]]) -> dict[tuple[int, bytes], bytes]:
        """Return (entity_no, session_id) -> state of those sessions that have one."""
        return await self._reader.read_states(names)

    async def read(self, needs: Needs) -> Found:
        """Return the rows, states and ids that a command needs; raises StoreUnavailable."""
        found = Found(needs.row_keys)
        if needs.row_keys:
            found += await self.read_rows(needs.row_keys)
        for first_key, end_key, limit in needs.ranges:
            found += await self.read_range(first_key, end_key, limit)
        for entity_no, sub_queue, from_sequence, limit in needs.numbers:
            found += await self.read_numbers(entity_no, sub_queue, from_sequence, limit)
        for entity_no, sub_queue, numbers in needs.named:
            found += await self._reader.read_named(entity_no, sub_queue, numbers)
        if needs.states:
            found.states = await self.read_states(needs.states)
        if needs.ids:
            found.seen = await self._reader.read_seen(needs.ids)
        return found

    async def sample_clock_ms(self) -> int:
        """Return database time, never below the time this partition persisted last (ADR 28)."""
        return max(await self._store.sample_clock_ms(), self._persisted_ms)

    async def upkeep(self, now_ms: int) -> bool:
        """Run upkeep that is due (ADR 30): VACUUM, folding of acquisitions, removal of old rows.

        `now_ms` is entity time. Return whether more is due. Raises StoreUnavailable, Fenced.
        """
        await self._upkeep.look_at_age()
        self._is_sweep_due = bool(self._sides.bodies.dead)
        if self._upkeep.is_fold_due or self._is_sweep_due:
            self._kick()
        is_left = await self._upkeep.reap(now_ms)
        await self._upkeep.vacuum_if_due()
        return is_left

    def fail(self, error: Exception) -> None:
        """Fail for a reason of the host: a broken state, a fault for tests."""
        self._end(error)

    def abandon(self) -> None:
        """Drop the connections of a journal that is dead or no longer needed; never raises."""
        self._is_dead = True
        self._store.beats.unfollow(self._end)
        if self._watch is not None:
            self._watch.cancel()
        for runner in self._runners:
            runner.writer.connection.terminate()
            if runner.wake is not None and not runner.wake.done():
                runner.wake.set_result(None)
        current = asyncio.current_task(self._loop)
        for task in self._tasks:
            if task is not current and not any(runner.task is task for runner in self._runners):
                task.cancel()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def close(self) -> None:
        """Commit the queue, release the partition, close; errors are logged, not raised."""
        if not self._is_dead and not self.is_idle:
            self._drained = self._loop.create_future()
            self._kick()
            await self._drained
        was_alive = not self._is_dead
        self._is_dead = True
        if self._watch is not None:
            self._watch.cancel()
        try:
            if was_alive:
                await self._wait_for_runners()
                async with asyncio.timeout(ANSWER_S):
                    connection = self._runners[0].writer.connection
                    await release(connection, self.epoch, self._persisted_ms)
        except (*CONNECTION_ERRORS, asyncpg.PostgresError) as error:
            logger.warning(
                "partition was not released",
                extra={"partition": self.partition_id, "error": repr(error)},
            )
        self.abandon()

    # --- forming commits --------------------------------------------------------------------------

    def _kick(self) -> None:
        """Wake a writer if a commit may start."""
        if self._in_flight and not self._may_overlap():
            return
        for runner in self._runners:
            if runner.wake is not None and not runner.wake.done():
                runner.wake.set_result(None)
                return
        if len(self._runners) == 1 and not self._is_opening_second and len(self._in_flight) == 1:
            self._is_opening_second = True
            self._spawn(self._open_second())

    def _may_overlap(self) -> bool:
        """True if a plain commit may start beside the one in flight (ADR 32)."""
        first = self._in_flight[0]
        limit = GATHER_ROWS if self._is_beside_others else OVERLAP_ROWS
        if self._waiting_rows < limit or first.is_exclusive or self._alone_until:
            return False
        return not is_barrier(self._queue[0].outcome)

    def _next_batch(self) -> Batch[P] | None:
        """Return the next batch, None if no commit may start now."""
        queue = self._queue
        if self._error is not None:
            return None
        is_second = bool(self._in_flight)
        is_sweep_due = self._is_sweep_due and self._sides.bodies.dead
        if (self._upkeep.is_fold_due or is_sweep_due) and not is_second:
            return Batch.of_fold()
        if not queue:
            return None
        if is_second and (len(self._in_flight) > 1 or not self._may_overlap()):
            return None
        batch: Batch[P] = Batch()
        while queue:
            item = queue[0]
            outcome = item.outcome
            if batch.entries and (
                batch.row_count + item.row_count > BATCH_ROWS
                or batch.byte_count + item.byte_count > BATCH_BYTES
                or not batch.admits(outcome)
            ):
                break
            if is_second and is_barrier(outcome):
                break
            if item.staging is not None and not item.staging.done():
                break
            queue.popleft()
            batch.add(outcome, item.parked, item.row_count, item.byte_count)
            batch.is_large |= item.largest_bytes > INLINE_BODY_BYTES
            if self._alone_until:
                batch.is_exclusive = True
                break
        if not batch.entries:
            return None
        self._waiting_rows -= batch.row_count
        return batch

    # --- writing ----------------------------------------------------------------------------------

    async def _run(self, runner: _Runner[P]) -> None:
        """Run a writer; an exception here is a bug of ours or of a callback."""
        try:
            await self._write(runner)
        except Exception as error:
            logger.exception("journal broke", extra={"partition": self.partition_id})
            self._end(error)

    async def _write(self, runner: _Runner[P]) -> None:
        """Commit batches on one connection until the journal is dead."""
        while not self._is_dead:
            await self._gather()
            if self._is_dead:
                return
            batch = self._next_batch()
            if batch is None:
                runner.wake = self._loop.create_future()
                await runner.wake
                runner.wake = None
                continue
            await self._commit(runner.writer, batch)

    async def _gather(self) -> None:
        """Let a small batch grow while commits of other partitions keep store and loop busy."""
        for _ in range(GATHER_ROUNDS):
            is_small = self._queue and self._waiting_rows < GATHER_ROWS and not self._in_flight
            if not is_small or self._store.commits_under_way < CROWD_COMMITS:
                break
            self._is_gathering = True
            await asyncio.sleep(0)
        self._is_gathering = False

    async def _commit(self, writer: Writer, batch: Batch[P]) -> None:
        batch.started = time.monotonic()
        self._in_flight.append(batch)
        store = self._store
        self._is_beside_others = store.commits_begun != self._begun_count
        store.commits_begun = self._begun_count = store.commits_begun + 1
        if self._waiting_rows >= OVERLAP_ROWS:
            self._kick()
        store.commits_under_way += 1
        try:
            if batch.is_fold:
                await self._upkeep.tidy(writer.connection)
                self._is_sweep_due = bool(self._sides.bodies.dead)
            else:
                await writer.commit(batch)
        except Exception as error:  # noqa: BLE001 - any error ends this journal
            self._batch_failed(batch, error)
            return
        finally:
            store.commits_under_way -= 1
        if self._is_dead:
            return
        batch.is_done = True
        self._counters.note_commit(time.monotonic() - batch.started, batch.row_count)
        self._report_committed()
        if self._upkeep.note(batch) and not self._is_dead:
            self._spawn(self._aside("VACUUM failed", self._upkeep.vacuum_if_due()))
        if self._upkeep.is_sweep_due and not self._is_dead:
            self._spawn(self._aside("bodies were not removed", self._upkeep.sweep()))

    def _report_committed(self) -> None:
        """Report durable outcomes in order; then fail if the next batch has failed."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].is_done:
            batch = in_flight.popleft()
            self.queued_bytes -= batch.byte_count
            self.queued_rows -= batch.row_count
            if batch.inserts:
                self._persisted_ms = max(self._persisted_ms, batch.inserts[-1].enqueued_ms)
                beats = self._store.beats
                beats.persisted_ms = max(beats.persisted_ms, self._persisted_ms)
            if batch.entries:
                if self._alone_until and self._alone_until < time.monotonic():
                    self._alone_until = 0.0
                self._on_committed(batch.entries)
                if self._is_dead:
                    return
        if self._error is not None and not (in_flight and in_flight[0].error is None):
            self._end(self._error)
        elif self._drained is not None and self.is_idle and not self._drained.done():
            self._drained.set_result(None)

    # --- failing ----------------------------------------------------------------------------------

    def _batch_failed(self, batch: Batch[P], error: Exception) -> None:
        """Start no further commit; fail as soon as the commits before this one are reported."""
        if self._is_dead or batch.error is not None:
            return
        batch.error = error
        batch.refusal = refusal_of(error) if batch.is_sent else Refusal.NOT_APPLIED
        self._error = self._error or error
        self._report_committed()

    def _end(self, error: Exception) -> None:
        """Fail: report each pending outcome as not applied or unknown (ADR 2)."""
        if self._is_dead:
            return
        failed: list[tuple[Outcome, P, Refusal]] = []
        for batch in self._in_flight:
            refusal = batch.refusal or Refusal.UNKNOWN
            failed += [(outcome, parked, refusal) for outcome, parked in batch.entries]
        failed += [(item.outcome, item.parked, Refusal.NOT_APPLIED) for item in self._queue]
        self._in_flight.clear()
        self._queue.clear()
        self.abandon()
        self._on_failed(failed, as_store_error(error) or error)

    def _look(self) -> None:
        """Check for unanswered commits and closed connections every half second."""
        now = time.monotonic()
        self._watch = self._loop.call_later(WATCH_S, self._look)
        is_late, self._look_due = now - self._look_due > WATCH_S, now + WATCH_S
        if is_late:  # the loop was blocked: answers may be unread
            return
        silent = StoreUnavailable(f"the store did not answer within {ANSWER_S:.0f} s")
        for batch in list(self._in_flight):
            if not batch.is_done and now - batch.started > ANSWER_S:
                self._batch_failed(batch, silent)
        if not self._is_dead and any(
            runner.writer.connection.is_closed() for runner in self._runners
        ):
            self._end(StoreUnavailable("a connection of the writers was ended"))

    # --- connections and tasks --------------------------------------------------------------------

    async def _add_runner(self, slot: Slot, writer: Writer) -> None:
        await writer.prepare(is_pipelined=self._store.pipelined)
        writer.connection.add_log_listener(self._warned)
        runner: _Runner[P] = _Runner(slot, writer)
        self._runners.append(runner)
        runner.task = self._spawn(self._run(runner))

    def _warned(self, _: object, message: asyncpg.PostgresLogMessage) -> None:
        """Fail on a server warning: a commit that was not confirmed by the standbys is not safe."""
        if getattr(message, "severity_en", None) == "WARNING":
            self._end(StoreUnavailable(f"the server warned: {message}"))

    async def _open_second(self) -> None:
        """Open the second writer; without it commits run one at a time."""
        connection = None
        try:
            connection = await self._store.connect_writer(self.partition_id)
            await take_slot(connection, self.partition_id, Slot.SECOND_WRITER, self.epoch)
            if not self._is_dead:
                await self._add_runner(Slot.SECOND_WRITER, Writer(connection, self._sides))
        except (*CONNECTION_ERRORS, StoreError, asyncpg.PostgresError) as error:
            logger.warning(
                "no second writer", extra={"partition": self.partition_id, "error": repr(error)}
            )
            self._loop.call_later(SECOND_WRITER_S, self._allow_second)
        finally:
            if connection is not None and len(self._runners) < 2:
                connection.terminate()

    def _allow_second(self) -> None:
        self._is_opening_second = False

    def _start_staging(self, item: _Queued[P]) -> None:
        """Write bodies above 1 MiB ahead; the outcome waits in the queue until they are stored."""
        bodies = bodies_to_stage(item.outcome)
        if bodies:
            item.staging = self._spawn(self._stage(bodies))

    async def _stage(self, bodies: list[tuple[int, bytes]]) -> None:
        try:
            await stage_bodies(self._store, self.partition_id, self.epoch, bodies)
        except Exception as error:  # noqa: BLE001 - any error ends this journal
            self._error = self._error or error
            self._report_committed()
            return
        self._loop.call_soon(self._kick)  # when this task is done

    async def _aside(self, trouble: str, work: Coroutine[object, object, None]) -> None:
        """Run upkeep at once; the periodic upkeep repeats it after an error."""
        try:
            await work
        except StoreError as error:
            logger.warning(trouble, extra={"partition": self.partition_id, "error": repr(error)})

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Start a task that ends with the journal; each task handles its own errors."""
        task = self._loop.create_task(work, name=f"journal-{self.partition_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait_for_runners(self) -> None:
        """Wait for the commits of both writers; a dead journal starts no more."""
        runners = [runner.task for runner in self._runners if runner.task is not None]
        for task in self._tasks.difference(runners):
            task.cancel()
        for runner in self._runners:
            if runner.wake is not None and not runner.wake.done():
                runner.wake.set_result(None)
        await asyncio.wait(self._tasks | set(runners), timeout=ANSWER_S)
