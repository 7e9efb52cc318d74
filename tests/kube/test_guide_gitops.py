"""The commands of the guide about GitOps work, and its manifests are accepted."""

from __future__ import annotations

import pytest
import yaml

from postbus_operator.annotations import FINALIZER
from postbus_operator.kube.resource_types import RESOURCES
from tests.kube.api_server import ROOT, ApiServer
from tests.kube.guides import apply, blocks, languages, run

PAGE = "gitops.md"
MERGE = "application/merge-patch+json"
HEALTH = ROOT / "docs/gitops/argocd/resource_customizations/postbus.dev/_/health.lua"
QUEUE = """\
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: orders}
spec: {owner: {name: shop-bus}}
"""


def test_the_guide_about_gitops_works_as_written(server: ApiServer) -> None:
    assert languages(PAGE) == {"sh", "yaml"}
    run(server, "kubectl create namespace argocd && kubectl create namespace shop")
    run(server, "kubectl --namespace argocd create configmap argocd-cm")
    apply(server, QUEUE, "shop")
    (manifest,) = blocks(PAGE, "yaml")
    apply(server, manifest, "shop", "--dry-run=server")
    for command in blocks(PAGE, "sh"):
        run(server, command)
    script = run(
        server,
        "kubectl --namespace argocd get configmap argocd-cm"
        " --output=go-template='{{index .data \"resource.customizations\"}}'",
    )
    indented = "".join(
        f"    {line}" if line.strip() else line
        for line in HEALTH.read_text(encoding="utf-8").splitlines(keepends=True)
    )
    assert indented in script
    annotations = run(server, "kubectl -n shop get queue orders --output=jsonpath='{.metadata}'")
    assert "postbus.dev/recreate-requested-at" in annotations
    run(server, "kubectl delete namespace argocd shop --wait=false")


STATUS = {"observedGeneration": 1, "conditions": []}


def test_nothing_differs_after_defaults_and_the_operators_own_fields(server: ApiServer) -> None:
    """As `selfHeal` and `kubectl diff` compare: what was applied against what is there."""
    run(server, "kubectl create namespace healed")
    (guide,) = blocks(PAGE, "yaml")
    topics = (ROOT / "examples" / "topics.yaml").read_text(encoding="utf-8")
    manifest = f"{guide}---\n{topics}"
    words = "kubectl --namespace healed"
    run(server, f"{words} apply --filename=-", manifest)
    for document in yaml.safe_load_all(manifest):
        if document["kind"] not in RESOURCES:
            continue
        path = RESOURCES[document["kind"]].path("healed", document["metadata"]["name"])
        finalizers = {"metadata": {"finalizers": [FINALIZER]}}
        server.request("PATCH", path, finalizers, MERGE)
        server.request("PATCH", f"{path}/status", {"status": STATUS}, MERGE)
    for option in ("", " --server-side --field-manager=kubectl-client-side-apply"):
        run(server, f"{words} diff --filename=-{option}", manifest)
    changed = {"spec": {"autoDeleteOnIdle": "P1D"}}
    server.request("PATCH", RESOURCES["Queue"].path("healed", "orders"), changed, MERGE)
    with pytest.raises(AssertionError, match="autoDeleteOnIdle: P1D"):
        run(server, f"{words} diff --filename=-", manifest)
    run(server, "kubectl delete namespace healed --wait=false")
