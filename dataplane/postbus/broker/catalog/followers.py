"""Who is told of a change of the catalog: the partitions it concerns, then whoever asked for it.

A partition follows when it has committed the change to its own copy of the definitions. One that is
not loaded is not told: it catches up when it loads, before it takes anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol, TypeAlias

from postbus.entity.commands import Command, Done, DropEntity, PutEntity, Refused, Reply
from postbus.store.catalog import CatalogEntry

logger = logging.getLogger(__name__)


NOTIFIED_AT_ONCE: Final = 100
"""Entities that partitions are told of together. Our choice: each commits them at once, and the
commands for sixteen partitions hold up others for less than a tenth of a second."""

DONE: Final = Done()

News: TypeAlias = tuple[CatalogEntry, PutEntity | DropEntity]


class DefinitionFollower(Protocol):
    """A partition's host, as far as the directory knows it."""

    @property
    def is_loaded(self) -> bool: ...

    @property
    def reload_count(self) -> int: ...

    @property
    def epoch(self) -> int | None: ...

    @property
    def trouble(self) -> str | None: ...

    async def call(self, command: Command) -> Reply: ...


class Followers:
    """`on_deleted` and `on_restored` get numbers of entities when their partitions know of it."""

    def __init__(self, partition_count: int) -> None:
        self._partition_count = partition_count
        self._notified: dict[
            int, int
        ] = {}  # partition that is being told -> what it has until then
        self.hosts: Sequence[DefinitionFollower] = ()
        """In order of partition id."""

        self.on_deleted: list[Callable[[int], None]] = []
        self.on_restored: list[Callable[[int], None]] = []

    def homes_of(self, entry: CatalogEntry) -> Collection[int]:
        """Return the partitions that an entity lives in."""
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
        """Return when the loaded partitions follow all of it, in this order, or are being loaded.

        Whom it concerns they learn of many at a time, which they commit together.
        """
        if not self.hosts:
            return
        told = {home for entry, _ in news for home in self.homes_of(entry)}
        told = {home for home in told if self.hosts[home].is_loaded}
        for home in told:
            self._notified.setdefault(home, news[0][1].catalog_version - 1)
        try:
            for start in range(0, len(news), NOTIFIED_AT_ONCE):
                await self._notify_some(news[start : start + NOTIFIED_AT_ONCE])
        finally:
            for home in told:
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
            if isinstance(reply, Refused):  # whatever the store said, the reload catches up
                logger.warning(
                    "partition did not take a definition",
                    extra={"partition": home, "refusal": reply.refusal.value},
                )

    async def _call(self, home: int, command: PutEntity | DropEntity) -> Reply:
        """Tell one partition; it does not wait for a load, which waits for the catalog."""
        host = self.hosts[home]
        return await host.call(command) if host.is_loaded else DONE

    async def notify_gone(self, entries: Sequence[CatalogEntry], version: int) -> None:
        """Have partitions drop entities, subscriptions before their topic; then tell others."""
        await self.notify([(entry, DropEntity(entry.entity_no, version)) for entry in entries])
        for entry in entries:
            for notify in self.on_deleted:
                notify(entry.entity_no)

    def notify_move(self, entry: CatalogEntry) -> None:
        """Tell that an entity is retained now, or came back; its partitions know."""
        for notify in self.on_deleted if entry.is_retained else self.on_restored:
            notify(entry.entity_no)
