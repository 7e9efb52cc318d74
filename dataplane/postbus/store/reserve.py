"""Disk space reserved for receivers: filler in each partition, not part of its schema.

A full disk must not stop completions and redeliveries, whose side rows need a little space. While
the reserve exists, senders may use the rest; when the disk is full the reserve is dropped, and
sends are refused until it can be filled again. Called by `broker/partition/disk_reserve.py`.
"""

from __future__ import annotations

from typing import Final

from postbus.store.errors import Connection
from postbus.store.fenced import fenced
from postbus.store.postgres import Store

RESERVE_ROWS: Final = 128
ROW_BYTES: Final = 8_000
"""One row fills a page, so the reserve is 1 MiB: the counts of some 50,000 redeliveries."""


PROBE_ROWS: Final = 4 * RESERVE_ROWS
"""Free space needed before sends are accepted again: more than the reserve itself freed."""


async def fill_reserve(store: Store, partition_id: int, epoch: int) -> None:
    """Create the reserve if it is missing; raises StoreFull if it does not fit, Fenced."""
    async with fenced(store, partition_id, epoch) as connection:
        if await connection.fetchval("select to_regclass('reserve') is null"):
            await _make_filler(connection, "reserve", RESERVE_ROWS)


async def look_for_room(store: Store, partition_id: int, epoch: int) -> None:
    """Check for more free space than the reserve; raises StoreFull if there is less."""
    async with fenced(store, partition_id, epoch) as connection:
        probe = connection.transaction()
        await probe.start()
        try:
            await _make_filler(connection, "probe", PROBE_ROWS)
        finally:
            await probe.rollback()


async def _make_filler(connection: Connection, table: str, rows: int) -> None:
    await connection.execute(f"create table {table} (filler bytea) with (autovacuum_enabled = off)")
    await connection.execute(f"alter table {table} alter column filler set storage plain")
    await connection.execute(
        f"insert into {table} (filler)"
        f" select decode(repeat('00', {ROW_BYTES}), 'hex') from generate_series(1, {rows})"
    )


async def give_up_reserve(store: Store, partition_id: int, epoch: int) -> None:
    """Free the reserve's disk space.

    The table is dropped, not truncated: only that writes nothing new into the catalog.
    """
    async with fenced(store, partition_id, epoch) as connection:
        await connection.execute("drop table if exists reserve")
