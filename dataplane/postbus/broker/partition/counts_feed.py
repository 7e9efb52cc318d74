"""Feed of entities whose counts moved since a cursor, for callers that keep all of them current.

It compares counts in memory with those of the last look, and only in partitions that committed
something since then: idle entities cost nothing, and no look reads the store. A movement is
assigned the next number; a cursor is a number and the life of the broker that assigned it. An
entity that moved twice is listed once, as it is now, under its last number, so that nothing is lost
between two requests, whatever their pages. Messages that came and went between two looks are a
movement, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from secrets import token_hex
from typing import Final, NamedTuple, TypeAlias

from postbus.broker.catalog.directory import Directory
from postbus.broker.partition.host import Host
from postbus.entity.counts import Counts, sum_of
from postbus.store.catalog import CatalogEntry

COUNTS_AT_ONCE: Final = 200
"""Number of counts taken before other tasks run: about a millisecond. Our choice."""

PartitionMark: TypeAlias = tuple[bool, int, int, str | None]
"""Differs after each commit, reload and change of availability of a partition."""

_compared = attrgetter(
    "active", "dead_letter", "scheduled", "transfer", "transfer_dead_letter", "size_bytes"
)


class EntityMovement(NamedTuple):
    """The counts of an entity when it moved last.

    `counts` leave `unavailable_partitions` out; None: none of its partitions is available.
    `accepted`: messages sent to it, as far as this broker knows. `is_limited`: a partition is
    unavailable or takes no messages.
    """

    number: int
    entry: CatalogEntry
    counts: Counts | None
    accepted: int
    unavailable_partitions: tuple[int, ...]
    is_limited: bool
    subscription_count: int

    def is_as(self, other: EntityMovement) -> bool:
        """Return whether nothing moved in between; the time of the last access moves nothing."""
        if self[3:] != other[3:] or (self.counts is None) is not (other.counts is None):
            return False
        return self.counts is None or _compared(self.counts) == _compared(other.counts)


class MovementPage(NamedTuple):
    """Movements in order, and the cursor behind them.

    `starts_over`: they begin with the first, since the cursor of the request is of no use.
    """

    items: list[EntityMovement]
    cursor: str
    is_end: bool
    starts_over: bool


class CountsFeed:
    """Movements in this life of the broker; see the module's docstring."""

    def __init__(
        self, directory: Directory, hosts: Sequence[Host], life: str | None = None
    ) -> None:
        self._directory = directory
        self._hosts = hosts
        self._life = life or token_hex(8)
        self._number = 0
        self._movements: dict[int, EntityMovement] = {}  # by entity, in order of number
        self._marks: list[PartitionMark] = []
        self._version = -1  # of the catalog at the last look
        self._entries: list[CatalogEntry] = []
        self._entries_version = -1
        self._homes: set[int] = set()
        self._look_count = 0
        self._looking = asyncio.Lock()

    def homes(self) -> list[Host]:
        """Return the partitions in which entities live."""
        self._know_entries()
        return [self._hosts[home] for home in sorted(self._homes)]

    async def since(self, cursor: str, top: int) -> MovementPage:
        """Return at most `top` movements after a cursor; a cursor of another life starts over."""
        life, _, number_text = cursor.partition(".")
        number = int(number_text) if life == self._life else 0
        starts_over = life != self._life or number > self._number
        if starts_over:
            number = 0
        if len(found := self._after(number)) < top:
            await self._look()
            found = self._after(number)
        items = found[:top]
        is_end = len(items) == len(found)
        behind = self._number if is_end else items[-1].number
        return MovementPage(items, self._cursor_of(behind), is_end, starts_over)

    async def cursor(self) -> str:
        """Return the cursor behind the last movement; nothing is loaded for it."""
        await self._look()
        return self._cursor_of(self._number)

    def _cursor_of(self, number: int) -> str:
        return f"{self._life}.{number}"

    def _after(self, number: int) -> list[EntityMovement]:
        """Return the movements of existing entities after a number, in order."""
        found = []
        for movement in reversed(self._movements.values()):
            if movement.number <= number:
                break
            if self._directory.numbered(movement.entry.entity_no) is not None:
                found.append(movement)
        found.reverse()
        return found

    async def _look(self) -> None:
        """Find movements; callers that come during one look share the next one."""
        count = self._look_count
        async with self._looking:
            if self._look_count == count:
                self._look_count += 1
                await self._look_once()

    async def _look_once(self) -> None:
        self._know_entries()
        version, entries = self._entries_version, self._entries
        marks = [_mark_of(host) for host in self._hosts]
        if version != self._version:
            known = {entry.entity_no for entry in entries}
            for gone in self._movements.keys() - known:
                del self._movements[gone]
        else:
            moved = {
                home
                for home, (now, before) in enumerate(zip(marks, self._marks, strict=True))
                if now != before
            }
            if not moved:
                return
            entries = [
                entry for entry in entries if entry.is_partitioned or entry.home_partition in moved
            ]
        counted = 0
        for entry in entries:
            counted += self._compare(entry)
            if counted >= COUNTS_AT_ONCE:
                counted = 0
                await asyncio.sleep(0)
        self._marks, self._version = marks, version

    def _know_entries(self) -> None:
        if self._entries_version != self._directory.version:
            self._entries_version = self._directory.version
            self._entries = self._directory.entries()
            self._homes = {
                home for entry in self._entries for home in self._directory.homes_of(entry)
            }

    def _compare(self, entry: CatalogEntry) -> int:
        """Number an entity if it moved; return how many of its partitions were counted."""
        entity_no = entry.entity_no
        hosts = [self._hosts[home] for home in self._directory.homes_of(entry)]
        known, unavailable, accepted, is_limited = [], [], 0, False
        for host in hosts:
            counts = host.counts(entity_no)
            if counts is None:
                unavailable.append(host.partition_id)
            else:
                known.append(counts)
            traffic = host.traffic.get(entity_no)
            accepted += 0 if traffic is None else traffic.accepted
            is_limited = is_limited or counts is None or host.trouble is not None
        total = known[0] if len(known) == 1 else sum_of(known) if known else None
        now = EntityMovement(
            self._number + 1,
            entry,
            total,
            accepted,
            tuple(unavailable),
            is_limited,
            self._directory.subscription_count(entity_no),
        )
        before = self._movements.get(entity_no)
        if before is None or not before.is_as(now):
            self._movements.pop(entity_no, None)
            self._movements[entity_no] = now
            self._number += 1
        return len(hosts)


def _mark_of(host: Host) -> PartitionMark:
    commits = sum(host.counters.commit_counts)
    return host.is_loaded, host.reload_count, commits, host.trouble
