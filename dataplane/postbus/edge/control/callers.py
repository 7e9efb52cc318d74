"""Callers of the control API: names and scopes of tokens and certificates."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")


class Scope(Enum):
    """Operations that a token allows; each scope includes reading."""

    READ = "read"
    """Definitions, counts, status; no message and no key."""

    MESSAGES = "messages"
    """Message operations: show, delete and resend."""

    DEFINITIONS = "definitions"
    """Entities, rules of subscriptions, the namespace, restores."""

    ALL = "all"
    """Everything, including keys of authorization rules."""


@dataclass(frozen=True, slots=True)
class ControlCaller:
    """An authenticated caller. `name` is for people: `token ci`, `certificate operator`."""

    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has a scope."""
        return scope is Scope.READ or not self.scopes.isdisjoint({scope, Scope.ALL})


ANONYMOUS: Final = ControlCaller("nobody", frozenset())
"""Caller of operations that need no token."""


def scopes_of(text: str) -> frozenset[Scope]:
    """Return the scopes of `read,messages`; raises ValueError."""
    return frozenset(Scope(each) for each in text.split(","))


def certified(tls: ssl.SSLObject) -> ControlCaller | None:
    """Return the caller of a verified client certificate; None without one."""
    found: dict[str, Any] | None = tls.getpeercert()
    if not found:
        return None
    subject = {key: value for part in found["subject"] for key, value in part}
    name = subject.get("commonName", found["serialNumber"])
    return ControlCaller(f"certificate {name}", frozenset({Scope.ALL}))
