"""Ports for servers that a test starts later.

A port that the system chooses is of those it also gives to connections: one of another test could
have it before the server does.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from random import SystemRandom
from typing import Final

LOOPBACK: Final = "127.0.0.1"
CHOICE: Final = range(10_000, 32_000)
"""Below those of connections. Source: Linux, net.ipv4.ip_local_port_range."""


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody uses."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = SystemRandom().choice(CHOICE)
            try:
                held.enter_context(socket.create_server((LOOPBACK, port)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                found.append(port)
    return found
