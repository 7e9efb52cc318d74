"""Retention of settled messages (ADR 18).

A settled row stays in `message`; `settled` records that it is not live, the reason and the time.
The load finds the entities with such rows, so that others cost nothing. Rows are deleted in chunks
outside the journal, so that no commit waits for them. Called by `upkeep.py`.
"""

from __future__ import annotations

import time
from typing import Final

from postbus.contract.entities import EntityProperties
from postbus.entity.outcomes import (
    DropDefinition,
    LoadedPartition,
    Mutation,
    PutDefinition,
    SettleRows,
)
from postbus.store.errors import Connection
from postbus.store.fenced import fenced
from postbus.store.postgres import Store
from postbus.store.shared import BodyCounts


class SettledRows:
    """The settled rows of one partition: their entities and retention."""

    def __init__(self, store: Store, partition_id: int, epoch: int, bodies: BodyCounts) -> None:
        self._store = store
        self._partition_id = partition_id
        self._epoch = epoch
        self._bodies = bodies
        self._limits = store.upkeep_limits
        self._retentions: dict[int, int] = {}
        self._entities: set[int] = set()

    async def load(self, loaded: LoadedPartition, connection: Connection) -> int:
        """Find the entities with settled rows; return their approximate number."""
        for entity in loaded.entities:
            self._define(entity.entity_no, entity.properties)
        self._entities = {row["entity_no"] for row in await connection.fetch(ENTITIES)}
        return await connection.fetchval(ABOUT_ROWS) if self._entities else 0

    def note(self, change: Mutation) -> None:
        """Record a durable mutation."""
        if type(change) is SettleRows:
            self._entities.add(change.entity_no)
        elif type(change) is PutDefinition:
            self._define(change.entity_no, change.properties)
        elif type(change) is DropDefinition:
            self._retentions.pop(change.entity_no, None)

    def _define(self, entity_no: int, properties: EntityProperties) -> None:
        retention_ms = getattr(properties, "history_retention_ms", None)
        if retention_ms is None:
            self._retentions.pop(entity_no, None)
        else:
            self._retentions[entity_no] = retention_ms

    async def reap(self, now_ms: int) -> tuple[int, bool]:
        """Delete expired settled rows, and all settled rows of entities without a history.

        Returns the number of rows and whether some are left: it stops after `reap_s`. Raises
        StoreUnavailable, Fenced.
        """
        reaped = 0
        until = time.monotonic() + self._limits.reap_s
        for entity_no in list(self._entities):
            is_left = is_full = True
            has_later = False
            had_history = entity_no in self._retentions
            self._entities.discard(entity_no)  # rows settled from now on add it again
            try:
                while is_full:
                    if time.monotonic() > until:
                        return reaped, True
                    count, is_full, has_later = await self._reap_chunk(entity_no, now_ms)
                    reaped += count
                is_left = had_history or entity_no in self._retentions or has_later
            finally:
                if is_left:
                    self._entities.add(entity_no)
        return reaped, False

    async def _reap_chunk(self, entity_no: int, now_ms: int) -> tuple[int, bool, bool]:
        """Delete a chunk; return its size, whether more may be due, and whether any rows stay.

        Rows settled after `now_ms` stay, since a history may begin meanwhile.
        """
        async with fenced(self._store, self._partition_id, self._epoch) as connection:
            await connection.execute(BY_INDEX)
            retention_ms = self._retentions.get(entity_no)
            before_ms = now_ms + 1 if retention_ms is None else now_ms - retention_ms
            row = await connection.fetchrow(REAP, entity_no, before_ms, self._limits.reap_rows)
        assert row is not None
        if row["shared_ids"] is not None:
            self._bodies.release(row["shared_ids"])
        if row["own_ids"] is not None:
            self._bodies.orphan(row["own_ids"])
        return int(row["count"]), row["count"] == self._limits.reap_rows, bool(row["has_later"])


ENTITIES: Final = """
with recursive found as (
    (select entity_no from settled order by entity_no limit 1)
    union all
    select (
        select s.entity_no from settled s
        where s.entity_no > found.entity_no order by s.entity_no limit 1
    )
    from found where found.entity_no is not null
)
select entity_no from found where entity_no is not null
"""
ABOUT_ROWS: Final = """
select greatest(reltuples, 0)::bigint from pg_class where oid = 'settled'::regclass
"""
BY_INDEX: Final = "set local enable_seqscan = off; set local enable_bitmapscan = off"
"""Else the planner, without good statistics of these tables, sorts all old rows per chunk."""
REAP: Final = """
with old as materialized (
    select row_key from settled
    where entity_no = $1 and settled_ms < $2
    order by settled_ms
    limit $3
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
select (select count(*) from old) as count,
       exists (
           select from settled where entity_no = $1 and settled_ms >= $2
       ) as has_later,
       (select string_agg(int8send(body_id), ''::bytea) from bodies where is_shared) as shared_ids,
       (select string_agg(int8send(body_id), ''::bytea) from bodies where not is_shared) as own_ids
"""
