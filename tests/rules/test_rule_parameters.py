"""Parameters of filters and actions: a value takes the place of a name."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.contract.entities import RuleProperties, SqlAction, SqlFilter
from postbus.contract.rule_values import (
    Identifier,
    Moment,
    Octets,
    RuleValue,
    Span,
    parse_moment_ms,
)
from postbus.message.codec import Described, Symbol, Timestamp, Ulong, Value
from postbus.message.described_times import EPOCH_TICKS
from postbus.message.fields import MessageFields
from postbus.rules.compiled import RuleError, check_rule, compile_rule
from postbus.rules.grammar import parse_filter
from postbus.rules.nodes import Comparison, Constant, Property
from tests.entity.topics.published import fields_of, published, selects


def rule(text: str, values: dict[str, object], action: str | None = None) -> RuleProperties:
    return RuleProperties(
        name="r",
        sql_filter=SqlFilter(sql_expression=text, parameters=values),
        action=None if action is None else SqlAction(sql_expression=action, parameters=values),
    )


def matches(text: str, values: dict[str, object], application: dict[str, Value]) -> bool:
    return selects(compile_rule(rule(text, values)), fields_of(published(application)))


@pytest.mark.parametrize("name", ["@p", "p", "@P"])
def test_a_parameter_has_its_value_regardless_of_case(name: str) -> None:
    assert matches("a = @p", {name: "x"}, {"a": "x"})
    assert not matches("a = @p", {name: "x"}, {"a": "y"})


def test_parameters_may_replace_any_value() -> None:
    values = {"@one": 1, "@two": 2.5, "@text": "x%", "@yes": True, "@name": "b"}
    assert matches("-@one + a * @two = 4", values, {"a": 2})
    assert matches("a IN (@one, @text)", values, {"a": "x%"})
    assert matches("a LIKE @text AND c = @yes", values, {"a": "xyz", "c": True})
    assert matches("p(@name) = @one", values, {"b": 1})


def test_times_and_durations_keep_their_meaning() -> None:
    at, span = Moment(at_ms=5_000), Span(ticks=25_000_000)
    assert matches("a < @at", {"@at": at}, {"a": Timestamp(4_999)})
    assert not matches("a < @at", {"@at": at}, {"a": Timestamp(5_000)})
    assert matches("b - a = @span", {"@span": span}, {"a": Timestamp(0), "b": Timestamp(2_500)})
    acted = compile_rule(rule("a = 1", {"@at": at}, "SET b = @at"))
    assert MessageFields(acted.act(fields_of(published({}))), 0).application["b"] == at.at_ms


ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
SPAN = Symbol("com.microsoft:timespan")
OFFSET = Symbol("com.microsoft:datetime-offset")
A_SECOND = Moment(at_ms=1_000)
AN_HOUR = Span(ticks=36_000_000_000)


@pytest.mark.parametrize(
    ("parameter", "text", "value", "fits"),
    [
        (A_SECOND, "a > @p", Timestamp(1_001), True),
        (A_SECOND, "a > @p", Timestamp(1_000), False),
        (A_SECOND, "a > @p", 1_001, False),
        (A_SECOND, "a = @p", "1970-01-01T00:00:01Z", True),
        (A_SECOND, "@p <= a", Timestamp(1_000), True),
        (A_SECOND, "a = @p", Described(OFFSET, EPOCH_TICKS + 10_000_000), True),
        (AN_HOUR, "a = @p", Described(SPAN, 36_000_000_000), True),
        (AN_HOUR, "a < @p", Described(SPAN, 35_999_999_999), True),
        (AN_HOUR, "a < @p", Described(SPAN, 36_000_000_000), False),
        (AN_HOUR, "a = @p", 3_600, True),
        (AN_HOUR, "a = @p", "PT1H", False),
        (AN_HOUR, "sys.TimeToLive > @p", None, True),
        (Identifier(id=ID), "a = @p", ID, True),
        (Identifier(id=ID), "a = @p", str(ID).upper(), True),
        (Octets(octets=b"\0"), "a = @p", b"\0", True),
        (Octets(octets=b"\0"), "a = @p", b"", False),
        (Octets(octets=b"\0"), "a IN (1, @p)", b"\0", True),
    ],
)
def test_times_durations_ids_and_octets_compare(
    parameter: RuleValue, text: str, value: Value, fits: bool
) -> None:
    assert matches(text, {"@p": parameter}, {"a": value}) is fits


def test_durations_of_messages_compare_with_each_other() -> None:
    both: dict[str, Value] = {"a": Described(SPAN, 5), "b": Described(SPAN, 6)}
    assert matches("a < b AND a = a", {}, both)
    assert not matches("a = b", {}, {"a": Described(Ulong(1), 5), "b": Described(Ulong(1), 5)})


def test_an_action_sets_a_time_to_live_from_a_duration() -> None:
    values = {"@at": Moment(at_ms=parse_moment_ms("2030-01-01T00:00:00")), "@for": AN_HOUR}
    made = rule("1=1", values, "SET at = @at; SET sys.TimeToLive = @for")
    acted = MessageFields(compile_rule(made).act(fields_of(published({"c": 1}))), 0)
    assert type(acted.application["at"]) is Timestamp
    assert acted.ttl_ms == 3_600_000


def test_equal_values_of_other_types_stay_apart() -> None:
    assert matches("a = @p", {"@p": 1}, {"a": 1})
    assert matches("a = @p", {"@p": True}, {"a": True})
    assert not matches("a = @p", {"@p": 1}, {"a": True})


def test_an_action_has_parameters_of_its_own() -> None:
    acted = compile_rule(rule("@yes = TRUE", {"@yes": True, "@v": 7}, "SET a = @v; SET b = @yes"))
    fields = fields_of(published({"c": 1}))
    assert acted.is_always
    assert MessageFields(acted.act(fields), 0).application == {
        "c": 1,
        "a": 7,
        "b": True,
        "RuleName": "r",
    }


def test_a_parameter_in_a_text_is_text() -> None:
    assert matches("a = '@p'", {}, {"a": "@p"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "line 1, column 5: the parameter @p has no value"),
        ({"q": 1}, "line 1, column 5: the parameter @p has no value"),
        ({"p": 2**63}, "the number 9223372036854775808 of the parameter @p is too large"),
        ({"p": "\0"}, "a rule cannot hold the character NUL"),
        ({"p": 1, "\0": 1}, "a rule cannot hold the character NUL"),
    ],
)
def test_a_missing_or_invalid_value_is_reported(values: dict[str, object], message: str) -> None:
    with pytest.raises(RuleError) as caught:
        check_rule(rule("a = @p", values))
    assert str(caught.value).startswith(message)


def test_values_cannot_make_an_expression_deeper() -> None:
    with pytest.raises(RuleError, match="nested more than 64 levels"):
        parse_filter("a = " + "-" * 900 + "@p", {"p": 1})


@given(st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text())
def test_a_value_is_never_read_as_an_expression(value: bool | int | str) -> None:
    found = parse_filter("a = @p", {"p": value})
    assert found == Comparison("=", Property("a", is_system=False), Constant(value))
