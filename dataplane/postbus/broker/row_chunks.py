"""Readable ranges of a partition for bulk reads, and chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from postbus.store.browse_rows import Piece, Present
from postbus.store.bulk_reads import Block, Columns


@dataclass(frozen=True, slots=True)
class PartitionRanges:
    """The readable part of a partition; see `contract.bulk.PartitionRange`."""

    partition_id: int
    low: int
    next_position: int
    live: int
    deferred: int
    average_bytes: int
    splits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Some rows of a range. `offset`: in ACTIVE a number is its position plus this.

    `present`: what changes later, of rows that are read without a group.
    """

    columns: Columns
    offset: int
    present: Present | None = None


def divided(blocks: Sequence[Block | Piece], count: int) -> tuple[int, ...]:
    """Return positions that divide the keys of blocks into parts of about equal size."""
    total = sum(block.end - block.first for block in blocks)
    found: list[int] = []
    passed = 0
    for block in blocks:
        size = block.end - block.first
        while len(found) < count - 1:
            wanted = total * (len(found) + 1) // count
            if wanted >= passed + size:
                break
            found.append(block.first + wanted - passed)
        passed += size
    return tuple(found)
