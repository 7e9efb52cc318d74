"""Feed of changes since a version of the catalog, for operators and audits.

The feed is derived from the present state: entities with the version of their last change, and
tombstones. It needs no history in memory, survives restarts, and contains an entity that changed
twice once, with its last change. It does not reach back beyond the last tombstone that was removed.
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
    """Some changes since that version are no longer known: list everything again."""

    def __init__(self, version: int) -> None:
        super().__init__(
            Refused(
                Refusal.ARGUMENT_OUT_OF_RANGE,
                f"some changes since version {version} are no longer known: list everything again"
                " and continue from the version of the list",
            )
        )


class ChangeFeed:
    """The feed of one directory. Every method may raise StoreUnavailable or `TooOld`."""

    def __init__(self, directory: Directory, tombstones: TombstoneStore) -> None:
        self._directory = directory
        self._tombstones = tombstones

    async def tombstones(self, since: int, top: int = MOST, begun: int = 0) -> list[Tombstone]:
        """Return the entities deleted after a version, in order of version; 0: all known ones.

        At most `top` or a few more; continue with the version of the last one. `begun`: see
        `changes`.
        """
        forgotten, found = await self._tombstones.after(since, top)
        is_forgotten = since > 0 and max(since, begun) < forgotten
        if is_forgotten or since > self._directory.version:
            raise TooOld(since)
        return [stone for stone in found if stone.version <= self._directory.version]

    async def changes(
        self, since: int, wait_s: float = 0.0, begun: int = 0
    ) -> tuple[int, list[EntityChange]]:
        """Return changes after a version, and the version up to which these are all.

        They are `MOST` or a few more: the changes of one version are not split. Waits up to
        `wait_s` for the first one. `begun` is the version of the catalog when the caller began with
        0: it misses no tombstone that was removed before.
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
        stones = await self.tombstones(since, begun=begun)
        if len(stones) >= MOST:
            version = min(version, stones[-1].version)
        gone = [EntityChange(stone.version, stone.name, None, stone) for stone in stones]
        found = [change for change in (*puts, *gone) if since < change.version <= version]
        found.sort(key=lambda change: (change.version, change.name))
        if len(found) > MOST:
            version = found[MOST - 1].version
            found = [change for change in found if change.version <= version]
        return version, found
