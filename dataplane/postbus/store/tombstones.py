"""Tombstones of deleted entities: reason, time, and until when they can be restored.

A tombstone is the row of the entity in the catalog. It is removed after a time, so that short-lived
names do not accumulate; the store records how far back the list is complete. Called by
`broker/administration.py` and `broker/catalog/change_feed.py`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from postbus.contract.entities import EntityKind
from postbus.store.catalog import DeletedReason
from postbus.store.catalog_change import CATALOG_PARTITION
from postbus.store.fenced import fenced
from postbus.store.postgres import Store


class Tombstone(NamedTuple):
    """A deleted entity. `version`: the catalog's when it was deleted or ceased to be restorable.

    `deleted_ms` is database time, `restorable_until_ms` entity time; None: no messages are kept.
    """

    entity_no: int
    name: str
    kind: EntityKind
    reason: DeletedReason
    version: int
    deleted_ms: int
    restorable_until_ms: int | None
    managed_by: str


class TombstoneStore:
    """Reads and clears tombstones. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def after(self, version: int, top: int) -> tuple[int, list[Tombstone]]:
        """Return the version up to which some were removed, and the tombstones after a version.

        They are in order, `top` or a few more: the deletions of one change are not split.
        """
        await self._store.open()
        async with self._store.aside() as connection:
            forgotten = await connection.fetchval(READ_FORGOTTEN)
            rows = await connection.fetch(READ, version, top)
        return int(forgotten), [
            Tombstone(
                row["entity_no"],
                row["name"],
                EntityKind(row["kind"]),
                DeletedReason(row["deleted_reason"]),
                row["version"],
                row["updated_ms"],
                row["restorable_until_ms"],
                row["managed_by"],
            )
            for row in rows
        ]

    async def forget(self, before_ms: int, epoch: int) -> int:
        """Remove tombstones from before a time of entities that cannot be restored.

        Their authorization rules are removed too. Return the number; the next call continues.
        `epoch` is that of partition 0; raises Fenced when it has another one.
        """
        await self._store.open()
        async with fenced(self._store, CATALOG_PARTITION, epoch) as connection:
            return int(await connection.fetchval(FORGET, before_ms, FORGOTTEN_AT_ONCE))


FORGOTTEN_AT_ONCE: Final = 10_000
READ_FORGOTTEN: Final = "select forgotten_version from postbus.catalog_version"
READ: Final = """
select entity_no, name, kind, coalesce(deleted_reason, 'requested') as deleted_reason, version,
       updated_ms, restorable_until_ms, managed_by
from postbus.catalog where is_deleted and version > $1
order by version fetch first ($2::bigint) rows with ties
"""
FORGET: Final = """
with old as materialized (
    select entity_no from postbus.catalog
    where is_deleted and restorable_until_ms is null and updated_ms < $1
    order by version limit $2
), rules as (
    delete from postbus.authorization_rule where entity_no in (select entity_no from old)
), gone as (
    delete from postbus.catalog where entity_no in (select entity_no from old)
    returning version
), noted as (
    update postbus.catalog_version
    set forgotten_version = greatest(forgotten_version, (select max(version) from gone))
    where exists (select from gone)
)
select count(*) from gone
"""
