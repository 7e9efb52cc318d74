"""Decides whether a checkpoint may go on with a reader group.

The group knows its last plan. A checkpoint goes on exactly where that plan ends, or repeats it
while it is not settled; everything else means that checkpoint and group are of different times.
Planning is checked again by the bus: here the reader learns it before it plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from postbus_spark.errors import BusRestored, InvalidOption, StaleCheckpoint

if TYPE_CHECKING:
    from postbus.contract.bulk import ReaderGroup, ShownPlan
    from postbus_spark.options import Options


def starts_of(plan: ShownPlan) -> dict[int, int]:
    """Return where a reader without a checkpoint begins: with the plan that is not settled."""
    if plan.is_settled:
        return ends_of(plan)
    return {number: first for number, (first, _) in plan.ranges.items()}


def ends_of(plan: ShownPlan) -> dict[int, int]:
    return {number: end for number, (_, end) in plan.ranges.items()}


def repeated_end(plan: ShownPlan, positions: Mapping[int, int]) -> dict[int, int] | None:
    """Return the end of the plan if a reader at these positions must repeat it exactly."""
    ends = ends_of(plan)
    if plan.is_settled or positions == ends or positions != starts_of(plan):
        return None
    return ends


def check_mode(group: ReaderGroup, options: Options) -> None:
    """Raise `InvalidOption` if a group does not read in the mode of the options."""
    if options.mode not in (None, group.kind):
        raise InvalidOption(
            f"option mode: the reader group {group.name} of {options.entity} is a {group.kind},"
            f" not a {options.mode}"
        )


def check_place(group: ReaderGroup, positions: Mapping[int, int]) -> None:
    """Raise `StaleCheckpoint` or `BusRestored` if a reader may not go on at these positions."""
    plan = group.plan
    if repeated_end(plan, positions) is not None:
        return
    for number, planned in sorted(ends_of(plan).items()):
        position = positions[number]
        if position == planned:
            continue
        where = (
            f"the checkpoint goes on at position {position} of partition {number}, and plan"
            f" {plan.number} of the reader group {group.name} ends at {planned}"
        )
        raise (StaleCheckpoint if position < planned else BusRestored)(where)
