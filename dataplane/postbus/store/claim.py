"""Who may write a partition (D9).

Each writer connection holds a session advisory lock (partition, slot); a claim ends the backends
that hold them, gets every lock, which proves that nothing of theirs can commit any more, and raises
the epoch in its own commit. The owner row tells other brokers whether its writer is alive. Called
by the journal on its own connections only.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from postbus.store.errors import Connection, Fenced, StoreUnavailable, translated
from postbus.store.migrate import migrate_partition, refuse_newer

SILENCE_MS: Final = 5_000
"""A writer that did not write its heartbeat for so long may be taken over (D9)."""
LOCK_MS: Final = 3_000
"""How long an ended backend may take to leave its locks before the claim is given up."""
PROTOCOL_VERSION: Final = 1
LOCK_CLASS: Final = 0x5042_0000  # "PB" and the partition; the second key is the slot


class Slot(IntEnum):
    """What a lock of a partition is for."""

    FIRST_WRITER = 0
    SECOND_WRITER = 1
    STAGING = 2


class Claim(NamedTuple):
    """A partition that is ours now. `was_clean`: the writer before released it in order."""

    epoch: int
    was_clean: bool
    persisted_ms: int
    catalog_version: int


async def claim_partition(connection: Connection, partition_id: int, broker_name: str) -> Claim:
    """Take the partition; on return the connection holds the lock of the first writer.

    Raises Fenced (another broker is alive), StoreUnavailable (a former backend does not end),
    SchemaTooNew.
    """
    with translated():
        await connection.execute(SET_LOCK_TIMEOUT, str(LOCK_MS))
        for slot in Slot:
            await _check_owner(connection, broker_name)
            await connection.fetch(END_HOLDERS, LOCK_CLASS | partition_id, slot, broker_name)
            await connection.execute(
                "select pg_advisory_lock($1, $2)", LOCK_CLASS | partition_id, slot
            )
        # Somebody else may have claimed the partition while we waited.
        version = await _check_owner(connection, broker_name)
        await migrate_partition(connection, version)
        row = await connection.fetchrow(RAISE_EPOCH, broker_name, PROTOCOL_VERSION)
        assert row is not None
        for slot in (Slot.SECOND_WRITER, Slot.STAGING):
            await connection.execute(UNLOCK, LOCK_CLASS | partition_id, slot)
        await connection.execute(SET_LOCK_TIMEOUT, "0")
    return Claim(row["epoch"], row["was_clean"], row["persisted_ms"], row["catalog_version"])


SET_LOCK_TIMEOUT: Final = "select set_config('lock_timeout', $1, false)"
UNLOCK: Final = "select pg_advisory_unlock($1, $2)"
END_HOLDERS: Final = """
select pg_terminate_backend(pid)
from pg_locks, owner
where locktype = 'advisory' and granted and objsubid = 2
  and database = (select oid from pg_database where datname = current_database())
  and classid = $1::int::oid and objid = $2::int::oid
  and pid <> pg_backend_pid()
  and (
      is_released or broker_name = $3
      or (extract(epoch from clock_timestamp()) * 1000)::bigint - heartbeat_ms >= 5000
  )
"""
"""Asks for the owner again: two that claim at once must not end the one that has just won."""
RAISE_EPOCH: Final = """
update owner as o
set epoch = o.epoch + 1, broker_name = $1, protocol_version = $2, is_released = false,
    is_clean = false, heartbeat_ms = (extract(epoch from clock_timestamp()) * 1000)::bigint
from owner as before
returning o.epoch, before.is_clean as was_clean, o.persisted_ms, o.catalog_version
"""


async def _check_owner(connection: Connection, broker_name: str) -> int:
    """Return the schema version; raise Fenced while another broker is alive."""
    row = await connection.fetchrow(READ_OWNER)
    if row is None:
        raise StoreUnavailable("the partition has no owner row yet")
    refuse_newer(row["schema_version"], "partition")
    is_ours = row["is_released"] or row["broker_name"] == broker_name
    if not is_ours and row["silence_ms"] < SILENCE_MS:
        raise Fenced(f"the partition is owned by {row['broker_name']}")
    return int(row["schema_version"])


READ_OWNER: Final = """
select broker_name, is_released, schema_version,
       (extract(epoch from clock_timestamp()) * 1000)::bigint - heartbeat_ms as silence_ms
from owner
"""


async def take_slot(connection: Connection, partition_id: int, slot: Slot, epoch: int) -> None:
    """Lock another slot for the owner of `epoch`; raises Fenced when that is history."""
    with translated():
        is_locked = await connection.fetchval(
            "select pg_try_advisory_lock($1, $2)", LOCK_CLASS | partition_id, slot
        )
        if not is_locked or await connection.fetchval("select epoch from owner") != epoch:
            raise Fenced


async def beat(connection: Connection, epoch: int, persisted_ms: int) -> None:
    """Write the heartbeat; raises Fenced when the epoch is not ours any more.

    The commit does not wait for the disk: a heartbeat lost with a crash of the server tells no lie.
    """
    if await connection.fetchval(BEAT, epoch, persisted_ms) != epoch:
        raise Fenced


BEAT: Final = """
with quick as materialized (select set_config('synchronous_commit', 'off', true))
update owner
set heartbeat_ms = (extract(epoch from clock_timestamp()) * 1000)::bigint,
    persisted_ms = greatest(persisted_ms, $2)
from quick
where epoch = $1
returning epoch
"""


async def release(connection: Connection, epoch: int, persisted_ms: int) -> None:
    """Give the partition up in order: anybody may claim it at once."""
    await connection.execute(RELEASE, epoch, persisted_ms)


RELEASE: Final = """
update owner
set is_released = true, is_clean = true, persisted_ms = greatest(persisted_ms, $2),
    heartbeat_ms = (extract(epoch from clock_timestamp()) * 1000)::bigint
where epoch = $1
"""
