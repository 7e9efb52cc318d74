"""Management requests about the rules of a subscription, in the shapes that SDKs send and expect.

Requests carry plain maps, answers AMQP described lists; clients compare their codes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from pydantic import ValidationError

from postbus.broker.address import Address
from postbus.broker.audit import AuditedChange
from postbus.contract.entities import (
    CorrelationFilter,
    EntityKind,
    Right,
    RuleProperties,
    SqlAction,
    SqlFilter,
)
from postbus.contract.rule_values import Identifier, Moment, Octets, RuleValue, Span
from postbus.edge.amqp.management_bodies import BadRequest, integer, ok, response
from postbus.edge.amqp.requests import Respond
from postbus.edge.amqp.subscription_rules import SubscriptionRules
from postbus.entity.commands import Done, Refusal, Refused
from postbus.message.codec import (
    TIME_SPAN,
    Described,
    Int,
    Symbol,
    Timestamp,
    Ulong,
    Value,
)
from postbus.message.described_times import offset_ms, span_ticks

if TYPE_CHECKING:
    from postbus.edge.amqp.management_node import ManagementNode

RULE: Final = Ulong(0x0000_0137_0000_0004)
EMPTY_ACTION: Final = Ulong(0x0000_0137_0000_0005)
SQL_ACTION: Final = Ulong(0x0000_0137_0000_0006)
SQL_FILTER: Final = Ulong(0x0000_0013_7000_0006)
TRUE_FILTER: Final = Ulong(0x0000_0013_7000_0007)
FALSE_FILTER: Final = Ulong(0x0000_0013_7000_0008)
CORRELATION_FILTER: Final = Ulong(0x0000_0013_7000_0009)
"""Descriptor codes of answers; those of filters have another prefix than rules and actions."""

COMPATIBILITY_LEVEL: Final = 20
MAX_LISTED: Final = 1_000
MAX_LONG: Final = (1 << 63) - 1

CORRELATION_FIELDS: Final = {
    "correlation-id": "correlation_id",
    "message-id": "message_id",
    "to": "to",
    "reply-to": "reply_to",
    "label": "label",
    "session-id": "session_id",
    "reply-to-session-id": "reply_to_session_id",
    "content-type": "content_type",
}
"""Wire name -> field, in the order of the described list."""


class RuleContext(Protocol):
    """The connection as these requests see it."""

    subscription_rules: SubscriptionRules

    def audited_change(self, verb: str, path: str, right: Right) -> AuditedChange:
        """Describe a change that a right on a path allows for the audit."""


class RuleRequests:
    """The operations of one management node."""

    def __init__(self, connection: RuleContext, node: ManagementNode) -> None:
        self._connection = connection
        self._node = node
        self.operations: dict[str, Callable[[Address, Any, Respond], None]] = {
            "add-rule": self._add,
            "remove-rule": self._remove,
            "enumerate-rules": self._list,
        }

    def _add(self, address: Address, body: Any, respond: Respond) -> None:
        rule = rule_of(body)
        if self._is_subscription(address, respond):
            change = self._connection.audited_change("put rule", address.name, Right.LISTEN)
            self._connection.subscription_rules.add(
                address.name, rule, change, lambda reply: self._answer(respond, reply)
            )

    def _remove(self, address: Address, body: Any, respond: Respond) -> None:
        name = body.get("rule-name")
        if not isinstance(name, str):
            raise BadRequest("rule-name is missing")
        if self._is_subscription(address, respond):
            change = self._connection.audited_change("delete rule", address.name, Right.LISTEN)
            self._connection.subscription_rules.remove(
                address.name, name, change, lambda reply: self._answer(respond, reply)
            )

    def _list(self, address: Address, body: Any, respond: Respond) -> None:
        skip = max(integer(body, "skip", default=0), 0)
        top = max(1, min(integer(body, "top", default=MAX_LISTED), MAX_LISTED))
        if not self._is_subscription(address, respond):
            return
        found = self._connection.subscription_rules.listed(address.name)
        if isinstance(found, Refused):
            self._node.refuse(respond, found)
            return
        rules = found[skip : skip + top]
        if not rules:
            respond(response(204, "No content"))
            return
        described = [describe(each.properties, each.created_ms) for each in rules]
        ok(respond, {"rules": [{"rule-description": each} for each in described]})

    def _is_subscription(self, address: Address, respond: Respond) -> bool:
        if address.kind is EntityKind.SUBSCRIPTION:
            return True
        self._node.refuse(respond, Refused(Refusal.NOT_ALLOWED, "Only subscriptions have rules."))
        return False

    def _answer(self, respond: Respond, reply: Done | Refused) -> None:
        if isinstance(reply, Done):
            ok(respond, None)
        else:
            self._node.refuse(respond, reply)


def rule_of(body: Any) -> RuleProperties:
    """Return the rule of an `add-rule` request. Raises `BadRequest`.

    `rule-description` is a map of `sql-filter` or `correlation-filter`, and of `sql-rule-action`,
    which may be null or empty.
    """
    description = body.get("rule-description")
    if not isinstance(description, dict):
        raise BadRequest("rule-description is missing")
    fields = {str(key): value for key, value in description.items()}
    name = body.get("rule-name", fields.get("rule-name"))
    try:
        return RuleProperties(
            name=name,
            filter_type=_filter_type(fields),
            sql_filter=_sql_filter(fields),
            correlation_filter=_correlation_filter(fields),
            action=_action(fields.get("sql-rule-action")),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = str(first["msg"]).removeprefix("Value error, ")
        raise BadRequest(f"{where}: {why}" if where else why) from None


def _filter_type(fields: dict[str, Any]) -> Literal["TrueFilter", "FalseFilter"] | None:
    if "true-filter" in fields:
        return "TrueFilter"
    return "FalseFilter" if "false-filter" in fields else None


def _sql_filter(fields: dict[str, Any]) -> SqlFilter | None:
    expression = _expression("sql-filter", fields.get("sql-filter"))
    return None if expression is None else SqlFilter(sql_expression=expression)


def _action(value: Any) -> SqlAction | None:
    if value == {}:  # some clients send it explicitly for no action
        return None
    expression = _expression("sql-rule-action", value)
    return None if expression is None else SqlAction(sql_expression=expression)


def _expression(name: str, value: Any) -> str | None:
    if value is None:
        return None
    given = value if isinstance(value, dict) else {}
    expression = {str(key): each for key, each in given.items()}.get("expression")
    if not isinstance(expression, str):
        raise BadRequest(f"{name} has no expression")
    return expression


def _correlation_filter(fields: dict[str, Any]) -> CorrelationFilter | None:
    value = fields.get("correlation-filter")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequest("correlation-filter is not a map")
    given = {str(key): each for key, each in value.items()}
    named = {
        field: given[wire]
        for wire, field in CORRELATION_FIELDS.items()
        if given.get(wire) not in (None, "")
    }
    properties = given.get("properties") or {}
    if not isinstance(properties, dict):
        raise BadRequest("properties of a correlation filter is not a map")
    return CorrelationFilter(
        **named, properties={str(key): _asked(each) for key, each in properties.items()}
    )


def _asked(value: Any) -> Any:
    """Return a value in the form of definitions, which refuse what they cannot hold."""
    match value:
        case Timestamp():
            return Moment(at_ms=int(value))
        case Described() if (ticks := span_ticks(value)) is not None:
            return Span(ticks=ticks)
        case Described() if (at_ms := offset_ms(value)) is not None:
            return Moment(at_ms=at_ms)
        case uuid.UUID():
            return Identifier(id=value)
        case bytes():
            return Octets(octets=value)
        case _:
            return value


def describe(rule: RuleProperties, created_ms: int) -> Described:
    """Return a rule as the described list that clients decode."""
    action: Described = Described(EMPTY_ACTION, [])
    if rule.action is not None:
        action = Described(SQL_ACTION, [rule.action.sql_expression, Int(COMPATIBILITY_LEVEL)])
    return Described(RULE, [_describe_filter(rule), action, rule.name, Timestamp(created_ms)])


def _describe_filter(rule: RuleProperties) -> Described:
    if rule.correlation_filter is not None:
        given = rule.correlation_filter
        fields = [getattr(given, field) for field in CORRELATION_FIELDS.values()]
        properties = {name: _wide(value) for name, value in given.properties.items()}
        return Described(CORRELATION_FILTER, [*fields, properties])
    assert rule.sql_filter is not None
    if rule.filter_type == "TrueFilter":
        return Described(TRUE_FILTER, [])
    if rule.filter_type == "FalseFilter":
        return Described(FALSE_FILTER, [])
    return Described(SQL_FILTER, [rule.sql_filter.sql_expression, Int(COMPATIBILITY_LEVEL)])


def _wide(value: RuleValue) -> Value:
    """Return a value in an AMQP type it fits: a plain number is a long."""
    match value:
        case Moment(at_ms=at_ms):
            return Timestamp(at_ms)
        case Span(ticks=ticks):
            return Described(Symbol(TIME_SPAN), ticks)
        case Identifier(id=value_id):
            return value_id
        case Octets(octets=octets):
            return octets
        case _:
            return Ulong(value) if type(value) is int and value > MAX_LONG else value
