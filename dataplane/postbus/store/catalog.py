"""The durable catalog of a namespace: definitions of entities, decided by partition 0 (D14).

Each change is one commit that raises the version. Called by `broker/directory.py` only, which
serialises its changes; two brokers that change at once wait for each other's row lock here.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

import asyncpg

from postbus.contract import QueueProperties
from postbus.store.postgres import Store, StoreMisconfigured


class CatalogEntry(NamedTuple):
    """An entity that exists. `version`: the catalog's when it was changed last."""

    entity_no: int
    name: str
    kind: str
    properties: QueueProperties
    home_partition: int
    version: int
    created_ms: int
    updated_ms: int


class CatalogStore:
    """Reads and writes the catalog's tables. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def load(self) -> tuple[int, list[CatalogEntry]]:
        """Return the catalog's version and what exists, in order of name.

        Waits for a writer that is under way, so that what a lost connection left is known.
        """
        await self._store.open()
        async with self._store.aside() as connection, connection.transaction():
            await connection.execute(f"set local lock_timeout = {LOCK_MS}")
            version = await connection.fetchval(LOCK_VERSION)
            rows = await connection.fetch(LOAD)
        return int(version), [_entry(row) for row in rows]

    async def record_shape(self, sku: str, partition_count: int) -> None:
        """Record the SKU and number of partitions; raise StoreMisconfigured where they clash.

        The partition count is for life (D18), so Premium is too; Basic and Standard may change
        into each other.
        """
        await self._store.open()
        async with self._store.aside() as connection, connection.transaction():
            row = await connection.fetchrow(READ_SHAPE)
            assert row is not None
            count = row["partition_count"]
            if count is None and row["in_use"] > partition_count:
                raise StoreMisconfigured(
                    f"the store holds queues in {row['in_use']} partitions, the manifest asks for "
                    f"{partition_count}; give the bus the partitions it was made with"
                )
            is_premium_changed = row["sku"] is not None and PREMIUM in (row["sku"], sku)
            if count is not None and (
                count != partition_count or (is_premium_changed and row["sku"] != sku)
            ):
                raise StoreMisconfigured(
                    f"the store was made as {row['sku']} with {count} partitions, the manifest "
                    f"asks for {sku} with {partition_count}; set sku and partitions in the "
                    "manifest back, or use a new database and move the messages"
                )
            if (row["sku"], count) != (sku, partition_count):
                await connection.execute(WRITE_SHAPE, sku, partition_count)

    async def put(
        self, *, name: str, properties: QueueProperties, home_partition: int, kind: str = "queue"
    ) -> CatalogEntry:
        """Create an entity under a fresh number, or replace the definition of that name."""
        await self._store.open()
        definition = properties.model_dump_json(by_alias=True)
        async with self._store.aside() as connection, connection.transaction():
            version = await connection.fetchval(RAISE_VERSION)
            row = await connection.fetchrow(REPLACE, name, definition, version)
            if row is None:
                row = await connection.fetchrow(
                    CREATE, name, kind, definition, home_partition, version
                )
            assert row is not None
        return _entry(row)

    async def delete(self, entity_no: int) -> int:
        """Free the name of an entity; its number is never used again. Return the new version."""
        await self._store.open()
        async with self._store.aside() as connection, connection.transaction():
            version = await connection.fetchval(RAISE_VERSION)
            await connection.execute(DELETE, entity_no, version)
        return int(version)


PREMIUM: Final = "Premium"
LOCK_MS: Final = 4_500
LOCK_VERSION: Final = "select version from postbus.catalog_version for share"
READ_SHAPE: Final = """
select sku, partition_count,
       (select coalesce(max(home_partition) + 1, 0) from postbus.catalog where not is_deleted)
           as in_use
from postbus.store for update
"""
WRITE_SHAPE: Final = "update postbus.store set sku = $1, partition_count = $2"
COLUMNS: Final = """
entity_no, name, kind, definition, home_partition, version, created_ms, updated_ms
"""
LOAD: Final = f"select {COLUMNS} from postbus.catalog where not is_deleted order by name"
RAISE_VERSION: Final = """
update postbus.catalog_version set version = version + 1 returning version
"""
REPLACE: Final = f"""
update postbus.catalog
set definition = $2, version = $3,
    updated_ms = (extract(epoch from clock_timestamp()) * 1000)::bigint
where lower(name) = lower($1) and not is_deleted
returning {COLUMNS}
"""
CREATE: Final = f"""
with fresh as (
    update postbus.catalog_version set next_entity_no = next_entity_no + 1
    returning next_entity_no - 1 as entity_no,
              (extract(epoch from clock_timestamp()) * 1000)::bigint as now_ms
)
insert into postbus.catalog (
    entity_no, name, kind, definition, home_partition, version, created_ms, updated_ms
)
select entity_no, $1, $2, $3, $4, $5, now_ms, now_ms from fresh
returning {COLUMNS}
"""
DELETE: Final = """
update postbus.catalog
set is_deleted = true, version = $2,
    updated_ms = (extract(epoch from clock_timestamp()) * 1000)::bigint
where entity_no = $1 and not is_deleted
"""


def _entry(row: asyncpg.Record) -> CatalogEntry:
    return CatalogEntry(
        row["entity_no"],
        row["name"],
        row["kind"],
        QueueProperties.model_validate(json.loads(row["definition"])),
        row["home_partition"],
        row["version"],
        row["created_ms"],
        row["updated_ms"],
    )
