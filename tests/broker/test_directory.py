"""The catalog in memory and in its tables, also when the answer of a write is lost (D14)."""

from __future__ import annotations

import pytest

from postbus.broker.directory import Directory, home_of
from postbus.contract import QueueProperties
from postbus.store.catalog import CatalogEntry, CatalogStore
from postbus.store.errors import StoreUnavailable
from postbus.store.postgres import Store

pytestmark = pytest.mark.slow


class LossyCatalog(CatalogStore):
    """The real catalog; the answer to a write, or the write itself, is lost when asked for."""

    loses_answer = loses_write = False
    failing_loads = 0

    async def load(self) -> tuple[int, list[CatalogEntry]]:
        if self.failing_loads:
            self.failing_loads -= 1
            raise StoreUnavailable
        return await super().load()

    async def put(
        self, *, name: str, properties: QueueProperties, home_partition: int, kind: str = "queue"
    ) -> CatalogEntry:
        if self.loses_write:
            raise StoreUnavailable
        entry = await super().put(
            name=name, properties=properties, home_partition=home_partition, kind=kind
        )
        if self.loses_answer:
            raise StoreUnavailable
        return entry

    async def delete(self, entity_no: int) -> int:
        version = await super().delete(entity_no)
        if self.loses_answer:
            raise StoreUnavailable
        return version


async def test_a_write_whose_answer_was_lost_is_found_in_the_tables(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory = Directory(catalog, 4)
    await directory.load()
    catalog.loses_answer, catalog.failing_loads = True, 2
    entry = await directory.put_queue("Orders", QueueProperties())
    assert directory.find("orders") == entry
    assert entry.home_partition == home_of("orders", 4)
    assert await directory.delete("ORDERS")
    assert directory.find("orders") is None
    assert (directory.version, directory.entries()) == await catalog.load()


async def test_a_write_that_was_lost_is_told_and_changes_nothing(store: Store) -> None:
    catalog = LossyCatalog(store)
    directory = Directory(catalog, 4)
    await directory.load()
    catalog.loses_write = True
    with pytest.raises(StoreUnavailable):
        await directory.put_queue("orders", QueueProperties())
    assert directory.find("orders") is None
    catalog.loses_write = False
    entry = await directory.put_queue("orders", QueueProperties())
    assert await directory.put_queue("ORDERS", QueueProperties()) is entry
