"""Rows of Service Bus features beyond plain queues: sessions, topics, dead letters and so on.

Each row starts a server of its own and alternates between the feature and a plain queue of the same
server, `--rounds` times: shares are the medians of such pairs. Only Postbus is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from measuring import MAIN_QUEUE, OTHER_QUEUE, Bench, Result, finish, reason_of
from postbus_server import OWNER, Postbus, document
from rows import Demand, Metric, Row, seconds_to_accept, warm_up
from server import BenchError, Server

Step: TypeAlias = Callable[[], Result]

SESSIONS = 1_000
SESSION_RECEIVERS = 100
"""Links that drain sessions: fewer than sessions, as processors do it."""
HELD_TIMES = 3
"""Factor of messages while sessions are held: accepting a session costs as much as twenty messages,
and these rows do not measure that."""

SUBSCRIPTIONS = 2_000
MATCHING = 1_234
EXPRESSION = "color = 'red' AND quantity > 10 AND region LIKE 'eu-%'"
PROPERTIES = ("--property", "color=red", "--property", "quantity=12", "--property", "region=eu-1")

SESSION_QUEUE = "bench-sessions"
DEDUP_QUEUE = "bench-dedup"
PARTITIONED_QUEUE = "bench-partitioned"
RETENTION_QUEUE = "bench-retention"
HISTORY = "operatorSpec: {history: {retention: P7D}}"
TOPIC = "bench-topic"


def subscription(number: int, topic: str = TOPIC) -> str:
    """Return the address of a subscription."""
    return f"{topic}/Subscriptions/{topic}-{number:04}"


def subscriptions_of(
    topic: str,
    count: int,
    rule_of: Callable[[int], str | None] = lambda _number: None,
    max_size_mb: int = 5120,
) -> str:
    """Return the manifests of a topic and its subscriptions.

    `rule_of`: rules of a subscription as YAML, None for $Default.
    """
    documents = [document("Topic", topic, OWNER, f"maxSizeInMegabytes: {max_size_mb}")]
    for number in range(count):
        rule = rule_of(number)
        limits = "lockDuration: PT5M" + ("" if rule is None else f", rules: [{rule}]")
        documents.append(document("Subscription", f"{topic}-{number:04}", topic, limits))
    return "".join(documents)


# ---- alternating ---------------------------------------------------------------------------------


def alternate(bench: Bench, steps: dict[str, tuple[Step, str]]) -> dict[str, list[Result]]:
    """Run named steps alternately, each once a round; a step has the name of its rate."""
    results: dict[str, list[Result]] = {name: [] for name in steps}
    for _ in range(bench.rounds):
        for name, (step, rate) in steps.items():
            result = step()
            if not result["is_complete"]:
                raise BenchError(f"{name}: {reason_of(result)}")
            result["rate"] = result[rate]
            results[name].append(result)
    return results


def summary_of(results: dict[str, list[Result]], shares: Iterable[tuple[str, str]]) -> Result:
    """Return NAME_rate and NAME_cpu_us of each step, and NAME_share of pairs (name, plain)."""
    summary: Result = {"foreign_share": 0.0, "rounds": results}
    for name, rounds in results.items():
        summary[f"{name}_rate"] = statistics.median(result["rate"] for result in rounds)
        summary[f"{name}_cpu_us"] = statistics.median(result["cpu_us"] for result in rounds)
        admission_control = max(
            result["foreign_share"] + result["stolen_share"] for result in rounds
        )
        summary["foreign_share"] = max(summary["foreign_share"], admission_control)
    for name, plain in shares:
        pairs = zip(results[name], results[plain], strict=True)
        ratios = sorted(100 * result["rate"] / other["rate"] for result, other in pairs)
        summary[f"{name}_share"] = statistics.median(ratios)
        summary[f"{name}_spread"] = [ratios[0], ratios[-1]]
    return summary


def _send(bench: Bench, server: Server, queue: str, *options: str | float) -> Result:
    shape = ("--mode", "send", "--window", 100, "--count", bench.bulk_count(server))
    return bench.measure(server, *shape, *options, queue=queue)


def send_and_drain(
    bench: Bench, server: Server, queue: str, *options: str | float, copies: tuple[str, ...] = ()
) -> Result:
    """Measure sending alone, then empty the queue, or the subscriptions that have the copies."""
    result = _send(bench, server, queue, *options)
    bench.drain(server, ",".join(copies) or queue)
    return result


def _receive(bench: Bench, server: Server, queue: str, *options: str | float) -> Result:
    shape = ("--mode", "receive", "--count", bench.bulk_count(server))
    return bench.measure(server, *shape, *options, queue=queue)


def both_ways(
    bench: Bench, server: Server, queue: str, *options: str | float, times: int = 1
) -> Result:
    """Send and receive at once, a multiple of the usual number of messages."""
    shape = ("--mode", "both", "--window", 100, "--count", times * bench.bulk_count(server))
    result = bench.measure(server, *shape, *options, queue=queue)
    result["each_way_rate"] = min(result["send_rate"], result["receive_rate"])
    return result


# ---- rows ----------------------------------------------------------------------------------------


def _sessions(bench: Bench, server: Server) -> Result:
    server.start()
    warm_up(bench, server)
    spread = ("--sessions", SESSIONS)
    next_ones = ("--accept-sessions", SESSION_RECEIVERS)
    held = (*spread, "--accept-sessions", SESSIONS, "--hold-sessions", "--credit", 20)
    both = partial(both_ways, bench, server, times=HELD_TIMES)
    results = alternate(
        bench,
        {
            "plain_send": (lambda: _send(bench, server, MAIN_QUEUE), "send_rate"),
            "plain_receive": (lambda: _receive(bench, server, MAIN_QUEUE), "receive_rate"),
            "send": (lambda: _send(bench, server, SESSION_QUEUE, *spread), "send_rate"),
            "drain": (lambda: _receive(bench, server, SESSION_QUEUE, *next_ones), "receive_rate"),
            "plain_both": (lambda: both(MAIN_QUEUE), "each_way_rate"),
            "both": (lambda: both(SESSION_QUEUE, *held), "each_way_rate"),
            "ids": (lambda: both(MAIN_QUEUE, *spread), "each_way_rate"),
        },
    )
    shares = [("send", "plain_send"), ("drain", "plain_receive"), ("both", "plain_both")]
    return summary_of(results, [*shares, ("ids", "plain_both")])


def _dedup(bench: Bench, server: Server) -> Result:
    server.start()
    warm_up(bench, server)
    ids = "--message-ids"
    results = alternate(
        bench,
        {
            "plain": (lambda: send_and_drain(bench, server, MAIN_QUEUE), "send_rate"),
            "dedup": (lambda: send_and_drain(bench, server, DEDUP_QUEUE, ids), "send_rate"),
            "ids": (lambda: send_and_drain(bench, server, MAIN_QUEUE, ids), "send_rate"),
        },
    )
    return summary_of(results, [("dedup", "plain"), ("ids", "plain")])


def _topic(count: int, *options: str | float) -> Callable[[Bench, Server], Result]:
    """Publish to a topic with subscriptions that all get a copy; the first one is read."""
    copies = tuple(subscription(number) for number in range(count))

    def run(bench: Bench, server: Server) -> Result:
        server.start()
        warm_up(bench, server)
        read = ("--receive-address", copies[0])

        def both() -> Result:
            result = both_ways(bench, server, TOPIC, *options, *read)
            if count > 1:
                bench.drain(server, ",".join(copies[1:]))
            return result

        results = alternate(
            bench,
            {
                "plain": (lambda: send_and_drain(bench, server, MAIN_QUEUE), "send_rate"),
                "publish": (
                    lambda: send_and_drain(bench, server, TOPIC, *options, copies=copies),
                    "send_rate",
                ),
                "plain_both": (lambda: both_ways(bench, server, MAIN_QUEUE), "each_way_rate"),
                "both": (both, "each_way_rate"),
                "properties": (
                    lambda: send_and_drain(bench, server, MAIN_QUEUE, *options),
                    "send_rate",
                ),
            },
        )
        shares = [("publish", "plain"), ("both", "plain_both"), ("properties", "plain")]
        summary = summary_of(results, shares)
        summary["copies_rate"] = count * summary["publish_rate"]
        return summary

    return run


def _topic_of_thousands(bench: Bench, server: Server) -> Result:
    server.start()
    warm_up(bench, server)
    options = ("--property", f"region=r{MATCHING}")
    matching = (subscription(MATCHING),)

    def publish() -> Result:
        result = _send(bench, server, TOPIC, *options)
        got = bench.drain(server, matching[0])
        if got != result["accepted"]:
            raise BenchError(f"{got} of {result['accepted']} arrived")
        return result

    results = alternate(
        bench,
        {
            "plain": (lambda: send_and_drain(bench, server, MAIN_QUEUE), "send_rate"),
            "publish": (publish, "send_rate"),
        },
    )
    return summary_of(results, [("publish", "plain")])


def _partitioned(bench: Bench, server: Server) -> Result:
    server.start()
    warm_up(bench, server)
    results = alternate(
        bench,
        {
            "plain": (lambda: both_ways(bench, server, MAIN_QUEUE), "each_way_rate"),
            "partitioned": (lambda: both_ways(bench, server, PARTITIONED_QUEUE), "each_way_rate"),
            "plain_send": (lambda: _send(bench, server, MAIN_QUEUE), "send_rate"),
            "plain_receive": (lambda: _receive(bench, server, MAIN_QUEUE), "receive_rate"),
            "send": (lambda: _send(bench, server, PARTITIONED_QUEUE), "send_rate"),
            "receive": (lambda: _receive(bench, server, PARTITIONED_QUEUE), "receive_rate"),
        },
    )
    shares = [("partitioned", "plain"), ("send", "plain_send"), ("receive", "plain_receive")]
    return summary_of(results, shares)


def _retention(bench: Bench, server: Server) -> Result:
    """Run both ways; then keep a million messages, start over them, and have them deleted."""
    assert isinstance(server, Postbus)
    server.start()
    warm_up(bench, server)
    bench.client.run(server, RETENTION_QUEUE, "--mode", "both", "--count", 100)
    results = alternate(
        bench,
        {
            "plain": (lambda: both_ways(bench, server, MAIN_QUEUE), "each_way_rate"),
            "kept": (lambda: both_ways(bench, server, RETENTION_QUEUE), "each_way_rate"),
        },
    )
    summary = summary_of(results, [("kept", "plain")])
    for name in ("plain", "kept"):
        for part in ("broker", "postgres"):
            cost = statistics.median(result[f"{part}_cpu_us"] for result in results[name])
            summary[f"{name}_{part}_us"] = cost
    server.stop()
    summary["small_start_s"] = seconds_to_accept(bench, server, fresh=False, queue=RETENTION_QUEUE)
    kept, (_, before) = server.settled_rows(), server.table_bytes()
    options = ("--mode", "both", "--window", 1000, "--limit-s", 3600)
    count = max(100, bench.count(1_000_000) - kept)
    result = bench.client.run(server, RETENTION_QUEUE, *options, "--count", count)
    if not result["is_complete"]:
        raise BenchError(f"could not settle {count}: {reason_of(result)}")
    summary["settled"] = server.settled_rows()
    summary["kept_bytes"] = (server.table_bytes()[1] - before) / count
    server.stop()
    summary["start_s"] = seconds_to_accept(bench, server, fresh=False, queue=RETENTION_QUEUE)
    server.stop()
    server.documents = _queue_with(RETENTION_QUEUE, "status: Active")
    seconds_to_accept(bench, server, fresh=False, queue=RETENTION_QUEUE)
    begun = time.monotonic()
    while server.settled_rows():
        time.sleep(0.5)
        if time.monotonic() - begun > 600:
            raise BenchError(f"{server.settled_rows()} rows are still there")
    summary["reap_rate"] = summary["settled"] / (time.monotonic() - begun)
    return summary


def _dead_letter_drain(bench: Bench, server: Server) -> Result:
    """Run the main queue alone, over dead letters, and beside a receiver that drains them.

    Draining another queue as fast is the measure for the last: a second client takes its part of
    the machine whatever it reads.
    """
    server.start()
    warm_up(bench, server)
    dead = bench.count(100_000)
    count = bench.count(40_000)

    def bury() -> None:
        bench.fill(server, dead)
        reject = ("--mode", "receive", "--outcome", "reject", "--settle-range", 50)
        result = bench.client.run(server, MAIN_QUEUE, *reject, "--count", dead)
        if not result["is_complete"]:
            raise BenchError(f"could not dead-letter: {reason_of(result)}")

    def main_queue() -> Result:
        options = ("--mode", "both", "--window", 100, "--count", count)
        result = bench.measure(server, *options)
        result["each_way_rate"] = min(result["send_rate"], result["receive_rate"])
        return result

    def beside(queue: str) -> Result:
        drain = bench.client.start(server, queue, "--mode", "receive", "--count", dead)
        result = main_queue()
        result["has_overlapped"] = drain.poll() is None
        drained = finish(drain)
        result["drain_rate"] = drained["receive_rate"]
        if not drained["is_complete"]:
            raise BenchError(f"could not drain: {reason_of(drained)}")
        return result

    def over() -> Result:
        bury()
        return main_queue()

    def beside_another() -> Result:
        shape = ("--mode", "send", "--window", 1000, "--count", dead)
        bench.client.run(server, OTHER_QUEUE, *shape)
        return beside(OTHER_QUEUE)

    dead_letters = f"{MAIN_QUEUE}/$DeadLetterQueue"
    rate = "each_way_rate"
    results = alternate(
        bench,
        {
            "alone": (main_queue, rate),
            "over": (over, rate),
            "beside": (lambda: beside(dead_letters), rate),
            "another": (beside_another, rate),
        },
    )
    shares = [("over", "alone"), ("beside", "alone"), ("another", "alone")]
    summary = summary_of(results, shares)
    summary["drain_rate"] = statistics.median(r["drain_rate"] for r in results["beside"])
    summary["overlapped"] = sum(r["has_overlapped"] for r in results["beside"])
    return summary


# ---- entities ------------------------------------------------------------------------------------


def _queue_with(name: str, limits: str) -> str:
    limits += ", lockDuration: PT5M, maxSizeInMegabytes: 5120"
    return document("Queue", name, OWNER, limits)


def _sql_rule(_number: int) -> str:
    return f'{{name: asked, sqlFilter: {{sqlExpression: "{EXPRESSION}"}}}}'


def _correlation_rule(number: int) -> str:
    return f"{{name: asked, correlationFilter: {{properties: {{region: r{number}}}}}}}"


# ---- the table -----------------------------------------------------------------------------------


def rate_of(name: str, label: str) -> Metric:
    return Metric(f"{name}_rate", label, "msg/s")


def share_of(name: str, label: str) -> Metric:
    return Metric(f"{name}_share", f"{label}, of plain", "%")


def cpu_of(name: str, label: str) -> Metric:
    return Metric(f"{name}_cpu_us", f"{label}, CPU of all", "µs/msg", is_better_high=False)


def messaging_row(
    key: str,
    title: str,
    run: Callable[[Bench, Server], Result],
    metrics: tuple[Metric, ...],
    documents: str = "",
    demands: tuple[Demand, ...] = (),
) -> Row:
    return Row(
        key,
        title,
        run,
        metrics,
        demands,
        is_interleaved=False,
        only="postbus",
        documents=documents,
    )


def _topic_row(
    key: str, title: str, count: int, rule: Callable[[int], str | None], *options: str
) -> Row:
    return messaging_row(
        key,
        title,
        _topic(count, *options),
        (
            rate_of("publish", "publish"),
            rate_of("copies", "copies"),
            share_of("publish", "publish"),
            share_of("both", "both ways"),
            share_of("properties", "the same messages to a queue"),
            cpu_of("publish", "publish"),
            cpu_of("plain", "plain send"),
        ),
        subscriptions_of(TOPIC, count, rule),
        (Demand("publish_share", None, 60, 60),) if count == 1 and not options else (),
    )


MESSAGING_ROWS: tuple[Row, ...] = (
    messaging_row(
        "sessions",
        "1,000 sessions in flight",
        _sessions,
        (
            rate_of("send", "send"),
            rate_of("drain", "accept, drain, release"),
            rate_of("both", "both ways, all held"),
            share_of("send", "send"),
            share_of("drain", "drain"),
            share_of("both", "both ways"),
            share_of("ids", "session ids in a plain queue, both ways"),
            cpu_of("both", "both ways"),
            cpu_of("plain_both", "plain, both ways"),
        ),
        _queue_with(SESSION_QUEUE, "requiresSession: true"),
        tuple(Demand(f"{name}_share", None, 70, 70) for name in ("send", "drain", "both")),
    ),
    messaging_row(
        "dedup",
        "duplicate detection, every id new",
        _dedup,
        (
            rate_of("dedup", "send"),
            share_of("dedup", "send"),
            share_of("ids", "message ids in a plain queue"),
            cpu_of("dedup", "send"),
            cpu_of("plain", "plain send"),
        ),
        _queue_with(
            DEDUP_QUEUE,
            "requiresDuplicateDetection: true, duplicateDetectionHistoryTimeWindow: PT10M",
        ),
        (Demand("dedup_share", None, 75, 75),),
    ),
    _topic_row("topic-1", "topic, 1 subscription", 1, lambda _number: None),
    _topic_row("topic-10", "topic, 10 subscriptions", 10, lambda _number: None),
    _topic_row("topic-sql", "topic, 1 with a SQL filter of 3 terms", 1, _sql_rule, *PROPERTIES),
    messaging_row(
        "topic-2000",
        "topic, 2,000 correlation filters, one fits",
        _topic_of_thousands,
        (
            rate_of("publish", "publish"),
            share_of("publish", "publish"),
            cpu_of("publish", "publish"),
        ),
        subscriptions_of(TOPIC, SUBSCRIPTIONS, _correlation_rule),
        (Demand("publish_rate", None, 5_000, 5_000),),
    ),
    messaging_row(
        "partitioned",
        "queue over 16 partitions, no keys",
        _partitioned,
        (
            rate_of("partitioned", "both ways"),
            share_of("partitioned", "both ways"),
            share_of("send", "send"),
            share_of("receive", "receive"),
            cpu_of("partitioned", "both ways"),
            cpu_of("plain", "plain, both ways"),
        ),
        _queue_with(PARTITIONED_QUEUE, "enablePartitioning: true"),
    ),
    messaging_row(
        "retention",
        "queue that keeps what was settled",
        _retention,
        (
            rate_of("kept", "both ways"),
            share_of("kept", "both ways"),
            cpu_of("kept", "both ways"),
            cpu_of("plain", "plain, both ways"),
            Metric("kept_bytes", "disk for each kept message", "B", is_better_high=False),
            Metric("start_s", "first accepted over 1 M kept", "s", is_better_high=False),
            Metric("small_start_s", "over those of the rounds", "s", is_better_high=False),
            rate_of("reap", "deleted when switched off"),
        ),
        _queue_with(RETENTION_QUEUE, HISTORY),
    ),
    messaging_row(
        "dead-letter-drain",
        "queue, both ways, with 100,000 dead letters",
        _dead_letter_drain,
        (
            rate_of("alone", "without dead letters"),
            Metric("over_share", "while they lie there", "%"),
            Metric("beside_share", "while they are drained", "%"),
            Metric("another_share", "while another queue is drained", "%"),
            rate_of("drain", "drain"),
        ),
    ),
)
