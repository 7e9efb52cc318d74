"""Claims of partitions: which broker may write (ADR 22).

Each writer connection holds a session advisory lock (partition, slot). A claim has three steps: it
ends the backends that hold the locks; takes every lock, which proves that no earlier writer can
commit; and raises the epoch in a commit of its own. The owner row names the incarnation that
claimed the partition; beats show whether it is alive. Called by the journal, on its own
connections.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple
from uuid import UUID

from postbus.store.beats import INCARNATION_COLUMNS, Beats, Incarnation
from postbus.store.errors import Connection, Fenced, StoreUnavailable, translated
from postbus.store.migrate import migrate_partition, prepare_partition, refuse_newer

LOCK_MS: Final = 3_000
"""Time an ended backend may take to release its locks before the claim fails."""
PROTOCOL_VERSION: Final = 3
LOCK_CLASS: Final = 0x5042_0000  # "PB" and the partition; the second key is the slot
KNOWS_GROUPS: Final = 3
"""The first version that keeps rows for reader groups."""


class Slot(IntEnum):
    """Purpose of a partition's lock."""

    FIRST_WRITER = 0
    SECOND_WRITER = 1
    STAGING = 2


class Claim(NamedTuple):
    """A claimed partition. `schema_version`: the newest step that its tables have."""

    epoch: int
    schema_version: int
    persisted_ms: int
    catalog_version: int


async def claim_partition(connection: Connection, partition_id: int, beats: Beats) -> Claim:
    """Claim the partition; create its tables if they are missing.

    On return the connection holds the lock of the first writer. Raises Fenced (another broker is
    alive), StoreUnavailable (a former backend does not end), SchemaTooNew.
    """
    identity = await beats.begin()
    with translated():
        await prepare_partition(connection, partition_id)
        await connection.execute(SET_LOCK_TIMEOUT, str(LOCK_MS))
        for slot in Slot:
            await _make_way(connection, beats, identity, partition_id)
            await connection.fetch(END_HOLDERS, LOCK_CLASS | partition_id, slot, identity)
            await connection.execute(
                "select pg_advisory_lock($1, $2)", LOCK_CLASS | partition_id, slot
            )
        # Another broker may have claimed the partition while we waited.
        version = await _make_way(connection, beats, identity, partition_id)
        schema_version = await migrate_partition(connection, version)
        await connection.execute(MARK_GAP, KNOWS_GROUPS)
        row = await connection.fetchrow(RAISE_EPOCH, beats.broker.name, PROTOCOL_VERSION, identity)
        assert row is not None
        for slot in (Slot.SECOND_WRITER, Slot.STAGING):
            await connection.execute(UNLOCK, LOCK_CLASS | partition_id, slot)
        await connection.execute(SET_LOCK_TIMEOUT, "0")
    return Claim(row["epoch"], schema_version, row["persisted_ms"], row["catalog_version"])


SET_LOCK_TIMEOUT: Final = "select set_config('lock_timeout', $1, false)"
UNLOCK: Final = "select pg_advisory_unlock($1, $2)"
END_HOLDERS: Final = """
select pg_terminate_backend(pid)
from pg_locks, (
    select is_released, (to_jsonb(owner) ->> 'incarnation')::uuid as incarnation from owner
) o
where locktype = 'advisory' and granted and objsubid = 2
  and database = (select oid from pg_database where datname = current_database())
  and classid = $1::int::oid and objid = $2::int::oid
  and pid <> pg_backend_pid()
  and (
      is_released or incarnation = $3::uuid or not exists (
          select from postbus.broker b
          where b.incarnation = o.incarnation and b.ended_by is null
      )
  )
"""
"""Checks the owner again, so that of two claims at a time the loser does not end the winner."""
MARK_GAP: Final = """
insert into low_mark as l (entity_no, sub_queue, low)
select distinct g.entity_no, g.sub_queue, (select max(first_key + size) from block)
from reader_group g cross join owner o
where o.protocol_version < $1 and exists (select from block)
on conflict (entity_no, sub_queue) do update set low = greatest(l.low, excluded.low)
"""
"""An owner that does not know reader groups deletes rows that they have not read (ADR 42)."""
RAISE_EPOCH: Final = """
update owner
set epoch = epoch + 1, broker_name = $1, protocol_version = $2, incarnation = $3,
    is_released = false
returning epoch, catalog_version,
    greatest(persisted_ms, (select max(b.persisted_ms) from postbus.broker b)) as persisted_ms
"""


async def _make_way(connection: Connection, beats: Beats, identity: UUID, partition_id: int) -> int:
    """Return the schema version of a partition that may be claimed; otherwise raise Fenced."""
    row = await connection.fetchrow(READ_OWNER)
    if row is None:
        raise StoreUnavailable("the partition has no owner row yet")
    refuse_newer(row["schema_version"], "partition")
    version = int(row["schema_version"])
    if row["is_released"] or row["incarnation"] == identity:
        return version
    if row["incarnation"] is None:
        beats.outwait(partition_id, row["heartbeat_ms"], row["broker_name"])
    elif row["is_alive"]:
        await beats.take_place_of(Incarnation.from_row(row), row["epoch"], connection)
    return version


READ_OWNER: Final = f"""
select o.epoch, o.broker_name, o.is_released, o.schema_version, o.incarnation, o.heartbeat_ms,
       coalesce(b.ended_by is null and b.incarnation is not null, false) as is_alive,
       {INCARNATION_COLUMNS}
from (
    select epoch, broker_name, is_released, schema_version, heartbeat_ms,
           (to_jsonb(owner) ->> 'incarnation')::uuid as incarnation
    from owner
) o left join postbus.broker b on b.incarnation = o.incarnation
"""
"""Runs before the migration: older tables have no incarnation."""


async def take_slot(connection: Connection, partition_id: int, slot: Slot, epoch: int) -> None:
    """Lock another slot for the owner of `epoch`; raises Fenced if the epoch has changed."""
    with translated():
        is_locked = await connection.fetchval(
            "select pg_try_advisory_lock($1, $2)", LOCK_CLASS | partition_id, slot
        )
        if not is_locked or await connection.fetchval("select epoch from owner") != epoch:
            raise Fenced


async def release(connection: Connection, epoch: int, persisted_ms: int) -> None:
    """Release the partition, so that any broker may claim it at once."""
    await connection.execute(RELEASE, epoch, persisted_ms)


RELEASE: Final = """
update owner
set is_released = true, persisted_ms = greatest(persisted_ms, $2)
where epoch = $1
"""
