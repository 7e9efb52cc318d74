"""Messages that leave in the outcome that brings them, or before its commit is known."""

from __future__ import annotations

from postbus.contract.entities import EntityKind, QueueProperties, SubscriptionProperties
from postbus.entity.commands import Disposition, PutEntity, SetDemand, SubQueue, SupplyRows, Tick
from postbus.entity.outcomes import Fetch, MoveMessage, Outcome
from tests.entity.partition_rig import DELETE, DLQ, QUEUE, Rig, message, name_of, properties_of
from tests.entity.topics.topic_rig import ONE, names, publish, topic_rig, with_properties


def stored(rig: Rig, entity_no: int) -> list[str]:
    """Return the names of messages in the rows of an entity."""
    return [
        name_of(envelope)
        for row_key, (_, envelope) in sorted(rig.tables.rows.items())
        if rig.tables.block_of(row_key).entity_no == entity_no
    ]


def test_a_message_expired_on_arrival_is_inserted_as_a_dead_letter() -> None:
    rig = Rig(QueueProperties(dead_lettering_on_message_expiration=True))
    rig.demand("A", 5)
    (number,) = rig.send(message("late", ttl_ms=0))
    result = rig.results[-1]
    assert isinstance(result, Outcome)
    assert not any(isinstance(each, MoveMessage) for each in result.mutations)
    (peeked,) = rig.peek(sub_queue=DLQ)
    assert peeked.sequence == number
    assert properties_of(peeked.envelope)["DeadLetterReason"] == "TTLExpiredException"
    rig.crash()
    assert rig.peek_names(DLQ) == ["late"]
    assert rig.peek_names() == []


def test_a_message_arriving_during_forwarding_is_forwarded_once() -> None:
    rig = Rig(QueueProperties())
    rig.send(*(f"m{number}" for number in range(1_500)))
    forwarding = QueueProperties(forward_to="target")
    rig.submit(PutEntity(QUEUE, "queue-7", EntityKind.QUEUE, forwarding, 2))
    rig.submit(Tick())  # moves 1,000, and the next command the rest
    rig.send("late")
    assert stored(rig, QUEUE) == []
    assert stored(rig, 0)[-2:] == ["m1499", "late"]


def test_a_session_message_arriving_during_forwarding_is_forwarded_once() -> None:
    rig = Rig(QueueProperties(requires_session=True))
    rig.send(message("deferred", session="a"))
    rig.accept("A", "a")
    rig.demand("A", 1)
    (delivery,) = rig.inbox("A")
    rig.settle(Disposition.DEFER, delivery, session_id=b"a")
    rig.detach("A")
    rig.put(QueueProperties(requires_session=True, forward_to="target"))
    rig.tick_now()
    rig.send(message("late", session="b"))
    rig.tick_now()
    assert stored(rig, QUEUE) == ["deferred"]
    assert stored(rig, 0) == ["late"]


def test_a_scheduled_message_expired_before_publication_is_a_dead_letter() -> None:
    rig = topic_rig(0)
    rig.put_subscription(ONE, SubscriptionProperties(dead_lettering_on_message_expiration=True))
    envelope = with_properties("due", b"x" * 9_000)
    envelope.scheduled_ms, envelope.ttl_ms = rig.now_ms + 1_000, 60_000
    rig.put_subscription(ONE + 1)
    publish(rig, envelope)
    rig.now_ms += 600_000
    consumer_id = rig.consumer("A", entity_no=ONE)
    rig.apply(SetDemand(consumer_id, 5))
    rig.tick_now()
    assert names(rig, ONE, DLQ) == ["due"]
    assert names(rig, ONE) == []
    (shared,) = rig.tables.shared
    assert set(shared) <= rig.tables.rows.keys()


def test_an_earlier_enqueued_time_does_not_imply_a_commit() -> None:
    rig = topic_rig(1)
    consumer_id = rig.consumer("A", entity_no=ONE, mode=DELETE)
    envelope = with_properties("due")
    envelope.scheduled_ms = rig.now_ms + 1_000
    publish(rig, envelope)
    rig.now_ms += 1_000
    rig.is_auto = False
    rig.submit(Tick())
    (fetch,) = (each for each in rig.pending[0][0].effects if isinstance(each, Fetch))
    rows = rig.tables.read(fetch.row_keys)
    rig.pending[0][0].effects.clear()
    rig.now_ms += 5
    rig.state.mark_committed(rig.now_ms)  # others are committed while these rows are read
    rig.commit()
    rig.now_ms += 5
    rig.submit(SupplyRows(fetch.entity_no, SubQueue.SCHEDULED, rows))
    rig.submit(SetDemand(consumer_id, 5))
    published, taken = (outcome for outcome, _ in rig.pending)
    assert taken.deletes == [insert.row_key for insert in published.inserts]
    assert taken.touches_uncommitted
    rig.commit()
    assert stored(rig, ONE) == []
