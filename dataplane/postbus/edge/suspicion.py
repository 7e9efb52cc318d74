"""Who guesses keys: refused tokens and passwords by source address, and how long answers wait.

All doors share one `Suspicion`. Whoever shows a good key is answered at once, whatever others at
its address did: many clients share the address of a router or a proxy. What is refused waits the
longer the more was refused, and the log hears of it once in a while, not each time.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final

logger = logging.getLogger(__name__)

FREE_REFUSALS: Final = 3
"""Refusals of a burst that are answered at once: somebody mistyped a key."""

FIRST_DELAY_S: Final = 0.1
"""How long the next answer waits; each further one twice as long."""

MAX_DELAY_S: Final = 5.0
"""Our choice: far below what SDKs wait for a token, and it leaves a guesser one try a connection
and five seconds."""

QUIET_S: Final = 60.0
"""A burst is over after this time without a refusal."""

MAX_ADDRESSES: Final = 10_000
"""Addresses remembered; the one that was quiet for longest is forgotten first."""

SUBNET_BITS: Final = 64
"""What one client has of IPv6 addresses."""


@dataclass(slots=True)
class _Burst:
    count: int
    last_s: float


class Suspicion:
    """Counts refusals. Time is real and only passes."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._bursts: OrderedDict[str, _Burst] = OrderedDict()

    def note_refused(self, address: str | None, door: str, why: str) -> float:
        """Count a refusal and return for how many seconds its answer has to wait."""
        source, now_s = source_of(address), self.now_s()
        burst = self._bursts.get(source)
        if burst is None or now_s - burst.last_s >= QUIET_S:
            burst = self._bursts[source] = _Burst(0, now_s)
        burst.count += 1
        burst.last_s = now_s
        self._bursts.move_to_end(source)
        if len(self._bursts) > MAX_ADDRESSES:
            self._bursts.popitem(last=False)
        _tell(source, door, why, burst.count)
        over = burst.count - FREE_REFUSALS
        if over <= 0:
            return 0.0
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(over - 1, 30))


def source_of(address: str | None) -> str:
    """Return what counts as one client: an IPv4 address, or a network of IPv6."""
    try:
        found = ip_address(address or "")
    except ValueError:
        return address or "unknown"
    if not isinstance(found, IPv6Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    shift = found.max_prefixlen - SUBNET_BITS
    return f"{IPv6Address(int(found) >> shift << shift)}/{SUBNET_BITS}"


def _tell(source: str, door: str, why: str, count: int) -> None:
    """Log the first refusal of a burst, then each time there are ten times as many."""
    if count == 1:
        logger.warning("key refused", extra={"address": source, "door": door, "why": why})
    elif count >= 10 and str(count).strip("0") == "1":
        logger.warning(
            "keys are being guessed", extra={"address": source, "door": door, "refused": count}
        )
