"""Rights granted by the keys of one connection, and the time when the first of them expires.

The connection is notified at that second, by one timer for any number of tokens and links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from postbus.broker.access.authz import NEVER_S, Authorizer, Grant, has_right, resource_path
from postbus.contract.entities import Right

MAX_WAIT_S: Final = 3_600.0
"""Longest period of the timer. If real time is adjusted, expiry is checked again after this period
at the latest, and with each tick of the connection."""

MAX_GRANTS: Final = 10_000
"""Audiences kept for one connection, as many as a namespace has entities: a name has any number of
spellings. Above it the oldest is dropped, and the links that depend on it."""


class Grants:
    """The valid grants of one connection. Times are real, in seconds since the epoch."""

    def __init__(
        self,
        authorizer: Authorizer,
        real_time_s: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        on_expired: Callable[[], None],
    ) -> None:
        """`on_expired` is called when a grant has expired; it calls `renew`."""
        self._authorizer = authorizer
        self._real_time_s = real_time_s
        self._call_later = call_later
        self._on_expired = on_expired
        self._grants: dict[str, Grant] = {}
        self._earliest_s = NEVER_S
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._grants)

    def rules(self) -> list[str]:
        """Return the rule of each grant."""
        return [grant.rule_name for grant in self._grants.values()]

    def add(self, grant: Grant) -> None:
        """Keep the grant of a token; a later token of an audience replaces the former."""
        before = self._grants.get(grant.path)
        self._grants[grant.path] = grant
        if before is not None:
            self._watch()
        elif len(self._grants) > MAX_GRANTS:
            del self._grants[next(iter(self._grants))]
            self._watch()
        elif grant.expires_s < self._earliest_s:
            self._expect(grant.expires_s)

    def find(self, path: str, right: Right) -> Grant | None:
        """Return a valid grant that covers a right on a path."""
        wanted, now_s = resource_path("/" + path), self._real_time_s()
        for grant in self._grants.values():
            if grant.covers(wanted) and has_right(grant.rights, right) and grant.expires_s > now_s:
                return grant
        return None

    def has_expired(self) -> bool:
        """Return whether a grant has expired since the last renewal."""
        return self._earliest_s <= self._real_time_s()

    def renew(self) -> None:
        """Drop grants that have expired or have no rule; take the current rights of rules."""
        now_s = self._real_time_s()
        renewed = {path: self._authorizer.renewed(grant) for path, grant in self._grants.items()}
        self._grants = {
            path: grant
            for path, grant in renewed.items()
            if grant is not None and grant.expires_s > now_s
        }
        self._watch()

    def close(self) -> None:
        """Forget the callback of the closed connection, which it would keep in memory."""
        self._on_expired = _nothing
        self._stop_timer()

    def _stop_timer(self) -> None:
        self._earliest_s = NEVER_S
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        earliest_s = min((grant.expires_s for grant in self._grants.values()), default=NEVER_S)
        if earliest_s != self._earliest_s:
            self._expect(earliest_s)

    def _expect(self, earliest_s: float) -> None:
        self._stop_timer()
        self._earliest_s = earliest_s
        self._set_timer()

    def _set_timer(self) -> None:
        if self._earliest_s < NEVER_S:
            wait_s = max(self._earliest_s - self._real_time_s(), 0.0)
            self._timer = self._call_later(min(wait_s, MAX_WAIT_S), self._look)

    def _look(self) -> None:
        if self.has_expired():
            self._on_expired()
        else:
            self._set_timer()


def _nothing() -> None:
    """Do nothing: the connection is closed."""
