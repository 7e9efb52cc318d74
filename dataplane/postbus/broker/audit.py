"""Who changed what by hand: a line for each change of definitions, rules, keys and messages.

A line is durable before its change begins, so that no change is without one; how it ended is
written behind it, again and again until the store takes it. Doors call `recorded` around what they
do for somebody. Messages that clients send and receive never come here.
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
from postbus.store.audit import AuditEnd, AuditEntry, AuditLine, AuditStore
from postbus.store.errors import StoreError, StoreFull

__all__ = [
    "DONE",
    "UNKNOWN",
    "Audit",
    "AuditEntry",
    "AuditLine",
    "AuditResult",
    "Line",
    "outcome_of",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_LINES: Final = 100_000
KEPT_MS: Final = 400 * DAY_MS
"""What is kept: some 30 MB, and a year with its audit. Our choice."""

FORGET_AFTER: Final = 1_000
"""Lines after which is looked for old ones."""

TOGETHER_MS: Final = 60_000
"""Calls of one caller that do the same to the same within this time of each other are one line: a
purge of a hundred thousand messages is four hundred calls."""

REMEMBERED: Final = 1_000
"""Lines that a further call may join."""

WAITING_ENDS: Final = 100_000
"""Ends that wait for a store that is away; of more the oldest are forgotten."""

WRITTEN_AT_ONCE: Final = 1_000
SETTLE_S: Final = 1.0
"""How long a question, or a further call, waits for what is on its way to the store."""

MOST_NAMED: Final = 100
"""Sequence numbers, or rules, that a line names of all its calls."""

MOST_WHY_CHARS: Final = 200
DONE: Final = "done"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What a change came to: name -> how many, and which messages or rules it was done to."""

    counts: Mapping[str, int] = field(default_factory=dict)
    numbers: Sequence[int] = ()
    rules: Sequence[str] = ()


@dataclass(slots=True, eq=False)
class Line:
    """A line while its change is under way, and after it while more may come."""

    entry: AuditEntry
    begun_ms: int
    number: int | None = None  # None: it could not be written yet
    ended_ms: int = 0
    is_open: bool = True
    outcome: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)

    def count(self, told: AuditResult) -> None:
        """Add what a call came to."""
        for name, count in told.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.numbers += told.numbers[: MOST_NAMED - len(self.numbers)]
        self.rules += told.rules[: MOST_NAMED - len(self.rules)]

    def written(self) -> AuditEnd:
        """Return what the store is told at the end."""
        assert self.number is not None
        detail = dict(self.entry.detail)
        if self.counts:
            detail["counts"] = dict(self.counts)
        if self.numbers:
            detail["numbers"] = list(self.numbers)
        if self.rules:
            detail["rules"] = list(self.rules)
        return AuditEnd(self.number, self.ended_ms, self.outcome, detail)


class Audit:
    """The audit of one bus; `keep_writing` runs as long as it does."""

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
        self._recent: OrderedDict[str, Line] = OrderedDict()
        self._ended: deque[Line] = deque(maxlen=WAITING_ENDS)
        self._has_ended = asyncio.Event()
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._is_stopping = False
        self._since_forgotten = FORGET_AFTER

    # --- changes --------------------------------------------------------------------------------

    async def recorded(
        self,
        entry: AuditEntry,
        work: Awaitable[T],
        told: Callable[[T], AuditResult] = lambda _: AuditResult(),
        *,
        may_repeat: bool = False,
        may_change_nothing: bool = False,
    ) -> T:
        """Return what a change returns, or raise what it raises, with a line that says who did it.

        It runs to its end whatever becomes of its caller. `may_repeat`: further calls may join the
        line. `may_change_nothing`: there is no line of a definition that is as it was. Raises
        `DirectoryRefusal` when no line can be written; then nothing is changed.
        """
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await self._record(entry, work, told, may_repeat, may_change_nothing)
            except Exception as error:  # noqa: BLE001 - it is the caller's
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
        entry: AuditEntry,
        work: Awaitable[T],
        told: Callable[[T], AuditResult],
        may_repeat: bool,
        may_change_nothing: bool,
    ) -> T:
        try:
            line = await self._begin(entry, may_repeat)
        except BaseException:
            _close(work)
            raise
        before = self._version()
        try:
            result = await work
        except Exception as error:
            self.end(line, outcome_of(error))
            raise
        line.count(told(result))
        is_unchanged = may_change_nothing and self._version() == before
        self.end(line, None if is_unchanged else DONE)
        return result

    async def begin_all(self, entries: Sequence[AuditEntry]) -> list[Line]:
        """Write lines of changes that are made together; raises `StoreUnavailable`."""
        now_ms = self._now_ms()
        numbers = await self._store.begin(now_ms, entries) if entries else []
        return [Line(entry, now_ms, number) for entry, number in zip(entries, numbers, strict=True)]

    def end(self, line: Line, outcome: str | None) -> None:
        """Say how a change ended; None: it changed nothing, and there is no line of it."""
        line.is_open = False
        line.ended_ms = self._now_ms()
        line.outcome = outcome
        self._ended.append(line)
        self._is_settled.clear()
        self._has_ended.set()

    async def _begin(self, entry: AuditEntry, may_repeat: bool) -> Line:
        key = json.dumps([entry.caller, entry.address, entry.protocol, entry.verb, entry.entity,
                          entry.detail], sort_keys=True)  # fmt: skip
        now_ms = self._now_ms()
        try:
            line = await self._joined(key, now_ms) if may_repeat else None
            if line is None:
                line = Line(entry, now_ms)
                (line.number,) = await self._store.begin(now_ms, [entry])
        except StoreFull:
            # A purge may be what makes room: it goes on, and its line is written when it can be.
            line = Line(entry, now_ms)
            logger.warning("the audit is behind: the store is full", extra={"verb": entry.verb})
        except StoreError as error:
            detail = f"the store is away, so that it cannot be audited: {error}; try again"
            raise DirectoryRefusal(Refused(Refusal.NOT_APPLIED, detail)) from error
        if may_repeat:
            self._recent[key] = line
            self._recent.move_to_end(key)
            if len(self._recent) > REMEMBERED:
                self._recent.popitem(last=False)
        return line

    async def _joined(self, key: str, now_ms: int) -> Line | None:
        """Return the line of a call like this one that has ended shortly before."""
        line = self._recent.get(key)
        if line is None or line.is_open or now_ms - line.ended_ms > TOGETHER_MS:
            return None
        line.is_open = True  # for whoever calls while this waits
        await self._settled()
        if line in self._ended or line.number is None:  # the store is slow, or was full
            return None
        await self._store.resume(line.number)
        return line

    # --- questions ------------------------------------------------------------------------------

    async def page(
        self, before: int, top: int, entity: str | None = None, caller: str | None = None
    ) -> list[AuditLine]:
        """Return lines below a number, the newest first.

        Raises `DirectoryRefusal` while the store is away.
        """
        await self._settled()
        try:
            return await self._store.page(before, top, entity, caller)
        except StoreError as error:
            detail = f"the store is away: {error}; try again"
            raise DirectoryRefusal(Refused(Refusal.NOT_APPLIED, detail)) from error

    async def _settled(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._is_settled.wait()
        except TimeoutError:
            pass

    # --- writing --------------------------------------------------------------------------------

    async def keep_writing(self) -> None:
        """Write how changes ended, until `stop`; what fails is tried again."""
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
                    logger.warning("the audit is not complete", extra={"why": str(error)})
                    return
                await backoff.pause()
            else:
                backoff.reset()

    def stop(self) -> None:
        """End `keep_writing` when all is written, or the store is away."""
        self._is_stopping = True
        self._has_ended.set()

    async def _write(self) -> None:
        lines = [self._ended[n] for n in range(min(len(self._ended), WRITTEN_AT_ONCE))]
        for line in lines:
            if line.number is None:
                (line.number,) = await self._store.begin(line.begun_ms, [line.entry])
        await self._store.end([line.written() for line in lines])
        for line in lines:
            if self._ended and self._ended[0] is line:
                self._ended.popleft()
        self._since_forgotten += len(lines)
        if self._since_forgotten >= FORGET_AFTER:
            self._since_forgotten = 0
            await self._store.forget(MOST_LINES, self._now_ms() - KEPT_MS)


def outcome_of(error: Exception) -> str:
    """Return what a line says of a change that raised."""
    refused = getattr(error, "refused", None)
    if isinstance(refused, Refused):
        if refused.refusal is Refusal.UNKNOWN:
            return UNKNOWN
        return f"refused: {refused.detail or refused.refusal.value}"[:MOST_WHY_CHARS]
    return f"refused: {error}"[:MOST_WHY_CHARS] if hasattr(error, "status") else UNKNOWN


def _close(work: Awaitable[object]) -> None:
    if isinstance(work, Coroutine):
        work.close()
