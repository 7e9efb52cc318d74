"""The table of reconcilers: which one looks at resources of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from postbus_operator.context import Buses, Reconciler
from postbus_operator.namespace import reconcile_namespace
from postbus_operator.objects import Resource
from postbus_operator.settings import Settings

RECONCILERS: Final[Mapping[str, Reconciler]] = {"Namespace": reconcile_namespace}
"""Kind -> its reconciler. Resources of a kind without one are watched, and left alone."""


class NoBuses:
    """Sessions of an operator that has no reconciler of entities."""

    async def of(self, bus: Resource) -> None:
        """Return none."""

    async def close(self) -> None:
        """Do nothing."""


def make_buses(_: Settings) -> Buses:
    """Return the sessions with control APIs."""
    return NoBuses()
