"""Counters of the entities of a partition, for metrics; a reload keeps them.

The host keeps the counters and lends them to each life of the partition. No decision depends on
them.
"""

from __future__ import annotations

from typing import Final

MAX_REASONS: Final = 20
MAX_REASON_CHARS: Final = 100
"""Maximum number of dead-letter reasons that are counted separately for an entity, and their
reported length. Our choice: each is a series, and applications choose the text."""

UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"
"""Replacement of unprintable characters: metrics are read in terminals, too."""

OTHER: Final = "other"
NO_REASON: Final = "none"


class Traffic:
    """Counters of one entity since the process started; repeated deliveries count each time.

    `accepted`: messages sent to it, including scheduled ones; for a subscription its copies.
    `delivered` and `completed` count active messages only. `expired` were dropped, `deaths` counts
    dead letters by reason: the first `MAX_REASONS` separately, later ones as `OTHER`.
    """

    __slots__ = ("accepted", "completed", "deaths", "delivered", "expired")

    def __init__(self) -> None:
        self.accepted = 0
        self.delivered = 0
        self.completed = 0
        self.expired = 0
        self.deaths: dict[str, int] = {}

    def died(self, reason: object) -> None:
        """Count a message that became a dead letter."""
        text = reason[:MAX_REASON_CHARS] if isinstance(reason, str) and reason else NO_REASON
        if not text.isprintable():
            text = "".join(each if each.isprintable() else UNPRINTABLE for each in text)
        count_death(self.deaths, text, 1)


def count_death(deaths: dict[str, int], reason: str, count: int) -> None:
    """Add to the count of a reason, or to that of `OTHER` above the maximum number of reasons."""
    if reason not in deaths and len(deaths) >= MAX_REASONS:
        reason = OTHER
    deaths[reason] = deaths.get(reason, 0) + count
