"""How accounts share the time of the event loop.

What one read costs depends on what was sent: 64 KiB of frames that do nothing take forty times as
long as 64 KiB of messages. The reads of an account that takes long turns are handled one after the
other, over all its connections, with pauses as long as the turns: half of the loop is left for
others. An account that is alone pauses never. Who has shown no key is an account by address.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

LONG_TURN_NS: Final = 4_000_000
"""CPU time of a turn above which its account is costly. Measured: 64 KiB of messages of 1 KiB take
1 ms."""

OTHERS_NS: Final = 5_000_000_000
"""How long another account counts as there after its last turn, the time of turns not counted: who
waits for a busy loop has none. Our choice."""

SIGNING_IN_NS: Final = 500_000_000
"""The same of a client that has shown no key yet: it asks again at once, or is somebody else."""

COSTLY_NS: Final = 1_000_000_000
"""How long an account counts as costly after its last long turn. Our choice."""

SMALL_BYTES: Final = 1_024
SMALL_AT_ONCE: Final = 8
"""Reads up to this size go first, as many in a row: who signs in, or asks for a little, does not
wait for all that others with its key or address have sent. Our choice."""

TARGET_NOT_FOUND: Final = "\0"


class _Costly:
    """An account that takes long turns: when it may have the next, and who waits for one."""

    __slots__ = ("_large", "_small", "_small_count", "free_ns", "is_due")

    def __init__(self) -> None:
        self.free_ns = 0
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
        """Return the next turn of those that wait."""
        if self._small and (self._small_count < SMALL_AT_ONCE or not self._large):
            self._small_count += 1
            return self._small.popleft()
        self._small_count = 0
        return self._large.popleft()


class LoopTime:
    """The turns of all accounts. Times in nanoseconds of `now_ns`, which never goes back."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_ns = now_ns
        self.last = TARGET_NOT_FOUND
        """Who had a turn last."""
        self._others_ns = self._known_ns = self._unknown_ns = -OTHERS_NS - 1
        """When another key than the last one had a turn, when any had, and a client without."""
        self.costly: dict[str, _Costly] = {}
        """Empty mostly: then nobody waits, whatever they send."""

    def is_costly(self, account: str) -> bool:
        """Say whether an account took long turns a moment ago: the next ones should be short."""
        costly = self.costly.get(account)
        if costly is None:
            return False
        if costly.is_waited_for or costly.free_ns + COSTLY_NS > self._now_ns():
            return True
        del self.costly[account]
        return False

    def admit(self, account: str, size_bytes: int, turn: Callable[[], None]) -> bool:
        """Say whether an account may have a turn now; else `turn` is called when it may."""
        if not self.is_costly(account):
            return True
        costly = self.costly[account]
        if not costly.is_waited_for and costly.free_ns <= self._now_ns():
            return True
        costly.add(size_bytes, turn)
        self._arm(account, costly)
        return False

    def saw(self, account: str) -> None:
        """Note that an account is there, whatever its turns cost."""
        now_ns = self._now_ns()
        if account.startswith(TARGET_NOT_FOUND):
            self._unknown_ns = now_ns
            return
        if account != self.last:
            self._others_ns = self._known_ns
            self.last = account
        self._known_ns = now_ns

    def note(self, account: str, began_ns: int, took_ns: int) -> None:
        """Note a turn that is over. `took_ns`: its CPU time, less than others waited where the
        machine is busy.
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

    def _is_alone(self, account: str, now_ns: int) -> bool:
        """Say whether nobody else was there a moment ago."""
        if account.startswith(TARGET_NOT_FOUND):
            return now_ns - self._known_ns > OTHERS_NS
        others_ns = self._others_ns if account == self.last else self._known_ns
        return now_ns - others_ns > OTHERS_NS and now_ns - self._unknown_ns > SIGNING_IN_NS

    def _arm(self, account: str, costly: _Costly) -> None:
        if costly.is_waited_for and not costly.is_due:
            costly.is_due = True
            delay_s = max(costly.free_ns - self._now_ns(), 0) / 1_000_000_000
            self._loop.call_later(delay_s, self._next, account, costly)

    def _next(self, account: str, costly: _Costly) -> None:
        """Let the first that waits have its turn."""
        costly.is_due = False
        try:
            if costly.free_ns <= self._now_ns() + 1_000_000:  # timers come up to 1 ms early
                costly.take()()
        except Exception:
            logger.exception("a turn of a client broke")
        self._arm(account, costly)
