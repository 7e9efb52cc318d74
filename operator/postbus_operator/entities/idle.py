"""Idle deletion: what becomes of a resource whose entity was deleted because it was idle. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

from postbus_operator.entities.memory import Memory, asks_for_creation
from postbus_operator.objects import Resource

Policy = Literal["KeepResource", "Recreate", "DeleteResource"]

OWNERSHIP_LABELS: Final = (
    "argocd.argoproj.io/instance",
    "app.kubernetes.io/instance",  # Argo CD's default, and that of Helm's charts
    "kustomize.toolkit.fluxcd.io/name",
    "helm.toolkit.fluxcd.io/name",
)
OWNERSHIP_ANNOTATIONS: Final = ("argocd.argoproj.io/tracking-id", "meta.helm.sh/release-name")
"""Names that tools write on what they keep: they would make a deleted resource again."""


class AfterIdle(Enum):
    """What is done."""

    CREATE = "create the entity again"
    KEEP = "keep the resource without an entity"
    DELETE = "delete the resource"


def policy_of(resource: Resource) -> Policy:
    """Return the effective `onAutoDelete`."""
    said: Policy | None = (resource.spec.get("operatorSpec") or {}).get("onAutoDelete")
    if said is not None:
        return said
    return "KeepResource" if is_kept_by_a_tool(resource) else "DeleteResource"


def is_kept_by_a_tool(resource: Resource) -> bool:
    """Return whether Argo CD, Flux or Helm applied the resource."""
    return (
        any(name in resource.labels for name in OWNERSHIP_LABELS)
        or any(name in resource.annotations for name in OWNERSHIP_ANNOTATIONS)
        or resource.labels.get("app.kubernetes.io/managed-by") == "Helm"
    )


def after_idle(resource: Resource, memory: Memory) -> AfterIdle:
    """Return what is done; `memory` is from before the deletion, or from a look after it."""
    if asks_for_creation(resource, memory):
        return AfterIdle.CREATE
    match policy_of(resource):
        case "Recreate":
            return AfterIdle.CREATE
        case "DeleteResource":
            return AfterIdle.DELETE
        case "KeepResource":
            return AfterIdle.KEEP
