"""Current rates of entities and the age of their oldest message.

Rates come from the counters of metrics, sampled every few seconds, at no cost per message. Used by
administration and metrics; no decision depends on them.
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
"""Interval and number of samples: rates cover the last 10 to 15 s. Our choice: quick enough for an
observer, and a pause of a second does not show."""
LEAST_S: Final = 1.0
"""Minimum period for a rate: over less, one message would be many per second."""
OLDEST_S: Final = 2.0
"""Timeout of the store's answer about the age of a message that is not in memory."""

Counted: TypeAlias = tuple[int, int, int]
"""Counters of `Traffic`: accepted, delivered, completed."""
NOTHING: Final[Counted] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Rates:
    """Messages per second: sent to an entity, delivered from it, completed."""

    accepted: float
    delivered: float
    completed: float


class Activity:
    """Samples the counters of all hosts; `now_s` is monotonic real time."""

    def __init__(self, hosts: Sequence[Host], now_s: Callable[[], float] = time.monotonic) -> None:
        self._hosts = hosts
        self._now_s = now_s
        self._samples: deque[tuple[float, list[dict[int, Counted]]]] = deque(maxlen=SAMPLES)
        self.sample()

    async def keep_sampling(self, stopping: asyncio.Event) -> None:
        """Sample periodically until the bus stops."""
        while not stopping.is_set():
            try:
                await asyncio.wait_for(stopping.wait(), SAMPLE_S)
            except TimeoutError:
                self.sample()

    def sample(self) -> None:
        """Record the counters; an idle entity shares the previous sample."""
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
    """Return the age of the oldest active message in a partition.

    By the clock of its database. None when there is none, or when the age is unknown: the partition
    is unavailable, or has too many sessions. `reading` is entered around reads of the store.
    """
    found = None if host.state is None else host.state.oldest(entity_no)
    if found is None:
        return None
    row_key, enqueued_ms = found
    if enqueued_ms is None:
        async with reading or nullcontext():
            try:
                rows = await host.read_rows([row_key])
            except StoreUnavailable:  # the partition reports this itself
                return None
        if not rows:
            return None
        enqueued_ms = rows[0].enqueued_ms
    return max(host.clock() - enqueued_ms, 0)


async def oldest_age_of(hosts: Iterable[Host], entity_no: int) -> int | None:
    """Return the age over all partitions of an entity that answer in time."""
    looks = [asyncio.ensure_future(oldest_age_ms(host, entity_no)) for host in hosts]
    try:
        done, _ = await asyncio.wait(looks, timeout=OLDEST_S)
    finally:
        for look in looks:
            look.cancel()
    known = (look.result() for look in done)
    return max((each for each in known if each is not None), default=None)
