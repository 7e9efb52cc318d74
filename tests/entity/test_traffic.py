"""Counters of each entity for metrics, across reloads."""

from __future__ import annotations

from postbus.contract.entities import QueueProperties, SubscriptionProperties
from postbus.entity.commands import Disposition, DropEntity
from tests.entity.partition_rig import DELETE, DLQ, QUEUE, START_MS, TOPIC, Rig, message
from tests.entity.topics.topic_rig import ONE, TWO, publish, take, topic_rig


def counters(rig: Rig, entity_no: int = QUEUE) -> dict[str, int]:
    traffic = rig.traffic[entity_no]
    found = {name: getattr(traffic, name) for name in traffic.__slots__ if name != "deaths"}
    dead = sum(traffic.deaths.values())
    return {name: count for name, count in {**found, "dead_lettered": dead}.items() if count}


def test_each_message_counts_where_it_comes_and_goes() -> None:
    rig = Rig(QueueProperties(dead_lettering_on_message_expiration=False))
    rig.send("a", "b", "c")
    first, second = rig.receive(count=2)
    assert rig.state.locked_count(QUEUE) == 2
    rig.settle(Disposition.COMPLETE, first)
    rig.settle(Disposition.ABANDON, second)
    assert counters(rig) == {"accepted": 3, "delivered": 2, "completed": 1}
    (second,) = rig.receive()
    rig.settle(Disposition.DEAD_LETTER, second)
    rig.receive("R", mode=DELETE)
    assert rig.state.locked_count(QUEUE) == 0
    wanted = {"accepted": 3, "delivered": 4, "completed": 2, "dead_lettered": 1}
    assert counters(rig) == wanted
    (dead,) = rig.receive(sub_queue=DLQ)
    rig.settle(Disposition.COMPLETE, dead, sub_queue=DLQ)
    assert counters(rig) == wanted, "dead letters are looked after, not processed"
    rig.send(message("d", ttl_ms=1_000))
    rig.advance(2_000)
    assert rig.receive() == []
    assert counters(rig) == wanted | {"accepted": 4, "expired": 1}


def test_deaths_are_counted_by_reason_the_first_twenty_apart() -> None:
    rig = Rig(QueueProperties(max_delivery_count=1, dead_lettering_on_message_expiration=True))
    rig.send("a", "b")
    first, second = rig.receive(count=2)
    rig.settle(Disposition.ABANDON, first)
    rig.settle(Disposition.DEAD_LETTER, second)
    rig.send(message("c", ttl_ms=1_000))
    rig.advance(2_000)
    assert rig.receive() == []
    expected = {"MaxDeliveryCountExceeded": 1, "none": 1, "TTLExpiredException": 1}
    assert rig.traffic[QUEUE].deaths == expected
    for number in range(30):
        rig.send("m")
        reason = f"reason {number} " + "x" * 200
        rig.settle(Disposition.DEAD_LETTER, *rig.receive(), reason=reason)
    deaths = rig.traffic[QUEUE].deaths
    assert len(deaths) == 21
    assert deaths["other"] == 13
    assert max(map(len, deaths)) == 100
    rig.crash()
    assert rig.traffic[QUEUE].deaths == deaths


def test_reasons_are_bounded_and_without_control_characters() -> None:
    rig = Rig()
    for number in range(40):
        rig.send("m")
        reason = f"\x1b]0;é\x07\r\u202e\x9b{chr(0x80 + number)}" if number < 32 else "\x1b" * number
        rig.settle(Disposition.DEAD_LETTER, *rig.receive(), reason=reason)
    deaths = rig.traffic[QUEUE].deaths
    assert all(map(str.isprintable, deaths))
    shown = "�]0;é�����"
    assert deaths == {shown: 32, **{"�" * number: 1 for number in range(32, 40)}}


def test_reload_keeps_the_counters_and_deletion_does_not() -> None:
    rig = Rig()
    rig.send("a")
    rig.crash()
    rig.send("b")
    assert counters(rig)["accepted"] == 2
    rig.apply(DropEntity(QUEUE, 2))
    assert QUEUE not in rig.traffic


def test_scheduled_message_counts_once() -> None:
    rig = Rig()
    rig.send(message("later", scheduled_ms=START_MS + 60_000))
    assert counters(rig) == {"accepted": 1}
    rig.advance(60_000)
    assert rig.receive()
    assert counters(rig) == {"accepted": 1, "delivered": 1}


def test_copies_count_for_their_subscriptions() -> None:
    rig = topic_rig(2)
    publish(rig, "a", "b")
    publish(rig, message("c", scheduled_ms=START_MS + 60_000))
    rig.advance(60_000)
    assert counters(rig, TOPIC) == {"accepted": 3}
    assert counters(rig, ONE) == counters(rig, TWO) == {"accepted": 3}
    take(rig, ONE)
    assert counters(rig, ONE)["delivered"] > 0
    assert "delivered" not in counters(rig, TWO)


def test_sessions_are_counted_too() -> None:
    rig = Rig(QueueProperties(requires_session=True))
    rig.send(message("a", session="s"), message("b", session="t"))
    for name in ("A", "B"):
        rig.accept(name)
        rig.demand(name, 1)
    assert rig.state.locked_count(QUEUE) == 2
    (first,) = rig.inbox("A")
    rig.settle(Disposition.COMPLETE, first, session_id=b"s")
    assert counters(rig) == {"accepted": 2, "delivered": 2, "completed": 1}
    assert rig.state.locked_count(QUEUE) == 1


def test_a_copy_that_is_dead_at_once_counts_twice() -> None:
    rig = topic_rig(1)
    rig.put_subscription(TWO, SubscriptionProperties(requires_session=True))
    publish(rig, message("a", session="s"), "b")
    assert counters(rig, TWO) == {"accepted": 2, "dead_lettered": 1}
