"""Memory of the links of one connection, counted for the connection's account.

A link is cheap and a connection may have thousands of them: without a share of all link memory one
key could fill the broker's memory with unused links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.edge.access.shares import UNKNOWN

if TYPE_CHECKING:
    from postbus.amqp.link import Link
    from postbus.edge.access.shares import Shares

LINK_BYTES: Final = 2_048
"""Bytes of an attached link besides its attach. Measured: 1.2 KiB a sender, 1.7 KiB a receiver,
with short names."""

KEPT_FACTOR: Final = 3
"""Memory per byte of an attach during the life of its link: as received and decoded."""


class LinkMemory:
    """Counts the links of one connection."""

    __slots__ = ("_account", "_shares", "_sizes")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._account = UNKNOWN
        self._sizes: dict[Link, int] = {}

    def take(self, link: Link) -> bool:
        """Count a link unless its account has used up its share; return whether it was counted."""
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
        """Release the rest: the last endpoint is gone."""
        for link in list(self._sizes):
            self.give_back(link)

    def move(self, account: str) -> None:
        """Move the count to another account: the client has presented its first key."""
        used = sum(self._sizes.values())
        if used:
            self._shares.give_back(self._account, used)
            self._shares.add(account, used)
        self._account = account
