"""Messages and rules for the tests of filters, actions and routing."""

from __future__ import annotations

from collections.abc import Mapping

from postbus.contract.entities import CorrelationFilter, RuleProperties, SqlAction, SqlFilter
from postbus.contract.rule_values import RuleValue
from postbus.message.codec import Symbol, Value, encode_map, encode_value
from postbus.message.envelope import Envelope
from postbus.message.fields import MessageFields
from postbus.message.sections import slice_message
from postbus.rules.compiled import CompiledRule
from tests.message.wire_values import BODY, properties, section

NOW_MS = 1_700_000_000_000


def published(
    application: dict[str, Value] | None = None,
    *,
    annotations: dict[str, Value] | None = None,
    ttl_ms: int | None = None,
    **fields: Value,
) -> Envelope:
    """Return a message; `fields` are those of the properties section by their AMQP names."""
    data = b""
    if annotations:
        named = {Symbol(name): value for name, value in annotations.items()}
        data += section(0x72, named)
    if fields:
        data += properties(**fields)
    if application is not None:
        entries = b"".join(encode_value(n) + encode_value(v) for n, v in application.items())
        data += b"\x00\x53\x74" + encode_map(entries, len(application))
    envelope = slice_message(data + BODY)
    envelope.ttl_ms = ttl_ms
    return envelope


def fields_of(envelope: Envelope) -> MessageFields:
    return MessageFields(envelope, NOW_MS)


def selects(rule: CompiledRule, fields: MessageFields) -> bool:
    """Return whether a filter selects a message, as routing evaluates it."""
    return rule.test(fields) is True


def sql(expression: str, action: str | None = None, name: str = "rule") -> RuleProperties:
    return RuleProperties(
        name=name,
        sql_filter=SqlFilter(sql_expression=expression),
        action=None if action is None else SqlAction(sql_expression=action),
    )


def correlation(
    properties: Mapping[str, RuleValue | Value] | None = None,
    action: str | None = None,
    name: str = "rule",
    **fields: str,
) -> RuleProperties:
    return RuleProperties(
        name=name,
        correlation_filter=CorrelationFilter(properties=dict(properties or {}), **fields),
        action=None if action is None else SqlAction(sql_expression=action),
    )
