"""What can go wrong with a store, and what the driver's exceptions mean.

One translation for the whole room: callers see `StoreUnavailable` (try again), its kinds, or
`StoreMisconfigured` (a human must act); what is neither is a bug and passes as it is.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias
from uuid import UUID

import asyncpg

from postbus.entity.commands import Refusal

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

COMMIT_MS: Final = 4_500
"""Statement timeout of writers, below the 5 s after which a commit is called unknown (ADR 2): a
statement the server gave up on is known to be rolled back."""


class StoreError(Exception):
    """The store failed."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or type(self).__doc__ or "")


class StoreUnavailable(StoreError):
    """The database cannot be reached or cannot answer now; try again."""


class Fenced(StoreUnavailable):
    """Another broker owns the partition."""

    def __init__(self, detail: str = "", owner: UUID | None = None) -> None:
        """`owner` is its incarnation, None when that is not known."""
        self.owner = owner
        super().__init__(detail)


class StoreFull(StoreUnavailable):
    """The database has no room left."""


class StoreMisconfigured(StoreError):
    """The database is not set up as Postbus needs it; a human must act."""


class SchemaTooNew(StoreMisconfigured):
    """The tables were made by a newer Postbus; run that version."""


UNAVAILABLE_CLASSES: Final = frozenset({"08", "40", "57", "58"})
"""Connection exception, transaction rollback, operator intervention, system error."""
UNAVAILABLE_STATES: Final = frozenset({"25006", "53000", "53300", "53400", "55P03"})
"""Read-only (a standby), too many connections, configuration limit, lock not available."""
FULL_STATES: Final = frozenset({"53100", "53200"})
"""Disk full, out of memory."""
MISCONFIGURED_STATES: Final = frozenset({"28000", "28P01", "3D000", "42501"})
"""Role or `pg_hba.conf`, password, no such database, a right that is missing: waiting does not mend
them. Source: PostgreSQL manual, appendix A; docs/guides/troubleshooting.md lists them."""
MISCONFIGURED_ERRORS: Final = (
    ssl.SSLCertVerificationError,
    asyncpg.exceptions.ClientConfigurationError,
    asyncpg.UnsupportedClientFeatureError,
    asyncpg.UnsupportedServerFeatureError,
)
REFUSED_TLS: Final = "rejected SSL upgrade"
"""How the driver says that a server has no TLS, by an error without a class of its own."""


CONNECTION_ERRORS: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a connection whose end is half digested
)


def as_store_error(error: Exception) -> StoreError | None:
    """Return what a driver's exception means to callers, None when it is a bug of ours."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        if state in FULL_STATES:
            return StoreFull(str(error))
        if state[:2] in UNAVAILABLE_CLASSES or state in UNAVAILABLE_STATES:
            return StoreUnavailable(_described(error))
        return StoreMisconfigured(str(error)) if state in MISCONFIGURED_STATES else None
    if isinstance(error, asyncpg.DataError):
        return None
    if isinstance(error, MISCONFIGURED_ERRORS) or REFUSED_TLS in str(error):
        return StoreMisconfigured(_described(error))
    if isinstance(error, CONNECTION_ERRORS):
        return StoreUnavailable(_described(error))
    return None


def meaning_of(error: BaseException, connection: Connection) -> StoreError | None:
    """Return what an exception means that came while this connection was used.

    A connection that ends between two steps of the driver makes it use what is not there any more.
    """
    if isinstance(error, AttributeError) and connection.is_closed():
        return StoreUnavailable("the connection was ended")
    return as_store_error(error) if isinstance(error, Exception) else None


def _described(error: Exception) -> str:
    """Return the kind and the text of an error; a limit of time that ran out has no text."""
    text = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else "")
    return f"{type(error).__name__}: {text}"


@contextmanager
def translated() -> Iterator[None]:
    """Raise a StoreError for what the driver raises; bugs pass as they are."""
    try:
        yield
    except Exception as error:
        meaning = as_store_error(error)
        if meaning is None or meaning is error:
            raise
        raise meaning from error


def refusal_of(error: Exception) -> Refusal:
    """Return what a failed commit means to those who wait for it (ADR 2).

    An error the server reports is a rollback; one that ends the session may have come after the
    commit. What the driver refuses to encode was never sent. Whatever else is unknown.
    """
    if isinstance(error, asyncpg.PostgresError):
        severity = getattr(error, "severity_en", None) or getattr(error, "severity", None)
        if severity not in ("ERROR", None) or (error.sqlstate or "")[:2] == "08":
            return Refusal.UNKNOWN
        is_full = isinstance(as_store_error(error), StoreFull)
        return Refusal.STORE_FULL if is_full else Refusal.NOT_APPLIED
    return Refusal.NOT_APPLIED if isinstance(error, asyncpg.DataError) else Refusal.UNKNOWN
