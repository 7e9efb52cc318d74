"""What went through the entities of a partition, counted for metrics; a reload forgets nothing.

The host keeps the counters and lends them to each life of the partition. Nothing decides by them.
"""

from __future__ import annotations


class Traffic:
    """Counters of one entity since the process started; a message that comes again counts again.

    `accepted`: sent to it, scheduled ones included; of a subscription its copies. `delivered` and
    `completed` are about active messages only. `dead_lettered` and `expired` say how others went.
    """

    __slots__ = ("accepted", "completed", "dead_lettered", "delivered", "expired")

    def __init__(self) -> None:
        self.accepted = 0
        self.delivered = 0
        self.completed = 0
        self.dead_lettered = 0
        self.expired = 0
