"""Controls of a development bus that clients do not have: moving time, injecting faults.

Called by `edge/control/development.py` of a development bus only. Faults go through the paths of
real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from postbus.broker.address import Address
from postbus.broker.backoff import FIRST_BACKOFF_S
from postbus.broker.partition.clock import ClockMode, EntityClock, ManualClock
from postbus.broker.partition.host import Host
from postbus.broker.partition.ownership import HostStatus
from postbus.broker.router import Router
from postbus.entity.commands import Done, LoseLocks, Refused, Tick

CATCH_UP_S: Final = 60.0
"""How long `advance` waits for timers. Our choice: twice what a million messages need."""


class Controls:
    """Clock and faults of all partitions of this process."""

    def __init__(self, hosts: Sequence[Host], router: Router, clock: EntityClock) -> None:
        self._hosts = hosts
        self._router = router
        self._clock = clock

    # --- time -----------------------------------------------------------------------------------

    @property
    def mode(self) -> ClockMode:
        return self._clock.mode

    @property
    def now_ms(self) -> int:
        """Entity time."""
        return self._clock()

    @property
    def offset_ms(self) -> int:
        """How far time was moved by hand."""
        return self._clock.offset_ms if isinstance(self._clock, ManualClock) else 0

    async def advance(self, duration_ms: int) -> list[int]:
        """Move time; what became due is done and durable when this returns.

        Only with `ClockMode.MANUAL`. Returns the partitions that could not do it in time, because
        their store is unavailable: they will when it is back.
        """
        assert isinstance(self._clock, ManualClock)
        self._clock.advance(duration_ms)
        hosts = [host for host in self._hosts if host.status is not HostStatus.UNCLAIMED]
        for host in hosts:
            host.clock_changed()
        return await _catch_up(hosts)

    # --- faults ---------------------------------------------------------------------------------

    async def lose_locks(self, path: str) -> str | None:
        """Take every message lock of an entity away; return its name, None when there is none.

        Locks run out as by time: messages are available again with one more delivery counted.
        """
        address = await self._resolve(path)
        if address is None:
            return None
        hosts = [host for host in self._hosts if host.is_loaded]  # elsewhere nothing is locked
        for host in hosts:
            await host.call(LoseLocks(address.entity_no))
        await _catch_up(hosts)
        return address.name

    def interrupt_store(self, duration_s: float, partition_id: int | None) -> list[int]:
        """Simulate an outage of the store for a partition, None: for all; return which.

        Raises IndexError for a partition that does not exist.
        """
        hosts = self._hosts if partition_id is None else [self._hosts[partition_id]]
        for host in hosts:
            host.interrupt(duration_s)
        return [host.partition_id for host in hosts]

    @property
    def partition_count(self) -> int:
        return len(self._hosts)

    async def _resolve(self, path: str) -> Address | None:
        found: asyncio.Future[Address | None] = asyncio.get_running_loop().create_future()

        def take(address: Address | None) -> None:
            if not found.done():
                found.set_result(address)

        self._router.resolve(path, take)
        return await found


async def _catch_up(hosts: Sequence[Host]) -> list[int]:
    """Let hosts do what is due; return the partitions that were not ready in time."""
    work = {asyncio.ensure_future(run_due(host)): host.partition_id for host in hosts}
    if not work:
        return []
    done, late = await asyncio.wait(work, timeout=CATCH_UP_S)
    for task in late:
        task.cancel()
    for task in done:
        task.result()
    return sorted(work[task] for task in late)


async def run_due(host: Host) -> None:
    """Return when what waits for the present time has been done and committed.

    One turn does a limited part of it, so that clients are served in between. While the store is
    away this waits.
    """
    is_due = True
    while is_due and host.status is not HostStatus.CLOSED:
        replied: asyncio.Future[Done | Refused] = asyncio.get_running_loop().create_future()

        def take(reply: Done | Refused, replied: asyncio.Future[Done | Refused] = replied) -> None:
            if not replied.done():
                replied.set_result(reply)

        host.submit(Tick(), take)
        is_due = host.is_due or not host.is_loaded
        if isinstance(await replied, Refused):
            is_due = True
            await asyncio.sleep(FIRST_BACKOFF_S)
