"""Topics, subscriptions and rules with the unmodified azure-servicebus SDK and raw requests."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import ServiceBusAuthenticationError, ServiceBusError
from azure.servicebus.management import CorrelationRuleFilter, SqlRuleFilter

from postbus.contract.entities import CorrelationFilter, RuleProperties, SqlAction, SqlFilter
from tests.edge.bus_thread import BusThread
from tests.edge.sdk.test_sdk_administration import administration_of

pytestmark = pytest.mark.slow

SOON_S = 0.5
LONG_S = 10
DEAD = ServiceBusSubQueue.DEAD_LETTER


def sql(name: str, expression: str, action: str | None = None) -> RuleProperties:
    return RuleProperties(
        name=name,
        sql_filter=SqlFilter(sql_expression=expression),
        action=None if action is None else SqlAction(sql_expression=action),
    )


def publish(client: ServiceBusClient, topic: str, *bodies: str, **properties: object) -> None:
    with client.get_topic_sender(topic) as sender:
        sender.send_messages([ServiceBusMessage(body, **properties) for body in bodies])


def take(
    client: ServiceBusClient, topic: str, name: str, count: int, **options: object
) -> list[ServiceBusReceivedMessage]:
    """Receive and complete a number of messages."""
    with client.get_subscription_receiver(topic, name, **options) as receiver:
        taken: list[ServiceBusReceivedMessage] = []
        while len(taken) < count:
            more = receiver.receive_messages(count - len(taken), max_wait_time=LONG_S)
            assert more, f"only {len(taken)} of {count} came"
            taken += more
        for message in taken:
            receiver.complete_message(message)
    return taken


def is_empty(receiver: ServiceBusReceiver) -> bool:
    return receiver.receive_messages(1, max_wait_time=SOON_S) == []


def test_each_subscription_gets_its_copy(bus: BusThread, client: ServiceBusClient) -> None:
    topic = bus.topic()
    for name in ("one", "two", "three"):
        bus.subscription(topic, name)
    publish(client, topic, "a", "b", application_properties={"n": 1}, subject="s")
    for name in ("one", "two", "three"):
        messages = take(client, topic, name, 2)
        assert [str(message) for message in messages] == ["a", "b"]
        assert messages[0].application_properties == {b"n": 1}
        assert messages[0].subject == "s"
        assert [message.enqueued_sequence_number for message in messages] == [1, 2]


@pytest.mark.behaviour("S31", "S35", "S46", "S276")
def test_subscriptions_lock_and_count_for_themselves(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic, "short", lock_duration_ms=30_000, max_delivery_count=1)
    bus.subscription(topic, "long", lock_duration_ms=60_000)
    publish(client, topic, "a")
    with (
        client.get_subscription_receiver(topic, "short") as short,
        client.get_subscription_receiver(topic, "short") as other,
        client.get_subscription_receiver(topic, "long") as long,
    ):
        (message,) = short.receive_messages(1, max_wait_time=LONG_S)
        left = message.locked_until_utc - bus.now()
        assert timedelta(seconds=20) < left <= timedelta(seconds=30)
        assert is_empty(other)
        short.abandon_message(message)
        assert is_empty(short)
        (copy,) = long.receive_messages(1, max_wait_time=LONG_S)
        assert copy.delivery_count == 0
        long.complete_message(copy)
    (dead,) = take(client, topic, "short", 1, sub_queue=DEAD)
    assert dead.dead_letter_reason == "MaxDeliveryCountExceeded"
    with client.get_subscription_receiver(topic, "long", sub_queue=DEAD) as receiver:
        assert is_empty(receiver)


@pytest.mark.behaviour("S241", "S246")
def test_a_subscription_has_a_dead_letter_queue(bus: BusThread, client: ServiceBusClient) -> None:
    topic = bus.topic()
    bus.subscription(topic)
    with client.get_subscription_receiver(topic, "all", sub_queue=DEAD) as receiver:
        assert receiver.peek_messages(1) == []
    publish(client, topic, "bad")
    with client.get_subscription_receiver(topic, "all") as receiver:
        (message,) = receiver.receive_messages(1, max_wait_time=LONG_S)
        receiver.dead_letter_message(message, reason="why")
    (dead,) = take(client, topic, "all", 1, sub_queue=DEAD)
    assert (str(dead), dead.dead_letter_reason) == ("bad", "why")


def test_sql_and_correlation_filters_select_messages(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic, "red", [sql("red", "color = 'red' AND size > 10")])
    bus.subscription(topic, "label", [sql("label", "sys.Label LIKE 'ord%'")])
    correlation = CorrelationFilter(correlation_id="c1", properties={"color": "blue"})
    bus.subscription(topic, "blue", [RuleProperties(name="blue", correlation_filter=correlation)])
    bus.subscription(topic, "none", [])
    publish(client, topic, "r", application_properties={"color": "red", "size": 11})
    publish(client, topic, "small", application_properties={"color": "red", "size": 10})
    publish(client, topic, "o", subject="orders")
    publish(client, topic, "b", correlation_id="c1", application_properties={"color": "blue"})
    assert [str(each) for each in take(client, topic, "red", 1)] == ["r"]
    assert [str(each) for each in take(client, topic, "label", 1)] == ["o"]
    assert [str(each) for each in take(client, topic, "blue", 1)] == ["b"]
    for name in ("red", "label", "blue", "none"):
        with client.get_subscription_receiver(topic, name) as receiver:
            assert receiver.peek_messages(1) == []


def test_times_and_durations_select_messages(bus: BusThread, client: ServiceBusClient) -> None:
    topic = bus.topic()
    moment, span = datetime(2026, 11, 21, 12, 30, 1, tzinfo=UTC), timedelta(hours=2)
    filters = {
        "moment": CorrelationRuleFilter(properties={"at": moment}),
        "span": CorrelationRuleFilter(properties={"for": span}),
        "sql": SqlRuleFilter(
            'at > @at AND "for" <= @for',
            parameters={"@at": moment - timedelta(days=1), "@for": span},
        ),
    }
    with administration_of(bus) as administration:
        for name, wanted in filters.items():
            bus.subscription(topic, name, [])
            administration.create_rule(topic, name, "r", filter=wanted)
    described = {
        "TYPE": "DESCRIBED",
        "VALUE": (
            {"TYPE": "SYMBOL", "VALUE": b"com.microsoft:timespan"},
            {"TYPE": "LONG", "VALUE": 2 * 3_600 * 10_000_000},
        ),
    }
    publish(client, topic, "both", application_properties={"at": moment, "for": described})
    late = moment + timedelta(milliseconds=1)
    publish(client, topic, "other", application_properties={"at": late, "for": 7_201})
    numbers = {"at": {"TYPE": "LONG", "VALUE": int(moment.timestamp() * 1_000)}, "for": 7_201}
    publish(client, topic, "numbers", application_properties=numbers)
    for name in filters:
        with client.get_subscription_receiver(topic, name) as receiver:
            assert [str(each) for each in receiver.peek_messages(5)] == ["both"], name


def test_actions_change_copies_and_rules_with_actions_give_one_each(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    rules = [
        sql("plain", "1=1"),
        sql("up", "n > 0", "SET n = n + 1; SET sys.Label = 'up'"),
        sql("gone", "n > 0", "REMOVE n"),
    ]
    bus.subscription(topic, "all", rules)
    publish(client, topic, "a", application_properties={"n": 1})
    copies = {
        (each.application_properties or {}).get(b"RuleName", b"-"): each
        for each in take(client, topic, "all", 3)
    }
    assert set(copies) == {b"-", b"up", b"gone"}
    assert copies[b"up"].application_properties[b"n"] == 2
    assert copies[b"up"].subject == "up"
    assert b"n" not in copies[b"gone"].application_properties


@pytest.mark.behaviour("S260", "S282", "S283", "S284")
def test_filter_errors_dead_letter_where_that_is_on(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    failing = [sql("fails", "1 / n = 1")]
    bus.subscription(topic, "on", failing)
    bus.subscription(topic, "off", failing, dead_lettering_on_filter_evaluation_exceptions=False)
    bus.subscription(topic, "false", [sql("never", "n = 5")])
    bus.subscription(topic, "sibling")
    publish(client, topic, "zero", application_properties={"n": 0})
    assert [str(each) for each in take(client, topic, "sibling", 1)] == ["zero"]
    (dead,) = take(client, topic, "on", 1, sub_queue=DEAD)
    assert dead.dead_letter_reason
    assert "zero" in (dead.dead_letter_error_description or "").lower()
    for name in ("off", "false"):
        for sub_queue in (None, DEAD):
            with client.get_subscription_receiver(topic, name, sub_queue=sub_queue) as receiver:
                assert receiver.peek_messages(1) == []


@pytest.mark.behaviour("S91", "S102", "S103")
def test_the_shortest_time_to_live_of_topic_and_subscription_counts(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic(default_message_ttl_ms=20_000)
    bus.subscription(topic, "longer", default_message_ttl_ms=60_000)
    bus.subscription(topic, "shorter", default_message_ttl_ms=10_000)
    publish(client, topic, "a")
    publish(client, topic, "b", time_to_live=timedelta(seconds=15))
    with (
        client.get_subscription_receiver(topic, "longer") as longer,
        client.get_subscription_receiver(topic, "shorter") as shorter,
    ):
        lives = [
            [
                (message.expires_at_utc - message.enqueued_time_utc) / timedelta(seconds=1)
                for message in receiver.receive_messages(2, max_wait_time=LONG_S)
            ]
            for receiver in (longer, shorter)
        ]
    assert lives == [[20.0, 15.0], [10.0, 10.0]]


@pytest.mark.behaviour("S279")
def test_expired_messages_of_a_subscription_are_dead_lettered_there(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic, "all", dead_lettering_on_message_expiration=True)
    publish(client, topic, "a", time_to_live=timedelta(seconds=5))
    bus.advance(6_000)
    with client.get_subscription_receiver(topic, "all") as receiver:
        assert is_empty(receiver)
    (dead,) = take(client, topic, "all", 1, sub_queue=DEAD)
    assert dead.dead_letter_reason == "TTLExpiredException"


def test_scheduled_messages_wait_in_the_topic(bus: BusThread, client: ServiceBusClient) -> None:
    topic = bus.topic()
    bus.subscription(topic)
    with client.get_topic_sender(topic) as sender:
        due = bus.now() + timedelta(seconds=60)
        number, cancelled = sender.schedule_messages(
            [ServiceBusMessage("later"), ServiceBusMessage("never")], due
        )
        assert number != cancelled
        sender.cancel_scheduled_messages(cancelled)
    with client.get_subscription_receiver(topic, "all") as receiver:
        assert receiver.peek_messages(5) == []
        bus.advance(61_000)
        (message,) = receiver.receive_messages(1, max_wait_time=LONG_S)
        assert str(message) == "later"
        assert abs(message.enqueued_time_utc - due) < timedelta(seconds=1)
        receiver.complete_message(message)
        assert is_empty(receiver)


@pytest.mark.behaviour("S262")
def test_a_message_without_session_is_dead_lettered_by_a_session_subscription(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic, "grouped", requires_session=True)
    publish(client, topic, "lost")
    publish(client, topic, "kept", session_id="s")
    (message,) = take(client, topic, "grouped", 1, session_id="s")
    assert str(message) == "kept"
    (dead,) = take(client, topic, "grouped", 1, sub_queue=DEAD)
    assert dead.dead_letter_reason == "Session id is null."
    assert dead.dead_letter_error_description == (
        "Session enabled entity doesn't allow a message whose session identifier is null."
    )


def test_a_large_body_reaches_every_subscription(bus: BusThread, client: ServiceBusClient) -> None:
    topic = bus.topic()
    names = [f"s{number}" for number in range(5)]
    for name in names:
        bus.subscription(topic, name)
    body = "x" * 200_000
    publish(client, topic, body)
    for name in names:
        assert [str(each) for each in take(client, topic, name, 1)] == [body]


def test_topics_cannot_be_received_from_nor_subscriptions_sent_to(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic)
    with (
        pytest.raises(ServiceBusError, match="subscription"),
        client.get_queue_receiver(topic) as receiver,
    ):
        receiver.receive_messages(1, max_wait_time=SOON_S)
    with (
        pytest.raises(ServiceBusError, match="topic"),
        client.get_queue_sender(f"{topic}/Subscriptions/all") as sender,
    ):
        sender.send_messages(ServiceBusMessage("x"))
    with (
        pytest.raises(ServiceBusAuthenticationError),
        client.get_subscription_receiver(topic, "nobody") as receiver,
    ):
        receiver.receive_messages(1, max_wait_time=SOON_S)


def test_a_dropped_topic_takes_its_subscriptions_along(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic)
    publish(client, topic, "a")
    bus.delete(topic)
    with (
        pytest.raises(ServiceBusAuthenticationError),
        client.get_subscription_receiver(topic, "all") as receiver,
    ):
        receiver.receive_messages(1, max_wait_time=SOON_S)
    bus.topic(topic)
    bus.subscription(topic)
    with client.get_subscription_receiver(topic, "all") as receiver:
        assert receiver.peek_messages(1) == []


def test_messages_of_a_subscription_survive_a_reload(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic, "one")
    bus.subscription(topic, "two", [sql("n", "n = 1")])
    publish(client, topic, "a", application_properties={"n": 1})
    bus.reload(topic)
    publish(client, topic, "b", application_properties={"n": 2})
    assert [str(each) for each in take(client, topic, "one", 2)] == ["a", "b"]
    assert [str(each) for each in take(client, topic, "two", 1)] == ["a"]


# --- rules over the management node ---------------------------------------------------------------


class Rules:
    """Rule requests on an SDK receiver's own management link: this SDK has no method for them."""

    def __init__(self, receiver: ServiceBusReceiver, topic: str) -> None:
        self._receiver = receiver
        self.topic = topic

    def ask(self, operation: str, **body: object) -> object:
        def answer(status: int, message: Any, description: object, **_: object) -> object:
            return status, message.value, description

        request = {key.replace("_", "-"): value for key, value in body.items()}
        return self._receiver._mgmt_request_response_with_retry(
            f"com.microsoft:{operation}".encode(), request, answer
        )


@pytest.fixture
def rules(bus: BusThread, client: ServiceBusClient) -> Rules:
    topic = bus.topic(f"rules-{uuid.uuid4().hex[:8]}")
    bus.subscription(topic)
    with client.get_subscription_receiver(topic, "all") as receiver:
        receiver.peek_messages(1)
        yield Rules(receiver, topic)


def names_of(listed: object) -> list[str]:
    _, body, _ = listed
    return [each[b"rule-description"][2].decode() for each in body[b"rules"]]


def test_rules_are_added_listed_and_removed(rules: Rules) -> None:
    listed = rules.ask("enumerate-rules", top=100, skip=0)
    assert names_of(listed) == ["$Default"]
    status, _, _ = rules.ask(
        "add-rule",
        rule_name="big",
        rule_description={
            "sql-filter": {"expression": "size > 10"},
            "sql-rule-action": {"expression": "SET big = TRUE"},
        },
    )
    assert status == 200
    rules.ask(
        "add-rule",
        rule_name="blue",
        rule_description={"correlation-filter": {"label": "blue", "properties": {"n": 1}}},
    )
    assert sorted(names_of(rules.ask("enumerate-rules", top=100, skip=0))) == [
        "$Default",
        "big",
        "blue",
    ]
    assert names_of(rules.ask("enumerate-rules", top=1, skip=1)) in (
        ["$Default"],
        ["big"],
        ["blue"],
    )
    status, _, _ = rules.ask("remove-rule", rule_name="$Default")
    assert status == 200
    assert sorted(names_of(rules.ask("enumerate-rules", top=100, skip=0))) == ["big", "blue"]


@pytest.mark.parametrize(
    ("operation", "body", "status"),
    [
        ("add-rule", {"rule_name": "$Default", "rule_description": {"true-filter": {}}}, 409),
        ("add-rule", {"rule_name": "x", "rule_description": {}}, 400),
        ("add-rule", {"rule_name": "x"}, 400),
        ("add-rule", {"rule_name": "", "rule_description": {"true-filter": {}}}, 400),
        (
            "add-rule",
            {"rule_name": "x", "rule_description": {"sql-filter": {"expression": "a = = 1"}}},
            400,
        ),
        ("remove-rule", {"rule_name": "nobody"}, 404),
        ("remove-rule", {}, 400),
    ],
)
def test_wrong_rule_requests_are_answered(
    rules: Rules, operation: str, body: dict[str, object], status: int
) -> None:
    assert rules.ask(operation, **body)[0] == status
    assert names_of(rules.ask("enumerate-rules", top=100, skip=0)) == ["$Default"]


def test_a_rule_change_takes_effect_for_the_next_message(
    client: ServiceBusClient, rules: Rules
) -> None:
    publish(client, rules.topic, "before")
    rules.ask("remove-rule", rule_name="$Default")
    publish(client, rules.topic, "nobody gets it")
    rules.ask("add-rule", rule_name="n", rule_description={"sql-filter": {"expression": "n = 1"}})
    publish(client, rules.topic, "after", application_properties={"n": 1})
    taken = take(client, rules.topic, "all", 2)
    assert [str(each) for each in taken] == ["before", "after"]
