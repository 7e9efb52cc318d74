"""Idle entities: use, reports, freezing, and use across a crash (ADR 27)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from postbus.contract.entities import (
    DEFAULT_RULE,
    EntityKind,
    QueueProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    AcceptSession,
    Arrive,
    Arrived,
    Cancelled,
    CancelScheduled,
    Command,
    Disposition,
    DropEntity,
    Enqueue,
    Enqueued,
    Freeze,
    Frozen,
    Hold,
    Peek,
    Peeked,
    PutEntity,
    Quiesce,
    Refusal,
    Refused,
    RenewLocks,
    SetDemand,
    Shipped,
    Thaw,
    Transact,
)
from postbus.entity.outcomes import RecordUse
from tests.entity.partition_rig import ACTIVE, DELETE, PEEK_LOCK, QUEUE, Rig, message

MINUTE_MS = 60_000
PERIOD_MS = 5 * MINUTE_MS
PROPERTIES = QueueProperties(auto_delete_on_idle_ms=PERIOD_MS)


def is_idle(rig: Rig, ms: int, entity_no: int = QUEUE) -> bool:
    """Let time pass; return whether the entity was reported idle at its end."""
    rig.advance(ms - 1)
    assert entity_no not in rig.idle
    rig.advance(1)
    reported, rig.idle = rig.idle, []
    return entity_no in reported


@pytest.mark.behaviour("S117")
def test_a_queue_is_reported_idle_after_its_period() -> None:
    rig = Rig(PROPERTIES)
    assert is_idle(rig, PERIOD_MS)


def test_an_idle_queue_is_reported_again_each_minute() -> None:
    rig = Rig(PROPERTIES)
    rig.advance(PERIOD_MS)
    assert rig.idle == [QUEUE]
    rig.advance(3 * MINUTE_MS)
    assert rig.idle == [QUEUE] * 4
    rig.send("a")
    rig.idle.clear()
    assert is_idle(rig, PERIOD_MS)


@pytest.mark.behaviour("S124")
def test_idleness_is_not_reported_without_a_period() -> None:
    rig = Rig()
    rig.advance(400 * 24 * 60 * MINUTE_MS)
    assert rig.idle == []
    assert rig.apply(Freeze(QUEUE)) == Refused(Refusal.BUSY, "the entity is in use")


def receive_no_message(rig: Rig) -> None:
    rig.receive("A", 1)


def receive_one_message(rig: Rig) -> None:
    assert rig.receive("A", 1, mode=DELETE)


def peek(rig: Rig) -> None:
    assert isinstance(rig.apply(Peek(QUEUE, ACTIVE, 0, 1, 1_000)), Peeked)


def update(rig: Rig) -> None:
    rig.put(PROPERTIES.model_copy(update={"max_delivery_count": 3}))


def send(rig: Rig) -> None:
    rig.send("a")


def arrive(rig: Rig) -> None:
    assert rig.apply(Arrive(2, QUEUE, [1], [message("b")])) == Arrived(1)


def transact(rig: Rig) -> None:
    rig.apply(Transact([Enqueue(QUEUE, [message("b")])]))


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(send, marks=pytest.mark.behaviour("S125")),
        pytest.param(receive_one_message, marks=pytest.mark.behaviour("S126")),
        pytest.param(receive_no_message, marks=pytest.mark.behaviour("S126")),
        pytest.param(update, marks=pytest.mark.behaviour("S127")),
        pytest.param(peek, marks=pytest.mark.behaviour("S128")),
        arrive,
        transact,
    ],
)
def test_use_restarts_the_time(use: Callable[[Rig], None]) -> None:
    rig = Rig(PROPERTIES)
    rig.send("first")
    rig.advance(PERIOD_MS - 1)
    use(rig)
    if "A" in rig.names:
        rig.detach("A")
    assert is_idle(rig, PERIOD_MS)


@pytest.mark.behaviour("S126")
def test_a_receiver_with_credit_counts_as_long_as_it_is_there() -> None:
    rig = Rig(PROPERTIES)
    consumer_id = rig.consumer()
    rig.apply(SetDemand(consumer_id, 1))
    rig.advance(10 * PERIOD_MS)
    assert rig.idle == []
    rig.detach("A")
    assert is_idle(rig, PERIOD_MS)


def test_a_receiver_counts_until_its_credit_is_used_up() -> None:
    rig = Rig(PROPERTIES)
    consumer_id = rig.consumer()
    rig.apply(SetDemand(consumer_id, 1))
    rig.advance(3 * PERIOD_MS)
    rig.send("a")
    assert is_idle(rig, PERIOD_MS)


def test_renewing_a_lock_counts() -> None:
    rig = Rig(PROPERTIES)
    rig.send("a")
    (delivery,) = rig.receive()
    for _ in range(12):
        rig.advance(MINUTE_MS - 1)
        rig.apply(RenewLocks(QUEUE, ACTIVE, [delivery.lock_token]))
    assert rig.idle == []


def test_a_receiver_waiting_for_a_session_counts() -> None:
    rig = Rig(QueueProperties(auto_delete_on_idle_ms=PERIOD_MS, requires_session=True))
    assert rig.accept("A") is None
    rig.advance(3 * PERIOD_MS)
    assert rig.idle == []
    rig.detach("A")
    assert is_idle(rig, PERIOD_MS)


@pytest.mark.behaviour("S129")
def test_a_scheduled_message_keeps_a_queue() -> None:
    rig = Rig(PROPERTIES)
    rig.send(message("a", scheduled_ms=rig.now_ms + 3 * PERIOD_MS))
    (number,) = rig.send(message("b", scheduled_ms=rig.now_ms + 30 * PERIOD_MS))
    rig.advance(10 * PERIOD_MS)
    assert rig.idle == []
    assert rig.apply(CancelScheduled(QUEUE, [number])) == Cancelled()
    assert is_idle(rig, PERIOD_MS)


@pytest.mark.behaviour("S139")
def test_forwarding_keeps_a_queue() -> None:
    rig = Rig(QueueProperties(auto_delete_on_idle_ms=PERIOD_MS, forward_to="elsewhere"))
    rig.advance(10 * PERIOD_MS)
    assert rig.idle == []
    rig.put(QueueProperties(auto_delete_on_idle_ms=PERIOD_MS))
    assert is_idle(rig, PERIOD_MS)


def test_a_changed_period_counts_from_the_change() -> None:
    rig = Rig(QueueProperties(auto_delete_on_idle_ms=60 * MINUTE_MS))
    rig.advance(59 * MINUTE_MS)
    rig.put(PROPERTIES)
    assert is_idle(rig, PERIOD_MS)
    rig.put(QueueProperties())
    rig.advance(100 * PERIOD_MS)
    assert rig.idle == []


# --- topics ---------------------------------------------------------------------------------------

TOPIC, FIRST = 20, 21


def topic_rig(
    topic_ms: int | None = PERIOD_MS, subscription_ms: int | None = None, **details: object
) -> Rig:
    rig = Rig()
    topic = {} if topic_ms is None else {"auto_delete_on_idle_ms": topic_ms}
    rig.apply(PutEntity(TOPIC, "t", EntityKind.TOPIC, TopicProperties(**topic), 2))
    put_subscription(rig, subscription_ms, **details)
    return rig


def put_subscription(rig: Rig, period_ms: int | None, **details: object) -> None:
    if period_ms is not None:
        details["auto_delete_on_idle_ms"] = period_ms
    properties = SubscriptionProperties(**details)
    rig.apply(PutEntity(FIRST, "t/Subscriptions/s", EntityKind.SUBSCRIPTION, properties, 3, TOPIC))


@pytest.mark.behaviour("S118")
def test_a_topic_is_reported_idle_after_its_period() -> None:
    assert is_idle(topic_rig(), PERIOD_MS, TOPIC)


@pytest.mark.behaviour("S119")
def test_a_subscription_is_reported_idle_and_not_its_topic() -> None:
    rig = topic_rig(None, PERIOD_MS)
    rig.advance(PERIOD_MS)
    assert rig.idle == [FIRST]


@pytest.mark.behaviour("S130", "S138")
def test_publishing_uses_the_topic_and_not_its_subscriptions() -> None:
    rig = topic_rig(PERIOD_MS, PERIOD_MS)
    rig.advance(PERIOD_MS - 1)
    assert isinstance(rig.apply(Enqueue(TOPIC, [message("a")])), Enqueued)
    rig.advance(1)
    assert rig.idle == [FIRST]
    assert rig.apply(Freeze(TOPIC)) == Refused(Refusal.BUSY, "the entity is in use")


@pytest.mark.behaviour("S131")
def test_an_update_of_a_topic_restarts_its_time() -> None:
    rig = topic_rig()
    rig.advance(PERIOD_MS - 1)
    properties = TopicProperties(auto_delete_on_idle_ms=PERIOD_MS, max_size_in_megabytes=2048)
    rig.apply(PutEntity(TOPIC, "t", EntityKind.TOPIC, properties, 4))
    assert is_idle(rig, PERIOD_MS, TOPIC)


@pytest.mark.behaviour("S132")
def test_a_scheduled_message_keeps_a_topic() -> None:
    rig = topic_rig()
    due_ms = rig.now_ms + 5 * PERIOD_MS
    rig.apply(Enqueue(TOPIC, [message("a", scheduled_ms=due_ms)]))
    rig.advance(5 * PERIOD_MS - 1)
    assert rig.idle == []


@pytest.mark.behaviour("S140")
def test_forwarding_keeps_a_subscription_and_its_topic() -> None:
    rig = topic_rig(PERIOD_MS, PERIOD_MS, forward_to="elsewhere")
    rig.advance(5 * PERIOD_MS)
    assert rig.idle == []


def receive_of_subscription(rig: Rig) -> None:
    consumer_id = rig.consumer("S", entity_no=FIRST)
    rig.apply(SetDemand(consumer_id, 1))
    rig.detach("S")


def update_subscription(rig: Rig) -> None:
    put_subscription(rig, PERIOD_MS, max_delivery_count=3)


def add_rule(rig: Rig) -> None:
    properties = SubscriptionProperties(auto_delete_on_idle_ms=PERIOD_MS)
    command = PutEntity(FIRST, "t/Subscriptions/s", EntityKind.SUBSCRIPTION, properties, 5, TOPIC)
    command.rules = (DEFAULT_RULE,)
    rig.apply(command)


def peek_subscription(rig: Rig) -> None:
    assert isinstance(rig.apply(Peek(FIRST, ACTIVE, 0, 1, 1_000)), Peeked)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(receive_of_subscription, marks=pytest.mark.behaviour("S133", "S134")),
        pytest.param(update_subscription, marks=pytest.mark.behaviour("S133", "S135")),
        pytest.param(add_rule, marks=pytest.mark.behaviour("S133", "S136")),
        pytest.param(peek_subscription, marks=pytest.mark.behaviour("S133", "S137")),
    ],
)
def test_use_of_a_subscription_restarts_its_time_and_its_topic_s(
    use: Callable[[Rig], None],
) -> None:
    rig = topic_rig(PERIOD_MS, PERIOD_MS)
    rig.advance(PERIOD_MS - 1)
    use(rig)
    rig.advance(PERIOD_MS - 1)
    assert rig.idle == []
    rig.advance(1)
    assert sorted(rig.idle) == [TOPIC, FIRST]


# --- freezing -------------------------------------------------------------------------------------


def frozen_rig() -> Rig:
    rig = Rig(PROPERTIES)
    rig.send("a")
    rig.advance(PERIOD_MS)
    assert rig.apply(Freeze(QUEUE)) == Frozen(rig.now_ms - PERIOD_MS)
    return rig


BUSY = Refused(Refusal.BUSY, "the entity is about to be deleted")


@pytest.mark.parametrize(
    "command",
    [
        Enqueue(QUEUE, [message("b")]),
        Peek(QUEUE, ACTIVE, 0, 1, 1_000),
        AcceptSession(QUEUE, 99, PEEK_LOCK, None),
        Transact([Enqueue(QUEUE, [message("b")])]),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_frozen_entity_refuses_commands_and_thaws_by_itself(command: Command) -> None:
    rig = frozen_rig()
    assert rig.apply(command) == BUSY
    assert rig.apply(Arrive(2, QUEUE, [5], [message("x")])) == Arrived(0, BUSY)
    rig.advance(1_999)
    assert rig.apply(command) == BUSY
    rig.advance(1)
    assert rig.apply(command) != BUSY


def test_a_frozen_entity_is_thawed_by_command_and_by_an_update() -> None:
    for command in (Thaw(QUEUE), PutEntity(QUEUE, "queue-7", EntityKind.QUEUE, PROPERTIES, 2)):
        rig = frozen_rig()
        rig.apply(command)
        rig.send("b")
        assert rig.peek_names() == ["a", "b"]


def test_a_frozen_entity_can_be_frozen_longer_and_dropped() -> None:
    rig = frozen_rig()
    rig.advance(1_500)
    assert isinstance(rig.apply(Freeze(QUEUE)), Frozen)
    rig.advance(1_500)
    assert rig.apply(Enqueue(QUEUE, [message("b")])) == BUSY
    rig.apply(DropEntity(QUEUE, 2))
    assert rig.apply(Enqueue(QUEUE, [message("b")])) == Refused(Refusal.ENTITY_NOT_FOUND)
    rig.advance(PERIOD_MS)
    assert rig.tables.rows == {}


def test_a_held_entity_stays_frozen_until_it_is_thawed() -> None:
    rig = frozen_rig()
    rig.advance(1_500)
    assert isinstance(rig.apply(Hold(QUEUE)), Frozen)
    rig.advance(10 * PERIOD_MS)
    assert rig.apply(Enqueue(QUEUE, [message("b")])) == BUSY
    rig.apply(Thaw(QUEUE))
    rig.send("b")


def test_only_a_frozen_entity_is_held_unless_deletion_was_decided() -> None:
    rig = frozen_rig()
    rig.advance(2_000)
    assert rig.apply(Hold(QUEUE)) == Refused(Refusal.BUSY, "the entity is no longer frozen")
    rig.send("b")
    assert isinstance(rig.apply(Hold(QUEUE, is_decided=True)), Frozen)
    assert rig.apply(Enqueue(QUEUE, [message("b")])) == BUSY
    assert rig.apply(Hold(99)) == Refused(Refusal.ENTITY_NOT_FOUND)


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_messages_in_the_outbox_are_a_use_of_their_entity(is_reloaded: bool) -> None:
    rig = Rig(PROPERTIES)
    rig.apply(Transact([Enqueue(QUEUE, [message("a")], via="away")]))
    if is_reloaded:
        rig.crash()
    rig.advance(3 * PERIOD_MS)
    assert rig.idle == []
    assert rig.apply(Freeze(QUEUE)) == Refused(Refusal.BUSY, "the entity is in use")
    (ship,) = rig.ships
    rig.apply(Shipped(ship.target, ship.numbers, {}))
    rig.advance(2 * PERIOD_MS)
    assert QUEUE in rig.idle


def test_a_used_entity_cannot_be_frozen() -> None:
    rig = Rig(PROPERTIES)
    rig.advance(PERIOD_MS)
    assert rig.idle == [QUEUE]
    rig.send("a")
    assert rig.apply(Freeze(QUEUE)) == Refused(Refusal.BUSY, "the entity is in use")


def test_a_frozen_topic_stops_its_subscriptions_and_a_frozen_subscription_no_publisher() -> None:
    rig = topic_rig(PERIOD_MS, PERIOD_MS)
    rig.advance(PERIOD_MS)
    assert isinstance(rig.apply(Freeze(TOPIC)), Frozen)
    assert rig.apply(Peek(FIRST, ACTIVE, 0, 1, 1_000)) == BUSY
    rig.apply(Thaw(TOPIC))
    assert isinstance(rig.apply(Freeze(FIRST)), Frozen)
    assert isinstance(rig.apply(Enqueue(TOPIC, [message("a")])), Enqueued)
    assert rig.apply(Peek(FIRST, ACTIVE, 0, 1, 1_000)) == BUSY


# --- across a crash -------------------------------------------------------------------------------


@pytest.mark.parametrize("use_ms", [0, 30_000, 61_000, 200_000, 299_000])
def test_after_a_crash_no_use_is_forgotten(use_ms: int) -> None:
    rig = Rig(PROPERTIES)
    rig.advance(use_ms)
    rig.send("a")
    rig.crash()
    rig.advance(PERIOD_MS - 1)
    assert rig.idle == []
    rig.advance(MINUTE_MS + 1)  # written coarsely: at most one grain late
    assert QUEUE in rig.idle


def test_a_receiver_that_only_waits_is_remembered_across_a_crash() -> None:
    rig = Rig(PROPERTIES)
    consumer_id = rig.consumer()
    rig.apply(SetDemand(consumer_id, 1))
    rig.advance(7 * PERIOD_MS + 12_345)
    rig.crash()
    rig.advance(PERIOD_MS - 1)
    assert rig.idle == []


def test_a_crash_does_not_prolong_the_life_of_an_unused_entity() -> None:
    rig = Rig(PROPERTIES)
    for _ in range(6):
        rig.advance(MINUTE_MS - 1)
        assert rig.idle == []
        rig.crash()
    rig.advance(6)
    assert rig.idle == [QUEUE]


def test_use_is_written_coarsely() -> None:
    rig = Rig(QueueProperties(auto_delete_on_idle_ms=100 * MINUTE_MS))
    start = len(rig.results)
    for _ in range(1_000):
        rig.advance(1_200)
        rig.send("a")
    written = [
        mutation
        for outcome in rig.results[start:]
        for mutation in getattr(outcome, "mutations", [])
        if isinstance(mutation, RecordUse)
    ]
    assert 1 <= len(written) <= 3


# --- freezing if empty ----------------------------------------------------------------------------


def test_an_empty_entity_is_frozen_even_with_receivers() -> None:
    rig = Rig(QueueProperties())  # it has no period
    rig.send("a")
    (delivery,) = rig.receive()
    assert rig.apply(Freeze(QUEUE, if_empty=True)) == Refused(
        Refusal.NOT_EMPTY, "queue-7 holds 1 message"
    )
    rig.settle(Disposition.COMPLETE, delivery)
    assert isinstance(rig.apply(Freeze(QUEUE, if_empty=True)), Frozen)
    assert rig.apply(Enqueue(QUEUE, [message("b")])) == BUSY
    assert isinstance(rig.apply(Hold(QUEUE)), Frozen)
    rig.advance(10 * MINUTE_MS)
    assert rig.apply(Enqueue(QUEUE, [message("b")])) == BUSY
    rig.apply(Thaw(QUEUE))
    rig.send("b")
    assert rig.apply(Freeze(9, if_empty=True)) == Refused(Refusal.ENTITY_NOT_FOUND)


def test_messages_of_a_subscription_make_its_topic_not_empty() -> None:
    rig = topic_rig(None)
    rig.apply(
        PutEntity(
            FIRST,
            "t/Subscriptions/s",
            EntityKind.SUBSCRIPTION,
            SubscriptionProperties(),
            4,
            TOPIC,
            (DEFAULT_RULE,),
        )
    )
    assert isinstance(rig.apply(Freeze(TOPIC, if_empty=True)), Frozen)
    assert rig.apply(Enqueue(TOPIC, [message("a")])) == BUSY
    rig.apply(Thaw(TOPIC))
    rig.send("a", entity_no=TOPIC)
    refused = rig.apply(Freeze(TOPIC, if_empty=True))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.NOT_EMPTY


def test_a_publish_makes_a_subscription_not_empty() -> None:
    rig = topic_rig(None)
    rig.apply(
        PutEntity(
            FIRST,
            "t/Subscriptions/s",
            EntityKind.SUBSCRIPTION,
            SubscriptionProperties(),
            4,
            TOPIC,
            (DEFAULT_RULE,),
        )
    )
    assert isinstance(rig.apply(Freeze(FIRST, if_empty=True)), Frozen)
    assert isinstance(rig.apply(Hold(FIRST)), Frozen)
    rig.apply(Thaw(FIRST))
    assert isinstance(rig.apply(Freeze(FIRST, if_empty=True)), Frozen)
    rig.send("a", entity_no=TOPIC)  # the others get theirs meanwhile
    refused = rig.apply(Hold(FIRST))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.NOT_EMPTY


# --- time of last use -----------------------------------------------------------------------------


def test_sending_and_receiving_is_access_and_a_clean_stop_remembers_it() -> None:
    rig = Rig(QueueProperties())
    assert rig.state.counts(QUEUE).accessed_ms == 0  # type: ignore[union-attr]
    rig.advance(MINUTE_MS)
    rig.send("a")
    sent_ms = rig.now_ms
    assert rig.state.counts(QUEUE).accessed_ms == sent_ms  # type: ignore[union-attr]
    rig.advance(MINUTE_MS)
    rig.peek()
    assert rig.state.counts(QUEUE).accessed_ms == sent_ms  # type: ignore[union-attr]
    rig.apply(Quiesce())
    rig.crash()
    assert rig.state.counts(QUEUE).accessed_ms == sent_ms  # type: ignore[union-attr]
    rig.advance(MINUTE_MS)
    rig.receive()
    assert rig.state.counts(QUEUE).accessed_ms == rig.now_ms  # type: ignore[union-attr]
