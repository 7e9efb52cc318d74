"""Rules created from their properties: kinds of filters, correlation, and refusals."""

from __future__ import annotations

import random
import uuid

import pytest

from postbus.contract.entities import DEFAULT_RULE, CorrelationFilter, RuleProperties
from postbus.contract.rule_values import Identifier, Moment, Octets, RuleValue, Span
from postbus.entity.topics.routing import Routing
from postbus.message.codec import (
    Array,
    Byte,
    Described,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    Ubyte,
    Uint,
    Ulong,
    Ushort,
    Value,
)
from postbus.message.fields import MessageFields
from postbus.rules.compiled import (
    CORRELATION_FIELDS,
    RuleError,
    check_rule,
    compile_rule,
)
from tests.entity.topics.published import correlation, fields_of, published, selects, sql

ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
WIRE_NAMES = {
    "content_type": "content_type",
    "correlation_id": "correlation_id",
    "label": "subject",
    "message_id": "message_id",
    "reply_to": "reply_to",
    "reply_to_session_id": "reply_to_group_id",
    "session_id": "group_id",
    "to": "to",
}


def matches(
    rule: RuleProperties, application: dict[str, Value] | None = None, **fields: Value
) -> bool:
    return selects(compile_rule(rule), fields_of(published(application, **fields)))


def test_the_default_rule_takes_everything_as_it_is() -> None:
    rule = compile_rule(DEFAULT_RULE)
    fields = fields_of(published({"a": 1}))
    assert rule.is_always
    assert selects(rule, fields)
    assert rule.act(fields) is fields.envelope
    assert rule.properties is DEFAULT_RULE


def test_a_rule_with_an_action_gives_another_message() -> None:
    rule = compile_rule(sql("a = 1", "SET b = 2", name="second"))
    fields = fields_of(published({"a": 1}))
    assert selects(rule, fields)
    assert MessageFields(rule.act(fields)).application == {"a": 1, "RuleName": "second", "b": 2}


def test_a_correlation_rule_may_have_an_action() -> None:
    rule = compile_rule(correlation(label="x", action="REMOVE a"))
    changed = rule.act(fields_of(published({"a": 1}, subject="x")))
    assert MessageFields(changed).application == {"RuleName": "rule"}


# --- correlation filters --------------------------------------------------------------------------


def test_every_field_of_a_correlation_filter_is_known() -> None:
    assert set(CORRELATION_FIELDS) | {"properties"} == set(CorrelationFilter.model_fields)
    assert set(WIRE_NAMES) == set(CORRELATION_FIELDS)


@pytest.mark.parametrize("name", sorted(WIRE_NAMES))
def test_a_field_matches_exactly(name: str) -> None:
    rule = correlation(**{name: "Red"})
    wire_name = WIRE_NAMES[name]
    assert matches(rule, **{wire_name: "Red"})
    for other in ("red", "Red ", "", None):
        assert not matches(rule, {"a": 1}, **{wire_name: other})
    if name != "to":
        assert not matches(rule, to="Red")


def test_ids_of_other_types_match_by_their_text() -> None:
    assert matches(correlation(message_id=str(ID)), message_id=ID)
    assert matches(correlation(correlation_id="7"), correlation_id=Ulong(7))
    assert matches(correlation(content_type="text/plain"), content_type=Symbol("text/plain"))


def test_all_that_is_named_must_match() -> None:
    rule = correlation({"color": "red", "size": 1}, label="x", to="y")
    assert matches(rule, {"color": "red", "size": 1, "more": 2}, subject="x", to="y")
    assert not matches(rule, {"color": "red", "size": 2}, subject="x", to="y")
    assert not matches(rule, {"color": "red"}, subject="x", to="y")
    assert not matches(rule, {"color": "red", "size": 1}, subject="x")


def test_names_of_properties_are_exact() -> None:
    assert not matches(correlation({"color": "red"}), {"Color": "red"})


@pytest.mark.parametrize(
    "value",
    [Ubyte(7), Ushort(7), Uint(7), Ulong(7), Byte(7), Short(7), Int(7), 7, Float(7), 7.0],
    ids=lambda value: type(value).__name__,
)
def test_numbers_of_every_width_are_equal(value: Value) -> None:
    assert matches(correlation({"n": 7}), {"n": value})
    assert matches(correlation({"n": 7.0}), {"n": value})
    assert not matches(correlation({"n": 8}), {"n": value})


@pytest.mark.parametrize(
    ("named", "value"),
    [
        (1, True),
        (0, False),
        (True, 1),
        (True, "True"),
        ("1", 1),
        (1, "1"),
        (5, Timestamp(5)),
        (5.5, "5.5"),
        ("x", b"x"),
        ("x", None),
        ("x", ["x"]),
        ("x", Array(0xA1, ["x"])),
        ("x", Described(Ulong(1), "x")),
    ],
    ids=repr,
)
def test_values_of_different_kinds_are_not_equal(named: Value, value: Value) -> None:
    assert not matches(correlation({"n": named}), {"n": value})


@pytest.mark.parametrize(
    ("named", "value"),
    [(True, True), (False, False), ("x", Symbol("x")), (str(ID), ID), ("", ""), (2.5, Float(2.5))],
    ids=repr,
)
def test_values_of_the_same_kind_are_equal(named: Value, value: Value) -> None:
    assert matches(correlation({"n": named}), {"n": value})


def test_broken_properties_are_reported() -> None:
    broken = published({"a": 1})
    broken.application_properties = broken.application_properties[:-1]
    routing = Routing(random.Random(1))
    routing.put(1, [correlation({"a": 1})])
    routing.put(2, [correlation(label="x")])
    (copies,) = routing.route(broken, 0)
    assert copies.subscription_no == 1
    assert copies.envelopes == []
    assert copies.error is not None
    assert (copies.error.name, "malformed" in str(copies.error)) == ("FilterException", True)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [sql("a ="), sql("a = 1", "SET a"), correlation(label="x", action="SET sys.Size = 1")],
    ids=["filter", "action", "action of a correlation rule"],
)
def test_a_wrong_rule_is_refused_when_it_is_made(rule: RuleProperties) -> None:
    with pytest.raises(RuleError):
        compile_rule(rule)
    with pytest.raises(RuleError):
        check_rule(rule)
    assert issubclass(RuleError, ValueError)


@pytest.mark.parametrize("rule", [DEFAULT_RULE, sql("a = newid()", "SET a = newid()")])
def test_a_right_rule_is_accepted(rule: RuleProperties) -> None:
    check_rule(rule)


TICKS_OF_5_S = 621_355_968_000_000_000 + 50_000_000


@pytest.mark.parametrize(
    ("named", "value", "is_equal"),
    [
        (Moment(at_ms=5_000), Timestamp(5_000), True),
        (Moment(at_ms=5_000), Timestamp(5_001), False),
        (Moment(at_ms=5_000), 5_000, False),
        (Moment(at_ms=5_000), "1970-01-01T00:00:05Z", False),
        (
            Moment(at_ms=5_000),
            Described(Symbol("com.microsoft:datetime-offset"), TICKS_OF_5_S),
            True,
        ),
        (
            Moment(at_ms=5_000),
            Described(Symbol("com.microsoft:datetime-offset"), 50_000_000),
            False,
        ),
        (Span(ticks=7), Described(Symbol("com.microsoft:timespan"), 7), True),
        (Span(ticks=7), Described(Symbol("com.microsoft:timespan"), 8), False),
        (Span(ticks=7), Described(Symbol("com.microsoft:other"), 7), False),
        (Span(ticks=7), Described(Symbol("com.microsoft:timespan"), "7"), False),
        (Identifier(id=ID), ID, True),
        (Identifier(id=ID), str(ID), True),
        (Identifier(id=ID), uuid.UUID(int=1), False),
        (Octets(octets=b"x"), b"x", True),
        (Octets(octets=b"x"), "x", False),
        (Octets(octets=b""), None, False),
        (Span(ticks=7), 7, False),
        (7, Described(Symbol("com.microsoft:timespan"), 7), False),
    ],
)
def test_times_and_durations_equal_those_of_clients(
    named: RuleValue, value: Value, is_equal: bool
) -> None:
    rule = correlation({"p": named})
    assert matches(rule, {"p": value}) is is_equal
    routing = Routing(random.Random(0))
    routing.put(1, [rule])
    assert bool(routing.route(published({"p": value}), 0)) is is_equal
