"""A bus as its objects are made from it: spec, names, and what the cluster decides about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from postbus.contract.operator_spec import MAX_PARTITIONS, Store
from postbus.contract.resources import API_VERSION, NamespaceSpec
from postbus_operator.annotations import BUS_LABEL, COMPONENT_LABEL, MANAGED_BY_LABEL
from postbus_operator.names import child_name, store_name
from postbus_operator.objects import Key

Json = dict[str, Any]

NAME_LABEL: Final = "app.kubernetes.io/name"
OPERATOR_NAME: Final = "postbus-operator"
"""Label `app.kubernetes.io/name` of the operator's pods, which the charts set."""

BROKER: Final = "broker"
STORE: Final = "store"
STORE_LABEL: Final = "postbus.dev/store"

TLS_PORT: Final = 5671
HTTP_PORT: Final = 5300
METRICS_PORT: Final = 9464
CONTROL_PORT: Final = 9465
POSTGRES_PORT: Final = 5432


@dataclass(frozen=True, slots=True)
class Platform:
    """What the operator's settings say about objects."""

    image: str
    store_image: str
    image_pull_policy: str = "IfNotPresent"
    cluster_domain: str = "cluster.local"
    operator_namespace: str = "postbus-system"


@dataclass(frozen=True, slots=True)
class Bus:
    """A bus. `claim_sizes`: store -> size in the template of an existing StatefulSet."""

    key: Key
    uid: str
    spec: NamespaceSpec
    platform: Platform
    claim_sizes: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name as objects have it."""
        return child_name(self.key.name)

    @property
    def bus_name(self) -> str:
        """The name of the bus for its clients."""
        return self.spec.entity_name or self.key.name

    @property
    def brokers(self) -> int:
        """The number of brokers. One: several of them do not share a bus yet."""
        return 1

    @property
    def partition_bound(self) -> int:
        """The number of partitions, or its bound where only the store knows it."""
        return self.spec.known_partition_count or MAX_PARTITIONS

    @property
    def managed(self) -> list[Store]:
        """The stores that the operator runs."""
        return [each for each in self.spec.operator_spec.storage.stores if each.managed is not None]

    def child(self, suffix: str) -> str:
        """Return the name of an object, `suffix` one of `names.SUFFIXES`."""
        return f"{self.name}-{suffix}"

    def store(self, store: str) -> str:
        """Return the name of a store's objects."""
        return store_name(self.name, store)

    def host(self, service: str) -> str:
        """Return the full host name of a Service."""
        return f"{service}.{self.key.namespace}.svc.{self.platform.cluster_domain}"

    def hosts(self, service: str) -> list[str]:
        """Return all names that a Service has within the cluster, the shortest first."""
        short = f"{service}.{self.key.namespace}"
        return [service, short, f"{short}.svc", self.host(service)]

    @property
    def client_names(self) -> list[str]:
        """The host names by which clients reach the bus."""
        return [*self.hosts(self.name), *self.spec.operator_spec.service.names]

    @property
    def certificate_names(self) -> list[str]:
        """The host names in the certificate of the brokers: those of clients, and each pod's."""
        pods = [f"*.{each}" for each in self.hosts(self.child("brokers"))]
        return list(dict.fromkeys([*self.client_names, *pods]))

    def labels(self, component: str) -> dict[str, str]:
        """Return the labels by which Services and policies select pods."""
        return {NAME_LABEL: "postbus", BUS_LABEL: self.name, COMPONENT_LABEL: component}

    def metadata(self, name: str, component: str, *, outlives: bool = False) -> Json:
        """Return the metadata of an object. `outlives`: it stays when the resource goes."""
        made: Json = {
            "name": name,
            "namespace": self.key.namespace,
            "labels": {**self.labels(component), MANAGED_BY_LABEL: OPERATOR_NAME},
        }
        if not outlives:
            made["ownerReferences"] = [
                {
                    "apiVersion": API_VERSION,
                    "kind": self.key.kind,
                    "name": self.key.name,
                    "uid": self.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ]
        return made
