"""Records of a death: its time, the delivery count and the last receiver."""

from __future__ import annotations

from postbus.contract.entities import QueueProperties, SubscriptionProperties
from postbus.entity.commands import Death, Disposition, Receiver
from tests.entity.partition_rig import DLQ, QUEUE, START_MS, Rig, message
from tests.entity.topics.topic_rig import ONE, publish, sql, topic_rig, with_properties

LOCK_MS = 60_000
A = Receiver("link-A", "192.0.2.1")
B = Receiver("link-B", "192.0.2.1")


def deaths(rig: Rig, entity_no: int = QUEUE) -> list[Death | None]:
    return [peeked.death for peeked in rig.peek(sub_queue=DLQ, entity_no=entity_no)]


def test_an_application_that_dead_letters_is_named_with_its_delivery() -> None:
    rig = Rig(QueueProperties(max_delivery_count=5))
    rig.send("m")
    rig.settle(Disposition.ABANDON, *rig.receive("A"))
    (held,) = rig.receive("B")
    rig.advance(5_000)
    rig.settle(Disposition.DEAD_LETTER, held)
    expected = [Death(START_MS + 5_000, 2, B)]
    assert deaths(rig) == expected
    rig.crash()
    assert deaths(rig) == expected
    rig.receive("D", sub_queue=DLQ)  # later readers of a dead letter change nothing
    rig.crash()
    assert deaths(rig) == expected


def test_the_last_receiver_is_named_when_deliveries_are_used_up() -> None:
    rig = Rig(QueueProperties(max_delivery_count=2))
    rig.send("abandoned", "forgotten")
    for name in ("A", "B"):
        abandoned, _ = rig.receive(name, 2)
        rig.settle(Disposition.ABANDON, abandoned)
        rig.advance(LOCK_MS)
    assert deaths(rig) == [
        Death(START_MS + LOCK_MS, 2, B),
        Death(START_MS + 2 * LOCK_MS, 2, B),
    ]


def test_a_dead_letter_of_a_session_names_the_session_holder() -> None:
    rig = Rig(QueueProperties(requires_session=True))
    rig.send(message("m", session="s"))
    rig.accept("A", "s")
    rig.demand("A", 1)
    (held,) = rig.inbox("A")
    rig.settle(Disposition.DEAD_LETTER, held, session_id=b"s")
    assert deaths(rig) == [Death(START_MS, 1, A)]


def test_an_expired_dead_letter_names_no_receiver() -> None:
    rig = Rig(QueueProperties(dead_lettering_on_message_expiration=True))
    rig.send(message("m", ttl_ms=1_000))
    rig.settle(Disposition.ABANDON, *rig.receive("A"))
    rig.advance(2_000)
    assert rig.receive("B") == []
    assert deaths(rig) == [Death(START_MS + 2_000, 1)]


def test_a_failed_filter_gives_the_time_of_death() -> None:
    rig = topic_rig(0)
    rig.put_subscription(ONE, SubscriptionProperties(), rules=(sql("r", "a / 0 = 1"),))
    publish(rig, with_properties("m", a=1))
    assert deaths(rig, ONE) == [Death(START_MS)]


def test_a_dead_letter_that_is_sent_again_and_dies_again_has_the_last_death() -> None:
    rig = Rig(QueueProperties(max_delivery_count=1))
    rig.send("m")
    rig.settle(Disposition.ABANDON, *rig.receive("A"))
    (dead,) = rig.receive("D", sub_queue=DLQ)
    rig.advance(1_000)
    rig.send("m")
    rig.settle(Disposition.COMPLETE, dead, sub_queue=DLQ)
    rig.settle(Disposition.ABANDON, *rig.receive("B"))
    assert deaths(rig) == [Death(START_MS + 1_000, 1, B)]
