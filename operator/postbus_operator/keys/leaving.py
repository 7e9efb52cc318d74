"""Secrets of keys that stay when their resource goes, as what their keys are of stays, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from postbus_operator.annotations import COMPONENT_LABEL
from postbus_operator.context import Context
from postbus_operator.keys.contents import COMPONENT
from postbus_operator.kube.api import Conflict, NotFound
from postbus_operator.kube.resource_types import type_of
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable

ATTEMPTS: Final = 5


async def leave_secrets(context: Context, resource: Resource) -> None:
    """Remove the owner references of a resource's Secrets; a new resource of the name has them.

    Needs no bus. Without a finalizer nobody can do it later: paused and observed resources, too.
    """
    for each in context.cache.secrets_owned_by(resource.key):
        if (each["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == COMPONENT:
            await disown(context, resource, each)


async def disown(context: Context, resource: Resource, found: Mapping[str, Any]) -> None:
    """Remove the reference to an owner from an object, if it has one.

    Others may add theirs at any time: a list is replaced only in the version that was read.
    """
    type, name = type_of(found), found["metadata"]["name"]
    for _ in range(ATTEMPTS):
        references = found["metadata"].get("ownerReferences") or []
        others = [owner for owner in references if owner["uid"] != resource.uid]
        if len(others) == len(references):
            return
        version = found["metadata"]["resourceVersion"]
        change = {"metadata": {"resourceVersion": version, "ownerReferences": others or None}}
        try:
            await context.api.patch(type, resource.key.namespace, name, change)
        except NotFound:  # deleted meanwhile
            return
        except Conflict:
            try:
                found = await context.api.get(type, resource.key.namespace, name)
            except NotFound:
                return
        else:
            return
    raise BackendUnavailable(f"{type.kind} {name} is being changed by somebody else")
