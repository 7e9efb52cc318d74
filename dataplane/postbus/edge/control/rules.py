"""Control API of authorization rules. Keys are included only on request."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

from pydantic import SecretStr

from postbus.broker.access.authorization_rules import AuthorizationRuleDescription as KnownRule
from postbus.broker.access.authorization_rules import AuthorizationRules, WantedRule
from postbus.broker.administration import Administration
from postbus.contract.control import (
    AuthorizationRuleDefinition,
    AuthorizationRuleDescription,
    AuthorizationRulePage,
    ProblemType,
)
from postbus.contract.entities import EntityKind
from postbus.edge.control.calls import Answer, Call, ControlRefused, Handler
from postbus.edge.control.routes import MANAGED_BY


class ControlRules:
    """Handlers of the rules of the namespace, of queues and of topics."""

    def __init__(self, rules: AuthorizationRules, administration: Administration) -> None:
        self._rules = rules
        self._administration = administration

    def operations(self) -> Mapping[str, Handler]:
        found: dict[str, Handler] = {}
        scopes = (("", None), ("Queue", EntityKind.QUEUE), ("Topic", EntityKind.TOPIC))
        for of, kind in scopes:
            found[f"list{of}AuthorizationRules"] = partial(self._list, kind)
            found[f"get{of}AuthorizationRule"] = partial(self._get, kind)
            found[f"put{of}AuthorizationRule"] = partial(self._put, kind)
            found[f"delete{of}AuthorizationRule"] = partial(self._delete, kind)
        return found

    async def _list(self, kind: EntityKind | None, call: Call) -> Answer:
        with_keys = call.flag("keys")
        known = self._rules.listed(self._scope(kind, call))
        return Answer(AuthorizationRulePage(items=[_described(rule, with_keys) for rule in known]))

    async def _get(self, kind: EntityKind | None, call: Call) -> Answer:
        found = self._find(self._scope(kind, call), call.names["authorization_rule"])
        if found is None:
            raise _missing(call)
        return Answer(_described(found, call.flag("keys")))

    async def _put(self, kind: EntityKind | None, call: Call) -> Answer:
        scope, name = self._scope(kind, call), call.names["authorization_rule"]
        body = call.read(AuthorizationRuleDefinition)
        wanted = WantedRule(
            name,
            body.rights,
            _text(body.primary_key),
            _text(body.secondary_key),
            call.text_or_none(MANAGED_BY.name),
        )
        put = await self._rules.put(scope, wanted)
        return Answer(_described(put, with_keys=False), 201 if put.is_new else 200)

    async def _delete(self, kind: EntityKind | None, call: Call) -> Answer:
        scope, name = self._scope(kind, call), call.names["authorization_rule"]
        found = self._find(scope, name)
        if found is None:
            raise _missing(call)
        await self._rules.delete(scope, name)
        return Answer(_described(found, with_keys=False))

    def _scope(self, kind: EntityKind | None, call: Call) -> str | None:
        """Return the name of a queue or topic that exists, None for the namespace."""
        if kind is None:
            return None
        name = call.names[kind.value]
        found = self._administration.find(name)
        if found is None or found.kind is not kind or found.name.lower() != name.lower():
            raise ControlRefused(404, f"there is no {kind.value} {name}", ProblemType.NOT_FOUND)
        return found.name

    def _find(self, scope: str | None, name: str) -> KnownRule | None:
        return next((rule for rule in self._rules.listed(scope) if rule.name == name), None)


def _missing(call: Call) -> ControlRefused:
    name = call.names["authorization_rule"]
    return ControlRefused(404, f"there is no authorization rule {name}", ProblemType.NOT_FOUND)


def _text(key: SecretStr | None) -> str | None:
    return None if key is None else key.get_secret_value()


def _described(rule: KnownRule, with_keys: bool) -> AuthorizationRuleDescription:
    return AuthorizationRuleDescription(
        name=rule.name,
        rights=sorted(rule.rights, key=lambda right: right.value),
        is_declared=rule.is_declared,
        created_at=_time(rule.created_ms),
        updated_at=_time(rule.updated_ms),
        managed_by=rule.managed_by,
        primary_key=rule.keys.primary if with_keys else None,
        secondary_key=rule.keys.secondary if with_keys else None,
    )


def _time(value_ms: int) -> datetime | None:
    return datetime.fromtimestamp(value_ms / 1_000, UTC) if value_ms else None
