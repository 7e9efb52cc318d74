"""Deliveries of one connection whose last frame is still to come: their bytes and their time.

Counted once a read, as the engine tells: nothing here is done for each message. Above the share of
the connection's key, or when a delivery takes too long, its link is detached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.amqp import conditions
from postbus.amqp.link import IncomingLink
from postbus.edge.shares import UNKNOWN

if TYPE_CHECKING:
    from postbus.edge.amqp.connection import AmqpConnection

DELIVERY_MS: Final = 300_000
"""How long a delivery may take to come. Our choice: the largest message in five minutes is a third
of a megabyte a second."""


class Unfinished:
    """What one connection has sent of messages that are not whole yet."""

    def __init__(self, connection: AmqpConnection) -> None:
        self._connection = connection
        self._account = UNKNOWN
        self.counted_bytes = 0
        """What the accounts know of."""

    def count(self) -> None:
        """Tell the accounts what the engine holds; above the share the largest deliveries go."""
        engine, intake = self._connection.engine, self._connection.intake
        self._give_back()
        if not engine.partial_bytes:
            return
        self._account = self._connection.account
        while not intake.unfinished.take(self._account, engine.partial_bytes):
            link = max(self._links(), key=lambda each: len(each.partial), default=None)
            if link is None:
                return
            text = "Too many bytes of unfinished deliveries were sent with this key."
            self._detach(link, conditions.SERVER_BUSY, text)
        self.counted_bytes = engine.partial_bytes
        intake.take(self._account, self.counted_bytes)

    def end(self) -> None:
        """The connection is over."""
        self._give_back()

    def detach_late(self, now_ms: int) -> None:
        """Detach the links whose delivery takes too long."""
        for link in self._links():
            if now_ms - link.partial_since_ms >= DELIVERY_MS:
                text = f"A delivery was not complete after {DELIVERY_MS // 1_000} seconds."
                self._detach(link, conditions.TIMEOUT, text)
        if self.counted_bytes != self._connection.engine.partial_bytes:
            self.count()

    def _links(self) -> list[IncomingLink]:
        return [
            link
            for link in self._connection.links()
            if isinstance(link, IncomingLink) and link.partial_transfer is not None
        ]

    def _detach(self, link: IncomingLink, condition: str, text: str) -> None:
        connection = self._connection
        connection.detach(
            link, connection.explainer.error(condition, text, connection.path_of(link))
        )

    def _give_back(self) -> None:
        intake, size_bytes = self._connection.intake, self.counted_bytes
        if size_bytes:
            self.counted_bytes = 0
            intake.unfinished.give_back(self._account, size_bytes)
            intake.give_back(self._account, size_bytes)
