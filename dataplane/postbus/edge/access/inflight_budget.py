"""Limits on bytes in flight from clients, and a guard against our own errors in callbacks.

Endpoints of all connections share one `InflightBudget`. Each key has a share of it: a key at its
limit waits or is refused as busy, the others continue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from postbus.edge.access.shares import Limit, Shares

INFLIGHT_BYTES: Final = 64 << 20
"""Bytes of unanswered and unfinished messages up to which credit is granted. Our choice: one second
of sends of a busy bus."""

INFLIGHT_HARD_BYTES: Final = 256 << 20
"""Bytes of the same up to which sends are not refused as busy (ADR 25)."""

UNFINISHED_BYTES: Final = 64 << 20
"""Bytes of AMQP deliveries whose last frame is still to come; more where messages are larger."""

UNFINISHED_MESSAGES: Final = 4
"""Unfinished messages of the largest size that are always allowed, whatever that size."""

WAITING_BYTES: Final = 128 << 20
"""Bytes of messages that may wait in open transactions. Clients may leave transactions open for
minutes, which must not delay other sends."""

LINKS_BYTES: Final = 256 << 20
"""Bytes that attached links keep: more than 100,000 links with usual names."""

READING_BYTES: Final = 128 << 20
"""Bytes received of HTTP bodies that are not complete. Our choice, as all of these."""

P = ParamSpec("P")
D = TypeVar("D", bound="CalledBack")


class Breakable(Protocol):
    """A connection that can be ended because of an error of ours."""

    def broke(self) -> None: ...


class CalledBack(Protocol):
    """An endpoint that partitions call back."""

    @property
    def connection(self) -> Breakable: ...


class WaitingEndpoint(Protocol):
    """An endpoint that waits for budget."""

    def replenish(self) -> None: ...


def guarded(method: Callable[Concatenate[D, P], None]) -> Callable[Concatenate[D, P], None]:
    """Confine an error in a callback to its connection, so that the partition continues."""

    def call(self: D, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
            self.connection.broke()

    return call


class InflightBudget:
    """Bytes of messages between all sockets and their commits, by account."""

    def __init__(
        self,
        soft_bytes: int = INFLIGHT_BYTES,
        hard_bytes: int = INFLIGHT_HARD_BYTES,
        unfinished_bytes: int = UNFINISHED_BYTES,
    ) -> None:
        self.unfinished = Shares(Limit(unfinished_bytes))
        """Bytes of unfinished AMQP deliveries; these bytes are in `unanswered` too."""
        self.unanswered = Shares(Limit(hard_bytes + unfinished_bytes))
        self.waiting = Shares(Limit(WAITING_BYTES))
        """Bytes in open transactions."""
        self.reading = Shares(Limit(READING_BYTES))
        """Bytes of HTTP bodies."""
        self.links = Shares(Limit(LINKS_BYTES))
        """Bytes kept by attached links; not part of the bytes in flight."""
        self._credit = Limit(soft_bytes + unfinished_bytes)
        self._held: dict[str, dict[WaitingEndpoint, None]] = {}

    @classmethod
    def within(cls, max_message_bytes: int) -> InflightBudget:
        """Return a budget that has room for some messages of the largest size."""
        return cls(unfinished_bytes=_unfinished_bytes(max_message_bytes))

    def resize(self, max_message_bytes: int) -> None:
        """Make room for some messages of another largest size; bytes in flight stay counted."""
        unfinished_bytes = _unfinished_bytes(max_message_bytes)
        self.unfinished.limit = Limit(unfinished_bytes)
        self.unanswered.limit = Limit(INFLIGHT_HARD_BYTES + unfinished_bytes)
        self._credit = Limit(INFLIGHT_BYTES + unfinished_bytes)

    def is_over(self, account: str) -> bool:
        """Return whether further credit of an account must wait."""
        used = self.unanswered.used
        if used <= self._credit.calm:
            return False
        return not self._credit.allows(self.unanswered.of(account), used)

    def is_full(self, account: str) -> bool:
        """Return whether sends of an account must be refused."""
        unanswered = self.unanswered
        if unanswered.used < unanswered.limit.calm or unanswered.has_room(account, 1):
            return False
        unanswered.refused_count += 1
        return True

    def refusals(self) -> dict[str, int]:
        """Return the number of requests above a share, by limit."""
        return {
            "reading": self.reading.refused_count,
            "unanswered": self.unanswered.refused_count,
            "unfinished": self.unfinished.refused_count,
            "transactions": self.waiting.refused_count,
            "links": self.links.refused_count,
        }

    def take(self, account: str, size_bytes: int) -> None:
        self.unanswered.add(account, size_bytes)

    def give_back(self, account: str, size_bytes: int) -> None:
        """Release answered bytes; endpoints of the account that waited grant credit again."""
        self.unanswered.give_back(account, size_bytes)
        if self._held and account in self._held and not self.is_over(account):
            for endpoint in self._held.pop(account):
                endpoint.replenish()

    def hold(self, account: str, endpoint: WaitingEndpoint) -> None:
        """Let an endpoint wait until its account has budget."""
        self._held.setdefault(account, {})[endpoint] = None

    def forget(self, account: str, endpoint: WaitingEndpoint) -> None:
        held = self._held.get(account)
        if held is not None:
            held.pop(endpoint, None)
            if not held:
                del self._held[account]


def _unfinished_bytes(max_message_bytes: int) -> int:
    return max(UNFINISHED_BYTES, UNFINISHED_MESSAGES * max_message_bytes)
