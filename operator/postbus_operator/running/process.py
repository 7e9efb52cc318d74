"""The operator's process: standby, then leader, until a signal or the loss of the Lease."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
import threading
import time
from datetime import UTC, datetime
from typing import Final

from postbus_operator.bus.access import open_sessions
from postbus_operator.context import LeadershipLost
from postbus_operator.kube.api import Api
from postbus_operator.kube.connection import api_client, load_configuration
from postbus_operator.leader import Elector, LeaseTimes
from postbus_operator.names import child_name
from postbus_operator.reconcile import RECONCILERS
from postbus_operator.running.health import Health, HealthServer
from postbus_operator.running.leading import Parts, WatchesEnded, error_of, lead
from postbus_operator.running.metrics import Metrics
from postbus_operator.settings import Settings

SPARE_CONNECTIONS: Final = 8
"""Connections to the API server beside one for each worker."""

EXIT_S: Final = 10.0
"""Time for an orderly end of a leader; then its process is ended."""

STOPPED: Final = 0
FAILED: Final = 1

logger = logging.getLogger(__name__)


async def run(settings: Settings) -> int:
    """Run until a signal; return the exit code."""
    stop = asyncio.Event()
    _take_signals(stop)
    health, metrics = Health(), Metrics()
    server = HealthServer(health, metrics, settings.watch_silence_s)
    identity = f"{settings.identity}_{secrets.token_hex(4)}"
    lag = asyncio.create_task(health.measure_lag())
    async with server.run(settings.http_host, settings.http_port) as port:
        logger.info("health and metrics on port %d", port)
        configuration = await load_configuration(connections=settings.workers + SPARE_CONNECTIONS)
        parts = Parts(
            settings,
            configuration,
            identity,
            RECONCILERS,
            open_sessions,
            child_name,
            metrics,
            health,
        )
        try:
            return await _elect_and_lead(parts, stop)
        finally:
            lag.cancel()


async def _elect_and_lead(parts: Parts, stop: asyncio.Event) -> int:
    # A client of its own: renewals never wait for a connection.
    async with api_client(parts.configuration) as client:
        api = Api(client, on_answer=parts.metrics.answered, on_object=lambda _: None)
        elector = _elector(parts, api)
        parts.health.elector_answered_at = lambda: elector.answered_at
        stopping = asyncio.create_task(stop.wait())
        acquiring = asyncio.create_task(elector.acquire())
        await asyncio.wait({stopping, acquiring}, return_when=asyncio.FIRST_COMPLETED)
        if not acquiring.done():
            acquiring.cancel()
            return STOPPED
        epoch = parts.health.epoch = acquiring.result()
        holding = asyncio.create_task(elector.hold(), name="lease")
        leading = asyncio.create_task(
            lead(parts, epoch, elector.still_leads, lambda: _take_signals(stop)), name="leader"
        )
        await asyncio.wait({stopping, holding, leading}, return_when=asyncio.FIRST_COMPLETED)
        error = error_of(holding) or error_of(leading)
        result = STOPPED if error is None else FAILED
        _end_for_certain(result)
        if isinstance(error, LeadershipLost):
            logger.error("leadership lost: %s", error)
        elif error is not None:
            logger.error("stopping: %s", error, exc_info=_unexpected(error))
        parts.health.epoch = 0
        leading.cancel()
        await asyncio.wait({leading})
        holding.cancel()
        if not isinstance(error, LeadershipLost):
            await elector.release()
        return result


def _elector(parts: Parts, api: Api) -> Elector:
    settings = parts.settings
    times = LeaseTimes(
        settings.lease_duration_s,
        settings.renew_deadline_s,
        settings.retry_period_s,
        monotonic=time.monotonic,
        now=lambda: datetime.now(UTC),
    )
    return Elector(
        api, settings.own_namespace, settings.lease_name, parts.identity, times, random.Random()
    )


def _unexpected(error: BaseException) -> BaseException | None:
    return None if isinstance(error, WatchesEnded) else error


def _take_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop.set)


def _end_for_certain(result: int) -> None:
    """End the process soon, whatever its tasks do: somebody else leads, or will."""
    timer = threading.Timer(EXIT_S, os._exit, args=(result,))
    timer.daemon = True
    timer.start()
