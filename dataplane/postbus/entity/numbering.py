"""Row keys and sequence numbers, from blocks reserved for one sub-queue (ADR 15)."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, Protocol

from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import RecordSize, ReserveBlock

if TYPE_CHECKING:
    from postbus.entity.apply_context import ApplyContext

FIRST_BLOCK_KEYS: Final = 256
LAST_BLOCK_KEYS: Final = 65_536
GROWTH: Final = 4
"""Each block of a sub-queue is four times the one before, up to the last size (ADR 15)."""


class Numbered(Protocol):
    """An owner of row keys: an entity, or the outbox."""

    @property
    def entity_no(self) -> int: ...

    def recorded_size(self) -> RecordSize: ...


class Numbering:
    """The row keys of one sub-queue; in ACTIVE also the sequence numbers of the entity.

    The number of a key in a block is key + offset. `next_sequence` is the first number never
    reserved by a block.
    """

    __slots__ = (
        "_end_key",
        "_entity",
        "_first_keys",
        "_next_key",
        "_next_size",
        "_offset",
        "_offsets",
        "_sub_queue",
        "next_sequence",
    )

    def __init__(self, entity: Numbered, sub_queue: SubQueue, next_sequence: int) -> None:
        self._entity = entity
        self._sub_queue = sub_queue
        self.next_sequence = next_sequence
        self._next_key = 0
        self._end_key = 0
        self._offset = 0
        self._next_size = FIRST_BLOCK_KEYS
        self._first_keys: list[int] = []
        self._offsets: list[int] = []

    def add_loaded(self, block: ReserveBlock) -> None:
        """Add a loaded block, in key order; its unused rest stays unused."""
        self._first_keys.append(block.first_key)
        self._offsets.append(block.first_sequence - block.first_key)

    def next_position(self, context: ApplyContext) -> int:
        """Return a key above all keys used so far, and not above any later one."""
        return self._next_key or context.first_key

    def take(self, count: int, context: ApplyContext) -> list[tuple[int, int, int]]:
        """Use `count` keys. Shape: runs of (first key, offset to the number, length)."""
        key = self._next_key
        if key + count <= self._end_key:
            self._next_key = key + count
            return [(key, self._offset, count)]
        runs: list[tuple[int, int, int]] = []
        while count > 0:
            if self._next_key == self._end_key:
                self._reserve(context)
            length = min(count, self._end_key - self._next_key)
            runs.append((self._next_key, self._offset, length))
            self._next_key += length
            count -= length
        return runs

    def take_one(self, context: ApplyContext) -> tuple[int, int]:
        """Use one key. Shape: (key, number)."""
        ((key, offset, _),) = self.take(1, context)
        return key, key + offset

    def number_of(self, row_key: int) -> int:
        """Return the sequence number of a key in ACTIVE."""
        return row_key + self._offsets[bisect_right(self._first_keys, row_key) - 1]

    def offset_of(self, first_key: int, last_key: int) -> int | None:
        """Return what number a key has beyond itself, None if these two are of different blocks."""
        index = bisect_right(self._first_keys, first_key) - 1
        is_one = index == bisect_right(self._first_keys, last_key) - 1
        return self._offsets[index] if is_one else None

    def number_at(self, row_key: int) -> int | None:
        """Return the number of a key, None if it is none of ACTIVE."""
        if not self._first_keys or row_key < self._first_keys[0]:
            return None
        number = self.number_of(row_key)
        return number if self.key_of(number) == row_key else None

    def key_of(self, sequence: int) -> int | None:
        """Return the key in ACTIVE that had or would have this number. It may not exist: a number
        beyond a block is a key of another sub-queue.
        """
        keys = self._first_keys
        if not keys or not keys[0] + self._offsets[0] <= sequence < self.next_sequence:
            return None
        key = self.key_from(sequence)
        return key if self.number_of(key) == sequence else None

    def key_from(self, sequence: int) -> int:
        """Return the lowest key in ACTIVE whose number may be `sequence` or above."""
        keys, offsets = self._first_keys, self._offsets
        low, high = 0, len(keys)
        while low < high:  # the first block that starts above `sequence`
            middle = (low + high) // 2
            if keys[middle] + offsets[middle] <= sequence:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return 0
        key = sequence - offsets[low - 1]
        return min(key, keys[low]) if low < len(keys) else key

    def _reserve(self, context: ApplyContext) -> None:
        size = self._next_size
        self._next_size = min(size * GROWTH, LAST_BLOCK_KEYS)
        is_active = self._sub_queue is SubQueue.ACTIVE
        first_sequence = self.next_sequence if is_active else 0
        first_key = context.next_key
        context.next_key += size
        context.outcome.mutations.append(
            ReserveBlock(first_key, size, self._entity.entity_no, self._sub_queue, first_sequence)
        )
        self._next_key, self._end_key = first_key, first_key + size
        self._offset = first_sequence - first_key
        if is_active:
            self.next_sequence += size
            self._first_keys.append(first_key)
            self._offsets.append(self._offset)
            # This commit is a barrier anyway, therefore the checkpoint of the size costs nothing.
            context.outcome.mutations.append(self._entity.recorded_size())
