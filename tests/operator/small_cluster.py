"""Resources without an API server, reconciled against a real broker.

What the API server does to a custom resource is done here by hand: defaults, generations, versions,
deletion with finalizers. Every change wakes every resource: reconciles are level-triggered.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from postbus_operator.annotations import FINALIZER
from postbus_operator.bus.control_client import Access
from postbus_operator.bus.session import BusSessions, Periods
from postbus_operator.context import Context
from postbus_operator.crdgen import schema_of
from postbus_operator.crds import KINDS
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.finalizers import is_held
from postbus_operator.kube.api import Api, NotFound
from postbus_operator.kube.cache import Cache
from postbus_operator.kube.resource_types import ResourceType
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import BackendUnavailable, Event, Outcome
from postbus_operator.settings import Settings
from tests.edge.control.control_bus import ControlledBus
from tests.operator.health import check_health
from tests.operator.live_bus import access_to, leads
from tests.operator.objects import condition

NAMESPACE = "shop"
SCHEMAS = {kind.name: schema_of(kind) for kind in KINDS}
PERIODS = Periods(wait_s=1, counts_s=0.2, outage_s=0.3, pause_s=0.05)
SETTLE_S = 30.0
UIDS = itertools.count(9999, -1)  # falling: nothing may depend on newer ones being larger
SETTINGS = Settings()


def with_defaults(schema: Mapping[str, Any], value: Any) -> Any:
    """Return a value with the defaults of its schema, as the API server writes them."""
    if isinstance(value, dict) and "properties" in schema:
        made = dict(value)
        for name, field in schema["properties"].items():
            if name not in made and "default" in field:
                made[name] = copy.deepcopy(field["default"])
            if name in made:
                made[name] = with_defaults(field, made[name])
        return made
    if isinstance(value, list):
        return [with_defaults(schema["items"], each) for each in value]
    return value


class NoObjects:
    """An API server that has nothing but the resources of the test."""

    def __init__(self) -> None:
        self.patched: list[str] = []
        self.deleted: list[str] = []

    async def get(self, type: ResourceType, namespace: str, name: str) -> Any:
        raise NotFound(404, "NotFound", f"there is no {type.kind} {namespace}/{name}")

    async def patch(self, type: ResourceType, namespace: str, name: str, change: Any) -> None:
        """Note the name of an object that only the cache has."""
        self.patched.append(name)

    async def delete(self, type: ResourceType, namespace: str, name: str, *, uid: str) -> None:
        self.deleted.append(name)


class SmallCluster:
    """Resources by key, and what their reconciles decided."""

    def __init__(self, running: ControlledBus | None, buses: Any = None) -> None:
        """`buses`: sessions in place of those with a running bus."""
        self._running = running
        self.cache = Cache()
        self.api = NoObjects()
        self.events: list[tuple[str, Event]] = []
        self.outcomes: dict[Key, Outcome] = {}
        """The last one of each resource."""

        self.status_writes = 0
        self.labels: dict[str, dict[str, str]] = {}
        self._objects: dict[Key, dict[str, Any]] = {}
        self._version = 0
        self._woken = asyncio.Event()
        self.now = datetime(2026, 11, 23, 9, 0, tzinfo=UTC)
        self.buses: Any = self._sessions() if buses is None else buses
        self.bus = self.apply("Namespace", "bus")

    @property
    def running(self) -> ControlledBus:
        assert self._running is not None
        return self._running

    def _sessions(self) -> BusSessions:
        def moved(bus: Resource, paths: object) -> None:
            self._woken.set()

        return BusSessions(self._read_access, 1, leads, self._is_current, moved, PERIODS)

    async def _read_access(self, bus: Resource) -> Access:
        return access_to(self.running)

    def _is_current(self, bus: Resource) -> bool:
        found = self.cache.get(bus.key)
        return found is not None and found.uid == bus.uid

    async def restart_operator(self) -> None:
        """Forget everything that is not in the objects."""
        await self.buses.close()
        self.buses = self._sessions()

    # --- objects --------------------------------------------------------------------------------

    def apply(
        self,
        kind: str,
        name: str,
        *,
        owner: str = "bus",
        owner_namespace: str = "",
        namespace: str = NAMESPACE,
        annotations: Mapping[str, str] = {},
        labels: Mapping[str, str] = {},
        **spec: Any,
    ) -> Key:
        """Create a resource or replace its spec."""
        key = Key(kind, namespace, name)
        if kind != "Namespace":
            above = {"name": owner} | ({"namespace": owner_namespace} if owner_namespace else {})
            spec = {"owner": above} | spec
        wanted = with_defaults(SCHEMAS[kind]["properties"]["spec"], spec)
        known = self._objects.get(key)
        self.now += timedelta(seconds=1)
        if known is None:
            metadata: dict[str, Any] = {
                "name": name,
                "namespace": namespace,
                "uid": f"00000000-{next(UIDS):04}",
                "generation": 1,
                "creationTimestamp": self.now.isoformat(),
            }
            known = {"apiVersion": "postbus.dev/v1alpha1", "kind": kind, "metadata": metadata}
        found = copy.deepcopy(known)
        if found.get("spec", wanted) != wanted:
            found["metadata"]["generation"] += 1
        found["spec"] = wanted
        if annotations:
            found["metadata"]["annotations"] = dict(annotations)
        if labels:
            found["metadata"]["labels"] = dict(labels)
        self._store(key, found)
        return key

    def annotate(self, key: Key, **annotations: str) -> None:
        found = copy.deepcopy(self._objects[key])
        known = found["metadata"].setdefault("annotations", {})
        known |= {
            f"postbus.dev/{name.replace('_', '-')}": each for name, each in annotations.items()
        }
        self._store(key, found)

    def show(self, key: Key, *conditions: tuple[str, str, str, str]) -> None:
        """Set the conditions of a resource that nobody reconciles here, such as the bus."""
        found = copy.deepcopy(self._objects[key])
        found["status"] = {"conditions": [condition(*each) for each in conditions]}
        self._store(key, found)

    def lose_status(self, key: Key) -> None:
        found = copy.deepcopy(self._objects[key])
        found.pop("status", None)
        self._store(key, found)

    def delete(self, key: Key) -> None:
        """Delete a resource as a user does; it goes when its finalizer does."""
        found = copy.deepcopy(self._objects[key])
        found["metadata"].setdefault("deletionTimestamp", self.now.isoformat())
        self._store(key, found)
        self._collect(key)

    def exists(self, key: Key) -> bool:
        return key in self._objects

    def get(self, key: Key) -> Resource:
        found = self.cache.get(key)
        assert found is not None, key
        return found

    def condition(self, key: Key, type: str) -> tuple[str, str]:
        """Return status and reason of a condition; empty if it is not there."""
        conditions = self.get(key).status.get("conditions", ())
        found = {each["type"]: (each["status"], each["reason"]) for each in conditions}
        return found.get(type, ("", ""))

    def message(self, key: Key, type: str) -> str:
        conditions = self.get(key).status.get("conditions", ())
        return next(each["message"] for each in conditions if each["type"] == type)

    def reasons(self) -> list[str]:
        return [event.reason for _, event in self.events]

    def _store(self, key: Key, found: dict[str, Any]) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = found
        self.cache.observe(copy.deepcopy(found))

    def _collect(self, key: Key) -> None:
        found = self._objects[key]
        if "deletionTimestamp" in found["metadata"] and not found["metadata"].get("finalizers"):
            self._version += 1
            found["metadata"]["resourceVersion"] = str(self._version)
            del self._objects[key]
            self.cache.forget(found)

    # --- reconciles -----------------------------------------------------------------------------

    def context(self) -> Context:
        return Context(
            settings=SETTINGS,
            api=cast(Api, self.api),
            cache=self.cache,
            buses=self.buses,
            epoch=1,
            now=lambda: self.now,
            wake=lambda key, delay: self._woken.set(),
        )

    async def look(self, key: Key) -> bool:
        """Look at a resource as the worker does; return whether something changed."""
        resource = self.get(key)
        if is_held(resource) and not resource.is_deleting and not resource.has_finalizer:
            self._patch(key, finalizers=[FINALIZER])
            resource = self.get(key)
        try:
            outcome = await reconcile_entity(self.context(), resource)
        except BackendUnavailable:
            return False
        self.events += [(key.name, event) for event in outcome.events]
        self.outcomes[key] = outcome
        return self._write(key, outcome)

    def _write(self, key: Key, outcome: Outcome) -> bool:
        before = self._version
        if outcome.status is not None:
            status = outcome.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            if status != self._objects[key].get("status"):
                self.status_writes += 1
                changed = copy.deepcopy(self._objects[key])
                self._store(key, changed | {"status": status})
                check_health(self._objects[key])
        if outcome.delete_resource:
            self.delete(key)
        if key in self._objects and not outcome.has_finalizer:
            if self._objects[key]["metadata"].get("finalizers"):
                self._patch(key, finalizers=[])
            self._collect(key)
        return self._version != before

    def _patch(self, key: Key, **metadata: Any) -> None:
        found = copy.deepcopy(self._objects[key])
        found["metadata"] |= metadata
        self._store(key, found)

    async def settle(self) -> int:
        """Look at everything until a whole pass changes nothing; return the number of passes."""
        passes = 0
        await self._wait_until_listed()
        async with asyncio.timeout(SETTLE_S):
            is_changed = True
            while is_changed:
                passes += 1
                changes = [
                    await self.look(key)
                    for key in list(self._objects)
                    if key.kind != "Namespace" and key in self._objects
                ]
                is_changed = any(changes)
        return passes

    async def _wait_until_listed(self) -> None:
        bus = self.cache.get(self.bus)
        if bus is None or bus.is_deleting:
            return
        async with asyncio.timeout(SETTLE_S):
            while (session := await self.buses.of(bus)) is None or session.trouble is not None:
                await asyncio.sleep(0.01)
            await session.catch_up()


@asynccontextmanager
async def small_cluster(running: ControlledBus) -> AsyncIterator[SmallCluster]:
    cluster = SmallCluster(running)
    try:
        yield cluster
    finally:
        await cluster.buses.close()
