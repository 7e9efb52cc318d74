"""Cost limits of rules: steps of some 25 ns, taken from the budget of an apply.

A message's `steps_left` is the budget of the rules that are being evaluated for it. Steps are
counted by work, never by a clock, so that an apply always gives the same result. Their weights were
measured on CPython 3.11 and rounded up.
"""

from __future__ import annotations

from typing import Final

from postbus.message.fields import MessageFields
from postbus.rules.values import EvaluationError

APPLY_STEPS: Final = 500_000
"""What the rules of all topics may spend in one apply, beside what follows: some 12 ms. Our
choice, so that a publish among the worst rules keeps nobody else waiting for 50 ms."""

MESSAGE_STEPS: Final = 600
"""What each message of a burst or batch brings along: as much as storing it costs."""

SUBSCRIPTION_STEPS: Final = 400
"""What a subscription may spend on each message whatever others have spent: some sixty simple
conditions. Beyond it takes at most half of what is left, so that nobody can use up all."""

NODE_STEPS: Final = 2
"""A comparison, a property or a constant of an expression."""

FIELD_STEPS: Final = 3
"""A field or property of a correlation filter that the index has not looked up."""

TEXT_SHIFT: Final = 6
"""So many characters (a power of two) are joined, compared or folded in one step."""

COPY_STEPS: Final = 250
STATEMENT_STEPS: Final = 20
USUAL_PROPERTIES: Final = 32
PROPERTY_STEPS: Final = 40
REMOVE_STEPS: Final = 50
"""A copy that an action changes, each of its statements, and each of the copy's properties above so
many: they are encoded again, once more when any is removed."""

TOO_MANY: Final = (
    "The rules of the subscription take too many steps for what was published: fewer rules,"
    " shorter texts, or patterns without _ take less."
)


class StepPool:
    """The remaining steps of an apply."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = APPLY_STEPS


def spend(fields: MessageFields, steps: int) -> None:
    """Take steps before the work they stand for. Raises `EvaluationError`."""
    fields.steps_left -= steps
    if fields.steps_left < 0:
        raise EvaluationError(TOO_MANY)
