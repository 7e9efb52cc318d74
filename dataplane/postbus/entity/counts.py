"""Counts of an entity: plain data, made by `partition_state`, shown by the edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from postbus.entity.commands import SubQueue


@dataclass(frozen=True, slots=True)
class Counts:
    """Exact counts of one entity; `size_bytes` is an estimate after a load (ADR 37).

    `active` includes locked and deferred messages, `transfer` counts messages in the outbox.
    `accessed_ms`: time of the last send or receive, 0 when unknown.
    """

    active: int
    dead_letter: int
    scheduled: int
    transfer_dead_letter: int
    size_bytes: int
    transfer: int = 0
    accessed_ms: int = 0


def count_in(counts: Counts, sub_queue: SubQueue) -> int:
    """Return the number of messages in a sub-queue, including scheduled ones."""
    match sub_queue:
        case SubQueue.DEAD_LETTER:
            return counts.dead_letter
        case SubQueue.TRANSFER_DEAD_LETTER:
            return counts.transfer_dead_letter
        case SubQueue.ACTIVE | SubQueue.SCHEDULED | SubQueue.OUTBOX:
            return counts.active + counts.scheduled


def sum_of(parts: Sequence[Counts]) -> Counts:
    """Return the counts of a partitioned entity: the sum of its parts."""
    return Counts(
        sum(each.active for each in parts),
        sum(each.dead_letter for each in parts),
        sum(each.scheduled for each in parts),
        sum(each.transfer_dead_letter for each in parts),
        sum(each.size_bytes for each in parts),
        sum(each.transfer for each in parts),
        max((each.accessed_ms for each in parts), default=0),
    )
