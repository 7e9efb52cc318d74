"""Limits on the cost of rules: steps, so that costly rules harm their own subscription only."""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import replace
from random import Random

import pytest

from postbus.contract.entities import DEFAULT_RULE, RuleProperties, SubscriptionProperties
from postbus.entity.commands import Enqueue, Enqueued, Transact, Transacted
from postbus.entity.topics import routing as routing_module
from postbus.entity.topics.routing import INDEXED_GROUPS, Copies, Routing
from postbus.message.envelope import Envelope
from postbus.message.fields import MessageFields, StoredFields
from postbus.rules.compiled import CompiledRule, compile_rule
from postbus.rules.like import MAX_TEXT_CHARS
from postbus.rules.values import EvaluationError
from tests.entity.partition_rig import DLQ, TOPIC, properties_of
from tests.entity.topics.published import NOW_MS, correlation, fields_of, published, selects, sql
from tests.entity.topics.topic_rig import (
    ONE,
    THREE,
    TWO,
    names,
    publish,
    take,
    topic_rig,
    with_properties,
)

HOG = sql(" OR ".join(["a LIKE b"] * 32))
"""As costly as a rule may be: its pattern comes from the message, and it never fits."""

WORST: dict[str, object] = {"a": "x" * 4_000, "b": "%_" * 500 + "y"}
TURN_S = 0.5
"""Processor time an apply may take in a test: about forty times the usual one, tracing included."""


def hogs(count: int, rule: RuleProperties = HOG) -> list[RuleProperties]:
    return [rule.model_copy(update={"name": f"rule-{number}"}) for number in range(count)]


def of(copies: list[Copies]) -> dict[int, str]:
    """Return subscription -> "copy" or the error's name."""
    return {found.subscription_no: found.error.name if found.error else "copy" for found in copies}


def timed(topic: Routing, message: Envelope) -> tuple[list[Copies], float]:
    started = time.process_time()
    copies = topic.route(message, NOW_MS)
    return copies, time.process_time() - started


# --- the budget -----------------------------------------------------------------------------------


def test_costly_rules_are_given_up_and_the_other_subscriptions_get_their_copies() -> None:
    topic = Routing(Random(1))
    topic.put(1, [sql("a LIKE 'x%'")])
    topic.put(2, hogs(100))
    topic.put(3, [sql("a LIKE '%x'")])
    topic.put(4, [DEFAULT_RULE])
    topic.put(5, hogs(100))
    topic.put(6, [correlation({"b": WORST["b"]})])
    copies, took_s = timed(topic, published(WORST))
    assert took_s < TURN_S
    assert of(copies) == {
        1: "copy", 2: "FilterException", 3: "copy", 4: "copy", 5: "FilterException", 6: "copy",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (HOG, WORST),
        (sql(" OR ".join(["a LIKE '%_%_%_%_y'"] * 32)), WORST),
        (sql(" OR ".join(["a = 'x'"] * 32)), {"a": "y" * 30_000}),
        (sql(" OR ".join(["a = b"] * 32)), {"a": "y" * 30_000 + "a", "b": "y" * 30_000 + "b"}),
        (sql(" OR ".join(["property(a) = 1"] * 32)), {"a": "Ä" * 15_000}),
        (sql(" OR ".join(["a+a+a+a+a+a = b"] * 32)), {"a": "y" * 5_000}),
        (sql(" OR ".join(["a = newid()"] * 32)), {"a": "-" * 30_000}),
        (sql("1=1", ";".join(["REMOVE a"] * 32)), {f"p{n}": None for n in range(5_000)}),
        (sql("1=1", ";".join(f"SET sys.To = a + {n}" for n in range(32))), {"a": "y" * 30_000}),
    ],
    ids=["like", "pattern", "equal", "long", "name", "join", "uuid", "remove", "set"],
)
def test_two_thousand_rules_of_a_kind_take_little_time(
    monkeypatch: pytest.MonkeyPatch, rule: RuleProperties, message: dict[str, object]
) -> None:
    compiled = compile_rule(rule, Random(1))  # once: two thousand of them take seconds
    topic = Routing(Random(1))
    with monkeypatch.context() as patched:
        patched.setattr(
            routing_module, "compile_rule", lambda each, _: replace(compiled, properties=each)
        )
        topic.put(1, hogs(2_000, rule))
    topic.put(2, [sql("a = 1")])
    _, took_s = timed(topic, published(message))
    assert took_s < TURN_S


def test_a_subscription_with_few_conditions_is_always_evaluated() -> None:
    topic = Routing(Random(1))
    for number in range(50):
        topic.put(number, hogs(10))
    topic.put(50, [sql("a LIKE 'y%'"), sql("c = 1 OR c = 2", name="other")])
    for _ in range(5):
        got = of(topic.route(published({**WORST, "c": 2}), NOW_MS))
        assert got.pop(50) == "copy"
        assert set(got.values()) == {"FilterException"}


def test_the_same_messages_get_the_same_answers_however_often() -> None:
    def answers() -> list[dict[int, str]]:
        topic = Routing(Random(1))
        topic.put(1, hogs(3))
        topic.put(2, [sql("a LIKE '%_x'")])
        topic.put(3, hogs(1))
        return [of(topic.route(published(WORST), NOW_MS)) for _ in range(30)]

    assert answers() == answers()


@pytest.mark.slow
def test_usual_rules_never_run_out_of_steps_in_a_large_batch() -> None:
    topic = Routing(Random(1))
    topic.put(1, [sql("a LIKE '%ed' AND b > 3", name=f"r{n}") for n in range(40)])
    topic.put(2, [sql("b > 3", "SET c = b * 2; REMOVE d; SET sys.Label = 'x'")])
    topic.put(3, [sql("a LIKE 'r_d'")])
    message = published({"a": "red", "b": 4, "d": 1})
    for _ in range(5_000):
        assert of(topic.route(message, NOW_MS)) == {1: "copy", 2: "copy", 3: "copy"}


def test_many_groups_of_correlation_filters_are_asked_one_by_one() -> None:
    fields = [f"p{n}" for n in range(20)]
    rules = [
        correlation({fields[a]: 0, fields[b]: 0, fields[c]: number == 1_139}, name=f"r{number}")
        for number, (a, b, c) in enumerate(
            (a, b, c) for a in range(20) for b in range(a) for c in range(b)
        )
    ]
    topic = Routing(Random(1))
    topic.put(1, rules)
    assert len(topic._index._groups) == INDEXED_GROUPS
    last = dict.fromkeys(fields, 0) | {fields[17]: True}
    assert of(topic.route(published(last), NOW_MS)) == {1: "copy"}
    assert topic.route(published(dict.fromkeys(fields, 1)), NOW_MS) == []


def test_a_filter_over_stored_messages_has_steps_for_each() -> None:
    rule = compile_rule(sql("a LIKE '%_%y'"))
    for _ in range(200):
        assert rule.test(StoredFields(published(WORST), NOW_MS, 1, 0)) is False
    with pytest.raises(EvaluationError, match="too many steps"):
        compile_rule(HOG).test(StoredFields(published(WORST), NOW_MS, 1, 0))


# --- LIKE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["'%_y'", "'%y%'", "b"])
def test_like_refuses_texts_that_are_too_long(pattern: str) -> None:
    rule = compile_rule(sql(f"a LIKE {pattern}"))
    message = published({"a": "x" * MAX_TEXT_CHARS, "b": "%y%z%"})
    assert selects(rule, fields_of(message)) is False
    longer = published({"a": "x" * (MAX_TEXT_CHARS + 1), "b": "%y%z%"})
    with pytest.raises(EvaluationError, match="at most 4096 characters"):
        selects(rule, fields_of(longer))


@pytest.mark.slow
def test_patterns_are_not_kept_as_tables() -> None:
    """Those of messages not at all, those of rules when they are short, and few of them."""
    by_message = compile_rule(sql("a LIKE b"))
    kept: list[CompiledRule] = []
    gc.collect()
    tracemalloc.start()
    for number in range(150):
        letters = "".join(chr(300 + number + n) for n in range(950))
        selects(by_message, fields_of(published({"a": "x", "b": letters + "_"})))
        kept.append(compile_rule(sql(f"a LIKE '{letters}_'")))
        selects(kept[-1], fields_of(published({"a": "x"})))
    gc.collect()
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 3_000_000


# --- in a topic -----------------------------------------------------------------------------------


@pytest.mark.behaviour("S260", "S282")
def test_an_unevaluated_filter_dead_letters_the_copy_with_a_reason() -> None:
    rig = topic_rig(0)
    rig.put_subscription(ONE, rules=hogs(30))
    rig.put_subscription(TWO)
    off = SubscriptionProperties(dead_lettering_on_filter_evaluation_exceptions=False)
    rig.put_subscription(THREE, off, rules=hogs(30))
    publish(rig, with_properties("m", **WORST))
    assert (names(rig, ONE), names(rig, TWO), names(rig, THREE)) == ([], ["m"], [])
    (dead,) = take(rig, ONE, 1, DLQ)
    properties = properties_of(dead.envelope)
    assert properties["DeadLetterReason"] == "FilterException"
    assert "too many steps" in str(properties["DeadLetterErrorDescription"])
    assert names(rig, THREE, DLQ) == []


def test_a_batch_shares_the_steps_and_the_next_command_has_all_again() -> None:
    rig = topic_rig(0)
    rig.put_subscription(ONE, rules=[sql("a LIKE '%_y' OR b = 0")])
    rig.put_subscription(TWO)
    batch = [with_properties(f"m{n}", a="x" * 4_000, b=n % 2) for n in range(200)]
    publish(rig, *batch)
    assert len(names(rig, TWO)) == 200
    failed = names(rig, ONE, DLQ)
    assert 0 < len(failed) < 200
    assert "m0" not in failed
    publish(rig, with_properties("last", a="x" * 4_000, b=0))
    assert names(rig, ONE)[-1] == "last"


def test_a_transaction_publishes_the_copies_of_its_check() -> None:
    rig = topic_rig(0)
    rig.put_subscription(ONE, rules=[sql("a LIKE '%_y' OR b = 0")])
    operations = [Enqueue(TOPIC, [with_properties(f"m{n}", a="x" * 4_000, b=0)]) for n in range(40)]
    reply = rig.apply(Transact(operations))
    assert isinstance(reply, Transacted)
    assert all(isinstance(each, Enqueued) for each in reply.replies)
    in_transaction = names(rig, ONE, DLQ)
    rig_alone = topic_rig(0)
    rig_alone.put_subscription(ONE, rules=[sql("a LIKE '%_y' OR b = 0")])
    publish(rig_alone, *(with_properties(f"m{n}", a="x" * 4_000, b=0) for n in range(40)))
    assert names(rig_alone, ONE, DLQ) == in_transaction
    assert 0 < len(in_transaction) < 40


# --- changes --------------------------------------------------------------------------------------


def test_adding_a_rule_compiles_and_indexes_that_rule_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def counting(properties: RuleProperties, source: Random | None = None) -> CompiledRule:
        compiled.append(properties.name)
        return compile_rule(properties, source)

    monkeypatch.setattr(routing_module, "compile_rule", counting)
    topic = Routing(Random(1))
    rules: list[RuleProperties] = []
    for number in range(50):
        rules.append(sql(f"a = {number}", name=f"s{number}"))
        rules.append(correlation({"b": number}, "SET c = 1", name=f"c{number}"))
        topic.put(1, rules)
    assert len(compiled) == 100
    del rules[40:60]
    topic.put(1, rules)
    assert len(compiled) == 100
    assert of(topic.route(published({"b": 24}), NOW_MS)) == {}
    for b, rule in ((3, "c3"), (40, "c40")):
        (copies,) = topic.route(published({"b": b}), NOW_MS)
        assert MessageFields(copies.envelopes[0]).application["RuleName"] == rule
    topic.remove(1)
    assert not topic._index._groups


def test_a_rule_added_twice_is_removed_once() -> None:
    twice = correlation({"b": 1}, "SET c = 1")
    topic = Routing(Random(1))
    topic.put(1, [twice, twice])
    (copies,) = topic.route(published({"b": 1}), NOW_MS)
    assert len(copies.envelopes) == 2
    topic.put(1, [twice])
    (copies,) = topic.route(published({"b": 1}), NOW_MS)
    assert len(copies.envelopes) == 1
