"""Admission of connections: limits before authentication, eviction, and rate of log entries.

A connection is unauthenticated from its dial until its first good key, whatever protocol it speaks.
Such connections are limited in total and for each address, and are evicted when a limit is reached,
so that clients without a key cannot keep out clients that have one. Clients that dial at once from
behind one router are unauthenticated for milliseconds; only the slow ones are disconnected.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from postbus.broker.access.authz import Grant, is_signed_with
from postbus.edge.access.auth_throttle import source_of
from postbus.edge.access.bursts import QUIET_S, Bursts, is_power_of_ten
from postbus.edge.access.refusal_sums import SUMMED, RefusalSums
from postbus.edge.access.shares import UNKNOWN, Limit, Shares
from postbus.entity.commands import Refusal

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 5_000
"""Connections of a namespace over all protocols; the quota of Service Bus."""

MAX_UNAUTHENTICATED: Final = 2_000
"""Our choice: less than half of all connections; at 256 KiB of heap each they hold 512 MiB."""

MAX_UNAUTHENTICATED_OF_ADDRESS: Final = 1_000
"""Our choice: all clients behind one router or load balancer may reconnect at once, and half of the
unauthenticated connections remain for others."""

PATIENCE_S: Final = 5.0
"""Time that an unauthenticated connection may take for its key when others of its address wait. Our
choice: TLS, SASL and a token are about ten round trips."""

MAX_LOGGED_CHARS: Final = 300
"""Maximum length of a requested path in the log; names of entities are shorter."""

LOGGED_REFUSALS: Final = 10
"""Refusals of an address without a key that are logged one by one, until a minute without refusals.
"""

LOGGED_REFUSALS_A_SECOND: Final = 40
"""Refusals with keys that are logged one by one in a second; one key may have half of them. Our
choice: a person can read no more, and a client that makes a mistake repeats it."""

CONNECTIONS_OF_KEY: Final = 0.8
"""Part of all connections that one key may have while no other key has any."""

_NONE: Final = OrderedDict["Admission", None]()


class Admission:
    """One connection and its state of authentication. The owner of the connection holds it."""

    __slots__ = ("_cut", "_holder", "_key", "_registry", "account", "since_s", "source")

    def __init__(self, registry: AdmissionControl, source: str, since_s: float) -> None:
        self._registry = registry
        self._holder: object = None
        self._cut: Callable[[], None] = _nothing
        self.source = source
        self.since_s = since_s
        self.account = UNKNOWN
        """Account that is charged for the resources of the connection."""
        self._key = ""

    @property
    def is_authenticated(self) -> bool:
        """Return whether the client has presented a good key."""
        return self.account is not UNKNOWN

    def hold(self, holder: object, cut: Callable[[], None]) -> None:
        """Take the connection over; `cut` ends it immediately."""
        self._holder = holder
        self._cut = cut

    def release(self, holder: object) -> None:
        """Forget the connection unless another owner has taken it over."""
        if holder is self._holder:
            self._holder, self._cut = None, _nothing
            self._registry.remove(self)
            if self.is_authenticated:
                self._registry.of_keys.give_back(self.account, 1)

    def mark_authenticated(self, grant: Grant) -> bool:
        """Mark the connection as authenticated unless the key has too many connections; return
        which.

        Only the first key of a connection counts.
        """
        if not self.is_authenticated:
            if not self._registry.of_keys.take(grant.account, 1):
                self._registry.note_crowd(grant.account)
                return False
            self.account = grant.account
            self._key = grant.key
            self._registry.remove(self)
        return True

    def has_signed(self, token: str) -> bool:
        """Return whether a token is signed with the key of the connection: it is then no guess."""
        return bool(self._key) and is_signed_with(token, self._key)

    def cut(self) -> None:
        """End the connection."""
        self._registry.remove(self)
        self._cut()

    def is_refusal_logged(self, refusal: Refusal | None = None, entity: str = "") -> bool:
        """Return whether a refusal is logged individually; all refusals appear in the summaries.

        `refusal`: the broker's reason, if it is one of the broker's.
        """
        if refusal in SUMMED:
            return self._registry.sums.is_logged(refusal, entity)
        if self.is_authenticated:
            return self._registry.note_refusal_of_key(self.account)
        return self._registry.note_refusal(self.source)


class AdmissionControl:
    """All unauthenticated connections of a bus. Times are monotonic, in seconds."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        *,
        most: int = MAX_UNAUTHENTICATED,
        most_of_address: int = MAX_UNAUTHENTICATED_OF_ADDRESS,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.now_s = now_s
        self.of_keys = Shares(Limit(max_connections, CONNECTIONS_OF_KEY))
        """Authenticated connections, by account."""
        self._most = most
        self._most_of_address = most_of_address
        self._all: OrderedDict[Admission, None] = OrderedDict()  # oldest first
        self._by_source: dict[str, OrderedDict[Admission, None]] = {}  # oldest first
        self._crowded_s: float | None = None
        self._refusals = Bursts()
        self._crowds = Bursts()
        self._second = 0
        self._logged = Shares(Limit(LOGGED_REFUSALS_A_SECOND))  # logged in that second
        self._unlogged = Bursts()
        self.sums = RefusalSums()
        """Refusals caused by the broker itself."""
        self.cut_count = 0
        """Unauthenticated connections evicted so far."""

    @classmethod
    def within(cls, max_connections: int) -> AdmissionControl:
        """Return admission control limited to its part of all connections."""
        return cls(
            most=min(MAX_UNAUTHENTICATED, max_connections * 2 // 5),
            most_of_address=min(MAX_UNAUTHENTICATED_OF_ADDRESS, max_connections // 5),
            max_connections=max_connections,
        )

    def resize(self, max_connections: int) -> None:
        """Limit admissions to their part of another number of connections."""
        other = type(self).within(max_connections)
        self._most, self._most_of_address = other._most, other._most_of_address
        self.of_keys.limit = other.of_keys.limit

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, address: str | None, *, is_full: bool) -> Admission | None:
        """Return the admission of a new connection, or None to refuse it; may evict another one.

        `is_full`: all connections are in use; one can only be admitted by evicting another.
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
            self._log_crowded(next(iter(crowd)).source, len(crowd), now_s)
        if leaving is None:
            return None
        self.cut_count += 1
        leaving.cut()
        return self._add(source, now_s)

    def remove(self, admission: Admission) -> None:
        """Forget a connection; may be called twice."""
        if self._all.pop(admission, True):
            return
        found = self._by_source[admission.source]
        del found[admission]
        if not found:
            del self._by_source[admission.source]

    def note_refusal(self, source: str) -> bool:
        """Count a refusal; return whether it is logged individually rather than in a summary."""
        count = self._refusals.note(source, self.now_s())
        if count > LOGGED_REFUSALS and is_power_of_ten(count):
            logger.warning(
                "many requests of an unauthenticated client refused",
                extra={"address": source, "refused": count},
            )
        return count <= LOGGED_REFUSALS

    def note_refusal_of_key(self, account: str) -> bool:
        """Count a refusal of a client with a key, by what was logged within a second."""
        now_s = self.now_s()
        second = int(now_s)
        if second != self._second:
            self._second = second
            self._logged.clear()
        if self._logged.take(account, 1):
            return True
        count = self._unlogged.note(account, now_s)
        if is_power_of_ten(count):
            logger.warning(
                "many requests with one key refused", extra={"rule": account, "refused_more": count}
            )
        return False

    def refusals_of_keys(self) -> dict[str, int]:
        """Return the number of requests above a share, by limit."""
        return {
            "connections": self.of_keys.refused_count,
            "log_lines": self._logged.refused_count,
        }

    def note_crowd(self, account: str) -> None:
        """Log in summaries that a key has too many connections."""
        count = self._crowds.note(account, self.now_s())
        if is_power_of_ten(count):
            extra = {"rule": account, "connections": self.of_keys.of(account), "refused": count}
            logger.warning("too many connections with one key", extra=extra)

    def _add(self, source: str, now_s: float) -> Admission:
        admission = Admission(self, source, now_s)
        self._all[admission] = None
        self._by_source.setdefault(source, OrderedDict())[admission] = None
        return admission

    @staticmethod
    def _overdue(found: Iterable[Admission], now_s: float) -> Admission | None:
        """Return the oldest connection if its time for authentication is over."""
        oldest = next(iter(found), None)
        return oldest if oldest and now_s - oldest.since_s >= PATIENCE_S else None

    def _log_crowded(self, source: str, count: int, now_s: float) -> None:
        """Log the first eviction of a burst; a burst ends after a minute below the limit."""
        if self._crowded_s is None or now_s - self._crowded_s >= QUIET_S:
            logger.warning(
                "too many unauthenticated connections",
                extra={"address": source, "connections": count, "all": len(self._all)},
            )
        self._crowded_s = now_s


def _nothing() -> None:
    """Do nothing: nobody holds the connection yet."""
