"""Estimates of what the taps of a partition keep from deletion, and their limits (ADR 42).

Every look reads a limited number of rows for each tap, spread over the keys from its cursor on, and
concludes from them how many there are and what they take: a group of few rows is counted exactly.
Beyond a limit a group that drops releases its oldest rows, by position: `retention.py`, which calls
this, then deletes them and raises `low_mark`, so that the group's reader is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import asyncpg

from postbus.entity.group_commands import Limits
from postbus.store.batch import STAGED_BODY_BYTES
from postbus.store.errors import Connection
from postbus.store.fenced import fenced
from postbus.store.postgres import Store
from postbus.store.taps import Place, Tap, Taps

SAMPLE_KEYS: Final = 1_024
"""Keys that a look reads of a tap at most: two milliseconds. Our choice."""
WINDOWS: Final = 64
"""Places over which they are spread, when there are more keys."""
GOLDEN_16_BITS: Final = 40_503
ROW_BYTES: Final = 190
"""Bytes of a kept row beside its message: 90 for its settlement (ADR 18), the rest for the
header of its tuple and its entry in an index."""


class Pinned(NamedTuple):
    """An estimate of what one tap has before it in a partition.

    `unread`: messages at or above its settled position, `oldest_ms` the enqueued time of the first.
    `kept_bytes`: those of them that only groups keep, `settled_ms` the earliest time at which one
    was settled. `has_lost`: rows are deleted that it has not read. `is_over` is at the last look.
    """

    unread: int
    oldest_ms: int | None
    kept_bytes: int
    settled_ms: int | None
    has_lost: bool
    is_over: bool


class Window(NamedTuple):
    """Keys [first, end) that are read; each stands for `weight` keys."""

    first: int
    end: int
    weight: float


class Row(NamedTuple):
    """A row that was read. `settled_ms` None: it is live, or its history has not ended."""

    row_key: int
    enqueued_ms: int
    settled_ms: int | None
    size_bytes: int
    weight: float


def windows_over(ranges: Sequence[tuple[int, int]]) -> list[Window]:
    """Return what to read of ranges of keys: all of it, or a window in each of equal parts.

    The place of a window in its part varies by the golden section: messages often come in rounds.
    """
    total = sum(end - first for first, end in ranges)
    if total <= SAMPLE_KEYS:
        return [Window(first, end, 1.0) for first, end in ranges]
    found: list[Window] = []
    passed, spare = 0, total // WINDOWS - SAMPLE_KEYS // WINDOWS
    for first, end in ranges:
        size = end - first
        while len(found) < WINDOWS:
            number = len(found)
            at = total * number // WINDOWS - passed
            at += (number * GOLDEN_16_BITS % (1 << 16)) * spare >> 16
            if at >= size:
                break
            width = min(SAMPLE_KEYS // WINDOWS, size - at)
            found.append(Window(first + at, first + at + width, total / WINDOWS / width))
        passed += size
    return found


def pinned_of(rows: Sequence[Row], limits: Limits, now_ms: int, *, has_lost: bool) -> Pinned:
    """Return the estimate from rows in order of their keys."""
    kept = [row for row in rows if row.settled_ms is not None]
    kept_bytes = round(sum(row.size_bytes * row.weight for row in kept))
    settled_ms = min((row.settled_ms for row in kept if row.settled_ms is not None), default=None)
    is_over = limits.share_bytes is not None and kept_bytes > limits.share_bytes
    if limits.max_age_ms is not None and settled_ms is not None:
        is_over = is_over or now_ms - settled_ms > limits.max_age_ms
    return Pinned(
        unread=round(sum(row.weight for row in rows)),
        oldest_ms=rows[0].enqueued_ms if rows else None,
        kept_bytes=kept_bytes,
        settled_ms=settled_ms,
        has_lost=has_lost,
        is_over=is_over or (limits.drops and has_lost),
    )


def joined(parts: Sequence[Pinned]) -> Pinned:
    """Return the sum over partitions of one group, or over several groups."""
    times_ms = [each.oldest_ms for each in parts if each.oldest_ms is not None]
    settled_ms = [each.settled_ms for each in parts if each.settled_ms is not None]
    return Pinned(
        unread=sum(each.unread for each in parts),
        oldest_ms=min(times_ms, default=None),
        kept_bytes=sum(each.kept_bytes for each in parts),
        settled_ms=min(settled_ms, default=None),
        has_lost=any(each.has_lost for each in parts),
        is_over=any(each.is_over for each in parts),
    )


def first_kept(rows: Sequence[Row], limits: Limits, now_ms: int) -> int | None:
    """Return the position below which a group that drops keeps nothing, None within its limits.

    By age up to the first row that is young enough, so that none goes before its time.
    """
    kept = [row for row in rows if row.settled_ms is not None]
    beyond = 0
    if limits.share_bytes is not None:
        left = float(limits.share_bytes)
        for count, row in enumerate(reversed(kept)):
            left -= row.size_bytes * row.weight
            if left < 0:
                beyond = len(kept) - count
                break
    if limits.max_age_ms is not None:
        before_ms = now_ms - limits.max_age_ms
        while beyond < len(kept) and (kept[beyond].settled_ms or 0) < before_ms:
            beyond += 1
    if not beyond:
        return None
    return kept[beyond].row_key if beyond < len(kept) else kept[-1].row_key + 1


class PinLimits:
    """Looks at all taps in turn."""

    def __init__(
        self,
        store: Store,
        partition_id: int,
        epoch: int,
        taps: Taps,
        before_ms: Callable[[int, int], int],
    ) -> None:
        """`before_ms(entity_no, now_ms)`: rows settled before it are kept by groups alone."""
        self._store = store
        self._partition_id = partition_id
        self._epoch = epoch
        self._limits = store.upkeep_limits
        self._taps = taps
        self._before_ms = before_ms
        self._waiting: list[Place] = []

    async def look(self, now_ms: int) -> bool:
        """Look at each tap, and release what is beyond its limits.

        Returns whether something was released. If the time does not suffice, the next look begins
        with the rest. Raises StoreUnavailable, Fenced.
        """
        until = time.monotonic() + self._limits.look_s
        has_released = False
        rest = dict.fromkeys(self._waiting)
        self._waiting = [place for place in self._taps.places() if place not in rest] + [*rest]
        while self._waiting:
            place = self._waiting.pop()
            tap = self._taps.find(place)
            if tap is not None:
                has_released |= await self._look_at(place, tap, now_ms)
            if time.monotonic() >= until:
                break
        return has_released

    async def _look_at(self, place: Place, tap: Tap, now_ms: int) -> bool:
        limits, first_key = tap.limits, tap.at
        before_ms = self._before_ms(place[0], now_ms)
        async with fenced(self._store, self._partition_id, self._epoch) as connection:
            await connection.execute(BY_INDEX)
            rows = await _sampled(connection, place, first_key, before_ms)
            has_lost = bool(await connection.fetchval(HAS_LOST, *_columns(place)))
        end_key = first_kept(rows, limits, now_ms) if limits.drops else None
        tap.pinned = pinned_of(rows, limits, now_ms, has_lost=has_lost)
        has_moved = self._taps.find(place) is not tap or tap.at != first_key
        if end_key is None or has_moved or tap.limits != limits:
            return False
        self._taps.release(place, end_key)
        return True


async def _sampled(
    connection: Connection, place: Place, first_key: int, before_ms: int
) -> list[Row]:
    """Return rows of a sub-queue from a key on, in order."""
    entity_no, sub_queue, _ = place
    blocks = await connection.fetch(BLOCKS, entity_no, int(sub_queue), first_key)
    ranges = [(int(row["first_key"]), int(row["end_key"])) for row in blocks]
    if ranges:  # most of the last block is not used yet
        first, end = ranges.pop()
        last = await connection.fetchval(LAST_KEY, first, end)
        if last is not None:
            ranges.append((first, int(last) + 1))
    windows = windows_over(ranges)
    rows = await connection.fetch(
        SAMPLE, [each.first for each in windows], [each.end for each in windows], before_ms
    )
    return [_row(row, windows[row["window_no"] - 1].weight) for row in rows]


def _row(row: asyncpg.Record, weight: float) -> Row:
    size_bytes = row["size_bytes"] + ROW_BYTES
    return Row(row["row_key"], row["enqueued_ms"], row["settled_ms"], size_bytes, weight)


def _columns(place: Place) -> tuple[int, int, str]:
    entity_no, sub_queue, name = place
    return entity_no, int(sub_queue), name


BY_INDEX: Final = "set local enable_seqscan = off; set local enable_bitmapscan = off"
"""Else the planner, without good statistics of these tables, sorts all old rows per chunk."""
BLOCKS: Final = """
select greatest(first_key, $3) as first_key, first_key + size as end_key from block
where entity_no = $1 and sub_queue = $2::smallint and first_key + size > $3
order by block.first_key
"""
LAST_KEY: Final = "select max(row_key) from message where row_key >= $1 and row_key < $2"
SAMPLE: Final = f"""
select w.window_no, m.row_key, m.enqueued_ms, (
           select s.settled_ms from settled s
           where s.row_key = m.row_key and s.settled_ms < $3
       ) as settled_ms,
       octet_length(m.envelope) + coalesce(octet_length(m.application_properties), 0)
       + case when m.body_id is null then coalesce(octet_length(m.body), 0) else coalesce(
             (
                 select b.chunk * {STAGED_BODY_BYTES} + octet_length(b.data) from body b
                 where b.body_id = m.body_id order by b.chunk desc limit 1
             ), 0
         ) end as size_bytes
from unnest($1::bigint[], $2::bigint[]) with ordinality as w (first_key, end_key, window_no)
cross join lateral (
    select * from message r
    where r.row_key >= w.first_key and r.row_key < w.end_key
    order by r.row_key limit {SAMPLE_KEYS}
) as m
order by m.row_key
"""
"""Lookups, not joins: a plan that merges whole indexes would read all of them."""
HAS_LOST: Final = """
select (
    select case when m.low <= g.base then false else m.low > g.settled end
    from low_mark m where m.entity_no = g.entity_no and m.sub_queue = g.sub_queue
)
from reader_group g where g.entity_no = $1 and g.sub_queue = $2::smallint and g.name = $3
"""
"""The mark of `bulk_reads.LOW` is above the group."""
