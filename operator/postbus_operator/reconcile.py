"""The table of reconcilers: which one looks at resources of a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from postbus_operator.api import Api
from postbus_operator.cache import Cache
from postbus_operator.context import Buses, Reconciler
from postbus_operator.namespace import reconcile_namespace
from postbus_operator.objects import Key, Resource

RECONCILERS: Final[Mapping[str, Reconciler]] = {"Namespace": reconcile_namespace}
"""Kind -> its reconciler. Resources of a kind without one are watched, and left alone."""


class NoBuses:
    """Sessions of an operator that has no reconciler of entities."""

    async def of(self, bus: Resource) -> None:
        """Return none."""

    async def close(self) -> None:
        """Do nothing."""


def open_sessions(
    api: Api,
    cache: Cache,
    epoch: int,
    wake: Callable[[Key, float], None],
    *,
    cluster_domain: str,
    control_url: Callable[[Resource], str] | None,
) -> Buses:
    """Return the sessions with control APIs."""
    del api, cache, epoch, wake, cluster_domain, control_url
    return NoBuses()
