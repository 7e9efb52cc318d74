"""One look at a resource: ask its reconciler, then write what it decided."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from postbus_operator.context import Context, LeadershipLost, Reconciler
from postbus_operator.failures import outcome_of_failure
from postbus_operator.finalizers import finalizer_patch, is_held
from postbus_operator.kube.api import ApiError, ApiUnavailable, Conflict, NotFound
from postbus_operator.kube.cache import ObjectKey
from postbus_operator.kube.event_posting import EventPoster
from postbus_operator.kube.resource_types import RESOURCES
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import (
    BackendUnavailable,
    DependencyMissing,
    Outcome,
    SpecInvalid,
    StillConnecting,
)
from postbus_operator.redaction import redacted
from postbus_operator.running.condition_events import Report, report
from postbus_operator.running.status_patch import is_same, status_json
from postbus_operator.running.work_queue import WorkQueue

LOOK_S: Final = 120.0
"""Limit of a look: a call without a limit of its own must not hold a resource for ever."""

CONFLICT_RETRY_S: Final = 0.5

logger = logging.getLogger(__name__)

OnLook = Callable[[str, str], None]
"""Called with kind and result of each look, for metrics."""


class Worker:
    """Looks at resources. Not more than one look at a resource at a time, as the queue sees to."""

    def __init__(
        self,
        context: Context,
        reconcilers: Mapping[str, Reconciler],
        queue: WorkQueue,
        events: EventPoster,
        on_look: OnLook,
    ) -> None:
        self._context = context
        self._reconcilers = reconcilers
        self._queue = queue
        self._events = events
        self._on_look = on_look
        self._settled: dict[Key, Callable[[], bool]] = {}
        """Resources whose last look left nothing to do, and whether another one would find
        everything as that one did."""

    def is_settled(self, key: Key) -> bool:
        """Return whether a look has nothing to do, because nothing that it reads has changed.

        For the resync alone: what is woken for a reason is looked at.
        """
        is_current = self._settled.get(key)
        try:
            if is_current is None or not is_current():
                return False
        except Exception:
            logger.exception("%s: not compared with its last look", key)
            return False
        self._on_look(key.kind, "unchanged")
        return True

    async def look(self, key: Key) -> float | None:
        """Look at a resource once; return the seconds until the next look, None: when it changes.

        Raises LeadershipLost.
        """
        self._settled.pop(key, None)
        resource = self._context.cache.get(key)
        reconciler = self._reconcilers.get(key.kind)
        if resource is None or reconciler is None:
            self._queue.forget_failures(key)
            return None
        try:
            return await self._look(resource, reconciler)
        except NotFound:
            # The resource itself: its deletion is on its way through the watch.
            self._queue.forget_failures(key)
            self._on_look(key.kind, "gone")
            return None
        except Conflict:
            self._on_look(key.kind, "conflict")
            return await self._after_conflict(key)
        except ApiError as error:
            logger.warning("%s: result of the look not written: %s", key, error)
            self._on_look(key.kind, "unwritten")
            return self._pause(key, error)
        except LeadershipLost:
            raise
        except Exception as error:
            # One resource must not stop the others.
            logger.exception("%s: result of the look not written", key)
            self._on_look(key.kind, "failed")
            return self._pause(key, error)

    async def _look(self, resource: Resource, reconciler: Reconciler) -> float | None:
        key = resource.key
        if not resource.is_deleting and not resource.is_paused and is_held(resource):
            resource = await self._with_finalizer(resource, is_there=True)
        try:
            async with asyncio.timeout(LOOK_S):
                outcome = await reconciler(self._context, resource)
        except LeadershipLost:
            raise
        except Exception as error:  # noqa: BLE001  # one resource's bug must not stop the others
            return await self._after_failure(resource, error)
        said = await self._apply(resource, outcome)
        self._queue.forget_failures(key)
        self._on_look(key.kind, "done")
        again_s = _sooner(outcome.retry_s, said.due_s)
        # What was said is said again each hour: by a look.
        if again_s is None and not said.events and outcome.is_current is not None:
            self._settled[key] = outcome.is_current
        return again_s

    async def _apply(self, resource: Resource, outcome: Outcome) -> Report:
        """Write what a look decided, the release last; return what was said of it."""
        events, due_s = outcome.events, None
        if outcome.status is not None:
            await self._write_status(resource, status_json(outcome.status))
            if not resource.is_paused:
                found = report(outcome.status.conditions, events, self._context.now())
                events, due_s = (*events, *found.events), found.due_s
        for event in events:
            await self._events.post(resource, event)
        if outcome.delete_resource and not resource.is_deleting:
            await self._delete(resource)
        may_go = resource.is_deleting or not is_held(resource)
        if resource.has_finalizer and not outcome.has_finalizer and may_go:
            await self._with_finalizer(resource, is_there=False)
        return Report(events, due_s)

    async def _delete(self, resource: Resource) -> None:
        """Delete a resource, unless somebody has changed it since the look began."""
        newest = self._newest(resource)
        if (newest.generation, newest.annotations) == (resource.generation, resource.annotations):
            type, key = RESOURCES[resource.key.kind], resource.key
            version = newest.resource_version
            await self._context.api.delete(
                type, key.namespace, key.name, uid=resource.uid, version=version
            )

    async def _write_status(self, resource: Resource, wanted: dict[str, object]) -> None:
        there = self._newest(resource).status
        if is_same(there, wanted):
            return
        type, key = RESOURCES[resource.key.kind], resource.key
        await self._context.api.put_status(type, key.namespace, key.name, resource.uid, wanted)

    async def _with_finalizer(self, resource: Resource, *, is_there: bool) -> Resource:
        newest = self._newest(resource)
        if newest.has_finalizer != is_there:
            await self._context.api.patch(
                RESOURCES[resource.key.kind],
                resource.key.namespace,
                resource.key.name,
                finalizer_patch(newest, is_there=is_there),
            )
        return self._newest(resource)

    def _newest(self, resource: Resource) -> Resource:
        """Return the resource with what own writes have made of it; not another of its name."""
        found = self._context.cache.get(resource.key)
        return resource if found is None or found.uid != resource.uid else found

    async def _after_failure(self, resource: Resource, error: Exception) -> float | None:
        key = resource.key
        pause = self._pause(key, error)
        match error:
            case SpecInvalid():
                result = "invalid"
                logger.info("%s: %s", key, redacted(str(error)))
            case DependencyMissing():
                result = "waiting"
                logger.info("%s: %s", key, redacted(str(error)))
            case StillConnecting():
                result = "unavailable"
                logger.debug("%s: %s", key, redacted(str(error)))
            case BackendUnavailable() | ApiUnavailable() | Conflict() | TimeoutError():
                result = "unavailable"
                logger.warning("%s: %s", key, redacted(str(error) or repr(error)))
            case ApiError():
                result = "refused"
                logger.warning("%s: the API server refuses: %s", key, redacted(str(error)))
            case _:
                result = "failed"
                logger.error("%s: unexpected error", key, exc_info=error)
        self._on_look(key.kind, result)
        outcome = outcome_of_failure(
            self._newest(resource),
            _as_unavailable(error),
            failures=self._queue.failures(key),
            now=self._context.now(),
        )
        said = await self._apply(resource, outcome)
        if isinstance(error, SpecInvalid):
            self._queue.forget_failures(key)
            return None
        return _sooner(pause if outcome.retry_s is None else outcome.retry_s, said.due_s)

    async def _after_conflict(self, key: Key) -> float:
        """Read the resource again: the cache is behind, and its event may take long."""
        type = RESOURCES[key.kind]
        try:
            found = await self._context.api.get(type, key.namespace, key.name)
            self._context.cache.observe(found)
        except NotFound:
            known = self._context.cache.get(key)
            if known is not None:
                place = ObjectKey(type, key.namespace, key.name)
                self._context.cache.drop(place, int(known.resource_version))
        except ApiError as error:
            logger.warning("%s: not read after a conflict: %s", key, error)
        return max(CONFLICT_RETRY_S, self._queue.pause_after_failure(key) - 1)

    def _pause(self, key: Key, error: Exception) -> float:
        pause = self._queue.pause_after_failure(key)
        if isinstance(error, ApiUnavailable) and error.retry_after_s is not None:
            return max(pause, error.retry_after_s)
        return pause


def _sooner(*pauses_s: float | None) -> float | None:
    """Return the shortest pause; None: there is none."""
    return min((each for each in pauses_s if each is not None), default=None)


def _as_unavailable(error: Exception) -> Exception:
    """Return BackendUnavailable for the refusals and silences that pass by themselves."""
    match error:
        case ApiUnavailable() | Conflict():
            return BackendUnavailable(f"the API server: {error}")
        case TimeoutError():
            return BackendUnavailable(f"no result within {LOOK_S:g} s; trying again")
        case _:
            return error
