"""Starts a suite of another language beside a bus, where fixed ports and host names are free.

Each suite finds the same entities (`entities`), its bus through variables of the environment
(keeper.py), and writes down which methods of its client it called.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database, temporary_folder
from tests.sdk.keeper import Plan

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "sdk-suite"
LIMIT_S = 900.0

Manifest = dict[str, object]


def entities() -> Iterator[Manifest]:
    """Declare the entities of the suites; each test has entities of its own."""
    rules = {"RootManageSharedAccessKey": "Manage", "sender": "Send", "listener": "Listen"}
    keys = {
        "RootManageSharedAccessKey": "SAS_KEY_VALUE",
        "sender": "s3nd=s3nd=s3nd=s3nd=",
        "listener": "l1sten/+l1sten/+l1sten/+",
    }
    authorization = [
        {"name": name, "rights": [right], "secretName": name.lower()}
        for name, right in rules.items()
    ]
    yield manifest(
        "Namespace", NAMESPACE, sku={"name": "Standard"}, authorizationRules=authorization
    )
    for name, key in keys.items():
        named: Manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name.lower()}}
        yield {**named, "stringData": {"primaryKey": key}}
    for number in range(1, 41):
        yield queue(f"plain-{number}")
    for number in range(1, 13):
        yield queue(f"sessions-{number}", requiresSession=True)
    yield queue("orders")
    yield queue("twice", maxDeliveryCount=2)
    yield queue("unique", requiresDuplicateDetection=True)
    yield queue("disabled", status="Disabled")
    yield queue("forwards", forwardTo="plain-40")
    yield queue("expires", deadLetteringOnMessageExpiration=True)
    for number in range(1, 9):
        topic = f"topic-{number}"
        yield manifest("Topic", topic, owner={"name": NAMESPACE})
        yield subscription(topic, "all")
        yield subscription(topic, "sessions", requiresSession=True)


def manifest(kind: str, name: str, **spec: object) -> Manifest:
    metadata = {"name": name.lower()}
    return {"apiVersion": "postbus.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def queue(name: str, **properties: object) -> Manifest:
    return manifest("Queue", name, owner={"name": NAMESPACE}, **properties)


def subscription(topic: str, name: str, **properties: object) -> Manifest:
    spec = {"owner": {"name": topic}, "entityName": name, **properties}
    return manifest("Subscription", f"{topic}-{name}", **spec)


def program_of_the_page(language: str) -> str:
    """Return the first program of docs/clients.md in a language; the suite runs it unchanged."""
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    found = re.search(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None, language
    return found[1]


def own_namespace() -> list[str]:
    """Return the command that gives a program a network and mounts of its own."""
    unshare = shutil.which("unshare")
    assert unshare is not None, "install util-linux: the suites need `unshare`"
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [unshare, "--net", "--mount", *as_root]


def run_suite(
    server: EmbeddedPostgres,
    name: str,
    command: list[str],
    cwd: Path,
    environment: dict[str, str] | None = None,
    trust_files: Sequence[Path] = (),
) -> None:
    """Run a suite's command to its end beside a fresh bus; raises when it fails.

    `trust_files` are files of authorities that hold the bus's one alone while the suite runs.
    """
    database = f"sdk_{name}"
    make_database(server, database, template=TEMPLATE)
    with temporary_folder() as folder:
        manifests = folder / "entities.yaml"
        manifests.write_text("\n---\n".join(json.dumps(each) for each in entities()))
        plan = Plan(
            folder=str(folder),
            manifests=str(manifests),
            stores=dsn_of(server, database),
            command=command,
            cwd=str(cwd),
            environment=environment or {},
            limit_s=LIMIT_S,
            trust_files=[str(file) for file in trust_files],
        )
        ended = subprocess.run(
            [*own_namespace(), sys.executable, "-m", "tests.sdk.keeper"],
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'dataplane'}:{ROOT}"},
            input=json.dumps(vars(plan)),
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 120,
        )
        log = folder / "bus.log"
        log_tail = log.read_text()[-6_000:] if log.exists() else ""
    assert ended.returncode == 0, (
        ended.stdout[-20_000:] + ended.stderr[-4_000:] + "\n--- the bus ---\n" + log_tail
    )
