"""The language of SQL filters: grammar, three-valued logic, values, places of errors, limits."""

from __future__ import annotations

import random
import time
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.entity.topics.routing import Routing
from postbus.message.codec import (
    Byte,
    Decimal128,
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
from postbus.rules.compiled import CompiledRule, EvaluationError, RuleError, compile_rule
from postbus.rules.grammar import MAX_CHARS, MAX_COMPARISONS, MAX_DEPTH, parse_filter
from postbus.rules.like import MAX_PATTERN_CHARS, PatternError, message_pattern, rule_pattern
from tests.entity.topics.published import NOW_MS, fields_of, published, selects, sql
from tests.message.wire_values import BODY, section
from tests.rules.fuzz_filters import fuzz

ID = uuid.UUID("12345678-1234-5678-1234-567812345678")

MESSAGE = published(
    {
        "color": "red",
        "Quantity": 12,
        "price": 2.5,
        "flag": True,
        "none": None,
        "when": Timestamp(NOW_MS),
        "id": ID,
        "data": b"\x01\x02",
        "symbol": Symbol("sym"),
        "money": Decimal128(bytes(16)),
        "big": Ulong(2**64 - 1),
        "a b]c": 1,
        'q"q': 2,
        "sys": "mine",
        "property": "color",
        "größe": 3,
    },
    ttl_ms=90_000,
    annotations={"x-opt-partition-key": "key"},
    message_id="id-1",
    to="there",
    subject="order",
    reply_to="back",
    correlation_id=ID,
    content_type=Symbol("text/plain"),
    group_id="key",
    reply_to_group_id="s2",
)


def result(expression: str) -> bool | None:
    """Return the three-valued result; constant filters are evaluated as well."""
    return compile_rule(sql(expression)).test(fields_of(MESSAGE))


TRUE = [
    "color = 'red'",
    "COLOR = 'red' and NOT user.Color <> 'red'",
    "[color] = 'red' AND \"color\" = 'red' AND user.[COLOR] = 'red'",
    '[a b]]c] = 1 AND "q""q" = 2 AND größe = 3',
    "sys = 'mine' AND user.sys = 'mine'",
    "quantity = 12 AND quantity = 12.0 AND quantity > 11.5 AND quantity < 1.3E1",
    "quantity >= 12 AND quantity <= 12 AND quantity != 13",
    "price = 2.5 AND price = .25e1 AND price < 3. AND 2 < price",
    "1=1",
    "'it''s' = 'it''s'",
    "'' = ''",
    "flag = TRUE AND flag <> false AND TRUE > FALSE AND flag > FALSE",
    "none IS NULL AND missing IS NULL AND color IS NOT NULL",
    "EXISTS(none) AND NOT EXISTS(missing) AND exists ( user.color )",
    "sys.MessageId = 'id-1' AND sys.To = 'there' AND sys.ReplyTo = 'back'",
    "sys.Label = 'order' AND sys.subject = 'order' AND SYS.label LIKE 'ord%'",
    "sys.SessionId = 'key' AND sys.ReplyToSessionId = 's2' AND sys.PartitionKey = 'key'",
    "sys.ContentType = 'text/plain' AND symbol = 'sym' AND symbol LIKE 's_m'",
    "sys.CorrelationId = '12345678-1234-5678-1234-567812345678'",
    "sys.TimeToLive = 90 AND sys.DeliveryCount = 0 AND sys.Size > 100",
    "sys.EnqueuedTimeUtc = '2023-11-14T22:13:20Z' AND when = sys.EnqueuedTimeUtc",
    "sys.ExpiresAtUtc - sys.EnqueuedTimeUtc = 90 AND sys.ExpiresAtUtc - 90 = when",
    "sys.ScheduledEnqueueTimeUtc IS NULL AND NOT EXISTS(sys.DeadLetterSource)",
    "when > '2023-11-14' AND '2023-11-15T00:00:00+01:00' > when AND when + 1 > when",
    "id = '12345678-1234-5678-1234-567812345678' AND id = id AND data = data",
    "big > 9223372036854775807 AND big = big",
    "color IN ('blue', 'red') AND quantity IN (1, 12.0) AND color NOT IN ('blue', missing, 3)",
    "flag IN (TRUE) AND flag NOT IN (1) AND 'x' IN (color, 'x')",
    "when IN ('2023-11-14T22:13:20Z') AND '2023-11-14T22:13:20Z' IN (when)",
    "property('color') = 'red' AND p('COLOR') = 'red' AND p(property) = 'red'",
    "p(p('x')) = 1 OR property = 'color'",
    "color + '!' = 'red!' AND 'n' + 1 = 'n1' AND 1.0 + 'n' = '1n' AND '' + TRUE = 'True'",
    "'' + when = '2023-11-14T22:13:20.000Z' AND '' + id LIKE '12345678-%' AND '' + 0.5 = '0.5'",
    "1 + 2 * 3 = 7 AND (1 + 2) * 3 = 9 AND 10 - 2 - 3 = 5 AND 100 / 10 / 2 = 5",
    "-quantity = -12 AND - -1 = 1 AND +quantity = 12 AND 2 - -2 = 4 AND -(1 + 1) = -2",
    "7 / 2 = 3 AND -7 / 2 = -3 AND 7 / 2.0 = 3.5 AND -7 % 3 = -1 AND 7 % -3 = 1 AND 7.5 % 2 = 1.5",
    "-9223372036854775808 < 0 AND 9223372036854775807 > 0",
    "newid() <> newid() AND '' + newid() LIKE '________-____-4___-____-____________'",
    "color = 'blue' OR color = 'red' AND quantity = 12",
    "NOT color = 'blue' AND quantity = 12",
    "NOT (color = 'blue' AND 1=1)",
    "((((color = ('red')))))",
    "color = 'red'\n\tAND\r\n quantity=12",
    "1=1 OR sys.Nothing = 1",
    "1/0 = 1 OR 1=1",
    "color IN (1/0, 'red') AND symbol IN (1/0, 'sym')",
]

FALSE = [
    "color = 'Red'",
    "color = 'RED' OR color LIKE 'R%'",
    "1=0",
    "TRUE = FALSE",
    "NOT 1=1",
    "color IN ('blue', NULL)",
    "color IN ('blue', missing)",
    "flag IN (1, 'True')",
    "color = 'blue' AND missing = 1",
    "color = 'blue' AND sys.Nothing = 1",
    "1=0 AND 1/0 = 1",
    "(color = 'red' OR color = 'blue') AND quantity = 1",
    "NOT color = 'red' AND 1=1",
    "none IS NOT NULL",
    "'a' = 'b' OR 'B' > 'a'",
]

UNKNOWN = [
    "missing = 1",
    "missing <> 1",
    "NOT missing = 1",
    "none = NULL",
    "NULL = NULL",
    "1 = NULL OR 1=0",
    "color = 1",
    "color <> 1",
    "flag = 1",
    "flag = 'True'",
    "when = 1",
    "when = 'yesterday'",
    "id = 'no id'",
    "data = 'x'",
    "money = money",
    "money = 0",
    "quantity LIKE '1%'",
    "missing LIKE 'x'",
    "color NOT LIKE missing",
    "color LIKE quantity",
    "missing IN (1)",
    "missing NOT IN (1)",
    "missing + 1 = 1",
    "-missing = 1",
    "+missing = 1",
    "missing + 'x' = 'x'",
    "missing = 1 AND color = 'red'",
    "missing = 1 OR color = 'blue'",
    "missing = missing",
    "p(quantity) = 1",
    "p(missing) = 1",
    "sys.ScheduledEnqueueTimeUtc > '2000-01-01'",
]


@pytest.mark.parametrize("expression", TRUE)
def test_true(expression: str) -> None:
    assert result(expression) is True


@pytest.mark.parametrize("expression", FALSE)
def test_false(expression: str) -> None:
    assert result(expression) is False


@pytest.mark.parametrize("expression", UNKNOWN)
def test_unknown_and_not_selected(expression: str) -> None:
    assert result(expression) is None
    assert not selects(compile_rule(sql(expression)), fields_of(MESSAGE))


@pytest.mark.parametrize(
    "value",
    [Ubyte(7), Ushort(7), Uint(7), Ulong(7), Byte(7), Short(7), Int(7), 7, Float(7.0), 7.0],
    ids=lambda value: type(value).__name__,
)
def test_numbers_of_every_width_compare_by_value(value: Value) -> None:
    fields = fields_of(published({"n": value}))
    for expression in ("n = 7", "n = 7.0", "n > 6", "n IN (7)", "n + 1 = 8", "-n = -7"):
        assert selects(compile_rule(sql(expression)), fields), expression


def test_message_ids_of_all_types_become_text() -> None:
    for given_id, text in (("a", "a"), (ID, str(ID)), (Ulong(5), "5")):
        fields = fields_of(published(message_id=given_id))
        assert selects(compile_rule(sql(f"sys.MessageId = '{text}'")), fields)
    binary = fields_of(published(message_id=b"\x01"))
    assert compile_rule(sql("sys.MessageId = '1'")).test(binary) is None


def test_a_missing_ttl_means_never() -> None:
    assert selects(compile_rule(sql("sys.TimeToLive > 1000000000")), fields_of(published()))


def test_of_names_that_differ_in_case_the_last_counts() -> None:
    fields = fields_of(published({"Color": "red", "color": "blue"}))
    assert selects(compile_rule(sql("COLOR = 'blue'")), fields)


# --- LIKE -----------------------------------------------------------------------------------------

LIKES = [
    ("abc", None, ["abc"], ["ab", "abcd", "ABC", ""]),
    ("", None, [""], ["a"]),
    ("%", None, ["", "a", "a\nb"], []),
    ("a%", None, ["a", "abc"], ["", "ba"]),
    ("%c", None, ["c", "abc"], ["", "cb"]),
    ("%b%", None, ["b", "abc"], ["", "ac"]),
    ("a%c", None, ["ac", "abc", "acc"], ["a", "c", "abcd"]),
    ("a%a", None, ["aa", "aba"], ["a", "ab"]),
    ("a%b%c%d", None, ["abcd", "axbxcxd", "abcbcd"], ["abdc", "acbd", "abcde"]),
    ("%a%a%", None, ["aa", "xaxax"], ["a", "xax"]),
    ("a%ab%b", None, ["aabb", "axabxb"], ["aab", "abb"]),
    ("%%", None, ["", "x"], []),
    ("%a%%b%", None, ["ab", "xaxbx"], ["ba", "b", "a"]),
    ("_", None, ["a", "ß", "\n"], ["", "ab"]),
    ("_%", None, ["a", "ab"], [""]),
    ("a_c%e_", None, ["abcef", "abcdeeg", "abcexef"], ["abce", "acef", "abcdefg"]),
    ("%a_", None, ["ab", "aaab", "aaaa"], ["a", "ba", "abcd"]),
    ("_a%_b", None, ["xaxb", "xaaab"], ["xab", "aab"]),
    ("50\\%", "\\", ["50%"], ["50", "500", "50\\%"]),
    ("a!_b", "!", ["a_b"], ["axb"]),
    ("a!!b", "!", ["a!b"], ["a!!b"]),
    ("!a%", "!", ["a", "ab"], ["!a"]),
    ("%%x", "%", ["%x"], ["x", "ax"]),
    ("a.c[b]*", None, ["a.c[b]*"], ["abc[b]*", "a.cb"]),
]


@pytest.mark.parametrize(("pattern", "escape", "fitting", "other"), LIKES)
def test_like(pattern: str, escape: str | None, fitting: list[str], other: list[str]) -> None:
    fits = rule_pattern(pattern, escape).fits
    assert [text for text in fitting if not fits(text)] == []
    assert [text for text in other if fits(text)] == []


def like_by_definition(pattern: str, text: str) -> bool:
    """Return whether a text matches, by trying everything."""
    if not pattern:
        return not text
    if pattern[0] == "%":
        return any(like_by_definition(pattern[1:], text[at:]) for at in range(len(text) + 1))
    return bool(text) and pattern[0] in ("_", text[0]) and like_by_definition(pattern[1:], text[1:])


@given(st.text("ab%_", max_size=7), st.text("abc", max_size=8))
@settings(max_examples=400)
def test_like_matches_its_definition(pattern: str, text: str) -> None:
    for made in (rule_pattern(pattern, None), message_pattern(pattern, None)):
        assert made.fits(text) == like_by_definition(pattern, text)


def test_like_in_a_filter_takes_its_pattern_and_escape_character() -> None:
    assert result("'50%' LIKE '50\\%' ESCAPE '\\' AND '5x' NOT LIKE '5\\_' ESCAPE '\\'") is True
    assert result("'redder' LIKE color + '%' AND 'red' LIKE color") is True


def test_a_hostile_pattern_takes_time_in_proportion_to_the_text() -> None:
    text = "a" * 32_000
    patterns = [
        "%a" * 500 + "%b",
        "%" + "a_" * 500 + "b",
        "%a%_" * 250 + "b",
        "%" + "a" * 1000 + "b%",
    ]
    for pattern in patterns:
        started = time.process_time()
        assert rule_pattern(pattern, None).fits(text) is False
        assert time.process_time() - started < 0.5


def test_patterns_that_are_refused() -> None:
    with pytest.raises(RuleError, match="ends with its escape character"):
        compile_rule(sql("a LIKE 'x!' ESCAPE '!'"))
    with pytest.raises(PatternError):
        rule_pattern("x" * (MAX_PATTERN_CHARS + 1), None)
    rule = compile_rule(sql("'x' LIKE pattern"))
    with pytest.raises(EvaluationError, match="at most 1024 characters"):
        selects(rule, fields_of(published({"pattern": "%" * 2_000})))


# --- errors when a message is looked at -----------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("sys.Nothing = 1", "There is no system property 'Nothing'."),
        ("sys.Nothing IS NULL", "There is no system property 'Nothing'."),
        ("EXISTS(sys.Nothing)", "There is no system property 'Nothing'."),
        ("missing = 1 AND sys.Nothing = 1", "There is no system property 'Nothing'."),
        ("quantity / 0 = 1", "Attempted to divide by zero."),
        ("quantity IN (1/0, 12)", "Attempted to divide by zero."),
        ("symbol IN ('other', 1/0)", "Attempted to divide by zero."),
        ("quantity % 0 = 1", "Attempted to divide by zero."),
        ("price / 0 = 1", "Attempted to divide by zero."),
        ("9223372036854775807 + 1 = 1", "Arithmetic operation resulted in an overflow."),
        ("9223372036854775807 * quantity = 1", "Arithmetic operation resulted in an overflow."),
        ("-9223372036854775808 - 1 = 1", "Arithmetic operation resulted in an overflow."),
        ("-9223372036854775808 / -1 = 1", "Arithmetic operation resulted in an overflow."),
        ("-big = 1", "Arithmetic operation resulted in an overflow."),
        ("when + 1e300 = 1", "Arithmetic operation resulted in an overflow."),
        ("when + 1e308 * 10 = 1", "Arithmetic operation resulted in an overflow."),
        ("color - 1 = 1", "the operator - takes no operands of types text and number"),
        ("flag + 1 = 1", "the operator + takes no operands of types boolean and number"),
        ("-color = 1", "the operator - takes no operand of type text"),
        ("+flag = 1", "the operator + takes no operand of type boolean"),
        ("data + 'x' = 'x'", "a value of type binary has no text"),
    ],
)
def test_errors_of_evaluation(expression: str, text: str) -> None:
    with pytest.raises(EvaluationError) as caught:
        selects(compile_rule(sql(expression)), fields_of(MESSAGE))
    assert str(caught.value) == text
    assert caught.value.name == "FilterException"


def test_a_text_does_not_grow_without_bounds() -> None:
    fields = fields_of(published({"a": "x" * 20_000}))
    with pytest.raises(EvaluationError, match="32768 characters"):
        selects(compile_rule(sql("a + a = 'x'")), fields)


def test_a_timestamp_beyond_the_calendar_has_no_text() -> None:
    fields = fields_of(published({"when": Timestamp(2**62)}))
    with pytest.raises(EvaluationError, match="range of dates"):
        selects(compile_rule(sql("'' + when = 'x'")), fields)


def test_broken_properties_fail_only_the_rules_that_read_them() -> None:
    broken = published({"a": "x"}, subject="order")
    broken.application_properties = broken.application_properties.replace(
        b"\xa1\x01x", b"\xa1\x01\xff"
    )
    routing = Routing(random.Random(1))
    for number, text in enumerate(["a = 'x'", "a = 'y'", "sys.Label = 'order'"]):
        routing.put(number, [sql(text)])
    *failed, passed = routing.route(broken, NOW_MS)
    assert [("malformed" in str(each.error), each.envelopes) for each in failed] == [(True, [])] * 2
    assert (passed.error, passed.envelopes) == (None, [broken])


# --- texts that are refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" ", "line 1, column 2: expected a condition, found the end"),
        ("a", "line 1, column 2: expected a comparison, found the end"),
        ("a =", "line 1, column 4: expected a value, found the end"),
        ("quantity = )", "line 1, column 12: expected a value, found ')'"),
        ("a = 1 AND", "line 1, column 10: expected a condition, found the end"),
        ("a=1\nAND\n  b ==1", "line 3, column 6: expected a value, found '='"),
        ("a=1\nAND ", "line 2, column 5: expected a condition, found the end"),
        ("a = 'x", "line 1, column 5: expected a value, found ''', which no ' closes"),
        ("[x = 1", "line 1, column 1: expected a condition, found '[', which no ] closes"),
        ("[] = 1", "line 1, column 1: expected a condition, found '[', which no ] closes"),
        ('"" = 1', "line 1, column 1: expected a condition, found '\"', which no \" closes"),
        ("a = #", "line 1, column 5: expected a value, found '#'"),
        ("a ; 1", "line 1, column 3: expected a comparison, found ';'"),
        ("(a = 1", "line 1, column 7: expected AND, OR or ')', found the end"),
        ("(a + 1", "line 1, column 7: expected a comparison or ')', found the end"),
        ("a = 1)", "line 1, column 6: expected AND, OR or the end, found ')'"),
        ("a IS 1", "line 1, column 6: expected NULL, found '1'"),
        ("a NOT 1", "line 1, column 7: expected IN or LIKE, found '1'"),
        ("a IN 1", "line 1, column 6: expected '(', found '1'"),
        ("a IN ()", "line 1, column 7: expected a value, found ')'"),
        ("a IN (1", "line 1, column 8: expected ',' or ')', found the end"),
        ("1 IS NULL", "line 1, column 3: expected a comparison, found 'IS'"),
        ("a LIKE 'x' ESCAPE b", "line 1, column 19: expected a text, found 'b'"),
        ("a LIKE 'x' ESCAPE 'ab'", "line 1, column 19: expected one escape character, found 'ab'"),
        ("EXISTS a", "line 1, column 8: expected '(', found 'a'"),
        ("EXISTS(1)", "line 1, column 8: expected a name, found '1'"),
        ("sys. = 1", "line 1, column 6: expected a name, found '='"),
        ("or = 1", "line 1, column 1: expected a condition, found 'or'"),
        ("TRUE", "line 1, column 5: expected a comparison, found the end"),
        ("a = b = c", "line 1, column 7: expected AND, OR or the end, found '='"),
        ("msg.a = 1", "line 1, column 1: expected sys or user as the scope, found 'msg'"),
        (
            "now() = 1",
            "line 1, column 1: expected newid, property or p as the function, found 'now'",
        ),
        ("newid(1) = 1", "line 1, column 1: newid() takes no argument"),
        ("p() = 1", "line 1, column 1: p() takes the name of a property"),
        (
            "a = @b",
            (
                "line 1, column 5: the parameter @b has no value;"
                " give it one or write the value instead"
            ),
        ),
        (
            "a = 9223372036854775809",
            "line 1, column 5: the number 9223372036854775809 is too large",
        ),
        ("a = 9223372036854775808", "the number 9223372036854775808 is too large"),
        ("a = 1e999", "line 1, column 5: the number 1e999 is too large"),
        ("sys.SequenceNumber = 1", "sys.SequenceNumber has no value yet when rules are evaluated"),
    ],
)
def test_an_invalid_filter_is_reported_with_place_and_expectation(text: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        compile_rule(sql(text))
    assert str(caught.value) == message


# --- limits ---------------------------------------------------------------------------------------


def refused(text: str) -> str:
    with pytest.raises(RuleError) as caught:
        parse_filter(text)
    return str(caught.value)


def test_a_filter_has_at_most_1024_characters() -> None:
    text = "a = '" + "x" * (MAX_CHARS - 6) + "'"
    parse_filter(text)
    assert refused(text + " ") == "the text of a filter has at most 1024 characters"


def test_a_filter_has_at_most_32_conditions() -> None:
    parse_filter(" AND ".join(["a = 1"] * MAX_COMPARISONS))
    text = " OR ".join(["a = 1"] * 31 + ["(b IS NULL AND c LIKE 'x')"])
    assert refused(text) == "a filter has at most 32 conditions, this has 33"


@pytest.mark.parametrize(
    "text",
    [
        "NOT " * 200 + "a=1",
        "- " * 200 + "a=1",
        "+".join("a" * 400) + "=1",
        "p(" * 200 + "a" + ")" * 200 + "=1",
        "(NOT " * 120 + "a=1" + ")" * 120,
    ],
)
def test_deep_nesting_is_refused(text: str) -> None:
    assert refused(text) == f"the expression is nested more than {MAX_DEPTH} levels deep"


def test_parentheses_alone_cost_no_depth() -> None:
    assert result("(" * 500 + "1=1" + ")" * 500) is True
    assert result("(" * 500 + "color" + ")" * 500 + " = 'red'") is True


def test_the_deepest_expression_is_evaluated() -> None:
    text = "NOT " * (MAX_DEPTH - 2) + "color='red'"
    assert result(text) is True


def test_invalid_unicode_is_refused() -> None:
    assert refused("a = '\ud800'") == "the text of a filter is not Unicode"


# --- decided when the rule is made ----------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["1=1", "1 = 1.0", "'a'<'b'", "NOT 1=0", "1=1 OR a=1", "1=1 AND 2=2"]
)
def test_a_true_filter_is_known_without_a_message(text: str) -> None:
    rule = compile_rule(sql(text))
    assert rule.is_always
    assert not rule.is_never


@pytest.mark.parametrize(
    "text", ["1=0", "NOT 1=1", "a=1 AND 1=0", "1=0 OR 2=1", "NULL=NULL", "1='a'"]
)
def test_a_false_filter_is_known_without_a_message(text: str) -> None:
    rule = compile_rule(sql(text))
    assert rule.is_never
    assert not rule.is_always


@pytest.mark.parametrize("text", ["a=1", "newid()=newid()", "1=1 AND a=1", "1/1=1"])
def test_any_other_filter_is_evaluated(text: str) -> None:
    rule = compile_rule(sql(text))
    assert not rule.is_never
    assert not rule.is_always


def test_new_ids_come_from_the_source_that_was_given() -> None:
    def ids(seed: int) -> CompiledRule:
        return compile_rule(sql("1=1", "SET a = newid()"), random.Random(seed))

    def made(seed: int) -> object:
        return fields_of(ids(seed).act(fields_of(MESSAGE))).application["a"]

    assert made(1) == made(1) != made(2)
    assert isinstance(made(1), uuid.UUID)


# --- three-valued logic against an evaluator of its own -------------------------------------------

Tree = tuple[Any, ...]

LEAVES = st.sampled_from(
    [
        ("leaf", "color = 'red'", True),
        ("leaf", "color = 'blue'", False),
        ("leaf", "missing = 1", None),
        ("leaf", "quantity > 10", True),
        ("leaf", "quantity < 10", False),
        ("leaf", "color > 1", None),
        ("leaf", "1=1", True),
        ("leaf", "1=0", False),
        ("leaf", "NULL=1", None),
        ("leaf", "missing IS NULL", True),
        ("leaf", "EXISTS(missing)", False),
        ("leaf", "missing IN ('a')", None),
        ("leaf", "color LIKE '_e%'", True),
    ]
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.just("NOT"), inner),
        st.tuples(st.sampled_from(["AND", "OR"]), inner, inner),
        st.tuples(st.sampled_from(["AND", "OR"]), inner, inner, inner),
    ),
    max_leaves=20,
)

RANK = {"NOT": 2, "AND": 1, "OR": 0}


def written(tree: Tree) -> str:
    """Write a tree with no more parentheses than precedence asks for."""
    if tree[0] == "leaf":
        return str(tree[1])
    rank = RANK[str(tree[0])]
    terms = [
        f"({written(term)})" if term[0] != "leaf" and RANK[term[0]] < rank else written(term)
        for term in tree[1:]
    ]
    return f"NOT {terms[0]}" if tree[0] == "NOT" else f" {tree[0]} ".join(terms)


def evaluated(tree: Tree) -> bool | None:
    """Evaluate by the tables of the documentation: false is 0, unknown 1, true 2."""
    order = [False, None, True]
    if tree[0] == "leaf":
        return bool(tree[2]) if tree[2] is not None else None
    ranks = [order.index(evaluated(term)) for term in tree[1:]]
    if tree[0] == "NOT":
        return order[2 - ranks[0]]
    return order[min(ranks) if tree[0] == "AND" else max(ranks)]


@given(TREES)
@settings(max_examples=400, deadline=None)
def test_logic_is_that_of_the_tables(tree: Tree) -> None:
    text = written(tree)
    if len(text) <= MAX_CHARS:
        assert result(text) is evaluated(tree)


@pytest.mark.slow
def test_damaged_filters_are_refused_or_evaluated() -> None:
    tried, accepted = fuzz(seconds=60, seed=7, max_inputs=3_000)
    assert tried == 3_000
    assert accepted > 200


def test_the_sections_of_a_message_may_have_long_descriptors() -> None:
    envelope = published({"a": 1}, subject="x")
    envelope.application_properties = section(0x74, {"a": 1}).replace(
        b"\x00\x53\x74", b"\x00\x80\x00\x00\x00\x00\x00\x00\x00\x74"
    )
    assert BODY in envelope.body
    assert selects(compile_rule(sql("a = 1")), fields_of(envelope))
