"""Bodies that copies have in common, and topics as entities: dropped, reloaded, partitioned."""

from __future__ import annotations

import pytest

from postbus.contract.entities import (
    LIMITS,
    EntityKind,
    NamespaceLimits,
    Sku,
    TopicProperties,
    limits_of,
)
from postbus.entity.commands import (
    Disposition,
    DropEntity,
    Enqueue,
    Enqueued,
    Peek,
    PutEntity,
    Refusal,
    Refused,
    Settle,
    Transact,
    Transacted,
)
from postbus.entity.topics.topic_state import TopicState
from postbus.entity.window import MESSAGE_OVERHEAD_BYTES
from tests.entity.partition_rig import (
    ACTIVE,
    DELETE,
    QUEUE,
    TOPIC,
    Rig,
    message,
    name_of,
)
from tests.entity.topics.topic_rig import (
    ONE,
    THREE,
    TWO,
    names,
    publish,
    shared_rows,
    sql,
    take,
    topic_rig,
    with_properties,
)

# --- bodies in common -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size_bytes", "is_shared"),
    [(1, 100_000, False), (2, 8_192, False), (2, 8_193, True), (3, 1_000, True), (3, 10, False)],
)
def test_bodies_in_common_are_stored_once(count: int, size_bytes: int, is_shared: bool) -> None:
    rig = topic_rig(count)
    publish(rig, with_properties("a", b"x" * size_bytes), with_properties("b", b"y" * size_bytes))
    assert len(shared_rows(rig)) == 2 * is_shared
    for row_keys in shared_rows(rig):
        assert len(row_keys) == count
        assert len({rig.tables.rows[row_key][1].body for row_key in row_keys}) == 1


def test_copies_with_other_properties_share_the_body_too() -> None:
    rig = topic_rig(1)
    rig.put_subscription(TWO, rules=(sql("one", "1=1", "SET n = 1"),))
    rig.put_subscription(THREE, rules=(sql("broken", "n / 0 = 1"),))
    publish(rig, with_properties("a", b"x" * 10_000, n=1))
    (row_keys,) = shared_rows(rig)
    assert len(row_keys) == 3


@pytest.mark.slow
def test_a_body_in_common_counts_once_in_the_window() -> None:
    rig = topic_rig(0)
    count, size_bytes = 200, 256 * 1024 - 200
    for entity_no in range(ONE, ONE + count):
        rig.put_subscription(entity_no)
    body = b"x" * size_bytes
    publish(rig, with_properties("a", body))
    used_bytes = rig.budget.used_bytes
    assert used_bytes <= size_bytes + count * (MESSAGE_OVERHEAD_BYTES + 100)
    assert rig.state.counts(TOPIC).size_bytes == count * (100 + size_bytes)
    for entity_no in range(ONE, ONE + count - 1):
        deliveries = take(rig, entity_no)
        rig.settle(Disposition.COMPLETE, *deliveries, entity_no=entity_no)
    assert rig.budget.used_bytes == 100 + size_bytes + MESSAGE_OVERHEAD_BYTES
    rig.crash()


@pytest.mark.parametrize("budget_bytes", [20_000, 60_000])
def test_the_budget_holds_with_bodies_in_common(budget_bytes: int) -> None:
    """The rig checks after each step that every body is counted exactly once."""
    rig = topic_rig(4, budget_bytes=budget_bytes)
    for n in range(30):
        publish(rig, with_properties(f"m{n}", bytes([n]) * 5_000))
        for entity_no in (ONE, TWO):
            for delivery in take(rig, entity_no, 2):
                disposition = list(Disposition)[n % 5]
                rig.settle(disposition, delivery, entity_no=entity_no, properties={"n": n})
        rig.advance(20_000)
    rig.apply(DropEntity(THREE, 2))
    for entity_no in (ONE, TWO, 24):
        while batch := rig.receive(f"R{entity_no}", 9, entity_no=entity_no, mode=DELETE):
            assert batch
    rig.crash()


# --- definitions ----------------------------------------------------------------------------------


def test_a_dropped_subscription_gets_no_more_copies() -> None:
    rig = topic_rig(2)
    publish(rig, "a")
    rig.apply(DropEntity(ONE, 2))
    publish(rig, "b")
    rig.advance(1_000)
    assert names(rig, TWO) == ["a", "b"]
    assert len(rig.tables.rows) == 2
    assert rig.apply(Peek(ONE, ACTIVE, 0, 9, 999)) == Refused(Refusal.ENTITY_NOT_FOUND)


def test_dropping_a_topic_drops_its_subscriptions_and_every_row() -> None:
    rig = topic_rig(2, TopicProperties(requires_duplicate_detection=True))
    scheduled = with_properties("b")
    scheduled.scheduled_ms = rig.now_ms + 5_000
    publish(rig, with_properties("a"), scheduled)
    rig.apply(DropEntity(TOPIC, 2))
    rig.advance(60_000)
    assert rig.tables.rows == {}
    assert list(rig.tables.definitions) == [QUEUE]
    assert rig.tables.seen == []
    rig.crash()
    assert rig.state.counts(TOPIC) is None


def test_topics_and_their_messages_survive_a_restart() -> None:
    rig = topic_rig(2, TopicProperties(requires_duplicate_detection=True))
    publish(rig, with_properties("a"), with_properties("b", b"x" * 9_000))
    rig.settle(Disposition.COMPLETE, *take(rig, ONE), entity_no=ONE)
    rig.crash()
    assert names(rig, ONE) == ["b"]
    assert names(rig, TWO) == ["a", "b"]
    assert publish(rig, with_properties("a"), with_properties("c"))[0] == 0
    assert names(rig, TWO) == ["a", "b", "c"]
    (copy,) = [p for p in rig.peek(entity_no=TWO) if name_of(p.envelope) == "c"]
    assert copy.envelope.origin_sequence == 257


def test_duplicates_are_dropped_before_they_are_routed() -> None:
    rig = topic_rig(2, TopicProperties(requires_duplicate_detection=True))
    publish(rig, with_properties("a"), with_properties("a"))
    assert publish(rig, with_properties("a")) == [0]
    due_ms = rig.now_ms + 5_000
    first, second = with_properties("s"), with_properties("s")
    first.scheduled_ms = second.scheduled_ms = due_ms
    numbers = publish(rig, first, second)
    assert 0 not in numbers
    rig.advance(6_000)
    assert names(rig, ONE) == names(rig, TWO) == ["a", "s"]


def test_a_transaction_publishes_and_settles_in_one_commit() -> None:
    rig = topic_rig(2)
    rig.send("in")
    (delivery,) = rig.receive()
    settle = Settle(QUEUE, ACTIVE, [delivery.lock_token], Disposition.COMPLETE)
    reply = rig.apply(Transact([Enqueue(TOPIC, [message("out")]), settle]))
    assert isinstance(reply, Transacted)
    assert names(rig, ONE) == names(rig, TWO) == ["out"]
    large = Enqueue(TOPIC, [message("large", size_bytes=300_000)])
    refused = rig.apply(Transact([Enqueue(TOPIC, [message("not")]), large]))
    assert isinstance(refused, Refused)
    assert names(rig, ONE) == ["out"]


@pytest.mark.parametrize(
    ("limits", "size_bytes"),
    [
        (LIMITS[Sku.STANDARD], 1 << 30),  # each part has all of it
        (limits_of(Sku.PREMIUM, 16), 1 << 30),  # it was Standard
        (limits_of(Sku.PREMIUM, 4), 1 << 28),
    ],
)
def test_partitioned_entities_number_by_partition_and_have_a_size_for_each(
    limits: NamespaceLimits, size_bytes: int
) -> None:
    rig = Rig(limits=limits)
    rig.put_topic(is_partitioned=True)
    rig.put_subscription(ONE, is_partitioned=True)
    first = (3 << 48) + 1  # the rig is partition 3
    assert publish(rig, "a") == [first]
    assert [p.sequence for p in rig.peek(entity_no=ONE)] == [first]
    rig.crash()
    assert publish(rig, "b") == [first + 256]
    topic = rig.state.entities.get(TOPIC)
    assert isinstance(topic, TopicState)
    assert topic.max_size_bytes == size_bytes
    topic.max_size_bytes = topic.total_bytes + 256 * 1024 - 1
    topic._room_checks = 0
    reply = rig.apply(Enqueue(TOPIC, [message("m", size_bytes=256 * 1024)]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    assert reply.refusals[0].refusal is Refusal.QUOTA_EXCEEDED


def test_a_partitioned_queue_too() -> None:
    rig = Rig()
    properties = rig.state.entities.get(QUEUE).properties
    put = PutEntity(50, "q", EntityKind.QUEUE, properties, 1, is_partitioned=True)
    rig.apply(put)
    assert rig.send("a", "b", entity_no=50) == [(3 << 48) + 1, (3 << 48) + 2]
    assert rig.peek_names(entity_no=50) == ["a", "b"]
    entity = rig.state.entities.get(50)
    assert entity is not None
    assert entity.max_size_bytes == 1024 * 1024 * 1024  # each part has all of it
    rig.crash()
    assert rig.send("c", entity_no=50) == [(3 << 48) + 257]
