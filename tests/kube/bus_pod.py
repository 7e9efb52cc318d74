"""A broker as a pod of a bus would run it: the Secrets and the manifest that the operator wrote.

The kubelet is missing: what it reports of a container that has ended is written by the test.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from postbus_operator.kube.resource_types import CONFIG_MAPS, PODS, STATEFUL_SETS
from tests.broker.brokers_rig import PORTS
from tests.dev_bus import environment
from tests.kube.bus_rig import Rig
from tests.ports import free_ports

MAX_LAST_WORDS = 2_048
"""The end of a log that the kubelet keeps as the message of a container."""


@dataclass
class Pod:
    """A running broker; `url` is that of its metrics and health."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def last_words(self) -> str:
        return self.log.read_text()[-MAX_LAST_WORDS:]


def start(manifests: Path, settings: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "postbus", "serve", str(manifests)],
            env=environment(**settings),
            stdout=output,
            stderr=output,
        )


@asynccontextmanager
async def broker_pod(rig: Rig, folder: Path, bus: str = "shop-bus") -> AsyncIterator[Pod]:
    """Run the broker of a bus; the operator learns of its health."""
    stores = await rig.data_of(f"{bus}-stores")
    key = await rig.data_of(f"{bus}-sealing-key")
    manifest = await rig.get(CONFIG_MAPS, f"{bus}-manifest")
    assert manifest is not None
    folder.mkdir()
    for name, data in {**stores, "sealing.key": key["key"]}.items():
        (folder / name).write_bytes(data.replace(b"/etc/postbus/stores", str(folder).encode()))
        (folder / name).chmod(0o600)
    (folder / "manifests").mkdir()
    for name, text in manifest["data"].items():
        (folder / "manifests" / name).write_text(text)
    [port] = free_ports(1)
    numbers = dict.fromkeys(PORTS, "0") | {"metrics_port": str(port)}
    settings = {
        "POSTBUS_DATA": str(folder / "data"),
        "POSTBUS_STORES_FILE": str(folder / "stores"),
        "POSTBUS_SEALING_KEY_FILE": str(folder / "sealing.key"),
        "POSTBUS_BROKER_NAME": f"{bus}-broker-0",
        "POSTBUS_LOG_FORMAT": "json",
        **{f"POSTBUS_{name.upper()}": number for name, number in numbers.items()},
    }
    log = folder / "log"
    process = start(folder / "manifests", settings, log)
    url = f"http://127.0.0.1:{port}"
    rig.health_url = lambda key: f"{url}/readyz"
    try:
        yield Pod(process, url, log)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def show_end(rig: Rig, pod: Pod) -> None:
    """Write what the kubelet reports of a container that ends at each start."""
    broker = await rig.get(STATEFUL_SETS, "shop-bus-broker")
    assert broker is not None
    template = broker["spec"]["template"]
    ended = {"exitCode": pod.process.returncode, "message": pod.last_words, "reason": "Error"}
    wanted = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "shop-bus-broker-0", "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    }
    path = PODS.path(rig.namespace, "shop-bus-broker-0")
    await asyncio.to_thread(rig.server.apply, path, wanted)
    container = {
        "name": "broker",
        "image": "postbus:dev",
        "imageID": "",
        "ready": False,
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    status = {"status": {"containerStatuses": [container]}}
    await rig.request("PATCH", PODS, "shop-bus-broker-0/status", status)
