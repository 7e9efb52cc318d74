#!/usr/bin/env python3
"""Compares the cost of a message in two checkouts of Postbus, in alternating pairs.

Both buses run at once and alternate, so that a busy hour meets both. CPU is read from the
scheduler's own accounts, finer than the clock ticks of `run.py`.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from measuring import MAIN_QUEUE, LoadClient, reason_of
from postbus_server import Postbus
from procfs import Process
from run import build_client
from server import BenchError

BOTH = ("--mode", "both", "--window", 100)
SEND = ("--mode", "send", "--window", 100)
RECEIVE = ("--mode", "receive")
STEPS = {"send": SEND, "receive": RECEIVE, "both": BOTH}
EPILOG = """
Example:

  git worktree add /tmp/before v0.1.0 && bench/pairs.py /tmp/before --steps both,send
"""
Pair: TypeAlias = tuple[tuple[float, float], tuple[float, float]]
"""Costs of one step before and after: of the broker and of Postgres, in microseconds."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Checkout(Postbus):
    """A bus of some checkout."""

    def __init__(self, checkout: Path, directory: Path, port: int) -> None:
        super().__init__(directory, port, [MAIN_QUEUE], dsn=None, tier="Standard")
        self._source = checkout / "dataplane"

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": str(self._source)}

    def cpu_us(self) -> tuple[float, float]:
        """Return the CPU time of the broker so far, and that of its Postgres."""
        own, postgres = self.processes()
        return sum(map(_run_us, own)), sum(map(_run_us, postgres))


def _run_us(process: Process) -> float:
    total_ns = 0
    for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e3


@app.command(epilog=EPILOG)
def main(
    before: Annotated[Path, typer.Argument(help="The checkout to compare this one with.")],
    steps: Annotated[str, typer.Option(help="Steps to run: send, receive, both.")] = ",".join(
        STEPS
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of each step.")] = 12,
    count: Annotated[int, typer.Option(min=1_000, help="Messages of one run.")] = 100_000,
    base_port: Annotated[int, typer.Option(help="First of 40 ports to use.")] = 25770,
) -> None:
    """Print the cost of a message here as a multiple of its cost in another checkout."""
    client = LoadClient(build_client())
    names = steps.split(",")
    with ExitStack() as cleanup:
        here = Path(__file__).resolve().parents[1]
        buses = []
        for number, checkout in enumerate((before.resolve(), here)):
            bus = Checkout(checkout, here / f"bench/work/pair-{number}", base_port + 20 * number)
            cleanup.callback(bus.stop)
            bus.start()
            buses.append(bus)
            _run(client, bus, *BOTH, "--count", count)
        for name in names:
            pairs = [_pair(client, buses, name, count, turn) for turn in range(rounds)]
            _print(name, pairs, count)


def _print(name: str, pairs: list[Pair], count: int) -> None:
    """Print the ratio with its quartiles, and the costs of a message."""
    ratios = sorted(sum(after) / sum(before) for before, after in pairs)
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    print(f"{name:8} {statistics.median(ratios):.3f}  ({low:.3f} .. {high:.3f})", end="")
    for index, process in enumerate(("broker", "Postgres")):
        before, after = (
            statistics.median(pair[side][index] for pair in pairs) / count for side in (0, 1)
        )
        print(f"   {process} {before:.1f} -> {after:.1f} us", end="")
    print()


def _pair(client: LoadClient, buses: list[Checkout], name: str, count: int, turn: int) -> Pair:
    """Run a step on both, another one first each time; return the costs."""
    costs = {}
    for bus in buses if turn % 2 else reversed(buses):
        if name == "receive":
            _run(client, bus, "--mode", "send", "--window", 1000, "--count", count)
        broker_us, postgres_us = bus.cpu_us()
        _run(client, bus, *STEPS[name], "--count", count)
        own, postgres = bus.cpu_us()
        costs[bus] = own - broker_us, postgres - postgres_us
        if name == "send":
            _run(client, bus, *RECEIVE, "--count", count)
    return costs[buses[0]], costs[buses[1]]


def _run(client: LoadClient, bus: Checkout, *options: str | float) -> None:
    result = client.run(bus, MAIN_QUEUE, *options)
    if not result["is_complete"]:
        raise BenchError(reason_of(result))


if __name__ == "__main__":
    try:
        app()
    except BenchError as error:
        raise SystemExit(str(error)) from None
