"""The work of the leader, from the lists of all objects to the loss of the Lease."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import kopf
from kubernetes.aio.client import ApiClient, Configuration

from postbus_operator.context import Context, LeadershipLost, OpenSessions, Reconciler, StillLeads
from postbus_operator.crds import GROUP, KINDS, VERSION
from postbus_operator.handlers import registry
from postbus_operator.kube.api import Api, ApiError
from postbus_operator.kube.cache import Cache
from postbus_operator.kube.connection import api_client
from postbus_operator.kube.event_posting import EventPoster
from postbus_operator.kube.kopf_settings import kopf_settings
from postbus_operator.kube.observer import Observer
from postbus_operator.kube.watch_session import watch_session
from postbus_operator.kube.watches import Watches, watches_of
from postbus_operator.namespaces.deletion import keep_sweeping
from postbus_operator.objects import Key, Resource
from postbus_operator.running.health import Health
from postbus_operator.running.metrics import Metrics
from postbus_operator.running.work_loop import WorkLoop
from postbus_operator.running.work_queue import WorkQueue
from postbus_operator.running.worker import Worker
from postbus_operator.settings import Settings

DEFINITIONS_RETRY_S: Final = 5.0
STOP_S: Final = 5.0
"""Time for kopf to end its watches."""

WATCHES_OF_KOPF: Final = "watcher for "
"""Beginning of the names of kopf's tasks."""

logger = logging.getLogger(__name__)


class WatchesEnded(Exception):
    """kopf ended by itself: a watch cannot continue, as after the removal of a definition."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the work is made with; tests give other reconcilers and brokers elsewhere."""

    settings: Settings
    configuration: Configuration
    identity: str
    reconcilers: Mapping[str, Reconciler]
    open_sessions: OpenSessions
    child_name: Callable[[str], str]
    metrics: Metrics
    health: Health
    control_url: Callable[[Resource], str] | None = None


async def lead(
    parts: Parts, epoch: int, still_leads: StillLeads, on_started: Callable[[], None]
) -> None:
    """Reconcile until cancelled. Raises LeadershipLost or WatchesEnded.

    `on_started`: called when kopf has started; it takes the process's signals for itself.
    """
    async with api_client(parts.configuration) as client:
        await _Leader(parts, epoch, still_leads, client).run(on_started)


class _Leader:
    def __init__(
        self, parts: Parts, epoch: int, still_leads: StillLeads, client: ApiClient
    ) -> None:
        settings = parts.settings
        self._parts = parts
        self._cache = Cache()
        self._watches = Watches(watches_of(settings.namespaces), time.monotonic())
        self._queue = WorkQueue(random.Random())
        self._loop = WorkLoop(
            self._queue,
            self._look,
            workers=settings.workers,
            now=time.monotonic,
            on_times=lambda key, waited, took: parts.metrics.timed(key.kind, waited, took),
        )
        self._listed = asyncio.Event()
        self._observer = Observer(
            self._cache,
            self._watches,
            wake=self._loop.wake,
            is_running=self._queue.is_running,
            on_complete=self._listed.set,
            child_name=parts.child_name,
            now=time.monotonic,
        )
        self._api = Api(client, on_answer=parts.metrics.answered, on_object=self._observer.written)
        self._buses = parts.open_sessions(
            self._api,
            self._cache,
            epoch,
            self._loop.wake,
            still_leads,
            cluster_domain=settings.cluster_domain,
            control_url=parts.control_url,
        )
        self._context = Context(
            settings=settings,
            api=self._api,
            cache=self._cache,
            buses=self._buses,
            epoch=epoch,
            now=_now,
            wake=self._loop.wake,
            control_url=parts.control_url,
        )
        events = EventPoster(self._api, parts.identity, _now)
        self._worker = Worker(
            self._context, parts.reconcilers, self._queue, events, parts.metrics.looked
        )
        show_queue(parts.metrics, self._queue)

    async def _look(self, key: Key) -> float | None:
        return await self._worker.look(key)

    async def run(self, on_started: Callable[[], None]) -> None:
        health = self._parts.health
        await self._wait_for_definitions()
        health.watches, health.cache = self._watches, self._cache
        stop, ready = asyncio.Event(), asyncio.Event()
        # kopf ends all tasks that began after it: this one begins before.
        work = asyncio.create_task(self._work(ready, on_started), name="reconciles")
        watching = asyncio.create_task(self._watch(stop, ready), name="kopf")
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            await asyncio.wait({work})
            await self._buses.close()
            stop.set()
            await asyncio.wait({watching}, timeout=STOP_S)
            watching.cancel()
        if not work.cancelled():
            work.result()
        if watching.done() and not watching.cancelled():
            watching.result()
        raise WatchesEnded("kopf has ended its watches")

    async def _watch(self, stop: asyncio.Event, ready: asyncio.Event) -> None:
        settings = self._parts.settings
        is_cluster_wide = not settings.namespaces
        session = watch_session(self._parts.configuration, self._observer)
        made = registry(is_cluster_wide=is_cluster_wide)
        server = self._parts.configuration.host

        @kopf.on.login(registry=made)
        async def login(**_: object) -> kopf.AiohttpSession:
            return kopf.AiohttpSession(server=server, aiohttp_session=session)

        before = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=made,
            settings=kopf_settings(is_cluster_wide=is_cluster_wide),
            memo=self._observer,
            clusterwide=is_cluster_wide,
            namespaces=settings.namespaces,
            stop_flag=stop,
            ready_flag=ready,
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for each in tasks if (error := error_of(each)) is not None]
            if errors:
                await _stop_orphans(before)
                raise WatchesEnded(f"a watch has ended: {errors[0]!r}") from errors[0]
            await kopf.run_tasks(tasks, ignored=before)
        finally:
            await session.close()

    async def _work(self, ready: asyncio.Event, on_started: Callable[[], None]) -> None:
        await ready.wait()
        on_started()
        await self._listed.wait()
        logger.info("lists are complete: %d resources", len(self._cache.all_keys()))
        try:
            async with asyncio.TaskGroup() as group:
                period_s = self._parts.settings.resync_s
                group.create_task(
                    self._loop.resync(self._cache.all_keys, period_s, self._worker.is_settled)
                )
                group.create_task(keep_sweeping(self._context))
                await self._loop.run()
        except BaseExceptionGroup as errors:
            lost = errors.subgroup(LeadershipLost)
            if lost is not None:
                raise LeadershipLost(str(_first_of(lost))) from lost
            raise

    async def _wait_for_definitions(self) -> None:
        """Wait until the API server serves all kinds; kopf would watch those that are there."""
        wanted = {kind.plural for kind in KINDS}
        while True:
            try:
                missing = wanted - await self._api.serves(GROUP, VERSION)
                reason = f"not installed: {', '.join(sorted(missing))} of {GROUP}/{VERSION}"
            except ApiError as error:
                missing, reason = wanted, f"the API server does not answer: {error}"
            self._parts.health.waits_for = reason if missing else ""
            if not missing:
                return
            logger.warning("%s", reason)
            await asyncio.sleep(DEFINITIONS_RETRY_S)


def _first_of(errors: BaseExceptionGroup) -> BaseException:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def _stop_orphans(before: set[asyncio.Task[Any]]) -> None:
    """End the watches that kopf leaves behind when one fails.

    It cancels them together with tasks that they need to end, so that they never do.
    """
    watches = {
        each for each in asyncio.all_tasks() - before if each.get_name().startswith(WATCHES_OF_KOPF)
    }
    for each in watches:
        each.cancel()
    if watches:
        await asyncio.wait(watches, timeout=STOP_S)


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return the error with which a task has ended, if it has."""
    return task.exception() if task.done() and not task.cancelled() else None


def show_queue(metrics: Metrics, queue: WorkQueue) -> None:
    """Add the gauges of a queue."""
    metrics.show(
        "queue_depth",
        "Resources that are due and wait for a look",
        lambda: float(queue.waiting(time.monotonic())),
    )
    metrics.show(
        "queue_age_seconds",
        "Time that the first of them has waited",
        lambda: _age(queue, time.monotonic()),
    )
    metrics.show(
        "reconciles_running",
        "Resources that are looked at now",
        lambda: float(queue.running),
    )


def _age(queue: WorkQueue, now: float) -> float:
    due = queue.next_due()
    return 0.0 if due is None else max(0.0, now - due)


def _now() -> datetime:
    return datetime.now(UTC)
