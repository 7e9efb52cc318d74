"""Crashes anywhere in the traffic of sessions, and determinism of it."""

from __future__ import annotations

import random

import pytest

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    AcceptSession,
    Disposition,
    Done,
    Enqueue,
    Enqueued,
    GetSessionState,
    MessageState,
    ReceiveDeferred,
    RemoveConsumer,
    RenewSession,
    Reply,
    SessionState,
    SetDemand,
    SetSessionState,
    Settle,
    Settled,
    Tick,
)
from tests.entity.partition_rig import (
    ACTIVE,
    DLQ,
    PEEK_LOCK,
    QUEUE,
    Client,
    Rig,
    message,
    name_of,
)

PROPERTIES = QueueProperties(
    requires_session=True,
    lock_duration_ms=5_000,
    max_delivery_count=3,
    dead_lettering_on_message_expiration=True,
)
SESSIONS = [b"a", b"b", b"c", b"d", b"e"]


class Traffic:
    """Random clients of one session queue; remembers their commands and the replies."""

    def __init__(self, seed: int, budget_bytes: int) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(PROPERTIES, budget_bytes=budget_bytes, is_auto=False, seed=seed)
        self.rig.commit()
        self.sent: dict[str, list[Reply]] = {}
        self.session_of: dict[str, bytes] = {}
        self.completed: dict[str, list[Reply]] = {}
        self.states: dict[bytes, list[tuple[bytes | None, list[Reply]]]] = {}
        self.demands: dict[int, int] = {}
        self.deferred: list[tuple[int, bytes]] = []
        self.consumer_id = 0

    def step(self) -> None:
        rig, choose = self.rig, self.random
        action = choose.random()
        if action < 0.3:
            self.send()
        elif action < 0.45:
            self.accept()
        elif action < 0.6 and self.demands:
            consumer_id = choose.choice(sorted(self.demands))
            self.demands[consumer_id] += choose.randint(1, 4)
            rig.submit(SetDemand(consumer_id, self.demands[consumer_id]))
        elif action < 0.8 and self.demands:
            self.settle(choose.choice(sorted(self.demands)))
        elif action < 0.9 and self.demands:
            self.use_session(choose.choice(sorted(self.demands)))
        else:
            rig.now_ms += choose.choice([1, 10, 120, 2_000, 5_000])
            rig.submit(Tick())
        if choose.random() < 0.6:
            rig.commit(choose.randint(1, 6))
        for consumer_id in [each for each in self.demands if rig.clients[each].ended]:
            del self.demands[consumer_id]

    def send(self) -> None:
        envelopes = []
        for _ in range(self.random.randint(1, 4)):
            name = f"m{len(self.session_of)}"
            self.session_of[name] = self.random.choice(SESSIONS)
            due_ms = self.rig.now_ms + 1_500 if self.random.random() < 0.15 else None
            ttl_ms = 3_000 if self.random.random() < 0.1 else None
            session = self.session_of[name].decode()
            envelopes.append(message(name, scheduled_ms=due_ms, ttl_ms=ttl_ms, session=session))
        replies = self.rig.submit(Enqueue(QUEUE, envelopes))
        for envelope in envelopes:
            self.sent[name_of(envelope)] = replies

    def accept(self) -> None:
        if len(self.demands) > 6:
            return
        self.consumer_id += 1
        self.rig.clients[self.consumer_id] = Client(QUEUE, ACTIVE, PEEK_LOCK)
        session_id = self.random.choice([None, *SESSIONS])
        self.rig.submit(AcceptSession(QUEUE, self.consumer_id, PEEK_LOCK, session_id))
        self.demands[self.consumer_id] = 0

    def settle(self, consumer_id: int) -> None:
        client = self.rig.clients[consumer_id]
        self.random.shuffle(client.inbox)
        for _ in range(min(len(client.inbox), self.random.randint(1, 4))):
            delivery = client.inbox.pop()
            disposition = self.random.choice([Disposition.COMPLETE] * 4 + [*Disposition])
            session_id = delivery.envelope.session_id
            assert session_id is not None
            assert client.session == session_id.decode()
            command = Settle(QUEUE, ACTIVE, [delivery.lock_token], disposition)
            command.session_id = session_id
            replies = self.rig.submit(command)
            if disposition is Disposition.COMPLETE:
                self.completed[name_of(delivery.envelope)] = replies
            elif disposition is Disposition.DEFER:
                self.deferred.append((delivery.sequence, session_id))

    def use_session(self, consumer_id: int) -> None:
        client = self.rig.clients[consumer_id]
        action = self.random.choice(["state", "state", "renew", "deferred", "close"])
        if action == "close":
            self.rig.submit(RemoveConsumer(consumer_id))
            del self.rig.clients[consumer_id], self.demands[consumer_id]
        elif client.session is not None:
            session_id = client.session.encode()
            if action == "state":
                state = self.random.choice([None, b"%d" % self.random.randint(0, 99)])
                replies = self.rig.submit(SetSessionState(QUEUE, session_id, consumer_id, state))
                self.states.setdefault(session_id, []).append((state, replies))
            elif action == "renew":
                self.rig.submit(RenewSession(QUEUE, session_id, consumer_id))
            else:
                numbers = [number for number, of in self.deferred if of == session_id][-1:]
                self.rig.submit(
                    ReceiveDeferred(QUEUE, ACTIVE, numbers, PEEK_LOCK, session_id, consumer_id)
                )

    def crash(self) -> None:
        self.rig.crash()
        self.demands.clear()
        self.deferred.clear()

    def check_after_crash(self) -> None:
        """Assert that confirmed commands took effect; unanswered ones may have."""
        rig = self.rig
        peeked = rig.peek(limit=10_000)
        main = [name_of(each.envelope) for each in peeked]
        dead = [name_of(each.envelope) for each in rig.peek(limit=10_000, sub_queue=DLQ)]
        present = main + dead
        assert len(present) == len(set(present)), "a message is in two places"
        for each in peeked:
            assert each.envelope.session_id == self.session_of[name_of(each.envelope)]
        for name, replies in self.sent.items():
            if replies and name not in self.completed:
                assert isinstance(replies[0], Enqueued)
                assert name in present, f"accepted {name} is missing"
        for name, replies in self.completed.items():
            if replies == [Settled()]:
                assert name not in present, f"completed {name} is back"
        for session_id, writes in self.states.items():
            self._check_state(session_id, writes)

    def _check_state(
        self, session_id: bytes, writes: list[tuple[bytes | None, list[Reply]]]
    ) -> None:
        """Assert that the state is the last confirmed write, or a later unconfirmed one."""
        tellable: list[bytes | None] = [None]
        for state, replies in writes:
            if replies == [Done()]:
                tellable = [state]
            elif not replies:
                tellable.append(state)
        self.consumer_id += 1
        rig = self.rig
        rig.clients[self.consumer_id] = Client(QUEUE, ACTIVE, PEEK_LOCK)
        rig.apply(AcceptSession(QUEUE, self.consumer_id, PEEK_LOCK, session_id))
        reply = rig.apply(GetSessionState(QUEUE, session_id, self.consumer_id))
        assert isinstance(reply, SessionState)
        assert reply.state in tellable
        rig.apply(RemoveConsumer(self.consumer_id))
        del rig.clients[self.consumer_id]
        writes[:] = [(reply.state, [Done()])]

    def drain(self) -> dict[bytes, list[int]]:
        """Receive and complete everything, session by session; return their numbers."""
        rig = self.rig
        rig.is_auto = True
        numbers: dict[bytes, list[int]] = {}
        while (session := rig.accept("Z")) is not None:
            assert isinstance(session, str)
            while batch := rig.receive("Z", 3):
                seen = numbers.setdefault(session.encode(), [])
                seen += [delivery.sequence for delivery in batch]
                rig.settle(Disposition.COMPLETE, *batch, session_id=session.encode())
            rig.detach("Z")
        return numbers


@pytest.mark.slow
@pytest.mark.parametrize("budget_bytes", [1 << 30, 8_000, 2_000])
@pytest.mark.parametrize("seed", range(12))
def test_a_crash_between_any_two_commits_keeps_sessions_whole(seed: int, budget_bytes: int) -> None:
    traffic = Traffic(seed, budget_bytes)
    for _ in range(6):
        for _ in range(traffic.random.randint(5, 60)):
            traffic.step()
        traffic.crash()
        traffic.check_after_crash()
    traffic.rig.advance(2_000)
    numbers = traffic.drain()
    assert all(each == sorted(set(each)) for each in numbers.values()), "out of order"
    left = {peeked.state for peeked in traffic.rig.peek(limit=10_000)}
    assert left <= {MessageState.DEFERRED}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_log_makes_the_same_outcomes(seed: int) -> None:
    first = Traffic(seed, 4_000)
    for _ in range(400):
        first.step()
    again = Rig(PROPERTIES, budget_bytes=4_000, is_auto=False, seed=seed)
    for (command, now_ms, found), expected in zip(
        first.rig.log[1:], first.rig.results[1:], strict=True
    ):
        assert again.state.apply(command, now_ms, found) == expected
    assert again.state.next_deadline_ms == first.rig.state.next_deadline_ms
