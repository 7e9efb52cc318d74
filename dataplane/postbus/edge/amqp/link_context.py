"""The connection as its links see it.

`AmqpConnection` makes the endpoints of all links; they do not import it back, but name the members
they use. All need a `LinkContext`. A module with endpoints that need more extends it beside them.
"""

from __future__ import annotations

from typing import Protocol

from postbus.amqp.conditions import AmqpError
from postbus.amqp.link import Link
from postbus.amqp.session import Session
from postbus.broker.router import Router
from postbus.edge.access.inflight_budget import InflightBudget
from postbus.edge.refusals import ErrorMapper


class LinkContext(Protocol):
    """The connection as every endpoint sees it."""

    router: Router
    error_mapper: ErrorMapper
    inflight: InflightBudget
    unanswered_count: int
    """Commands in flight that the client waits for."""

    @property
    def account(self) -> str:
        """Account that the connection's bytes are counted for."""

    def flush_soon(self) -> None:
        """Write what the engine holds before the next iteration of the event loop."""

    def detach(self, link: Link, error: AmqpError | None) -> None:
        """Detach a link from our side and forget its endpoint."""

    def broke(self) -> None:
        """End the connection because of an error of ours; called in an `except` block."""


class Pumped(Protocol):
    """An endpoint that works when its client has read something."""

    def pump(self) -> None: ...


class PacedContext(LinkContext, Protocol):
    """For endpoints that write no faster than the client reads."""

    def pump_soon(self, endpoint: Pumped) -> None:
        """Pump an endpoint before the next write."""

    def note_starved(self, endpoint: Pumped) -> None:
        """Pump an endpoint when the client has read or settled something."""

    def must_wait(self, endpoint: Pumped, session: Session, max_out_bytes: int) -> bool:
        """Return whether the client must read first; if so, the endpoint is pumped afterwards."""
