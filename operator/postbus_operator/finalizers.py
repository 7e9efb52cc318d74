"""Which resources the operator holds back from going, so that it can do what their policy says."""

from __future__ import annotations

from typing import Any

from postbus_operator.annotations import FINALIZER
from postbus_operator.objects import Resource


def is_held(resource: Resource) -> bool:
    """Return whether the policies of a resource leave work for its deletion.

    They are read from the spec alone: the finalizer is there before anything is made elsewhere.
    The objects of a Namespace would go with it: detaching needs the operator, too.
    """
    operator_spec = resource.spec.get("operatorSpec") or {}
    reconcile_policy = operator_spec.get("reconcilePolicy", "Manage")
    if resource.is_released_by_force:
        return False
    if resource.key.kind == "Pipeline":
        return True  # the rule of its keys goes, whatever becomes of the reader group
    if operator_spec.get("deletionProtection"):
        return True
    if resource.key.kind == "Namespace" and reconcile_policy == "DetachOnDelete":
        return True
    return not is_left(resource)


def is_left(resource: Resource) -> bool:
    """Return whether the entity or the data of a bus stays as it is when the resource goes.

    Secrets with its keys stay then, too: they have no owner reference.
    """
    if resource.key.kind == "Pipeline":
        return False
    operator_spec = resource.spec.get("operatorSpec") or {}
    reconcile_policy = operator_spec.get("reconcilePolicy", "Manage")
    return operator_spec.get("deletionPolicy") == "Retain" or reconcile_policy != "Manage"


def finalizer_patch(resource: Resource, *, is_there: bool) -> dict[str, Any]:
    """Return the merge patch that adds or removes the finalizer, of exactly this version."""
    others = [each for each in resource.finalizers if each != FINALIZER]
    return {
        "metadata": {
            "uid": resource.uid,
            "resourceVersion": resource.resource_version,
            "finalizers": [*others, FINALIZER] if is_there else others,
        }
    }
