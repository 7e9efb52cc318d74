"""Limit on the memory of loaded messages, for a process and its partitions (ADR 16).

One `WindowBudget` is shared by all partitions of a process; each partition accounts for its loaded
messages in its own `Window`, so that a reload can release all of them at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from postbus.entity.queues.runs import ARE_VISITED
from postbus.message.envelope import SharedBody

MESSAGE_OVERHEAD_BYTES: Final = 512
"""Memory of a loaded message besides its encoded bytes: envelope, slices and queue entry.
Measured with sys.getsizeof on CPython 3.11: 400 to 560 bytes for a typical message."""

WINDOW_MESSAGES: Final = 50_000 if ARE_VISITED else sys.maxsize
"""Maximum number of loaded messages of a partition, whatever their size: where a garbage collection
visits them, it takes tens of milliseconds for so many (ADR 16)."""

RESERVE_SHIFT: Final = 3
"""Share of the budget, 1/8, that sub-queues without receivers leave to those with receivers, so
that idle backlogs cannot starve them. Our choice."""


@dataclass(slots=True)
class WindowBudget:
    """Limit and present number of bytes of loaded messages of the process."""

    limit_bytes: int
    used_bytes: int = 0


class Window:
    """The part of the budget that one partition uses."""

    __slots__ = ("budget", "count", "used_bytes")

    def __init__(self, budget: WindowBudget) -> None:
        self.budget = budget
        self.count = 0
        self.used_bytes = 0

    def room_bytes(self, *, is_wanted: bool) -> int:
        """Return the number of bytes that may still be loaded; `is_wanted`: for a waiting
        receiver.
        """
        return 0 if self.count >= WINDOW_MESSAGES else self._free_bytes(is_wanted=is_wanted)

    def _free_bytes(self, *, is_wanted: bool) -> int:
        limit_bytes = self.budget.limit_bytes
        if not is_wanted:
            limit_bytes -= limit_bytes >> RESERVE_SHIFT
        return limit_bytes - self.budget.used_bytes

    def has_room(self, count: int, size_bytes: int, *, is_wanted: bool) -> bool:
        """Return whether `count` messages of `size_bytes` together may be loaded."""
        cost = size_bytes + count * MESSAGE_OVERHEAD_BYTES
        return (
            self.count + count <= WINDOW_MESSAGES and self._free_bytes(is_wanted=is_wanted) >= cost
        )

    @property
    def is_over(self) -> bool:
        return self.budget.used_bytes > self.budget.limit_bytes or self.count > WINDOW_MESSAGES

    def add(self, count: int, size_bytes: int) -> None:
        """Account for `count` loaded messages of `size_bytes` together."""
        cost = size_bytes + count * MESSAGE_OVERHEAD_BYTES
        self.count += count
        self.used_bytes += cost
        self.budget.used_bytes += cost

    def remove(self, count: int, size_bytes: int) -> None:
        """Account for messages that were unloaded, received and deleted, or deleted."""
        cost = size_bytes + count * MESSAGE_OVERHEAD_BYTES
        self.count -= count
        self.used_bytes -= cost
        self.budget.used_bytes -= cost

    def share(self, body: SharedBody) -> None:
        """Account for the shared body of a loaded message that was added with its full size."""
        if body.holders:
            self.used_bytes -= body.size_bytes
            self.budget.used_bytes -= body.size_bytes
        body.holders += 1

    def unshare(self, body: SharedBody) -> None:
        """Account for the shared body of a message that was removed with its full size."""
        body.holders -= 1
        if body.holders:
            self.used_bytes += body.size_bytes
            self.budget.used_bytes += body.size_bytes

    def discard(self) -> None:
        """Release everything: the partition's memory is dropped."""
        self.remove(self.count, self.used_bytes - self.count * MESSAGE_OVERHEAD_BYTES)
