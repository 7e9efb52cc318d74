"""Followers of the catalog: partitions, then callbacks, are notified of each change.

A partition follows when it has committed the change to its own copy of the definitions. A partition
that is not loaded is not notified: it catches up when it loads, before it accepts commands.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol, TypeAlias

from postbus.entity.commands import (
    Done,
    DropEntity,
    PutEntity,
    Refused,
)
from postbus.entity.expects import Expects, R
from postbus.store.catalog import CatalogEntry

logger = logging.getLogger(__name__)


NOTIFIED_AT_ONCE: Final = 100
"""Number of definition changes sent to a partition at a time, which it commits together. Our
choice: the commands for sixteen partitions delay others by less than a tenth of a second."""

DONE: Final = Done()

News: TypeAlias = tuple[CatalogEntry, PutEntity | DropEntity]


class DefinitionFollower(Protocol):
    """A partition's host, as the directory sees it."""

    @property
    def is_loaded(self) -> bool: ...

    @property
    def reload_count(self) -> int: ...

    @property
    def epoch(self) -> int | None: ...

    @property
    def trouble(self) -> str | None: ...

    async def call(self, command: Expects[R]) -> R | Refused: ...


class Followers:
    """`on_deleted` and `on_restored` are called with entity numbers after the partitions follow."""

    def __init__(self, partition_count: int) -> None:
        self._partition_count = partition_count
        self._notified: dict[int, int] = {}
        """Partition that is being notified -> the version it has until then."""
        self.hosts: Sequence[DefinitionFollower] = ()
        """In order of partition id."""

        self.on_deleted: list[Callable[[int], None]] = []
        self.on_restored: list[Callable[[int], None]] = []

    def homes_of(self, entry: CatalogEntry) -> Collection[int]:
        """Return the partitions of an entity."""
        return range(self._partition_count) if entry.is_partitioned else (entry.home_partition,)

    def hosts_of(self, entry: CatalogEntry) -> list[DefinitionFollower]:
        return [self.hosts[home] for home in self.homes_of(entry)]

    def acknowledged(self, version: int) -> dict[int, int]:
        """Return partition -> the version of the catalog it has; `version` is the latest."""
        return {
            partition_id: self._notified.get(partition_id, version)
            for partition_id in range(self._partition_count)
        }

    async def notify(self, news: Sequence[News]) -> None:
        """Return when loaded partitions follow all changes, in this order, or are being loaded."""
        if not self.hosts:
            return
        homes = {home for entry, _ in news for home in self.homes_of(entry)}
        homes = {home for home in homes if self.hosts[home].is_loaded}
        for home in homes:
            self._notified.setdefault(home, news[0][1].catalog_version - 1)
        try:
            for start in range(0, len(news), NOTIFIED_AT_ONCE):
                await self._notify_some(news[start : start + NOTIFIED_AT_ONCE])
        finally:
            for home in homes:
                self._notified.pop(home, None)

    async def _notify_some(self, news: Sequence[News]) -> None:
        calls = [
            (home, command)
            for entry, command in news
            for home in self.homes_of(entry)
            if self.hosts[home].is_loaded
        ]
        replies = await asyncio.gather(*(self._call(home, command) for home, command in calls))
        for (home, _), reply in zip(calls, replies, strict=True):
            if isinstance(reply, Refused):  # the reload catches up
                logger.warning(
                    "partition did not take a definition",
                    extra={"partition": home, "refusal": reply.refusal.value},
                )

    async def _call(self, home: int, command: PutEntity | DropEntity) -> Done | Refused:
        """Notify one partition; do not wait for a load, which waits for the catalog."""
        host = self.hosts[home]
        return await host.call(command) if host.is_loaded else DONE

    async def notify_gone(self, entries: Sequence[CatalogEntry], version: int) -> None:
        """Have partitions drop entities, subscriptions before topics; then call the callbacks."""
        await self.notify([(entry, DropEntity(entry.entity_no, version)) for entry in entries])
        for entry in entries:
            for notify in self.on_deleted:
                notify(entry.entity_no)

    def notify_move(self, entry: CatalogEntry) -> None:
        """Call the callbacks of an entity that was retained or restored; its partitions know."""
        for notify in self.on_deleted if entry.is_retained else self.on_restored:
            notify(entry.entity_no)
