"""Requests of the operator, and what it makes of refusals."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from kubernetes.aio.client import Configuration

from postbus_operator.annotations import FINALIZER, WATCH_LABEL
from postbus_operator.bus.access import read_credentials
from postbus_operator.kube.api import (
    PAGE,
    Api,
    ApiUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
)
from postbus_operator.kube.connection import load_configuration
from postbus_operator.kube.resource_types import (
    CLUSTER_NAMESPACES,
    CONFIG_MAPS,
    LEASES,
    RESOURCES,
    SECRETS,
    SERVICES,
    VOLUME_CLAIMS,
    ResourceType,
)
from postbus_operator.objects import Resource
from postbus_operator.outcome import BackendUnavailable
from tests.kube.api_server import ApiServer
from tests.kube.clients import Calls, api_of, configuration_of

QUEUES = RESOURCES["Queue"]
QUEUE = {
    "apiVersion": "postbus.dev/v1alpha1",
    "kind": "Queue",
    "metadata": {"name": "orders", "namespace": "api"},
    "spec": {"owner": {"name": "bus"}},
}

CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}

BUS = {
    "metadata": {
        "name": "bus", "namespace": "api", "uid": "1", "generation": 1, "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    },
}  # fmt: skip


def config_map(name: str, **data: str) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "api"},
        "data": data,
    }


@pytest.fixture(scope="module")
def namespace(server: ApiServer) -> Iterator[str]:
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": "api"}})
    yield "api"
    for plural in ("configmaps", "secrets"):
        server.request("DELETE", f"/api/v1/namespaces/api/{plural}")
    server.request("DELETE", QUEUES.path("api"))


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def api(
    server: ApiServer, namespace: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Api]:
    async with api_of(await configuration_of(server, monkeypatch), calls) as api:
        yield api


async def test_an_applied_object_has_what_was_applied_last(api: Api, calls: Calls) -> None:
    """Fields that are left out go, fields of others stay; equal ones make no new version."""
    first = await api.apply(config_map("applied", a="1", b="2"))
    await api.patch(CONFIG_MAPS, "api", "applied", {"metadata": {"labels": {"theirs": "x"}}})
    second = await api.apply(config_map("applied", a="1"))
    assert (first["data"], second["data"]) == ({"a": "1", "b": "2"}, {"a": "1"})
    assert second["metadata"]["labels"] == {"theirs": "x"}
    third = await api.apply(config_map("applied", a="1"))
    assert third["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    assert {each["manager"] for each in third["metadata"]["managedFields"]} == {"postbus-operator"}
    assert [each["metadata"]["name"] for each in calls.objects] == ["applied"] * 4
    assert calls.answers == [("apply", 201), ("patch", 200), ("apply", 200), ("apply", 200)]


async def test_applied_secrets_can_be_watched(api: Api) -> None:
    secret = config_map("keys") | {"kind": "Secret", "stringData": {"a": "b"}}
    del secret["data"]
    made = await api.apply(secret)
    assert made["metadata"]["labels"] == {WATCH_LABEL: "true"}
    assert "labels" not in secret["metadata"]


async def test_a_list_is_read_in_pages(api: Api, server: ApiServer, calls: Calls) -> None:
    for number in range(3):
        await api.apply(config_map(f"listed-{number}") | {"metadata": {
            "name": f"listed-{number}", "namespace": "api", "labels": {"page": "x"}}})  # fmt: skip
    calls.answers.clear()
    found = [each async for each in api.list(CONFIG_MAPS, "api", labels="page=x")]
    assert {each["metadata"]["name"] for each in found} == {f"listed-{n}" for n in range(3)}
    assert {each["kind"] for each in found} == {"ConfigMap"}
    assert calls.answers == [("list", 200)]
    assert PAGE == 500


async def test_a_status_is_replaced_if_the_uid_is_that_of_the_object(api: Api) -> None:
    uid = (await api.create(QUEUES, "api", QUEUE))["metadata"]["uid"]
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Ready",
        "message": "",
        "lastTransitionTime": "2026-11-23T09:00:00Z",
    }
    status = {"entityId": "1", "messageCount": 3, "conditions": [condition]}
    await api.put_status(QUEUES, "api", "orders", uid, status)
    wanted = {"entityId": "1", "conditions": [condition | {"type": "Valid"}]}
    found = await api.put_status(QUEUES, "api", "orders", uid, wanted)
    assert found["status"] == wanted
    with pytest.raises(Conflict, match="has the uid"):
        await api.put_status(QUEUES, "api", "orders", str(UUID(int=1)), status)
    with pytest.raises(NotFound):
        await api.put_status(QUEUES, "api", "absent", uid, status)
    assert (await api.get(QUEUES, "api", "orders"))["status"] == wanted
    assert (await api.get(QUEUES, "api", "orders"))["metadata"]["generation"] == 1


async def test_a_patch_of_an_old_version_is_a_conflict(api: Api) -> None:
    made = await api.apply(config_map("versioned"))
    change = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"],
                           "finalizers": [FINALIZER]}}  # fmt: skip
    patched = await api.patch(CONFIG_MAPS, "api", "versioned", change)
    assert patched["metadata"]["finalizers"] == [FINALIZER]
    with pytest.raises(Conflict):
        await api.patch(CONFIG_MAPS, "api", "versioned", change)
    await api.patch(CONFIG_MAPS, "api", "versioned", {"metadata": {"finalizers": []}})


@pytest.mark.parametrize(
    ("type", "content"),
    [
        (CONFIG_MAPS, {}),
        (SECRETS, {}),
        (VOLUME_CLAIMS, {"spec": CLAIM}),
        (QUEUES, {"spec": QUEUE["spec"]}),
    ],
    ids=lambda value: getattr(value, "plural", ""),
)
async def test_a_patch_of_another_object_of_the_name_is_a_conflict(
    api: Api, calls: Calls, type: ResourceType, content: dict
) -> None:
    """It needs no right to read: the operator may patch volume claims, but not get one."""
    metadata = {"name": "patched", "namespace": "api", "finalizers": []}
    wanted = {"apiVersion": type.api_version, "kind": type.kind, "metadata": metadata} | content
    uid = (await api.create(type, "api", wanted))["metadata"]["uid"]
    calls.answers.clear()
    change = {"metadata": {"uid": str(UUID(int=1)), "annotations": {"of": "another"}}}
    with pytest.raises(Conflict, match=r"metadata\.uid"):
        await api.patch(type, "api", "patched", change)
    assert calls.answers == [("patch", 422)]
    for right in ({"uid": uid}, {}):
        invalid = {"metadata": right | {"annotations": {"a b": "no name"}}}
        with pytest.raises(Invalid, match=r"metadata\.annotations"):
            await api.patch(type, "api", "patched", invalid)
    change = {"metadata": {"uid": uid, "annotations": {"of": "this one"}, "finalizers": None}}
    patched = await api.patch(type, "api", "patched", change)
    assert patched["metadata"]["annotations"] == {"of": "this one"}
    assert await api.delete(type, "api", "patched", uid=uid)


async def test_a_deletion_names_the_incarnation(api: Api) -> None:
    made = await api.apply(config_map("deleted"))
    with pytest.raises(Conflict):
        await api.delete(CONFIG_MAPS, "api", "deleted", uid="another")
    uid, version = made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    await api.patch(CONFIG_MAPS, "api", "deleted", {"metadata": {"labels": {"kept": "true"}}})
    with pytest.raises(Conflict):
        await api.delete(CONFIG_MAPS, "api", "deleted", uid=uid, version=version)
    assert await api.delete(CONFIG_MAPS, "api", "deleted", uid=uid)
    assert not await api.delete(CONFIG_MAPS, "api", "deleted")


async def test_refusals_have_types(api: Api, calls: Calls) -> None:
    with pytest.raises(NotFound):
        await api.get(SECRETS, "api", "absent")
    with pytest.raises(NotFound):
        await api.patch(QUEUES, "api", "absent", {"metadata": {"labels": {}}})
    with pytest.raises(Conflict):
        await api.create(CLUSTER_NAMESPACES, "", {"metadata": {"name": "api"}})
    with pytest.raises(Invalid, match="spec"):
        await api.create(QUEUES, "api", QUEUE | {"spec": {"lockDuration": "PT9H"}})
    with pytest.raises(Invalid):
        await api.apply({"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": -1}]},
                         "metadata": {"name": "bad", "namespace": "api"}})  # fmt: skip
    assert SERVICES.path("api", "bad") == "/api/v1/namespaces/api/services/bad"
    assert ("get", 404) in calls.answers


async def test_a_missing_right_is_a_refusal(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(server.kubeconfig().read_text())
    config["users"][0]["user"] = {}
    path = server.folder / "anonymous"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    async with api_of(await load_configuration(connections=1)) as api:
        with pytest.raises(Forbidden):
            await api.get(LEASES, "api", "leader")
        bus = Resource.from_object("Namespace", BUS)
        with pytest.raises(BackendUnavailable, match="may not read Secrets in api: install"):
            await read_credentials(api, bus, "https://bus")


async def test_no_answer_is_worth_another_attempt() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        calls = Calls()
        configuration = nowhere(unused.getsockname()[1])
        async with api_of(configuration, calls) as api:
            with pytest.raises(ApiUnavailable) as caught:
                await api.get(SECRETS, "api", "x")
    assert (caught.value.status, calls.answers) == (0, [("get", 0)])


async def test_a_group_says_what_it_serves(api: Api) -> None:
    assert await api.serves("postbus.dev", "v1alpha1") == {
        "busnamespaces",
        "queues",
        "topics",
        "subscriptions",
        "pipelines",
    }
    assert await api.serves("postbus.dev", "v1") == set()


def nowhere(port: int) -> Configuration:
    from kubernetes.aio.client import Configuration

    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{port}"
    return configuration


async def test_passwords_and_proxies_of_the_environment_are_not_for_the_api_server(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They were looked for before each request, and a password there was an error."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    async with api_of(await configuration_of(server, monkeypatch)) as api:
        assert "queues" in await api.serves("postbus.dev", "v1alpha1")
