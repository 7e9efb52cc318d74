"""What is known of entities that are gone: which, how, when, and until when they can come back.

A tombstone is the row of the entity in the catalog. It is forgotten after a time, so that names
that come and go do not pile up; how far back the list is complete is remembered. Called by
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
    """A deleted entity. `version`: the catalog's when it was deleted, or could not come back.

    `deleted_ms` is database time, `restorable_until_ms` entity time; None: its messages are gone.
    """

    entity_no: int
    name: str
    kind: EntityKind
    reason: DeletedReason
    version: int
    deleted_ms: int
    restorable_until_ms: int | None


class TombstoneStore:
    """Reads and clears tombstones. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def after(self, version: int, top: int) -> tuple[int, list[Tombstone]]:
        """Return the version up to which some are forgotten, and those after a version in order.

        They are `top`, or a few more: what one change deleted is not torn apart.
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
            )
            for row in rows
        ]

    async def forget(self, before_ms: int, epoch: int) -> int:
        """Forget those of entities that were deleted before a time and cannot come back.

        Their authorization rules go with them. Return how many went; the rest goes with the next
        call. `epoch` is that of partition 0; raises Fenced when it has another one.
        """
        await self._store.open()
        async with fenced(self._store, CATALOG_PARTITION, epoch) as connection:
            return int(await connection.fetchval(FORGET, before_ms, FORGOTTEN_AT_ONCE))


FORGOTTEN_AT_ONCE: Final = 10_000
READ_FORGOTTEN: Final = "select forgotten_version from postbus.catalog_version"
READ: Final = """
select entity_no, name, kind, coalesce(deleted_reason, 'requested') as deleted_reason, version,
       updated_ms, restorable_until_ms
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
