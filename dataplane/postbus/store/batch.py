"""What one commit holds: outcomes in order, and which rows they touch.

Sub-statements of one SQL statement share a snapshot, so a batch never deletes or moves a row that
it makes itself; `Batch.admits` keeps that. `SideRows` knows which rows need more than a delete of
the wide row. Pure memory; the journal forms batches, the writer turns them into SQL.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Generic, TypeVar

from postbus.entity.commands import Refusal, SubQueue
from postbus.entity.outcomes import (
    DropDefinition,
    InsertMessage,
    MoveMessage,
    Outcome,
    PatchMessage,
    PutDefinition,
    PutDue,
    RecordSize,
    ReserveBlock,
)

P = TypeVar("P")

INLINE_BODY_BYTES = 8_192
"""Greater bodies lie in `body`: the wide row stays within one page (D4)."""
STAGED_BODY_BYTES = 1 << 20
"""Greater bodies are written before their commit, in chunks of this size (D4)."""


class SideRows:
    """Which rows may have rows in `patch`, `kept`, `due` or `body`; may say yes too often.

    Everything in a block of another sub-queue than ACTIVE counts: those are ranges, not a set as
    large as the backlog. `keys` holds the rest.
    """

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self._starts: array[int] = array("q")
        self._has_sides: list[bool] = []

    def add_block(self, block: ReserveBlock) -> None:
        """Take note of a block; blocks come in order of their first key."""
        self._starts.append(block.first_key)
        self._has_sides.append(block.sub_queue is not SubQueue.ACTIVE)

    def touch(self, row_keys: list[int]) -> bool:
        """Return whether one of the rows may have side rows."""
        if self.keys and not self.keys.isdisjoint(row_keys):
            return True
        first = max(bisect_right(self._starts, min(row_keys)) - 1, 0)
        last = bisect_right(self._starts, max(row_keys))
        if True not in self._has_sides[first:last]:
            return False
        starts, has_sides = self._starts, self._has_sides
        return any(has_sides[max(bisect_right(starts, key) - 1, 0)] for key in row_keys)

    def forget(self, row_keys: Iterable[int]) -> None:
        if self.keys:
            self.keys.difference_update(row_keys)


class Batch(Generic[P]):
    """Outcomes of one commit. `is_exclusive`: no other commit may be in flight (D20)."""

    __slots__ = (
        "byte_count",
        "created",
        "deletes",
        "entities",
        "entries",
        "error",
        "inserts",
        "is_done",
        "is_exclusive",
        "is_fold",
        "is_large",
        "is_sent",
        "mutations",
        "refusal",
        "row_count",
        "started",
    )

    def __init__(self) -> None:
        self.entries: list[tuple[Outcome, P]] = []
        self.inserts: list[InsertMessage] = []
        self.deletes: list[int] = []
        self.mutations: list[object] = []
        self.row_count = 0
        self.byte_count = 0
        self.is_exclusive = False
        self.is_large = False
        self.is_sent = False
        self.is_done = False
        self.is_fold = False
        self.started = 0.0
        self.error: Exception | None = None
        self.refusal: Refusal | None = None
        self.created: set[int] | None = None
        self.entities: set[int] = set()

    @classmethod
    def of_fold(cls) -> Batch[P]:
        """Return the commit that folds old acquisitions; it holds no outcome."""
        batch = cls()
        batch.is_fold = batch.is_exclusive = True
        return batch

    def admits(self, outcome: Outcome) -> bool:
        """Return whether the outcome may join without touching what the batch itself makes."""
        if not self.entries:
            return True
        if self.created is None:
            if not (outcome.mutations or outcome.touches_uncommitted):
                return True
            self.created = self._all_created()
        created = self.created
        if not created.isdisjoint(outcome.deletes):
            return False
        for change in outcome.mutations:
            if isinstance(change, MoveMessage):
                if change.row_key in created:
                    return False
            elif (
                isinstance(change, PutDefinition | DropDefinition | RecordSize)
                and change.entity_no in self.entities
            ):
                return False
        return True

    def add(self, outcome: Outcome, parked: P, row_count: int, byte_count: int) -> None:
        """Append an admitted outcome."""
        self.entries.append((outcome, parked))
        self.row_count += row_count
        self.byte_count += byte_count
        inserts, deletes = outcome.inserts, outcome.deletes
        if inserts and deletes:
            inserts, deletes = _without_passing(inserts, deletes)
        self.inserts += inserts
        self.deletes += deletes
        if self.created is not None:
            self.created.update(insert.row_key for insert in inserts)
            self.created.update(_created_by(outcome.mutations))
        if outcome.mutations or outcome.touches_uncommitted:
            self.is_exclusive = True
            self.mutations += outcome.mutations
            for change in outcome.mutations:
                if isinstance(change, PutDefinition | DropDefinition | RecordSize):
                    self.entities.add(change.entity_no)
            if self.created is None:
                self.created = self._all_created()

    def _all_created(self) -> set[int]:
        created = {insert.row_key for insert in self.inserts}
        created.update(_created_by(self.mutations))
        return created


def _created_by(mutations: Iterable[object]) -> Iterable[int]:
    """Yield the keys of which a mutation writes some row."""
    for change in mutations:
        if isinstance(change, PatchMessage | PutDue):
            yield change.row_key
        elif isinstance(change, MoveMessage):
            yield change.new_row_key


def _without_passing(
    inserts: list[InsertMessage], deletes: list[int]
) -> tuple[list[InsertMessage], list[int]]:
    """Drop rows that come and go in one outcome: sent straight into a receive-and-delete."""
    gone = {insert.row_key for insert in inserts}.intersection(deletes)
    if not gone:
        return inserts, deletes
    return (
        [insert for insert in inserts if insert.row_key not in gone],
        [key for key in deletes if key not in gone],
    )


def index_range(keys: array[int], first_key: int, end_key: int) -> tuple[int, int]:
    """Return the slice of sorted keys that lies in [first_key, end_key)."""
    return bisect_left(keys, first_key), bisect_left(keys, end_key)
