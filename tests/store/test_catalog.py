"""The durable catalog: versions, numbers that are never reused, names freed at once (ADR 27)."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from postbus.contract.entities import (
    DEFAULT_RULE,
    EntityKind,
    EntityStatus,
    QueueProperties,
    RuleProperties,
    Sku,
    SkuProperties,
    SubscriptionProperties,
    TopicProperties,
    subscription_path,
)
from postbus.contract.namespace import NamespaceDefinition
from postbus.store.authorization import NAMESPACE_NO, AuthorizationStore
from postbus.store.caller_epoch import CallerEpochStore
from postbus.store.catalog import (
    CatalogEntry,
    CatalogPut,
    CatalogStore,
    DeletedReason,
    StoredRule,
)
from postbus.store.catalog_change import CallerOutdated, CatalogMoved
from postbus.store.errors import Fenced
from postbus.store.namespace import NamespaceStore
from postbus.store.postgres import Store, StoreMisconfigured
from postbus.store.tombstones import TombstoneStore
from tests.store.catalog_rig import FreeCatalog, fence_of

PLAIN = QueueProperties()

NEVER_MS = 1 << 60


@pytest.fixture
def catalog(store: Store) -> FreeCatalog:
    return FreeCatalog(store)


async def put_queue(
    catalog: FreeCatalog,
    name: str,
    properties: QueueProperties = PLAIN,
    home_partition: int = 0,
) -> CatalogEntry:
    return await catalog.put(
        name=name, kind=EntityKind.QUEUE, properties=properties, home_partition=home_partition
    )


async def put_subscription(
    catalog: FreeCatalog, topic: CatalogEntry, name: str, *rules: StoredRule
) -> CatalogEntry:
    return await catalog.put(
        name=subscription_path(topic.name, name),
        kind=EntityKind.SUBSCRIPTION,
        properties=SubscriptionProperties(),
        home_partition=topic.home_partition,
        topic_no=topic.entity_no,
        rules=rules,
        is_partitioned=topic.is_partitioned,
    )


async def put_topic(catalog: FreeCatalog, name: str) -> CatalogEntry:
    return await catalog.put(
        name=name,
        kind=EntityKind.TOPIC,
        properties=TopicProperties(enable_partitioning=True),
        home_partition=2,
        is_partitioned=True,
    )


async def test_new_catalog_is_empty(catalog: FreeCatalog) -> None:
    assert await catalog.load() == (0, [])


async def test_definition_is_read_back(catalog: FreeCatalog) -> None:
    properties = QueueProperties(max_delivery_count=4)
    entry = await put_queue(catalog, "Orders", properties, 7)
    assert (entry.entity_no, entry.name, entry.kind) == (1, "Orders", EntityKind.QUEUE)
    assert (entry.properties, entry.home_partition, entry.version) == (properties, 7, 1)
    assert await catalog.load() == (1, [entry])


async def test_replacing_keeps_number_home_and_spelling(catalog: FreeCatalog) -> None:
    first = await put_queue(catalog, "Orders", QueueProperties(), 7)
    changed = QueueProperties(max_delivery_count=4)
    entry = await put_queue(catalog, "ORDERS", changed, 3)
    assert (entry.entity_no, entry.name, entry.home_partition) == (1, "Orders", 7)
    assert (entry.properties, entry.version) == (changed, 2)
    assert entry.created_ms == first.created_ms
    assert await catalog.load() == (2, [entry])


async def test_name_is_free_at_once_and_the_number_never_again(catalog: FreeCatalog) -> None:
    first = await put_queue(catalog, "orders", QueueProperties(), 0)
    assert await catalog.delete(first.entity_no) == 2
    assert await catalog.load() == (2, [])
    again = await put_queue(catalog, "orders", QueueProperties(), 0)
    assert (again.entity_no, again.version) == (2, 3)


@pytest.mark.behaviour("S92", "S219")
async def test_topic_and_subscription_are_read_back_with_their_rules(catalog: FreeCatalog) -> None:
    topic = await put_topic(catalog, "Events")
    correlated = {"label": "order", "properties": {"n": 1, "x": 1.5, "yes": True, "s": "1"}}
    other = RuleProperties.model_validate({"name": "eu", "correlationFilter": correlated})
    entry = await put_subscription(
        catalog, topic, "audit", StoredRule(DEFAULT_RULE), StoredRule(other)
    )
    assert (topic.kind, entry.kind) == (EntityKind.TOPIC, EntityKind.SUBSCRIPTION)
    assert (entry.topic_no, entry.is_partitioned) == (topic.entity_no, True)
    assert [rule.properties for rule in entry.rules] == [DEFAULT_RULE, other]
    assert {rule.created_ms for rule in entry.rules} == {entry.created_ms}
    assert await catalog.load() == (2, [topic, entry])


async def test_a_rule_keeps_its_time_when_others_come(catalog: FreeCatalog) -> None:
    topic = await put_topic(catalog, "events")
    first = await put_subscription(catalog, topic, "audit", StoredRule(DEFAULT_RULE, 1_000))
    assert first.rules == (StoredRule(DEFAULT_RULE, 1_000),)
    another = DEFAULT_RULE.model_copy(update={"name": "another"})
    entry = await put_subscription(catalog, topic, "audit", *first.rules, StoredRule(another))
    assert [rule.created_ms for rule in entry.rules] == [1_000, entry.updated_ms]
    assert entry.entity_no == first.entity_no


async def test_deleting_a_topic_deletes_its_subscriptions(
    catalog: FreeCatalog, store: Store
) -> None:
    topic = await put_topic(catalog, "events")
    await put_subscription(catalog, topic, "one")
    await put_subscription(catalog, topic, "two")
    queue = await put_queue(catalog, "orders")
    assert await catalog.delete(topic.entity_no, DeletedReason.IDLE) == 5
    assert await catalog.delete(queue.entity_no) == 6
    assert await catalog.load() == (6, [])
    async with store.aside() as connection:
        rows = await connection.fetch(
            "select name, deleted_reason, version from postbus.catalog order by entity_no"
        )
    assert [tuple(row) for row in rows] == [
        ("events", "idle", 5),
        ("events/Subscriptions/one", "idle", 5),
        ("events/Subscriptions/two", "idle", 5),
        ("orders", "requested", 6),
    ]


async def test_kind_and_home_of_an_entity_never_change(catalog: FreeCatalog) -> None:
    topic = await put_topic(catalog, "events")
    changed = await catalog.put(
        name="EVENTS",
        kind=EntityKind.TOPIC,
        properties=TopicProperties(status=EntityStatus.DISABLED),
        home_partition=0,
    )
    assert (changed.home_partition, changed.is_partitioned) == (2, True)
    assert changed.entity_no == topic.entity_no
    with pytest.raises(asyncpg.UniqueViolationError):
        await put_queue(catalog, "events")
    assert (await catalog.load())[1] == [changed]


async def test_catalog_of_the_version_before_is_read(store: Store) -> None:
    """Rows written before the column `kind` existed, after the migration."""
    await store.open()
    async with store.aside() as connection:
        await connection.execute(
            """
            insert into postbus.catalog
                (entity_no, name, kind, definition, home_partition, version, created_ms, updated_ms)
            values (1, 'orders', 'queue', '{"maxDeliveryCount": 4}', 3, 1, 7, 8)
            """
        )
    (entry,) = (await CatalogStore(store).load())[1]
    assert entry == CatalogEntry(
        1, "orders", EntityKind.QUEUE, QueueProperties(max_delivery_count=4), 3, 1, 7, 8
    )


async def test_of_changes_decided_on_one_version_one_is_written(database: str) -> None:
    stores = [Store(database) for _ in range(3)]
    fence = await fence_of(stores[0])
    puts = [
        CatalogPut(None, f"queue-{number}", EntityKind.QUEUE, QueueProperties(), 0)
        for number in range(3)
    ]
    results = await asyncio.gather(
        *(
            CatalogStore(store).put_all([put], fence)
            for store, put in zip(stores, puts, strict=True)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(each, CatalogMoved) for each in results) == 2
    version, entries = await CatalogStore(stores[0]).load()
    assert (version, len(entries)) == (1, 1)
    for store in stores:
        await store.close()


async def test_a_change_of_a_former_owner_is_not_written(
    catalog: FreeCatalog, store: Store
) -> None:
    fence = await fence_of(store)
    async with store.aside() as connection:
        await connection.execute("update partition_0.owner set epoch = epoch + 1")
    put = CatalogPut(None, "orders", EntityKind.QUEUE, QueueProperties(), 0)
    with pytest.raises(Fenced):
        await catalog.tables.put_all([put], fence)
    with pytest.raises(Fenced):
        await TombstoneStore(store).forget(NEVER_MS, fence.epoch)
    with pytest.raises(Fenced):
        await NamespaceStore(store).put(NamespaceDefinition(), fence)
    with pytest.raises(Fenced):
        await AuthorizationStore(store).replace(NAMESPACE_NO, [], [], fence)
    with pytest.raises(Fenced):
        await CallerEpochStore(store).raise_to(7, fence.epoch)
    with pytest.raises(Fenced):
        await CallerEpochStore(store).forget(fence.epoch)
    assert await catalog.load() == (0, [])


async def test_the_epoch_of_callers_does_not_fall(catalog: FreeCatalog, store: Store) -> None:
    fence = await fence_of(store)
    epochs = CallerEpochStore(store)
    assert [await epochs.raise_to(each, fence.epoch) for each in (7, 5, 7, 8)] == [7, 7, 7, 8]
    assert await epochs.load() == 8


async def test_a_change_of_an_older_caller_is_not_written(
    catalog: FreeCatalog, store: Store
) -> None:
    fence = await fence_of(store)
    assert await CallerEpochStore(store).raise_to(7, fence.epoch) == 7
    put = CatalogPut(None, "orders", EntityKind.QUEUE, QueueProperties(), 0)
    with pytest.raises(CallerOutdated) as caught:
        await catalog.tables.put_all([put], fence._replace(caller_epoch=6))
    assert caught.value.highest == 7
    assert await catalog.load() == (0, [])
    (entry,) = await catalog.tables.put_all([put], fence._replace(caller_epoch=7))
    assert await catalog.load() == (1, [entry])


async def test_only_entities_with_a_present_or_former_tombstone_are_gone(
    catalog: FreeCatalog, store: Store
) -> None:
    lives = await put_queue(catalog, "lives")
    deleted = await put_queue(catalog, "deleted")
    kept = await put_queue(catalog, "kept")
    forgotten = await put_queue(catalog, "forgotten")
    await catalog.delete(forgotten.entity_no)
    assert await TombstoneStore(store).forget(NEVER_MS, (await fence_of(store)).epoch) == 1
    await catalog.delete(deleted.entity_no)
    await catalog.retain(kept.entity_no, NEVER_MS)
    version, _ = await catalog.load()
    copies = {each.entity_no: each.version for each in (lives, deleted, kept, forgotten)}
    gone = await catalog.tables.buried(copies | {99: version})
    assert gone == {deleted.entity_no, forgotten.entity_no}


async def test_sku_and_partitions_are_recorded_once(store: Store) -> None:
    namespaces = NamespaceStore(store)
    assert await namespaces.shape(Sku.BASIC, None) == (Sku.BASIC, 16)
    for sku in (None, *Sku):  # partition 0 changes the tier
        assert await namespaces.shape(sku, None) == (Sku.BASIC, 16)
    with pytest.raises(
        StoreMisconfigured, match="16 partitions, fixed at its creation, not 4 as in the"
    ):
        await namespaces.shape(Sku.PREMIUM, 4)
    assert await namespaces.shape(None, None) == (Sku.BASIC, 16)


async def test_a_new_store_has_the_partitions_of_its_tier(store: Store) -> None:
    assert await NamespaceStore(store).shape(None, None) == (Sku.STANDARD, 16)


@pytest.mark.behaviour("S149")
async def test_premium_stays_premium(store: Store) -> None:
    namespaces = NamespaceStore(store)
    await namespaces.shape(Sku.PREMIUM, 4)
    with pytest.raises(StoreMisconfigured, match="stays Premium, but the manifest says Standard"):
        await namespaces.shape(Sku.STANDARD, None)
    with pytest.raises(StoreMisconfigured, match="4 partitions, fixed at its creation, not 8"):
        await namespaces.shape(Sku.PREMIUM, 8)
    assert await namespaces.shape(Sku.PREMIUM, None) == (Sku.PREMIUM, 4)


async def test_a_tier_and_its_definition_are_one_commit(catalog: FreeCatalog, store: Store) -> None:
    namespaces = NamespaceStore(store)
    await namespaces.shape(Sku.STANDARD, None)
    fence = await fence_of(store)
    premium = NamespaceDefinition(sku=SkuProperties(name=Sku.PREMIUM), tags={"a": "b"})
    with pytest.raises(CatalogMoved):
        await namespaces.put(premium, fence._replace(version=fence.version + 1))
    assert await namespaces.load() == (None, Sku.STANDARD, False)
    version = await namespaces.put(premium, fence)
    assert version == fence.version + 1 == (await catalog.load())[0]
    assert await namespaces.load() == (premium, Sku.PREMIUM, False)
    assert await namespaces.shape(None, None) == (Sku.PREMIUM, 16)


async def test_older_store_with_more_partitions_is_refused(
    catalog: FreeCatalog, store: Store
) -> None:
    await put_queue(catalog, "orders", QueueProperties(), 11)
    with pytest.raises(StoreMisconfigured, match="in 12 partitions, the manifest asks for 4"):
        await NamespaceStore(store).shape(Sku.PREMIUM, 4)
    await NamespaceStore(store).shape(Sku.STANDARD, None)


# --- deleted and kept -----------------------------------------------------------------------------


async def test_retained_entities_have_their_own_versions_and_are_restored(
    catalog: FreeCatalog,
) -> None:
    topic = await put_topic(catalog, "t")
    first = await put_subscription(catalog, topic, "first")
    second = await put_subscription(catalog, topic, "second")
    (alone,) = await catalog.retain(first.entity_no, 1_000)
    assert (alone.version, alone.deleted_with) == (4, None)
    gone = await catalog.retain(topic.entity_no, 2_000)
    assert [(each.entity_no, each.version) for each in gone] == [
        (topic.entity_no, 5),
        (second.entity_no, 6),
    ]
    assert [each.deleted_with for each in gone] == [None, topic.entity_no]
    assert all(each.restorable_until_ms == 2_000 for each in gone)
    version, stored = await catalog.load()
    assert version == 6
    assert {each.entity_no for each in stored if each.is_retained} == {
        topic.entity_no,
        first.entity_no,
        second.entity_no,
    }
    again = await put_topic(catalog, "T")  # the name is free
    assert again.entity_no > second.entity_no
    await catalog.delete(again.entity_no)
    back = await catalog.restore(topic.entity_no)
    assert [(each.entity_no, each.version) for each in back] == [
        (topic.entity_no, 9),
        (second.entity_no, 10),
    ]
    assert back[0]._replace(version=1, updated_ms=topic.updated_ms) == topic
    assert back[1].rules == second.rules
    assert (await catalog.load())[0] == 10
    assert await catalog.restore(topic.entity_no) == []


async def test_tombstones_are_listed_in_order_and_forgotten(
    catalog: FreeCatalog, store: Store
) -> None:
    tombstones = TombstoneStore(store)
    topic = await put_topic(catalog, "t")
    for name in ("a", "b"):
        await put_subscription(catalog, topic, name)
    kept = await put_queue(catalog, "kept")
    await catalog.delete(topic.entity_no, DeletedReason.IDLE)
    await catalog.retain(kept.entity_no, 1_000)
    forgotten, found = await tombstones.after(0, 1)
    assert forgotten == 0
    assert [(each.name, each.version) for each in found] == [  # one change is not torn apart
        ("t", 5),
        ("t/Subscriptions/a", 5),
        ("t/Subscriptions/b", 5),
    ]
    assert {each.reason for each in found} == {DeletedReason.IDLE}
    _, (last,) = await tombstones.after(5, 10)
    assert (last.name, last.restorable_until_ms) == ("kept", 1_000)
    epoch = (await fence_of(store)).epoch
    assert await tombstones.forget(0, epoch) == 0
    assert await tombstones.forget(last.deleted_ms + 10_000, epoch) == 3
    assert await tombstones.after(0, 10) == (5, [last])
    await catalog.delete(kept.entity_no)
    assert (await tombstones.after(6, 10))[1] == [
        last._replace(version=7, restorable_until_ms=None)
    ]
