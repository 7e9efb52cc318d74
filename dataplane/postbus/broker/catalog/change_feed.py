"""Feed of changes since a version of the catalog, for operators and audits.

The feed is made of the present state: entities with the version of their last change, and
tombstones. It needs no history in memory, survives restarts, and shows an entity that changed twice
once, as it is now. It cannot go back beyond the oldest tombstone that was removed.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.entity.commands import Refusal, Refused
from postbus.store.catalog import CatalogEntry
from postbus.store.tombstones import Tombstone, TombstoneStore

MOST: Final = 1_000
"""Changes in one answer, or a few more; a caller that gets this many asks again."""


class EntityChange(NamedTuple):
    """A change of the catalog: an entity as it is now, or its tombstone."""

    version: int
    name: str
    entity: CatalogEntry | None
    tombstone: Tombstone | None


class TooOld(DirectoryRefusal):
    """Not all changes since that version are known any more: list everything again."""

    def __init__(self, version: int) -> None:
        super().__init__(
            Refused(
                Refusal.ARGUMENT_OUT_OF_RANGE,
                f"the changes since version {version} are not all known: list everything again"
                " and go on from the version of the list",
            )
        )


class ChangeFeed:
    """Answers for one directory. Every method may raise StoreUnavailable or `TooOld`."""

    def __init__(self, directory: Directory, tombstones: TombstoneStore) -> None:
        self._directory = directory
        self._tombstones = tombstones

    async def tombstones(self, since: int, top: int = MOST) -> list[Tombstone]:
        """Return what was deleted after a version, in order of version; 0 asks for all known.

        They are `top` or a few more; the rest follows after the version of the last.
        """
        forgotten, found = await self._tombstones.after(since, top)
        if 0 < since < forgotten or since > self._directory.version:
            raise TooOld(since)
        return [stone for stone in found if stone.version <= self._directory.version]

    async def changes(self, since: int, wait_s: float = 0.0) -> tuple[int, list[EntityChange]]:
        """Return changes after a version, and the version up to which these are all.

        They are `MOST` or a few more: the changes of one version are not split. Waits up to
        `wait_s` for the first one.
        """
        if since > self._directory.version:
            raise TooOld(since)
        if wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._directory.catalog.wait_beyond(since)
            except TimeoutError:
                pass
        version = self._directory.version
        if version == since:
            return version, []
        puts = [
            EntityChange(entry.version, entry.name, entry, None)
            for entry in self._directory.changed_since(since)
        ]
        stones = await self.tombstones(since)
        if len(stones) >= MOST:
            version = min(version, stones[-1].version)
        gone = [EntityChange(stone.version, stone.name, None, stone) for stone in stones]
        found = [change for change in (*puts, *gone) if since < change.version <= version]
        found.sort(key=lambda change: (change.version, change.name))
        if len(found) > MOST:
            version = found[MOST - 1].version
            found = [change for change in found if change.version <= version]
        return version, found
