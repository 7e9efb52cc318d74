"""Rules of subscriptions in the XML of administration: filters, actions and typed values.

A true or false filter keeps its type; its SQL is always written as `1=1` or `1=0`.
"""

from __future__ import annotations

from typing import Any, Final
from xml.etree.ElementTree import Element

from pydantic import ValidationError

from postbus.contract.entities import CorrelationFilter, RuleProperties, SqlAction, SqlFilter
from postbus.contract.rule_values import (
    Identifier,
    Moment,
    Octets,
    RuleValue,
    Span,
    format_moment,
    format_octets,
    format_span,
    parse_moment_ms,
    parse_span_ticks,
)
from postbus.edge.atom.xml_text import (
    SCHEMA_NAMESPACE,
    BadDocument,
    children,
    element,
    read_boolean,
    read_integer,
    text_of,
    type_of,
    write_boolean,
    written,
)

COMPATIBILITY_LEVEL: Final = "20"
MAX_INT: Final = 2**31 - 1
DEFAULT_RULE_NAME: Final = "$Default"

CORRELATION_ELEMENTS: Final = {
    "CorrelationId": "correlation_id",
    "MessageId": "message_id",
    "To": "to",
    "ReplyTo": "reply_to",
    "Label": "label",
    "SessionId": "session_id",
    "ReplyToSessionId": "reply_to_session_id",
    "ContentType": "content_type",
}
"""Element -> field, in the order of Service Bus."""

PAIR: Final = "KeyValueOfstringanyType"
GUID: Final = "{http://schemas.microsoft.com/2003/10/Serialization/}guid"


# --- reading ------------------------------------------------------------------------------------


def read_rule(description: Element, name: str | None = None) -> RuleProperties:
    """Return the rule of a `RuleDescription` or a `DefaultRuleDescription`.

    `name` has precedence, then the element's, then `$Default`. A rule without a filter matches
    everything. Raises `BadDocument`.
    """
    said: dict[str, Any] = {}
    for tag, child in children(description):
        match tag:
            case "Filter":
                said |= _read_filter(child)
            case "Action":
                said["action"] = _read_action(child)
            case "Name":
                said["name"] = text_of(child).strip() or DEFAULT_RULE_NAME
            case _:
                pass
    if not said.keys() & {"sql_filter", "correlation_filter", "filter_type"}:
        said["filter_type"] = "TrueFilter"
    said["name"] = said.get("name", DEFAULT_RULE_NAME) if name is None else name
    try:
        return RuleProperties(**said)
    except ValidationError as error:
        raise BadDocument(first_mistake(error)) from None


def first_mistake(error: ValidationError) -> str:
    """Return the first mistake, with the name of its field."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, problem["loc"]))
    why = str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {why[:1].lower()}{why[1:]}" if where else why


def _read_filter(said: Element) -> dict[str, Any]:
    try:
        match type_of(said)[1]:
            case "TrueFilter" | "FalseFilter" as kind:
                return {"filter_type": kind}
            case "SqlFilter":
                return {"sql_filter": SqlFilter(**_read_sql(said))}
            case "CorrelationFilter":
                return {"correlation_filter": _read_correlation(said)}
            case other:
                raise BadDocument(
                    f"Filter: the type {other or 'that is missing'} is not known; use SqlFilter,"
                    " TrueFilter, FalseFilter or CorrelationFilter as i:type"
                )
    except ValidationError as error:
        raise BadDocument(f"Filter: {first_mistake(error)}") from None


def _read_action(said: Element) -> SqlAction | None:
    try:
        match type_of(said)[1]:
            case "EmptyRuleAction":
                return None
            case "SqlRuleAction":
                return SqlAction(**_read_sql(said))
            case other:
                raise BadDocument(
                    f"Action: the type {other or 'that is missing'} is not known; use"
                    " SqlRuleAction or EmptyRuleAction as i:type"
                )
    except ValidationError as error:
        raise BadDocument(f"Action: {first_mistake(error)}") from None


def _read_sql(said: Element) -> dict[str, Any]:
    read: dict[str, Any] = {"sql_expression": ""}
    for tag, child in children(said):
        if tag == "SqlExpression":
            read["sql_expression"] = text_of(child)
        elif tag == "Parameters":
            parameters = _read_pairs(child)
            if parameters:
                read["parameters"] = parameters
    return read


def _read_correlation(said: Element) -> CorrelationFilter:
    read: dict[str, Any] = {}
    for tag, child in children(said):
        field = CORRELATION_ELEMENTS.get(tag)
        if field is not None:
            read[field] = text_of(child) or None  # SDKs write omitted values as empty
        elif tag == "Properties":
            read["properties"] = _read_pairs(child)
    return CorrelationFilter(**read)


def _read_pairs(said: Element) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for tag, pair in children(said):
        if tag != PAIR:
            continue
        parts = dict(children(pair))
        if not parts.keys() >= {"Key", "Value"}:
            raise BadDocument(f"{PAIR}: must have a Key and a Value")
        key = text_of(parts["Key"])
        pairs[key] = _read_value(key, parts["Value"])
    return pairs


def _read_value(key: str, said: Element) -> RuleValue:
    uri, kind = type_of(said)
    text = text_of(said)
    try:
        match kind if uri == SCHEMA_NAMESPACE else f"{{{uri}}}{kind}":
            case "string":
                return text
            case "int" | "long":
                return read_integer(text)
            case "boolean":
                return read_boolean(text)
            case "double":
                return _read_double(text)
            case "dateTime":
                return Moment(at_ms=parse_moment_ms(text.strip()))
            case "duration":
                return Span(ticks=parse_span_ticks(text.strip()))
            case "base64Binary":
                return Octets.model_validate({"binary": text})
            case other if other == GUID:
                return Identifier.model_validate({"uuid": text.strip()})
            case _:
                raise ValueError(
                    "use one of the types string, int, long, boolean, double, dateTime, duration"
                    f" and base64Binary of {SCHEMA_NAMESPACE} as i:type"
                )
    except ValidationError as error:
        raise BadDocument(f"{key}: {first_mistake(error)}") from None
    except ValueError as error:
        raise BadDocument(f"{key}: {error}") from None


def _read_double(text: str) -> float:
    try:
        return float(text.strip().replace("_", "?"))
    except ValueError:
        raise ValueError("use a number") from None


# --- writing ------------------------------------------------------------------------------------


def write_rule(rule: RuleProperties, created_at: str) -> str:
    """Return the content of a `RuleDescription`."""
    return (
        f"{_write_filter(rule)}{_write_action(rule.action)}"
        f"<CreatedAt>{created_at}</CreatedAt>{element('Name', rule.name)}"
    )


def _write_filter(rule: RuleProperties) -> str:
    if rule.correlation_filter is not None:
        given = rule.correlation_filter
        fields = "".join(
            element(tag, value)
            for tag, field in CORRELATION_ELEMENTS.items()
            if (value := getattr(given, field)) is not None
        )
        pairs = _write_pairs("Properties", given.properties)
        return f'<Filter i:type="CorrelationFilter">{fields}{pairs}</Filter>'
    assert rule.sql_filter is not None
    return (
        f'<Filter i:type="{rule.filter_type or "SqlFilter"}">{_write_sql(rule.sql_filter)}</Filter>'
    )


def _write_action(action: SqlAction | None) -> str:
    """Return an action; SDKs expect one even where there is none."""
    if action is None:
        return '<Action i:type="EmptyRuleAction"/>'
    return f'<Action i:type="SqlRuleAction">{_write_sql(action)}</Action>'


def _write_sql(given: SqlFilter | SqlAction) -> str:
    return (
        f"{element('SqlExpression', given.sql_expression)}"
        f"<CompatibilityLevel>{COMPATIBILITY_LEVEL}</CompatibilityLevel>"
        f"{_write_pairs('Parameters', given.parameters)}"
        "<RequiresPreprocessing>false</RequiresPreprocessing>"
    )


def _write_pairs(tag: str, pairs: dict[str, RuleValue]) -> str:
    if not pairs:
        return f"<{tag}/>"
    return f"<{tag}>{''.join(_write_pair(key, value) for key, value in pairs.items())}</{tag}>"


def _write_pair(key: str, value: RuleValue) -> str:
    """Return a pair; JavaScript's client takes types from the fifth letter on, hence `d6p1:`."""
    if isinstance(value, bool):
        kind, text = "boolean", write_boolean(value)
    elif isinstance(value, int):
        kind, text = ("int" if -MAX_INT <= value <= MAX_INT else "long"), str(value)
    elif isinstance(value, float):
        kind, text = "double", repr(value)
    elif isinstance(value, Moment):
        kind, text = "dateTime", format_moment(value.at_ms)
    elif isinstance(value, Span):
        kind, text = "duration", format_span(value.ticks)
    elif isinstance(value, Identifier):
        kind, text = "string", str(value.id)  # equal to it: SDKs have no type for it
    elif isinstance(value, Octets):
        kind, text = "base64Binary", format_octets(value.octets)
    else:
        kind, text = "string", value
    return (
        f"<{PAIR}>{element('Key', key)}"
        f'<Value xmlns:d6p1="{SCHEMA_NAMESPACE}" i:type="d6p1:{kind}">{written(text)}</Value>'
        f"</{PAIR}>"
    )
