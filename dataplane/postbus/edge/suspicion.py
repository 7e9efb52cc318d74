"""Who guesses keys: refused tokens and passwords by source address, and how long answers wait.

All doors share one `Suspicion`. Whoever shows a good key is answered at once, whatever others at
its address did: many clients share the address of a router or a proxy. What is refused waits the
longer the more was refused, and the log hears of it once in a while, not each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Final

from postbus.edge.bursts import Bursts, is_power_of_ten

logger = logging.getLogger(__name__)

FREE_REFUSALS: Final = 3
"""Refusals of a burst that are answered at once: somebody mistyped a key."""

FIRST_DELAY_S: Final = 0.1
"""How long the next answer waits; each further one twice as long."""

MAX_DELAY_S: Final = 5.0
"""Our choice: far below what SDKs wait for a token, and it leaves a guesser one try a connection
and five seconds."""

SUBNET_BITS: Final = 64
"""What one client has of IPv6 addresses."""


class Suspicion:
    """Counts refusals. Time is real and only passes."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._refusals = Bursts()

    def note_refused(self, address: str | None, door: str, why: str) -> float:
        """Count a refusal and return for how many seconds its answer has to wait."""
        source = source_of(address)
        count = self._refusals.note(source, self.now_s())
        _tell(source, door, why, count)
        over = count - FREE_REFUSALS
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
    elif is_power_of_ten(count):
        logger.warning(
            "keys are being guessed", extra={"address": source, "door": door, "refused": count}
        )
