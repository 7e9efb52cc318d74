"""Shares of one limit for each account.

Every exhaustible resource is counted by account: the authorization rule of the client's key, or
`UNKNOWN` for all clients without one. An account may have as much as is free, times a factor: alone
it gets a part of the whole, beside others less, and a later account finds room. Pure: the caller
decides what follows from an answer. Source: Choudhury, Hahne: Dynamic Queue Length Thresholds for
Shared-Memory Packet Switches, 1998.
"""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = ""
"""Account of clients that have not presented a key."""

FLOORS: Final = 64
"""Number of floors in a whole: an account below its floor is refused nothing until the whole is
used up. Our choice."""


class Limit:
    """A whole and the part of it that an account may have while no other account has any."""

    __slots__ = ("_factor", "calm", "floor", "total")

    def __init__(self, total: int, alone: float = 0.5) -> None:
        self.total = total
        self.floor = max(total // FLOORS, 1)
        self.calm = int(total * alone)
        """No account exceeds its share while all together have no more than this."""
        self._factor = alone / (1 - alone)

    def allows(self, own: int, used: int) -> bool:
        """Return whether an account may have `own` while all together have `used`."""
        return own <= self.floor or own <= (self.total - used) * self._factor


class Shares:
    """Amounts of one limit by account. Accounts without an amount cost nothing."""

    __slots__ = ("_of", "limit", "refused_count", "used")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.used = 0
        self.refused_count = 0
        """Number of requests above an account's share."""
        self._of: dict[str, int] = {}

    def of(self, account: str) -> int:
        """Return the amount of an account."""
        return self._of.get(account, 0)

    @property
    def is_used_up(self) -> bool:
        """Return whether the whole is used up."""
        return self.used >= self.limit.total

    def has_room(self, account: str, size: int) -> bool:
        """Return whether an account may have an additional amount."""
        used = self.used + size
        if used <= self.limit.calm:
            return True
        return used <= self.limit.total and self.limit.allows(self.of(account) + size, used)

    def take(self, account: str, size: int) -> bool:
        """Add an amount to an account if its share allows; return whether it did."""
        if not self.has_room(account, size):
            self.refused_count += 1
            return False
        self.add(account, size)
        return True

    def add(self, account: str, size: int) -> None:
        """Add an amount to an account, whatever its share."""
        self.used += size
        self._of[account] = self._of.get(account, 0) + size

    def give_back(self, account: str, size: int) -> None:
        """Subtract an amount from an account."""
        left = self._of.get(account, 0) - size
        assert left >= 0, "an account gives back at most its amount"
        self.used -= size
        if left:
            self._of[account] = left
        else:
            self._of.pop(account, None)

    def clear(self) -> None:
        """Forget the amounts of all accounts."""
        self.used = 0
        self._of.clear()
