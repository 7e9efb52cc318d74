"""Reference counts of shared bodies, and unreferenced bodies (ADR 7).

Counts are in arrays parallel to the blocks of row keys, four bytes per key, because a body's id is
the key of its first row; those of loaded bodies are in two sorted arrays, twelve bytes per body. A
reference is released when the delete is durable, so that commits in flight never lose a body. A
body without references is removed later, by a commit if it is small, else outside the commits
(`sweep.py`). Pure memory; called by the writer and the load.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

REMOVED_AT_ONCE: Final = 1_000
"""Maximum number of small bodies that a commit removes; more than it can release itself."""
LARGE: Final = 1 << 31
"""Flag in the count of a body that is too large for a commit to remove."""
COUNT: Final = LARGE - 1


class BodyCounts:
    """References to shared bodies.

    `dead`: ids of small unreferenced bodies; `large_dead`: those of large ones, of ones of unknown
    size, and of bodies that were never shared.
    """

    def __init__(self) -> None:
        self.dead: list[int] = []
        self.large_dead: list[int] = []
        self._old_ids: array[int] = array("q")
        self._old_counts: array[int] = array("I")
        self._first_keys: array[int] = array("q")
        self._blocks: dict[int, array[int]] = {}
        self._live: dict[int, int] = {}

    def load(self, body_id: int, count: int) -> None:
        """Add a loaded body; ids are added in order, at least those in use."""
        if not count:
            self.large_dead.append(body_id)
            return
        self._old_ids.append(body_id)
        self._old_counts.append(count)

    def add(
        self, body_id: int, count: int, first_key: int, size: int, *, is_large: bool = False
    ) -> None:
        """Add a new body with an id in the block [first_key, first_key + size)."""
        counts = self._blocks.get(first_key)
        if counts is None:
            counts = self._blocks[first_key] = array("I", bytes(4 * size))
            self._live[first_key] = 0
            self._first_keys.insert(bisect_left(self._first_keys, first_key), first_key)
        counts[body_id - first_key] = count | LARGE if is_large else count
        self._live[first_key] += 1

    def release(self, packed: bytes) -> list[int]:
        """Release one reference for each id; ids are packed in eight bytes, big-endian.

        Returns the ids that are not counted: the load skips bodies that only settled rows refer to.
        """
        first_keys, blocks = self._first_keys, self._blocks
        unknown: list[int] = []
        for body_id in _unpacked(packed):
            index = bisect_left(first_keys, body_id + 1) - 1
            if index >= 0:
                first_key = first_keys[index]
                counts = blocks[first_key]
                offset = body_id - first_key
                if offset < len(counts) and counts[offset]:
                    left = counts[offset] - 1
                    if left & COUNT:
                        counts[offset] = left
                    else:
                        counts[offset] = 0
                        (self.large_dead if left else self.dead).append(body_id)
                        self._forget_one(index)
                    continue
            if not self._release_old(body_id):
                unknown.append(body_id)
        return unknown

    def retain(self, packed: bytes) -> None:
        """Add one reference for each id; a body with a single row then has two."""
        first_keys, blocks = self._first_keys, self._blocks
        for body_id in _unpacked(packed):
            index = bisect_left(first_keys, body_id + 1) - 1
            if index >= 0:
                counts = blocks[first_keys[index]]
                offset = body_id - first_keys[index]
                if offset < len(counts) and counts[offset]:
                    counts[offset] += 1
                    continue
            self._retain_old(body_id)

    def _retain_old(self, body_id: int) -> None:
        ids, counts = self._old_ids, self._old_counts
        index = bisect_left(ids, body_id)
        if index < len(ids) and ids[index] == body_id:
            counts[index] += 1
        else:
            ids.insert(index, body_id)
            counts.insert(index, 2)

    def orphan(self, packed: bytes) -> None:
        """Add bodies whose only row was deleted, packed as for `release`."""
        self.large_dead.extend(_unpacked(packed))

    def bury(self, body_ids: Iterable[int]) -> None:
        """Add bodies that are not counted and that no row refers to any longer."""
        self.large_dead.extend(body_ids)

    def take_dead(self) -> list[int]:
        """Return small bodies for the current commit to remove."""
        dead = self.dead
        if len(dead) <= REMOVED_AT_ONCE:
            self.dead = []
            return dead
        self.dead = dead[REMOVED_AT_ONCE:]
        return dead[:REMOVED_AT_ONCE]

    def _forget_one(self, index: int) -> None:
        first_key = self._first_keys[index]
        self._live[first_key] -= 1
        if not self._live[first_key]:
            del self._live[first_key], self._blocks[first_key], self._first_keys[index]

    def _release_old(self, body_id: int) -> bool:
        """Release a reference to a loaded body; return whether it is counted."""
        index = bisect_left(self._old_ids, body_id)
        if index >= len(self._old_ids) or self._old_ids[index] != body_id:
            return False
        left = self._old_counts[index]
        assert left, "a body has more references than rows"
        self._old_counts[index] = left - 1
        if left == 1:
            self.large_dead.append(body_id)
        return True


def _unpacked(packed: bytes) -> Iterable[int]:
    ids = array("q", packed)
    if sys.byteorder == "little":
        ids.byteswap()
    return ids
