"""Pauses between attempts of an operation that is retried until it succeeds."""

from __future__ import annotations

import asyncio
from typing import Final

FIRST_BACKOFF_S: Final = 0.05
LAST_BACKOFF_S: Final = 5.0


class Backoff:
    """Exponential backoff of one task: each pause is twice the previous one, up to a limit."""

    __slots__ = ("_first_s", "_last_s", "_pause_s")

    def __init__(self, first_s: float = FIRST_BACKOFF_S, last_s: float = LAST_BACKOFF_S) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._pause_s = 0.0

    def next_s(self, left_s: float | None = None) -> float:
        """Return the length of the next pause in seconds, at most `left_s`."""
        self._pause_s = min(max(self._pause_s * 2, self._first_s), self._last_s)
        if left_s is not None:
            self._pause_s = min(self._pause_s, left_s)
        return self._pause_s

    async def pause(self) -> None:
        """Wait until the next attempt."""
        await asyncio.sleep(self.next_s())

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._pause_s = 0.0
