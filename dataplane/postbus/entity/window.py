"""How many bytes of messages a process and a partition hold ready (ADR 16).

One `WindowBudget` is shared by all partitions of a process; each partition accounts for what it
loaded through its own `Window`, so that a reload can give everything back at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postbus.message.envelope import SharedBody

MESSAGE_OVERHEAD_BYTES: Final = 512
"""Memory of a loaded message besides its encoded bytes: envelope, slices and queue entry.
Measured with sys.getsizeof on CPython 3.11: 400 to 560 bytes for a typical message."""

WINDOW_MESSAGES: Final = 50_000
"""Most messages a partition holds loaded, whatever their size (ADR 16)."""

RESERVE_SHIFT: Final = 3
"""Sub-queues without receivers leave 1/8 of the budget to those that have receivers, so that
idle backlogs cannot starve them. Our choice."""


@dataclass(slots=True)
class WindowBudget:
    """Bytes of messages the process may hold, and holds."""

    limit_bytes: int
    used_bytes: int = 0


class Window:
    """The share of the budget one partition uses."""

    __slots__ = ("budget", "count", "used_bytes")

    def __init__(self, budget: WindowBudget) -> None:
        self.budget = budget
        self.count = 0
        self.used_bytes = 0

    def room_bytes(self, *, is_wanted: bool) -> int:
        """Return what may still be loaded; `is_wanted`: for a receiver that waits."""
        if self.count >= WINDOW_MESSAGES:
            return 0
        limit_bytes = self.budget.limit_bytes
        if not is_wanted:
            limit_bytes -= limit_bytes >> RESERVE_SHIFT
        return limit_bytes - self.budget.used_bytes

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
        """Account for messages that were unloaded, delivered for good or deleted."""
        cost = size_bytes + count * MESSAGE_OVERHEAD_BYTES
        self.count -= count
        self.used_bytes -= cost
        self.budget.used_bytes -= cost

    def share(self, body: SharedBody) -> None:
        """Account for one more loaded message, added as if it had the body for itself."""
        if body.holders:
            self.used_bytes -= body.size_bytes
            self.budget.used_bytes -= body.size_bytes
        body.holders += 1

    def unshare(self, body: SharedBody) -> None:
        """Account for one loaded message less, removed as if the body left with it."""
        body.holders -= 1
        if body.holders:
            self.used_bytes += body.size_bytes
            self.budget.used_bytes += body.size_bytes

    def discard(self) -> None:
        """Give everything back: the partition's memory is dropped."""
        self.remove(self.count, self.used_bytes - self.count * MESSAGE_OVERHEAD_BYTES)
