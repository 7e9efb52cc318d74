"""What protects the broker from its clients: a bound on bytes taken in, and a bound on errors.

Doors of all connections share one `Intake`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

INTAKE_BYTES: Final = 64 << 20
"""Bytes of unanswered messages of all connections above which no credit is given. Our choice: a
second of sends of a busy bus."""

INTAKE_HARD_BYTES: Final = 256 << 20
"""Bytes of unanswered messages of all connections above which sends are refused as busy (D15)."""

WAITING_BYTES: Final = 64 << 20
"""Bytes of messages that may wait in open transactions of all connections. They have an account of
their own: clients may leave transactions open for minutes, and nobody else shall wait for that."""

P = ParamSpec("P")
D = TypeVar("D", bound="CalledBack")


class Breakable(Protocol):
    """A connection that can be ended for an error of ours."""

    def broke(self) -> None: ...


class CalledBack(Protocol):
    """A door that partitions call back."""

    @property
    def connection(self) -> Breakable: ...


class WaitingDoor(Protocol):
    """A door that waits for room."""

    def replenish(self) -> None: ...


def guarded(method: Callable[Concatenate[D, P], None]) -> Callable[Concatenate[D, P], None]:
    """Let an error in a callback end the connection, not the partition that called back."""

    def call(self: D, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
            self.connection.broke()

    return call


class Intake:
    """Bytes of messages on the way from all sockets to their commits."""

    def __init__(self, soft_bytes: int = INTAKE_BYTES, hard_bytes: int = INTAKE_HARD_BYTES) -> None:
        self.used_bytes = 0
        self.waiting_bytes = 0
        self._soft_bytes = soft_bytes
        self._hard_bytes = hard_bytes
        self._held: dict[WaitingDoor, None] = {}

    @property
    def is_over(self) -> bool:
        """Whether further credit must wait."""
        return self.used_bytes >= self._soft_bytes

    @property
    def is_full(self) -> bool:
        """Whether sends must be refused."""
        return self.used_bytes >= self._hard_bytes

    def take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count what was answered; who waited for room gets credit again."""
        self.used_bytes -= size_bytes
        if self._held and not self.is_over:
            held, self._held = self._held, {}
            for door in held:
                door.replenish()

    def let_wait(self, size_bytes: int) -> bool:
        """Count messages of an open transaction, negative when they go; say whether they may."""
        if size_bytes > 0 and self.waiting_bytes + size_bytes > WAITING_BYTES:
            return False
        self.waiting_bytes += size_bytes
        return True

    def hold(self, door: WaitingDoor) -> None:
        """Let a door wait for room."""
        self._held[door] = None

    def forget(self, door: WaitingDoor) -> None:
        self._held.pop(door, None)
