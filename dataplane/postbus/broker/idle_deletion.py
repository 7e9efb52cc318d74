"""The protocol by which an idle entity is deleted in step with traffic (D14).

Every partition that the entity lives in is asked to freeze it and to say that it was not used; all
must agree. One that is not loaded is asked too, which loads it: it may hold a scheduled message or
know of a use. One that does not answer in time counts as in use: the question comes again with the
next `Idle`. A freeze ends by itself, and a reload forgets it: therefore all are asked again, in the
end, to keep what they froze, and one that froze it no longer took perhaps a message meanwhile.
Nothing is decided here but that; the catalog deletes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from postbus.entity.commands import Command, Freeze, Frozen, Hold, Reply, Thaw

ANSWER_S: Final = 2.0
"""Silence for so long means in use. A frozen entity thaws by itself after the same time."""


class FreezingHost(Protocol):
    """A partition's host, as far as this protocol knows it."""

    async def call(self, command: Command) -> Reply: ...


@asynccontextmanager
async def freeze(
    hosts: Sequence[FreezingHost], entity_no: int, answer_s: float = ANSWER_S
) -> AsyncIterator[bool]:
    """Freeze an entity in all its partitions; False when it is in use.

    Afterwards it is thawed wherever it still exists; to one that was dropped that means nothing.
    """
    try:
        yield await _agree(hosts, Freeze(entity_no), answer_s)
    finally:
        # A partition that has not answered gets this after the question; it stays frozen no longer.
        for host in hosts:
            call = asyncio.ensure_future(host.call(Thaw(entity_no)))  # nobody waits for the answer
            call.add_done_callback(lambda done: done.cancelled() or done.exception())


async def hold(hosts: Sequence[FreezingHost], entity_no: int, answer_s: float = ANSWER_S) -> bool:
    """Keep it frozen for as long as `freeze` lasts; False when it was not, all the time, in one."""
    return await _agree(hosts, Hold(entity_no), answer_s)


async def _agree(hosts: Sequence[FreezingHost], command: Command, answer_s: float) -> bool:
    """Say whether all of them answer in time that the entity is frozen."""
    calls = [asyncio.ensure_future(host.call(command)) for host in hosts]
    try:
        done, late = await asyncio.wait(calls, timeout=answer_s)
        return not late and all(isinstance(call.result(), Frozen) for call in done)
    finally:
        for call in calls:
            call.cancel()
