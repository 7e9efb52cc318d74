"""Turns the rendered chart into manifests for kubectl and kustomize; `make manifests` calls it.

    helm template postbus charts/postbus | python -m postbus_operator.generate.plain_manifests

Hooks are left out, and labels that name helm. Objects are in an order in which each finds what it
refers to.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import yaml

NAMESPACE: Final = "postbus-system"
ORDER: Final = (
    "Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding",
    "NetworkPolicy", "PodDisruptionBudget", "Service", "Deployment",
)  # fmt: skip
HELM_LABELS: Final = {"helm.sh/chart", "app.kubernetes.io/managed-by"}
HEAD: Final = "# Written by `make manifests` from charts/postbus.\n"


def plain_manifests(rendered: str) -> str:
    """Return the manifests of a rendered chart.

    Raises:
        ValueError: the chart has a kind whose place in the order nobody has decided.
    """
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": NAMESPACE,
                "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            },
        }
    ]
    objects += (
        _without_helm(each)
        for each in yaml.safe_load_all(rendered)
        if each and "helm.sh/hook" not in each["metadata"].get("annotations", {})
    )
    unknown = {each["kind"] for each in objects} - set(ORDER)
    if unknown:
        raise ValueError(f"no order for {', '.join(sorted(unknown))}")
    objects.sort(key=lambda each: (ORDER.index(each["kind"]), each["metadata"]["name"]))
    texts = (yaml.safe_dump(each, sort_keys=False, width=100) for each in objects)
    return HEAD + "---\n".join(texts)


def _without_helm(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_helm(each) for name, each in value.items() if name not in HELM_LABELS
        }
    if isinstance(value, list):
        return [_without_helm(each) for each in value]
    return value


if __name__ == "__main__":
    sys.stdout.write(plain_manifests(sys.stdin.read()))
