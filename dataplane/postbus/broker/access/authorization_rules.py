"""Authorization rules of a namespace and its entities, which can change at run time.

Rules in manifests are set at the start and can only be changed there. Rules created at run time are
stored with sealed keys (ADR 31), belong to an incarnation of their entity and are deleted with it.
The `Authorizer` gets every change at once, and links that lose their rights are detached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from postbus.broker.access.authz import Authorizer, KeyPair, KeyRule
from postbus.broker.access.sealing import KeySeal, SealBroken
from postbus.broker.catalog.change_tasks import ChangeTasks
from postbus.broker.catalog.directory import Directory, DirectoryRefusal
from postbus.contract.entities import (
    LEAST_KEY_CHARS,
    EntityKind,
    Right,
    catalog_key,
    check_rule_name,
)
from postbus.entity.commands import Refusal, Refused
from postbus.store.authorization import NAMESPACE_NO, AuthorizationStore, SealedRule

MAX_RULES: Final = 12
"""Maximum per namespace or entity; the quota of Service Bus. Rules that programs keep are counted
for each of their marks."""

MAX_RULES_OF_ALL: Final = 100
"""Maximum per namespace or entity with those that programs keep. Our choice: each is compared with
the name of a client's key, and has a share of what is limited."""

MAX_KEY_CHARS: Final = 256
"""The maximum of Service Bus."""


class KeysUnreadable(Exception):
    """Stored keys cannot be decrypted with this sealing key; the text is for the operator."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a rule as text; both are valid for signing."""

    primary: str = field(repr=False)
    secondary: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class WantedRule:
    """A wanted rule; a key that is None stays as it is, or is generated.

    `managed_by`: opaque mark of the program that keeps the rule; None: the mark it has.
    """

    name: str
    rights: frozenset[Right]
    primary: str | None = field(default=None, repr=False)
    secondary: str | None = field(default=None, repr=False)
    managed_by: str | None = None


@dataclass(frozen=True, slots=True)
class AuthorizationRuleDescription:
    """An existing rule. Times in milliseconds, 0 for a rule in a manifest.

    `is_new`: it was created by the change that returned this.
    """

    name: str
    rights: frozenset[Right]
    keys: KeyPair
    is_declared: bool
    created_ms: int = 0
    updated_ms: int = 0
    managed_by: str = ""
    is_new: bool = field(default=False, compare=False)


class AuthorizationRules:
    """All rules of a namespace. `load` first; changes are serialised and run to their end.

    A scope is the name of a queue or topic, None for the namespace. Changes raise
    `DirectoryRefusal`; after an unknown result the store is read before the change is answered.
    """

    def __init__(
        self,
        store: AuthorizationStore,
        seal: KeySeal,
        directory: Directory,
        authorizer: Authorizer,
        declared: Sequence[KeyRule],
        new_key: Callable[[], str],
        change_tasks: ChangeTasks,
        keep_keys: Callable[[KeyRule, Keys], Awaitable[bool]],
    ) -> None:
        """`new_key` returns a random key as text.

        `keep_keys` replaces the keys that the bus generated for a declared rule; it returns False
        when a manifest sets the keys of the rule.
        """
        self._store = store
        self._seal = seal
        self._directory = directory
        self._authorizer = authorizer
        self._declared = list(declared)
        self._new_key = new_key
        self._change_tasks = change_tasks
        self._keep_keys = keep_keys
        self._stored: dict[int, list[AuthorizationRuleDescription]] = {}

    async def load(self) -> None:
        """Read the stored rules; raises `StoreUnavailable` and `KeysUnreadable`.

        Also called when the catalog was moved to another broker.
        """
        stored: dict[int, list[AuthorizationRuleDescription]] = {}
        for rule in await self._store.load():
            stored.setdefault(rule.entity_no, []).append(self._opened(rule))
        self._stored = stored
        self.refresh()

    def declare(self, declared: Sequence[KeyRule]) -> None:
        """Replace the rules that manifests declare."""
        self._declared = list(declared)
        self.refresh()

    def refresh(self) -> None:
        """Update the authorizer; also called when entities are created or deleted."""
        rules = list(self._declared)
        for entity_no, found in self._stored.items():
            scope = None
            if entity_no != NAMESPACE_NO:
                entry = self._directory.numbered(entity_no)
                if entry is None:  # deleted, and may be restored
                    continue
                scope = entry.name
            rules += [KeyRule(rule.name, rule.rights, rule.keys, scope) for rule in found]
        self._authorizer.replace(rules)

    # --- questions ------------------------------------------------------------------------------

    def listed(self, scope: str | None) -> list[AuthorizationRuleDescription]:
        """Return the rules of a scope by name; raises `DirectoryRefusal` for an unknown entity."""
        stored = self._stored.get(self._number_of(scope), [])
        return sorted([*self._declared_at(scope), *stored], key=lambda rule: rule.name)

    # --- changes --------------------------------------------------------------------------------

    async def put(self, scope: str | None, wanted: WantedRule) -> AuthorizationRuleDescription:
        """Create or change a rule."""
        return await self._change_tasks.run(self._put(scope, wanted))

    async def _put(self, scope: str | None, wanted: WantedRule) -> AuthorizationRuleDescription:
        async with self._directory.catalog.changing():
            if any(rule.name == wanted.name for rule in self._declared_at(scope)):
                return await self._put_declared(scope, wanted)
            known = self._stored.get(self._number_of(scope), [])
            others = [_kept(rule) for rule in known if rule.name != wanted.name]
            stored = await self._replace(scope, [*others, wanted])
        put = next(rule for rule in stored if rule.name == wanted.name)
        return replace(put, is_new=len(others) == len(known))

    async def _put_declared(
        self, scope: str | None, wanted: WantedRule
    ) -> AuthorizationRuleDescription:
        """Change the keys of a declared rule, if the bus generated them."""
        if wanted.primary is None and wanted.secondary is None:
            raise _declared(wanted.name)
        (rule,) = (each for each in self._of_scope(scope) if each.name == wanted.name)
        keys = Keys(
            wanted.primary or rule.keys.primary,
            wanted.secondary or rule.keys.secondary or self._new_key(),
        )
        _check_keys(wanted, set(_keys_of(rule)))
        rights = frozenset(Right) if Right.MANAGE in wanted.rights else wanted.rights
        if rights != rule.rights or not await self._keep_keys(rule, keys):
            raise _declared(wanted.name)
        self._declared = [replace(one, keys=keys) if one is rule else one for one in self._declared]
        self.refresh()
        return AuthorizationRuleDescription(rule.name, rule.rights, keys, is_declared=True)

    async def replace(self, scope: str | None, wanted: Sequence[WantedRule]) -> None:
        """Replace the rules of a scope, except those that manifests declare.

        A declared rule may be repeated unchanged, since clients send back all rules they read.
        """
        await self._change_tasks.run(self._replace_all(scope, wanted))

    async def _replace_all(self, scope: str | None, wanted: Sequence[WantedRule]) -> None:
        async with self._directory.catalog.changing():
            await self._replace(scope, self._besides_declared(scope, wanted))

    def check(self, scope: str | None, wanted: Sequence[WantedRule]) -> None:
        """Raise the error that `replace` would raise; the scope may not exist yet."""
        try:
            stored = self._stored.get(self._number_of(scope), [])
        except DirectoryRefusal:
            stored = []
        known = {rule.name: rule for rule in stored}
        self._check(scope, self._besides_declared(scope, wanted), known)

    def _besides_declared(
        self, scope: str | None, wanted: Sequence[WantedRule]
    ) -> list[WantedRule]:
        declared = {rule.name: rule for rule in self._declared_at(scope)}
        return [each for each in wanted if not _repeats(each, declared.get(each.name))]

    async def delete(self, scope: str | None, name: str) -> None:
        """Delete a rule; its keys and tokens become invalid at once."""
        await self._change_tasks.run(self._delete(scope, name))

    async def _delete(self, scope: str | None, name: str) -> None:
        async with self._directory.catalog.changing():
            known = self._stored.get(self._number_of(scope), [])
            if any(rule.name == name for rule in self._declared_at(scope)):
                raise _declared(name)
            if all(rule.name != name for rule in known):
                raise _refusal(Refusal.ENTITY_NOT_FOUND, f"there is no authorization rule {name}")
            await self._replace(scope, [_kept(rule) for rule in known if rule.name != name])

    async def _replace(
        self, scope: str | None, wanted: Sequence[WantedRule]
    ) -> list[AuthorizationRuleDescription]:
        """Check, seal and store rules, then update the authorizer."""
        entity_no = self._number_of(scope)
        known = {rule.name: rule for rule in self._stored.get(entity_no, [])}
        self._check(scope, wanted, known)
        new = [self._completed(each, known.get(each.name)) for each in wanted]
        kept = [rule.name for rule in new if rule is known.get(rule.name)]
        if len(kept) < max(len(new), len(known)):
            await self._write(entity_no, new, kept)
        return self._stored.get(entity_no, [])

    async def _write(
        self, entity_no: int, rules: list[AuthorizationRuleDescription], kept: list[str]
    ) -> None:
        """Store the changed rules. Sealing the same text twice gives different bytes."""
        sealed = [self._sealed(entity_no, rule) for rule in rules if rule.name not in kept]
        catalog = self._directory.catalog
        written = await catalog.written(
            self._store.replace(entity_no, sealed, kept, catalog.fence()),
            lambda: _worth(self._stored.get(entity_no, [])) == _worth(rules),
        )
        if written is None:
            return
        version, stored = written
        catalog.version = version
        self._stored[entity_no] = [self._opened(rule) for rule in stored]
        self.refresh()

    # --- checks ---------------------------------------------------------------------------------

    def _check(
        self,
        scope: str | None,
        wanted: Sequence[WantedRule],
        known: Mapping[str, AuthorizationRuleDescription],
    ) -> None:
        """Raise for invalid rules; keys that a `known` rule has are not checked."""
        kept = {key for rule in known.values() for key in _keys_of(rule)}
        declared = {rule.name for rule in self._declared_at(scope)}
        names = [rule.name for rule in wanted]
        for rule in wanted:
            if rule.name in declared:
                raise _declared(rule.name)
            if names.count(rule.name) > 1:
                raise _wrong(f"the authorization rule {rule.name} occurs twice")
            try:
                check_rule_name(rule.name)
            except ValueError as error:
                raise _wrong(f"{rule.name!r}: {error}") from error
            if not rule.rights:
                raise _wrong(f"the authorization rule {rule.name} has no rights")
            _check_keys(rule, kept)
        counts = Counter(_mark_of(rule, known) for rule in wanted)
        counts[""] += len(declared)
        if max(counts.values()) > MAX_RULES or counts.total() > MAX_RULES_OF_ALL:
            raise _refusal(
                Refusal.QUOTA_EXCEEDED,
                f"the maximum is {MAX_RULES} authorization rules, and {MAX_RULES_OF_ALL} with those"
                " that programs keep",
            )

    def _number_of(self, scope: str | None) -> int:
        if scope is None:
            return NAMESPACE_NO
        entry = self._directory.find(catalog_key(scope))
        if entry is None or entry.kind is EntityKind.SUBSCRIPTION:
            raise _refusal(Refusal.ENTITY_NOT_FOUND, f"there is no queue or topic {scope}")
        return entry.entity_no

    def _declared_at(self, scope: str | None) -> list[AuthorizationRuleDescription]:
        return [
            AuthorizationRuleDescription(rule.name, rule.rights, rule.keys, is_declared=True)
            for rule in self._of_scope(scope)
        ]

    def _of_scope(self, scope: str | None) -> list[KeyRule]:
        name = None if scope is None else scope.lower()
        return [
            rule
            for rule in self._declared
            if (None if rule.scope is None else rule.scope.lower()) == name
        ]

    # --- keys -----------------------------------------------------------------------------------

    def _completed(
        self, wanted: WantedRule, known: AuthorizationRuleDescription | None
    ) -> AuthorizationRuleDescription:
        """Return a rule with all keys, and with implied rights."""
        rights = frozenset(Right) if Right.MANAGE in wanted.rights else wanted.rights
        primary, secondary, mark = wanted.primary, wanted.secondary, wanted.managed_by
        if known is not None:
            mark = known.managed_by if mark is None else mark
            primary = primary or known.keys.primary
            secondary = secondary or known.keys.secondary
        keys = Keys(primary or self._new_key(), secondary or self._new_key())
        if known is not None and (known.rights, known.keys, known.managed_by) == (
            rights,
            keys,
            mark,
        ):
            return known
        return AuthorizationRuleDescription(
            wanted.name, rights, keys, is_declared=False, managed_by=mark or ""
        )

    def _sealed(self, entity_no: int, rule: AuthorizationRuleDescription) -> SealedRule:
        place = f"{entity_no}/{rule.name}"
        assert rule.keys.secondary is not None
        return SealedRule(
            entity_no,
            rule.name,
            rule.rights,
            self._seal.seal(rule.keys.primary, f"{place}/primary"),
            self._seal.seal(rule.keys.secondary, f"{place}/secondary"),
            managed_by=rule.managed_by,
        )

    def _opened(self, rule: SealedRule) -> AuthorizationRuleDescription:
        place = f"{rule.entity_no}/{rule.name}"
        try:
            keys = Keys(
                self._seal.open(rule.primary_sealed, f"{place}/primary"),
                self._seal.open(rule.secondary_sealed, f"{place}/secondary"),
            )
        except SealBroken as error:
            raise KeysUnreadable(
                f"the keys of the authorization rule {rule.name} were sealed with another key:"
                " set POSTBUS_SEALING_KEY_FILE to the former sealing key, or delete the rows of"
                " postbus.authorization_rule and create the rules again"
            ) from error
        return AuthorizationRuleDescription(
            rule.name,
            rule.rights,
            keys,
            False,
            rule.created_ms,
            rule.updated_ms,
            rule.managed_by,
        )


def _check_keys(rule: WantedRule, kept: set[str]) -> None:
    """Raise for keys that are easily guessed; keys that are `kept` may stay shorter."""
    for key in (rule.primary, rule.secondary):
        if key is None or key in kept:
            continue
        if not LEAST_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
            raise _wrong(
                f"a key of {rule.name} must have {LEAST_KEY_CHARS} to {MAX_KEY_CHARS} characters;"
                " leave it out for a random key"
            )


def _mark_of(wanted: WantedRule, known: Mapping[str, AuthorizationRuleDescription]) -> str:
    """Return the mark that a wanted rule will have."""
    if wanted.managed_by is not None:
        return wanted.managed_by
    return known[wanted.name].managed_by if wanted.name in known else ""


def _keys_of(rule: AuthorizationRuleDescription | KeyRule) -> list[str]:
    return [key for key in (rule.keys.primary, rule.keys.secondary) if key is not None]


def _kept(rule: AuthorizationRuleDescription) -> WantedRule:
    return WantedRule(
        rule.name, rule.rights, rule.keys.primary, rule.keys.secondary, rule.managed_by
    )


def _worth(
    rules: Sequence[AuthorizationRuleDescription],
) -> set[tuple[str, frozenset[Right], str, str | None, str]]:
    return {
        (rule.name, rule.rights, rule.keys.primary, rule.keys.secondary, rule.managed_by)
        for rule in rules
    }


def _repeats(wanted: WantedRule, declared: AuthorizationRuleDescription | None) -> bool:
    """Return whether a wanted rule repeats the one that a manifest declares."""
    return declared is not None and (
        wanted.rights == declared.rights
        and wanted.primary in (None, declared.keys.primary)
        and wanted.secondary in (None, declared.keys.secondary)
    )


def _refusal(refusal: Refusal, detail: str) -> DirectoryRefusal:
    return DirectoryRefusal(Refused(refusal, detail))


def _wrong(detail: str) -> DirectoryRefusal:
    return _refusal(Refusal.ARGUMENT_OUT_OF_RANGE, detail)


def _declared(name: str) -> DirectoryRefusal:
    return _refusal(
        Refusal.NOT_ALLOWED,
        f"a manifest declares the authorization rule {name}: change it there, and send the bus"
        " SIGHUP to read it again",
    )
