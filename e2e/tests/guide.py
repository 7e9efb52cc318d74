"""The quickstart of docs/guides/kubernetes.md, with the image tag of this run."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from e2e.tests.cluster import ROOT, TAG

GUIDE: Final = ROOT / "docs" / "guides" / "kubernetes.md"
MANIFEST: Final = ROOT / "examples" / "kubernetes" / "quickstart.yaml"


class Quickstart(NamedTuple):
    """Its lines, but the first one, which makes a cluster and images."""

    installs: list[str]
    apply: str
    wait: str
    job: str


def blocks() -> list[str]:
    """Return the commands of the page, a text for each block."""
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def quickstart() -> Quickstart:
    cluster, *installs, apply, wait, job = blocks()[0].splitlines()
    assert cluster.startswith("kind create cluster")
    path = str(MANIFEST.relative_to(ROOT))
    assert apply == f"kubectl apply -f {path}"
    if TAG != "dev":
        installs = [line.replace("image.tag=dev", f"image.tag={TAG}") for line in installs]
        apply = f"sed s/postbus:dev/postbus:{TAG}/ {path} | kubectl apply -f -"
    return Quickstart(installs, apply, wait, job)
