"""Sessions of one entity: scheduled messages, use of memory, reads over sessions."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest

from postbus.contract.entities import (
    LIMITS,
    EntityKind,
    QueueProperties,
    Sku,
)
from postbus.entity.commands import (
    AcceptSession,
    Cancelled,
    CancelScheduled,
    DeleteMessages,
    Disposition,
    Enqueue,
    GetSessionState,
    Peek,
    Peeked,
    Quiesce,
    Refusal,
    Refused,
    SessionState,
    SetSessionState,
    SubQueue,
    SupplyRows,
    Tick,
)
from postbus.entity.outcomes import (
    Fetch,
    LoadedEntity,
    LoadedPartition,
    Outcome,
    ReserveBlock,
)
from postbus.entity.partition_state import PartitionState, WindowBudget
from postbus.entity.sessions import messages_by_session, session_states
from postbus.entity.sessions.session_queue import SessionQueue
from tests.entity.partition_rig import (
    ACTIVE,
    PEEK_LOCK,
    QUEUE,
    Client,
    Rig,
    message,
    name_of,
)
from tests.entity.sessions.session_rig import PROPERTIES, names, queue_of, rig_of, send


def refusal(reply: object) -> Refusal:
    assert isinstance(reply, Refused)
    return reply.refusal


# --- scheduled ------------------------------------------------------------------------------------


def test_scheduled_messages_come_to_their_sessions_when_they_are_due() -> None:
    rig = rig_of()
    later_ms = rig.now_ms + 1_000
    rig.send(*(message(f"{s}2", session=s, scheduled_ms=later_ms) for s in "ab"))
    send(rig, "a", "a1")
    rig.accept("A", "a")
    rig.demand("A", 5)
    rig.accept("B")
    rig.demand("B", 5)
    assert names(rig.inbox("A")) == ["a1"]
    rig.advance(999)
    assert rig.inbox("A") == []
    rig.advance(1)
    assert names(rig.inbox("A")) == ["a2"]
    (delivery,) = rig.inbox("B")
    assert name_of(delivery.envelope) == "b2"
    assert delivery.enqueued_ms == later_ms


@pytest.mark.behaviour("S84")
def test_a_schedule_does_not_come_along_with_one_that_is_due_before() -> None:
    rig = rig_of()
    due_ms = rig.now_ms + 1_000
    rig.send(
        message("later", session="s", scheduled_ms=due_ms + 500),
        message("first", session="s", scheduled_ms=due_ms),
    )
    rig.accept("A", "s")
    rig.demand("A", 2)
    rig.advance(1_499)
    assert names(rig.inbox("A")) == ["first"]
    rig.advance(1)
    assert names(rig.inbox("A")) == ["later"]


def test_a_message_cancelled_while_its_row_is_read_is_not_delivered() -> None:
    rig = rig_of(is_auto=False)
    rig.commit()
    late = message("m", session="s", scheduled_ms=rig.now_ms + 1_000)
    rig.submit(Enqueue(QUEUE, [late]))
    rig.commit()
    rig.now_ms += 1_000
    rig.submit(Tick())
    outcome, _ = rig.pending.pop()
    (fetch,) = outcome.effects
    assert isinstance(fetch, Fetch)
    assert fetch.sub_queue is SubQueue.SCHEDULED
    rows = rig.tables.read(fetch.row_keys)
    assert rig.apply(CancelScheduled(QUEUE, [1])) == Cancelled()
    rig.submit(SupplyRows(QUEUE, SubQueue.SCHEDULED, rows))
    rig.commit()
    assert rig.peek_names() == []
    assert not rig.tables.rows


def test_many_due_messages_are_activated_in_portions() -> None:
    rig = rig_of()
    rig.checks = False
    due_ms = rig.now_ms + 1_000
    rig.send(*(message(f"m{n}", session=f"s{n % 7}", scheduled_ms=due_ms) for n in range(2_500)))
    rig.advance(1_000)
    counts = rig.state.counts(QUEUE)
    assert counts is not None
    assert (counts.active, counts.scheduled) == (2_500, 0)
    rig.accept("A", "s0")
    taken = rig.receive("A", 1_000)
    assert names(taken) == [f"m{n}" for n in range(0, 2_500, 7)]


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_bytes", [800, 5_000, 40_000])
def test_sessions_above_the_budget_are_paged_and_keep_their_order(budget_bytes: int) -> None:
    rig = rig_of(budget_bytes=budget_bytes)
    sessions = [f"s{n}" for n in range(8)]
    for turn in range(12):
        rig.send(*(message(f"{s}-{turn}", session=s) for s in sessions))
    seen: dict[str, list[str]] = {session: [] for session in sessions}
    for _ in range(4):
        for _ in sessions:
            got = rig.accept("A")
            assert isinstance(got, str)
            seen[got] += names(taken := rig.receive("A", 5))
            rig.settle(Disposition.ABANDON, *taken[:1], session_id=got.encode())
            again = rig.receive("A", 1)
            assert names(again) == names(taken[:1])
            rest = again + taken[1:]
            rig.settle(Disposition.COMPLETE, *rest[:3], session_id=got.encode())
            seen[got] = seen[got][: len(seen[got]) - len(taken) + 3]
            rig.detach("A")
    for session in sessions:
        assert seen[session] == [f"{session}-{turn}" for turn in range(12)]
    assert rig.peek_names() == []


def test_sessions_without_holder_give_way_to_receivers() -> None:
    rig = rig_of(budget_bytes=24_000)
    for number in range(6):
        send(rig, f"s{number}", "m")
    queue = queue_of(rig)
    assert len(queue.idle) == 6
    rig.send(*(message(f"n{n}", session="s0") for n in range(40)))
    rig.accept("A", "s0")
    rig.demand("A", 41)
    assert len(rig.inbox("A")) == 41
    assert len(queue.idle) < 5
    assert len(queue.idle) + len(queue.dormant) == 5


def test_open_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_by_session, "IDLE_SESSIONS", 3)
    rig = rig_of()
    for number in range(10):
        send(rig, f"s{number}", "m")
    queue = queue_of(rig)
    assert (len(queue.idle), len(queue.dormant)) == (3, 7)
    for number in range(10):
        assert rig.accept(f"R{number}") == f"s{number}"
        assert names(rig.receive(f"R{number}")) == ["m"]
    for number in range(10):
        rig.detach(f"R{number}")
    assert (len(queue.idle), len(queue.dormant)) == (3, 7)


def test_reads_for_many_sessions_are_one_at_a_time_and_shared() -> None:
    rig = rig_of()
    for number in range(40):
        send(rig, f"s{number}", *(f"{number}-{n}" for n in range(5)))
    rig.crash()
    rig.is_auto = False
    for number in range(40):
        consumer_id = 1_000 + number
        rig.names[f"R{number}"] = consumer_id
        rig.submit(AcceptSession(QUEUE, consumer_id, PEEK_LOCK, f"s{number}".encode()))
    fetches = [
        effect
        for outcome, _ in rig.pending
        for effect in outcome.effects
        if isinstance(effect, Fetch)
    ]
    assert [len(fetch.row_keys) for fetch in fetches] == [5]
    rig.clients.update({1_000 + n: Client(QUEUE, ACTIVE, PEEK_LOCK) for n in range(40)})
    rig.commit()
    fetched = [
        len(effect.row_keys)
        for result in rig.results
        if isinstance(result, Outcome)
        for effect in result.effects
        if isinstance(effect, Fetch)
    ]
    assert fetched == [5, 195]


def test_a_clean_stop_journals_attempts_of_sessions() -> None:
    rig = rig_of()
    send(rig, "s", "a")
    rig.accept("A", "s")
    rig.receive("A")
    rig.apply(Quiesce())
    assert rig.tables.acquired == {1: 1}


def test_counts_of_a_session_that_is_paged_out_are_kept() -> None:
    rig = rig_of()
    send(rig, "s", "a", "b")
    rig.accept("A", "s")
    rig.settle(Disposition.ABANDON, *rig.receive("A"), session_id=b"s")
    rig.detach("A")
    queue = queue_of(rig)
    (session,) = queue.idle
    queue._reduce(session)
    rig.accept("B")
    assert [d.delivery_count for d in rig.receive("B", 2)] == [1, 0]


def test_a_clean_stop_journals_counts_of_unloaded_messages() -> None:
    rig = rig_of(budget_bytes=6_000)
    send(rig, "s", "a")
    rig.accept("A", "s")
    rig.settle(Disposition.ABANDON, *rig.receive("A"), session_id=b"s")
    rig.detach("A")
    send(rig, "t", *(f"t{n}" for n in range(20)))
    rig.accept("B", "t")
    rig.demand("B", 20)
    assert list(queue_of(rig).dormant) == [b"s"]
    rig.apply(Quiesce())
    rig.crash()
    rig.accept("A", "s")
    assert rig.receive("A")[0].delivery_count == 1


def test_an_empty_session_object_is_used_again_for_another_session() -> None:
    rig = rig_of(budget_bytes=800)
    send(rig, "s", "a", "b")
    send(rig, "t", "c", "d")
    rig.accept("A", "s")
    rig.apply(DeleteMessages(QUEUE, ACTIVE, 2, None, b"s"))
    rig.detach("A")
    rig.accept("A", "t")
    assert names(rig.receive("A", 3)) == ["c", "d"]


def loaded_sessions(sessions: int, each: int) -> LoadedPartition:
    """Return a partition with this number of sessions, their messages alternating."""
    total = sessions * each
    blocks = [
        ReserveBlock(1 + start, 65_536, QUEUE, ACTIVE, 1 + start)
        for start in range(0, total, 65_536)
    ]
    return LoadedPartition(
        epoch=2,
        catalog_version=1,
        next_row_key=blocks[-1].first_key + 65_536,
        entities=[LoadedEntity(QUEUE, "q", EntityKind.QUEUE, PROPERTIES, total * 100)],
        blocks=blocks,
        keys={(QUEUE, ACTIVE): array("q", range(1, total + 1))},
        next_sequence={QUEUE: blocks[-1].first_sequence + 65_536},
        sessions={
            QUEUE: {
                b"session-%d" % n: array("q", range(1 + n, total + 1, sessions))
                for n in range(sessions)
            }
        },
    )


def test_dormant_sessions_are_small() -> None:
    """1 M messages in 100 k sessions: 64 bytes a message and 300 a session at most, measured on a
    tenth of that."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        loaded = loaded_sessions(10_000, 10)
        state = PartitionState(
            partition_id=1,
            loaded=loaded,
            seed=1,
            budget=WindowBudget(1 << 20),
            limits=LIMITS[Sku.STANDARD],
        )
        del loaded
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= 100_000 * 64 + 10_000 * 300
    counts = state.counts(QUEUE)
    assert counts is not None
    assert counts.active == 100_000


@pytest.mark.slow
def test_messages_above_the_budget_take_little_memory() -> None:
    state = PartitionState(
        partition_id=1,
        loaded=loaded_sessions(1, 1),
        seed=1,
        budget=WindowBudget(2_000),
        limits=LIMITS[Sku.STANDARD],
    )
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(10):
            for first in range(0, 5_000, 50):
                burst = [message("m", session=f"session-{n}") for n in range(first, first + 50)]
                state.apply(Enqueue(QUEUE, burst), 1_000)
        del burst
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= 50_000 * 64 + 5_000 * 300


# --- browsing -------------------------------------------------------------------------------------


def test_peek_over_sessions_pages_in_order_of_number() -> None:
    rig = rig_of(budget_bytes=9_000)
    for turn in range(5):
        for session in "abcd":
            send(rig, session, f"{session}{turn}")
    rig.accept("A", "b")
    rig.settle(Disposition.DEFER, *rig.receive("A", 1), session_id=b"b")
    rig.receive("A", 1)
    seen: list[str] = []
    number = 0
    while True:
        reply = rig.apply(Peek(QUEUE, ACTIVE, number, 3, 1 << 20))
        assert isinstance(reply, Peeked)
        if not reply.messages:
            break
        seen += [name_of(peeked.envelope) for peeked in reply.messages]
        number = reply.messages[-1].sequence + 1
    assert seen == [f"{session}{turn}" for turn in range(5) for session in "abcd"]
    reply = rig.apply(Peek(QUEUE, ACTIVE, 0, 9, 1 << 20, b"b"))
    assert isinstance(reply, Peeked)
    assert [name_of(p.envelope) for p in reply.messages] == [f"b{turn}" for turn in range(5)]
    assert rig.apply(Peek(QUEUE, ACTIVE, 0, 9, 1 << 20, b"none")) == Peeked([])


def test_peek_finds_the_oldest_session_wherever_it_is_kept() -> None:
    rig = rig_of(budget_bytes=800)
    for session in "abcd":
        send(rig, session, session)
    rig.accept("A", "a")
    rig.detach("A")
    assert [name_of(peeked.envelope) for peeked in rig.peek(limit=1)] == ["a"]
    assert list(queue_of(rig).dormant)[-1] == b"a"


def test_states_that_were_removed_are_not_remembered_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An early state that is kept precedes those of short-lived sessions."""
    monkeypatch.setattr(session_states, "KEPT_STATES", 50)
    rig = Rig(QueueProperties(requires_session=True))
    rig.accept("first", "first")
    rig.apply(SetSessionState(QUEUE, b"first", rig.names["first"], b"kept"))
    for number in range(200):
        name = f"s{number}"
        rig.accept(name, name)
        for state in (b"x", None):
            rig.now_ms += 1
            rig.apply(SetSessionState(QUEUE, name.encode(), rig.names[name], state))
        rig.detach(name)
    entity = rig.state.entities.get(QUEUE)
    assert entity is not None
    assert isinstance(entity.active, SessionQueue)
    assert len(entity.active.states._held) < 60
    assert rig.apply(GetSessionState(QUEUE, b"first", rig.names["first"])) == SessionState(b"kept")


def test_a_state_pushes_out_messages_of_other_entities() -> None:
    rig = Rig(PROPERTIES, budget_bytes=3_000)
    rig.put(QueueProperties(), entity_no=QUEUE + 1)
    rig.accept("A", "s")
    rig.send("a", "b", "c", "d", entity_no=QUEUE + 1)
    consumer_id = rig.names["A"]
    rig.is_auto = False  # a state is kept until it is durable
    rig.submit(SetSessionState(QUEUE, b"s", consumer_id, b"x" * 1_500))
    assert rig.budget.used_bytes <= 3_000
    rig.commit()
    taken = rig.receive("B", 4, entity_no=QUEUE + 1)
    assert [name_of(delivery.envelope) for delivery in taken] == ["a", "b", "c", "d"]
