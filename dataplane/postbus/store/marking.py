"""Marks of parts of blocks in which everything is settled, so that a load skips them (ADR 44).

A part is marked when no row in it is live, no row can be added to it, and no live row refers to a
body with an id in it. None of these ends: settled rows stay settled, a key is used once, and a
reference is copied from live rows only. So the checks need not share a transaction with the mark.
Works outside the journal, in short transactions with the partition's fence. Called by
`retention.py`.
"""

from __future__ import annotations

import sys
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from postbus.entity.outcomes import LoadedPartition, ReserveBlock
from postbus.store.errors import Connection
from postbus.store.fenced import fenced
from postbus.store.parts import (
    GRANULE_BITS,
    all_parts,
    keys_of_part,
    numbers_in,
    part_range,
    parts_between,
)
from postbus.store.postgres import Store

AGAIN_S: Final = 600.0
"""Pause before a part is checked again that only bodies keep from its mark: what releases them is
elsewhere. Our choice."""
GROUP_PARTS: Final = 256
"""Maximum number of parts that one statement checks."""
FORGOTTEN_BLOCKS: Final = 200
"""Maximum number of blocks that one statement examines."""
SHARED_ROWS: Final = 64
SHARED_BYTES: Final = 128 << 10
"""Shared bodies of a page, and bytes of their references, eight each; one body may have more."""


class SettledParts:
    """The blocks of one partition, their marks, and what to check next."""

    def __init__(self, store: Store, partition_id: int, epoch: int) -> None:
        self._store = store
        self._partition_id = partition_id
        self._epoch = epoch
        self._limits = store.upkeep_limits
        self._starts: array[int] = array("q")
        self._sizes: array[int] = array("i")
        self._marks: array[int] = array("Q")
        self._newest: dict[tuple[int, int], int] = {}  # entity and sub-queue -> index
        self._open: set[int] = set()
        self._entities: set[int] = set()
        self._touched: set[int] = set()
        self._closed: list[int] = []
        self._work: dict[int, int] = {}  # index of a block -> its parts to check
        self._delayed: dict[int, int] = {}
        self._again_at = time.monotonic() + AGAIN_S

    async def load(
        self, loaded: LoadedPartition, entities: Iterable[int], connection: Connection
    ) -> None:
        """Take over the blocks of former lives, which get no more rows.

        `entities`: those with settled rows; all their parts without live rows are checked.
        """
        self._entities = set(entities)
        marks = {row["first_key"]: row["settled_parts"] for row in await connection.fetch(MARKS)}
        for index, block in enumerate(loaded.blocks):
            settled = marks.get(block.first_key, 0)
            self._append(block, settled)
            if block.entity_no in self._entities:
                keys = loaded.keys.get((block.entity_no, block.sub_queue))
                wanted = all_parts(block.size) & ~settled
                if keys and wanted:
                    wanted &= ~_parts_with(keys, block)
                self._work[index] = wanted

    def add_block(self, block: ReserveBlock) -> None:
        """Add a block whose commit is durable.

        It was alone in flight (ADR 32): all rows of the block before it are durable, too.
        """
        before = self._newest.get((block.entity_no, block.sub_queue))
        self._open.add(self._append(block, 0))
        if before is not None and before in self._open:
            self._open.discard(before)
            if block.entity_no in self._entities:
                self._closed.append(before)

    def _append(self, block: ReserveBlock, settled: int) -> int:
        index = len(self._starts)
        self._starts.append(block.first_key)
        self._sizes.append(block.size)
        self._marks.append(settled)
        self._newest[block.entity_no, block.sub_queue] = index
        return index

    def touch(self, entity_no: int, row_keys: Iterable[int]) -> None:
        """Check the parts of these rows: they were settled."""
        self._entities.add(entity_no)
        self._touched.update({key >> GRANULE_BITS for key in row_keys})

    def touch_reaped(self, granules: Iterable[int]) -> None:
        """Look at the blocks of rows that were deleted, keys without their lower bits."""
        self._touched.update(granules)

    async def look(self) -> bool:
        """Mark parts in which everything is settled, and forget blocks that are empty, too.

        Returns whether it stopped at its time limit. Raises StoreUnavailable, Fenced.
        """
        until = time.monotonic() + self._limits.look_s
        self._sort_work()
        while self._work:
            if time.monotonic() > until:
                return True
            group = self._next_group()
            if group:
                await self._mark(group, await self._checked(group))
            done = []
            for index in {index for index, _ in group} or list(
                islice(self._work, FORGOTTEN_BLOCKS)
            ):
                if not self._wanted(index):
                    del self._work[index]
                    done.append(index)
            await self._forget(done)
        return False

    def _sort_work(self) -> None:
        """Turn what was noted since the last look into blocks and parts."""
        for granule in sorted(self._touched):
            low, high = granule << GRANULE_BITS, (granule + 1) << GRANULE_BITS
            index = max(bisect_right(self._starts, low) - 1, 0)
            while index < len(self._starts) and self._starts[index] < high:
                parts = parts_between(self._starts[index], self._sizes[index], low, high)
                if parts:
                    self._work[index] = self._work.get(index, 0) | parts
                index += 1
        self._touched.clear()
        for index in self._closed:
            self._work[index] = all_parts(self._sizes[index])
        self._closed.clear()
        if time.monotonic() > self._again_at:
            self._again_at = time.monotonic() + AGAIN_S
            for index, parts in self._delayed.items():
                self._work[index] = self._work.get(index, 0) | parts
            self._delayed.clear()

    def _wanted(self, index: int) -> int:
        """Return the parts of a block to check; the marked ones need none."""
        wanted = self._work[index] & ~self._marks[index]
        self._work[index] = wanted
        return wanted

    def _next_group(self) -> list[tuple[int, int]]:
        """Return parts to check in one statement, as (index of the block, number)."""
        group: list[tuple[int, int]] = []
        key_count = 0
        for index in islice(self._work, FORGOTTEN_BLOCKS):
            for number in numbers_in(self._wanted(index)):
                key_count += keys_of_part(self._sizes[index])
                if group and (key_count > self._limits.look_keys or len(group) >= GROUP_PARTS):
                    return group
                group.append((index, number))
        return group

    async def _checked(self, group: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those of the parts in which everything is settled."""
        is_open = [index in self._open for index, _ in group]  # before the snapshot
        ranges = [
            part_range(self._starts[index], self._sizes[index], number) for index, number in group
        ]
        firsts, ends = [first for first, _ in ranges], [end for _, end in ranges]
        async with fenced(self._store, self._partition_id, self._epoch) as connection:
            await connection.execute(BY_INDEX)
            rows = await connection.fetch(CHECK, firsts, ends, is_open)
        found = []
        for row in rows:
            index, number = group[row["number"] - 1]
            if not row["is_settled"]:
                continue
            first, end = ranges[row["number"] - 1]
            if row["is_carried"] or (row["is_shared"] and await self._is_shared(first, end)):
                self._delayed[index] = self._delayed.get(index, 0) | 1 << number
            else:
                found.append((index, number))
        return found

    async def _is_shared(self, first_key: int, end_key: int) -> bool:
        """Return whether a live row refers to a shared body with an id in a range."""
        after = first_key - 1
        while True:
            async with fenced(self._store, self._partition_id, self._epoch) as connection:
                await connection.execute(BY_INDEX)
                rows = await connection.fetch(REFERENCES, after, end_key, SHARED_ROWS, SHARED_BYTES)
                if not rows:
                    return False
                keys = unpacked_keys(row["row_keys"] for row in rows)
                if await connection.fetchval(ANY_LIVE, keys):
                    return True
            after = rows[-1]["body_id"]

    async def _mark(self, group: list[tuple[int, int]], found: list[tuple[int, int]]) -> None:
        """Mark parts; then take the group from the work."""
        marks: dict[int, int] = {}
        for index, number in found:
            marks[index] = marks.get(index, 0) | 1 << number
        if marks:
            first_keys = [self._starts[index] for index in marks]
            async with fenced(self._store, self._partition_id, self._epoch) as connection:
                await connection.execute(MARK, first_keys, list(marks.values()))
        for index, parts in marks.items():
            self._marks[index] |= parts
        for index, number in group:
            self._work[index] &= ~(1 << number)

    async def _forget(self, indexes: Sequence[int]) -> None:
        """Delete blocks that are marked as a whole, have no row and bound no number."""
        bounds = {*self._newest.values(), len(self._starts) - 1}
        first_keys = [
            self._starts[index]
            for index in indexes
            if index not in bounds and self._marks[index] == all_parts(self._sizes[index])
        ]
        if first_keys:
            async with fenced(self._store, self._partition_id, self._epoch) as connection:
                await connection.execute(BY_INDEX)
                await connection.execute(FORGET, first_keys)


def unpacked_keys(packed: Iterable[bytes]) -> list[int]:
    """Return the keys in values of `shared.row_keys`."""
    keys = array("q", b"".join(packed))
    if sys.byteorder == "big":
        keys.byteswap()
    return keys.tolist()


def _parts_with(keys: array[int], block: ReserveBlock) -> int:
    """Return the parts of a block that have keys in a sorted array."""
    parts = 0
    at = bisect_left(keys, block.first_key)
    width = keys_of_part(block.size)
    while at < len(keys) and keys[at] < block.first_key + block.size:
        number = (keys[at] - block.first_key) // width
        parts |= 1 << number
        at = bisect_left(keys, block.first_key + (number + 1) * width, at)
    return parts


BY_INDEX: Final = "set local enable_seqscan = off; set local enable_bitmapscan = off"
MARKS: Final = "select first_key, settled_parts from block where settled_parts <> 0"
CHECK: Final = """
select p.number, q.is_settled,
       q.is_settled and exists (
           select from embodied e
           where e.body_id >= p.first_key and e.body_id < p.end_key
             and (select s.row_key from settled s where s.row_key = e.row_key) is null
       ) as is_carried,
       q.is_settled and exists (
           select from shared b where b.body_id >= p.first_key and b.body_id < p.end_key
       ) as is_shared
from unnest($1::bigint[], $2::bigint[], $3::boolean[])
     with ordinality as p (first_key, end_key, is_open, number)
cross join lateral (
    select case
        when p.is_open then
            s.key_count = p.end_key - p.first_key and (
                select count(*) from message m
                where m.row_key >= p.first_key and m.row_key < p.end_key
            ) = p.end_key - p.first_key
        when s.key_count = p.end_key - p.first_key then true
        else not exists (
            select row_key from message m
            where m.row_key >= p.first_key and m.row_key < p.end_key
            except
            select row_key from settled d
            where d.row_key >= p.first_key and d.row_key < p.end_key
        )
    end as is_settled
    from (
        select count(*) as key_count from settled s
        where s.row_key >= p.first_key and s.row_key < p.end_key
    ) as s
    offset 0
) as q
"""
"""A key is used once: a part whose keys are all settled gets no row that is live. In a block that
still gets rows, those must be there, too, since they bring bodies. `except` reads each range once,
whatever the statistics say; a subquery for one value is never turned into a scan of the table."""
REFERENCES: Final = """
select body_id, row_keys
from (
    select body_id, row_keys,
           sum(octet_length(row_keys)) over (order by body_id) - octet_length(row_keys)
               as bytes_before
    from (
        select body_id, row_keys from shared
        where body_id > $1 and body_id < $2 order by body_id limit $3
    ) as page
) as placed
where bytes_before < $4
order by body_id
"""
ANY_LIVE: Final = """
select exists (
    select from unnest($1::bigint[]) as k (row_key)
    where (select s.row_key from settled s where s.row_key = k.row_key) is null
      and (select m.row_key from message m where m.row_key = k.row_key) is not null
)
"""
MARK: Final = """
update block b set settled_parts = b.settled_parts | m.parts
from unnest($1::bigint[], $2::bigint[]) as m (first_key, parts)
where b.first_key = m.first_key
"""
FORGET: Final = """
delete from block b
where b.first_key = any ($1::bigint[])
  and (
      select m.row_key from message m
      where m.row_key >= b.first_key and m.row_key < b.first_key + b.size
      order by m.row_key limit 1
  ) is null
  and (
      select s.row_key from settled s
      where s.row_key >= b.first_key and s.row_key < b.first_key + b.size
      order by s.row_key limit 1
  ) is null
"""
