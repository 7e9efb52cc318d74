"""The namespace: changes at run time, and the result of a restart with manifests."""

from __future__ import annotations

from typing import Any

import pytest

from postbus.broker.administration import DeletePolicy
from postbus.broker.catalog.directory import DirectoryRefusal
from postbus.broker.catalog.namespace import Namespace
from postbus.broker.catalog.preconditions import NotWritten, Precondition
from postbus.contract.entities import (
    DAY_MS,
    LIMITS,
    NamespaceLimits,
    QueueProperties,
    Sku,
    limits_of,
)
from postbus.contract.namespace import NamespaceDefinition
from postbus.entity.commands import Refusal
from postbus.store.catalog import CatalogStore
from postbus.store.catalog_change import CatalogFence
from postbus.store.errors import StoreUnavailable
from postbus.store.namespace import NamespaceStore, StoredNamespace
from postbus.store.postgres import Store, StoreMisconfigured
from tests.broker.administration_rig import administered, refusal_of
from tests.broker.owner import directory_of
from tests.broker.putting import NEW, a_queue, put_queue

pytestmark = pytest.mark.slow


def defined(**fields: Any) -> NamespaceDefinition:
    return NamespaceDefinition.model_validate(fields)


async def started(
    store: Store, declared: NamespaceDefinition, namespaces: NamespaceStore | None = None
) -> Namespace:
    """Return the namespace as a start of the broker finds it, with its manifest applied."""
    namespaces = namespaces or NamespaceStore(store)
    shape = await namespaces.shape(declared.declared_sku, declared.premium_messaging_partitions)
    catalog = CatalogStore(store)
    directory = directory_of(catalog, shape.partition_count, shape.limits)
    await directory.load()
    made = Namespace("bus", declared, namespaces, directory)
    await made.load()
    if declared.declared_sku is not None:
        await made.declare_sku(declared.declared_sku)
    directory.catalog.on_read.append(made.load)
    return made


async def refused_by(work: Any) -> Refusal:
    with pytest.raises(DirectoryRefusal) as caught:
        await work
    return caught.value.refused.refusal


# --- changes ------------------------------------------------------------------------------------


async def test_a_change_is_reported_once_and_survives_a_restart(store: Store) -> None:
    namespace = await started(store, defined())
    heard: list[str] = []
    namespace.on_change.append(lambda changed: heard.append(changed.minimum_tls_version))
    before = namespace._directory.version
    wanted = defined(
        minimumTlsVersion="1.3", tags={"team": "shop"}, softDelete={"retention": "P3D"}
    )
    version = await namespace.put(wanted)
    assert version == before + 1
    assert await namespace.put(wanted) == version  # it is so already
    assert heard == ["1.3"]
    again = (await started(store, defined())).definition
    assert (again.minimum_tls_version, again.tags) == ("1.3", {"team": "shop"})
    assert again.soft_delete.retention_ms == 3 * DAY_MS
    assert (await started(store, defined()))._directory.version == version


async def test_missing_fields_get_defaults_except_immutable_ones(store: Store) -> None:
    declared = defined(sku={"name": "Premium"}, premiumMessagingPartitions=2)
    namespace = await started(store, declared)
    await namespace.put(defined(tags={"a": "b"}, minimumTlsVersion="1.3"))
    await namespace.put(defined(tags={"a": "c"}))
    assert namespace.definition == defined(
        sku={"name": "Premium"}, premiumMessagingPartitions=2, tags={"a": "c"}
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (
            "premiumMessagingPartitions: the namespace has 16 partitions, fixed at its creation",
            {"sku": {"name": "Premium"}, "premiumMessagingPartitions": 2},
        ),
        ("authorizationRules", {"authorizationRules": [{"name": "a", "rights": ["Send"]}]}),
    ],
)
async def test_changes_of_immutable_fields_are_refused_by_name(
    store: Store, field: str, value: dict[str, Any]
) -> None:
    namespace = await started(store, defined())
    with pytest.raises(DirectoryRefusal, match=field) as caught:
        await namespace.put(defined(minimumTlsVersion="1.3", **value))
    assert caught.value.refused.refusal is Refusal.NOT_ALLOWED
    assert namespace.definition == defined()
    assert (await started(store, defined())).definition == defined()


async def test_a_change_may_be_for_one_version_of_the_catalog(store: Store) -> None:
    namespace = await started(store, defined())
    now = Precondition(versions=frozenset({namespace._directory.version}))
    version = await namespace.put(defined(tags={"a": "1"}), now)
    await put_queue(namespace._directory, "q", QueueProperties())
    assert (
        await refused_by(namespace.put(defined(), Precondition(versions=frozenset({version}))))
        is Refusal.CONFLICT
    )
    assert namespace.definition.tags == {"a": "1"}


# --- starts -------------------------------------------------------------------------------------


async def test_manifest_wins_at_a_start_and_other_fields_keep_their_values(
    store: Store,
) -> None:
    namespace = await started(store, defined(minimumTlsVersion="1.3", tags={"from": "manifest"}))
    await namespace.put(defined(tags={"from": "put"}, softDelete={"retention": "P3D"}))
    assert namespace.definition.minimum_tls_version == "1.2"
    again = await started(store, defined(minimumTlsVersion="1.3"))
    assert again.definition.minimum_tls_version == "1.3"
    assert again.definition.tags == {"from": "put"}
    assert again.definition.soft_delete.retention_ms == 3 * DAY_MS
    silent = await started(store, defined())
    assert silent.definition.minimum_tls_version == "1.2"


async def test_the_tier_is_that_of_the_manifest_or_else_of_the_store(store: Store) -> None:
    namespace = await started(store, defined(sku={"name": "Standard"}))
    namespace = await started(store, defined(sku={"name": "Premium"}))
    await namespace.put(defined(sku={"name": "Premium", "capacity": 4}))
    assert namespace.definition.sku.capacity == 4
    silent = (await started(store, defined())).definition
    assert (silent.sku.name, silent.sku.capacity) == (Sku.PREMIUM, 4)
    assert (await started(store, defined(sku={"name": "Premium"}))).definition.sku.capacity is None


# --- the tier -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [Sku.BASIC, Sku.PREMIUM])
async def test_a_tier_is_put_with_its_limits(store: Store, after: Sku) -> None:
    namespace = await started(store, defined())
    directory, heard = namespace._directory, list[NamespaceLimits]()
    namespace.on_change.append(lambda _: heard.append(directory.limits))
    await namespace.put(defined(sku={"name": after.value}))
    assert namespace.shape == (after, 16)
    assert heard == [limits_of(after, 16)]
    again = await started(store, defined())
    assert (again.shape, again.definition.premium_messaging_partitions) == ((after, 16), None)
    assert again._directory.version == directory.version


@pytest.mark.behaviour("S149")
async def test_premium_is_never_left(store: Store) -> None:
    namespace = await started(store, defined(sku={"name": "Premium"}))
    for sku in ("Basic", "Standard"):
        with pytest.raises(
            DirectoryRefusal, match=r"sku.name: .* Premium namespace stays"
        ) as caught:
            await namespace.put(defined(sku={"name": sku}))
        assert caught.value.refused.refusal is Refusal.NOT_ALLOWED
        with pytest.raises(DirectoryRefusal, match=f"stays Premium; the manifest says {sku}"):
            await namespace.declare_sku(Sku(sku))
    assert namespace.definition.sku.name is Sku.PREMIUM
    with pytest.raises(StoreMisconfigured, match="Premium namespace stays Premium"):
        await started(store, defined(sku={"name": "Standard"}))


async def test_another_broker_follows_the_tier_whatever_its_manifest_says(store: Store) -> None:
    owner = await started(store, defined(sku={"name": "Standard"}))
    other = await started(store, defined(sku={"name": "Standard"}))
    await owner.put(defined(sku={"name": "Premium", "capacity": 2}))
    catalog = other._directory.catalog
    await catalog.refresh(await catalog.store.read_version())
    assert other.definition.sku == owner.definition.sku
    assert other._directory.limits == limits_of(Sku.PREMIUM, 16)


async def test_a_tier_that_changes_during_a_start_has_its_limits(store: Store) -> None:
    owner = await started(store, defined(sku={"name": "Basic"}))
    namespaces, catalog = NamespaceStore(store), CatalogStore(store)
    shape = await namespaces.shape(Sku.STANDARD, None)
    directory = directory_of(catalog, shape.partition_count, shape.limits)
    await owner.put(defined(sku={"name": "Standard"}))
    starting = Namespace("bus", defined(sku={"name": "Standard"}), namespaces, directory)
    await starting.load()
    assert starting.shape == (Sku.STANDARD, 16)
    assert directory.limits == limits_of(Sku.STANDARD, 16)


@pytest.mark.parametrize("loses", ["answer", "write"])
async def test_a_tier_with_unknown_result_is_looked_up(store: Store, loses: str) -> None:
    namespaces = LossyNamespaces(store)
    namespace = await started(store, defined(), namespaces)
    namespaces.loses, namespaces.failing_loads = loses, 1
    if loses == "answer":
        await namespace.declare_sku(Sku.PREMIUM)
        assert namespace._directory.limits == limits_of(Sku.PREMIUM, 16)
    else:
        with pytest.raises(NotWritten):
            await namespace.declare_sku(Sku.PREMIUM)
        assert namespace.shape == (Sku.STANDARD, 16)
        assert namespace._directory.limits == LIMITS[Sku.STANDARD]


# --- a store that fails -------------------------------------------------------------------------


class LossyNamespaces(NamespaceStore):
    """The real table; on request it loses a write or the answer to it."""

    loses = ""
    failing_loads = 0

    async def load(self) -> StoredNamespace:
        if self.failing_loads:
            self.failing_loads -= 1
            raise StoreUnavailable
        return await super().load()

    async def put(self, definition: NamespaceDefinition, fence: CatalogFence) -> int:
        if self.loses == "write":
            raise StoreUnavailable
        version = await super().put(definition, fence)
        if self.loses == "answer":
            raise StoreUnavailable
        return version

    async def put_sku(self, sku: Sku, fence: CatalogFence) -> int:
        if self.loses == "write":
            raise StoreUnavailable
        await super().put_sku(sku, fence)
        raise StoreUnavailable

    async def put_closed(self, is_closed: bool, fence: CatalogFence) -> int:
        if self.loses == "write":
            raise StoreUnavailable
        await super().put_closed(is_closed, fence)
        raise StoreUnavailable


@pytest.mark.parametrize("loses", ["answer", "write"])
async def test_a_closing_with_unknown_result_is_looked_up(store: Store, loses: str) -> None:
    namespaces = LossyNamespaces(store)
    namespace = await started(store, defined(), namespaces)
    namespaces.loses, namespaces.failing_loads = loses, 1
    with namespace.refusing_sends():
        assert namespace._directory.refuses_sends
        if loses == "answer":
            await namespace.put_closed(lambda: True)
        else:
            with pytest.raises(NotWritten):
                await namespace.put_closed(lambda: True)
    assert namespace.is_closed is namespace._directory.refuses_sends is (loses == "answer")
    assert (await started(store, defined())).is_closed is namespace.is_closed


@pytest.mark.parametrize("loses", ["answer", "write"])
async def test_a_write_with_unknown_result_is_looked_up(store: Store, loses: str) -> None:
    namespaces = LossyNamespaces(store)
    namespace = await started(store, defined(), namespaces)
    before = namespace._directory.version
    namespaces.loses, namespaces.failing_loads = loses, 1
    wanted = defined(minimumTlsVersion="1.3")
    if loses == "answer":
        assert await namespace.put(wanted) == before + 1
        assert namespace.definition == wanted
    else:
        with pytest.raises(NotWritten):
            await namespace.put(wanted)
        assert namespace.definition == defined()
        assert namespace._directory.version == before


# --- uses of the limits -------------------------------------------------------------------------


async def test_changed_retention_applies_to_later_deletions(store: Store) -> None:
    async with administered(store) as (administration, _):
        for name, days in (("a", 7), ("b", 3)):
            await administration.put_namespace(defined(softDelete={"retention": f"P{days}D"}))
            await administration.put(a_queue(name, QueueProperties()), NEW)
            await administration.delete(name, policy=DeletePolicy.RETAIN)
        kept = await administration.tombstones(0)
        days_kept = [
            round(((each.restorable_until_ms or 0) - each.deleted_ms) / DAY_MS) for each in kept
        ]
        assert days_kept == [7, 3]
        rules = defined(authorizationRules=[{"name": "a", "rights": ["Send"]}])
        assert await refusal_of(administration.put_namespace(rules)) is Refusal.NOT_ALLOWED
