"""What a watch has seen of entities: when each had a status, and when it was ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from e2e.scale.cluster import SHOW_S, Cluster, say

from postbus_operator.kube.resource_types import RESOURCES

KINDS: Final = ("Queue", "Topic", "Subscription")


class Sightings:
    """Times by namespace and name, of the clock `time.monotonic`."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], float] = {}
        self.filled: dict[tuple[str, str], float] = {}
        self.ready: dict[tuple[str, str], float] = {}
        self._changed = asyncio.Condition()

    async def take(self, found: dict[str, Any]) -> None:
        """Note a version of an object."""
        metadata, status = found["metadata"], found.get("status") or {}
        key, now = (metadata["namespace"], metadata["name"]), time.monotonic()
        self.seen.setdefault(key, now)
        if status.get("observedGeneration") == metadata["generation"]:
            self.filled.setdefault(key, now)
            if any(
                each["type"] == "Ready" and each["status"] == "True"
                for each in status.get("conditions", ())
            ):
                self.ready.setdefault(key, now)
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, count: int, limit_s: float) -> None:
        """Return when so many are ready."""
        end = time.monotonic() + limit_s
        while len(self.ready) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.ready)} of {count} are ready after {limit_s:g} s")
            say(f"ready: {len(self.ready)} of {count}, applied: {len(self.seen)}")
            with suppress(TimeoutError):
                async with asyncio.timeout(SHOW_S), self._changed:
                    await self._changed.wait_for(lambda: len(self.ready) >= count)

    async def wait_ready(self, namespace: str, name: str, limit_s: float = 60) -> None:
        """Return when an object is ready."""
        async with asyncio.timeout(limit_s), self._changed:
            await self._changed.wait_for(lambda: (namespace, name) in self.ready)


@asynccontextmanager
async def watching(cluster: Cluster, labels: str) -> AsyncIterator[Sightings]:
    """Watch the entities with a label while the block runs."""
    sightings = Sightings()

    async def watch(kind: str) -> None:
        async for event, found in cluster.events(RESOURCES[kind], labels):
            if event in ("ADDED", "MODIFIED"):
                await sightings.take(found)
        raise ConnectionError(f"the watch of {kind} has ended")

    tasks = [asyncio.create_task(watch(kind)) for kind in KINDS]
    try:
        yield sightings
    finally:
        for each in tasks:
            each.cancel()
        for each in tasks:
            await asyncio.wait({each})
            if not each.cancelled() and each.exception() is not None:
                say(f"{each.exception()}")
