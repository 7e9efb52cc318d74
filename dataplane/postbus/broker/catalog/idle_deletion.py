"""Protocol for deleting an idle or empty entity in step with traffic (ADR 27).

Every partition of the entity is asked to freeze it and to confirm that it was not used, or that it
is empty; all must agree. A partition that is not loaded is loaded for it: it may have a scheduled
message or know of a use. One that does not answer in time counts as in use; the next `Idle` of the
entity repeats the question. A freeze ends by itself, and a reload forgets it: therefore all are
finally asked to keep the entity frozen, and one that had thawed it may have accepted a message
meanwhile. Nothing else is decided here; the catalog deletes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from postbus.entity.commands import (
    Freeze,
    Frozen,
    Hold,
    Refusal,
    Refused,
    Thaw,
)
from postbus.entity.expects import Expects, R

ANSWER_S: Final = 2.0
"""Time after which a partition that does not answer counts as in use. A frozen entity thaws after
the same time."""


class FreezingHost(Protocol):
    """A partition's host, as this protocol sees it."""

    async def call(self, command: Expects[R]) -> R | Refused: ...


SILENT: Final = Refused(
    Refusal.NOT_APPLIED,
    "a partition did not answer in time if the entity is in use; try again",
)


@asynccontextmanager
async def freeze(
    hosts: Sequence[FreezingHost],
    entity_no: int,
    answer_s: float = ANSWER_S,
    *,
    if_empty: bool = False,
) -> AsyncIterator[Refused | None]:
    """Freeze an entity in all its partitions; return the reason if it is in use or has messages.

    Afterwards it is thawed where it still exists.
    """
    try:
        yield await _agree(hosts, Freeze(entity_no, if_empty), answer_s)
    finally:
        # A partition that has not answered yet receives this after the question.
        for host in hosts:
            call = asyncio.ensure_future(host.call(Thaw(entity_no)))  # the answer is not needed
            call.add_done_callback(lambda done: done.cancelled() or done.exception())


async def hold(
    hosts: Sequence[FreezingHost], entity_no: int, answer_s: float = ANSWER_S
) -> Refused | None:
    """Keep it frozen while `freeze` lasts; return the reason if it has thawed meanwhile."""
    return await _agree(hosts, Hold(entity_no), answer_s)


async def _agree(
    hosts: Sequence[FreezingHost], command: Freeze | Hold, answer_s: float
) -> Refused | None:
    """Return None if all partitions answer in time that the entity is frozen, else the reason."""
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
