"""Fencing of callers whose lease has ended: no change of an older epoch follows a newer one.

Two replicas of an operator may both believe that they lead. Each sends with its changes the number
of transfers of the lease (the epoch). The first change of a higher epoch waits for changes in
progress and makes the epoch durable; from then on lower epochs are refused, also after a restart.
Each commit of a change checks the durable epoch again, since another broker may have raised it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from postbus.broker.catalog.catalog import Catalog, caller_epoch
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.store.caller_epoch import CallerEpochStore
from postbus.store.catalog_change import CallerOutdated
from postbus.store.errors import StoreError


class CallerTooOld(Exception):
    """A caller with a higher epoch was seen: nothing was changed."""

    def __init__(self, epoch: int, highest: int) -> None:
        self.epoch = epoch
        self.highest = highest
        super().__init__(f"epoch {epoch} is outdated: a caller had epoch {highest}")


class StoreAway(Exception):
    """The store failed, or another broker manages definitions: retry."""


class CallerFence:
    """Tracks the highest epoch seen, while this broker manages definitions."""

    def __init__(self, store: CallerEpochStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._read_in: int | None = None  # the epoch of partition 0 in which it was read
        self._entering = asyncio.Lock()
        self._at_work = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.highest = 0

    @asynccontextmanager
    async def admitted(self, epoch: int | None) -> AsyncIterator[None]:
        """Hold the epoch during a change; callers without one (None), such as people, are admitted.

        Raises `CallerTooOld`, and `StoreAway` for errors of the store in the meantime.
        """
        try:
            if epoch is None:
                yield
                return
            await self._enter(epoch)
            token = caller_epoch.set(epoch)
            try:
                yield
            except DirectoryRefusal as error:
                if isinstance(error.__cause__, CallerOutdated):
                    raise CallerTooOld(epoch, error.__cause__.highest) from error
                raise
            finally:
                caller_epoch.reset(token)
                self._at_work -= 1
                if not self._at_work:
                    self._is_idle.set()
        except StoreError as error:
            raise StoreAway from error

    async def _enter(self, epoch: int) -> None:
        async with self._entering:
            ours = await self._read()
            if epoch > self.highest:
                await self._is_idle.wait()
                self.highest = max(self.highest, await self._store.raise_to(epoch, ours))
            if epoch < self.highest:
                raise CallerTooOld(epoch, self.highest)
            self._at_work += 1
            self._is_idle.clear()

    async def _read(self) -> int:
        """Read the highest epoch that former owners of partition 0 saw; return its epoch."""
        try:
            epoch = await self._catalog.own()
        except DirectoryRefusal as error:
            raise StoreAway(str(error)) from error
        if epoch != self._read_in:
            self.highest = await self._store.load()
            self._read_in = epoch
        return epoch

    async def forget(self) -> None:
        """Accept any epoch again, after the lease was recreated; may raise StoreAway."""
        async with self._entering:
            try:
                ours = await self._read()
                await self._is_idle.wait()
                await self._store.forget(ours)
            except StoreError as error:
                raise StoreAway from error
            self.highest = 0
