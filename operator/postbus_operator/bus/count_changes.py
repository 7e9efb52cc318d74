"""Counts of messages in a status: they change when they mean something else.

Exact counts are metrics; a status that followed each message would be a write to the API server for
each message.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from postbus.contract.control import CountDetails
from postbus.contract.control_counts import EntityCounts

SHARE: Final = 0.1
"""A count is shown again when it differs by more than this part of the shown one."""

Numbers: TypeAlias = tuple[int, ...]


def numbers_of(details: CountDetails | None, size_bytes: int | None) -> Numbers | None:
    """Return the counts that are compared; None if they are unknown."""
    if details is None or size_bytes is None:
        return None
    return (
        details.active_message_count,
        details.dead_letter_message_count,
        details.scheduled_message_count,
        details.transfer_message_count,
        details.transfer_dead_letter_message_count,
        size_bytes,
    )


def numbers_in(counts: EntityCounts) -> Numbers | None:
    """Return the counts of an entity in the answer about many."""
    return numbers_of(counts.count_details, counts.size_in_bytes)


def has_moved(shown: Numbers | None, found: Numbers | None) -> bool:
    """Return whether the found counts are shown in place of others; unknown ones never are."""
    if found is None:
        return False
    if shown is None:
        return True
    return any(
        (before == 0) != (after == 0) or abs(after - before) > before * SHARE
        for before, after in zip(shown, found, strict=True)
    )
