"""Takes down the links of closed connections, a few in each iteration of the event loop.

A link takes 17 us, and a network failure ends thousands of connections at once: the remaining
clients must not wait for all of that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final, Protocol

logger = logging.getLogger(__name__)

LINKS_A_ROUND: Final = 256
"""Links taken down between two polls of the sockets: 4 ms. Our choice."""


class EndedConnection(Protocol):
    """A connection that is over."""

    @property
    def link_count(self) -> int: ...
    def take_down(self, most: int) -> int: ...


class Endings:
    """Closed connections that still have links, in the order they were closed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left: deque[EndedConnection] = deque()
        self._room = LINKS_A_ROUND
        self._is_round_due = False

    def add(self, connection: EndedConnection) -> None:
        """Take a connection down, immediately if little was taken down in this iteration."""
        self._left.append(connection)
        self._work()

    def _work(self) -> None:
        if not self._is_round_due:
            self._is_round_due = True
            self._loop.call_soon(self._next_round)
        while self._left and self._room > 0:
            connection = self._left[0]
            try:
                self._room -= max(connection.take_down(self._room), 1)
            except Exception:
                self._room -= 1
                logger.exception("a link could not be taken down")
            if not connection.link_count:
                self._left.popleft()

    def _next_round(self) -> None:
        self._is_round_due = False
        self._room = LINKS_A_ROUND
        if self._left:
            self._work()
