"""Connections that have not shown a key: how many there may be, who gives way, what the log hears.

A client is a stranger from its dial until its first good key, over whatever door. Strangers are
bounded, all together and of one address, and give way when there is no room: so that nobody
without a key keeps clients out that have one. Those who dial at once from behind one router are
strangers for milliseconds; only who takes long is asked to leave.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from postbus.edge.suspicion import MAX_ADDRESSES, QUIET_S, source_of

logger = logging.getLogger(__name__)

MAX_STRANGERS: Final = 2_000
"""Our choice: less than half of all connections; a head of 64 KiB each is 128 MiB."""

MAX_STRANGERS_OF_ADDRESS: Final = 1_000
"""Our choice: all clients behind one router or balancer may come back at once, and half of the
strangers are left to others."""

PATIENCE_S: Final = 5.0
"""How long a stranger may take for its key when others of its address wait. Our choice: TLS, SASL
and a token are some ten round trips."""

MAX_LOGGED_CHARS: Final = 300
"""What the log hears at most of a path that a client asked for; names of entities are shorter."""

TOLD_REFUSALS: Final = 10
"""Refusals of an address that are logged one by one, until a quiet minute."""


_NONE: Final = OrderedDict["Stranger", None]()


class Stranger:
    """One connection before its first good key. Whoever has the connection holds it."""

    __slots__ = ("_cut", "_holder", "_registry", "is_known", "since_s", "source")

    def __init__(self, registry: Strangers, source: str, since_s: float) -> None:
        self._registry = registry
        self._holder: object = None
        self._cut: Callable[[], None] = _nothing
        self.source = source
        self.since_s = since_s
        self.is_known = False

    def hold(self, holder: object, cut: Callable[[], None]) -> None:
        """Take the connection over; `cut` ends it at once."""
        self._holder = holder
        self._cut = cut

    def release(self, holder: object) -> None:
        """The connection is gone, unless another has taken it over."""
        if holder is self._holder:
            self._registry.remove(self)

    def show_key(self) -> None:
        """Be a stranger no longer."""
        if not self.is_known:
            self.is_known = True
            self._registry.remove(self)

    def cut(self) -> None:
        """End the connection."""
        self._registry.remove(self)
        self._cut()

    def is_refusal_told(self) -> bool:
        """Say whether the log hears of a refusal by itself: always with a key, else in bounds."""
        return self.is_known or self._registry.note_refusal(self.source)


class Strangers:
    """All strangers of a bus. Time is real and only passes."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        *,
        most: int = MAX_STRANGERS,
        most_of_address: int = MAX_STRANGERS_OF_ADDRESS,
    ) -> None:
        self.now_s = now_s
        self._most = most
        self._most_of_address = most_of_address
        self._all: OrderedDict[Stranger, None] = OrderedDict()  # the oldest first
        self._by_source: dict[str, OrderedDict[Stranger, None]] = {}  # as well
        self._crowded_s: float | None = None
        self._refusals: OrderedDict[str, _Refusals] = OrderedDict()
        self.cut_count = 0
        """Strangers that had to give way so far."""

    @classmethod
    def within(cls, max_connections: int) -> Strangers:
        """Return strangers that have no more than their part of all connections."""
        return cls(
            most=min(MAX_STRANGERS, max_connections * 2 // 5),
            most_of_address=min(MAX_STRANGERS_OF_ADDRESS, max_connections // 5),
        )

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, address: str | None, *, is_full: bool) -> Stranger | None:
        """Return a new stranger, None when it must be turned away; another may have to go for it.

        `is_full`: there is no room unless a stranger leaves.
        """
        source, now_s = source_of(address), self.now_s()
        own = self._by_source.get(source, _NONE)
        if is_full or len(self._all) >= self._most:
            crowd = max(self._by_source.values(), key=len, default=_NONE)
            leaving = self._overdue(self._all, now_s)
            if leaving is None and len(crowd) > len(own) + 1:
                leaving = next(iter(crowd))
        elif len(own) >= self._most_of_address:
            crowd, leaving = own, self._overdue(own, now_s)
        else:
            return self._add(source, now_s)
        if crowd:
            self._tell_crowded(next(iter(crowd)).source, len(crowd), now_s)
        if leaving is None:
            return None
        self.cut_count += 1
        leaving.cut()
        return self._add(source, now_s)

    def remove(self, stranger: Stranger) -> None:
        """Forget a stranger; may be called twice."""
        if self._all.pop(stranger, True):
            return
        found = self._by_source[stranger.source]
        del found[stranger]
        if not found:
            del self._by_source[stranger.source]

    def note_refusal(self, source: str) -> bool:
        """Count a refusal and say whether it is logged by itself; else the log hears of sums."""
        now_s = self.now_s()
        known = self._refusals.get(source)
        if known is None or now_s - known.last_s >= QUIET_S:
            known = self._refusals[source] = _Refusals(0, now_s)
        known.count += 1
        known.last_s = now_s
        self._refusals.move_to_end(source)
        if len(self._refusals) > MAX_ADDRESSES:
            self._refusals.popitem(last=False)
        if known.count > TOLD_REFUSALS and str(known.count).strip("0") == "1":
            logger.warning(
                "much is refused to a client without a key",
                extra={"address": source, "refused": known.count},
            )
        return known.count <= TOLD_REFUSALS

    def _add(self, source: str, now_s: float) -> Stranger:
        stranger = Stranger(self, source, now_s)
        self._all[stranger] = None
        self._by_source.setdefault(source, OrderedDict())[stranger] = None
        return stranger

    @staticmethod
    def _overdue(found: Iterable[Stranger], now_s: float) -> Stranger | None:
        """Return the oldest of strangers when it had its time."""
        oldest = next(iter(found), None)
        return oldest if oldest and now_s - oldest.since_s >= PATIENCE_S else None

    def _tell_crowded(self, source: str, count: int, now_s: float) -> None:
        """Log the first of a burst that lasts until there was room for a minute."""
        if self._crowded_s is None or now_s - self._crowded_s >= QUIET_S:
            logger.warning(
                "too many connections without a key",
                extra={"address": source, "connections": count, "all": len(self._all)},
            )
        self._crowded_s = now_s


@dataclass(slots=True)
class _Refusals:
    count: int
    last_s: float


def _nothing() -> None:
    """Cut what nobody holds yet."""
