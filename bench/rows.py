"""The rows of the table: work of each broker, reported numbers and targets.

Interleaved rows run once for each broker in every round, one after the other, so that whatever
the machine does meanwhile hits all of them. Solo rows need a broker for themselves, because they
start, stop or fill it; they run after the rounds.

Every row leaves the queue empty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from measuring import MAIN_QUEUE, OTHER_QUEUE, Bench, Result, finish, reason_of
from server import BenchError, Server

Run: TypeAlias = Callable[[Bench, Server], Result]

KIB = 1024
# Names enough that every one of 16 partitions is very likely home of one of them.
BUSY_QUEUES = tuple(f"busy-{number:02}" for number in range(64))
# A Standard message of 256 KiB includes its header.
LARGEST_STANDARD_BODY = 255 * KIB


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a result that the table shows."""

    key: str
    label: str
    unit: str
    is_better_high: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """Required and desired value of Postbus: a ratio to a peer, or a number without one."""

    metric: str
    peer: str | None
    must: float
    goal: float


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, or a few of the same run."""

    key: str
    title: str
    run: Run
    metrics: tuple[Metric, ...]
    demands: tuple[Demand, ...] = ()
    is_interleaved: bool = True
    is_default: bool = True
    only: str | None = None  # a broker's key: the row means nothing for the others
    tier: str = "Standard"
    queues: tuple[str, ...] = (MAIN_QUEUE, OTHER_QUEUE)
    documents: str = ""  # manifests beside those of the queues; only Postbus reads them


# ---- interleaved ---------------------------------------------------------------------------------


def _send(window: int) -> Run:
    def run(bench: Bench, server: Server) -> Result:
        count = bench.count(3000) if window == 1 else bench.bulk_count(server)
        result = bench.measure(server, "--mode", "send", "--window", window, "--count", count)
        bench.drain(server)
        return result

    return run


def _receive(settle_range: int) -> Run:
    def run(bench: Bench, server: Server) -> Result:
        count = bench.bulk_count(server)
        bench.fill(server, count)
        options = ("--mode", "receive", "--count", count, "--settle-range", settle_range)
        return bench.measure(server, *options)

    return run


def _receive_one_by_one(bench: Bench, server: Server) -> Result:
    count = bench.count(2000)
    bench.fill(server, count + bench.count(20_000))
    result = bench.measure(server, "--mode", "receive", "--count", count, "--credit", 1)
    bench.drain(server)
    return result


def _both(window: int, count: int | None = None) -> Run:
    def run(bench: Bench, server: Server) -> Result:
        number = bench.bulk_count(server) if count is None else bench.count(count)
        options = ("--mode", "both", "--window", window, "--count", number)
        result = bench.measure(server, *options)
        result["each_way_rate"] = min(result["send_rate"], result["receive_rate"])
        return result

    return run


def _paced(rate: int, seconds: int) -> Run:
    def run(bench: Bench, server: Server) -> Result:
        count = bench.count(rate * seconds)
        options = ("--mode", "both", "--rate", rate, "--count", count, "--window", 100_000)
        return bench.measure(server, *options, "--limit-s", seconds * bench.scale * 3 + 10)

    return run


# ---- solo: memory, tables, backlog ---------------------------------------------------------------


def _table_heap(bench: Bench, server: Server) -> Result:
    from postbus_server import Postbus

    assert isinstance(server, Postbus)
    live, through = bench.count(20_000), bench.count(5_000_000)
    server.start()
    bench.fill(server, live)
    # Paced below what receivers manage, else the queue holds far more than it should.
    options = ("--mode", "both", "--rate", 30_000, "--count", through, "--limit-s", 3600)
    result = bench.measure(server, *options)
    heap, total = server.table_bytes()
    result.update(heap_mb=heap / 1e6, tables_mb=total / 1e6, live_mb=live * KIB / 1e6)
    result["each_way_rate"] = min(result["send_rate"], result["receive_rate"])
    return result


def _high_water(count: int, body_bytes: int) -> Run:
    def run(bench: Bench, server: Server) -> Result:
        server.start()
        resident = server.resident_kib() / KIB
        server.reset_high_water()
        number = bench.count(count)
        options = ("--count", number, "--size", body_bytes, "--window", 50, "--limit-s", 7200)
        busy = ",".join(BUSY_QUEUES)
        result = bench.measure(server, "--mode", "send", *options, queue=busy)
        result["filled_mib"] = server.resident_kib("VmHWM") / KIB
        read = bench.client.run(server, busy, "--mode", "receive", *options)
        result["high_water_mib"] = server.resident_kib("VmHWM") / KIB
        result["start_mib"] = resident
        result["backlog_mb"] = result["accepted"] * body_bytes / 1e6
        result["receive_rate"] = read["receive_rate"]
        return result

    return run


def _with_backlog(bench: Bench, server: Server) -> Result:
    server.start()
    warm_up(bench, server)
    send = ("--mode", "send", "--window", 1000, "--count", bench.bulk_count(server))
    both = ("--mode", "both", "--window", 100, "--count", bench.bulk_count(server))

    def medians() -> tuple[float, float]:
        sends, boths = [], []
        for _ in range(3):
            sends.append(bench.measure(server, *send)["send_rate"])
            drained = bench.client.run(server, MAIN_QUEUE, "--mode", "receive", *send[4:])
            if not drained["is_complete"]:
                raise BenchError(f"{server.title}: {reason_of(drained)}")
            boths.append(bench.measure(server, *both)["receive_rate"])
        return sorted(sends)[1], sorted(boths)[1]

    send_empty, both_empty = medians()
    bench.fill(server, bench.count(1_000_000))
    send_full, both_full = medians()
    return {
        "send_rate_empty": send_empty,
        "send_rate_backlog": send_full,
        "send_share": 100 * send_full / send_empty,
        "both_share": 100 * both_full / both_empty,
        "resident_mib": server.resident_kib() / KIB,
    }


def warm_up(bench: Bench, server: Server) -> None:
    """Let compilers compile and the first segments be written."""
    for _ in range(3):
        options = ("--mode", "both", "--window", 100, "--count", bench.bulk_count(server))
        bench.client.run(server, MAIN_QUEUE, *options)


# ---- solo: connections and starts ----------------------------------------------------------------


def _idle_connections(bench: Bench, server: Server) -> Result:
    server.start()
    warm_up(bench, server)
    count = bench.count(5000)
    before = server.resident_kib()
    client = bench.client.start(
        server, MAIN_QUEUE, "--mode", "idle", "--connections", count, "--credit", 10
    )
    assert client.stdout is not None
    line = client.stdout.readline()
    if not line:
        raise BenchError(client.communicate()[1].strip() or "no idle connection stands")
    result: Result = json.loads(line)
    time.sleep(2)  # memory allocated after the attach belongs to the connection, too
    result["kib_each"] = (server.resident_kib() - before) / max(1, result["connections"])
    with_cpu = server.usage().total_s
    time.sleep(3)
    result["idle_cpu_percent"] = (server.usage().total_s - with_cpu) / 3 * 100
    client.communicate()
    result["is_complete"] = client.returncode == 0
    return result


def _storm(bench: Bench, server: Server) -> Result:
    server.start()
    count = bench.count(500)
    options = ("--mode", "storm", "--connections", count, "--limit-s", 120)
    result = bench.measure(server, *options)
    bench.drain(server)
    return result


def seconds_to_accept(
    bench: Bench, server: Server, *, fresh: bool, queue: str = MAIN_QUEUE
) -> float:
    """Start a broker and return the seconds until a queue accepts its first message."""
    start = time.monotonic()
    server.launch(fresh=fresh)
    server.wait_for_port()
    if fresh:
        server.after_start()
    options = ("--mode", "send", "--count", 1, "--quiet-s", 5)
    while True:
        try:
            if bench.client.run(server, queue, *options)["is_complete"]:
                return time.monotonic() - start
        except BenchError:
            if time.monotonic() - start > 120 or not server.is_running:
                raise
        time.sleep(0.01)


def _cold_start(bench: Bench, server: Server) -> Result:
    seconds = []
    for _ in range(3):
        seconds.append(seconds_to_accept(bench, server, fresh=True))
        server.stop()
    return {"seconds": sorted(seconds)[1]}


def _restart(bench: Bench, server: Server) -> Result:
    server.start()
    count = bench.count(1_000_000)
    if server.key == "postbus":
        # A message that is rejected goes to the dead-letter queue; elsewhere that is set up
        # differently or not at all.
        bench.fill(server, count)
        options = ("--mode", "receive", "--outcome", "reject", "--count", count)
        bench.client.run(server, MAIN_QUEUE, *options, "--settle-range", 50, "--limit-s", 3600)
    bench.fill(server, count)
    server.stop()
    seconds = seconds_to_accept(bench, server, fresh=False)
    start = time.monotonic()
    received = bench.client.run(server, MAIN_QUEUE, "--mode", "receive", "--count", 1)
    return {
        "seconds": seconds,
        "receive_s": seconds + time.monotonic() - start,
        "is_complete": received["is_complete"],
        "resident_mib": server.resident_kib() / KIB,
    }


# ---- solo: bodies --------------------------------------------------------------------------------


def _bodies(bench: Bench, server: Server) -> Result:
    server.start()
    warm_up(bench, server)
    small = ("--mode", "both", "--rate", 1000, "--window", 10_000)
    alone = bench.client.run(server, OTHER_QUEUE, *small, "--count", bench.count(5000))
    result: Result = {"others_p99_ms_alone": alone["end_to_end_p99_us"] / 1e3}
    for label, size, count, window in (
        ("64k", 64 * KIB, 4000, 16),
        ("1m", KIB * KIB, 300, 4),
        ("100m", 100_000_000, 4, 1),
    ):
        # Large bodies need a few messages at any scale, hence no minimum of 100 here.
        number = max(2, round(count * bench.scale))
        other = bench.client.start(
            server, OTHER_QUEUE, *small, "--count", bench.count(5000), "--limit-s", 120
        )
        shape = ("--size", size, "--count", number, "--quiet-s", 60)
        sent = bench.client.run(server, MAIN_QUEUE, "--mode", "send", "--window", window, *shape)
        receiving = ("--mode", "receive", "--credit", window, *shape)
        received = bench.client.run(server, MAIN_QUEUE, *receiving)
        meanwhile = finish(other)
        if not (sent["is_complete"] and received["is_complete"]):
            failed = received if sent["is_complete"] else sent
            result[f"problem_{label}"] = reason_of(failed)
            continue
        result[f"send_mb_{label}"] = sent["send_mb_per_s"]
        result[f"receive_mb_{label}"] = received["receive_mb_per_s"]
        result[f"others_p99_ms_{label}"] = meanwhile["end_to_end_p99_us"] / 1e3
    return result


# ---- the table -----------------------------------------------------------------------------------

_SEND = Metric("send_rate", "send", "msg/s")
_RECEIVE = Metric("receive_rate", "receive", "msg/s")
_EACH_WAY = Metric("each_way_rate", "each way", "msg/s")
_CPU = Metric("cpu_us", "CPU of all", "µs/msg", is_better_high=False)
_BROKER_CPU = Metric("broker_cpu_us", "CPU of broker", "µs/msg", is_better_high=False)
_ACK_P99 = Metric("ack_p99_us", "accepted, p99", "µs", is_better_high=False)


def _mib(key: str, label: str) -> Metric:
    return Metric(key, label, "MiB", is_better_high=False)


def _against(metric: str, **limits: tuple[float, float]) -> tuple[Demand, ...]:
    """Return demands on ratios: required and desired one, by the key of the peer."""
    return tuple(Demand(metric, peer, *limit) for peer, limit in limits.items())


def _memory_row(key: str, title: str, count: int, body_bytes: int, *, is_default: bool) -> Row:
    return Row(
        key,
        title,
        _high_water(count, body_bytes),
        (
            _mib("start_mib", "at start"),
            _mib("filled_mib", "peak, filled"),
            _mib("high_water_mib", "peak, drained too"),
        ),
        (Demand("high_water_mib", None, 512, 512),),
        is_interleaved=False,
        is_default=is_default,
        only="postbus",
        queues=(MAIN_QUEUE, *BUSY_QUEUES),
    )


_BODY_METRICS = (
    Metric("others_p99_ms_alone", "others' p99 alone", "ms", is_better_high=False),
    *(
        metric
        for size, label in (("64k", "64 KiB"), ("1m", "1 MiB"), ("100m", "100 MB"))
        for metric in (
            Metric(f"send_mb_{size}", f"{label} send", "MB/s"),
            Metric(f"receive_mb_{size}", f"{label} receive", "MB/s"),
            Metric(f"others_p99_ms_{size}", f"{label}, others' p99", "ms", is_better_high=False),
        )
    ),
)

ROWS: tuple[Row, ...] = (
    Row(
        "send-1",
        "send, window 1",
        _send(1),
        (_SEND, _ACK_P99, _CPU),
        _against("send_rate", rabbitmq=(1.3, 1.5), rabbitmq4=(1.25, 1.5), artemis=(0.85, 1)),
    ),
    Row(
        "send-100",
        "send, window 100",
        _send(100),
        (_SEND, _ACK_P99, _CPU),
        _against("send_rate", rabbitmq=(2.7, 3.5), rabbitmq4=(2.6, 3.5), artemis=(0.95, 1.2)),
    ),
    Row(
        "send-1000",
        "send, window 1000",
        _send(1000),
        (_SEND, _ACK_P99, _CPU),
        (
            *_against("send_rate", rabbitmq=(5, 6), rabbitmq4=(4.2, 6), artemis=(1, 1.2)),
            *_against("ack_p99_us", rabbitmq=(0.5, 0.3), rabbitmq4=(1.5, 0.8), artemis=(2, 1)),
        ),
    ),
    Row(
        "receive",
        "receive + complete",
        _receive(1),
        (_RECEIVE, _CPU),
        _against("receive_rate", rabbitmq=(4.5, 6), rabbitmq4=(2.3, 3.5), artemis=(0.75, 1)),
    ),
    Row(
        "receive-50",
        "receive + complete, ranges of 50",
        _receive(50),
        (_RECEIVE, _CPU),
        is_default=False,
    ),
    Row(
        "credit-1",
        "receive + complete, credit 1, backlog",
        _receive_one_by_one,
        (_RECEIVE, _CPU),
        _against("receive_rate", rabbitmq=(1.4, 1.7), rabbitmq4=(1.2, 1.5)),
    ),
    Row(
        "both-100",
        "both ways, window 100",
        _both(100),
        (_EACH_WAY, _SEND, _RECEIVE, _CPU, _BROKER_CPU),
        (
            *_against("each_way_rate", rabbitmq=(3.5, 4.5), rabbitmq4=(3.2, 4.5), artemis=(1, 1.3)),
            *_against("cpu_us", rabbitmq=(0.25, 0.2), rabbitmq4=(0.25, 0.2), artemis=(0.9, 0.7)),
            Demand("cpu_us", None, 12, 10),
            Demand("broker_cpu_us", None, 15, 10),
        ),
    ),
    Row(
        "both-1000",
        "both ways, window 1000",
        _both(1000),
        (_EACH_WAY, _SEND, _RECEIVE, _CPU),
        _against("each_way_rate", rabbitmq=(5, 6.5), rabbitmq4=(3.8, 5), artemis=(0.75, 1)),
    ),
    Row(
        "sustained",
        "both ways, window 100, 1 M messages",
        _both(100, 1_000_000),
        (_EACH_WAY, _CPU, _BROKER_CPU),
        (
            *_against("each_way_rate", rabbitmq=(3.5, 4.5), rabbitmq4=(3.2, 4.5), artemis=(1, 1.3)),
            Demand("cpu_us", "artemis", 1.0, 0.8),
        ),
    ),
    Row(
        "paced",
        "both ways at 20 k/s for 60 s",
        _paced(20_000, 60),
        (
            Metric("end_to_end_p50_us", "end to end, p50", "µs", is_better_high=False),
            Metric("end_to_end_p99_us", "end to end, p99", "µs", is_better_high=False),
            _ACK_P99,
            _SEND,
            _CPU,
        ),
        (Demand("end_to_end_p99_us", "rabbitmq", 1.0, 0.5),),
    ),
    Row(
        "heap",
        "tables after 5 M messages through 20 k",
        _table_heap,
        (
            Metric("heap_mb", "heap", "MB", is_better_high=False),
            Metric("tables_mb", "with indexes", "MB", is_better_high=False),
            _EACH_WAY,
        ),
        (Demand("heap_mb", None, 3 * 20.48 + 200, 2 * 20.48 + 100),),
        is_interleaved=False,
        only="postbus",
    ),
    _memory_row("memory", "memory, 1 M x 1 KiB waiting", 1_000_000, KIB, is_default=True),
    _memory_row("memory-5m", "memory, 5 M x 1 KiB waiting", 5_000_000, KIB, is_default=False),
    _memory_row(
        "memory-large",
        "memory, 20 k x 255 KiB waiting",
        20_000,
        LARGEST_STANDARD_BODY,
        is_default=True,
    ),
    Row(
        "backlog",
        "throughput at 1 M backlog, of an empty queue's",
        _with_backlog,
        (
            Metric("send_share", "send", "%"),
            Metric("both_share", "both ways", "%"),
            _mib("resident_mib", "resident"),
        ),
        (Demand("send_share", None, 90, 95), Demand("both_share", None, 65, 80)),
        is_interleaved=False,
    ),
    Row(
        "idle",
        "5,000 idle connections",
        _idle_connections,
        (
            Metric("kib_each", "memory each", "KiB", is_better_high=False),
            Metric("idle_cpu_percent", "CPU", "%", is_better_high=False),
        ),
        (Demand("kib_each", None, 40, 20),),
        is_interleaved=False,
    ),
    Row(
        "storm",
        "500 reconnecting at once",
        _storm,
        (
            Metric("elapsed_s", "all served", "s", is_better_high=False),
            Metric("served_p50_us", "half served", "µs", is_better_high=False),
        ),
        (Demand("elapsed_s", None, 10, 5),),
        is_interleaved=False,
    ),
    Row(
        "cold",
        "cold data directory to first accepted message",
        _cold_start,
        (Metric("seconds", "first accepted", "s", is_better_high=False),),
        (Demand("seconds", None, 3, 2),),
        is_interleaved=False,
    ),
    Row(
        "restart",
        "restart with 1 M waiting (Postbus: and 1 M dead)",
        _restart,
        (
            Metric("seconds", "first accepted", "s", is_better_high=False),
            Metric("receive_s", "first received", "s", is_better_high=False),
        ),
        (Demand("seconds", None, 6, 4),),
        is_interleaved=False,
    ),
    Row(
        "bodies",
        "large bodies",
        _bodies,
        _BODY_METRICS,
        is_interleaved=False,
        tier="Premium",
    ),
)
