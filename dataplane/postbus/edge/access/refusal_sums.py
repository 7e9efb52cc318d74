"""Log summaries of refusals caused by the broker itself: the store is unavailable, full, or busy.

In these states every request is refused, for one reason that the log has elsewhere. The first
refusal of a reason is logged at once, then once a minute the number that followed and their
entities. Refusals caused by a client are logged one by one: their texts have a tracking id that
people search for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeAlias

from postbus.entity.commands import Refusal

logger = logging.getLogger(__name__)

SUMMED: Final = frozenset({Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.STORE_FULL, Refusal.BUSY})
"""Refusals that are temporary, or that affect all clients."""

SUMMARY_S: Final = 60.0
"""Interval of log entries while a condition lasts. Our choice: rare enough to be read."""

MAX_ENTITIES: Final = 1_000
"""Entities counted separately for each reason; the rest are counted together."""

LOGGED_ENTITIES: Final = 5
"""Entities named in a log entry, most refusals first."""

MAX_NAME_CHARS: Final = 100

Later: TypeAlias = Callable[[float, Callable[[], None]], object]
OTHERS: Final = "others"


class RefusalSums:
    """Counts by reason, of one bus over all its listeners."""

    def __init__(self, later: Later | None = None) -> None:
        """`later` calls a function after a number of seconds, by default in the running loop."""
        self._later = later or _in_loop
        self._unlogged: dict[Refusal, Counter[str]] = {}

    def is_logged(self, refusal: Refusal, entity: str) -> bool:
        """Count a refusal; return whether it is logged individually."""
        unlogged = self._unlogged.get(refusal)
        if unlogged is None:
            self._unlogged[refusal] = Counter()
            self._later(SUMMARY_S, lambda: self._sum_up(refusal))
            return True
        name = entity[:MAX_NAME_CHARS]
        unlogged[name if name in unlogged or len(unlogged) < MAX_ENTITIES else OTHERS] += 1
        return False

    def _sum_up(self, refusal: Refusal) -> None:
        """Log the counts of a minute; after a minute without a refusal the next one is a first
        again.
        """
        unlogged = self._unlogged.pop(refusal)
        if not unlogged:
            return
        named = [(name, count) for name, count in unlogged.most_common() if name != OTHERS]
        shown, rest = named[:LOGGED_ENTITIES], named[LOGGED_ENTITIES:]
        others = sum(count for _, count in rest) + unlogged[OTHERS]
        entities = [f"{name or '-'} {count}" for name, count in shown]
        if others:
            entities.append(f"{OTHERS} {others}")
        logger.warning(
            "further requests refused",
            extra={
                "reason": refusal.value,
                "refused": unlogged.total(),
                "within_s": round(SUMMARY_S),
                "entities": ", ".join(entities),
            },
        )
        self._unlogged[refusal] = Counter()
        self._later(SUMMARY_S, lambda: self._sum_up(refusal))


def _in_loop(delay_s: float, call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, call)
