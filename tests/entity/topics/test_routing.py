"""Routing over all subscriptions of a topic, against a scan of all rules."""

from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.contract.entities import DEFAULT_RULE, RuleProperties
from postbus.entity.topics.routing import Copies, Routing
from postbus.message.codec import Int, Value
from postbus.message.envelope import Envelope
from postbus.message.fields import MessageFields
from postbus.rules.compiled import EvaluationError, RuleError, compile_rule
from tests.entity.topics.published import NOW_MS, correlation, fields_of, published, selects, sql


def routing(*subscriptions: list[RuleProperties]) -> Routing:
    made = Routing(Random(1))
    for number, rules in enumerate(subscriptions):
        made.put(number, rules)
    return made


def numbers(copies: list[Copies]) -> list[int]:
    return [found.subscription_no for found in copies]


def names(copies: Copies) -> list[object]:
    """Return the rule's name of each copy, None of the message as published."""
    return [MessageFields(copy).application.get("RuleName") for copy in copies.envelopes]


# --- copies ---------------------------------------------------------------------------------------


def test_rules_without_an_action_give_one_copy_and_it_is_the_message() -> None:
    message = published({"a": 1})
    topic = routing(
        [sql("a = 1"), sql("a > 0"), DEFAULT_RULE], [sql("a = 1"), correlation({"a": 1})]
    )
    copies = topic.route(message, NOW_MS)
    assert numbers(copies) == [0, 1]
    for found in copies:
        assert len(found.envelopes) == 1
        assert found.envelopes[0] is message
        assert found.error is None


def test_each_rule_with_an_action_gives_its_copy() -> None:
    rules = [
        sql("a = 1", "SET b = 1", name="one"),
        DEFAULT_RULE,
        sql("a = 2", "SET b = 2", name="two"),
        correlation({"a": 1}, "SET b = 3", name="three"),
        sql("1=1", "SET b = 4", name="four"),
    ]
    (copies,) = routing(rules).route(published({"a": 1}), NOW_MS)
    assert names(copies) == [None, "one", "three", "four"]
    values = [MessageFields(copy).application.get("b") for copy in copies.envelopes]
    assert values == [None, 1, 3, 4]


def test_a_subscription_without_true_rules_gets_no_copy() -> None:
    topic = routing(
        [], [sql("1=0")], [sql("a = 2")], [correlation({"a": 2})], [sql("1=0", "SET a=1")]
    )
    assert topic.route(published({"a": 1}), NOW_MS) == []


def test_subscriptions_come_in_rising_order() -> None:
    topic = Routing(Random(1))
    rules = [[DEFAULT_RULE], [sql("a = 1")], [correlation({"a": 1})], [sql("1=1", "SET a = 2")]]
    for number in (9, 2, 7, 4, 1, 8, 3, 6, 5, 0):
        topic.put(number, rules[number % 4])
    assert numbers(topic.route(published({"a": 1}), NOW_MS)) == list(range(10))


def test_true_filters_do_not_look_at_the_message() -> None:
    class Unreadable(Envelope):
        """A message that must not be read."""

        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"{name} was read")

    topic = routing([DEFAULT_RULE], [sql("NOT 1=0 OR a = 1")], [])
    topic.put(2, [sql("1=0"), DEFAULT_RULE, correlation({"a": 1})])
    message = Unreadable()
    assert numbers(topic.route(message, NOW_MS)) == [0, 1, 2]


def test_the_time_of_publishing_is_known() -> None:
    topic = routing([sql("sys.EnqueuedTimeUtc = '2023-11-14T22:13:20Z'")])
    assert numbers(topic.route(published(), NOW_MS)) == [0]
    assert numbers(topic.route(published(), NOW_MS + 1)) == []


def test_new_ids_repeat_with_the_seed() -> None:
    def made(seed: int) -> object:
        topic = Routing(Random(seed))
        topic.put(1, [sql("1=1", "SET a = newid()")])
        (copies,) = topic.route(published({}), NOW_MS)
        return MessageFields(copies.envelopes[0]).application["a"]

    assert made(1) == made(1) != made(2)


# --- changes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules",
    [[DEFAULT_RULE], [sql("a = 1")], [correlation({"a": 1})], [correlation({"a": 1}, "SET b = 1")]],
    ids=["true", "sql", "correlation", "action"],
)
def test_rules_are_replaced_and_removed(rules: list[RuleProperties]) -> None:
    topic = routing(rules, rules)
    message = published({"a": 1})
    assert numbers(topic.route(message, NOW_MS)) == [0, 1]
    topic.put(0, [sql("a = 2")])
    assert numbers(topic.route(message, NOW_MS)) == [1]
    topic.put(0, rules)
    topic.remove(1)
    topic.remove(1)
    topic.remove(77)
    assert numbers(topic.route(message, NOW_MS)) == [0]
    topic.put(0, [])
    assert topic.route(message, NOW_MS) == []


def test_an_invalid_rule_leaves_routing_unchanged() -> None:
    topic = routing([DEFAULT_RULE])
    with pytest.raises(RuleError, match="line 1, column 4"):
        topic.put(0, [sql("a = 1"), sql("a =")])
    with pytest.raises(RuleError):
        topic.put(1, [sql("a =")])
    assert numbers(topic.route(published(), NOW_MS)) == [0]


def test_removed_subscriptions_leave_no_entries() -> None:
    topic = Routing(Random(1))
    rules = [correlation({"a": 1, "b": 2}), correlation({"a": 1}, label="x"), correlation({"a": 2})]
    for number in range(3):
        topic.put(number, rules)
    for number in range(3):
        topic.remove(number)
    index = topic._index
    for kept in (index._groups, index._by_pivot, index._fields, index._names):
        assert not kept
    assert topic.route(published({"a": 1}), NOW_MS) == []


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_comes_instead_of_copies_and_concerns_its_subscription_alone() -> None:
    topic = routing(
        [DEFAULT_RULE],
        [sql("a / 0 = 1")],
        [sql("a = 1", "SET b = 1"), sql("a = 1", "SET b = 1 / 0", name="bad")],
        [sql("a = 1")],
    )
    copies = topic.route(published({"a": 1}), NOW_MS)
    assert numbers(copies) == [0, 1, 2, 3]
    assert [len(found.envelopes) for found in copies] == [1, 0, 0, 1]
    failures = [(found.error.name, str(found.error)) for found in copies if found.error]
    zero = "Attempted to divide by zero."
    assert failures == [("FilterException", zero), ("RuleActionException", zero)]


def test_a_rule_skipped_by_routing_cannot_fail() -> None:
    bad = sql("sys.Nothing = 1")
    topic = routing(
        [bad, DEFAULT_RULE], [bad, correlation({"a": 1})], [sql("a = 1"), bad], [bad, sql("a = 1")]
    )
    copies = topic.route(published({"a": 1}), NOW_MS)
    assert [found.error is None for found in copies] == [True, True, True, False]


def test_broken_properties_fail_the_subscriptions_that_read_them() -> None:
    broken = published({"a": 1}, subject="x")
    broken.application_properties = broken.application_properties[:-1]
    topic = routing(
        [DEFAULT_RULE],
        [sql("a = 1")],
        [sql("sys.Label = 'x'")],
        [correlation({"a": 1})],
        [correlation(label="x")],
        [correlation(label="y")],
        [correlation({"a": 1}, label="y")],
        [correlation({"a": 1}), DEFAULT_RULE],
    )
    copies = topic.route(broken, NOW_MS)
    assert numbers(copies) == [0, 1, 2, 3, 4, 7]
    assert [found.error is not None for found in copies] == [False, True, False, True, False, False]


def test_a_broken_message_is_read_once_for_all_subscriptions() -> None:
    broken = published({str(n): None for n in range(8_000)})
    broken.application_properties = broken.application_properties[:-1]
    topic = routing(*[[correlation({"a": n})] for n in range(500)])
    started = time.process_time()
    copies = topic.route(broken, NOW_MS)
    assert time.process_time() - started < 1.0
    assert len(copies) == 500
    assert all(found.error for found in copies)


# --- against a scan -------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "A")
VALUES = st.sampled_from([1, 1.0, True, "x", "y", Int(1), 2, None])
ASKED = st.sampled_from([1, True, "x", 2.0, "y"])
FIELDS = st.dictionaries(
    st.sampled_from(["label", "to", "message_id"]), st.sampled_from(["x", "y"]), max_size=2
)
CORRELATED = st.tuples(st.dictionaries(st.sampled_from(NAMES), ASKED, max_size=3), FIELDS).filter(
    any
)
EXPRESSIONS = st.sampled_from(
    ["1=1", "1=0", "a = 1", "a = 'x' OR b = 2", "missing = 1", "sys.Nothing = 1", "b / 0 = 1"]
)
ACTIONS = st.sampled_from([None, None, "SET d = 1", "SET d = 1 / 0", "REMOVE a"])


@st.composite
def rule_lists(draw: st.DrawFn) -> list[RuleProperties]:
    rules = []
    for number in range(draw(st.integers(0, 4))):
        action, name = draw(ACTIONS), f"r{number}"
        if draw(st.booleans()):
            rules.append(sql(draw(EXPRESSIONS), action, name))
        else:
            properties, fields = draw(CORRELATED)
            rules.append(correlation(properties, action, name, **fields))
    return rules


def scanned(rules: list[RuleProperties], message: Envelope) -> tuple[list[object], str] | None:
    """Return names of copies and the error, by asking rule after rule in the documented order."""
    compiled = [compile_rule(rule) for rule in rules]
    fields = fields_of(message)
    passing = sorted(
        (rule for rule in compiled if rule.action is None),
        key=lambda rule: (not rule.is_always, rule.criteria is None),
    )
    try:
        got = [message] if any(selects(rule, fields) for rule in passing) else []
        got += [rule.act(fields) for rule in compiled if rule.action and selects(rule, fields)]
    except EvaluationError as error:
        return [], f"{error.name}: {error}"
    return (names(Copies(0, got, None)), "") if got else None


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), rule_lists())), max_size=12),
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from(NAMES), VALUES), FIELDS), min_size=1, max_size=4
    ),
)
@settings(max_examples=250, deadline=None)
def test_routing_selects_the_same_subscriptions_as_a_scan(
    changes: list[tuple[int, list[RuleProperties] | None]],
    messages: list[tuple[dict[str, Value], dict[str, str]]],
) -> None:
    topic = Routing(Random(1))
    model: dict[int, list[RuleProperties]] = {}
    for number, rules in changes:
        if rules is None:
            topic.remove(number)
            model.pop(number, None)
        else:
            topic.put(number, rules)
            model[number] = rules
    for application, fields in messages:
        wire = {"subject" if name == "label" else name: text for name, text in fields.items()}
        message = published(application, **wire)
        expected = {number: scanned(rules, message) for number, rules in sorted(model.items())}
        copies = topic.route(message, NOW_MS)
        assert {
            found.subscription_no: (
                names(found),
                f"{found.error.name}: {found.error}" if found.error else "",
            )
            for found in copies
        } == {number: got for number, got in expected.items() if got is not None}
        assert numbers(copies) == sorted(numbers(copies))


# --- the index ------------------------------------------------------------------------------------


def least_us(topic: Routing, message: Envelope) -> float:
    """Return the least processor time of one routing in microseconds."""
    rounds = []
    for _ in range(7):
        started = time.process_time()
        for _ in range(50):
            topic.route(message, NOW_MS)
        rounds.append((time.process_time() - started) / 50 * 1e6)
    return min(rounds)


@pytest.mark.slow
def test_two_thousand_correlation_filters_cost_as_little_as_a_few() -> None:
    def topic(count: int) -> Routing:
        return routing(*[[correlation({"region": f"r{n}"}, label="order")] for n in range(count)])

    message = published({"region": "r3", "size": 1}, subject="order", message_id="m")
    many, few = topic(2_000), topic(10)
    assert numbers(many.route(message, NOW_MS)) == numbers(few.route(message, NOW_MS)) == [3]
    assert least_us(many, message) < 3 * least_us(few, message)


@pytest.mark.slow
def test_filters_that_name_different_properties_are_not_scanned() -> None:
    def topic(count: int) -> Routing:
        return routing(*[[correlation({"all": 1, f"p{n}": 1})] for n in range(count)])

    message = published({"all": 1, "p3": 1})
    many, few = topic(2_000), topic(10)
    assert numbers(many.route(message, NOW_MS)) == [3]
    assert least_us(many, message) < 3 * least_us(few, message)
