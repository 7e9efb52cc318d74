"""Who may do what: key rules, SAS tokens and what they grant (ADR 31).

Rules lie on the namespace or on one entity. A token is signed with a rule's key for a resource and
everything below it. Time is real time, given by the caller in seconds: never entity time.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, Protocol
from urllib.parse import unquote, unquote_plus

from postbus.broker.access.own_names import OwnNames
from postbus.contract.entities import Right, catalog_key

EXPIRY: Final = re.compile(r"-?[0-9]{1,19}")
"""Seconds since the epoch, as `se` of a token has them."""

SAS_PREFIX: Final = "SharedAccessSignature "
NEVER_S: Final = float("inf")

MAX_TOLD_NAME: Final = 50
"""No rule has a longer name; what a client says it shows may be anything."""


class KeyPair(Protocol):
    """The keys of a rule as text; either signs."""

    @property
    def primary(self) -> str: ...
    @property
    def secondary(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class KeyRule:
    """A named rule. `scope` is an entity's name, None for the whole namespace."""

    name: str
    rights: frozenset[Right]
    keys: KeyPair = field(repr=False)
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights on a path and everything below it, until a time in seconds since the epoch."""

    path: str
    rights: frozenset[Right]
    rule_name: str
    expires_s: float
    scope: str | None = None
    key: str = field(default="", repr=False)
    """The key that was shown; the grant ends when the rule has it no more."""

    @property
    def account(self) -> str:
        """Whose bytes, connections and refusals are counted together: the rule's path and name."""
        return self.rule_name if self.scope is None else f"{self.scope.lower()}/{self.rule_name}"

    @property
    def caller(self) -> str:
        """Who it is, for the audit: `rule root`, `rule orders/worker`."""
        return f"rule {self.rule_name if self.scope is None else f'{self.scope}/{self.rule_name}'}"

    def covers(self, path: str) -> bool:
        """Say whether a normalised path lies under the grant and in the scope of its rule."""
        return covers(self.path, path) and _is_in_scope(self.scope, path)


class TokenRefused(Exception):
    """A token or password does not grant anything; the text is for the client.

    `code` begins the texts that clients log: `InvalidSignature` or `ExpiredToken`, as Service Bus
    says it.
    """

    def __init__(self, text: str, code: str = "InvalidSignature") -> None:
        self.code = code
        super().__init__(text)


class GrantHolder(Protocol):
    """Who keeps grants and looks at them again when rules change."""

    def review_grants(self) -> None: ...


class Authorizer:
    """Checks tokens and passwords against the rules of one namespace."""

    def __init__(
        self,
        rules: Sequence[KeyRule] = (),
        names: OwnNames | None = None,
        is_taken: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`names`: what the bus is called, loopback if not said. `is_taken`: whether a lower-case
        path is an entity's name or the beginning of one: then no host is meant by it.
        """
        self._names = names or OwnNames()
        self._is_taken = is_taken
        self._rules: dict[str, list[KeyRule]] = {}
        self._holders: dict[GrantHolder, None] = {}
        self.refused_count = 0
        self.replace(rules)

    def replace(self, rules: Sequence[KeyRule]) -> None:
        """Take other rules; who holds grants is told."""
        self._rules = {}
        for rule in rules:
            self._rules.setdefault(rule.name, []).append(rule)
        for holder in list(self._holders):
            holder.review_grants()

    def add_holder(self, holder: GrantHolder) -> None:
        """Tell somebody of each change of rules until `remove_holder`."""
        self._holders[holder] = None

    def remove_holder(self, holder: GrantHolder) -> None:
        self._holders.pop(holder, None)

    def check_token(self, token: str, audience: str, now_s: float, below: str = "") -> Grant:
        """Return what a SAS token grants on an audience. Raises `TokenRefused`.

        The signature covers the resource exactly as it was written and the expiry. A token for
        just the place `below` the audience where it is used, such as `messages`, will do. One for
        the bare name of this bus, without scheme, counts for the whole namespace.
        """
        if not token.startswith(SAS_PREFIX):
            raise self._refused("Only shared access signatures are accepted: use a SAS key.")
        fields = fields_of(token)
        try:
            token.encode()  # HTTP brings what is no UTF-8 as half surrogate pairs
            resource, signature = fields["sr"], unquote(fields["sig"])
            expiry, rule_name = fields["se"], unquote_plus(fields["skn"])
            if not EXPIRY.fullmatch(expiry):
                raise ValueError
            expires_s = float(int(expiry))
        except (KeyError, ValueError, OverflowError):
            raise self._refused("The shared access signature is malformed.") from None
        path = resource_path(audience)
        scope = self._scope_of(unquote_plus(resource))
        if not (covers(scope, path) or (below and covers(scope, f"{path}/{below.lower()}"))):
            raise self._refused("The token was signed for another resource.")
        for rule in self._rules_at(rule_name, path):
            key = _signing_key(rule, resource, expiry, signature)
            if key is not None:
                if expires_s <= now_s:
                    self.refused_count += 1
                    raise expired(expires_s)
                return Grant(path, rule.rights, rule.name, expires_s, rule.scope, key)
        raise self._refused(f"The signature does not match a key of {_told_rule(rule_name)}.")

    def check_password(self, rule_name: str, key: str) -> list[Grant]:
        """Return what a rule's name and key grant (SASL PLAIN). Raises `TokenRefused`.

        Rules of one name may stand on several entities; a key that they share counts on each.
        """
        granted = [
            Grant(
                "" if rule.scope is None else rule.scope.lower(),
                rule.rights,
                rule.name,
                NEVER_S,
                rule.scope,
                known,
            )
            for rule in self._rules.get(rule_name, ())
            for known in _keys_of(rule)
            if hmac.compare_digest(known.encode(), key.encode())
        ]
        if not granted:
            raise self._refused("The rule name or the key is wrong.")
        return granted

    def _refused(self, text: str) -> TokenRefused:
        self.refused_count += 1
        return TokenRefused(text)

    def renewed(self, grant: Grant) -> Grant | None:
        """Return a grant with the rights its rule has now; None when rule or key is gone."""
        for rule in self._rules.get(grant.rule_name, ()):
            if rule.scope == grant.scope and grant.key in _keys_of(rule):
                return grant if rule.rights == grant.rights else replace(grant, rights=rule.rights)
        return None

    def _scope_of(self, resource: str) -> str:
        """Return the path a token was signed for, "" when that is the whole namespace."""
        name = resource.rstrip("/")
        if self._names.include(name) and not self._is_taken(name.lower()):
            return ""
        return resource_path(resource)

    def _rules_at(self, rule_name: str, path: str) -> list[KeyRule]:
        return [rule for rule in self._rules.get(rule_name, ()) if _is_in_scope(rule.scope, path)]


def expired(expires_s: float) -> TokenRefused:
    """Return the refusal of a token that ended at a time in seconds, in Service Bus's words."""
    try:
        ended = f"{datetime.fromtimestamp(expires_s, UTC):%Y-%m-%d %H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):  # before the year 1
        ended = "long ago"
    return TokenRefused(f"The token is expired. Expiration time: '{ended}'.", "ExpiredToken")


def has_right(rights: frozenset[Right], needed: Right) -> bool:
    """Say whether rights include one; Manage implies the others."""
    return needed in rights or Right.MANAGE in rights


def audience_path(audience: str) -> str:
    """Return the lower-case path of an audience of any SDK, without scheme, host and slashes."""
    _, is_absolute, rest = audience.partition("://")
    if is_absolute:
        _, _, audience = rest.partition("/")
    return catalog_key(unquote(audience.partition("?")[0]))


def resource_path(audience: str) -> str:
    """Return the path of what an audience is about: a management node belongs to its entity."""
    return audience_path(audience).removesuffix("/$management")


def covers(scope: str, path: str) -> bool:
    """Say whether `path` is `scope` or lies below it; both normalised."""
    return not scope or path == scope or path.startswith(scope + "/")


def _is_in_scope(scope: str | None, path: str) -> bool:
    """Say whether a path is the rule's entity or a node of it, not an entity named below it."""
    if scope is None:
        return True
    entity = scope.lower()
    return path == entity or path.startswith((entity + "/$", entity + "/subscriptions/"))


def sign(resource: str, expiry: str, key: str) -> str:
    """Return the base64 signature of a token; `resource` is URL-encoded already."""
    digest = hmac.digest(key.encode(), f"{resource}\n{expiry}".encode(), "sha256")
    return base64.b64encode(digest).decode()


def is_signed_with(token: str, key: str) -> bool:
    """Say whether a key has signed a token, whatever it is for and until when."""
    fields = fields_of(token)
    try:
        signature = unquote(fields["sig"]).encode()
        return hmac.compare_digest(sign(fields["sr"], fields["se"], key).encode(), signature)
    except (KeyError, ValueError):
        return False


def fields_of(token: str) -> dict[str, str]:
    """Return the fields of a shared access signature as they are written, by lower-case name."""
    fields: dict[str, str] = {}
    for part in token.removeprefix(SAS_PREFIX).split("&"):
        name, _, value = part.partition("=")
        fields[name.strip().lower()] = value
    return fields


def _told_rule(name: str) -> str:
    """Name a rule as a refusal may repeat it; the same whether there is one."""
    is_plain = name.isascii() and name.isprintable() and len(name) <= MAX_TOLD_NAME
    return f"the rule {name}" if name and is_plain else "the rule"


def _signing_key(rule: KeyRule, resource: str, expiry: str, signature: str) -> str | None:
    """Return the key of a rule that made a signature, None when neither did."""
    for key in _keys_of(rule):
        if hmac.compare_digest(sign(resource, expiry, key).encode(), signature.encode()):
            return key
    return None


def _keys_of(rule: KeyRule) -> list[str]:
    return [key for key in (rule.keys.primary, rule.keys.secondary) if key is not None]
