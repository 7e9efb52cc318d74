"""What pods of brokers and stores have in common: rights, resources, volumes."""

from __future__ import annotations

from typing import Any, Final

from postbus.contract.operator_spec import ResourceAmounts, Resources
from postbus_operator.children.bus import Json
from postbus_operator.children.quantities import canonical_quantity

USER_ID: Final = 10_001
"""User and group of all images."""


def pod_base() -> Json:
    """Return the fields of every pod: no rights on the node, none on the API server."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def container_base(image: str, pull_policy: str, resources: Resources) -> Json:
    """Return the fields of every container.

    Its last lines of log are in the pod's status when it fails, where the operator reads them.
    """
    made: Json = {
        "image": image,
        "imagePullPolicy": pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    amounts = {"requests": _amounts(resources.requests), "limits": _amounts(resources.limits)}
    if any(amounts.values()):
        made["resources"] = {name: each for name, each in amounts.items() if each}
    return made


def secret_volume(name: str, secret: str) -> Json:
    """Return a volume with all keys of a Secret. It is mounted whole: a subPath never changes."""
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def empty_volume(name: str) -> Json:
    """Return a volume that lives as long as its pod."""
    return {"name": name, "emptyDir": {}}


def mount(name: str, path: str, *, is_writable: bool = False) -> Json:
    """Return the mount of a volume."""
    return {"name": name, "mountPath": path} | ({} if is_writable else {"readOnly": True})


def http_probe(path: str, *, period_s: int, failures: int, timeout_s: int = 2) -> Json:
    """Return a probe of the metrics port."""
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def exec_probe(command: list[str], *, period_s: int, failures: int) -> Json:
    """Return a probe that runs a command in the container."""
    return {
        "exec": {"command": command},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _amounts(amounts: ResourceAmounts) -> dict[str, Any]:
    said = amounts.model_dump(by_alias=True, exclude_none=True)
    return {name: canonical_quantity(each) for name, each in said.items()}
