"""Delayed calls for a connection: keys to check, refusals to answer.

Other objects keep these calls for seconds. After the end of the connection they keep nothing of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from postbus.edge.access.auth_throttle import AuthThrottle, TooManyChecks


class CalledConnection(Protocol):
    """A connection that is called later. `address`: its client's IP address."""

    address: str | None

    def broke(self) -> None: ...


class LateCalls:
    """Delayed calls of one connection."""

    def __init__(self) -> None:
        self._waiting: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    def add(self, connection: CalledConnection, call: Callable[[], None]) -> Callable[[], None]:
        """Return a function that makes the call once, or nothing after the connection's end."""
        number, waiting = next(self._numbers), self._waiting

        def guarded_call() -> None:
            try:
                call()
            except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
                connection.broke()

        def call_late() -> None:
            waiting.pop(number, _nothing)()

        waiting[number] = guarded_call
        return call_late

    def admit(
        self, connection: CalledConnection, throttle: AuthThrottle, check: Callable[[], None]
    ) -> None:
        """Let a key be checked in its turn. Raises `TooManyChecks` and then forgets the key."""
        call = self.add(connection, check)
        try:
            throttle.admit(connection.address, call)
        except TooManyChecks:
            self._waiting.popitem()
            raise

    def end(self) -> None:
        """Drop all calls; the connection is over."""
        self._waiting.clear()


def _nothing() -> None:
    """Do nothing: the call was made or dropped."""
