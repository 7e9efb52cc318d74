"""Reconciler of kind Namespace: Secrets, then stores, then brokers, then what a bus takes while it
runs.

Each look goes as far as it gets and shows all that it found. Whatever is missing wakes the resource
when it appears; a look that is not whole is also repeated after a while, for what no watch reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from postbus.client.control import RequestRefused
from postbus.contract.entities import check_namespace_name
from postbus.contract.namespace import NamespaceDefinition
from postbus.contract.resources import NamespaceSpec
from postbus_operator.bus.broker_health import readiness_trouble
from postbus_operator.bus.control_client import BusControl
from postbus_operator.bus.session import BusSession
from postbus_operator.bus.synced_keys import KeysResult
from postbus_operator.children import desired
from postbus_operator.children.broker import environment_problem
from postbus_operator.children.bus import BROKER, METRICS_PORT, STORE, Bus, Platform
from postbus_operator.children.quantities import canonical_quantity, quantity_value
from postbus_operator.children.store import CLAIM, claim_name
from postbus_operator.context import Context
from postbus_operator.finalizers import is_held, is_left
from postbus_operator.keys.leaving import leave_secrets
from postbus_operator.keys.sync import sync_keys
from postbus_operator.kube.resource_types import (
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    PODS,
    STATEFUL_SETS,
    VOLUME_CLAIMS,
)
from postbus_operator.namespaces.bus_secrets import Settled, ensure_secrets
from postbus_operator.namespaces.child_writer import ChildWriter
from postbus_operator.namespaces.deletion import adopt_data, release
from postbus_operator.namespaces.status import Look, Trouble, Verdict, namespace_status
from postbus_operator.namespaces.workloads import claim_size, observed_workload, pod_trouble
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable, Event, Outcome, StillConnecting
from postbus_operator.status import NamespaceStatus

STARTING_S: Final = 2.0
"""Shortest pause while brokers start. Our choice: their StatefulSets wake the resource, reasons of
pods that do not start are read by this look."""

PATIENCE: Final = 0.2
"""Pause as part of the time in which the bus has not been ready."""

WAITING_S: Final = 30.0
"""Pause while a person or another object is waited for, which wake the resource."""

RUN_TIME: Final = (
    "minimum_tls_version",
    "public_network_access",
    "tags",
    "soft_delete",
)
"""Fields that a running bus takes over the control API, besides its tier."""


class NamespaceReconciler:
    """Looks at resources of kind Namespace."""

    def __init__(self) -> None:
        self._secrets = Settled()
        self._children = Settled()

    async def __call__(self, context: Context, resource: Resource) -> Outcome:
        """Look once."""
        if is_left(resource):
            await leave_secrets(context, resource)
        if resource.is_deleting:
            self._secrets.drop(resource.key)
            self._children.drop(resource.key)
            return await release(context, resource)
        look = Look(resource, context.now())
        spec = _parsed(look)
        if spec is not None:
            look.bus = _bus(context, resource, spec)
            look.verdict = look.verdict or _verdict(look.bus)
            await self._reconcile(context, look, look.bus)
        keys = look.keys or KeysResult()
        pauses = [keys.retry_s, None if look.is_whole else _pause(look)]
        status = namespace_status(look)
        return Outcome(
            status,
            is_held(resource),
            retry_s=min((each for each in pauses if each is not None), default=None),
            events=(*keys.events, *_events(resource, status)),
        )

    async def _reconcile(self, context: Context, look: Look, bus: Bus) -> None:
        policy = bus.spec.operator_spec.reconcile_policy
        can_write = not look.resource.is_paused
        is_fatal = look.verdict is not None and look.verdict.stalls_as == FATAL
        if can_write and not is_fatal:
            writer = ChildWriter(context, bus, look, is_observing=policy == "Observe")
            is_adopted = await adopt_data(context, bus, look, writer)
            if is_adopted:
                is_complete = await ensure_secrets(context, bus, look, writer, self._secrets)
                await self._put_children(context, bus, look, writer, is_complete=is_complete)
                await _grow(context, bus, writer)
        await _observe(context, bus, look)
        await _ask_the_bus(context, bus, look, can_write=can_write and policy != "Observe")

    async def _put_children(
        self, context: Context, bus: Bus, look: Look, writer: ChildWriter, *, is_complete: bool
    ) -> None:
        """Apply all objects, unless the last time nothing was left to do with these versions."""
        versions = _versions(context, bus, look, is_complete=is_complete)
        if self._children.holds(bus.key, versions, context.now()):
            return
        troubles = len(look.troubles)
        await _put_children(context, bus, writer, is_complete=is_complete)
        if len(look.troubles) == troubles and not look.differing:
            # A write makes other versions than these, and another look.
            self._children.keep(bus.key, versions, context.now())
        else:
            self._children.drop(bus.key)


reconcile_namespace: Final = NamespaceReconciler()

FATAL: Final = "InvalidSpec"
"""Specs with this reason of Stalled change nothing; with others the rest of them is applied."""


# --- the spec -----------------------------------------------------------------------------------


def _parsed(look: Look) -> NamespaceSpec | None:
    """Return the spec; note why it is none. A newer version of the definition may accept more."""
    try:
        return NamespaceSpec.model_validate(look.resource.spec)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(each) for each in problem["loc"])
        message = str(problem["msg"]).removeprefix("Value error, ")
        text = f"spec.{field}: {message}" if field else f"spec: {message}"
        is_version = problem["loc"][-2:] == ("managed", "version")
        look.verdict = (
            Verdict("VersionUnsupported", text, "VersionUnsupported")
            if is_version
            else Verdict("InvalidSpec", text)
        )
        return None


def _verdict(bus: Bus) -> Verdict | None:
    """Return what is wrong with a spec that no rule of the API server can see."""
    operator = bus.spec.operator_spec
    try:
        check_namespace_name(bus.bus_name)
    except ValueError as error:
        return Verdict("InvalidSpec", f"{error}: create another Namespace with spec.entityName")
    problem = environment_problem(operator.pod_template)
    if problem is not None:
        return Verdict("InvalidSpec", problem)
    if operator.brokers > 1:
        text = "several brokers are not there yet: set operatorSpec.brokers to 1"
        return Verdict("BrokersUnsupported", text, "BrokersUnsupported")
    if bus.spec.zone_redundant:
        text = (
            "zone redundancy needs two brokers, and several brokers are not there yet: set"
            " zoneRedundant to false"
        )
        return Verdict("ZonesUnsupported", text, "ZonesUnsupported")
    return None


def _bus(context: Context, resource: Resource, spec: NamespaceSpec) -> Bus:
    settings = context.settings
    platform = Platform(
        settings.image,
        settings.store_image,
        settings.image_pull_policy,
        settings.cluster_domain,
        settings.own_namespace,
    )
    bus = Bus(resource.key, resource.uid, spec, platform)
    sizes = {}
    for store in bus.managed:
        found = context.cache.find(STATEFUL_SETS, resource.key.namespace, bus.store(store.name))
        size = None if found is None else claim_size(found, CLAIM)
        if size is not None:
            sizes[store.name] = size
    return Bus(resource.key, resource.uid, spec, platform, sizes)


# --- objects ------------------------------------------------------------------------------------


def _versions(context: Context, bus: Bus, look: Look, *, is_complete: bool) -> object:
    """Return what the objects follow from, and those that are there."""
    found = context.cache.children_of(bus.key.namespace, bus.name)
    return (
        (look.resource.uid, look.resource.generation, bus.platform, bus.claim_sizes, is_complete),
        [(each["kind"], each["metadata"]["resourceVersion"]) for each in found],
    )


async def _put_children(
    context: Context, bus: Bus, writer: ChildWriter, *, is_complete: bool
) -> None:
    """Apply all objects; brokers only when they can start, or when they exist already."""
    find, namespace = context.cache.find, bus.key.namespace
    brokers = bus.child("broker")
    can_start = is_complete or find(STATEFUL_SETS, namespace, brokers) is not None
    wanted = desired(bus)
    for each in wanted:
        is_broker = each["kind"] == STATEFUL_SETS.kind and each["metadata"]["name"] == brokers
        if can_start or not is_broker:
            await writer.put(each)
    names = {(each["kind"], each["metadata"]["name"]) for each in wanted}
    for type, name in (
        (DISRUPTION_BUDGETS, brokers),
        (NETWORK_POLICIES, f"{bus.name}-{BROKER}"),
        (NETWORK_POLICIES, f"{bus.name}-{STORE}"),
    ):
        if (type.kind, name) not in names:
            await writer.remove(type, name)


async def _grow(context: Context, bus: Bus, writer: ChildWriter) -> None:
    """Enlarge the volumes of stores: the template of a StatefulSet cannot be changed."""
    for store in bus.managed:
        assert store.managed is not None
        name = claim_name(bus, store)
        claim = context.cache.find(VOLUME_CLAIMS, bus.key.namespace, name)
        if claim is None:
            continue
        asked = claim["spec"]["resources"]["requests"]["storage"]
        if quantity_value(store.managed.size) > quantity_value(asked):
            size = canonical_quantity(store.managed.size)
            change = {"spec": {"resources": {"requests": {"storage": size}}}}
            advice = (
                f"the volume keeps {asked}; set the former size, or use a storage class with"
                " allowVolumeExpansion in another Namespace"
            )
            await writer.patch(VOLUME_CLAIMS, name, change, "storage", advice)


async def _observe(context: Context, bus: Bus, look: Look) -> None:
    """Note the state of pods and volumes; pods are read only while one of them is not ready."""
    find, namespace = context.cache.find, bus.key.namespace
    for store in bus.managed:
        found = find(STATEFUL_SETS, namespace, bus.store(store.name))
        if found is None:
            continue
        workload = observed_workload(found)
        look.stores.append(workload)
        if not workload.is_ready and not look.store_trouble:
            look.store_trouble = await _store_trouble(context, bus, claim_name(bus, store))
    found = find(STATEFUL_SETS, namespace, bus.child("broker"))
    if found is not None:
        look.broker = observed_workload(found)
        if look.broker.ready < look.broker.wanted:
            look.broker_trouble = pod_trouble(await _pods(context, bus, BROKER))
            if look.broker_trouble is None:
                look.readiness_trouble = await readiness_trouble(_health_url(context, bus))


def _health_url(context: Context, bus: Bus) -> str:
    """Return the address of `/readyz` of the first broker."""
    if context.health_url is not None:
        return context.health_url(bus.key)
    brokers = bus.child("brokers")
    return f"http://{bus.host(f'{bus.child(BROKER)}-0.{brokers}')}:{METRICS_PORT}/readyz"


async def _store_trouble(context: Context, bus: Bus, claim: str) -> str:
    trouble = pod_trouble(await _pods(context, bus, STORE))
    volume = context.cache.find(VOLUME_CLAIMS, bus.key.namespace, claim)
    if volume is not None and volume.get("status", {}).get("phase") == "Pending":
        named = volume["spec"].get("storageClassName")
        advice = (
            f"see `kubectl describe pvc {claim}`"
            if named
            else "set storageClassName, or make a storage class the default"
        )
        if trouble is None or "PersistentVolumeClaim" in trouble.text:
            return f"PersistentVolumeClaim {claim} is Pending: {advice}"
    return "" if trouble is None else trouble.text


async def _pods(context: Context, bus: Bus, component: str) -> list[Mapping[str, Any]]:
    labels = ",".join(f"{name}={value}" for name, value in bus.labels(component).items())
    return [each async for each in context.api.list(PODS, bus.key.namespace, labels=labels)]


# --- the bus ------------------------------------------------------------------------------------


async def _ask_the_bus(context: Context, bus: Bus, look: Look, *, can_write: bool) -> None:
    """Read the status of the bus, and tell it what it takes while it runs."""
    if look.broker is None or look.broker.ready == 0:
        return
    session: BusSession | None = await context.buses.of(look.resource)
    if session is None:
        failure = context.buses.failure_of(look.resource)
        if look.was_ready and isinstance(failure, StillConnecting):
            raise failure
        look.bus_trouble = str(failure)
        return
    try:
        look.bus_status = await session.control.status()
        look.description = await session.control.description()
    except (BackendUnavailable, RequestRefused) as error:
        look.bus_status = None
        look.bus_trouble = str(error)
        return
    if bus.spec.operator_spec.brokers > look.description.partition_count:
        count = look.description.partition_count
        text = f"operatorSpec.brokers: at most one a partition, here {count}"
        look.verdict = Verdict("BrokersUnsupported", text, "BrokersUnsupported")
    wanted = definition(bus.spec)
    if not can_write:
        return
    try:
        if look.description.is_closed:
            await _open_bus(look, session.control)
        if differs(wanted, look.description.properties):
            await _change_bus(look, session.control, wanted)
        look.keys = await sync_keys(context, session, look.resource, look.resource)
    except BackendUnavailable as error:
        look.troubles.append(Trouble("bus", "BackendUnavailable", str(error), is_stalled=False))


async def _open_bus(look: Look, control: BusControl) -> None:
    """Let a bus accept messages that the deletion of a former resource has closed."""
    try:
        await control.ask("POST", "/v1/namespace/open")
    except RequestRefused as error:
        text = f"the bus is closed and cannot be opened: {error.detail}"
        look.troubles.append(Trouble("bus", "Closed", text, is_stalled=True))


async def _change_bus(look: Look, control: BusControl, wanted: NamespaceDefinition) -> None:
    """Tell a bus what it takes while it runs; other fields and rules stay."""
    body = wanted.model_dump(mode="json", by_alias=True, exclude_unset=True)
    try:
        await control.ask("PUT", "/v1/namespace", body)
    except RequestRefused as error:
        look.verdict = look.verdict or Verdict("SkuUnsupported", error.detail, "SkuUnsupported")


def definition(spec: NamespaceSpec) -> NamespaceDefinition:
    """Return what a running bus takes: tier, TLS, tags, retention."""
    said = spec.model_dump(by_alias=True, include=set(RUN_TIME))
    sku = {"name": spec.sku.name, "capacity": spec.sku.capacity}
    said["sku"] = {name: value for name, value in sku.items() if value is not None}
    retention = spec.operator_spec.soft_delete.model_dump(by_alias=True)
    said["softDelete"] = retention
    return NamespaceDefinition.model_validate(said)


def differs(wanted: NamespaceDefinition, found: NamespaceDefinition) -> bool:
    """Return whether a bus has to be told."""
    is_sku = (wanted.sku.name, wanted.sku.capacity) == (found.sku.name, found.sku.capacity)
    return not is_sku or any(getattr(wanted, each) != getattr(found, each) for each in RUN_TIME)


def _events(resource: Resource, status: NamespaceStatus) -> list[Event]:
    """Return an Event if a person is needed for something that was not said before."""
    said = [each["message"] for each in resource.status.get("conditions", ())]
    return [
        Event("Warning", each.reason, each.message)
        for each in status.conditions
        if each.type == "Stalled" and each.message not in said
    ]


def _pause(look: Look) -> float | None:
    """Return seconds until the next look at a bus that is not whole."""
    is_settled = look.verdict is not None or any(each.is_stalled for each in look.troubles)
    if look.broker is None or (is_settled and look.bus_status is not None):
        return WAITING_S
    conditions = look.resource.status.get("conditions", ())
    since = [each["lastTransitionTime"] for each in conditions if each["type"] == "Ready"]
    begun = datetime.fromisoformat(since[0]) if since else look.now
    waited_s = (look.now - begun).total_seconds()
    return min(WAITING_S, max(STARTING_S, PATIENCE * waited_s))
