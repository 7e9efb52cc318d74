"""The shape of the namespace, and its definition set at run time.

Tier and number of partitions are recorded by the first start. A later change, of the tier too, is
one commit that raises the version of the catalog. Called by `broker/catalog/namespace.py` and
`assembly/opening.py` only.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from postbus.contract.entities import Sku, limits_of
from postbus.contract.namespace import NamespaceDefinition, NamespaceShape
from postbus.store.catalog_change import CatalogFence, changing
from postbus.store.postgres import Store, StoreMisconfigured


class StoredNamespace(NamedTuple):
    """The namespace as recorded.

    `definition` is None if there was no PUT, `sku` None before the first start. `is_closed`: sends
    are refused.
    """

    definition: NamespaceDefinition | None
    sku: Sku | None
    is_closed: bool


class NamespaceStore:
    """Reads and writes two rows. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def shape(self, sku: Sku | None, partition_count: int | None) -> NamespaceShape:
        """Return the shape of the namespace; record it in a new store. None: not declared.

        Another tier than the recorded one is not recorded here: partition 0 does that. Raises
        StoreMisconfigured for a shape that the namespace can never have.
        """
        await self._store.open()
        async with self._store.aside() as connection, connection.transaction():
            row = await connection.fetchrow(READ_SHAPE)
            assert row is not None
            if row["partition_count"] is not None:
                shape = NamespaceShape(Sku(row["sku"]), row["partition_count"])
                _check(shape, sku, partition_count)
                return shape
            limits = limits_of(sku or Sku.STANDARD, partition_count)
            shape = NamespaceShape(sku or Sku.STANDARD, limits.partition_count)
            if row["in_use"] > shape.partition_count:
                raise StoreMisconfigured(
                    f"the store has queues in {row['in_use']} partitions, the manifest asks for "
                    f"{shape.partition_count}; restore the original number of partitions in the "
                    "manifest"
                )
            await connection.execute(WRITE_SHAPE, shape.sku.value, shape.partition_count)
        return shape

    async def load(self) -> StoredNamespace:
        await self._store.open()
        async with self._store.aside() as connection:
            row = await connection.fetchrow(LOAD)
        assert row is not None
        text, sku = row["definition"], row["sku"]
        return StoredNamespace(
            None if text is None else NamespaceDefinition.model_validate(json.loads(text)),
            None if sku is None else Sku(sku),
            row["is_closed"],
        )

    async def put(self, definition: NamespaceDefinition, fence: CatalogFence) -> int:
        """Replace the definition, with its tier; return the catalog's version."""
        text = definition.model_dump_json(by_alias=True)
        async with changing(self._store, fence) as change:
            await change.connection.execute(PUT, text)
            await change.connection.execute(WRITE_SKU, definition.sku.name.value)
        return change.version

    async def put_sku(self, sku: Sku, fence: CatalogFence) -> int:
        """Replace the tier alone; return the catalog's version."""
        async with changing(self._store, fence) as change:
            await change.connection.execute(WRITE_SKU, sku.value)
        return change.version

    async def put_closed(self, is_closed: bool, fence: CatalogFence) -> int:
        """Record whether sends are refused, by later brokers too; return the catalog's version."""
        async with changing(self._store, fence) as change:
            await change.connection.execute(WRITE_CLOSED, is_closed)
        return change.version


def _check(shape: NamespaceShape, sku: Sku | None, partition_count: int | None) -> None:
    """Raise StoreMisconfigured for a manifest that the namespace can never match."""
    elsewhere = "or use a new database and move the messages"
    problem = shape.tier_problem(sku)
    if problem is not None and sku is not None:
        raise StoreMisconfigured(
            f"{problem}, but the manifest says {sku.value}; write Premium there, {elsewhere}"
        )
    problem = shape.partitions_problem(partition_count)
    if problem is not None:
        raise StoreMisconfigured(
            f"{problem} as in the manifest; leave premiumMessagingPartitions out, {elsewhere}"
        )


READ_SHAPE: Final = """
select sku, partition_count,
       (select coalesce(max(home_partition) + 1, 0) from postbus.catalog where not is_deleted)
           as in_use
from postbus.store for update
"""
WRITE_SHAPE: Final = "update postbus.store set sku = $1, partition_count = $2"
WRITE_SKU: Final = "update postbus.store set sku = $1"
WRITE_CLOSED: Final = "update postbus.store set is_closed = $1"
LOAD: Final = """
select sku, is_closed, (select definition from postbus.namespace) as definition from postbus.store
"""
PUT: Final = """
insert into postbus.namespace (definition) values ($1)
on conflict (is_only) do update set definition = excluded.definition
"""
