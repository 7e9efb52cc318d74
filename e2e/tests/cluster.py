"""The cluster of KUBECONFIG, used with kubectl: manifests go in, observations come out."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

ROOT: Final = Path(__file__).resolve().parents[2]
TAG: Final = os.environ.get("E2E_IMAGE_TAG", "dev")
IMAGE: Final = f"postbus:{TAG}"
SYSTEM: Final = "postbus-system"

LIMIT_S: Final = 90.0
"""Default limit of a wait; a bus needs 15 s on an idle machine with two cores."""

OURS: Final = "example.test/postbus-e2e"
"""Label of the cluster namespaces that tests make."""

POLL_S: Final = 0.3
"""Pause between two looks; each one starts kubectl."""

Found = TypeVar("Found")


class Refused(Exception):
    """The command failed; the text is what it wrote."""


def run(*command: str, given: str | None = None, limit_s: float = 300.0) -> str:
    """Run a command in the repository and return what it wrote."""
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=limit_s, cwd=ROOT
    )
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def kubectl(*arguments: str, given: str | None = None, limit_s: float = 300.0) -> str:
    return run("kubectl", *arguments, given=given, limit_s=limit_s)


def wait_for(
    attempt: Callable[[], Found],
    wanted: Callable[[Found], object],
    limit_s: float = LIMIT_S,
) -> Found:
    """Return what an attempt gave as soon as that is wanted; a refused attempt is repeated."""
    end = time.monotonic() + limit_s
    while True:
        found: Found | Refused
        try:
            found = attempt()
        except Refused as error:
            found = error
        else:
            if wanted(found):
                return found
        assert time.monotonic() < end, found
        time.sleep(POLL_S)


def buses_elsewhere() -> set[str]:
    """Return the cluster namespaces with resources of Postbus that no test has made."""
    found = json.loads(kubectl("get", "postbus", "--all-namespaces", "--output=json"))
    ours = kubectl("get", "namespaces", f"--selector={OURS}", "--output=name").split()
    return {
        each["metadata"]["namespace"]
        for each in found["items"]
        if f"namespace/{each['metadata']['namespace']}" not in ours
    }


class Space:
    """A cluster namespace for some tests; it enforces the restricted Pod Security Standard."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def make(cls, prefix: str, **labels: str) -> Space:
        made = cls(f"{prefix}-{uuid.uuid4().hex[:6]}")
        made.open(**labels)
        return made

    def open(self, **labels: str) -> None:
        labels |= {"pod-security.kubernetes.io/enforce": "restricted", OURS: "true"}
        metadata = {"name": self.name, "labels": labels}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def close(self) -> None:
        self.kubectl("delete", "namespace", self.name, "--wait=false", "--ignore-not-found")

    def kubectl(self, *arguments: str, given: str | None = None, limit_s: float = 300.0) -> str:
        return kubectl("--namespace", self.name, *arguments, given=given, limit_s=limit_s)

    def apply(self, *resources: dict[str, Any]) -> None:
        """Apply resources; a field that the server does not know is an error."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(resources)}
        self.kubectl("apply", "--validate=strict", "--filename=-", given=json.dumps(items))

    def get(self, reference: str) -> dict[str, Any]:
        """Return a resource, as in `sbq/orders`."""
        found: dict[str, Any] = json.loads(self.kubectl("get", reference, "--output=json"))
        return found

    def uid_if_ready(self, pod: str) -> str:
        """Return the identity of a pod, as in `pod/bus-broker-0`; nothing while it is not ready."""
        found = self.get(pod)
        is_ready = ("Ready", "True") in {
            (each["type"], each["status"]) for each in found["status"].get("conditions", ())
        }
        return found["metadata"]["uid"] if is_ready else ""

    def exists(self, reference: str) -> bool:
        return bool(self.kubectl("get", reference, "--ignore-not-found", "--output=name"))

    def patch(self, reference: str, change: dict[str, Any]) -> None:
        self.kubectl("patch", reference, "--type=merge", f"--patch={json.dumps(change)}")

    def delete(self, *references: str, limit_s: float = 60.0) -> float:
        """Delete resources, wait until they are gone, and return the time that it took."""
        start = time.monotonic()
        self.kubectl("delete", *references, f"--timeout={limit_s:.0f}s")
        return time.monotonic() - start

    def start_deletion(self, *references: str) -> None:
        self.kubectl("delete", *references, "--wait=false")

    def wait(self, wanted: str, *references: str, limit_s: float = LIMIT_S) -> None:
        """Wait as `kubectl wait --for` does."""
        try:
            self.kubectl("wait", f"--for={wanted}", *references, f"--timeout={limit_s:.0f}s")
        except Refused as error:
            seen = [self.kubectl("get", each, "--output=yaml") for each in references]
            raise AssertionError(f"{error}\n{seen}") from error

    def wait_ready(self, *references: str, limit_s: float = LIMIT_S) -> None:
        self.wait("condition=Ready", *references, limit_s=limit_s)

    def condition(self, reference: str, type: str) -> tuple[str, str]:
        """Return status and reason of a condition; both are empty if it is not there."""
        for each in self.get(reference).get("status", {}).get("conditions", []):
            if each["type"] == type:
                return each["status"], each["reason"]
        return "", ""

    def wait_condition(
        self, reference: str, type: str, status: str, reason: str, limit_s: float = LIMIT_S
    ) -> None:
        wait_for(
            lambda: self.condition(reference, type),
            lambda found: found == (status, reason),
            limit_s,
        )

    def events(self, name: str) -> list[str]:
        """Return the reasons of the events about all resources of a name."""
        found = json.loads(self.kubectl("get", "events.events.k8s.io", "--output=json"))
        return [each["reason"] for each in found["items"] if each["regarding"].get("name") == name]

    def wait_event(self, name: str, reason: str) -> None:
        wait_for(lambda: self.events(name), lambda found: reason in found, 30)
