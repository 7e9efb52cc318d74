"""StatefulSets and Services of managed stores: a Postgres with one volume for each."""

from __future__ import annotations

from typing import Final

from postbus.contract.operator_spec import ManagedStore, Store
from postbus_operator.children.bus import POSTGRES_PORT, STORE, STORE_LABEL, Bus, Json
from postbus_operator.children.pods import (
    container_base,
    empty_volume,
    exec_probe,
    mount,
    pod_base,
    secret_volume,
)
from postbus_operator.children.quantities import canonical_quantity

CLAIM: Final = "data"
DATA: Final = "/var/lib/postbus-store"
TLS: Final = "/etc/postbus-store/tls"
AUTH: Final = "/etc/postbus-store/auth"
PASSWORD_FILE: Final = "password"
USER: Final = "postbus"
DATABASE: Final = "postbus"

PRE_STOP_S: Final = 6
"""Time for brokers that stop at the same moment to release their partitions: without a database a
broker waits for it until it is killed. Postgres serves meanwhile. Our choice: a stop of a broker
took 4 s with a client."""

STOP_S: Final = 29
"""Time for Postgres to write its buffers, 256 MB at most; one that is killed recovers at its next
start. Kubernetes deletes a namespace in steps: between two it pauses for half of the longest grace
period of its pods."""

CONNECTIONS_OF_PARTITION: Final = 2
CONNECTIONS_OF_BROKER: Final = 5
"""Connections of a broker to each database (docs/guides/operations.md, Sizing)."""

OVERLAP: Final = 2
"""Processes of a broker at the same time: a pod that was deleted by force, and its successor."""

RESERVE: Final = 10
"""For probes, backups, a person, and those that Postgres keeps for superusers."""


def store_objects(bus: Bus) -> list[Json]:
    """Return the objects of all managed stores."""
    found = []
    for store in bus.managed:
        assert store.managed is not None
        found += [_stateful_set(bus, store, store.managed), _service(bus, store)]
    return found


def claim_name(bus: Bus, store: Store) -> str:
    """Return the name of a store's volume claim."""
    return f"{CLAIM}-{bus.store(store.name)}-0"


def max_connections(bus: Bus) -> int:
    """Return the connections that a store must take.

    It counts a broker for each partition, so that another number of brokers restarts no store.
    """
    stores = len(bus.spec.operator_spec.storage.stores)
    partitions = -(-bus.partition_bound // stores)
    brokers = bus.partition_bound
    of_brokers = CONNECTIONS_OF_PARTITION * partitions + CONNECTIONS_OF_BROKER * brokers
    return OVERLAP * of_brokers + RESERVE


def labels_of(bus: Bus, store: Store) -> dict[str, str]:
    """Return the labels of a store's pod."""
    return {**bus.labels(STORE), STORE_LABEL: store.name}


def _stateful_set(bus: Bus, store: Store, managed: ManagedStore) -> Json:
    name = bus.store(store.name)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": bus.metadata(name, STORE),
        "spec": {
            "replicas": 1,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 2,
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
            "persistentVolumeClaimRetentionPolicy": {
                "whenDeleted": "Retain",
                "whenScaled": "Retain",
            },
            "selector": {"matchLabels": labels_of(bus, store)},
            "template": {
                "metadata": {"labels": labels_of(bus, store)},
                "spec": _pod(bus, name, managed),
            },
            "volumeClaimTemplates": [_claim_template(bus, store, managed)],
        },
    }


def _claim_template(bus: Bus, store: Store, managed: ManagedStore) -> Json:
    """Return the template, which cannot be changed: a size that grew is set at the claim."""
    metadata = bus.metadata(CLAIM, STORE, outlives=True)
    labels = {**metadata["labels"], STORE_LABEL: store.name}
    size = bus.claim_sizes.get(store.name, managed.size)
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": canonical_quantity(size)}},
    }
    if managed.storage_class_name is not None:
        spec["storageClassName"] = managed.storage_class_name
    # The API server names no type in a template that gives none, and adds both where one is given.
    return {"metadata": {"name": CLAIM, "labels": labels}, "spec": spec}


def _pod(bus: Bus, name: str, managed: ManagedStore) -> Json:
    ready = ["postbus-store-ready"]
    return {
        **pod_base(),
        "terminationGracePeriodSeconds": PRE_STOP_S + STOP_S,
        "containers": [
            {
                "name": STORE,
                **container_base(
                    bus.platform.store_image, bus.platform.image_pull_policy, managed.resources
                ),
                "args": ["postbus-store", "--max-connections", str(max_connections(bus))],
                "ports": [{"name": "postgres", "containerPort": POSTGRES_PORT, "protocol": "TCP"}],
                "startupProbe": exec_probe(ready, period_s=1, failures=86_400),
                "readinessProbe": exec_probe(ready, period_s=10, failures=3),
                "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
                "volumeMounts": [
                    mount(CLAIM, DATA, is_writable=True),
                    mount("run", "/run/postgresql", is_writable=True),
                    mount("tmp", "/tmp", is_writable=True),
                    mount("tls", TLS),
                    mount("auth", AUTH),
                ],
            }
        ],
        "volumes": [
            empty_volume("run"),
            empty_volume("tmp"),
            secret_volume("tls", f"{name}-tls"),
            secret_volume("auth", f"{name}-auth"),
        ],
    }


def _service(bus: Bus, store: Store) -> Json:
    """Return the headless Service; it has the address of a Postgres that still starts."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": bus.metadata(bus.store(store.name), STORE),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels_of(bus, store),
            "ports": [
                {
                    "name": "postgres",
                    "port": POSTGRES_PORT,
                    "targetPort": "postgres",
                    "protocol": "TCP",
                }
            ],
        },
    }
