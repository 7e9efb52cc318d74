"""Objects of a pipeline on the API server: written if they differ, ended, and looked at."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from postbus_operator.annotations import COMPONENT_LABEL
from postbus_operator.children.bus import Json
from postbus_operator.children.comparison import is_current, with_digest
from postbus_operator.context import Context
from postbus_operator.kube.api import Invalid, NotFound
from postbus_operator.kube.cache import owners_of
from postbus_operator.kube.resource_types import (
    CRON_JOBS,
    JOBS,
    PODS,
    ROLE_BINDINGS,
    SERVICE_ACCOUNTS,
    STATEFUL_SETS,
    type_of,
)
from postbus_operator.kube.slimming import slim
from postbus_operator.names import pipeline_name
from postbus_operator.objects import Resource
from postbus_operator.outcome import SpecInvalid
from postbus_operator.pipelines.workloads import (
    PIPELINE,
    ending_of,
    has_document_of,
    is_run_of,
    is_suspended,
    labels_of,
    suspension,
)

Found = Mapping[str, Any]


def workloads_of(context: Context, resource: Resource) -> list[Found]:
    """Return StatefulSet, CronJob and Jobs of a pipeline.

    A CronJob is before its Jobs: one that is stopped first makes no other Job.
    """
    cache, namespace = context.cache, resource.key.namespace
    types = (STATEFUL_SETS, CRON_JOBS, JOBS)
    found = [cache.find(*key) for type in types for key in cache.keys_of(type, namespace)]
    return [each for each in found if each is not None and resource.key in owners_of(each)]


async def put(context: Context, resource: Resource, wanted: Json) -> Found:
    """Apply an object unless it is as wanted; return it. Of a Job only `suspend` can be changed.

    Raises SpecInvalid if the name is taken, or the API server does not accept the object.
    """
    wanted = with_digest(wanted)
    type, name, namespace = type_of(wanted), wanted["metadata"]["name"], resource.key.namespace
    observed = context.cache.find(type, namespace, name)
    if observed is None:
        with suppress(NotFound):
            observed = slim(await context.api.get(type, namespace, name))
    if observed is not None:
        if resource.key not in owners_of(observed):
            text = f"{type.kind} {name} exists and is not of this pipeline: rename or delete it"
            raise SpecInvalid("NameTaken", text)
        if is_current(observed, wanted):
            return observed
        if type is JOBS:
            change: Json = {"spec": {"suspend": wanted["spec"]["suspend"]}}
            is_same = is_suspended(observed) == is_suspended(wanted)
            return observed if is_same else await context.api.patch(type, namespace, name, change)
    try:
        return await context.api.apply(wanted)
    except Invalid as error:
        raise SpecInvalid("InvalidSpec", f"{type.kind} {name}: {error.message}") from None


async def stop(context: Context, resource: Resource) -> list[Found]:
    """Let the pods of a pipeline end after their batch; return its workloads."""
    return [await _stopped(context, each) for each in workloads_of(context, resource)]


async def remove_others(context: Context, resource: Resource, kept: Found) -> None:
    """End the workloads of former documents; a StatefulSet without pods goes with its Pipeline."""
    for each in workloads_of(context, resource):
        metadata, type = each["metadata"], type_of(each)
        if metadata["uid"] == kept["metadata"]["uid"] or _is_left(each, kept):
            continue
        if type is STATEFUL_SETS:
            await _stopped(context, each)
        else:
            name, uid = metadata["name"], metadata["uid"]
            await context.api.delete(type, metadata["namespace"], name, uid=uid)


async def remove_rights(context: Context, resource: Resource) -> None:
    """Delete account and binding of a pipeline that has no executors any more."""
    namespace, name = resource.key.namespace, pipeline_name(resource.key.name)
    for type in (ROLE_BINDINGS, SERVICE_ACCOUNTS):
        found = context.cache.find(type, namespace, name)
        if found is not None and resource.key in owners_of(found):
            await context.api.delete(type, namespace, name, uid=found["metadata"]["uid"])


def _is_left(found: Found, kept: Found) -> bool:
    """Return whether a workload is a Job of the CronJob that is kept, with its document or over."""
    if type_of(kept) is not CRON_JOBS or type_of(found) is not JOBS or not is_run_of(found, kept):
        return False
    return ending_of(found) is not None or has_document_of(found, kept)


async def jobs_of(context: Context, resource: Resource, cron_job: Found) -> list[Found]:
    """Return the Jobs of a CronJob with its document; those that were suspended with it go on."""
    return [
        await _patched(context, each, {"spec": {"suspend": False}})
        if is_suspended(each) and not is_suspended(cron_job)
        else each
        for each in workloads_of(context, resource)
        if type_of(each) is JOBS and is_run_of(each, cron_job) and has_document_of(each, cron_job)
    ]


async def _stopped(context: Context, found: Found) -> Found:
    if is_suspended(found) or ending_of(found) is not None:
        return found
    return await _patched(context, found, suspension(found))


async def _patched(context: Context, found: Found, change: Json) -> Found:
    metadata = found["metadata"]
    return await context.api.patch(type_of(found), metadata["namespace"], metadata["name"], change)


async def pods_of(context: Context, resource: Resource, component: str = PIPELINE) -> list[Json]:
    """Return the pods of a pipeline, also those that have ended. `component`: or its executors."""
    wanted = labels_of(resource) | {COMPONENT_LABEL: component}
    labels = ",".join(f"{name}={value}" for name, value in wanted.items())
    return [each async for each in context.api.list(PODS, resource.key.namespace, labels=labels)]
