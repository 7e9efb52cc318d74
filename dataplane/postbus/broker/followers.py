"""Who is told of a change of the catalog: the partitions it concerns, then whoever asked for it.

A partition follows when it has committed the change to its own copy of the definitions. One that is
not loaded is not told: it catches up when it loads, before it takes anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from postbus.entity.commands import Command, DropEntity, PutEntity, Refused, Reply
from postbus.store.catalog import CatalogEntry

logger = logging.getLogger(__name__)


class DefinitionFollower(Protocol):
    """A partition's host, as far as the directory knows it."""

    @property
    def is_loaded(self) -> bool: ...

    @property
    def reload_count(self) -> int: ...

    async def call(self, command: Command) -> Reply: ...


class Followers:
    """`on_deleted` and `on_restored` get numbers of entities when their partitions know of it."""

    def __init__(self, partition_count: int) -> None:
        self._partition_count = partition_count
        self._told: dict[int, int] = {}  # partition that is being told -> what it has until then
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
            partition_id: self._told.get(partition_id, version)
            for partition_id in range(self._partition_count)
        }

    async def tell(self, entry: CatalogEntry, command: PutEntity | DropEntity) -> None:
        """Return when the loaded partitions of an entity follow, or are being loaded."""
        if not self.hosts:
            return
        homes = [home for home in self.homes_of(entry) if self.hosts[home].is_loaded]
        for home in homes:
            self._told.setdefault(home, command.catalog_version - 1)
        try:
            replies = await asyncio.gather(*(self.hosts[home].call(command) for home in homes))
        finally:
            for home in homes:
                self._told.pop(home, None)
        for home, reply in zip(homes, replies, strict=True):
            if isinstance(reply, Refused):  # whatever the store said, the reload catches up
                logger.warning(
                    "partition did not take a definition",
                    extra={"partition": home, "refusal": reply.refusal.value},
                )

    async def tell_gone(self, entry: CatalogEntry, version: int) -> None:
        await self.tell(entry, DropEntity(entry.entity_no, version))
        for tell in self.on_deleted:
            tell(entry.entity_no)

    def tell_move(self, entry: CatalogEntry) -> None:
        """Tell that an entity is retained now, or came back; its partitions know."""
        for tell in self.on_deleted if entry.is_retained else self.on_restored:
            tell(entry.entity_no)
