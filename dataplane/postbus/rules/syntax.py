"""Syntax of SQL filters and actions: from text to nodes, or a `RuleError` with line and column.

The library and the tables that it makes of the grammar cost a tenth of the start of a broker:
`grammar` imports this module for the first text. The grammar is a constant because nothing in this
package reads files. Source: "Subscription rule SQL filter syntax" and "SQL action syntax" of Azure
Service Bus.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final, NoReturn

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedToken, v_args

from postbus.rules.nodes import (
    MAX_INTEGER,
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
    Remove,
    RuleError,
    Statement,
)

GRAMMAR: Final = r"""
filter: _disjunction
action: statement+

statement: _SET property _EQUAL _sum ";"?  -> assign
         | _REMOVE property ";"?           -> remove

_disjunction: _conjunction | any_of
any_of: _conjunction (_OR _conjunction)+
_conjunction: _negation | all_of
all_of: _negation (_AND _negation)+
_negation: _test | negate
negate: _NOT _negation
_test: "(" _disjunction ")"
     | comparison | like | not_like | is_in | is_not_in | is_null | is_not_null | exists

comparison: _sum operator _sum
!operator: _EQUAL | COMPARE
like: _sum _LIKE _sum (_ESCAPE TEXT)?
not_like: _sum _NOT _LIKE _sum (_ESCAPE TEXT)?
is_in: _sum _IN "(" _sum ("," _sum)* ")"
is_not_in: _sum _NOT _IN "(" _sum ("," _sum)* ")"
is_null: property _IS _NULL
is_not_null: property _IS _NOT _NULL
exists: _EXISTS "(" property ")"

_sum: _product | arithmetic_sum
arithmetic_sum: _sum SIGN _product         -> arithmetic
_product: _unary | arithmetic_product
arithmetic_product: _product FACTOR _unary -> arithmetic
_unary: _atom | signed
signed: SIGN _unary
_atom: constant | property | call | parameter | "(" _sum ")"
call: NAME "(" _sum? ")"
property: NAME "." _name -> scoped
        | _name          -> unscoped
_name: NAME | BRACKETED | QUOTED
constant: INTEGER        -> integer
        | DECIMAL        -> decimal
        | TEXT           -> text
        | _TRUE          -> true
        | _FALSE         -> false
        | _NULL          -> null
parameter: PARAMETER

_AND.2: /and\b/i
_OR.2: /or\b/i
_NOT.2: /not\b/i
_IN.2: /in\b/i
_IS.2: /is\b/i
_LIKE.2: /like\b/i
_ESCAPE.2: /escape\b/i
_EXISTS.2: /exists\b/i
_NULL.2: /null\b/i
_TRUE.2: /true\b/i
_FALSE.2: /false\b/i
_SET.2: /set\b/i
_REMOVE.2: /remove\b/i
_EQUAL: "="
COMPARE: "<>" | "!=" | ">=" | "<=" | ">" | "<"
SIGN: "+" | "-"
FACTOR: "*" | "/" | "%"
DECIMAL.1: /([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+/i
INTEGER: /[0-9]+/
TEXT: /'[^']*(?:''[^']*)*'/
NAME: /[^\W\d]\w*/
BRACKETED: /\[(?:[^\]]|\]\])+\]/
QUOTED: /"(?:[^"]|"")+"/
PARAMETER: /@\w+/
%ignore /\s+/
"""


def nodes_of(text: str, start: str) -> Any:
    """Return the node of a `filter`, or the statements of an `action`. Raises `RuleError`."""
    try:
        return _parser().parse(text, start)
    except (UnexpectedToken, UnexpectedCharacters) as error:
        raise RuleError(_describe(error, text, start)) from None


@cache
def _parser() -> Lark:
    return Lark(
        GRAMMAR,
        parser="lalr",
        lexer="basic",
        start=["filter", "action"],
        transformer=_Nodes(),
        maybe_placeholders=False,
    )


def _fail(token: Token, text: str) -> NoReturn:
    raise RuleError(f"line {token.line}, column {token.column}: {text}")


@v_args(inline=True)
class _Nodes(Transformer[Token, Any]):
    """Transforms the parse tree to nodes, from the innermost outwards."""

    def filter(self, predicate: Predicate) -> Predicate:
        return predicate

    def action(self, *statements: Statement) -> tuple[Statement, ...]:
        return statements

    assign = Assign
    remove = Remove
    negate = Not
    is_null = IsNull
    exists = Exists

    def any_of(self, *terms: Predicate) -> Predicate:
        return AnyOf(terms)

    def all_of(self, *terms: Predicate) -> Predicate:
        return AllOf(terms)

    def operator(self, token: Token) -> str:
        return str(token)

    def comparison(self, left: Expression, operator: str, right: Expression) -> Predicate:
        return Comparison(operator, left, right)

    def like(
        self, value: Expression, pattern: Expression, escape: Token | None = None
    ) -> Predicate:
        if escape is None:
            return Like(value, pattern, None)
        character = _unquoted(escape)
        if len(character) != 1:
            _fail(escape, f"expected one escape character, found {escape}")
        return Like(value, pattern, character)

    def not_like(self, *parts: Any) -> Predicate:
        return Not(self.like(*parts))

    def is_in(self, value: Expression, *items: Expression) -> Predicate:
        return IsIn(value, items)

    def is_not_in(self, value: Expression, *items: Expression) -> Predicate:
        return Not(IsIn(value, items))

    def is_not_null(self, named: Property) -> Predicate:
        return Not(IsNull(named))

    def arithmetic(self, left: Expression, operator: Token, right: Expression) -> Expression:
        return Arithmetic(str(operator), left, right)

    def signed(self, sign: Token, operand: Expression) -> Expression:
        if sign == "+":
            return Positive(operand)
        if isinstance(operand, Constant) and type(operand.value) in (int, float):
            assert operand.value is not None
            return Constant(-operand.value)  # a number, by the test above
        return Negative(operand)

    def scoped(self, scope: Token, name: Token) -> Property:
        if scope.lower() not in ("sys", "user"):
            _fail(scope, f"expected sys or user as the scope, found '{scope}'")
        return Property(_unquoted(name), scope.lower() == "sys")

    def unscoped(self, name: Token) -> Property:
        return Property(_unquoted(name), False)

    def call(self, name: Token, argument: Expression | None = None) -> Expression:
        match name.lower():
            case "newid":
                if argument is not None:
                    _fail(name, "newid() takes no argument")
                return NewId()
            case "property" | "p":
                if argument is None:
                    _fail(name, f"{name}() takes the name of a property")
                return PropertyCall(argument)
            case _:
                _fail(name, f"expected newid, property or p as the function, found '{name}'")

    def integer(self, token: Token) -> Constant:
        value = int(token)
        if value > MAX_INTEGER + 1:  # the one above is the lowest number, with its sign
            _fail(token, f"the number {token} is too large")
        return Constant(value)

    def decimal(self, token: Token) -> Constant:
        value = float(token)
        if math.isinf(value):
            _fail(token, f"the number {token} is too large")
        return Constant(value)

    def text(self, token: Token) -> Constant:
        return Constant(_unquoted(token))

    def true(self) -> Constant:
        return Constant(True)

    def false(self) -> Constant:
        return Constant(False)

    def null(self) -> Constant:
        return Constant(None)

    def parameter(self, token: Token) -> Parameter:
        return Parameter(str(token), token.line or 1, token.column or 1)


def _unquoted(token: Token) -> str:
    """Return the text or name of a token without its quotes."""
    close = _CLOSING.get(token[0]) if token.type != "NAME" else None
    return str(token) if close is None else token[1:-1].replace(close * 2, close)


_CLOSING: Final = {"'": "'", '"': '"', "[": "]"}


# --- errors of syntax -----------------------------------------------------------------------------

_CALL: Final = "'('"
_VALUE: Final = {"INTEGER", "TEXT", "NAME"}
_EXPECTATIONS: Final[tuple[tuple[set[str], str], ...]] = (
    (_VALUE | {"_EXISTS"}, "a condition"),
    (_VALUE, "a value"),
    ({"NAME"}, "a name"),
    ({"BRACKETED"}, "a name"),
    ({"COMPARE"}, "a comparison"),
    ({"_EQUAL"}, "'='"),
    ({"_IN"}, "IN"),
    ({"_LIKE"}, "LIKE"),
    ({"_NULL"}, "NULL"),
    ({"TEXT"}, "a text"),
    ({"_AND"}, "AND"),
    ({"_OR"}, "OR"),
    ({"_SET"}, "SET"),
    ({"_REMOVE"}, "REMOVE"),
    ({"COMMA"}, "','"),
    ({"LPAR"}, _CALL),
    ({"RPAR"}, "')'"),
    ({"$END"}, "the end"),
)
"""Names of the expected terminals; the first entry that fits replaces its terminals."""


def _expected(accepted: set[str]) -> str:
    left = set(accepted)
    words: list[str] = []
    for terminals, word in _EXPECTATIONS:
        if terminals <= left:
            words.append(word)
            left -= _BEGINS_VALUE if terminals >= _VALUE else terminals | _FOLLOWS.get(word, set())
    if len(words) > 1 and _CALL in words:  # any name may begin a call, which is no useful hint
        words.remove(_CALL)
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " or " + words[-1]


_BEGINS_VALUE: Final = _VALUE | {
    "_EXISTS", "_NOT", "_NULL", "_TRUE", "_FALSE", "DECIMAL", "SIGN", "PARAMETER",
    "BRACKETED", "QUOTED", "LPAR",
}  # fmt: skip
_FOLLOWS: Final = {
    "a comparison": {"_EQUAL", "_IN", "_LIKE", "_IS", "_NOT"},
    "a name": {"BRACKETED", "QUOTED"},
}


def _describe(error: UnexpectedToken | UnexpectedCharacters, text: str, start: str) -> str:
    line, column, end = error.line, error.column, error.pos_in_stream
    if isinstance(error, UnexpectedCharacters):
        found = f"'{error.char}'"
        if error.char in _CLOSING:
            found += f", which no {_CLOSING[error.char]} closes"
    elif error.token.type != "$END":
        found = f"'{error.token}'"
    else:
        found = "the end"
        line = text.count("\n") + 1
        column = len(text) - text.rfind("\n")
        end = len(text)
    expected = _expected(_accepted(text, start, end))
    return f"line {line}, column {column}: expected {expected}, found {found}"


def _accepted(text: str, start: str, end: int | None) -> set[str]:
    """Return the terminals that are valid at a position; the failed parser has lost some."""
    cursor: Any = _parser().parse_interactive(text[:end], start)
    cursor.exhaust_lexer()
    accepted: set[str] = cursor.accepts()
    return accepted
