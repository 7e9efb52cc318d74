"""Detaches idle links after ten minutes, as Service Bus does.

An endpoint sets a flag on use, which costs one store; the connection's tick checks its endpoints
periodically. So a link needs no timer, and is detached at most one tick late, never early.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from postbus.amqp import conditions
from postbus.amqp.link import Link
from postbus.edge.amqp.link_context import LinkContext

LINK_IDLE_MS: Final = 600_000
"""Idle time after which a link is detached. Transfers, flows and dispositions are uses; unused
credit is none. Source: Service Bus, idle timeout 00:10:00 of publishers and consumers."""


class Idleness:
    """Idle time of one link."""

    __slots__ = ("_since_ms", "is_used")

    def __init__(self) -> None:
        self.is_used = True
        """Set by each use, cleared by each check."""
        self._since_ms = 0

    def is_over(self, now_ms: int) -> bool:
        """Return whether the link has been idle for too long, and begin the next period."""
        if self.is_used:
            self.is_used = False
            self._since_ms = now_ms
            return False
        return now_ms - self._since_ms >= LINK_IDLE_MS


class Watched(Protocol):
    """An endpoint; the links of nodes may be idle and have no idleness."""

    path: str

    @property
    def idleness(self) -> Idleness | None: ...


def detach_idle(connection: LinkContext, endpoints: Mapping[Link, Watched], now_ms: int) -> None:
    """Detach idle links, with the condition that makes clients reconnect."""
    idle = [
        link
        for link, endpoint in endpoints.items()
        if endpoint.idleness is not None and endpoint.idleness.is_over(now_ms)
    ]
    for link in idle:
        kind = "Publisher" if link.is_incoming else "Consumer"
        minutes, seconds = divmod(LINK_IDLE_MS // 1_000, 60)
        text = (
            f"The link '{link.name}' is force detached. Code: {kind.lower()}(link{link.handle})."
            f" Details: AmqpMessage{kind}.IdleTimerExpired:"
            f" Idle timeout: 00:{minutes:02}:{seconds:02}."
        )
        error = connection.error_mapper.error(conditions.DETACH_FORCED, text, endpoints[link].path)
        connection.detach(link, error)
