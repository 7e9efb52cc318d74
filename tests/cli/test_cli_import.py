"""`postbus import`: the configuration of Microsoft's emulator; and manifests that are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from postbus.cli.failures import InputError
from postbus.cli.formats.emulator_config import read_emulator_config
from postbus.cli.formats.manifest_text import difference, manifests_of, resource_name
from postbus.contract.checks import complete
from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import (
    DAY_MS,
    ROOT_RULE_NAME,
    NamespaceProperties,
    QueueProperties,
    Right,
    RuleProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.manifests.reader import (
    BusDefinition,
    QueueDefinition,
    RuleDefinition,
    SubscriptionDefinition,
    TopicDefinition,
    read_one_bus,
)
from tests.cli.command_line import CommandLine
from tests.dev_bus import ROOT

CONFIG: dict[str, Any] = {
    "UserConfig": {
        "Namespaces": [
            {
                "Name": "sbemulatorns",
                "Queues": [
                    {
                        "Name": "queue.1",
                        "Properties": {
                            "DeadLetteringOnMessageExpiration": False,
                            "DefaultMessageTimeToLive": "PT1H",
                            "DuplicateDetectionHistoryTimeWindow": "PT20S",
                            "ForwardDeadLetteredMessagesTo": "",
                            "ForwardTo": "",
                            "LockDuration": "PT1M",
                            "MaxDeliveryCount": 3,
                            "RequiresDuplicateDetection": False,
                            "RequiresSession": False,
                        },
                    },
                    {"Name": "Orders/EU", "Properties": {"ForwardTo": "queue.1"}},
                ],
                "Topics": [
                    {
                        "Name": "topic.1",
                        "Properties": {
                            "DefaultMessageTimeToLive": "PT1H",
                            "DuplicateDetectionHistoryTimeWindow": "PT20S",
                            "RequiresDuplicateDetection": False,
                        },
                        "Subscriptions": [
                            {
                                "Name": "subscription.1",
                                "Properties": {
                                    "DeadLetteringOnMessageExpiration": False,
                                    "DefaultMessageTimeToLive": "PT1H",
                                    "LockDuration": "PT1M",
                                    "MaxDeliveryCount": 3,
                                    "ForwardDeadLetteredMessagesTo": "",
                                    "ForwardTo": "",
                                    "RequiresSession": False,
                                },
                                "Rules": [
                                    {
                                        "Name": "app-prop-filter-1",
                                        "Properties": {
                                            "FilterType": "Correlation",
                                            "CorrelationFilter": {
                                                "ContentType": "application/json",
                                                "CorrelationId": "id1",
                                                "Label": "subject1",
                                                "MessageId": "msgid1",
                                                "ReplyTo": "someQueue",
                                                "ReplyToSessionId": "sessionId",
                                                "SessionId": "session1",
                                                "To": "xyz",
                                                "Properties": {"prop1": "value1"},
                                            },
                                        },
                                    }
                                ],
                            },
                            {
                                "Name": "subscription.2",
                                "Rules": [
                                    {
                                        "Name": "sql",
                                        "Properties": {
                                            "FilterType": "Sql",
                                            "SqlFilter": {"SqlExpression": "prop1 = 'value2'"},
                                            "Action": {"SqlExpression": "SET prop3 = 'value3'"},
                                        },
                                    }
                                ],
                            },
                            {"Name": "subscription.3"},
                        ],
                    }
                ],
            }
        ],
        "Logging": {"Type": "File"},
    }
}


def written(folder: Path, config: object) -> Path:
    path = folder / "Config.json"
    path.write_text(json.dumps(config))
    return path


def with_rule(properties: object) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    topic = config["UserConfig"]["Namespaces"][0]["Topics"][0]
    topic["Subscriptions"][0]["Rules"][0]["Properties"] = properties
    return config


def with_queue(properties: object, name: str = "q") -> dict[str, Any]:
    queue = {"Name": name, "Properties": properties}
    return {"UserConfig": {"Namespaces": [{"Name": "sbemulatorns", "Queues": [queue]}]}}


def test_everything_of_the_emulators_configuration_is_carried_over(tmp_path: Path) -> None:
    imported = read_emulator_config(written(tmp_path, CONFIG))
    bus = imported.definition
    assert bus.name == "sbemulatorns"
    first, second = bus.queues
    assert (first.name, first.properties.max_delivery_count) == ("queue.1", 3)
    assert first.properties.default_message_ttl_ms == 3_600_000
    assert first.properties.duplicate_detection_history_time_window_ms == 20_000
    assert first.properties.forward_to is None
    assert (second.name, second.properties.forward_to) == ("Orders/EU", "queue.1")
    assert second.properties.max_delivery_count == 10
    assert second.properties.default_message_ttl_ms == MAX_DURATION_MS
    one, two, three = bus.subscriptions
    assert one.rules is not None
    correlation = one.rules[0].correlation_filter
    assert correlation is not None
    assert correlation.model_dump(by_alias=True) == {
        "contentType": "application/json",
        "correlationId": "id1",
        "label": "subject1",
        "messageId": "msgid1",
        "replyTo": "someQueue",
        "replyToSessionId": "sessionId",
        "sessionId": "session1",
        "to": "xyz",
        "properties": {"prop1": "value1"},
    }
    assert two.rules is not None
    (rule,) = two.rules
    assert rule.sql_filter is not None
    assert rule.action is not None
    assert rule.sql_filter.sql_expression == "prop1 = 'value2'"
    assert rule.action.sql_expression == "SET prop3 = 'value3'"
    assert three.rules is None
    assert imported.remarks == ["UserConfig.Logging was ignored: use --log-level"]


def test_unknown_emulator_settings_are_reported(tmp_path: Path) -> None:
    imported = read_emulator_config(
        written(tmp_path, with_queue({"MaxSize": 1, "ForwardTo": None}))
    )
    where = "UserConfig.Namespaces[0].Queues[0].Properties"
    assert imported.remarks == [f"{where}.MaxSize is unknown and was ignored"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "the file: must be an object"),
        ({}, "UserConfig: must be an object"),
        ({"UserConfig": {"Namespaces": []}}, "must have exactly one, has 0"),
        (with_queue({}, "a b"), r"Queues\[0\].Name: 'a b': the name of a queue or topic"),
        (with_queue({"LockDuration": "PT1H"}), r"Queues\[0\].Properties: lockDuration: must be"),
        (with_queue({"MaxDeliveryCount": "many"}), "maxDeliveryCount: input should be a valid"),
        (with_rule({"FilterType": "Magic"}), "FilterType: must be Correlation or Sql, not 'Magic'"),
        (with_rule({}), "FilterType: must be Correlation or Sql, not None"),
        (with_rule({"FilterType": "Sql", "SqlFilter": {}}), r"Rules\[0\]: sqlFilter"),
        (
            with_rule({"FilterType": "Correlation", "CorrelationFilter": {}}),
            "a correlation filter names at least one field",
        ),
    ],
)
def test_configuration_with_a_mistake_is_refused(tmp_path: Path, config: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_emulator_config(written(tmp_path, config))


def test_missing_or_invalid_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_emulator_config(tmp_path / "absent")
    (tmp_path / "c").write_text("{")
    with pytest.raises(InputError, match="invalid JSON"):
        read_emulator_config(tmp_path / "c")
    (tmp_path / "bom").write_text("\ufeff" + json.dumps(CONFIG), encoding="utf-8")
    assert read_emulator_config(tmp_path / "bom").definition.queues


@pytest.mark.slow
def test_command_prints_manifests_that_check_takes(tmp_path: Path) -> None:
    user = CommandLine(tmp_path)
    written(tmp_path, CONFIG)
    done = user.run("import", "Config.json")
    logging, key = done.stderr.splitlines()
    assert logging == "postbus: UserConfig.Logging was ignored: use --log-level"
    assert "connection strings for the emulator work: the Secret has its public key" in key
    (tmp_path / "bus.yaml").write_text(done.stdout)
    counts = "2 queues, 1 topic, 3 subscriptions"
    assert user.ok("check", "bus.yaml") == f"ok sbemulatorns (Standard), {counts}\n"
    user.fails("import", "absent.json", code=4, says="absent.json: no such file")
    bad = with_rule({"FilterType": "Sql", "SqlFilter": {"SqlExpression": "a >"}})
    written(tmp_path, bad)
    user.fails("import", "Config.json", code=4, says="sqlFilter.sqlExpression")
    written(tmp_path, with_queue({"ForwardTo": "nowhere"}))
    user.fails("import", "Config.json", code=4, says="there is no queue or topic nowhere")
    assert "postbus import Config.json --apply" in user.ok("import", "--help")


# --- manifests that are written -----------------------------------------------------------------

TYPED = {
    "d": {"duration": "PT1H"},
    "e": {"dateTime": "2031-01-01T00:00:00.500"},
    "f": {"uuid": "12345678-1234-5678-1234-567812345678"},
    "g": {"binary": "AP8="},
}
RULES = (
    RuleProperties.model_validate({"name": "all", "sqlFilter": {"sqlExpression": "1=1"}}),
    RuleProperties.model_validate({"name": "everything", "filterType": "TrueFilter"}),
    RuleProperties.model_validate(
        {
            "name": "some",
            "correlationFilter": {
                "label": "x",
                "properties": {"a": 1, "b": True, "c": "1"} | TYPED,
            },
            "action": {"sqlExpression": "SET a = 2"},
        }
    ),
)


def whole_bus() -> BusDefinition:
    """Return a bus in which every field that may differ from its default does."""
    properties = NamespaceProperties.model_validate(
        {"sku": {"name": "Premium", "capacity": 2}, "premiumMessagingPartitions": 2,
         "minimumTlsVersion": "1.3", "tags": {"team": "a"}}
    )  # fmt: skip
    limits = properties.new_limits
    rule = RuleDefinition("reader", frozenset({Right.LISTEN}), None)
    queue = QueueProperties.model_validate(
        {"status": "SendDisabled", "lockDuration": "PT30S", "maxDeliveryCount": 3,
         "defaultMessageTimeToLive": "P1D", "deadLetteringOnMessageExpiration": True,
         "maxSizeInMegabytes": 2048, "maxMessageSizeInKilobytes": 2048,
         "enableBatchedOperations": False, "duplicateDetectionHistoryTimeWindow": "PT1M",
         "requiresSession": True, "requiresDuplicateDetection": True,
         "autoDeleteOnIdle": "P7D", "forwardDeadLetteredMessagesTo": "Other/Queue",
         "historyRetention": "P30D"}
    )  # fmt: skip
    topic = TopicProperties.model_validate({"autoDeleteOnIdle": "P7D", "supportOrdering": False})
    subscription = SubscriptionProperties.model_validate(
        {"forwardTo": "Other/Queue", "deadLetteringOnFilterEvaluationExceptions": False}
    )
    return BusDefinition(
        "Example-Bus",
        properties,
        (RuleDefinition(ROOT_RULE_NAME, frozenset(Right), None), rule),
        (
            QueueDefinition("Orders", complete(queue, limits), (rule,)),
            QueueDefinition("Other/Queue", complete(QueueProperties(), limits), ()),
            QueueDefinition("other-queue", complete(QueueProperties(), limits), ()),
        ),
        (TopicDefinition("Events", complete(topic, limits), ()),),
        (
            SubscriptionDefinition("Events", "All", complete(subscription, limits), RULES),
            SubscriptionDefinition(
                "Events", "none", complete(SubscriptionProperties(), limits), ()
            ),
        ),
    )


def yaml_rules(path: Path) -> list[object]:
    documents = yaml.safe_load_all(path.read_text())
    return [rule for each in documents for rule in each["spec"].get("rules", ())]


def test_manifests_that_are_written_are_read_as_the_same_bus(tmp_path: Path) -> None:
    bus = whole_bus()
    path = tmp_path / "bus.yaml"
    path.write_text(yaml.safe_dump_all(manifests_of(bus), sort_keys=False))
    again = read_one_bus([path])
    for name in ("name", "rules", "queues", "topics"):
        assert getattr(again, name) == getattr(bus, name), name
    assert again.properties.sku == bus.properties.sku
    assert [each.rules for each in again.subscriptions] == [RULES, ()]
    assert {"name": "everything", "filterType": "TrueFilter"} in yaml_rules(path)
    assert [replace(each, rules=None) for each in again.subscriptions] == [
        replace(each, rules=None) for each in bus.subscriptions
    ]


def test_manifests_of_the_examples_survive_being_written(tmp_path: Path) -> None:
    bus = read_one_bus([ROOT / "examples"])
    path = tmp_path / "bus.yaml"
    path.write_text(yaml.safe_dump_all(manifests_of(bus), sort_keys=False))
    again = read_one_bus([path])
    assert sorted(again.queues, key=lambda each: each.name) == sorted(
        bus.queues, key=lambda each: each.name
    )


def test_defaults_are_left_out() -> None:
    limits = NamespaceProperties().new_limits
    queue = QueueDefinition("orders", complete(QueueProperties(), limits), ())
    bus = BusDefinition("example-bus", NamespaceProperties(), (), (queue,))
    _, manifest = manifests_of(bus)
    assert manifest["spec"] == {"owner": {"name": "example-bus"}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("orders", "orders"),
        ("Orders/EU~1", "orders-eu-1"),
        ("a" * 260, "a" * 253),
        ("Ä", "unnamed"),
    ],
)
def test_names_of_resources_are_those_of_kubernetes(name: str, expected: str) -> None:
    assert resource_name(name) == expected


def test_difference_is_unified_and_empty_for_the_same() -> None:
    assert difference({"a": 1}, {"a": 1}, "x") == []
    assert difference({"a": 1}, {"a": 2}, "x")[2:] == ["@@ -1 +1 @@", "-a: 1", "+a: 2"]
    assert difference(None, {"a": 2}, "x")[-1] == "+a: 2"


@pytest.mark.parametrize("kept_ms", [None, 3 * DAY_MS])
def test_soft_delete_retention_survives_being_written(tmp_path: Path, kept_ms: int | None) -> None:
    bus = BusDefinition("shop", NamespaceProperties(), (), (), deleted_retention_ms=kept_ms)
    path = tmp_path / "bus.yaml"
    path.write_text(yaml.safe_dump_all(manifests_of(bus), sort_keys=False))
    assert read_one_bus([path]).deleted_retention_ms == kept_ms
