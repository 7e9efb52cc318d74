"""Make a bus with a queue, send and receive with the SDK, delete both; for `helm test`.

python trial.py CLUSTER_NAMESPACE SECONDS [STORAGE_CLASS]
"""

from __future__ import annotations

import base64
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import send_and_receive
from cluster_api import KINDS, ClusterApi

POLL_S = 0.5
DELETE_S = 45.0
"""Limit of the deletion, below the time that the pod has after the test."""


class Failure(Exception):
    """The bus did not do what it should; the text says what was seen last."""


class Trial:
    """A bus and a queue of one name, which nobody else has."""

    def __init__(self, api: ClusterApi, namespace: str) -> None:
        self._api = api
        self._name = f"postbus-test-{secrets.token_hex(4)}"
        self._core = f"/api/v1/namespaces/{namespace}"
        self._buses = f"{KINDS}/namespaces/{namespace}/busnamespaces"
        self._queues = f"{KINDS}/namespaces/{namespace}/queues"

    def create(self, storage_class: str) -> None:
        """Create bus and queue."""
        managed = {"size": "1Gi"} | ({"storageClassName": storage_class} if storage_class else {})
        self._post(
            self._buses,
            "Namespace",
            {
                "operatorSpec": {
                    "deletionPolicy": "Delete",
                    "storage": {"stores": [{"name": "main", "managed": managed}]},
                }
            },
        )
        self._post(
            self._queues,
            "Queue",
            {
                "owner": {"name": self._name},
                "authorizationRules": [{"name": "test", "rights": ["Listen", "Send"]}],
                "operatorSpec": {"deletionPolicy": "Delete"},
            },
        )
        print(f"created bus and queue {self._name}")

    def _post(self, path: str, kind: str, spec: dict[str, Any]) -> None:
        metadata = {"name": self._name}
        wanted = {"apiVersion": "postbus.dev/v1alpha1", "kind": kind, "metadata": metadata}
        self._api.request("POST", path, {**wanted, "spec": spec})

    def wait_until_ready(self, limit_s: float) -> str:
        """Return the name of the Secret to connect with."""

        def look() -> tuple[str, str]:
            status = self._api.request("GET", f"{self._queues}/{self._name}").get("status", {})
            found = [each for each in status.get("conditions", ()) if each["type"] == "Ready"]
            shown = f"{found[0]['reason']}: {found[0]['message']}" if found else "no status yet"
            is_ready = bool(found) and found[0]["status"] == "True"
            return (status.get("binding", {}).get("name", "") if is_ready else ""), shown

        return self._wait("the queue is not ready", limit_s, look)

    def write_secret(self, name: str, folder: Path) -> None:
        """Write the Secret as a mount would show it."""
        for key, value in self._api.request("GET", f"{self._core}/secrets/{name}")["data"].items():
            (folder / key).write_bytes(base64.b64decode(value))

    def delete(self) -> None:
        """Delete both, wait until they are gone, and remove what is kept of a deleted bus."""
        paths = [f"{self._queues}/{self._name}", f"{self._buses}/{self._name}"]
        left = [path for path in paths if self._api.exists(path)]
        for path in left:
            self._api.request("DELETE", path)

        def look() -> tuple[str, str]:
            left = [path.split("/")[-2] for path in paths if self._api.exists(path)]
            return ("" if left else "gone"), f"waits for the deletion of {', '.join(left)}"

        self._wait("not deleted", DELETE_S, look)
        for plural in ("persistentvolumeclaims", "secrets"):
            self._api.request(
                "DELETE", f"{self._core}/{plural}?labelSelector=postbus.dev/bus={self._name}"
            )
        print(f"deleted {self._name}")

    def _wait(self, failure: str, limit_s: float, look: Callable[[], tuple[str, str]]) -> str:
        """Look until there is a result, and print what is seen meanwhile when it changes."""
        last = ""
        end_s = time.monotonic() + limit_s
        while True:
            found, shown = look()
            if found:
                return found
            if shown != last:
                print(shown)
            last = shown
            if time.monotonic() > end_s:
                raise Failure(f"{failure}: {shown}")
            time.sleep(POLL_S)


def main(
    namespace: str, seconds: str, storage_class: str = "", api: ClusterApi | None = None
) -> int:
    """Return the exit code."""
    trial = Trial(api or ClusterApi(), namespace)
    code = 1
    try:
        trial.create(storage_class)
        with tempfile.TemporaryDirectory() as folder:
            trial.write_secret(trial.wait_until_ready(float(seconds)), Path(folder))
            code = send_and_receive.main(folder)
    except Failure as error:
        print(error)
    finally:
        try:
            trial.delete()
        except Failure as error:
            print(error)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
