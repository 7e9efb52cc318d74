"""Controls of a development bus beside those of clients: moving time, injecting faults.

Called by `edge/control/development.py` of a development bus only. Injected faults take the code
paths of real ones.
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
"""Maximum wait of `advance` for timers. Our choice: twice the time for a million messages."""


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
        """Milliseconds by which time was advanced manually."""
        return self._clock.offset_ms if isinstance(self._clock, ManualClock) else 0

    async def advance(self, duration_ms: int) -> list[int]:
        """Advance time; everything that became due is done and durable when this returns.

        Only with `ClockMode.MANUAL`. Returns the partitions that did not finish in time, because
        their store is unavailable: they finish when it is back.
        """
        assert isinstance(self._clock, ManualClock)
        self._clock.advance(duration_ms)
        hosts = [host for host in self._hosts if host.status is not HostStatus.UNCLAIMED]
        for host in hosts:
            host.clock_changed()
        return await _catch_up(hosts)

    # --- faults ---------------------------------------------------------------------------------

    async def lose_locks(self, path: str) -> str | None:
        """End all message locks of an entity; return its name, None if there is no such entity.

        Locks end as if they expired: messages are available again, with a higher delivery count.
        """
        address = await self._resolve(path)
        if address is None:
            return None
        hosts = [host for host in self._hosts if host.is_loaded]  # other partitions have no locks
        for host in hosts:
            await host.call(LoseLocks(address.entity_no))
        await _catch_up(hosts)
        return address.name

    def interrupt_store(self, duration_s: float, partition_id: int | None) -> list[int]:
        """Simulate an outage of the store for a partition, None: for all; return the partitions.

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
    """Have hosts do due work; return the partitions that did not finish in time."""
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
    """Do the work that is due now; return when it is committed.

    A turn does a limited part of it, so that clients are served in between. Waits while the store
    is away.
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
