"""Services of the brokers, and who may connect to pods."""

from __future__ import annotations

from typing import Final

from postbus_operator.annotations import BUS_LABEL, COMPONENT_LABEL
from postbus_operator.children.bus import (
    BROKER,
    CONTROL_PORT,
    HTTP_PORT,
    METRICS_PORT,
    NAME_LABEL,
    OPERATOR_NAME,
    POSTGRES_PORT,
    STORE,
    TLS_PORT,
    Bus,
    Json,
)

METRICS_LABEL: Final = "postbus.dev/metrics"
"""`"true"` on a namespace of the cluster: its pods may read the metrics of brokers."""

BACKUP: Final = "backup"
"""Component of pods that may connect to stores, besides brokers."""

HTTPS_PORT: Final = 443
"""Administration clients of Java and KEDA's scaler connect to this port of the bus's name."""


def network_objects(bus: Bus) -> list[Json]:
    """Return Services and, unless they are off, policies."""
    found = [_client_service(bus), _peer_service(bus)]
    if bus.spec.operator_spec.network_policy.enabled:
        found.append(_broker_policy(bus))
        if bus.managed:
            found.append(_store_policy(bus))
    return found


def _client_service(bus: Bus) -> Json:
    wanted = bus.spec.operator_spec.service
    is_public = bus.spec.public_network_access == "Enabled"
    metadata = bus.metadata(bus.name, BROKER)
    if wanted.annotations:
        metadata["annotations"] = dict(wanted.annotations)
    spec: Json = {
        "type": wanted.type if is_public else "ClusterIP",
        "selector": bus.labels(BROKER),
        "ports": [
            _port("amqps", TLS_PORT, "amqps"),
            _port("https", HTTPS_PORT, "amqps"),
            _port("http", HTTP_PORT, "http"),
        ],
    }
    if wanted.load_balancer_class is not None and is_public:
        spec["loadBalancerClass"] = wanted.load_balancer_class
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _peer_service(bus: Bus) -> Json:
    """Return the headless Service: brokers and the operator find each broker by its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": bus.metadata(bus.child("brokers"), BROKER),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": bus.labels(BROKER),
            "ports": [
                _port("amqps", TLS_PORT, "amqps"),
                _port("http", HTTP_PORT, "http"),
                _port("metrics", METRICS_PORT, "metrics"),
                _port("control", CONTROL_PORT, "control"),
            ],
        },
    }


def _broker_policy(bus: Bus) -> Json:
    operator = {
        "namespaceSelector": _in_namespace(bus.platform.operator_namespace),
        "podSelector": {"matchLabels": {NAME_LABEL: OPERATOR_NAME}},
    }
    metrics = {"namespaceSelector": {"matchLabels": {METRICS_LABEL: "true"}}}
    clients: Json = {"ports": [_allowed(TLS_PORT), _allowed(HTTP_PORT)]}
    if bus.spec.public_network_access == "Disabled":
        clients["from"] = [{"namespaceSelector": {}}]
    return _policy(
        bus,
        BROKER,
        [
            clients,
            {"from": [operator], "ports": [_allowed(METRICS_PORT), _allowed(CONTROL_PORT)]},
            {"from": [metrics], "ports": [_allowed(METRICS_PORT)]},
        ],
    )


def _store_policy(bus: Bus) -> Json:
    """Return the policy of stores: Postgres for brokers and backups, and nothing outwards."""
    clients = [
        {"podSelector": {"matchLabels": bus.labels(BROKER)}},
        {"podSelector": {"matchLabels": {BUS_LABEL: bus.name, COMPONENT_LABEL: BACKUP}}},
    ]
    made = _policy(bus, STORE, [{"from": clients, "ports": [_allowed(POSTGRES_PORT)]}])
    made["spec"]["policyTypes"] = ["Ingress", "Egress"]
    return made


def _policy(bus: Bus, component: str, ingress: list[Json]) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": bus.metadata(f"{bus.name}-{component}", component),
        "spec": {
            "podSelector": {"matchLabels": bus.labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _port(name: str, port: int, target: str) -> Json:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}


def _allowed(port: int) -> Json:
    return {"port": port, "protocol": "TCP"}


def _in_namespace(name: str) -> Json:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}
