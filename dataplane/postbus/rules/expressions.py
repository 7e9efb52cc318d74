"""Compiler of SQL filters: a parsed condition becomes closures over the fields of a message.

Conditions are True, False or None (unknown), and only True selects a message. False dominates in
AND, True in OR, and None comes next; both evaluate from left to right and stop early. Arithmetic,
comparison and LIKE of an unknown value are unknown; IN is unknown only if its left side is: an item
that does not compare is not equal; IS NULL and EXISTS are never unknown. LIKE of a value that is
not text is unknown. A system property that does not exist is an error when it is evaluated, as
Service Bus documents; one that has no value before the message is stored is rejected when the rule
is created (`refuse_unstored`), because it could never be true. Conditions on stored messages may
use it; they may not use a property that no message has (`refuse_unknown`).
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Final, TypeAlias, assert_never

from postbus.message.codec import Timestamp, Value
from postbus.message.fields import Field, MessageFields
from postbus.message.sections import MAX_TTL_MS
from postbus.rules.like import (
    MAX_TEXT_CHARS,
    PATTERN_STEPS,
    Pattern,
    PatternError,
    message_pattern,
    rule_pattern,
)
from postbus.rules.nodes import (
    AllOf,
    AnyOf,
    Arithmetic,
    Comparison,
    Constant,
    Exists,
    Expression,
    IsIn,
    IsNull,
    Like,
    Negative,
    NewId,
    Not,
    Positive,
    Predicate,
    Property,
    PropertyCall,
    RuleError,
)
from postbus.rules.steps import TEXT_SHIFT, spend
from postbus.rules.values import (
    COMPARISONS,
    NUMBERS,
    Compare,
    EvaluationError,
    calculate,
    compare,
    negative,
    positive,
)

Read: TypeAlias = Callable[[MessageFields], Value]
"""Returns a value of a message, or None if it is unknown. Raises `EvaluationError`."""

Test: TypeAlias = Callable[[MessageFields], bool | None]
"""Returns whether a message matches, or None if that is unknown. Raises `EvaluationError`."""


def always(_fields: MessageFields) -> bool:
    """Return True for every message; recognized by identity, so that it is not called."""
    return True


def never(_fields: MessageFields) -> bool:
    """Return False for every message; recognized by identity, so that it is not called."""
    return False


def unknown(_fields: MessageFields) -> None:
    """Return None for every message; recognized by identity, so that it is not called."""
    return


_SETTLED: Final[dict[bool | None, Test]] = {True: always, False: never, None: unknown}


# --- conditions -----------------------------------------------------------------------------------


def compile_test(node: Predicate, source: random.Random) -> Test:
    """Return a condition as a function; `source` supplies randomness for newid().

    Raises `RuleError`. A condition that is the same for every message is evaluated now: the result
    is then one of `always`, `never` and `unknown`.
    """
    match node:
        case Comparison(sign, left, right):
            return _comparison(COMPARISONS[sign], left, right, source)
        case Like():
            return _like(node, source)
        case IsIn(value, items):
            return _is_in(value, items, source)
        case IsNull(named):
            return _is_null(compile_read(named, source))
        case Exists(named):
            return _exists(named)
        case Not(term):
            return _negated(compile_test(term, source))
        case AllOf(terms):
            return _joined([compile_test(term, source) for term in terms], always, never, _all_of)
        case AnyOf(terms):
            return _joined([compile_test(term, source) for term in terms], never, always, _any_of)
        case _:
            assert_never(node)


def _joined(
    terms: list[Test], neutral: Test, decisive: Test, join: Callable[[tuple[Test, ...]], Test]
) -> Test:
    """Join terms by AND or OR; those that are the same for every message are left out."""
    if decisive in terms:
        return decisive
    left = tuple(term for term in terms if term is not neutral)
    if not left:
        return neutral
    if len(left) == 1:
        return left[0]
    return join(left)


def _all_of(terms: tuple[Test, ...]) -> Test:
    def test(fields: MessageFields) -> bool | None:
        result: bool | None = True
        for term in terms:
            found = term(fields)
            if found is False:
                return False
            if found is None:
                result = None
        return result

    return test


def _any_of(terms: tuple[Test, ...]) -> Test:
    def test(fields: MessageFields) -> bool | None:
        result: bool | None = False
        for term in terms:
            found = term(fields)
            if found is True:
                return True
            if found is None:
                result = None
        return result

    return test


def _negated(term: Test) -> Test:
    if term is always or term is never:
        return never if term is always else always
    if term is unknown:
        return unknown

    def test(fields: MessageFields) -> bool | None:
        found = term(fields)
        return None if found is None else not found

    return test


def _comparison(
    operation: Compare, left: Expression, right: Expression, source: random.Random
) -> Test:
    if isinstance(left, Constant) and isinstance(right, Constant):
        return _SETTLED[compare(operation, left.value, right.value)]
    read = compile_read(left, source)
    if isinstance(right, Constant):
        return _comparison_with_constant(operation, read, right.value)
    other = compile_read(right, source)

    def test(fields: MessageFields) -> bool | None:
        value = read(fields)
        if value.__class__ is str and len(value) >> TEXT_SHIFT:
            spend(fields, len(value) >> TEXT_SHIFT)
        return compare(operation, value, other(fields))

    return test


def _comparison_with_constant(operation: Compare, read: Read, constant: Value) -> Test:
    """Compare with a value of a known kind, as most filters do."""
    if constant is None:
        return lambda fields: compare(operation, read(fields), None)
    if type(constant) is str:

        def test_text(fields: MessageFields) -> bool | None:
            value = read(fields)
            if value.__class__ is str:
                return operation(value, constant)
            return compare(operation, value, constant)

        return test_text
    if type(constant) not in NUMBERS:
        return lambda fields: compare(operation, read(fields), constant)

    def test_number(fields: MessageFields) -> bool | None:
        value = read(fields)
        if value.__class__ in NUMBERS:
            return operation(value, constant)
        return compare(operation, value, constant)

    return test_number


def _like(node: Like, source: random.Random) -> Test:
    read = compile_read(node.value, source)
    escape = node.escape
    if isinstance(node.pattern, Constant) and type(node.pattern.value) is str:
        try:
            kept = rule_pattern(node.pattern.value, escape)
        except PatternError as error:
            raise RuleError(str(error)) from error

        def test_constant(fields: MessageFields) -> bool | None:
            value = read(fields)
            return _fits(kept, value, fields) if isinstance(value, str) else None

        return test_constant
    read_pattern = compile_read(node.pattern, source)

    def test(fields: MessageFields) -> bool | None:
        value, pattern = read(fields), read_pattern(fields)
        if not isinstance(value, str) or not isinstance(pattern, str):
            return None
        spend(fields, PATTERN_STEPS * len(pattern))
        try:
            found = message_pattern(pattern, escape)
        except PatternError as error:
            raise EvaluationError(str(error)) from error
        return _fits(found, value, fields)

    return test


def _fits(pattern: Pattern, text: str, fields: MessageFields) -> bool:
    fits, once_steps, char_steps = pattern
    if char_steps:
        size = len(text)
        if size > MAX_TEXT_CHARS:
            raise EvaluationError(f"LIKE matches texts of at most {MAX_TEXT_CHARS} characters.")
        spend(fields, once_steps + size * char_steps)
    return fits(text)


def _is_in(value: Expression, items: tuple[Expression, ...], source: random.Random) -> Test:
    read = compile_read(value, source)
    equal = COMPARISONS["="]
    texts = frozenset(
        item.value for item in items if isinstance(item, Constant) and type(item.value) is str
    )
    # Texts are looked up by hash; items and values of other kinds are compared one by one.
    others = tuple(
        compile_read(item, source)
        for item in items
        if not isinstance(item, Constant) or type(item.value) is not str
    )
    every = tuple(compile_read(item, source) for item in items)

    def test(fields: MessageFields) -> bool | None:
        found = read(fields)
        if found is None:
            return None
        if isinstance(found, str):
            if found in texts:
                return True
            if not others:
                return False
            return any(compare(equal, found, item(fields)) for item in others)
        return any(compare(equal, found, item(fields)) for item in every)

    return test


def _is_null(read: Read) -> Test:
    return lambda fields: read(fields) is None


def _exists(named: Property) -> Test:
    """Test that a user property exists, even if null, or that a system property has a value."""
    if named.is_system:
        read = _system_read(named.name)
        return lambda fields: read(fields) is not None
    name = named.name.lower()
    return lambda fields: name in fields.folded


# --- values ---------------------------------------------------------------------------------------


def compile_read(node: Expression, source: random.Random) -> Read:
    """Return an expression as a function; `source` supplies randomness for newid().

    Raises `RuleError`.
    """
    match node:
        case Constant(value):
            return lambda _fields: value
        case Property(name, is_system):
            return _system_read(name) if is_system else _user_read(name)
        case PropertyCall(name):
            return _property_call(name, source)
        case NewId():
            return lambda _fields: uuid.UUID(int=source.getrandbits(128), version=4)
        case Negative(operand):
            read = compile_read(operand, source)
            return lambda fields: negative(read(fields))
        case Positive(operand):
            read = compile_read(operand, source)
            return lambda fields: positive(read(fields))
        case Arithmetic(sign, left, right):
            return _arithmetic(sign, compile_read(left, source), compile_read(right, source))
        case _:
            assert_never(node)


def _arithmetic(sign: str, left: Read, right: Read) -> Read:
    if sign != "+":
        return lambda fields: calculate(sign, left(fields), right(fields))

    def read_sum(fields: MessageFields) -> Value:
        found = calculate(sign, left(fields), right(fields))
        if found.__class__ is str and len(found) >> TEXT_SHIFT:
            spend(fields, len(found) >> TEXT_SHIFT)
        return found

    return read_sum


def _user_read(name: str) -> Read:
    name = name.lower()
    return lambda fields: fields.folded.get(name)


def _property_call(name: Expression, source: random.Random) -> Read:
    if isinstance(name, Constant) and isinstance(name.value, str):
        return _user_read(name.value)
    read = compile_read(name, source)

    def read_named(fields: MessageFields) -> Value:
        found = read(fields)
        if not isinstance(found, str):
            return None
        if len(found) >> TEXT_SHIFT:
            spend(fields, len(found))
        return fields.folded.get(found.lower())

    return read_named


# --- system properties ----------------------------------------------------------------------------


def _field(field: Field) -> Read:
    index = int(field)
    return lambda fields: fields.system[index]


def _ttl_ms(fields: MessageFields) -> int:
    return MAX_TTL_MS if fields.ttl_ms is None else fields.ttl_ms


def _scheduled(fields: MessageFields) -> Timestamp | None:
    return None if fields.scheduled_ms is None else Timestamp(fields.scheduled_ms)


SYSTEM_FIELDS: Final[dict[str, Field]] = {
    "contenttype": Field.CONTENT_TYPE,
    "correlationid": Field.CORRELATION_ID,
    "label": Field.SUBJECT,
    "messageid": Field.MESSAGE_ID,
    "replyto": Field.REPLY_TO,
    "replytosessionid": Field.REPLY_TO_GROUP_ID,
    "sessionid": Field.GROUP_ID,
    "subject": Field.SUBJECT,
    "to": Field.TO,
}
"""Lower-case name of a system property -> its text field in the properties section."""

_READS: Final[dict[str, Read]] = {
    **{name: _field(field) for name, field in SYSTEM_FIELDS.items()},
    "deadlettersource": lambda fields: fields.dead_letter_source,
    "deliverycount": lambda fields: fields.delivery_count,
    "enqueuedtimeutc": lambda fields: Timestamp(fields.enqueued_ms),
    "expiresatutc": lambda fields: Timestamp(fields.enqueued_ms + _ttl_ms(fields)),
    "partitionkey": lambda fields: fields.partition_key,
    "scheduledenqueuetimeutc": _scheduled,
    "size": lambda fields: fields.envelope.size_bytes,
    "timetolive": lambda fields: _ttl_ms(fields) / 1000,
}

_NOT_YET: Final[dict[str, Read]] = {
    "enqueuedsequencenumber": lambda fields: fields.envelope.origin_sequence or fields.sequence,
    "lockeduntilutc": lambda _fields: None,
    "locktoken": lambda _fields: None,
    "sequencenumber": lambda fields: fields.sequence,
}
"""Properties that are set when a subscription stores or delivers a message, after its rules."""

SYSTEM_NAMES: Final = frozenset({*_READS, *_NOT_YET})


def refuse_unstored(node: object) -> None:
    """Raise `RuleError` for a system property that only stored messages have."""
    for name in _system_names(node):
        if name.lower() in _NOT_YET:
            raise RuleError(f"sys.{name} has no value yet when rules are evaluated")


def refuse_unknown(node: object) -> None:
    """Raise `RuleError` for a system property that no message has."""
    for name in _system_names(node):
        if name.lower() not in SYSTEM_NAMES:
            raise RuleError(
                f"there is no system property sys.{name}; what the sender or a dead letter's reason"
                f" added is named without sys: {name}"
            )


def user_properties(node: object) -> set[str]:
    """Yield the application properties that a condition names."""
    return {named.name for named in _properties(node) if not named.is_system}


def _system_names(node: object) -> Iterator[str]:
    return (named.name for named in _properties(node) if named.is_system)


def _properties(node: object) -> Iterator[Property]:
    if isinstance(node, Property):
        yield node
    if isinstance(node, tuple):
        for part in node:
            yield from _properties(part)
    elif is_dataclass(node):
        for field in fields_of(node):
            yield from _properties(getattr(node, field.name))


def _system_read(name: str) -> Read:
    folded = name.lower()

    def read_nothing(_fields: MessageFields) -> Value:
        raise EvaluationError(f"There is no system property '{name}'.")

    return _READS.get(folded) or _NOT_YET.get(folded, read_nothing)
