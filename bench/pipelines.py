#!/usr/bin/env python3
"""Measures pipelines on Spark beside other ways to the same result, on this machine.

Rounds alternate between all of them; ratios are those of one round, and the table has medians with
the lowest and the highest. Only ratios can be compared between machines.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

import procfs
from measuring import LoadClient
from postbus_spark.jobs.main import SESSION
from run import build_client
from server import BenchError
from spark_bus import PipelineBus
from spark_rows import QUEUES, READ, ROWS, TOPIC, Numbers, Scene

HERE: Final = Path(__file__).resolve().parent
WORK: Final = HERE / "work" / "pipelines"
JDBC: Final = "org/postgresql/postgresql"
JDBC_COMMAND: Final = (
    "mvn org.apache.maven.plugins:maven-dependency-plugin:3.6.1:get -Dtransitive=false"
    " -Dartifact=org.postgresql:postgresql:42.7.14"
)
EPILOG = """
Examples:

  bench/pipelines.py --rounds 5

  bench/pipelines.py --rows reads,loads --count 20000 --rounds 1
"""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Demand:
    """A line of the table: a number, or its ratio to another one; None: only shown."""

    title: str
    number: str
    other: str | None = None
    must: float | None = None
    goal: float | None = None
    is_better_high: bool = True

    def of(self, round_: Numbers) -> float | None:
        """Return the value of a round; None if it was not measured."""
        value = round_.get(self.number)
        if value is None or self.other is None:
            return value
        other = round_.get(self.other)
        return None if other is None else value / other


DEMANDS: Final = (
    Demand("stored columns ÷ JDBC, the same columns and splits", "stored", "stored_jdbc", 0.8, 1.5),
    Demand("position, time and body ÷ JDBC", "few", "few_jdbc"),
    Demand("all columns decoded ÷ JDBC, decoded alike", "decoded", "decoded_jdbc", 1.0, 1.5),
    Demand("all columns decoded ÷ SDK, receive and complete", "decoded", "receive_sdk", 10, 30),
    Demand("drain, settled ÷ tap", "drain", "tap", 0.75, 0.9),
    Demand("capture to Parquet ÷ Spark's rewrite of it", "capture", "rewrite", 0.35, 0.55),
    Demand("load ÷ SDK, batches of 100", "load", "load_sdk", 3, 8),
    Demand("load ÷ the load client at window 1000", "load", "load_client", 0.25, 0.5),
    Demand("queue → SQL → topic, msg/s", "through", None, 5_000, 12_000),
    Demand("plan and settle a batch, ms", "plan_settle_ms", None, 150, 75, is_better_high=False),
    Demand("send to receipt at 500/s, p95, s", "latency_p95_s", None, 3, 1.5, is_better_high=False),
    Demand("broker's CPU of a row read, µs", "stored_broker_us", None, 2, 1, is_better_high=False),
    Demand("Postgres' CPU of a row read, µs", "stored_postgres_us", is_better_high=False),
    Demand("p99 of AMQP beside a reader ÷ alone", "p99_beside", "p99_alone", 3, 1.5, False),
    Demand("both ways with a tap ÷ plain", "both_tapped", "both_plain", 0.75, 0.85),
    Demand("dead letters grouped by reason, msg/s", "grouped", None, 25_000, 50_000),
    Demand("dead letters resent, msg/s", "resent", None, 3_000, 10_000),
    Demand("memory of driver, JVM and workers, GiB", "memory_gib", is_better_high=False),
)


@app.command(epilog=EPILOG)
def main(
    rows: Annotated[str, typer.Option(help="Rows to run, by name.")] = ",".join(ROWS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each row.")] = 5,
    count: Annotated[int, typer.Option(min=1_000, help="Messages of a row.")] = 100_000,
    base_port: Annotated[int, typer.Option(help="First of 40 ports to use.")] = 25810,
) -> None:
    """Print medians and ratios, with what is demanded of them; write bench/work/pipelines.json."""
    names = rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise BenchError(f"no row is called {unknown[0]}; there are {', '.join(ROWS)}")
    client = LoadClient(build_client())
    found: list[Numbers] = []
    with ExitStack() as cleanup:
        bus = PipelineBus(WORK, base_port, list(QUEUES), [TOPIC])
        bus.run(cleanup)
        spark = _session(_jdbc_driver())
        cleanup.callback(spark.stop)
        scene = Scene(bus, client, spark, WORK, count)
        scene.group = scene.create_group(READ, "tap")
        scene.fill(READ, count)
        for turn in range(rounds + 1):  # the first one warms up
            numbers: Numbers = {}
            for name in names:
                numbers |= ROWS[name](scene)
            if turn:
                found.append(numbers)
            print(f"round {turn}: {_short(numbers)}", file=sys.stderr)
    _show(found, count)
    file = HERE / "work" / "pipelines.json"
    file.write_text(json.dumps({"count": count, "rounds": found}, indent=1), encoding="utf-8")


def _session(driver: Path) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    source = HERE.parent
    paths = (str(source / "pipeline"), str(source / "dataplane"), str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    builder = SparkSession.builder.master("local[2]").appName("bench")
    for name, value in SESSION.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.config("spark.jars", str(driver)).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _jdbc_driver() -> Path:
    """Return Postgres' driver from the local repository of Maven."""
    found = sorted((Path.home() / ".m2" / "repository" / JDBC).glob("*/postgresql-*.jar"))
    if not found:
        raise BenchError(f"there is no JDBC driver of Postgres: {JDBC_COMMAND}")
    return found[-1]


def _short(numbers: Numbers) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _show(found: list[Numbers], count: int) -> None:
    title = f"Pipelines, {count:,} messages of 1 KiB a row, {procfs.processor()}"
    table = Table(title=title)
    for column in ("", "median (lowest to highest)", "must, goal", ""):
        table.add_column(column)
    for demand in DEMANDS:
        values = [value for round_ in found if (value := demand.of(round_)) is not None]
        if not values:
            continue
        median = statistics.median(values)
        wanted = "" if demand.must is None else f"{demand.must:,g}, {demand.goal:,g}"
        shown = f"{median:,.4g} ({min(values):,.4g} to {max(values):,.4g})"
        table.add_row(demand.title, shown, wanted, _verdict(demand, median))
    Console(width=140).print(table)


def _verdict(demand: Demand, median: float) -> str:
    if demand.must is None or demand.goal is None:
        return ""
    sign = 1 if demand.is_better_high else -1
    if sign * median >= sign * demand.goal:
        return "goal"
    return "must" if sign * median >= sign * demand.must else "below"


if __name__ == "__main__":
    try:
        app()
    except BenchError as error:
        raise SystemExit(str(error)) from None
