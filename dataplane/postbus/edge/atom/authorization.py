"""Authorization rules of queues and topics in the XML of administration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from xml.etree.ElementTree import Element

from postbus.broker.access.authorization_rules import AuthorizationRuleDescription, WantedRule
from postbus.contract.entities import Right
from postbus.edge.atom.xml_text import BadDocument, children, element, text_of, write_time

ORDER: Final = (Right.MANAGE, Right.SEND, Right.LISTEN)


def read_authorization_rules(said: Element) -> tuple[WantedRule, ...]:
    """Return the rules of an `AuthorizationRules`; an omitted key is generated or kept."""
    return tuple(_read_rule(child) for tag, child in children(said) if tag == "AuthorizationRule")


def _read_rule(said: Element) -> WantedRule:
    read: dict[str, Any] = {"name": "", "rights": frozenset()}
    for tag, child in children(said):
        match tag:
            case "KeyName":
                read["name"] = text_of(child).strip()
            case "Rights":
                read["rights"] = _read_rights(child)
            case "PrimaryKey":
                read["primary"] = text_of(child) or None
            case "SecondaryKey":
                read["secondary"] = text_of(child) or None
            case _:
                pass
    if not read["name"]:
        raise BadDocument("AuthorizationRule: must have a KeyName")
    return WantedRule(**read)


def _read_rights(said: Element) -> frozenset[Right]:
    try:
        return frozenset(
            Right(text_of(child).strip()) for tag, child in children(said) if tag == "AccessRights"
        )
    except ValueError:
        raise BadDocument("AccessRights: use Manage, Send and Listen") from None


def write_authorization_rules(rules: Sequence[AuthorizationRuleDescription], since_ms: int) -> str:
    """Return the element; rules without a time get `since_ms`."""
    if not rules:
        return "<AuthorizationRules/>"
    written = "".join(_write_rule(rule, since_ms) for rule in rules)
    return f"<AuthorizationRules>{written}</AuthorizationRules>"


def _write_rule(rule: AuthorizationRuleDescription, since_ms: int) -> str:
    rights = "".join(
        f"<AccessRights>{right.value}</AccessRights>" for right in ORDER if right in rule.rights
    )
    return (
        '<AuthorizationRule i:type="SharedAccessAuthorizationRule">'
        "<ClaimType>SharedAccessKey</ClaimType><ClaimValue>None</ClaimValue>"
        f"<Rights>{rights}</Rights>"
        f"<CreatedTime>{write_time(rule.created_ms or since_ms)}</CreatedTime>"
        f"<ModifiedTime>{write_time(rule.updated_ms or since_ms)}</ModifiedTime>"
        f"{element('KeyName', rule.name)}{element('PrimaryKey', rule.keys.primary)}"
        f"{element('SecondaryKey', rule.keys.secondary or '')}"
        "</AuthorizationRule>"
    )
