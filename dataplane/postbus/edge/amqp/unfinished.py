"""Unfinished deliveries of one connection: their bytes and their time.

The engine's count is read once for each read of the socket, never for each message. A link is
detached when its unfinished delivery exceeds the share of the connection's key or takes too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from postbus.amqp import conditions
from postbus.amqp.connection import Connection
from postbus.amqp.link import IncomingLink, Link
from postbus.edge.access.shares import UNKNOWN
from postbus.edge.amqp.idleness import Watched
from postbus.edge.amqp.link_context import LinkContext

DELIVERY_MS: Final = 300_000
"""Maximum duration of a delivery. Our choice: the largest message in five minutes is a third of a
megabyte a second."""


class UnfinishedContext(LinkContext, Protocol):
    """A connection with unfinished deliveries."""

    engine: Connection

    def endpoints(self) -> Mapping[Link, Watched]:
        """Return the endpoint of each link."""


class Unfinished:
    """Unfinished messages of one connection.

    It does not refer to the connection, which it would keep in memory.
    """

    def __init__(self) -> None:
        self._account = UNKNOWN
        self.counted_bytes = 0
        """Bytes known to the accounts."""

    def count(self, connection: UnfinishedContext) -> None:
        """Update the accounts from the engine; above the share detach the largest deliveries."""
        engine, inflight = connection.engine, connection.inflight
        grown = engine.partial_bytes - self.counted_bytes
        is_same = self.counted_bytes and self._account == connection.account
        # Growth is taken on its own: releasing everything first would grant credit to waiting
        # links.
        if grown > 0 and is_same and inflight.unfinished.take(self._account, grown):
            inflight.take(self._account, grown)
            self.counted_bytes += grown
            return
        self._give_back(connection)
        if not engine.partial_bytes:
            return
        self._account = connection.account
        while not inflight.unfinished.take(self._account, engine.partial_bytes):
            link = max(_links(connection), key=lambda each: len(each.partial), default=None)
            if link is None:
                return
            text = "Too many bytes of unfinished deliveries were sent with this key."
            _detach(connection, link, conditions.SERVER_BUSY, text)
        self.counted_bytes = engine.partial_bytes
        inflight.take(self._account, self.counted_bytes)

    def end(self, connection: UnfinishedContext) -> None:
        """Release all bytes; the connection is over."""
        self._give_back(connection)

    def detach_late(self, connection: UnfinishedContext, now_ms: int) -> None:
        """Detach links with deliveries that take too long."""
        for link in _links(connection):
            if now_ms - link.partial_since_ms >= DELIVERY_MS:
                text = f"A delivery was not complete after {DELIVERY_MS // 1_000} seconds."
                _detach(connection, link, conditions.TIMEOUT, text)
        if self.counted_bytes != connection.engine.partial_bytes:
            self.count(connection)

    def _give_back(self, connection: UnfinishedContext) -> None:
        inflight, size_bytes = connection.inflight, self.counted_bytes
        if size_bytes:
            self.counted_bytes = 0
            inflight.unfinished.give_back(self._account, size_bytes)
            inflight.give_back(self._account, size_bytes)


def _links(connection: UnfinishedContext) -> list[IncomingLink]:
    return [
        link
        for link in connection.endpoints()
        if isinstance(link, IncomingLink) and link.partial_transfer is not None
    ]


def _detach(connection: UnfinishedContext, link: IncomingLink, condition: str, text: str) -> None:
    connection.detach(
        link, connection.error_mapper.error(condition, text, connection.endpoints()[link].path)
    )
