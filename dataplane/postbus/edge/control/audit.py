"""Audit entries of control API calls, and the operation that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from postbus.broker.audit import Audit, AuditedChange, AuditEntry, AuditResult
from postbus.contract import control as contract
from postbus.contract.bulk import PinLimited
from postbus.contract.control import AuditPage, AuthorizationRuleDefinition
from postbus.contract.control_groups import CreateReaderGroup, OfReaderGroup
from postbus.contract.control_messages import (
    DeletedMessages,
    MessagesOf,
    PurgedMessages,
    PurgeMessages,
    ResendMessages,
    ResentMessages,
)
from postbus.contract.entities import Sku, subscription_path
from postbus.contract.namespace import NamespaceDefinition
from postbus.edge.control.callers import ControlCaller
from postbus.edge.control.calls import Answer, Call, Handler
from postbus.edge.control.messages import path_of
from postbus.edge.control.routes import Route

PROTOCOL: Final = "control API"
VERBS: Final = {
    "putNamespace": "put namespace",
    "closeNamespace": "close namespace",
    "openNamespace": "open namespace",
    "putQueue": "put",
    "putTopic": "put",
    "putSubscription": "put",
    "deleteQueue": "delete",
    "deleteTopic": "delete",
    "deleteSubscription": "delete",
    "putRule": "put rule",
    "deleteRule": "delete rule",
    "restoreEntity": "restore",
    "deleteMessages": "delete messages",
    "purgeMessages": "purge messages",
    "resendMessages": "resend messages",
    "createReaderGroup": "create reader group",
    "resetReaderGroup": "reset reader group",
    "deleteReaderGroup": "delete reader group",
    **{f"put{of}AuthorizationRule": "put authorization rule" for of in ("", "Queue", "Topic")},
    **{
        f"delete{of}AuthorizationRule": "delete authorization rule" for of in ("", "Queue", "Topic")
    },
}
"""Operation -> verb in the audit; a test compares with the operations that change something."""

MAY_CHANGE_NOTHING: Final = frozenset({"put", "put namespace"})
"""Verbs of definitions that leave the catalog as it is when repeated."""


def change_of(
    route: Route, call: Call, caller: ControlCaller, address: str
) -> AuditedChange | None:
    """Return the change that a call makes, for the audit; None if it makes none."""
    verb = VERBS.get(route.operation)
    if verb is None or (isinstance(call.body, PurgeMessages) and call.body.dry_run):
        return None
    names, detail = call.names, dict[str, Any]()
    entity = names.get("queue", names.get("topic", ""))
    if "subscription" in names:
        entity = subscription_path(entity, names["subscription"])
    if "policy" in call.queries:
        detail["policy"] = call.text("policy")
    for name in ("rule", "authorization_rule", "entity_id"):
        if name in names:
            detail[{"authorization_rule": "rule", "entity_id": "entityId"}.get(name, name)] = names[
                name
            ]
    match call.body:
        case NamespaceDefinition(declared_sku=Sku() as sku):
            detail["sku"] = sku.value
        case AuthorizationRuleDefinition() as body:
            detail["rights"] = sorted(right.value for right in body.rights)
        case OfReaderGroup() as body:
            entity = path_of(body)
            detail["group"] = body.name
            if isinstance(body, CreateReaderGroup):
                limits = set(PinLimited.model_fields)
                detail |= body.model_dump(
                    mode="json", include=limits, exclude_unset=True, by_alias=True
                )
        case MessagesOf() as body:
            entity = path_of(body)
            said = body.model_dump(include={"where", "session_id", "state", "to"}, by_alias=True)
            detail |= {name: value for name, value in said.items() if value is not None}
            if isinstance(body, ResendMessages) and body.edit is not None:
                verb = "edit messages"
                detail["edited"] = sorted(body.edit.model_dump(by_alias=True, exclude_unset=True))
        case _:
            pass
    return AuditedChange(caller.name, address, PROTOCOL, verb, entity, detail)


def result_of(answer: Answer) -> AuditResult:
    """Return the result of a call for its audit entry."""
    match answer.body:
        case DeletedMessages(numbers=numbers, refused=refused):
            return AuditResult({"deleted": len(numbers), "refused": len(refused)}, numbers)
        case PurgedMessages(matched=matched, deleted=deleted, refused=refused):
            return AuditResult({"matched": matched, "deleted": deleted, "refused": len(refused)})
        case ResentMessages(resent=resent, forwarded=forwarded, refused=refused):
            numbers = [*(each.number for each in resent), *forwarded]
            return AuditResult({"resent": len(numbers), "refused": len(refused)}, numbers)
        case _:
            return AuditResult()


class ControlAudit:
    """Writes audit entries for calls, and handles the operation that lists them."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def operations(self) -> Mapping[str, Handler]:
        return {"listAudit": self._list}

    async def run(
        self, operation: Handler, route: Route, call: Call, caller: ControlCaller, address: str
    ) -> Answer:
        """Run a handler, with an audit entry if it changes something."""
        change = change_of(route, call, caller, address)
        if change is None:
            return await operation(call)
        return await self._audit.recorded(
            change,
            operation(call),
            result_of,
            may_repeat=isinstance(call.body, MessagesOf),
            may_change_nothing=change.verb in MAY_CHANGE_NOTHING,
        )

    async def _list(self, call: Call) -> Answer:
        top = call.number("top")
        entries = await self._audit.page(
            call.number("before"), top + 1, call.text("entity") or None, call.text("caller") or None
        )
        items = [_shown(entry) for entry in entries[:top]]
        following = items[-1].number if len(entries) > top else None
        return Answer(AuditPage(items=items, next_before=following))


def _shown(entry: AuditEntry) -> contract.AuditEntry:
    change = entry.change
    return contract.AuditEntry(
        number=entry.number,
        begun_at=_time(entry.begun_ms),
        ended_at=None if entry.ended_ms is None else _time(entry.ended_ms),
        calls=entry.calls,
        caller=change.caller,
        address=change.address,
        protocol=change.protocol,
        verb=change.verb,
        entity=change.entity,
        detail=dict(change.detail),
        outcome=entry.outcome,
    )


def _time(value_ms: int) -> datetime:
    return datetime.fromtimestamp(value_ms / 1_000, UTC)
