"""The host of one partition: order, release after commit, timers, reload.

Every command of a partition passes `submit`; its replies and effects are released only after the
commit that justifies them, and in order. The host does the I/O that the state machine requests. If
a commit fails, it drops the partition's memory, claims it again and loads it, without a rollback.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias, assert_never

from postbus.broker.backoff import Backoff
from postbus.broker.catalog.directory import Directory
from postbus.broker.partition.clock import EntityClock
from postbus.broker.partition.disk_reserve import RESERVE_LOOK_S, STORE_FULL, DiskReserve
from postbus.broker.partition.ownership import HostStatus, Ownership
from postbus.broker.partition.recovery import INTERRUPTED, Recovery
from postbus.broker.partition.sends import BEHIND, CLOSED, SendOrder, Waiting, brings_messages
from postbus.broker.partition.shipper import Shipper
from postbus.broker.partition.sinks import DeliverySink, Sinks
from postbus.broker.partition.trouble import Troubles
from postbus.broker.partition.waiting import WaitingCommands
from postbus.entity.commands import (
    AddConsumer,
    Command,
    Done,
    OnReply,
    Quiesce,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    StoredRow,
    SupplyRows,
    Tick,
)
from postbus.entity.expects import Expects, R
from postbus.entity.outcomes import (
    Available,
    Deliver,
    EndConsumer,
    Fetch,
    Idle,
    LoadedPartition,
    Needs,
    Outcome,
    SessionGranted,
    Ship,
)
from postbus.entity.partition_state import Counts, PartitionState, WindowBudget
from postbus.entity.traffic import Traffic
from postbus.store.beats import CONFIRMATION_S
from postbus.store.browse_rows import BrowseReader
from postbus.store.bulk_reads import BulkReader
from postbus.store.counters import StoreCounters
from postbus.store.errors import Fenced, StoreUnavailable
from postbus.store.incarnation import boottime_s
from postbus.store.journal import Journal
from postbus.store.pinned import Pinned
from postbus.store.postgres import Store
from postbus.store.taps import Place

logger = logging.getLogger(__name__)

PartitionJournal: TypeAlias = Journal[OnReply[Any] | None]

CLOCK_SAMPLE_S = 10.0
CONFIRM_LOOK_S = 0.1


class LoadedWork(Protocol):
    """Work of a partition while it is loaded."""

    def start(self) -> None: ...

    def drop(self) -> None: ...


class Host:
    """Owns one partition while it is claimed."""

    def __init__(
        self,
        *,
        partition_id: int,
        store: Store,
        directory: Directory,
        clock: EntityClock,
        budget: WindowBudget,
        new_seed: Callable[[], int],
        tasks: asyncio.TaskGroup,
        monotonic_s: Callable[[], float] = boottime_s,
        troubles: Troubles | None = None,  # one for each store, so that an outage is logged once
    ) -> None:
        self.partition_id = partition_id
        self.status = HostStatus.UNCLAIMED
        self.reload_count = 0
        self.counters = StoreCounters()
        self.traffic: dict[int, Traffic] = {}
        self._load_trouble: str | None = None
        self._troubles = troubles or Troubles(lambda: store.where, monotonic_s)
        self._epoch = self.schema_version = 0  # of the previous life, or of this one
        self._store = store
        self.bulk = BulkReader(store, partition_id)
        self.browse = BrowseReader(store, partition_id)
        self._directory = directory
        self.clock = clock
        self._budget = budget
        self._new_seed = new_seed
        self._tasks = tasks
        self._monotonic_s = monotonic_s
        self._unreleased: deque[tuple[Outcome, OnReply[Any] | None]] = deque()
        self._is_releasing = False
        self._confirm_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._state: PartitionState | None = None
        self._journal: PartitionJournal | None = None
        self._sinks = Sinks(partition_id, self.submit)
        self._waiting = WaitingCommands()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._recovery = Recovery(monotonic_s)
        self._disk_reserve = DiskReserve(store, partition_id)
        self.ownership = Ownership(partition_id, store)
        self._send_order = SendOrder()
        self._early_error: Exception | None = None
        self._stop_asked = asyncio.Event()
        self._upkeep: asyncio.Task[None] | None = None
        self._shipper: Shipper | None = None
        self._publisher: LoadedWork | None = None

    # --- for the router -------------------------------------------------------------------------

    def submit(self, command: Expects[R], on_reply: OnReply[R] | None = None) -> None:
        """Apply a command now, or when the partition is loaded."""
        if self._state is not None:
            self._apply(command, on_reply, None)
        elif self.status is HostStatus.CLOSED:
            self._reply(on_reply, Refused(Refusal.NOT_APPLIED, "the broker is stopping"))
        elif type(command) is RemoveConsumer:  # no consumer outlives a reload
            self._waiting.forget_consumer(command.consumer_id)
            self._reply(on_reply, Done())
        elif self._waiting.is_full:
            self._reply(on_reply, Refused(Refusal.BUSY, "the partition is loading"))
        else:
            self._waiting.add((command, on_reply))
            self.claim()

    def claim(self) -> None:
        """Start to claim the partition unless it is claimed or being claimed."""
        if self.status is HostStatus.UNCLAIMED:
            self.status = HostStatus.LOADING
            self._tasks.create_task(self._load(), name=f"load-{self.partition_id}")

    def register_sink(self, consumer_id: int, sink: DeliverySink) -> None:
        self._sinks.register(consumer_id, sink)

    def unregister_sink(self, consumer_id: int) -> None:
        self._sinks.unregister(consumer_id)

    @property
    def is_loaded(self) -> bool:
        return self._state is not None

    def follow_limits(self) -> None:
        """Apply the limits that the directory has now; a later load reads them there."""
        if self._state is not None:
            self._state.set_limits(self._directory.limits)

    def ship_with(self, shipper: Shipper) -> None:
        """Set the shipper for outgoing messages; call before the partition is claimed."""
        self._shipper = shipper

    def publish_with(self, publisher: LoadedWork) -> None:
        """Set the publisher of what writers staged here; call before the partition is claimed."""
        self._publisher = publisher

    def _drop_work(self) -> None:
        if self._shipper is not None:
            self._shipper.drop()
        if self._publisher is not None:
            self._publisher.drop()

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run a task in the task group of the bus; an exception ends the bus."""
        return self._tasks.create_task(work)

    async def read_rows(self, row_keys: list[int]) -> list[StoredRow]:
        """Return the existing rows in key order; raises StoreUnavailable."""
        if self._journal is None:
            raise StoreUnavailable("the partition is loading")
        return await self._journal.read_rows(row_keys)

    async def call(self, command: Expects[R]) -> R | Refused:
        """Apply a command and wait for its reply."""
        answered: asyncio.Future[R | Refused] = self._loop.create_future()

        def answer(reply: R | Refused) -> None:
            if not answered.done():
                answered.set_result(reply)

        self.submit(command, answer)
        return await answered

    @property
    def epoch(self) -> int | None:
        """The epoch of our ownership, None while the partition is not loaded."""
        return None if self._state is None else self._epoch

    @property
    def is_full(self) -> bool:
        """True if sends are refused because the store is full."""
        return self._disk_reserve.is_full

    @property
    def trouble(self) -> str | None:
        """The current problem of the partition, None when there is none."""
        if self.ownership.held_by is not None:
            return f"waits: {self.ownership.held_by}"
        if self._load_trouble is not None:
            return f"cannot be loaded: {self._load_trouble}"
        return "the store is full, sends are refused" if self.is_full else None

    @property
    def queued_bytes(self) -> int:
        """Bytes accepted from listeners and not yet committed."""
        return 0 if self._journal is None else self._journal.queued_bytes

    def counts(self, entity_no: int) -> Counts | None:
        """Return exact message counts, None while the partition is not loaded."""
        return None if self._state is None else self._state.counts(entity_no)

    def pinned(self, place: Place) -> Pinned | None:
        """Return the last estimate of what a reader group keeps, None before the first."""
        return None if self._journal is None else self._journal.pinned(place)

    @property
    def state(self) -> PartitionState | None:
        """The loaded state, for reading only."""
        return self._state

    @property
    def is_due(self) -> bool:
        """True if a deadline has passed."""
        deadline_ms = None if self._state is None else self._state.next_deadline_ms
        return deadline_ms is not None and deadline_ms <= self.clock()

    def interrupt(self, duration_s: float) -> None:
        """Simulate an unreachable store for a duration: a fault for tests."""
        self._recovery.interrupt(duration_s)
        error = StoreUnavailable(INTERRUPTED)
        if self._journal is not None:
            self._journal.fail(error)
        else:
            self._early_error = error

    async def stop(self) -> None:
        """Commit accepted commands, journal outstanding state, release the partition (ADR 19)."""
        self._stop_asked.set()
        if self._timer is not None:
            self._timer.cancel()
        journal = self._journal
        if self._state is not None and journal is not None:
            quiesced: asyncio.Future[Done | Refused] = self._loop.create_future()
            self.submit(Quiesce(), quiesced.set_result)
            self.status, self._state = HostStatus.CLOSED, None  # nothing is applied after it
            await quiesced
        if self._upkeep is not None:
            self._upkeep.cancel()
        self.status = HostStatus.CLOSED
        self._drop_work()
        self._state = self._journal = None
        self._refuse_unreleased()
        self._refuse_waiting(Refused(Refusal.NOT_APPLIED, "the broker is stopping"))
        if journal is not None:
            await journal.close()

    # --- applying -------------------------------------------------------------------------------

    def _apply(
        self, command: Any, on_reply: OnReply[Any] | None, found: Sequence[StoredRow] | None
    ) -> None:
        state, journal = self._state, self._journal
        if state is None or journal is None:
            self._reply(on_reply, Refused(Refusal.NOT_APPLIED, "the partition was reloaded"))
            return
        is_full, is_closed = self._disk_reserve.is_full, self._directory.refuses_sends
        if (journal.is_congested or is_full or is_closed) and brings_messages(command):
            self._reply(on_reply, CLOSED if is_closed else STORE_FULL if is_full else BEHIND)
            return
        if found is None and self._send_order.must_wait(command, on_reply):
            return
        try:
            result = state.apply(command, self.clock(), found)
        except Exception as error:  # noqa: BLE001 - logged; the partition is reloaded
            is_ours = self._monotonic_s() - journal.confirmed_at <= CONFIRMATION_S
            self._troubles.log_broken_state(self.partition_id, error, is_ours=is_ours)
            self._reply(on_reply, Refused(Refusal.NOT_APPLIED, "the partition was reloaded"))
            journal.fail(StoreUnavailable("the state failed"))  # answers callers
            return
        if type(result) is Needs:
            self._send_order.begin(command)
            read = self._read_and_apply(command, on_reply, result, self._send_order)
            self._tasks.create_task(read)
            return
        assert isinstance(result, Outcome)
        if journal.is_idle and not (result.inserts or result.deletes or result.mutations):
            self._release_durable(journal, [(result, on_reply)])
        else:
            journal.submit(result, on_reply)
        deadline_ms = state.next_deadline_ms
        if deadline_ms is not None and (self._timer is None or deadline_ms < self._timer_ms):
            self._arm(deadline_ms)

    def _release(self, outcome: Outcome, on_reply: OnReply[Any] | None) -> None:
        """Release reply and effects of an outcome; its commit and all earlier ones are durable."""
        for effect in outcome.effects:
            if type(effect) is Deliver:
                self._sinks.deliver(effect)
            elif type(effect) is Fetch:
                self._tasks.create_task(self._fetch(effect))
            elif type(effect) is EndConsumer:
                self._sinks.end(effect)
            elif type(effect) is Available:
                self._sinks.hint(effect)
            elif type(effect) is SessionGranted:
                self._sinks.grant(effect)
            elif type(effect) is Idle:
                self._tasks.create_task(self._delete_idle(effect.entity_no))
            elif type(effect) is not Ship:
                assert_never(effect)
            elif self._shipper is not None:
                self._shipper.ship(effect)
        self._reply(on_reply, outcome.reply)

    async def _delete_idle(self, entity_no: int) -> None:
        """Ask the catalog to delete an idle entity; a failure is retried with the next `Idle`."""
        try:
            await self._directory.idle(entity_no)
        except Exception as error:  # noqa: BLE001 - logged, and tried again
            self._troubles.log(self.partition_id, "an idle entity could not be deleted", error)

    def _committed(self, parked: list[tuple[Outcome, OnReply[Any] | None]]) -> None:
        """Handle a commit; called by the journal in order, once for each."""
        self._recovery.commit_count += 1
        if self._state is not None:
            self._state.mark_committed(parked[-1][0].applied_ms)
        if self._journal is not None:
            self._release_durable(self._journal, parked)
        else:  # the host is stopping: its sinks are gone, replies are not
            for outcome, on_reply in parked:
                self._release(outcome, on_reply)

    def _release_durable(
        self, journal: PartitionJournal, durable: Sequence[tuple[Outcome, OnReply[Any] | None]]
    ) -> None:
        """Release in order; effects of a release itself follow everything released before."""
        self._unreleased.extend(durable)
        if not self._is_releasing:
            self._release_in_order(journal)

    def _release_in_order(self, journal: PartitionJournal) -> None:
        """Release durable outcomes, or hold them until ownership is confirmed again (ADR 22)."""
        if self._monotonic_s() - journal.confirmed_at > CONFIRMATION_S:
            if self._confirm_timer is None:
                self._confirm_timer = self._loop.call_later(
                    CONFIRM_LOOK_S, self._look_for_confirmation, journal
                )
            return
        self._is_releasing = True
        try:
            while self._unreleased:  # a reload empties it
                self._release(*self._unreleased.popleft())
        finally:
            self._is_releasing = False

    def _look_for_confirmation(self, journal: PartitionJournal) -> None:
        self._confirm_timer = None
        if journal is self._journal:
            self._release_in_order(journal)

    def _refuse_unreleased(self) -> None:
        """Answer held commands when the partition may no longer be ours, without guessing."""
        order, self._send_order = self._send_order, SendOrder()
        for _, on_reply in order.drop():
            self._reply(on_reply, Refused(Refusal.NOT_APPLIED, "the partition was reloaded"))
        if self._confirm_timer is not None:
            self._confirm_timer.cancel()
            self._confirm_timer = None
        while self._unreleased:
            _, on_reply = self._unreleased.popleft()
            self._reply(on_reply, Refused(Refusal.UNKNOWN, "ownership was not confirmed"))

    def _failed(
        self, parked: list[tuple[Outcome, OnReply[Any] | None, Refusal]], error: Exception
    ) -> None:
        """Handle the end of the journal; called once. Callers never get a guess (ADR 2)."""
        journal = self._journal
        extra = {"partition": self.partition_id, "error": repr(error), "parked": len(parked)}
        logger.warning("commit failed, reloading", extra=extra)
        self._disk_reserve.note_failure(error)
        if journal is not None:
            self._reload(journal, error)
        else:
            self._early_error = error
        for _, on_reply, refusal in parked:
            self._reply(on_reply, Refused(refusal, "the store did not confirm the commit"))

    # --- reads ----------------------------------------------------------------------------------

    async def _read_and_apply(
        self, command: Command, on_reply: OnReply[Any] | None, needs: Needs, order: SendOrder
    ) -> None:
        """Apply a command with the rows it needs, then commands that waited for it."""
        journal, found = self._journal, None
        try:
            found = None if journal is None else await journal.read(needs)
        except Exception as error:  # noqa: BLE001 - logged; a failed read harms nobody else
            self._troubles.log(self.partition_id, "rows could not be read", error)
        if found is None:
            self._reply(on_reply, Refused(Refusal.NOT_APPLIED, "the store could not be read"))
        elif journal is not self._journal:  # the rows belong to a former life
            self._reply(on_reply, Refused(Refusal.NOT_APPLIED, "the partition was reloaded"))
        else:
            self._apply(command, on_reply, found)
        for each, on_its_reply in order.end(command):
            self.submit(each, on_its_reply)

    async def _fetch(self, effect: Fetch) -> None:
        """Read messages into memory; retry without limit, as the sub-queue waits for them."""
        backoff = Backoff()
        journal = self._journal
        while journal is not None and journal is self._journal:
            try:
                rows = await journal.read_rows(effect.row_keys)
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                self._troubles.log(self.partition_id, "paging failed", error)
                await self._pause(backoff.next_s())
                if self._stop_asked.is_set():
                    return
                continue
            if journal is self._journal:
                self.submit(SupplyRows(effect.entity_no, effect.sub_queue, rows))
            return

    # --- time -----------------------------------------------------------------------------------

    def _arm(self, deadline_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(deadline_ms - self.clock(), 0) / 1_000
        self._timer_ms = deadline_ms
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._state is None or self._stop_asked.is_set():
            return
        if self.clock() < self._timer_ms:  # the clock was corrected meanwhile
            self._arm(self._timer_ms)
            return
        self._apply(Tick(), None, None)

    def clock_changed(self) -> None:
        """Check the deadlines again after entity time was advanced manually."""
        if self._timer is not None:
            self._arm(self._timer_ms)

    async def _keep_up(self, journal: PartitionJournal) -> None:
        """Sample database time and run the store's upkeep while the journal is open."""
        is_first = True
        while journal is self._journal:
            is_behind = False
            try:
                self.clock.observe(await journal.sample_clock_ms())
                if not is_first or not self._disk_reserve.is_full:  # receivers first
                    await self._disk_reserve.refill(journal.epoch)
                is_behind = await journal.upkeep(self.clock())
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                self._troubles.log(self.partition_id, "upkeep failed", error)
            is_first = False
            is_hasty = is_behind or self._disk_reserve.is_full
            await asyncio.sleep(RESERVE_LOOK_S if is_hasty else CLOCK_SAMPLE_S)

    # --- loading --------------------------------------------------------------------------------

    def _reload(self, journal: PartitionJournal, error: Exception | None = None) -> None:
        """Drop all memory and load from the tables; `error` is that of a commit."""
        if journal is not self._journal:
            return
        if self._state is not None:
            self._state.discard()
        self._state, self._journal = None, None
        journal.abandon()
        self._drop_work()
        self._refuse_unreleased()
        self._recovery.failed(error)
        self.reload_count += 1
        self.ownership.failed(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._upkeep is not None:
            self._upkeep.cancel()
        if self._stop_asked.is_set():
            return
        self.status = HostStatus.LOADING
        self._tasks.create_task(self._load(), name=f"load-{self.partition_id}")
        self._sinks.reset()

    async def _load(self) -> None:
        """Claim and load the partition, retrying without limit."""
        while not self._stop_asked.is_set():
            await self._pause(self._recovery.wait_s)
            if self._stop_asked.is_set():
                return
            journal: PartitionJournal | None = None
            self._early_error = None
            try:
                self._recovery.check_interruption()
                await self.ownership.wait_for_first(self._pause)
                await self._disk_reserve.release_before_claim(self._epoch)
                journal, loaded = await self._open_journal()
                self.clock.observe(now_ms := await journal.sample_clock_ms())
                loaded.begin_at(now_ms)
                await self._disk_reserve.release_if_full(journal.epoch)
                gone = await self._directory.read_for(self.partition_id, loaded, self._epoch)
                if self._early_error is not None:  # it failed before it was registered
                    raise self._early_error
                state = PartitionState(
                    partition_id=self.partition_id,
                    loaded=loaded,
                    seed=self._new_seed(),
                    budget=self._budget,
                    limits=self._directory.limits,
                    traffic=self.traffic,
                )
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                if journal is not None:
                    journal.abandon()  # else its end would be taken for the next one's
                self._not_loaded(error)
                if isinstance(error, Fenced):
                    await self.ownership.outwait(error, self._pause)
                continue
            if self._stop_asked.is_set():
                await journal.close()
                return
            self._enter(journal, state, self._directory.missing(self.partition_id, loaded, gone))
            return

    async def _open_journal(self) -> tuple[PartitionJournal, LoadedPartition]:
        return await Journal.open(
            self._store,
            self.partition_id,
            on_committed=self._committed,
            on_failed=self._failed,
            on_claimed=self.ownership.claimed,
            one_by_one=self._recovery.is_one_by_one,
            counters=self.counters,
        )

    def _enter(self, journal: PartitionJournal, state: PartitionState, news: list[Command]) -> None:
        """Start on a loaded state, then apply waiting commands."""
        self._journal, self._state, self._epoch = journal, state, journal.epoch
        self.schema_version = journal.schema_version
        self._recovery.loaded()
        self._load_trouble = None
        self.status = HostStatus.ACTIVE
        self._upkeep = self._tasks.create_task(self._keep_up(journal))
        logger.info(
            "partition loaded", extra={"partition": self.partition_id, "epoch": self._epoch}
        )
        for command in news:
            self.submit(command)
        for waiting in self._take_waiting():
            self.submit(*waiting)
        self._apply(Tick(), None, None)
        if self._publisher is not None:
            self._publisher.start()

    def _not_loaded(self, error: Exception) -> None:
        """Log the reason, and refuse waiting commands as not applied."""
        self.ownership.failed(error)
        self._load_trouble = self._troubles.text(error)
        if isinstance(error, Fenced):
            self._recovery.wait_s = 0.0
        else:
            self._recovery.failed(None)
            self._troubles.log(self.partition_id, "partition could not be loaded", error)
        is_away = isinstance(error, StoreUnavailable)
        detail = self._load_trouble if is_away else "the store needs attention"
        self._refuse_waiting(Refused(Refusal.NOT_APPLIED, detail))

    async def _pause(self, seconds: float) -> bool:
        """Wait for a time, or until the host must stop; return whether to continue."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop_asked.wait()
        except TimeoutError:
            return True
        return False

    def _refuse_waiting(self, reply: Refused) -> None:
        """Refuse waiting commands, except those of consumers, which no client would repeat."""
        for command, on_reply in self._take_waiting():
            if isinstance(command, AddConsumer | SetDemand) and not self._stop_asked.is_set():
                self._waiting.add((command, on_reply))
            else:
                self._reply(on_reply, reply)

    def _take_waiting(self) -> list[Waiting]:
        kept, gone = self._waiting.take()
        for _, on_reply in gone:
            self._reply(on_reply, Refused(Refusal.NOT_APPLIED, "the consumer was removed"))
        return kept

    def _reply(self, on_reply: OnReply[Any] | None, reply: Reply) -> None:
        """Call a caller's reply; its failure must not affect later callers (ADR 2)."""
        if on_reply is not None:
            try:
                on_reply(reply)
            except Exception:
                extra = {"partition": self.partition_id, "reply": type(reply).__name__}
                logger.exception("a callback for a reply failed", extra=extra)
