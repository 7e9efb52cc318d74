"""The rows with a fault: the operator's leader is killed, the broker with all entities ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Final

from e2e.faults import node
from e2e.scale.cluster import until
from e2e.scale.processes import leader
from e2e.scale.resources import BUS, LABEL
from e2e.scale.rows import Run, settled
from e2e.scale.sightings import watching
from e2e.tests import manifests
from e2e.tests.cluster import SYSTEM, Space, wait_for
from e2e.tests.traffic import LOCK, traffic

from postbus_operator.kube.resource_types import PODS

KILLS: Final = 3
REPLICAS: Final = 2
FEW_ENTITIES: Final = 1_000
"""The limit of a refusal is for a bus with so many: a broker reads its entities when it starts."""


async def leader_killed(run: Run) -> None:
    """Kill the operator's leader, and apply a queue: the next leader makes it ready."""
    cluster, plan = run.cluster, run.plan
    await settled(run)
    times = []
    async with watching(cluster, f"{LABEL}={plan.run}") as sightings:
        for number in range(KILLS):
            await until(_ready_operators, lambda found: found >= REPLICAS, 120, "both operators")
            pod = await cluster.api.get(PODS, SYSTEM, await leader(cluster))
            processes = node.processes_of_pod(pod["metadata"]["uid"])
            assert processes, "only processes of the own node can be killed"
            name = f"{plan.run}-killed-{number}"
            start = time.monotonic()
            node.send(signal.SIGKILL, processes)
            await cluster.create(plan.queue(name))
            await sightings.wait_ready(plan.home, name, 120)
            times.append(sightings.ready[plan.home, name] - start)
    remark = f"worst of {', '.join(f'{each:.1f}' for each in sorted(times))}"
    what = "leader killed → a Queue applied then is Ready"
    run.report.note(what, max(times), "s", 20, 17, remark)


async def _ready_operators() -> int:
    found = await asyncio.to_thread(Space(SYSTEM).get, "deployment/postbus-operator")
    count: int = found["status"].get("readyReplicas") or 0
    return count


async def broker_ends(run: Run) -> None:
    """Delete the pod of the broker, and roll it, while a client sends and receives."""
    space, pod, count = Space(run.plan.home), run.plan.broker, run.plan.entity_count
    limits = (15.0, 8.0) if count <= FEW_ENTITIES else (None, None)
    await asyncio.to_thread(_make_queue, space)
    for what, fault in (
        ("broker pod deleted", lambda: _delete(space, pod)),
        ("planned roll", lambda: _roll(space)),
    ):
        refused_s = await asyncio.to_thread(_refused_for, space, pod, fault)
        run.report.note(f"{what}, {count:,} entities: sends refused for", refused_s, "s", *limits)


def _make_queue(space: Space) -> None:
    rules = [{"name": "app", "rights": ["Send", "Listen"]}]
    space.apply(manifests.queue("orders", BUS, authorizationRules=rules, lockDuration=LOCK))
    space.wait_ready("sbq/orders")


def _refused_for(space: Space, broker: str, fault: Callable[[], None]) -> float:
    """Return the longest time without an accepted message; raises if a message was lost."""
    pod = f"pod/{broker}"
    before = space.get(pod)["metadata"]["uid"]
    with traffic(space, "orders-queue-app") as client:
        fault()
        wait_for(lambda: space.uid_if_ready(pod), lambda found: found not in {"", before}, 120)
    client.check()
    refused_s: float = client.account["refused_for"]
    return refused_s


def _delete(space: Space, pod: str) -> None:
    space.kubectl("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")


def _roll(space: Space) -> None:
    template = {"annotations": {"example.test/roll": str(time.time_ns())}}
    space.patch(f"sbns/{BUS}", {"spec": {"operatorSpec": {"podTemplate": template}}})
