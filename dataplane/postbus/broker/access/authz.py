"""Authorization: key rules, SAS tokens and their grants (ADR 31).

Rules belong to the namespace or to one entity. A token is signed with a rule's key for a resource
and everything below it. Time is real time, given by the caller in seconds, never entity time.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, Protocol
from urllib.parse import unquote, unquote_plus

from postbus.broker.access.own_names import OwnNames
from postbus.contract.entities import Right, catalog_key
from postbus.contract.shared_access import SAS_PREFIX, sign

EXPIRY: Final = re.compile(r"-?[0-9]{1,19}")
"""Seconds since the epoch, as in `se` of a token."""

NEVER_S: Final = float("inf")

MAX_TOLD_NAME: Final = 50
"""Maximum length of a rule's name; a client may claim a longer one."""


class KeyPair(Protocol):
    """The keys of a rule as text; both are valid for signing."""

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
    """The key that was used; the grant ends when the rule no longer has it."""

    @property
    def account(self) -> str:
        """Account for limits of bytes, connections and refusals: the rule's path and name."""
        return self.rule_name if self.scope is None else f"{self.scope.lower()}/{self.rule_name}"

    @property
    def caller(self) -> str:
        """Caller for the audit: `rule root`, `rule orders/worker`."""
        return f"rule {self.rule_name if self.scope is None else f'{self.scope}/{self.rule_name}'}"

    def covers(self, path: str) -> bool:
        """Return whether the grant and its rule's scope cover a normalised path."""
        return covers(self.path, path) and _is_in_scope(self.scope, path)


class TokenRefused(Exception):
    """A token or password is rejected; the text is for the client.

    `code` is the prefix of the text, as in Service Bus: `InvalidSignature` or `ExpiredToken`.
    """

    def __init__(self, text: str, code: str = "InvalidSignature") -> None:
        self.code = code
        super().__init__(text)


class GrantHolder(Protocol):
    """An object that keeps grants and reviews them when rules change."""

    def review_grants(self) -> None: ...


class Authorizer:
    """Checks tokens and passwords against the rules of one namespace."""

    def __init__(
        self,
        rules: Sequence[KeyRule] = (),
        names: OwnNames | None = None,
        is_taken: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`names`: host names of the bus, default loopback. `is_taken`: whether a lower-case path
        is an entity's name or a prefix of one, and thus not a host.
        """
        self._names = names or OwnNames()
        self._is_taken = is_taken
        self._rules: dict[str, list[KeyRule]] = {}
        self._holders: dict[GrantHolder, None] = {}
        self.refused_count = 0
        self.replace(rules)

    def replace(self, rules: Sequence[KeyRule]) -> None:
        """Replace the rules and notify holders of grants."""
        self._rules = {}
        for rule in rules:
            self._rules.setdefault(rule.name, []).append(rule)
        for holder in list(self._holders):
            holder.review_grants()

    def add_holder(self, holder: GrantHolder) -> None:
        """Notify a holder of each change of rules until `remove_holder`."""
        self._holders[holder] = None

    def remove_holder(self, holder: GrantHolder) -> None:
        self._holders.pop(holder, None)

    def check_token(self, token: str, audience: str, now_s: float, below: str = "") -> Grant:
        """Return the grant of a SAS token on an audience. Raises `TokenRefused`.

        The signature covers the resource exactly as written and the expiry. A token only for the
        resource `below` the audience where it is used, such as `messages`, is accepted. A token for
        the bare name of this bus, without scheme, is valid for the whole namespace.
        """
        if not token.startswith(SAS_PREFIX):
            raise self._refused("Only shared access signatures are accepted: use a SAS key.")
        fields = fields_of(token)
        try:
            token.encode()  # HTTP delivers invalid UTF-8 as lone surrogates
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
        """Return the grants of a rule's name and key (SASL PLAIN). Raises `TokenRefused`.

        Several entities may have a rule with this name; a key that they share is valid for each.
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
        """Return a grant with the current rights of its rule; None if the rule or key is gone."""
        for rule in self._rules.get(grant.rule_name, ()):
            if rule.scope == grant.scope and grant.key in _keys_of(rule):
                return grant if rule.rights == grant.rights else replace(grant, rights=rule.rights)
        return None

    def _scope_of(self, resource: str) -> str:
        """Return the path that a token was signed for, "" for the whole namespace."""
        name = resource.rstrip("/")
        if self._names.include(name) and not self._is_taken(name.lower()):
            return ""
        return resource_path(resource)

    def _rules_at(self, rule_name: str, path: str) -> list[KeyRule]:
        return [rule for rule in self._rules.get(rule_name, ()) if _is_in_scope(rule.scope, path)]


def expired(expires_s: float) -> TokenRefused:
    """Return the refusal of a token that expired at a time in seconds, in Service Bus's words."""
    try:
        ended = f"{datetime.fromtimestamp(expires_s, UTC):%Y-%m-%d %H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):  # before the year 1
        ended = "long ago"
    return TokenRefused(f"The token is expired. Expiration time: '{ended}'.", "ExpiredToken")


def has_right(rights: frozenset[Right], needed: Right) -> bool:
    """Return whether rights include one; Manage implies the others."""
    return needed in rights or Right.MANAGE in rights


def audience_path(audience: str) -> str:
    """Return the lower-case path of an audience of any SDK, without scheme, host and slashes."""
    _, is_absolute, rest = audience.partition("://")
    if is_absolute:
        _, _, audience = rest.partition("/")
    return catalog_key(unquote(audience.partition("?")[0]))


def resource_path(audience: str) -> str:
    """Return the entity's path of an audience: a management node belongs to its entity."""
    return audience_path(audience).removesuffix("/$management")


def covers(scope: str, path: str) -> bool:
    """Return whether `path` is `scope` or below it; both normalised."""
    return not scope or path == scope or path.startswith(scope + "/")


def _is_in_scope(scope: str | None, path: str) -> bool:
    """Return whether a path is the rule's entity or a node of it, not an entity named below it."""
    if scope is None:
        return True
    entity = scope.lower()
    return path == entity or path.startswith((entity + "/$", entity + "/subscriptions/"))


def is_signed_with(token: str, key: str) -> bool:
    """Return whether a key has signed a token, for any resource and expiry."""
    fields = fields_of(token)
    try:
        signature = unquote(fields["sig"]).encode()
        return hmac.compare_digest(sign(fields["sr"], fields["se"], key).encode(), signature)
    except (KeyError, ValueError):
        return False


def fields_of(token: str) -> dict[str, str]:
    """Return the raw fields of a shared access signature, by lower-case name."""
    fields: dict[str, str] = {}
    for part in token.removeprefix(SAS_PREFIX).split("&"):
        name, _, value = part.partition("=")
        fields[name.strip().lower()] = value
    return fields


def _told_rule(name: str) -> str:
    """Return the name of a rule for a refusal; does not reveal whether the rule exists."""
    is_plain = name.isascii() and name.isprintable() and len(name) <= MAX_TOLD_NAME
    return f"the rule {name}" if name and is_plain else "the rule"


def _signing_key(rule: KeyRule, resource: str, expiry: str, signature: str) -> str | None:
    """Return the key of a rule that made a signature, None if neither did."""
    for key in _keys_of(rule):
        if hmac.compare_digest(sign(resource, expiry, key).encode(), signature.encode()):
            return key
    return None


def _keys_of(rule: KeyRule) -> list[str]:
    return [key for key in (rule.keys.primary, rule.keys.secondary) if key is not None]
