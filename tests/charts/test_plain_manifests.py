"""Manifests made from the rendered chart."""

from __future__ import annotations

import pytest
import yaml

from postbus_operator.generate.plain_manifests import NAMESPACE, plain_manifests

RENDERED = """
---
# Source: a
kind: Deployment
metadata: {name: a, labels: {helm.sh/chart: postbus-1, app: b}}
spec: {template: {metadata: {labels: {app.kubernetes.io/managed-by: Helm, app: b}}}}
---
kind: ServiceAccount
metadata: {name: a}
---
---
kind: Pod
metadata: {name: test, annotations: {helm.sh/hook: test}}
"""


def test_objects_are_in_order_and_helm_is_not_named() -> None:
    namespace, account, deployment = yaml.safe_load_all(plain_manifests(RENDERED))
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", NAMESPACE)
    assert account["kind"] == "ServiceAccount"
    assert deployment["metadata"]["labels"] == {"app": "b"}
    assert deployment["spec"]["template"]["metadata"]["labels"] == {"app": "b"}


def test_a_kind_needs_a_place() -> None:
    with pytest.raises(ValueError, match="no order for Gateway"):
        plain_manifests("kind: Gateway\nmetadata: {name: a}\n")
