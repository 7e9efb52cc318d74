"""What the log hears of refusals whose cause is the broker's own: the store is away, full, or busy.

Then everybody is refused, again and again, for one reason that the log has elsewhere. Told are the
first refusal of a reason at once, and once a minute how many followed and of which entities. What a
client did wrong is told each time: its text has a tracking id that somebody will look for.
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
"""Refusals that pass, or that hit whoever comes."""

SUMMARY_S: Final = 60.0
"""How often a lasting trouble is told. Our choice: seldom enough to be read."""

MAX_ENTITIES: Final = 1_000
"""Entities counted apart for each reason; more are counted together."""

LOGGED_ENTITIES: Final = 5
"""Entities that a line names, those first that were refused most."""

MAX_NAME_CHARS: Final = 100

Later: TypeAlias = Callable[[float, Callable[[], None]], object]
OTHERS: Final = "others"


class RefusalSums:
    """Counts by reason. Of one bus, over all its doors."""

    def __init__(self, later: Later | None = None) -> None:
        """`later` calls something after so many seconds, by default in the running loop."""
        self._later = later or _in_loop
        self._unlogged: dict[Refusal, Counter[str]] = {}

    def is_logged(self, refusal: Refusal, entity: str) -> bool:
        """Count a refusal and say whether the log hears of it by itself."""
        unlogged = self._unlogged.get(refusal)
        if unlogged is None:
            self._unlogged[refusal] = Counter()
            self._later(SUMMARY_S, lambda: self._sum_up(refusal))
            return True
        name = entity[:MAX_NAME_CHARS]
        unlogged[name if name in unlogged or len(unlogged) < MAX_ENTITIES else OTHERS] += 1
        return False

    def _sum_up(self, refusal: Refusal) -> None:
        """Tell what came in a minute; after one without a refusal the next one is a first again."""
        unlogged = self._unlogged.pop(refusal)
        if not unlogged:
            return
        named = [(name, count) for name, count in unlogged.most_common() if name != OTHERS]
        told, rest = named[:LOGGED_ENTITIES], named[LOGGED_ENTITIES:]
        others = sum(count for _, count in rest) + unlogged[OTHERS]
        entities = [f"{name or '-'} {count}" for name, count in told]
        if others:
            entities.append(f"{OTHERS} {others}")
        logger.warning(
            "more was refused",
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
