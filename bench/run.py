#!/usr/bin/env python3
"""Measures Postbus beside RabbitMQ and ActiveMQ Artemis on this machine; bench/README.md explains.

`make bench` calls it. It builds the load client, starts the brokers on loopback, runs the rows,
prints a table and writes everything as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import procfs
from costly_rules import COSTLY_RULE_ROWS
from fan_out import FAN_OUT_ROWS
from history import HISTORY_ROWS
from many import MANY_ROWS
from measuring import MAIN_QUEUE, Bench, LoadClient, Result
from messaging import MESSAGING_ROWS
from over_http import HTTP_ROWS
from peers import Artemis, RabbitMQ, RabbitMQ4
from postbus_server import Postbus
from report import Results, as_json, show
from rows import ROWS as PLAIN_ROWS
from rows import Row
from server import BenchError, Server
from transports import TRANSPORT_ROWS
from waiting import WAITING_ROWS

HERE = Path(__file__).resolve().parent
BROKERS = ("postbus", "rabbitmq", "rabbitmq4", "artemis")
ROWS = (
    *PLAIN_ROWS,
    *MESSAGING_ROWS,
    *TRANSPORT_ROWS,
    *FAN_OUT_ROWS,
    *COSTLY_RULE_ROWS,
    *WAITING_ROWS,
    *HTTP_ROWS,
    *MANY_ROWS,
    *HISTORY_ROWS,
)
EPILOG = """
Examples:

  bench/run.py                                    every default row, five rounds

  bench/run.py --rows send,both --rounds 3        rows by name or by the start of a name

  bench/run.py --rows paced --scale 0.1           a tenth of the messages and of the time

  bench/run.py --brokers postbus,rabbitmq4        two brokers; the others are rabbitmq and artemis

  bench/run.py --list                             list the rows
"""

# A log or a pipe has no width of its own; the table wants some.
console = Console(width=None if sys.stdout.isatty() else 240)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Yard:
    """Builds servers in the work directory, on ports that do not collide."""

    def __init__(self, work: Path, base_port: int, dsn: str | None) -> None:
        self._work = work
        self._base_port = base_port
        self._dsn = dsn

    def server(self, broker: str, row: Row) -> Server:
        """Return a broker, not started, with the queues and the tier a row wants."""
        directory = self._work / broker
        queues = list(row.queues)
        match broker:
            case "rabbitmq":
                return RabbitMQ(directory, self._base_port + 10, queues)
            case "rabbitmq4":
                return RabbitMQ4(directory, self._base_port + 30, queues)
            case "artemis":
                return Artemis(directory, self._base_port + 20, queues)
            case _:
                return Postbus(
                    directory,
                    self._base_port,
                    queues,
                    dsn=self._dsn,
                    tier=row.tier,
                    documents=row.documents,
                )

    def installed(self, wanted: list[str]) -> list[str]:
        """Return the brokers that can run, and print how to get the others."""
        found = []
        for broker in wanted:
            missing = self.server(broker, ROWS[0]).missing()
            if missing is None:
                found.append(broker)
            else:
                console.print(
                    f"{broker} is left out; to have it: {missing}", style="yellow", markup=False
                )
        return found


@app.command(epilog=EPILOG)
def main(
    rows: Annotated[
        str, typer.Option(help="Rows, comma-separated; prefixes of names are accepted.")
    ] = "",
    brokers: Annotated[str, typer.Option(help="Brokers to run, comma-separated.")] = ",".join(
        BROKERS
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of interleaved rows.")] = 5,
    scale: Annotated[float, typer.Option(min=0.001, help="Factor for all counts.")] = 1.0,
    warm_up: Annotated[int, typer.Option(min=0, help="Unmeasured rounds before the first.")] = 7,
    calm: Annotated[
        float, typer.Option(help="Seconds to wait, at most, for an idle machine before a round.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = HERE / "work/results.json",
    work: Annotated[Path, typer.Option(help="Data and logs of the brokers.")] = HERE / "work",
    base_port: Annotated[int, typer.Option(help="First of 40 ports to use.")] = 25670,
    dsn: Annotated[
        str | None, typer.Option(help="Postgres for Postbus; its schemas are dropped.")
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="List the rows and end.")] = False,
) -> None:
    """Measure Postbus, RabbitMQ and Artemis with the same load in the same run."""
    if list_rows:
        for row in ROWS:
            console.print(f"{row.key:18}{row.title}{'' if row.is_default else ' (on request)'}")
        return
    # The brokers run in sessions of their own; only an ending in order takes them along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        _run(
            selected=_select_rows(rows),
            yard=Yard(work.resolve(), base_port, dsn),
            wanted=_select_brokers(brokers),
            bench=Bench(LoadClient(build_client()), scale, rounds),
            rounds=rounds,
            warm_up=warm_up,
            calm_s=calm,
            out=out,
        )
    except BenchError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None


def _run(
    *,
    selected: list[Row],
    yard: Yard,
    wanted: list[str],
    bench: Bench,
    rounds: int,
    warm_up: int,
    calm_s: float,
    out: Path,
) -> None:
    brokers = yard.installed(wanted)
    if not brokers:
        raise BenchError("no broker to measure")
    out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(_about(yard, brokers, bench, out.parent))
    interleaved = [row for row in selected if row.is_interleaved]
    try:
        if interleaved:
            _run_rounds(interleaved, yard, brokers, bench, results, rounds, warm_up, calm_s)
        for row in selected:
            if not row.is_interleaved:
                _run_solo(row, yard, brokers, bench, results, calm_s)
    finally:
        if results.rows:
            out.write_text(json.dumps(as_json(results, selected), indent=1))
            show(results, selected, console)
            console.print(f"written: {out}", style="dim", markup=False)


# ---- running -------------------------------------------------------------------------------------


def _run_rounds(
    rows: list[Row],
    yard: Yard,
    brokers: list[str],
    bench: Bench,
    results: Results,
    rounds: int,
    warm_up: int,
    calm_s: float,
) -> None:
    servers = [yard.server(broker, rows[0]) for broker in brokers]
    with _running(servers):
        results.about["versions"] = {server.key: server.version() for server in servers}
        for server in servers:
            with console.status(f"{server.title}: warming up"):
                _warm_up(bench, server, warm_up)
        for number in range(rounds):
            _wait_for_calm(calm_s)
            results.about["fdatasync_us"].append(_fdatasync_us(servers[0].directory))
            # Another broker begins each time, so that none always follows the same neighbour.
            turn = number % len(servers)
            for row in rows:
                for server in servers[turn:] + servers[:turn]:
                    if row.only not in {None, server.key}:
                        continue
                    where = f"round {number + 1} of {rounds}: {row.title}: {server.title}"
                    with console.status(where):
                        result = _guarded(row, bench, server)
                    results.add(row, server.key, result)
                    if not result.get("is_complete", True):
                        bench.drain(server)


def _run_solo(
    row: Row, yard: Yard, brokers: list[str], bench: Bench, results: Results, calm_s: float
) -> None:
    for broker in brokers:
        if row.only not in {None, broker}:
            continue
        _wait_for_calm(calm_s)
        server = yard.server(broker, row)
        with console.status(f"{row.title}: {server.title}"), _stopped_afterwards(server):
            results.add(row, broker, _guarded(row, bench, server))
            if server.is_running:
                results.about["versions"][broker] = server.version()


def _guarded(row: Row, bench: Bench, server: Server) -> Result:
    """Run a row; a broker that cannot do it costs this number, not the whole run."""
    try:
        return row.run(bench, server)
    except BenchError as error:
        text = f"{row.title}: {server.title}: {error}"
        console.print(text, style="red", markup=False)
        return {"is_complete": False, "error": str(error)}


def _warm_up(bench: Bench, server: Server, rounds: int) -> None:
    """Send enough messages to warm up JIT compilers and log files, at any scale."""
    bench.drain(server)
    count = bench.bulk.get(server.key, bench.bulk_default)
    for _ in range(rounds):
        for options in (
            ("--mode", "both", "--window", 100, "--count", count),
            ("--mode", "send", "--window", 1000, "--count", count),
            ("--mode", "receive", "--count", count),
        ):
            bench.client.run(server, MAIN_QUEUE, *options)


@contextmanager
def _running(servers: list[Server]) -> Iterator[None]:
    try:
        for server in servers:
            with console.status(f"{server.title}: starting"):
                server.start()
        yield
    finally:
        for server in servers:
            server.stop()


@contextmanager
def _stopped_afterwards(server: Server) -> Iterator[None]:
    try:
        yield
    finally:
        server.stop()


# ---- the machine ---------------------------------------------------------------------------------


def _about(yard: Yard, brokers: list[str], bench: Bench, directory: Path) -> dict[str, object]:
    kind = procfs.filesystem_of(directory)
    if kind in {"tmpfs", "ramfs"}:
        console.print(f"[red]{directory} is {kind}: no sync reaches a disk there[/]")
    return {
        "titles": {broker: yard.server(broker, ROWS[0]).title for broker in brokers},
        "versions": {},
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": procfs.processor(),
        "kernel": platform.release(),
        "file_system": kind,
        "scale": bench.scale,
        "fdatasync_us": [],
    }


def _fdatasync_us(directory: Path) -> int:
    """Return the median time of a 4 KiB overwrite that reaches the disk."""
    path = directory / "probe"
    times = []
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, bytes(4096 * 100), 0)
        os.fsync(descriptor)
        for index in range(100):
            start = time.perf_counter()
            os.pwrite(descriptor, b"x" * 4096, 4096 * index)
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - start)
    finally:
        os.close(descriptor)
        path.unlink()
    return round(statistics.median(times) * 1e6)


def _wait_for_calm(limit_s: float) -> None:
    """Wait until the machine, idle brokers included, is busy for less than an eighth."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = procfs.MachineTime.read()
        time.sleep(1)
        after = procfs.MachineTime.read()
        busy = after.busy_s - before.busy_s + after.stolen_s - before.stolen_s
        if busy < (os.cpu_count() or 1) / 8:
            return


# ---- arguments -----------------------------------------------------------------------------------


def build_client() -> Path:
    built = subprocess.run(
        ["make", "-C", str(HERE), "--silent"], capture_output=True, text=True, check=False
    )
    if built.returncode != 0:
        raise BenchError(f"the load client does not build:\n{built.stderr.strip()}")
    return HERE / "build/postbus-load"


def _select_rows(text: str) -> list[Row]:
    if not text:
        return [row for row in ROWS if row.is_default]
    chosen: list[Row] = []
    for name in filter(None, text.split(",")):
        exact = [row for row in ROWS if row.key == name]
        found = exact or [row for row in ROWS if row.key.startswith(name)]
        if not found:
            raise BenchError(f"no row is called {name}; --list shows them")
        chosen += [row for row in found if row not in chosen]
    return chosen


def _select_brokers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in BROKERS:
            raise BenchError(f"no broker is called {name}; there are {', '.join(BROKERS)}")
    return names


if __name__ == "__main__":
    app()
