"""Commands waiting for their partition to load: bookkeeping of one host."""

from __future__ import annotations

from collections import deque
from typing import Final

from postbus.broker.partition.sends import Waiting
from postbus.entity.commands import AcceptSession, AddConsumer, SetDemand

WAITING_LIMIT: Final = 10_000
"""Maximum number of commands held while a partition loads; more are refused. Our choice: a second
of sends."""

OF_CONSUMER = (AddConsumer, AcceptSession, SetDemand)


class WaitingCommands:
    """Waiting commands in order. No consumer survives a reload: its commands are dropped with
    it.
    """

    def __init__(self) -> None:
        self._commands: deque[Waiting] = deque()
        self._removed: set[int] = set()

    @property
    def is_full(self) -> bool:
        return len(self._commands) >= WAITING_LIMIT

    def add(self, waiting: Waiting) -> None:
        self._commands.append(waiting)

    def forget_consumer(self, consumer_id: int) -> None:
        """Record that a consumer left while the partition loads."""
        if self._commands:
            self._removed.add(consumer_id)

    def take(self) -> tuple[list[Waiting], list[Waiting]]:
        """Return and clear the waiting commands, and those of consumers that left."""
        commands, self._commands = self._commands, deque()
        removed, self._removed = self._removed, set()
        kept: list[Waiting] = []
        gone: list[Waiting] = []
        for waiting in commands:
            command = waiting[0]
            is_gone = isinstance(command, OF_CONSUMER) and command.consumer_id in removed
            (gone if is_gone else kept).append(waiting)
        return kept, gone
