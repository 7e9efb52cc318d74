"""How trouble with a store is told in the log."""

from __future__ import annotations

import logging

from postbus.store.errors import StoreMisconfigured, StoreUnavailable

logger = logging.getLogger(__name__)


def log_trouble(partition_id: int, what: str, error: Exception) -> None:
    """Log an outage as a warning, what a human must mend as an error, a bug with its origin."""
    extra = {"partition": partition_id, "error": f"{type(error).__name__}: {error}"}
    if isinstance(error, StoreUnavailable):
        logger.warning(what, extra=extra)
    else:
        is_known = isinstance(error, StoreMisconfigured)
        logger.error(what, extra=extra, exc_info=None if is_known else error)
