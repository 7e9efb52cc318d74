"""Random specs of kind Namespace as the API server accepts them, and the buses made of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from postbus.contract.resources import NamespaceSpec
from postbus_operator.children.bus import Bus, Platform
from postbus_operator.objects import Key

PLATFORM = Platform("postbus:dev", "postbus-store:dev", "Never", "cluster.local", "postbus-system")

quantities = st.sampled_from(
    ["500m", "1Gi", "1.5", 2, "0.5Gi", "1e3", "1536Mi", "100M", "1.5Gi", "1024Ki", "2000m", "0.1"]
)
amounts = st.dictionaries(st.sampled_from(["cpu", "memory"]), quantities)
resources = st.fixed_dictionaries({}, optional={"limits": amounts})
managed = st.fixed_dictionaries(
    {},
    optional={
        "managed": st.fixed_dictionaries(
            {"size": st.sampled_from(["10Gi", "0.5Ti", "1.5Gi", "100000000000"])},
            optional={
                "storageClassName": st.sampled_from(["fast", "local-path"]),
                "resources": resources,
            },
        )
    },
).map(lambda store: {"managed": {}} | store)
external = st.fixed_dictionaries(
    {},
    optional={
        "sslMode": st.sampled_from(["require", "verify-full"]),
        "caSecretRef": st.just({"name": "db-ca"}),
    },
).map(lambda extra: {"postgres": {"secretRef": {"name": "db"}, **extra}})
store_lists = st.lists(st.one_of(managed, external), min_size=1, max_size=4).map(
    lambda stores: [{"name": f"s{at}", **each} for at, each in enumerate(stores)]
)
labels = st.dictionaries(st.sampled_from(["team", "example.org/tier"]), st.just("a"), max_size=2)
environment = st.lists(
    st.sampled_from(
        [
            {"name": "TZ", "value": "UTC"},
            {"name": "EMPTY", "value": ""},
            {"name": "POSTBUS_LOG_LEVEL", "value": "debug"},
            {"name": "POSTBUS_WINDOW_BYTES", "value": "1048576"},
            {"name": "PART", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
            {"name": "MORE", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}},
        ]
    ),
    unique_by=lambda each: each["name"],
)
spread = {
    "maxSkew": 1,
    "topologyKey": "rack",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"a": "b"}},
}
pod_templates = st.fixed_dictionaries(
    {},
    optional={
        "labels": labels,
        "annotations": labels,
        "nodeSelector": labels,
        "tolerations": st.lists(
            st.sampled_from(
                [
                    {"operator": "Exists"},
                    {"key": "a", "value": "b", "effect": "NoSchedule"},
                    {"key": "a", "operator": "Exists", "effect": "NoExecute"},
                ]
            ),
            max_size=2,
        ),
        "affinity": st.just({"nodeAffinity": {}}),
        "topologySpreadConstraints": st.just([spread]),
        "priorityClassName": st.just("system-cluster-critical"),
        "env": environment,
    },
)
services = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
            "annotations": labels,
            "names": st.lists(
                st.sampled_from(["bus.example.org", "10.0.0.7", "x" * 200 + ".example.org"]),
                unique=True,
            ),
        },
    ),
    st.just({"type": "LoadBalancer", "loadBalancerClass": "example.org/lb"}),
)
skus = st.sampled_from(
    [
        {"sku": {"name": "Basic"}},
        {"sku": {"name": "Standard"}},
        {"sku": {"name": "Premium", "capacity": 2}},
        {"sku": {"name": "Premium"}, "premiumMessagingPartitions": 4},
    ]
)
operators = st.fixed_dictionaries(
    {"storage": store_lists.map(lambda stores: {"stores": stores})},
    optional={
        "image": st.just("registry.example.org/postbus:1"),
        "resources": resources,
        "podTemplate": pod_templates,
        "service": services,
        "networkPolicy": st.fixed_dictionaries({"enabled": st.booleans()}),
        "upgradeStrategy": st.fixed_dictionaries(
            {"type": st.sampled_from(["RollingUpdate", "OnDelete"])}
        ),
        "softDelete": st.just({"retention": "P1D"}),
    },
)
specs = st.builds(
    lambda sku, rest, operator: {**sku, **rest, "operatorSpec": operator},
    skus,
    st.fixed_dictionaries(
        {},
        optional={
            "entityName": st.just("Shop-Bus"),
            "publicNetworkAccess": st.sampled_from(["Enabled", "Disabled"]),
            "tags": labels,
        },
    ),
    operators,
)
names = st.sampled_from(["shop-bus", "x" * 253, "shop.bus", "1st", "a-broker", "a-store-b"])


def bus_of(spec: dict[str, Any], name: str = "shop-bus", namespace: str = "apps") -> Bus:
    parsed = NamespaceSpec.model_validate(spec)
    return Bus(Key("Namespace", namespace, name), "1-2-3", parsed, PLATFORM)


buses = st.builds(bus_of, specs, names)
