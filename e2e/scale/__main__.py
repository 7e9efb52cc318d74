"""Measure what docs/benchmarks.md tells of Kubernetes, on the cluster of KUBECONFIG."""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from e2e.scale import audit, fault_rows, rows
from e2e.scale.cluster import cluster, remove_namespaces, say
from e2e.scale.figures import Report
from e2e.scale.resources import Plan
from e2e.tests.conftest import install_operator, wait_for_operator

ROWS: Final[dict[str, Callable[[rows.Run], Awaitable[None]]]] = {
    each.__name__: each
    for each in (
        rows.apply, rows.entities, rows.restart, rows.unchanged, rows.idle,
        fault_rows.leader_killed, fault_rows.broker_ends,
    )
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m e2e.scale",
        description=__doc__,
        epilog="\n".join(f"{name:14} {each.__doc__}" for name, each in ROWS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="default: all, in this order")
    parser.add_argument("--entities", type=int, default=10_000, metavar="N")
    parser.add_argument("--namespaces", type=int, default=500, metavar="N")
    parser.add_argument("--idle-s", type=float, default=600, metavar="S", help="default: 600")
    text = "audit log of the API server; default: that of the own node"
    parser.add_argument("--audit", type=Path, default=audit.DEFAULT, metavar="FILE", help=text)
    text = "name of cluster namespaces; one that exists continues"
    parser.add_argument("--run", default=f"s{uuid.uuid4().hex[:5]}", metavar="NAME", help=text)
    parser.add_argument("--keep", action="store_true", help="leave everything for another run")
    return parser.parse_args()


async def measure(said: argparse.Namespace) -> Report:
    """Measure the rows."""
    report = Report()
    plan = Plan(said.run, said.entities, said.namespaces)
    async with cluster() as connected:
        run = rows.Run(connected, plan, report, said.audit, said.idle_s)
        say(f"run {plan.run}")
        await rows.prepare(run)
        try:
            for name in said.rows or ROWS:
                say(f"row {name}")
                await ROWS[name](run)
        finally:
            if not said.keep:
                await remove_namespaces(connected, [*plan.namespaces, plan.home])
    return report


def main() -> int:
    """Measure, and return 1 if a limit is missed."""
    said = arguments()
    install_operator()
    wait_for_operator()
    report = asyncio.run(measure(said))
    print(report.text())
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
