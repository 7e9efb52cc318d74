"""Faults of a bus on our own node, one after another, under clients; the check of their record.

The seed decides which faults come, in which order, and how long each lasts. After each one the run
waits until every path of the clients works, the operator applies a change, and all messages that
were accepted before are through. It ends with a table of the faults. After a violation it ends at
once, with exit code 1, and the logs of the pods stay in a folder.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from e2e.faults.checker import refused_for, violations
from e2e.faults.report import Done, line, table, totals
from e2e.faults.scene import Scene, scene
from e2e.faults.table import FAULTS, Fault, deck
from e2e.tests.cluster import SYSTEM, Refused, kubectl
from e2e.tests.conftest import install_operator, wait_for_operator

from tests.faults.history import Violation

CHECK_EVERY = 10
"""The record is checked after this many faults, and at the end."""

EXAMPLES = """
examples, on a node that runs and has the images (make e2e-faults does that too):
  e2e/run.sh .venv/bin/python -m e2e.faults.run --faults 20 --seed 7
  e2e/run.sh .venv/bin/python -m e2e.faults.run --only broker-kill,store-kill --faults 6
  e2e/run.sh .venv/bin/python -m e2e.faults.run --slow --faults 0
"""


class Run:
    """Faults of one seed."""

    def __init__(self, scene: Scene, seed: int, logs: Path) -> None:
        self.scene, self.chance, self.logs = scene, random.Random(seed), logs
        self.done: list[Done] = []
        self.violations: list[Violation] = []

    def one(self, fault: Fault) -> None:
        """Inject a fault, wait for the recovery, and write a line."""
        start = time.time()
        fault.inject(self.scene, self.chance)
        healed = time.time()
        took: dict[str, float] = {}
        try:
            took = self.scene.wait_recovered(healed, fault.limit_s)
        except AssertionError as error:
            what = str(error).replace("\n", " ")[:600]
            self.violations.append(Violation("recovery", fault.name, "", what))
        end = time.time()
        gap = refused_for(self.scene.record.lines[-20_000:], "plain", start, end)
        self.done.append(Done(fault.name, start, healed, end, gap, took))
        print(line(len(self.done), self.done[-1]), flush=True)
        if len(self.done) % CHECK_EVERY == 0:
            self.check(is_end=False)
        if self.violations:
            self.keep_logs()

    def check(self, *, is_end: bool) -> None:
        disturbed = [(each.start, each.end) for each in self.done]
        for each in violations(self.scene.record.lines, disturbed, is_end=is_end):
            if each not in self.violations:
                self.violations.append(each)

    def keep_logs(self) -> None:
        """Write what pods, resources and clients say now."""
        folder = self.logs / f"after-{len(self.done)}"
        folder.mkdir(parents=True, exist_ok=True)
        for space in (self.scene.space.name, SYSTEM):
            for kind in ("pods", "events", "postbus", "statefulsets", "leases"):
                keep(folder / f"{space}-{kind}.yaml", space, "get", kind, "--output=yaml")
            for pod in said(space, "get", "pods", "--output=name").split():
                for flag in ("--previous=false", "--previous"):
                    name = f"{space}-{pod.partition('/')[2]}{flag}.log"
                    keep(folder / name, space, "logs", pod, flag)
        record = self.scene.folder / "record"
        (folder / "record").write_bytes(record.read_bytes())


def said(space: str, *command: str) -> str:
    try:
        return kubectl("--namespace", space, *command)
    except Refused as error:
        return str(error)


def keep(path: Path, space: str, *command: str) -> None:
    path.write_text(said(space, *command))


def faults_of(names: str) -> tuple[Fault, ...]:
    known = {each.name: each for each in FAULTS}
    if not names:
        return tuple(each for each in FAULTS if not each.is_slow)
    unknown = set(names.split(",")) - set(known)
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}; --list shows them")
    return tuple(known[each] for each in names.split(","))


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m e2e.faults.run",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=20, help="number of faults (20)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed, the same faults (1)")
    parser.add_argument("--only", default="", metavar="NAMES", help="only these, with commas")
    parser.add_argument("--slow", action="store_true", help="also those that take minutes, once")
    parser.add_argument("--limit-s", type=float, help="begin no fault after this many seconds")
    parser.add_argument("--logs", type=Path, help="folder for logs after a violation")
    parser.add_argument("--list", action="store_true", help="show the faults and end")
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    """Return the exit code: 0 without violations."""
    chosen = arguments(given)
    if chosen.list:
        for each in FAULTS:
            print(f"{each.name:24} {'slow' if each.is_slow else ''}".rstrip())
        return 0
    drawn = deck(chosen.seed, chosen.faults, faults_of(chosen.only))
    if chosen.slow:
        drawn += [each for each in FAULTS if each.is_slow]
    logs = chosen.logs or Path(tempfile.gettempdir()) / f"postbus-faults-{chosen.seed}"
    if os.environ.get("E2E_CLUSTER", "node") != "node":
        print("faults need E2E_CLUSTER=node: signals go to processes that this machine sees")
        return 77
    install_operator()
    wait_for_operator()
    began = time.monotonic()
    with scene() as made:
        run = Run(made, chosen.seed, logs)
        for fault in drawn:
            if chosen.limit_s is not None and time.monotonic() - began > chosen.limit_s:
                print(f"no further fault after {chosen.limit_s:g} s")
                break
            run.one(fault)
            if run.violations:
                break
        finish(run)
    print(table(run.done))
    print(totals(run.done, made.record.lines, time.monotonic() - began))
    for violation in run.violations[:50]:
        print(f"violation: {violation}")
    if run.violations:
        print(f"{len(run.violations)} violations with seed {chosen.seed}; logs: {logs}")
    return 1 if run.violations else 0


def finish(run: Run) -> None:
    """End the clients and check the whole record."""
    try:
        run.scene.end_clients()
    except AssertionError as error:
        what = str(error).replace("\n", " ")[:600]
        run.violations.append(Violation("end", "", "", what))
    run.check(is_end=not run.violations)
    if run.violations:
        run.keep_logs()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
