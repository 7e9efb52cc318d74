"""Reporting of problems with a store, in the log and to people.

An outage is one event: its first failure is logged in full, later ones are summarised once a minute
for all partitions of the store. Problems that need an operator are logged when they are new, then
once a minute. Other errors are all logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from postbus.store.errors import Fenced, StoreMisconfigured, StoreUnavailable

logger = logging.getLogger(__name__)

SUMMARY_S: Final = 60.0
"""Interval of log lines during an outage. Our choice: rare enough to be read."""


class Troubles:
    """Problems with one store. `where` returns its host and port as of now, "" if it has none."""

    def __init__(
        self, where: Callable[[], str], monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._where = where
        self._monotonic_s = monotonic_s
        self._logged_at = float("-inf")
        self._failed_at = float("-inf")
        self._since = 0.0
        self._unlogged = 0
        self._known: tuple[str, str] | None = None  # problem for an operator, as last logged
        self._known_at = 0.0

    def text(self, error: Exception) -> str:
        """Return one line for people; a partition of another broker is no outage."""
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        if not isinstance(error, StoreUnavailable):
            return line
        line = line.removeprefix(f"{StoreUnavailable.__name__}: ")
        if isinstance(error, Fenced):
            return str(error)
        where = f" at {host}" if (host := self._where()) else ""
        return f"the store{where} is unavailable: {line}"

    def log(self, partition_id: int, what: str, error: Exception) -> None:
        """Log an outage as warning, a problem for an operator as error, a bug with traceback."""
        text, now = self.text(error), self._monotonic_s()
        extra: dict[str, object] = {"partition": partition_id, "error": text}
        if isinstance(error, StoreMisconfigured):
            if (what, text) != self._known or now - self._known_at >= SUMMARY_S:
                self._known, self._known_at = (what, text), now
                logger.error(what, extra=extra)
            return
        if not isinstance(error, StoreUnavailable):
            logger.error(what, extra=extra, exc_info=error)
            return
        if now - self._failed_at >= SUMMARY_S:  # another outage
            self._since, self._unlogged = now, 0
            self._logged_at = float("-inf")
        self._failed_at = now
        self._unlogged += 1
        if now - self._logged_at < SUMMARY_S:
            return
        if self._unlogged > 1:
            extra |= {"failures": self._unlogged, "since_s": round(now - self._since)}
        self._logged_at, self._unlogged = now, 0
        logger.warning(what, extra=extra)

    def log_broken_state(self, partition_id: int, error: Exception, *, is_ours: bool) -> None:
        """Log a command that broke a partition's state, with a traceback.

        A bug, unless ownership is not confirmed (ADR 22): then another broker may have changed rows
        that this one knows, for example while this one was paused.
        """
        level = logging.ERROR if is_ours else logging.WARNING
        what = "partition state failed" if is_ours else "partition may belong to another broker"
        logger.log(level, what, extra={"partition": partition_id}, exc_info=error)
