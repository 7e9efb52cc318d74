"""Audit of manual changes: an entry for each change of definitions, rules, keys and messages.

An entry is durable before its change begins, so that no change is without one. The outcome is
written afterwards and retried until the store accepts it. Listeners wrap changes in `recorded`.
Messages that clients send and receive are not audited.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from postbus.broker.backoff import Backoff
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.contract.entities import DAY_MS
from postbus.entity.commands import Refusal, Refused
from postbus.store.audit import AuditedChange, AuditEnd, AuditEntry, AuditStore
from postbus.store.errors import StoreError, StoreFull

__all__ = [
    "DONE",
    "UNKNOWN",
    "Audit",
    "AuditEntry",
    "AuditResult",
    "AuditedChange",
    "PendingEntry",
    "outcome_of",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_ENTRIES: Final = 100_000
KEPT_MS: Final = 400 * DAY_MS
"""Limits of the audit: some 30 MB, and a year. Our choice."""

FORGET_AFTER: Final = 1_000
"""Number of new entries between removals of old ones."""

TOGETHER_MS: Final = 60_000
"""Equal calls of one caller within this time of each other share an entry: a purge of a hundred
thousand messages takes four hundred calls."""

REMEMBERED: Final = 1_000
"""Number of entries that later calls may join."""

WAITING_ENDS: Final = 100_000
"""Outcomes waiting for an unavailable store; above this the oldest are dropped."""

WRITTEN_AT_ONCE: Final = 1_000
SETTLE_S: Final = 1.0
"""Maximum wait of a query, or a joining call, for writes in flight."""

MOST_NAMED: Final = 100
"""Maximum number of sequence numbers, or rules, in an entry over all its calls."""

MOST_WHY_CHARS: Final = 200
DONE: Final = "done"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of a change: counts by name, and the messages or rules concerned."""

    counts: Mapping[str, int] = field(default_factory=dict)
    numbers: Sequence[int] = ()
    rules: Sequence[str] = ()


@dataclass(slots=True, eq=False)
class PendingEntry:
    """An entry whose change is in progress, or that later calls may join."""

    change: AuditedChange
    begun_ms: int
    number: int | None = None  # None: not written yet
    ended_ms: int = 0
    is_open: bool = True
    outcome: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)

    def count(self, result: AuditResult) -> None:
        """Add the result of a call."""
        for name, count in result.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.numbers += result.numbers[: MOST_NAMED - len(self.numbers)]
        self.rules += result.rules[: MOST_NAMED - len(self.rules)]

    def written(self) -> AuditEnd:
        """Return the outcome to store."""
        assert self.number is not None
        detail = dict(self.change.detail)
        if self.counts:
            detail["counts"] = dict(self.counts)
        if self.numbers:
            detail["numbers"] = list(self.numbers)
        if self.rules:
            detail["rules"] = list(self.rules)
        return AuditEnd(self.number, self.ended_ms, self.outcome, detail)


class Audit:
    """The audit of one bus; `keep_writing` runs throughout its life."""

    def __init__(
        self,
        store: AuditStore,
        start: Callable[[Coroutine[object, object, None]], object],
        version: Callable[[], int],
        now_ms: Callable[[], int],
    ) -> None:
        """`start` runs a coroutine in a task of the bus; `version` is the catalog's; real time."""
        self._store = store
        self._start = start
        self._version = version
        self._now_ms = now_ms
        self._recent: OrderedDict[str, PendingEntry] = OrderedDict()
        self._ended: deque[PendingEntry] = deque(maxlen=WAITING_ENDS)
        self._has_ended = asyncio.Event()
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._is_stopping = False
        self._since_forgotten = FORGET_AFTER

    # --- changes --------------------------------------------------------------------------------

    async def recorded(
        self,
        change: AuditedChange,
        work: Awaitable[T],
        result_of: Callable[[T], AuditResult] = lambda _: AuditResult(),
        *,
        may_repeat: bool = False,
        may_change_nothing: bool = False,
    ) -> T:
        """Run a change with an audit entry; return its result or raise its error.

        It runs to its end even if the caller disconnects. `may_repeat`: later calls may join the
        entry. `may_change_nothing`: an unchanged definition gets no entry. Raises
        `DirectoryRefusal` if no entry can be written; then nothing is changed.
        """
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await self._record(change, work, result_of, may_repeat, may_change_nothing)
            except Exception as error:  # noqa: BLE001 - raised to the caller
                if not answered.done():
                    answered.set_exception(error)
            except BaseException:
                answered.cancel()
                raise
            else:
                if not answered.done():
                    answered.set_result(result)

        running = run()
        try:
            self._start(running)
        except RuntimeError:
            running.close()
            _close(work)
            stopping = Refused(Refusal.NOT_APPLIED, "the broker is stopping")
            raise DirectoryRefusal(stopping) from None
        return await answered

    async def _record(
        self,
        change: AuditedChange,
        work: Awaitable[T],
        result_of: Callable[[T], AuditResult],
        may_repeat: bool,
        may_change_nothing: bool,
    ) -> T:
        try:
            entry = await self._begin(change, may_repeat)
        except BaseException:
            _close(work)
            raise
        before = self._version()
        try:
            result = await work
        except Exception as error:
            self.end(entry, outcome_of(error))
            raise
        entry.count(result_of(result))
        is_unchanged = may_change_nothing and self._version() == before
        self.end(entry, None if is_unchanged else DONE)
        return result

    async def begin_all(self, changes: Sequence[AuditedChange]) -> list[PendingEntry]:
        """Write the entries of changes that are made together; raises `StoreUnavailable`."""
        now_ms = self._now_ms()
        numbers = await self._store.begin(now_ms, changes) if changes else []
        return [
            PendingEntry(change, now_ms, number)
            for change, number in zip(changes, numbers, strict=True)
        ]

    def end(self, entry: PendingEntry, outcome: str | None) -> None:
        """Set the outcome of a change; None: nothing changed, and there is no entry."""
        entry.is_open = False
        entry.ended_ms = self._now_ms()
        entry.outcome = outcome
        self._ended.append(entry)
        self._is_settled.clear()
        self._has_ended.set()

    async def _begin(self, change: AuditedChange, may_repeat: bool) -> PendingEntry:
        key = json.dumps([change.caller, change.address, change.protocol, change.verb,
                          change.entity, change.detail], sort_keys=True)  # fmt: skip
        now_ms = self._now_ms()
        try:
            entry = await self._joined(key, now_ms) if may_repeat else None
            if entry is None:
                entry = PendingEntry(change, now_ms)
                (entry.number,) = await self._store.begin(now_ms, [change])
        except StoreFull:
            # A purge may free the space: it continues, and its entry is written later.
            entry = PendingEntry(change, now_ms)
            logger.warning(
                "audit entries are delayed: the store is full", extra={"verb": change.verb}
            )
        except StoreError as error:
            detail = f"the change cannot be audited, the store is unavailable: {error}; try again"
            raise DirectoryRefusal(Refused(Refusal.NOT_APPLIED, detail)) from error
        if may_repeat:
            self._recent[key] = entry
            self._recent.move_to_end(key)
            if len(self._recent) > REMEMBERED:
                self._recent.popitem(last=False)
        return entry

    async def _joined(self, key: str, now_ms: int) -> PendingEntry | None:
        """Return the entry of an equal call that has ended shortly before."""
        entry = self._recent.get(key)
        if entry is None or entry.is_open or now_ms - entry.ended_ms > TOGETHER_MS:
            return None
        entry.is_open = True  # for calls that come while this one waits
        await self._settled()
        if entry in self._ended or entry.number is None:  # the store is slow, or was full
            return None
        await self._store.resume(entry.number)
        return entry

    # --- questions ------------------------------------------------------------------------------

    async def page(
        self, before: int, top: int, entity: str | None = None, caller: str | None = None
    ) -> list[AuditEntry]:
        """Return entries below a number, newest first.

        Raises `DirectoryRefusal` while the store is unavailable.
        """
        await self._settled()
        try:
            return await self._store.page(before, top, entity, caller)
        except StoreError as error:
            detail = f"the store is unavailable: {error}; try again"
            raise DirectoryRefusal(Refused(Refusal.NOT_APPLIED, detail)) from error

    async def _settled(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._is_settled.wait()
        except TimeoutError:
            pass

    # --- writing --------------------------------------------------------------------------------

    async def keep_writing(self) -> None:
        """Write outcomes until `stop`; failed writes are retried."""
        backoff = Backoff()
        while True:
            if not self._ended:
                self._is_settled.set()
                if self._is_stopping:
                    return
                self._has_ended.clear()
                await self._has_ended.wait()
                continue
            try:
                await self._write()
            except StoreError as error:
                if self._is_stopping:
                    logger.warning(
                        "audit outcomes could not be written, retrying", extra={"why": str(error)}
                    )
                    return
                await backoff.pause()
            else:
                backoff.reset()

    def stop(self) -> None:
        """End `keep_writing` when everything is written, or the store is unavailable."""
        self._is_stopping = True
        self._has_ended.set()

    async def _write(self) -> None:
        entries = [self._ended[n] for n in range(min(len(self._ended), WRITTEN_AT_ONCE))]
        for entry in entries:
            if entry.number is None:
                (entry.number,) = await self._store.begin(entry.begun_ms, [entry.change])
        await self._store.end([entry.written() for entry in entries])
        for entry in entries:
            if self._ended and self._ended[0] is entry:
                self._ended.popleft()
        self._since_forgotten += len(entries)
        if self._since_forgotten >= FORGET_AFTER:
            self._since_forgotten = 0
            await self._store.forget(MOST_ENTRIES, self._now_ms() - KEPT_MS)


def outcome_of(error: Exception) -> str:
    """Return the outcome of a change that raised."""
    refused = getattr(error, "refused", None)
    if isinstance(refused, Refused):
        if refused.refusal is Refusal.UNKNOWN:
            return UNKNOWN
        return f"refused: {refused.detail or refused.refusal.value}"[:MOST_WHY_CHARS]
    return f"refused: {error}"[:MOST_WHY_CHARS] if hasattr(error, "status") else UNKNOWN


def _close(work: Awaitable[object]) -> None:
    if isinstance(work, Coroutine):
        work.close()
