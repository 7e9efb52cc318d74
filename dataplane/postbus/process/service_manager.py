"""Notifications to systemd or another service manager about this process (`Type=notify`).

Source: sd_notify(3): datagrams of NAME=value to the socket that NOTIFY_SOCKET names; a leading `@`
is a name without a file. Without the variable nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

logger = logging.getLogger(__name__)

MORE_TIME: Final = "EXTEND_TIMEOUT_USEC=120000000"
"""Sent repeatedly by a start that waits; without it the start would time out. Our choice: longer
than one attempt at a database may take."""


def notify(*assignments: str) -> None:
    """Send assignments such as `READY=1`. An unreachable manager is only logged."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto("\n".join(assignments).encode(), address)
    except OSError as error:
        logger.warning("the service manager cannot be notified", extra={"why": str(error)})
