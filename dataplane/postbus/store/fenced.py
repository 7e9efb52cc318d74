"""Transactions of a partition's owner outside its journal, fenced like its commits (ADR 22).

Each holds the partition's staging lock until it ends, so that a claim ends it or waits for it, and
begins only in its intended epoch. Unfinished transactions of a former owner, even a paused one, can
neither commit after a claim nor delay one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from postbus.store.claim import LOCK_CLASS, Slot
from postbus.store.errors import Connection, Fenced
from postbus.store.migrate import schema_of
from postbus.store.postgres import Store

LOCK_MS: Final = 4_500
"""Maximum wait of a transaction for another one, or for a claim."""


@asynccontextmanager
async def fenced(store: Store, partition_id: int, epoch: int) -> AsyncIterator[Connection]:
    """Lend the side connection in a transaction of a partition's owner, in the partition's schema.

    Raises StoreUnavailable, and its subclass Fenced when the partition has another epoch.
    """
    async with store.aside() as connection, connection.transaction():
        await connection.execute(f"set local search_path = {schema_of(partition_id)}")
        await connection.execute(f"set local lock_timeout = {LOCK_MS}")
        await connection.execute(
            "select pg_advisory_xact_lock($1, $2)", LOCK_CLASS | partition_id, Slot.STAGING
        )
        if await connection.fetchval("select epoch from owner") != epoch:
            raise Fenced
        yield connection
