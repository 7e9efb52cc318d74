"""Authorization rules of a Namespace, Queue or Topic: wanted ones, those of the bus, the changes.

The bus makes the keys of a rule and keeps them; a rule with `secretName` has those of the user's
Secret. A rule of the bus belongs to the resource whose mark it has (`managed-by`); the operator
changes no other. Rotation gives one key of each rule a new value in two steps: first every Secret
names the other key only (`RotationStep.hidden`), then the key changes (`RotationStep.renewed`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from postbus.contract.entities import LEAST_KEY_CHARS, ROOT_RULE_NAME, AuthorizationRule, Right
from postbus_operator.objects import Resource

Side = Literal["primary", "secondary"]

MAX_KEY_CHARS: Final = 256
"""The maximum of the bus."""

PLAIN_KEY: Final = re.compile(r"[!-:<-~]+")
"""Printable ASCII without blanks and without `;`, which ends a value of a connection string."""

DEFAULT_RULE: Final = AuthorizationRule(name=ROOT_RULE_NAME, rights=frozenset({Right.MANAGE}))
"""The rule of a Namespace without `authorizationRules`; Azure makes it, too."""


# --- what is there ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The keys of a rule as text; both are valid."""

    primary: str = field(repr=False)
    secondary: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class FoundRule:
    """A rule of the bus. `managed_by` is the mark of the program that keeps it."""

    name: str
    rights: frozenset[Right]
    keys: KeyPair
    managed_by: str

    @classmethod
    def from_answer(cls, item: Mapping[str, Any]) -> FoundRule:
        """Return a rule of a list with keys of the control API."""
        return cls(
            item["name"],
            frozenset(map(Right, item["rights"])),
            KeyPair(item["primaryKey"], item["secondaryKey"] or ""),
            item["managedBy"],
        )


@dataclass(frozen=True, slots=True)
class SourceKeys:
    """Keys of a Secret; one that is None stays as it is on the bus, or the bus makes it."""

    primary: str | None = field(repr=False)
    secondary: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why Secrets are not as the spec wants them, for the condition SecretsSynced."""

    reason: str
    message: str


def wanted_rules(resource: Resource) -> tuple[AuthorizationRule, ...]:
    """Return the rules that the spec wants; a Namespace that names none at all has one."""
    rules = resource.spec.get("authorizationRules")
    if rules is None:
        return (DEFAULT_RULE,) if resource.key.kind == "Namespace" else ()
    return tuple(AuthorizationRule.model_validate(rule) for rule in rules)


def read_source(rule: str, name: str, secret: Mapping[str, Any] | None) -> SourceKeys | Problem:
    """Return the keys of the Secret `name` for a rule; None: there is no such Secret."""
    if secret is None:
        return Problem(
            "SourceMissing",
            f"the Secret {name} of the rule {rule} does not exist: create it with the keys"
            " primaryKey and secondaryKey",
        )
    data = secret.get("data") or {}
    if "primaryKey" not in data:
        return Problem(
            "SourceMissing",
            f"the Secret {name} of the rule {rule} has no primaryKey: add one of"
            f" {LEAST_KEY_CHARS} to {MAX_KEY_CHARS} characters",
        )
    found: dict[str, str | None] = {"secondaryKey": None}
    for key in ("primaryKey", "secondaryKey"):
        if key in data:
            text = _text(data[key])
            if text is None:
                return Problem(
                    "SourceInvalid",
                    f"{key} of the Secret {name} of the rule {rule} is no key: set"
                    f" {LEAST_KEY_CHARS} to {MAX_KEY_CHARS} printable characters without blanks,"
                    " line breaks and semicolons, such as the output of `openssl rand -base64 32`"
                    " without its line break",
                )
            found[key] = text
    return SourceKeys(str(found["primaryKey"]), found["secondaryKey"])


def _text(packed: str) -> str | None:
    try:
        text = base64.b64decode(packed, validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return None
    is_valid = LEAST_KEY_CHARS <= len(text) <= MAX_KEY_CHARS and PLAIN_KEY.fullmatch(text)
    return text if is_valid else None


def former_keys(secret: Mapping[str, Any], rule: str, hidden: str | None) -> SourceKeys | None:
    """Return the keys that a Secret of the operator has for a rule that the bus has no longer.

    `hidden`: the key that the Secret does not name, since it names the other one twice. None: what
    is in it are no keys.
    """
    found = read_source(rule, "", secret)
    if isinstance(found, Problem):
        return None
    match hidden:
        case "primary":
            return SourceKeys(None, found.primary)
        case "secondary":
            return SourceKeys(found.primary, None)
        case _:
            return found


# --- rotation -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RotationStep:
    """The present step. `hidden`: the key that no Secret names; `renewed`: it gets a new value.

    `until`: the end of the time in which clients read the Secrets again.
    """

    hidden: Side | None = None
    renewed: Side | None = None
    until: datetime | None = None


def rotation_step(
    requested: str | None, hidden_since: datetime | None, now: datetime, pause: timedelta
) -> RotationStep | Problem:
    """Return the step of a rotation.

    `requested`: the value of the annotation, None without it. `hidden_since`: since when every
    Secret of the resource has hidden the key; None: not yet all of them.
    """
    match requested:
        case None:
            return RotationStep()
        case "primary" | "secondary":
            side: Side = requested
            until = (now if hidden_since is None else hidden_since) + pause
            return RotationStep(side, None if now < until else side, until)
        case _:
            return Problem(
                "RotationInvalid",
                "the annotation postbus.dev/rotate has another value than primary or secondary:"
                " set one of them, or remove it",
            )


def visible(keys: KeyPair, hidden: Side | None) -> KeyPair:
    """Return the keys as Secrets name them: the other one twice while one is hidden."""
    match hidden:
        case None:
            return keys
        case "primary":
            return KeyPair(keys.secondary, keys.secondary)
        case "secondary":
            return KeyPair(keys.primary, keys.primary)


# --- changes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RulePut:
    """A rule to create or change; a key that is None stays, or is made by the bus."""

    name: str
    rights: frozenset[Right]
    primary: str | None = field(default=None, repr=False)
    secondary: str | None = field(default=None, repr=False)

    def body(self) -> dict[str, Any]:
        """Return the body of a request to the control API."""
        keys = {"primaryKey": self.primary, "secondaryKey": self.secondary}
        return {
            "rights": sorted(right.value for right in self.rights),
            **{name: key for name, key in keys.items() if key is not None},
        }


@dataclass(frozen=True, slots=True)
class RulePlan:
    """Changes of the rules of one resource. `kept`: wanted rules that are the resource's own."""

    puts: tuple[RulePut, ...] = ()
    deletes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def is_own(managed_by: str, mark: str) -> bool:
    """Return whether a mark is the resource's, also that of a former one with its name."""
    return managed_by.rpartition("/")[0] == mark.rpartition("/")[0] != ""


def plan_rules(
    wanted: Sequence[AuthorizationRule],
    found: Sequence[FoundRule],
    sources: Mapping[str, SourceKeys | Problem],
    mark: str,
    renewed: Side | None,
    new_key: Callable[[], str],
) -> RulePlan:
    """Return the changes that make the rules of the bus those that are wanted.

    `sources`: by rule, the keys of wanted rules with `secretName`, and former keys of rules that
    the bus has lost. `mark`: that of the resource. Without the Secret that `secretName` names, a
    rule that exists keeps its keys, and a new one is not made.
    """
    known = {rule.name: rule for rule in found}
    puts: list[RulePut] = []
    kept: list[str] = []
    problems: list[Problem] = []
    for rule in wanted:
        before = known.get(rule.name)
        if before is not None and not is_own(before.managed_by, mark):
            problems.append(_name_taken(rule.name))
            continue
        source = sources.get(rule.name)
        if isinstance(source, Problem):
            problems.append(source)
            if before is None:
                continue
            source = None
        kept.append(rule.name)
        put = _put(rule, before, source, renewed, new_key)
        if before is None or before.managed_by != mark or put != _present(before):
            puts.append(put)
    names = {rule.name for rule in wanted}
    deletes = (
        rule.name for rule in found if rule.name not in names and is_own(rule.managed_by, mark)
    )
    return RulePlan(tuple(puts), tuple(deletes), tuple(kept), tuple(problems))


def _put(
    rule: AuthorizationRule,
    before: FoundRule | None,
    source: SourceKeys | None,
    renewed: Side | None,
    new_key: Callable[[], str],
) -> RulePut:
    """Return the rule as it shall be; the keys of one that exists are named."""
    primary = before.keys.primary if before is not None else None
    secondary = before.keys.secondary if before is not None else None
    if source is not None and (rule.secret_name is not None or before is None):
        primary, secondary = source.primary or primary, source.secondary or secondary
    if rule.secret_name is None and renewed == "primary":
        primary = new_key()
    elif rule.secret_name is None and renewed == "secondary":
        secondary = new_key()
    return RulePut(rule.name, rule.effective_rights, primary, secondary)


def _present(rule: FoundRule) -> RulePut:
    return RulePut(rule.name, rule.rights, rule.keys.primary, rule.keys.secondary)


def _name_taken(name: str) -> Problem:
    return Problem(
        "NameTaken",
        f"the bus has an authorization rule {name} that does not belong to this resource: delete"
        " it there, or choose another name",
    )


# --- what to show -------------------------------------------------------------------------------
