"""kopf watches and writes nothing; lists, bookmarks and interruptions are seen beside it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kubernetes.aio.client import Configuration

from postbus_operator.annotations import BUS_LABEL, FINALIZER, MANAGED_BY_LABEL, WATCH_LABEL
from postbus_operator.kube.resource_types import CONFIG_MAPS, RESOURCES, SECRETS
from postbus_operator.outcome import Outcome
from tests.kube.api_server import ApiError, ApiServer
from tests.kube.clients import configuration_of
from tests.kube.operator_run import eventually, leading, make


@pytest.fixture
def namespace(server: ApiServer) -> str:
    name = f"watch-{uuid.uuid4().hex[:8]}"
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
async def configuration(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Configuration:
    return await configuration_of(server, monkeypatch)


@contextmanager
def suppress_missing() -> Iterator[None]:
    """Pass over the answer that an object is not there."""
    try:
        yield
    except ApiError as error:
        if error.status != 404:
            raise


@pytest.fixture(autouse=True)
def clean(server: ApiServer) -> Iterator[None]:
    """Leave no resources to the next test: its watches see the whole cluster."""
    yield
    for type in RESOURCES.values():
        for each in server.request("GET", type.path())["items"]:
            metadata = each["metadata"]
            path = type.path(metadata["namespace"], metadata["name"])
            # One that another test's end deletes already is gone with its finalizer.
            with suppress_missing():
                if metadata.get("finalizers"):
                    body = {"metadata": {"finalizers": None}}
                    server.request("PATCH", path, body, "application/merge-patch+json")
                server.request("DELETE", path)


async def test_nothing_runs_before_all_lists_are_complete(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    make(server, "Namespace", "bus", namespace)
    for number in range(20):
        make(server, "Queue", f"queue-{number}", namespace)
    seen: list[int] = []

    async def look(context, resource):
        if resource.key.namespace == namespace:
            keys = context.cache.all_keys()
            seen.append(sum(key.namespace == namespace for key in keys))
        return Outcome(None, has_finalizer=False)

    async with leading(configuration, {"Queue": look}) as run:
        await eventually(lambda: len(seen) >= 20)
        assert set(seen) == {21}
        assert run.health.unready() == []


async def test_objects_carry_nothing_of_kopf(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    """No annotation, no finalizer, no manager but the operator's own."""
    queues = RESOURCES["Queue"]
    make(server, "Queue", "before", namespace)
    async with leading(configuration) as run:
        make(server, "Queue", "after", namespace)
        for name in ("before", "after"):
            await eventually(lambda name=name: run.looked_at(name))
            path = queues.path(namespace, name)
            found = await eventually(
                lambda path=path: (
                    (each := server.request("GET", path))["metadata"].get("finalizers") and each
                )
            )
            assert found["metadata"]["finalizers"] == [FINALIZER]
            assert "annotations" not in found["metadata"]
            managers = {each["manager"] for each in found["metadata"]["managedFields"]}
            assert managers - {"Python-urllib"} == {"postbus-operator"}
        server.request("DELETE", queues.path(namespace, "after"))
        await eventually(lambda: "after" not in names(server, namespace))


async def test_an_event_wakes_the_resource_and_those_that_depend_on_it(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    make(server, "Queue", "orders", namespace)
    async with leading(configuration) as run:
        await eventually(lambda: run.looked_at("orders"))
        before = run.looked_at("orders")
        make(server, "Namespace", "bus", namespace)
        await eventually(lambda: run.looked_at("bus") and run.looked_at("orders") > before)


async def test_own_secrets_and_labelled_ones_are_seen_and_no_others(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    def secret(name: str, **labels: str) -> None:
        server.request(
            "POST",
            SECRETS.path(namespace),
            {"metadata": {"name": name, "labels": labels}, "stringData": {"a": "hush"}},
        )

    secret("mine", **{WATCH_LABEL: "true"})
    secret("other")
    own = {MANAGED_BY_LABEL: "postbus-operator", BUS_LABEL: "bus"}
    server.request(
        "POST", CONFIG_MAPS.path(namespace), {"metadata": {"name": "own", "labels": own}}
    )
    async with leading(configuration) as run:
        cache = run.health.cache
        assert cache.find(SECRETS, namespace, "mine")["data"]["a"] != "aHVzaA=="
        assert cache.find(SECRETS, namespace, "other") is None
        assert len(cache.children_of(namespace, "bus")) == 1
        secret("late", **{WATCH_LABEL: "true"})
        await eventually(lambda: cache.find(SECRETS, namespace, "late"))
        server.request("DELETE", SECRETS.path(namespace, "late"))
        await eventually(lambda: cache.find(SECRETS, namespace, "late") is None)
        assert run.health.unready() == []


async def test_labels_of_namespaces_are_known(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    async with leading(configuration) as run:
        labels = run.health.cache.labels_of_namespace(namespace)
        assert labels["kubernetes.io/metadata.name"] == namespace


async def test_named_namespaces_are_the_only_ones_seen(
    server: ApiServer, configuration: Configuration, namespace: str
) -> None:
    other = f"{namespace}-b"
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": other}})
    for place in (namespace, other, "default"):
        make(server, "Queue", f"in-{place}", place)
    async with leading(configuration, namespaces=(namespace, other)) as run:
        cache = run.health.cache
        assert {key.namespace for key in cache.all_keys()} == {namespace, other}
        assert cache.labels_of_namespace(namespace) == {}
        make(server, "Queue", "late", other)
        await eventually(lambda: run.looked_at("late"))


async def test_cancelling_leaves_no_task_behind(
    server: ApiServer, configuration: Configuration
) -> None:
    before = asyncio.all_tasks()
    async with leading(configuration):
        pass
    left = {each for each in asyncio.all_tasks() - before if not each.done()}
    assert left == set()


def names(server: ApiServer, namespace: str) -> list[str]:
    items = server.request("GET", RESOURCES["Queue"].path(namespace))["items"]
    return [each["metadata"]["name"] for each in items]
