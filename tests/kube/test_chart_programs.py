"""The programs of the chart's hooks on a real API server, with rights that the chart grants."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.charts.programs import program, secret_of, tls_bus
from tests.edge.bus_thread import BusThread
from tests.kube.api_server import TOKEN, ApiError, ApiServer

HERE: Final = "chart-programs"
KINDS: Final = f"/apis/postbus.dev/v1alpha1/namespaces/{HERE}"
SECRETS: Final = f"/api/v1/namespaces/{HERE}/secrets"
FINALIZER: Final = "postbus.dev/finalizer"
LIMIT_S: Final = 60.0
NOW: Final = "2026-01-01T00:00:00Z"


@pytest.fixture(scope="module")
def bus(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BusThread]:
    with tls_bus(postgres_server, "chart_programs", tmp_path_factory.mktemp("tls")) as running:
        yield running


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> Any:
    """The API server as a pod sees it: a token and an authority in files."""
    server.apply(
        f"/api/v1/namespaces/{HERE}",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HERE}},
    )
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    authority = (server.folder / "certificates" / "apiserver.crt").read_bytes()
    (tmp_path / "ca.crt").write_bytes(authority)
    return program("cluster_api").ClusterApi(server.url, tmp_path)


def resources(server: ApiServer, plural: str) -> dict[str, dict[str, Any]]:
    """Return the resources by name; definitions that are new answer 429 for a second."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            items = server.request("GET", f"{KINDS}/{plural}")["items"]
            return {each["metadata"]["name"]: each for each in items}
        except ApiError as error:
            if error.status != 429 or time.monotonic() > end_s:
                raise


# --- helm test ----------------------------------------------------------------------------------


class Operator:
    """Does with resources what the operator does, with one bus for all of them."""

    def __init__(self, server: ApiServer, bus: BusThread, *, is_able: bool = True) -> None:
        self._server = server
        self._bus = bus
        self._is_able = is_able
        self.seen: list[dict[str, Any]] = []
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_done.wait(0.1):
            for plural in ("busnamespaces", "queues"):
                for name, found in resources(self._server, plural).items():
                    self._look(f"{KINDS}/{plural}/{name}", plural, found)

    def _look(self, path: str, plural: str, found: dict[str, Any]) -> None:
        metadata = found["metadata"]
        if "deletionTimestamp" in metadata:
            self._patch(path, {"metadata": {"finalizers": None}})
        elif not metadata.get("finalizers"):
            self.seen.append(found["spec"])
            self._patch(path, {"metadata": {"finalizers": [FINALIZER]}})
            if plural == "queues":
                self._make_ready(path, metadata["name"])

    def _make_ready(self, path: str, name: str) -> None:
        ready: dict[str, Any] = {
            "type": "Ready", "status": "False", "reason": "OwnerNotReady",
            "message": "the bus has no broker", "lastTransitionTime": NOW,
        }  # fmt: skip
        status: dict[str, Any] = {"conditions": [ready]}
        if self._is_able:
            contents = secret_of(self._bus, self._bus.queue())
            data = {key: base64.b64encode(value).decode() for key, value in contents.items()}
            labels = {"postbus.dev/bus": name}
            metadata = {"name": f"{name}-queue-test", "labels": labels}
            body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
            self._server.request("POST", SECRETS, body)
            ready |= {"status": "True", "reason": "Ready", "message": "ready"}
            status["binding"] = {"name": f"{name}-queue-test"}
        self._patch(f"{path}/status", {"status": status})

    def _patch(self, path: str, change: dict[str, Any]) -> None:
        try:
            self._server.request("PATCH", path, change, "application/merge-patch+json")
        except ApiError as error:
            if error.status != 404:
                raise


def test_trial_sends_receives_and_leaves_nothing(
    server: ApiServer, api: Any, bus: BusThread, capsys: pytest.CaptureFixture[str]
) -> None:
    with Operator(server, bus) as operator:
        assert program("trial").main(HERE, str(LIMIT_S), "fast", api=api) == 0
    bus_spec, queue_spec = operator.seen
    [store] = bus_spec["operatorSpec"]["storage"]["stores"]
    assert store["managed"]["storageClassName"] == "fast"
    # Nothing of a trial is kept for the retention of a bus that has gone, too.
    assert bus_spec["operatorSpec"]["deletionPolicy"] == "Delete"
    assert queue_spec["operatorSpec"]["deletionPolicy"] == "Delete"
    assert resources(server, "busnamespaces") == resources(server, "queues") == {}
    assert server.request("GET", SECRETS)["items"] == []
    said = capsys.readouterr().out
    assert "received hello 2 as number 3" in said
    assert "deleted postbus-test-" in said


def test_trial_says_why_a_bus_is_not_ready_and_deletes_it(
    server: ApiServer, api: Any, bus: BusThread, capsys: pytest.CaptureFixture[str]
) -> None:
    with Operator(server, bus, is_able=False):
        assert program("trial").main(HERE, "3", api=api) == 1
        wait_until_gone(server)
    said = capsys.readouterr().out
    assert "OwnerNotReady: the bus has no broker\n" in said
    assert "the queue is not ready: OwnerNotReady" in said


def wait_until_gone(server: ApiServer) -> None:
    end_s = time.monotonic() + LIMIT_S
    while resources(server, "busnamespaces") or resources(server, "queues"):
        assert time.monotonic() < end_s
        time.sleep(0.05)


# --- helm uninstall -----------------------------------------------------------------------------


def test_remaining_resources_are_listed_and_hold_up_the_uninstall(
    server: ApiServer, api: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    remaining = program("remaining")
    assert remaining.main([HERE], api) == 0
    assert "no bus and no entity is left" in capsys.readouterr().out
    path = f"{KINDS}/queues/orders"
    metadata = {"name": "orders"}
    spec = {"owner": {"name": "shop-bus"}}
    wanted = {"apiVersion": "postbus.dev/v1alpha1", "kind": "Queue", "metadata": metadata}
    server.apply(path, {**wanted, "spec": spec})
    other = "kube-public"  # in `default` are resources of other tests
    for namespaces in ([], [HERE], [other, HERE]):
        assert remaining.main(namespaces, api) == 1
        *listed, summary = capsys.readouterr().out.splitlines()
        assert f"queues/orders in {HERE}" in listed
        assert summary.startswith(f"{len(listed)} resources are left")
        if namespaces:  # in all of them are other tests' resources
            assert len(listed) == 1
    assert remaining.main([other], api) == 0
    server.request("DELETE", path)


def test_a_cluster_without_the_definitions_has_nothing_left(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = program("remaining")
    monkeypatch.setattr(remaining, "KINDS", "/apis/postbus.dev/v0")
    assert remaining.main([], api) == 0
