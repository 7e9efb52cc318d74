"""Handling of another process with the same broker name: `--take-over` and `--no-wait`.

Without either option `serve` starts as a standby. The other processes are those with a heartbeat
in the first database, where every broker claims partition 0. This happens before the data directory
is locked, since the other process may hold the lock. The bus serves health meanwhile.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Final

import asyncpg

from postbus.assembly.bus import STOP_S, BusError, OnStep
from postbus.assembly.store_trouble import explain_store_error
from postbus.broker.backoff import Backoff
from postbus.process.data_directory import DataDirectory, DataDirectoryInUse
from postbus.store.beats import ANSWER_S
from postbus.store.belonging import refuse_another_bus
from postbus.store.errors import StoreError, StoreUnavailable
from postbus.store.postgres import Store
from postbus.store.rivals import Rivals

logger = logging.getLogger(__name__)

HEARING_S: Final = ANSWER_S
"""Time until a request is noticed: at the next heartbeat, which a slow database delays."""


class Meeting(Enum):
    """Action if another process is running."""

    WAIT = "wait"
    TAKE_OVER = "take over"
    REFUSE = "refuse"


async def meet_rivals(
    store: Store, namespace: str, meeting: Meeting, grace_s: float, on_step: OnStep
) -> None:
    """Ask other processes with our name to end, or refuse to start; raises `BusError`.

    A process that continues is waited for later. With --take-over an unavailable store is waited
    for, since other processes can only be found through it.
    """
    backoff = Backoff()
    while True:
        try:
            await store.open()
            await refuse_another_bus(store, namespace)
            rivals = Rivals(store, store.beats.broker)
            if meeting is Meeting.REFUSE:
                await _refuse(rivals)
            else:
                # We assume that their grace period equals ours: they have the same settings.
                await _ask(rivals, HEARING_S + grace_s + STOP_S, on_step)
        except (StoreError, asyncpg.PostgresError, OSError, ValueError) as error:
            if not isinstance(error, StoreUnavailable) or meeting is Meeting.REFUSE:
                raise BusError(explain_store_error(error), is_about_store=True) from error
            store.outage.failed(error)
            on_step(f"waiting for the store: {store.outage.text}")
        else:
            return store.outage.ended()
        await backoff.pause()


async def lock_data(data: DataDirectory, on_step: OnStep) -> None:
    """Lock the data directory; wait for a process that uses it. Raises `DataDirectoryError`."""
    backoff = Backoff()
    while True:
        try:
            return data.open()
        except DataDirectoryInUse as error:
            on_step(
                f"waiting for process {error.holder}, which uses {data.path}: stop it, or choose"
                " another data directory with --data"
            )
        await backoff.pause()


async def _refuse(rivals: Rivals) -> None:
    living = await rivals.living()
    if living:
        raise BusError(
            f"{living[0]} is using this store: stop it, take over with --take-over, or start"
            " without --no-wait to wait for it",
            is_about_store=True,
        )


async def _ask(rivals: Rivals, limit_s: float, on_step: OnStep) -> None:
    asked = await rivals.ask_to_end()
    for rival in asked:
        logger.warning("asked another process to end", extra={"broker": str(rival)})
        on_step(f"waiting for {rival} to end")
    for rival in await rivals.outwait(asked, limit_s):
        logger.warning(
            "a process that was asked to end is still running, perhaps an earlier version",
            extra={"broker": str(rival), "asked_s": limit_s},
        )
