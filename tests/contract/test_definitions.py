"""Requirements of a definition besides a valid model: its tier, its past, its namespace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.contract.checks import (
    PlainDefinition,
    change_problems,
    complete,
    doubled_rule,
    forwarding_problems,
    forwarding_warnings,
    in_order_of_forwarding,
    rule_count_problem,
    tier_problems,
)
from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import (
    DAY_MS,
    LIMITS,
    CorrelationFilter,
    EntityKind,
    EntityProperties,
    NamespaceLimits,
    QueueProperties,
    RuleProperties,
    Sku,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
    subscription_path,
    topic_of,
)

BASIC, STANDARD, PREMIUM = LIMITS[Sku.BASIC], LIMITS[Sku.STANDARD], LIMITS[Sku.PREMIUM]
PARTITIONED_PREMIUM = replace(PREMIUM, partition_count=4)
ALL_KINDS: list[EntityProperties] = [QueueProperties(), TopicProperties(), SubscriptionProperties()]


def queue(**fields: object) -> QueueProperties:
    return QueueProperties.model_validate(fields)


def topic(**fields: object) -> TopicProperties:
    return TopicProperties.model_validate(fields)


def subscription(**fields: object) -> SubscriptionProperties:
    return SubscriptionProperties.model_validate(fields)


# --- the tier -----------------------------------------------------------------------------------


@pytest.mark.behaviour("S98", "S99")
@pytest.mark.parametrize("limits", [STANDARD, PREMIUM])
@pytest.mark.parametrize("properties", ALL_KINDS)
def test_messages_never_expire_by_default(
    properties: QueueProperties, limits: NamespaceLimits
) -> None:
    completed = complete(properties, limits)
    assert completed.default_message_ttl_ms == MAX_DURATION_MS
    assert tier_problems(completed, limits) == {}


@pytest.mark.behaviour("S100")
def test_basic_queues_expire_after_fourteen_days_by_default() -> None:
    completed = complete(queue(), BASIC)
    assert completed.default_message_ttl_ms == 14 * DAY_MS
    assert tier_problems(completed, BASIC) == {}


@pytest.mark.behaviour("S101")
def test_basic_queues_refuse_more_than_fourteen_days() -> None:
    requested = queue(defaultMessageTimeToLive="P14DT1S")
    assert list(tier_problems(requested, BASIC)) == ["defaultMessageTimeToLive"]
    assert tier_problems(requested, STANDARD) == {}
    assert tier_problems(queue(defaultMessageTimeToLive="P14D"), BASIC) == {}


@pytest.mark.parametrize(
    ("limits", "size_mb", "is_allowed"),
    [
        (STANDARD, 5120, True),
        (STANDARD, 1500, False),
        (STANDARD, 10_240, False),
        (PREMIUM, 10_240, True),
        (PREMIUM, 81_920, True),
    ],
)
def test_sizes_are_those_of_the_tier(
    limits: NamespaceLimits, size_mb: int, is_allowed: bool
) -> None:
    for problems in (
        tier_problems(complete(queue(maxSizeInMegabytes=size_mb), limits), limits),
        tier_problems(complete(topic(maxSizeInMegabytes=size_mb), limits), limits),
    ):
        assert (problems == {}) is is_allowed


def test_only_premium_chooses_the_size_of_messages() -> None:
    large = queue(maxMessageSizeInKilobytes=2048)
    assert list(tier_problems(large, STANDARD)) == ["maxMessageSizeInKilobytes"]
    assert tier_problems(large, PREMIUM) == {}
    assert complete(queue(), PREMIUM).max_message_size_in_kilobytes == 1024
    assert complete(topic(), STANDARD).max_message_size_in_kilobytes == 256


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requiresSession", True),
        ("requiresDuplicateDetection", True),
        ("autoDeleteOnIdle", "PT10M"),
        ("forwardTo", "elsewhere"),
        ("forwardDeadLetteredMessagesTo", "elsewhere"),
    ],
)
def test_features_missing_in_basic(field: str, value: object) -> None:
    problems = tier_problems(complete(queue(**{field: value}), BASIC), BASIC)
    assert problems == {field: "not available in Basic: use Standard or Premium"}
    assert tier_problems(complete(queue(**{field: value}), STANDARD), STANDARD) == {}


@pytest.mark.parametrize("properties", [TopicProperties(), SubscriptionProperties()])
def test_basic_has_queues_only(properties: TopicProperties) -> None:
    assert list(tier_problems(complete(properties, BASIC), BASIC)) == [""]


@pytest.mark.behaviour("S142")
@pytest.mark.parametrize("limits", [BASIC, STANDARD])
def test_partitioning_is_set_for_each_entity_of_basic_and_standard(
    limits: NamespaceLimits,
) -> None:
    for is_partitioned in (True, False):
        completed = complete(queue(enablePartitioning=is_partitioned), limits)
        assert completed.enable_partitioning is is_partitioned
        assert tier_problems(completed, limits) == {}
    assert complete(topic(enablePartitioning=True), STANDARD).enable_partitioning


@pytest.mark.behaviour("S144")
@pytest.mark.parametrize("properties", [QueueProperties(), TopicProperties()])
def test_everything_in_a_partitioned_premium_namespace_is_partitioned(
    properties: QueueProperties,
) -> None:
    completed = complete(properties, PARTITIONED_PREMIUM)
    assert completed.enable_partitioning
    assert tier_problems(completed, PARTITIONED_PREMIUM) == {}


@pytest.mark.behaviour("S145")
def test_premium_is_partitioned_when_the_namespace_is_made_or_not_at_all() -> None:
    requested = complete(queue(enablePartitioning=True), PREMIUM)
    assert "when it is created" in tier_problems(requested, PREMIUM)["enablePartitioning"]


# --- the past -----------------------------------------------------------------------------------


@pytest.mark.behaviour("S150", "S221")
@pytest.mark.parametrize("model", [QueueProperties, TopicProperties])
def test_partitioning_of_an_entity_never_changes(model: type[QueueProperties]) -> None:
    flipped = model.model_validate({"enablePartitioning": True})
    for before, after in ((model(), flipped), (flipped, model())):
        assert list(change_problems(before, after)) == ["enablePartitioning"]


@pytest.mark.parametrize("field", ["requiresSession", "requiresDuplicateDetection"])
def test_requirements_of_a_queue_never_change(field: str) -> None:
    (problem,) = change_problems(queue(), queue(**{field: True})).items()
    assert problem[0] == field
    assert problem[1].startswith("cannot be changed from false")


def test_other_properties_may_change() -> None:
    after = queue(lockDuration="PT5S", maxDeliveryCount=1, forwardTo="x", status="Disabled")
    assert change_problems(queue(), after) == {}


# --- forwarding ---------------------------------------------------------------------------------


class Namespace:
    """Definitions by name, as manifests and the directory offer them."""

    def __init__(self, **entities: EntityProperties) -> None:
        self.all: dict[str, PlainDefinition] = {}
        for name, properties in entities.items():
            if isinstance(properties, SubscriptionProperties):
                self.add(subscription_path(*name.split("__")), properties)
            else:
                self.add(name, properties)

    def add(self, name: str, properties: EntityProperties) -> PlainDefinition:
        kind = {
            QueueProperties: EntityKind.QUEUE,
            TopicProperties: EntityKind.TOPIC,
            SubscriptionProperties: EntityKind.SUBSCRIPTION,
        }[type(properties)]
        self.all[name.lower()] = PlainDefinition(name, kind, properties)
        return self.all[name.lower()]

    def problems(self, name: str) -> dict[str, str]:
        return forwarding_problems(self.all[name.lower()], self.all.get)

    def warnings(self, name: str) -> dict[str, str]:
        return forwarding_warnings(self.all[name.lower()], self.all.get, self.subscriptions_of)

    def subscriptions_of(self, name: str) -> list[PlainDefinition]:
        return [
            each
            for each in self.all.values()
            if each.kind is EntityKind.SUBSCRIPTION and topic_of(each.name).lower() == name
        ]


def test_target_must_exist_and_names_ignore_case() -> None:
    bus = Namespace(a=queue(forwardTo="B", forwardDeadLetteredMessagesTo="t"), b=queue(), t=topic())
    assert bus.problems("a") == {}
    del bus.all["b"]
    assert bus.problems("a") == {"forwardTo": "there is no queue or topic B"}


def test_messages_are_not_forwarded_to_a_subscription() -> None:
    bus = Namespace(a=queue(forwardTo="t/subscriptions/s"), t=topic(), t__s=subscription())
    assert "to a queue or a topic" in bus.problems("a")["forwardTo"]


@pytest.mark.parametrize(
    ("field", "warning"),
    [
        ("forwardTo", "forwarding loop; messages in it will be dead-lettered: "),
        ("forwardDeadLetteredMessagesTo", "dead letters return to this entity"),
    ],
)
def test_forwarding_to_itself_is_warned_of(field: str, warning: str) -> None:
    bus = Namespace(a=queue(**{field: "A"}), t=topic(), t__s=subscription(**{field: "T"}))
    way = {"a": "a -> a", "t/Subscriptions/s": "t/Subscriptions/s -> t"}
    for name, addition in way.items():
        assert bus.problems(name) == {}
        assert bus.warnings(name) == {field: warning + (addition if field == "forwardTo" else "")}


def test_sessions_that_are_forwarded_are_warned_of() -> None:
    bus = Namespace(a=queue(requiresSession=True, forwardTo="b"), b=queue(requiresSession=True))
    assert "no session can be received" in bus.warnings("a")["forwardTo"]
    assert bus.warnings("b") == {}


def test_a_subscription_may_forward_to_a_queue_of_its_own_name() -> None:
    bus = Namespace(t=topic(), t__audit=subscription(forwardTo="audit"), audit=queue())
    assert bus.problems("t/Subscriptions/audit") == {}


def test_a_forwarding_cycle_is_warned_of_with_its_path() -> None:
    bus = Namespace(
        a=queue(forwardTo="T"),
        t=topic(),
        t__one=subscription(),
        t__two=subscription(forwardTo="b"),
        b=queue(forwardTo="a"),
    )
    assert bus.problems("a") == {}
    assert bus.warnings("a")["forwardTo"].endswith("dead-lettered: a -> t -> b -> a")
    path = "t/Subscriptions/two"
    assert bus.warnings(path)["forwardTo"].endswith("t/Subscriptions/two -> b -> a -> t")
    bus.add("b", queue())
    assert bus.warnings("a") == {}


def test_dead_letters_may_come_back_by_way_of_another_queue() -> None:
    bus = Namespace(a=queue(forwardDeadLetteredMessagesTo="retry"), retry=queue(forwardTo="a"))
    assert bus.problems("a") == bus.problems("retry") == {}
    assert bus.warnings("a") == bus.warnings("retry") == {}


names = st.sampled_from("abcdef")


@given(st.dictionaries(names, st.none() | names), st.dictionaries(names, st.none() | names))
def test_order_of_forwarding_makes_no_circle_on_the_way(
    before: dict[str, str | None], after: dict[str, str | None]
) -> None:
    """Changing one namespace without cycles into another creates none meanwhile."""
    everything = dict.fromkeys("abcdef")
    start = Namespace(
        **{name: queue(forwardTo=to) for name, to in {**everything, **before}.items()}
    )
    end = Namespace(**{name: queue(forwardTo=to) for name, to in {**everything, **after}.items()})
    for bus in (start, end):
        for name in list(bus.all):
            if bus.warnings(name):
                bus.add(name, queue())
    ordered = in_order_of_forwarding(end.all.values())
    assert sorted(each.name for each in ordered) == list("abcdef")
    for each in ordered:
        start.add(each.name, each.properties)
        assert start.problems(each.name) == start.warnings(each.name) == {}


# --- rules --------------------------------------------------------------------------------------


def rule(name: str, *, is_sql: bool = True) -> RuleProperties:
    if is_sql:
        return RuleProperties(name=name, sql_filter=SqlFilter(sql_expression="1=1"))
    return RuleProperties(name=name, correlation_filter=CorrelationFilter(label=name))


def test_rules_of_a_topic_are_counted_by_kind() -> None:
    limits = replace(STANDARD, max_sql_rule_count=2, max_correlation_rule_count=1)
    rules = [rule("a"), rule("b"), rule("c", is_sql=False)]
    assert rule_count_problem(rules, limits) is None
    assert "2 rules with a SQL filter" in str(rule_count_problem([*rules, rule("d")], limits))
    more = [*rules, rule("d", is_sql=False)]
    assert "1 rules with a correlation" in str(rule_count_problem(more, limits))


def test_names_of_rules_ignore_case() -> None:
    assert doubled_rule([rule("a"), rule("b"), rule("A")]) == "A"
    assert doubled_rule([rule("a"), rule("b")]) is None
