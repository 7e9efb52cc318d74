"""The guide to Kubernetes, as typed on a cluster that has nothing of Postbus yet.

There are no nodes here: what pods would do is done by the test, and what needs pods is checked by
its words. `e2e` runs the quickstart as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from tests.kube.api_server import ROOT, ApiError, ApiServer, api_server, missing_programs
from tests.kube.guides import blocks, languages, run
from tests.kube.helm import SYSTEM, rendered

PAGE: Final = "kubernetes.md"
QUICKSTART: Final = ROOT / "examples" / "kubernetes" / "quickstart.yaml"
SHOP: Final = "/apis/postbus.dev/v1alpha1/namespaces/shop"
JOB: Final = "/apis/batch/v1/namespaces/shop/jobs/hello"
PLURALS: Final = ("busnamespaces", "queues", "topics", "subscriptions")
NOW: Final = "2026-01-01T00:00:00Z"
MERGE: Final = "application/merge-patch+json"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """A server of its own, since the page begins without definitions and ends without them."""
    missing = missing_programs()
    if missing:
        pytest.fail(f"{', '.join(missing)}: not built yet; run make kube-tools")
    with api_server() as running:
        yield running


def condition(type: str, reason: str) -> dict[str, str]:
    return {
        "type": type, "status": "True", "reason": reason, "message": "", "lastTransitionTime": NOW,
    }  # fmt: skip


def resources(server: ApiServer) -> dict[str, dict[str, Any]]:
    """Return the buses and entities of the quickstart by their paths."""
    return {
        f"{SHOP}/{plural}/{each['metadata']['name']}": each
        for plural in PLURALS
        for each in server.request("GET", f"{SHOP}/{plural}")["items"]
    }


def test_the_guide_works_as_written(server: ApiServer) -> None:
    assert languages(PAGE) == {"sh", "console"}
    quickstart, trial, scope, uninstall, way_out, definitions = blocks(PAGE, "sh")
    try_quickstart(server, quickstart.splitlines())
    assert trial == f"helm test postbus --namespace {SYSTEM}\n"
    run(server, scope)
    roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/shop/roles"
    assert server.request("GET", f"{roles}/postbus-operator")["rules"]
    run(server, uninstall)
    assert resources(server) == {}
    try_way_out(server, way_out)
    run(server, definitions)
    with pytest.raises(ApiError, match="404"):
        server.request("GET", f"{SHOP}/queues")


def try_quickstart(server: ApiServer, lines: list[str]) -> None:
    images, *installs, wait, job = lines
    check_images(images, installs[1])
    for command in installs:
        run(server, command)
    status = {"conditions": [condition("Ready", "Ready")]}
    server.request("PATCH", f"{SHOP}/queues/orders/status", {"status": status}, MERGE)
    shown = run(server, wait)
    assert "queue.postbus.dev/orders" in shown
    assert re.search(r"namespace.postbus.dev/shop-bus  ", shown)
    create, wait, logs = job.split(" && ")
    run(server, create)
    status = {
        "startTime": NOW,
        "completionTime": NOW,
        "succeeded": 1,
        "conditions": [condition("SuccessCriteriaMet", "Done"), condition("Complete", "Done")],
    }
    server.request("PATCH", f"{JOB}/status", {"status": status}, MERGE)
    run(server, wait)
    assert logs == "kubectl -n shop logs job/hello"


def check_images(line: str, install: str) -> None:
    """Check that the images that are made and loaded are those of the installation."""
    cluster, make, load = line.split(" && ")
    name = re.fullmatch(r"kind create cluster --name (\w+)", cluster)
    loaded = re.fullmatch(r"kind load docker-image (.+) --name (\w+)", load)
    assert name is not None
    assert loaded is not None
    assert loaded[2] == name[1]
    target = make.removeprefix("make ")
    assert re.search(rf"^{target}:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    tag = re.search(r"--set image\.tag=(\w+)", install)
    assert tag is not None
    [deployment] = [
        each for each in rendered({"image": {"tag": tag[1]}}) if each["kind"] == "Deployment"
    ]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert loaded[1].split() == [
        environment["POSTBUS_OPERATOR_IMAGE"],
        environment["POSTBUS_OPERATOR_STORE_IMAGE"],
    ]
    assert container["image"] == environment["POSTBUS_OPERATOR_IMAGE"]


def try_way_out(server: ApiServer, command: str) -> None:
    """The operator has gone, and a deletion waits for its finalizer."""
    run(server, f"kubectl apply -f {QUICKSTART}")
    finalizer = {"metadata": {"finalizers": ["postbus.dev/finalizer"]}}
    for path in resources(server):
        server.request("PATCH", path, finalizer, MERGE)
    run(server, "kubectl -n shop delete sbns/shop-bus --wait=false")
    waiting = [path for path, each in resources(server).items() if is_deleting(each)]
    assert waiting == [f"{SHOP}/busnamespaces/shop-bus"]
    run(server, command)
    assert list(resources(server)) == [f"{SHOP}/queues/orders"]
    run(server, "kubectl -n shop delete sbq/orders --wait=false")
    run(server, command)
    assert resources(server) == {}


def is_deleting(found: dict[str, Any]) -> bool:
    return "deletionTimestamp" in found["metadata"]


def test_pods_of_the_quickstart_satisfy_the_restricted_standard(server: ApiServer) -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all(QUICKSTART.read_text())}
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "restricted"}}
    namespace["metadata"]["labels"] = labels
    server.apply("/api/v1/namespaces/restricted", namespace)
    spec = documents["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hello"}, "spec": spec}
    server.request("POST", "/api/v1/namespaces/restricted/pods?dryRun=All", pod)
