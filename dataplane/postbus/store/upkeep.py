"""Upkeep of a partition's tables: VACUUM (ADR 30), folding of acquisitions (ADR 19).

Autovacuum is off for wide rows, because it comes too late; the broker knows exactly how much was
deleted. VACUUM runs on a separate connection and is harmless, even when run by a former owner;
folding changes what a load reads, so it is a commit of the journal.
"""

from __future__ import annotations

import time
from typing import Final, TypeVar

from postbus.entity.outcomes import (
    DropDefinition,
    ForgetIds,
    LoadedPartition,
    RecordAcquired,
)
from postbus.store.batch import Batch, SideRows
from postbus.store.changes import ALL_TIME_MS
from postbus.store.errors import Connection
from postbus.store.fenced import fenced
from postbus.store.migrate import schema_of
from postbus.store.pinned import Pinned
from postbus.store.postgres import Store
from postbus.store.retention import SettledRows
from postbus.store.statements import SWEEP
from postbus.store.sweep import SWEEP_AT, sweep_some
from postbus.store.taps import Place

P = TypeVar("P")


class Upkeep:
    """Counts writes to one partition and runs upkeep when it is due."""

    def __init__(self, store: Store, partition_id: int, epoch: int, sides: SideRows) -> None:
        self._store = store
        self._partition_id = partition_id
        self._epoch = epoch
        self._sides = sides
        self._limits = store.upkeep_limits
        self._settled = SettledRows(store, partition_id, epoch, sides.bodies)
        self._schema = schema_of(partition_id)
        self._rows = 0
        self._inserts = 0
        self._deletes = 0
        self._side_changes = 0
        self._acquired_rows = 0
        self._aged_at = time.monotonic()
        self._is_freeze_due = False
        self._is_vacuuming = False
        self._is_sweeping = False
        self._has_swept_in_vain = False
        self._dropped: set[int] = set()
        self._forgotten: dict[int, int] = {}

    async def note_load(self, loaded: LoadedPartition, connection: Connection) -> None:
        """Set the counts of a fresh load; earlier writes are unknown."""
        self._rows = sum(map(len, loaded.keys.values()))
        self._rows += await self._settled.load(loaded, connection)
        self._acquired_rows = await connection.fetchval("select count(*) from acquired")

    def note(self, batch: Batch[P]) -> bool:
        """Count a commit; return whether a VACUUM should start now."""
        inserts, deletes = len(batch.inserts), len(batch.deletes)
        self._inserts += inserts
        self._deletes += deletes
        self._rows += inserts - deletes
        if batch.mutations or batch.is_large:
            self._side_changes += len(batch.mutations) + (inserts if batch.is_large else 0)
            if any(type(change) is RecordAcquired for change in batch.mutations):
                self._acquired_rows += 1
            for change in batch.mutations:
                self._settled.note(change)
                if type(change) is DropDefinition:
                    self._dropped.add(change.entity_no)
                elif type(change) is ForgetIds:
                    self._forgotten[change.entity_no] = (
                        ALL_TIME_MS if change.before_ms is None else change.before_ms
                    )
        return self._is_vacuum_due and not self._is_vacuuming

    @property
    def is_fold_due(self) -> bool:
        """Return whether there are enough acquisitions to fold some into `patch`."""
        return self._acquired_rows > self._limits.fold_rows

    @property
    def _is_vacuum_due(self) -> bool:
        threshold = max(self._limits.vacuum_rows, self._rows * self._limits.vacuum_share)
        return self._inserts >= threshold or self._deletes >= threshold or self._is_freeze_due

    async def vacuum_if_due(self) -> None:
        """Run VACUUM on the tables where it is due; raises StoreUnavailable."""
        if self._is_vacuuming:
            return
        self._is_vacuuming = True
        try:
            if self._is_vacuum_due:
                options = FREEZE_OPTIONS if self._is_freeze_due else OPTIONS
                counted = self._inserts, self._deletes
                async with self._store.vacuuming() as connection:
                    for table in MESSAGE_TABLES:
                        await connection.execute(f"vacuum ({options}) {self._schema}.{table}")
                self._inserts -= counted[0]
                self._deletes -= counted[1]
                self._is_freeze_due = False
            if self._side_changes >= self._limits.side_rows:
                changes = self._side_changes
                async with self._store.vacuuming() as connection:
                    for table in SIDE_TABLES:
                        await connection.execute(f"vacuum ({OPTIONS}) {self._schema}.{table}")
                self._side_changes -= changes
        finally:
            self._is_vacuuming = False

    def pinned(self, place: Place) -> Pinned | None:
        """Return the last estimate of what a tap keeps, None before the first."""
        return self._settled.pinned(place)

    async def reap(self, now_ms: int) -> bool:
        """Delete expired settled rows, remains of dropped entities, and unreferenced bodies.

        Commits that drop entities or ids delete only a limited number of rows. Entity numbers are
        never reused, so this is safe. `now_ms` is entity time. Returns whether expired settled rows
        are left, or parts to mark. Raises StoreUnavailable, Fenced.
        """
        has_released = await self._settled.look_at_taps(now_ms)
        reaped, is_left = await self._settled.reap(now_ms)
        is_left |= has_released
        self._deletes += reaped
        self._rows -= reaped
        is_left |= await self._settled.look()
        for entity_no, before_ms in list(self._forgotten.items()):
            await self._delete_all(REAP_SEEN, entity_no, before_ms, self._limits.reap_ids)
            if self._forgotten.get(entity_no) == before_ms:
                del self._forgotten[entity_no]
        while self._dropped:
            entity_no = next(iter(self._dropped))
            await self._delete_all(
                REAP_SESSIONS, entity_no, self._limits.reap_states, self._limits.reap_state_bytes
            )
            await self._delete_all(REAP_SEEN, entity_no, ALL_TIME_MS, self._limits.reap_ids)
            self._dropped.discard(entity_no)
        await self.sweep(least=1)
        return is_left

    async def _delete_all(self, sql: str, *arguments: int) -> None:
        """Delete rows in chunks until there are none."""
        tag = ""
        while tag != "DELETE 0":
            async with fenced(self._store, self._partition_id, self._epoch) as connection:
                tag = await connection.execute(sql, *arguments)

    @property
    def is_sweep_due(self) -> bool:
        """Return whether removal of bodies should start; after a failure regular upkeep retries."""
        is_free = not (self._is_sweeping or self._has_swept_in_vain)
        return is_free and len(self._sides.bodies.large_dead) >= SWEEP_AT

    async def sweep(self, least: int = SWEEP_AT) -> None:
        """Remove bodies that no commit may remove, while there are at least `least`.

        Raises StoreUnavailable, Fenced.
        """
        if self._is_sweeping:
            return
        self._is_sweeping = True
        bodies = self._sides.bodies
        self._has_swept_in_vain = True
        try:
            while len(bodies.large_dead) >= least:
                self._side_changes += await sweep_some(
                    self._store, self._partition_id, self._epoch, bodies
                )
            self._has_swept_in_vain = False
        finally:
            self._is_sweeping = False

    async def look_at_age(self) -> None:
        """Check periodically how close transaction ids are to wraparound."""
        now = time.monotonic()
        if now - self._aged_at < self._limits.age_check_s:
            return
        self._aged_at = now
        async with self._store.reading() as connection:
            age = await connection.fetchval(AGE, f"{self._schema}.message")
        self._is_freeze_due = age > self._limits.freeze_age

    async def tidy(self, connection: Connection) -> None:
        """Fold acquisitions when due, and remove small unreferenced bodies."""
        dead = self._sides.bodies.take_dead()
        if dead:
            await connection.execute(SWEEP, dead)
        if self.is_fold_due:
            await self._fold(connection)

    async def _fold(self, connection: Connection) -> None:
        """Turn the oldest acquisition records into counts in `patch`."""
        rows = await connection.fetch(FOLD, self._limits.fold_rows, self._limits.fold_keys)
        self._acquired_rows -= rows[0]["folded"]
        self._sides.keys.update(row["row_key"] for row in rows if row["row_key"] is not None)


OPTIONS: Final = "truncate off, index_cleanup on, parallel 0"
FREEZE_OPTIONS: Final = f"freeze, {OPTIONS}"
MESSAGE_TABLES: Final = ("message", "settled")
"""Tables that every message changes; without a history the second is empty."""
SIDE_TABLES: Final = (
    "acquired",
    "patch",
    "kept",
    "due",
    "body",
    "embodied",
    "staged",
    "shared",
    "session",
    "seen",
    "outbound",
    "inbound",
    "reader_group",
    "low_mark",
    "writer",
    "stage",
    "stage_part",
)
REAP_SESSIONS: Final = """
delete from session where ctid = any (array(
    select row_id from (
        select row_id, sum(size_bytes) over (rows unbounded preceding) - size_bytes as bytes_before
        from (
            select ctid as row_id, octet_length(state) as size_bytes
            from session where entity_no = $1 limit $2
        ) as found
    ) as placed
    where bytes_before < $3
))
"""
REAP_SEEN: Final = """
delete from seen where ctid = any (array(
    select ctid from seen
    where entity_no = $1 and first_ms < $2 and last_ms < $2 limit $3
))
"""
AGE: Final = """
select greatest(age(c.relfrozenxid), coalesce(age(t.relfrozenxid), 0))
from pg_class c left join pg_class t on t.oid = c.reltoastrelid
where c.oid = $1::text::regclass
"""
FOLD: Final = """
with first as materialized (
    select id, cardinality(row_keys) as key_count from acquired order by id limit $1
), placed as (
    select id, sum(key_count) over (order by id) - key_count as keys_before from first
), old as materialized (
    select id, row_keys, attempts from acquired
    where id in (select id from placed where keys_before < $2)
), gone as (
    delete from acquired where id in (select id from old)
), latest as (
    select distinct on (u.row_key) u.row_key, u.attempt
    from old, unnest(old.row_keys, old.attempts) as u (row_key, attempt)
    order by u.row_key, old.id desc
), folded as (
    insert into patch as p (row_key, delivery_count)
    select l.row_key, l.attempt
    from latest l
    where exists (select from message m where m.row_key = l.row_key)
    on conflict (row_key) do update set delivery_count = excluded.delivery_count
    returning row_key
)
select done.folded, f.row_key
from (select count(*) as folded from old) as done
left join (
    select row_key from folded f
    where not exists (select from settled s where s.row_key = f.row_key)
) as f on true
"""
"""Returns the live rows that now have counts in `patch`, each with the number of folded records; at
least one line."""
