"""Runs looks: as many at once as there are workers, each resource when its time has come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from postbus_operator.objects import Key
from postbus_operator.running.work_queue import WorkQueue, parts_of

Look = Callable[[Key], Awaitable[float | None]]
OnTimes = Callable[[Key, float, float], None]
"""Called after a look with the seconds that the key has waited, and those of the look."""

IDLE_S: Final = 60.0

STRIDE_S: Final = 1.0
"""Time between two parts of the walk over all resources: 10,000 are walked in parts of 34. To wake
up for each one costs more than to find that it needs no look."""


class WorkLoop:
    """The only place that waits for the queue's times; the queue itself has no clock."""

    def __init__(
        self,
        queue: WorkQueue,
        look: Look,
        *,
        workers: int,
        now: Callable[[], float],
        on_times: OnTimes,
    ) -> None:
        self._queue = queue
        self._look = look
        self._workers = workers
        self._now = now
        self._on_times = on_times
        self._changed = asyncio.Event()

    def wake(self, key: Key, delay_s: float = 0.0) -> None:
        """Have a resource looked at after a delay, or before."""
        self._queue.wake(key, self._now() + delay_s)
        self._changed.set()

    async def resync(
        self,
        keys: Callable[[], Iterable[Key]],
        period_s: float,
        is_settled: Callable[[Key], bool],
    ) -> None:
        """Look at all that is not settled once in each period, evenly spread; without an end."""
        count = math.ceil(period_s / STRIDE_S)
        while True:
            start = self._now()
            for number, part in enumerate(parts_of(list(keys()), count), 1):
                for key in part:
                    if not is_settled(key):
                        self.wake(key)
                await asyncio.sleep(start + period_s * number / count - self._now())

    async def run(self) -> None:
        """Run looks until one raises, which only the loss of leadership does."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                while self._queue.running < self._workers:
                    taken = self._queue.take(self._now())
                    if taken is None:
                        break
                    key, waited = taken
                    group.create_task(self._run_one(key, waited))
                await self._wait()

    async def _wait(self) -> None:
        due = self._queue.next_due()
        is_full = self._queue.running >= self._workers
        pause = IDLE_S if due is None or is_full else min(IDLE_S, max(0.0, due - self._now()))
        try:
            async with asyncio.timeout(pause):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _run_one(self, key: Key, waited: float) -> None:
        start = self._now()
        again: float | None = None
        try:
            again = await self._look(key)
        finally:
            end = self._now()
            self._queue.done(key, None if again is None else end + again)
            self._on_times(key, waited, end - start)
            self._changed.set()
