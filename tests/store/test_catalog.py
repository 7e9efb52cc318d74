"""The durable catalog: versions, numbers that never come back, names freed at once (D14)."""

from __future__ import annotations

import asyncio

import pytest

from postbus.contract import QueueProperties
from postbus.store.catalog import CatalogStore
from postbus.store.postgres import Store, StoreMisconfigured


@pytest.fixture
def catalog(store: Store) -> CatalogStore:
    return CatalogStore(store)


async def test_new_catalog_is_empty(catalog: CatalogStore) -> None:
    assert await catalog.load() == (0, [])


async def test_definition_is_read_back(catalog: CatalogStore) -> None:
    properties = QueueProperties(max_delivery_count=4)
    entry = await catalog.put(name="Orders", properties=properties, home_partition=7)
    assert (entry.entity_no, entry.name, entry.kind) == (1, "Orders", "queue")
    assert (entry.properties, entry.home_partition, entry.version) == (properties, 7, 1)
    assert await catalog.load() == (1, [entry])


async def test_replacing_keeps_number_home_and_spelling(catalog: CatalogStore) -> None:
    first = await catalog.put(name="Orders", properties=QueueProperties(), home_partition=7)
    changed = QueueProperties(max_delivery_count=4)
    entry = await catalog.put(name="ORDERS", properties=changed, home_partition=3)
    assert (entry.entity_no, entry.name, entry.home_partition) == (1, "Orders", 7)
    assert (entry.properties, entry.version) == (changed, 2)
    assert entry.created_ms == first.created_ms
    assert await catalog.load() == (2, [entry])


async def test_name_is_free_at_once_and_the_number_never_again(catalog: CatalogStore) -> None:
    first = await catalog.put(name="orders", properties=QueueProperties(), home_partition=0)
    assert await catalog.delete(first.entity_no) == 2
    assert await catalog.load() == (2, [])
    again = await catalog.put(name="orders", properties=QueueProperties(), home_partition=0)
    assert (again.entity_no, again.version) == (2, 3)


async def test_changes_at_the_same_time_get_different_versions(database: str) -> None:
    stores = [Store(database) for _ in range(3)]
    entries = await asyncio.gather(
        *(
            CatalogStore(store).put(
                name=f"queue-{number}", properties=QueueProperties(), home_partition=0
            )
            for number, store in enumerate(stores)
        )
    )
    assert sorted(entry.version for entry in entries) == [1, 2, 3]
    assert sorted(entry.entity_no for entry in entries) == [1, 2, 3]
    for store in stores:
        await store.close()


async def test_sku_and_partitions_are_recorded_once(catalog: CatalogStore) -> None:
    await catalog.record_shape("Basic", 16)
    await catalog.record_shape("Standard", 16)  # limits only
    with pytest.raises(StoreMisconfigured, match=r"Standard with 16 .* Premium with 16; set sku"):
        await catalog.record_shape("Premium", 16)
    with pytest.raises(StoreMisconfigured, match="asks for Standard with 8"):
        await catalog.record_shape("Standard", 8)
    await catalog.record_shape("Standard", 16)


async def test_premium_stays_premium(catalog: CatalogStore) -> None:
    await catalog.record_shape("Premium", 4)
    with pytest.raises(StoreMisconfigured, match="made as Premium with 4 partitions"):
        await catalog.record_shape("Standard", 16)
    with pytest.raises(StoreMisconfigured, match="asks for Premium with 8"):
        await catalog.record_shape("Premium", 8)


async def test_older_store_with_more_partitions_is_refused(catalog: CatalogStore) -> None:
    await catalog.put(name="orders", properties=QueueProperties(), home_partition=11)
    with pytest.raises(StoreMisconfigured, match="in 12 partitions, the manifest asks for 4"):
        await catalog.record_shape("Premium", 4)
    await catalog.record_shape("Standard", 16)
