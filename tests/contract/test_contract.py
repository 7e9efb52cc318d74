from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from postbus.contract.durations import MAX_DURATION_MS, format_duration, parse_duration_ms
from postbus.contract.entities import (
    DAY_MS,
    LIMITS,
    AuthorizationRule,
    CorrelationFilter,
    Model,
    NamespaceProperties,
    QueueProperties,
    Right,
    RuleProperties,
    Sku,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
    catalog_key,
    check_entity_name,
    check_filter_name,
    check_namespace_name,
    check_rule_name,
    check_subscription_name,
    subscription_path,
    topic_of,
)
from postbus.contract.rule_values import Identifier, Moment, Octets, Span


def queue(**fields: object) -> QueueProperties:
    return QueueProperties.model_validate(fields)


# --- durations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("PT1M", 60_000),
        ("P14D", 14 * DAY_MS),
        ("PT0.5S", 500),
        ("PT19.9999999S", 19_999),  # not 20 s, the least window of duplicate detection
        ("P1DT2H3M4.005S", DAY_MS + 7_384_005),
        ("P10675199DT2H48M5.4775807S", MAX_DURATION_MS),
        ("P10675199DT2H48M5.477581S", MAX_DURATION_MS),
        ("P99999999D", MAX_DURATION_MS),
    ],
)
def test_duration_is_read_as_milliseconds(text: str, expected_ms: int) -> None:
    assert parse_duration_ms(text) == expected_ms


@pytest.mark.parametrize(
    "text", ["", "P", "PT", "P1DT", "1M", "PT-1S", "P1W", "PT1H1H", "PT1M\n", "PT١M", None, True]
)
def test_invalid_durations_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="ISO 8601"):
        parse_duration_ms(text)


@given(st.integers(min_value=0, max_value=MAX_DURATION_MS))
def test_duration_survives_being_written_and_read(value_ms: int) -> None:
    assert parse_duration_ms(format_duration(value_ms)) == value_ms


def test_a_number_is_no_duration_in_a_manifest() -> None:
    with pytest.raises(ValidationError, match="ISO 8601"):
        QueueProperties.model_validate_json('{"lockDuration": 60000}')


# --- queues -------------------------------------------------------------------------------------


@pytest.mark.behaviour("S266")
def test_queue_allows_ten_deliveries_by_default() -> None:
    assert queue().max_delivery_count == 10


@pytest.mark.behaviour("S277")
def test_dead_lettering_on_expiry_is_off_by_default() -> None:
    assert queue().dead_lettering_on_message_expiration is False


@pytest.mark.behaviour("S274")
def test_delivery_limit_may_be_the_greatest_32_bit_number() -> None:
    assert queue(maxDeliveryCount=2**31 - 1).max_delivery_count == 2**31 - 1


@pytest.mark.behaviour("S273")
@pytest.mark.parametrize("value", [0, -1, 2**31, None, "off", False])
def test_delivery_limit_cannot_be_switched_off(value: object) -> None:
    with pytest.raises(ValidationError):
        QueueProperties.model_validate({"maxDeliveryCount": value}, strict=True)


@pytest.mark.behaviour("S92")
def test_default_time_to_live_survives_being_stored() -> None:
    stored = queue(defaultMessageTimeToLive="PT90S").model_dump_json(by_alias=True)
    assert '"defaultMessageTimeToLive":"PT1M30S"' in stored
    assert QueueProperties.model_validate_json(stored).default_message_ttl_ms == 90_000


@pytest.mark.parametrize("text", ["PT4.999S", "PT5M0.001S", "P1D"])
def test_lock_duration_outside_its_range_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="between PT5S and PT5M"):
        queue(lockDuration=text)


def test_unsupported_features_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"zone redundancy .* not available yet"):
        NamespaceProperties.model_validate({"zoneRedundant": True})
    NamespaceProperties.model_validate({"zoneRedundant": False})


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("lockDuration", ["PT5S", "PT5M"], ["PT4.999S", "PT5M0.001S"]),
        ("defaultMessageTimeToLive", ["PT1S", "P10675199D"], ["PT0.999S", "PT0S"]),
        ("duplicateDetectionHistoryTimeWindow", ["PT20S", "P7D"], ["PT19.999S", "P7DT0.001S"]),
        ("maxDeliveryCount", [1, 2_000], [0, -1]),
        ("userMetadata", ["", "x" * 1_024], ["x" * 1_025]),
        ("maxSizeInMegabytes", [1_024, 81_920], [1_023, 81_921]),
        ("maxMessageSizeInKilobytes", [256, 102_400], [255, 102_401]),
    ],
)
def test_limits_of_service_bus_are_those_here(
    name: str, allowed: list[object], refused: list[object]
) -> None:
    for model in (QueueProperties, TopicProperties, SubscriptionProperties):
        if name not in {field.alias for field in model.model_fields.values()}:
            continue
        for value in allowed:
            model.model_validate({name: value})
        for value in refused:
            with pytest.raises(ValidationError):
                model.model_validate({name: value})


@pytest.mark.behaviour("S120", "S122")
@pytest.mark.parametrize("model", [QueueProperties, TopicProperties, SubscriptionProperties])
def test_idle_entities_are_kept_for_five_minutes_at_least(model: type[Model]) -> None:
    with pytest.raises(ValidationError, match="must be at least PT5M"):
        model.model_validate({"autoDeleteOnIdle": "PT4M59.999S"})
    model.model_validate({"autoDeleteOnIdle": "PT5M"})
    requested = model.model_validate({"autoDeleteOnIdle": "PT5M"})
    assert requested.model_dump()["auto_delete_on_idle_ms"] == "PT5M"


@pytest.mark.behaviour("S267")
def test_subscription_allows_ten_deliveries_by_default() -> None:
    assert SubscriptionProperties().max_delivery_count == 10


@pytest.mark.behaviour("S273")
def test_delivery_limit_of_a_subscription_cannot_be_switched_off() -> None:
    for value in (0, -1, None, False):
        with pytest.raises(ValidationError):
            SubscriptionProperties.model_validate({"maxDeliveryCount": value}, strict=True)


@pytest.mark.behaviour("S277")
def test_subscription_does_not_dead_letter_expired_messages_by_default() -> None:
    assert SubscriptionProperties().dead_lettering_on_message_expiration is False


@pytest.mark.behaviour("S220")
@pytest.mark.parametrize("model", [QueueProperties, TopicProperties])
def test_entities_are_not_partitioned_by_default(model: type[Model]) -> None:
    assert model().model_dump()["enable_partitioning"] is False


@pytest.mark.parametrize("path", ["Orders/Subscriptions/All", "/orders/SUBSCRIPTIONS/all//"])
def test_catalog_finds_a_path_regardless_of_case_and_outer_slashes(path: str) -> None:
    assert catalog_key(path) == "orders/subscriptions/all"


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="lockduration"):
        queue(lockduration="PT30S")


# --- namespaces and rules -----------------------------------------------------------------------


def test_manage_implies_listen_and_send() -> None:
    rule = AuthorizationRule.model_validate({"name": "all", "rights": ["Manage"]})
    assert rule.effective_rights == {Right.LISTEN, Right.SEND, Right.MANAGE}


@pytest.mark.parametrize("rights", [["Listen"], ["Send"], ["Listen", "Send"]])
def test_listen_and_send_imply_no_other_right(rights: list[str]) -> None:
    rule = AuthorizationRule.model_validate({"name": "some", "rights": rights})
    assert {right.value for right in rule.effective_rights} == set(rights)


def test_rule_names_are_unique_in_a_namespace() -> None:
    rule = {"name": "twice", "rights": ["Send"]}
    with pytest.raises(ValidationError, match="named twice"):
        NamespaceProperties.model_validate({"authorizationRules": [rule, rule]})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sku": {"name": "Standard", "tier": "Premium"}}, "equal the sku's name"),
        ({"sku": {"name": "Standard", "capacity": 2}}, "only Premium"),
        ({"premiumMessagingPartitions": 1}, "only Premium"),
        ({"sku": {"name": "Premium"}, "premiumMessagingPartitions": 3}, "1, 2, 4 or 8"),
        ({"disableLocalAuth": True}, "not available yet"),
        ({"minimumTlsVersion": "1.0"}, "'1.2' or '1.3'"),
    ],
)
def test_contradictions_of_a_namespace_are_refused(fields: object, words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        NamespaceProperties.model_validate(fields)


def test_default_tier_is_standard() -> None:
    assert NamespaceProperties().new_limits == LIMITS[Sku.STANDARD]


@pytest.mark.behaviour("S147", "S148")
def test_partitions_of_a_namespace() -> None:
    assert NamespaceProperties().new_limits.partition_count == 16
    for fields, count in (({}, 1), ({"premiumMessagingPartitions": 4}, 4)):
        namespace = NamespaceProperties.model_validate({"sku": {"name": "Premium"}, **fields})
        assert namespace.new_limits.partition_count == count
        assert namespace.new_limits.is_wholly_partitioned is (count > 1)


# --- rules of subscriptions ---------------------------------------------------------------------


def test_a_rule_has_one_filter() -> None:
    sql = {"sqlExpression": "a = 1"}
    correlated = {"label": "x"}
    both = {"name": "r", "sqlFilter": sql, "correlationFilter": correlated}
    true = {"name": "r", "filterType": "TrueFilter"}
    for wrong in (
        true | {"sqlFilter": sql},
        true | {"sqlFilter": {"sqlExpression": "1=0"}},
        true | {"sqlFilter": {"sqlExpression": "1=1", "parameters": {"@a": 1}}},
        true | {"correlationFilter": {"label": "x"}},
        {"name": "r", "filterType": "FalseFilter", "sqlFilter": {"sqlExpression": "1=1"}},
    ):
        with pytest.raises(ValidationError, match="has no other filter than 1="):
            RuleProperties.model_validate(wrong)
    made = RuleProperties.model_validate(true)
    assert made.sql_filter == SqlFilter(sql_expression="1=1")
    assert RuleProperties.model_validate_json(made.model_dump_json(by_alias=True)) == made
    plain = RuleProperties(name="r", sql_filter=SqlFilter(sql_expression="1=1"))
    assert plain != made
    assert RuleProperties(name="r", filter_type="SqlFilter", sql_filter=plain.sql_filter) == plain
    wrong = {"name": "r", "filterType": "CorrelationFilter", "sqlFilter": sql}
    for fields in ({"name": "r"}, both, wrong):
        with pytest.raises(ValidationError, match="either a sqlFilter or a correlationFilter"):
            RuleProperties.model_validate(fields)
    with pytest.raises(ValidationError, match="at least one field or property"):
        RuleProperties.model_validate({"name": "r", "correlationFilter": {}})


@pytest.mark.parametrize(
    "value",
    [
        [1],
        {"a": 1},
        None,
        float("nan"),
        float("inf"),
        {},
        {"dateTime": "2026-01-01T00:00:00Z", "duration": "PT1S"},
        {"dateTime": "yesterday"},
        {"dateTime": 1.5},
        {"duration": "P"},
        {"duration": True + 0.5},
        {"uuid": "{12345678-1234-5678-1234-567812345678}"},
        {"uuid": 5},
        {"binary": "A"},
        {"binary": "\u00e4"},
        {"binary": 5},
    ],
)
def test_incomparable_values_of_a_rule_are_one_problem(value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        CorrelationFilter.model_validate({"properties": {"a": value}})
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("value", ['{"dateTime": 5}', '{"duration": 5}'])
def test_json_has_times_and_durations_as_text(value: str) -> None:
    with pytest.raises(ValidationError, match="use an ISO 8601"):
        CorrelationFilter.model_validate_json(f'{{"properties": {{"a": {value}}}}}')


def test_values_of_a_rule_keep_their_kind_when_stored() -> None:
    values = {
        "a": True,
        "b": 1,
        "c": 1.5,
        "d": "1",
        "e": 2**62,
        "f": {"dateTime": "2026-01-01T00:00:00.500Z"},
        "g": {"duration": "-P1DT0.0000001S"},
        "h": "2026-01-01T00:00:00Z",
        "i": {"uuid": "12345678-1234-5678-1234-567812345678"},
        "j": {"binary": "AP8="},
        "k": {"dateTime": "2026-01-01T00:00:00"},
    }
    rule = RuleProperties.model_validate({"name": "r", "correlationFilter": {"properties": values}})
    again = RuleProperties.model_validate_json(rule.model_dump_json(by_alias=True))
    assert again == rule
    assert again.correlation_filter is not None
    assert [type(value) for value in again.correlation_filter.properties.values()] == [
        bool,
        int,
        float,
        str,
        int,
        Moment,
        Span,
        str,
        Identifier,
        Octets,
        Moment,
    ]
    assert json.loads(rule.model_dump_json(by_alias=True))["correlationFilter"]["properties"] == {
        **values,
        "f": {"dateTime": "2026-01-01T00:00:00.500Z"},
    }


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "orders", "a/b/c", "A-1_x.y~z", "q" * 260])
def test_names_of_queues(name: str) -> None:
    assert check_entity_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "$cbs",
        "a/$dlq/b",
        "a b",
        "a?",
        "é",
        "q" * 261,
        "a\n",
        "-a",
        "t/subscriptions/s",
        "t/Subscriptions/s/below",
    ],
)
def test_invalid_names_of_a_queue(name: str) -> None:
    with pytest.raises(ValueError, match="the name of a queue or topic"):
        check_entity_name(name)


@pytest.mark.parametrize("name", ["short", "1number", "ends-", "under_score", "x" * 51])
def test_invalid_names_of_a_namespace(name: str) -> None:
    with pytest.raises(ValueError, match="a namespace's name"):
        check_namespace_name(name)


def test_names_of_subscriptions_and_their_rules() -> None:
    assert check_subscription_name("a.b_C-1") == "a.b_C-1"
    assert check_filter_name("$Default") == "$Default"
    for name in ("", "a/b", "x" * 51, "$x", "a b"):
        with pytest.raises(ValueError, match="subscription's name"):
            check_subscription_name(name)
        with pytest.raises(ValueError, match="a rule's name"):
            check_filter_name(name)
    assert topic_of("a/Subscriptions/b/Subscriptions/c") == "a/Subscriptions/b"
    assert topic_of(subscription_path("Shop/Orders", "all")) == "Shop/Orders"


def test_invalid_names_of_a_rule() -> None:
    assert check_rule_name("RootManageSharedAccessKey")
    with pytest.raises(ValueError, match="a rule's name"):
        check_rule_name("a/b")
