"""Outages of a database: begin and cause, logged at once, then once a minute.

The store reports the result of opening it and of each heartbeat. Metrics and `/readyz` read it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from postbus.store.errors import StoreMisconfigured, StoreUnavailable

logger = logging.getLogger(__name__)

SUMMARY_S: Final = 60.0
"""Interval of log lines during an outage. Our choice: rare enough to be read."""


class Outage:
    """The outage of one store. `where`: its host and port, "" if it has none."""

    def __init__(
        self,
        where: str,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.where = where
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._error: Exception | None = None
        self._since_s = 0.0
        self._logged_s = 0.0
        self._unlogged = 0
        self._shown_since = ""

    @property
    def _at(self) -> str:
        return f" at {self.where}" if self.where else ""

    @property
    def is_on(self) -> bool:
        """True if the last use of the store failed."""
        return self._error is not None

    @property
    def text(self) -> str | None:
        """The problem in one line for people; None when there is none."""
        return None if self._error is None else self._describe(f" (since {self._shown_since})")

    def failed(self, error: Exception) -> None:
        """Record a failure of the store; the same error may be reported twice."""
        if error is self._error:
            return
        is_new, now_s = self._error is None, self._monotonic_s()
        self._error = error
        if is_new:
            self._since_s, self._unlogged = now_s, 0
            since = datetime.fromtimestamp(self._wall_s(), UTC)
            self._shown_since = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        self._unlogged += 1
        if not is_new and now_s - self._logged_s < SUMMARY_S:
            return
        extra: dict[str, object] = {"why": self._describe("")}
        if not is_new:
            extra |= {"failures": self._unlogged, "since_s": round(now_s - self._since_s)}
        self._logged_s, self._unlogged = now_s, 0
        is_known = isinstance(error, StoreUnavailable)
        logger.log(logging.WARNING if is_known else logging.ERROR, "the store fails", extra=extra)

    def ended(self) -> None:
        """Record a success of the store."""
        if self._error is not None:
            extra = {"store": self.where, "away_s": self.lasts_s}
            self._error = None
            logger.info("the store answers again", extra=extra)

    @property
    def lasts_s(self) -> int:
        """Seconds since the first failure."""
        return round(self._monotonic_s() - self._since_s)

    def _describe(self, since: str) -> str:
        error = self._error
        line = (f"{error}" or type(error).__name__).splitlines()[0]
        if isinstance(error, StoreUnavailable):
            return f"the store{self._at} is unavailable{since}: {line}"
        if isinstance(error, StoreMisconfigured):
            return f"the store{self._at} cannot be used{since}: {line}"
        return f"the store{self._at} fails{since}: {type(error).__name__}: {line}"
