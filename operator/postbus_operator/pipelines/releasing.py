"""Deletion of a pipeline: its driver ends first, then reader group and key go.

A drained group that stayed would hold receivers off. A batch that runs is settled before its group
goes: its messages were sent already, and receivers would get them again.
"""

from __future__ import annotations

from typing import Final

from postbus.client.control import RequestRefused
from postbus.contract.control_groups import OfReaderGroup
from postbus.contract.pipeline import Source
from postbus_operator.annotations import FORCE_RELEASE
from postbus_operator.bus.session import BusSession
from postbus_operator.context import Context
from postbus_operator.entities.owners import is_owner_gone
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, Outcome
from postbus_operator.pipelines.draft import PipelineDraft
from postbus_operator.pipelines.groups import find_group
from postbus_operator.pipelines.keys import remove_key
from postbus_operator.pipelines.objects import stop
from postbus_operator.pipelines.rivals import is_group_shared
from postbus_operator.pipelines.workloads import has_pods

RETRY_S: Final = 10.0


async def release_pipeline(context: Context, resource: Resource) -> Outcome:
    """Look once at a Pipeline that is being deleted."""
    has_nothing = not resource.status.get("readerGroup") and not resource.status.get("binding")
    is_free = not resource.has_finalizer or resource.is_released_by_force
    if is_free or has_nothing or is_owner_gone(resource, context.cache.get):
        return _freed()
    draft = PipelineDraft(resource, context.now())
    if any(map(has_pods, await stop(context, resource))):
        return draft.blocked("DriverEnds", f"the driver ends its batch: wait, {_force()}", RETRY_S)
    bus = None if resource.owner is None else context.cache.get(resource.owner)
    assert bus is not None
    session: BusSession | None = await context.buses.of(bus)
    try:
        if session is None or session.trouble is not None:
            raise context.buses.failure_of(bus)
        await _drop_groups(context, session, resource)
        keys = await remove_key(context, session, bus, resource)
    except (BackendUnavailable, RequestRefused) as error:
        text = f"the reader group cannot be dropped ({error}): wait, delete the Namespace"
        return draft.blocked("BackendUnavailable", f"{text}, {_force()}", RETRY_S)
    if keys.condition is not None and keys.condition[0] == "False":
        return draft.blocked(keys.condition[1], f"{keys.condition[2]}: {_force()}", RETRY_S)
    return _freed()


async def _drop_groups(context: Context, session: BusSession, resource: Resource) -> None:
    """Drop the groups unless the policy keeps them, or another pipeline reads with them.

    A look that is repeated can find a group of the same name and another kind: it is of a pipeline
    that waited for the name.
    """
    policy = (resource.spec.get("operatorSpec") or {}).get("deletionPolicy", "Delete")
    if policy == "Retain" or resource.status.get("readerGroup") is None:
        return
    others = context.cache.of_kind("Pipeline")
    for source in map(Source.model_validate, resource.spec["sources"]):
        if source.is_bounded or is_group_shared(resource, source, others):
            continue
        name = source.reader_group or resource.key.name
        group = OfReaderGroup(entity=source.entity, sub_queue=source.sub_queue, name=name)
        found = await find_group(session, group)
        if found is None or found.kind != source.mode:
            continue
        try:
            await session.control.delete_reader_group(group)
        except RequestRefused as error:
            if error.status != 404:  # dropped by somebody, or with its entity
                raise


def _force() -> str:
    return f"or set the annotation {FORCE_RELEASE}=true to leave the reader group as it is"


def _freed() -> Outcome:
    return Outcome(None, has_finalizer=False)
