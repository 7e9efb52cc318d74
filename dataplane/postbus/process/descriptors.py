"""File descriptors of a process with thousands of clients.

Systems begin with 1,024 for each process and allow more; without a request a broker would stop
accepting clients long before its own limit.
"""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)


def allow_descriptors(count: int) -> int:
    """Raise the limit of this process to `count` if it is lower; return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:  # some systems have a lower, hidden limit
            logger.debug(
                "the limit of file descriptors cannot be raised", extra={"why": str(error)}
            )
    if soft != resource.RLIM_INFINITY and soft < count:
        logger.warning(
            "few file descriptors: raise the limit of the process (ulimit -n, LimitNOFILE=)",
            extra={"limit": soft, "wanted": count},
        )
    return soft
