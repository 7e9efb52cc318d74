"""One session for each bus: its control API, what its feed reports, and counts.

The feed is one long poll a bus. A session begins with a list of everything, and begins again after
each lost connection: behind the same address may then be another store. Resources whose entity
moved are woken; what to do about it is decided by their reconcilers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from postbus.client.control import RequestRefused
from postbus.contract.control import Applied, EntityChange
from postbus.contract.control_counts import EntityCounts
from postbus.contract.control_groups import ReaderGroupList
from postbus.contract.entities import catalog_key
from postbus_operator.bus.control_client import PAGE, Access, BusControl
from postbus_operator.bus.count_changes import Numbers, has_moved, numbers_in
from postbus_operator.bus.entity_paths import EntityPath
from postbus_operator.bus.synced_keys import SyncedKeys
from postbus_operator.bus.view import BusView, view_of
from postbus_operator.context import StillLeads
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import BackendUnavailable, StillConnecting

WAIT_S: Final = 50
"""Length of a long poll: below the limit of the API (60 s) and of usual proxies. Its end says
whether counts have moved, so that they are shown within a minute."""

GROUPS_S: Final = 60.0
"""About the time between two looks at the lag of a reader group."""

COUNTS_S: Final = 60.0
"""Pause between two requests for counts, and so the least time between two counts in a status."""

OUTAGE_S: Final = 30.0
"""Resources show an outage that lasts longer; a restart of a broker takes 10 to 15 s."""

FIRST_ANSWER_S: Final = 5.0
"""Longest wait of a look for the first answer of a bus; a list of 10,000 entities takes seconds."""

MAX_CHANGES: Final = 250_000
"""Changes in a list of everything: entities and tombstones. A bus may be anything that answers, and
must not exhaust the memory that all buses share; these need 150 MiB with usual names."""

MAX_CHARS: Final = 64 * 1024 * 1024
"""Characters of texts in these changes."""

FEED_PAUSE_S: Final = 0.1
"""Pause after each page of the feed, so that no bus takes all the time of the operator."""

CONNECTING: Final = "the operator is connecting to the bus"

FIRST_PAUSE_S: Final = 1.0
LEAST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0

logger = logging.getLogger(__name__)


BUS_PATH: Final = ""
"""Stands for the bus itself among paths of entities: it shows how many it has."""

Moved: TypeAlias = Callable[[Collection[str] | None], None]
"""Takes paths of entities that moved; None: everything of the bus may have moved."""


@dataclass(frozen=True, slots=True)
class Periods:
    """Times of a session, in seconds; `wait_s` is the length of a long poll."""

    wait_s: int = WAIT_S
    counts_s: float = COUNTS_S
    groups_s: float = GROUPS_S
    outage_s: float = OUTAGE_S
    pause_s: float = FIRST_PAUSE_S


USUAL: Final = Periods()


class Allowance:
    """Changes that a bus may still report before it is listed again."""

    def __init__(self) -> None:
        self._changes = MAX_CHANGES
        self._chars = MAX_CHARS

    def take(self, items: Collection[EntityChange]) -> None:
        """Count changes; raises `BackendUnavailable` if there are more than a bus has."""
        self._changes -= max(len(items), 1)  # empty pages have an end, too
        self._chars -= sum(
            len(each.name) + len(each.managed_by) + len(each.applied_hash or each.reason or "")
            for each in items
        )
        if self._changes < 0 or self._chars < 0:
            raise BackendUnavailable("the bus reports more entities than the operator can follow")


class BusSession:
    """The session of one bus. `trouble` None: the bus answers, as far as is known."""

    def __init__(
        self,
        control: BusControl,
        moved: Moved,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        periods: Periods = USUAL,
    ) -> None:
        """`moved` gets the paths, in lower case, of which there is something new."""
        self.control = control
        self.view = BusView()
        self.trouble: str | None = CONNECTING
        self.is_listed = False
        self.is_tried = asyncio.Event()
        """Set after the first attempt to list everything, whatever came of it."""

        self._is_asked_for = asyncio.Event()
        self.list_count = 0
        """Lists of everything so far: after each one the bus may be another one."""

        self.synced_keys: dict[Key, SyncedKeys] = {}
        """Results of `key_sync`, which last as long as the session."""

        self._moved = moved
        self._is_wanted = is_wanted
        self._periods = periods
        self._made_at = asyncio.get_running_loop().time()
        self._begun = 0
        self._counts: dict[int, EntityCounts] = {}
        self._shown: dict[int, Numbers] = {}
        self._cursor = "0"
        self._counted_version = 0
        self._may_count = asyncio.Event()
        """Set while counts may differ from those that are known. A bus at rest is not asked: each
        request beside the long poll is another TLS connection."""

        self._allowance = Allowance()
        self._taking = asyncio.Lock()
        self._groups: ReaderGroupList | None = None
        self._groups_at = 0.0
        self._asking_for_groups = asyncio.Lock()

    @property
    def is_new(self) -> bool:
        """Whether the bus has never answered, and was not tried for long."""
        age_s = asyncio.get_running_loop().time() - self._made_at
        return not self.is_listed and age_s < self._periods.outage_s

    def counts_of(self, entity_id: int) -> EntityCounts | None:
        """Return the latest counts of an entity; None while they are not known."""
        return self._counts.get(entity_id)

    def hurry(self) -> None:
        """Try a bus that does not answer soon again: somebody needs it."""
        if self.trouble is not None:
            self._is_asked_for.set()

    def note_put(self, path: EntityPath, answer: Applied, mark: str) -> None:
        """Note the answer to a change, so that the feed's report of it wakes nobody."""
        self.view.note_put(path, answer, mark)

    async def catch_up(self) -> None:
        """Read the changes that the feed has not reported yet."""
        async with self._taking:
            since = -1
            while since != self.view.version:
                since = self.view.version
                page = await self.control.changes(since, self._begun)
                self._take(page.items, page.version)

    async def run(self) -> None:
        """Follow the bus until the task is cancelled or the bus is no longer wanted."""
        counting = asyncio.create_task(self._follow_counts())
        try:
            await self._follow()
        finally:
            counting.cancel()
            with suppress(asyncio.CancelledError):
                await counting
            await self.control.close()

    async def _follow(self) -> None:
        clock = asyncio.get_running_loop().time
        failures, outage = 0, clock()
        while self._is_wanted():
            try:
                await self._list()
                failures = 0
                while self._is_wanted():
                    await self._poll()
            except BackendUnavailable as error:
                trouble = str(error)
            except RequestRefused as error:  # 410: the feed has forgotten changes; list again
                trouble = error.detail
            except Exception as error:
                logger.exception("the session of a bus failed")
                trouble = f"unexpected error of the operator: {type(error).__name__}"
            else:
                return
            outage = clock() if failures == 0 else outage
            failures += 1
            if clock() - outage >= self._periods.outage_s:
                self._show(trouble)
            elif not self.is_listed:
                self.trouble = trouble
            self.is_tried.set()
            pause_s = min(self._periods.pause_s * 2 ** (failures - 1), LONGEST_PAUSE_S)
            await self._pause(pause_s * random.uniform(0.5, 1.0))

    async def _pause(self, pause_s: float) -> None:
        """Wait before the next attempt; not longer than a second if somebody asks for the bus."""
        self._is_asked_for.clear()
        least_s = min(pause_s, LEAST_PAUSE_S)
        await asyncio.sleep(least_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s - least_s):
                await self._is_asked_for.wait()

    # --- the feed -------------------------------------------------------------------------------

    async def _list(self) -> None:
        """Replace the view by a list of everything."""
        begun, since = (await self.control.status()).version, 0
        found: list[EntityChange] = []
        allowance = Allowance()
        while True:
            page = await self.control.changes(since, begun)
            allowance.take(page.items)
            found += page.items
            if page.version == since:
                break
            since = page.version
        async with self._taking:
            former, self.view, self._begun = self.view, view_of(found, since), begun
            self._counted_version = since
            self._allowance = Allowance()
            self._counts, self._shown, self._cursor = {}, {}, "0"
            self._groups = None
            self._may_count.set()
        was_away, self.trouble, self.is_listed = self.trouble is not None, None, True
        self.list_count += 1
        self.is_tried.set()
        self._moved(None if was_away else self.view.differences(former))

    async def _poll(self) -> None:
        clock = asyncio.get_running_loop().time
        asked, since = clock(), self.view.version
        page = await self.control.changes(since, self._begun, self._periods.wait_s)
        async with self._taking:
            self._take(page.items, page.version)
        if page.version != since:  # also without items: a rule has changed
            await asyncio.sleep(FEED_PAUSE_S)
        elif clock() - asked < self._periods.wait_s / 2:  # the broker ends, or does not wait
            raise BackendUnavailable("the bus ended a long poll before its time")
        elif page.counts_cursor is None or page.counts_cursor != self._cursor:
            self._may_count.set()

    def _take(self, items: Collection[EntityChange], version: int) -> None:
        self._allowance.take(items)
        moved = {catalog_key(each.name) for each in items if self.view.take(each)}
        if version > self.view.version:
            self.view.version = version
            self._may_count.set()
        if moved:
            self._moved(moved)

    def _show(self, trouble: str) -> None:
        """Show an outage in the resources of the bus."""
        is_new, self.trouble = self.trouble is None, trouble
        if is_new:
            self._moved(None)

    # --- counts ---------------------------------------------------------------------------------

    async def _follow_counts(self) -> None:
        while True:
            await self._may_count.wait()
            self._may_count.clear()
            try:
                await self._read_counts()
            except (BackendUnavailable, RequestRefused):  # the feed reports an outage
                self._may_count.set()
            await asyncio.sleep(self._periods.counts_s)

    async def _read_counts(self) -> None:
        changed: set[str] = set()
        is_end = False
        if len(self._counts) > MAX_CHANGES:  # of entities that are gone
            self._counts, self._shown, self._cursor = {}, {}, "0"
        for _ in range(MAX_CHANGES // PAGE):
            if is_end:
                break
            page = await self.control.counts(self._cursor)
            for each in page.items:
                self._counts[each.entity_id] = each
                numbers = numbers_in(each)
                if numbers is not None and has_moved(self._shown.get(each.entity_id), numbers):
                    self._shown[each.entity_id] = numbers
                    changed.add(catalog_key(each.name))
            self._cursor, is_end = page.cursor, page.is_end
        if self.view.version != self._counted_version:
            self._counted_version = self.view.version
            changed.add(BUS_PATH)
        if changed:
            self._moved(changed)

    # --- reader groups --------------------------------------------------------------------------

    async def reader_groups(self, *, is_fresh: bool) -> ReaderGroupList:
        """Return all reader groups: as they are now, or half a period ago, for looks at their lag.

        Looks at the same time share a request.
        """
        clock = asyncio.get_running_loop().time
        oldest = clock() - (0 if is_fresh else self._periods.groups_s / 2)
        async with self._asking_for_groups:
            if self._groups is None or self._groups_at < oldest:
                asked = clock()
                self._groups = await self.control.reader_groups()
                self._groups_at = asked
            return self._groups

    def next_groups_s(self) -> float:
        """Return the seconds until a look at the lag of a group, not the same for all of them."""
        return self._periods.groups_s * random.uniform(0.8, 1.2)


class BusSessions:
    """The sessions of all buses, opened when they are first needed."""

    def __init__(
        self,
        read_access: Callable[[Resource], Awaitable[Access]],
        epoch: int,
        still_leads: StillLeads,
        is_current: Callable[[Resource], bool],
        moved: Callable[[Resource, Collection[str] | None], None],
        periods: Periods = USUAL,
    ) -> None:
        """`is_current`: whether a Namespace exists, as the one with this uid."""
        self._read_access = read_access
        self._epoch = epoch
        self._still_leads = still_leads
        self._is_current = is_current
        self._on_moved = moved
        self._periods = periods
        self._sessions: dict[str, tuple[BusSession, asyncio.Task[None]]] = {}

    async def of(self, bus: Resource) -> BusSession | None:
        """Return the session of a bus; None while it has not answered yet (see `failure_of`).

        A new session is waited for.
        """
        session = self._session(bus)
        session.hurry()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_S):
                await session.is_tried.wait()
        return session if session.is_listed else None

    def answering(self, bus: Resource) -> BusSession | None:
        """Return the session of a bus that answers, as far as is known; None is opened here."""
        session, _ = self._sessions.get(bus.uid, (None, None))
        if session is None or not session.is_listed or session.trouble is not None:
            return None
        return session

    def failure_of(self, bus: Resource) -> BackendUnavailable:
        """Return the reason why a bus has not answered yet, or no longer answers.

        After a restart of the operator nothing shall be shown as unreachable only because it was
        not reached yet: that is StillConnecting, for as long as an outage is not shown either.
        """
        session = self._session(bus)
        text = session.trouble or CONNECTING
        return StillConnecting(text) if session.is_new else BackendUnavailable(text)

    async def close(self) -> None:
        """End all sessions."""
        sessions, self._sessions = self._sessions, {}
        for _, task in sessions.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in sessions.values()), return_exceptions=True)

    def _session(self, bus: Resource) -> BusSession:
        known = self._sessions.get(bus.uid)
        if known is not None:
            return known[0]
        session = BusSession(
            BusControl(lambda: self._read_access(bus), self._epoch, self._still_leads),
            lambda paths: self._on_moved(bus, paths),
            is_wanted=lambda: self._is_current(bus),
            periods=self._periods,
        )
        task = asyncio.create_task(session.run(), name=f"session of {bus.key}")
        task.add_done_callback(lambda _: self._sessions.pop(bus.uid, None))
        self._sessions[bus.uid] = (session, task)
        return session
