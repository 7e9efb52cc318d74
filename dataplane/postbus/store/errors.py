"""Errors of a store, and the translation of the driver's exceptions.

One translation for the whole package: callers see `StoreUnavailable` (retry), its subclasses, or
`StoreMisconfigured` (an operator must act); any other exception is a bug and passes unchanged.
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
"""Statement timeout of writers, below the 5 s after which a commit is reported as unknown (ADR 2):
a statement that the server cancelled is known to be rolled back."""


class StoreError(Exception):
    """The store failed."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or type(self).__doc__ or "")


class StoreUnavailable(StoreError):
    """The database is unreachable or cannot answer now; retry."""


class Fenced(StoreUnavailable):
    """Another broker owns the partition."""

    def __init__(self, detail: str = "", owner: UUID | None = None) -> None:
        """`owner` is its incarnation, None if unknown."""
        self.owner = owner
        super().__init__(detail)


class StoreFull(StoreUnavailable):
    """The database is full."""


class StoreMisconfigured(StoreError):
    """The database is not configured as Postbus needs it; an operator must act."""


class SchemaTooNew(StoreMisconfigured):
    """The tables belong to a newer Postbus; run that version."""


UNAVAILABLE_CLASSES: Final = frozenset({"08", "40", "57", "58"})
"""Connection exception, transaction rollback, operator intervention, system error."""
UNAVAILABLE_STATES: Final = frozenset({"25006", "53000", "53300", "53400", "55P03"})
"""Read-only (a standby), too many connections, configuration limit, lock not available."""
FULL_STATES: Final = frozenset({"53100", "53200"})
"""Disk full, out of memory."""
INTERNAL_ERROR: Final = "XX000"
NO_CATALOG_CACHE: Final = "could not write init file"
"""Text, never translated, of the internal error of a new connection whose server must write its
cache of system tables (pg_internal.init) on a full disk."""
MISCONFIGURED_STATES: Final = frozenset({"28000", "28P01", "3D000", "42501"})
"""Role or `pg_hba.conf`, password, missing database, missing privilege: waiting does not help.
Source: PostgreSQL manual, appendix A; docs/guides/troubleshooting.md lists them."""
MISCONFIGURED_ERRORS: Final = (
    ssl.SSLCertVerificationError,
    asyncpg.exceptions.ClientConfigurationError,
    asyncpg.UnsupportedClientFeatureError,
    asyncpg.UnsupportedServerFeatureError,
)
REFUSED_TLS: Final = "rejected SSL upgrade"
"""Text of the driver's error, which has no class of its own, for a server without TLS."""


CONNECTION_ERRORS: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a connection whose end was not fully processed
)


def as_store_error(error: Exception) -> StoreError | None:
    """Return the store error for a driver's exception, None when it is a bug of ours."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        if state in FULL_STATES or (state == INTERNAL_ERROR and NO_CATALOG_CACHE in str(error)):
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
    """Return the store error for an exception during the use of a connection.

    When a connection ends between two steps of the driver, the driver uses objects that are gone.
    """
    if isinstance(error, AttributeError) and connection.is_closed():
        return StoreUnavailable("the connection was ended")
    return as_store_error(error) if isinstance(error, Exception) else None


def _described(error: Exception) -> str:
    """Return the class and text of an error; a timeout has no text of its own."""
    text = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else "")
    return f"{type(error).__name__}: {text}"


@contextmanager
def translated() -> Iterator[None]:
    """Translate the driver's exceptions to StoreError; bugs pass unchanged."""
    try:
        yield
    except Exception as error:
        meaning = as_store_error(error)
        if meaning is None or meaning is error:
            raise
        raise meaning from error


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal for callers waiting for a failed commit (ADR 2).

    An error that the server reports is a rollback; one that ends the session may have come after
    the commit. Arguments that the driver cannot encode were never sent. Anything else is unknown.
    """
    if isinstance(error, asyncpg.PostgresError):
        severity = getattr(error, "severity_en", None) or getattr(error, "severity", None)
        if severity not in ("ERROR", None) or (error.sqlstate or "")[:2] == "08":
            return Refusal.UNKNOWN
        is_full = isinstance(as_store_error(error), StoreFull)
        return Refusal.STORE_FULL if is_full else Refusal.NOT_APPLIED
    return Refusal.NOT_APPLIED if isinstance(error, asyncpg.DataError) else Refusal.UNKNOWN
