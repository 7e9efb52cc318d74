"""What a reconcile works with besides its resource."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from postbus_operator.kube.api import Api
from postbus_operator.kube.cache import Cache
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import BackendUnavailable, Outcome
from postbus_operator.settings import Settings


class Buses(Protocol):
    """Sessions with the control APIs of buses."""

    async def of(self, bus: Resource) -> Any:
        """Return the session of a bus; None: it cannot be reached yet."""

    def answering(self, bus: Resource) -> Any:
        """Return the session of a bus that answers, as far as is known; None: there is none."""

    def failure_of(self, bus: Resource) -> BackendUnavailable:
        """Return the reason why a bus does not answer; StillConnecting: it was hardly tried."""

    async def close(self) -> None:
        """End all sessions; nothing is reconciled any more."""


@dataclass(frozen=True, slots=True)
class Context:
    """Settings, access and time, for the whole time as the leader.

    `wake`: look at a resource after these seconds, 0 is now. `control_url`: address of the control
    API of a bus, `health_url` that of `/readyz`; None: those of its first broker; tests run brokers
    elsewhere.
    """

    settings: Settings
    api: Api
    cache: Cache
    buses: Buses
    epoch: int
    now: Callable[[], datetime]
    wake: Callable[[Key, float], None]
    control_url: Callable[[Resource], str] | None = None
    health_url: Callable[[Key], str] | None = None


StillLeads = Callable[[], Awaitable[bool]]
"""Asks the API server for the Lease: False if this process no longer holds it with its epoch."""


class OpenSessions(Protocol):
    """Makes the sessions of one time as the leader."""

    def __call__(
        self,
        api: Api,
        cache: Cache,
        epoch: int,
        wake: Callable[[Key, float], None],
        still_leads: StillLeads,
        *,
        cluster_domain: str,
        control_url: Callable[[Resource], str] | None,
    ) -> Buses:
        """Return sessions that are opened as they are needed."""


Reconciler = Callable[[Context, Resource], Awaitable[Outcome]]
"""Looks at a resource once. `Resource.is_deleting` is the first thing it asks.

Raises SpecInvalid, DependencyMissing, BackendUnavailable, or an ApiError.
"""


class LeadershipLost(Exception):
    """Another process leads, or may lead, as the Lease says: this one must stop at once."""
