"""The catalog in the memory of a broker: the owner of partition 0 changes it, all others follow.

Decisions under its lock are based on the durable version, and written only while partition 0 is
still ours (`store/catalog_change.py`). A failed write may be durable nevertheless: the tables are
read again before any caller is answered. A broker that does not own partition 0 reads the tables
when their version changes; a loaded partition accepts no commands before the catalog here is at
least as new as its own copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

from postbus.broker.backoff import Backoff
from postbus.broker.catalog.entries import Entries, put_of, puts_in_order
from postbus.broker.catalog.followers import Followers
from postbus.broker.catalog.preconditions import DirectoryRefusal, NotWritten, refusal
from postbus.entity.commands import DropEntity, PutEntity, Refusal, Refused, Tick
from postbus.store.catalog import CatalogEntry, CatalogStore
from postbus.store.catalog_change import CATALOG_PARTITION, CatalogFence
from postbus.store.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FOLLOW_S: Final = 1.0
"""Interval at which a broker that does not change definitions reads the catalog's version, a row.
Our choice."""

caller_epoch: Final[ContextVar[int | None]] = ContextVar("caller_epoch", default=None)
"""Epoch with which `CallerFence` admitted the current change."""


class Catalog:
    """Entries and version in step with the tables; call `read` first.

    `on_read` are called after each read of the tables, before the version is visible: they read
    tables beside the catalog.
    """

    def __init__(
        self,
        store: CatalogStore,
        partition_count: int,
        on_put: Callable[[CatalogEntry], None],
    ) -> None:
        """`on_put` is called with each entry that was put, before partitions are notified."""
        self.store = store
        self.entries = Entries()
        self.followers = Followers(partition_count)
        self.on_read: list[Callable[[], Awaitable[None]]] = []
        self._on_put = on_put
        self._lock = asyncio.Lock()
        self._is_unsure = False  # the result of a write is unknown
        self._version = 0
        self._moved = asyncio.Event()

    @property
    def version(self) -> int:
        """The catalog's version: each change raises it."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def wait_beyond(self, version: int) -> None:
        """Return when the catalog has a later version."""
        while self._version <= version:
            await self._moved.wait()

    async def read(self) -> None:
        """Read the tables for the first time; raises `StoreUnavailable`."""
        version, entries = await self.store.load()
        self.entries = Entries(entries)
        self.version = version

    # --- ownership ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int | None:
        """The epoch of partition 0 while it is ours, else None; only its owner changes
        definitions.
        """
        hosts = self.followers.hosts
        return hosts[CATALOG_PARTITION].epoch if hosts else None

    async def own(self) -> int:
        """Return that epoch; try to claim partition 0 once if it is not ours.

        Raises `DirectoryRefusal`, NOT_APPLIED, naming the owner.
        """
        owner = self.followers.hosts[CATALOG_PARTITION]
        if owner.epoch is None:
            reply = await owner.call(Tick())
            if isinstance(reply, Refused):
                raise _elsewhere(reply.detail)
        return self._owned()

    def _owned(self) -> int:
        owner = self.followers.hosts[CATALOG_PARTITION]
        if owner.epoch is None:
            raise _elsewhere(owner.trouble or "it is being loaded")
        return owner.epoch

    def fence(self) -> CatalogFence:
        """Return the condition under which a decision made now may commit."""
        return CatalogFence(self._owned(), self._version, caller_epoch.get())

    # --- changing -------------------------------------------------------------------------------

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Lock the catalog for changes in a block; raises `DirectoryRefusal` like `own`."""
        await self.own()
        async with self._lock:
            await self._resolve_unknown_write()
            self._owned()
            yield

    async def written(self, work: Awaitable[T], is_written: Callable[[], bool]) -> T | None:
        """Write to the tables. Return None if the answer was lost, but the tables show the write.

        Partitions and `on_read` then know of it already. Raises `NotWritten` if they do not show
        it.
        """
        self._is_unsure = True
        try:
            result = await work
        except Exception as error:
            await self._resolve_unknown_write()
            if not is_written():
                raise NotWritten(error) from error
            return None
        self._is_unsure = False
        return result

    async def follow(self, moved: Sequence[CatalogEntry], *, was_elsewhere: bool = False) -> None:
        """Apply written entries, a topic first, and notify followers; also if retained or
        restored.
        """
        for entry in moved:
            self.entries.put(entry)
            self.version = entry.version
        await self._notify([(entry, put_of(entry)) for entry in moved])
        for entry in moved if was_elsewhere else ():
            self.followers.notify_move(entry)

    async def remove(self, entry: CatalogEntry, version: int) -> None:
        """Remove an entity permanently, a topic with its subscriptions, and notify followers."""
        number = entry.entity_no
        below = (*self.entries.subscriptions_of(number), *self.entries.retained_below(number))
        self.version = version
        for gone in (*below, entry):
            self.entries.remove(gone)
        await self.followers.notify_gone([*below, entry], version)

    async def _resolve_unknown_write(self) -> None:
        """Read the catalog again if a write's result is unknown; retried until it succeeds."""
        backoff = Backoff()
        while self._is_unsure:
            try:
                await self._read_again()
            except StoreError as error:
                logger.warning("the catalog could not be read again", extra={"error": str(error)})
                await backoff.pause()

    # --- following ------------------------------------------------------------------------------

    async def keep_following(self) -> None:
        """Follow the owner of partition 0 while it is another broker; ends when cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            if self.epoch is not None:
                continue
            try:
                await self.refresh(await self.store.read_version())
            except (StoreError, ValueError) as error:  # a row of a newer version, perhaps
                logger.warning("the catalog could not be read", extra={"error": str(error)})

    async def refresh(self, at_least: int) -> None:
        """Return when the catalog here has at least this version, which is durable.

        Raises StoreUnavailable.
        """
        if self._version >= at_least:
            return
        async with self._lock:
            if self._version < at_least or self._is_unsure:
                await self._read_again()

    async def catch_up(
        self, partition_id: int, copies: dict[int, int], version: int, *, was_ours: bool
    ) -> set[int]:
        """Read what a partition needs that was just loaded; return what it has to drop (ADR 27).

        `copies`: number -> version of the definitions it has, `version`: up to which it followed,
        `was_ours`: no other broker has owned it since its previous load here. An entity is never
        dropped because it is unknown here: there must be a tombstone. Raises StoreUnavailable.
        """
        if not was_ours or version > self._version:
            await self.refresh(max(version, await self.store.read_version()))
        gone: set[int] = set()
        asked: set[int] = set()
        while unknown := self._unknown(partition_id, copies) - asked:
            gone |= await self.store.buried({number: copies[number] for number in unknown})
            asked |= unknown
        if asked - gone:
            logger.warning(
                "a partition has entities that are not in the catalog; their messages are kept,"
                " but cannot be received",
                extra={"partition": partition_id, "entities": sorted(asked - gone)},
            )
        return gone

    def missing(
        self, partition_id: int, known: set[int], version: int, gone: Iterable[int]
    ) -> list[PutEntity | DropEntity]:
        """Return the missing commands of a partition that knows these numbers up to a version, in
        order.

        `gone` is what `catch_up` returned.
        """
        # Subscriptions are created after their topic and dropped before it.
        drops = [DropEntity(number, self.version) for number in sorted(gone, reverse=True)]
        return [*puts_in_order(self.entries_of(partition_id), known, version), *drops]

    def entries_of(self, partition_id: int) -> list[CatalogEntry]:
        """Return the entities of a partition, including retained ones."""
        homes_of = self.followers.homes_of
        return [entry for entry in self.entries.stored() if partition_id in homes_of(entry)]

    def _unknown(self, partition_id: int, copies: dict[int, int]) -> set[int]:
        return set(copies) - {entry.entity_no for entry in self.entries_of(partition_id)}

    async def _read_again(self) -> None:
        """Read the tables and notify followers; the lock is held. Raises StoreUnavailable."""
        version, entries = await self.store.load()
        stored = {entry.entity_no for entry in entries}
        lost = {
            each.entity_no: each.version
            for each in self.entries.stored()
            if each.entity_no not in stored
        }
        buried = await self.store.buried(lost)
        known, self.entries = self.entries.stored(), Entries(entries)
        try:
            for read in self.on_read:
                await read()
        except BaseException:
            self.entries = Entries(known)
            raise
        known_version, self.version = self._version, version
        self._is_unsure = False
        await self._notify_changes(known, known_version, buried)

    async def _notify_changes(
        self, known: list[CatalogEntry], known_version: int, buried: set[int]
    ) -> None:
        """Notify partitions of differences that a read has found, in order of version (ADR 27)."""
        before = {entry.entity_no: entry for entry in known}
        news: list[tuple[CatalogEntry, PutEntity]] = []
        for put in puts_in_order(self.entries.stored(), set(before), known_version):
            entry = self.entries.stored_numbered(put.entity_no)
            assert entry is not None
            news.append((entry, put))
        await self._notify(news)
        for entry in {entry.entity_no: entry for entry, _ in news}.values():
            was = before.get(entry.entity_no)
            if was is not None and was.is_retained is not entry.is_retained:
                self.followers.notify_move(entry)
        known.sort(key=lambda each: each.entity_no, reverse=True)
        gone = [each for each in known if each.entity_no in buried]
        await self.followers.notify_gone(gone, self.version)

    async def _notify(self, news: Sequence[tuple[CatalogEntry, PutEntity]]) -> None:
        """Notify partitions, which thaws entities that were frozen since the write began."""
        for entry, _ in news:
            self._on_put(entry)
        await self.followers.notify(news)


def _elsewhere(why: str) -> DirectoryRefusal:
    return refusal(
        Refusal.NOT_APPLIED,
        "definitions are changed by the broker that owns partition 0, and not by this one:"
        f" {why}; try again, or there",
    )
