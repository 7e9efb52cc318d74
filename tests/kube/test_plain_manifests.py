"""Manifests without helm: in step with the chart, accepted by the server, a base of kustomize."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from postbus_operator.generate.plain_manifests import NAMESPACE, plain_manifests
from tests.kube.api_server import BIN, ROOT, ApiServer
from tests.kube.helm import helm

MANIFESTS: Final = ROOT / "operator" / "manifests"


def kustomize(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [BIN / "kubectl", "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_manifests_are_the_rendered_chart() -> None:
    done = helm("template", "postbus", "charts/postbus", "--namespace", NAMESPACE)
    text = (MANIFESTS / "operator.yaml").read_text()
    assert text == plain_manifests(done.stdout), "run make manifests"


def test_api_server_accepts_the_base(server: ApiServer) -> None:
    """As one apply of kubectl; the namespace exists already in a dry run."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    server.apply(f"/api/v1/namespaces/{NAMESPACE}", namespace)
    done = subprocess.run(
        [
            BIN / "kubectl", "apply", "--server-side", "--dry-run=server", "--validate=strict",
            "--kubeconfig", server.kubeconfig(), "-k", MANIFESTS,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "deployment.apps/postbus-operator serverside-applied" in done.stdout


def test_an_overlay_changes_namespace_and_all_images(tmp_path: Path) -> None:
    images = [
        {"name": name, "newName": f"r.example.org/{name}", "newTag": "dev"}
        for name in ("postbus", "postbus-store")
    ]
    # kustomize admits no absolute path.
    base = os.path.relpath(MANIFESTS, tmp_path)
    overlay = {"resources": [base], "namespace": "buses", "images": images}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    made = kustomize(tmp_path)
    [deployment] = [each for each in made if each["kind"] == "Deployment"]
    assert deployment["metadata"]["namespace"] == "buses"
    [binding] = [each for each in made if each["kind"] == "ClusterRoleBinding"]
    assert [each["namespace"] for each in binding["subjects"]] == ["buses"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "r.example.org/postbus:dev"
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["POSTBUS_OPERATOR_IMAGE"] == "r.example.org/postbus:dev"
    assert environment["POSTBUS_OPERATOR_STORE_IMAGE"] == "r.example.org/postbus-store:dev"
    assert environment["POSTBUS_OPERATOR_LEASE_NAME"] == "postbus-operator"
