"""Values of a message in SQL: kinds, comparison, arithmetic, texts, conversion.

None is both NULL and unknown. Numbers compare by value whatever their AMQP width; a boolean or a
timestamp is not a number. A text compared with a timestamp or a uuid is parsed as one (ISO 8601;
UTC without a zone), because there is no other way to write them. Values of different kinds do not
compare: the result is unknown. A TimeSpan of Service Bus is a number of seconds. Source: "SQL
filter syntax" of Azure Service Bus; where it is silent the choice is ours.
"""

from __future__ import annotations

import math
import operator
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final

from postbus.contract.rule_values import TICKS_A_SECOND
from postbus.message.codec import (
    Byte,
    Char,
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
from postbus.message.described_times import offset_ms, span_ticks

MAX_TEXT_CHARS: Final = 32 * 1024
"""Maximum length of the result of an addition of texts: the limit of a property."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MIN_LONG: Final = -(2**63)
_MAX_LONG: Final = 2**63 - 1
_MAX_FLOAT32: Final = 3.4028234663852886e38


class EvaluationError(Exception):
    """A filter or action cannot be evaluated for a message.

    `name` is the exception of Service Bus that becomes the dead-letter reason; the text describes
    it.
    """

    def __init__(self, text: str, name: str = "FilterException") -> None:
        super().__init__(text)
        self.name = name


class ValueKind(Enum):
    """Kinds of comparable values. A value without a kind is not comparable."""

    NUMBER = "number"
    TEXT = "text"
    BOOLEAN = "boolean"
    TIME = "timestamp"
    ID = "uuid"
    OCTETS = "binary"


INTEGERS: Final[dict[type[int], tuple[int, int]]] = {
    int: (_MIN_LONG, _MAX_LONG),
    Ubyte: (0, 2**8 - 1),
    Ushort: (0, 2**16 - 1),
    Uint: (0, 2**32 - 1),
    Ulong: (0, 2**64 - 1),
    Byte: (-(2**7), 2**7 - 1),
    Short: (-(2**15), 2**15 - 1),
    Int: (-(2**31), 2**31 - 1),
}
"""Range of each class of integers."""

NUMBERS: Final[frozenset[type[Any]]] = frozenset({*INTEGERS, float, Float})

KINDS: Final[dict[type, ValueKind]] = {
    **dict.fromkeys(NUMBERS, ValueKind.NUMBER),
    **dict.fromkeys((str, Char, Symbol), ValueKind.TEXT),
    bool: ValueKind.BOOLEAN,
    Timestamp: ValueKind.TIME,
    uuid.UUID: ValueKind.ID,
    bytes: ValueKind.OCTETS,
}

Compare = Callable[[Any, Any], bool]

COMPARISONS: Final[dict[str, Compare]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def compare(operation: Compare, left: Value, right: Value) -> bool | None:
    """Compare two values; return None if the result is unknown."""
    if left is None or right is None:
        return None
    left_kind, right_kind = KINDS.get(left.__class__), KINDS.get(right.__class__)
    if left_kind is None or right_kind is None:
        left, right = _plain_time(left), _plain_time(right)
        left_kind, right_kind = KINDS.get(left.__class__), KINDS.get(right.__class__)
    if left_kind is not right_kind:
        if left_kind is ValueKind.TEXT:
            left = _read_as(right_kind, left)
        elif right_kind is ValueKind.TEXT:
            right = _read_as(left_kind, right)
        else:
            return None
        return None if left is None or right is None else operation(left, right)
    return None if left_kind is None else operation(left, right)


# --- times and durations of .NET ------------------------------------------------------------------


def seconds_of(ticks: int) -> int | float:
    """Return the value of a duration in SQL."""
    whole, rest = divmod(ticks, TICKS_A_SECOND)
    return ticks / TICKS_A_SECOND if rest else whole


def _plain_time(value: Value) -> Value:
    """Convert a duration or a time of .NET to a comparable value; return others unchanged."""
    if value.__class__ is not Described:
        return value
    ticks, at_ms = span_ticks(value), offset_ms(value)
    if ticks is not None:
        return seconds_of(ticks)
    return value if at_ms is None else Timestamp(at_ms)


# --- texts ----------------------------------------------------------------------------------------


def _read_as(kind: ValueKind | None, text: str) -> Value:
    """Parse a text that is compared with a value of another kind; None if it is malformed."""
    if kind is ValueKind.TIME:
        return timestamp_of(text)
    return uuid_of(text) if kind is ValueKind.ID else None


MAX_READ_CHARS: Final = 100
"""Maximum length of the text of a time or a uuid, with braces and prefixes."""


def timestamp_of(text: str) -> Timestamp | None:
    """Parse an ISO 8601 time; return None for other text."""
    if len(text) > MAX_READ_CHARS:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return Timestamp((moment - _EPOCH) // timedelta(milliseconds=1))


def uuid_of(text: str) -> uuid.UUID | None:
    if len(text) > MAX_READ_CHARS:
        return None
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def text_of(value: Value) -> str:
    """Return a value as text, as .NET formats it in the invariant culture. Raises
    `EvaluationError`.
    """
    match KINDS.get(value.__class__):
        case ValueKind.TEXT:
            return str(value)
        case ValueKind.NUMBER:
            is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
            return str(int(value)) if is_whole else repr(value + 0)
        case ValueKind.BOOLEAN | ValueKind.ID:
            return str(value)
        case ValueKind.TIME:
            try:
                moment = _EPOCH + timedelta(milliseconds=value)
            except OverflowError:
                raise EvaluationError("a timestamp is out of the range of dates") from None
            return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        case ValueKind.OCTETS | None:
            raise EvaluationError(f"a value of type {kind_name(value)} has no text")


def kind_name(value: Value) -> str:
    kind = KINDS.get(value.__class__)
    return type(value).__name__ if kind is None else kind.value


# --- arithmetic -----------------------------------------------------------------------------------


def calculate(sign: str, left: Value, right: Value) -> Value:
    """Return `left sign right`: 64-bit integers, doubles, joined texts, shifted timestamps.

    Integer division truncates towards zero; overflow is an error; doubles may become infinite.
    Division by zero is an error for both. Text plus any value joins their texts. Raises
    `EvaluationError`.
    """
    if left is None or right is None:
        return None
    kinds = (KINDS.get(left.__class__), KINDS.get(right.__class__))
    if kinds == (ValueKind.NUMBER, ValueKind.NUMBER):
        return _checked(_NUMERIC[sign](left, right))
    if sign == "+" and ValueKind.TEXT in kinds:
        joined = text_of(left) + text_of(right)
        if len(joined) > MAX_TEXT_CHARS:
            raise EvaluationError(f"a text exceeds {MAX_TEXT_CHARS} characters")
        return joined
    if sign == "-" and kinds == (ValueKind.TIME, ValueKind.TIME):
        return (left - right) / 1000
    if sign in "+-" and kinds == (ValueKind.TIME, ValueKind.NUMBER):
        shift_ms = right * 1000
        if not math.isfinite(shift_ms):
            raise EvaluationError(_OVERFLOW)
        shifted = left + round(shift_ms) if sign == "+" else left - round(shift_ms)
        return Timestamp(_checked(shifted))
    raise EvaluationError(
        f"the operator {sign} takes no operands of types {kind_name(left)} and {kind_name(right)}"
    )


def negative(value: Value) -> Value:
    """Return `-value`. Raises `EvaluationError`."""
    if value is None:
        return None
    if value.__class__ not in NUMBERS:
        raise EvaluationError(f"the operator - takes no operand of type {kind_name(value)}")
    return _checked(-value)


def positive(value: Value) -> Value:
    """Return `+value`. Raises `EvaluationError`."""
    if value is not None and value.__class__ not in NUMBERS:
        raise EvaluationError(f"the operator + takes no operand of type {kind_name(value)}")
    return value


_OVERFLOW: Final = "Arithmetic operation resulted in an overflow."
_ZERO: Final = "Attempted to divide by zero."


def _checked(result: Value) -> Value:
    if isinstance(result, int) and not _MIN_LONG <= result <= _MAX_LONG:
        raise EvaluationError(_OVERFLOW)
    return result


def _divide(left: Any, right: Any) -> Value:
    if right == 0:
        raise EvaluationError(_ZERO)
    if isinstance(left, float) or isinstance(right, float):
        return left / right
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: Any, right: Any) -> Value:
    if right == 0:
        raise EvaluationError(_ZERO)
    if isinstance(left, float) or isinstance(right, float):
        return math.nan if math.isinf(left) else math.fmod(left, right)
    rest = abs(left) % abs(right)
    return rest if left >= 0 else -rest


_NUMERIC: Final[dict[str, Callable[[Any, Any], Value]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _remainder,
}


# --- conversion -----------------------------------------------------------------------------------


def convert(value: Value, model: Value) -> Value:
    """Convert `value` to the type of `model` if no information is lost, else return it unchanged.

    A text becomes a number, a boolean, a timestamp or a uuid if it can be parsed as one, and every
    value with a text form becomes text.
    """
    wanted: type[Any] = model.__class__
    if value is None or model is None or value.__class__ is wanted:
        return value
    converted: Value = None
    if wanted in INTEGERS:
        converted = _integer(value, wanted)
    elif wanted in (float, Float):
        converted = _float(value, wanted)
    elif wanted in (str, Symbol, Char):
        converted = _text(value, wanted)
    elif KINDS.get(value.__class__) is ValueKind.TEXT:
        if wanted is bool:
            short = value[:MAX_READ_CHARS].strip().lower()
            converted = {"true": True, "false": False}.get(short)
        else:
            converted = _read_as(KINDS.get(wanted), value)
    return value if converted is None else converted


def _integer(value: Value, wanted: type[int]) -> Value:
    number = _number(value)
    if number is None or (isinstance(number, float) and not number.is_integer()):
        return None
    least, greatest = INTEGERS[wanted]
    return wanted(number) if least <= number <= greatest else None


def _float(value: Value, wanted: type) -> Value:
    number = _number(value)
    if number is None or (wanted is Float and abs(number) > _MAX_FLOAT32):
        return None
    return wanted(number)


def _number(value: Value) -> int | float | None:
    """Return a number, or the number that a text denotes; None for other values."""
    kind = KINDS.get(value.__class__)
    if kind is ValueKind.NUMBER:
        found: int | float = value + 0
        return found
    if kind is not ValueKind.TEXT or not value.isascii() or "_" in value or len(value) > 64:
        return None
    try:
        return int(value)
    except ValueError:
        pass
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _text(value: Value, wanted: type) -> Value:
    try:
        text = text_of(value)
    except EvaluationError:
        return None
    if wanted is Symbol:
        return Symbol(text) if text.isascii() else text
    if wanted is Char:
        return Char(text) if len(text) == 1 else text
    return text
