"""Writes the catalog's tables from a test, as the owner of partition 0."""

from __future__ import annotations

from collections.abc import Sequence

from postbus.contract.entities import EntityKind, EntityProperties
from postbus.store.catalog import (
    CatalogEntry,
    CatalogPut,
    CatalogStore,
    DeletedReason,
    StoredRule,
)
from postbus.store.catalog_change import CatalogFence
from postbus.store.postgres import Store
from tests.store.driving import make_partition


async def fence_of(store: Store) -> CatalogFence:
    """Return the current epoch of partition 0 and version of the catalog."""
    await make_partition(store, 0)
    async with store.aside() as connection:
        epoch = await connection.fetchval("select epoch from partition_0.owner")
        version = await connection.fetchval("select version from postbus.catalog_version")
    return CatalogFence(epoch, version)


class FreeCatalog:
    """The catalog's tables without a broker: each change uses the current version."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.tables = CatalogStore(store)

    async def load(self) -> tuple[int, list[CatalogEntry]]:
        return await self.tables.load()

    async def put(
        self,
        *,
        name: str,
        kind: EntityKind,
        properties: EntityProperties,
        home_partition: int,
        topic_no: int | None = None,
        rules: Sequence[StoredRule] = (),
        is_partitioned: bool = False,
    ) -> CatalogEntry:
        """Create or replace an entity with its rules."""
        _, entries = await self.load()
        known = [
            entry
            for entry in entries
            if (entry.kind, entry.name.lower()) == (kind, name.lower()) and not entry.is_retained
        ]
        put = CatalogPut(
            known[0] if known else None,
            name,
            kind,
            properties,
            home_partition,
            topic_no,
            tuple(rules),
            is_partitioned,
        )
        (entry,) = await self.put_all([put])
        return entry

    async def put_all(self, puts: Sequence[CatalogPut]) -> list[CatalogEntry]:
        return await self.tables.put_all(puts, await fence_of(self._store))

    async def delete(self, entity_no: int, reason: DeletedReason = DeletedReason.REQUESTED) -> int:
        return await self.tables.delete(entity_no, reason, await fence_of(self._store))

    async def retain(self, entity_no: int, until_ms: int) -> list[CatalogEntry]:
        return await self.tables.retain(entity_no, until_ms, await fence_of(self._store))

    async def restore(self, entity_no: int) -> list[CatalogEntry]:
        return await self.tables.restore(entity_no, await fence_of(self._store))
