"""The rows that need a node: each function measures one of the table of docs/benchmarks.md."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.scale import audit
from e2e.scale.cluster import Cluster, say, until
from e2e.scale.figures import Report
from e2e.scale.processes import (
    Usage,
    control_calls,
    leader,
    metrics,
    operators,
    total,
    usage,
)
from e2e.scale.resources import BUS, LABEL, Plan
from e2e.scale.sightings import Sightings, watching
from e2e.tests.cluster import SYSTEM

from postbus_operator.bus.session import COUNTS_S
from postbus_operator.kube.resource_types import PODS, RESOURCES

OPERATOR_PORT: Final = 8080
HOUR_S: Final = 3_600.0
APPLIED: Final = 50
"""Queues that are applied one after the other."""


@dataclass
class Run:
    """What all rows share."""

    cluster: Cluster
    plan: Plan
    report: Report
    log: Path
    idle_s: float

    async def operator(self) -> Usage:
        """Return what the leader uses."""
        return await usage(SYSTEM, await leader(self.cluster))

    async def looks(self) -> float:
        """Return the looks at resources so far of the leader."""
        found = await metrics(self.cluster, SYSTEM, await leader(self.cluster), OPERATOR_PORT)
        return total(found, "postbus_operator_reconciles_total")

    async def waiting(self) -> float:
        """Return the resources that wait for the leader's look, or are looked at."""
        found = await metrics(self.cluster, SYSTEM, await leader(self.cluster), OPERATOR_PORT)
        names = ("postbus_operator_queue_depth", "postbus_operator_reconciles_running")
        return sum(total(found, each) for each in names)

    async def calls(self) -> float:
        """Return the control calls of the bus so far."""
        return await control_calls(self.cluster, self.plan.home, self.plan.broker)

    def writes(self, begin: str) -> audit.Written:
        """Return what the operator has written since."""
        return audit.writes(self.log, begin, audit.now())


async def prepare(run: Run) -> None:
    """Make the cluster namespaces and the bus, and wait for it."""
    cluster, plan = run.cluster, run.plan
    await cluster.create(plan.namespace(plan.home))
    await cluster.create(plan.bus())
    names = map(plan.namespace, plan.namespaces)
    await cluster.all_of("cluster namespaces", map(cluster.create, names))

    async def conditions() -> dict[str, str]:
        found = await cluster.api.get(RESOURCES["Namespace"], plan.home, BUS)
        listed = (found.get("status") or {}).get("conditions") or ()
        return {each["type"]: each["status"] for each in listed}

    await until(conditions, lambda found: found.get("Ready") == "True", 300, "the bus")


async def entities(run: Run) -> None:
    """Apply everything at once, and wait until all is ready."""
    cluster, plan, report = run.cluster, run.plan, run.report
    before, begin, calls = await run.operator(), audit.now(), await run.calls()
    broker = await usage(plan.home, plan.broker)
    async with watching(cluster, f"{LABEL}={plan.run}") as sightings:
        start = time.monotonic()
        applying = asyncio.create_task(
            cluster.all_of("entities", map(cluster.create, plan.entities()))
        )
        await sightings.wait(plan.entity_count, 3_600)
        took = time.monotonic() - start
        applied = await applying
    after, written = await run.operator(), run.writes(begin)
    what = f"{plan.entity_count:,} entities in {plan.namespace_count} cluster namespaces"
    report.note(f"{what}: applied → all Ready", took, "s", 600, 300, f"applied in {applied:.0f} s")
    report.note(f"{what}: operator's memory, peak", after.peak_mib, "MiB", 250, 150)
    report.note("operator's CPU meanwhile", after.cpu_s - before.cpu_s)
    spent = (await usage(plan.home, plan.broker)).cpu_s - broker.cpu_s
    report.note("broker's CPU meanwhile", spent)
    report.note("API writes for an entity", written.total / plan.entity_count, "", None, None,
                str(written))  # fmt: skip
    more = await run.calls() - calls
    report.note("control calls for an entity", more / plan.entity_count, "")


async def restart(run: Run) -> None:
    """Delete all pods of the operator; a new leader looks at everything and writes nothing."""
    cluster, count = run.cluster, run.plan.entity_count
    await settled(run)
    begin, start, old = audit.now(), time.monotonic(), set(await operators(cluster))
    for each in old:
        await cluster.api.delete(PODS, SYSTEM, each)

    async def looked() -> float:
        return 0.0 if await leader(cluster) in old else await run.looks()

    await until(looked, lambda found: found >= count, 600, "looks of a new leader")
    await until(run.waiting, lambda found: not found, 600, "the queue of a new leader")
    took = time.monotonic() - start
    await asyncio.sleep(10)
    written = run.writes(begin)
    report = run.report
    report.note("operator restarted with these: caught up", took, "s", 60, 30)
    report.note("operator restarted with these: writes", written.total, "", 0, 0, str(written))
    peak = (await run.operator()).peak_mib
    report.note("operator restarted with these: memory, peak", peak, "MiB", 250, 150)


async def settled(run: Run) -> None:
    """Wait until the operator has nothing to do; first counts come a minute later."""

    async def writes() -> int:
        begin = audit.now()
        await asyncio.sleep(COUNTS_S + 5)
        return run.writes(begin).total

    await until(writes, lambda found: found == 0, 900, "an operator without work")


async def unchanged(run: Run) -> None:
    """Apply everything as it is, and wait for a whole walk over all resources."""
    cluster, plan = run.cluster, run.plan
    wanted = list(plan.entities())
    # The first apply takes over what was created, which changes the object.
    await cluster.all_of("first apply", map(cluster.apply, wanted))
    await settled(run)
    begin, calls, looks = audit.now(), await run.calls(), await run.looks()
    await cluster.all_of("apply of the same", map(cluster.apply, wanted))
    count = plan.entity_count
    await until(run.looks, lambda found: found - looks >= count, 1_200, "a walk over everything")
    written, more = run.writes(begin), await run.calls() - calls
    run.report.note("re-apply and resync of everything: API writes", written.total, "", 0, 0,
                    str(written))  # fmt: skip
    run.report.note("re-apply and resync of everything: control calls", more, "", 20, 5)


async def idle(run: Run) -> None:
    """Do nothing for a while."""
    await settled(run)
    say(f"idle for {run.idle_s:g} s")
    begin, calls, before = audit.now(), await run.calls(), await run.operator()
    start = time.monotonic()
    await asyncio.sleep(run.idle_s)
    took = time.monotonic() - start
    after, written = await run.operator(), run.writes(begin)
    hours = HOUR_S / took
    seen = f"in {took / 60:.0f} min"
    report = run.report
    report.note("idle: API writes but for the Lease", written.total, "", 0, 0, f"{seen}: {written}")
    spent = 100 * (after.cpu_s - before.cpu_s) / took
    report.note("idle: operator's CPU", spent, "% of a core", 2, 1, seen)
    more = await run.calls() - calls
    report.note("idle: control calls an hour", more * hours, "", None, None, f"{more:.0f} {seen}")


async def apply(run: Run) -> None:
    """Apply queues one after the other; each is ready before the next one."""
    cluster, plan = run.cluster, run.plan
    filled, ready = [], []
    async with watching(cluster, f"{LABEL}={plan.run}") as sightings:
        for number in range(APPLIED):
            name = f"{plan.run}-single-{number}-{time.time_ns() % 10**6}"
            start = time.monotonic()
            await cluster.create(plan.queue(name))
            await sightings.wait_ready(plan.home, name)
            filled.append(sightings.filled[plan.home, name] - start)
            ready.append(sightings.ready[plan.home, name] - start)
    for what, found, limit, goal in (
        ("apply a Queue → Ready", ready, 3.0, 1.5),
        ("apply a Queue → status filled", filled, 1.0, 0.5),
    ):
        found.sort()
        middle = f"median {found[len(found) // 2]:.3f} s of {APPLIED}"
        worst = found[min(len(found) - 1, round(0.99 * len(found)))]
        run.report.note(f"{what}, p99", worst, "s", limit, goal, middle)


__all__ = [
    "Run", "Sightings", "apply", "entities", "idle", "prepare", "restart", "unchanged",
]  # fmt: skip
