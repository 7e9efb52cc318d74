"""The most expensive permitted rules, beside a queue of another user; only Postbus is measured."""

from __future__ import annotations

from measuring import OTHER_QUEUE, Bench, Result, finish
from messaging import subscriptions_of
from postbus_server import Postbus
from rows import Demand, Metric, Row, warm_up
from server import Server

TOPIC = "bench-costly"
SUBSCRIPTIONS = 20
RULES = 2_000
EXPRESSION = " OR ".join(["a LIKE b"] * 32)
"""As many conditions as a rule may have; the pattern comes with the message."""
PROPERTIES = ("--property", "a=" + "x" * 198, "--property", "b=" + "%_" * 98 + "y")
"""As long as the load client makes them: without a limit each publish would take seconds."""
PUBLISHES_A_SECOND = 5


def _rules(_subscription: int) -> str:
    """Return the rules of a subscription as YAML, without the first and the last brace."""
    each = f'sqlFilter: {{sqlExpression: "{EXPRESSION}"}}'
    count = RULES // SUBSCRIPTIONS
    return ", ".join(f"{{name: r{number}, {each}}}" for number in range(count))


def _costly_rules(bench: Bench, server: Server) -> Result:
    """Send through a queue, alone and while messages are published to the worst rules."""
    assert isinstance(server, Postbus)
    server.start()
    warm_up(bench, server)
    small = ("--mode", "both", "--rate", 500, "--window", 10_000, "--count", bench.count(10_000))
    alone = bench.client.run(server, OTHER_QUEUE, *small)
    other = bench.client.start(server, OTHER_QUEUE, *small, "--limit-s", 120)
    count = max(10, bench.count(10_000) * PUBLISHES_A_SECOND // 500)
    publishing = ("--mode", "send", "--rate", PUBLISHES_A_SECOND, "--count", count, *PROPERTIES)
    sent = bench.client.run(server, TOPIC, *publishing)
    meanwhile = finish(other)
    return {
        "is_complete": sent["is_complete"] and meanwhile["is_complete"],
        "accept_p99_ms": sent["ack_p99_us"] / 1e3,
        "others_p99_ms_alone": alone["end_to_end_p99_us"] / 1e3,
        "others_p99_ms": meanwhile["end_to_end_p99_us"] / 1e3,
    }


COSTLY_RULE_ROWS: tuple[Row, ...] = (
    Row(
        "costly-rules",
        f"{RULES:,} worst rules on a topic, {PUBLISHES_A_SECOND} publishes a second",
        _costly_rules,
        (
            Metric("others_p99_ms_alone", "others' p99 alone", "ms", is_better_high=False),
            Metric("others_p99_ms", "others' p99", "ms", is_better_high=False),
            Metric("accept_p99_ms", "publish accepted, p99", "ms", is_better_high=False),
        ),
        (Demand("others_p99_ms", None, 50, 30),),
        is_interleaved=False,
        only="postbus",
        documents=subscriptions_of(TOPIC, SUBSCRIPTIONS, _rules),
    ),
)
