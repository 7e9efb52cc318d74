"""Fuzzes SQL filters and actions: `python tests/rules/fuzz_filters.py SECONDS [SEED]`.

Damages known texts and puts random tokens together. For all texts, only `RuleError` may come
out of making a rule and only `EvaluationError` out of asking it, and nothing may take long.
"""

from __future__ import annotations

import random
import sys
import time

from postbus.message.codec import Int, Timestamp, Ulong
from postbus.message.sections import slice_message
from postbus.rules.compiled import CompiledRule, EvaluationError, RuleError, compile_rule
from postbus.rules.grammar import MAX_CHARS
from tests.entity.topics.published import fields_of, published, selects, sql
from tests.fuzz_bounds import Bounds, program_arguments
from tests.text_damages import damaged

SLOW_SECONDS = 1.0

FILTERS = [
    "color = 'red' AND quantity > 10 AND sys.Label LIKE 'ord%'",
    "NOT (a IS NULL OR b IS NOT NULL) AND EXISTS(user.c)",
    "StoreId NOT IN ('Store1', 'Store2', 3, 4.5, TRUE, NULL)",
    "property('a') + p(b) <> newid() OR -(1 + 2) * 3 / 4 % 5 >= .5e1",
    "[a b]]c] = \"x\"\"y\" AND name LIKE '50\\%_' ESCAPE '\\'",
    "sys.EnqueuedTimeUtc - 60 < when AND sys.TimeToLive < 90",
]
ACTIONS = [
    "SET quantity = quantity / 2; REMOVE priority;SET sys.CorrelationId = 'low';",
    "SET sys.TimeToLive = '00:05:00' SET sys.SessionId = newid()",
    "SET a = a + a; SET sys.ScheduledEnqueueTimeUtc = '2030-01-01'; REMOVE [b c]",
    "SET sys.MessageId = NULL; SET user.text = 'it''s' + 1",
]
TOKENS = [
    *" ()=,.;'\"[]@+-*/%_#\n",
    *(
        "AND ",
        "OR ",
        "NOT ",
        " IN (",
        " LIKE ",
        " ESCAPE '!'",
        " IS NULL",
        "EXISTS(",
        "SET ",
        "REMOVE ",
    ),
    *("<>", "<=", "!=", "TRUE", "NULL", "newid()", "p(", "sys.", "user.", "sys.Label", "@p"),
    *("a", "b", "text", "quantity", "when", "big", "0", "1", "9223372036854775807", "1e308", ".5"),
    *("'%a_'", "''", "'2020-01-01'", "[a]]b]", "é", "\x00", "\U0001f600"),
]

MESSAGE = published(
    {"a": "aaaa", "b": 2.5, "text": "x" * 1_000, "quantity": Int(7), "when": Timestamp(0),
     "big": Ulong(2**64 - 1), "color": "red", "none": None, "flag": True},
    message_id="m", subject="order", group_id="s",
)  # fmt: skip


def mutated(pool: list[str], source: random.Random) -> str:
    """Return a text with a few damages, or one of tokens alone."""
    if source.random() < 0.2:
        return "".join(source.choice(TOKENS) for _ in range(source.randint(1, 40)))
    text = source.choice(pool)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(text) + 1)
        if source.randrange(5):
            text = damaged(text, at, pool, TOKENS, source)
        else:
            text = text[:at] + text[at : at + 12] * source.randint(2, 30) + text[at:]
    return text


def made(filter_text: str, action: str | None) -> CompiledRule | None:
    if not 0 < len(filter_text) <= MAX_CHARS or (
        action is not None and not 0 < len(action) <= MAX_CHARS
    ):
        return None
    try:
        return compile_rule(sql(filter_text, action))
    except RuleError:
        return None


def check(text: str) -> int:
    """Compile and evaluate a text as a filter and an action; return the number accepted."""
    accepted = 0
    fields = fields_of(MESSAGE)
    for rule in (made(text, None), made("1=1", text)):
        if rule is None:
            continue
        accepted += 1
        try:
            if selects(rule, fields):
                changed = rule.act(fields)
                again = slice_message(
                    changed.properties + changed.application_properties + changed.body
                )
                assert again.application_properties == changed.application_properties
                assert again.message_id == changed.message_id
                assert again.session_id == changed.session_id
                assert "RuleName" in fields_of(changed).application or rule.action is None
        except EvaluationError:
            continue
    return accepted


def fuzz(
    seconds: float, seed: int, max_inputs: int | None = None, bounds: Bounds | None = None
) -> tuple[int, int]:
    """Return the numbers of tried and of valid texts."""
    bounds = bounds or Bounds()
    source = random.Random(seed)
    pool = [*FILTERS, *ACTIONS]
    known = len(pool)
    ends_at = time.monotonic() + seconds
    tried = accepted = 0
    while time.monotonic() < ends_at and (max_inputs is None or tried < max_inputs):
        text = mutated(pool, source)
        started = time.process_time()
        try:
            with bounds.step():
                found = check(text)
        except BaseException:
            sys.stderr.write(f"seed {seed}, input {tried}: {text!r}\n")
            raise
        assert time.process_time() - started < SLOW_SECONDS, repr(text)
        tried += 1
        accepted += found
        if found and source.random() < 0.1:
            pool[known:] = [*pool[known:][-100:], text]
    return tried, accepted


def main() -> None:
    seconds, seed = program_arguments()
    bounds = Bounds()
    tried, accepted = fuzz(seconds, seed, bounds=bounds)
    sys.stdout.write(f"{tried} texts, {accepted} rules accepted, seed {seed}, {bounds}\n")


if __name__ == "__main__":
    main()
