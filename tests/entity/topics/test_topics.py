"""Topics: the copies of a publish, and their life in each subscription."""

from __future__ import annotations

import pytest

from postbus.contract.entities import (
    EntityStatus,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    AddConsumer,
    Cancelled,
    CancelScheduled,
    Disposition,
    Enqueue,
    Enqueued,
    MessageState,
    Refusal,
    Refused,
    Settled,
    Tick,
)
from postbus.entity.outcomes import Outcome
from postbus.entity.topics.publish_limits import PublishLimits
from tests.entity.partition_rig import (
    ACTIVE,
    DELETE,
    DLQ,
    START_MS,
    TOPIC,
    message,
    name_of,
    properties_of,
)
from tests.entity.topics.topic_rig import (
    ONE,
    THREE,
    TWO,
    names,
    publish,
    sql,
    take,
    topic_rig,
    with_properties,
)

# --- copies ---------------------------------------------------------------------------------------


def test_every_subscription_gets_its_copy_in_one_commit() -> None:
    rig = topic_rig(3)
    rig.results.clear()
    assert publish(rig, "a", "b") == [1, 2]
    (outcome,) = rig.results
    assert isinstance(outcome, Outcome)
    assert len(outcome.inserts) == 6
    for entity_no in (ONE, TWO, THREE):
        assert names(rig, entity_no) == ["a", "b"]
    assert names(rig, TOPIC) == []


def test_copies_of_a_message_live_their_own_lives() -> None:
    rig = topic_rig(2)
    publish(rig, "a")
    (first,) = take(rig, ONE)
    (second,) = take(rig, TWO)
    assert first.lock_token != second.lock_token
    rig.settle(Disposition.COMPLETE, first, entity_no=ONE)
    assert rig.settle(Disposition.COMPLETE, first, entity_no=TWO) == Settled([0])
    assert names(rig, ONE) == []
    assert names(rig, TWO) == ["a"]


@pytest.mark.behaviour("S276")
def test_abandoning_one_copy_does_not_count_for_the_other() -> None:
    rig = topic_rig(2)
    publish(rig, "a")
    (first,) = take(rig, ONE)
    rig.settle(Disposition.ABANDON, first, entity_no=ONE)
    (again,) = take(rig, ONE)
    (other,) = take(rig, TWO)
    assert (again.delivery_count, other.delivery_count) == (1, 0)


@pytest.mark.behaviour("S46", "S246")
def test_exhausted_deliveries_go_to_the_dead_letter_queue_of_that_subscription() -> None:
    rig = topic_rig(2)
    rig.put_subscription(ONE, SubscriptionProperties(max_delivery_count=2))
    publish(rig, "a")
    for _ in range(2):
        rig.settle(Disposition.ABANDON, *take(rig, ONE), entity_no=ONE)
    (dead,) = take(rig, ONE, sub_queue=DLQ)
    assert properties_of(dead.envelope)["DeadLetterReason"] == "MaxDeliveryCountExceeded"
    assert names(rig, TWO, DLQ) == []
    (other,) = take(rig, TWO)
    assert other.delivery_count == 0
    assert properties_of(other.envelope) == {}


def test_a_copy_has_its_number_in_the_topic_and_its_own() -> None:
    rig = topic_rig(1)
    publish(rig, "a", "b")
    rig.put_subscription(TWO)
    publish(rig, "c")
    (copy,) = take(rig, TWO)
    assert (copy.sequence, copy.envelope.origin_sequence) == (1, 3)
    assert [d.envelope.origin_sequence for d in take(rig, ONE, 3)] == [1, 2, 3]


def test_a_forwarded_message_keeps_the_number_of_where_it_was_sent_first() -> None:
    rig = topic_rig(1)
    forwarded = message("a")
    forwarded.hop_count, forwarded.origin_sequence = 1, 77
    publish(rig, forwarded)
    (copy,) = take(rig, ONE)
    assert copy.envelope.origin_sequence == 77


def test_copies_are_in_the_order_of_publishing() -> None:
    """I7: per subscription the order of the topic, from several senders and in batches."""
    rig = topic_rig(2)
    for start in range(0, 300, 3):
        publish(rig, *(f"m{n}" for n in range(start, start + 3)))
    numbers = [peeked.envelope.origin_sequence for peeked in rig.peek(limit=999, entity_no=TWO)]
    assert numbers == sorted(numbers, key=lambda number: number or 0)
    assert names(rig, TWO) == [f"m{n}" for n in range(300)]


def test_a_publish_without_rules_or_subscriptions_stores_no_row() -> None:
    rig = topic_rig(0)
    assert publish(rig, "a") == [1]
    rig.put_subscription(ONE, rules=())
    assert publish(rig, "b") == [2]
    assert rig.tables.rows == {}


def test_receivers_of_a_subscription_are_served_by_the_publish_itself() -> None:
    rig = topic_rig(1)
    rig.consumer("A", entity_no=ONE)
    rig.demand("A", 1)
    rig.results.clear()
    publish(rig, "a")
    assert len(rig.results) == 1
    assert [name_of(d.envelope) for d in rig.inbox("A")] == ["a"]


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.behaviour("S284")
def test_a_false_or_unknown_filter_gives_neither_copy_nor_dead_letter() -> None:
    rig = topic_rig(1)
    rig.put_subscription(TWO, rules=(sql("r", "color = 'red'"),))
    publish(rig, with_properties("a", color="blue"), with_properties("b"))
    assert names(rig, ONE) == ["a", "b"]
    assert names(rig, TWO) == []
    assert names(rig, TWO, DLQ) == []


def test_each_action_makes_a_copy_of_its_own() -> None:
    rig = topic_rig(1)
    rules = (
        sql("plain", "color = 'red'"),
        sql("one", "1=1", "SET n = 1"),
        sql("two", "1=1", "SET n = 2"),
    )
    rig.put_subscription(TWO, rules=rules)
    publish(rig, with_properties("a", color="red"))
    copies = take(rig, TWO, 5)
    assert [properties_of(d.envelope).get("n") for d in copies] == [None, 1, 2]
    assert {d.envelope.origin_sequence for d in copies} == {1}
    assert properties_of(take(rig, ONE)[0].envelope) == {"color": "red"}


def test_rules_change_between_two_messages() -> None:
    rig = topic_rig(1)
    publish(rig, with_properties("a", color="red"))
    rig.put_subscription(ONE, rules=(sql("r", "color = 'blue'"),))
    publish(rig, with_properties("b", color="red"), with_properties("c", color="blue"))
    assert names(rig, ONE) == ["a", "c"]
    rig.crash()
    publish(rig, with_properties("d", color="red"), with_properties("e", color="blue"))
    assert names(rig, ONE) == ["a", "c", "e"]


@pytest.mark.behaviour("S260", "S282")
def test_a_failing_filter_dead_letters_the_copy_with_the_error() -> None:
    rig = topic_rig(1)
    rig.put_subscription(TWO, rules=(sql("broken", "n / 0 = 1"),))
    publish(rig, with_properties("a", n=1), "b")
    (dead,) = take(rig, TWO, 5, sub_queue=DLQ)
    assert name_of(dead.envelope) == "a"
    properties = properties_of(dead.envelope)
    assert properties["n"] == 1
    assert properties["DeadLetterReason"]
    assert str(properties["DeadLetterReason"]).endswith("Exception")
    assert properties["DeadLetterErrorDescription"]
    assert dead.sequence == 1
    assert dead.enqueued_ms == START_MS
    assert names(rig, TWO) == []
    assert names(rig, ONE) == ["a", "b"]
    rig.crash()
    assert names(rig, TWO, DLQ) == ["a"]
    rig.settle(
        Disposition.COMPLETE, *take(rig, TWO, 5, sub_queue=DLQ), entity_no=TWO, sub_queue=DLQ
    )
    assert names(rig, TWO, DLQ) == []


@pytest.mark.behaviour("S283")
def test_with_the_flag_off_a_failing_filter_drops_the_copy_only() -> None:
    rig = topic_rig(1)
    off = SubscriptionProperties(dead_lettering_on_filter_evaluation_exceptions=False)
    rig.put_subscription(TWO, off, (sql("broken", "n / 0 = 1"),))
    publish(rig, with_properties("a", n=1))
    assert names(rig, TWO) == names(rig, TWO, DLQ) == []
    assert names(rig, ONE) == ["a"]


@pytest.mark.behaviour("S262")
def test_a_copy_without_session_id_is_a_dead_letter_of_a_session_subscription() -> None:
    rig = topic_rig(1)
    rig.put_subscription(TWO, SubscriptionProperties(requires_session=True))
    publish(rig, message("a", session="s"), message("b"), message("c", session="s"))
    (dead,) = take(rig, TWO, 5, sub_queue=DLQ)
    assert name_of(dead.envelope) == "b"
    assert properties_of(dead.envelope) == {
        "DeadLetterReason": "Session id is null.",
        "DeadLetterErrorDescription": (
            "Session enabled entity doesn't allow a message whose session identifier is null."
        ),
    }
    assert names(rig, TWO) == ["a", "c"]
    assert names(rig, ONE) == ["a", "b", "c"]
    rig.crash()
    assert names(rig, TWO) == ["a", "c"]


# --- time to live ---------------------------------------------------------------------------------


@pytest.mark.behaviour("S91")
def test_the_default_of_the_topic_counts_for_messages_without_their_own() -> None:
    rig = topic_rig(1, TopicProperties(default_message_ttl_ms=10_000))
    publish(rig, "a")
    (delivery,) = take(rig, ONE)
    assert delivery.ttl_ms == 10_000
    rig.settle(Disposition.RELEASE, delivery, entity_no=ONE)
    rig.advance(10_000)
    assert take(rig, ONE) == []


@pytest.mark.behaviour("S102")
def test_a_shorter_life_in_the_topic_counts_for_the_subscription() -> None:
    rig = topic_rig(0, TopicProperties(default_message_ttl_ms=10_000))
    rig.put_subscription(ONE, SubscriptionProperties(default_message_ttl_ms=60_000))
    publish(rig, "a", message("b", ttl_ms=30_000), message("c", ttl_ms=5_000))
    assert [d.ttl_ms for d in take(rig, ONE, 3)] == [10_000, 10_000, 5_000]
    rig.put_topic(TopicProperties(default_message_ttl_ms=20_000))
    publish(rig, "d")
    assert [d.ttl_ms for d in take(rig, ONE)] == [20_000]


@pytest.mark.behaviour("S102")
def test_an_action_cannot_let_a_copy_live_longer_than_its_topic_allows() -> None:
    rig = topic_rig(0, TopicProperties(default_message_ttl_ms=10_000))
    rules = (sql("r", "1=1", "SET sys.TimeToLive = 60"), sql("s", "1=1", "SET sys.TimeToLive = 5"))
    rig.put_subscription(ONE, rules=rules)
    publish(rig, "a")
    assert [d.ttl_ms for d in take(rig, ONE, 2)] == [10_000, 5_000]


@pytest.mark.behaviour("S103")
def test_a_shorter_life_in_a_subscription_counts_for_its_copy_alone() -> None:
    rig = topic_rig(1, TopicProperties(default_message_ttl_ms=60_000))
    rig.put_subscription(TWO, SubscriptionProperties(default_message_ttl_ms=10_000))
    rig.put_subscription(THREE, SubscriptionProperties(default_message_ttl_ms=10_000))
    publish(rig, "a", message("b", ttl_ms=30_000), message("c", ttl_ms=5_000))
    assert [d.ttl_ms for d in take(rig, ONE, 3)] == [60_000, 30_000, 5_000]
    assert [d.ttl_ms for d in take(rig, TWO, 3)] == [10_000, 10_000, 5_000]
    rig.crash()
    assert [d.ttl_ms for d in take(rig, THREE, 3)] == [10_000, 10_000, 5_000]


@pytest.mark.behaviour("S279")
def test_expired_copies_go_to_the_dead_letter_queue_of_their_subscription() -> None:
    rig = topic_rig(0, TopicProperties(default_message_ttl_ms=10_000))
    rig.put_subscription(ONE, SubscriptionProperties(dead_lettering_on_message_expiration=True))
    rig.put_subscription(TWO)
    publish(rig, *(f"m{n}" for n in range(5)))
    rig.advance(10_000)
    assert take(rig, ONE, 9) == take(rig, TWO, 9) == []
    dead = take(rig, ONE, 9, sub_queue=DLQ)
    assert [name_of(d.envelope) for d in dead] == [f"m{n}" for n in range(5)]
    assert {properties_of(d.envelope)["DeadLetterReason"] for d in dead} == {"TTLExpiredException"}
    assert names(rig, TWO, DLQ) == []


@pytest.mark.behaviour("S279")
def test_a_copy_that_expires_under_its_lock_is_dead_lettered_when_it_returns() -> None:
    rig = topic_rig(0, TopicProperties(default_message_ttl_ms=10_000))
    rig.put_subscription(ONE, SubscriptionProperties(dead_lettering_on_message_expiration=True))
    publish(rig, "abandoned", "left")
    held = take(rig, ONE, 2)
    rig.advance(10_000)
    rig.settle(Disposition.ABANDON, held[0], entity_no=ONE)
    assert names(rig, ONE, DLQ) == ["abandoned"]
    rig.advance(60_000)
    assert names(rig, ONE, DLQ) == ["abandoned", "left"]
    assert names(rig, ONE) == []


# --- scheduled ------------------------------------------------------------------------------------


def test_scheduled_messages_wait_in_the_topic_and_are_published_when_due() -> None:
    rig = topic_rig(2)
    due_ms = rig.now_ms + 5_000
    numbers = publish(
        rig, message("a", scheduled_ms=due_ms), "b", message("c", scheduled_ms=due_ms)
    )
    assert names(rig, ONE) == ["b"]
    peeked = rig.peek(entity_no=TOPIC)
    assert [name_of(p.envelope) for p in peeked] == ["a", "c"]
    assert [p.sequence for p in peeked] == [numbers[0], numbers[2]]
    assert {p.state for p in peeked} == {MessageState.SCHEDULED}
    assert rig.state.counts(TOPIC).scheduled == 2  # type: ignore[union-attr]
    rig.now_ms += 7_000  # late
    rig.tick_now()
    assert names(rig, TOPIC) == []
    for entity_no in (ONE, TWO):
        assert names(rig, entity_no) == ["b", "a", "c"]
    copies = take(rig, ONE, 3)
    assert [d.enqueued_ms for d in copies] == [START_MS, due_ms, due_ms]
    assert [d.envelope.origin_sequence for d in copies] == [2, 4, 5]
    assert len(rig.tables.rows) == 6
    assert rig.tables.due == {}


@pytest.mark.behaviour("S84")
def test_a_schedule_is_not_published_along_with_one_that_is_due_before() -> None:
    rig = topic_rig(1)
    due_ms = rig.now_ms + 1_000
    publish(rig, message("later", scheduled_ms=due_ms + 500), message("first", scheduled_ms=due_ms))
    rig.advance(1_499)
    assert names(rig, ONE) == ["first"]
    rig.advance(1)
    assert names(rig, ONE) == ["first", "later"]


def test_a_scheduled_message_meets_the_rules_of_when_it_is_due() -> None:
    rig = topic_rig(1)
    publish(rig, message("a", scheduled_ms=rig.now_ms + 5_000))
    rig.put_subscription(ONE, rules=())
    rig.put_subscription(TWO)
    rig.crash()
    rig.advance(6_000)
    assert names(rig, ONE) == []
    assert names(rig, TWO) == ["a"]


def test_a_cancelled_schedule_is_never_published() -> None:
    rig = topic_rig(1)
    (number,) = publish(rig, message("a", scheduled_ms=rig.now_ms + 5_000))
    assert isinstance(rig.apply(CancelScheduled(TOPIC, [number])), Cancelled)
    assert isinstance(rig.apply(CancelScheduled(TOPIC, [number])), Refused)
    rig.advance(10_000)
    assert names(rig, ONE) == []
    assert rig.tables.rows == {}


def test_a_schedule_cancelled_while_its_row_is_read_is_not_published() -> None:
    rig = topic_rig(1)
    (number,) = publish(rig, message("a", scheduled_ms=rig.now_ms + 5_000))
    rig.now_ms += 5_000
    rig.is_auto = False
    rig.submit(Tick())
    rig.submit(CancelScheduled(TOPIC, [number]))
    rig.commit()
    rig.tick_now()
    assert names(rig, ONE) == []
    assert rig.tables.rows == {}


def test_many_due_messages_are_published_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postbus.entity.queues.scheduled.PUBLISH_COPIES", 4)
    rig = topic_rig(2)
    due_ms = rig.now_ms + 1_000
    publish(rig, *(message(f"m{n}", scheduled_ms=due_ms) for n in range(9)))
    rig.results.clear()
    rig.advance(1_000)
    inserted = [len(r.inserts) for r in rig.results if isinstance(r, Outcome) and r.inserts]
    assert inserted == [4, 4, 4, 4, 2]
    assert names(rig, ONE) == names(rig, TWO) == [f"m{n}" for n in range(9)]


# --- refusals -------------------------------------------------------------------------------------


def test_a_topic_refuses_the_same_messages_as_a_queue() -> None:
    rig = topic_rig(1)
    reply = rig.apply(Enqueue(TOPIC, [message("a", size_bytes=300_000), message("b")]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    assert reply.refusals[0].refusal is Refusal.MESSAGE_TOO_LARGE
    assert names(rig, ONE) == ["b"]
    batch = Enqueue(TOPIC, [message("c"), message("d", size_bytes=300_000)], is_atomic=True)
    assert isinstance(rig.apply(batch), Refused)
    assert names(rig, ONE) == ["b"]
    for status, refusal in (
        (EntityStatus.DISABLED, Refusal.ENTITY_DISABLED),
        (EntityStatus.SEND_DISABLED, Refusal.SEND_DISABLED),
    ):
        rig.put_topic(TopicProperties(status=status))
        assert rig.apply(Enqueue(TOPIC, [message("e")])) == Refused(refusal, "topic")


def test_topics_refuse_receivers_and_subscriptions_refuse_senders() -> None:
    rig = topic_rig(1)
    reply = rig.apply(AddConsumer(TOPIC, ACTIVE, 99, DELETE))
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.NOT_ALLOWED
    reply = rig.apply(Enqueue(ONE, [message("a")]))
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.NOT_ALLOWED


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (EntityStatus.DISABLED, ["a", "c"]),
        (EntityStatus.SEND_DISABLED, ["a", "c"]),
        (EntityStatus.RECEIVE_DISABLED, ["a", "b", "c"]),
    ],
)
def test_a_disabled_subscription_gets_no_copies(status: EntityStatus, expected: list[str]) -> None:
    rig = topic_rig(2)
    publish(rig, "a")
    rig.put_subscription(ONE, SubscriptionProperties(status=status))
    publish(rig, "b")
    rig.crash()
    rig.put_subscription(ONE)
    publish(rig, "c")
    assert names(rig, ONE) == expected
    assert names(rig, TWO) == ["a", "b", "c"]


def test_the_size_of_a_topic_is_that_of_all_copies() -> None:
    rig = topic_rig(2)
    half_mb = 256 * 1024
    for _ in range(32):
        publish(rig, *(message("m", size_bytes=half_mb) for _ in range(64)))
    counts = rig.state.counts(TOPIC)
    assert counts is not None
    assert counts.size_bytes == 1024 * 1024 * 1024
    reply = rig.apply(Enqueue(TOPIC, [message("x", size_bytes=1)]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    assert reply.refusals[0].refusal is Refusal.QUOTA_EXCEEDED
    gone = take(rig, ONE)
    rig.settle(Disposition.COMPLETE, *gone, entity_no=ONE)
    publish(rig, message("x", size_bytes=half_mb // 2))
    reply = rig.apply(Enqueue(TOPIC, [message("y", size_bytes=1)]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None


def test_a_publish_above_the_commit_limit_is_refused_whole() -> None:
    rig = topic_rig(3, publish_limits=PublishLimits(max_copies=6))
    batch = Enqueue(TOPIC, [message(name) for name in "abc"], is_atomic=True)
    reply = rig.apply(batch)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.PUBLISH_TOO_LARGE
    assert "split it" in reply.detail
    assert rig.tables.rows == {}
    assert len(publish(rig, *"abcdefgh")) == 8  # each for itself: several such publishes
    reply = rig.apply(Enqueue(TOPIC, [message(name) for name in "abcdefghij"]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    assert list(reply.refusals) == [8, 9]
    assert reply.refusals[8].refusal is Refusal.BUSY
    rig = topic_rig(3, publish_limits=PublishLimits(max_copies=2))
    reply = rig.apply(Enqueue(TOPIC, [message("a")]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    assert reply.refusals[0].refusal is Refusal.PUBLISH_TOO_LARGE


def test_burst_of_publishes_has_the_bytes_of_one() -> None:
    """They are one commit: messages that do not fit must come again."""
    rig = topic_rig(3, publish_limits=PublishLimits(max_row_bytes=2_500))
    reply = rig.apply(Enqueue(TOPIC, [with_properties(name, b"x" * 1_000) for name in "abc"]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    assert list(reply.refusals) == [1, 2]
    assert reply.refusals[1].refusal is Refusal.BUSY


def test_bytes_of_a_publish_count_a_shared_body_once() -> None:
    rig = topic_rig(3, publish_limits=PublishLimits(max_row_bytes=60_000))
    batch = [with_properties(name, b"x" * 50_000) for name in "ab"]
    assert len(publish(rig, batch[0])) == 1
    reply = rig.apply(Enqueue(TOPIC, batch, is_atomic=True))
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.PUBLISH_TOO_LARGE
