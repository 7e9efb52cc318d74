"""Who calls the control API and how far that goes: names and scopes of tokens and certificates."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")


class Scope(Enum):
    """What a token lets its caller do; each of them includes to read."""

    READ = "read"
    """Definitions, counts, status; no message and no key."""

    MESSAGES = "messages"
    """Messages by hand: to show, delete and send them again."""

    DEFINITIONS = "definitions"
    """Entities, rules of subscriptions, the namespace, restores."""

    ALL = "all"
    """Everything, keys of authorization rules among it."""


@dataclass(frozen=True, slots=True)
class ControlCaller:
    """Who asks. `name` is for people: `token ci`, `certificate operator`."""

    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        """Say whether a scope is the caller's."""
        return scope is Scope.READ or not self.scopes.isdisjoint({scope, Scope.ALL})


ANONYMOUS: Final = ControlCaller("nobody", frozenset())
"""Caller of operations that need no token."""


def scopes_of(text: str) -> frozenset[Scope]:
    """Return the scopes of `read,messages`; raises ValueError."""
    return frozenset(Scope(each) for each in text.split(","))


def certified(tls: ssl.SSLObject) -> ControlCaller | None:
    """Return who showed a certificate, which the handshake has checked; None: nobody did."""
    found: dict[str, Any] | None = tls.getpeercert()
    if not found:
        return None
    subject = {key: value for part in found["subject"] for key, value in part}
    name = subject.get("commonName", found["serialNumber"])
    return ControlCaller(f"certificate {name}", frozenset({Scope.ALL}))
