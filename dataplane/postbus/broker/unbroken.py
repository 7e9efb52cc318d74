"""Changes that run to their end: who asked for one may go before it is done.

A door cancels what it does for a client that hangs up. A change that has begun must not end there,
between what the store has and what is in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_RUNNING: Final[set[asyncio.Task[Any]]] = set()
"""The loop itself forgets tasks that nobody holds."""


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """Return what some work returns; it goes on when its caller is cancelled."""
    running = asyncio.get_running_loop().create_task(work, name="change")
    _RUNNING.add(running)
    running.add_done_callback(_RUNNING.discard)
    return await asyncio.shield(running)
