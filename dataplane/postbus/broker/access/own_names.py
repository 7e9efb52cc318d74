"""Host names of the bus.

Tokens for a bare host and, on loopback, hosts and origins of requests are compared with these
names, never with the host that a client claims to have dialled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

AZURE_DOMAIN: Final = "servicebus.windows.net"
"""Suffix that clients add to the name of a namespace."""

AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@?#\[\]]+)(?::\d{1,5})?")


class OwnNames:
    """Names and addresses of one bus, always including loopback."""

    def __init__(self, namespace: str = "", more: Iterable[str] = ()) -> None:
        """`more`: further host names and addresses of the bus."""
        own = [namespace, f"{namespace}.{AZURE_DOMAIN}"] if namespace else []
        self._names = frozenset(_host_of(name) for name in ("localhost", *own, *more)) - {""}

    def include(self, authority: str) -> bool:
        """Return whether a host, perhaps with port, is this bus: `name`, `name:5671`, `[::1]`."""
        host = _host_of(authority)
        if host in self._names:
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False


def _host_of(authority: str) -> str:
    """Return the lower-case host of an authority, "" when it is invalid."""
    text = authority.strip().lower()
    found = AUTHORITY.fullmatch(text)
    if found is not None:
        return found[1].strip("[]").rstrip(".")
    try:
        return str(ip_address(text))  # IPv6 without brackets
    except ValueError:
        return ""
