from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from postbus.contract.entities import DAY_MS, Right, Sku
from postbus.contract.rule_values import Moment, parse_moment_ms
from postbus.contract.yaml_documents import ManifestError
from postbus.manifests.reader import BusDefinition, RuleKeys, read_manifests, read_one_bus

NAMESPACE = """\
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: shop-bus}
spec: {}
"""
QUEUE = """\
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: orders}
spec:
  owner: {name: shop-bus}
"""


def write(folder: Path, *documents: str, name: str = "bus.yaml") -> Path:
    path = folder / name
    path.write_text("---\n".join(dedent(document) for document in documents))
    return path


def read(folder: Path, *documents: str) -> BusDefinition:
    return read_one_bus([write(folder, *documents)])


def shifted(spec: str) -> str:
    """Indent lines like the fields of a spec."""
    return "".join(f"  {line}\n" for line in dedent(spec).splitlines())


def complaints(folder: Path, *documents: str) -> list[str]:
    path = write(folder, *documents)
    with pytest.raises(ManifestError) as caught:
        read_one_bus([path])
    return [str(problem).removeprefix(f"{path}") for problem in caught.value.problems]


# --- reading ------------------------------------------------------------------------------------


def test_queue_belongs_to_the_namespace_it_names(tmp_path: Path) -> None:
    bus = read(tmp_path, NAMESPACE, QUEUE)
    assert bus.name == "shop-bus"
    assert [queue.name for queue in bus.queues] == ["orders"]


def test_order_of_documents_does_not_matter(tmp_path: Path) -> None:
    assert read(tmp_path, QUEUE, NAMESPACE) == read(tmp_path, NAMESPACE, QUEUE)


def test_folder_is_read_file_by_file(tmp_path: Path) -> None:
    write(tmp_path, NAMESPACE, name="a.yaml")
    write(tmp_path, QUEUE, name="b.yml")
    write(tmp_path, "not: read", name="c.json")
    assert len(read_one_bus([tmp_path]).queues) == 1


def test_entity_name_wins_over_the_name_of_the_resource(tmp_path: Path) -> None:
    bus = read(tmp_path, NAMESPACE, QUEUE + "  entityName: Shop/Orders_1\n")
    assert bus.queues[0].name == "Shop/Orders_1"


@pytest.mark.behaviour("S92")
def test_properties_are_read(tmp_path: Path) -> None:
    spec = """\
      lockDuration: PT30S
      maxDeliveryCount: 3
      defaultMessageTimeToLive: P2D
      deadLetteringOnMessageExpiration: true
      status: SendDisabled
    """
    bus = read(tmp_path, NAMESPACE, QUEUE + dedent(spec).replace("\n", "\n  ").join(["  ", "\n"]))
    properties = bus.queues[0].properties
    assert properties.lock_duration_ms == 30_000
    assert properties.max_delivery_count == 3
    assert properties.default_message_ttl_ms == 2 * DAY_MS
    assert properties.dead_lettering_on_message_expiration is True
    assert properties.status.value == "SendDisabled"


@pytest.mark.behaviour("S100", "S266", "S277")
def test_defaults_are_those_of_the_tier(tmp_path: Path) -> None:
    bus = read(tmp_path, NAMESPACE.replace("{}", "{sku: {name: Basic}}"), QUEUE)
    assert bus.properties.sku.name is Sku.BASIC
    properties = bus.queues[0].properties
    assert properties.default_message_ttl_ms == 14 * DAY_MS
    assert properties.max_delivery_count == 10
    assert properties.dead_lettering_on_message_expiration is False


SECRET = """\
apiVersion: v1
kind: Secret
metadata: {name: shop-keys}
type: Opaque
data:
  primaryKey: b2xkLXByaW1hcnktb2YtdHdlbnR5LWFuZC1tb3Jl
  secondaryKey: c2Vjb25kLW9mLXR3ZW50eS1hbmQtbW9yZQ==
stringData:
  primaryKey: first-of-twenty-and-more
"""
WITH_RULES = """\
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: shop-bus}
spec:
  authorizationRules:
    - {name: everything, rights: [Manage], secretName: shop-keys}
    - {name: reader, rights: [Listen]}
"""


def test_keys_come_from_the_secret_that_the_rule_names(tmp_path: Path) -> None:
    first, second = read(tmp_path, WITH_RULES, SECRET).rules
    assert (first.name, first.rights) == ("everything", frozenset(Right))
    assert first.keys == RuleKeys("first-of-twenty-and-more", "second-of-twenty-and-more")
    assert (second.rights, second.keys) == (frozenset({Right.LISTEN}), None)


def test_keys_are_not_shown_in_text_of_objects(tmp_path: Path) -> None:
    text = repr(read(tmp_path, WITH_RULES, SECRET))
    assert "everything" in text
    assert "first" not in text
    assert "second" not in text


def test_queue_of_another_cluster_namespace_needs_permission(tmp_path: Path) -> None:
    queue = QUEUE.replace("{name: orders}", "{name: orders, namespace: team}").replace(
        "{name: shop-bus}", "{name: shop-bus, namespace: default}"
    )
    assert complaints(tmp_path, NAMESPACE, queue) == [
        ":10: spec.owner: the bus admits entities of its own cluster namespace default only"
    ]
    open_bus = NAMESPACE.replace("{}", "{operatorSpec: {allowedNamespaces: {from: All}}}")
    assert len(read(tmp_path, open_bus, queue).queues) == 1


def test_soft_delete_retention_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, NAMESPACE).deleted_retention_ms is None
    assert read(tmp_path, NAMESPACE).declared.soft_delete.retention_ms == 7 * DAY_MS
    text = NAMESPACE.replace("{}", "{operatorSpec: {softDelete: {retention: P30D}}}")
    assert read(tmp_path, text).deleted_retention_ms == 30 * DAY_MS
    (complaint,) = complaints(tmp_path, text.replace("P30D", "P91D"))
    assert complaint.endswith("softDelete.retention: must be between PT1M and P90D")


# --- history --------------------------------------------------------------------------------------

HISTORY = "  operatorSpec: {history: {retention: P7D}}\n"


def test_queues_and_subscriptions_keep_settled_messages(tmp_path: Path) -> None:
    bus = read(tmp_path, NAMESPACE, QUEUE + HISTORY, TOPIC, SUBSCRIPTION + HISTORY)
    assert bus.queues[0].properties.history_retention_ms == 7 * DAY_MS
    assert bus.subscriptions[0].properties.history_retention_ms == 7 * DAY_MS


@pytest.mark.parametrize("text", ["", HISTORY.replace("P7D", "null"), "  operatorSpec: {}\n"])
def test_without_a_retention_deleted_entities_are_not_kept(tmp_path: Path, text: str) -> None:
    (queue,) = read(tmp_path, NAMESPACE, QUEUE + text).queues
    assert queue.properties.history_retention_ms is None


@pytest.mark.parametrize("text", ["PT59S", "P91D"])
def test_retention_outside_its_range_is_refused(tmp_path: Path, text: str) -> None:
    (complaint,) = complaints(tmp_path, NAMESPACE, QUEUE + HISTORY.replace("P7D", text))
    assert complaint.endswith("operatorSpec.history.retention: must be between PT1M and P90D")


def test_a_topic_has_no_history(tmp_path: Path) -> None:
    (complaint,) = complaints(tmp_path, NAMESPACE, TOPIC + HISTORY)
    assert complaint.endswith(
        "operatorSpec.history: a topic stores no messages: give its subscriptions a history"
    )


def test_a_retention_stands_in_its_place_only(tmp_path: Path) -> None:
    assert complaints(tmp_path, NAMESPACE, QUEUE + "  historyRetention: P7D\n")


# --- topics and subscriptions -------------------------------------------------------------------

TOPIC = """\
apiVersion: postbus.dev/v1alpha1
kind: Topic
metadata: {name: events}
spec:
  owner: {name: shop-bus}
"""
SUBSCRIPTION = """\
apiVersion: postbus.dev/v1alpha1
kind: Subscription
metadata: {name: audit}
spec:
  owner: {name: events}
"""


def test_subscription_belongs_to_the_topic_it_names(tmp_path: Path) -> None:
    bus = read(tmp_path, SUBSCRIPTION, TOPIC + "  entityName: Shop/Events\n", NAMESPACE)
    assert [topic.name for topic in bus.topics] == ["Shop/Events"]
    (subscription,) = bus.subscriptions
    assert (subscription.topic, subscription.name) == ("Shop/Events", "audit")
    assert subscription.rules is None


def test_topics_have_rules_of_access_like_queues(tmp_path: Path) -> None:
    rules = "  authorizationRules: [{name: publisher, rights: [Send]}]\n"
    (topic,) = read(tmp_path, NAMESPACE, TOPIC + rules).topics
    assert [(rule.name, rule.rights) for rule in topic.rules] == [
        ("publisher", frozenset({Right.SEND}))
    ]


@pytest.mark.behaviour("S92")
def test_properties_of_topics_and_subscriptions_are_read(tmp_path: Path) -> None:
    bus = read(
        tmp_path,
        NAMESPACE,
        TOPIC + "  defaultMessageTimeToLive: P2D\n  requiresDuplicateDetection: true\n",
        SUBSCRIPTION + "  defaultMessageTimeToLive: P1D\n  requiresSession: true\n",
    )
    assert bus.topics[0].properties.default_message_ttl_ms == 2 * DAY_MS
    assert bus.topics[0].properties.requires_duplicate_detection
    assert bus.subscriptions[0].properties.default_message_ttl_ms == DAY_MS
    assert bus.subscriptions[0].properties.requires_session


def test_rules_that_are_too_large_are_complained_about(tmp_path: Path) -> None:
    def rules_of(sizes: list[int]) -> str:
        return "  rules:\n" + "".join(
            f"    - name: r{number}\n      correlationFilter: {{label: {'x' * size}}}\n"
            for number, size in enumerate(sizes)
        )

    (one,) = complaints(tmp_path, NAMESPACE, TOPIC, SUBSCRIPTION + rules_of([100, 66_000]))
    assert "spec.rules" in one
    assert "65536 are allowed" in one
    (all_of_them,) = complaints(tmp_path, NAMESPACE, TOPIC, SUBSCRIPTION + rules_of([65_000] * 17))
    assert "spec.rules: the rules of the subscription have" in all_of_them


def test_rules_are_exactly_those_given(tmp_path: Path) -> None:
    rules = """\
      rules:
        - name: red
          sqlFilter: {sqlExpression: "colour = 'red' AND weight > 3"}
          action: {sqlExpression: SET sys.Label = 'heavy'}
        - name: eu
          filterType: CorrelationFilter
          correlationFilter: {label: order, properties: {region: eu, urgent: true, weight: 3}}
        - name: new-year
          correlationFilter:
            properties: {due: {dateTime: 2031-01-01T00:00:00Z}}
    """
    (subscription,) = read(tmp_path, NAMESPACE, TOPIC, SUBSCRIPTION + shifted(rules)).subscriptions
    assert subscription.rules is not None
    red, eu, year = subscription.rules
    assert (red.name, red.sql_filter and red.sql_filter.sql_expression) == (
        "red",
        "colour = 'red' AND weight > 3",
    )
    assert red.action is not None
    assert eu.correlation_filter is not None
    assert eu.correlation_filter.properties == {"region": "eu", "urgent": True, "weight": 3}
    assert year.correlation_filter is not None
    due = parse_moment_ms("2031-01-01T00:00:00Z")
    assert year.correlation_filter.properties == {"due": Moment(at_ms=due)}
    (none,) = read(tmp_path, NAMESPACE, TOPIC, SUBSCRIPTION + "  rules: []\n").subscriptions
    assert none.rules == ()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            "rules: [{name: r, sqlFilter: {sqlExpression: 'a = = 1'}}]",
            "spec.rules[0].sqlFilter.sqlExpression: line 1, column 5: expected",
        ),
        (
            "rules: [{name: r, sqlFilter: {sqlExpression: 1=1}, action: {sqlExpression: SETT a}}]",
            "spec.rules[0].action.sqlExpression: line 1, column 1",
        ),
        ("rules: [{name: r}]", "spec.rules[0]: a rule has either"),
        ("rules: [{name: a/b, sqlFilter: {sqlExpression: 1=1}}]", "spec.rules[0].name: a rule's"),
        (
            "rules: [{name: r, correlationFilter: {properties: {x: [1]}}}]",
            "spec.rules[0].correlationFilter.properties.x: a rule compares with",
        ),
        (
            "rules: [{name: r, correlationFilter: {to: x}}, {name: R, correlationFilter: {to: x}}]",
            "spec.rules: the rule R is named twice",
        ),
        ("maxSizeInMegabytes: 1024", "spec.maxSizeInMegabytes: unknown field"),
        ("isClientAffine: true", "spec.isClientAffine: subscriptions of one client are not"),
        ("entityName: a/b", "spec.entityName: a subscription's name has"),
        ("forwardTo: nowhere", "spec.forwardTo: there is no queue or topic nowhere"),
    ],
)
def test_errors_of_a_subscription_are_reported_with_their_field(
    tmp_path: Path, spec: str, expected: str
) -> None:
    (found,) = complaints(tmp_path, NAMESPACE, TOPIC, SUBSCRIPTION + f"  {spec}\n")
    assert found.startswith(f":17: {expected}")


def test_the_place_of_a_mistake_in_sql_is_shown(tmp_path: Path) -> None:
    rules = """\
      rules:
        - name: red
          sqlFilter: {sqlExpression: "colour = '\u6f22'\\nAND\\tname = '\u6f22' AND = 3"}
    """
    shown = complaints(tmp_path, NAMESPACE, TOPIC, SUBSCRIPTION + shifted(rules))
    assert "line 2, column 20: expected " in shown[0]
    line, caret = shown[0].splitlines()[1:]
    assert line == "  AND name = '\u6f22' AND = 3"
    assert caret == " " * (2 + 20) + "^"  # one column of the text is two wide


def test_fields_without_meaning_for_a_subscription_are_accepted(tmp_path: Path) -> None:
    more = "  duplicateDetectionHistoryTimeWindow: PT10M\n"
    assert read(tmp_path, NAMESPACE, TOPIC, SUBSCRIPTION + more).subscriptions


def test_topic_of_a_subscription_must_be_defined(tmp_path: Path) -> None:
    assert complaints(tmp_path, NAMESPACE, SUBSCRIPTION) == [
        ":10: spec.owner.name: the Topic events is not among the manifests"
    ]


def test_name_of_the_resource_may_be_too_long_for_a_subscription(tmp_path: Path) -> None:
    long = SUBSCRIPTION.replace("audit", "x" * 51)
    (found,) = complaints(tmp_path, NAMESPACE, TOPIC, long)
    assert found.startswith(":14: metadata.name: a subscription's name has 1 to 50")
    assert read(tmp_path, NAMESPACE, TOPIC, long + "  entityName: short\n").subscriptions


def test_a_queue_and_a_topic_cannot_have_one_name(tmp_path: Path) -> None:
    (found,) = complaints(tmp_path, NAMESPACE, QUEUE, TOPIC + "  entityName: ORDERS\n")
    assert found.endswith("has a queue ORDERS already")


def test_forwarding_cycle_is_warned_of(tmp_path: Path) -> None:
    bus = read(
        tmp_path,
        NAMESPACE,
        QUEUE + "  forwardTo: events\n",
        TOPIC,
        SUBSCRIPTION + "  forwardTo: orders\n",
    )
    circle = "spec.forwardTo: forwarding loop; messages in it will be dead-lettered"
    assert [str(each).partition(".yaml")[2] for each in bus.warnings] == [
        f":11: {circle}: orders -> events -> orders",
        f":24: {circle}: events/Subscriptions/audit -> orders -> events",
    ]


def test_zone_redundancy_is_for_the_operator(tmp_path: Path) -> None:
    bus = read(tmp_path, NAMESPACE.replace("{}", "{zoneRedundant: true}"))
    [warning] = bus.warnings
    assert str(warning).endswith(
        "spec.zoneRedundant: has an effect on Kubernetes only, where the operator spreads brokers"
    )
    assert not bus.properties.zone_redundant


def test_basic_has_no_topics(tmp_path: Path) -> None:
    basic = NAMESPACE.replace("{}", "{sku: {name: Basic}}")
    found = complaints(tmp_path, basic, TOPIC)
    assert found == [
        ":7: kind: topics and subscriptions are not available in Basic: use Standard or Premium"
    ]


@pytest.mark.behaviour("S215")
def test_a_namespace_has_a_hundred_partitioned_entities(tmp_path: Path) -> None:
    queues = [QUEUE.replace("orders", f"q{n}") + "  enablePartitioning: true\n" for n in range(99)]
    topic = TOPIC + "  enablePartitioning: true\n"
    assert len(read(tmp_path, NAMESPACE, *queues, topic).queues) == 99
    (found,) = complaints(
        tmp_path, NAMESPACE, *queues, topic, QUEUE + "  enablePartitioning: true\n"
    )
    assert found == ":3: metadata.name: at most 100 partitioned queues and topics, here are 101"


@pytest.mark.behaviour("S144", "S148")
def test_premium_namespace_declares_its_number_of_partitions(tmp_path: Path) -> None:
    premium = NAMESPACE.replace("{}", "{sku: {name: Premium}, premiumMessagingPartitions: 4}")
    bus = read(tmp_path, premium, QUEUE, TOPIC)
    assert bus.properties.new_limits.partition_count == 4
    assert bus.queues[0].properties.enable_partitioning
    assert bus.topics[0].properties.enable_partitioning


@pytest.mark.behaviour("S145")
def test_premium_namespace_is_partitioned_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    queue = QUEUE + "  enablePartitioning: true\n"
    plain = NAMESPACE.replace("{}", "{sku: {name: Premium}, premiumMessagingPartitions: 1}")
    (found,) = complaints(tmp_path, plain, queue)
    assert found.startswith(":11: spec.enablePartitioning: ")
    assert "when it is created" in found


@pytest.mark.behaviour("S146")
def test_entities_of_a_premium_namespace_may_have_another_tier(tmp_path: Path) -> None:
    premium = NAMESPACE.replace("{}", "{sku: {name: Premium}}")  # the store has its partitions
    queue = QUEUE + "  enablePartitioning: true\n  maxMessageSizeInKilobytes: "
    bus = read(tmp_path, premium, queue + "256\n")
    assert bus.queues[0].properties.enable_partitioning
    (found,) = complaints(tmp_path, premium, queue + "512\n")
    assert found.endswith("must be at least 1024")


# --- refusals -----------------------------------------------------------------------------------


def test_complaint_names_file_line_and_field(tmp_path: Path) -> None:
    assert complaints(tmp_path, NAMESPACE, QUEUE + "  lockDuration: PT6M\n") == [
        ":11: spec.lockDuration: must be between PT5S and PT5M"
    ]


def test_all_complaints_come_at_once(tmp_path: Path) -> None:
    found = complaints(
        tmp_path,
        NAMESPACE.replace("{}", "{sku: {name: Gold}}"),
        QUEUE + "  maxDeliveryCount: 0\n  status: Paused\n",
    )
    assert [line.split(": ")[1] for line in found] == [
        "spec.sku.name",
        "spec.maxDeliveryCount",
        "spec.status",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lockDurations: PT1M", "spec.lockDurations: unknown field; did you mean lockDuration?"),
        ("lockDuration: 60000", "spec.lockDuration: use an ISO 8601 duration"),
        ('maxDeliveryCount: "3"', "spec.maxDeliveryCount: input should be a valid integer"),
        ("enableExpress: 1", "spec.enableExpress: input should be a valid boolean"),
        ("forwardTo: nowhere", "spec.forwardTo: there is no queue or topic nowhere"),
        ("autoDeleteOnIdle: PT4M", "spec.autoDeleteOnIdle: must be at least PT5M"),
        ("requiresSession: 'yes'", "spec.requiresSession: input should be a valid boolean"),
        ("entityName: a//b", "spec.entityName: the name of a queue or topic has"),
        ("maxSizeInMegabytes: 10240", "spec.maxSizeInMegabytes: this tier allows 1024, 2048"),
        ("maxDeliveryCount: .nan", "this number cannot be used"),
        ("maxDeliveryCount: 99999999999999999999", "this number is too large"),
        ("status: !!binary aGk=", "values tagged"),
    ],
)
def test_errors_of_a_queue_are_reported_with_their_field(
    tmp_path: Path, line: str, expected: str
) -> None:
    (found,) = complaints(tmp_path, NAMESPACE, QUEUE + f"  {line}\n")
    assert found.startswith(f":11: {expected}")


@pytest.mark.behaviour("S101")
def test_basic_namespace_refuses_more_than_fourteen_days(tmp_path: Path) -> None:
    basic = NAMESPACE.replace("{}", "{sku: {name: Basic}}")
    assert complaints(tmp_path, basic, QUEUE + "  defaultMessageTimeToLive: P15D\n") == [
        ":11: spec.defaultMessageTimeToLive: this tier allows at most P14D"
    ]


def test_owner_must_be_defined(tmp_path: Path) -> None:
    found = complaints(tmp_path, NAMESPACE, QUEUE.replace("shop-bus", "shop-buss"))
    assert found == [":10: spec.owner.name: the Namespace shop-buss is not among the manifests"]


def test_missing_field_is_reported_at_its_parent(tmp_path: Path) -> None:
    found = complaints(
        tmp_path, NAMESPACE, QUEUE.replace("owner: {name: shop-bus}", "status: Active")
    )
    assert found == [":9: spec.owner: this field is required"]


def test_secret_must_be_defined_and_hold_a_key(tmp_path: Path) -> None:
    expected = ":6: spec.authorizationRules[0].secretName: the Secret shop-keys "
    assert complaints(tmp_path, WITH_RULES) == [expected + "is not among the manifests"]
    empty = SECRET.replace("primaryKey", "somethingElse")
    assert complaints(tmp_path, WITH_RULES, empty) == [expected + "has no usable primaryKey"]


@pytest.mark.parametrize("key", ["x", "SAS_KEY", "nineteen-characters"])
def test_given_keys_must_not_be_short(tmp_path: Path, key: str) -> None:
    complaint = "a key has at least 20 characters: generate one with `openssl rand -base64 32`"
    short = SECRET.replace("first-of-twenty-and-more", key)
    twice = WITH_RULES.replace("[Listen]}", "[Listen], secretName: shop-keys}")
    assert complaints(tmp_path, twice, short) == [f":17: stringData.primaryKey: {complaint}"]
    second = SECRET.replace("c2Vjb25kLW9mLXR3ZW50eS1hbmQtbW9yZQ==", "c2hvcnQ=")
    assert complaints(tmp_path, WITH_RULES, second) == [f":15: data.secondaryKey: {complaint}"]


def test_key_of_the_emulator_is_taken_here(tmp_path: Path) -> None:
    public = SECRET.replace("first-of-twenty-and-more", "SAS_KEY_VALUE")
    keys = read(tmp_path, WITH_RULES, public).rules[0].keys
    assert keys is not None
    assert keys.primary == "SAS_KEY_VALUE"


def test_secret_without_base64_is_refused(tmp_path: Path) -> None:
    broken = SECRET.replace("c2Vjb25kLW9mLXR3ZW50eS1hbmQtbW9yZQ==", "'%%%'")
    assert complaints(tmp_path, WITH_RULES, broken) == [
        ":15: data.secondaryKey: must be base64 of UTF-8 text"
    ]


def test_duplicate_queue_is_refused(tmp_path: Path) -> None:
    again = QUEUE.replace("name: orders", "name: orders-2") + "  entityName: ORDERS\n"
    (found,) = complaints(tmp_path, NAMESPACE, QUEUE, again)
    assert found.endswith("has a queue ORDERS already")
    (found,) = complaints(tmp_path, NAMESPACE, QUEUE, QUEUE)
    assert "the same object is defined in" in found


@pytest.mark.parametrize(
    ("api_version", "kind", "expected"),
    [
        ("v1", "Topic", "apiVersion of kind Topic must be postbus.dev/v1alpha1"),
        ("v1", "Namespace", "this is the cluster's own Namespace"),
        ("postbus.dev/v1", "Queue", "apiVersion of kind Queue must be postbus.dev/v1alpha1"),
        ("apps/v1", "Deployment", "apiVersion apps/v1, kind Deployment: only"),
        ("postbus.dev/v1alpha1", "Pipeline", "a Pipeline is run by `postbus-pipeline run`"),
    ],
)
def test_manifests_of_other_kinds_are_refused_or_ignored(
    tmp_path: Path, api_version: str, kind: str, expected: str
) -> None:
    document = f"apiVersion: {api_version}\nkind: {kind}\n"
    assert complaints(tmp_path, document)[0].startswith(f":2: kind: {expected}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n  - [", ":2: no valid YAML"),
        ("a: 1\na: 2", ":2: the key 'a' occurs twice"),
        ("- 1", ":1: a document must be a mapping"),
        ("? [a]\n: 1", ":1: keys must be plain text"),
        ("a: &a [*a]", ":1: the document is too large or nested too deeply"),
        ("a: \x01", ": no valid YAML"),
        ("[" * 600, ": the document is too large or nested too deeply"),
    ],
)
def test_text_without_a_manifest_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (found,) = complaints(tmp_path, text)
    assert found.startswith(expected)


def test_aliases_do_not_make_a_small_file_large(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (found,) = complaints(tmp_path, "\n".join(levels))
    assert "too large" in found


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such file"):
        read_manifests([tmp_path / "absent.yaml"])
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ManifestError, match="not UTF-8"):
        read_manifests([tmp_path / "latin.yaml"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ManifestError, match=r"no \.yaml files"):
        read_manifests([empty])


def test_exactly_one_bus_is_wanted(tmp_path: Path) -> None:
    second = NAMESPACE.replace("shop-bus", "other-bus")
    (found,) = complaints(tmp_path, NAMESPACE, second)
    assert found.endswith("found shop-bus, other-bus")
    assert len(read_manifests([tmp_path / "bus.yaml"])) == 2
