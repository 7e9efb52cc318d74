"""Whether a partition takes new messages: not while its store has no room left.

Receivers go on meanwhile, on what the reserve of the partition gave back to the disk.
"""

from __future__ import annotations

import logging

from postbus.entity.commands import Refusal, Refused
from postbus.store.errors import StoreFull
from postbus.store.postgres import Store
from postbus.store.reserve import fill_reserve, give_up_reserve, look_for_room

logger = logging.getLogger(__name__)

STORE_FULL = Refused(Refusal.STORE_FULL, "the store has no room for messages")
RESERVE_LOOK_S = 5.0
"""How often a full store is asked whether it has room again."""


class DiskReserve:
    """Of one partition; outlives its reloads. `epoch`: that of the life that asks."""

    def __init__(self, store: Store, partition_id: int) -> None:
        self.is_full = False
        """Whether senders have to wait."""
        self._store = store
        self._partition_id = partition_id

    def note_failure(self, error: Exception | None) -> None:
        """A commit failed; `error` as the store tells it."""
        if isinstance(error, StoreFull) and not self.is_full:
            self.is_full = True
            logger.warning(
                "the store is full, sends are refused", extra={"partition": self._partition_id}
            )

    async def make(self, epoch: int) -> None:
        """Let receivers have the reserve when it is needed; raises StoreUnavailable."""
        if self.is_full:
            await give_up_reserve(self._store, self._partition_id, epoch)

    async def look(self, epoch: int) -> None:
        """Fill the reserve; senders may go on when it fits. Raises StoreUnavailable."""
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
            logger.info("the store has room again", extra={"partition": self._partition_id})
