"""Names that the operator gives to what it writes on objects of the API server."""

from __future__ import annotations

from typing import Final

FIELD_MANAGER: Final = "postbus-operator"
FINALIZER: Final = "postbus.dev/finalizer"

PAUSED: Final = "postbus.dev/paused"
"""`"true"`: the operator leaves the resource and its entity alone."""

FORCE_RELEASE: Final = "postbus.dev/force-release"
"""`"true"`: a deletion asks nobody and changes nothing on the bus."""

START_EMPTY: Final = "postbus.dev/start-empty"
"""`"true"`: a new resource restores nothing that a deletion has left."""

ROTATE: Final = "postbus.dev/rotate"
"""`primary` or `secondary`: this key gets a new value."""

RECREATE_REQUESTED_AT: Final = "postbus.dev/recreate-requested-at"
"""Any new value creates an entity again that was deleted because it was idle."""

RESOURCE: Final = "postbus.dev/resource"
"""The resource that a Secret with keys is of, with or without an owner reference, or a Job that a
CronJob owns: `Queue/shop/orders`."""

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
BUS_LABEL: Final = "postbus.dev/bus"
"""The name of the bus as its children have it (`names.child_name`)."""

WATCH_LABEL: Final = "postbus.dev/watch"
"""`"true"` on Secrets that the operator reads: users set it, and the operator on its own ones. The
API server filters by it, so that other Secrets never reach the operator."""
