"""The cluster runs pods with volumes, names and addresses; takes nothing but KUBECONFIG.

Run with `e2e/run.sh .venv/bin/python -m pytest e2e/tests/test_cluster.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# It has a shell, httpd, wget and nslookup; each cluster of e2e/up.sh has it.
IMAGE = os.environ.get("E2E_TEST_IMAGE", "e2e.local/busybox:1")
PORT = 8080
START = f"hostname >> /data/starts; echo started; exec httpd -f -p {PORT} -h /data"
LABELS = {"app": "check"}
RESTRICTED = {
    "runAsNonRoot": True, "runAsUser": 10001, "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


class Refused(Exception):
    """The command failed; the text is what it wrote."""


class Namespace:
    """A namespace for one test module, used with kubectl."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        done = subprocess.run(
            ["kubectl", "--namespace", self.name, *arguments],
            input=given, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        if done.returncode:
            raise Refused(done.stdout + done.stderr)
        return done.stdout

    def apply(self, *resources: dict[str, Any]) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(resources)}
        self.kubectl("apply", "--filename", "-", given=json.dumps(items))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "--output", "json"))
        return found

    def run(self, pod: str, *command: str) -> str:
        return self.kubectl("exec", pod, "--", *command)

    def wait_until_rolled_out(self) -> None:
        self.kubectl("rollout", "status", "statefulset/check", "--timeout=90s")


def wait_for(attempt: Callable[[], str], wanted: Callable[[str], bool]) -> str:
    """Return what an attempt gave as soon as that is wanted; endpoints follow pods in seconds."""
    end = time.monotonic() + 30
    while True:
        try:
            found = attempt()
        except Refused as error:
            found = str(error)
        else:
            if wanted(found):
                return found
        assert time.monotonic() < end, found
        time.sleep(0.2)


def stateful_set() -> dict[str, Any]:
    container = {
        "name": "web", "image": IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", START],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }  # fmt: skip
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "16Mi"}}}
    return {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "check"},
        "spec": {
            "serviceName": "peers", "replicas": 2, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": LABELS},
            "template": {
                "metadata": {"labels": LABELS},
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "securityContext": {"fsGroup": 10001},
                    "containers": [container],
                },
            },
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
        },
    }  # fmt: skip


def service(name: str, **spec: Any) -> dict[str, Any]:
    spec |= {"selector": LABELS, "ports": [{"port": 80, "targetPort": PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    made = Namespace(f"check-{uuid.uuid4().hex[:8]}")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    made.apply({
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.name, "labels": labels},
    })  # fmt: skip
    try:
        made.apply(service("peers", clusterIP="None"), service("check"), stateful_set())
        made.wait_until_rolled_out()
        yield made
    finally:
        made.kubectl("delete", "namespace", made.name, "--wait=false")


def test_headless_service_names_each_pod(namespace: Namespace) -> None:
    address = namespace.get("pod", "check-1")["status"]["podIP"]
    name = f"check-1.peers.{namespace.name}.svc.cluster.local"
    wait_for(lambda: namespace.run("check-0", "nslookup", name), lambda found: address in found)


def test_cluster_ip_answers_over_tcp(namespace: Namespace) -> None:
    address = namespace.get("service", "check")["spec"]["clusterIP"]
    url = f"http://{address}/starts"
    wait_for(
        lambda: namespace.run("check-0", "timeout", "3", "wget", "-q", "-O", "-", url),
        lambda found: found.startswith("check-"),
    )


def test_name_outside_of_the_cluster_fails_at_once(namespace: Namespace) -> None:
    with pytest.raises(Refused, match="NXDOMAIN"):
        namespace.run("check-0", "timeout", "3", "nslookup", "name.example.test")


def test_deleted_pod_returns_with_its_volume(namespace: Namespace) -> None:
    before = namespace.get("pod", "check-0")["metadata"]["uid"]
    volume = namespace.get("pvc", "data-check-0")["spec"]["volumeName"]
    namespace.kubectl("delete", "pod", "check-0")
    namespace.wait_until_rolled_out()
    assert namespace.get("pod", "check-0")["metadata"]["uid"] != before
    assert namespace.get("pvc", "data-check-0")["spec"]["volumeName"] == volume
    assert namespace.run("check-0", "cat", "/data/starts") == "check-0\ncheck-0\n"
    assert namespace.run("check-1", "cat", "/data/starts") == "check-1\n"


def test_log_of_a_pod_can_be_read(namespace: Namespace) -> None:
    assert namespace.kubectl("logs", "check-1") == "started\n"


def test_pod_has_a_token_of_its_service_account(namespace: Namespace) -> None:
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert namespace.run("check-1", "cat", f"{folder}/namespace") == namespace.name
    assert namespace.run("check-1", "cat", f"{folder}/token").count(".") == 2


def test_pod_security_rejects_a_privileged_pod(namespace: Namespace) -> None:
    container = {"name": "web", "image": IMAGE, "securityContext": {"privileged": True}}
    with pytest.raises(Refused, match="violates PodSecurity"):
        namespace.apply({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "privileged"},
            "spec": {"containers": [container]},
        })  # fmt: skip
