"""The table of reconcilers: which one looks at resources of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from postbus_operator.context import Reconciler

RECONCILERS: Final[Mapping[str, Reconciler]] = {}
"""Kind -> its reconciler. Resources of a kind without one are watched, and left alone."""
