"""Converts `Config.json` of Microsoft's Service Bus emulator to definitions.

Settings that cannot be converted are reported, never dropped silently; an unknown filter is an
error, not a filter that selects everything. Missing settings get Service Bus's defaults, not the
emulator's (3 deliveries, one hour). Source: the emulator's documentation of its configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from postbus.cli.failures import InputError
from postbus.contract.checks import assume
from postbus.contract.entities import (
    PUBLIC_KEY,
    ROOT_RULE_NAME,
    NamespaceProperties,
    QueueProperties,
    Right,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
    check_entity_name,
    check_namespace_name,
    check_subscription_name,
)
from postbus.manifests.reader import (
    BusDefinition,
    QueueDefinition,
    RuleDefinition,
    RuleKeys,
    SubscriptionDefinition,
    TopicDefinition,
)

MAX_FILE_BYTES: Final = 4 << 20

EMULATOR_KEYS: Final = RuleKeys(PUBLIC_KEY)
"""The public key in the connection strings of the emulator's documentation."""

QUEUE_FIELDS: Final = {
    "DeadLetteringOnMessageExpiration": "deadLetteringOnMessageExpiration",
    "DefaultMessageTimeToLive": "defaultMessageTimeToLive",
    "DuplicateDetectionHistoryTimeWindow": "duplicateDetectionHistoryTimeWindow",
    "ForwardDeadLetteredMessagesTo": "forwardDeadLetteredMessagesTo",
    "ForwardTo": "forwardTo",
    "LockDuration": "lockDuration",
    "MaxDeliveryCount": "maxDeliveryCount",
    "RequiresDuplicateDetection": "requiresDuplicateDetection",
    "RequiresSession": "requiresSession",
}
TOPIC_FIELDS: Final = {
    "DefaultMessageTimeToLive": "defaultMessageTimeToLive",
    "DuplicateDetectionHistoryTimeWindow": "duplicateDetectionHistoryTimeWindow",
    "RequiresDuplicateDetection": "requiresDuplicateDetection",
}
SUBSCRIPTION_FIELDS: Final = {
    name: QUEUE_FIELDS[name]
    for name in QUEUE_FIELDS
    if name not in {"DuplicateDetectionHistoryTimeWindow", "RequiresDuplicateDetection"}
}
CORRELATION_FIELDS: Final = {
    "ContentType": "contentType",
    "CorrelationId": "correlationId",
    "Label": "label",
    "MessageId": "messageId",
    "ReplyTo": "replyTo",
    "ReplyToSessionId": "replyToSessionId",
    "SessionId": "sessionId",
    "To": "to",
}


@dataclass(slots=True)
class Imported:
    """A converted configuration. `remarks`: differences from the file, for people."""

    definition: BusDefinition
    remarks: list[str] = field(default_factory=list)


def read_emulator_config(path: Path) -> Imported:
    """Return the bus that a file describes; raises `InputError` with all mistakes."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than 4 MiB")
        held = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, ValueError) as error:
        hint = ""
        if path.suffix.lower() in {".yaml", ".yml"}:
            hint = "; for manifests use postbus apply"
        raise InputError(f"{path}: invalid JSON: {error}{hint}") from None
    except OSError as error:
        raise InputError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
    reader = _Reader()
    try:
        definition = reader.read(held)
    except InputError as error:
        reader.problems.append(str(error))
        definition = None
    if reader.problems or definition is None:
        raise InputError("\n".join(f"{path}: {each}" for each in reader.problems))
    return Imported(definition, reader.remarks)


class _Reader:
    """Collects definitions, problems and remarks of one configuration."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.remarks: list[str] = []
        self._limits = NamespaceProperties().new_limits

    def read(self, held: object) -> BusDefinition:
        user = _object(_object(held, "the file").get("UserConfig"), "UserConfig")
        namespaces = _list(user.get("Namespaces"), "UserConfig.Namespaces")
        if len(namespaces) != 1:
            raise InputError(f"UserConfig.Namespaces: must have exactly one, has {len(namespaces)}")
        if "Logging" in user:
            self.remarks.append("UserConfig.Logging was ignored: use --log-level")
        where = "UserConfig.Namespaces[0]"
        namespace = _object(namespaces[0], where)
        self._unknown(namespace, {"Name", "Queues", "Topics"}, where)
        name = str(namespace.get("Name") or "sbemulatorns")
        self._checked(check_namespace_name, name, f"{where}.Name")
        queues = [
            queue
            for at, each in enumerate(_list(namespace.get("Queues"), f"{where}.Queues"))
            if (queue := self._queue(each, f"{where}.Queues[{at}]")) is not None
        ]
        topics: list[TopicDefinition] = []
        subscriptions: list[SubscriptionDefinition] = []
        for at, each in enumerate(_list(namespace.get("Topics"), f"{where}.Topics")):
            self._topic(each, f"{where}.Topics[{at}]", topics, subscriptions)
        root = RuleDefinition(ROOT_RULE_NAME, frozenset(Right), EMULATOR_KEYS)
        return BusDefinition(
            name,
            NamespaceProperties(),
            (root,),
            tuple(queues),
            tuple(topics),
            tuple(subscriptions),
        )

    def _queue(self, held: object, where: str) -> QueueDefinition | None:
        entity = _object(held, where)
        self._unknown(entity, {"Name", "Properties"}, where)
        name = self._checked(check_entity_name, entity.get("Name"), f"{where}.Name")
        said = self._properties(entity, where, QUEUE_FIELDS)
        try:
            properties = QueueProperties.model_validate(said)
        except ValidationError as error:
            self._invalid(error, f"{where}.Properties")
            return None
        return QueueDefinition(name, assume(properties, self._limits), ())

    def _topic(
        self,
        held: object,
        where: str,
        topics: list[TopicDefinition],
        subscriptions: list[SubscriptionDefinition],
    ) -> None:
        entity = _object(held, where)
        self._unknown(entity, {"Name", "Properties", "Subscriptions"}, where)
        name = self._checked(check_entity_name, entity.get("Name"), f"{where}.Name")
        said = self._properties(entity, where, TOPIC_FIELDS)
        try:
            properties = TopicProperties.model_validate(said)
            topics.append(TopicDefinition(name, assume(properties, self._limits), ()))
        except ValidationError as error:
            self._invalid(error, f"{where}.Properties")
        inner = _list(entity.get("Subscriptions"), f"{where}.Subscriptions")
        for at, each in enumerate(inner):
            found = self._subscription(name, each, f"{where}.Subscriptions[{at}]")
            if found is not None:
                subscriptions.append(found)

    def _subscription(self, topic: str, held: object, where: str) -> SubscriptionDefinition | None:
        entity = _object(held, where)
        self._unknown(entity, {"Name", "Properties", "Rules"}, where)
        name = self._checked(check_subscription_name, entity.get("Name"), f"{where}.Name")
        said = self._properties(entity, where, SUBSCRIPTION_FIELDS)
        given = _list(entity.get("Rules"), f"{where}.Rules")
        rules = [
            rule
            for at, each in enumerate(given)
            if (rule := self._rule(each, f"{where}.Rules[{at}]")) is not None
        ]
        try:
            properties = SubscriptionProperties.model_validate(said)
        except ValidationError as error:
            self._invalid(error, f"{where}.Properties")
            return None
        properties = assume(properties, self._limits)
        return SubscriptionDefinition(topic, name, properties, tuple(rules) if given else None)

    def _rule(self, held: object, where: str) -> RuleProperties | None:
        rule = _object(held, where)
        self._unknown(rule, {"Name", "Properties"}, where)
        inner = f"{where}.Properties"
        properties = _object(rule.get("Properties") or {}, inner)
        self._unknown(properties, {"FilterType", "CorrelationFilter", "SqlFilter", "Action"}, inner)
        kind = str(properties.get("FilterType") or "").lower()
        said: dict[str, Any] = {"name": rule.get("Name")}
        if kind == "correlation":
            held_filter = _object(properties.get("CorrelationFilter"), f"{inner}.CorrelationFilter")
            known = {*CORRELATION_FIELDS, "Properties"}
            self._unknown(held_filter, known, f"{inner}.CorrelationFilter")
            correlation = {
                new: held_filter[old]
                for old, new in CORRELATION_FIELDS.items()
                if held_filter.get(old) is not None
            }
            if held_filter.get("Properties"):
                correlation["properties"] = held_filter["Properties"]
            said["correlationFilter"] = correlation
        elif kind == "sql":
            held_filter = _object(properties.get("SqlFilter"), f"{inner}.SqlFilter")
            said["sqlFilter"] = {"sqlExpression": held_filter.get("SqlExpression")}
        else:
            self.problems.append(
                f"{inner}.FilterType: must be Correlation or Sql, not"
                f" {properties.get('FilterType')!r}"
            )
            return None
        if properties.get("Action"):
            action = _object(properties["Action"], f"{inner}.Action")
            said["action"] = {"sqlExpression": action.get("SqlExpression")}
        try:
            return RuleProperties.model_validate(said)
        except ValidationError as error:
            self._invalid(error, where)
            return None

    # --- parts ----------------------------------------------------------------------------------

    def _properties(
        self, entity: Mapping[str, Any], where: str, known: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return an entity's properties by our names; empty forwarding targets are unset."""
        inner = f"{where}.Properties"
        given = _object(entity.get("Properties") or {}, inner)
        for name in given:
            if name not in known:
                self.remarks.append(f"{inner}.{name} is unknown and was ignored")
        return {
            known[name]: value
            for name, value in given.items()
            if name in known and value is not None and value != ""
        }

    def _unknown(self, held: Mapping[str, Any], known: set[str], where: str) -> None:
        for name in held:
            if name not in known:
                self.remarks.append(f"{where}.{name} is unknown and was ignored")

    def _checked(self, check: Any, name: object, where: str) -> str:
        try:
            return str(check(str(name or "")))
        except ValueError as error:
            self.problems.append(f"{where}: {name!r}: {error}")
            return str(name)

    def _invalid(self, error: ValidationError, where: str) -> None:
        for each in error.errors(include_url=False, include_input=False):
            field_name = ".".join(map(str, each["loc"]))
            message = str(each["msg"]).removeprefix("Value error, ")
            self.problems.append(f"{where}: {field_name}: {message[:1].lower()}{message[1:]}")


def _object(held: object, where: str) -> Mapping[str, Any]:
    if not isinstance(held, dict):
        raise InputError(f"{where}: must be an object")
    return held


def _list(held: object, where: str) -> list[Any]:
    if held is None:
        return []
    if not isinstance(held, list):
        raise InputError(f"{where}: must be a list")
    return held
