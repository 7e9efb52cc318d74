"""Who may have entities on a bus."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from postbus_operator.context import Context
from postbus_operator.entities.owners import admits
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.kube.api import Api
from postbus_operator.kube.cache import Cache
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import BackendUnavailable
from postbus_operator.settings import Settings
from tests.operator.objects import entity, shown

NOBODY_KEEPS_OUT = [
    {},
    {"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["test"]}]},
    {"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]},
]


@pytest.mark.parametrize("selector", NOBODY_KEEPS_OUT)
def test_a_selector_admits_no_namespace_whose_labels_are_unknown(selector: dict) -> None:
    """An operator without rights in the whole cluster cannot read them."""
    allowed = {"from": "Selector", "selector": selector}
    own = {"kubernetes.io/metadata.name": "team"}
    assert admits(allowed, "team", "shop", lambda _: own)
    assert not admits(allowed, "team", "shop", lambda _: {})
    assert admits(allowed, "shop", "shop", lambda _: {})


class Silence:
    """No bus answers; it is asked by a resource that has the entity."""

    async def of(self, _bus: Resource) -> None:
        return None

    def trouble_of(self, _bus: Resource) -> str:
        return "no answer"


@pytest.mark.parametrize("source", ["Same", "All"])
async def test_a_claim_from_a_namespace_that_is_not_admitted_does_not_count(source: str) -> None:
    """Everyone may write the name of a foreign bus: that must not take its entities' names."""
    spec = {"operatorSpec": {"allowedNamespaces": {"from": source}}}
    owner = {"name": "bus", "namespace": "shop"}
    older = {"creationTimestamp": "2020-01-01T00:00:00Z"}
    cache = Cache()
    cache.observe(shown("Namespace", "bus", spec=spec))
    cache.observe(entity("Queue", "orders"))
    cache.observe(
        shown(
            "Queue",
            "squatter",
            namespace="team",
            spec={"owner": owner, "entityName": "orders"},
            metadata=older,
        )
    )
    context = Context(
        settings=Settings(image="postbus:dev", store_image="postbus-store:dev"),
        api=cast("Api", None),
        cache=cache,
        buses=cast("Any", Silence()),
        epoch=1,
        now=lambda: datetime(2026, 11, 23, 12, tzinfo=UTC),
        wake=lambda key, seconds: None,
    )
    orders = cache.get(Key("Queue", "shop", "orders"))
    assert orders is not None
    if source == "Same":
        with pytest.raises(BackendUnavailable, match="no answer"):
            await reconcile_entity(context, orders)
        return
    outcome = await reconcile_entity(context, orders)
    assert outcome.status is not None
    ready = next(each for each in outcome.status.conditions if each.type == "Ready")
    assert ready.reason == "OwnedByOther"
