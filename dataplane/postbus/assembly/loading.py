"""Claims partitions with entities when a bus starts, so that the first client need not wait.

Also partitions with retained entities only: their messages expire only in a loaded partition. The
same applies to remains of entities whose removal was interrupted by a crash. An unavailable
database delays none of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import asyncpg

from postbus.broker.backoff import Backoff
from postbus.broker.partition.host import Host
from postbus.entity.commands import Tick
from postbus.store.errors import StoreError
from postbus.store.postgres import Store
from postbus.store.stores import Stores

logger = logging.getLogger(__name__)

LOADING_S: Final = 10.0
"""Time that a start waits for partitions; commands wait for those that load longer. Twice the
silence after which another broker's partition may be taken over."""


async def load_partitions(
    hosts: Sequence[Host],
    stores: Stores,
    homes: set[int],
    tasks: asyncio.TaskGroup,
    limit_s: float = LOADING_S,
) -> list[asyncio.Task[None]]:
    """Claim the partitions with entities; return when each was tried once, or after `limit_s`.

    A database that does not answer is not waited for.

    `homes`: partitions that are known to hold entities. The others are checked; the returned tasks
    continue until all are known, and are to be cancelled when the bus stops.
    """
    going: dict[Store, asyncio.Task[None]] = {}
    for store in stores.all:
        its = [host for host in hosts if stores.home_of(host.partition_id) is store]
        going[store] = tasks.create_task(_load(store, its, homes), name="load")
    answering = [task for store, task in going.items() if not store.outage.is_on]
    _, late = await asyncio.wait(answering, timeout=limit_s) if answering else ((), ())
    if late:
        logger.warning("partitions are still loading", extra={"databases": len(late)})
    return list(going.values())


async def _load(store: Store, hosts: Sequence[Host], homes: set[int]) -> None:
    """Claim the partitions of one database that hold entities; return when each was tried once."""
    wanted = [host for host in hosts if host.partition_id in homes]
    tries = [asyncio.ensure_future(host.call(Tick())) for host in wanted]
    try:
        others = [host for host in hosts if host not in wanted]
        found = [host for host in others if await _holds_anything(store, host.partition_id)]
        tries += [asyncio.ensure_future(host.call(Tick())) for host in found]
        await asyncio.gather(*tries)
    finally:
        for each in tries:
            each.cancel()


async def _holds_anything(store: Store, partition_id: int) -> bool:
    """Return whether a partition has entities; retry until the store answers."""
    backoff = Backoff()
    while True:
        try:
            return await store.holds_anything(partition_id)
        except (StoreError, asyncpg.PostgresError) as error:
            if not store.outage.is_on:  # otherwise it is logged already
                extra = {"partition": partition_id, "error": str(error)}
                logger.warning("cannot read whether a partition holds entities", extra=extra)
        await backoff.pause()
