"""Nodes of SQL filters and actions.

`grammar` makes them of text, `expressions` and `actions` compile them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from postbus.message.codec import Value

MAX_INTEGER: Final = 2**63 - 1


class RuleError(ValueError):
    """The text of a rule is invalid."""


# --- nodes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constant:
    """`value` is a bool, int (64 bits), float, str or None; of a parameter any simple value."""

    value: Value


@dataclass(frozen=True, slots=True)
class Property:
    """A property by name, of the system or the user scope. User names are case-insensitive."""

    name: str
    is_system: bool


@dataclass(frozen=True, slots=True)
class PropertyCall:
    """`property(name)`: the user property whose name is the value of an expression."""

    name: Expression


@dataclass(frozen=True, slots=True)
class NewId:
    """`newid()`: a new uuid at each evaluation."""


@dataclass(frozen=True, slots=True)
class Negative:
    operand: Expression


@dataclass(frozen=True, slots=True)
class Positive:
    operand: Expression


@dataclass(frozen=True, slots=True)
class Arithmetic:
    operator: str
    left: Expression
    right: Expression


Expression: TypeAlias = (
    Constant | Property | PropertyCall | NewId | Negative | Positive | Arithmetic
)


@dataclass(frozen=True, slots=True)
class Comparison:
    operator: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Like:
    value: Expression
    pattern: Expression
    escape: str | None


@dataclass(frozen=True, slots=True)
class IsIn:
    value: Expression
    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    property: Property


@dataclass(frozen=True, slots=True)
class Exists:
    property: Property


@dataclass(frozen=True, slots=True)
class Not:
    term: Predicate


@dataclass(frozen=True, slots=True)
class AllOf:
    terms: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    terms: tuple[Predicate, ...]


Predicate: TypeAlias = Comparison | Like | IsIn | IsNull | Exists | Not | AllOf | AnyOf


@dataclass(frozen=True, slots=True)
class Assign:
    property: Property
    value: Expression


@dataclass(frozen=True, slots=True)
class Remove:
    property: Property


Statement: TypeAlias = Assign | Remove

Values: TypeAlias = Mapping[str, Value]
"""Values of parameters. Names are case-insensitive and may begin with `@`."""

NOTHING: Final[Values] = {}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that is not replaced by its value yet."""

    name: str
    line: int
    column: int
