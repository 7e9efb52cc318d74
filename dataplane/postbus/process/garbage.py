"""Schedule of garbage collections in a process that runs a bus: after a time, and after growth.

Python counts objects, not bytes. A few objects in a cycle may hold megabytes, and with many
messages in memory Python's own rule almost never starts a full collection. Memory of connections
and partitions is freed without one; this is for forgotten cycles.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize
from typing import Final

THRESHOLDS: Final = (50_000, 20, 100)
"""Collections of a broker's memory find almost nothing, and each one is a pause: the youngest
generation is collected after this many objects, the middle one each twentieth time, all when
`Collector` decides."""

CHECK_S: Final = 1.0
LONGEST_S: Final = 60.0
"""Longest time that garbage may stay when memory does not grow."""

GROWTH_BYTES: Final = 64 << 20
GROWTH_PART: Final = 4
"""Growth by 64 MiB and by a quarter may be due to garbage."""

PAUSE_PART: Final = 500
"""Pauses take at most this part of the time. A full collection that finds nothing takes 0.1 s for a
million objects (CPython 3.11)."""


class Collector:
    """Collects when due; call `check` each second."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        resident_bytes: Callable[[], int] | None = None,
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        """`now_s` is real; `resident_bytes` returns the memory of this process."""
        self._now_s = now_s
        self._resident_bytes = resident_bytes or own_resident_bytes
        self._collect = collect
        self._last_s = now_s()
        self._last_bytes = self._resident_bytes()
        self._pause_s = 0.0

    def check(self) -> None:
        """Collect if it is due."""
        began_s = self._now_s()
        since_s = began_s - self._last_s
        if since_s < self._pause_s * PAUSE_PART:
            return
        grown_bytes = self._resident_bytes() - self._last_bytes
        much_bytes = max(GROWTH_BYTES, self._last_bytes // GROWTH_PART)
        if since_s < LONGEST_S and grown_bytes < much_bytes:
            return
        self._collect()
        self._last_s = self._now_s()
        self._pause_s = self._last_s - began_s
        self._last_bytes = self._resident_bytes()


async def collect_forever() -> None:
    """Freeze the existing objects, and collect garbage from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    collector = Collector()
    while True:
        await asyncio.sleep(CHECK_S)
        collector.check()


def own_resident_bytes() -> int:
    """Return the memory of this process, 0 where the system does not report it."""
    try:
        _, pages, _ = _STATM.read_text(encoding="ascii").split(maxsplit=2)
    except OSError:  # not Linux
        return 0
    return int(pages) * getpagesize()


_STATM: Final = Path("/proc/self/statm")
