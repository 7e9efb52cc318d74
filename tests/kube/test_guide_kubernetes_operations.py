"""The commands of the guide about operations on Kubernetes, as far as an API server answers them.

What needs pods is run by `e2e`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from tests.kube.api_server import ROOT, ApiServer
from tests.kube.guides import blocks, languages, run
from tests.kube.helm import SYSTEM

PAGE: Final = "kubernetes-operations.md"
QUICKSTART: Final = ROOT / "examples" / "kubernetes" / "quickstart.yaml"
NEEDS_PODS: Final = re.compile(r" (exec|logs) ")
SPACE: Final = "operated"
"""Cluster namespace in place of `shop`, which other guides use."""

STALLED: Final = {
    "type": "Stalled",
    "status": "True",
    "reason": "InvalidSpec",
    "message": "say another name",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def moved(text: str) -> str:
    return re.sub(r"\bshop\b(?!-)", SPACE, text)


def patch(server: ApiServer, change: dict[str, Any]) -> None:
    words = f"kubectl --namespace {SPACE} patch sbq/orders --subresource=status --type=merge"
    run(server, f"{words} --patch='{json.dumps(change)}'")


def test_commands_of_the_guide_work_as_written(server: ApiServer) -> None:
    assert languages(PAGE) <= {"sh", "yaml"}
    run(server, f"kubectl create namespace {SYSTEM} || true")
    create = "create deployment postbus-operator --image=postbus:dev"
    run(server, f"kubectl --namespace {SYSTEM} {create}")
    run(server, "kubectl apply --filename=-", moved(QUICKSTART.read_text(encoding="utf-8")))
    patch(server, {"status": {"conditions": [STALLED]}})
    commands = [moved(line) for block in blocks(PAGE, "sh") for line in block.splitlines()]
    shown = {line: run(server, line) for line in commands if not NEEDS_PODS.search(line)}
    assert len(shown) > len(commands) / 2
    [stalled] = [text for line, text in shown.items() if "Stalled" in line]
    assert f"Queue {SPACE}/orders: say another name\n" in stalled
    released = "--output=jsonpath='{.metadata.annotations}'"
    annotations = run(server, f"kubectl --namespace {SPACE} get sbq/orders {released}")
    assert '"postbus.dev/force-release":"true"' in annotations
    run(server, f"kubectl delete namespace {SPACE} --wait=false")
    run(server, f"kubectl --namespace {SYSTEM} delete deployment postbus-operator")
