"""Deletion of a Namespace, and what is left of it: data that a new resource adopts.

Workloads go with the resource by their owner references. Volume claims, the sealing key, the
authority and the passwords of stores have none: they stay. `Delete` marks them with the time of
their end, which `sweep` keeps; `DeleteIfEmpty` does the same if the bus says that it is empty, and
else leaves them unmarked, as `Retain` does. A deletion waits for protection only: a bus that cannot
be asked keeps its data.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import ValidationError

from postbus.client.control import RequestRefused
from postbus.contract.control import ProblemType
from postbus.contract.namespace import SoftDelete
from postbus_operator.annotations import COMPONENT_LABEL, START_EMPTY
from postbus_operator.children.bus import STORE, Bus
from postbus_operator.conditions import Conditions, timestamp
from postbus_operator.context import Context
from postbus_operator.failures import former_status
from postbus_operator.keys.leaving import disown, leave_secrets
from postbus_operator.kube.api import ApiError, Conflict, Forbidden, NotFound
from postbus_operator.kube.cache import bus_label
from postbus_operator.kube.resource_types import (
    CERTIFICATES,
    CLUSTER_NAMESPACES,
    SECRETS,
    STATEFUL_SETS,
    VOLUME_CLAIMS,
    ResourceType,
    type_of,
)
from postbus_operator.names import child_name
from postbus_operator.namespaces.child_writer import ChildWriter
from postbus_operator.namespaces.status import Look, Trouble
from postbus_operator.namespaces.workloads import observed_workload
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, Event, Outcome

PURGE_AT: Final = "postbus.dev/purge-at"
"""Time at which data without a resource is deleted."""

ASK_S: Final = 8.0
"""Time from a deletion for a bus to say that it is empty; then its data is kept. Our choice: most
of the 10 s in which a bus shall be gone."""

ANSWER_S: Final = 7.0
"""Bound on the answer: closing waits 5 s for commits."""

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
PROTECTED_S: Final = 300.0


async def release(context: Context, resource: Resource) -> Outcome:
    """Look once at a resource that is being deleted."""
    operator = resource.spec.get("operatorSpec", {})
    if not resource.has_finalizer:
        return Outcome(None, has_finalizer=False)
    if resource.is_released_by_force:
        return _released("the deletion is forced: volumes and keys of the bus are kept")
    if operator.get("deletionProtection"):
        text = "the bus is protected: set operatorSpec.deletionProtection to false"
        return _blocked(context, resource, "DeletionProtected", text, PROTECTED_S)
    if operator.get("reconcilePolicy") == "DetachOnDelete":
        await _detach(context, resource)
        return _released("all objects of the bus stay as they are")
    policy = operator.get("deletionPolicy", "DeleteIfEmpty")
    is_observed = operator.get("reconcilePolicy") == "Observe"
    if policy == "Retain" or is_observed or resource.is_paused:
        return _released("volumes and keys of the bus are kept")
    if policy == "Delete":
        return await _let_go(context, resource)
    return await _delete_if_empty(context, resource)


async def _delete_if_empty(context: Context, resource: Resource) -> Outcome:
    if not _may_have_messages(context, resource):
        return await _let_go(context, resource)
    try:
        async with asyncio.timeout(ANSWER_S):
            session = await context.buses.of(resource)
            if session is None:
                raise context.buses.failure_of(resource)
            await session.control.ask("POST", "/v1/namespace/close")
    except RequestRefused as refused:
        if refused.type is ProblemType.NOT_EMPTY:
            text = f"volumes and keys of the bus are kept: {refused.detail}"
            await leave_secrets(context, resource)
            return _released(text, "NotEmpty")
        trouble = refused.detail
    except (BackendUnavailable, TimeoutError) as error:
        trouble = str(error) or "no answer in time"
    else:
        return await _let_go(context, resource)
    assert resource.deleted_at is not None
    is_in_time = context.now() < resource.deleted_at + timedelta(seconds=ASK_S)
    if is_in_time and _may_answer(context, resource):
        text = f"asks the bus whether it is empty: {trouble}"
        return _blocked(context, resource, "BackendUnavailable", text, RETRY_S)
    await leave_secrets(context, resource)
    text = f"volumes and keys of the bus are kept, as it did not say that it is empty: {trouble}"
    return _released(text, "EmptinessUnknown")


def _may_have_messages(context: Context, resource: Resource) -> bool:
    """Return whether a bus has answered, has data of a former one, or takes messages unasked."""
    namespace, bus = resource.key.namespace, child_name(resource.key.name)
    brokers = context.cache.find(STATEFUL_SETS, namespace, f"{bus}-broker")
    return (
        resource.status.get("version") is not None
        or bool(_former(context, resource))
        or (brokers is not None and observed_workload(brokers).ready > 0)
    )


def _may_answer(context: Context, resource: Resource) -> bool:
    """Return whether brokers stay while the resource does: not if all of its namespace goes."""
    namespace = resource.key.namespace
    brokers = f"{child_name(resource.key.name)}-broker"
    around = (
        context.cache.find(STATEFUL_SETS, namespace, brokers),
        context.cache.find(CLUSTER_NAMESPACES, "", namespace),
    )
    is_going = [each is not None and "deletionTimestamp" in each["metadata"] for each in around]
    return around[0] is not None and not any(is_going)


def _released(text: str, warning: str | None = None) -> Outcome:
    event = Event("Warning", warning, text) if warning else Event("Normal", "Released", text)
    return Outcome(None, has_finalizer=False, events=(event,))


def _blocked(
    context: Context, resource: Resource, reason: str, message: str, retry_s: float
) -> Outcome:
    conditions = Conditions(
        resource.status.get("conditions", ()), resource.generation, context.now()
    )
    conditions.set("Ready", "False", "Deleting", message)
    conditions.set("DeletionBlocked", "True", reason, message)
    status = former_status(resource).model_copy(
        update={
            "observed_generation": resource.generation,
            "conditions": conditions.all(),
            "provisioning_state": "Deleting",
        }
    )
    return Outcome(status, has_finalizer=True, retry_s=retry_s)


# --- data that stays ----------------------------------------------------------------------------


async def _let_go(context: Context, resource: Resource) -> Outcome:
    """Mark what outlives the resource with the time of its end, and release the resource.

    With a database of somebody else, the keys stay: what they belong to is not deleted either.
    """
    retention_s = _retention(resource)
    at = timestamp(context.now() + timedelta(seconds=retention_s))
    stores = resource.spec.get("operatorSpec", {}).get("storage", {}).get("stores", ())
    is_external = any(each.get("postgres") for each in stores)
    kept = 0
    for each in data_of(context, resource.key.namespace, child_name(resource.key.name)):
        is_of_store = each["metadata"]["labels"].get(COMPONENT_LABEL) == STORE
        if is_external and not is_of_store:
            continue
        kept += 1
        if _annotations(each).get(PURGE_AT) is None:
            await _annotate(context, each, {PURGE_AT: at})
    text = f"volumes and keys of the bus are kept until {at}: a new resource of this name has them"
    return _released(text if kept else "the bus has no volumes")


def _retention(resource: Resource) -> float:
    said = resource.spec.get("operatorSpec", {}).get("softDelete", {})
    try:
        return SoftDelete.model_validate(said).retention_ms / 1_000
    except ValidationError:  # of another version of the definition
        return SoftDelete().retention_ms / 1_000


def data_of(context: Context, namespace: str, bus: str) -> list[Mapping[str, Any]]:
    """Return the objects of a bus that outlive its resource."""
    return [
        each
        for each in context.cache.children_of(namespace, bus)
        if each["kind"] in {SECRETS.kind, VOLUME_CLAIMS.kind}
        and not each["metadata"].get("ownerReferences")
    ]


async def adopt_data(context: Context, bus: Bus, look: Look, writer: ChildWriter) -> bool:
    """Take over what a former resource of the name left; return False while it goes instead."""
    former = _former(context, look.resource)
    starts_empty = look.resource.annotations.get(START_EMPTY) == "true"
    if starts_empty and former and not _has_begun(context, look.resource):
        for each in former:
            if not each["metadata"].get("deletionTimestamp"):
                await _delete(context, each)
        text = f"waits for {len(former)} volumes and keys of a former bus to go"
        look.troubles.append(Trouble("storage", "Deleting", text, is_stalled=False))
        return False
    for each in data_of(context, bus.key.namespace, bus.name):
        if PURGE_AT in _annotations(each):
            change = {"metadata": {"annotations": {PURGE_AT: None}}}
            name = each["metadata"]["name"]
            await writer.patch(type_of(each), name, change, "storage", "")
    return True


def _former(context: Context, resource: Resource) -> list[Mapping[str, Any]]:
    """Return the data that is older than a resource."""
    found = data_of(context, resource.key.namespace, child_name(resource.key.name))
    return [each for each in found if _created(each) < resource.created_at]


def _has_begun(context: Context, resource: Resource) -> bool:
    """Return whether a bus was made of a resource: its data is in use, however old it is."""
    children = context.cache.children_of(resource.key.namespace, child_name(resource.key.name))
    return any(
        owner["uid"] == resource.uid
        for each in children
        for owner in each["metadata"].get("ownerReferences") or ()
    )


async def keep_sweeping(context: Context) -> None:
    """Sweep once in each period of the resync, without an end."""
    while True:
        await sweep(context)
        await asyncio.sleep(context.settings.resync_s)


async def sweep(context: Context) -> None:
    """Delete data whose time has come, unless a resource has adopted it.

    Keys go after the volumes that they open, and stay while one of these does. What cannot be
    deleted is tried again by the next sweep, and keeps nothing else. A resource may appear, and
    adopt, at any time: the API server deletes an object only as it is in the cache.
    """
    for each in _due(context, VOLUME_CLAIMS):
        await _sweep(context, each)
    for each in _due(context, SECRETS):
        if not _has_volumes(context, each):
            await _sweep(context, each)


def _due(context: Context, type: ResourceType) -> Iterator[Mapping[str, Any]]:
    for key in context.cache.keys_of(type, None):
        found = context.cache.find(*key)
        end = None if found is None else _end_of(found)
        if found is None or end is None or end > context.now():
            continue
        bus = bus_label(found)
        if bus is not None and not _has_resource(context, key.namespace, bus):
            yield found


def _has_resource(context: Context, namespace: str, bus: str) -> bool:
    return any(
        each.key.namespace == namespace and child_name(each.key.name) == bus
        for each in context.cache.of_kind("Namespace")
    )


def _has_volumes(context: Context, secret: Mapping[str, Any]) -> bool:
    """Return whether volumes of the bus of a Secret stay, whatever keeps them."""
    around = context.cache.children_of(secret["metadata"]["namespace"], str(bus_label(secret)))
    return any(
        each["kind"] == VOLUME_CLAIMS.kind and not each["metadata"].get("deletionTimestamp")
        for each in around
    )


async def _sweep(context: Context, found: Mapping[str, Any]) -> None:
    metadata = found["metadata"]
    try:
        await _delete(context, found)
    except ApiError as error:
        place = f"{metadata['namespace']}/{metadata['name']}"
        logger.warning("%s %s stays for now: %s", found["kind"], place, error)


async def _detach(context: Context, resource: Resource) -> None:
    """Remove the owner references of all objects of a bus, so that they stay.

    Certificates of cert-manager are not watched. `leave_secrets` does it for Secrets of keys.
    """
    namespace, bus = resource.key.namespace, child_name(resource.key.name)
    for each in context.cache.children_of(namespace, bus):
        await disown(context, resource, each)
    if resource.spec["operatorSpec"].get("tls", {}).get("issuerRef"):
        try:
            found = await context.api.get(CERTIFICATES, namespace, f"{bus}-tls")
        except (NotFound, Forbidden):  # never made
            return
        await disown(context, resource, found)


async def _annotate(
    context: Context, found: Mapping[str, Any], annotations: Mapping[str, str | None]
) -> None:
    metadata = found["metadata"]
    change = {"metadata": {"uid": metadata["uid"], "annotations": dict(annotations)}}
    try:
        await context.api.patch(type_of(found), metadata["namespace"], metadata["name"], change)
    except (NotFound, Conflict):  # deleted meanwhile, or another object of the name
        return


async def _delete(context: Context, found: Mapping[str, Any]) -> None:
    metadata = found["metadata"]
    try:
        await context.api.delete(
            type_of(found),
            metadata["namespace"],
            metadata["name"],
            uid=metadata["uid"],
            version=metadata["resourceVersion"],
        )
    except Conflict:  # another object of the name, or somebody has changed it: look again
        return


def _annotations(found: Mapping[str, Any]) -> Mapping[str, str]:
    said: Mapping[str, str] = found["metadata"].get("annotations") or {}
    return said


def _end_of(found: Mapping[str, Any]) -> datetime | None:
    """Return the time of the end; None without one, or with a text that somebody else wrote."""
    try:
        return datetime.strptime(_annotations(found).get(PURGE_AT, ""), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None


def _created(found: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(found["metadata"]["creationTimestamp"])
