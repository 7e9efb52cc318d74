"""Measure the operator with many buses and no entity: `python -m e2e.scale.buses`.

No node: an API server with etcd, the operator as a process, and a stand-in for the brokers
(`standin.py`). What controllers and kubelets report of StatefulSets is written here.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from bench.procfs import memory_kib, read_process
from e2e.scale import audit
from e2e.scale.cluster import Cluster, cluster, say, until
from e2e.scale.figures import Report
from e2e.scale.processes import read_metrics, total
from e2e.scale.standin import StandIn
from e2e.tests import manifests

from postbus_operator.bus.access import CONTROL_PORT
from postbus_operator.kube.resource_types import RESOURCES, SECRETS, STATEFUL_SETS
from tests.kube.api_server import OPERATOR, OPERATOR_TOKEN, ROOT, ApiServer, api_server
from tests.kube.conftest import install_definitions
from tests.ports import free_ports

KIB: Final = 1024
HOUR_S: Final = 3_600.0
LOOK_S: Final = 600.0
"""Limit of a walk over all buses; the resync period is 300 s."""


class Operator:
    """The process; each start is a new leader."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        [self._port] = free_ports(1)
        self._log = folder / "operator.log"
        self._process: subprocess.Popen[bytes] | None = None
        settings = {
            "LEASE_NAMESPACE": "default",
            "HTTP_HOST": "127.0.0.1",
            "HTTP_PORT": str(self._port),
        }
        self._environment = os.environ | {
            "KUBECONFIG": str(server.kubeconfig(OPERATOR_TOKEN)),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "dataplane", ROOT / "operator"))),
            **{f"POSTBUS_OPERATOR_{name}": value for name, value in settings.items()},
        }

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "e2e.scale.operator_here"],
                env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip

    def end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def peak_mib(self) -> float:
        return memory_kib(self.pid, "VmHWM") / KIB

    @property
    def cpu_s(self) -> float:
        found = read_process(self.pid)
        return 0.0 if found is None else found.cpu_s

    async def metrics(self) -> dict[str, float]:
        return await asyncio.to_thread(read_metrics, f"http://127.0.0.1:{self._port}/metrics")

    async def looks(self) -> float:
        try:
            found = await self.metrics()
        except OSError:
            return 0.0
        return total(found, "postbus_operator_reconciles_total")

    async def waiting(self) -> float:
        found = await self.metrics()
        names = ("postbus_operator_queue_depth", "postbus_operator_reconciles_running")
        return sum(total(found, each) for each in names)

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:]


class Buses:
    """The buses of a run, and what the missing controllers and nodes do for them."""

    def __init__(self, connected: Cluster, standin: StandIn, count: int) -> None:
        self._cluster = connected
        self._standin = standin
        self.names = [f"bus-{number:03}" for number in range(count)]
        self.ready: set[str] = set()
        self.trouble = ""
        """What a bus that is not ready says."""

    async def make(self) -> None:
        """Make the buses, each in its cluster namespace."""
        create = self._cluster.create
        namespaces = [_named("v1", "Namespace", name) for name in self.names]
        await self._cluster.all_of("cluster namespaces", map(create, namespaces))
        wanted = [manifests.bus(name) for name in self.names]
        for each in wanted:
            each["metadata"]["namespace"] = each["metadata"]["name"]
        await self._cluster.all_of("buses", map(create, wanted))

    async def run_pods(self) -> None:
        """Report each StatefulSet as running; a broker's bus answers before. Does not end."""
        async with asyncio.TaskGroup() as group:
            async for event, found in self._cluster.events(STATEFUL_SETS, ""):
                generation = found["metadata"]["generation"]
                seen = (found.get("status") or {}).get("observedGeneration")
                if event in ("ADDED", "MODIFIED") and seen != generation:
                    group.create_task(self._run_pod(found, generation))

    async def _run_pod(self, found: dict[str, Any], generation: int) -> None:
        name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
        if name.endswith("-broker"):
            bus = name.removesuffix("-broker")
            secret = await self._cluster.api.get(SECRETS, namespace, f"{bus}-tls")
            data = {key: base64.b64decode(value) for key, value in secret["data"].items()}
            host = f"{name}-0.{bus}-brokers.{namespace}.svc.cluster.local"
            self._standin.add(host, bus, data["tls.crt"], data["tls.key"])
        status = {
            "replicas": 1, "readyReplicas": 1, "currentReplicas": 1, "updatedReplicas": 1,
            "availableReplicas": 1, "currentRevision": "a", "updateRevision": "a",
            "observedGeneration": generation,
        }  # fmt: skip
        uid = found["metadata"]["uid"]
        await self._cluster.api.put_status(STATEFUL_SETS, namespace, name, uid, status)

    async def look(self) -> None:
        """Note which buses are ready. Does not end."""
        async for _, found in self._cluster.events(RESOURCES["Namespace"], ""):
            conditions = (found.get("status") or {}).get("conditions", ())
            [ready] = [each for each in conditions if each["type"] == "Ready"] or [{}]
            if ready.get("status") == "True":
                self.ready.add(found["metadata"]["name"])
            else:
                self.ready.discard(found["metadata"]["name"])
                self.trouble = ready.get("message", "")

    async def missing(self) -> str:
        """Return how many are not ready, and why one of them; empty if all are."""
        left = len(self.names) - len(self.ready)
        return f"{left} are not ready: {self.trouble}" if left else ""


def _named(version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


def _grant(server: ApiServer) -> None:
    """Let the operator do everything: its rights are tried elsewhere."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    subject = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": OPERATOR}
    path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    made = _named("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "operator")
    server.request("POST", path, made | {"roleRef": role, "subjects": [subject]})


@asynccontextmanager
async def background(*work: Any) -> AsyncIterator[None]:
    """Run work beside the block; its failure ends the run with a line."""
    tasks = [asyncio.create_task(each) for each in work]
    for each in tasks:
        each.add_done_callback(lambda task: task.cancelled() or say(f"ended: {task.exception()!r}"))
    try:
        yield
    finally:
        for each in tasks:
            each.cancel()


async def measure(server: ApiServer, said: argparse.Namespace, folder: Path) -> Report:
    """Make buses, start the operator again, be idle."""
    report, standin, log = Report(), StandIn(), server.folder / "audit.jsonl"
    operator, count = Operator(server, folder), said.buses

    async def quiet() -> int:
        begin = audit.now()
        await asyncio.sleep(15)
        return audit.writes(log, begin, audit.now()).total

    await standin.start(CONTROL_PORT)
    async with cluster() as connected:
        buses = Buses(connected, standin, count)
        try:
            operator.start()
            async with background(buses.run_pods(), buses.look()):
                start, begin = time.monotonic(), audit.now()
                await buses.make()
                await until(buses.missing, lambda found: not found, 7_200, "buses")
                what = f"{count} buses without an entity"
                report.note(f"{what}: applied → all Ready", time.monotonic() - start)
                await until(quiet, lambda found: found == 0, 900, "an operator without work")
                report.note(f"{what}: operator's memory, peak", operator.peak_mib, "MiB", 250, 150)
                report.note(f"{what}: operator's CPU", operator.cpu_s)
                written = audit.writes(log, begin, audit.now())
                report.note("API writes for a bus", written.total / count, "", None, None,
                            str(written))  # fmt: skip
                calls = standin.calls
                report.note("control calls for a bus", calls.total() / count, "", None, None,
                            _list(calls))  # fmt: skip
                await _idle(report, operator, standin, log, said.idle_s, count)
                await _restart(report, operator, standin, log, count)
        finally:
            operator.end()
            await standin.stop()
    for each in sorted(set(standin.misfits))[:10]:
        say(f"not as docs/openapi.json says: {each}")
    report.note("answers and requests that docs/openapi.json does not allow",
                len(standin.misfits), "", 0)  # fmt: skip
    return report


async def _idle(
    report: Report, operator: Operator, standin: StandIn, log: Path, idle_s: float, count: int
) -> None:
    say(f"idle for {idle_s:g} s")
    begin, cpu, calls, start = audit.now(), operator.cpu_s, standin.calls, time.monotonic()
    looks = await operator.looks()
    await asyncio.sleep(idle_s)
    took = time.monotonic() - start
    written, more = audit.writes(log, begin, audit.now()), standin.calls - calls
    seen = f"in {took / 60:.0f} min with {await operator.looks() - looks:.0f} looks"
    report.note("idle: API writes but for the Lease", written.total, "", 0, 0, f"{seen}: {written}")
    spent = 100 * (operator.cpu_s - cpu) / took
    report.note("idle: operator's CPU", spent, "% of a core", None, None, seen)
    hours = took / HOUR_S
    report.note("idle: control calls a bus and hour", more.total() / count / hours, "", None, None,
                _list(more))  # fmt: skip


async def _restart(
    report: Report, operator: Operator, standin: StandIn, log: Path, count: int
) -> None:
    operator.end()
    begin, start, calls = audit.now(), time.monotonic(), standin.calls
    operator.start()
    await until(operator.looks, lambda found: found >= count, LOOK_S, "looks of a new leader")
    await until(operator.waiting, lambda found: not found, LOOK_S, "the queue of a new leader")
    took = time.monotonic() - start
    await asyncio.sleep(10)
    written, more = audit.writes(log, begin, audit.now()), standin.calls - calls
    report.note("operator restarted with these: caught up", took, "s", 60, 30)
    report.note("operator restarted with these: writes", written.total, "", 0, 0, str(written))
    report.note("operator restarted with these: control calls a bus", more.total() / count, "",
                20, 5, _list(more))  # fmt: skip
    report.note("operator restarted with these: memory, peak", operator.peak_mib, "MiB", 250, 150)


def _list(calls: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(calls.items()))


def main() -> int:
    """Measure, and return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m e2e.scale.buses", description=__doc__)
    parser.add_argument("--buses", type=int, default=500, metavar="N")
    parser.add_argument("--idle-s", type=float, default=600, metavar="S", help="default: 600")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="postbus-scale-") as folder, api_server() as server:
        install_definitions(server)
        _grant(server)
        os.environ["KUBECONFIG"] = str(server.kubeconfig())
        report = asyncio.run(measure(server, said, Path(folder)))
    print(report.text())
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
