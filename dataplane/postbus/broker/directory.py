"""The catalog of a namespace: which entities exist, what they are and where they live (D14).

One process decides for now; the durable catalog lies with partition 0 and every partition keeps
its own copy through its own journal. A definition counts as changed when the catalog's commit is
durable and, if the home partition is loaded, it has acknowledged the change. A write that failed
may be durable all the same: the tables are read again before anybody is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Protocol

from postbus.broker.recovery import FIRST_BACKOFF_S, LAST_BACKOFF_S
from postbus.contract import QueueProperties
from postbus.entity.commands import Command, DropEntity, PutEntity, Refused, Reply
from postbus.store.catalog import CatalogEntry, CatalogStore
from postbus.store.errors import StoreError

logger = logging.getLogger(__name__)


class DefinitionFollower(Protocol):
    """A partition's host, as far as the directory knows it."""

    @property
    def is_loaded(self) -> bool: ...

    async def call(self, command: Command) -> Reply: ...


class Directory:
    """Definitions in memory, in step with the catalog's tables."""

    def __init__(self, catalog: CatalogStore, partition_count: int) -> None:
        self._catalog = catalog
        self._partition_count = partition_count
        self._entries: dict[str, CatalogEntry] = {}
        self._followers: Sequence[DefinitionFollower] = ()
        self._changing = asyncio.Lock()
        self._is_unsure = False  # a write began whose result nobody learned
        self.version = 0

    def follow(self, followers: Sequence[DefinitionFollower]) -> None:
        """Name the hosts of the partitions, in order of partition id."""
        self._followers = followers

    async def load(self) -> None:
        """Read the catalog; raises `StoreUnavailable`."""
        self.version, entries = await self._catalog.load()
        self._entries = {entry.name.lower(): entry for entry in entries}

    def find(self, name: str) -> CatalogEntry | None:
        """Return the entity of a lower-case name."""
        return self._entries.get(name)

    def entries(self) -> list[CatalogEntry]:
        return sorted(self._entries.values(), key=lambda entry: entry.name)

    def entries_of(self, partition_id: int) -> list[CatalogEntry]:
        """Return what lives in a partition, for its host to catch up with."""
        return [entry for entry in self._entries.values() if entry.home_partition == partition_id]

    async def put_queue(self, name: str, properties: QueueProperties) -> CatalogEntry:
        """Create a queue or change its definition; an equal definition changes nothing.

        Raises what the store raised when the definition was not written; waits for the store as
        long as that is unknown.
        """
        async with self._changing:
            await self._make_sure()
            known = self._entries.get(name.lower())
            if known is not None and known.properties == properties:
                return known
            self._is_unsure = True
            try:
                entry = await self._catalog.put(
                    name=known.name if known else name,
                    properties=properties,
                    home_partition=(
                        known.home_partition if known else home_of(name, self._partition_count)
                    ),
                )
            except Exception:
                await self._make_sure()
                found = self._entries.get(name.lower())
                if found is None or found.properties != properties:
                    raise
                return found
            self._is_unsure = False
            self._entries[name.lower()] = entry
            self.version = entry.version
            await self._tell(
                entry.home_partition,
                PutEntity(entry.entity_no, entry.name, entry.properties, entry.version),
            )
            return entry

    async def delete(self, name: str) -> bool:
        """Free a name at once; its messages go with it. False when there was none.

        Fails as `put_queue` does.
        """
        async with self._changing:
            await self._make_sure()
            entry = self._entries.get(name.lower())
            if entry is None:
                return False
            self._is_unsure = True
            try:
                self.version = await self._catalog.delete(entry.entity_no)
            except Exception:
                await self._make_sure()
                found = self._entries.get(name.lower())
                if found is not None and found.entity_no == entry.entity_no:
                    raise
                return True
            self._is_unsure = False
            del self._entries[name.lower()]
            await self._tell(entry.home_partition, DropEntity(entry.entity_no, self.version))
            return True

    async def _make_sure(self) -> None:
        """Read the catalog again if a write's result is unknown; repeated until it works."""
        backoff_s = FIRST_BACKOFF_S
        while self._is_unsure:
            try:
                version, entries = await self._catalog.load()
            except StoreError as error:
                logger.warning("the catalog could not be read again", extra={"error": str(error)})
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, LAST_BACKOFF_S)
                continue
            known, self._entries = self._entries, {entry.name.lower(): entry for entry in entries}
            self.version = version
            self._is_unsure = False
            await self._tell_changes(list(known.values()))

    async def _tell_changes(self, known: list[CatalogEntry]) -> None:
        """Let partitions follow what the tables turned out to say, in order of version (D14)."""
        versions = {entry.entity_no: entry.version for entry in known}
        live = sorted(self._entries.values(), key=lambda entry: entry.version)
        for entry in live:
            if versions.pop(entry.entity_no, None) != entry.version:
                await self._tell(
                    entry.home_partition,
                    PutEntity(entry.entity_no, entry.name, entry.properties, entry.version),
                )
        for entry in known:
            if entry.entity_no in versions:  # not there any more
                await self._tell(entry.home_partition, DropEntity(entry.entity_no, self.version))

    async def _tell(self, partition_id: int, command: Command) -> None:
        """Let a loaded partition follow; one that is not catches up when it loads."""
        if self._followers and self._followers[partition_id].is_loaded:
            reply = await self._followers[partition_id].call(command)
            if isinstance(reply, Refused):  # whatever the store said, the reload catches up
                logger.warning(
                    "partition did not take a definition",
                    extra={"partition": partition_id, "refusal": reply.refusal.value},
                )


def home_of(name: str, partition_count: int) -> int:
    """Choose the partition of a new entity by rendezvous hashing of its name."""
    key = name.lower().encode()

    def weight(partition_id: int) -> bytes:
        return hashlib.blake2b(key, digest_size=8, salt=partition_id.to_bytes(2, "big")).digest()

    return max(range(partition_count), key=weight)
