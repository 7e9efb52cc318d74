"""The last batch of a pipeline, as its status shows it: not each one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from postbus.contract.control_groups import ReaderGroupDescription
from postbus_operator.conditions import timestamp
from postbus_operator.status import BatchStatus

PAUSE: Final = timedelta(minutes=10)
"""Time for which a batch is shown although others follow. Our choice: six writes an hour; what
stands still is shown at once."""


def shown_batch(status: Mapping[str, Any]) -> BatchStatus | None:
    """Return the batch in a status."""
    found = status.get("lastBatch")
    return None if found is None else BatchStatus.model_validate(found)


def batch_of(
    groups: Sequence[ReaderGroupDescription], shown: BatchStatus | None, now: datetime
) -> BatchStatus | None:
    """Return the batch to show in place of another one; None: there was none.

    Its number is that of the runner: the sum of the plans of all groups (ADR 47).
    Another one follows soon in a pipeline that works, and is shown after a pause. One that was
    begun again, or that was not settled and is, is shown at once.
    """
    planned = [group for group in groups if group.plan_number]
    if not planned:
        return None
    begun = [group for group in planned if not group.is_settled]
    found = BatchStatus(
        number=sum(group.plan_number for group in planned),
        attempts=max(group.attempts for group in begun or planned),
        settled=not begun,
        time=timestamp(now),
    )
    if shown is None or shown.number > found.number:  # of a group that was made again
        return found
    if shown.number == found.number:
        is_same = (shown.attempts, shown.settled) == (found.attempts, found.settled)
        return shown if is_same else found
    is_usual = shown.attempts == found.attempts == 1
    is_fresh = now - datetime.fromisoformat(shown.time) < PAUSE
    return shown if is_usual and is_fresh else found
