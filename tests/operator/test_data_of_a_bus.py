"""Volumes and keys of a bus go when they are to go, and never else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from postbus_operator.children.bus import Bus
from postbus_operator.context import Context
from postbus_operator.entities.reconciler import reconcile_entity
from postbus_operator.kube.api import Api, Forbidden, NotFound
from postbus_operator.kube.cache import Cache, ObjectKey
from postbus_operator.kube.resource_types import ResourceType
from postbus_operator.namespaces.child_writer import ChildWriter
from postbus_operator.namespaces.deletion import PURGE_AT, adopt_data, release, sweep
from postbus_operator.namespaces.reconciler import NamespaceReconciler
from postbus_operator.namespaces.status import Look
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import BackendUnavailable
from postbus_operator.settings import Settings
from tests.operator.buses import bus_of
from tests.operator.objects import entity, key_secret, shown

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
BEFORE, AFTER = "2026-11-23T11:00:00Z", "2026-11-23T13:00:00Z"
KEY = Key("Namespace", "shop", "bus")


@dataclass
class Writes:
    """Notes deletions and changes."""

    cache: Cache = field(default_factory=Cache, compare=False)
    deleted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    patched: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    unwatched: list[dict[str, Any]] = field(default_factory=list)
    on_delete: Callable[[], object] = field(default=lambda: None, compare=False)

    async def delete(
        self, type: ResourceType, namespace: str, name: str, *, uid: str, version: str
    ) -> bool:
        assert (uid, version) == (f"uid-of-{name}", "1")
        if name in self.refused:
            raise Forbidden(403, "Forbidden", "an admission rule keeps it")
        self.on_delete()
        self.deleted.append(name)
        self.cache.drop(ObjectKey(type, namespace, name), 1)
        return True

    async def patch(self, _type: ResourceType, _namespace: str, name: str, _change: Any) -> None:
        if name in self.gone:
            raise NotFound(404, "NotFound", f"there is no {name}")
        self.patched.append(name)

    async def get(self, type: ResourceType, _namespace: str, name: str) -> dict[str, Any]:
        for each in self.unwatched:
            if (each["kind"], each["metadata"]["name"]) == (type.kind, name):
                return each
        raise NotFound(404, "NotFound", f"there is no {type.kind} {name}")


class Silence:
    """No bus answers."""

    async def of(self, _bus: Resource) -> None:
        return None

    def answering(self, _bus: Resource) -> None:
        return None

    def failure_of(self, _bus: Resource) -> BackendUnavailable:
        return BackendUnavailable("no answer")


def secret(name: str, purge_at: str | None = None, bus: str | None = "bus") -> dict[str, Any]:
    labels = {} if bus is None else {"postbus.dev/bus": bus}
    annotations = {} if purge_at is None else {PURGE_AT: purge_at}
    return shown("Secret", name, metadata={"labels": labels, "annotations": annotations})


def broker(owner: str, ready: int = 0) -> dict[str, Any]:
    reference = {
        "apiVersion": "postbus.dev/v1alpha1",
        "kind": "Namespace",
        "name": "bus",
        "uid": owner,
    }
    metadata = {"labels": {"postbus.dev/bus": "bus"}, "ownerReferences": [reference]}
    status = {"readyReplicas": ready, "replicas": 1}
    spec = {"replicas": 1}
    return shown("StatefulSet", "bus-broker", metadata=metadata, spec=spec, status=status)


def namespace(created: str, **metadata: Any) -> dict[str, Any]:
    return shown("Namespace", "bus", metadata={"creationTimestamp": created} | metadata)


def context_of(*objects: dict[str, Any]) -> tuple[Context, Writes]:
    writes = Writes()
    cache = writes.cache
    for each in objects:
        cache.observe(each)
    settings = Settings(image="postbus:dev", store_image="postbus-store:dev")
    made = Context(
        settings=settings,
        api=cast("Api", writes),
        cache=cache,
        buses=cast("Any", Silence()),
        epoch=1,
        now=lambda: NOON,
        wake=lambda key, seconds: None,
    )
    return made, writes


def resource_of(context: Context) -> Resource:
    found = context.cache.get(KEY)
    assert found is not None
    return found


async def adopt(context: Context) -> bool:
    look = Look(resource_of(context), NOON)
    bus: Bus = bus_of({}, "bus", "shop")
    return await adopt_data(context, bus, look, ChildWriter(context, bus, look, is_observing=False))


@pytest.mark.parametrize("text", ["", "soon", "2026-11-23", "2026-11-23T11:00:00", "1e9"])
async def test_a_time_that_somebody_wrote_ends_neither_the_data_nor_the_sweep(text: str) -> None:
    """Whoever may write a Secret in some namespace must not stop the operator of the cluster."""
    context, writes = context_of(secret("a-key", text), secret("bus-key", BEFORE))
    await sweep(context)
    assert writes.deleted == ["bus-key"]


def volume(name: str, bus: str, purge_at: str | None = BEFORE) -> dict[str, Any]:
    annotations = {} if purge_at is None else {PURGE_AT: purge_at}
    metadata = {"labels": {"postbus.dev/bus": bus}, "annotations": annotations}
    return shown("PersistentVolumeClaim", name, metadata=metadata)


async def test_what_cannot_be_deleted_keeps_its_keys_and_nothing_else() -> None:
    """Without its key a volume that stays could not be read by a new bus of the name."""
    objects = [
        each
        for bus in ("first", "other")
        for each in (secret(f"{bus}-key", BEFORE, bus), volume(f"data-{bus}", bus))
    ]
    context, writes = context_of(*objects)
    writes.refused = ["data-first"]
    await sweep(context)
    assert writes.deleted == ["data-other", "other-key"]
    writes.refused = []
    await sweep(context)
    assert writes.deleted[2:] == ["data-first", "first-key"]


async def test_a_volume_that_somebody_keeps_has_its_keys() -> None:
    """Who removes the annotation of the volume only wants to read it later."""
    context, writes = context_of(secret("bus-key", BEFORE), volume("data-bus", "bus", None))
    await sweep(context)
    assert writes.deleted == []


async def test_a_resource_that_comes_during_a_sweep_has_its_data() -> None:
    context, writes = context_of(volume("data-first", "first"), volume("data-bus", "bus"))
    writes.on_delete = lambda: context.cache.observe(namespace(AFTER))
    await sweep(context)
    assert writes.deleted == ["data-first"]


async def test_only_data_of_a_bus_is_swept() -> None:
    context, writes = context_of(secret("copy", BEFORE, bus=None), secret("later", AFTER))
    await sweep(context)
    assert writes.deleted == []


async def test_a_new_bus_starts_empty() -> None:
    asked = namespace(BEFORE, annotations={"postbus.dev/start-empty": "true"})
    for old in ((), (broker("uid-of-former"),)):
        context, writes = context_of(asked, secret("bus-sealing-key"), *old)
        assert not await adopt(context)
        assert writes.deleted == ["bus-sealing-key"]


async def test_a_bus_that_has_taken_over_data_keeps_it() -> None:
    """The annotation is for a new resource: on one in use it must not delete what is in use."""
    asked = namespace(BEFORE, annotations={"postbus.dev/start-empty": "true"})
    context, writes = context_of(asked, secret("bus-sealing-key"), broker("uid-of-bus"))
    assert await adopt(context)
    assert writes.deleted == []


@pytest.mark.parametrize(
    "policy",
    [{"deletionPolicy": "Retain"}, {"reconcilePolicy": "DetachOnDelete"}],
    ids=["retained", "detached"],
)
@pytest.mark.parametrize("is_going", [True, False], ids=["going", "living"])
async def test_secrets_of_keys_stay_also_if_the_bus_is_silent(
    policy: dict[str, str], is_going: bool
) -> None:
    """Nobody holds a resource back whose entity stays: its Secrets are let go before."""
    metadata = {"deletionTimestamp": "2026-11-23T12:00:00Z"} if is_going else {}
    queue = entity("Queue", "orders", operatorSpec=policy, metadata=metadata)
    secrets = (key_secret("Queue", "orders"), key_secret("Queue", "others"))
    context, writes = context_of(namespace(BEFORE), queue, *secrets)
    found = context.cache.get(Key("Queue", "shop", "orders"))
    assert found is not None
    with contextlib.suppress(BackendUnavailable):
        await reconcile_entity(context, found)
    assert writes.patched == ["orders-key"]


@pytest.mark.parametrize(
    "operator",
    [{"deletionPolicy": "Retain"}, {"reconcilePolicy": "DetachOnDelete"}, {}],
    ids=["retained", "detached", "silent"],
)
async def test_keys_of_a_bus_stay_with_its_data(operator: dict[str, Any]) -> None:
    asked = going()
    asked |= {"spec": {"operatorSpec": operator}, "status": {"version": "1.0.0"}}
    context, writes = context_of(asked, key_secret("Namespace", "bus"))
    outcome = await NamespaceReconciler()(context, resource_of(context))
    assert not outcome.has_finalizer
    assert writes.patched == ["bus-key"]


async def test_a_detached_certificate_stays() -> None:
    owner = {"kind": "Namespace", "name": "bus", "uid": "uid-of-bus"}
    metadata = {"name": "bus-tls", "resourceVersion": "1", "ownerReferences": [owner]}
    certificate = {"apiVersion": "cert-manager.io/v1", "kind": "Certificate", "metadata": metadata}
    asked = going()
    tls = {"issuerRef": {"name": "letsencrypt"}}
    asked["spec"] = {"operatorSpec": {"reconcilePolicy": "DetachOnDelete", "tls": tls}}
    for shown_objects, expected in (([certificate], ["bus-tls"]), ([], [])):
        context, writes = context_of(asked)
        writes.unwatched = shown_objects
        outcome = await release(context, resource_of(context))
        assert not outcome.has_finalizer
        assert writes.patched == expected


def going(**metadata: Any) -> dict[str, Any]:
    return namespace(
        "2026-11-23T08:00:00Z",
        deletionTimestamp="2026-11-23T12:00:00Z",
        finalizers=["postbus.dev/finalizer"],
        **metadata,
    )


async def test_a_name_that_no_bus_can_have_needs_another() -> None:
    """The API server refuses it; a resource of definitions before that rule has it still."""
    context, writes = context_of(namespace(BEFORE) | {"spec": {"sku": {"name": "Standard"}}})
    outcome = await NamespaceReconciler()(context, resource_of(context))
    assert outcome.status is not None
    (valid,) = [each for each in outcome.status.conditions if each.type == "Valid"]
    assert valid.status == "False"
    assert "spec.entityName" in valid.message
    assert writes == Writes()


async def test_what_somebody_deletes_during_a_release_does_not_hold_it() -> None:
    context, writes = context_of(going(), secret("bus-sealing-key"), secret("bus-ca"))
    writes.gone = ["bus-ca"]
    outcome = await release(context, resource_of(context))
    assert not outcome.has_finalizer
    assert writes.patched == ["bus-sealing-key"]


async def test_a_bus_that_never_was_goes_with_its_data() -> None:
    context, writes = context_of(going(), secret("bus-sealing-key"), broker("uid-of-bus"))
    await release(context, resource_of(context))
    assert writes.patched == ["bus-sealing-key"]


async def test_a_bus_is_asked_if_it_may_have_messages_although_it_never_answered() -> None:
    """It has the data of a former one, or its applications reach it and the operator does not."""
    adopted = going() | {}
    adopted["metadata"] = adopted["metadata"] | {"creationTimestamp": BEFORE}
    for objects in (
        (adopted, secret("bus-sealing-key"), broker("uid-of-bus")),
        (going(), secret("bus-sealing-key"), broker("uid-of-bus", ready=1)),
    ):
        context, writes = context_of(*objects)
        outcome = await release(context, resource_of(context))
        assert outcome.has_finalizer
        assert writes.patched == []
