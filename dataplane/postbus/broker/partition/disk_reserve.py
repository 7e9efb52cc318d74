"""Disk reserve of a partition: sends are refused while its store is full.

Receivers continue meanwhile, in the space that the partition's reserve freed on the disk.
"""

from __future__ import annotations

import logging

from postbus.entity.commands import Refusal, Refused
from postbus.store.errors import Fenced, StoreFull
from postbus.store.postgres import Store
from postbus.store.reserve import fill_reserve, give_up_reserve, look_for_room

logger = logging.getLogger(__name__)

STORE_FULL = Refused(Refusal.STORE_FULL, "the store is full")
RESERVE_LOOK_S = 5.0
"""Interval of checks whether a full store has space again."""


class DiskReserve:
    """The reserve of one partition; survives its reloads. `epoch`: that of the calling life."""

    def __init__(self, store: Store, partition_id: int) -> None:
        self.is_full = False
        """True if sends are refused."""
        self._store = store
        self._partition_id = partition_id

    def note_failure(self, error: Exception | None) -> None:
        """Record a failed commit and its error."""
        if isinstance(error, StoreFull) and not self.is_full:
            self.is_full = True
            logger.warning(
                "the store is full, sends are refused", extra={"partition": self._partition_id}
            )

    async def release_if_full(self, epoch: int) -> None:
        """Free the reserve for receivers when needed; raises StoreUnavailable."""
        if self.is_full:
            await give_up_reserve(self._store, self._partition_id, epoch)

    async def release_before_claim(self, former_epoch: int) -> None:
        """Free the reserve in the name of the life that has ended, if it is still the owner.

        A claim needs a new connection, for which Postgres may need space itself.
        """
        try:
            await self.release_if_full(former_epoch)
        except Fenced:
            logger.debug("another broker owns the reserve now")

    async def refill(self, epoch: int) -> None:
        """Fill the reserve and accept sends when that succeeds. Raises StoreUnavailable."""
        try:
            if self.is_full:
                await look_for_room(self._store, self._partition_id, epoch)
            await fill_reserve(self._store, self._partition_id, epoch)
        except StoreFull as error:
            self.note_failure(error)
            await give_up_reserve(self._store, self._partition_id, epoch)
            return
        if self.is_full:
            self.is_full = False
            logger.info("the store has space again", extra={"partition": self._partition_id})
