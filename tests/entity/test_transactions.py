"""Transactions: several operations in one outcome, checked as a whole before anything happens."""

from __future__ import annotations

import pytest

from postbus.contract.entities import (
    DEFAULT_RULE,
    EntityKind,
    EntityStatus,
    QueueProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    AddConsumer,
    CheckLocks,
    Delivery,
    Disposition,
    Enqueue,
    Enqueued,
    PutEntity,
    Refusal,
    Refused,
    Reply,
    Settle,
    Settled,
    SubQueue,
    Transact,
    Transacted,
)
from postbus.entity.outcomes import Outcome
from postbus.entity.topics.publish_limits import PublishLimits
from postbus.message.codec import encode_value
from tests.entity.partition_rig import (
    ACTIVE,
    DLQ,
    PEEK_LOCK,
    QUEUE,
    Rig,
    message,
    name_of,
    properties_of,
)
from tests.entity.transfer.forward_rig import Bus

OTHER = 8
TRANSFER = SubQueue.TRANSFER_DEAD_LETTER
MEGABYTE = 1024 * 1024


def settle(
    delivery: Delivery,
    disposition: Disposition = Disposition.COMPLETE,
    sub_queue: SubQueue = ACTIVE,
    entity_no: int = QUEUE,
    **details: object,
) -> Settle:
    command = Settle(entity_no, sub_queue, [delivery.lock_token], disposition)
    for name, value in details.items():
        setattr(command, name, value)
    return command


def send(*names: str, entity_no: int = QUEUE, size_bytes: int = 100) -> Enqueue:
    return Enqueue(entity_no, [message(name, size_bytes=size_bytes) for name in names])


def refused(rig: Rig, *operations: Enqueue | Settle) -> Refused:
    """Expect a refusal without changes and effects."""
    before = dict(rig.tables.rows), rig.peek_names(), rig.peek_names(DLQ)
    reply = rig.apply(Transact(list(operations)))
    assert isinstance(reply, Refused), reply
    outcome = rig.results[-1]
    assert isinstance(outcome, Outcome)
    assert [outcome.inserts, outcome.deletes, outcome.mutations, outcome.effects] == [[]] * 4
    assert (dict(rig.tables.rows), rig.peek_names(), rig.peek_names(DLQ)) == before
    return reply


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1_000])
def test_sends_and_settlements_happen_in_one_outcome(budget_bytes: int) -> None:
    rig = Rig(budget_bytes=budget_bytes)
    rig.put(QueueProperties(), entity_no=OTHER)
    rig.send("a", "b", "c", "d", "e")
    a, b, c, d, e = rig.receive(count=5)
    reply = rig.apply(
        Transact(
            [
                settle(a),
                send("x", "y"),
                settle(b, Disposition.DEAD_LETTER, reason="why", description="so"),
                settle(c, Disposition.DEFER, properties={"step": 1}),
                send("z", entity_no=OTHER),
                settle(d, Disposition.ABANDON, properties={"step": 2}),
                settle(e, Disposition.RELEASE),
            ]
        )
    )
    assert isinstance(reply, Transacted)
    numbers = [item.sequence_numbers for item in reply.replies if isinstance(item, Enqueued)]
    assert numbers == [[6, 7], [1]]
    assert [item for item in reply.replies if isinstance(item, Settled)] == [Settled()] * 5
    assert rig.peek_names() == ["c", "d", "e", "x", "y"]
    (dead,) = rig.receive("D", sub_queue=DLQ)
    assert name_of(dead.envelope) == "b"
    assert properties_of(dead.envelope)["DeadLetterReason"] == "why"
    counts = {p.sequence: p.delivery_count for p in rig.peek()}
    assert (counts[4], counts[5]) == (1, 0)
    rig.crash()
    assert rig.peek_names() == ["c", "d", "e", "x", "y"]
    assert rig.peek_names(DLQ) == ["b"]


@pytest.mark.behaviour("S251")
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_dead_letter_and_its_copy_in_the_main_queue(is_committed: bool) -> None:
    rig = Rig(is_auto=False)
    rig.commit()
    rig.submit(send("a"))
    rig.commit()
    rig.settle(Disposition.DEAD_LETTER, *rig.receive())
    (dead,) = rig.receive("D", sub_queue=DLQ)
    rig.submit(Transact([settle(dead, sub_queue=DLQ), send("copy")]))
    if is_committed:
        rig.commit()
    rig.crash()
    both = (rig.peek_names(), rig.peek_names(DLQ))
    assert both == ((["copy"], []) if is_committed else ([], ["a"]))


# --- refusals -------------------------------------------------------------------------------------


def test_the_same_lock_cannot_be_settled_twice() -> None:
    rig = Rig()
    rig.send("a")
    (a,) = rig.receive()
    answer = refused(rig, send("x"), settle(a), settle(a, Disposition.ABANDON))
    assert answer == Refused(Refusal.LOCK_LOST, "operation 3 of the transaction")
    command = Settle(QUEUE, ACTIVE, [a.lock_token] * 2, Disposition.COMPLETE)
    assert refused(rig, command).refusal is Refusal.LOCK_LOST
    assert rig.settle(Disposition.COMPLETE, a) == Settled()


def test_a_lock_that_expired_or_was_settled_refuses_all() -> None:
    rig = Rig(QueueProperties(lock_duration_ms=5_000))
    rig.send("a", "b")
    a, b = rig.receive(count=2)
    rig.settle(Disposition.COMPLETE, a)
    assert refused(rig, settle(b), settle(a)).refusal is Refusal.LOCK_LOST
    rig.now_ms += 5_000  # its Tick has not come
    assert refused(rig, send("x"), settle(b)).refusal is Refusal.LOCK_LOST


def test_a_lost_session_refuses_all() -> None:
    rig = Rig(QueueProperties(lock_duration_ms=5_000, requires_session=True))
    rig.send(message("a", session="s"), message("b", session="t"))
    rig.accept("A", "s")
    rig.demand("A", 1)
    (a,) = rig.inbox("A")
    held = settle(a, session_id=b"s")
    assert refused(rig, held, settle(a, session_id=b"s")).refusal is Refusal.SESSION_LOCK_LOST
    assert refused(rig, settle(a, session_id=b"t")).refusal is Refusal.SESSION_LOCK_LOST
    copy = Enqueue(QUEUE, [message("c", session="s")])
    assert isinstance(rig.apply(Transact([settle(a), copy])), Transacted)  # found by its token
    rig.demand("A", 1)
    (c,) = rig.inbox("A")
    check = CheckLocks(QUEUE, ACTIVE, [c.lock_token], b"s")
    assert rig.apply(check) == Settled()
    rig.now_ms += 5_000
    assert rig.apply(check) == Settled([0])
    assert refused(rig, settle(c, session_id=b"s")).refusal is Refusal.SESSION_LOCK_LOST


@pytest.mark.behaviour("S196")
def test_a_message_without_session_id_refuses_all() -> None:
    rig = Rig(QueueProperties(requires_session=True))
    with_session = Enqueue(QUEUE, [message("a", session="s")])
    assert refused(rig, with_session, send("b")).refusal is Refusal.SESSION_REQUIRED


@pytest.mark.behaviour("S199")
def test_two_sessions_in_one_transaction() -> None:
    rig = Rig(QueueProperties(requires_session=True))
    operations: list[Enqueue | Settle] = [
        Enqueue(QUEUE, [message(name, session=name)]) for name in "st"
    ]
    assert isinstance(rig.apply(Transact(operations)), Transacted)
    assert rig.peek_names() == ["s", "t"]


def test_the_quota_counts_bytes_used_and_freed_by_earlier_operations() -> None:
    rig = Rig()
    filled = 1024 * MEGABYTE - 1_000
    rig.state.entities[QUEUE].size_bytes = 0
    rig.send(message("big", size_bytes=200_000))
    rig.state.entities[QUEUE].size_bytes = filled
    (big,) = rig.receive()
    answer = refused(rig, send("x", size_bytes=600), send("y", size_bytes=600))
    assert answer.refusal is Refusal.QUOTA_EXCEEDED
    assert answer.detail.endswith("(operation 2 of the transaction)")
    assert refused(rig, send("x", "y", size_bytes=600)).refusal is Refusal.QUOTA_EXCEEDED
    freed = Transact([settle(big), send("x", size_bytes=600), send("y", size_bytes=600)])
    assert isinstance(rig.apply(freed), Transacted)
    rig.state.entities[QUEUE].size_bytes = 1_200  # else these count as huge, to be read singly
    assert rig.peek_names() == ["x", "y"]


@pytest.mark.parametrize(
    ("operation", "refusal"),
    [
        (send("a", size_bytes=300_000), Refusal.MESSAGE_TOO_LARGE),
        (
            Enqueue(QUEUE, [message("a", application_properties=bytes(70_000))]),
            Refusal.PROPERTIES_TOO_LARGE,
        ),
        (send("a", entity_no=99), Refusal.ENTITY_NOT_FOUND),
        (Settle(99, ACTIVE, [bytes(16)], Disposition.COMPLETE), Refusal.ENTITY_NOT_FOUND),
        (Settle(QUEUE, ACTIVE, [bytes(16)], Disposition.COMPLETE), Refusal.LOCK_LOST),
    ],
)
def test_a_transaction_refuses_the_same_operations_as_single_commands(
    operation: Enqueue | Settle, refusal: Refusal
) -> None:
    rig = Rig()
    assert refused(rig, send("x"), operation).refusal is refusal


def test_a_disabled_entity_refuses_all() -> None:
    rig = Rig()
    rig.put(QueueProperties(status=EntityStatus.SEND_DISABLED), entity_no=OTHER)
    operations = send("x"), send("y", entity_no=OTHER)
    assert refused(rig, *operations).refusal is Refusal.SEND_DISABLED


def test_invalid_settlements_are_refused_before_any_change() -> None:
    rig = Rig()
    rig.send("a", "b", "c")
    a, b, c = rig.receive(count=3)
    rig.settle(Disposition.DEAD_LETTER, b)
    (dead,) = rig.receive("D", sub_queue=DLQ)
    again = settle(dead, Disposition.DEAD_LETTER, DLQ)
    assert refused(rig, settle(a), again).refusal is Refusal.NOT_ALLOWED
    too_long = settle(c, Disposition.DEAD_LETTER, reason="x" * 4_097)
    assert refused(rig, settle(a), too_long).refusal is Refusal.ARGUMENT_OUT_OF_RANGE
    too_large = settle(c, Disposition.DEAD_LETTER, properties={"a": "x" * 70_000})
    assert refused(rig, settle(a), too_large).refusal is Refusal.PROPERTIES_TOO_LARGE


# --- checking locks -------------------------------------------------------------------------------


def test_check_locks_leaves_the_state_unchanged() -> None:
    rig = Rig(QueueProperties(lock_duration_ms=5_000))
    rig.send("a", "b")
    a, b = rig.receive(count=2)
    rig.settle(Disposition.COMPLETE, a)
    tokens = [a.lock_token, b.lock_token]
    assert rig.apply(CheckLocks(QUEUE, ACTIVE, tokens)) == Settled([0])
    assert rig.apply(CheckLocks(QUEUE, ACTIVE, [b.lock_token])) == Settled()
    assert rig.apply(CheckLocks(99, ACTIVE, tokens)) == Refused(Refusal.ENTITY_NOT_FOUND)
    rig.now_ms += 5_000
    assert rig.apply(CheckLocks(QUEUE, ACTIVE, tokens)) == Settled([0, 1])
    assert rig.settle(Disposition.COMPLETE, b) == Settled([0])


# --- paging, duplicates ---------------------------------------------------------------------------


def test_unloaded_messages_are_read_before_any_change() -> None:
    rig = Rig(budget_bytes=1_500)
    rig.send(*(f"m{n}" for n in range(6)))
    taken = rig.receive(count=6)
    operations: list[Enqueue | Settle] = [
        settle(delivery, Disposition.DEAD_LETTER, reason=f"r{index}")
        for index, delivery in enumerate(taken)
    ]
    assert isinstance(rig.apply(Transact(operations)), Transacted)
    dead = rig.receive("D", 6, sub_queue=DLQ)
    reasons = [properties_of(delivery.envelope)["DeadLetterReason"] for delivery in dead]
    assert reasons == [f"r{index}" for index in range(6)]


def test_duplicates_within_a_transaction_are_accepted_and_dropped() -> None:
    rig = Rig(QueueProperties(requires_duplicate_detection=True))
    messages = [message(name) for name in ("first", "second", "third")]
    for envelope, message_id in zip(messages, "xxy", strict=True):
        envelope.message_id = encode_value(message_id)
    reply = rig.apply(Transact([Enqueue(QUEUE, [envelope]) for envelope in messages]))
    assert isinstance(reply, Transacted)
    numbers = [item.sequence_numbers[0] for item in reply.replies if isinstance(item, Enqueued)]
    assert numbers[1] == 0
    assert [peeked.envelope.body for peeked in rig.peek()] == [b"first", b"third"]
    assert rig.apply(Transact([Enqueue(QUEUE, [messages[0]])])) == Transacted([Enqueued([0])])
    assert len(rig.peek()) == 2


# --- send-via -------------------------------------------------------------------------------------


def via(name: str, target: str) -> Enqueue:
    return Enqueue(QUEUE, [message(name)], via=target)


def test_send_via_reaches_another_partition_with_the_rest_or_not_at_all() -> None:
    rigs = {1: Rig(), 2: Rig()}
    rigs[2].put(QueueProperties(), entity_no=OTHER)
    bus = Bus(rigs, {"far": (2, OTHER)})
    rigs[1].send("a")
    (a,) = rigs[1].receive()
    assert refused(rigs[1], via("x", "far"), settle(a), settle(a)).refusal is Refusal.LOCK_LOST
    reply: Reply = rigs[1].apply(Transact([settle(a), via("x", "far"), via("y", "far")]))
    assert isinstance(reply, Transacted)
    assert rigs[1].peek_names() == []
    bus.settle()
    assert list(bus.where()) == ["x", "y"]
    assert {place for places in bus.where().values() for place in places} == {(2, OTHER, ACTIVE)}


@pytest.mark.behaviour("S291")
@pytest.mark.parametrize("case", ["gone", "disabled", "full"])
def test_undeliverable_messages_sent_via_are_transfer_dead_lettered(case: str) -> None:
    rigs = {1: Rig(), 2: Rig()}
    status = EntityStatus.DISABLED if case == "disabled" else EntityStatus.ACTIVE
    rigs[2].put(QueueProperties(status=status), entity_no=OTHER)
    if case == "full":
        rigs[2].send("first", entity_no=OTHER)
        rigs[2].state.entities[OTHER].size_bytes = 1024 * MEGABYTE
    bus = Bus(rigs, {} if case == "gone" else {"far": (2, OTHER)})
    assert isinstance(rigs[1].apply(Transact([via("x", "far")])), Transacted)
    bus.settle()
    assert rigs[1].peek_names(SubQueue.TRANSFER_DEAD_LETTER) == ["x"]


def test_send_via_is_checked_like_any_message() -> None:
    rig = Rig()
    large = Enqueue(QUEUE, [message("x", size_bytes=300_000)], via="far")
    assert refused(rig, send("a"), large).refusal is Refusal.MESSAGE_TOO_LARGE


# --- topics ---------------------------------------------------------------------------------------

TOPIC, SUBSCRIPTION = 20, 21


def topic_rig(limits: PublishLimits = PublishLimits(), **subscription: object) -> Rig:  # noqa: B008
    rig = Rig(publish_limits=limits)
    rig.apply(PutEntity(TOPIC, "t", EntityKind.TOPIC, TopicProperties(), 2))
    properties = SubscriptionProperties(**subscription)
    name = "t/Subscriptions/s"
    kind = EntityKind.SUBSCRIPTION
    rig.apply(PutEntity(SUBSCRIPTION, name, kind, properties, 3, TOPIC, (DEFAULT_RULE,)))
    return rig


def received(rig: Rig, count: int) -> list[Delivery]:
    rig.consumer("S", entity_no=SUBSCRIPTION)
    rig.demand("S", count)
    return rig.inbox("S")


def test_a_publish_and_a_settlement_of_a_copy() -> None:
    rig = topic_rig()
    rig.send("a", entity_no=TOPIC)
    (a,) = received(rig, 1)
    done = settle(a, entity_no=SUBSCRIPTION)
    assert refused(rig, done, send("b", entity_no=TOPIC), done).refusal is Refusal.LOCK_LOST
    too_large = send("b", entity_no=TOPIC, size_bytes=300_000)
    assert refused(rig, done, too_large).refusal is Refusal.MESSAGE_TOO_LARGE
    direct = send("b", entity_no=SUBSCRIPTION)
    assert refused(rig, done, direct).refusal is Refusal.NOT_ALLOWED
    reply = rig.apply(Transact([done, send("b", entity_no=TOPIC)]))
    assert isinstance(reply, Transacted)
    assert [name_of(delivery.envelope) for delivery in received(rig, 5)] == ["b"]


@pytest.mark.behaviour("S291", "S292", "S293")
def test_messages_sent_via_a_topic_in_vain_are_transfer_dead_letters() -> None:
    """The first message of a transaction went to the topic, the other one elsewhere."""
    bus = Bus({1: topic_rig()}, {})
    rig = bus.rigs[1]
    away = Enqueue(TOPIC, [message("b")], via="nowhere")
    assert isinstance(rig.apply(Transact([send("a", entity_no=TOPIC), away])), Transacted)
    bus.settle()
    rig.crash()
    counts = rig.state.counts(TOPIC)
    assert counts is not None
    assert counts.transfer_dead_letter == 1
    (lost,) = rig.receive("T", sub_queue=TRANSFER, entity_no=TOPIC)
    assert name_of(lost.envelope) == "b"
    assert properties_of(lost.envelope)["DeadLetterReason"] == "MessagingEntityNotFound"
    rig.settle(Disposition.COMPLETE, lost, sub_queue=TRANSFER, entity_no=TOPIC)
    assert rig.peek_names(TRANSFER, TOPIC) == []
    for sub_queue in (ACTIVE, DLQ):
        reply = rig.apply(AddConsumer(TOPIC, sub_queue, 99, PEEK_LOCK))
        assert isinstance(reply, Refused)
    disabled = TopicProperties(status=EntityStatus.DISABLED)
    rig.apply(PutEntity(TOPIC, "t", EntityKind.TOPIC, disabled, 4))
    assert rig.clients[rig.names["T"]].ended is Refusal.ENTITY_DISABLED


def test_a_message_sent_via_a_subscription_leaves_with_its_settlement() -> None:
    rigs = {1: topic_rig(), 2: Rig()}
    rigs[2].put(QueueProperties(), entity_no=OTHER)
    bus = Bus(rigs, {"far": (2, OTHER)})
    rigs[1].send("a", entity_no=TOPIC)
    (a,) = received(rigs[1], 1)
    away = Enqueue(SUBSCRIPTION, [message("b")], via="far")
    reply = rigs[1].apply(Transact([settle(a, entity_no=SUBSCRIPTION), away]))
    assert isinstance(reply, Transacted)
    bus.settle()
    assert {name: set(places) for name, places in bus.where().items()} == {
        "b": {(2, OTHER, ACTIVE)}
    }


def test_the_copies_of_all_operations_together_are_limited() -> None:
    rig = topic_rig(PublishLimits(max_copies=10))
    sends = [send(f"m{number}", entity_no=TOPIC) for number in range(11)]
    assert refused(rig, *sends).refusal is Refusal.PUBLISH_TOO_LARGE
    assert isinstance(rig.apply(Transact([*sends[:10]])), Transacted)
