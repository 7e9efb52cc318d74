"""The highest epoch of callers of the control API.

Called by `broker/access/caller_fence.py` only. Only `forget` resets it.
"""

from __future__ import annotations

from typing import Final

from postbus.store.catalog_change import CATALOG_PARTITION
from postbus.store.fenced import fenced
from postbus.store.postgres import Store


class CallerEpochStore:
    """Reads and writes one row. Every method may raise StoreUnavailable.

    `epoch` of a write is that of partition 0; raises Fenced unless we are its owner.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def load(self) -> int:
        """Return the highest epoch, 0 if there was none."""
        await self._store.open()
        async with self._store.aside() as connection:
            return int(await connection.fetchval(LOAD) or 0)

    async def raise_to(self, caller_epoch: int, epoch: int) -> int:
        """Record a caller's epoch if it is higher; return the highest one, which is durable."""
        await self._store.open()
        async with fenced(self._store, CATALOG_PARTITION, epoch) as connection:
            return int(await connection.fetchval(RAISE, caller_epoch))

    async def forget(self, epoch: int) -> None:
        """Accept any epoch again."""
        await self._store.open()
        async with fenced(self._store, CATALOG_PARTITION, epoch) as connection:
            await connection.execute(FORGET)


LOAD: Final = "select epoch from postbus.caller_epoch"
RAISE: Final = """
insert into postbus.caller_epoch (epoch) values ($1)
on conflict (is_only) do update set epoch = greatest(postbus.caller_epoch.epoch, excluded.epoch)
returning epoch
"""
FORGET: Final = "delete from postbus.caller_epoch"
