"""Memory and CPU of the first process of a pod, and its metrics.

Read in the container with `kubectl exec`, so that it works on each cluster. The peak is that of the
process's life (VmHWM): that of the cgroup has the page cache in it.
"""

from __future__ import annotations

import asyncio
import os
import re
import urllib.request
from dataclasses import dataclass
from typing import Final

from e2e.scale.cluster import Cluster
from e2e.tests.cluster import SYSTEM, run

from postbus_operator.kube.resource_types import LEASES, PODS

TICKS_S: Final = os.sysconf("SC_CLK_TCK")
SELECTOR: Final = "app.kubernetes.io/name=postbus,app.kubernetes.io/component=operator"
MIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory in MiB, CPU in seconds since the start of the process."""

    peak_mib: float
    now_mib: float
    cpu_s: float


async def usage(namespace: str, pod: str) -> Usage:
    """Return what the first process of a pod uses."""
    command = ("kubectl", "--namespace", namespace, "exec", pod, "--", "cat")
    text = await asyncio.to_thread(run, *command, "/proc/1/status", "/proc/1/stat")
    found = {
        name: int(value) / MIB
        for name, value in re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", text, re.MULTILINE)
    }
    # After the name, which may have any character: state is field 3, user time 14, system time 15.
    fields = text.rpartition(")")[2].split()
    return Usage(found["VmHWM"], found["VmRSS"], (int(fields[11]) + int(fields[12])) / TICKS_S)


async def leader(cluster: Cluster) -> str:
    """Return the pod that holds the Lease; an empty text if none does."""
    lease = await cluster.api.get(LEASES, SYSTEM, "postbus-operator")
    holder: str = lease["spec"].get("holderIdentity") or ""
    return holder.rpartition("_")[0]


async def operators(cluster: Cluster) -> list[str]:
    """Return the pods of the operator."""
    found = cluster.api.list(PODS, SYSTEM)
    return [
        each["metadata"]["name"]
        async for each in found
        if each["metadata"]["name"].startswith("postbus-operator-")
    ]


async def metrics(cluster: Cluster, namespace: str, pod: str, port: int) -> dict[str, float]:
    """Return the samples of a pod by name with labels, through the API server."""
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/metrics"
    return samples(await cluster.text(path))


def read_metrics(url: str) -> dict[str, float]:
    """Return the samples at an address. Raises OSError."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        return samples(answer.read().decode())


def samples(text: str) -> dict[str, float]:
    """Return value by name with labels."""
    found = re.findall(r"^([a-zA-Z_]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def total(found: dict[str, float], name: str, *labels: str) -> float:
    """Return the sum of the series of a metric that have these labels, as in `api="control"`."""
    return sum(
        value
        for series, value in found.items()
        if series.partition("{")[0] == name and all(each in series for each in labels)
    )


async def control_calls(cluster: Cluster, namespace: str, broker: str) -> float:
    """Return the answers of the control API of a broker so far."""
    found = await metrics(cluster, namespace, broker, 9464)
    return total(found, "postbus_http_requests_total", 'api="control"')
