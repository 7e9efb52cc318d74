"""What a look decides is written: finalizers first, statuses that differ, Events, releases."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from postbus_operator.annotations import FINALIZER
from postbus_operator.conditions import Conditions
from postbus_operator.context import Context, LeadershipLost
from postbus_operator.kube.api import Forbidden
from postbus_operator.kube.resource_types import EVENTS, RESOURCES
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import Event, Outcome, SpecInvalid
from postbus_operator.running import condition_events
from postbus_operator.running.abnormal import abnormal_conditions
from postbus_operator.status import QueueStatus
from tests.kube.api_server import ApiServer
from tests.kube.clients import configuration_of
from tests.kube.operator_run import eventually, leading, make

QUEUES = RESOURCES["Queue"]


@pytest.fixture
def namespace(server: ApiServer) -> str:
    name = f"work-{uuid.uuid4().hex[:8]}"
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
async def configuration(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Configuration:
    return await configuration_of(server, monkeypatch)


@pytest.fixture
def show(server: ApiServer, namespace: str) -> Callable[[str], Any]:
    return lambda name: server.request("GET", QUEUES.path(namespace, name))


def change(server: ApiServer, namespace: str, name: str, body: dict, part: str = "") -> Any:
    path = QUEUES.path(namespace, name, *([part] if part else []))
    return server.request("PATCH", path, body, "application/merge-patch+json")


def ready(context: Context, resource: Resource, **fields: Any) -> Outcome:
    conditions = Conditions(
        resource.status.get("conditions", ()), resource.generation, context.now()
    )
    conditions.set("Ready", "True", "Ready", "")
    status = QueueStatus(
        conditions=conditions.all(), observed_generation=resource.generation, **fields
    )
    return Outcome(status, has_finalizer=not resource.is_deleting)


async def test_the_finalizer_is_there_before_the_first_look(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    at_look: list[tuple[str, bool]] = []

    async def look(context: Context, resource: Resource) -> Outcome:
        at_look.append((resource.key.name, resource.has_finalizer))
        return ready(context, resource)

    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)):
        make(server, "Queue", "held", namespace)
        for name, protection in (("kept", False), ("protected", True)):
            policy = {"deletionPolicy": "Retain", "deletionProtection": protection}
            make(server, "Queue", name, namespace, spec={"operatorSpec": policy})
        await eventually(lambda: {name for name, _ in at_look} == {"held", "kept", "protected"})
    assert set(at_look) == {("held", True), ("kept", False), ("protected", True)}


async def test_a_status_is_written_once_and_again_only_if_it_differs(
    server: ApiServer,
    configuration: Configuration,
    namespace: str,
    show: Callable[[str], Any],
) -> None:
    counts = {"message_count": 3}

    async def look(context: Context, resource: Resource) -> Outcome:
        return ready(context, resource, **counts)

    make(server, "Queue", "orders", namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)) as run:
        first = await eventually(lambda: (each := show("orders")).get("status") and each)
        assert first["status"]["messageCount"] == 3
        assert first["status"]["observedGeneration"] == 1
        await eventually(lambda: not run.value("reconciles_running"))
        writes = run.value("api_requests_total", verb="patch", code="200")
        looks = run.looked_at("orders")
        change(server, namespace, "orders", {"metadata": {"labels": {"a": "b"}}})
        await eventually(lambda: run.looked_at("orders") > looks)
        assert run.value("api_requests_total", verb="patch", code="200") == writes
        counts.clear()
        change(server, namespace, "orders", {"metadata": {"labels": {"a": "c"}}})
        await eventually(lambda: "messageCount" not in show("orders")["status"])
        second = show("orders")["status"]["conditions"]
        assert second == first["status"]["conditions"]


async def test_a_status_is_not_written_to_the_next_resource_of_the_name(
    server: ApiServer,
    configuration: Configuration,
    namespace: str,
    show: Callable[[str], Any],
) -> None:
    """It names an entity that the new resource may not have."""
    seen: list[str] = []
    retained = {"operatorSpec": {"deletionPolicy": "Retain"}}

    def make_again() -> None:
        server.request("DELETE", QUEUES.path(namespace, "orders"))
        make(server, "Queue", "orders", namespace, spec=retained)

    async def look(context: Context, resource: Resource) -> Outcome:
        seen.append(resource.uid)
        if len(seen) > 1:
            return Outcome(None, has_finalizer=False)
        await asyncio.to_thread(make_again)
        return replace(ready(context, resource, entity_id="7"), has_finalizer=False)

    make(server, "Queue", "orders", namespace, spec=retained)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)):
        await eventually(lambda: len(set(seen)) == 2)
        assert "status" not in show("orders")


async def test_a_lost_status_is_written_again(
    server: ApiServer,
    configuration: Configuration,
    namespace: str,
    show: Callable[[str], Any],
) -> None:
    async def look(context: Context, resource: Resource) -> Outcome:
        return ready(context, resource)

    make(server, "Queue", "orders", namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)) as run:
        await eventually(lambda: show("orders").get("status"))
        await eventually(lambda: not run.value("reconciles_running"))
        change(server, namespace, "orders", {"status": None}, "status")
        await eventually(lambda: show("orders").get("status"))


async def test_a_deleted_resource_is_looked_at_and_then_released(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    async def look(context: Context, resource: Resource) -> Outcome:
        outcome = ready(context, resource)
        if not resource.is_deleting:
            return outcome
        said = (Event("Normal", "Released", "with 3 messages"),)
        return Outcome(None, has_finalizer=False, events=said)

    make(server, "Queue", "orders", namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)) as run:
        await eventually(lambda: run.looked_at("orders"))
        await eventually(
            lambda: server.request("GET", QUEUES.path(namespace, "orders"))["metadata"].get(
                "finalizers"
            )
        )
        server.request("DELETE", QUEUES.path(namespace, "orders"))
        await eventually(lambda: server.request("GET", QUEUES.path(namespace))["items"] == [])
        events = server.request("GET", EVENTS.path(namespace))["items"]
        assert [(each["reason"], each["note"]) for each in events] == [
            ("Released", "with 3 messages")
        ]
        assert events[0]["regarding"]["name"] == "orders"


async def test_a_deletion_before_the_write_of_a_look_is_looked_at(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    """The answer to the write shows the deletion, whose own event is older than that."""

    async def look(context: Context, resource: Resource) -> Outcome:
        if resource.is_deleting:
            return Outcome(None, has_finalizer=False)
        # While this waits for the answer, the loop reads no event.
        server.request("DELETE", QUEUES.path(namespace, "orders"))
        return ready(context, resource)

    make(server, "Queue", "orders", namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)):
        await eventually(lambda: server.request("GET", QUEUES.path(namespace))["items"] == [])


async def test_a_look_may_delete_its_resource_but_not_the_next_of_its_name(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    async def look(context: Context, resource: Resource) -> Outcome:
        return Outcome(None, has_finalizer=False, delete_resource=True)

    make(server, "Queue", "orders", namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)):
        await eventually(lambda: server.request("GET", QUEUES.path(namespace))["items"] == [])


async def test_a_resource_that_somebody_changes_during_its_look_is_not_deleted(
    server: ApiServer,
    configuration: Configuration,
    namespace: str,
    show: Callable[[str], Any],
) -> None:
    """A new spec asks for the entity again, which the look saw as idle."""
    seen: list[int] = []

    async def look(context: Context, resource: Resource) -> Outcome:
        seen.append(resource.generation)
        if resource.generation > 1 or resource.is_deleting:
            return ready(context, resource)
        again = {"spec": {"maxDeliveryCount": 3}}
        await asyncio.to_thread(change, server, namespace, "orders", again)
        return Outcome(None, has_finalizer=True, delete_resource=True)

    make(server, "Queue", "orders", namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)):
        await eventually(lambda: 2 in seen)
        assert "deletionTimestamp" not in show("orders")["metadata"]


async def test_conditions_with_unreadable_times_are_replaced(
    server: ApiServer,
    configuration: Configuration,
    namespace: str,
    show: Callable[[str], Any],
) -> None:
    """The API server accepts times that Python does not know, from who may write a status."""

    async def look(context: Context, resource: Resource) -> Outcome:
        conditions = Conditions(
            resource.status.get("conditions", ()), resource.generation, context.now()
        )
        conditions.set("OwnerResolved", "False", "NotFound", "there is no bus")
        conditions.set("Ready", "False", "OwnerNotReady", "there is no bus")
        return Outcome(QueueStatus(conditions=conditions.all()), has_finalizer=False)

    make(server, "Queue", "orders", namespace)
    parts = {"status": "False", "reason": "NotFound", "message": "", "observedGeneration": 1}
    written = [
        {"type": type, "lastTransitionTime": "0000-01-01T00:00:00Z"} | parts
        for type in ("OwnerResolved", "Ready")
    ]
    change(server, namespace, "orders", {"status": {"conditions": written}}, "status")

    def times() -> list[str]:
        return [each["lastTransitionTime"] for each in show("orders")["status"]["conditions"]]

    assert times() == ["0000-01-01T00:00:00Z"] * 2
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)) as run:
        await eventually(lambda: all(each > "2026" for each in times()))
        assert len(times()) == 2
        assert not run.value("reconciles_total", kind="Queue", result="failed")
        found = abnormal_conditions([each for each in run.looks if each.key.name == "orders"])
        assert all(each.start > 0 for each in found)


async def test_a_result_that_cannot_be_written_stops_no_other_resource(
    server: ApiServer,
    configuration: Configuration,
    namespace: str,
    show: Callable[[str], Any],
) -> None:
    async def look(context: Context, resource: Resource) -> Outcome:
        now = "never" if resource.key.name == "bad" else "2026-11-23T09:00:00Z"
        conditions = Conditions((), resource.generation, context.now())
        conditions.set("OwnerResolved", "False", "NotFound", "there is no bus")
        (found,) = conditions.all()
        changed = found.model_copy(update={"last_transition_time": now})
        return Outcome(QueueStatus(conditions=(changed,)), has_finalizer=False)

    make(server, "Queue", "bad", namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)) as run:
        await eventually(lambda: run.looked_at("bad"))
        make(server, "Queue", "orders", namespace)
        await eventually(lambda: show("orders").get("status"))
        assert not run.task.done()


async def test_a_change_of_policy_to_retain_takes_the_finalizer_away(
    server: ApiServer,
    configuration: Configuration,
    namespace: str,
    show: Callable[[str], Any],
) -> None:
    async def look(context: Context, resource: Resource) -> Outcome:
        policy = resource.spec["operatorSpec"]["deletionPolicy"]
        return Outcome(None, has_finalizer=policy != "Retain")

    make(server, "Queue", "orders", namespace, metadata={"finalizers": ["example.com/other"]})
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)):
        await eventually(lambda: FINALIZER in show("orders")["metadata"]["finalizers"])
        change(
            server, namespace, "orders", {"spec": {"operatorSpec": {"deletionPolicy": "Retain"}}}
        )
        await eventually(lambda: show("orders")["metadata"]["finalizers"] == ["example.com/other"])
    change(server, namespace, "orders", {"metadata": {"finalizers": None}})


async def test_an_error_of_one_resource_is_shown_and_leaves_the_others_alone(
    server: ApiServer,
    configuration: Configuration,
    namespace: str,
    show: Callable[[str], Any],
) -> None:
    errors = {
        "bug": ZeroDivisionError("division by zero"),
        "wrong": SpecInvalid("InvalidFilter", "mend the filter"),
        "refused": Forbidden(403, "Forbidden", "may not create services"),
    }

    async def look(context: Context, resource: Resource) -> Outcome:
        if resource.key.name in errors:
            raise errors[resource.key.name]
        return ready(context, resource)

    def reasons() -> set[str]:
        return {each["reason"] for each in server.request("GET", EVENTS.path(namespace))["items"]}

    for name in (*errors, "good"):
        make(server, "Queue", name, namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)) as run:
        for name in (*errors, "good"):
            await eventually(lambda name=name: show(name).get("status"))
        shown = {
            name: {each["type"]: each["reason"] for each in show(name)["status"]["conditions"]}
            for name in (*errors, "good")
        }
        assert shown["good"] == {"Ready": "Ready"}
        assert shown["wrong"]["Stalled"] == "InvalidFilter"
        assert shown["bug"]["Reconciling"] == shown["refused"]["Reconciling"] == "Retrying"
        await eventually(lambda: run.looked_at("bug") >= 2, "a second attempt")
        assert run.looked_at("wrong") == 1
        assert run.value("reconciles_total", kind="Queue", result="failed") >= 2
        assert run.value("reconciles_total", kind="Queue", result="refused") >= 1
        await eventually(lambda: reasons() == {"ReconcileFailed", "InvalidFilter"})


async def test_a_condition_that_does_not_pass_is_reported_without_an_event_from_outside(
    configuration: Configuration,
    server: ApiServer,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(condition_events, "PATIENCE", timedelta(seconds=0.5))

    async def look(context: Context, resource: Resource) -> Outcome:
        conditions = Conditions(
            resource.status.get("conditions", ()), resource.generation, context.now()
        )
        conditions.set("OwnerResolved", "False", "NotFound", "create the bus")
        return Outcome(QueueStatus(conditions=conditions.all()), has_finalizer=True)

    make(server, "Queue", "orders", namespace)
    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)):
        [event] = await eventually(
            lambda: server.request("GET", EVENTS.path(namespace))["items"], "an event"
        )
    assert (event["type"], event["reason"]) == ("Warning", "NotFound")
    assert event["note"] == "create the bus"


async def test_a_conflict_is_resolved_by_reading_again(
    server: ApiServer, configuration: Configuration, namespace: str, show: Callable[[str], Any]
) -> None:
    """A cache that is behind for long would otherwise be refused for as long."""
    make(server, "Queue", "orders", namespace)
    context_of: list[Context] = []

    async def look(context: Context, resource: Resource) -> Outcome:
        context_of.append(context)
        return ready(context, resource)

    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)) as run:
        await eventually(lambda: show("orders").get("status"))
        await eventually(lambda: not run.value("reconciles_running"))
        old = show("orders")
        cache = context_of[0].cache
        stale = replace(cache.get(Key("Queue", namespace, "orders")), finalizers=())
        change(server, namespace, "orders", {"metadata": {"labels": {"a": "b"}}})
        await eventually(lambda: cache.get(stale.key).resource_version != stale.resource_version)
        await eventually(lambda: not run.value("reconciles_running"))
        cache._resources[stale.key] = stale
        context_of[0].wake(stale.key, 0)
        await eventually(lambda: run.value("reconciles_total", kind="Queue", result="conflict"))
        await eventually(lambda: cache.get(stale.key).has_finalizer)
        assert show("orders")["status"] == old["status"]


async def test_the_loss_of_leadership_ends_all_work(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    async def look(context: Context, resource: Resource) -> Outcome:
        raise LeadershipLost("caller-too-old")

    async with leading(configuration, {"Queue": look}, namespaces=(namespace,)) as run:
        make(server, "Queue", "orders", namespace)
        await eventually(run.task.done)
        assert isinstance(run.task.exception(), LeadershipLost)
    change(server, namespace, "orders", {"metadata": {"finalizers": None}})
