"""Feeds the control API requests within and outside its OpenAPI document: `schemathesis`.

    python -m tests.edge.control.fuzz_control [SECONDS]

A bus of its own, with its Postgres; an answer that the document does not know is a failure.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from postbus.broker.partition.clock import ClockMode
from postbus.edge.control.openapi import openapi_document
from tests.conftest import dsn_of, run_server
from tests.dev_bus import environment
from tests.edge.control.control_bus import ControlledBus, controlled_bus, path_of

SECONDS = 600
EXCLUDED = ("listChanges", "interruptStore")
"""One may wait a minute, the other makes every answer 503; their own tests try both."""

UNTRUE = "positive_data_acceptance"
"""A document cannot express which names exist, which filters are SQL, and what a tier allows."""

CASES = re.compile(r"^ *(\d+) generated", re.MULTILINE)

HOOKS = '''
import schemathesis

@schemathesis.hook
def filter_case(context, case):
    """HTTP lets every header pass that nobody knows."""
    return not any(name.startswith("x-schemathesis") for name in case.headers or ())
'''

QUEUE, TOPIC, SUBSCRIPTION = "some-queue", "some-topic", "some-subscription"
EXISTING = {
    "queue": QUEUE,
    "topic": TOPIC,
    "subscription": SUBSCRIPTION,
    "rule": "$Default",
    "authorization_rule": "some-rule",
}


def fuzz(bus: ControlledBus, folder: Path, *how_long: str) -> str:
    """Return the findings, nothing when all is well."""
    make_existing(bus)
    (folder / "openapi.json").write_text(json.dumps(document()), encoding="utf-8")
    (folder / "fuzz_hooks.py").write_text(HOOKS, encoding="utf-8")
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", "openapi.json"),
        *("--url", bus.caller.address),
        *("--header", f"Authorization:Bearer {bus.caller.token}"),
        *("--checks", "all", "--exclude-checks", UNTRUE),
        *(word for each in EXCLUDED for word in ("--exclude-operation-id", each)),
        *("--request-timeout", "30", "--continue-on-failure"),
        *("--generation-database", "none", "--no-color", "--suppress-health-check", "all"),
        *how_long,
    ]
    with patch("postbus.edge.access.auth_throttle.MAX_DELAY_S", 0.0):  # it tries wrong tokens
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=folder,
            env=environment(SCHEMATHESIS_HOOKS="fuzz_hooks", PYTHONPATH=str(folder)),
        )
    cases = CASES.search(done.stdout)
    assert cases is not None, done.stdout
    assert int(cases[1]) > 0, done.stdout
    return "" if done.returncode == 0 else done.stdout


def make_existing(bus: ControlledBus) -> None:
    """Create the entities that the document names."""
    api = bus.caller
    api.put(path_of("queues", QUEUE), {})
    api.put(path_of("topics", TOPIC), {})
    api.put(path_of("topics", TOPIC, "subscriptions", SUBSCRIPTION), {})
    for of in ((), ("queues", QUEUE), ("topics", TOPIC)):
        path = path_of(*of, "authorization-rules", EXISTING["authorization_rule"])
        api.put(path, {"rights": ["Listen"]})


def document() -> dict[str, Any]:
    """Return the document with names that exist beside those that could."""
    openapi = openapi_document()
    for methods in openapi["paths"].values():
        for operation in methods.values():
            for parameter in operation["parameters"]:
                name = EXISTING.get(parameter["name"])
                if parameter["in"] == "path" and name is not None:
                    parameter["schema"] = {"anyOf": [{"const": name}, parameter["schema"]]}
    for schema in openapi["components"]["schemas"].values():
        entity = schema.get("properties", {}).get("entity")
        if entity is not None:
            names = [QUEUE, f"{TOPIC}/Subscriptions/{SUBSCRIPTION}"]
            schema["properties"]["entity"] = {"anyOf": [{"enum": names}, entity]}
    return openapi


def main(seconds: int) -> int:
    with tempfile.TemporaryDirectory(prefix="postbus-fuzz-") as name:
        folder = Path(name)
        with (
            contextmanager(run_server)(folder / "postgres") as server,
            controlled_bus(dsn_of(server, "postgres"), folder / "bus", ClockMode.MANUAL) as bus,
        ):
            found = fuzz(bus, folder, "--max-time", str(seconds))
    sys.stdout.write(found or f"nothing was found in {seconds} s\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else SECONDS))
