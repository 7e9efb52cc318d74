"""Charts as helm renders them."""

from __future__ import annotations

import json
import subprocess
from typing import Any, Final

import yaml

from tests.kube.api_server import BIN, ROOT

SYSTEM: Final = "postbus-system"

Values = dict[str, Any]
Object = dict[str, Any]


def helm(*arguments: str, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "helm", *arguments, *(["--values", "-"] if values is not None else [])],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def rendered(values: Values | None = None, chart: str = "postbus") -> list[Object]:
    """Return the objects of a chart, those of its hooks included."""
    done = helm(
        "template", "postbus", f"charts/{chart}", "--namespace", SYSTEM, values=values or {}
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def one(objects: list[Object], kind: str, name: str = "") -> Object:
    [found] = [
        each for each in of_kind(objects, kind) if not name or each["metadata"]["name"] == name
    ]
    return found
