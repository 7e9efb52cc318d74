"""Parser of SQL filters and actions: from text to nodes, or a `RuleError` with line and column.

`syntax` has the grammar; here are parameters and limits, the quotas of Azure Service Bus.
`expressions` and `actions` compile the nodes.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Final, assert_never
from unicodedata import east_asian_width

from postbus.rules.nodes import (
    MAX_INTEGER,
    NOTHING,
    AllOf,
    AnyOf,
    Arithmetic,
    Assign,
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
    Parameter,
    Positive,
    Predicate,
    Property,
    PropertyCall,
    RuleError,
    Statement,
    Values,
)

MAX_CHARS: Final = 1_024
MAX_COMPARISONS: Final = 32
MAX_STATEMENTS: Final = 32

PARSED_TEXTS: Final = 2_048
"""Number of cached results for equal rules: at most some 10 KiB each, measured."""

MAX_DEPTH: Final = 64
"""Maximum nesting of an expression, since its evaluation recurses. Our choice."""


def parse_filter(text: str, values: Values = NOTHING) -> Predicate:
    """Return the condition of a filter, with values for its parameters. Raises `RuleError`."""
    predicate: Predicate = _parse(text, "filter", "a filter")
    return _bound(predicate, _named(values)) if "@" in text else predicate


def parse_action(text: str, values: Values = NOTHING) -> tuple[Statement, ...]:
    """Return the statements of an action, with values for its parameters. Raises `RuleError`."""
    statements: tuple[Statement, ...] = _parse(text, "action", "an action")
    if len(statements) > MAX_STATEMENTS:
        raise RuleError(f"an action has at most {MAX_STATEMENTS} statements")
    return _bound(statements, _named(values)) if "@" in text else statements


@lru_cache(maxsize=PARSED_TEXTS)
def _parse(text: str, start: str, noun: str) -> Any:
    if len(text) > MAX_CHARS:
        raise RuleError(f"the text of {noun} has at most {MAX_CHARS} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RuleError(f"the text of {noun} is not Unicode") from error
    from postbus.rules.syntax import nodes_of

    found = nodes_of(text, start)
    if start == "filter":
        _check_size(found)
    else:
        for statement in found:
            if isinstance(statement, Assign):
                _check_size(statement.value)
    return found


# --- parameters -----------------------------------------------------------------------------------


def _named(values: Values) -> Values:
    return {name.removeprefix("@").lower(): value for name, value in values.items()}


def _bound(node: Any, values: Values) -> Any:
    """Replace the parameters of a node by constants; its depth was checked."""
    if isinstance(node, Parameter):
        name = node.name.removeprefix("@").lower()
        if name not in values:
            raise RuleError(
                f"line {node.line}, column {node.column}: the parameter {node.name} has no value;"
                " give it one or write the value instead"
            )
        value = values[name]
        if type(value) is int and not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
            raise RuleError(f"the number {value} of the parameter {node.name} is too large")
        return Constant(value)
    if isinstance(node, tuple):
        return tuple(_bound(part, values) for part in node)
    if not is_dataclass(node):
        return node
    changes = {field.name: _bound(getattr(node, field.name), values) for field in fields(node)}
    return replace(node, **changes)  # type: ignore[type-var]  # an instance, not a class


# --- limits ---------------------------------------------------------------------------------------


def _check_size(root: Predicate | Expression | Parameter) -> None:
    """Reject expressions that are too large to evaluate; walks without recursion."""
    comparisons = 0
    pending: list[tuple[Predicate | Expression | Parameter, int]] = [(root, 1)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise RuleError(f"the expression is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, Comparison | Like | IsIn | IsNull | Exists):
            comparisons += 1
        if isinstance(node, Constant) and type(node.value) is int and node.value > MAX_INTEGER:
            raise RuleError(f"the number {node.value} is too large")
        pending += [(part, depth + 1) for part in _parts(node)]
    if comparisons > MAX_COMPARISONS:
        raise RuleError(
            f"a filter has at most {MAX_COMPARISONS} conditions, this has {comparisons}"
        )


def node_count(root: Predicate) -> int:
    """Return the number of comparisons, operators, names and constants in a condition."""
    count = 0
    pending: list[Predicate | Expression] = [root]
    while pending:
        count += 1
        pending += _parts(pending.pop())
    return count


def _parts(node: Predicate | Expression | Parameter) -> tuple[Predicate | Expression, ...]:
    match node:
        case Constant() | Property() | NewId() | IsNull() | Exists() | Parameter():
            return ()
        case PropertyCall(operand) | Negative(operand) | Positive(operand) | Not(operand):
            return (operand,)
        case Arithmetic(_, left, right) | Comparison(_, left, right) | Like(left, right, _):
            return (left, right)
        case IsIn(value, items):
            return (value, *items)
        case AllOf(terms) | AnyOf(terms):
            return terms
        case _:
            assert_never(node)


# --- errors for people ---------------------------------------------------------------------------


def pointed(message: str, text: str) -> str:
    """Return the message of a `RuleError`, with the line and a caret if it has a position."""
    place = _PLACE.search(message)
    lines = text.split("\n")
    if place is None or not 0 < int(place[1]) <= len(lines):
        return message
    line, column = lines[int(place[1]) - 1], int(place[2])
    before = "".join("  " if east_asian_width(each) in "WF" else " " for each in line[: column - 1])
    return f"{message}\n  {line.replace(chr(9), ' ')}\n  {before}^"


_PLACE: Final = re.compile(r"line (\d+), column (\d+): ")
