"""Events about resources, for `kubectl describe`; each is posted once an hour at most."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from postbus_operator.kube.api import Api, ApiError, Conflict
from postbus_operator.kube.resource_types import EVENTS, RESOURCES
from postbus_operator.objects import Resource
from postbus_operator.outcome import Event
from postbus_operator.redaction import redacted

CONTROLLER: Final = "postbus.dev/operator"
MAX_NOTE: Final = 1_024
MAX_NAME_START: Final = 200
PERIOD_S: Final = 3_600
MAX_POSTED: Final = 10_000
"""Names of Events that are remembered; the API server refuses those that were forgotten."""

logger = logging.getLogger(__name__)


class EventPoster:
    """Posts Events. They inform people only: one that cannot be posted is logged and dropped."""

    def __init__(self, api: Api, instance: str, now: Callable[[], datetime]) -> None:
        """`instance` names this process in the Events."""
        self._api = api
        self._instance = instance
        self._now = now
        self._posted: dict[str, None] = {}

    async def post(self, resource: Resource, event: Event) -> None:
        """Post an Event about a resource, unless the same was posted within the hour."""
        made = event_object(resource, event, self._instance, self._now())
        name = made["metadata"]["name"]
        if name in self._posted:
            return
        self._posted[name] = None
        if len(self._posted) > MAX_POSTED:
            del self._posted[next(iter(self._posted))]
        try:
            await self._api.create(EVENTS, resource.key.namespace, made)
        except Conflict:
            pass  # another replica, or this one before its restart, has posted it
        except ApiError as error:
            logger.warning("event %s of %s not posted: %s", event.reason, resource.key, error)


def event_object(resource: Resource, event: Event, instance: str, now: datetime) -> dict[str, Any]:
    """Return the Event's JSON. Its name follows from what it says and the hour."""
    note = redacted(event.message)[:MAX_NOTE]
    hour = int(now.timestamp() // PERIOD_S)
    said = f"{resource.uid} {event.type} {event.reason} {hour} {note}"
    digest = hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
    type = RESOURCES[resource.key.kind]
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {
            "name": f"{resource.key.name[:MAX_NAME_START].rstrip('.-')}.{digest}",
            "namespace": resource.key.namespace,
        },
        "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": CONTROLLER,
        "reportingInstance": instance[:128],
        "action": "Reconcile",
        "reason": event.reason,
        "note": note,
        "type": event.type,
        "regarding": {
            "apiVersion": type.api_version,
            "kind": type.kind,
            "namespace": resource.key.namespace,
            "name": resource.key.name,
            "uid": resource.uid,
            "resourceVersion": resource.resource_version,
        },
    }
