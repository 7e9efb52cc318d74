"""SQL actions: effects of SET and REMOVE on a copy, and failures of an action."""

from __future__ import annotations

import uuid

import pytest

from postbus.message.codec import (
    Char,
    Float,
    Int,
    Symbol,
    Timestamp,
    Ubyte,
    Uint,
    Ulong,
    Value,
    encode_value,
)
from postbus.message.envelope import Envelope
from postbus.message.fields import Field, MessageFields
from postbus.message.patch import MAX_PROPERTIES_BYTES
from postbus.message.sections import MAX_TTL_MS
from postbus.rules.actions import SETTABLE, SPARE_BYTES
from postbus.rules.compiled import EvaluationError, RuleError, compile_rule
from postbus.rules.grammar import MAX_STATEMENTS, parse_action
from tests.entity.topics.published import NOW_MS, fields_of, published, sql
from tests.message.wire_values import same

ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def acted(action: str, envelope: Envelope, name: str = "rule") -> Envelope:
    return compile_rule(sql("1=1", action, name)).act(fields_of(envelope))


def applied(action: str, application: dict[str, Value]) -> dict[str, Value]:
    """Return the application properties after an action, without the name of the rule."""
    found = dict(MessageFields(acted(action, published(application))).application)
    assert found.pop("RuleName") == "rule"
    return found


def failed(action: str, envelope: Envelope) -> str:
    with pytest.raises(EvaluationError) as caught:
        acted(action, envelope)
    assert caught.value.name == "RuleActionException"
    return str(caught.value)


def refused(action: str) -> str:
    with pytest.raises(RuleError) as caught:
        compile_rule(sql("1=1", action))
    return str(caught.value)


# --- application properties -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [
        ("SET a = 1", {}, {"a": 1}),
        ("SET a = 1.5", {}, {"a": 1.5}),
        ("SET a = 'it''s'", {}, {"a": "it's"}),
        ("SET a = TRUE", {}, {"a": True}),
        ("SET a = NULL", {"a": 1}, {"a": None}),
        ("SET a = missing", {"a": 1}, {"a": None}),
        ("SET a = missing + 1", {}, {"a": None}),
        ("SET [a b] = 1; SET user.\"c\" = 2", {}, {"a b": 1, "c": 2}),
        ("SET a = b", {"b": Ulong(2**64 - 1)}, {"b": Ulong(2**64 - 1), "a": Ulong(2**64 - 1)}),
        ("SET a = b", {"b": Symbol("s")}, {"b": Symbol("s"), "a": Symbol("s")}),
        ("REMOVE a", {"a": 1, "b": 2}, {"b": 2}),
        ("REMOVE A", {"a": 1}, {}),
        ("REMOVE a", {}, {}),
        ("remove a; set a = 1", {"a": "x"}, {"a": 1}),
        ("SET a = 1 SET b = a + 1 REMOVE a", {}, {"b": 2}),
        ("SET a = a + 1; SET a = a + 1", {"a": Int(1)}, {"a": Int(3)}),
        ("SET quantity = quantity / 2; REMOVE priority", {"quantity": Int(5), "priority": "high"},
         {"quantity": Int(2)}),
        ("SET A = 1", {"a": Int(0)}, {"a": Int(1)}),
        ("SET a = p('b') + '!'", {"B": "x"}, {"B": "x", "a": "x!"}),
        ("SET a = sys.Label", {}, {"a": None}),
        ("SET a = sys.EnqueuedTimeUtc", {}, {"a": Timestamp(NOW_MS)}),
    ],
)  # fmt: skip
def test_application_properties(
    action: str, before: dict[str, Value], after: dict[str, Value]
) -> None:
    assert same(applied(action, before), after)


@pytest.mark.parametrize(
    ("old", "expression", "new"),
    [
        (Int(1), "5", Int(5)),
        (Int(1), "5.0", Int(5)),
        (Int(1), "5.5", 5.5),
        (Int(1), "' 5 '", Int(5)),
        (Int(1), "'5.5'", "5.5"),
        (Int(1), "'five'", "five"),
        (Int(1), "3000000000", 3000000000),
        (Int(1), "TRUE", True),
        (Ubyte(1), "255", Ubyte(255)),
        (Ubyte(1), "256", 256),
        (Ubyte(1), "-1", -1),
        (Uint(1), "'4294967295'", Uint(2**32 - 1)),
        (Ulong(1), "1e3", Ulong(1000)),
        (1, "1e30", 1e30),
        (1.5, "2", 2.0),
        (1.5, "'2.5'", 2.5),
        (1.5, "'nan'", "nan"),
        (1.5, "'1_0'", "1_0"),
        (Float(1.5), "2.5", Float(2.5)),
        (Float(1.5), "1e300", 1e300),
        ("x", "5", "5"),
        ("x", "5.0", "5"),
        ("x", "1e-7", "1e-07"),
        ("x", "TRUE", "True"),
        ("x", "sys.EnqueuedTimeUtc", "2023-11-14T22:13:20.000Z"),
        (Symbol("x"), "'y'", Symbol("y")),
        (Symbol("x"), "'ß'", "ß"),
        (Char("x"), "'y'", Char("y")),
        (Char("x"), "'yy'", "yy"),
        (True, "'FALSE'", False),
        (True, "'no'", "no"),
        (True, "1", 1),
        (Timestamp(1), "'1970-01-01T00:00:01Z'", Timestamp(1000)),
        (Timestamp(1), "'1970-01-01T01:00:00.5+01:00'", Timestamp(500)),
        (Timestamp(1), "'soon'", "soon"),
        (Timestamp(1), "5", 5),
        (Timestamp(1), "a + 1.5", Timestamp(1501)),
        (ID, f"'{ID}'", ID),
        (ID, "'no id'", "no id"),
        (b"x", "'y'", "y"),
        (None, "5", 5),
    ],
    ids=repr,
)
def test_a_set_property_keeps_its_type_without_a_loss(
    old: Value, expression: str, new: Value
) -> None:
    assert same(applied(f"SET a = {expression}", {"a": old}), {"a": new})


def test_a_text_keeps_values_without_a_text_form() -> None:
    assert same(applied("SET a = b", {"a": "x", "b": b"y"}), {"a": b"y", "b": b"y"})


def test_the_name_of_the_rule_is_set_and_may_be_changed() -> None:
    envelope = published({"RuleName": "mine"})
    assert MessageFields(acted("SET a = 1", envelope, "red")).application["RuleName"] == "red"
    after = acted("SET a = RuleName REMOVE RuleName", envelope, "red")
    assert MessageFields(after).application == {"a": "red"}


def test_the_published_message_is_not_changed() -> None:
    envelope = published({"a": 1}, subject="old")
    before = (envelope.properties, envelope.application_properties, envelope.size_bytes)
    after = acted("SET a = 2; SET sys.Label = 'new'", envelope)
    assert (envelope.properties, envelope.application_properties, envelope.size_bytes) == before
    assert after.body is envelope.body
    assert after.size_bytes == envelope.size_bytes + len(after.application_properties) - len(
        envelope.application_properties
    )


# --- system properties ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("ContentType", Field.CONTENT_TYPE),
        ("CorrelationId", Field.CORRELATION_ID),
        ("Label", Field.SUBJECT),
        ("Subject", Field.SUBJECT),
        ("MessageId", Field.MESSAGE_ID),
        ("ReplyTo", Field.REPLY_TO),
        ("ReplyToSessionId", Field.REPLY_TO_GROUP_ID),
        ("SessionId", Field.GROUP_ID),
        ("To", Field.TO),
    ],
)
def test_system_texts_are_set_and_taken_away(name: str, field: Field) -> None:
    after = acted(f"SET sys.{name} = 'x' + 1", published({"a": 1}, to="there"))
    assert MessageFields(after).system[field] == "x1"
    gone = acted(f"SET sys.{name.upper()} = NULL", after)
    assert MessageFields(gone).system[field] is None
    assert name.lower() in SETTABLE


def test_ids_of_the_envelope_follow() -> None:
    envelope = published(
        {"n": Int(5)}, annotations={"x-opt-partition-key": "old"}, message_id=ID, group_id="old"
    )
    after = acted("SET sys.MessageId = 'm'; SET sys.SessionId = n", envelope)
    assert after.message_id == encode_value("m")
    assert after.session_id == after.partition_key == b"5"
    assert acted("SET sys.SessionId = newid()", envelope).session_id is not None
    gone = acted("SET sys.SessionId = NULL; SET sys.PartitionKey = NULL", envelope)
    assert gone.session_id is gone.partition_key is None


def test_a_statement_sees_system_properties_that_were_set() -> None:
    action = (
        "SET sys.Label = 'a' SET sys.To = sys.Label + 'b' SET sys.TimeToLive = 60"
        " SET t = sys.TimeToLive SET sys.PartitionKey = 'k' SET k = sys.PartitionKey"
        " SET sys.ScheduledEnqueueTimeUtc = sys.EnqueuedTimeUtc + t"
        " SET s = sys.ScheduledEnqueueTimeUtc SET e = sys.ExpiresAtUtc"
    )
    after = acted(action, published({}))
    assert MessageFields(after).system[Field.TO] == "ab"
    minute = Timestamp(NOW_MS + 60_000)
    expected = {"RuleName": "rule", "t": 60.0, "k": "k", "s": minute, "e": minute}
    assert same(MessageFields(after).application, expected)
    assert (after.ttl_ms, after.scheduled_ms) == (60_000, NOW_MS + 60_000)


@pytest.mark.parametrize(
    ("value", "ttl_ms"),
    [
        ("90", 90_000),
        ("0.0001", 1),
        ("1e300", MAX_TTL_MS),
        ("'00:05:00'", 300_000),
        ("'1.02:03:04.5'", 93_784_500),
        ("'10:00'", 36_000_000),
        ("'PT1M'", 60_000),
        ("'P1DT0.5S'", 86_400_500),
        ("'10675199.02:48:05.4775807'", MAX_TTL_MS),
        ("NULL", None),
    ],
)
def test_an_action_sets_and_removes_the_ttl(value: str, ttl_ms: int | None) -> None:
    assert acted(f"SET sys.TimeToLive = {value}", published(ttl_ms=5)).ttl_ms == ttl_ms


@pytest.mark.parametrize(
    "value", ["0", "-1", "'soon'", "'00:00:00'", "'P'", "TRUE", "''", "newid()"]
)
def test_invalid_ttls_fail_the_action(value: str) -> None:
    assert "positive number of seconds" in failed(f"SET sys.TimeToLive = {value}", published())


def test_the_schedule_takes_timestamps_and_their_texts() -> None:
    envelope = published({"when": Timestamp(5)})
    assert acted("SET sys.ScheduledEnqueueTimeUtc = when", envelope).scheduled_ms == 5
    later = acted("SET sys.ScheduledEnqueueTimeUtc = '1970-01-02'", envelope)
    assert later.scheduled_ms == 86_400_000
    assert acted("SET sys.ScheduledEnqueueTimeUtc = NULL", later).scheduled_ms is None
    assert "takes a timestamp" in failed("SET sys.ScheduledEnqueueTimeUtc = 5", envelope)
    assert "'soon' is no timestamp" in failed("SET sys.ScheduledEnqueueTimeUtc = 'soon'", envelope)


# --- failures for a message -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("SET sys.Nothing = 1", "There is no system property 'Nothing'."),
        ("SET a = sys.Nothing", "There is no system property 'Nothing'."),
        ("SET a = 1 / 0", "Attempted to divide by zero."),
        ("SET a = b - 1", "the operator - takes no operands of types text and number"),
        ("SET sys.MessageId = long", "The message id is longer than 128 characters."),
        ("SET sys.SessionId = long", "The session id is longer than 128 characters."),
        ("SET sys.PartitionKey = long", "The partition key is longer than 128 characters."),
        ("SET sys.PartitionKey = 'other'", "The partition key differs from the session id."),
        ("SET sys.Label = data", "a value of type binary has no text"),
        ("SET a = items", "an application property is a simple value"),
        ("SET a = huge + huge", "a text exceeds 32768 characters"),
        ("SET a = huge SET b = huge", "The application properties would exceed their limit."),
    ],
)
def test_actions_that_fail(action: str, text: str) -> None:
    envelope = published(
        {"b": "x", "long": "x" * 129, "data": b"x", "items": [1], "huge": "x" * 25_000},
        group_id="s",
    )
    assert failed(action, envelope) == text


def test_doubling_a_text_again_and_again_stays_within_bounds() -> None:
    action = "SET a = a + a " * 32
    assert failed(action, published({"a": "x"})) == "a text exceeds 32768 characters"


def test_an_action_fails_on_broken_properties() -> None:
    envelope = published({"a": "x"})
    envelope.application_properties = envelope.application_properties[:-1]
    assert failed("SET sys.Label = 'x'", envelope)


def test_the_name_of_the_rule_fits_into_full_properties() -> None:
    application = {"a": "x" * 32_000, "b": "x" * 32_000, "c": "x" * 400, "d": ""}
    used = len(published(application).application_properties)
    full = published({**application, "d": "x" * (MAX_PROPERTIES_BYTES - used - 3)})
    assert len(full.application_properties) == MAX_PROPERTIES_BYTES
    name = "x" * 50
    assert MessageFields(acted("REMOVE none", full, name)).application["RuleName"] == name
    assert failed("SET e = '" + "x" * SPARE_BYTES + "'", full)


# --- texts that are refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (" ", "line 1, column 2: expected SET or REMOVE, found the end"),
        ("UPDATE a", "line 1, column 1: expected SET or REMOVE, found 'UPDATE'"),
        ("SET a", "line 1, column 6: expected '=', found the end"),
        ("SET a > 1", "line 1, column 7: expected '=', found '>'"),
        ("SET a =", "line 1, column 8: expected a value, found the end"),
        ("SET = 1", "line 1, column 5: expected a name, found '='"),
        ("SET a = 1 2", "line 1, column 11: expected SET, REMOVE or the end, found '2'"),
        ("SET a = 1;;", "line 1, column 11: expected SET, REMOVE or the end, found ';'"),
        ("SET a = b = c", "line 1, column 11: expected SET, REMOVE or the end, found '='"),
        ("SET a = 1,\nb = 2", "line 1, column 10: expected SET, REMOVE or the end, found ','"),
        ("SET a = 1\nREMOVE 1", "line 2, column 8: expected a name, found '1'"),
        ("SET p('a') = 1", "line 1, column 6: expected '=', found '('"),
        ("SET a = @x", "line 1, column 9: the parameter @x has no value;"),
        ("REMOVE sys.Label", "sys.Label cannot be removed; set it to NULL instead"),
        ("SET sys.EnqueuedTimeUtc = NULL", "sys.EnqueuedTimeUtc cannot be set"),
        ("SET sys.SequenceNumber = 1", "sys.SequenceNumber cannot be set"),
        ("SET a = " + "-" * 100 + "b", "the expression is nested more than 64 levels deep"),
        ("SET a = 9223372036854775808", "the number 9223372036854775808 is too large"),
    ],
)
def test_an_invalid_action_is_reported_with_place_and_expectation(action: str, text: str) -> None:
    assert refused(action).startswith(text)


def test_an_action_has_at_most_32_statements_and_1024_characters() -> None:
    compile_rule(sql("1=1", "REMOVE a;" * MAX_STATEMENTS))
    assert refused("REMOVE a " * 33) == "an action has at most 32 statements"
    with pytest.raises(RuleError, match="text of an action has at most 1024 characters"):
        parse_action("REMOVE a" + " " * 1_017)
