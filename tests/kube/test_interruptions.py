"""Watches that break off, fall silent or end, and rights that are missing."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
from kubernetes.aio.client import Configuration

from postbus_operator.kube import kopf_settings
from postbus_operator.kube.resource_types import CHILDREN, RESOURCES
from postbus_operator.objects import Key
from postbus_operator.running.leading import WatchesEnded
from tests.kube.api_server import OPERATOR, OPERATOR_TOKEN, ApiError, ApiServer, api_server
from tests.kube.clients import configuration_of
from tests.kube.conftest import DEFINITIONS, install_definitions
from tests.kube.operator_run import eventually, leading, make

QUEUES = RESOURCES["Queue"]


@pytest.fixture(scope="module")
def own_server() -> Iterator[ApiServer]:
    """A server that only these tests use: they restart it, and remove definitions."""
    with api_server() as server:
        install_definitions(server)
        yield server


@pytest.fixture
async def configuration(own_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Configuration:
    return await configuration_of(own_server, monkeypatch)


def namespace_of(server: ApiServer, name: str) -> str:
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


async def test_a_quiet_watch_lives_by_its_connections(
    own_server: ApiServer, configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bookmarks are sent for types without an event since the API server began."""
    monkeypatch.setattr(kopf_settings, "RECONNECT_S", 2)
    async with leading(configuration) as run:
        start = time.monotonic()
        await eventually(lambda: time.monotonic() > start + 6)
        assert max(run.health.watches.ages(time.monotonic()).values()) < 5


async def test_a_silent_watch_is_a_problem_until_it_is_heard_again(
    own_server: ApiServer, configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kopf_settings, "RECONNECT_S", 1)
    async with leading(configuration) as run:
        assert run.health.problems(20) == []
        own_server.program.send(signal.SIGSTOP)
        try:
            problems = await eventually(lambda: run.health.problems(4))
            assert any("has been silent for" in each for each in problems)
        finally:
            own_server.program.send(signal.SIGCONT)
        await eventually(lambda: not run.health.problems(4))


async def test_what_went_while_the_api_server_was_away_is_dropped(
    own_server: ApiServer, configuration: Configuration
) -> None:
    """A server that starts has no history: kopf lists again, and says nothing about the gone."""
    namespace = namespace_of(own_server, "interrupted")
    policy = {"spec": {"operatorSpec": {"deletionPolicy": "Retain"}}}
    for name in ("goes", "stays"):
        make(own_server, "Queue", name, namespace, **policy)
    async with leading(configuration) as run:
        cache = run.health.cache
        gone = Key("Queue", namespace, "goes")
        assert cache.get(gone) is not None
        hear, run.health.cache.forget = cache.forget, lambda found: None
        own_server.request("DELETE", QUEUES.path(namespace, "goes"))
        # Else the watch of queues may know the newest version, and go on from there.
        make(own_server, "Topic", "newer", namespace, **policy)
        own_server.restart()
        await eventually(lambda: make(own_server, "Queue", "late", namespace, **policy))
        await eventually(lambda: run.looked_at("late"))
        await eventually(lambda: cache.get(gone) is None)
        cache.forget = hear
        assert cache.get(Key("Queue", namespace, "stays")) is not None
        assert not run.task.done()


async def test_a_removed_definition_ends_the_work(
    own_server: ApiServer, configuration: Configuration
) -> None:
    """The process ends, starts again and waits for the definition."""
    async with leading(configuration) as run:
        await remove_definition(own_server, "subscriptions")
        await eventually(run.task.done)
        assert isinstance(run.task.exception(), WatchesEnded)
        assert "APINotFoundError" in str(run.task.exception())
    install_definitions(own_server)


async def test_definitions_are_waited_for(
    own_server: ApiServer, configuration: Configuration
) -> None:
    await remove_definition(own_server, "topics")
    installed = asyncio.create_task(install_after_a_look(own_server))
    async with leading(configuration) as run:
        await installed
        assert run.health.unready() == []
        assert run.health.cache.of_kind("Topic") == []


async def remove_definition(server: ApiServer, plural: str) -> None:
    path = f"{DEFINITIONS}/{plural}.postbus.dev"
    server.request("DELETE", path)

    def is_gone() -> bool:
        try:
            server.request("GET", path)
        except ApiError as error:
            return error.status == 404
        return False

    await eventually(is_gone)


async def install_after_a_look(server: ApiServer) -> None:
    await asyncio.sleep(0)
    await asyncio.to_thread(install_definitions, server)


async def test_an_operator_of_namespaces_needs_rights_in_them_only(
    own_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = namespace_of(own_server, "limited")
    rules = [
        {"apiGroups": ["postbus.dev"], "resources": ["*"], "verbs": ["*"]},
        *(
            {"apiGroups": [each.group], "resources": [each.plural], "verbs": ["list", "watch"]}
            for each in CHILDREN
        ),
    ]
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    role = {"metadata": {"name": "operator"}, "rules": rules}
    own_server.request("POST", f"{rbac}/roles", role)
    own_server.request(
        "POST",
        f"{rbac}/rolebindings",
        {
            "metadata": {"name": "operator"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": "operator",
            },
            "subjects": [{"kind": "User", "name": OPERATOR}],
        },
    )
    configuration = await configuration_of(own_server, monkeypatch, OPERATOR_TOKEN)
    async with leading(configuration, namespaces=(namespace,)) as run:
        make(own_server, "Queue", "orders", namespace)
        await eventually(lambda: run.looked_at("orders"))


async def test_a_missing_right_ends_the_work_with_its_name(
    own_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = await configuration_of(own_server, monkeypatch, OPERATOR_TOKEN)
    namespace = namespace_of(own_server, "closed")
    monkeypatch.setattr(kopf_settings, "RETRIES_S", (0.1,))
    with pytest.raises(WatchesEnded, match="APIForbiddenError"):
        async with leading(configuration, namespaces=(namespace,)):
            pass
