"""How accounts share the time of the event loop.

What one read costs depends on what was sent: 64 KiB of frames that do nothing take forty times as
long as 64 KiB of messages. An account that takes long turns pauses between them, as long as they
took, while others are there: so half of the loop is left for those. Alone it pauses never.
Pure: the caller measures, and stops reading.
"""

from __future__ import annotations

from typing import Final

LONG_TURN_NS: Final = 4_000_000
"""CPU time of a turn above which its account pauses. Measured: 64 KiB of messages of 1 KiB take
1 ms."""

OTHERS_NS: Final = 1_000_000_000
"""How long another account counts as there after its last turn. Our choice."""

NOBODY: Final = "\0"


class LoopTime:
    """The turns of all accounts. Times in nanoseconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._last = NOBODY
        self._switched_ns = -OTHERS_NS - 1
        self._paused_until_ns: dict[str, int] = {}

    def is_costly(self, account: str, now_ns: int) -> bool:
        """Say whether an account took long turns a moment ago: the next ones should be short."""
        until_ns = self._paused_until_ns.get(account)
        if until_ns is None:
            return False
        if until_ns + OTHERS_NS > now_ns:
            return True
        del self._paused_until_ns[account]
        return False

    def pause_ns(self, account: str, began_ns: int, ended_ns: int, took_ns: int) -> int:
        """Return how long a connection shall not be read after its turn, mostly 0.

        `took_ns`: the CPU time of the turn, less than others waited where the machine is busy.
        """
        if account != self._last:
            if self._last is not NOBODY:
                self._switched_ns = began_ns
            self._last = account
        if took_ns < LONG_TURN_NS and not self._paused_until_ns:
            return 0
        paused_until_ns = self._paused_until_ns.get(account, 0)
        if took_ns < LONG_TURN_NS and paused_until_ns <= began_ns:
            return 0
        if began_ns - self._switched_ns > OTHERS_NS:
            return 0
        until_ns = max(paused_until_ns, began_ns) + 2 * (ended_ns - began_ns)
        self._paused_until_ns[account] = until_ns
        return until_ns - ended_ns
