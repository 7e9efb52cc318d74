"""Objects of a bus: pure functions from what is wanted to what the API server gets."""

from __future__ import annotations

from postbus_operator.children.broker import broker_objects, manifest
from postbus_operator.children.bus import Bus, Json
from postbus_operator.children.network import network_objects
from postbus_operator.children.store import store_objects


def desired(bus: Bus) -> list[Json]:
    """Return all objects but Secrets, in the order in which they are applied."""
    return [*network_objects(bus), *store_objects(bus), manifest(bus), *broker_objects(bus)]
