"""What the bus is called by its clients: the host names it answers to.

Tokens for a bare host and, on loopback, the hosts and origins of requests are compared with these
names and never with what a client says it dialled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

AZURE_DOMAIN: Final = "servicebus.windows.net"
"""Clients that take the name of a namespace put this behind it."""

AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@?#\[\]]+)(?::\d{1,5})?")


class OwnNames:
    """Names and addresses of one bus; loopback is always among them."""

    def __init__(self, namespace: str = "", more: Iterable[str] = ()) -> None:
        """`more`: host names and addresses it is reached by beside its own name."""
        own = [namespace, f"{namespace}.{AZURE_DOMAIN}"] if namespace else []
        self._names = frozenset(_host_of(name) for name in ("localhost", *own, *more)) - {""}

    def include(self, authority: str) -> bool:
        """Say whether a host, with or without a port, is this bus: `name`, `name:5671`, `[::1]`."""
        host = _host_of(authority)
        if host in self._names:
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False


def _host_of(authority: str) -> str:
    """Return the lower-case host of an authority, "" when it is none."""
    text = authority.strip().lower()
    found = AUTHORITY.fullmatch(text)
    if found is not None:
        return found[1].strip("[]").rstrip(".")
    try:
        return str(ip_address(text))  # IPv6 without brackets
    except ValueError:
        return ""
