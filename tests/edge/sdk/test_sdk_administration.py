"""`ServiceBusAdministrationClient` of Python's SDK, unchanged, over TLS: all that it can do."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio.management import (
    ServiceBusAdministrationClient as AsyncAdministrationClient,
)
from azure.servicebus.management import (
    AccessRights,
    ApiVersion,
    AuthorizationRule,
    CorrelationRuleFilter,
    FalseRuleFilter,
    RuleProperties,
    ServiceBusAdministrationClient,
    SqlRuleAction,
    SqlRuleFilter,
    TrueRuleFilter,
)

from tests.edge.bus_thread import PARTITION_COUNT, BusThread

FOREVER = timedelta(days=10_675_199, hours=2, minutes=48, seconds=5, microseconds=477_581)


def administration_of(
    bus: BusThread, rule: str = "RootManageSharedAccessKey", key: str | None = None, **more: Any
) -> ServiceBusAdministrationClient:
    return ServiceBusAdministrationClient.from_connection_string(
        bus.connection_string(rule, key),
        connection_verify=str(bus.authority_file),
        retry_total=0,
        **more,
    )


@pytest.fixture
def administration(bus: BusThread) -> Iterator[ServiceBusAdministrationClient]:
    with administration_of(bus) as client:
        yield client


def refusal_of(work: Callable[[], object]) -> HttpResponseError:
    with pytest.raises(HttpResponseError) as caught:
        work()
    return caught.value


# --- every public method --------------------------------------------------------------------------


class Steps:
    """Calls each method once in an order that makes sense; `call` runs it, sync or async."""

    def __init__(self, client: Any, call: Callable[[Any], Any], pages: Callable[[Any], list[Any]]):
        self._client, self._call, self._pages = client, call, pages
        self.called: set[str] = set()

    def __call__(self, name: str, *arguments: Any, **named: Any) -> Any:
        self.called.add(name)
        found = getattr(self._client, name)(*arguments, **named)
        return self._pages(found) if name.startswith("list_") else self._call(found)


def walk(do: Steps, prefix: str) -> None:
    queue, topic = f"{prefix}/queue", f"{prefix}/topic"
    assert do("get_namespace_properties").name == "test-bus"

    assert do("create_queue", queue, max_delivery_count=3).max_delivery_count == 3
    found = do("get_queue", queue)
    found.max_delivery_count = 4
    do("update_queue", found)
    assert do("get_queue", queue).max_delivery_count == 4
    assert do("get_queue_runtime_properties", queue).total_message_count == 0
    assert queue in [each.name for each in do("list_queues")]
    assert queue in [each.name for each in do("list_queues_runtime_properties")]

    assert do("create_topic", topic, user_metadata="a").user_metadata == "a"
    do("update_topic", do("get_topic", topic), user_metadata="b")
    assert do("get_topic", topic).user_metadata == "b"
    assert do("get_topic_runtime_properties", topic).subscription_count == 0
    assert topic in [each.name for each in do("list_topics")]
    assert topic in [each.name for each in do("list_topics_runtime_properties")]

    assert do("create_subscription", topic, "sub").name == "sub"
    do("update_subscription", topic, do("get_subscription", topic, "sub"), max_delivery_count=7)
    assert do("get_subscription", topic, "sub").max_delivery_count == 7
    assert do("get_subscription_runtime_properties", topic, "sub").active_message_count == 0
    assert [each.name for each in do("list_subscriptions", topic)] == ["sub"]
    names = [each.name for each in do("list_subscriptions_runtime_properties", topic)]
    assert names == ["sub"]

    assert do("create_rule", topic, "sub", "rule", filter=SqlRuleFilter("a=1")).name == "rule"
    rule = do("get_rule", topic, "sub", "rule")
    rule.filter = SqlRuleFilter("a=2")
    do("update_rule", topic, "sub", rule)
    assert do("get_rule", topic, "sub", "rule").filter.sql_expression == "a=2"
    assert {each.name for each in do("list_rules", topic, "sub")} == {"$Default", "rule"}

    do("delete_rule", topic, "sub", "rule")
    do("delete_subscription", topic, "sub")
    do("delete_topic", topic)
    do("delete_queue", queue)
    for gone in (queue, topic):
        with pytest.raises(ResourceNotFoundError):
            do("get_queue", gone)


def methods_of(client: type) -> set[str]:
    """Return the methods of the client, without its creation and close."""
    return {
        name
        for name, _ in inspect.getmembers(client, callable)
        if not name.startswith("_") and name not in ("from_connection_string", "close")
    }


def test_every_method_of_the_client_works(administration: ServiceBusAdministrationClient) -> None:
    do = Steps(administration, lambda found: found, list)
    walk(do, "walk")
    assert do.called == methods_of(ServiceBusAdministrationClient)


def test_a_closed_client_sends_no_request(bus: BusThread, queue: str) -> None:
    client = administration_of(bus)
    assert client.get_queue(queue).name == queue
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.get_queue(queue)


async def test_every_method_of_the_async_client_works(bus: BusThread) -> None:
    """The steps are those of the other client; they run in a loop of their own."""
    loop = asyncio.new_event_loop()
    runner = threading.Thread(target=loop.run_forever)
    runner.start()

    def wait(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def every(found: AsyncIterator[Any]) -> list[Any]:
        return [each async for each in found]

    async def opened() -> AsyncAdministrationClient:
        return AsyncAdministrationClient.from_connection_string(
            bus.connection_string(), connection_verify=str(bus.authority_file), retry_total=0
        )

    client = wait(opened())
    try:
        do = Steps(client, wait, lambda found: wait(every(found)))
        await asyncio.to_thread(walk, do, "walk-async")
        assert do.called == methods_of(AsyncAdministrationClient)
    finally:
        wait(client.close())
        loop.call_soon_threadsafe(loop.stop)
        runner.join()
        loop.close()


# --- properties -----------------------------------------------------------------------------------


def given_properties(properties: Any) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if not name.startswith("_")}


@pytest.mark.behaviour("S218", "S120", "S92", "S274")
def test_a_queue_reads_back_as_it_was_made(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    target = bus.queue()
    wanted: dict[str, Any] = {
        "auto_delete_on_idle": timedelta(minutes=10),
        "dead_lettering_on_message_expiration": True,
        "default_message_time_to_live": timedelta(days=14, seconds=3),
        "duplicate_detection_history_time_window": timedelta(minutes=7),
        "enable_batched_operations": False,
        "enable_express": True,
        "enable_partitioning": True,
        "lock_duration": timedelta(seconds=37),
        "max_delivery_count": 2**31 - 1,
        "requires_duplicate_detection": True,
        "requires_session": True,
        "user_metadata": 'costs 5 < 6 & "more" \n\té \U0001f4ee',
    }
    made = administration.create_queue(
        "Read/Back",
        forward_dead_lettered_messages_to=target,
        max_size_in_megabytes=2048,
        **wanted,
    )
    found = administration.get_queue("rEAD/bACK")
    for properties in (made, found):
        assert {name: getattr(properties, name) for name in wanted} == wanted
        assert properties.forward_dead_lettered_messages_to.endswith(f"/{target}")
        assert properties.forward_to is None
        assert properties.status == "Active"
        assert properties.availability_status == "Available"
        assert properties.max_size_in_megabytes == PARTITION_COUNT * 2048
        assert properties.max_message_size_in_kilobytes == 256
        assert not properties.authorization_rules
    assert [each.name for each in administration.list_queues()].count("Read/Back") == 1
    too_short = refusal_of(
        lambda: administration.create_queue("short", auto_delete_on_idle=timedelta(minutes=4))
    )
    assert too_short.status_code == 400
    assert "AutoDeleteOnIdle: must be at least PT5M" in too_short.message


@pytest.mark.behaviour("S219", "S220", "S99", "S266", "S267", "S277")
def test_omitted_properties_have_the_defaults_of_service_bus(
    administration: ServiceBusAdministrationClient,
) -> None:
    queue = administration.create_queue("plain-queue")
    topic = administration.create_topic("plain-topic")
    subscription = administration.create_subscription("plain-topic", "sub")
    assert queue.lock_duration == subscription.lock_duration == timedelta(minutes=1)
    assert queue.max_delivery_count == subscription.max_delivery_count == 10
    assert queue.dead_lettering_on_message_expiration is False
    assert subscription.dead_lettering_on_message_expiration is False
    for each in (queue, topic):
        assert each.default_message_time_to_live == FOREVER
        assert each.auto_delete_on_idle == FOREVER
        assert each.duplicate_detection_history_time_window == timedelta(minutes=10)
        assert each.max_size_in_megabytes == 1024
        assert each.enable_partitioning is False
        assert each.enable_express is False
        assert each.requires_duplicate_detection is False
        assert each.user_metadata is None
    assert subscription.default_message_time_to_live == FOREVER
    assert subscription.dead_lettering_on_filter_evaluation_exceptions is True
    assert topic.support_ordering is True
    partitioned = administration.create_topic("partitioned-topic", enable_partitioning=True)
    assert partitioned.enable_partitioning is True
    assert partitioned.max_size_in_megabytes == PARTITION_COUNT * 1024


def test_a_topic_and_a_subscription_read_back_as_they_were_made(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    target = bus.queue()
    wanted_topic: dict[str, Any] = {
        "default_message_time_to_live": timedelta(hours=5),
        "max_size_in_megabytes": 3072,
        "requires_duplicate_detection": True,
        "duplicate_detection_history_time_window": timedelta(seconds=40),
        "enable_batched_operations": False,
        "auto_delete_on_idle": timedelta(days=1),
        "support_ordering": False,
        "user_metadata": "t",
    }
    wanted: dict[str, Any] = {
        "lock_duration": timedelta(minutes=5),
        "requires_session": False,
        "default_message_time_to_live": timedelta(milliseconds=1500),
        "dead_lettering_on_message_expiration": True,
        "dead_lettering_on_filter_evaluation_exceptions": False,
        "max_delivery_count": 2,
        "enable_batched_operations": False,
        "auto_delete_on_idle": timedelta(days=2),
        "user_metadata": "s",
    }
    administration.create_topic("back/topic", **wanted_topic)
    topic = administration.get_topic("back/topic")
    assert {name: getattr(topic, name) for name in wanted_topic} == wanted_topic
    administration.create_subscription("back/topic", "sub", forward_to=target, **wanted)
    found = administration.get_subscription("back/topic", "sub")
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert found.forward_to.endswith(f"/{target}")


@pytest.mark.behaviour("S204")
def test_an_update_changes_given_properties_and_clears_a_target(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    target, name = bus.queue(), bus.queue()
    bus.change(name, history_retention_ms=60_000)
    queue = administration.get_queue(name)
    administration.update_queue(
        queue, forward_to=target, user_metadata="new", status="SendDisabled"
    )
    changed = administration.get_queue(name)
    assert changed.forward_to.endswith(f"/{target}")
    assert (changed.user_metadata, changed.status) == ("new", "SendDisabled")
    assert changed.default_message_time_to_live == FOREVER
    entry = bus._directory.find(name)
    assert entry is not None
    assert entry.properties.history_retention_ms == 60_000  # ATOM has no element for it
    changed.forward_to = None
    changed.status = "Active"
    administration.update_queue(changed)
    assert administration.get_queue(name).forward_to is None
    with bus.client() as client, client.get_queue_sender(name) as sender:
        sender.send_messages(ServiceBusMessage("x"))
    assert bus.counts(name).active == 1


@pytest.mark.behaviour("S150", "S221", "S121")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requires_session": True}, "requiresSession: cannot be changed"),
        ({"requires_duplicate_detection": True}, "requiresDuplicateDetection: cannot be changed"),
        ({"enable_partitioning": True}, "enablePartitioning: cannot be changed"),
        ({"auto_delete_on_idle": timedelta(seconds=1)}, "AutoDeleteOnIdle: must be at least"),
        pytest.param(
            {"max_delivery_count": 0},
            "MaxDeliveryCount: ",
            marks=pytest.mark.behaviour("S273"),
        ),
        ({"max_size_in_megabytes": 1500}, "maxSizeInMegabytes: this tier allows 1024, 2048"),
        (
            {"max_message_size_in_kilobytes": 1024},
            "maxMessageSizeInKilobytes: can only be changed in Premium",
        ),
        ({"forward_to": "nowhere"}, "forwardTo: there is no queue or topic nowhere"),
        ({"lock_duration": timedelta(minutes=6)}, "LockDuration: must be between PT5S and PT5M"),
        ({"user_metadata": "x" * 1_025}, "UserMetadata: "),
    ],
)
def test_an_invalid_change_is_refused_with_its_reason(
    bus: BusThread,
    administration: ServiceBusAdministrationClient,
    change: dict[str, Any],
    message: str,
) -> None:
    name = bus.queue()
    before = given_properties(administration.get_queue(name))
    properties = administration.get_queue(name)
    if (target := change.get("forward_to")) is not None:
        change = {"forward_to": f"sb://localhost:{bus.port}/{target}"}
    error = refusal_of(lambda: administration.update_queue(properties, **change))
    assert error.status_code == 400
    assert "SubCode=40000" in error.message
    assert message in error.message
    assert "TrackingId:" in error.message
    assert given_properties(administration.get_queue(name)) == before


def test_a_namespace_describes_itself(administration: ServiceBusAdministrationClient) -> None:
    found = administration.get_namespace_properties()
    assert (found.name, found.messaging_sku, found.namespace_type) == (
        "test-bus",
        "Standard",
        "Messaging",
    )
    assert found.messaging_units is None
    assert found.created_at_utc <= datetime.now(UTC)


# --- counts ---------------------------------------------------------------------------------------


def test_counts_are_exact_after_traffic(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    name = bus.queue()
    before = administration.get_queue_runtime_properties(name)
    assert before.accessed_at_utc == before.created_at_utc
    with bus.client() as client:
        with client.get_queue_sender(name) as sender:
            sender.send_messages([ServiceBusMessage(str(n)) for n in range(7)])
            later = bus.now() + timedelta(hours=1)
            sender.schedule_messages([ServiceBusMessage("later")] * 2, later)
        with client.get_queue_receiver(name) as receiver:
            first, second, third, *_ = receiver.receive_messages(7, max_wait_time=5)
            receiver.dead_letter_message(first)
            receiver.complete_message(second)
            receiver.defer_message(third)
            for found in (
                administration.get_queue_runtime_properties(name),
                next(
                    each
                    for each in administration.list_queues_runtime_properties()
                    if each.name == name
                ),
            ):
                assert found.active_message_count == 5  # locked and deferred ones are active
                assert found.dead_letter_message_count == 1
                assert found.scheduled_message_count == 2
                assert found.transfer_message_count == 0
                assert found.transfer_dead_letter_message_count == 0
                assert found.total_message_count == 8
                assert found.size_in_bytes > 0
                assert found.created_at_utc <= found.updated_at_utc
                assert found.accessed_at_utc > found.created_at_utc
    bus.reload(name)
    assert administration.get_queue_runtime_properties(name).total_message_count == 8


def test_a_topic_counts_its_subscriptions_and_filters(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    topic = bus.topic()
    administration.create_subscription(topic, "one")
    administration.create_subscription(topic, "two")
    administration.create_rule(topic, "two", "r", filter=CorrelationRuleFilter(label="x"))
    with bus.client() as client, client.get_topic_sender(topic) as sender:
        sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
        sender.schedule_messages(ServiceBusMessage("c"), bus.now() + timedelta(hours=1))
    found = administration.get_topic_runtime_properties(topic)
    assert found.subscription_count == 2
    assert found.scheduled_message_count == 1
    assert (found.sql_filter_count, found.correlation_filter_count) == (2, 1)
    for each in administration.list_subscriptions_runtime_properties(topic):
        assert each.active_message_count == each.total_message_count == 2


# --- lists ----------------------------------------------------------------------------------------


def test_lists_are_paged_in_order_and_complete(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    names = [f"page/{number:03}" for number in range(250)]
    for name in reversed(names):
        bus.queue(name)
    pages = [list(page) for page in administration.list_queues().by_page()]
    assert all(len(page) == 100 for page in pages[:-1])
    found = [queue.name for page in pages for queue in page]
    assert [name for name in found if name.startswith("page/")] == names
    assert len(found) == len(set(found))
    topic = bus.topic()
    for number in range(101):
        bus.subscription(topic, f"s{number:03}")
    listed = [each.name for each in administration.list_subscriptions(topic)]
    assert listed == [f"s{number:03}" for number in range(101)]
    assert [rule.name for rule in administration.list_rules(topic, "s000")] == ["$Default"]


# --- errors ---------------------------------------------------------------------------------------


def test_existing_and_missing_entities_are_answered_as_clients_expect(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    queue, topic = bus.queue(), bus.topic()
    bus.subscription(topic, "sub")
    for create in (
        lambda: administration.create_queue(queue),
        lambda: administration.create_queue(queue.upper()),
        lambda: administration.create_topic(queue),
        lambda: administration.create_queue(topic),
        lambda: administration.create_subscription(topic, "SUB"),
        lambda: administration.create_rule(topic, "sub", "$Default"),
    ):
        with pytest.raises(ResourceExistsError, match="SubCode=40900"):
            create()
    queue_gone = administration.create_queue("gone-queue")
    administration.delete_queue("gone-queue")
    topic_gone = administration.create_topic("gone-topic")
    administration.delete_topic("gone-topic")
    subscription_gone = administration.create_subscription(topic, "gone")
    administration.delete_subscription(topic, "gone")
    rule_gone = administration.create_rule(topic, "sub", "gone")
    administration.delete_rule(topic, "sub", "gone")
    for miss in (
        lambda: administration.get_queue("missing"),
        lambda: administration.get_queue_runtime_properties("missing"),
        lambda: administration.get_subscription(topic, "missing"),
        lambda: administration.get_subscription("missing", "sub"),
        lambda: administration.get_subscription_runtime_properties(topic, "missing"),
        lambda: administration.get_rule(topic, "sub", "missing"),
        lambda: administration.delete_queue("missing"),
        lambda: administration.delete_topic("missing"),
        lambda: administration.delete_subscription(topic, "missing"),
        lambda: administration.delete_rule(topic, "sub", "missing"),
        lambda: administration.create_subscription("missing", "sub"),
        lambda: administration.create_subscription(queue, "sub"),
        lambda: administration.create_rule(topic, "missing", "r"),
        lambda: list(administration.list_subscriptions("missing")),
        lambda: list(administration.list_rules(topic, "missing")),
        lambda: administration.update_queue(queue_gone),
        lambda: administration.update_topic(topic_gone),
        lambda: administration.update_subscription(topic, subscription_gone),
        lambda: administration.update_rule(topic, "sub", rule_gone),
    ):
        with pytest.raises(ResourceNotFoundError):
            miss()


@pytest.mark.parametrize("name", ["a b", "a?b", "-a", "x" * 261, "$a", "a/$DeadLetterQueue"])
@pytest.mark.behaviour("S243")
def test_an_invalid_name_is_refused(
    administration: ServiceBusAdministrationClient, name: str
) -> None:
    assert refusal_of(lambda: administration.create_queue(name)).status_code == 400


def test_only_clients_with_manage_are_answered(bus: BusThread) -> None:
    queue = bus.queue()
    for rule, key in (
        ("sender", None),
        ("listener", None),
        ("nobody", "key"),
        ("RootManageSharedAccessKey", "wrong"),
        ("of-one-queue", None),
    ):
        with administration_of(bus, rule, key) as client:
            for work in (
                client.get_namespace_properties,
                lambda client=client: list(client.list_queues()),
                lambda client=client: client.get_queue(queue),
                lambda client=client: client.get_queue("missing"),
                lambda client=client: client.delete_queue(queue),
                lambda client=client: client.create_queue("forbidden"),
            ):
                with pytest.raises(ClientAuthenticationError):
                    work()
    assert bus._directory.find("forbidden") is None
    bus.age_tokens(0)


def test_a_token_that_has_expired_is_refused(bus: BusThread) -> None:
    with administration_of(bus) as client:
        client.get_namespace_properties()
        bus.real_shift_s = 7 * 24 * 3_600.0
        with pytest.raises(ClientAuthenticationError, match="expired"):
            client.get_namespace_properties()


# --- rules of subscriptions -----------------------------------------------------------------------

STRANGE = "a < b & 'c' > \"d\""
FILTERS = {
    "true": TrueRuleFilter(),
    "false": FalseRuleFilter(),
    "sql that is true": SqlRuleFilter("1=1"),
    "sql": SqlRuleFilter("a = @a AND b = @b", parameters={"@a": STRANGE, "@b": 5}),
    "correlation": CorrelationRuleFilter(
        correlation_id="c",
        message_id="m",
        to="t",
        reply_to="r",
        label=STRANGE,
        session_id="s",
        reply_to_session_id="rs",
        content_type="ct",
        properties={
            "i": 1,
            "l": 2**40,
            "d": 1.5,
            "b": True,
            "s": STRANGE,
            "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "local": datetime(2020, 7, 5, 11, 12, 13),  # noqa: DTZ001 - it is sent without one
            "for": timedelta(days=1, milliseconds=7),
        },
    ),
}


@pytest.mark.parametrize("kind", FILTERS)
def test_a_rule_reads_back_as_it_was_made(
    bus: BusThread, administration: ServiceBusAdministrationClient, kind: str
) -> None:
    topic = bus.topic()
    bus.subscription(topic, "sub")
    wanted = FILTERS[kind]
    action = SqlRuleAction("SET x = @x; REMOVE y", parameters={"@x": "z"})
    administration.create_rule(topic, "sub", "r", filter=wanted, action=action)
    for rule in (
        administration.get_rule(topic, "sub", "r"),
        next(each for each in administration.list_rules(topic, "sub") if each.name == "r"),
    ):
        assert type(rule.filter) is type(wanted)
        if isinstance(wanted, CorrelationRuleFilter):
            assert vars(rule.filter) == vars(wanted)
        elif kind.startswith("sql"):
            assert rule.filter.sql_expression == wanted.sql_expression
            assert rule.filter.parameters == (wanted.parameters or {})
        assert rule.action.sql_expression == "SET x = @x; REMOVE y"
        assert rule.action.parameters == {"@x": "z"}
        assert rule.created_at_utc.year > 2000


def test_a_rule_is_changed_and_rules_without_action_have_none(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic, "sub")
    rule = administration.get_rule(topic, "sub", "$default")
    assert isinstance(rule.filter, TrueRuleFilter)
    assert rule.action is None
    changed = RuleProperties("$Default", filter=FILTERS["sql"], action=None, created_at_utc=None)
    administration.update_rule(topic, "sub", changed)
    with bus.client() as client, client.get_topic_sender(topic) as sender:
        sender.send_messages(
            [
                ServiceBusMessage("yes", application_properties={"a": STRANGE, "b": 5}),
                ServiceBusMessage("no", application_properties={"a": STRANGE, "b": 6}),
            ]
        )
    counted = administration.get_subscription_runtime_properties(topic, "sub")
    assert counted.active_message_count == 1
    error = refusal_of(
        lambda: administration.create_rule(topic, "sub", "bad", filter=SqlRuleFilter("a = "))
    )
    assert error.status_code == 400
    assert "rule bad: line 1, column 5: expected a value" in error.message


# --- authorization rules --------------------------------------------------------------------------


def rule_of(name: str, *rights: AccessRights, **keys: str) -> AuthorizationRule:
    return AuthorizationRule(
        type="SharedAccessAuthorizationRule",
        claim_type="SharedAccessKey",
        claim_value="None",
        rights=list(rights),
        key_name=name,
        **keys,
    )


FIRST_KEY, SECOND_KEY = "the first of twenty and more", "the second of twenty and more"


def test_authorization_rules_come_and_go_with_their_queue(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    name = "authorized"
    rules = [
        rule_of(
            "send",
            AccessRights.SEND,
            primary_key=FIRST_KEY,
            secondary_key=SECOND_KEY,
        ),
        rule_of("all", AccessRights.MANAGE, AccessRights.SEND, AccessRights.LISTEN),
    ]
    administration.create_queue(name, authorization_rules=rules)
    queue = administration.get_queue(name)
    found = {each.key_name: each for each in queue.authorization_rules}
    assert found.keys() == {"send", "all"}
    assert found["send"].rights == ["Send"]
    assert found["send"].primary_key == FIRST_KEY
    assert found["send"].secondary_key == SECOND_KEY
    assert set(found["all"].rights) == {"Manage", "Send", "Listen"}
    assert len(found["all"].primary_key) == 44  # it was made
    assert found["all"].type == "SharedAccessAuthorizationRule"

    with (
        bus.client("send", SECOND_KEY) as client,
        client.get_queue_sender(name) as sender,
    ):
        sender.send_messages(ServiceBusMessage("x"))
    with administration_of(bus, "all", found["all"].primary_key) as own:
        assert own.get_queue_runtime_properties(name).active_message_count == 1
        with pytest.raises(ClientAuthenticationError):
            own.get_namespace_properties()

    administration.update_queue(queue, user_metadata="kept")
    kept = administration.get_queue(name).authorization_rules
    assert {each.primary_key for each in kept} == {
        FIRST_KEY,
        found["all"].primary_key,
    }
    administration.update_queue(queue, authorization_rules=[rules[0]])
    assert [each.key_name for each in administration.get_queue(name).authorization_rules] == [
        "send"
    ]
    with (
        administration_of(bus, "all", found["all"].primary_key) as own,
        pytest.raises(ClientAuthenticationError),
    ):
        own.get_queue(name)
    administration.delete_queue(name)
    administration.create_queue(name)
    assert not administration.get_queue(name).authorization_rules


def test_too_many_authorization_rules_leave_no_queue_behind(
    administration: ServiceBusAdministrationClient,
) -> None:
    rules = [rule_of(f"r{number}", AccessRights.SEND) for number in range(13)]
    error = refusal_of(lambda: administration.create_queue("full", authorization_rules=rules))
    assert error.status_code == 403
    assert "SubCode=40300" in error.message
    with pytest.raises(ResourceNotFoundError):
        administration.get_queue("full")


def test_invalid_authorization_rules_change_no_other_property(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    name = bus.queue()
    queue = administration.get_queue(name)
    for rules, status in (
        ([rule_of(f"r{number}", AccessRights.SEND) for number in range(13)], 403),
        ([rule_of("a", AccessRights.SEND), rule_of("a", AccessRights.LISTEN)], 400),
        ([rule_of("a b", AccessRights.SEND)], 400),
        ([rule_of("none")], 400),
        ([rule_of("long", AccessRights.SEND, primary_key="x" * 257)], 400),
        ([rule_of("short", AccessRights.SEND, primary_key="x" * 19)], 400),
    ):
        error = refusal_of(
            lambda rules=rules: administration.update_queue(
                queue, max_delivery_count=99, authorization_rules=rules
            )
        )
        assert error.status_code == status
    assert administration.get_queue(name).max_delivery_count == 10


# --- forwarding -----------------------------------------------------------------------------------


@pytest.mark.behaviour("S203")
def test_a_queue_forwards_from_its_creation(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    target = bus.queue()
    made = administration.create_queue("forwards", forward_to=target)
    assert made.forward_to == f"sb://localhost:{bus.port}/{target}"
    with bus.client() as client:
        with client.get_queue_sender("forwards") as sender:
            sender.send_messages(ServiceBusMessage("on its way"))
        with client.get_queue_receiver(target) as receiver:
            (message,) = receiver.receive_messages(1, max_wait_time=10)
            assert str(message) == "on its way"


def test_manage_on_one_queue_does_not_allow_to_send_to_another(bus: BusThread) -> None:
    bus.queue("scoped")
    target = bus.queue()
    with administration_of(bus, "of-one-queue") as own:
        scoped = own.get_queue("scoped")
        own.update_queue(scoped, max_delivery_count=5)
        with pytest.raises(ClientAuthenticationError):
            own.update_queue(scoped, forward_to=f"sb://localhost:{bus.port}/{target}")
        assert own.get_queue("scoped").forward_to is None


# --- while it runs --------------------------------------------------------------------------------


def test_definitions_change_under_traffic_without_a_loss(
    bus: BusThread, administration: ServiceBusAdministrationClient
) -> None:
    name = bus.queue()
    count, batches = 10, 40
    failures: list[Exception] = []

    def send() -> None:
        try:
            with bus.client() as client, client.get_queue_sender(name) as sender:
                for batch in range(batches):
                    sender.send_messages(
                        [ServiceBusMessage(str(batch * count + n)) for n in range(count)]
                    )
        except Exception as error:  # noqa: BLE001  # reported by the test's own thread
            failures.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    got: list[int] = []
    changes = 0
    with bus.client() as client, client.get_queue_receiver(name) as receiver:
        while len(got) < count * batches:
            changes += 1
            properties = administration.get_queue(name)
            properties.max_delivery_count = 5 + changes
            properties.lock_duration = timedelta(seconds=30 + changes % 60)
            administration.update_queue(properties)
            messages = receiver.receive_messages(50, max_wait_time=5)
            assert messages, f"{len(got)} messages came, then none"
            for message in messages:
                receiver.complete_message(message)
            got += [int(str(message)) for message in messages]
    sending.join()
    assert failures == []
    assert sorted(got) == list(range(count * batches))
    assert changes > 5
    assert administration.get_queue_runtime_properties(name).total_message_count == 0


@pytest.mark.parametrize("version", ApiVersion)
def test_every_version_of_the_api_is_answered(bus: BusThread, version: ApiVersion) -> None:
    name = bus.queue()
    with administration_of(bus, api_version=version) as client:
        assert client.get_queue(name).max_delivery_count == 10
