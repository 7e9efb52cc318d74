"""Keeps callers out whose lease is over: a change of an older epoch never follows a newer one's.

Two replicas of an operator may both believe that they lead. Each says with its changes how often
the lease has changed hands (the epoch). The first change of a higher epoch waits for those under
way, makes the epoch durable, and from there on lower ones are refused, after a restart too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from postbus.store.caller_epoch import CallerEpochStore
from postbus.store.errors import StoreError


class CallerTooOld(Exception):
    """A caller with a higher epoch has been here: nothing was changed."""

    def __init__(self, epoch: int, highest: int) -> None:
        self.epoch = epoch
        self.highest = highest
        super().__init__(f"a caller with epoch {highest} has been here, this one has {epoch}")


class StoreAway(Exception):
    """The store failed during a change: repeat it."""


class CallerFence:
    """Knows the highest epoch; `load` comes first."""

    def __init__(self, store: CallerEpochStore) -> None:
        self._store = store
        self._entering = asyncio.Lock()
        self._at_work = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.highest = 0

    async def load(self) -> None:
        """Read what was shown before; raises `StoreUnavailable`."""
        self.highest = await self._store.load()

    @asynccontextmanager
    async def admitted(self, epoch: int | None) -> AsyncIterator[None]:
        """Hold the epoch during a change; None, as people have, is always let in.

        Raises `CallerTooOld`, and `StoreAway` for whatever the store raised in the meantime.
        """
        try:
            if epoch is None:
                yield
                return
            await self._enter(epoch)
            try:
                yield
            finally:
                self._at_work -= 1
                if not self._at_work:
                    self._is_idle.set()
        except StoreError as error:
            raise StoreAway from error

    async def _enter(self, epoch: int) -> None:
        async with self._entering:
            if epoch > self.highest:
                await self._is_idle.wait()
                self.highest = max(self.highest, await self._store.raise_to(epoch))
            if epoch < self.highest:
                raise CallerTooOld(epoch, self.highest)
            self._at_work += 1
            self._is_idle.clear()

    async def forget(self) -> None:
        """Begin again with any epoch, for people whose lease was made anew; may raise StoreAway."""
        async with self._entering:
            await self._is_idle.wait()
            try:
                await self._store.forget()
            except StoreError as error:
                raise StoreAway from error
            self.highest = 0
