"""Objects as the API server shows them."""

from __future__ import annotations

from typing import Any

APIS = {
    "Namespace": "postbus.dev/v1alpha1", "Queue": "postbus.dev/v1alpha1",
        "Topic": "postbus.dev/v1alpha1", "Subscription": "postbus.dev/v1alpha1",
        "Pipeline": "postbus.dev/v1alpha1",
        "Secret": "v1", "StatefulSet": "apps/v1", "PersistentVolumeClaim": "v1"}  # fmt: skip


def shown(
    kind: str, name: str, version: int = 1, /, *, namespace: str = "shop", **parts: Any
) -> dict[str, Any]:
    """Return an object's JSON; `parts` are its fields, those of `metadata` included."""
    metadata = {
        "namespace": namespace,
        "name": name,
        "uid": f"uid-of-{name}",
        "resourceVersion": str(version),
        "creationTimestamp": "2026-11-23T09:00:00Z",
    }
    if APIS[kind].startswith("postbus.dev"):
        metadata["generation"] = 1
    metadata |= parts.pop("metadata", {})
    return {"apiVersion": APIS[kind], "kind": kind, "metadata": metadata, **parts}


def key_secret(kind: str, owner: str) -> dict[str, Any]:
    """Return a Secret with keys of a resource, which it goes with."""
    reference = {"apiVersion": APIS[kind], "kind": kind, "name": owner, "uid": f"uid-of-{owner}"}
    labels = {"app.kubernetes.io/component": "keys"}
    metadata = {"labels": labels, "ownerReferences": [reference]}
    return shown("Secret", f"{owner}-key", metadata=metadata)


def entity(
    kind: str, name: str, version: int = 1, /, *, owner: str = "bus", **spec: Any
) -> dict[str, Any]:
    """Return a queue, topic or subscription; `spec` are further fields of its spec."""
    namespace = spec.pop("namespace", "shop")
    metadata = spec.pop("metadata", {})
    wanted = {"owner": {"name": owner}} | spec
    return shown(kind, name, version, namespace=namespace, spec=wanted, metadata=metadata)


def condition(type: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    """Return a condition as the operator writes it."""
    found = {"type": type, "status": status, "reason": reason, "message": message}
    return found | {"lastTransitionTime": "2026-11-23T09:00:00Z"}
