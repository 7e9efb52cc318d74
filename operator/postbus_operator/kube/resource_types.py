"""Types of objects of the API server that the operator reads or writes, and their paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from postbus_operator.crds import GROUP, KINDS, VERSION


@dataclass(frozen=True, slots=True, eq=False)
class ResourceType:
    """A type as the API server names it; `group` is empty for the core. Each is made here once."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, *parts: str) -> str:
        """Return a path: of a list in a namespace or everywhere, or with a name, of an object."""
        start = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if namespace is not None and self.is_namespaced:
            start += f"/namespaces/{quote(namespace, safe='')}"
        return "/".join((start, self.plural, *(quote(each, safe="") for each in parts)))


CLUSTER_NAMESPACES: Final = ResourceType("", "v1", "namespaces", "Namespace", is_namespaced=False)
CONFIG_MAPS: Final = ResourceType("", "v1", "configmaps", "ConfigMap")
SECRETS: Final = ResourceType("", "v1", "secrets", "Secret")
SERVICES: Final = ResourceType("", "v1", "services", "Service")
VOLUME_CLAIMS: Final = ResourceType("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
STATEFUL_SETS: Final = ResourceType("apps", "v1", "statefulsets", "StatefulSet")
JOBS: Final = ResourceType("batch", "v1", "jobs", "Job")
CRON_JOBS: Final = ResourceType("batch", "v1", "cronjobs", "CronJob")
DISRUPTION_BUDGETS: Final = ResourceType(
    "policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"
)
NETWORK_POLICIES: Final = ResourceType(
    "networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"
)
SERVICE_ACCOUNTS: Final = ResourceType("", "v1", "serviceaccounts", "ServiceAccount")
ROLE_BINDINGS: Final = ResourceType(
    "rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"
)
PODS: Final = ResourceType("", "v1", "pods", "Pod")
CERTIFICATES: Final = ResourceType("cert-manager.io", "v1", "certificates", "Certificate")
LEASES: Final = ResourceType("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS: Final = ResourceType("events.k8s.io", "v1", "events", "Event")

RESOURCES: Final[Mapping[str, ResourceType]] = {
    kind.name: ResourceType(GROUP, VERSION, kind.plural, kind.name) for kind in KINDS
}
"""Custom resources, by the name of their kind."""

CHILDREN: Final = (
    CONFIG_MAPS,
    SECRETS,
    SERVICES,
    VOLUME_CLAIMS,
    STATEFUL_SETS,
    JOBS,
    CRON_JOBS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    SERVICE_ACCOUNTS,
    ROLE_BINDINGS,
)
"""Types of objects that the operator makes for a bus or pipeline, or that belong to a bus."""

_BY_NAME: Final = {
    (each.api_version, each.kind): each
    for each in (*RESOURCES.values(), *CHILDREN, CLUSTER_NAMESPACES, CERTIFICATES, LEASES, EVENTS)
}


def type_of(found: Mapping[str, Any]) -> ResourceType:
    """Return the type of an object's JSON. Raises KeyError for one that is not listed here."""
    return _BY_NAME[found["apiVersion"], found["kind"]]
