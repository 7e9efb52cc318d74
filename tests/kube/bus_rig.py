"""The operator's part for buses on a real API server: one look at a time, no watches.

Controllers, nodes and brokers are missing: a test writes the status of StatefulSets itself, and
`session` stands for a broker, which a test may run on this machine.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from postbus_operator.bus.control_client import BusControl
from postbus_operator.bus.session import BusSession
from postbus_operator.context import Context
from postbus_operator.kube.api import Api
from postbus_operator.kube.cache import Cache
from postbus_operator.kube.connection import api_client
from postbus_operator.kube.resource_types import (
    RESOURCES,
    SECRETS,
    STATEFUL_SETS,
    VOLUME_CLAIMS,
    ResourceType,
)
from postbus_operator.kube.watches import watched_types
from postbus_operator.namespaces.reconciler import NamespaceReconciler
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import BackendUnavailable, Outcome
from postbus_operator.settings import Settings
from tests.edge.control.control_bus import ControlledBus
from tests.kube.api_server import ApiError, ApiServer
from tests.kube.clients import Calls, configuration_of
from tests.operator.live_bus import control_of

Json = dict[str, Any]
NUMBERS = itertools.count(1)
WRITES = {"apply", "create", "patch", "update", "delete"}
MERGE = "application/merge-patch+json"


@dataclass
class Sessions:
    """The session of every bus; None: it does not answer."""

    session: BusSession | None = None

    async def of(self, _bus: Resource) -> Any:
        return self.session

    def answering(self, _bus: Resource) -> Any:
        return self.session

    def failure_of(self, _bus: Resource) -> BackendUnavailable:
        return BackendUnavailable("no answer")


@dataclass
class Rig:
    """A cluster namespace, and the operator's look at it."""

    server: ApiServer
    calls: Calls
    namespace: str
    sessions: Sessions = field(default_factory=Sessions)
    cache: Cache = field(default_factory=Cache)
    reconciler: NamespaceReconciler = field(default_factory=NamespaceReconciler)
    later: timedelta = timedelta()
    outcome: Outcome | None = None
    requests: list[str] = field(default_factory=list)
    """The operator's requests in its last look, by verb."""
    health_url: Callable[[Key], str] = lambda key: "http://127.0.0.1:9/readyz"
    controls: list[BusControl] = field(default_factory=list)
    api: Api = field(init=False)

    @property
    def now(self) -> datetime:
        """The operator's time: that of the API server, moved by `later`."""
        return datetime.now(UTC) + self.later

    @property
    def writes(self) -> list[str]:
        """The requests that write."""
        return [verb for verb in self.requests if verb in WRITES]

    @property
    def context(self) -> Context:
        settings = Settings(image="postbus:dev", store_image="postbus-store:dev")
        return Context(
            settings=settings,
            api=self.api,
            cache=self.cache,
            buses=self.sessions,
            epoch=1,
            now=lambda: self.now,
            wake=lambda key, seconds: None,
            health_url=self.health_url,
        )

    def session_with(self, running: ControlledBus) -> BusSession:
        """Return a session with a bus on this machine; it follows no feed."""
        session = BusSession(control_of(running), lambda paths: None)
        self.controls.append(session.control)
        return session

    # --- what users and controllers do ----------------------------------------------------------

    async def put(self, spec: Json, name: str = "shop-bus", **annotations: str) -> None:
        wanted = {
            "apiVersion": "postbus.dev/v1alpha1",
            "kind": "Namespace",
            "metadata": {"name": name, "annotations": annotations},
            "spec": spec,
        }
        path = RESOURCES["Namespace"].path(self.namespace, name)
        await asyncio.to_thread(self.server.apply, path, wanted)

    async def put_secret(self, name: str, **data: bytes) -> None:
        wanted = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "data": {
                each.replace("_", "."): base64.b64encode(value).decode()
                for each, value in data.items()
            },
        }
        await asyncio.to_thread(self.server.apply, SECRETS.path(self.namespace, name), wanted)

    async def request(self, method: str, type: ResourceType, name: str, body: Any = None) -> Any:
        path = type.path(self.namespace, *name.split("/"))
        return await asyncio.to_thread(self.server.request, method, path, body, MERGE)

    async def delete(self, type: ResourceType, name: str) -> None:
        path = type.path(self.namespace, name)
        await asyncio.to_thread(self.server.request, "DELETE", path)

    async def get(self, type: ResourceType, name: str) -> Json | None:
        try:
            found: Json = await self.request("GET", type, name)
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        return found

    async def data_of(self, name: str) -> dict[str, bytes]:
        found = await self.get(SECRETS, name)
        assert found is not None, name
        return {each: base64.b64decode(value) for each, value in found["data"].items()}

    async def is_ready(self, *stateful_sets: str) -> None:
        """Say what the controller and the nodes would say of pods that run."""
        for name in stateful_sets:
            found = await self.get(STATEFUL_SETS, name)
            assert found is not None, name
            status = {
                "replicas": 1,
                "readyReplicas": 1,
                "currentRevision": "a",
                "updateRevision": "a",
                "observedGeneration": found["metadata"]["generation"],
            }
            await self.request("PATCH", STATEFUL_SETS, f"{name}/status", {"status": status})

    async def make_claim(self, name: str, size: str, storage_class: str | None = None) -> None:
        """Make the claim that the controller makes of a template."""
        stateful_set = await self.get(STATEFUL_SETS, name)
        assert stateful_set is not None
        (template,) = stateful_set["spec"]["volumeClaimTemplates"]
        spec = {**template["spec"], "resources": {"requests": {"storage": size}}}
        if storage_class is not None:
            spec["storageClassName"] = storage_class
        wanted = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": f"data-{name}-0", "labels": template["metadata"]["labels"]},
            "spec": spec,
        }
        path = VOLUME_CLAIMS.path(self.namespace)
        await asyncio.to_thread(self.server.request, "POST", path, wanted)

    # --- what the operator does -----------------------------------------------------------------

    async def see(self) -> None:
        """Read everything, as watches would have shown it."""
        self.cache = Cache()
        for type, labels in watched_types(is_cluster_wide=False).items():
            async for each in self.api.list(type, self.namespace, labels=labels):
                self.cache.observe(each)

    async def look(self, name: str = "shop-bus") -> Outcome:
        """Look once at a Namespace, and write the status, as the worker does."""
        await self.see()
        resource = self.cache.get(Key("Namespace", self.namespace, name))
        assert resource is not None
        self.calls.answers.clear()
        outcome = await self.reconciler(self.context, resource)
        self.outcome = outcome
        self.requests = [verb for verb, _ in self.calls.answers]
        type = RESOURCES["Namespace"]
        if resource.has_finalizer != outcome.has_finalizer:
            finalizers = ["postbus.dev/finalizer"] if outcome.has_finalizer else []
            change: Json = {"metadata": {"finalizers": finalizers}}
            await self.request("PATCH", type, name, change)
        if outcome.status is not None:
            said = outcome.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            await self.request("PATCH", type, f"{name}/status", {"status": said})
        await self.see()
        return outcome

    def condition(self, type: str) -> tuple[str, str, str] | None:
        """Return status, reason and message."""
        assert self.outcome is not None
        assert self.outcome.status is not None
        for each in self.outcome.status.conditions:
            if each.type == type:
                return each.status, each.reason, each.message
        return None


@asynccontextmanager
async def rig_on(server: ApiServer, monkeypatch: Any) -> AsyncIterator[Rig]:
    """A rig in a cluster namespace of its own."""
    namespace = f"bus-{next(NUMBERS)}"
    wanted = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    await asyncio.to_thread(server.apply, f"/api/v1/namespaces/{namespace}", wanted)
    configuration = await configuration_of(server, monkeypatch)
    calls = Calls()
    async with api_client(configuration) as client:
        rig = Rig(server, calls, namespace)
        rig.api = Api(
            client, on_answer=calls.answered, on_object=lambda found: rig.cache.observe(found)
        )
        try:
            yield rig
        finally:
            for each in rig.controls:
                await each.close()
