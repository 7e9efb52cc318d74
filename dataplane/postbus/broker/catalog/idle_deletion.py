"""The protocol by which an idle or empty entity is deleted in step with traffic (ADR 27).

Every partition that the entity lives in is asked to freeze it and to say that it was not used, or
that it holds nothing; all must agree. One that is not loaded is asked too, which loads it: it may
hold a scheduled message or know of a use. One that does not answer in time counts as in use: of an
idle entity the question comes again with the next `Idle`. A freeze ends by itself, and a reload
forgets it: therefore all are asked again, in the end, to keep what they froze, and one that froze
it no longer took perhaps a message meanwhile. Nothing else is decided here; the catalog deletes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from postbus.entity.commands import (
    Expects,
    Freeze,
    Frozen,
    Hold,
    R,
    Refusal,
    Refused,
    Thaw,
)

ANSWER_S: Final = 2.0
"""Silence for so long means in use. A frozen entity thaws by itself after the same time."""


class FreezingHost(Protocol):
    """A partition's host, as far as this protocol knows it."""

    async def call(self, command: Expects[R]) -> R | Refused: ...


SILENT: Final = Refused(
    Refusal.NOT_APPLIED, "a partition did not say in time whether it uses the entity; try again"
)


@asynccontextmanager
async def freeze(
    hosts: Sequence[FreezingHost],
    entity_no: int,
    answer_s: float = ANSWER_S,
    *,
    if_empty: bool = False,
) -> AsyncIterator[Refused | None]:
    """Freeze an entity in all its partitions; why not, when it is in use or holds messages.

    Afterwards it is thawed wherever it still exists; to one that was dropped that means nothing.
    """
    try:
        yield await _agree(hosts, Freeze(entity_no, if_empty), answer_s)
    finally:
        # A partition that has not answered gets this after the question; it stays frozen no longer.
        for host in hosts:
            call = asyncio.ensure_future(host.call(Thaw(entity_no)))  # nobody waits for the answer
            call.add_done_callback(lambda done: done.cancelled() or done.exception())


async def hold(
    hosts: Sequence[FreezingHost], entity_no: int, answer_s: float = ANSWER_S
) -> Refused | None:
    """Keep it frozen for as long as `freeze` lasts; why not, when it was not so all the time."""
    return await _agree(hosts, Hold(entity_no), answer_s)


async def _agree(
    hosts: Sequence[FreezingHost], command: Freeze | Hold, answer_s: float
) -> Refused | None:
    """Return None when all of them answer in time that the entity is frozen."""
    calls = [asyncio.ensure_future(host.call(command)) for host in hosts]
    try:
        done, late = await asyncio.wait(calls, timeout=answer_s)
        replies = [call.result() for call in done]
        refusals = [reply for reply in replies if isinstance(reply, Refused)]
        if refusals:
            return next(
                (each for each in refusals if each.refusal is Refusal.NOT_EMPTY), refusals[0]
            )
        return SILENT if late or not all(isinstance(each, Frozen) for each in replies) else None
    finally:
        for call in calls:
            call.cancel()
