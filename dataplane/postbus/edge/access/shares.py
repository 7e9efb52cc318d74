"""What keys share: how much of one limit each of them may have at a time.

Whatever can run out is counted by account: the authorization rule that a client has shown, or
`UNKNOWN` for all who have shown none yet. An account may have as much as is left free, times a
factor: alone it gets a part of the whole, beside others less, and whoever comes later finds room.
Pure: whoever asks says what follows from an answer.
Source: Choudhury, Hahne: Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, 1998.
"""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = ""
"""The account of clients that have shown no key."""

FLOORS: Final = 64
"""Into how many floors a whole is cut: an account below its floor is refused nothing before the
whole is used up. Our choice."""


class Limit:
    """A whole and the part of it that an account may have when nobody else has any."""

    __slots__ = ("_factor", "calm", "floor", "total")

    def __init__(self, total: int, alone: float = 0.5) -> None:
        self.total = total
        self.floor = max(total // FLOORS, 1)
        self.calm = int(total * alone)
        """Nobody is above a share while all together have no more than this."""
        self._factor = alone / (1 - alone)

    def allows(self, own: int, used: int) -> bool:
        """Say whether an account may have `own` while all together have `used`."""
        return own <= self.floor or own <= (self.total - used) * self._factor


class Shares:
    """What accounts have of one limit. Accounts that have nothing cost nothing."""

    __slots__ = ("_of", "limit", "refused_count", "used")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.used = 0
        self.refused_count = 0
        """How often an account wanted more than its share."""
        self._of: dict[str, int] = {}

    def of(self, account: str) -> int:
        """Return what an account has."""
        return self._of.get(account, 0)

    @property
    def is_used_up(self) -> bool:
        """Whether nobody may have more."""
        return self.used >= self.limit.total

    def has_room(self, account: str, size: int) -> bool:
        """Say whether an account may have so much more."""
        used = self.used + size
        if used <= self.limit.calm:
            return True
        return used <= self.limit.total and self.limit.allows(self.of(account) + size, used)

    def take(self, account: str, size: int) -> bool:
        """Count so much more for an account if it may have it; say whether it has."""
        if not self.has_room(account, size):
            self.refused_count += 1
            return False
        self.add(account, size)
        return True

    def add(self, account: str, size: int) -> None:
        """Count what an account has already, whatever it may have."""
        self.used += size
        self._of[account] = self._of.get(account, 0) + size

    def give_back(self, account: str, size: int) -> None:
        """Count that an account has so much less."""
        left = self._of.get(account, 0) - size
        assert left >= 0, "an account gives back what it has"
        self.used -= size
        if left:
            self._of[account] = left
        else:
            self._of.pop(account, None)

    def clear(self) -> None:
        """Forget what everybody has."""
        self.used = 0
        self._of.clear()
