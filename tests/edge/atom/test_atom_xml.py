"""Descriptions of entities and rules: written documents read back unchanged, for all clients."""

from __future__ import annotations

import random
import re
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postbus.broker.access.authorization_rules import AuthorizationRuleDescription, Keys, WantedRule
from postbus.broker.administration import RuleDescription
from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import (
    DEFAULT_RULE,
    LIMITS,
    CorrelationFilter,
    EntityKind,
    EntityProperties,
    EntityStatus,
    NamespaceProperties,
    QueueProperties,
    Right,
    RuleProperties,
    Sku,
    SkuProperties,
    SqlAction,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.contract.rule_values import Identifier, Moment, Octets, RuleValue, Span
from postbus.edge.atom.descriptions import (
    DESCRIPTIONS,
    Shown,
    Wanted,
    read_description,
    read_path,
)
from postbus.edge.atom.feeds import Feeds
from postbus.edge.atom.rules import read_rule
from postbus.edge.atom.xml_text import (
    MAX_DEPTH,
    BadDocument,
    description_of,
    read_document,
    read_duration_ms,
    type_of,
)
from tests.edge.atom.atom_documents import (
    ATOM,
    BUS,
    COUNTS,
    ENTITIES,
    INSTANCE,
    PLACE,
    RULES,
    described,
    entry_of,
    request_of,
)
from tests.edge.atom.fuzz_atom import fuzz

LONG = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def read(body: bytes, known: EntityProperties | None = None) -> Wanted:
    name, description = description_of(read_document(body))
    return read_description(DESCRIPTIONS[name], description, known, LIMITS[Sku.STANDARD])


def queue_of(inside: str, known: EntityProperties | None = None) -> QueueProperties:
    found = read(request_of("QueueDescription", inside), known).properties
    assert isinstance(found, QueueProperties)
    return found


def refusal_of(inside: str, description: str = "QueueDescription") -> str:
    with pytest.raises(BadDocument) as caught:
        read(request_of(description, inside))
    return str(caught.value)


# --- entities -------------------------------------------------------------------------------------


@LONG
@given(ENTITIES)
def test_written_descriptions_read_back_unchanged(properties: EntityProperties) -> None:
    assert read(entry_of(properties)).properties == properties


@LONG
@given(ENTITIES, st.randoms(use_true_random=False))
def test_elements_come_in_any_order_among_others(
    properties: EntityProperties, source: random.Random
) -> None:
    root = ElementTree.fromstring(entry_of(properties))
    expected = read(ElementTree.tostring(root)).properties
    _, description = description_of(root)
    inside = [*description, ElementTree.Element(f"{{{BUS}}}NewInTwentyForty", {"a": "b"})]
    inside.append(ElementTree.Element("{urn:other}LockDuration"))
    source.shuffle(inside)
    description[:] = inside
    assert read(ElementTree.tostring(root)).properties == expected


def test_nil_and_omitted_elements_have_their_defaults() -> None:
    found = queue_of('<LockDuration i:nil="true">PT5M</LockDuration><ForwardTo i:nil="1"/>')
    assert found == QueueProperties()
    assert found.model_fields_set == set()


def test_immutable_and_unmapped_properties_are_kept() -> None:
    known = QueueProperties(
        requires_session=True,
        enable_partitioning=True,
        max_delivery_count=3,
        history_retention_ms=60_000,
    )
    found = queue_of("<LockDuration>PT30S</LockDuration>", known)
    assert found == QueueProperties(
        lock_duration_ms=30_000,
        requires_session=True,
        enable_partitioning=True,
        history_retention_ms=60_000,
    )
    assert not queue_of("<RequiresSession>false</RequiresSession>", known).requires_session


def test_properties_of_another_kind_of_entity_are_not_kept() -> None:
    assert queue_of("", TopicProperties(requires_duplicate_detection=True)) == QueueProperties()


@pytest.mark.parametrize(
    ("text", "value_ms"),
    [
        ("PT1M", 60_000),
        (" P14D ", 14 * 86_400_000),
        ("PT0.5S", 500),
        ("PT300S", 300_000),
        ("P1DT2H3M4.005S", 93_784_005),
        ("PT336H", 14 * 86_400_000),
        ("P10675199DT2H48M5.4775807S", MAX_DURATION_MS),
        ("P10675199DT2H48M5.477581S", MAX_DURATION_MS),
        ("P10675199DT2H48M5.47758S", MAX_DURATION_MS),
        ("PT256204778H48M5.4775807S", MAX_DURATION_MS),
        ("P99999999D", MAX_DURATION_MS),
    ],
)
def test_durations_of_every_client_are_read(text: str, value_ms: int) -> None:
    assert read_duration_ms(text) == value_ms


@pytest.mark.parametrize(
    "text", ["", "P", "PT", "P1DT", "1M", "-PT1M", "P1Y", "P1M", "PT1X", "P١D"]
)
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ISO 8601"):
        read_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("other", "other"),
        ("a/b", "a/b"),
        ("sb://bus.example/a/b", "a/b"),
        ("https://bus.example:5300/a%2Fb/", "a/b"),
        ("amqps://bus/q?api-version=2021-05", "q"),
        ("SB://BUS/Q", "Q"),
        ("", None),
        ("  ", None),
        ("sb://bus.example/", None),
        ("sb://bus.example", None),
    ],
)
def test_targets_are_named_or_given_as_urls(text: str, name: str | None) -> None:
    assert read_path(text) == name
    assert queue_of(f"<ForwardTo>{text}</ForwardTo>").forward_to == name


def test_a_target_is_written_as_a_url_of_this_host_unless_another_was_sent() -> None:
    queue = described(QueueProperties(forward_to="a/b"))
    here = "<ForwardTo>sb://bus.example:5300/a/b</ForwardTo>"
    for sent, written in {
        "": here,
        "https://Bus.example/a/B": "<ForwardTo>https://Bus.example/a/B</ForwardTo>",
        "https://bus.example/earlier": here,
    }.items():
        shown = replace(queue, forwards_as_sent={"forward_to": sent} if sent else {})
        assert written in Feeds(PLACE, "bus").entity(Shown(shown, COUNTS, PLACE))


def test_urls_of_targets_are_kept_and_names_need_not_be() -> None:
    inside = (
        "<ForwardTo>https://h/Orders</ForwardTo>"
        "<ForwardDeadLetteredMessagesTo>dead</ForwardDeadLetteredMessagesTo>"
    )
    wanted = read(request_of("QueueDescription", inside))
    assert wanted.forwards_as_sent == {"forward_to": "https://h/Orders"}
    inside = f"<ForwardTo>sb://{'h' * 1_100}/q</ForwardTo>"
    assert read(request_of("QueueDescription", inside)).forwards_as_sent == {}


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("<LockDuration>PT1S</LockDuration>", "LockDuration: must be between PT5S and PT5M"),
        ("<LockDuration>soon</LockDuration>", "LockDuration: use an ISO 8601 duration"),
        ("<RequiresSession>perhaps</RequiresSession>", "RequiresSession: use true or false"),
        ("<MaxDeliveryCount>1e3</MaxDeliveryCount>", "MaxDeliveryCount: use a whole number"),
        ("<MaxDeliveryCount>1_0</MaxDeliveryCount>", "MaxDeliveryCount: use a whole number"),
        ("<MaxDeliveryCount>0</MaxDeliveryCount>", "MaxDeliveryCount: input should be greater"),
        ("<EnableExpress>yes</EnableExpress>", "EnableExpress: use true or false"),
        ("<Status>Renaming</Status>", "Status: input should be"),
        ("<UserMetadata><a/></UserMetadata>", "UserMetadata: expected text, found elements"),
        (f"<UserMetadata>{'x' * 1025}</UserMetadata>", "UserMetadata: "),
        (
            "<IsAnonymousAccessible>true</IsAnonymousAccessible>",
            "IsAnonymousAccessible: anonymous access",
        ),
    ],
)
def test_a_mistake_names_its_element(inside: str, message: str) -> None:
    assert refusal_of(inside).startswith(message)


def test_a_size_of_all_parts_is_known_by_its_part() -> None:
    """A size that is not valid at all is refused with the value sent."""

    def sized(size_mb: int) -> str:
        size = f"<MaxSizeInMegabytes>{size_mb}</MaxSizeInMegabytes>"
        return size + "<EnablePartitioning>true</EnablePartitioning>"

    for said_mb in (1_024, 16 * 1_024):
        properties = read(request_of("QueueDescription", sized(said_mb))).properties
        assert isinstance(properties, QueueProperties)
        assert properties.max_size_in_megabytes == 1_024
    assert refusal_of(sized(1_024_256)).startswith("MaxSizeInMegabytes: ")


def test_all_mistakes_are_reported_together() -> None:
    written = refusal_of("<Status>Off</Status><MaxSizeInMegabytes>5</MaxSizeInMegabytes>")
    assert re.search("Status: .*; MaxSizeInMegabytes: |MaxSizeInMegabytes: .*; Status: ", written)


def test_counts_have_the_prefix_that_javascript_looks_for() -> None:
    answer = entry_of(QueueProperties()).decode()
    counts = answer[answer.index("<CountDetails") : answer.index("</CountDetails>")]
    assert counts == (
        '<CountDetails xmlns:d2p1="http://schemas.microsoft.com/netservices/2011/06/servicebus">'
        "<d2p1:ActiveMessageCount>3</d2p1:ActiveMessageCount>"
        "<d2p1:DeadLetterMessageCount>2</d2p1:DeadLetterMessageCount>"
        "<d2p1:ScheduledMessageCount>4</d2p1:ScheduledMessageCount>"
        "<d2p1:TransferMessageCount>5</d2p1:TransferMessageCount>"
        "<d2p1:TransferDeadLetterMessageCount>1</d2p1:TransferDeadLetterMessageCount>"
    )
    assert "<MessageCount>15</MessageCount>" in answer
    assert "<AccessedAt>2023-11-14T22:13:21.000Z</AccessedAt>" in answer


QUEUE_ORDER = (
    "LockDuration MaxSizeInMegabytes RequiresDuplicateDetection RequiresSession"
    " DefaultMessageTimeToLive DeadLetteringOnMessageExpiration"
    " DuplicateDetectionHistoryTimeWindow MaxDeliveryCount EnableBatchedOperations SizeInBytes"
    " MessageCount IsAnonymousAccessible AuthorizationRules Status CreatedAt UpdatedAt AccessedAt"
    " SupportOrdering CountDetails AutoDeleteOnIdle EnablePartitioning EntityAvailabilityStatus"
    " EnableExpress ForwardTo UserMetadata ForwardDeadLetteredMessagesTo MaxMessageSizeInKilobytes"
)
TOPIC_ORDER = (
    "DefaultMessageTimeToLive MaxSizeInMegabytes RequiresDuplicateDetection"
    " DuplicateDetectionHistoryTimeWindow EnableBatchedOperations SizeInBytes"
    " FilteringMessagesBeforePublishing IsAnonymousAccessible AuthorizationRules Status CreatedAt"
    " UpdatedAt AccessedAt SupportOrdering CountDetails SubscriptionCount SqlFilterCount"
    " CorrelationFilterCount AutoDeleteOnIdle EnablePartitioning EntityAvailabilityStatus"
    " EnableSubscriptionPartitioning EnableExpress UserMetadata MaxMessageSizeInKilobytes"
)
SUBSCRIPTION_ORDER = (
    "LockDuration RequiresSession DefaultMessageTimeToLive DeadLetteringOnMessageExpiration"
    " DeadLetteringOnFilterEvaluationExceptions MessageCount MaxDeliveryCount"
    " EnableBatchedOperations Status ForwardTo CreatedAt UpdatedAt AccessedAt CountDetails"
    " UserMetadata ForwardDeadLetteredMessagesTo AutoDeleteOnIdle EntityAvailabilityStatus"
)


@pytest.mark.parametrize(
    ("model", "order"),
    [
        (QueueProperties, QUEUE_ORDER),
        (TopicProperties, TOPIC_ORDER),
        (SubscriptionProperties, SUBSCRIPTION_ORDER),
    ],
)
def test_elements_are_written_in_the_order_of_service_bus(
    model: type[EntityProperties], order: str
) -> None:
    values = {"user_metadata": "x", "forward_to": "a", "forward_dead_lettered_messages_to": "b"}
    properties = model(**{key: values[key] for key in values if key in model.model_fields})
    shown = Shown(described(properties), COUNTS, PLACE, filter_counts=(2, 3))
    _, description = description_of(read_document(Feeds(PLACE, "bus").entity(shown).encode()))
    assert [child.tag.removeprefix(f"{{{BUS}}}") for child in description] == order.split()


# --- entries and feeds ----------------------------------------------------------------------------


def test_an_id_names_the_entity_in_the_case_javascript_splits_at() -> None:
    name = "a/b/Subscriptions/s"
    entry = read_document(entry_of(SubscriptionProperties(), name))
    assert entry.findtext(f"{{{ATOM}}}id") == (
        "https://bus.example:5300/a/b/Subscriptions/s?api-version=2021-05"
    )
    assert entry.findtext(f"{{{ATOM}}}title") == "s"
    rule = RuleDescription(RuleProperties(name="r", sql_filter=SqlFilter(sql_expression="1=1")), 5)
    written = Feeds(PLACE, "bus").rule(described(SubscriptionProperties(), name), rule)
    assert "/a/b/Subscriptions/s/Rules/r?" in written


@pytest.mark.parametrize("following", [None, "$skip=100&$top=100"])
def test_a_page_has_exactly_the_links_python_counts(following: str | None) -> None:
    text = Feeds(PLACE, "bus").feed("$Resources/queues", "Queues", [], 5, following)
    links = read_document(text.encode()).findall(f"{{{ATOM}}}link")
    assert [link.get("rel") for link in links] == (["self", "next"] if following else ["self"])
    if following:
        assert str(links[1].get("href")).endswith("?api-version=2021-05&$skip=100&$top=100")


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])))
def test_every_text_is_written_as_well_formed_xml(text: str) -> None:
    rule = RuleProperties(name="r", correlation_filter=CorrelationFilter(label=text, to="x"))
    subscription = described(SubscriptionProperties(), "t/Subscriptions/s")
    written = Feeds(PLACE, text).rule(subscription, RuleDescription(rule, 5))
    _, description = description_of(read_document(written.encode()))
    found = read_rule(description).correlation_filter
    shown = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "\ufffd", text)
    assert (found.label or "", found.to) == (shown, "x")


@pytest.mark.parametrize(
    ("sku", "units"),
    [
        (SkuProperties(name=Sku.BASIC), ""),
        (SkuProperties(name=Sku.STANDARD), ""),
        (SkuProperties(name=Sku.PREMIUM), "<MessagingUnits>1</MessagingUnits>"),
        (SkuProperties(name=Sku.PREMIUM, capacity=4), "<MessagingUnits>4</MessagingUnits>"),
    ],
)
def test_a_namespace_has_its_tier(sku: SkuProperties, units: str) -> None:
    written = Feeds(PLACE, "bus").namespace(NamespaceProperties(sku=sku), 1_700_000_000_000)
    assert (
        "<CreatedTime>2023-11-14T22:13:20.000Z</CreatedTime>"
        f"<MessagingSKU>{sku.name.value}</MessagingSKU>{units}"
        "<ModifiedTime>2023-11-14T22:13:20.000Z</ModifiedTime><Name>bus</Name>"
        "<NamespaceType>Messaging</NamespaceType></NamespaceInfo>"
    ) in written


# --- rules ----------------------------------------------------------------------------------------


def rule_back(rule: RuleProperties) -> RuleProperties:
    subscription = described(SubscriptionProperties(), "t/Subscriptions/s")
    written = Feeds(PLACE, "bus").rule(subscription, RuleDescription(rule, 5))
    _, description = description_of(read_document(written.encode()))
    return read_rule(description)


@LONG
@given(RULES)
def test_written_rules_read_back_unchanged(rule: RuleProperties) -> None:
    assert rule_back(rule) == rule


@pytest.mark.parametrize(("text", "kind"), [("1=1", "TrueFilter"), ("1=0", "FalseFilter")])
def test_true_and_false_come_back_with_their_own_types(text: str, kind: str) -> None:
    subscription = described(SubscriptionProperties(), "t/Subscriptions/s")
    rule = RuleProperties.model_validate({"name": "r", "filterType": kind})
    written = Feeds(PLACE, "bus").rule(subscription, RuleDescription(rule, 5))
    assert f'<Filter i:type="{kind}"><SqlExpression>{text}</SqlExpression>' in written
    assert '<Action i:type="EmptyRuleAction"/>' in written
    assert rule_back(rule) == rule
    as_sql = RuleProperties(name="r", sql_filter=SqlFilter(sql_expression=text))
    assert as_sql != rule
    written = Feeds(PLACE, "bus").rule(subscription, RuleDescription(as_sql, 5))
    assert f'<Filter i:type="SqlFilter"><SqlExpression>{text}</SqlExpression>' in written


def test_sql_filters_are_written_in_the_order_of_service_bus() -> None:
    rule = RuleProperties(
        name="r",
        sql_filter=SqlFilter(sql_expression="a = 1"),
        action=SqlAction(sql_expression="SET b = 2"),
    )
    subscription = described(SubscriptionProperties(), "t/Subscriptions/s")
    written = Feeds(PLACE, "bus").rule(subscription, RuleDescription(rule, 5))
    for tag, kind in (("Filter", "SqlFilter"), ("Action", "SqlRuleAction")):
        inside = re.search(rf'<{tag} i:type="{kind}">(.*)</{tag}>', written)
        assert inside is not None
        assert re.findall(r"<(\w+)", inside[1]) == [
            "SqlExpression",
            "CompatibilityLevel",
            "Parameters",
            "RequiresPreprocessing",
        ]


@pytest.mark.parametrize(
    ("kind", "text", "value", "again"),
    [
        ("dateTime", "2026-01-01T00:00:00Z", Moment(at_ms=1_767_225_600_000), None),
        (
            "dateTime",
            "2026-01-01T01:00:00.1234567+01:00",
            Moment(at_ms=1_767_225_600_123),
            "2026-01-01T00:00:00.123Z",
        ),
        ("dateTime", "2026-01-01T00:00:00", Moment(at_ms=1_767_225_600_000), None),
        ("base64Binary", "AP8=", Octets(octets=b"\0\xff"), None),
        ("duration", "P1DT2H3M4.0000005S", Span(ticks=937_840_000_005), None),
        ("duration", "-PT0.5S", Span(ticks=-5_000_000), None),
        ("duration", "PT90S", Span(ticks=900_000_000), "PT1M30S"),
        ("duration", "P0D", Span(ticks=0), "PT0S"),
    ],
)
def test_times_and_durations_are_compared_with(
    kind: str, text: str, value: RuleValue, again: str | None
) -> None:
    """`again` is the written form; None: unchanged."""
    rule = rule_of(PAIR.format(kind=f"d:{kind}", text=text) + "<Name>r</Name>")
    assert rule.correlation_filter is not None
    assert rule.correlation_filter.properties == {"k": value}
    subscription = described(SubscriptionProperties(), "t/Subscriptions/s")
    written = Feeds(PLACE, "bus").rule(subscription, RuleDescription(rule, 5))
    assert f'i:type="d6p1:{kind}">{again or text}</Value>' in written


def rule_of(inside: str) -> RuleProperties:
    _, description = description_of(read_document(request_of("RuleDescription", inside)))
    return read_rule(description)


def test_false_filter_of_the_python_sdk_becomes_a_constant() -> None:
    found = rule_of('<Filter i:type="FalseFilter"><SqlExpression>1&gt;1</SqlExpression></Filter>')
    assert found.sql_filter == SqlFilter(sql_expression="1=0")


def test_a_rule_without_filter_and_name_is_the_default_one() -> None:
    assert rule_of("") == DEFAULT_RULE


def test_prefixes_are_resolved_by_the_document() -> None:
    body = f"""<?xml version="1.0" encoding="UTF-8"?>
    <a:entry xmlns:a="{ATOM}" xmlns:s="{BUS}"><a:updated>2026-01-01T00:00:00Z</a:updated>
    <a:content a:type="application/xml"><s:RuleDescription>
      <s:Filter p4:type="s:CorrelationFilter" xmlns:p4="{INSTANCE}">
        <s:Label>x</s:Label><s:To/>
        <s:Properties>
          <s:KeyValueOfstringanyType><s:Key>d</s:Key>
            <s:Value p4:type="l28:double" xmlns:l28="http://www.w3.org/2001/XMLSchema">2</s:Value>
          </s:KeyValueOfstringanyType>
          <s:KeyValueOfstringanyType><s:Key>i</s:Key>
            <s:Value p4:type="s:int" xmlns:s="http://www.w3.org/2001/XMLSchema">7</s:Value>
          </s:KeyValueOfstringanyType>
        </s:Properties>
      </s:Filter><s:Name>r</s:Name></s:RuleDescription></a:content></a:entry>"""
    # The second value's prefix s is another one inside of it, so it is no value of this vocabulary.
    with pytest.raises(BadDocument, match="must have a Key and a Value"):
        read_rule(description_of(read_document(body.encode()))[1])
    body = body.replace("s:int", "x:int").replace(
        'xmlns:s="http://www.w3', 'xmlns:x="http://www.w3'
    )
    found = read_rule(description_of(read_document(body.encode()))[1])
    assert found.correlation_filter == CorrelationFilter(label="x", properties={"d": 2.0, "i": 7})


PAIR = (
    "<Filter i:type='CorrelationFilter'><Properties><KeyValueOfstringanyType><Key>k</Key>"
    "<Value xmlns:d='http://www.w3.org/2001/XMLSchema' i:type='{kind}'>{text}</Value>"
    "</KeyValueOfstringanyType></Properties></Filter>"
)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (PAIR.format(kind="d:int", text="x"), "k: use a whole number"),
        (PAIR.format(kind="d:long", text=str(2**63)), "k: use a whole number"),
        (PAIR.format(kind="d:double", text="1_0"), "k: use a number"),
        (PAIR.format(kind="d:double", text="INF"), "Filter: properties.k: a rule cannot compare"),
        (PAIR.format(kind="d:duration", text="P1M"), "k: use an ISO 8601 duration"),
        (PAIR.format(kind="d:duration", text="P99999999D"), "k: ticks: a duration has at most"),
        (PAIR.format(kind="d:dateTime", text="2026-02-30T00:00:00Z"), "k: use an ISO 8601 time"),
        (PAIR.format(kind="d:base64Binary", text="x"), "k: binary: use base64"),
        (PAIR.format(kind="d:dateTime", text="2026-02-03"), "k: use an ISO 8601 time"),
        (
            PAIR.format(kind="d:dateTime", text="0001-01-01T00:00:00+01:00"),
            "k: at_ms: a time must be",
        ),
        (PAIR.format(kind="i:int", text="1"), "k: use one of the types string"),
        (PAIR.format(kind="int", text="1"), "k: use one of the types string"),
        (PAIR.format(kind="q:int", text="1"), "the prefix of the type q:int is not declared"),
        ("<Filter/>", "Filter: the type that is missing is not known"),
        ("<Filter i:type='DateFilter'/>", "Filter: the type DateFilter is not known"),
        ("<Filter i:type='SqlFilter'/>", "Filter: sql_expression: string should have at least 1"),
        ("<Filter i:type='CorrelationFilter'/>", "Filter: a correlation filter names at least"),
        ("<Action/>", "Action: the type that is missing is not known"),
        ("<Name>a b</Name>", "name: a rule's name has 1 to 50 letters"),
    ],
)
def test_a_mistake_in_a_rule_is_reported(inside: str, message: str) -> None:
    with pytest.raises(BadDocument) as caught:
        rule_of(inside)
    assert str(caught.value).startswith(message)


def test_a_guid_is_read_and_written_as_the_text_it_equals() -> None:
    text = str(uuid.UUID(int=1))
    body = PAIR.format(kind="d:guid", text=text)
    with pytest.raises(BadDocument, match="k: use one of the types string"):
        rule_of(body)
    serialization = "http://schemas.microsoft.com/2003/10/Serialization/"
    found = rule_of(body.replace("http://www.w3.org/2001/XMLSchema'", f"{serialization}'"))
    assert found.correlation_filter is not None
    assert found.correlation_filter.properties == {"k": Identifier(id=uuid.UUID(int=1))}
    again = rule_back(found).correlation_filter
    assert again is not None
    assert again.properties == {"k": text}


def test_a_subscription_may_bring_its_first_rule() -> None:
    inside = (
        "<DefaultRuleDescription><Filter i:type='SqlFilter'><SqlExpression>a=1</SqlExpression>"
        "</Filter><Action i:type='SqlRuleAction'><SqlExpression>SET a=2</SqlExpression></Action>"
        "<Name>mine</Name></DefaultRuleDescription>"
    )
    wanted = read(request_of("SubscriptionDescription", inside))
    assert wanted.default_rule is not None
    assert wanted.default_rule.name == "mine"
    assert wanted.properties == SubscriptionProperties()


# --- authorization rules --------------------------------------------------------------------------


def test_written_authorization_rules_read_back_unchanged() -> None:
    keys = Keys("first&", "second<")
    rules = (
        AuthorizationRuleDescription("send", frozenset({Right.SEND}), keys, False, 7, 8),
        AuthorizationRuleDescription("all", frozenset(Right), keys, True),
    )
    shown = Shown(described(QueueProperties()), COUNTS, PLACE, rules)
    text = Feeds(PLACE, "bus").entity(shown)
    assert "<CreatedTime>1970-01-01T00:00:00.007Z</CreatedTime>" in text
    assert read(text.encode()).authorization_rules == tuple(
        WantedRule(rule.name, rule.rights, keys.primary, keys.secondary) for rule in rules
    )


def test_rules_that_are_not_mentioned_are_not_touched() -> None:
    assert read(request_of("QueueDescription", "")).authorization_rules is None
    assert read(request_of("QueueDescription", "<AuthorizationRules/>")).authorization_rules == ()
    assert "must have a KeyName" in refusal_of(
        "<AuthorizationRules><AuthorizationRule/></AuthorizationRules>"
    )
    assert "use Manage, Send and Listen" in refusal_of(
        "<AuthorizationRules><AuthorizationRule><Rights><AccessRights>Own</AccessRights></Rights>"
        "</AuthorizationRule></AuthorizationRules>"
    )


# --- hostile bytes --------------------------------------------------------------------------------

BILLION = (
    b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x "xxxxxxxxxx"><!ENTITY y "&x;&x;&x;&x;&x;">]>'
    b"<a>&y;&y;&y;</a>"
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"\0",
        b"<",
        b"<a",
        b"<a>\xff</a>",
        b"<a>&#1;</a>",
        b"<a>&x;</a>",
        b'<a b="" b=""/>',
        b"<x:a/>",
        BILLION,
        b'<!DOCTYPE a SYSTEM "file:///etc/hostname"><a/>',
        b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]><a>&x;</a>',
        b"<a>" * (MAX_DEPTH + 1),
        b"<a>" * 200_000,
        b'<?xml version="1.0" encoding="utf-7"?><a/>',
        b'<?xml version="1.0" encoding="idna"?><a/>',
        b'<?xml version="1.0" encoding="zip"?><a/>',
        b'<?xml version="1.0" encoding="no-such"?><a/>',
        b'<?xml version="1.0" encoding="utf-16"?><a/>',
        b"<a/><a/>",
        b"<a/>",
        f'<entry xmlns="{ATOM}"/>'.encode(),
        f'<entry xmlns="{ATOM}"><content/></entry>'.encode(),
        f'<entry xmlns="{ATOM}"><content><QueueDescription/></content></entry>'.encode(),
    ],
)
def test_only_bodies_that_are_no_entries_are_refused(body: bytes) -> None:
    with pytest.raises(BadDocument):
        description_of(read_document(body))


@pytest.mark.parametrize(
    "doctype",
    [
        b"<!DOCTYPE entry>",
        b'<!DOCTYPE entry [<!ENTITY x "y">]>',
        b'<!DOCTYPE entry [<!ENTITY x SYSTEM "file:///etc/hostname">]>',
        b'<!DOCTYPE entry SYSTEM "http://127.0.0.1/x.dtd">',
        b'<!DOCTYPE entry [<!ENTITY % x "y"> %x;]>',
    ],
)
def test_an_entry_with_a_document_type_is_refused_for_it(doctype: bytes) -> None:
    inside = "<UserMetadata>&x;</UserMetadata>" if b"ENTITY x" in doctype else ""
    with pytest.raises(BadDocument, match="has a document type or entities; leave them out"):
        read(doctype + request_of("QueueDescription", inside))


def test_an_entry_that_is_nested_too_deep_is_refused_for_it() -> None:
    queue_of("<New>" * (MAX_DEPTH - 3) + "</New>" * (MAX_DEPTH - 3))
    message = refusal_of("<New>" * (MAX_DEPTH - 2) + "</New>" * (MAX_DEPTH - 2))
    assert message == f"the elements are nested more than {MAX_DEPTH} levels deep"


def test_many_prefixes_cost_no_more_than_their_bytes() -> None:
    count = 10_000
    prefixes = " ".join(f'xmlns:p{n}="u{n}"' for n in range(count))
    typed = '<b i:type="p0:x"/>' * count
    body = f'<a {prefixes} xmlns:i="{INSTANCE}">{typed}</a>'
    begun_s = time.process_time()
    root = read_document(body.encode())
    assert time.process_time() - begun_s < 1.0
    assert type_of(root[-1]) == ("u0", "x")


def test_other_encodings_are_read() -> None:
    body = request_of("QueueDescription", "<UserMetadata>\xe9</UserMetadata>").decode()
    for encoding in ("utf-8", "utf-16", "iso-8859-1"):
        text = f'<?xml version="1.0" encoding="{encoding}"?>{body}'.encode(encoding)
        assert read(text).properties.user_metadata == "\xe9"


def try_everything(body: bytes) -> None:
    with suppress(BadDocument):
        name, description = description_of(read_document(body))
        if name in DESCRIPTIONS:
            read_description(DESCRIPTIONS[name], description, None, LIMITS[Sku.STANDARD])
        else:
            read_rule(description)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try_everything(body)


@LONG
@given(ENTITIES | RULES, st.data())
def test_mutations_of_real_documents_are_read_or_refused(
    wanted: EntityProperties | RuleProperties, data: st.DataObject
) -> None:
    if isinstance(wanted, RuleProperties):
        subscription = described(SubscriptionProperties(), "t/Subscriptions/s")
        body = Feeds(PLACE, "bus").rule(subscription, RuleDescription(wanted, 5)).encode()
    else:
        body = entry_of(wanted)
    pieces = re.split(rb"(?<=>)", body)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(pieces) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, data.draw(st.sampled_from(pieces)))
            case 2:
                pieces[at] = pieces[at].replace(b">", b" i:nil='true'>")
            case 3:
                pieces[at] = data.draw(st.binary(max_size=5)) + pieces[at]
        pieces = pieces or [b""]
    try_everything(b"".join(pieces))


def test_fuzzed_bodies_are_refused_or_read_correctly() -> None:
    count, accepted = fuzz(8.0, seed=7, max_inputs=4_000)
    assert count > accepted > 0


def test_statuses_are_all_known() -> None:
    for status in EntityStatus:
        assert queue_of(f"<Status>{status.value}</Status>").status is status
    assert set(DESCRIPTIONS.values()) == set(EntityKind)
