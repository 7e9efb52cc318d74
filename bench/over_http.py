"""Messages over HTTP on 16 kept-alive connections, each with one request on its way.

The client is `http_load.py`, one process beside the broker and Postgres; a received message is
locked by one request and completed by the next. Only Postbus is measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from measuring import MAIN_QUEUE, Bench, Result, costing
from postbus_server import OWNER, Postbus, document
from rows import Demand, Metric, Row, warm_up
from server import BenchError, Server

CLIENT = Path(__file__).resolve().parent / "http_load.py"
COUNT = 20_000
PARTITIONED_QUEUE = "bench-http-partitioned"
PARTS = (
    ("send", MAIN_QUEUE, "send"),
    ("receive", MAIN_QUEUE, "receive"),
    ("both", MAIN_QUEUE, "both"),
    ("partitioned_send", PARTITIONED_QUEUE, "send"),
    ("partitioned_receive", PARTITIONED_QUEUE, "receive"),
)


def _load(server: Server, mode: str, queue: str, count: int) -> Result:
    """Run the client to its end and add the cost of a message."""
    assert isinstance(server, Postbus)
    command = [sys.executable, str(CLIENT), "--mode", mode, "--port", str(server.port)]
    command += ["--queue", queue, "--user", str(server.user), "--password", str(server.password)]
    with costing(server) as cost:
        done = subprocess.run(
            [*command, "--count", str(count)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise BenchError(done.stderr.strip() or "the client over HTTP failed")
    result: Result = json.loads(done.stdout)
    if "problem" in result:
        raise BenchError(f"over HTTP: {result['problem']}")
    result["cpu_us"] = (cost.broker_s + cost.postgres_s) * 1e6 / count
    result["foreign_share"] = cost.foreign_share
    return result


def _over_http(bench: Bench, server: Server) -> Result:
    server.start()
    warm_up(bench, server)
    found: dict[str, list[float]] = {}
    admission_control = 0.0
    for _ in range(bench.rounds):
        for name, queue, mode in PARTS:
            result = _load(server, mode, queue, bench.count(COUNT))
            admission_control = max(admission_control, result["foreign_share"])
            if mode == "both":
                rates = (result["send_rate"], result["receive_rate"])
                found.setdefault("both_rate", []).append(min(rates))
            else:
                found.setdefault(f"{name}_rate", []).append(result[f"{mode}_rate"])
                found.setdefault(f"{name}_ms_p99", []).append(result[f"{mode}_ms_p99"])
            found.setdefault(f"{name}_cpu_us", []).append(result["cpu_us"])
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {**medians, "foreign_share": admission_control}


def _slowest(name: str, title: str) -> Metric:
    return Metric(f"{name}_ms_p99", f"{title}, slowest hundredth", "ms", is_better_high=False)


def _cpu(name: str, title: str) -> Metric:
    return Metric(f"{name}_cpu_us", f"{title}, CPU", "µs", is_better_high=False)


HTTP_ROWS: tuple[Row, ...] = (
    Row(
        "http",
        "over HTTP, 16 kept-alive connections",
        _over_http,
        (
            Metric("send_rate", "send", "msg/s"),
            _slowest("send", "send"),
            _cpu("send", "send"),
            Metric("receive_rate", "lock and complete", "msg/s"),
            _slowest("receive", "lock and complete"),
            _cpu("receive", "lock and complete"),
            Metric("both_rate", "both ways at once, each way", "msg/s"),
            Metric("partitioned_send_rate", "partitioned, send", "msg/s"),
            Metric("partitioned_receive_rate", "partitioned, lock and complete", "msg/s"),
            _cpu("partitioned_receive", "partitioned, lock and complete"),
        ),
        (
            Demand("send_rate", None, 3_000, 3_000),
            Demand("receive_rate", None, 2_000, 2_000),
        ),
        is_interleaved=False,
        only="postbus",
        documents=document(
            "Queue", PARTITIONED_QUEUE, OWNER, "enablePartitioning: true, lockDuration: PT5M"
        ),
    ),
)
