"""Readiness for clients, and the reasons if listeners are closed or no partition is usable.

For readiness probes of Kubernetes, which removes a broker that is not ready from its service: a
failed partition must not make the others unreachable, and a broker without any is of no use. A
loaded partition is usable. One that was not needed yet, or is just being loaded, is usable if its
store answers; one that could not be loaded is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from postbus.broker.partition.host import Host
from postbus.broker.partition.ownership import HostStatus
from postbus.store.errors import StoreError
from postbus.store.postgres import Store

PATIENCE_S: Final = 0.8
"""Timeout for an answer of a store. Our choice: a probe of the kubelet gives up after 1 s."""

FRESH_S: Final = 1.0
"""Time for which an answer of a store is reused, so that unauthenticated probes cost it nothing."""


class Readiness:
    """Readiness of one broker; `is_open` is set while its listeners are open."""

    def __init__(
        self,
        hosts: Sequence[Host],
        store_of: Callable[[int], Store],
        monotonic_s: Callable[[], float] = time.monotonic,
        stores: Sequence[Store] = (),
    ) -> None:
        """`store_of` returns the database of a partition; `stores`: all databases that may fail."""
        self.is_open = False
        self.step: str | None = None
        """Current step of the start or the stop; text after a colon is left out."""
        self._hosts = hosts
        self._stores = stores
        self._looks: dict[Store, _Look] = {}
        self._store_of = store_of
        self._monotonic_s = monotonic_s

    async def is_ready(self) -> bool:
        """Return whether clients are accepted, after at most `PATIENCE_S`."""
        if not self.is_open:
            return False
        if any(host.is_loaded for host in self._hosts):
            return True
        if self.held_by is not None:
            return False
        stores = {
            self._store_of(host.partition_id)
            for host in self._hosts
            if host.status is not HostStatus.CLOSED and host.trouble is None
        }
        return any(await asyncio.gather(*(self._answers(store) for store in stores)))

    @property
    def held_by(self) -> str | None:
        """The owner of the partitions while this broker is a standby, else None."""
        if any(host.is_loaded for host in self._hosts):
            return None
        return next((text for host in self._hosts if (text := host.ownership.held_by)), None)

    def troubles(self) -> list[str]:
        """Return the step while not open, and the problem of each store and partition."""
        partitions = [(host.partition_id, host.trouble) for host in self._hosts]
        step = [] if self.is_open or self.step is None else [self.step.partition(": ")[0]]
        return [
            *step,
            *(text for store in self._stores if (text := store.outage.text)),
            *(f"partition {number}: {text}" for number, text in partitions if text),
        ]

    async def _answers(self, store: Store) -> bool:
        look = self._looks.get(store)
        now_s = self._monotonic_s()
        if look is None or (look.task.done() and now_s - look.begun_s >= FRESH_S):
            look = self._looks[store] = _Look(now_s, asyncio.create_task(_look(store)))
        # It is not cancelled: a connection with a query in progress cannot be used by the next.
        done, _ = await asyncio.wait({look.task}, timeout=PATIENCE_S)
        return bool(done) and look.task.result()


class _Look(NamedTuple):
    """A query of a store, whose answer is shared by all callers that wait for it."""

    begun_s: float
    task: asyncio.Task[bool]


async def _look(store: Store) -> bool:
    try:
        await store.sample_clock_ms()
    except StoreError:
        return False
    return True
