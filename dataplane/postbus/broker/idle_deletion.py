"""The protocol by which an idle entity is deleted in step with traffic (D14).

Every partition that the entity lives in is asked to freeze it and to say that it was not used; all
must agree. One that is not loaded is asked too, which loads it: it may hold a scheduled message or
know of a use. One that does not answer in time counts as in use: the question comes again with the
next `Idle`. Nothing is decided here but that; the catalog deletes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Final, Protocol

from postbus.entity import commands
from postbus.entity.commands import Command, Freeze, Reply, Thaw

logger = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
"""Silence for so long means in use. A frozen entity thaws by itself after the same time."""

RENEWAL_S: Final = 0.5
"""How often the freeze is renewed while the catalog's answer is awaited: an entity that thawed
before its deletion is told would take messages that nobody gets."""


class FreezingHost(Protocol):
    """A partition's host, as far as this protocol knows it."""

    async def call(self, command: Command) -> Reply: ...


class Frozen(Enum):
    """Whether all partitions froze an entity."""

    YES = "yes"
    NO = "no"


@asynccontextmanager
async def freeze(
    hosts: Sequence[FreezingHost], entity_no: int, answer_s: float = ANSWER_S
) -> AsyncIterator[Frozen]:
    """Hold an entity frozen in all its partitions, or tell that it is in use.

    Afterwards it is thawed wherever it still exists; to one that was dropped that means nothing.
    """
    calls = [asyncio.ensure_future(host.call(Freeze(entity_no))) for host in hosts]
    renewal: asyncio.Task[None] | None = None
    try:
        done, late = await asyncio.wait(calls, timeout=answer_s)
        is_frozen = not late and all(isinstance(call.result(), commands.Frozen) for call in done)
        if is_frozen:
            renewal = asyncio.create_task(_renew(hosts, entity_no), name=f"freeze-{entity_no}")
        yield Frozen.YES if is_frozen else Frozen.NO
    finally:
        if renewal is not None:
            renewal.cancel()
        for call in calls:
            call.cancel()
        # A partition that has not answered gets this after the question; it stays frozen no longer.
        for host in hosts:
            _send(host, Thaw(entity_no))


async def _renew(hosts: Sequence[FreezingHost], entity_no: int) -> None:
    while True:
        await asyncio.sleep(RENEWAL_S)
        for host in hosts:
            _send(host, Freeze(entity_no))


def _send(host: FreezingHost, command: Command) -> None:
    """Tell without waiting for an answer, which means nothing any more."""
    call = asyncio.ensure_future(host.call(command))
    call.add_done_callback(lambda done: done.cancelled() or done.exception())
