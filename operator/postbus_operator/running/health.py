"""State of the process, and the HTTP server that shows it: `/healthz`, `/readyz`, `/metrics`.

Standbys serve them, too. `/healthz` fails for what a restart repairs: a watch that fell silent, an
elector that hangs. `/readyz` fails until the process does its part, as leader or as standby.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from postbus_operator.crds import KINDS
from postbus_operator.kube.cache import Cache
from postbus_operator.kube.watches import Watches
from postbus_operator.leader import TRANSITIONS
from postbus_operator.running.abnormal import abnormal_conditions
from postbus_operator.running.metrics import Metrics

ELECTOR_SILENCE_S: Final = 60.0
"""Seconds without an answer about the Lease after which a standby is not ready."""

LAG_PERIOD_S: Final = 1.0
MAX_LAG_S: Final = 10.0
"""Delay of the event loop above which the process counts as stuck."""


class Health:
    """What the process knows of itself; its parts write it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.lag_s = 0.0
        self.epoch = 0
        """Epoch of the Lease that is held; 0: standby."""

        self.waits_for = ""
        """Reason why the leader does not work yet."""

        self.watches: Watches | None = None
        self.cache: Cache | None = None
        self.elector_answered_at: Callable[[], float] | None = None

    def problems(self, silence_s: float) -> list[str]:
        """Return the reasons for a restart."""
        found = []
        if self.lag_s > MAX_LAG_S:
            found.append(f"the event loop is {self.lag_s:.0f} s late")
        if self.watches is not None:
            found += [
                f"the watch of {watch} has been silent for {age:.0f} s"
                for watch, age in self.watches.ages(self._monotonic()).items()
                if age > silence_s
            ]
        return found

    def unready(self) -> list[str]:
        """Return the reasons why the process does not do its part yet."""
        found = [self.waits_for] if self.waits_for else []
        if self.epoch and self.watches is None:
            found.append("the leader has not begun to watch")
        if self.watches is not None:
            found += [f"the list of {each} is not complete" for each in self.watches.unlisted]
        if not self.epoch and self.elector_silence_s() > ELECTOR_SILENCE_S:
            found.append(f"no answer about the Lease for {self.elector_silence_s():.0f} s")
        return found

    def elector_silence_s(self) -> float:
        """Return the seconds since the API server last answered about the Lease."""
        if self.elector_answered_at is None:
            return 0.0
        return self._monotonic() - self.elector_answered_at()

    async def measure_lag(self) -> None:
        """Measure how late the event loop is; without an end."""
        while True:
            start = self._monotonic()
            await asyncio.sleep(LAG_PERIOD_S)
            self.lag_s = max(0.0, self._monotonic() - start - LAG_PERIOD_S)


class HealthServer:
    """Answers of the three paths."""

    def __init__(self, health: Health, metrics: Metrics, silence_s: float) -> None:
        self._health = health
        self._metrics = metrics
        self._silence_s = silence_s
        metrics.show("leader", "1 while this process leads", lambda: float(health.epoch != 0))
        metrics.show(
            "lease_transitions",
            "Transitions of the Lease that is held",
            lambda: float(health.epoch & TRANSITIONS),
        )
        metrics.show("event_loop_lag_seconds", "Delay of the event loop", lambda: health.lag_s)

    @asynccontextmanager
    async def run(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve until the context ends; yields the port."""
        application = web.Application()
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics_text)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self._health.problems(self._silence_s))

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._health.unready())

    async def _metrics_text(self, _: web.Request) -> web.Response:
        health = self._health
        if health.watches is not None:
            for watch, age in health.watches.ages(time.monotonic()).items():
                self._metrics.set_age(watch.type.plural, watch.namespace or "", age)
        if health.cache is not None:
            for kind in KINDS:
                self._metrics.set_resources(kind.name, health.cache.count(kind.name))
            self._metrics.set_conditions(abnormal_conditions(health.cache.all()))
            self._metrics.set_certificates(health.cache.certificate_ends())
        return web.Response(
            body=self._metrics.text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _answer(problems: list[str]) -> web.Response:
    text = "\n".join(problems) if problems else "ok"
    return web.Response(text=f"{text}\n", status=503 if problems else 200)
