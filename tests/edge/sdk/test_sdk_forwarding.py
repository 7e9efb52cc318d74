"""Forwarding with the unmodified SDK: chains, dead letters, and failures."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import MessageLockLostError, ServiceBusError

from postbus.broker.catalog.directory import DirectoryRefusal
from postbus.broker.placement import partition_of_key
from postbus.contract.entities import RuleProperties, SqlFilter
from postbus.message.codec import Ubyte, Uint
from tests.edge.amqp.test_transactions import VIA, TransactionClient, accepts
from tests.edge.bus_thread import BusThread
from tests.edge.raw_client import ACCEPTED, ATTACH, described, frame, message
from tests.edge.sdk.sdk_steps import (
    DEAD,
    LONG_S,
    SOON_S,
    TRANSFER_DEAD,
    bodies_of,
    dead_letter,
    eventually,
    is_empty,
    named,
    path_of,
    peek_all,
    receive,
    send,
    send_together,
    take,
    total,
)

pytestmark = pytest.mark.slow


def chain(bus: BusThread, length: int) -> list[str]:
    """Make queues that forward to one another, at homes that differ from hop to hop."""
    names = [named(bus, number) for number in range(length)]
    for name, target in reversed(list(zip(names, [*names[1:], None], strict=True))):
        bus.queue(name, forward_to=target)
    return names


def pair(bus: BusThread, distance: int = 1, **source: object) -> tuple[str, str]:
    """Make a queue and its target, in one partition or in two."""
    target = bus.queue(named(bus, distance))
    return bus.queue(named(bus, 0), forward_to=target, **source), target


@pytest.fixture(params=[0, 1], ids=["one partition", "two partitions"])
def forwarding(bus: BusThread, request: pytest.FixtureRequest) -> tuple[str, str]:
    """A queue and the queue it forwards to."""
    return pair(bus, request.param)


# --- arrival --------------------------------------------------------------------------------------


@pytest.mark.behaviour("S203")
def test_a_message_arrives_as_it_was_sent(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str]
) -> None:
    source, target = forwarding
    send(
        client, source, "m",
        message_id="id", session_id="s", subject="label", correlation_id="c", to="t",
        reply_to="r", content_type="text", application_properties={"n": 1, "text": "x"},
        time_to_live=timedelta(minutes=5),
    )  # fmt: skip
    (arrived,) = take(client, target, 1)
    assert str(arrived) == "m"
    assert (arrived.message_id, arrived.session_id, arrived.subject) == ("id", "s", "label")
    assert (arrived.correlation_id, arrived.to, arrived.reply_to) == ("c", "t", "r")
    assert arrived.content_type == "text"
    assert arrived.application_properties == {b"n": 1, b"text": b"x"}
    assert arrived.time_to_live == timedelta(minutes=5)
    assert arrived.delivery_count == 0
    assert arrived.dead_letter_source is None
    assert is_empty(bus, source)


def test_order_is_kept_on_the_way(client: ServiceBusClient, forwarding: tuple[str, str]) -> None:
    source, target = forwarding
    names = [f"m{number}" for number in range(60)]
    send_together(client, source, names[:50])
    send(client, source, *names[50:])
    messages = take(client, target, 60)
    assert bodies_of(messages) == names
    numbers = [each.sequence_number for each in messages]
    assert numbers == sorted(set(numbers))


@pytest.mark.behaviour("S204")
def test_enabling_forwarding_moves_the_backlog(bus: BusThread, client: ServiceBusClient) -> None:
    target, source = bus.queue(named(bus, 1)), bus.queue(named(bus, 0))
    old = [f"old{number}" for number in range(120)]
    send_together(client, source, old)
    bus.change(source, forward_to=target)
    send(client, source, "new")
    assert bodies_of(take(client, target, 121)) == [*old, "new"]
    assert is_empty(bus, source)


@pytest.mark.behaviour("S204")
def test_forwarding_switched_off_keeps_messages_again(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str]
) -> None:
    source, target = forwarding
    send(client, source, "gone")
    assert bodies_of(take(client, target, 1)) == ["gone"]
    bus.change(source)
    send(client, source, "stays")
    assert bodies_of(take(client, source, 1)) == ["stays"]
    assert is_empty(bus, target)


@pytest.mark.behaviour("S63")
def test_messages_locked_when_forwarding_begins_are_not_lost(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target, source = bus.queue(named(bus, 1)), bus.queue(named(bus, 0))
    send(client, source, "locked")
    with client.get_queue_receiver(source) as receiver:
        (held,) = receive(receiver, 1)
        bus.change(source, forward_to=target)
        bus.advance(61_000)
        with pytest.raises((MessageLockLostError, ServiceBusError)):
            receiver.complete_message(held)
    assert bodies_of(take(client, target, 1)) == ["locked"]


def test_a_forwarding_queue_has_no_receivers(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str]
) -> None:
    source, _ = forwarding
    with (
        pytest.raises(ServiceBusError, match="not-allowed"),
        client.get_queue_receiver(source) as receiver,
    ):
        receiver.receive_messages(1, max_wait_time=SOON_S)
    with client.get_queue_receiver(source, sub_queue=DEAD) as receiver:
        assert receiver.receive_messages(1, max_wait_time=SOON_S) == []


def test_scheduled_messages_go_on_when_they_are_due(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str]
) -> None:
    source, target = forwarding
    with client.get_queue_sender(source) as sender:
        due = bus.now() + timedelta(seconds=60)
        _, cancelled = sender.schedule_messages(
            [ServiceBusMessage("due"), ServiceBusMessage("never")], due
        )
        sender.cancel_scheduled_messages(cancelled)
    assert is_empty(bus, target)
    assert bus.counts(source).scheduled == 1
    bus.advance(61_000)
    assert bodies_of(take(client, target, 1)) == ["due"]
    assert is_empty(bus, target)


def test_expired_messages_are_not_forwarded(bus: BusThread, client: ServiceBusClient) -> None:
    target = bus.queue(named(bus, 1))
    source = bus.queue(named(bus, 0), dead_lettering_on_message_expiration=True)
    send(client, source, "short", time_to_live=timedelta(seconds=5))
    send(client, source, "long")
    bus.advance(6_000)
    bus.change(source, forward_to=target, dead_lettering_on_message_expiration=True)
    assert bodies_of(take(client, target, 1)) == ["long"]
    (dead,) = take(client, source, 1, sub_queue=DEAD)
    assert (str(dead), dead.dead_letter_reason) == ("short", "TTLExpiredException")


def test_time_to_live_goes_on_counting_at_the_target(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str]
) -> None:
    source, target = forwarding
    send(client, source, "short", time_to_live=timedelta(seconds=5))
    send(client, source, "long", time_to_live=timedelta(seconds=500))
    eventually(bus, lambda: bus.counts(target).active == 2)
    bus.advance(6_000)
    assert bodies_of(take(client, target, 1)) == ["long"]


# --- chains ---------------------------------------------------------------------------------------


@pytest.mark.behaviour("S286", "S287", "S263", "S292", "S293")
def test_four_hops_arrive_and_the_fifth_goes_to_the_transfer_dead_letter_queue(
    bus: BusThread, client: ServiceBusClient
) -> None:
    names = chain(bus, 6)
    send(client, names[1], "four hops")
    assert bodies_of(take(client, names[5], 1)) == ["four hops"]
    send(client, names[0], "five hops")
    (stuck,) = take(client, names[4], 1, sub_queue=TRANSFER_DEAD)
    assert str(stuck) == "five hops"
    assert stuck.dead_letter_reason == "MaxTransferHopCountExceeded"
    assert stuck.dead_letter_error_description is None
    assert is_empty(bus, names[4], sub_queue=TRANSFER_DEAD)
    for name in names:
        assert is_empty(bus, name)
        assert is_empty(bus, name, sub_queue=DEAD)


@pytest.mark.behaviour("S286", "S287")
def test_topics_and_subscriptions_are_hops_too(bus: BusThread, client: ServiceBusClient) -> None:
    last = bus.queue()
    topics = [bus.topic() for _ in range(3)]
    for topic, target in zip(topics, [*topics[1:], last], strict=True):
        bus.subscription(topic, forward_to=target)
    fourth = bus.queue(forward_to=topics[0])
    fifth = bus.queue(forward_to=fourth)
    send(client, fourth, "four hops")
    assert bodies_of(take(client, last, 1)) == ["four hops"]
    send(client, fifth, "five hops")
    (stuck,) = take(client, path_of(topics[2]), 1, sub_queue=TRANSFER_DEAD)
    assert stuck.dead_letter_reason == "MaxTransferHopCountExceeded"


def ends_in_transfer_dead_letters(client: ServiceBusClient, sent_to: str, source: str) -> bool:
    send(client, sent_to, "round")
    (stuck,) = take(client, source, 1, sub_queue=TRANSFER_DEAD)
    assert str(stuck) == "round"
    return bool(stuck.dead_letter_reason == "MaxTransferHopCountExceeded")


def test_a_queue_that_forwards_to_itself_ends_its_messages(
    bus: BusThread, client: ServiceBusClient
) -> None:
    queue = bus.queue()
    bus.change(queue, forward_to=queue.upper())
    circle = f"forwarding loop; messages in it will be dead-lettered: {queue} -> {queue}"
    assert bus.administration.warnings_of(queue) == (f"forwardTo: {circle}",)
    assert ends_in_transfer_dead_letters(client, queue, queue)
    bus.change(queue, forward_to=None)
    send(client, queue, "still works")
    assert bodies_of(take(client, queue, 1)) == ["still works"]
    assert bus.administration.warnings_of(queue) == ()


def test_a_subscription_that_forwards_to_its_topic_ends_its_messages(
    bus: BusThread, client: ServiceBusClient
) -> None:
    topic = bus.topic()
    bus.subscription(topic, forward_to=topic)
    path = path_of(topic)
    assert bus.administration.warnings_of(path)
    assert ends_in_transfer_dead_letters(client, topic, path)


def test_a_circle_of_several_ends_its_messages(bus: BusThread, client: ServiceBusClient) -> None:
    first, second, third = chain(bus, 3)
    bus.change(third, forward_to=first)
    (warning,) = bus.administration.warnings_of(third)
    assert warning.endswith(f"{third} -> {first} -> {second} -> {third}")
    assert ends_in_transfer_dead_letters(client, second, third)


def test_a_queue_with_sessions_forwards_them(bus: BusThread, client: ServiceBusClient) -> None:
    target = bus.queue(requires_session=True)
    source = bus.queue(requires_session=True)
    with client.get_queue_sender(source) as sender:
        sender.send_messages([ServiceBusMessage("was there", session_id=each) for each in "st"])
    bus.change(source, requires_session=True, forward_to=target)
    (warning,) = bus.administration.warnings_of(source)
    assert warning == "forwardTo: all messages are forwarded, so no session can be received"
    with client.get_queue_sender(source) as sender:
        sender.send_messages(ServiceBusMessage("came later", session_id="s"))
    for session, bodies in (("s", ["was there", "came later"]), ("t", ["was there"])):
        with client.get_queue_receiver(target, session_id=session) as receiver:
            found: list[str] = []
            while len(found) < len(bodies):
                found += [str(each) for each in receiver.receive_messages(2, max_wait_time=5)]
            assert found == bodies
    assert is_empty(bus, source)


def test_a_target_has_to_exist_when_forwarding_is_set(bus: BusThread) -> None:
    with pytest.raises(DirectoryRefusal):
        bus.queue(forward_to="nobody")
    with pytest.raises(DirectoryRefusal):
        bus.queue(forward_dead_lettered_messages_to="nobody")


# --- subscriptions --------------------------------------------------------------------------------


@pytest.mark.behaviour("S203", "S204")
def test_a_subscription_forwards_messages_selected_by_its_rules(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target, later, topic = bus.queue(named(bus, 1)), bus.queue(), bus.topic(named(bus, 0))
    rule = RuleProperties(name="n", sql_filter=SqlFilter(sql_expression="n = 1"))
    bus.subscription(topic, "at-once", [rule], forward_to=target)
    bus.subscription(topic, "later")
    send(client, topic, "no", application_properties={"n": 2})
    send(client, topic, "yes", application_properties={"n": 1})
    (arrived,) = take(client, target, 1)
    assert str(arrived) == "yes"
    assert arrived.enqueued_sequence_number == 2
    assert arrived.sequence_number == 1
    assert is_empty(bus, target)
    bus.subscription(topic, "later", forward_to=later)
    assert bodies_of(take(client, later, 2)) == ["no", "yes"]


@pytest.mark.behaviour("S292", "S293", "S289")
def test_a_subscription_has_a_transfer_dead_letter_queue(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target, topic = bus.queue(), bus.topic()
    bus.subscription(topic, forward_to=target)
    bus.subscription(topic, "other")
    bus.delete(target)
    send(client, topic, "m")
    (stuck,) = take(client, path_of(topic), 1, sub_queue=TRANSFER_DEAD)
    assert str(stuck) == "m"
    assert stuck.dead_letter_reason
    assert is_empty(bus, path_of(topic), sub_queue=TRANSFER_DEAD)
    assert is_empty(bus, path_of(topic), sub_queue=DEAD)
    assert bodies_of(take(client, path_of(topic, "other"), 1)) == ["m"]


def test_a_queue_forwards_to_a_topic(bus: BusThread, client: ServiceBusClient) -> None:
    topic = bus.topic(named(bus, 1))
    bus.subscription(topic, "one")
    bus.subscription(topic, "two")
    source = bus.queue(named(bus, 0), forward_to=topic)
    send(client, source, "a", "b")
    for name in ("one", "two"):
        assert bodies_of(take(client, path_of(topic, name), 2)) == ["a", "b"]


# --- targets that do not take it ------------------------------------------------------------------


@pytest.mark.behaviour("S289", "S292", "S293")
def test_a_deleted_target(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str]
) -> None:
    source, target = forwarding
    bus.delete(target)
    send(client, source, "lost", "later")
    first, second = take(client, source, 2, sub_queue=TRANSFER_DEAD)
    assert bodies_of([first, second]) == ["lost", "later"]
    assert first.dead_letter_reason == second.dead_letter_reason == "MessagingEntityNotFound"
    assert first.dead_letter_error_description
    assert is_empty(bus, source, sub_queue=DEAD)
    bus.queue(target)
    send(client, source, "found again")
    assert bodies_of(take(client, target, 1)) == ["found again"]


@pytest.mark.behaviour("S288", "S292", "S293")
@pytest.mark.parametrize("status", ["Disabled", "SendDisabled"])
def test_a_disabled_target(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str], status: str
) -> None:
    source, target = forwarding
    bus.change(target, status=status)
    send(client, source, "refused")
    (stuck,) = take(client, source, 1, sub_queue=TRANSFER_DEAD)
    assert str(stuck) == "refused"
    assert "Disabled" in stuck.dead_letter_reason
    assert is_empty(bus, source, sub_queue=DEAD)
    bus.change(target)
    assert is_empty(bus, target)
    send(client, source, "taken")
    assert bodies_of(take(client, target, 1)) == ["taken"]


def test_a_receive_disabled_target_accepts_forwards(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str]
) -> None:
    source, target = forwarding
    bus.change(target, status="ReceiveDisabled")
    send(client, source, "taken")
    eventually(bus, lambda: bus.counts(target).active == 1)
    assert bus.counts(source).transfer_dead_letter == 0


def test_a_disabled_queue_does_not_forward_refused_messages(
    bus: BusThread, client: ServiceBusClient, forwarding: tuple[str, str]
) -> None:
    source, target = forwarding
    bus.change(source, forward_to=target, status="SendDisabled")
    with pytest.raises(ServiceBusError):
        send(client, source, "refused")
    assert is_empty(bus, target)


def shrink(bus: BusThread, name: str) -> None:
    """Reduce the quota of a partitioned entity so that every loaded part is full."""
    entry = bus.administration.find(name)
    assert entry is not None

    async def set_sizes() -> None:
        for host in bus._hosts:
            entity = None if host._state is None else host._state.entities.get(entry.entity_no)
            if entity is not None:
                entity.max_size_bytes = 1

    bus.run(set_sizes())


@pytest.mark.behaviour("S290", "S292")
def test_a_full_target(bus: BusThread, client: ServiceBusClient) -> None:
    target = bus.queue(enable_partitioning=True)
    source = bus.queue(forward_to=target)
    send(client, source, *"0123", partition_key="k")
    eventually(bus, lambda: total(bus, target).active == 4)
    shrink(bus, target)
    send(client, source, *"4567", partition_key="k")
    eventually(bus, lambda: total(bus, source).transfer_dead_letter == 4)
    stuck = peek_all(client, source, sub_queue=TRANSFER_DEAD)
    there = peek_all(client, target)
    assert bodies_of([*there, *stuck]) == list("01234567")
    assert {each.dead_letter_reason for each in stuck} == {"QuotaExceeded"}
    assert is_empty(bus, source, sub_queue=DEAD)


def test_a_message_without_session_does_not_enter_a_session_queue(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target = bus.queue(named(bus, 1), requires_session=True)
    source = bus.queue(named(bus, 0), forward_to=target)
    send(client, source, "no session")
    send(client, source, "a", "b", session_id="s")
    (stuck,) = take(client, source, 1, sub_queue=TRANSFER_DEAD)
    assert str(stuck) == "no session"
    assert stuck.dead_letter_reason
    assert bodies_of(take(client, target, 2, session_id="s")) == ["a", "b"]


def test_the_transfer_dead_letter_queue_is_a_queue(
    bus: BusThread, client: ServiceBusClient
) -> None:
    source, target = pair(bus, lock_duration_ms=30_000, max_delivery_count=1)
    bus.delete(target)
    send(client, source, "stuck")
    with client.get_queue_receiver(source, sub_queue=TRANSFER_DEAD) as receiver:
        (stuck,) = receive(receiver, 1)
        receiver.abandon_message(stuck)
        (stuck,) = receive(receiver, 1)
        assert stuck.delivery_count == 0  # deliveries there are not counted
        bus.advance(31_000)
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(stuck)
        (stuck,) = receive(receiver, 1)
        receiver.renew_message_lock(stuck)
        receiver.complete_message(stuck)
    assert bus.counts(source).transfer_dead_letter == 0
    assert bus.counts(source).dead_letter == 0


# --- dead letters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [0, 1])
def test_dead_letters_are_forwarded_with_their_source(
    bus: BusThread, client: ServiceBusClient, distance: int
) -> None:
    target = bus.queue(named(bus, distance))
    source = bus.queue(
        named(bus, 0), max_delivery_count=1, forward_dead_lettered_messages_to=target
    )
    send(client, source, "judged")
    dead_letter(client, source, 1, "why", "because")
    send(client, source, "abandoned")
    with client.get_queue_receiver(source) as receiver:
        receiver.abandon_message(receive(receiver, 1)[0])
    judged, abandoned = take(client, target, 2)
    assert (judged.dead_letter_reason, judged.dead_letter_error_description) == ("why", "because")
    assert abandoned.dead_letter_reason == "MaxDeliveryCountExceeded"
    assert [judged.dead_letter_source, abandoned.dead_letter_source] == [source, source]
    assert bodies_of([judged, abandoned]) == ["judged", "abandoned"]
    assert is_empty(bus, source, sub_queue=DEAD)


def test_expired_messages_are_forwarded_as_dead_letters(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target = bus.queue()
    source = bus.queue(
        forward_dead_lettered_messages_to=target, dead_lettering_on_message_expiration=True
    )
    send(client, source, "late", time_to_live=timedelta(seconds=5))
    bus.advance(6_000)
    with client.get_queue_receiver(source) as receiver:
        assert receiver.receive_messages(1, max_wait_time=SOON_S) == []
    (late,) = take(client, target, 1)
    assert (late.dead_letter_reason, late.dead_letter_source) == ("TTLExpiredException", source)


def test_dead_letters_that_were_there_before_are_forwarded_too(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target, source = bus.queue(named(bus, 1)), bus.queue(named(bus, 0))
    send(client, source, "a", "b")
    dead_letter(client, source, 2, "why")
    bus.change(source, forward_dead_lettered_messages_to=target)
    arrived = take(client, target, 2)
    assert bodies_of(arrived) == ["a", "b"]
    assert {each.dead_letter_source for each in arrived} == {source}


def test_dead_letters_of_subscriptions_are_forwarded(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target, topic = bus.queue(), bus.topic()
    failing = RuleProperties(name="fails", sql_filter=SqlFilter(sql_expression="1 / n = 1"))
    bus.subscription(topic, "judge", forward_dead_lettered_messages_to=target)
    bus.subscription(topic, "broken", [failing], forward_dead_lettered_messages_to=target)
    send(client, topic, "m", application_properties={"n": 0})
    dead_letter(client, path_of(topic, "judge"), 1, "why")
    arrived = {each.dead_letter_source: each for each in take(client, target, 2)}
    assert set(arrived) == {path_of(topic, "judge"), path_of(topic, "broken")}
    assert arrived[path_of(topic, "judge")].dead_letter_reason == "why"
    assert bodies_of(list(arrived.values())) == ["m", "m"]


def test_dead_letters_that_cannot_be_forwarded_are_kept(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target = bus.queue()
    source = bus.queue(forward_dead_lettered_messages_to=target)
    bus.delete(target)
    send(client, source, "m")
    dead_letter(client, source, 1, "why")
    eventually(
        bus,
        lambda: bus.counts(source).transfer_dead_letter + bus.counts(source).dead_letter == 1,
    )
    (stuck,) = take(client, source, 1, sub_queue=TRANSFER_DEAD)
    assert (str(stuck), stuck.dead_letter_reason) == ("m", "why")


def test_messages_stuck_in_transfer_are_not_forwarded_as_dead_letters(
    bus: BusThread, client: ServiceBusClient
) -> None:
    dead, target = bus.queue(), bus.queue()
    source = bus.queue(forward_to=target, forward_dead_lettered_messages_to=dead)
    bus.delete(target)
    send(client, source, "stuck")
    assert bodies_of(take(client, source, 1, sub_queue=TRANSFER_DEAD)) == ["stuck"]
    assert is_empty(bus, dead)


@pytest.mark.behaviour("S263")
def test_a_dead_letter_at_the_hop_limit_keeps_its_own_reason(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target = bus.queue()
    names = [bus.queue(forward_dead_lettered_messages_to=target)]
    for _ in range(4):
        names.append(bus.queue(forward_to=names[-1]))
    send(client, names[-1], "tired")
    dead_letter(client, names[0], 1, "why")
    (stuck,) = take(client, names[0], 1, sub_queue=TRANSFER_DEAD)
    assert (str(stuck), stuck.dead_letter_reason) == ("tired", "why")
    assert is_empty(bus, target)


# --- partitioned entities -------------------------------------------------------------------------


@pytest.mark.behaviour("S200", "S201", "S202", "S205", "S238")
@pytest.mark.parametrize(
    ("is_source_spread", "is_target_spread"), [(True, False), (False, True), (True, True)]
)
def test_to_and_from_partitioned_queues(
    bus: BusThread, client: ServiceBusClient, is_source_spread: bool, is_target_spread: bool
) -> None:
    target = bus.queue(enable_partitioning=is_target_spread)
    source = bus.queue(enable_partitioning=is_source_spread, forward_to=target)
    keys = [f"key{number}" for number in range(6)]
    for key in keys:
        send_together(client, source, [f"{key}-{number}" for number in range(3)], partition_key=key)
        send_together(client, source, [f"{key}-s{number}" for number in range(3)], session_id=key)
    send(client, source, *(f"no key {number}" for number in range(20)))
    arrived = take(client, target, 56)
    assert len({str(each) for each in arrived}) == 56
    for key in keys:
        for stem in ("", "s"):
            mine = [each for each in arrived if str(each).startswith(f"{key}-{stem}")]
            mine = [each for each in mine if (each.session_id is None) == (stem == "")]
            assert bodies_of(mine) == [f"{key}-{stem}{number}" for number in range(3)]
            places = {each.sequence_number >> 48 for each in mine}
            where = partition_of_key(key.encode(), len(bus._hosts)) if is_target_spread else 0
            assert places == {where}
    assert total(bus, source).active == 0
    assert total(bus, target).active == 0


@pytest.mark.behaviour("S205", "S238")
def test_a_message_id_places_forwarded_messages_where_duplicates_are_detected(
    bus: BusThread, client: ServiceBusClient
) -> None:
    target = bus.queue(enable_partitioning=True, requires_duplicate_detection=True)
    sources = [bus.queue(named(bus, number), forward_to=target) for number in range(2)]
    names = [f"m{number}" for number in range(12)]
    for source in sources:
        send_together(client, source, names)
    eventually(bus, lambda: all(total(bus, source).active == 0 for source in sources))
    arrived = take(client, target, 12)
    assert sorted(bodies_of(arrived)) == sorted(names)
    for each in arrived:
        assert each.sequence_number >> 48 == partition_of_key(str(each).encode(), len(bus._hosts))
    assert is_empty(bus, target)


# --- exactly once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_target_spread", [False, True])
def test_every_message_arrives_once_while_partitions_fail(
    bus: BusThread, client: ServiceBusClient, is_target_spread: bool
) -> None:
    target = bus.queue(named(bus, 1), enable_partitioning=is_target_spread)
    middle = bus.queue(named(bus, 1), forward_to=target)
    source = bus.queue(named(bus, 0), forward_to=middle)
    accepted: list[str] = []
    tried: list[str] = []

    def send_many() -> None:
        with bus.client() as mine, mine.get_queue_sender(source) as sender:
            for number in range(60):
                burst = [f"{number}-{each}" for each in range(5)]
                tried.extend(burst)
                try:
                    sender.send_messages([ServiceBusMessage(body) for body in burst])
                except ServiceBusError:
                    continue
                accepted.extend(burst)

    sending = threading.Thread(target=send_many)
    sending.start()
    for victim in (source, target, source, target):  # more would be paused longer each time
        sending.join(0.1)
        bus.counts(victim)  # it is loaded again
        bus.reload(victim)
    sending.join(LONG_S * 3)
    assert not sending.is_alive()
    eventually(bus, lambda: total(bus, target).active >= len(accepted))
    send(client, source, "the last")
    eventually(bus, lambda: any(str(each) == "the last" for each in peek_all(client, target)))
    found = Counter(bodies_of(peek_all(client, target)))
    assert set(found.values()) == {1}
    assert set(accepted) <= set(found) <= {*tried, "the last"}
    assert len(accepted) > 100
    for name in (source, middle):
        counts = bus.counts(name)
        assert (counts.active, counts.dead_letter, counts.transfer_dead_letter) == (0, 0, 0)


def test_messages_in_the_outbox_survive_a_restart(bus: BusThread, client: ServiceBusClient) -> None:
    source, target = pair(bus)
    names = [f"m{number}" for number in range(100)]
    send_together(client, source, names)
    bus.reload(source)
    bus.reload(target)
    assert bodies_of(take(client, target, 100)) == names
    bus.reload(source)
    bus.reload(target)
    assert is_empty(bus, target)
    assert is_empty(bus, source)


# --- send-via -------------------------------------------------------------------------------------


@pytest.mark.behaviour("S291", "S292")
@pytest.mark.parametrize("how", ["deleted", "disabled"])
def test_send_via_to_a_target_that_does_not_take_it(
    bus: BusThread, client: ServiceBusClient, queue: str, how: str
) -> None:
    target = bus.queue()
    with TransactionClient(bus) as raw:
        raw.write(
            frame(
                ATTACH, "via", Uint(5), False, Ubyte(2), Ubyte(0), described(0x28, "here"),
                described(0x29, queue), None, None, Uint(0), None, None, None, {VIA: target},
            )
        )  # fmt: skip
        assert raw.expect(ATTACH).fields[6] is not None
        transaction = raw.declare()
        assert accepts(raw.send_in(transaction, message(b"stuck"), handle=5), transaction)
        if how == "deleted":
            bus.delete(target)
        else:
            bus.change(target, status="Disabled")
        assert int(raw.discharge(transaction).descriptor) == ACCEPTED
    (stuck,) = take(client, queue, 1, sub_queue=TRANSFER_DEAD)
    assert str(stuck) == "stuck"
    assert stuck.dead_letter_reason
    assert is_empty(bus, queue)
    assert is_empty(bus, queue, sub_queue=DEAD)


def test_long_chains_of_senders_do_not_wait_for_a_slow_target(
    bus: BusThread, client: ServiceBusClient
) -> None:
    """A deleted target does not delay messages to others."""
    gone, alive = bus.queue(named(bus, 1)), bus.queue(named(bus, 1))
    to_gone = bus.queue(named(bus, 0), forward_to=gone)
    to_alive = bus.queue(named(bus, 0), forward_to=alive)
    bus.delete(gone)
    send_together(client, to_gone, [f"stuck{number}" for number in range(200)])
    send(client, to_alive, "through")
    with client.get_queue_receiver(alive) as receiver:
        assert bodies_of(receiver.receive_messages(1, max_wait_time=LONG_S)) == ["through"]
    eventually(bus, lambda: bus.counts(to_gone).transfer_dead_letter == 200)
