"""Sessions against a small model that knows nothing of open sessions, windows or tables.

Checked after every step: one holder a session and order within it (I6), no loss and one place for
each message (I1, I5), counts (I8, I18), reads of a state return the last write, no receiver waits
while a session is free, and all of it across restarts at any point.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    CompleteSessions,
    DeferredReceived,
    DeleteBySequence,
    DeleteMessages,
    Delivery,
    Disposition,
    Done,
    GetSessionState,
    ListSessions,
    MessagesDeleted,
    MessagesHandled,
    Peek,
    Peeked,
    ReceiveDeferred,
    Refusal,
    Refused,
    RenewSession,
    ResendBySequence,
    SessionRenewed,
    SessionsListed,
    SessionState,
    SetSessionState,
    Settled,
)
from tests.entity.partition_rig import (
    ACTIVE,
    DELETE,
    DLQ,
    PEEK_LOCK,
    QUEUE,
    Rig,
    message,
    name_of,
    properties_of,
)

LOCK_MS = 5_000
SESSIONS = "abcd"
RECEIVERS = ["R1", "R2", "R3", "R4"]


@dataclass
class Known:
    """One message of the model."""

    name: str
    session: str
    sequence: int
    place: int  # order among the available messages
    enqueued_ms: int
    ttl_ms: int | None
    state: str = "ready"  # ready, locked, deferred, scheduled, dead, gone
    failures: int = 0
    is_deferred: bool = False
    reason: str | None = None
    delivery: Delivery | None = None


@dataclass
class Held:
    """A session with a holder."""

    receiver: str
    until_ms: int
    is_deleting: bool = False


@dataclass
class Model:
    known: dict[str, Known] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    states: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    stale: list[tuple[Delivery, str]] = field(default_factory=list)


class SessionMachine(RuleBasedStateMachine):
    @initialize(
        budget_bytes=st.sampled_from([800, 3_000, 6_000, 1 << 30]),
        maximum=st.integers(1, 4),
        dead_letters=st.booleans(),
    )
    def start(self, budget_bytes: int, maximum: int, dead_letters: bool) -> None:
        self.maximum, self.dead_letters = maximum, dead_letters
        properties = QueueProperties(
            requires_session=True,
            lock_duration_ms=LOCK_MS,
            max_delivery_count=maximum,
            dead_lettering_on_message_expiration=dead_letters,
        )
        self.rig = Rig(properties, budget_bytes=budget_bytes)
        self.model = Model()
        self.places = 0

    # --- the model ------------------------------------------------------------------------------

    def of(self, *states: str, session: str | None = None) -> list[Known]:
        return [
            known
            for known in self.model.known.values()
            if known.state in states and session in (None, known.session)
        ]

    def next_place(self) -> int:
        self.places += 1
        return self.places

    def is_expired(self, known: Known) -> bool:
        return known.ttl_ms is not None and known.enqueued_ms + known.ttl_ms <= self.rig.now_ms

    def die(self, known: Known, reason: str | None) -> None:
        known.state, known.reason, known.delivery = "dead", reason, None

    def expire(self, known: Known) -> None:
        if self.dead_letters:
            self.die(known, "TTLExpiredException")
        else:
            known.state = "gone"

    def give_back(self, known: Known, *, failed: bool) -> None:
        if known.delivery is not None:
            self.model.stale.append((known.delivery, known.session))
        known.delivery = None
        known.failures += failed
        if failed and known.failures >= self.maximum:
            self.die(known, "MaxDeliveryCountExceeded")
        elif known.is_deferred:
            known.state = "deferred"
        elif self.is_expired(known):
            self.expire(known)
        else:
            known.state = "ready"

    def expected(self, session: str, count: int) -> list[Known]:
        """Walk the available messages of a session as its holder with demand `count` does."""
        taken: list[Known] = []
        for known in sorted(self.of("ready", session=session), key=lambda known: known.place):
            if len(taken) == count:
                break
            if self.is_expired(known):
                self.expire(known)
            elif known.failures >= self.maximum:
                self.die(known, "MaxDeliveryCountExceeded")
            else:
                taken.append(known)
        return taken

    def free(self) -> list[str]:
        """Return the sessions that a request for the next one may get."""
        return [
            session
            for session in SESSIONS
            if session not in self.model.held and self.of("ready", session=session)
        ]

    def end(self, session: str, *, failed: bool) -> None:
        """Take a session from its holder."""
        del self.model.held[session]
        for known in self.of("locked", session=session):
            self.give_back(known, failed=failed)

    def note_grants(self) -> None:
        """Record grants to waiting receivers: in order of waiting, and of free sessions only."""
        while self.model.waiting and self.free():
            receiver = self.model.waiting.pop(0)
            client = self.rig.clients[self.rig.names[receiver]]
            assert client.session in self.free()
            self.hold(client.session, receiver)

    def hold(self, session: str, receiver: str) -> None:
        client = self.rig.clients[self.rig.names[receiver]]
        assert session not in self.model.held, "two holders"
        assert client.until_ms == self.rig.now_ms + LOCK_MS
        self.model.held[session] = Held(receiver, client.until_ms, client.mode is DELETE)

    def idle_receivers(self) -> list[str]:
        busy = {held.receiver for held in self.model.held.values()} | set(self.model.waiting)
        return [receiver for receiver in RECEIVERS if receiver not in busy]

    def consumer_id(self, session: str) -> int:
        return self.rig.names[self.model.held[session].receiver]

    # --- rules ----------------------------------------------------------------------------------

    @rule(
        sessions=st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=6),
        ttl_ms=st.sampled_from([None, None, 1_000, 20_000]),
        delay_ms=st.sampled_from([0, 0, 0, 3_000]),
    )
    def send(self, sessions: list[str], ttl_ms: int | None, delay_ms: int) -> None:
        now_ms = self.rig.now_ms
        due_ms = now_ms + delay_ms if delay_ms else None
        names = [f"m{len(self.model.known) + n}" for n in range(len(sessions))]
        numbers = self.rig.send(
            *(
                message(name, ttl_ms=ttl_ms, scheduled_ms=due_ms, session=session)
                for name, session in zip(names, sessions, strict=True)
            )
        )
        assert numbers == sorted(set(numbers))
        for name, session, number in zip(names, sessions, numbers, strict=True):
            known = Known(name, session, number, self.next_place(), due_ms or now_ms, ttl_ms)
            known.state = "scheduled" if due_ms else "ready"
            self.model.known[name] = known
        self.note_grants()

    @precondition(lambda self: self.idle_receivers())
    @rule(
        data=st.data(),
        session=st.sampled_from(SESSIONS),
        mode=st.sampled_from([PEEK_LOCK, PEEK_LOCK, DELETE]),
    )
    def accept_named(self, data: st.DataObject, session: str, mode: int) -> None:
        receiver = data.draw(st.sampled_from(self.idle_receivers()))
        got = self.rig.accept(receiver, session, PEEK_LOCK if mode == 0 else DELETE)
        if session in self.model.held:
            assert got is Refusal.SESSION_CANNOT_BE_LOCKED
        else:
            assert got == session
            self.hold(session, receiver)

    @precondition(lambda self: self.idle_receivers())
    @rule(data=st.data())
    def accept_next(self, data: st.DataObject) -> None:
        receiver = data.draw(st.sampled_from(self.idle_receivers()))
        free = self.free()
        got = self.rig.accept(receiver)
        if free:
            assert got in free
            self.hold(str(got), receiver)
        else:
            assert got is None
            self.model.waiting.append(receiver)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        receiver = data.draw(st.sampled_from(self.model.waiting))
        self.rig.detach(receiver)
        self.model.waiting.remove(receiver)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), count=st.integers(1, 5))
    def receive(self, data: st.DataObject, count: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.model.held)))
        held = self.model.held[session]
        expected = self.expected(session, count)
        taken = self.rig.receive(held.receiver, count)
        assert [name_of(d.envelope) for d in taken] == [known.name for known in expected]
        for known, delivery in zip(expected, taken, strict=True):
            assert delivery.delivery_count == known.failures
            assert delivery.enqueued_ms == known.enqueued_ms
            known.sequence = delivery.sequence
            if held.is_deleting:
                known.state = "gone"
            else:
                assert delivery.locked_until_ms == held.until_ms
                known.state, known.delivery = "locked", delivery

    @precondition(lambda self: self.of("locked"))
    @rule(
        data=st.data(),
        disposition=st.sampled_from(list(Disposition)),
        is_changed=st.booleans(),
        is_named=st.booleans(),
    )
    def settle(
        self, data: st.DataObject, disposition: Disposition, is_changed: bool, is_named: bool
    ) -> None:
        known = data.draw(st.sampled_from(self.of("locked")))
        delivery = known.delivery
        assert delivery is not None
        reply = self.rig.settle(
            disposition,
            delivery,
            properties={"changed": known.name} if is_changed else None,
            session_id=known.session.encode() if is_named else None,
        )
        assert reply == Settled()
        if disposition in (Disposition.ABANDON, Disposition.RELEASE):
            self.give_back(known, failed=disposition is Disposition.ABANDON)
            return
        self.model.stale.append((delivery, known.session))
        known.delivery = None
        if disposition is Disposition.COMPLETE:
            known.state = "gone"
        elif disposition is Disposition.DEFER:
            known.is_deferred = True
            known.state = "deferred"
        else:
            self.die(known, None)

    @precondition(lambda self: self.model.stale)
    @rule(
        data=st.data(),
        disposition=st.sampled_from(list(Disposition)),
        is_named=st.booleans(),
    )
    def settle_with_a_stale_token(
        self, data: st.DataObject, disposition: Disposition, is_named: bool
    ) -> None:
        delivery, session = data.draw(st.sampled_from(self.model.stale))
        session_id = session.encode() if is_named else None
        assert self.rig.settle(disposition, delivery, session_id=session_id) == Settled([0])

    @precondition(lambda self: self.of("locked"))
    @rule(data=st.data())
    def complete_several(self, data: st.DataObject) -> None:
        locked = data.draw(st.lists(st.sampled_from(self.of("locked")), unique_by=id))
        stale = data.draw(st.lists(st.sampled_from(self.model.stale))) if self.model.stale else []
        done = [(known.delivery, known.session) for known in locked]
        settled = data.draw(st.permutations([*done, *stale]))
        parts = [
            (session.encode(), [delivery.lock_token])  # type: ignore[union-attr]
            for delivery, session in settled
        ]
        lost = [index for index, each in enumerate(settled) if each not in done]
        assert self.rig.apply(CompleteSessions(QUEUE, parts)) == Settled(lost or None)
        self.model.stale += done  # type: ignore[arg-type]
        for known in locked:
            known.delivery = None
            known.state = "gone"

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.model.held)))
        receiver = self.model.held[session].receiver
        self.rig.detach(receiver)
        self.end(session, failed=False)
        self.note_grants()

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.model.held)))
        until_ms = self.rig.now_ms + LOCK_MS
        command = RenewSession(QUEUE, session.encode(), self.consumer_id(session))
        assert self.rig.apply(command) == SessionRenewed(until_ms)
        self.model.held[session].until_ms = until_ms

    @rule(session=st.sampled_from(SESSIONS))
    def use_unheld_session(self, session: str) -> None:
        session_id = session.encode()
        for command in (
            RenewSession(QUEUE, session_id, 10**9),
            GetSessionState(QUEUE, session_id, 10**9),
            SetSessionState(QUEUE, session_id, 10**9, b"no"),
            ReceiveDeferred(QUEUE, ACTIVE, [1], PEEK_LOCK, session_id, 10**9),
        ):
            reply = self.rig.apply(command)
            assert isinstance(reply, Refused)
            assert reply.refusal is Refusal.SESSION_LOCK_LOST

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), state=st.sampled_from([None, b"", b"x", b"0123456789"]))
    def set_state(self, data: st.DataObject, state: bytes | None) -> None:
        session = data.draw(st.sampled_from(sorted(self.model.held)))
        command = SetSessionState(QUEUE, session.encode(), self.consumer_id(session), state)
        assert self.rig.apply(command) == Done()
        self.model.states.pop(session, None)
        if state:  # no bytes clear it
            self.model.states[session] = (state, self.rig.now_ms)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def get_state(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.model.held)))
        command = GetSessionState(QUEUE, session.encode(), self.consumer_id(session))
        expected, _ = self.model.states.get(session, (None, 0))
        assert self.rig.apply(command) == SessionState(expected)

    @rule(skip=st.integers(0, 2), top=st.integers(1, 4), age_ms=st.sampled_from([None, 0, 2_000]))
    def list_sessions(self, skip: int, top: int, age_ms: int | None) -> None:
        if age_ms is None:
            after_ms = None
            names = {k.session for k in self.of("ready", "locked", "deferred")}
            names |= set(self.model.states)
        else:
            after_ms = self.rig.now_ms - age_ms
            names = {s for s, (_, at_ms) in self.model.states.items() if at_ms > after_ms}
        expected = [name.encode() for name in sorted(names)[skip : skip + top]]
        assert self.rig.apply(ListSessions(QUEUE, after_ms, skip, top)) == SessionsListed(expected)

    @precondition(lambda self: any(k.session in self.model.held for k in self.of("deferred")))
    @rule(data=st.data(), is_deleting=st.booleans())
    def receive_deferred(self, data: st.DataObject, is_deleting: bool) -> None:
        held = self.model.held
        known = data.draw(st.sampled_from([k for k in self.of("deferred") if k.session in held]))
        reply = self.rig.apply(
            ReceiveDeferred(
                QUEUE,
                ACTIVE,
                [known.sequence],
                DELETE if is_deleting else PEEK_LOCK,
                known.session.encode(),
                self.consumer_id(known.session),
            )
        )
        if self.is_expired(known):
            assert isinstance(reply, Refused)
            self.expire(known)
            return
        assert isinstance(reply, DeferredReceived)
        (delivery,) = reply.deliveries
        assert name_of(delivery.envelope) == known.name
        assert delivery.delivery_count == known.failures
        if is_deleting:
            known.state = "gone"
        else:
            assert delivery.locked_until_ms == held[known.session].until_ms
            known.state, known.delivery = "locked", delivery

    @rule(
        session=st.sampled_from([None, *SESSIONS]),
        limit=st.integers(1, 4),
        age_ms=st.sampled_from([0, 2_000]),
    )
    def delete_oldest(self, session: str | None, limit: int, age_ms: int) -> None:
        bound_ms = self.rig.now_ms - age_ms
        oldest = sorted(self.of("ready", session=session), key=lambda known: known.place)
        expected = [known for known in oldest if known.enqueued_ms <= bound_ms][:limit]
        session_id = None if session is None else session.encode()
        reply = self.rig.apply(DeleteMessages(QUEUE, ACTIVE, limit, bound_ms, session_id))
        assert reply == MessagesDeleted(len(expected))
        for known in expected:
            known.state = "gone"

    @precondition(lambda self: self.model.known)
    @rule(data=st.data())
    def delete_by_sequence(self, data: st.DataObject) -> None:
        everything = sorted(self.model.known.values(), key=lambda known: known.name)
        selected = data.draw(st.lists(st.sampled_from(everything), unique_by=id, max_size=5))
        selected = [known for known in selected if known.state != "dead"]
        numbers = [known.sequence for known in selected]
        reply = self.rig.apply(DeleteBySequence(QUEUE, ACTIVE, numbers))
        assert isinstance(reply, MessagesHandled)
        reasons = {"locked": Refusal.MESSAGE_LOCKED, "gone": Refusal.MESSAGE_NOT_FOUND}
        for known in selected:
            if known.state in reasons:
                assert reply.refused[known.sequence].refusal is reasons[known.state]
            else:
                assert known.sequence in reply.done
                known.state = "gone"

    @precondition(lambda self: self.of("dead"))
    @rule(data=st.data())
    def resend(self, data: st.DataObject) -> None:
        dead = data.draw(st.lists(st.sampled_from(self.of("dead")), unique_by=id, min_size=1))
        numbers = [known.sequence for known in dead]
        reply = self.rig.apply(ResendBySequence(QUEUE, DLQ, numbers, QUEUE))
        assert isinstance(reply, MessagesHandled)
        assert list(reply.done) == numbers
        for known in dead:
            known.sequence, known.place = reply.done[known.sequence], self.next_place()
            known.state, known.failures, known.is_deferred = "ready", 0, False
            known.enqueued_ms, known.reason = self.rig.now_ms, None
        self.note_grants()

    @rule(ms=st.sampled_from([1, 60, 150, 1_000, 2_999, 5_000, 12_000]))
    def advance(self, ms: int) -> None:
        end_ms = self.rig.now_ms + ms
        while True:
            moments = [held.until_ms for held in self.model.held.values()]
            moments += [known.enqueued_ms for known in self.of("scheduled")]
            next_ms = min([end_ms, *moments])
            self.rig.advance(next_ms - self.rig.now_ms)
            due = [k for k in self.of("scheduled") if k.enqueued_ms <= next_ms]
            for known in sorted(due, key=lambda k: (k.enqueued_ms, k.sequence)):
                known.state, known.place = "ready", self.next_place()
            for session, held in list(self.model.held.items()):
                if held.until_ms <= next_ms:
                    client = self.rig.clients[self.rig.names.pop(held.receiver)]
                    assert client.ended is Refusal.SESSION_LOCK_LOST
                    self.end(session, failed=True)
            self.note_grants()
            if next_ms == end_ms:
                break
        for peeked in self.rig.peek(limit=10_000):
            self.model.known[name_of(peeked.envelope)].sequence = peeked.sequence

    @rule()
    def fold(self) -> None:
        self.rig.tables.fold()

    @rule()
    def crash(self) -> None:
        attempts = set()
        for known in self.of("locked"):
            attempts.add(known.name)
            if known.delivery is not None:
                self.model.stale.append((known.delivery, known.session))
            known.delivery = None
            known.state = "deferred" if known.is_deferred else "ready"
        self.model.held.clear()
        self.model.waiting.clear()
        self.rig.crash()
        for peeked in self.rig.peek(limit=10_000):
            known = self.model.known[name_of(peeked.envelope)]
            true_count = known.failures + (known.name in attempts)
            assert true_count - 1 <= peeked.delivery_count <= true_count
            known.failures = peeked.delivery_count

    @rule()
    def drain_dead_letters(self) -> None:
        dead = self.rig.receive("D", 100, sub_queue=DLQ)
        assert sorted(name_of(d.envelope) for d in dead) == sorted(
            known.name for known in self.of("dead")
        )
        for delivery in dead:
            known = self.model.known[name_of(delivery.envelope)]
            assert properties_of(delivery.envelope).get("DeadLetterReason") == known.reason
            known.state = "gone"
        self.rig.settle(Disposition.COMPLETE, *dead, sub_queue=DLQ)

    # --- invariants -----------------------------------------------------------------------------

    @invariant()
    def every_message_is_where_the_model_says(self) -> None:
        if not hasattr(self, "rig"):
            return
        main = [name_of(peeked.envelope) for peeked in self.rig.peek(limit=10_000)]
        known = self.of("ready", "locked", "deferred", "scheduled")
        assert main == [each.name for each in sorted(known, key=lambda each: each.sequence)]
        numbers = sorted(each.sequence for each in known)
        for first in numbers[: len(numbers) : 3]:
            page = [peeked.sequence for peeked in self.rig.peek(first, 2)]
            assert page == [number for number in numbers if number >= first][:2]
        assert sorted(self.rig.peek_names(DLQ)) == sorted(k.name for k in self.of("dead"))
        counts = self.rig.state.counts(QUEUE)
        assert counts is not None
        assert counts.active == len(self.of("ready", "locked", "deferred"))
        assert counts.scheduled == len(self.of("scheduled"))
        assert counts.dead_letter == len(self.of("dead"))
        assert len(self.rig.tables.rows) == len(main) + counts.dead_letter

    @invariant()
    def a_session_shows_its_own_messages(self) -> None:
        if not hasattr(self, "rig"):
            return
        for session in SESSIONS:
            reply = self.rig.apply(Peek(QUEUE, ACTIVE, 0, 3, 1 << 20, session.encode()))
            assert isinstance(reply, Peeked)
            known = self.of("ready", "locked", "deferred", session=session)
            expected = sorted(known, key=lambda each: each.sequence)[:3]
            assert [name_of(p.envelope) for p in reply.messages] == [k.name for k in expected]

    @invariant()
    def free_sessions_have_no_waiters(self) -> None:
        if hasattr(self, "rig"):
            assert not (self.model.waiting and self.free())
            for receiver in self.model.waiting:
                assert self.rig.clients[self.rig.names[receiver]].session is None


TestSessions = pytest.mark.slow(SessionMachine.TestCase)
TestSessions.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
