"""Messages for users about unusable stores when a bus starts."""

from __future__ import annotations

import asyncpg

from postbus.store.errors import StoreError, StoreMisconfigured


def explain_store_error(error: Exception) -> str:
    """Return a message for the user about an unusable store; never with its password."""
    if isinstance(error, ValueError):
        return (
            "POSTBUS_STORES or a line of POSTBUS_STORES_FILE is not an address of Postgres:"
            " postgresql://user:password@host/database"
        )
    notes = getattr(error, "__notes__", [])
    which = f" ({', '.join(notes)})" if notes else ""
    if isinstance(error, StoreMisconfigured):
        return f"Postgres cannot be used{which}: {error}"
    cause = error.__cause__ if isinstance(error, StoreError) else error
    if isinstance(cause, asyncpg.PostgresError):
        return f"Postgres cannot be used{which}: {cause}"
    return f"Postgres cannot be reached{which}: {cause or error}"
