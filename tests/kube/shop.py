"""A cluster namespace with a bus on a real API server, and a real broker behind the bus."""

from __future__ import annotations

import base64
import uuid
from typing import Any, Final

from postbus_operator.annotations import BUS_LABEL, WATCH_LABEL
from postbus_operator.bus.session import Periods
from postbus_operator.kube.resource_types import EVENTS, RESOURCES, SECRETS
from tests.edge.control.control_bus import ControlledBus
from tests.kube.api_server import ApiError, ApiServer
from tests.kube.operator_run import make

PERIODS: Final = Periods(wait_s=1, counts_s=0.5, groups_s=2.0, outage_s=0.5, pause_s=0.1)
MERGE: Final = "application/merge-patch+json"


class Shop:
    """A cluster namespace with a bus; entities have its name before their own on the bus."""

    def __init__(self, server: ApiServer, running: ControlledBus) -> None:
        self.server = server
        self.running = running
        self.name = f"shop-{uuid.uuid4().hex[:8]}"
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.name}})
        token = base64.b64encode(running.caller.token.encode()).decode()
        labels = {BUS_LABEL: "bus", WATCH_LABEL: "true"}
        metadata = {"name": "bus-control-token", "labels": labels}
        secret = {"metadata": metadata, "data": {"token": token}}
        server.request("POST", SECRETS.path(self.name), secret)

    def make(self, kind: str, name: str, **spec: Any) -> None:
        if kind in ("Queue", "Topic"):
            spec = {"entityName": self.entity(name)} | spec
        make(self.server, kind, name, self.name, spec=spec)

    def entity(self, name: str) -> str:
        return f"{self.name}.{name}"

    def delete(self, kind: str, name: str) -> None:
        self.server.request("DELETE", RESOURCES[kind].path(self.name, name))

    def change(self, kind: str, name: str, **parts: Any) -> None:
        path = RESOURCES[kind].path(self.name, name)
        self.server.request("PATCH", path, parts, MERGE)

    def get(self, kind: str, name: str) -> Any:
        return self.server.request("GET", RESOURCES[kind].path(self.name, name))

    def condition(self, kind: str, name: str, type: str = "Ready") -> tuple[str, str]:
        for each in self.get(kind, name).get("status", {}).get("conditions", ()):
            if each["type"] == type:
                return each["status"], each["reason"]
        return "", ""

    def is_ready(self, kind: str, name: str) -> bool:
        return self.condition(kind, name) == ("True", "Ready")

    def is_gone(self, kind: str, name: str) -> bool:
        try:
            self.get(kind, name)
        except ApiError as error:
            return error.status == 404
        return False

    def events(self) -> list[Any]:
        items: list[Any] = self.server.request("GET", EVENTS.path(self.name))["items"]
        return items
