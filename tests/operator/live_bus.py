"""A session with a real broker on a real Postgres, and the bus's side of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from postbus_operator.bus.control_client import Access, BusControl
from postbus_operator.bus.session import BusSession, Periods
from postbus_operator.context import StillLeads
from tests.edge.control.control_bus import Caller, ControlledBus

SHORT = Periods(wait_s=1, counts_s=0.05, outage_s=0.3, pause_s=0.05)
WAIT_S = 30.0


def access_to(running: ControlledBus) -> Access:
    return Access(running.caller.address, running.caller.token)


async def leads() -> bool:
    return True


async def was_replaced() -> bool:
    return False


def control_of(
    running: ControlledBus, epoch: int = 1, still_leads: StillLeads = leads
) -> BusControl:
    async def read_access() -> Access:
        return access_to(running)

    return BusControl(read_access, epoch, still_leads)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


class Followed:
    """A running session; `moved` has what it reported, None where everything may have moved."""

    def __init__(self, running: ControlledBus, periods: Periods) -> None:
        self.running = running
        self.moved: list[set[str] | None] = []
        self.session = BusSession(
            BusControl(self._access, 1, leads), self._on_moved, periods=periods
        )

    async def _access(self) -> Access:
        return access_to(self.running)

    def _on_moved(self, paths: Collection[str] | None) -> None:
        self.moved.append(None if paths is None else set(paths))

    def paths(self) -> set[str]:
        return {path for each in self.moved if each is not None for path in each}


@asynccontextmanager
async def followed(running: ControlledBus, periods: Periods = SHORT) -> AsyncIterator[Followed]:
    made = Followed(running, periods)
    task = asyncio.create_task(made.session.run())
    try:
        await wait_until(lambda: made.session.is_listed)
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def call(work: Callable[[], object]) -> None:
    """Run a call that blocks beside the loop."""
    await asyncio.to_thread(work)


async def advance(caller: Caller, duration: str) -> None:
    """Move the clock of the bus."""
    answer = await asyncio.to_thread(caller.post, "/v1/clock/advance", {"duration": duration})
    assert answer.status == 200, answer
