"""A million messages that wait for their own due times: memory, and CPU of waiting.

Their times lie hours ahead and differ by a millisecond each. Only Postbus is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from measuring import MAIN_QUEUE, Bench, Result, costing
from postbus_server import OWNER, document
from rows import Demand, Metric, Row, warm_up
from server import Server

MORTAL_QUEUE = "bench-mortal"
COUNT = 1_000_000
AHEAD_S = 4 * 3600
IDLE_S = 20


def _waiting(queue: str, *options: str | float) -> Callable[[Bench, Server], Result]:
    def run(bench: Bench, server: Server) -> Result:
        server.start()
        warm_up(bench, server)
        start_mib = server.resident_kib() / 1024
        server.reset_high_water()
        shape = ("--mode", "send", "--window", 1000, "--count", bench.count(COUNT))
        sent = bench.measure(server, *shape, *options, "--limit-s", 3600, queue=queue)
        peak_mib = server.resident_kib("VmHWM") / 1024
        time.sleep(2)  # VACUUM and upkeep after the sends are no cost of waiting
        with costing(server) as cost:
            time.sleep(IDLE_S)
        idle_s = cost.broker_s + cost.postgres_s
        return {
            **sent,
            "start_mib": start_mib,
            "peak_mib": peak_mib,
            "idle_cpu_percent": 100 * idle_s / cost.elapsed_s,
        }

    return run


def _row(key: str, title: str, queue: str, documents: str, *options: str | float) -> Row:
    return Row(
        key,
        title,
        _waiting(queue, *options),
        (
            Metric("send_rate", "send", "msg/s"),
            Metric("start_mib", "memory at start", "MiB", is_better_high=False),
            Metric("peak_mib", "peak, all waiting", "MiB", is_better_high=False),
            Metric("idle_cpu_percent", "CPU while they wait", "%", is_better_high=False),
        ),
        (Demand("peak_mib", None, 512, 512),),
        is_interleaved=False,
        only="postbus",
        documents=documents,
    )


WAITING_ROWS: tuple[Row, ...] = (
    _row("scheduled", "1 M scheduled messages", MAIN_QUEUE, "", "--schedule-s", AHEAD_S),
    _row(
        "deadlines",
        "1 M messages that expire one by one",
        MORTAL_QUEUE,
        document(
            "Queue",
            MORTAL_QUEUE,
            OWNER,
            "deadLetteringOnMessageExpiration: true, maxSizeInMegabytes: 5120",
        ),
        "--ttl-s",
        AHEAD_S,
    ),
)
