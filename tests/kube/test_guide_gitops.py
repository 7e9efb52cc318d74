"""The commands of the guide about GitOps work, and its manifests are accepted."""

from __future__ import annotations

from tests.kube.api_server import ROOT, ApiServer
from tests.kube.guides import apply, blocks, languages, run

PAGE = "gitops.md"
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
