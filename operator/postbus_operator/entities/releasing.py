"""Deletion of a queue, topic or subscription: what `release` decides meets the bus."""

from __future__ import annotations

from typing import Final

from postbus.client.control import RequestRefused
from postbus.contract.control import (
    ProblemType,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from postbus_operator.bus.entity_paths import EntityPath
from postbus_operator.bus.refusals import has_moved_on
from postbus_operator.bus.session import BusSession
from postbus_operator.bus.view import LiveEntity
from postbus_operator.context import Context
from postbus_operator.entities.definitions import path_of
from postbus_operator.entities.owners import is_owner_gone
from postbus_operator.entities.release import (
    Blocked,
    Delete,
    Free,
    blocked_by_the_bus,
    release,
    release_known,
    release_unasked,
)
from postbus_operator.entities.status import StatusDraft
from postbus_operator.keys.leaving import leave_secrets
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, Event, Outcome

ATTEMPTS: Final = 5
OUTAGE_RETRY_S: Final = 10.0


async def release_entity(context: Context, resource: Resource) -> Outcome:
    """Look once at a resource that is being deleted."""
    step = release(resource, is_owner_gone=is_owner_gone(resource, context.cache.get))
    if isinstance(step, Free):
        return _freed()
    bus_key = context.cache.bus_of(resource)
    bus = None if bus_key is None else context.cache.get(bus_key)
    if bus is None:
        return _freed()
    session = await context.buses.of(bus)
    if session is None or session.trouble is not None:
        unasked = release_unasked(resource, str(context.buses.failure_of(bus)))
        if isinstance(unasked, Free):
            return _freed()
        return _blocked(context, resource, unasked, retry_s=OUTAGE_RETRY_S)
    path = path_of(resource, _topic_name(context, resource))
    try:
        return await _release_from(context, session, resource, path)
    except BackendUnavailable as error:
        blocked = blocked_by_the_bus(str(error))
        return _blocked(context, resource, blocked, retry_s=OUTAGE_RETRY_S)


def _topic_name(context: Context, resource: Resource) -> str:
    if resource.key.kind != "Subscription" or resource.owner is None:
        return ""
    topic = context.cache.get(resource.owner)
    return "" if topic is None else topic.entity_name


async def _release_from(
    context: Context, session: BusSession, resource: Resource, path: EntityPath
) -> Outcome:
    for _ in range(ATTEMPTS):
        live = session.view.find(path.name)
        step = release_known(resource, live)
        match step:
            case Blocked():
                return _blocked(context, resource, step)
            case Delete() if live is not None:
                try:
                    return await _delete(context, resource, session, path, step, live)
                except RequestRefused as error:
                    if not has_moved_on(error):
                        return _blocked(
                            context,
                            resource,
                            blocked_by_the_bus(error.detail),
                            retry_s=OUTAGE_RETRY_S,
                        )
                await session.catch_up()
            case _:
                return _freed()
    raise BackendUnavailable("the entity is being changed by somebody else")


async def _delete(
    context: Context,
    resource: Resource,
    session: BusSession,
    path: EntityPath,
    step: Delete,
    live: LiveEntity,
) -> Outcome:
    entity_id = live.entity_id
    counts = session.counts_of(entity_id)
    try:
        deleted = await session.control.delete(path, step.policy, step.version)
    except RequestRefused as error:
        if error.type is not ProblemType.NOT_EMPTY:
            raise
        await leave_secrets(context, resource)
        return _freed(await _leave(session, path, step.version, error.detail))
    await session.catch_up()
    if counts is None or not counts.message_count:
        return _freed()
    kept = "restorable until the retention of the bus ends" if deleted.restorable else "final"
    text = (
        f"deleted the {path.kind} {path.name} (entity {entity_id}) with about"
        f" {counts.message_count} messages; {kept}"
    )
    return _freed(Event("Normal", "EntityDeleted", text))


async def _leave(session: BusSession, path: EntityPath, version: int, why: str) -> Event:
    """Leave an entity with messages as it is, as one that belongs to no resource."""
    facts = await session.control.describe(path)
    assert isinstance(facts, QueueDescription | TopicDescription | SubscriptionDescription)
    body = facts.properties.model_dump(mode="json", by_alias=True, exclude_none=True)
    counted = await session.control.count(path)
    answer = await session.control.put(path, body, "", version)
    session.note_put(path, answer, "")
    details = counted.count_details
    text = (
        f"the {path.kind} {path.name} stays on the bus, unmanaged: it holds"
        f" {counted.message_count} messages ({details.active_message_count} active,"
        f" {details.dead_letter_message_count} dead letters,"
        f" {details.scheduled_message_count} scheduled). {why}"
    )
    return Event("Warning", "EntityKept", text)


def _freed(*events: Event) -> Outcome:
    return Outcome(None, has_finalizer=False, events=events)


def _blocked(
    context: Context, resource: Resource, step: Blocked, *, retry_s: float | None = None
) -> Outcome:
    draft = StatusDraft(resource, context.now())
    draft.keep_all()
    draft.set("Ready", "False", "Deleting", step.message)
    draft.set("DeletionBlocked", "True", step.reason, step.message)
    return Outcome(draft.finish(), has_finalizer=True, retry_s=retry_s)
