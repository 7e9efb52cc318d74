"""Compiled rules of subscriptions: they select messages and change copies.

A rule without an action passes the message on as it was published. `routing` evaluates the rules of
a topic; manifests and management validate a rule with `check_rule` before they store it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from postbus.contract.entities import CorrelationFilter, RuleProperties
from postbus.contract.rule_values import Identifier, Moment, Octets, RuleValue, Span
from postbus.message.codec import (
    TIME_SPAN,
    DecodeError,
    Described,
    Symbol,
    Timestamp,
    Value,
)
from postbus.message.described_times import offset_ms, span_ticks
from postbus.message.envelope import Envelope
from postbus.message.fields import Field, MessageFields
from postbus.rules.actions import Act, compile_action
from postbus.rules.expressions import (
    Test,
    always,
    compile_test,
    never,
    refuse_unstored,
    unknown,
)
from postbus.rules.grammar import node_count, parse_action, parse_filter
from postbus.rules.nodes import Assign, RuleError, Values
from postbus.rules.steps import FIELD_STEPS, NODE_STEPS
from postbus.rules.values import KINDS, EvaluationError, ValueKind, seconds_of

__all__ = ["CompiledRule", "EvaluationError", "RuleError", "check_rule", "compile_rule"]

Criteria: TypeAlias = dict[Field | str, Hashable]
"""Criteria of a correlation filter: field or application property -> `correlated`."""

MAX_RULE_BYTES: Final = 65_536
"""Maximum size of a rule as JSON. Our choice."""

CORRELATION_FIELDS: Final = {
    "content_type": Field.CONTENT_TYPE,
    "correlation_id": Field.CORRELATION_ID,
    "label": Field.SUBJECT,
    "message_id": Field.MESSAGE_ID,
    "reply_to": Field.REPLY_TO,
    "reply_to_session_id": Field.REPLY_TO_GROUP_ID,
    "session_id": Field.GROUP_ID,
    "to": Field.TO,
}


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule with its filter and action as functions.

    `criteria` of a correlation filter; None for a SQL filter. `steps`: cost of an evaluation,
    independent of the message.
    """

    properties: RuleProperties
    criteria: Criteria | None = field(repr=False)
    test: Test = field(repr=False)
    action: Act | None = field(repr=False)
    steps: int = 0

    @property
    def is_always(self) -> bool:
        """True if the filter selects every message without looking at it."""
        return self.test is always

    @property
    def is_never(self) -> bool:
        """True if the filter selects no message at all."""
        return self.test is never or self.test is unknown

    def act(self, fields: MessageFields) -> Envelope:
        """Return the copy of a selected message, changed by the action. Raises
        `EvaluationError`.
        """
        return fields.envelope if self.action is None else self.action(fields)


def malformed(error: DecodeError) -> EvaluationError:
    """Return the error of a filter for a message that cannot be parsed."""
    return EvaluationError(f"The properties are malformed: {error}.")


def compile_rule(properties: RuleProperties, source: random.Random | None = None) -> CompiledRule:
    """Compile a rule; raises `RuleError`.

    `source` supplies randomness for newid(); without it the ids are the same in every process.
    """
    source = random.Random(0) if source is None else source
    action = None
    if properties.action is not None:
        values = _sql_values(properties.action.parameters)
        statements = parse_action(properties.action.sql_expression, values)
        refuse_unstored(tuple(each.value for each in statements if isinstance(each, Assign)))
        action = compile_action(properties.name, statements, source)
    if properties.correlation_filter is not None:
        criteria = correlation_criteria(properties.correlation_filter)
        steps = FIELD_STEPS * len(criteria)
        return CompiledRule(properties, criteria, _correlation_test(criteria), action, steps)
    assert properties.sql_filter is not None
    given = properties.sql_filter
    condition = parse_filter(given.sql_expression, _sql_values(given.parameters))
    refuse_unstored(condition)
    test = compile_test(condition, source)
    return CompiledRule(properties, None, test, action, NODE_STEPS * node_count(condition))


def _sql_values(parameters: Mapping[str, RuleValue]) -> Values:
    """Return the values of parameters in SQL, where a duration is a number of seconds."""
    return {name: _sql_value(value) for name, value in parameters.items()}


def _sql_value(value: RuleValue) -> Value:
    return seconds_of(value.ticks) if isinstance(value, Span) else amqp_value(value)


def check_rule(properties: RuleProperties) -> None:
    """Raise `RuleError` if the text of a filter or an action is invalid or cannot be stored."""
    size_bytes = len(properties.text.encode())
    if size_bytes > MAX_RULE_BYTES:
        raise RuleError(
            f"the rule has {size_bytes} bytes as JSON, {MAX_RULE_BYTES} are allowed: shorten its"
            " parameters or the texts of its correlation filter"
        )
    compile_rule(properties)
    if any("\0" in text for text in _texts(properties)):
        raise RuleError("a rule cannot hold the character NUL")


def _texts(properties: RuleProperties) -> Iterator[str]:
    """Return all text of a rule that comes from a client; the store's JSON has no NUL."""
    for given in (properties.sql_filter, properties.action):
        if given is not None:
            yield given.sql_expression
            yield from given.parameters
            yield from (value for value in given.parameters.values() if isinstance(value, str))
    correlation = properties.correlation_filter
    if correlation is not None:
        yield from correlation.properties
        named = (getattr(correlation, name) for name in CORRELATION_FIELDS)
        for value in (*named, *correlation.properties.values()):
            if isinstance(value, str):
                yield value


# --- correlation filters --------------------------------------------------------------------------


def correlation_criteria(given: CorrelationFilter) -> Criteria:
    """Return the criteria of a correlation filter; names of properties are case-sensitive."""
    criteria: Criteria = {}
    for name, place in CORRELATION_FIELDS.items():
        text = getattr(given, name)
        if text is not None:
            criteria[place] = text
    for name, value in given.properties.items():
        criteria[name] = correlated(amqp_value(value))
    return criteria


def amqp_value(value: RuleValue) -> Value:
    """Return the AMQP value that equals a value of a definition."""
    match value:
        case Moment(at_ms=at_ms):
            return Timestamp(at_ms)
        case Span(ticks=ticks):
            return Described(Symbol(TIME_SPAN), ticks)
        case Identifier(id=value_id):
            return value_id
        case Octets(octets=octets):
            return octets
        case _:
            return value


def correlated(value: Value) -> Hashable:
    """Return the key by which a value is compared: equal for equal numbers of any width.

    A boolean or a timestamp equals no number, a uuid equals its text; compounds equal nothing but
    the times and durations that .NET and Java send in types of their own.
    """
    if value.__class__ is str:
        text: str = value
        return text
    match KINDS.get(value.__class__):
        case ValueKind.NUMBER | ValueKind.TEXT | ValueKind.OCTETS:
            found: Hashable = value
            return found
        case ValueKind.ID:
            return str(value)
        case None:
            return _correlated_ticks(value) if isinstance(value, Described) else None
        case kind:
            return (kind, int(value))


def _correlated_ticks(value: Described) -> Hashable:
    """Return the key by which a TimeSpan or a DateTimeOffset is compared, None for other values."""
    ticks, at_ms = span_ticks(value), offset_ms(value)
    if ticks is not None:
        return (TIME_SPAN, ticks)
    return None if at_ms is None else (ValueKind.TIME, at_ms)


def _correlation_test(criteria: Criteria) -> Callable[[MessageFields], bool]:
    fields_asked = [(place, asked) for place, asked in criteria.items() if isinstance(place, Field)]
    names_asked = [(name, asked) for name, asked in criteria.items() if not isinstance(name, Field)]

    def test(fields: MessageFields) -> bool:
        if any(correlated(fields.system[place]) != asked for place, asked in fields_asked):
            return False
        return all(correlated(fields.application.get(name)) == asked for name, asked in names_asked)

    return test
