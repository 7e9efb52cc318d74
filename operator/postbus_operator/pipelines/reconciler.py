"""Reconciler of pipelines: reader group, key, document, and the workload that runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pydantic import ValidationError

from postbus.client.control import RequestRefused
from postbus.contract.control_groups import (
    CreateReaderGroup,
    OfReaderGroup,
    ReaderGroupDescription,
)
from postbus.contract.pipeline import PipelineDocument, Source
from postbus.contract.pipeline_checks import Problem, pipeline_problems, shared_claims
from postbus_operator.bus.marks import mark_of
from postbus_operator.bus.refusals import has_moved_on, spec_invalid
from postbus_operator.bus.session import BusSession
from postbus_operator.context import Context
from postbus_operator.entities.owners import NoOwner, owner_of
from postbus_operator.kube.cache import entities_of
from postbus_operator.kube.resource_types import CRON_JOBS, SECRETS, STATEFUL_SETS, type_of
from postbus_operator.names import pipeline_name
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, Outcome, SpecInvalid
from postbus_operator.pipelines.draft import PipelineDraft
from postbus_operator.pipelines.executors import EXECUTOR
from postbus_operator.pipelines.groups import find_group
from postbus_operator.pipelines.keys import sync_key
from postbus_operator.pipelines.lag import lag_of, limit_s
from postbus_operator.pipelines.objects import (
    jobs_of,
    pods_of,
    put,
    remove_others,
    remove_rights,
    stop,
)
from postbus_operator.pipelines.releasing import release_pipeline
from postbus_operator.pipelines.rivals import check_rivals, document_of, is_of_bus
from postbus_operator.pipelines.runs import (
    DECISION,
    Run,
    are_steady,
    decision,
    executor_trouble,
    is_steady,
    run_of,
    run_of_schedule,
    trouble_of,
)
from postbus_operator.pipelines.workloads import Driver, held_for, objects_of, runs
from postbus_operator.redaction import redacted

STARTING_RETRY_S: Final = 15.0
"""Looks at pods that have not started. Our choice: soon for people, rare for the API server."""


async def reconcile_pipeline(context: Context, resource: Resource) -> Outcome:
    """Look once at a Pipeline."""
    if resource.is_deleting:
        return await release_pipeline(context, resource)
    draft = PipelineDraft(resource, context.now())
    if resource.is_paused:
        return draft.paused()
    if resource.spec.get("suspend"):  # also while the bus does not answer
        await stop(context, resource)
    document = _valid_document(resource)
    if is_of_bus(resource):
        check_rivals(resource, document, context.cache.of_kind("Pipeline"))
    draft.set("Valid", "True", "Accepted", _accepted(document))
    owner = owner_of(resource, context.cache.get, context.cache.labels_of_namespace)
    if isinstance(owner, NoOwner):
        return draft.waits("OwnerResolved", owner.reason, owner.message, "OwnerNotReady")
    if not is_of_bus(resource):
        text = (
            f"a pipeline can read every entity of {owner.bus.key}: create it in the cluster"
            f" namespace {owner.bus.key.namespace}"
        )
        return draft.waits("OwnerResolved", "NotPermitted", text, "OwnerNotReady")
    draft.set("OwnerResolved", "True", "Resolved", f"belongs to {owner.bus.key}")
    session: BusSession | None = await context.buses.of(owner.bus)
    if session is None or session.trouble is not None:
        raise context.buses.failure_of(owner.bus)
    missing = _missing(context, session, owner.bus, resource)
    if missing is not None:
        return draft.waits("EntitiesResolved", "NotReady", missing, "EntityNotReady")
    draft.set("EntitiesResolved", "True", "Resolved", "all entities are on the bus")
    sources = [each for each in document.spec.sources if not each.is_bounded]
    is_fresh = not resource.meets("Ready")  # else this look is for the lag
    groups = [await _group(session, document, each, is_fresh=is_fresh) for each in sources]
    lag = lag_of(each for each in groups if each is not None)
    if lag is not None and groups and None not in groups:
        draft.note_lag(lag, limit_s(document.spec))
    draft.note_batch([each for each in groups if each is not None])
    # Noted first: otherwise a deletion would not look for what a lost look has made.
    if not sources and draft.binding is None:
        draft.binding = pipeline_name(resource.key.name)
        return draft.starts("the key is made next", retry_s=0)
    if sources and draft.reader_group is None:
        draft.reader_group = document.group
        return draft.starts("the reader group is made next", retry_s=0)
    for source, group in zip(sources, groups, strict=True):
        if group is None:
            await _create_group(session, document, source)
    keys = await sync_key(context, session, owner.bus, resource, document.spec)
    if keys.condition is None or keys.condition[0] != "True" or keys.binding is None:
        _, reason, message = keys.condition or ("False", "SourceMissing", "there is no key")
        return draft.waits("SecretsSynced", reason, message, "KeyNotReady")
    draft.set("SecretsSynced", *keys.condition)
    draft.binding = keys.binding.name
    run = await _run(context, resource, document, draft)
    has_lost = any(each.has_lost_messages for each in groups if each is not None)
    draft.note_trouble(run.message, trouble_of(run, has_lost_messages=has_lost))
    if draft.is_lagging and document.spec.runtime.executors:
        trouble = executor_trouble(await pods_of(context, resource, EXECUTOR))
        if trouble is not None:
            draft.note_executor(trouble)
    # Pods are not watched: that one does not start shows in no workload.
    is_starting = run.is_starting or run.also == "Reconciling"
    pauses = (keys.retry_s, STARTING_RETRY_S if is_starting else None, session.next_groups_s())
    return draft.outcome(*keys.events, retry_s=min(each for each in pauses if each is not None))


# --- the spec -----------------------------------------------------------------------------------


def _valid_document(resource: Resource) -> PipelineDocument:
    """Return the document. Raises SpecInvalid with all that is wrong."""
    try:
        document = document_of(resource)
    except ValidationError as error:
        problems = [
            (each["loc"], str(each["msg"]).removeprefix("Value error, "))
            for each in error.errors(include_url=False, include_input=False)
        ]
        raise SpecInvalid("InvalidSpec", _listed(problems)) from None
    found = pipeline_problems(document)
    if found:
        raise SpecInvalid("InvalidSpec", _listed(found))
    return document


def _accepted(document: PipelineDocument) -> str:
    """Return what the spec asks for that its cluster must have."""
    claims = shared_claims(document.spec)
    if not claims:
        return "the spec is valid"
    return f"the spec is valid if executors can mount {', '.join(claims)} on their nodes"


def _listed(problems: list[Problem]) -> str:
    return "; ".join(f"{'.'.join(map(str, place))}: {text}" for place, text in problems)


# --- the bus ------------------------------------------------------------------------------------


def _missing(
    context: Context, session: BusSession, bus: Resource, resource: Resource
) -> str | None:
    """Return what is said of the first entity that is not on the bus; None: all are."""
    for path in entities_of(resource):
        live = session.view.find(path)
        if live is None:
            return f"there is no {path} on {bus.key}: create it, or correct the spec"
        for each in context.cache.named(bus.key, path):
            if mark_of(each) != live.mark:  # it only claims the entity
                continue
            ready = {cond["type"]: cond for cond in each.status.get("conditions", ())}.get("Ready")
            if ready is not None and ready["status"] == "False":
                return f"{each.key} is not ready: {ready['message']}"
    return None


async def _group(
    session: BusSession, document: PipelineDocument, source: Source, *, is_fresh: bool
) -> ReaderGroupDescription | None:
    """Return the group of a source; None: there is none. Raises SpecInvalid if its kind differs.

    `is_fresh`: as it is now, and not as a look for another pipeline found it.
    """
    group = await find_group(session, _group_of(document, source), is_fresh=is_fresh)
    if group is not None and group.kind != source.mode:
        raise SpecInvalid(
            "GroupKindDiffers",
            f"the reader group {group.name} of {group.entity} is a {group.kind}, and mode is"
            f" {source.mode}: create another Pipeline with another readerGroup",
        )
    return group


async def _create_group(session: BusSession, document: PipelineDocument, source: Source) -> None:
    """Create the group of a source: from then on it keeps its messages."""
    named, kind = _group_of(document, source), source.group_kind
    assert kind is not None  # the source has no end
    group = CreateReaderGroup(
        entity=named.entity, sub_queue=named.sub_queue, name=named.name, kind=kind
    )
    try:
        await session.control.create_reader_group(group)
    except RequestRefused as error:
        if has_moved_on(error):
            raise BackendUnavailable(f"the entity is being changed: {error.detail}") from None
        raise spec_invalid(error) from error


def _group_of(document: PipelineDocument, source: Source) -> OfReaderGroup:
    name = document.group_of(source)
    return OfReaderGroup(entity=source.entity, sub_queue=source.sub_queue, name=name)


# --- objects ------------------------------------------------------------------------------------


async def _run(
    context: Context, resource: Resource, document: PipelineDocument, draft: PipelineDraft
) -> Run:
    """Apply the objects; return and note what the cluster says of them."""
    settings, namespace = context.settings, resource.key.namespace
    name = pipeline_name(resource.key.name)
    secret = context.cache.find(SECRETS, namespace, name)
    driver = Driver(
        resource,
        document,
        document.spec.runtime.image or settings.pipeline_image,
        settings.image_pull_policy,
        {} if secret is None else secret["data"],
        held_for(context.cache.find(STATEFUL_SETS, namespace, name), resource),
        settings.driver_role,
    )
    *others, wanted = objects_of(driver)
    for each in others:
        await put(context, resource, each)
    workload = await put(context, resource, wanted)
    await remove_others(context, resource, workload)
    if not driver.has_executors:
        await remove_rights(context, resource)
    if type_of(workload) is CRON_JOBS:
        jobs = await jobs_of(context, resource, workload)
        pods = [] if are_steady(workload, jobs) else await pods_of(context, resource)
        run = run_of_schedule(workload, jobs, pods)
    elif driver.held is not None:
        run = decision(driver.held)
    else:
        pods = [] if is_steady(workload) else await pods_of(context, resource)
        run = run_of(workload, [pod for pod in pods if runs(pod, driver)])
        if run.exit_code == DECISION and type_of(workload) is STATEFUL_SETS:
            held = replace(driver, held=redacted(run.message))
            await put(context, resource, objects_of(held)[-1])
    draft.set("Ready", run.status, run.reason, run.message)
    if run.also is not None:
        draft.set(run.also, "True", run.reason, run.message)
    draft.exit_code = run.exit_code
    return run
