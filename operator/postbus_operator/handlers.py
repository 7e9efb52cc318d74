"""What kopf does for the operator: it watches. `tests/operator/test_handlers.py` keeps it so.

Selectors are (group, version, plural): a bare name such as `namespaces` selects the core's.
"""

from __future__ import annotations

from typing import Any

import kopf

from postbus_operator.kube.observer import Observer
from postbus_operator.kube.watches import watched_types


async def observe(memo: Observer, event: kopf.RawEvent, **_: Any) -> None:
    """Take an event."""
    memo.event(event["type"], event["object"])


def registry(*, is_cluster_wide: bool) -> kopf.OperatorRegistry:
    """Return the handlers of all watched types."""
    made = kopf.OperatorRegistry()
    for type in watched_types(is_cluster_wide=is_cluster_wide):
        kopf.on.event(type.group, type.version, type.plural, registry=made)(observe)
    return made
