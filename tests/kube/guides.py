"""Commands and manifests of a guide about Kubernetes, on the API server of the tests."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Final

from tests.kube.api_server import BIN, ROOT, ApiServer

GUIDES: Final = ROOT / "docs" / "guides"
FENCE: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """Return the texts in fences of a language."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    return [found[2] for found in FENCE.finditer(text) if found[1] == language]


def languages(page: str) -> set[str]:
    """Return the languages that the fences of a page name."""
    return {found[1] for found in FENCE.finditer((GUIDES / page).read_text(encoding="utf-8"))}


def run(server: ApiServer, command: str, text: str = "") -> str:
    """Run a block of a shell in the repository, with the server's kubectl; return its output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ
        | {
            "KUBECONFIG": str(server.kubeconfig()),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        },
    )
    assert done.returncode == 0, (command, done.stdout)
    return done.stdout


def apply(server: ApiServer, manifest: str, namespace: str, *options: str) -> str:
    """Apply a manifest; a field that the server does not know is an error."""
    words = ["kubectl", "--namespace", namespace, "apply", "--server-side", "--validate=strict"]
    return run(server, " ".join([*words, *options, "--filename=-"]), manifest)
