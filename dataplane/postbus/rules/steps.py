"""Cost limits of rules: steps of some 25 ns, spent from the budget of an apply.

A message's `steps_left` is the budget of the rules that are being evaluated for it. Steps are
counted by work, never by a clock, so that an apply always gives the same result. Their weights were
measured on CPython 3.11 and rounded up.
"""

from __future__ import annotations

from typing import Final

from postbus.message.fields import MessageFields
from postbus.rules.values import EvaluationError

APPLY_STEPS: Final = 500_000
"""Budget of the rules of all topics in one apply, besides the following: some 12 ms. Our choice, so
that a publish with the most expensive rules delays others by less than 50 ms."""

MESSAGE_STEPS: Final = 600
"""Budget added by each message of a burst or batch: the cost of storing it."""

SUBSCRIPTION_STEPS: Final = 400
"""Steps that a subscription may always spend on a message: some sixty simple conditions. Beyond
these it gets at most half of the rest, so that none can use up the budget."""

NODE_STEPS: Final = 2
"""Cost of a comparison, a property or a constant of an expression."""

FIELD_STEPS: Final = 3
"""Cost of a field or property of a correlation filter that the index has not looked up."""

TEXT_SHIFT: Final = 6
"""Number of characters, as a power of two, that are joined, compared or folded in one step."""

COPY_STEPS: Final = 250
STATEMENT_STEPS: Final = 20
USUAL_PROPERTIES: Final = 32
PROPERTY_STEPS: Final = 40
REMOVE_STEPS: Final = 50
"""Cost of a copy that an action changes and of each of its statements; the number of properties of
a copy that are included; cost of each further one, since it is encoded again, and of removals."""

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
    """Spend steps before the work that they pay for. Raises `EvaluationError`."""
    fields.steps_left -= steps
    if fields.steps_left < 0:
        raise EvaluationError(TOO_MANY)
