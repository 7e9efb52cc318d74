"""The namespace: changes at run time, and the result of a restart with manifests."""

from __future__ import annotations

from typing import Any

import pytest

from postbus.broker.administration import DeletePolicy
from postbus.broker.catalog.directory import DirectoryRefusal
from postbus.broker.catalog.namespace import Namespace
from postbus.broker.catalog.preconditions import NotWritten, Precondition
from postbus.contract.entities import DAY_MS, QueueProperties
from postbus.contract.namespace import NamespaceDefinition
from postbus.entity.commands import Refusal
from postbus.store.catalog import CatalogStore
from postbus.store.catalog_change import CatalogFence
from postbus.store.errors import StoreUnavailable
from postbus.store.namespace import NamespaceStore
from postbus.store.postgres import Store
from tests.broker.administration_rig import administered, refusal_of
from tests.broker.owner import directory_of
from tests.broker.putting import NEW, a_queue, put_queue

pytestmark = pytest.mark.slow


def defined(**fields: Any) -> NamespaceDefinition:
    return NamespaceDefinition.model_validate(fields)


async def started(
    store: Store, declared: NamespaceDefinition, namespaces: NamespaceStore | None = None
) -> Namespace:
    """Return the namespace as a start of the broker finds it."""
    directory = directory_of(CatalogStore(store), 4)
    await directory.load()
    made = Namespace("bus", declared, namespaces or NamespaceStore(store), directory)
    await made.load()
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
        ("sku.name", {"sku": {"name": "Basic"}}),
        (
            "premiumMessagingPartitions",
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


async def test_a_tier_that_a_manifest_changed_is_not_changed_back(store: Store) -> None:
    namespace = await started(store, defined(sku={"name": "Premium"}))
    await namespace.put(defined(sku={"name": "Premium", "capacity": 4}))
    assert namespace.definition.sku.capacity == 4
    bare = NamespaceDefinition(sku=defined(sku={"name": "Premium"}).sku)
    bare.__pydantic_fields_set__.discard("sku")
    assert (await started(store, bare)).definition.sku.capacity == 4
    assert (await started(store, defined(sku={"name": "Premium"}))).definition.sku.capacity is None
    assert (await started(store, defined())).definition.sku == defined().sku


# --- a store that fails -------------------------------------------------------------------------


class LossyNamespaces(NamespaceStore):
    """The real table; on request it loses a write or the answer to it."""

    loses = ""
    failing_loads = 0

    async def load(self) -> NamespaceDefinition | None:
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
        basic = administration.put_namespace(defined(sku={"name": "Basic"}))
        assert await refusal_of(basic) is Refusal.NOT_ALLOWED
