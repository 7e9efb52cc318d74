"""Other processes with a broker's name in a store: detection, and requests to end (ADR 12).

A row alone is no proof, since a killed process leaves its row: a process is alive if its heartbeat
changes. Nothing is claimed or taken by force here: a process that does not see the request
continues, or becomes silent, and claims decide as usual. Called before a bus is assembled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from uuid import UUID

from postbus.store.beats import CONFIRMATION_S, INCARNATION_COLUMNS, Incarnation
from postbus.store.incarnation import Broker, boottime_s, is_provably_gone, runs_here
from postbus.store.postgres import Store

LOOK_S: Final = 0.2
"""Interval of looks. Our choice: a fifth of the time between two heartbeats."""


class Rivals:
    """Processes with one name in one store, as seen by `ours`, which has no row there yet."""

    def __init__(self, store: Store, ours: Broker, clock: Callable[[], float] = boottime_s) -> None:
        self._store = store
        self._ours = ours
        self._clock = clock
        self._seen: dict[UUID, tuple[Incarnation, float]] = {}
        """Observed incarnations, and since when their heartbeat has not changed."""
        self._moved: set[UUID] = set()

    async def living(self) -> list[Incarnation]:
        """Return those whose heartbeat changes, not those silent for 3 s. Raises StoreError."""
        while True:
            rivals = await self._look()
            moved = [rival for rival in rivals if rival.identity in self._moved]
            if moved or not rivals:
                return moved
            await asyncio.sleep(LOOK_S)

    async def ask_to_end(self) -> list[Incarnation]:
        """Ask all processes to end that have not provably ended; return them. Raises StoreError."""
        rivals = await self._look()
        async with self._store.aside() as connection:
            asked = [rival.identity for rival in rivals]
            await connection.execute(ASK, asked, str(self._ours))
        return rivals

    async def outwait(self, asked: list[Incarnation], limit_s: float) -> list[Incarnation]:
        """Wait for the asked processes to end; return those still running after `limit_s`.

        A process that is silent for 3 s is not waited for. On this machine one has ended when its
        process has, which holds a data directory and ports until then. Raises StoreError.
        """
        started = self._clock()
        while True:
            alive = {rival.identity for rival in await self._look()}
            left = [rival for rival in asked if rival.identity in alive or self._is_leaving(rival)]
            if not left or self._clock() - started >= limit_s:
                return left
            await asyncio.sleep(LOOK_S)

    def _is_leaving(self, rival: Incarnation) -> bool:
        is_there = rival.identity in self._seen
        return not is_there and runs_here(rival.process, self._ours.process)

    async def _look(self) -> list[Incarnation]:
        """Return those that may be alive."""
        async with self._store.aside() as connection:
            rows = await connection.fetch(READ, self._ours.name)
        now, before = self._clock(), self._seen
        self._seen, rivals = {}, []
        for rival in map(Incarnation.from_row, rows):
            known, since = before.get(rival.identity, (rival, now))
            if known.beat != rival.beat:
                self._moved.add(rival.identity)
                since = now
            self._seen[rival.identity] = rival, since
            is_gone = is_provably_gone(rival.process, rival.identity, self._ours.process, ())
            if not is_gone and now - since < CONFIRMATION_S:
                rivals.append(rival)
        return rivals


READ: Final = f"""
select b.incarnation, b.broker_name, {INCARNATION_COLUMNS}
from postbus.broker b where b.broker_name = $1 and b.ended_by is null
"""
ASK: Final = "update postbus.broker set asked_by = $2 where incarnation = any($1)"
