"""Handling of another process with the same broker name: `--take-over` and `--no-wait`.

Without either option `serve` starts as a stand-by. The other processes are those with a heartbeat
in the first database, where every broker claims partition 0. This happens before the data directory
is locked, since the other process may hold the lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import Final

import asyncpg

from postbus.assembly.bus import STOP_S
from postbus.assembly.store_trouble import explain_store_error
from postbus.broker.backoff import Backoff
from postbus.cli.failures import Exit, fail
from postbus.process.settings import Settings
from postbus.store.beats import ANSWER_S
from postbus.store.belonging import refuse_another_bus
from postbus.store.errors import StoreError, StoreUnavailable
from postbus.store.incarnation import Broker, this_process
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
    settings: Settings, namespace: str, meeting: Meeting, on_step: Callable[[str], None]
) -> None:
    """Ask other processes with our name to end, or end this command.

    A process that continues is waited for later. With --take-over an unavailable store is waited
    for, since other processes can only be found through it.
    """
    ours = Broker(settings.broker_name, this_process())
    try:
        store = Store(settings.store_dsns[0], unsafe=settings.is_unsafe, broker=ours)
        try:
            if meeting is Meeting.TAKE_OVER:
                await _outwait(store, on_step)
            await store.open()
            await refuse_another_bus(store, namespace)
            rivals = Rivals(store, ours)
            if meeting is Meeting.REFUSE:
                await _refuse(rivals)
            else:
                # We assume that their grace period equals ours: they have the same settings.
                await _ask(rivals, HEARING_S + settings.grace_s + STOP_S, on_step)
        finally:
            await store.close()
    except (StoreError, asyncpg.PostgresError, OSError, ValueError) as error:
        fail(explain_store_error(error), Exit.STORE)


async def _outwait(store: Store, on_step: Callable[[str], None]) -> None:
    """Wait until the store answers."""
    backoff = Backoff()
    while True:
        try:
            return await store.open()
        except StoreUnavailable:
            on_step(f"waiting for the store: {store.outage.text}")
        await backoff.pause()


async def _refuse(rivals: Rivals) -> None:
    living = await rivals.living()
    if living:
        fail(
            f"{living[0]} is using this store: stop it, take over with --take-over, or start"
            " without --no-wait to wait for it",
            Exit.STORE,
        )


async def _ask(rivals: Rivals, limit_s: float, on_step: Callable[[str], None]) -> None:
    asked = await rivals.ask_to_end()
    for rival in asked:
        logger.warning("asked another process to end", extra={"broker": str(rival)})
        on_step(f"waiting for {rival} to end")
    for rival in await rivals.outwait(asked, limit_s):
        logger.warning(
            "a process that was asked to end is still running, perhaps an earlier version",
            extra={"broker": str(rival), "asked_s": limit_s},
        )
