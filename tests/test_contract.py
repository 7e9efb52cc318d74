from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from postbus.contract import (
    DAY_MS,
    LIMITS,
    MAX_DURATION_MS,
    AuthorizationRule,
    NamespaceProperties,
    QueueProperties,
    Right,
    Sku,
    check_entity_name,
    check_namespace_name,
    check_rule_name,
    complete_queue,
    format_duration,
    parse_duration_ms,
    queue_problems,
)


def queue(**fields: object) -> QueueProperties:
    return QueueProperties.model_validate(fields)


# --- durations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("PT1M", 60_000),
        ("P14D", 14 * DAY_MS),
        ("PT0.5S", 500),
        ("P1DT2H3M4.005S", DAY_MS + 7_384_005),
        ("P10675199DT2H48M5.4775807S", MAX_DURATION_MS),
        ("P10675199DT2H48M5.477581S", MAX_DURATION_MS),
        ("P99999999D", MAX_DURATION_MS),
    ],
)
def test_duration_is_read_as_milliseconds(text: str, expected_ms: int) -> None:
    assert parse_duration_ms(text) == expected_ms


@pytest.mark.parametrize(
    "text", ["", "P", "PT", "P1DT", "1M", "PT-1S", "P1W", "PT1H1H", None, True]
)
def test_what_is_no_duration_is_refused(text: object) -> None:
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


@pytest.mark.behaviour("S98", "S99")
@pytest.mark.parametrize("sku", [Sku.STANDARD, Sku.PREMIUM])
def test_standard_and_premium_queues_never_expire_by_default(sku: Sku) -> None:
    assert complete_queue(queue(), LIMITS[sku]).default_message_ttl_ms == MAX_DURATION_MS


@pytest.mark.behaviour("S100")
def test_basic_queues_expire_after_fourteen_days_by_default() -> None:
    completed = complete_queue(queue(), LIMITS[Sku.BASIC])
    assert completed.default_message_ttl_ms == 14 * DAY_MS
    assert queue_problems(completed, LIMITS[Sku.BASIC]) == {}


@pytest.mark.behaviour("S101")
def test_basic_queues_refuse_more_than_fourteen_days() -> None:
    asked = queue(defaultMessageTimeToLive="P14DT1S")
    assert list(queue_problems(asked, LIMITS[Sku.BASIC])) == ["defaultMessageTimeToLive"]
    assert queue_problems(asked, LIMITS[Sku.STANDARD]) == {}
    exact = queue(defaultMessageTimeToLive="P14D")
    assert queue_problems(exact, LIMITS[Sku.BASIC]) == {}


@pytest.mark.parametrize(
    ("sku", "size_mb", "is_allowed"),
    [
        (Sku.STANDARD, 5120, True),
        (Sku.STANDARD, 1500, False),
        (Sku.STANDARD, 10_240, False),
        (Sku.PREMIUM, 10_240, True),
        (Sku.PREMIUM, 81_920, True),
    ],
)
def test_sizes_of_queues_are_those_of_the_tier(sku: Sku, size_mb: int, is_allowed: bool) -> None:
    problems = queue_problems(
        complete_queue(queue(maxSizeInMegabytes=size_mb), LIMITS[sku]), LIMITS[sku]
    )
    assert (problems == {}) is is_allowed


def test_only_premium_chooses_the_size_of_messages() -> None:
    large = queue(maxMessageSizeInKilobytes=2048)
    assert list(queue_problems(large, LIMITS[Sku.STANDARD])) == ["maxMessageSizeInKilobytes"]
    assert queue_problems(large, LIMITS[Sku.PREMIUM]) == {}
    assert complete_queue(queue(), LIMITS[Sku.PREMIUM]).max_message_size_in_kilobytes == 1024
    assert complete_queue(queue(), LIMITS[Sku.STANDARD]).max_message_size_in_kilobytes == 256


@pytest.mark.parametrize("text", ["PT4.999S", "PT5M0.001S", "P1D"])
def test_lock_duration_outside_its_range_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="between PT5S and PT5M"):
        queue(lockDuration=text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requiresSession", True),
        ("requiresDuplicateDetection", True),
        ("enablePartitioning", True),
        ("enableExpress", True),
        ("autoDeleteOnIdle", "PT10M"),
        ("forwardTo", "elsewhere"),
        ("forwardDeadLetteredMessagesTo", "elsewhere"),
    ],
)
def test_what_is_not_built_yet_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match="not available yet"):
        queue(**{field: value})


def test_what_is_not_built_yet_may_be_written_with_its_default() -> None:
    assert queue(requiresSession=False, autoDeleteOnIdle="P10675199DT2H48M5.4775807S") == queue()


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="lockduration"):
        queue(lockduration="PT30S")


# --- namespaces and rules -----------------------------------------------------------------------


def test_manage_implies_listen_and_send() -> None:
    rule = AuthorizationRule.model_validate({"name": "all", "rights": ["Manage"]})
    assert rule.effective_rights == {Right.LISTEN, Right.SEND, Right.MANAGE}


@pytest.mark.parametrize("rights", [["Listen"], ["Send"], ["Listen", "Send"]])
def test_other_rights_imply_nothing(rights: list[str]) -> None:
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
        ({"sku": {"name": "Premium"}, "premiumMessagingPartitions": 4}, "not available yet"),
        ({"disableLocalAuth": True}, "not available yet"),
        ({"minimumTlsVersion": "1.0"}, "'1.2' or '1.3'"),
    ],
)
def test_contradictions_of_a_namespace_are_refused(fields: object, words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        NamespaceProperties.model_validate(fields)


def test_default_tier_is_standard() -> None:
    assert NamespaceProperties().limits is LIMITS[Sku.STANDARD]


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "orders", "a/b/c", "A-1_x.y~z", "q" * 260])
def test_names_of_queues(name: str) -> None:
    assert check_entity_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "$cbs", "a/$dlq/b", "a b", "a?", "é", "q" * 261, "a\n", "-a"]
)
def test_what_is_no_name_of_a_queue(name: str) -> None:
    with pytest.raises(ValueError, match="a queue's name"):
        check_entity_name(name)


@pytest.mark.parametrize("name", ["short", "1number", "ends-", "under_score", "x" * 51])
def test_what_is_no_name_of_a_namespace(name: str) -> None:
    with pytest.raises(ValueError, match="a namespace's name"):
        check_namespace_name(name)


def test_what_is_no_name_of_a_rule() -> None:
    assert check_rule_name("RootManageSharedAccessKey")
    with pytest.raises(ValueError, match="a rule's name"):
        check_rule_name("a/b")
