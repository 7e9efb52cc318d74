"""One publish for many subscriptions: cost of a copy by their number and the size of the body.

All subscriptions take every message; none is read meanwhile. Only Postbus is measured.
"""

from __future__ import annotations

import time

from measuring import Bench, Result, reason_of
from messaging import subscriptions_of
from postbus_server import Postbus
from rows import Metric, Row, warm_up
from server import BenchError, Server

COUNTS = (1, 10, 100, 2_000)
SIZES = (("1k", 1_024), ("256k", 255 * 1_024))  # Standard takes 256 KiB with all around a body
COPIES = {"1k": 200_000, "256k": 20_000}
"""Limits of stored copies of a shape: few publishes for many subscriptions, or large bodies."""
PUBLISHES = {"1k": 40_000, "256k": 1_000}
WAITING_COPIES = 20_000
"""With more than 50,000 copies in flight to the store, sends are refused as busy."""
MAX_SIZE_MB = 81_920
"""Every copy counts with its whole size, though its body is stored once; Premium allows this."""


def topic_name(count: int, label: str) -> str:
    """Return the topic of one shape: a full one would refuse the next."""
    return f"bench-{label}-{count}"


def _fan_out(bench: Bench, server: Server) -> Result:
    assert isinstance(server, Postbus)
    server.start()
    warm_up(bench, server)
    result: Result = {"foreign_share": 0.0}
    for label, body_bytes in SIZES:
        for count in COUNTS:
            number = bench.count(min(PUBLISHES[label], COPIES[label] // count))
            _, before = server.table_bytes()
            window = min(100, WAITING_COPIES // count)
            shape = ("--mode", "send", "--window", window, "--size", body_bytes, "--count", number)
            sent = bench.measure(server, *shape, queue=topic_name(count, label))
            if not sent["is_complete"] or sent["accepted"] != number:
                raise BenchError(f"{count} subscriptions, {label}: {reason_of(sent)}")
            time.sleep(1)  # what the server knows of the size of its tables comes a bit later
            _, after = server.table_bytes()
            name = f"{label}_{count}"
            result[f"{name}_rate"] = sent["send_rate"]
            result[f"{name}_copy_us"] = sent["cpu_us"] / count
            result[f"{name}_copy_kb"] = (after - before) / number / count / 1e3
            admission_control = sent["foreign_share"] + sent["stolen_share"]
            result["foreign_share"] = max(result["foreign_share"], admission_control)
    return result


def _metrics() -> tuple[Metric, ...]:
    metrics: list[Metric] = []
    for label, _ in SIZES:
        for count in COUNTS:
            name, title = f"{label}_{count}", f"{count:,} x {label}"
            metrics += (
                Metric(f"{name}_rate", f"{title}, publish", "msg/s"),
                Metric(f"{name}_copy_us", f"{title}, CPU a copy", "µs", is_better_high=False),
                Metric(f"{name}_copy_kb", f"{title}, disk a copy", "kB", is_better_high=False),
            )
    return tuple(metrics)


FAN_OUT_ROWS: tuple[Row, ...] = (
    Row(
        "fan-out",
        "topic, every subscription takes a copy",
        _fan_out,
        _metrics(),
        is_interleaved=False,
        only="postbus",
        tier="Premium",
        documents="".join(
            subscriptions_of(topic_name(count, label), count, max_size_mb=MAX_SIZE_MB)
            for label, _ in SIZES
            for count in COUNTS
        ),
    ),
)
