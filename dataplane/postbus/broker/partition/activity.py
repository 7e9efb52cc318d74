"""What goes through entities now, and how long the oldest message has waited.

Rates come from the counters that metrics tell, looked at every few seconds: a message costs nothing
for it. Asked by administration and by metrics; nothing decides by it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, TypeAlias

from postbus.broker.partition.host import Host
from postbus.entity.traffic import Traffic
from postbus.store.errors import StoreUnavailable

SAMPLE_S: Final = 5.0
SAMPLES: Final = 3
"""How often the counters are looked at, and how many looks are kept: rates are those of the last 10
to 15 s. Our choice: soon enough for somebody who watches, and a pause of a second does not show."""
LEAST_S: Final = 1.0
"""Nothing is told of a shorter time: one message would be many a second."""
OLDEST_S: Final = 2.0
"""How long is waited for the store, which knows the age of a message that is not in memory."""

Counted: TypeAlias = tuple[int, int, int]
"""Of `Traffic`: accepted, delivered, completed."""
NOTHING: Final[Counted] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Rates:
    """Messages a second: sent to an entity, delivered from it, completed."""

    accepted: float
    delivered: float
    completed: float


class Activity:
    """Looks at the counters of all hosts; `now_s` is real time and never goes back."""

    def __init__(self, hosts: Sequence[Host], now_s: Callable[[], float] = time.monotonic) -> None:
        self._hosts = hosts
        self._now_s = now_s
        self._samples: deque[tuple[float, list[dict[int, Counted]]]] = deque(maxlen=SAMPLES)
        self.sample()

    async def keep_sampling(self, stopping: asyncio.Event) -> None:
        """Look again and again until the bus stops."""
        while not stopping.is_set():
            try:
                await asyncio.wait_for(stopping.wait(), SAMPLE_S)
            except TimeoutError:
                self.sample()

    def sample(self) -> None:
        """Remember what the counters say; an entity that stands still takes a reference."""
        before = self._samples[-1][1] if self._samples else [{} for _ in self._hosts]
        found = []
        for host, known in zip(self._hosts, before, strict=True):
            now: dict[int, Counted] = {}
            for entity_no, traffic in host.traffic.items():
                counted = _counted(traffic)
                if counted != NOTHING:
                    last = known.get(entity_no)
                    now[entity_no] = last if last == counted else counted
            found.append(now)
        self._samples.append((self._now_s(), found))

    def rates(self, entity_no: int, homes: Iterable[int]) -> Rates | None:
        """Return the rates of an entity over its partitions; None in the first second."""
        since_s, before = self._samples[0]
        seconds = self._now_s() - since_s
        if seconds < LEAST_S:
            return None
        totals = [0, 0, 0]
        for home in homes:
            traffic = self._hosts[home].traffic.get(entity_no)
            then = before[home].get(entity_no, NOTHING)
            for at, count in enumerate(NOTHING if traffic is None else _counted(traffic)):
                totals[at] += max(count - then[at], 0)
        return Rates(*(total / seconds for total in totals))


def _counted(traffic: Traffic) -> Counted:
    return traffic.accepted, traffic.delivered, traffic.completed


async def oldest_age_ms(
    host: Host, entity_no: int, reading: AbstractAsyncContextManager[object] | None = None
) -> int | None:
    """Return how long the active message has waited that waits longest, in a partition.

    By the clock of its database. None when none waits, or when that is not known: the partition is
    away, or has too many sessions. `reading` is entered where the store must be asked.
    """
    found = None if host.state is None else host.state.oldest(entity_no)
    if found is None:
        return None
    row_key, enqueued_ms = found
    if enqueued_ms is None:
        async with reading or nullcontext():
            try:
                rows = await host.read_rows([row_key])
            except StoreUnavailable:  # the partition tells its trouble itself
                return None
        if not rows:
            return None
        enqueued_ms = rows[0].enqueued_ms
    return max(host.clock() - enqueued_ms, 0)


async def oldest_age_of(hosts: Iterable[Host], entity_no: int) -> int | None:
    """Return the same over all partitions of an entity, of those that answer in time."""
    looks = [asyncio.ensure_future(oldest_age_ms(host, entity_no)) for host in hosts]
    try:
        done, _ = await asyncio.wait(looks, timeout=OLDEST_S)
    finally:
        for look in looks:
            look.cancel()
    known = (look.result() for look in done)
    return max((each for each in known if each is not None), default=None)
