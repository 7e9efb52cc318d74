"""Addresses of the databases of a bus; a file may replace them while the bus runs.

When a connection cannot be opened, the file is read again, so that a changed password needs no
restart; the next attempt uses what was read. Called by `postgres.py`. Nothing here writes an
address into a log or an error: it contains a password.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from postbus.store.outage import SUMMARY_S

logger = logging.getLogger(__name__)

REREAD_S: Final = 1.0
"""Shortest interval between two reads of the file, for all databases and connections together."""

TARGET: Final = frozenset({"host", "port", "dbname", "database", "service"})
"""Parameters of an address that say where the database is."""

Read: TypeAlias = Callable[[], Sequence[str]]


class Addresses:
    """Current addresses, in configured order. `read` reads them again; None: they cannot change."""

    def __init__(
        self,
        dsns: Sequence[str],
        read: Read | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` raises OSError or ValueError, with a text that contains no address."""
        self.dsns = list(dsns)
        self.problem: str | None = None
        """Reason why the file was not used at the last read."""
        self._read = read
        self._monotonic_s = monotonic_s
        self._read_at = float("-inf")
        self._logged: tuple[str, float] | None = None

    @property
    def may_change(self) -> bool:
        return self._read is not None

    def read_again(self) -> None:
        """Read the file unless it was read just now; an unusable one changes nothing."""
        now_s = self._monotonic_s()
        if self._read is None or now_s - self._read_at < REREAD_S:
            return
        self._read_at = now_s
        try:
            found = list(self._read())
            if len(found) != len(self.dsns):
                raise ValueError(
                    f"number of addresses: {len(found)} instead of {len(self.dsns)}; list all"
                    " databases of the bus in their original order"
                )
        except (OSError, ValueError) as error:
            self._note_problem(str(error), now_s)
            return
        self.problem = self._logged = None
        changed = [number for number, dsn in enumerate(found, 1) if dsn != self.dsns[number - 1]]
        if changed:
            self.dsns = found
            logger.info("addresses of databases have changed", extra={"databases": changed})

    def _note_problem(self, problem: str, now_s: float) -> None:
        self.problem = problem
        if (
            self._logged is None
            or self._logged[0] != problem
            or now_s - self._logged[1] >= SUMMARY_S
        ):
            self._logged = problem, now_s
            logger.error(
                "the file of addresses cannot be used, the former ones stay",
                extra={"why": problem},
            )


class Address:
    """The address of one database."""

    def __init__(self, addresses: Addresses, ordinal: int) -> None:
        self._addresses = addresses
        self._ordinal = ordinal

    @property
    def dsn(self) -> str:
        return self._addresses.dsns[self._ordinal]

    @property
    def may_change(self) -> bool:
        return self._addresses.may_change

    @property
    def problem(self) -> str | None:
        """Reason why a changed file was not used."""
        return self._addresses.problem

    def read_again(self) -> None:
        self._addresses.read_again()


def fixed(dsn: str) -> Address:
    """Return an address that cannot change."""
    return Address(Addresses([dsn]), 0)


def target_of(dsn: str) -> tuple[str, str, dict[str, str]]:
    """Return hosts and database of an address, which passwords and TLS do not change.

    Nor does the user, except of an address without a database: that has the user's name.
    """
    parts = urlsplit(dsn)
    queries = dict(parse_qsl(parts.query))
    named = {name: value for name, value in queries.items() if name in TARGET}
    path = parts.path.strip("/")
    if not path and not named.keys() & {"dbname", "database"}:
        path = parts.username or queries.get("user", "")
    return parts.netloc.rpartition("@")[2], path, named
