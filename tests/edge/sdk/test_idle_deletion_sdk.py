"""Deletion of idle entities, seen by clients of the unmodified SDK; time is moved, not waited.

A canary created together with the entity under test is never used: when it is gone, the broker has
made all decisions due at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.exceptions import ServiceBusAuthenticationError
from pydantic import ValidationError

from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import RuleProperties, SqlFilter
from postbus.entity.idle import LEAST_GRAIN_MS
from tests.edge.bus_thread import RULES, BusThread
from tests.edge.raw_client import DETACH, DISPOSITION, RawClient, message
from tests.edge.sdk.sdk_steps import (
    DEAD,
    SOON_S,
    bodies_of,
    dead_letter,
    eventually,
    exists,
    is_empty,
    path_of,
    peek_all,
    receive,
    send,
    take,
)

pytestmark = pytest.mark.slow

IDLE_MS = 300_000
NEARLY_MS = 290_000
DAY_MS = 86_400_000


def temporary(bus: BusThread, **properties: object) -> str:
    return bus.queue(auto_delete_on_idle_ms=IDLE_MS, **properties)


def wait_for_late_decisions(bus: BusThread) -> None:
    """Wait until decisions made together with the canary's are committed."""
    bus.run(asyncio.sleep(0.05))


def decide(bus: BusThread, duration_ms: int) -> None:
    """Let time pass and wait until a queue that was idle for that long is gone.

    `duration_ms` is at least `IDLE_MS`.
    """
    canary = temporary(bus)
    bus.counts(canary)
    bus.advance(duration_ms)
    eventually(bus, lambda: not exists(bus, canary))
    wait_for_late_decisions(bus)  # decisions made a moment later


def is_used_by(bus: BusThread, path: str, use: Callable[[], object]) -> bool:
    """Use an entity just before its expiry; return whether that prolonged its life.

    Then it is left alone, and has to go after all.
    """
    canary = temporary(bus)
    bus.counts(canary)
    bus.advance(NEARLY_MS)
    use()
    bus.advance(IDLE_MS - NEARLY_MS + 1_000)
    eventually(bus, lambda: not exists(bus, canary))
    wait_for_late_decisions(bus)
    if not exists(bus, path):
        return False
    bus.advance(IDLE_MS)
    eventually(bus, lambda: not exists(bus, path))
    return True


def poll(client: ServiceBusClient, path: str, **options: object) -> list[object]:
    with client.get_queue_receiver(path, **options) as receiver:
        return list(receiver.receive_messages(1, max_wait_time=SOON_S))


def not_found(bus: BusThread, client: ServiceBusClient, path: str) -> list[str]:
    """Return the errors of clients that send and receive there."""
    answers = []
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as raw:
        for attach in (raw.attach_sender, raw.attach_receiver):
            attach(path)
            condition, text, _ = raw.expect(DETACH).fields[2].value
            assert str(condition) == "amqp:not-found"
            answers.append(str(text).split("Reference:")[0].replace(path, "NAME"))
    # Its token is refused already, as on Azure.
    with pytest.raises(ServiceBusAuthenticationError):
        send(client, path, "m")
    return answers


# --- the setting ----------------------------------------------------------------------------------


@pytest.mark.behaviour("S120", "S122")
def test_five_minutes_are_the_least(bus: BusThread) -> None:
    for make in (
        lambda idle: bus.queue("brief", auto_delete_on_idle_ms=idle),
        lambda idle: bus.topic("brief-topic", auto_delete_on_idle_ms=idle),
        lambda idle: bus.subscription(bus.topic(), "brief", auto_delete_on_idle_ms=idle),
    ):
        with pytest.raises(ValidationError, match="at least PT5M"):
            make(IDLE_MS - 1)
        assert make(IDLE_MS)
    bus.delete("brief")
    bus.delete("brief-topic")


@pytest.mark.behaviour("S121")
def test_an_update_below_five_minutes_is_refused(bus: BusThread) -> None:
    queue, topic = temporary(bus), bus.topic(auto_delete_on_idle_ms=IDLE_MS)
    bus.subscription(topic, auto_delete_on_idle_ms=IDLE_MS)
    with pytest.raises(ValidationError):
        bus.change(queue, auto_delete_on_idle_ms=IDLE_MS - 1)
    with pytest.raises(ValidationError):
        bus.topic(topic, auto_delete_on_idle_ms=IDLE_MS - 1)
    with pytest.raises(ValidationError):
        bus.subscription(topic, auto_delete_on_idle_ms=IDLE_MS - 1)
    for path in (queue, topic, path_of(topic)):
        entry = bus._directory.find(path.lower())
        assert entry is not None
        assert entry.properties.auto_delete_on_idle_ms == IDLE_MS


# --- queues ---------------------------------------------------------------------------------------


@pytest.mark.behaviour("S117", "S141")
@pytest.mark.parametrize("is_spread", [False, True])
def test_an_idle_queue_is_deleted_and_not_found(
    bus: BusThread, client: ServiceBusClient, is_spread: bool
) -> None:
    queue = temporary(bus, enable_partitioning=is_spread)
    send(client, queue, "left behind")
    bus.advance(IDLE_MS - 10_000)
    wait_for_late_decisions(bus)
    assert exists(bus, queue)
    bus.advance(70_000)
    eventually(bus, lambda: not exists(bus, queue))
    assert not_found(bus, client, queue) == not_found(bus, client, "never-existed")
    temporary(bus)
    bus.queue(queue)
    assert is_empty(bus, queue)


@pytest.mark.behaviour("S141")
def test_open_links_of_a_deleted_queue_end(bus: BusThread) -> None:
    queue = temporary(bus)
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as raw:
        raw.attach_sender(queue, 0)
        raw.attach_receiver(queue, 1)  # without credit
        decide(bus, IDLE_MS + 1_000)
        receiver_end = raw.expect(DETACH)
        assert receiver_end.fields[0] == 1
        assert str(receiver_end.fields[2].value[0]) == "amqp:not-found"
        raw.write(raw.transfer(0, message(b"too late")))
        answers = raw.read()
        error = answers.fields[4].value[0] if answers.code == DISPOSITION else answers.fields[2]
        assert str(error.value[0]) == "amqp:not-found"


@pytest.mark.behaviour("S124")
def test_the_longest_duration_means_never(bus: BusThread, client: ServiceBusClient) -> None:
    queues = [bus.queue(), bus.queue(auto_delete_on_idle_ms=MAX_DURATION_MS)]
    topic = bus.topic()
    bus.subscription(topic)
    decide(bus, 400 * DAY_MS)
    assert all(exists(bus, path) for path in (*queues, topic, path_of(topic)))
    send(client, queues[1], "m")
    assert bodies_of(take(client, queues[1], 1)) == ["m"]


@pytest.mark.behaviour("S125")
def test_a_send_to_a_queue_is_a_use(bus: BusThread, client: ServiceBusClient) -> None:
    queue = temporary(bus)
    assert is_used_by(bus, queue, lambda: send(client, queue, "m"))


@pytest.mark.behaviour("S126")
@pytest.mark.parametrize("has_message", [False, True])
def test_a_receive_from_a_queue_is_a_use(
    bus: BusThread, client: ServiceBusClient, has_message: bool
) -> None:
    queue = temporary(bus)
    if has_message:
        send(client, queue, "m")
    assert is_used_by(bus, queue, lambda: poll(client, queue))


def test_receive_and_delete_is_a_use(bus: BusThread, client: ServiceBusClient) -> None:
    queue = temporary(bus)
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    assert is_used_by(bus, queue, lambda: poll(client, queue, receive_mode=mode))


def test_reading_dead_letters_is_a_use(bus: BusThread, client: ServiceBusClient) -> None:
    queue = temporary(bus)
    send(client, queue, "m")
    dead_letter(client, queue, 1)
    assert is_used_by(bus, queue, lambda: poll(client, queue, sub_queue=DEAD))


@pytest.mark.behaviour("S127")
def test_an_update_of_a_queue_is_a_use(bus: BusThread) -> None:
    queue = temporary(bus)

    def update() -> None:
        bus.change(queue, auto_delete_on_idle_ms=IDLE_MS, max_delivery_count=7)

    assert is_used_by(bus, queue, update)


@pytest.mark.behaviour("S128")
@pytest.mark.parametrize("has_message", [False, True])
def test_a_peek_at_a_queue_is_a_use(
    bus: BusThread, client: ServiceBusClient, has_message: bool
) -> None:
    queue = temporary(bus)
    if has_message:
        send(client, queue, "m")
    assert is_used_by(bus, queue, lambda: peek_all(client, queue))


@pytest.mark.behaviour("S126")
def test_an_open_receiver_with_credit_keeps_a_queue(bus: BusThread) -> None:
    """It counts as long as it is open, though nothing ever comes."""
    queue = temporary(bus)
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as raw:
        raw.attach_receiver(queue)
        raw.write(raw.flow(1))
        for _ in range(3):
            decide(bus, IDLE_MS + 60_000)
            assert exists(bus, queue)
    decide(bus, IDLE_MS + 60_000)
    eventually(bus, lambda: not exists(bus, queue))


@pytest.mark.behaviour("S129")
def test_a_scheduled_message_keeps_a_queue_until_it_is_due(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = temporary(bus)
    with client.get_queue_sender(queue) as sender:
        sender.schedule_messages(ServiceBusMessage("m"), bus.now() + timedelta(hours=1))
    decide(bus, 2 * IDLE_MS)
    assert exists(bus, queue)
    decide(bus, 3_600_000 - 2 * IDLE_MS + 1_000)
    bus.advance(IDLE_MS + 60_000)
    eventually(bus, lambda: not exists(bus, queue))


@pytest.mark.behaviour("S129")
def test_a_cancelled_message_does_not_keep_a_queue(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = temporary(bus)
    with client.get_queue_sender(queue) as sender:
        numbers = sender.schedule_messages(ServiceBusMessage("m"), bus.now() + timedelta(hours=9))
        sender.cancel_scheduled_messages(numbers)
    decide(bus, IDLE_MS + 60_000)
    eventually(bus, lambda: not exists(bus, queue))


@pytest.mark.behaviour("S139")
def test_forwarding_keeps_a_queue(bus: BusThread, client: ServiceBusClient) -> None:
    target = bus.queue()
    queue = temporary(bus, forward_to=target)
    decide(bus, 2 * IDLE_MS)
    assert exists(bus, queue)
    send(client, queue, "still there")
    assert bodies_of(take(client, target, 1)) == ["still there"]
    bus.change(queue, auto_delete_on_idle_ms=IDLE_MS)
    decide(bus, IDLE_MS + 60_000)
    eventually(bus, lambda: not exists(bus, queue))


def test_a_session_receiver_is_a_use(bus: BusThread, client: ServiceBusClient) -> None:
    queue = temporary(bus, requires_session=True)
    send(client, queue, "m", session_id="s")

    def accept() -> None:
        with client.get_queue_receiver(queue, session_id="s") as receiver:
            receive(receiver, 1)

    assert is_used_by(bus, queue, accept)


def test_a_use_in_any_partition_counts(bus: BusThread, client: ServiceBusClient) -> None:
    for key in ("a", "b", "c", "d"):
        queue = temporary(bus, enable_partitioning=True)
        use = partial(send, client, queue, "m", partition_key=key)
        assert is_used_by(bus, queue, use)


def test_time_of_use_survives_a_restart(bus: BusThread, client: ServiceBusClient) -> None:
    queue = temporary(bus)
    bus.advance(NEARLY_MS)
    send(client, queue, "m")
    bus.advance(IDLE_MS // 2)
    bus.reload(queue)
    bus.counts(queue)  # loads it
    bus.advance(IDLE_MS // 2 + LEAST_GRAIN_MS + 1_000)
    eventually(bus, lambda: not exists(bus, queue))


def test_a_restart_keeps_entities_in_use(bus: BusThread, client: ServiceBusClient) -> None:
    queue = temporary(bus)
    bus.advance(NEARLY_MS)
    send(client, queue, "m")
    bus.reload(queue)
    bus.advance(IDLE_MS - NEARLY_MS + 60_000)
    bus.counts(queue)
    wait_for_late_decisions(bus)
    assert exists(bus, queue)
    assert bodies_of(take(client, queue, 1)) == ["m"]


# --- topics and subscriptions ---------------------------------------------------------------------


def temporary_topic(bus: BusThread) -> str:
    topic = bus.topic(auto_delete_on_idle_ms=IDLE_MS)
    bus.subscription(topic)
    return topic


def temporary_subscription(bus: BusThread) -> str:
    topic = bus.topic()
    bus.subscription(topic, auto_delete_on_idle_ms=IDLE_MS)
    return path_of(topic)


@pytest.mark.behaviour("S118", "S141")
def test_an_idle_topic_is_deleted_with_its_subscriptions(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = temporary_topic(bus)
    decide(bus, IDLE_MS + 1_000)
    eventually(bus, lambda: not exists(bus, topic))
    assert not exists(bus, path_of(topic))
    assert not_found(bus, client, topic) == not_found(bus, client, "never-existed")
    assert not_found(bus, client, path_of(topic)) == not_found(bus, client, path_of("never"))


@pytest.mark.behaviour("S119", "S138", "S141")
def test_an_idle_subscription_is_deleted_despite_new_messages(
    bus: BusThread, client: ServiceBusClient
) -> None:
    path = temporary_subscription(bus)
    topic = path.split("/")[0]
    bus.subscription(topic, "other")
    assert not is_used_by(bus, path, lambda: send(client, topic, "m"))
    assert exists(bus, topic)
    send(client, topic, "n")
    assert bodies_of(take(client, path_of(topic, "other"), 2)) == ["m", "n"]
    assert not_found(bus, client, path) == not_found(bus, client, path_of(topic, "never"))


@pytest.mark.behaviour("S130")
def test_a_publish_is_a_use_of_the_topic(bus: BusThread, client: ServiceBusClient) -> None:
    topic = temporary_topic(bus)
    assert is_used_by(bus, topic, lambda: send(client, topic, "m"))


@pytest.mark.behaviour("S131")
def test_an_update_of_a_topic_is_a_use(bus: BusThread) -> None:
    topic = temporary_topic(bus)

    def update() -> None:
        bus.topic(topic, auto_delete_on_idle_ms=IDLE_MS, default_message_ttl_ms=DAY_MS)

    assert is_used_by(bus, topic, update)


@pytest.mark.behaviour("S132")
def test_a_scheduled_message_keeps_a_topic(bus: BusThread, client: ServiceBusClient) -> None:
    topic = temporary_topic(bus)
    with client.get_topic_sender(topic) as sender:
        sender.schedule_messages(ServiceBusMessage("m"), bus.now() + timedelta(hours=1))
    decide(bus, 2 * IDLE_MS)
    assert exists(bus, topic)
    decide(bus, 3_600_000 - 2 * IDLE_MS + 1_000)
    bus.advance(IDLE_MS + 60_000)
    eventually(bus, lambda: not exists(bus, topic))


@dataclass(frozen=True)
class Use:
    """Something one does with a subscription."""

    name: str
    do: Callable[[BusThread, ServiceBusClient, str], object]


def new_rule(bus: BusThread, path: str) -> None:
    rule = RuleProperties(name="n", sql_filter=SqlFilter(sql_expression="n = 1"))
    bus.run(bus._directory.add_rule(path, rule))


def update_subscription(bus: BusThread, path: str) -> None:
    topic, _, name = path.split("/")
    known = bus._directory.find(path.lower())
    assert known is not None
    idle = known.properties.auto_delete_on_idle_ms
    bus.subscription(topic, name, auto_delete_on_idle_ms=idle, max_delivery_count=7)


USES = [
    pytest.param(
        Use("receive", lambda _, client, path: poll(client, path)),
        id="receive",
        marks=pytest.mark.behaviour("S134", "S133"),
    ),
    pytest.param(
        Use("update", lambda bus, _, path: update_subscription(bus, path)),
        id="update",
        marks=pytest.mark.behaviour("S135", "S133"),
    ),
    pytest.param(
        Use("rule", lambda bus, _, path: new_rule(bus, path)),
        id="rule",
        marks=pytest.mark.behaviour("S136", "S133"),
    ),
    pytest.param(
        Use("peek", lambda _, client, path: peek_all(client, path)),
        id="peek",
        marks=pytest.mark.behaviour("S137", "S133"),
    ),
]


@pytest.mark.parametrize("use", USES)
def test_uses_of_a_subscription(bus: BusThread, client: ServiceBusClient, use: Use) -> None:
    path = temporary_subscription(bus)
    assert is_used_by(bus, path, lambda: use.do(bus, client, path))


@pytest.mark.parametrize("use", USES)
def test_a_use_of_a_subscription_is_one_of_its_topic(
    bus: BusThread, client: ServiceBusClient, use: Use
) -> None:
    topic = temporary_topic(bus)
    assert is_used_by(bus, topic, lambda: use.do(bus, client, path_of(topic)))


@pytest.mark.behaviour("S140")
def test_forwarding_keeps_a_subscription(bus: BusThread, client: ServiceBusClient) -> None:
    target, topic = bus.queue(), bus.topic()
    bus.subscription(topic, auto_delete_on_idle_ms=IDLE_MS, forward_to=target)
    decide(bus, 2 * IDLE_MS)
    assert exists(bus, path_of(topic))
    send(client, topic, "m")
    assert bodies_of(take(client, target, 1)) == ["m"]


def test_an_open_receiver_of_a_subscription_keeps_the_topic(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = temporary_topic(bus)
    with RawClient(bus.port, RULES[0].name, RULES[0].keys.primary) as raw:
        raw.attach_receiver(path_of(topic))
        raw.write(raw.flow(1))
        decide(bus, 2 * IDLE_MS)
        assert exists(bus, topic)
    send(client, topic, "m")
    assert bodies_of(take(client, path_of(topic), 1)) == ["m"]


# --- races ----------------------------------------------------------------------------------------


def test_a_queue_used_during_its_deletion_is_whole_or_deleted(
    bus: BusThread, client: ServiceBusClient
) -> None:
    """An accepted message is never in a queue that vanishes at that moment."""
    for _ in range(3):
        queue = temporary(bus)
        with client.get_queue_sender(queue) as sender:
            sender.send_messages(ServiceBusMessage("first"))
            bus.advance(IDLE_MS + 1_000)
            try:
                sender.send_messages(ServiceBusMessage("second"))
            except Exception:  # noqa: BLE001 - the SDK's errors for not found and busy
                eventually(bus, lambda: not exists(bus, queue))  # noqa: B023
            else:
                wait_for_late_decisions(bus)
                assert exists(bus, queue)
                assert bus.counts(queue).active == 2
