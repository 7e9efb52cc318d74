"""Random SQL filters and messages: the product compared with a second implementation.

`tests/rules/sql_oracle.py` is the second reading: a plain walk over the tree, from the guide and
the grammar. A difference is settled by the guide and becomes a named case in
`tests/rules/test_sql_filters.py`.
"""

from __future__ import annotations

import math
import uuid

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from postbus.message.codec import (
    Byte,
    Char,
    Decimal128,
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
from postbus.rules.compiled import EvaluationError, compile_rule
from postbus.rules.grammar import MAX_CHARS
from tests.entity.topics.published import NOW_MS, fields_of, published, sql
from tests.rules.sql_oracle import Failed, Message, Tree, evaluated, kind, pieces, value_of
from tests.rules.sql_writer import written

Sent = tuple[dict[str, Value], dict[str, Value], int | None]
"""Application properties, fields by their AMQP names with `partition_key`, time to live in ms."""

# --- messages -------------------------------------------------------------------------------------

SMALL = st.integers(0, 12)
NUMBERS = st.one_of(
    st.builds(
        lambda of, number: of(number),
        st.sampled_from([Ubyte, Ushort, Uint, Ulong, Byte, Short, Int, int, Float, float]),
        SMALL,
    ),
    st.builds(lambda of, number: of(-number), st.sampled_from([Byte, Short, Int, int]), SMALL),
    st.sampled_from([0.5, -2.25, Float(2.5), 2**53, 2.0**53, 2**53 + 1]),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    st.sampled_from([2**63 - 1, -(2**63), 2.0**63, Ulong(2**63), Ulong(2**64 - 1)]),
)
TEXTS = st.one_of(
    st.text("abAB%_!", max_size=4),
    st.sampled_from(["", "it's", "ß", "\U0001f600", "\uffff", "n", "5", "True"]),
)
DATES = [
    "2023-11-14",
    "2023-11-14T22:13:20",
    "2023-11-14T22:13:20Z",
    "2023-11-15T00:13:20.000+02:00",
    "2023-11-14T22:13:20.500Z",
    "yesterday",
]
TIMES = st.sampled_from([NOW_MS, NOW_MS + 500, NOW_MS - 80_000, 0]).map(Timestamp)
IDS = [uuid.UUID(int=1), uuid.UUID("12345678-1234-5678-1234-56789abcdef0"), uuid.UUID(int=2**127)]
ID_TEXTS = [str(IDS[0]), str(IDS[1]), str(IDS[1]).upper(), "no id"]
ODD = st.sampled_from(
    [b"", b"\x01", b"\x02", Decimal128(bytes(16)), Described(Symbol("com.example:span"), 5)]
)
BY_KIND: dict[str, st.SearchStrategy[Value]] = {
    "number": NUMBERS,
    "text": st.one_of(TEXTS, TEXTS.filter(str.isascii).map(Symbol), st.just(Char("a"))),
    "boolean": st.booleans(),
    "timestamp": TIMES,
    "uuid": st.sampled_from(IDS),
    "other": ODD,
}
VALUES = st.one_of(st.none(), *BY_KIND.values())

# Names and their most frequent types; `user`, `p` and the like are names as well as words.
NAMES = {
    "n": "number",
    "Sum": "number",
    "größe": "number",
    "p": "number",
    "a b]c": "number",
    "t": "text",
    "property": "text",
    'q"q': "text",
    "sys": "text",
    "flag": "boolean",
    "and": "boolean",
    "when": "timestamp",
    "id": "uuid",
    "odd": "other",
}
ENTRIES = st.sampled_from(sorted(NAMES)).flatmap(
    lambda name: st.tuples(
        st.sampled_from([name, name, name.title(), name.replace("n", "N")]),
        st.one_of(BY_KIND[NAMES[name]], BY_KIND[NAMES[name]], VALUES),
    )
)
FIELDS = {
    "MessageId": "message_id",
    "To": "to",
    "Label": "subject",
    "Subject": "subject",
    "ReplyTo": "reply_to",
    "CorrelationId": "correlation_id",
    "ContentType": "content_type",
    "SessionId": "group_id",
    "ReplyToSessionId": "reply_to_group_id",
    "PartitionKey": "partition_key",
}
SYSTEM = [
    *FIELDS,
    "TimeToLive",
    "EnqueuedTimeUtc",
    "ExpiresAtUtc",
    "ScheduledEnqueueTimeUtc",
    "DeliveryCount",
    "DeadLetterSource",
    "Nothing",
]


NEVER_MS = (2**63 - 1) // 10_000
"""Silent: the time to live of a message without one, the longest TimeSpan."""


@st.composite
def sent(draw: st.DrawFn) -> Sent:
    application = {name: draw(BY_KIND[NAMES[name]]) for name in ("n", "Sum", "t", "odd")}
    application |= dict(draw(st.lists(ENTRIES, min_size=2, max_size=10)))
    ids = st.one_of(TEXTS, st.sampled_from(IDS), SMALL.map(Ulong), st.just(b"\x01"))
    names = st.sampled_from(list(FIELDS.values()))
    fields: dict[str, Value] = dict(draw(st.dictionaries(names, TEXTS, max_size=5)))
    for name in ("message_id", "correlation_id"):
        if name in fields:
            fields[name] = draw(ids)
    if "content_type" in fields:
        fields["content_type"] = Symbol("text/plain")
    return application, fields, draw(st.sampled_from([None, 90_000, 1_500]))


def as_seen(application: dict[str, Value], fields: dict[str, Value], ttl_ms: int | None) -> Message:
    """Return the input of a filter for a message."""
    system = {name.lower(): fields.get(field) for name, field in FIELDS.items()}
    for name in ("messageid", "correlationid"):
        if kind(system[name]) in ("uuid", "number"):
            system[name] = str(system[name])
    ttl_ms = NEVER_MS if ttl_ms is None else ttl_ms
    system |= {
        "timetolive": ttl_ms / 1000,
        "enqueuedtimeutc": Timestamp(NOW_MS),
        "expiresatutc": Timestamp(NOW_MS + ttl_ms),
        "scheduledenqueuetimeutc": None,
        "deliverycount": 0,
        "deadlettersource": None,
    }
    return Message(application, system)


# --- filters --------------------------------------------------------------------------------------


def named(*kinds: str) -> st.SearchStrategy[Tree]:
    names = [name for name in NAMES if NAMES[name] in kinds]
    return st.tuples(st.just("name"), st.just("user"), st.sampled_from(names))


def constant(values: st.SearchStrategy[Value]) -> st.SearchStrategy[Tree]:
    return st.tuples(st.just("constant"), values)


PROPERTIES = st.one_of(
    st.tuples(st.just("name"), st.just("user"), st.sampled_from([*NAMES, "missing"])),
    st.tuples(st.just("name"), st.just("sys"), st.sampled_from(SYSTEM)),
)
NUMERIC_LEAVES = st.one_of(
    constant(st.one_of(SMALL, SMALL.map(float), st.sampled_from([0.5, 2.25, 2**63 - 1]))),
    constant(st.sampled_from([1e20, 0.00001])),
    named("number"),
    named("number"),
    st.just(("math", "/", ("constant", 1), ("constant", 0))),
)
LEAVES = st.one_of(
    NUMERIC_LEAVES,
    constant(st.one_of(st.none(), st.booleans(), TEXTS, st.sampled_from(DATES + ID_TEXTS))),
    PROPERTIES,
)


def computed(leaves: st.SearchStrategy[Tree], most: int) -> st.SearchStrategy[Tree]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.just("math"), st.sampled_from("+-*/%"), inner, inner),
            st.tuples(st.just("sign"), st.sampled_from("+-"), inner),
        ),
        max_leaves=most,
    )


WHOLE = st.one_of(
    constant(SMALL),
    st.tuples(st.just("sign"), st.just("-"), constant(SMALL)),
    st.tuples(st.just("name"), st.just("user"), st.sampled_from(["n", "Sum"])),
)
NUMERIC = st.one_of(
    st.tuples(st.just("math"), st.sampled_from("+-*/%"), WHOLE, WHOLE), computed(NUMERIC_LEAVES, 6)
)
TEXTUAL = st.one_of(
    constant(TEXTS),
    named("text"),
    st.tuples(st.just("math"), st.just("+"), constant(TEXTS), st.one_of(NUMERIC, LEAVES)),
    st.tuples(st.just("property"), constant(st.sampled_from([*NAMES, "N", "sys.To", "zz"]))),
    st.tuples(st.just("property"), LEAVES),
)
TEMPORAL = st.one_of(
    named("timestamp"),
    constant(st.sampled_from(DATES)),
    st.tuples(st.just("math"), st.sampled_from("+-"), named("timestamp"), NUMERIC_LEAVES),
    st.just(("name", "sys", "EnqueuedTimeUtc")),
)
ANY = st.one_of(computed(LEAVES, 4), NUMERIC, TEXTUAL, TEMPORAL)
UNIQUE = st.one_of(named("uuid"), constant(st.sampled_from(ID_TEXTS)))
ALIKE = [NUMERIC, NUMERIC, TEXTUAL, TEMPORAL, UNIQUE, named("boolean"), named("other"), ANY]


@st.composite
def likes(draw: st.DrawFn) -> Tree:
    """Draw a LIKE; a constant pattern does not end within an escape, which is refused."""
    left = draw(st.one_of(TEXTUAL, TEXTUAL, ANY))
    pattern = draw(st.one_of(TEXTUAL, constant(st.text("ab%_", max_size=5)), ANY))
    escape = draw(st.sampled_from([None, "!", "%", "b", "'"]))
    if pattern[0] == "constant" and isinstance(pattern[1], str):
        try:
            pieces(pattern[1], escape)
        except Failed:
            escape = None
    return ("like", draw(st.booleans()), left, pattern, escape)


PAIRS = st.sampled_from(ALIKE).flatmap(lambda of: st.tuples(of, of))
LISTS = st.sampled_from(ALIKE).flatmap(
    lambda of: st.tuples(of, st.lists(of, min_size=1, max_size=3))
)
SIGNS = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])
CONDITIONS = st.one_of(
    st.builds(lambda sign, pair: ("compare", sign, *pair), SIGNS, PAIRS),
    st.builds(lambda sign, pair: ("compare", sign, *pair), SIGNS, PAIRS),
    st.tuples(st.just("compare"), st.sampled_from(["=", "<>"]), st.just(("newid",)), UNIQUE),
    st.builds(lambda negation, listed: ("in", negation, *listed), st.booleans(), LISTS),
    likes(),
    st.tuples(st.just("null"), st.booleans(), PROPERTIES),
    st.tuples(st.just("exists"), PROPERTIES),
    st.tuples(st.just("compare"), SIGNS, constant(SMALL), constant(SMALL)),
)
FILTERS = st.recursive(
    CONDITIONS,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner),
    ),
    max_leaves=6,
)


def expected(tree: Tree, message: Sent) -> bool | str | None:
    try:
        return evaluated(tree, as_seen(*message))
    except Failed:
        return "failed"


def actual(text: str, message: Sent) -> bool | str | None:
    application, fields, ttl_ms = message
    named = dict(fields)
    key = named.pop("partition_key", None)
    annotations = {} if key is None else {"x-opt-partition-key": key}
    envelope = published(application, annotations=annotations, ttl_ms=ttl_ms, **named)
    rule = compile_rule(sql(text))
    try:
        return rule.test(fields_of(envelope))
    except EvaluationError:
        return "failed"


def check(tree: Tree, message: Sent, seed: int) -> None:
    text = written(tree, seed)
    assume(len(text) <= MAX_CHARS)
    event(str(wanted := expected(tree, message)))
    assert actual(text, message) == wanted, text


SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.slow
@given(FILTERS, sent(), SEEDS)
@settings(max_examples=200, deadline=None)
def test_filters_of_the_guide_evaluate_as_documented(tree: Tree, message: Sent, seed: int) -> None:
    check(tree, message, seed)


@pytest.mark.slow
@given(st.one_of(NUMERIC, ANY), sent(), SEEDS)
@settings(max_examples=150, deadline=None)
def test_operands_have_the_values_of_the_guide(tree: Tree, message: Sent, seed: int) -> None:
    """The value is sent along as a property, so that every difference in it shows."""
    application, fields, ttl_ms = message
    try:
        worth = value_of(tree, as_seen(*message))
    except Failed:
        worth = None
    comparison = ("compare", "=", tree, ("name", "user", "worth"))
    check(comparison, ({**application, "worth": worth}, fields, ttl_ms), seed)
