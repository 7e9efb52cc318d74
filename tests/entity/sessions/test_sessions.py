"""Sessions of one entity: grants, locks, state, and their use of memory."""

from __future__ import annotations

import pytest

from postbus.contract.entities import (
    LIMITS,
    EntityStatus,
    NamespaceLimits,
    Sku,
    SubscriptionProperties,
)
from postbus.entity.commands import (
    AcceptSession,
    AddConsumer,
    CompleteSessions,
    DeferredReceived,
    DemandSet,
    Disposition,
    Done,
    DropEntity,
    Enqueue,
    Enqueued,
    GetSessionState,
    ListSessions,
    LoseLocks,
    ReceiveDeferred,
    Refusal,
    Refused,
    RemoveConsumer,
    RenewLocks,
    RenewSession,
    SessionsListed,
    SessionState,
    SetDemand,
    SetSessionState,
    Settle,
    Settled,
    Tick,
)
from postbus.entity.outcomes import (
    Deliver,
    Needs,
    Outcome,
    RecordAcquired,
    SessionGranted,
)
from postbus.entity.sessions import messages_by_session
from postbus.entity.sessions.session_states import ROW_BYTES
from tests.entity.partition_rig import (
    ACTIVE,
    DELETE,
    DLQ,
    PEEK_LOCK,
    QUEUE,
    TOPIC,
    Rig,
    message,
    name_of,
)
from tests.entity.sessions.session_rig import PROPERTIES, names, queue_of, rig_of, send


def counted(rig: Rig) -> tuple[int, int]:
    counts = rig.state.counts(QUEUE)
    assert counts is not None
    return counts.active, counts.size_bytes


def refusal(reply: object) -> Refusal:
    assert isinstance(reply, Refused)
    return reply.refusal


# --- permitted uses -------------------------------------------------------------------------------


def test_a_receiver_without_session_is_refused() -> None:
    rig = rig_of()
    assert refusal(rig.apply(AddConsumer(QUEUE, ACTIVE, 1, PEEK_LOCK))) is Refusal.SESSION_REQUIRED
    assert rig.apply(AddConsumer(QUEUE, DLQ, 1, PEEK_LOCK)) == Done()


def test_a_session_of_a_plain_queue_is_refused() -> None:
    rig = Rig()
    assert rig.accept("A", "s") is Refusal.SESSION_NOT_SUPPORTED
    assert refusal(rig.apply(ListSessions(QUEUE, None, 0, 1))) is Refusal.SESSION_NOT_SUPPORTED
    assert refusal(rig.apply(ListSessions(99, None, 0, 1))) is Refusal.ENTITY_NOT_FOUND


def test_a_message_without_session_id_is_refused_alone() -> None:
    rig = rig_of()
    reply = rig.apply(Enqueue(QUEUE, [message("a", session="s"), message("b")]))
    assert isinstance(reply, Enqueued)
    assert reply.sequence_numbers == [1, 0]
    assert reply.refusals is not None
    assert refusal(reply.refusals[1]) is Refusal.SESSION_REQUIRED
    later = message("c", scheduled_ms=rig.now_ms + 1_000)
    reply = rig.apply(Enqueue(QUEUE, [later]))
    assert isinstance(reply, Enqueued)
    assert reply.refusals is not None
    assert refusal(reply.refusals[0]) is Refusal.SESSION_REQUIRED
    reply = rig.apply(Enqueue(QUEUE, [message("a", session="s"), message("b")], is_atomic=True))
    assert refusal(reply) is Refusal.SESSION_REQUIRED
    assert rig.peek_names() == ["a"]


def test_a_receiver_holds_one_session() -> None:
    rig = rig_of()
    assert rig.accept("A", "s") == "s"
    reply = rig.apply(AcceptSession(QUEUE, rig.names["A"], PEEK_LOCK, b"t"))
    assert refusal(reply) is Refusal.NOT_ALLOWED
    assert rig.accept("B", None) is None
    reply = rig.apply(AcceptSession(QUEUE, rig.names["B"], PEEK_LOCK, b"t"))
    assert refusal(reply) is Refusal.NOT_ALLOWED


def test_a_session_id_above_128_characters_is_refused() -> None:
    rig = rig_of()
    assert rig.accept("A", "é" * 128) == "é" * 128
    assert rig.accept("B", "é" * 129) is Refusal.ARGUMENT_OUT_OF_RANGE


def test_single_locks_are_not_renewed() -> None:
    rig = rig_of()
    send(rig, "s", "m")
    rig.accept("A", "s")
    (delivery,) = rig.receive("A")
    reply = rig.apply(RenewLocks(QUEUE, ACTIVE, [delivery.lock_token]))
    assert refusal(reply) is Refusal.NOT_ALLOWED


def test_an_unknown_session_can_be_accepted_and_leaves_no_state() -> None:
    rig = rig_of()
    assert rig.accept("A", "s") == "s"
    assert rig.receive("A", 3) == []
    rig.detach("A")
    queue = queue_of(rig)
    assert not queue.open_sessions
    assert not queue.dormant
    assert rig.apply(ListSessions(QUEUE, None, 0, 9)) == SessionsListed([])


# --- granting -------------------------------------------------------------------------------------


def test_a_waiting_receiver_gets_the_session_and_its_earlier_demand() -> None:
    rig = rig_of()
    assert rig.accept("A") is None
    rig.demand("A", 2)
    assert rig.accept("B") is None
    rig.demand("B", 5)
    rig.apply(SetDemand(rig.names["B"], 5, is_drain=True))
    rig.send(*(message(name, session=name[0]) for name in ("s1", "t1", "s2", "s3")))
    assert names(rig.inbox("A")) == ["s1", "s2"]
    assert rig.inbox("B") == []
    assert rig.clients[rig.names["B"]].session == "t"


def test_a_grant_precedes_its_deliveries() -> None:
    rig = rig_of()
    rig.accept("A")
    rig.demand("A", 1)
    send(rig, "s", "m")
    outcome = rig.results[-1]
    assert isinstance(outcome, Outcome)
    assert [type(effect) for effect in outcome.effects] == [SessionGranted, Deliver]


def test_drain_in_a_session_reads_what_is_not_loaded() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b")
    rig.crash()
    rig.accept("A", "s")
    rig.crash()
    rig.accept("A", "s")
    assert rig.apply(SetDemand(rig.names["A"], 5, is_drain=True)) == DemandSet(2)
    assert names(rig.inbox("A")) == ["a", "b"]


def test_a_waiting_receiver_can_be_withdrawn() -> None:
    rig = rig_of()
    rig.accept("A")
    rig.accept("B")
    rig.detach("A")
    send(rig, "s", "m")
    assert rig.clients[rig.names["B"]].session == "s"
    assert rig.apply(RemoveConsumer(12_345)) == Done()


def test_sessions_taken_by_name_leave_no_trace_in_the_line() -> None:
    rig = rig_of()
    rig.checks = False
    for turn in range(500):
        send(rig, f"s{turn}", "m")
        rig.accept("A", f"s{turn}")
        rig.settle(Disposition.COMPLETE, *rig.receive("A"), session_id=f"s{turn}".encode())
        rig.detach("A")
    assert len(queue_of(rig).available) <= 2 * messages_by_session.ORPHANS


def test_a_returned_session_keeps_its_place_behind_earlier_ones() -> None:
    rig = rig_of()
    for session in "abc":
        send(rig, session, f"{session}1")
    order = []
    for _ in range(6):
        order.append(rig.accept("A"))
        rig.detach("A")
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_receive_and_delete_in_a_session() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b", "c")
    rig.accept("A", "s", DELETE)
    rig.demand("A", 2)
    assert names(rig.inbox("A")) == ["a", "b"]
    rig.detach("A")
    rig.crash()
    assert rig.peek_names() == ["c"]


# --- locks ----------------------------------------------------------------------------------------


def test_locks_of_a_session_end_with_it_even_before_the_tick() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b")
    rig.accept("A", "s")
    (taken,) = rig.receive("A")
    rig.now_ms += 5_000  # no Tick yet
    assert rig.settle(Disposition.COMPLETE, taken, session_id=b"s") == Settled([0])
    assert rig.clients[rig.names["A"]].ended is Refusal.SESSION_LOCK_LOST
    assert rig.accept("B", "s") == "s"
    assert [(name_of(d.envelope), d.delivery_count) for d in rig.receive("B", 2)] == [
        ("a", 1),
        ("b", 0),
    ]


def test_an_ended_session_gets_no_delivery() -> None:
    rig = rig_of()
    rig.accept("A", "s")
    rig.demand("A", 3)
    rig.now_ms += 5_000  # no Tick yet
    send(rig, "s", "m")
    assert rig.inbox("A") == []
    assert rig.clients[rig.names["A"]].ended is Refusal.SESSION_LOCK_LOST
    assert rig.accept("B") == "s"
    assert rig.receive("B")[0].delivery_count == 0


def test_an_expired_session_can_be_taken_by_name_unless_a_receiver_waits() -> None:
    rig = rig_of()
    send(rig, "s", "m")
    rig.accept("A", "s")
    rig.now_ms += 5_000  # no Tick yet
    assert rig.accept("B", "s") == "s"
    rig.names.pop("A")
    rig.accept("C")
    rig.now_ms += 5_000
    assert rig.accept("D", "s") is Refusal.SESSION_CANNOT_BE_LOCKED
    assert rig.clients[rig.names["C"]].session == "s"


def test_expiry_counts_and_dead_letters() -> None:
    rig = rig_of()
    send(rig, "s", "m")
    for count in range(3):
        rig.accept("A", "s")
        assert rig.receive("A")[0].delivery_count == count
        rig.advance(5_000)
        rig.names.pop("A")
    assert rig.peek_names() == []
    assert rig.peek_names(DLQ) == ["m"]
    assert rig.accept("A") is None


def test_many_sessions_expire_in_portions() -> None:
    rig = rig_of()
    rig.checks = False
    for number in range(30):
        rig.send(*(message(f"{number}-{n}", session=f"s{number}") for n in range(100)))
        rig.accept(f"R{number}", f"s{number}")
        rig.receive(f"R{number}", 100)
    rig.now_ms += 5_000
    rig.submit(Tick())
    queue = queue_of(rig)
    assert 15 <= len(queue.held) <= 25
    rig.tick_now()
    assert not queue.held
    assert all(client.ended is Refusal.SESSION_LOCK_LOST for client in rig.clients.values())


def test_a_session_with_many_locks_expires_in_portions() -> None:
    """It is not granted meanwhile, and its next receiver gets all messages in order."""
    rig = rig_of()
    rig.checks = False
    for start in range(0, 3_500, 500):
        send(rig, "s", *(str(number) for number in range(start, start + 500)))
    rig.accept("A", "s")
    taken = [delivery for _ in range(7) for delivery in rig.receive("A", 500)]
    session = queue_of(rig).open_sessions[b"s"]
    assert len(session.locks) == 3_500
    rig.checks = True
    rig.now_ms += 5_000
    rig.submit(Tick())
    assert len(session.locks) == 2_500
    complete = Settle(QUEUE, ACTIVE, [taken[-1].lock_token], Disposition.COMPLETE)
    complete.session_id = b"s"
    assert rig.apply(complete) == Settled([0])
    assert len(session.locks) == 1_500
    assert rig.accept("B", "s") is Refusal.SESSION_CANNOT_BE_LOCKED
    assert len(session.locks) == 500
    rig.tick_now()
    send(rig, "s", "last")
    assert rig.clients[rig.names["A"]].ended is Refusal.SESSION_LOCK_LOST
    assert rig.accept("C") == "s"
    again = [d for _ in range(4) for d in rig.receive("C", 1_000)]
    assert names(again) == [*(str(number) for number in range(3_500)), "last"]
    assert [d.delivery_count for d in again] == [1] * 3_500 + [0]


def test_a_shorter_lock_duration_ends_new_sessions_first() -> None:
    rig = rig_of()
    rig.accept("A", "a")
    rig.advance(1)
    rig.put(PROPERTIES.model_copy(update={"lock_duration_ms": 5_000}))
    rig.put(PROPERTIES.model_copy(update={"lock_duration_ms": 300_000}))
    rig.accept("B", "b")
    rig.put(PROPERTIES)
    rig.accept("C", "c")
    rig.advance(5_000)
    ended = {name: rig.clients[rig.names[name]].ended for name in "ABC"}
    assert ended == {"A": Refusal.SESSION_LOCK_LOST, "B": None, "C": Refusal.SESSION_LOCK_LOST}


def test_a_renewed_session_does_not_keep_others_alive() -> None:
    rig = rig_of()
    rig.accept("A", "a")
    rig.advance(1)
    rig.accept("B", "b")
    rig.advance(1)
    rig.apply(RenewSession(QUEUE, b"a", rig.names["A"]))
    rig.advance(4_998)
    assert rig.clients[rig.names["B"]].ended is None
    rig.advance(1)
    assert rig.clients[rig.names["B"]].ended is Refusal.SESSION_LOCK_LOST
    assert rig.clients[rig.names["A"]].ended is None


def test_lost_locks_end_every_session() -> None:
    rig = rig_of()
    send(rig, "s", "m")
    rig.accept("A", "s")
    rig.receive("A")
    assert rig.apply(LoseLocks(QUEUE)) == Done()
    assert rig.clients[rig.names["A"]].ended is Refusal.SESSION_LOCK_LOST
    assert rig.accept("B") == "s"
    assert rig.receive("B")[0].delivery_count == 1


def test_a_closed_session_takes_its_attempts_back_in_one_record() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b")
    rig.accept("A", "s")
    rig.receive("A", 2)
    rig.advance(200)
    rig.detach("A")
    outcome = rig.results[-1]
    assert isinstance(outcome, Outcome)
    assert outcome.mutations == [RecordAcquired([1, 2], [0, 0])]
    rig.crash()
    rig.accept("B")
    assert [d.delivery_count for d in rig.receive("B", 2)] == [0, 0]


def test_tokens_without_session_are_found_in_one_session_only() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b")
    send(rig, "t", "c")
    rig.accept("A", "s")
    rig.accept("B", "t")
    first, second = rig.receive("A", 2)
    (third,) = rig.receive("B")
    reply = rig.settle(Disposition.COMPLETE, first, third)
    assert refusal(reply) is Refusal.SESSION_REQUIRED
    assert rig.settle(Disposition.COMPLETE, first, second) == Settled()
    assert rig.settle(Disposition.COMPLETE, first) == Settled([0])
    assert rig.settle(Disposition.COMPLETE, third, session_id=b"s") == Settled([0])
    assert rig.settle(Disposition.COMPLETE, third, session_id=b"u") == Settled([0])
    assert rig.settle(Disposition.COMPLETE, third) == Settled()


def test_messages_of_several_sessions_are_completed_at_once() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b", "c")
    send(rig, "t", "d")
    rig.accept("A", "s")
    rig.accept("B", "t")
    first, second, third = (delivery.lock_token for delivery in rig.receive("A", 3))
    (fourth,) = (delivery.lock_token for delivery in rig.receive("B"))
    parts = [
        (b"s", [first]),
        (b"s", [second]),
        (b"u", [third]),
        (b"t", [fourth, third]),
        (b"s", [first]),
    ]
    _, size_bytes = counted(rig)
    assert rig.apply(CompleteSessions(QUEUE, parts)) == Settled([2, 4, 5])
    assert counted(rig) == (1, size_bytes // 4)  # they are of one size
    assert rig.results[-1].deletes == [1, 2, 4]  # type: ignore[union-attr]
    assert rig.apply(CompleteSessions(QUEUE, [(b"s", [third])])) == Settled()
    assert counted(rig) == (0, 0)
    assert refusal(rig.apply(CompleteSessions(99, parts))) is Refusal.ENTITY_NOT_FOUND
    assert refusal(Rig().apply(CompleteSessions(QUEUE, parts))) is Refusal.SESSION_NOT_SUPPORTED


# --- deferred -------------------------------------------------------------------------------------


def test_deferred_messages_belong_to_their_session() -> None:
    rig = rig_of()
    send(rig, "s", "a")
    rig.accept("A", "s")
    rig.accept("B", "t")
    rig.settle(Disposition.DEFER, *rig.receive("A"), session_id=b"s")
    rig.crash()
    rig.accept("A", "s")
    rig.accept("B", "t")

    def ask(session: bytes | None, name: str | None) -> object:
        consumer_id = None if name is None else rig.names[name]
        return rig.apply(ReceiveDeferred(QUEUE, ACTIVE, [1], PEEK_LOCK, session, consumer_id))

    assert refusal(ask(b"t", "B")) is Refusal.MESSAGE_NOT_FOUND
    assert refusal(ask(b"s", "B")) is Refusal.SESSION_LOCK_LOST
    assert refusal(ask(None, None)) is Refusal.SESSION_REQUIRED
    reply = ask(b"s", "A")
    assert isinstance(reply, DeferredReceived)
    assert names(reply.deliveries) == ["a"]
    rig.detach("A")
    assert refusal(ask(b"s", "B")) is Refusal.SESSION_LOCK_LOST
    rig.accept("C", "s")
    reply = ask(b"s", "C")
    assert isinstance(reply, DeferredReceived)
    assert reply.deliveries[0].delivery_count == 0


# --- state ----------------------------------------------------------------------------------------


def state_of(rig: Rig, name: str, session: bytes) -> object:
    reply = rig.apply(GetSessionState(QUEUE, session, rig.names[name]))
    return reply.state if isinstance(reply, SessionState) else reply


def test_a_state_outlives_its_messages_its_holder_and_a_crash() -> None:
    rig = rig_of()
    rig.accept("A", "s")
    assert state_of(rig, "A", b"s") is None
    rig.apply(SetSessionState(QUEUE, b"s", rig.names["A"], b"1"))
    assert state_of(rig, "A", b"s") == b"1"
    rig.detach("A")
    rig.crash()
    rig.accept("B", "s")
    assert state_of(rig, "B", b"s") == b"1"
    assert any(isinstance(result, Needs) and result.states for result in rig.results)
    rig.apply(SetSessionState(QUEUE, b"s", rig.names["B"], None))
    assert state_of(rig, "B", b"s") is None
    rig.crash()
    rig.accept("C", "s")
    assert state_of(rig, "C", b"s") is None
    assert not rig.tables.states


@pytest.mark.parametrize("sku", list(Sku))
def test_a_state_has_the_tiers_size_at_most(sku: Sku) -> None:
    limits: NamespaceLimits = LIMITS[sku]
    rig = rig_of(limits=limits)
    rig.accept("A", "s")
    fits = bytes(limits.max_session_state_bytes)
    assert rig.apply(SetSessionState(QUEUE, b"s", rig.names["A"], fits)) == Done()
    reply = rig.apply(SetSessionState(QUEUE, b"s", rig.names["A"], fits + b"x"))
    assert refusal(reply) is Refusal.MESSAGE_TOO_LARGE
    assert state_of(rig, "A", b"s") == fits


def test_a_state_of_no_bytes_clears_it_and_the_session_leaves_the_list() -> None:
    rig = rig_of()
    rig.accept("A", "s")
    rig.apply(SetSessionState(QUEUE, b"s", rig.names["A"], b"1"))
    assert rig.apply(ListSessions(QUEUE, None, 0, 9)) == SessionsListed([b"s"])
    assert rig.apply(SetSessionState(QUEUE, b"s", rig.names["A"], b"")) == Done()
    assert state_of(rig, "A", b"s") is None
    assert rig.apply(ListSessions(QUEUE, None, 0, 9)) == SessionsListed([])
    assert not rig.tables.states


def test_states_count_in_the_size_of_their_entity_also_after_a_crash() -> None:
    rig = rig_of()
    rig.accept("A", "s")
    for size in (1_000, 5_000, 2_000):
        rig.apply(SetSessionState(QUEUE, b"s", rig.names["A"], bytes(size)))
        assert counted(rig) == (0, size + ROW_BYTES + 1)
    rig.crash()
    assert counted(rig) == (0, 2_000 + ROW_BYTES + 1)
    send(rig, "s", "m")
    with_message = counted(rig)[1]
    rig.accept("B", "s")
    rig.apply(SetSessionState(QUEUE, b"s", rig.names["B"], None))
    assert counted(rig) == (1, with_message - 2_000 - ROW_BYTES - 1)
    rig.crash()
    assert counted(rig)[1] < 2_000


def test_the_quota_refuses_states_and_messages_alike() -> None:
    rig = rig_of()
    entity = rig.state.entities.get(QUEUE)
    assert entity is not None
    entity.max_size_bytes = 10_000
    accepted = 0
    for number in range(9):
        rig.accept(f"R{number}", f"s{number}")
        put = SetSessionState(QUEUE, b"s%d" % number, rig.names[f"R{number}"], bytes(2_000))
        reply = rig.apply(put)
        if isinstance(reply, Refused):
            assert reply.refusal is Refusal.QUOTA_EXCEEDED
        else:
            accepted += 1
    assert accepted == 4
    assert len(rig.tables.states) == 4
    big = message("m", session="s0")
    big.size_bytes = 3_000
    sent = rig.apply(Enqueue(QUEUE, [big]))
    assert isinstance(sent, Enqueued)
    assert sent.refusals is not None
    assert sent.refusals[0].refusal is Refusal.QUOTA_EXCEEDED
    rig.apply(SetSessionState(QUEUE, b"s0", rig.names["R0"], None))
    send(rig, "s0", "fits again")
    shorter = SetSessionState(QUEUE, b"s1", rig.names["R1"], bytes(1_000))
    assert rig.apply(shorter) == Done()


def test_the_states_of_a_subscription_count_in_its_topic() -> None:
    rig = Rig()
    rig.put_topic()
    rig.put_subscription(21, SubscriptionProperties(requires_session=True))
    topic = rig.state.entities.get(TOPIC)
    assert topic is not None
    topic.max_size_bytes = 10_000
    rig.send(message("m", session="s"), entity_no=TOPIC)  # free quota is known from here on
    accepted = 0
    for number in range(9):
        session = f"s{number}"
        rig.accept(session, session, entity_no=21)
        put = SetSessionState(21, session.encode(), rig.names[session], bytes(2_000))
        accepted += rig.apply(put) == Done()
    assert accepted == 4
    counts = rig.state.counts(TOPIC)
    assert counts is not None
    assert counts.size_bytes > 4 * 2_000
    big = message("m", session="s")
    big.size_bytes = 3_000
    sent = rig.apply(Enqueue(TOPIC, [big]))
    assert isinstance(sent, Enqueued)
    assert sent.refusals is not None


def test_a_state_without_messages_is_listed_also_after_a_crash() -> None:
    rig = rig_of()
    rig.accept("A", "s")
    rig.apply(SetSessionState(QUEUE, b"s", rig.names["A"], b"1"))
    rig.crash()
    assert rig.apply(ListSessions(QUEUE, None, 0, 9)) == SessionsListed([b"s"])


def test_states_are_read_again_when_they_take_too_much_memory() -> None:
    rig = rig_of(budget_bytes=160_000)
    for number in range(20):
        rig.now_ms += 1
        rig.accept("A", f"s{number}")
        session = f"s{number}".encode()
        rig.apply(SetSessionState(QUEUE, session, rig.names["A"], bytes([number]) * 1_000))
        rig.detach("A")
    assert queue_of(rig).states.held_bytes <= 11_000
    for number in range(20):
        rig.accept("A", f"s{number}")
        assert state_of(rig, "A", f"s{number}".encode()) == bytes([number]) * 1_000
        rig.detach("A")


def test_a_state_is_kept_until_it_is_committed() -> None:
    rig = rig_of(is_auto=False, budget_bytes=20_000)
    rig.commit()
    rig.accept("A", "s")
    rig.submit(SetSessionState(QUEUE, b"s", rig.names["A"], bytes(1_500)))
    rig.now_ms += 1
    rig.submit(SetSessionState(QUEUE, b"s", rig.names["A"], bytes(1_600)))
    queue_of(rig).make_room(1 << 20)
    rig.submit(GetSessionState(QUEUE, b"s", rig.names["A"]))
    outcome = rig.results[-1]
    assert isinstance(outcome, Outcome)
    assert outcome.reply == SessionState(bytes(1_600))
    rig.commit()
    rig.now_ms += 1
    rig.submit(SetSessionState(QUEUE, b"s", rig.names["A"], b"x"))
    rig.commit()
    queue_of(rig).make_room(1 << 20)
    assert queue_of(rig).states.held_bytes == 1


def test_sessions_are_listed_in_pages() -> None:
    rig = rig_of()
    for number in (3, 1, 2):
        send(rig, f"m{number}", "m")
    rig.accept("A", "held")
    rig.accept("B", "state")
    rig.apply(SetSessionState(QUEUE, b"state", rig.names["B"], b"x"))
    rig.detach("B")
    early_ms = rig.now_ms
    rig.advance(10)
    rig.accept("B", "m2")
    rig.apply(SetSessionState(QUEUE, b"m2", rig.names["B"], b"y"))

    def listed(after_ms: int | None, skip: int, top: int) -> list[bytes]:
        reply = rig.apply(ListSessions(QUEUE, after_ms, skip, top))
        assert isinstance(reply, SessionsListed)
        return reply.session_ids

    assert listed(None, 0, 3) == [b"m1", b"m2", b"m3"]
    assert listed(None, 3, 3) == [b"state"]
    assert listed(None, 4, 3) == []
    assert listed(early_ms - 1, 0, 9) == [b"m2", b"state"]
    assert listed(early_ms, 0, 9) == [b"m2"]


# --- definitions ----------------------------------------------------------------------------------


def test_a_disabled_entity_ends_its_sessions() -> None:
    rig = rig_of()
    send(rig, "s", "m")
    rig.accept("A", "s")
    rig.receive("A")
    rig.put(PROPERTIES.model_copy(update={"status": EntityStatus.RECEIVE_DISABLED}))
    assert rig.clients[rig.names["A"]].ended is Refusal.RECEIVE_DISABLED
    assert rig.accept("B") is Refusal.RECEIVE_DISABLED
    rig.put(PROPERTIES)
    assert rig.accept("C") == "s"
    assert rig.receive("C")[0].delivery_count == 0


def test_a_dropped_entity_ends_sessions_and_forgets_all() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b")
    send(rig, "t", "c")
    rig.accept("A", "s")
    rig.receive("A")
    rig.apply(SetSessionState(QUEUE, b"s", rig.names["A"], b"1"))
    rig.accept("W", "u")
    rig.apply(DropEntity(QUEUE, 2))
    assert rig.clients[rig.names["A"]].ended is Refusal.ENTITY_NOT_FOUND
    assert rig.clients[rig.names["W"]].ended is Refusal.ENTITY_NOT_FOUND
    assert rig.budget.used_bytes == 0
    rig.advance(10_000)
    assert not rig.tables.rows


# --- dead letters and renewal --------------------------------------------------------------------


def test_dead_letters_of_a_session_are_read_without_it() -> None:
    rig = rig_of()
    send(rig, "s", "a")
    rig.accept("A", "s")
    rig.settle(Disposition.DEAD_LETTER, *rig.receive("A"), session_id=b"s", reason="broken")
    (dead,) = rig.receive("D", sub_queue=DLQ)
    assert dead.envelope.session_id == b"s"
    assert rig.settle(Disposition.COMPLETE, dead, sub_queue=DLQ) == Settled()


def test_renewing_reaches_every_lock_of_the_session() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b")
    rig.accept("A", "s")
    taken = rig.receive("A", 2)
    rig.advance(4_000)
    rig.apply(RenewSession(QUEUE, b"s", rig.names["A"]))
    rig.advance(4_999)
    assert rig.settle(Disposition.COMPLETE, *taken, session_id=b"s") == Settled()


def test_a_message_returned_to_a_disabled_entity_may_be_its_first_dead_letter() -> None:
    dead_letters = PROPERTIES.model_copy(update={"dead_lettering_on_message_expiration": True})
    rig = Rig(dead_letters)
    rig.send(message("x", session="a", ttl_ms=1_000))
    rig.accept("A", "a")
    rig.receive("A")
    rig.advance(2_000)
    rig.put(dead_letters.model_copy(update={"status": EntityStatus.RECEIVE_DISABLED}))
    assert rig.clients[rig.names["A"]].ended is Refusal.RECEIVE_DISABLED
    assert rig.peek_names(DLQ) == ["x"]
