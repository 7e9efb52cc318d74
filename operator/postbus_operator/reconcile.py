"""The table of reconcilers: which one looks at resources of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from postbus_operator.context import Reconciler
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.namespaces.reconciler import reconcile_namespace
from postbus_operator.pipelines.reconciler import reconcile_pipeline

RECONCILERS: Final[Mapping[str, Reconciler]] = {
    "Namespace": reconcile_namespace,
    "Queue": reconcile_entity,
    "Topic": reconcile_entity,
    "Subscription": reconcile_entity,
    "Pipeline": reconcile_pipeline,
}
"""Kind -> its reconciler. Resources of a kind without one are watched, and left alone."""
