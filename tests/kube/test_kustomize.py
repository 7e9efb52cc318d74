"""References between resources survive the transformers of kustomize, with our configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.api_server import BIN, ROOT, missing_programs

CONFIGURATION = ROOT / "docs" / "gitops" / "kustomize" / "kustomizeconfig.yaml"
RESOURCES = """\
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: shop}
spec:
  authorizationRules:
  - {name: app, rights: [Send], secretName: keys}
  operatorSpec:
    tls: {secretName: keys}
    storage:
      stores:
      - name: main
        postgres: {secretRef: {name: keys}, caSecretRef: {name: keys}}
    podTemplate:
      env:
      - {name: A, valueFrom: {secretKeyRef: {name: keys, key: a}}}
      - {name: B, valueFrom: {configMapKeyRef: {name: settings, key: b}}}
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: orders}
spec:
  owner: {name: shop}
  forwardTo: bills
  forwardDeadLetteredMessagesTo: events
  authorizationRules:
  - {name: app, rights: [Send], secretName: keys}
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: bills}
spec: {owner: {name: shop}, forwardTo: Elsewhere}
---
apiVersion: postbus.dev/v1alpha1
kind: Topic
metadata: {name: events}
spec:
  owner: {name: shop}
  authorizationRules:
  - {name: app, rights: [Send], secretName: keys}
---
apiVersion: postbus.dev/v1alpha1
kind: Subscription
metadata: {name: large}
spec:
  owner: {name: events}
  forwardTo: orders
  forwardDeadLetteredMessagesTo: bills
"""
KUSTOMIZATION: dict[str, Any] = {
    "namePrefix": "test-",
    "namespace": "shop",
    "resources": ["resources.yaml"],
    "configurations": ["kustomizeconfig.yaml"],
    "secretGenerator": [{"name": "keys", "literals": ["primaryKey=x"]}],
    "configMapGenerator": [{"name": "settings", "literals": ["b=x"]}],
    "generatorOptions": {"disableNameSuffixHash": True},
}


@pytest.fixture
def built(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What kustomize makes of the resources, by kind and former name."""
    missing = missing_programs()
    if missing:
        pytest.fail(f"{', '.join(missing)}: not built yet; run make kube-tools")
    (tmp_path / "resources.yaml").write_text(RESOURCES)
    (tmp_path / "kustomizeconfig.yaml").write_text(CONFIGURATION.read_text(encoding="utf-8"))
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(KUSTOMIZATION))
    text = subprocess.run(
        [BIN / "kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=True
    ).stdout
    return {
        f"{each['kind']} {each['metadata']['name'].removeprefix('test-')}": each
        for each in yaml.safe_load_all(text)
    }


def test_references_between_resources_follow_a_name_prefix(built: dict[str, Any]) -> None:
    # kustomize renames nothing whose kind is Namespace, whatever its group.
    assert built["Namespace shop"]["metadata"]["name"] == "shop"
    orders = built["Queue orders"]["spec"]
    assert orders["owner"]["name"] == "shop"
    assert orders["forwardTo"] == "test-bills"
    assert orders["forwardDeadLetteredMessagesTo"] == "test-events"
    assert built["Queue bills"]["spec"]["forwardTo"] == "Elsewhere"
    assert built["Topic events"]["spec"]["owner"]["name"] == "shop"
    large = built["Subscription large"]["spec"]
    assert large["owner"]["name"] == "test-events"
    assert large["forwardTo"] == "test-orders"
    assert large["forwardDeadLetteredMessagesTo"] == "test-bills"


def test_references_to_secrets_and_config_maps_follow_a_name_prefix(built: dict[str, Any]) -> None:
    bus = built["Namespace shop"]["spec"]
    for spec in (bus, built["Queue orders"]["spec"], built["Topic events"]["spec"]):
        assert spec["authorizationRules"][0]["secretName"] == "test-keys"
    operator = bus["operatorSpec"]
    assert operator["tls"]["secretName"] == "test-keys"
    store = operator["storage"]["stores"][0]["postgres"]
    assert store["secretRef"]["name"] == store["caSecretRef"]["name"] == "test-keys"
    secret, config_map = operator["podTemplate"]["env"]
    assert secret["valueFrom"]["secretKeyRef"]["name"] == "test-keys"
    assert config_map["valueFrom"]["configMapKeyRef"]["name"] == "test-settings"
