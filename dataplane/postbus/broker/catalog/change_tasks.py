"""Runs changes of stored definitions to completion, with answers that are certain.

Listeners cancel their work for a client that disconnects. A change that has begun must not stop
there, between the tables and memory, so it runs in a task of the bus. "Not applied" is answered
only when the tables confirm it; any other failure is "unknown".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar

from postbus.broker.catalog.preconditions import DirectoryRefusal, NotWritten
from postbus.entity.commands import Refusal, Refused
from postbus.store.catalog_change import CallerOutdated, CatalogMoved
from postbus.store.errors import Fenced, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CUT_SHORT: Final = Refused(
    Refusal.UNKNOWN,
    "the broker stopped in the meantime; check whether the change was made, or repeat it",
)
STOPPING: Final = Refused(Refusal.NOT_APPLIED, "the broker is stopping")
BROKE: Final = Refused(
    Refusal.UNKNOWN,
    "an internal error, which is in the log of the broker; check whether the change was made, or"
    " repeat it",
)


class ChangeTasks:
    """Runs changes in tasks of one bus."""

    def __init__(self, start: Callable[[Coroutine[object, object, None]], object]) -> None:
        """`start` runs a coroutine in a task of the bus, raising RuntimeError when it has ended."""
        self._start = start

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Return the result of a change; the change continues when its caller is cancelled.

        Raises `DirectoryRefusal` and nothing else.
        """
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            error: Exception = DirectoryRefusal(CUT_SHORT)
            try:
                result = await work
            except Exception as problem:  # noqa: BLE001 - answered, and logged if unexpected
                error = explained(problem)
            else:
                if not answered.done():
                    answered.set_result(result)
            finally:
                if not answered.done():
                    answered.set_exception(error)

        running = run()
        try:
            self._start(running)
        except RuntimeError:
            running.close()
            work.close()
            raise DirectoryRefusal(STOPPING) from None
        return await answered


def explained(error: Exception) -> DirectoryRefusal:
    """Return the refusal for the error of a change; unexpected errors are logged."""
    if isinstance(error, DirectoryRefusal):
        return error
    if not isinstance(error, NotWritten):
        logger.error("a change failed", exc_info=error)
        refused, cause = BROKE, error
    elif isinstance(error.why, Fenced | CatalogMoved | CallerOutdated):
        detail = f"another broker changed the catalog meanwhile: {error.why}; try again"
        refused, cause = Refused(Refusal.NOT_APPLIED, detail), error.why
    elif isinstance(error.why, StoreError):
        detail = f"the store is unavailable: {error.why}; try again"
        refused, cause = Refused(Refusal.NOT_APPLIED, detail), error.why
    else:
        logger.error("a change could not be stored", exc_info=error.why)
        detail = "the change could not be stored, see the broker's log"
        refused, cause = Refused(Refusal.NOT_APPLIED, detail), error.why
    refusal = DirectoryRefusal(refused)
    refusal.__cause__ = cause
    return refusal
