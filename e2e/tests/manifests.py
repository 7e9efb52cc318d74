"""Manifests of resources for tests."""

from __future__ import annotations

from typing import Any, Final

from e2e.tests.cluster import IMAGE

API: Final = "postbus.dev/v1alpha1"
RESTRICTED: Final = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
POD_SECURITY: Final = {
    "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def bus(
    name: str, *, partitions: int = 1, operator: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a Premium bus, which with one partition starts fastest, with one managed store."""
    stores = [{"name": "main", "managed": {"size": "1Gi"}}]
    spec: dict[str, Any] = {
        "sku": {"name": "Premium"},
        "premiumMessagingPartitions": partitions,
        "operatorSpec": {"storage": {"stores": stores}} | (operator or {}),
    }
    return resource("Namespace", name, spec)


def queue(name: str, owner: str, **spec: Any) -> dict[str, Any]:
    return resource("Queue", name, {"owner": {"name": owner}} | spec)


def topic(name: str, owner: str, **spec: Any) -> dict[str, Any]:
    return resource("Topic", name, {"owner": {"name": owner}} | spec)


def subscription(name: str, owner: str, **spec: Any) -> dict[str, Any]:
    return resource("Subscription", name, {"owner": {"name": owner}} | spec)


def resource(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}


def program_pod(name: str, program: str, secret: str, *arguments: str) -> dict[str, Any]:
    """Return a pod that runs a Python program with a Secret of the operator at /bus."""
    container = {
        "name": "program", "image": IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-u", "-c", program, "/bus", *arguments],
        "securityContext": RESTRICTED,
        "volumeMounts": [
            {"name": "bus", "mountPath": "/bus", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": POD_SECURITY,
            "containers": [container],
            "volumes": [
                {"name": "bus", "secret": {"secretName": secret, "defaultMode": 0o440}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
            ],
        },
    }  # fmt: skip
