"""Messages selected by number: deleted or sent again, and nothing else changes."""

from __future__ import annotations

import pytest

from postbus.contract.entities import (
    DAY_MS,
    LIMITS,
    EntityStatus,
    QueueProperties,
    Sku,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    DeferredReceived,
    DeleteBySequence,
    Disposition,
    Enqueue,
    MessageEdit,
    MessagesHandled,
    MessageState,
    Peek,
    Peeked,
    ReceiveDeferred,
    Refusal,
    Refused,
    Reply,
    ResendBySequence,
    SetDemand,
    Settle,
    Settled,
    SubQueue,
)
from postbus.entity.message_operations import MAX_SEQUENCE_NUMBERS
from postbus.entity.outcomes import Found, Needs, Outcome, Settling
from postbus.entity.queues import paging
from postbus.entity.queues.plain_messages import PlainMessages
from postbus.entity.topics.topic_state import TopicState
from postbus.message.codec import Symbol, Timestamp, encode_list, encode_value
from postbus.message.envelope import Envelope
from postbus.message.fields import RESENDS
from tests.entity.partition_rig import (
    ACTIVE,
    DLQ,
    PEEK_LOCK,
    QUEUE,
    START_MS,
    TOPIC,
    Rig,
    message,
    name_of,
    properties_of,
)
from tests.entity.topics.topic_rig import ONE, TWO, names, publish, topic_rig
from tests.entity.transfer.forward_rig import Bus

TRANSFER = SubQueue.TRANSFER_DEAD_LETTER
OTHER = 8
BUDGETS = pytest.mark.parametrize("budget_bytes", [1 << 30, 700])


def kill(rig: Rig, *sent: str | Envelope, entity_no: int = QUEUE, to: int = QUEUE) -> list[int]:
    """Send and dead-letter messages; return their numbers."""
    to = entity_no if to == QUEUE else to
    rig.send(*sent, entity_no=to)
    name = f"killer-{entity_no}"
    taken = rig.receive(name, len(sent), entity_no=entity_no)
    tokens = [each.lock_token for each in taken]
    settle = Settle(entity_no, ACTIVE, tokens, Disposition.DEAD_LETTER, "poison", "no price")
    assert rig.apply(settle) == Settled()
    rig.detach(name)
    return [each.sequence for each in taken]


def delete(
    rig: Rig, *numbers: int, sub_queue: SubQueue = ACTIVE, entity_no: int = QUEUE
) -> MessagesHandled:
    reply = rig.apply(DeleteBySequence(entity_no, sub_queue, list(numbers)))
    assert isinstance(reply, MessagesHandled), reply
    return reply


def asked_to_resend(
    rig: Rig,
    *numbers: int,
    to: int | str = QUEUE,
    edit: MessageEdit | None = None,
    sub_queue: SubQueue = DLQ,
    entity_no: int = QUEUE,
) -> Reply:
    target_no, target = (to, None) if isinstance(to, int) else (None, to)
    command = ResendBySequence(entity_no, sub_queue, list(numbers), target_no, target, edit)
    reply = rig.apply(command)
    rig.tick_now()
    return reply


def resend(
    rig: Rig,
    *numbers: int,
    to: int | str = QUEUE,
    edit: MessageEdit | None = None,
    sub_queue: SubQueue = DLQ,
    entity_no: int = QUEUE,
) -> MessagesHandled:
    reply = asked_to_resend(
        rig, *numbers, to=to, edit=edit, sub_queue=sub_queue, entity_no=entity_no
    )
    assert isinstance(reply, MessagesHandled), reply
    return reply


def refusals(handled: MessagesHandled) -> dict[int, Refusal]:
    return {number: refused.refusal for number, refused in handled.refused.items()}


# --- sent again -----------------------------------------------------------------------------------


@BUDGETS
@pytest.mark.parametrize("keeps", [False, True])
def test_dead_letters_by_number_are_sent_again_as_new_messages(
    budget_bytes: int, keeps: bool
) -> None:
    properties = QueueProperties(history_retention_ms=DAY_MS if keeps else None)
    rig = Rig(properties, budget_bytes=budget_bytes)
    numbers = kill(rig, "a", "b", "c", "d")
    rig.advance(1_000)
    handled = resend(rig, numbers[2], numbers[0])
    assert handled == MessagesHandled({numbers[2]: 5, numbers[0]: 6}, {}, [])
    assert rig.peek_names(DLQ) == ["b", "d"]
    found = rig.peek()
    assert [name_of(each.envelope) for each in found] == ["c", "a"]
    assert [each.sequence for each in found] == [5, 6]
    assert [each.delivery_count for each in found] == [0, 0]
    assert [each.enqueued_ms for each in found] == [rig.now_ms] * 2
    assert [properties_of(each.envelope) for each in found] == [{}, {}]
    resent = [how for _, how, _ in rig.tables.settled.values() if how is Settling.RESENT]
    assert len(resent) == (2 if keeps else 0)
    rig.crash()
    assert rig.peek_names(DLQ) == ["b", "d"]
    assert [name_of(each.envelope) for each in rig.receive(count=5)] == ["c", "a"]


def test_a_dead_letter_resent_twice_arrives_once() -> None:
    rig = Rig()
    (number,) = kill(rig, "a")
    assert resend(rig, number, number).done == {number: 2}
    again = resend(rig, number)
    assert again.done == {}
    assert refusals(again) == {number: Refusal.MESSAGE_NOT_FOUND}
    assert rig.peek_names() == ["a"]


def test_a_message_goes_to_a_receiver_that_waits_and_may_die_again() -> None:
    rig = Rig(QueueProperties(max_delivery_count=1))
    (number,) = kill(rig, "a")
    rig.demand("A", 1)
    resend(rig, number)
    (delivery,) = rig.inbox("A")
    assert delivery.delivery_count == 0
    rig.settle(Disposition.ABANDON, delivery)
    (dead,) = rig.peek(sub_queue=DLQ)
    assert dead.sequence == delivery.sequence
    assert properties_of(dead.envelope)["DeadLetterReason"] == "MaxDeliveryCountExceeded"


def test_a_resent_message_has_new_times_and_no_dead_letter_reason() -> None:
    rig = Rig(QueueProperties(dead_lettering_on_message_expiration=True))
    fields = [encode_value("id")] + [b"\x40"] * 7
    created = rig.now_ms
    fields += [encode_value(Timestamp(created + 5_000)), encode_value(Timestamp(created))]
    sent = message("a", ttl_ms=5_000, scheduled_ms=START_MS + 1_000)
    sent.properties = b"\x00\x53\x73" + encode_list(fields)
    sent.annotations = encode_value(Symbol("x-opt-scheduled-enqueue-time")) + encode_value(
        Timestamp(START_MS + 1_000)
    )
    sent.annotation_count = 1
    sent.hop_count, sent.dead_letter_source, sent.origin_sequence = 3, b"elsewhere", 77
    rig.send(sent)
    rig.advance(7_000)
    assert rig.receive() == []
    (dead,) = rig.peek(sub_queue=DLQ)
    rig.advance(60_000)
    resend(rig, dead.sequence)
    (found,) = rig.peek()
    envelope = found.envelope
    assert (envelope.hop_count, envelope.dead_letter_source) == (0, None)
    assert (envelope.origin_sequence, envelope.scheduled_ms) == (None, None)
    assert envelope.annotations == encode_value(Symbol(RESENDS)) + encode_value(1)
    assert envelope.annotation_count == 1
    assert envelope.ttl_ms == 5_000
    assert encode_value(Timestamp(created + 5_000)) not in envelope.properties
    assert encode_value(Timestamp(created)) in envelope.properties
    assert properties_of(envelope) == {}
    rig.advance(4_999)
    assert rig.peek_names() == ["a"]
    (delivery,) = rig.receive()
    assert delivery.ttl_ms == 5_000


def test_an_edit_changes_the_named_properties_only() -> None:
    rig = Rig()
    sent = message("a", session="s")
    sent.message_id = encode_value("a")
    sent.properties = b"\x00\x53\x73" + encode_list(
        [encode_value("a")] + [b"\x40"] * 2 + [encode_value("old")]
    )
    (number,) = kill(rig, sent)
    edit = MessageEdit(
        body=b"repaired",
        fields={"subject": "new", "session_id": "t", "message_id": "b"},
        properties={"fixed": True},
        removed=("absent",),
    )
    resend(rig, number, edit=edit)
    (found,) = rig.peek()
    envelope = found.envelope
    assert envelope.body == b"\x00\x53\x75\xa0\x08repaired"
    assert properties_of(envelope) == {"fixed": True}
    assert (envelope.message_id, envelope.session_id) == (encode_value("b"), b"t")
    assert encode_value("new") in envelope.properties
    assert rig.state.counts(QUEUE).size_bytes == envelope.size_bytes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("edit", "refusal"),
    [
        (MessageEdit(properties={"p": "x" * 70_000}), Refusal.PROPERTIES_TOO_LARGE),
        (MessageEdit(properties={"p": [1]}), Refusal.ARGUMENT_OUT_OF_RANGE),
        (MessageEdit(fields={"session_id": "s" * 200}), Refusal.ARGUMENT_OUT_OF_RANGE),
        (MessageEdit(body=b"x" * 300_000), Refusal.MESSAGE_TOO_LARGE),
        (MessageEdit(fields={"session_id": "s", "partition_key": "p"}), None),
    ],
)
def test_an_invalid_edit_is_refused_and_the_message_stays(
    edit: MessageEdit, refusal: Refusal | None
) -> None:
    rig = Rig()
    (number,) = kill(rig, "a")
    handled = resend(rig, number, edit=edit)
    assert handled.done == {}
    assert refusals(handled) == {number: refusal or Refusal.ARGUMENT_OUT_OF_RANGE}
    assert rig.peek_names(DLQ) == ["a"]


def test_properties_that_cannot_be_read_are_refused() -> None:
    rig = Rig()
    (number,) = kill(rig, "a")
    (row_key,) = [key for key, (n, _) in rig.tables.kept.items() if n == number]
    rig.tables.rows[row_key][1].application_properties = b"\x00\x53\x74\xc1\x02\x03\x40"
    assert refusals(resend(rig, number)) == {number: Refusal.MESSAGE_MALFORMED}


def test_the_target_checks_messages_before_they_leave() -> None:
    rig = Rig()
    numbers = kill(rig, "a", message("s", session="s"))
    rig.put(QueueProperties(requires_session=True), OTHER)
    handled = resend(rig, *numbers, to=OTHER)
    assert handled.done == {numbers[1]: 1}
    assert refusals(handled) == {numbers[0]: Refusal.SESSION_REQUIRED}
    rig.put(QueueProperties(status=EntityStatus.SEND_DISABLED), OTHER)
    reply = asked_to_resend(rig, numbers[0], to=OTHER)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.SEND_DISABLED
    reply = asked_to_resend(rig, numbers[0], to=99)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.ENTITY_NOT_FOUND
    assert rig.peek_names(DLQ) == ["a"]


def test_a_full_target_accepts_messages_that_fit_and_a_full_queue_its_own() -> None:
    rig = Rig()
    megabyte = 1 << 20
    numbers = kill(rig, *(message(str(n), size_bytes=250_000) for n in range(5)))
    rig.put(QueueProperties(max_size_in_megabytes=1024), OTHER)
    rig.state.entities[OTHER].max_size_bytes = megabyte
    handled = resend(rig, *numbers, to=OTHER)
    assert list(handled.done) == numbers[:4]
    assert refusals(handled) == {numbers[4]: Refusal.QUOTA_EXCEEDED}
    entity = rig.state.entities[QUEUE]
    entity.max_size_bytes = entity.size_bytes
    larger = MessageEdit(properties={"p": "x" * 1_000})
    assert refusals(resend(rig, numbers[4], edit=larger)) == {numbers[4]: Refusal.QUOTA_EXCEEDED}
    assert resend(rig, numbers[4]).refused == {}


def test_a_resent_message_is_no_duplicate_of_itself() -> None:
    detecting = QueueProperties(requires_duplicate_detection=True)
    rig = Rig(detecting)
    sent = message("a")
    sent.message_id = encode_value("a")
    (number,) = kill(rig, sent)
    assert resend(rig, number).refused == {}
    assert rig.peek_names() == ["a"]
    rig.send(sent)  # while those of others are
    assert rig.peek_names() == ["a"]


def test_only_dead_letters_are_sent_again_and_not_too_many() -> None:
    rig = Rig()
    (number,) = rig.send("a")
    reply = asked_to_resend(rig, number, sub_queue=ACTIVE)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.NOT_ALLOWED
    for command in (
        ResendBySequence(QUEUE, DLQ, list(range(MAX_SEQUENCE_NUMBERS + 1)), QUEUE),
        DeleteBySequence(QUEUE, DLQ, list(range(MAX_SEQUENCE_NUMBERS + 1))),
    ):
        reply = rig.apply(command)
        assert isinstance(reply, Refused)
        assert reply.refusal is Refusal.ARGUMENT_OUT_OF_RANGE


def test_large_messages_are_handled_in_parts() -> None:
    rig = Rig(budget_bytes=1 << 20)
    numbers = kill(rig, *(message(str(n), size_bytes=200_000) for n in range(200)))
    handled = resend(rig, *numbers)
    assert 100 < len(handled.done) < 200
    assert [*handled.done, *handled.left] == numbers
    assert resend(rig, *handled.left).left == []
    counts = rig.state.counts(QUEUE)
    assert counts is not None
    assert (counts.active, counts.dead_letter) == (200, 0)


def test_messages_enlarged_by_an_edit_are_resent_in_parts() -> None:
    rig = Rig(QueueProperties(max_message_size_in_kilobytes=102_400), limits=LIMITS[Sku.PREMIUM])
    numbers = kill(rig, *(f"m{n}" for n in range(20)))
    handled = resend(rig, *numbers, edit=MessageEdit(body=bytes(3 << 20)))
    assert handled.left == numbers[10:]
    assert list(handled.done) == numbers[:10]
    assert resend(rig, *handled.left).left == []


@BUDGETS
def test_locked_and_deferred_dead_letters(budget_bytes: int) -> None:
    rig = Rig(budget_bytes=budget_bytes)
    numbers = kill(rig, "a", "b", "c", "d")
    first, second, third, _ = rig.receive(count=4, sub_queue=DLQ)
    rig.settle(Disposition.DEFER, second, sub_queue=DLQ)
    rig.settle(Disposition.ABANDON, third, sub_queue=DLQ)
    handled = resend(rig, *numbers)
    assert list(handled.done) == [second.sequence, third.sequence]
    assert set(refusals(handled).values()) == {Refusal.MESSAGE_LOCKED}
    assert rig.peek_names() == ["b", "c"]
    assert rig.peek_names(DLQ) == ["a", "d"]
    rig.settle(Disposition.COMPLETE, first, sub_queue=DLQ)
    rig.advance(60_000)
    assert [name_of(each.envelope) for each in rig.receive(count=4, sub_queue=DLQ)] == ["d"]


# --- topics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["itself", "topic", "queue"])
def test_dead_letters_of_a_subscription(to: str) -> None:
    rig = topic_rig()
    (number,) = kill(rig, "a", entity_no=ONE, to=TOPIC)
    assert names(rig, TWO) == ["a"]
    place = {"itself": ONE, "topic": TOPIC, "queue": QUEUE}[to]
    handled = resend(rig, number, to=place, entity_no=ONE)
    assert list(handled.done) == [number]
    assert names(rig, ONE, DLQ) == []
    assert names(rig, ONE) == ([] if to == "queue" else ["a"])
    assert names(rig, TWO) == (["a", "a"] if to == "topic" else ["a"])
    assert rig.peek_names() == (["a"] if to == "queue" else [])
    (found,) = rig.peek(entity_no=place if to != "topic" else ONE)
    origin = {"itself": 1, "topic": 2, "queue": None}[to]
    assert found.envelope.origin_sequence == origin


def test_dead_letters_go_to_no_other_subscription() -> None:
    rig = topic_rig()
    (number,) = kill(rig, "a", entity_no=ONE, to=TOPIC)
    reply = asked_to_resend(rig, number, to=TWO, entity_no=ONE)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.NOT_ALLOWED


def test_a_topic_with_duplicate_detection_publishes_resent_messages() -> None:
    rig = topic_rig(topic=TopicProperties(requires_duplicate_detection=True))
    sent = message("a")
    sent.message_id = encode_value("a")
    (number,) = kill(rig, sent, entity_no=ONE, to=TOPIC)
    assert resend(rig, number, to=TOPIC, entity_no=ONE).refused == {}
    assert names(rig, ONE) == ["a"]
    assert names(rig, TWO) == ["a", "a"]


def test_a_subscription_with_sessions_and_its_limits() -> None:
    rig = topic_rig(1)
    rig.put_subscription(TWO, SubscriptionProperties(requires_session=True))
    publish(rig, "none", message("some", session="s"))
    (number,) = [each.sequence for each in rig.peek(sub_queue=DLQ, entity_no=TWO)]
    handled = resend(rig, number, to=TWO, entity_no=TWO)
    assert refusals(handled) == {number: Refusal.SESSION_REQUIRED}
    edit = MessageEdit(fields={"session_id": "s"})
    assert resend(rig, number, to=TWO, entity_no=TWO, edit=edit).refused == {}
    assert names(rig, TWO) == ["some", "none"]
    assert names(rig, TWO, DLQ) == []


def test_a_full_topic_accepts_resent_messages_that_do_not_grow() -> None:
    rig = topic_rig()
    (number,) = kill(rig, "a", entity_no=ONE, to=TOPIC)
    topic = rig.state.entities[TOPIC]
    assert isinstance(topic, TopicState)
    topic.max_size_bytes = topic.total_bytes
    topic._room_checks = 0
    larger = MessageEdit(properties={"p": "x" * 1_000})
    handled = resend(rig, number, to=ONE, entity_no=ONE, edit=larger)
    assert refusals(handled) == {number: Refusal.QUOTA_EXCEEDED}
    assert resend(rig, number, to=ONE, entity_no=ONE).refused == {}


def test_shared_bodies_are_counted_right() -> None:
    rig = topic_rig(3, budget_bytes=1 << 20)

    def large() -> Envelope:
        sent = message("a", size_bytes=20_100)
        sent.body = b"x" * 20_000
        return sent

    numbers = kill(rig, large(), entity_no=ONE, to=TOPIC)
    resend(rig, *numbers, to=ONE, entity_no=ONE)
    (found,) = rig.peek(entity_no=ONE)
    assert found.envelope.body == large().body
    assert found.envelope.shared is None
    publish(rig, large())
    (_, delivery) = rig.receive("R", 2, entity_no=ONE)
    rig.apply(Settle(ONE, ACTIVE, [delivery.lock_token], Disposition.ABANDON))
    assert delete(rig, delivery.sequence, entity_no=ONE).refused == {}


# --- over the outbox ------------------------------------------------------------------------------


@pytest.mark.parametrize("crashed", [None, 1, 2])
def test_to_another_partition_exactly_once_and_no_duplicate(crashed: int | None) -> None:
    rigs = {number: Rig(seed=number) for number in (1, 2)}
    bus = Bus(rigs, {"queue-8": (2, OTHER)})
    rigs[2].put(QueueProperties(requires_duplicate_detection=True), OTHER)
    sent = message("a")
    sent.message_id = encode_value("a")
    rigs[2].send(sent, entity_no=OTHER)
    numbers = kill(rigs[1], sent, "b")
    assert resend(rigs[1], *numbers, to="queue-8").done == dict.fromkeys(numbers, 0)
    assert rigs[1].state.counts(QUEUE).dead_letter == 0  # type: ignore[union-attr]
    if crashed is not None:
        bus.start()
        for hop in bus.hops:
            bus.send(hop)
        bus.crash(crashed)
    bus.settle()
    assert rigs[2].peek_names(entity_no=OTHER) == ["a", "a", "b"]
    assert [each.envelope.hop_count for each in rigs[2].peek(entity_no=OTHER)] == [0, 0, 0]
    assert rigs[1].peek_names() == rigs[1].peek_names(DLQ) == []
    assert rigs[1].state.counts(QUEUE).size_bytes == 0  # type: ignore[union-attr]


def test_messages_refused_by_another_partition_return() -> None:
    rigs = {number: Rig(seed=number) for number in (1, 2)}
    bus = Bus(rigs, {"queue-8": (2, OTHER)})
    rigs[2].put(QueueProperties(requires_session=True), OTHER)
    numbers = kill(rigs[1], message("s", session="s"), "b")
    resend(rigs[1], *numbers, to="queue-8")
    bus.settle()
    assert rigs[2].peek_names(entity_no=OTHER) == ["s"]
    (back,) = rigs[1].peek(sub_queue=TRANSFER)
    assert back.sequence == numbers[1]
    assert properties_of(back.envelope)["DeadLetterReason"] == "Session id is null."
    handled = resend(rigs[1], back.sequence, sub_queue=TRANSFER)
    assert list(handled.done) == [back.sequence]
    assert rigs[1].peek_names() == ["b"]
    assert rigs[1].peek_names(TRANSFER) == []


# --- deleted --------------------------------------------------------------------------------------


@BUDGETS
@pytest.mark.parametrize("keeps", [False, True])
def test_messages_of_any_state_are_deleted_but_locked_ones(budget_bytes: int, keeps: bool) -> None:
    properties = QueueProperties(
        lock_duration_ms=5_000, history_retention_ms=DAY_MS if keeps else None
    )
    rig = Rig(properties, budget_bytes=budget_bytes)
    numbers = rig.send(*"abcdefgh")
    (late,) = rig.send(message("late", scheduled_ms=rig.now_ms + 60_000))
    locked, deferred, returned = rig.receive(count=3)
    rig.settle(Disposition.DEFER, deferred)
    rig.settle(Disposition.ABANDON, returned)
    handled = delete(rig, *numbers[:4], late, 77, numbers[6])
    assert set(handled.done) == {*numbers[1:4], numbers[6], late}
    assert refusals(handled) == {
        locked.sequence: Refusal.MESSAGE_LOCKED,
        77: Refusal.MESSAGE_NOT_FOUND,
    }
    assert rig.peek_names() == ["a", "e", "f", "h"]
    counts = rig.state.counts(QUEUE)
    assert counts is not None
    assert (counts.active, counts.scheduled) == (4, 0)
    assert [how for _, how, _ in rig.tables.settled.values()] == [Settling.PURGED] * (4 * keeps)
    rig.advance(5_000)
    assert [name_of(each.envelope) for each in rig.receive(count=9)] == ["a", "e", "f", "h"]
    rig.crash()
    assert rig.peek_names() == ["a", "e", "f", "h"]


def test_deleting_leaves_counts_and_places_of_other_messages() -> None:
    rig = Rig()
    numbers = rig.send(*"abcdef")
    for delivery in rig.receive(count=4):
        rig.settle(Disposition.ABANDON, delivery)
    delete(rig, numbers[1], numbers[4])
    found = [(name_of(each.envelope), each.delivery_count) for each in rig.receive(count=9)]
    assert found == [("a", 1), ("c", 1), ("d", 1), ("f", 0)]


def test_returned_messages_stay_in_order_when_one_is_deleted() -> None:
    rig = Rig()
    rig.send(*"abcdefg")
    taken = {name_of(each.envelope): each for each in rig.receive(count=7)}
    for name in "aebfgcd":  # a heap that is none without b
        rig.settle(Disposition.ABANDON, taken[name])
    delete(rig, taken["b"].sequence)
    assert [name_of(each.envelope) for each in rig.receive(count=9)] == list("acdefg")


def test_loaded_messages_are_delivered_when_the_backlog_before_them_is_deleted() -> None:
    rig = Rig(budget_bytes=20 * 1024)
    first = rig.send(*(message(f"m{n}", size_bytes=3_000) for n in range(9)))
    taken = rig.receive("R", 2)
    rig.detach("R")
    rig.settle(Disposition.COMPLETE, *taken)
    sub = rig.state.entities[QUEUE].active
    assert isinstance(sub, PlainMessages)
    last = rig.send("last")
    assert sub.order.backlog_count
    assert [each.sequence for each in sub.order.messages()][-1:] == last
    delete(rig, *first)
    assert rig.peek_names() == ["last"]
    assert [name_of(each.envelope) for each in rig.receive(count=2)] == ["last"]


def test_properties_that_were_set_on_deferring_are_not_lost_before_their_commit() -> None:
    rig = Rig()
    kill(rig, "a")
    (dead,) = rig.receive(sub_queue=DLQ)
    rig.is_auto = False
    settle = Settle(QUEUE, DLQ, [dead.lock_token], Disposition.DEFER, properties={"seen": 1})
    rig.submit(settle)
    rig.submit(ResendBySequence(QUEUE, DLQ, [dead.sequence], QUEUE))
    rig.commit()
    (found,) = rig.peek()
    assert properties_of(found.envelope) == {"seen": 1}


def changed_and_unloaded(rig: Rig, sub_queue: SubQueue, number: int) -> None:
    """Abandon a message with a change whose commit stays in flight; only its key is kept."""
    (one,) = rig.receive(sub_queue=sub_queue)
    assert one.sequence == number
    rig.is_auto = False
    rig.submit(
        Settle(QUEUE, sub_queue, [one.lock_token], Disposition.ABANDON, properties={"seen": 1})
    )
    entity = rig.state.entities.get(QUEUE)
    assert entity is not None
    limit_bytes, rig.budget.limit_bytes = rig.budget.limit_bytes, 0
    sub = entity.sub_queue(sub_queue)
    assert isinstance(sub, PlainMessages)
    paging.shed(sub)
    rig.budget.limit_bytes = limit_bytes
    assert sub.order.has_absent


def test_properties_that_were_set_on_abandoning_are_sent_again_before_their_commit() -> None:
    rig = Rig()
    (number,) = kill(rig, "a")
    changed_and_unloaded(rig, DLQ, number)
    rig.submit(ResendBySequence(QUEUE, DLQ, [number], QUEUE))
    rig.commit()
    (found,) = rig.peek()
    assert properties_of(found.envelope) == {"seen": 1}


def test_properties_that_were_set_on_abandoning_are_delivered_before_their_commit() -> None:
    rig = Rig()
    (number,) = rig.send("a")
    changed_and_unloaded(rig, ACTIVE, number)
    consumer_id = rig.names["A"]
    replies = rig.submit(Peek(QUEUE, ACTIVE, 0, 9, 1 << 20))
    rig.submit(SetDemand(consumer_id, 2, is_drain=True))
    rig.commit()
    (again,) = rig.inbox("A")
    assert properties_of(again.envelope) == {"seen": 1}
    (peeked,) = replies
    assert isinstance(peeked, Peeked)
    assert [properties_of(each.envelope) for each in peeked.messages] == [{"seen": 1}]
    assert again.envelope.size_bytes == peeked.messages[0].envelope.size_bytes


def test_properties_that_were_set_are_not_held_for_ever() -> None:
    """They may have 64 KiB each, and no later change may ever come."""
    rig = Rig()
    for name in "ab":
        rig.send(name)
        (delivery,) = rig.receive()
        changes = {"tried": name}
        tokens = [delivery.lock_token]
        settle = Settle(QUEUE, ACTIVE, tokens, Disposition.ABANDON, properties=changes)
        assert rig.apply(settle) == Settled()
        rig.advance(5_000)
    context = rig.state._context
    assert context._changed
    rig.advance(20_000)
    assert not context._changed
    assert not context._is_watching_changes


def test_properties_set_on_abandoning_a_deferred_message_are_kept() -> None:
    rig = Rig()
    (number,) = rig.send("a")
    rig.settle(Disposition.DEFER, *rig.receive())
    reply = rig.apply(ReceiveDeferred(QUEUE, ACTIVE, [number], PEEK_LOCK))
    assert isinstance(reply, DeferredReceived)
    token = reply.deliveries[0].lock_token
    rig.is_auto = False
    rig.submit(Settle(QUEUE, ACTIVE, [token], Disposition.ABANDON, properties={"seen": 1}))
    replies = rig.submit(ReceiveDeferred(QUEUE, ACTIVE, [number], PEEK_LOCK))
    rig.commit()
    (again,) = replies
    assert isinstance(again, DeferredReceived)
    assert properties_of(again.deliveries[0].envelope) == {"seen": 1}


def test_a_message_whose_commit_is_under_way_is_deleted_after_it() -> None:
    rig = Rig()
    rig.send("a")
    rig.is_auto = False
    rig.submit(Enqueue(QUEUE, [message("b"), message("c")]))
    rig.submit(DeleteBySequence(QUEUE, ACTIVE, [2]))  # the rig checks that it is a barrier
    rig.commit()
    assert rig.peek_names() == ["a", "c"]


@BUDGETS
def test_messages_of_sessions_are_deleted(budget_bytes: int) -> None:
    rig = Rig(QueueProperties(requires_session=True), budget_bytes=budget_bytes)
    sent = [message(f"{session}{n}", session=session) for session in "abc" for n in range(4)]
    numbers = dict(zip([name_of(each) for each in sent], rig.send(*sent), strict=True))
    assert rig.accept("R", "a") == "a"
    rig.demand("R", 2)
    first, second = rig.inbox("R")
    rig.settle(Disposition.DEFER, second, session_id=b"a")
    gone = ["a0", "a1", "a3", "b0", "b2", "c0", "c1", "c2", "c3"]
    handled = delete(rig, *(numbers[name] for name in gone))
    assert refusals(handled) == {first.sequence: Refusal.MESSAGE_LOCKED}
    assert rig.peek_names() == ["a0", "a2", "b1", "b3"]
    assert rig.accept("S") == "b"
    rig.demand("S", 9)
    assert [name_of(each.envelope) for each in rig.inbox("S")] == ["b1", "b3"]
    assert rig.accept("T") is None
    rig.crash()
    assert rig.peek_names() == ["a0", "a2", "b1", "b3"]


def test_a_number_of_another_entity_is_not_found() -> None:
    rig = Rig()
    rig.put(QueueProperties(), OTHER)
    rig.send("a")
    rig.send(*"bc", entity_no=OTHER)
    numbers = list(range(1, 250))
    assert list(delete(rig, *numbers).done) == [1]
    assert rig.peek_names(entity_no=OTHER) == ["b", "c"]


def test_a_disabled_entity_refuses_deletes() -> None:
    rig = Rig()
    (number,) = rig.send("a")
    rig.put(QueueProperties(status=EntityStatus.DISABLED))
    reply = rig.apply(DeleteBySequence(QUEUE, ACTIVE, [number]))
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.ENTITY_DISABLED
    rig.put(QueueProperties(status=EntityStatus.RECEIVE_DISABLED))
    assert list(delete(rig, number).done) == [number]


# --- peek by state --------------------------------------------------------------------------------


@BUDGETS
@pytest.mark.parametrize("has_sessions", [False, True])
def test_peek_lists_messages_of_one_state(budget_bytes: int, has_sessions: bool) -> None:
    rig = Rig(QueueProperties(requires_session=has_sessions), budget_bytes=budget_bytes)
    for n in range(6):
        rig.send(message(f"m{n}", session=f"s{n % 2}"))
        rig.send(message(f"l{n}", session="s", scheduled_ms=rig.now_ms + 60_000))
    if has_sessions:
        rig.accept("A", "s0")
        rig.demand("A", 2)
        deliveries = rig.inbox("A")
    else:
        deliveries = rig.receive(count=2)
    session = b"s0" if has_sessions else None
    rig.settle(Disposition.DEFER, deliveries[0], session_id=session)
    name = name_of(deliveries[0].envelope)

    def names_in(state: MessageState) -> list[str]:
        found: list[str] = []
        first = 0
        while True:
            reply = rig.apply(Peek(QUEUE, ACTIVE, first, 2, 1 << 20, state=state))
            assert isinstance(reply, Peeked)
            if not reply.messages:
                return found
            assert {each.state for each in reply.messages} == {state}
            found += [name_of(each.envelope) for each in reply.messages]
            first = reply.messages[-1].sequence + 1

    assert names_in(MessageState.DEFERRED) == [name]
    assert names_in(MessageState.SCHEDULED) == [f"l{n}" for n in range(6)]
    assert names_in(MessageState.ACTIVE) == [f"m{n}" for n in range(6) if f"m{n}" != name]


def test_deferred_dead_letters_are_peeked_alone() -> None:
    rig = Rig()
    kill(rig, *"abc")
    _, second, _ = rig.receive(count=3, sub_queue=DLQ)
    rig.settle(Disposition.DEFER, second, sub_queue=DLQ)
    for state, expected in (
        (MessageState.DEFERRED, ["b"]),
        (MessageState.ACTIVE, ["a", "c"]),
        (MessageState.SCHEDULED, []),
    ):
        reply = rig.apply(Peek(QUEUE, DLQ, 0, 9, 1 << 20, state=state))
        assert isinstance(reply, Peeked)
        assert [name_of(each.envelope) for each in reply.messages] == expected


@pytest.mark.parametrize("has_sessions", [True, False])
def test_a_peek_continues_behind_messages_removed_during_its_read(has_sessions: bool) -> None:
    rig = Rig(QueueProperties(requires_session=has_sessions), budget_bytes=700)
    session = "s" if has_sessions else None
    numbers = rig.send(*(message(f"m{n}", session=session) for n in range(20)))
    peek = Peek(QUEUE, ACTIVE, 0, 3, 1 << 20)
    while True:  # until nothing of it is loaded
        needs = rig.state.apply(peek, rig.now_ms, None)
        if isinstance(needs, Needs) and len(needs.row_keys) == 3:
            break
        delete(rig, numbers.pop(0))
    found = Found(needs.row_keys)
    found += rig.tables.read(needs.row_keys)
    delete(rig, *numbers[:3])
    needs = rig.state.apply(peek, rig.now_ms, found)
    assert isinstance(needs, Needs), "the page is empty, the queue is not"
    reply = rig.apply(peek)
    assert isinstance(reply, Peeked)
    assert [each.sequence for each in reply.messages] == numbers[3:6]


def test_a_peek_ends_before_uncommitted_messages() -> None:
    rig = Rig(budget_bytes=700, is_auto=False)
    rig.submit(Enqueue(QUEUE, [message(f"m{n}") for n in range(20)]))
    rig.submit(Peek(QUEUE, ACTIVE, 15, 3, 1 << 20))
    *_, needs, outcome = rig.results
    assert isinstance(needs, Needs)
    assert isinstance(outcome, Outcome)
    assert outcome.reply == Peeked([])


def test_a_peek_of_dead_letters_continues_behind_those_removed_during_its_read() -> None:
    rig = Rig()
    numbers = kill(rig, *(message(name, size_bytes=200_000) for name in "abcdefgh"))
    dead = rig.receive(count=7, sub_queue=DLQ)
    peek = Peek(QUEUE, DLQ, 0, 9, 100_000)
    needs = rig.state.apply(peek, rig.now_ms, None)
    assert isinstance(needs, Needs)
    found = rig.tables.read_numbers(*needs.numbers[0])
    assert len(found) < 8
    rig.settle(Disposition.COMPLETE, *dead, sub_queue=DLQ)
    rig.send(*(message(size_bytes=10) for _ in range(900)))  # more of that size may be read
    needs = rig.state.apply(peek, rig.now_ms, found)
    assert isinstance(needs, Needs), "the page is empty, the queue is not"
    found = rig.tables.read_numbers(*needs.numbers[0])
    outcome = rig.state.apply(peek, rig.now_ms, found)
    assert isinstance(outcome, Outcome)
    assert isinstance(outcome.reply, Peeked)
    assert [each.sequence for each in outcome.reply.messages] == numbers[7:]
