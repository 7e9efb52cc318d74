"""What the links of one connection keep in memory, counted for the account that answers for it.

A link is cheap and a connection may have thousands of them: without a share of all that links keep
one key could fill the memory of the broker with links that do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.edge.access.shares import UNKNOWN

if TYPE_CHECKING:
    from postbus.amqp.link import Link
    from postbus.edge.access.shares import Shares

LINK_BYTES: Final = 2_048
"""An attached link besides what it keeps of its attach. Measured: 1.2 KiB a sender, 1.7 KiB a
receiver, with short names."""

KEPT_FACTOR: Final = 3
"""What a byte of an attach costs while its link is there: as it came and decoded."""


class LinkMemory:
    """Counts the links of one connection."""

    __slots__ = ("_account", "_shares", "_sizes")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._account = UNKNOWN
        self._sizes: dict[Link, int] = {}

    def take(self, link: Link) -> bool:
        """Count a link unless its account has its share of links already; say whether it counts."""
        size = LINK_BYTES + KEPT_FACTOR * link.attach_bytes
        if not self._shares.take(self._account, size):
            return False
        self._sizes[link] = size
        return True

    def give_back(self, link: Link) -> None:
        """Forget a link, if it was counted."""
        size = self._sizes.pop(link, 0)
        if size:
            self._shares.give_back(self._account, size)

    def end(self) -> None:
        """Give back what is left: the last door is gone."""
        for link in list(self._sizes):
            self.give_back(link)

    def move(self, account: str) -> None:
        """Count what is there for another account: the client has shown its first key."""
        used = sum(self._sizes.values())
        if used:
            self._shares.give_back(self._account, used)
            self._shares.add(account, used)
        self._account = account
