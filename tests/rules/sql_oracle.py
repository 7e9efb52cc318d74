"""A second implementation of the language of SQL filters: evaluation of a tree.

Made from the guide and the grammar alone, shares no code with the product; it walks the tree for
every message and parses nothing. `evaluated` gives the three-valued result or raises `Failed`.
Where the guide has no rule it follows the product, marked with the word "silent".

Operands: ("constant", value), ("name", scope, name), ("property", operand), ("newid",),
("sign", operator, operand), ("math", operator, left, right).
Conditions: ("compare", operator, left, right), ("like", negated, left, pattern, escape),
("in", negated, left, operands), ("null", negated, name), ("exists", name), ("not", condition),
("and" | "or", left, right).
"""

from __future__ import annotations

import math
import operator
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from postbus.message.codec import Decimal32, Decimal64, Decimal128, Timestamp, Value

Tree = tuple[Any, ...]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
END_MS = 253_402_300_800_000
"""The beginning of the year 10000: the text of a time ends before."""

COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Failed(Exception):
    """The filter cannot be evaluated for this message."""


@dataclass(frozen=True)
class Message:
    """Input of a filter: `application` as sent, `system` by lower-case names without `sys.`."""

    application: dict[str, Value] = field(default_factory=dict)
    system: dict[str, Value] = field(default_factory=dict)

    def user(self, name: str) -> tuple[bool, Value]:
        """Return whether there is such a property, and its value; of equal names the last.

        Silent: capitals are those of `str.lower`; `sys.To` as a text is a name like any other.
        """
        found: tuple[bool, Value] = (False, None)
        for given, value in self.application.items():
            if given.lower() == name.lower():
                found = (True, value)
        return found

    def named(self, scope: str, name: str) -> tuple[bool, Value]:
        if scope == "user":
            return self.user(name)
        if name.lower() not in self.system:
            raise Failed
        value = self.system[name.lower()]
        return value is not None, value


# --- conditions -----------------------------------------------------------------------------------


def evaluated(tree: Tree, message: Message) -> bool | None:
    """Return true, false or unknown (None); raise `Failed` where the guide has an error."""
    match tree:
        case ("or" | "and" as word, left, right):
            decisive: bool = word == "or"
            if settled(right) is decisive:  # Silent: constant parts are evaluated before.
                return decisive
            first = evaluated(left, message)
            if first is decisive:
                return first
            second = evaluated(right, message)
            return second if second is decisive or first is not None else None
        case ("not", inner):
            return negated(evaluated(inner, message), True)
        case ("compare", sign, left, right):
            return compared(sign, value_of(left, message), value_of(right, message))
        case ("in", negation, left, items):
            wanted = value_of(left, message)
            if wanted is None:  # Silent: then nothing on the right can fail, nor after a match.
                return None
            if kind(wanted) == "text":  # Silent: texts that are written out are looked at first.
                items = sorted(items, key=lambda item: not is_text(item))
            found = any(compared("=", wanted, value_of(item, message)) for item in items)
            return found is not negation
        case ("like", negation, left, pattern, escape):
            text, form = value_of(left, message), value_of(pattern, message)
            if kind(text) != "text" or kind(form) != "text":
                return None
            return fits(pieces(form, escape), text) is not negation
        case ("null", negation, (_, scope, name)):
            return (message.named(scope, name)[1] is None) is not negation
        case ("exists", (_, scope, name)):
            return message.named(scope, name)[0]
    raise AssertionError(tree)


def settled(tree: Tree) -> bool | None:
    """Return the value of a condition for every message, None if it is not constant."""
    match tree:
        case ("compare", sign, left, right) if is_constant(left) and is_constant(right):
            return compared(sign, value_of(left, Message()), value_of(right, Message()))
        case ("not", inner):
            return negated(settled(inner), True)
        case ("or" | "and" as word, left, right):
            results = settled(left), settled(right)
            if (word == "or") in results:
                return bool(word == "or")
            return None if None in results else bool(word == "and")
    return None


def is_constant(tree: Tree) -> bool:
    """Return whether it is a constant; a minus before a number is part of it."""
    match tree:
        case ("constant", _):
            return True
        case ("sign", "-", inner):
            return is_constant(inner) and kind(value_of(inner, Message())) == "number"
    return False


def is_text(tree: Tree) -> bool:
    return tree[0] == "constant" and kind(tree[1]) == "text"


def negated(result: bool | None, negation: bool) -> bool | None:
    return result if result is None else result is not negation


def compared(sign: str, left: Value, right: Value) -> bool | None:
    kinds = kind(left), kind(right)
    if kinds[0] == "text" and kinds[1] in ("timestamp", "uuid"):
        left = read(left, kinds[1])
    elif kinds[1] == "text" and kinds[0] in ("timestamp", "uuid"):
        right = read(right, kinds[0])
    if kind(left) != kind(right) or kind(left) in ("unknown", "other"):
        return None
    return COMPARED[sign](left, right)


def read(text: str, wanted: str) -> Value:
    """Return the timestamp or UUID in a text, None if there is none."""
    try:
        if wanted == "uuid":
            return uuid.UUID(text)
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return Timestamp((when - EPOCH) // timedelta(milliseconds=1))


def pieces(pattern: str, escape: str | None) -> list[tuple[bool, str]]:
    """Return characters, each with whether it is a wildcard."""
    found, at = [], 0
    while at < len(pattern):
        if pattern[at] == escape:
            at += 1
            if at == len(pattern):
                raise Failed
            found.append((False, pattern[at]))
        else:
            found.append((pattern[at] in "%_", pattern[at]))
        at += 1
    return found


def fits(pattern: list[tuple[bool, str]], text: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == (True, "%"):
        return any(fits(pattern[1:], text[at:]) for at in range(len(text) + 1))
    is_any, character = pattern[0]
    return bool(text) and (is_any or character == text[0]) and fits(pattern[1:], text[1:])


# --- operands -------------------------------------------------------------------------------------


def kind(value: Value) -> str:
    match value:
        case None:
            return "unknown"
        case bool():
            return "boolean"
        case Timestamp():
            return "timestamp"
        case int() | float():
            return "number"
        case str():
            return "text"
        case uuid.UUID():
            return "uuid"
        case Decimal32() | Decimal64() | Decimal128():
            return "other"
        case bytes():
            return "binary"
    return "other"


def value_of(tree: Tree, message: Message) -> Value:
    match tree:
        case ("constant", value):
            return value
        case ("name", scope, name):
            return message.named(scope, name)[1]
        case ("property", inner):
            name = value_of(inner, message)
            return message.user(name)[1] if kind(name) == "text" else None
        case ("newid",):
            return uuid.uuid4()
        case ("sign", sign, inner):
            value = value_of(inner, message)
            if value is None:
                return None
            if kind(value) != "number":
                raise Failed
            return bounded(-value) if sign == "-" else value
        case ("math", sign, left, right):
            first, second = value_of(left, message), value_of(right, message)
            return None if first is None or second is None else computed(sign, first, second)
    raise AssertionError(tree)


def computed(sign: str, left: Value, right: Value) -> Value:
    kinds = kind(left), kind(right)
    if sign == "+" and "text" in kinds:
        return as_text(left) + as_text(right)
    if kinds == ("number", "number"):
        return bounded(arithmetic(sign, left, right))
    if kinds == ("timestamp", "timestamp") and sign == "-":
        return (int(left) - int(right)) / 1000
    if kinds == ("timestamp", "number") and sign in "+-":
        if not math.isfinite(right * 1000):
            raise Failed
        shift_ms = round(right * 1000)
        return Timestamp(bounded(int(left) + (shift_ms if sign == "+" else -shift_ms)))
    raise Failed


def arithmetic(sign: str, left: Any, right: Any) -> int | float:
    if sign in "/%" and right == 0:
        raise Failed
    if isinstance(left, int) and isinstance(right, int):
        left, right = int(left), int(right)
        if sign in "/%":
            quotient: int = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if sign == "/" else left - quotient * right
    match sign:
        case "/":
            return float(left) / float(right)
        case "%":
            return math.nan if math.isinf(left) else math.fmod(left, right)
        case "*":
            return left * right  # type: ignore[no-any-return]
        case "+":
            return left + right  # type: ignore[no-any-return]
    return left - right  # type: ignore[no-any-return]


def bounded(number: float) -> float:
    """Refuse an integer of more than 64 bits."""
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise Failed
    return number


def as_text(value: Value) -> str:
    match kind(value):
        case "text" | "uuid" | "boolean":
            return str(value)
        case "number":
            if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
                return str(int(value))
            return repr(float(value))  # Silent: the shortest text that reads as the same number.
        case "timestamp":
            if value >= END_MS:
                raise Failed
            when = EPOCH + timedelta(milliseconds=value)
            return when.strftime("%Y-%m-%dT%H:%M:%S.") + f"{value % 1000:03}Z"
    raise Failed
