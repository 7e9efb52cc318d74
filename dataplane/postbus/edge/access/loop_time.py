"""Fair shares of event-loop time for accounts.

The cost of a read depends on its content: 64 KiB of frames that do nothing take forty times as long
as 64 KiB of messages. The reads of an account with long turns are handled one after the other, over
all its connections, with pauses as long as the turns, which leaves half of the loop to others. An
account that is alone never pauses. Unauthenticated clients of one address are one account.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

LONG_TURN_NS: Final = 4_000_000
"""CPU time of a turn above which its account is costly. Measured: 64 KiB of messages of 1 KiB take
1 ms."""

SHORT_TURN_NS: Final = LONG_TURN_NS // 8
"""The same for a costly account, whose reads are an eighth as long."""

OTHERS_NS: Final = 5_000_000_000
"""Time after its last turn during which another account counts as present. The time of turns does
not count: a client that waits for a busy loop has no turns. Our choice."""

SIGNING_IN_NS: Final = 500_000_000
"""The same for an unauthenticated client: it either reads again at once or has authenticated."""

COSTLY_NS: Final = 1_000_000_000
"""Time after its last long turn and pause during which an account is costly. Our choice."""

SMALL_BYTES: Final = 1_024
SMALL_AT_ONCE: Final = 8
"""Consecutive reads up to the small size that go first, so that a client that signs in or asks for
little does not wait for all data of others with its key or address. Our choice."""

UNAUTHENTICATED: Final = "\0"
"""First character of the account of unauthenticated clients; their address follows."""


class _Costly:
    """An account with long turns, until a time: that of its next turn, and the turns that wait."""

    __slots__ = ("_large", "_small", "_small_count", "free_ns", "is_due", "until_ns")

    def __init__(self) -> None:
        self.free_ns = 0
        self.until_ns = 0
        self.is_due = False
        self._small: deque[Callable[[], None]] = deque()
        self._large: deque[Callable[[], None]] = deque()
        self._small_count = 0

    @property
    def is_waited_for(self) -> bool:
        return bool(self._small or self._large)

    def add(self, size_bytes: int, turn: Callable[[], None]) -> None:
        (self._small if size_bytes <= SMALL_BYTES else self._large).append(turn)

    def take(self) -> Callable[[], None]:
        """Return the next waiting turn."""
        if self._small and (self._small_count < SMALL_AT_ONCE or not self._large):
            self._small_count += 1
            return self._small.popleft()
        self._small_count = 0
        return self._large.popleft()


class _Collections:
    """CPU time of garbage collections in one thread; called by the collector."""

    def __init__(self) -> None:
        self.took_ns = 0
        self._began_ns = 0
        self._thread = threading.get_ident()

    def __call__(self, phase: str, _: object) -> None:
        if threading.get_ident() == self._thread:
            now_ns = time.thread_time_ns()
            if phase == "start":
                self._began_ns = now_ns
            else:
                self.took_ns += now_ns - self._began_ns


class WorkTime:
    """CPU time of this thread without garbage collections.

    They run in the turn of any account and clean up after all: with many messages in memory one
    takes longer than a long turn.
    """

    def __init__(self) -> None:
        self._collections = _Collections()
        gc.callbacks.append(self._collections)
        weakref.finalize(self, gc.callbacks.remove, self._collections)

    def __call__(self) -> int:
        """Return nanoseconds since an arbitrary moment."""
        return time.thread_time_ns() - self._collections.took_ns


class LoopTime:
    """The turns of all accounts. Times in nanoseconds of `now_ns`, which never decreases."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_ns = now_ns
        self.work_ns = WorkTime()
        self.last = UNAUTHENTICATED
        """The account with the last turn."""
        self._others_ns = self._known_ns = self._unknown_ns = -OTHERS_NS - 1
        """Last turn of any account but the last one, of any authenticated and of any
        unauthenticated one."""
        self.costly: dict[str, _Costly] = {}
        """Usually empty: then no client waits, whatever it sends."""

    def is_costly(self, account: str) -> bool:
        """Return whether an account had long turns recently; its next ones should be short."""
        costly = self.costly.get(account)
        if costly is None:
            return False
        if costly.is_waited_for or costly.until_ns > self._now_ns():
            return True
        del self.costly[account]
        return False

    def admit(self, account: str, size_bytes: int, turn: Callable[[], None]) -> bool:
        """Return whether an account may have a turn now; otherwise call `turn` when it may."""
        if not self.is_costly(account):
            return True
        costly = self.costly[account]
        if not costly.is_waited_for and costly.free_ns <= self._now_ns():
            return True
        costly.add(size_bytes, turn)
        self._arm(account, costly)
        return False

    def saw(self, account: str) -> None:
        """Record that an account is present, whatever its turns cost."""
        now_ns = self._now_ns()
        if account.startswith(UNAUTHENTICATED):
            self._unknown_ns = now_ns
            return
        if account != self.last:
            self._others_ns = self._known_ns
            self.last = account
        self._known_ns = now_ns

    def note(self, account: str, began_ns: int, took_ns: int) -> None:
        """Record the end of a turn.

        `took_ns`: its CPU time by `work_ns`, on a busy machine less than the time others waited.
        """
        if took_ns < LONG_TURN_NS and not self.costly and account == self.last:
            return
        was_alone = self._is_alone(account, began_ns)
        self.saw(account)
        ended_ns = self._now_ns()
        self._others_ns += ended_ns - began_ns
        self._unknown_ns += ended_ns - began_ns
        self._known_ns += ended_ns - began_ns
        costly = self.costly.get(account)
        if was_alone or (took_ns < LONG_TURN_NS and costly is None):
            return
        if costly is None:
            costly = self.costly[account] = _Costly()
        costly.free_ns = 2 * ended_ns - began_ns
        if took_ns >= SHORT_TURN_NS:
            costly.until_ns = costly.free_ns + COSTLY_NS

    def _is_alone(self, account: str, now_ns: int) -> bool:
        """Return whether no other account was present recently."""
        if account.startswith(UNAUTHENTICATED):
            return now_ns - self._known_ns > OTHERS_NS
        others_ns = self._others_ns if account == self.last else self._known_ns
        return now_ns - others_ns > OTHERS_NS and now_ns - self._unknown_ns > SIGNING_IN_NS

    def _arm(self, account: str, costly: _Costly) -> None:
        if costly.is_waited_for and not costly.is_due:
            costly.is_due = True
            delay_s = max(costly.free_ns - self._now_ns(), 0) / 1_000_000_000
            self._loop.call_later(delay_s, self._next, account, costly)

    def _next(self, account: str, costly: _Costly) -> None:
        """Run the first waiting turn."""
        costly.is_due = False
        try:
            if costly.free_ns <= self._now_ns() + 1_000_000:  # timers fire up to 1 ms early
                costly.take()()
        except Exception:
            logger.exception("handling a client failed")
        self._arm(account, costly)
