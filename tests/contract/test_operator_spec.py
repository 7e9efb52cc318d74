"""`operatorSpec`: the values of each field; invalid ones are refused by the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from postbus.contract.operator_spec import NamespaceOperatorSpec, StoredOperatorSpec
from postbus.contract.resources import NamespaceSpec

DSN = {"secretRef": {"name": "shop-db"}}


def store(name: str = "main", **kind: Any) -> dict[str, Any]:
    return {"name": name, **(kind or {"managed": {}})}


def storage(*stores: dict[str, Any]) -> dict[str, Any]:
    return {"storage": {"stores": list(stores)}}


def test_defaults_are_one_broker_on_one_managed_store() -> None:
    spec = NamespaceOperatorSpec()
    assert spec.brokers == 1
    [only] = spec.storage.stores
    assert (only.name, only.postgres) == ("main", None)
    assert only.managed is not None
    assert only.managed.size == "10Gi"
    assert spec.deletion_policy == "DeleteIfEmpty"


@pytest.mark.parametrize(
    "text",
    [
        {"image": "registry.example/postbus:1"},
        {"brokers": 16},
        {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": 1024}}},
        storage(store(postgres=DSN), store("second", managed={"size": "1.5Ti"})),
        storage(store(postgres={"secretRef": {"name": "pg-app", "key": "uri"}})),
        storage(store(postgres={**DSN, "caSecretRef": {"name": "pg-ca"}, "sslMode": "verify-ca"})),
        {"podTemplate": {"nodeSelector": {"disk": "ssd"}, "env": [{"name": "TZ", "value": "UTC"}]}},
        {"podTemplate": {"affinity": {"podAntiAffinity": {}}, "tolerations": [{"key": "spot"}]}},
        {"service": {"type": "LoadBalancer", "loadBalancerClass": "example.com/internal"}},
        {"service": {"names": ["bus.example.com"]}},
        {"tls": {"secretName": "bus-tls"}},
        {"tls": {"issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}},
        {"networkPolicy": {"enabled": False}},
        {"podDisruptionBudget": {"maxUnavailable": "50%"}},
        {"upgradeStrategy": {"type": "OnDelete", "maxUnavailable": 2}},
        {"secrets": {"endpoint": {"name": "shop-bus", "key": "endpoint"}}},
        {"allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"team": "shop"}}}},
        {"softDelete": {"retention": "P30D"}},
    ],
    ids=lambda text: next(iter(text)),
)
def test_field_is_read(text: dict[str, Any]) -> None:
    spec = NamespaceOperatorSpec.model_validate(text)
    dumped = spec.model_dump(by_alias=True, mode="json", exclude_unset=True)
    assert NamespaceOperatorSpec.model_validate(dumped) == spec
    assert set(dumped) == set(text)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ({"image": ""}, "image"),
        ({"brokers": 0}, "brokers"),
        ({"brokers": 17}, "brokers"),
        ({"resources": {"requests": {"gpu": 1}}}, "resources.requests.gpu"),
        ({"resources": {"limits": {"memory": "much"}}}, "resources.limits.memory"),
        ({"resources": {"limits": {"memory": "1Gi\n"}}}, "resources.limits.memory"),
        (storage(), "storage.stores"),
        (storage({"name": "main"}), "storage.stores.0"),
        (storage(store(postgres=DSN, managed={})), "storage.stores.0"),
        (storage(store(), store()), "storage.stores"),
        (storage(store("Main")), "storage.stores.0.name"),
        (storage(store("x" * 31)), "storage.stores.0.name"),
        (storage(store(postgres={})), "storage.stores.0.postgres.secretRef"),
        (storage(store(postgres={**DSN, "sslMode": "on"})), "storage.stores.0.postgres.sslMode"),
        (storage(store(managed={"version": "9.6"})), "storage.stores.0.managed.version"),
        (storage(store(managed={"size": "large"})), "storage.stores.0.managed.size"),
        ({"podTemplate": {"hostNetwork": True}}, "podTemplate.hostNetwork"),
        ({"podTemplate": {"env": [{"name": "A B", "value": ""}]}}, "podTemplate.env.0.name"),
        (
            {"podTemplate": {"env": [{"name": "A", "valueFrom": {}}]}},
            "podTemplate.env.0.valueFrom",
        ),
        ({"podTemplate": {"tolerations": [{"effect": "Never"}]}}, "podTemplate.tolerations.0"),
        ({"service": {"type": "ExternalName"}}, "service.type"),
        ({"service": {"loadBalancerClass": "a/b"}}, "service"),
        ({"tls": {"secretName": "a", "issuerRef": {"name": "b"}}}, "tls"),
        ({"tls": {"issuerRef": {"name": "b", "kind": "Vault"}}}, "tls.issuerRef.kind"),
        ({"networkPolicy": True}, "networkPolicy"),
        ({"podDisruptionBudget": {"maxUnavailable": "half"}}, "podDisruptionBudget.maxUnavailable"),
        ({"upgradeStrategy": {"type": "Recreate"}}, "upgradeStrategy.type"),
        ({"secrets": {"password": {"name": "a", "key": "b"}}}, "secrets.password"),
        ({"secrets": {"endpoint": {"name": "a"}}}, "secrets.endpoint.key"),
        ({"allowedNamespaces": {"from": "Selector"}}, "allowedNamespaces"),
        ({"allowedNamespaces": {"selector": {}}}, "allowedNamespaces"),
        (
            {
                "allowedNamespaces": {
                    "from": "Selector",
                    "selector": {"matchExpressions": [{"key": "team", "operator": "In"}]},
                }
            },
            "allowedNamespaces.selector.matchExpressions.0",
        ),
        ({"deletionPolicy": "Purge"}, "deletionPolicy"),
        ({"onAutoDelete": "Recreate"}, "onAutoDelete"),
        ({"replicas": 3}, "replicas"),
    ],
)
def test_nonsense_is_refused_where_it_stands(text: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        NamespaceOperatorSpec.model_validate(text)
    places = [".".join(map(str, error["loc"])) for error in caught.value.errors()]
    assert any(place.startswith(where) for place in places), places


@pytest.mark.parametrize(
    ("bus", "brokers", "stores"),
    [
        ({}, 16, 16),
        ({"sku": {"name": "Basic"}}, 16, 16),
        ({"sku": {"name": "Premium"}, "premiumMessagingPartitions": 2}, 2, 2),
        # A Premium namespace that was a Standard one has 16 partitions without a field for them.
        ({"sku": {"name": "Premium"}}, 16, 16),
    ],
)
def test_brokers_and_stores_are_at_most_one_a_partition(
    bus: dict[str, Any], brokers: int, stores: int
) -> None:
    def spec(broker_count: int, store_count: int) -> dict[str, Any]:
        named = storage(*(store(f"s{number}") for number in range(store_count)))
        return bus | {"operatorSpec": {"brokers": broker_count} | named}

    NamespaceSpec.model_validate(spec(brokers, stores))
    with pytest.raises(ValidationError, match="brokers"):
        NamespaceSpec.model_validate(spec(brokers + 1, 1))
    with pytest.raises(ValidationError, match="stores"):
        NamespaceSpec.model_validate(spec(1, stores + 1))


def test_entity_takes_policies_and_a_history() -> None:
    spec = StoredOperatorSpec.model_validate(
        {"onAutoDelete": "Recreate", "adopt": "Always", "history": {"retention": "P1D"}}
    )
    assert (spec.on_auto_delete, spec.adopt, spec.history.retention_ms) == (
        "Recreate",
        "Always",
        86_400_000,
    )
    with pytest.raises(ValidationError, match="brokers"):
        StoredOperatorSpec.model_validate({"brokers": 1})
