"""Retention of settled messages (ADR 18), also for reader groups (ADR 42).

A settled row stays in `message`; `settled` records that it is not live, the reason and the time.
The load finds the entities with such rows, so that others cost nothing. Rows are deleted in chunks
outside the journal, so that no commit waits for them: when their retention has ended, and every tap
of their sub-queue has read them, or has released them (`pinned.py`). The same statement raises
`low_mark`, from which a reader knows that rows are missing. Blocks in which everything is settled
are marked (`marking.py`), so that a load skips them. Called by `upkeep.py`.
"""

from __future__ import annotations

import time
from typing import Final

import asyncpg

from postbus.contract.entities import EntityProperties
from postbus.entity.group_commands import GroupKind
from postbus.entity.outcomes import (
    DropCursor,
    DropDefinition,
    LoadedPartition,
    Mutation,
    PutCursor,
    PutDefinition,
    ReserveBlock,
    SettleRows,
)
from postbus.store.errors import Connection
from postbus.store.fenced import fenced
from postbus.store.marking import SettledParts, unpacked_keys
from postbus.store.parts import GRANULE_BITS, MAX_KEY
from postbus.store.pinned import BY_INDEX, PinLimits, Pinned
from postbus.store.postgres import Store
from postbus.store.shared import BodyCounts
from postbus.store.taps import ALL_KEYS, Pins, Place, Taps

LATE_MS: Final = 60_000
"""A row may become visible later than rows settled after it: a commit takes at most seconds. Our
choice."""


class SettledRows:
    """The settled rows of one partition: their entities and retention."""

    def __init__(self, store: Store, partition_id: int, epoch: int, bodies: BodyCounts) -> None:
        self._store = store
        self._partition_id = partition_id
        self._epoch = epoch
        self._bodies = bodies
        self._limits = store.upkeep_limits
        self._retentions: dict[int, int] = {}
        self._taps = Taps()
        self._pins = PinLimits(store, partition_id, epoch, self._taps, self._before_ms)
        self._entities: set[int] = set()
        self._parts = SettledParts(store, partition_id, epoch)
        self._floors: dict[int, int] = {}
        self._noted: dict[int, int] = {}
        self._uncounted: list[int] = []

    async def load(self, loaded: LoadedPartition, connection: Connection) -> int:
        """Find the entities with settled rows; return their approximate number."""
        for entity in loaded.entities:
            self._define(entity.entity_no, entity.properties)
        for put in loaded.cursors:
            self._taps.put(put)
        self._entities = {row["entity_no"] for row in await connection.fetch(ENTITIES)}
        await self._parts.load(loaded, self._entities, connection)
        return await connection.fetchval(ABOUT_ROWS) if self._entities else 0

    def note(self, change: Mutation) -> None:
        """Record a durable mutation."""
        if type(change) is SettleRows:
            entity_no, settled_ms = change.entity_no, change.settled_ms
            self._entities.add(entity_no)
            if settled_ms < self._noted.get(entity_no, MAX_KEY):
                self._noted[entity_no] = settled_ms
            if settled_ms < self._floors.get(entity_no, 0):
                self._floors[entity_no] = settled_ms
            self._taps.note_settled(entity_no, change.row_keys)
            self._parts.touch(entity_no, change.row_keys)
        elif type(change) is ReserveBlock:
            self._parts.add_block(change)
        elif type(change) is PutCursor:
            self._taps.put(change)
        elif type(change) is DropCursor:
            self._taps.drop(change)
            self._floors.pop(change.entity_no, None)  # below it are rows that the tap kept
        elif type(change) is PutDefinition:
            self._define(change.entity_no, change.properties)
        elif type(change) is DropDefinition:
            self._retentions.pop(change.entity_no, None)
            self._taps.forget(change.entity_no)

    def _define(self, entity_no: int, properties: EntityProperties) -> None:
        retention_ms = getattr(properties, "history_retention_ms", None)
        if retention_ms is None:
            if self._retentions.pop(entity_no, None) is not None:
                self._taps.look_again(entity_no)
        else:
            self._retentions[entity_no] = retention_ms

    def pinned(self, place: Place) -> Pinned | None:
        """Return the last estimate of what a tap keeps, None before the first."""
        tap = self._taps.find(place)
        return None if tap is None else tap.pinned

    async def look_at_taps(self, now_ms: int) -> bool:
        """Estimate what taps keep, and release what is beyond their limits.

        Returns whether more is to be done. Raises StoreUnavailable, Fenced.
        """
        return await self._pins.look(now_ms)

    async def reap(self, now_ms: int) -> tuple[int, bool]:
        """Delete expired settled rows, and all settled rows of entities without a history.

        Returns the number of rows and whether some are left: it stops after `reap_s`. Raises
        StoreUnavailable, Fenced.
        """
        reaped = 0
        until = time.monotonic() + self._limits.reap_s
        for entity_no in list(self._entities):
            if time.monotonic() > until:
                return reaped, True
            if (pins := self._taps.of(entity_no)) is not None:
                count, is_left = await self._reap_tapped(entity_no, pins, now_ms, until)
            else:
                count, is_left = await self._reap_all(entity_no, now_ms, until)
            reaped += count
            if is_left:
                return reaped, True
        return reaped, False

    async def _reap_all(self, entity_no: int, now_ms: int, until: float) -> tuple[int, bool]:
        """Delete the expired rows of an entity without taps.

        Each search begins where the last one ended: the index has deleted rows until the next
        VACUUM.
        """
        reaped = 0
        is_left = is_full = True
        has_later = False
        had_history = entity_no in self._retentions
        self._entities.discard(entity_no)  # rows settled from now on add it again
        try:
            while is_full:
                if time.monotonic() > until or self._taps.of(entity_no) is not None:
                    return reaped, True  # what a new tap needs stays
                self._noted.pop(entity_no, None)
                row = await self._reap_chunk(
                    REAP, entity_no, now_ms, self._floors.get(entity_no, 0)
                )
                if row["count"]:
                    # Rows whose commit was not visible yet may be older.
                    noted_ms = self._noted.get(entity_no, MAX_KEY)
                    self._floors[entity_no] = min(row["last_ms"], noted_ms)
                count, has_later = int(row["count"]), bool(row["has_later"])
                reaped += count
                is_full = count == self._limits.reap_rows
            is_left = had_history or entity_no in self._retentions or has_later
        finally:
            if is_left:
                self._entities.add(entity_no)
        return reaped, False

    async def _reap_tapped(
        self, entity_no: int, pins: Pins, now_ms: int, until: float
    ) -> tuple[int, bool]:
        """Delete rows that every tap has read: those below cursors that rose, then those whose
        retention ended.
        """
        reaped = 0
        first_key, pins.first_key = pins.first_key, ALL_KEYS
        bounds = pins.bounds()
        is_done = False
        try:
            for start, end in await self._ranges(entity_no, bounds, first_key):
                count = self._limits.reap_rows
                while count == self._limits.reap_rows:
                    if time.monotonic() > until or self._has_lower(entity_no, pins, bounds):
                        return reaped, True
                    row = await self._reap_chunk(REAP_RANGE, entity_no, now_ms, start, end)
                    count = int(row["count"])
                    reaped += count
                first_key = end
            is_done = True
        finally:
            if not is_done:
                pins.first_key = min(first_key, pins.first_key)
        if entity_no in self._retentions:
            count = self._limits.reap_rows
            while count == self._limits.reap_rows:
                if time.monotonic() > until or self._has_lower(entity_no, pins, bounds):
                    return reaped, True
                row = await self._reap_chunk(
                    REAP_TAPPED, entity_no, now_ms, pins.scanned_ms, pins.bounds()
                )
                count = int(row["count"])
                reaped += count
            pins.scanned_ms = self._before_ms(entity_no, now_ms) - LATE_MS
        return reaped, False

    def _has_lower(self, entity_no: int, pins: Pins, bounds: list[int]) -> bool:
        """Return whether a group was created or set back: what it needs stays."""
        if self._taps.of(entity_no) is not pins:
            return True
        return any(now < then for now, then in zip(pins.bounds(), bounds, strict=True))

    async def _ranges(
        self, entity_no: int, bounds: list[int], first_key: int
    ) -> list[tuple[int, int]]:
        """Return the ranges of keys from `first_key` to the cursors that have settled rows."""
        if first_key >= max(bounds):
            return []
        async with fenced(self._store, self._partition_id, self._epoch) as connection:
            await connection.execute(BY_INDEX)
            rows = await connection.fetch(BLOCKS_TO_REAP, entity_no, first_key, bounds)
        return [(row["first_key"], row["end_key"]) for row in rows]

    def _before_ms(self, entity_no: int, now_ms: int) -> int:
        """Return the time before which settled rows have expired.

        Without a history it is after this millisecond only: a history may begin meanwhile.
        """
        retention_ms = self._retentions.get(entity_no)
        return now_ms + 1 if retention_ms is None else now_ms - retention_ms

    async def _reap_chunk(
        self, sql: str, entity_no: int, now_ms: int, *bounds: object
    ) -> asyncpg.Record:
        """Delete a chunk; return its size, its last time, and whether later rows stay."""
        async with fenced(self._store, self._partition_id, self._epoch) as connection:
            await connection.execute(BY_INDEX)
            before_ms = self._before_ms(entity_no, now_ms)  # the definition may have changed
            row = await connection.fetchrow(
                sql, entity_no, before_ms, self._limits.reap_rows, *bounds
            )
        assert row is not None
        if row["count"]:
            self._parts.touch_reaped(row["granules"])
        if row["shared_ids"] is not None:
            self._uncounted += self._bodies.release(row["shared_ids"])
        if row["own_ids"] is not None:
            self._bodies.orphan(row["own_ids"])
        return row

    async def look(self) -> bool:
        """Mark what the load may skip, and find bodies that lost their last row.

        Returns whether more is to be done. Raises StoreUnavailable, Fenced.
        """
        while self._uncounted:
            body_ids = self._uncounted[:UNCOUNTED_BODIES]
            async with fenced(self._store, self._partition_id, self._epoch) as connection:
                await connection.execute(BY_INDEX)
                self._bodies.bury(await _unreferenced(connection, set(body_ids)))
            del self._uncounted[: len(body_ids)]
        return await self._parts.look()


async def _unreferenced(connection: Connection, body_ids: set[int]) -> set[int]:
    """Return those of the shared bodies that no row refers to."""
    left = body_ids - {row["body_id"] for row in await connection.fetch(CARRIED, list(body_ids))}
    keys: list[int] = []
    owners: dict[int, int] = {}
    for row in await connection.fetch(REFERENCES, list(left)):
        for key in unpacked_keys([row["row_keys"]]):
            owners[key] = row["body_id"]
            keys.append(key)
    for start in range(0, len(keys), STORED_KEYS):
        page = [key for key in keys[start : start + STORED_KEYS] if owners[key] in left]
        for row in await connection.fetch(STORED, page):
            left.discard(owners[row["row_key"]])
    return left


UNCOUNTED_BODIES: Final = 100
STORED_KEYS: Final = 2_000
CARRIED: Final = "select distinct body_id from embodied where body_id = any ($1::bigint[])"
REFERENCES: Final = "select body_id, row_keys from shared where body_id = any ($1::bigint[])"
STORED: Final = "select row_key from message where row_key = any ($1::bigint[])"
ENTITIES: Final = """
with recursive found as (
    (select entity_no from settled order by entity_no desc, settled_ms desc limit 1)
    union all
    select (
        select s.entity_no from settled s
        where s.entity_no < found.entity_no
        order by s.entity_no desc, s.settled_ms desc limit 1
    )
    from found where found.entity_no is not null
)
select entity_no from found where entity_no is not null
"""
"""Backwards: the oldest entries of the index may be of deleted rows."""
ABOUT_ROWS: Final = """
select greatest(reltuples, 0)::bigint from pg_class where oid = 'settled'::regclass
"""
_REAP: Final = """
with old as materialized (
    select s.row_key, s.settled_ms, b.sub_queue
    from settled s
    left join lateral (
        select sub_queue from block where first_key <= s.row_key order by first_key desc limit 1
    ) b on true
    where s.entity_no = $1 and s.settled_ms < $2 {more}
    order by {order}
    limit $3
), marked as (
    insert into low_mark as l (entity_no, sub_queue, low)
    select $1, sub_queue, max(row_key) + 1 from old
    where sub_queue is not null and exists (select from entity where entity_no = $1)
    group by sub_queue
    on conflict (entity_no, sub_queue) do update set low = greatest(l.low, excluded.low)
), rebased as (
    update reader_group g set base = 0
    from (select sub_queue, max(row_key) as last_key from old group by sub_queue) as deleted
    where g.entity_no = $1 and g.sub_queue = deleted.sub_queue and g.settled <= deleted.last_key
      and g.base > 0 and g.kind = {tap}
), unsettled as (
    delete from settled where row_key = any (array(select row_key from old))
), gone as (
    delete from message where row_key = any (array(select row_key from old))
    returning body_id
), unpatched as (
    delete from patch where row_key = any (array(select row_key from old))
), unkept as (
    delete from kept where row_key = any (array(select row_key from old))
), uncarried as (
    delete from embodied where row_key = any (array(select row_key from old))
), bodies as materialized (
    select body_id, exists (
        select from shared s where s.body_id = gone.body_id
    ) as is_shared
    from gone where body_id is not null
)
select (select count(*) from old) as count, {has_later} as has_later,
       (select max(settled_ms) from old) as last_ms,
       array(select row_key >> {granule_bits} from old) as granules,
       (select string_agg(int8send(body_id), ''::bytea) from bodies where is_shared) as shared_ids,
       (select string_agg(int8send(body_id), ''::bytea) from bodies where not is_shared) as own_ids
"""
REAP: Final = _REAP.format(
    more="and s.settled_ms >= $4",
    order="s.settled_ms",
    has_later="exists (select from settled where entity_no = $1 and settled_ms >= $2)",
    granule_bits=GRANULE_BITS,
    tap=int(GroupKind.TAP),
)
REAP_RANGE: Final = _REAP.format(
    more="and s.row_key >= $4 and s.row_key < $5",
    order="s.row_key",
    has_later="true",
    granule_bits=GRANULE_BITS,
    tap=int(GroupKind.TAP),
)
REAP_TAPPED: Final = _REAP.format(
    more="and s.settled_ms >= $4 and s.row_key < ($5::bigint[])[b.sub_queue + 1]",
    order="s.settled_ms",
    has_later="true",
    granule_bits=GRANULE_BITS,
    tap=int(GroupKind.TAP),
)
"""The cursors by sub-queue, whose number begins at 0; arrays begin at 1."""
BLOCKS_TO_REAP: Final = """
select greatest(first_key, $2) as first_key,
       least(first_key + size, ($3::bigint[])[sub_queue + 1]) as end_key
from block b
where entity_no = $1 and first_key + size > $2 and first_key < ($3::bigint[])[sub_queue + 1]
  and exists (
      select from settled s
      where s.row_key >= greatest(b.first_key, $2) and s.row_key < b.first_key + b.size
        and s.row_key < ($3::bigint[])[b.sub_queue + 1]
  )
order by first_key
"""
