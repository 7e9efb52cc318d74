#!/usr/bin/env python3
"""Measures rules without a broker: the cost of evaluating a filter, and of routing by an index.

bench/filters.py [SECONDS] measures each line for about SECONDS (default 1): a three-term
SQL expression on decoded fields, the same with decoding, an action, and routing to a few open
subscriptions and to 2,000 with a correlation filter each, of which one matches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dataplane"))

from postbus.contract.entities import (
    DEFAULT_RULE,
    CorrelationFilter,
    RuleProperties,
    SqlAction,
    SqlFilter,
)
from postbus.entity.topics.routing import Routing
from postbus.message.codec import encode_list, encode_map, encode_value
from postbus.message.envelope import Envelope
from postbus.message.fields import MessageFields
from postbus.message.sections import slice_message
from postbus.rules.compiled import compile_rule

EXPRESSION = "color = 'red' AND quantity > 10 AND sys.Label LIKE 'ord%'"
ACTION = "SET quantity = quantity / 2; REMOVE priority; SET sys.CorrelationId = 'low'"
SUBSCRIPTIONS = 2_000
ROUNDS = 5


def published() -> Envelope:
    """Return a message of 1 KiB as an SDK sends it."""
    properties = encode_list([encode_value("id-1"), b"\x40", b"\x40", encode_value("order")])
    pairs = {"color": "red", "quantity": 12, "priority": "high", "region": "r1234"}
    entries = b"".join(encode_value(name) + encode_value(value) for name, value in pairs.items())
    return slice_message(
        b"\x00\x53\x73" + properties
        + b"\x00\x53\x74" + encode_map(entries, len(pairs))
        + b"\x00\x53\x75" + encode_value(bytes(1_024))
    )  # fmt: skip


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of one call in several rounds."""
    count, spent = 1, 0.0
    while spent < seconds / ROUNDS / 4:
        count *= 2
        spent = _round(call, count)
    count = max(1, int(count * seconds / ROUNDS / spent))
    return min(_round(call, count) for _ in range(ROUNDS)) / count * 1e6


def _round(call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - started


def sql_rule(expression: str, action: str | None = None) -> RuleProperties:
    return RuleProperties(
        name="rule",
        sql_filter=SqlFilter(sql_expression=expression),
        action=None if action is None else SqlAction(sql_expression=action),
    )


def topic(rule_of: Callable[[int], RuleProperties], count: int) -> Routing:
    routing = Routing(Random(1))
    for number in range(count):
        routing.put(number, [rule_of(number)])
    return routing


def by_region(number: int) -> RuleProperties:
    filter_ = CorrelationFilter(label="order", properties={"region": f"r{number}"})
    return RuleProperties(name="rule", correlation_filter=filter_)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    envelope = published()
    fields = MessageFields(envelope)
    rule = compile_rule(sql_rule(EXPRESSION))
    changing = compile_rule(sql_rule(EXPRESSION, ACTION))
    correlated = topic(by_region, SUBSCRIPTIONS)
    default = topic(lambda _number: DEFAULT_RULE, 10)
    assert rule.test(fields) is True
    assert [found.subscription_no for found in correlated.route(envelope, 0)] == [1234]

    def with_steps(call: Callable[[MessageFields], object]) -> Callable[[], object]:
        def run() -> object:
            fields.steps_left = MessageFields.steps_left  # a published message has all of them
            return call(fields)

        return run

    rows: list[tuple[str, Callable[[], object]]] = [
        ("three terms, decoded", with_steps(rule.test)),
        ("three terms, with decoding", lambda: rule.test(MessageFields(envelope))),
        ("action of three statements, decoded", with_steps(changing.act)),
        ("10 subscriptions with $Default", lambda: default.route(envelope, 0)),
        (f"{SUBSCRIPTIONS} correlation filters, one fits", lambda: correlated.route(envelope, 0)),
    ]
    print(f"{'':40} {'µs':>8} {'per second':>12}")
    for name, call in rows:
        cost_us = microseconds(call, seconds)
        print(f"{name:40} {cost_us:8.2f} {1e6 / cost_us:12,.0f}")


if __name__ == "__main__":
    main()
