"""A batch: the outcomes of one commit in order, and the rows they touch.

Sub-statements of one SQL statement share a snapshot, so a batch never deletes or moves a row that
it inserts itself; `Batch.admits` ensures that. `SideRows` knows which rows need more than a delete
of the wide row. Pure memory; the journal forms batches, the writer turns them into SQL.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, Generic, TypeVar, assert_never

from postbus.entity.commands import Refusal, SubQueue
from postbus.entity.outcomes import (
    InsertMessage,
    MoveMessage,
    Mutation,
    Outcome,
    PatchMessage,
    PutSessionState,
    RecordAcquired,
    RecordIds,
    ReserveBlock,
    SettleRows,
    ShareBody,
)
from postbus.store.mutation_traits import (
    OVERLAPPING,
    EntityChange,
    FixedSize,
    OfEntity,
    OwnRows,
    SideRow,
)
from postbus.store.shared import BodyCounts

P = TypeVar("P")

BATCH_ROWS: Final = 400
BATCH_BYTES: Final = 1 << 20
ATTEMPT_BYTES: Final = 12
"""Size of one row's attempt in `acquired`."""
OVERLAP_ROWS: Final = 30
"""Number of waiting rows from which a second commit starts beside the first, `GATHER_ROWS` while
other partitions commit. Source: measured, ADR 32."""
CROWD_COMMITS: Final = 2
GATHER_ROWS: Final = 100
GATHER_ROUNDS: Final = 4
"""A commit of fewer than `GATHER_ROWS` rows starts `GATHER_ROUNDS` iterations of the event loop
later while at least `CROWD_COMMITS` commits of other partitions are in flight; iterations are short
on an idle broker. Source: measured; a hundred queues in 16 partitions, both ways: 60 to 90 rows a
commit instead of 30, and a quarter less CPU for a message."""
INLINE_BODY_BYTES = 8_192
"""Larger bodies are stored in `body`, so that the wide row fits one page (ADR 17)."""
STAGED_BODY_BYTES = 1 << 20
"""Larger bodies are written before their commit, in chunks of this size (ADR 17)."""


class RowKind(IntEnum):
    """Side rows and bodies that a delete of a row has to consider."""

    PLAIN = 0
    SHARING = 1
    SIDED = 2


class SideRows:
    """Rows that may have rows in side tables or share a body; may include rows that have none.

    Recorded for a block as a whole, not for each row: all rows of a sub-queue other than ACTIVE
    count as SIDED. `keys`: the SIDED rows of ACTIVE. `bodies` counts references.
    """

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.bodies = BodyCounts()
        self._starts: array[int] = array("q")
        self._sizes: array[int] = array("i")
        self._kinds = bytearray()
        self._has_bodies = bytearray()

    def add_block(self, block: ReserveBlock) -> None:
        """Record a block; blocks are added in order of their first key."""
        self._starts.append(block.first_key)
        self._sizes.append(block.size)
        is_active = block.sub_queue is SubQueue.ACTIVE
        self._kinds.append(RowKind.PLAIN if is_active else RowKind.SIDED)
        self._has_bodies.append(False)

    def kind_of(self, row_keys: list[int]) -> int:
        """Return the greatest `RowKind` of these rows."""
        if self.keys and not self.keys.isdisjoint(row_keys):
            return RowKind.SIDED
        first = max(bisect_right(self._starts, min(row_keys)) - 1, 0)
        last = bisect_right(self._starts, max(row_keys))
        starts, kinds = self._starts, self._kinds
        if not any(kinds[first:last]):
            return RowKind.PLAIN
        return max(kinds[max(bisect_right(starts, key) - 1, 0)] for key in row_keys)

    def note_share(self, body_id: int, row_keys: Sequence[int], *, is_large: bool) -> None:
        """Record rows that share a new body."""
        self.note_sharing(row_keys)
        index = self._block_of(body_id)
        first_key, size = self._starts[index], self._sizes[index]
        self.bodies.add(body_id, len(row_keys), first_key, size, is_large=is_large)

    def note_sharing(self, row_keys: Iterable[int]) -> None:
        """Record rows that share a body with others."""
        for key in row_keys:
            index = self._block_of(key)
            self._has_bodies[index] = True
            if self._kinds[index] == RowKind.PLAIN:
                self._kinds[index] = RowKind.SHARING

    def note_move(self, row_key: int, new_row_key: int, to_sub_queue: SubQueue) -> None:
        """Record a moved row, which may have a body that moves with it."""
        if row_key in self.keys:
            self.keys.discard(row_key)
        elif not self._has_bodies[self._block_of(row_key)]:
            return
        self.note_carried(new_row_key, to_sub_queue)

    def note_carried(self, row_key: int, sub_queue: SubQueue) -> None:
        """Record a moved row with a body; in ACTIVE such rows are few."""
        if sub_queue is SubQueue.ACTIVE:
            self.keys.add(row_key)
        else:
            self._has_bodies[self._block_of(row_key)] = True

    def forget(self, row_keys: Iterable[int]) -> None:
        if self.keys:
            self.keys.difference_update(row_keys)

    def _block_of(self, row_key: int) -> int:
        return max(bisect_right(self._starts, row_key) - 1, 0)


def is_barrier(outcome: Outcome) -> bool:
    """Return whether the commit of an outcome must be alone in flight (ADR 32)."""
    if outcome.touches_uncommitted:
        return True
    return bool(outcome.mutations) and not OVERLAPPING.issuperset(map(type, outcome.mutations))


def extra_bytes(outcome: Outcome) -> int:
    """Return the bytes of the mutations beyond those of the inserts; a shared body counts once.

    Of a row that moves only the properties that change are known.
    """
    byte_count = 0
    sizes: dict[int, int] = {}
    for change in outcome.mutations:
        if type(change) is PutSessionState:
            byte_count += len(change.state or b"")
        elif type(change) is RecordIds:
            byte_count += len(change.digests)
        elif type(change) is RecordAcquired:
            byte_count += ATTEMPT_BYTES * len(change.row_keys)
        elif type(change) is MoveMessage or type(change) is PatchMessage:
            byte_count += len(change.application_properties or b"")
        elif type(change) is ShareBody:
            if not sizes:
                sizes = {insert[0]: len(insert[2].body) for insert in outcome.inserts}
            byte_count -= sizes.get(change.row_keys[0], 0) * (len(change.row_keys) - 1)
        elif not isinstance(change, FixedSize):
            assert_never(change)
    return byte_count


def extra_rows(outcome: Outcome) -> int:
    """Return the number of rows that its mutations write beyond one each."""
    return sum(
        len(change.row_keys) - 1 for change in outcome.mutations if type(change) is SettleRows
    )


class Batch(Generic[P]):
    """Outcomes of one commit. `is_exclusive`: no other commit may be in flight (ADR 32)."""

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
        self.mutations: list[Mutation] = []
        self.row_count = 0
        self.byte_count = 0
        self.is_exclusive = False
        self.is_large = False  # has a message whose body may be beside its row
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
        """Return the commit that folds acquisitions (`upkeep.py`); it has no outcome."""
        batch = cls()
        batch.is_fold = batch.is_exclusive = True
        return batch

    def admits(self, outcome: Outcome) -> bool:
        """Return whether the outcome can be added: it touches no row that the batch itself
        creates.
        """
        if not self.entries:
            return True
        if self.created is None:
            if not is_barrier(outcome):
                return True
            self.created = self._all_created()
        created = self.created
        if not created.isdisjoint(outcome.deletes):
            return False
        for change in outcome.mutations:
            if isinstance(change, OfEntity):
                if change.entity_no in self.entities:
                    return False
            elif isinstance(change, MoveMessage):
                if change.row_key in created:
                    return False
            elif not isinstance(change, (OwnRows, SideRow)):
                assert_never(change)
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
            self.mutations += outcome.mutations
            if is_barrier(outcome):
                self._add_barrier(outcome)

    def _add_barrier(self, outcome: Outcome) -> None:
        self.is_exclusive = True
        for change in outcome.mutations:
            if isinstance(change, EntityChange):
                self.entities.add(change.entity_no)
        if self.created is None:
            self.created = self._all_created()

    def _all_created(self) -> set[int]:
        created = {insert.row_key for insert in self.inserts}
        created.update(_created_by(self.mutations))
        return created


def _created_by(mutations: Iterable[Mutation]) -> Iterable[int]:
    """Yield the keys whose rows a mutation writes."""
    for change in mutations:
        if isinstance(change, SideRow):
            yield change.row_key
        elif isinstance(change, MoveMessage):
            yield change.new_row_key
        elif not isinstance(change, (OwnRows, OfEntity)):
            assert_never(change)


def _without_passing(
    inserts: list[InsertMessage], deletes: list[int]
) -> tuple[list[InsertMessage], list[int]]:
    """Drop rows that an outcome both inserts and deletes: sent during a receive-and-delete."""
    gone = {insert.row_key for insert in inserts}.intersection(deletes)
    if not gone:
        return inserts, deletes
    return (
        [insert for insert in inserts if insert.row_key not in gone],
        [key for key in deletes if key not in gone],
    )


def index_range(keys: array[int], first_key: int, end_key: int) -> tuple[int, int]:
    """Return the slice of sorted keys in [first_key, end_key)."""
    return bisect_left(keys, first_key), bisect_left(keys, end_key)
