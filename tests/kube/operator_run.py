"""The operator's work as the leader, in the process of the test, with reconcilers of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kubernetes.aio.client import Configuration

from postbus_operator.context import Buses, Context, Reconciler, StillLeads
from postbus_operator.kube.resource_types import RESOURCES
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, Outcome
from postbus_operator.running.health import Health
from postbus_operator.running.leading import Parts, lead
from postbus_operator.running.metrics import Metrics
from postbus_operator.settings import Settings
from tests.kube.api_server import ApiError, ApiServer
from tests.operator.live_bus import leads

WAIT_S = 90.0


class NoBuses:
    """Sessions of an operator without buses."""

    async def of(self, bus: Resource) -> None:
        """Return none."""

    async def close(self) -> None:
        """Do nothing."""

    def answering(self, bus: Resource) -> None:
        """Return none."""

    def failure_of(self, bus: Resource) -> BackendUnavailable:
        return BackendUnavailable("there are no buses")


@dataclass
class Run:
    """A leader at work."""

    task: asyncio.Task[None]
    health: Health
    metrics: Metrics
    looks: list[Resource] = field(default_factory=list)

    def value(self, name: str, **labels: str) -> float:
        """Return a metric."""
        found = self.metrics._registry.get_sample_value(f"postbus_operator_{name}", labels)
        assert found is not None, name
        return found

    def looked_at(self, name: str) -> int:
        return sum(each.key.name == name for each in self.looks)


async def eventually(check: Callable[[], Any], what: str = "") -> Any:
    """Return what a check returns once it is true."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            found = check()
        except (ApiError, LookupError):
            found = None
        if found:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {WAIT_S:g} s: {what or check}")


@asynccontextmanager
async def leading(
    configuration: Configuration,
    reconcilers: Mapping[str, Reconciler] | None = None,
    *,
    open_sessions: Callable[..., Buses] = lambda *_, **__: NoBuses(),
    control_url: Callable[[Resource], str] | None = None,
    epoch: int = 1,
    still_leads: StillLeads = leads,
    **settings: Any,
) -> AsyncIterator[Run]:
    """Lead until the context ends. Kinds without a reconciler are looked at, nothing more."""
    health, metrics = Health(), Metrics()
    looks: list[Resource] = []

    def counted(reconciler: Reconciler) -> Reconciler:
        async def count(context: Context, resource: Resource) -> Outcome:
            looks.append(resource)
            return await reconciler(context, resource)

        return count

    async def nothing(context: Context, resource: Resource) -> Outcome:
        return Outcome(None, has_finalizer=resource.has_finalizer and not resource.is_deleting)

    chosen = dict.fromkeys(RESOURCES, nothing) | dict(reconcilers or {})
    parts = Parts(
        settings=Settings(**({"resync_s": 3_600} | settings)),
        configuration=configuration,
        identity="test",
        reconcilers={kind: counted(each) for kind, each in chosen.items()},
        open_sessions=open_sessions,
        child_name=lambda name: name,
        metrics=metrics,
        health=health,
        control_url=control_url,
    )
    started = asyncio.Event()
    task = asyncio.create_task(lead(parts, epoch, still_leads, started.set))
    run = Run(task, health, metrics, looks)
    try:
        await eventually(lambda: task.done() or (health.watches and health.watches.is_complete))
        if task.done():
            task.result()
        yield run
    finally:
        task.cancel()
        await asyncio.wait({task})


def make(server: ApiServer, kind: str, name: str, /, namespace: str, **parts: Any) -> Any:
    """Create a resource; `parts` are fields of it, `spec` is completed."""
    spec = parts.pop("spec", {})
    if kind == "Namespace":
        spec = {"sku": {"name": "Standard"}, "entityName": f"{name[:40]}-of-tests"} | spec
    else:
        spec = {"owner": {"name": "bus"}} | spec
    type = RESOURCES[kind]
    metadata = {"name": name, "namespace": namespace} | parts.pop("metadata", {})
    wanted = {"apiVersion": type.api_version, "kind": kind, "metadata": metadata, "spec": spec}
    return server.request("POST", type.path(namespace), wanted | parts)
