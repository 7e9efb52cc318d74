"""Crashes anywhere, and determinism: the same log makes the same outcomes."""

from __future__ import annotations

import random

import pytest

from postbus.contract.entities import DAY_MS, QueueProperties
from postbus.entity.commands import (
    Cancelled,
    CancelScheduled,
    DeleteBySequence,
    Disposition,
    Enqueue,
    Enqueued,
    Reply,
    ResendBySequence,
    SetDemand,
    Settle,
    Settled,
    Tick,
)
from postbus.entity.outcomes import Deliver, Outcome
from postbus.message.envelope import Envelope
from tests.entity.partition_rig import ACTIVE, DLQ, QUEUE, Rig, message, name_of

PROPERTIES = QueueProperties(
    lock_duration_ms=5_000, max_delivery_count=3, dead_lettering_on_message_expiration=True
)
WITH_HISTORY = PROPERTIES.model_copy(update={"history_retention_ms": DAY_MS})


class Traffic:
    """Random clients of one queue; remembers their commands and the replies."""

    def __init__(
        self, seed: int, budget_bytes: int, properties: QueueProperties = PROPERTIES
    ) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(properties, budget_bytes=budget_bytes, is_auto=False, seed=seed)
        self.rig.commit()
        self.sent: dict[str, list[Reply]] = {}
        self.completed: dict[str, list[Reply]] = {}
        self.cancelled: dict[str, list[Reply]] = {}
        self.deleted: dict[str, list[Reply]] = {}
        self.numbers: dict[str, int] = {}
        self.demand = 0
        self.attach()

    def attach(self) -> None:
        self.demand = 0
        self.consumer_id = self.rig.consumer("A")

    def step(self) -> None:
        rig, choose = self.rig, self.random
        action = choose.random()
        if action < 0.35:
            for _ in range(choose.randint(1, 4)):
                self.send()
        elif action < 0.55:
            self.demand += choose.randint(1, 5)
            rig.submit(SetDemand(self.consumer_id, self.demand))
        elif action < 0.85:
            self.settle()
        elif action < 0.88:
            self.handle()
        elif action < 0.92 and self.numbers:
            name = choose.choice(sorted(self.numbers))
            number = self.numbers.pop(name)
            self.cancelled[name] = rig.submit(CancelScheduled(QUEUE, [number]))
        else:
            rig.now_ms += choose.choice([1, 10, 120, 2_000, 5_000])
            rig.submit(Tick())
        if choose.random() < 0.6:
            rig.commit(choose.randint(1, 6))

    def send(self) -> None:
        name = f"m{len(self.sent)}"
        due_ms = self.rig.now_ms + 1_500 if self.random.random() < 0.15 else None
        ttl_ms = 3_000 if self.random.random() < 0.2 else None
        envelope = message(name, scheduled_ms=due_ms, ttl_ms=ttl_ms)
        self.sent[name] = self.rig.submit(Enqueue(QUEUE, [envelope]))
        if due_ms is not None:
            outcome = self.rig.results[-1]
            assert isinstance(outcome.reply, Enqueued)
            self.numbers[name] = outcome.reply.sequence_numbers[0]

    def settle(self) -> None:
        inbox = self.rig.clients[self.consumer_id].inbox
        self.random.shuffle(inbox)
        for _ in range(min(len(inbox), self.random.randint(1, 4))):
            delivery = inbox.pop()
            disposition = self.random.choice(
                [Disposition.COMPLETE, Disposition.COMPLETE, *Disposition]
            )
            replies = self.rig.submit(Settle(QUEUE, ACTIVE, [delivery.lock_token], disposition))
            if disposition is Disposition.COMPLETE:
                self.completed[name_of(delivery.envelope)] = replies

    def handle(self) -> None:
        """Delete or resend some messages of the dead-letter queue, or former ones."""
        known = [number for number, _ in self.rig.tables.kept.values()]
        if known:
            numbers = self.random.sample(known, min(len(known), 3))
            if self.random.random() < 0.8:
                self.rig.submit(ResendBySequence(QUEUE, DLQ, numbers, QUEUE))
            else:
                names = [
                    name_of(self.rig.tables.rows[key][1])
                    for key, (number, _) in self.rig.tables.kept.items()
                    if number in numbers
                ]
                replies = self.rig.submit(DeleteBySequence(QUEUE, DLQ, numbers))
                self.deleted.update(dict.fromkeys(names, replies))

    def names(self) -> tuple[list[str], list[str]]:
        return (
            [name_of(peeked.envelope) for peeked in self.rig.peek(limit=10_000)],
            [name_of(peeked.envelope) for peeked in self.rig.peek(limit=10_000, sub_queue=DLQ)],
        )

    def check_after_crash(self) -> None:
        """Assert that confirmed commands took effect; unanswered ones may have."""
        main, dead = self.names()
        present = main + dead
        assert len(present) == len(set(present)), "a message is in two places"
        requested = set(self.completed) | set(self.cancelled) | set(self.deleted)
        for name, replies in self.sent.items():
            if replies and name not in requested:
                assert name in present, f"accepted {name} is missing"
        for name, replies in self.completed.items():
            if replies == [Settled()]:
                assert name not in present, f"completed {name} is back"
        for name, replies in self.cancelled.items():
            if replies == [Cancelled()]:
                assert name not in present

    def check_history(self) -> None:
        """Assert that a history has all messages confirmed as accepted or completed."""
        tables = self.rig.tables
        if not self.rig.state.entities[QUEUE].keeps_settled:
            assert not tables.settled
            return
        rows = [name_of(envelope) for _, envelope in tables.rows.values()]
        kept = {name_of(tables.rows[row_key][1]) for row_key in tables.settled}
        for name, replies in self.sent.items():
            assert not replies or name in rows or name in self.cancelled
        for name, replies in self.completed.items():
            assert replies != [Settled()] or name in kept


@pytest.mark.behaviour("S3", "S61")
@pytest.mark.parametrize("budget_bytes", [1 << 30, 2_000])
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("properties", [PROPERTIES, WITH_HISTORY], ids=["plain", "history"])
def test_a_crash_between_any_two_commits_loses_and_revives_no_message(
    properties: QueueProperties, seed: int, budget_bytes: int
) -> None:
    traffic = Traffic(seed, budget_bytes, properties)
    for _ in range(6):
        for _ in range(traffic.random.randint(5, 60)):
            traffic.step()
        traffic.rig.crash()
        traffic.numbers.clear()
        traffic.check_after_crash()
        traffic.check_history()
        traffic.attach()
    traffic.rig.is_auto = True
    while batch := traffic.rig.receive(count=20):
        traffic.rig.settle(Disposition.COMPLETE, *batch)
    while batch := traffic.rig.receive(count=20, sub_queue=DLQ):
        traffic.rig.settle(Disposition.COMPLETE, *batch, sub_queue=DLQ)


@pytest.mark.parametrize("budget_bytes", [1 << 30, 2_000])
def test_a_reload_after_each_commit_shows_the_same_history(budget_bytes: int) -> None:
    """Deliveries in order, counts and dead letters are those of a partition that never stopped."""

    def history(*, is_reloaded: bool) -> list[object]:
        rig = Rig(PROPERTIES, budget_bytes=budget_bytes)
        seen: list[object] = []
        for turn in range(30):
            rig.send(f"a{turn}", message(f"b{turn}", scheduled_ms=rig.now_ms + 250))
            taken = rig.receive(count=2)
            seen += [(name_of(d.envelope), d.sequence, d.delivery_count) for d in taken]
            rig.advance(100)
            for index, delivery in enumerate(taken):
                rig.settle(list(Disposition)[(turn + index) % 5], delivery)
            if is_reloaded:
                rig.crash()
        seen.append(rig.peek_names())
        seen.append(rig.peek_names(DLQ))
        return seen

    straight, reloaded = history(is_reloaded=False), history(is_reloaded=True)

    def without_numbers(seen: list[object]) -> list[object]:
        return [(e[0], e[2]) if isinstance(e, tuple) else e for e in seen]

    assert without_numbers(straight) == without_numbers(reloaded)


def comparable(result: object) -> object:
    """Return the fields of a result, so that rebuilt messages compare by content."""
    if isinstance(result, list | tuple):
        return [comparable(each) for each in result]
    if isinstance(result, Outcome | Deliver | Envelope):
        return [comparable(getattr(result, slot)) for slot in type(result).__slots__]
    return result


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_log_makes_the_same_outcomes(seed: int) -> None:
    first = Traffic(seed, 2_000)
    for _ in range(300):
        first.step()
    replay = Rig(PROPERTIES, budget_bytes=2_000, is_auto=False, seed=seed)
    for (command, now_ms, found), expected in zip(
        first.rig.log[1:], first.rig.results[1:], strict=True
    ):
        assert comparable(replay.state.apply(command, now_ms, found)) == comparable(expected)
    assert replay.state.next_deadline_ms == first.rig.state.next_deadline_ms


def test_another_seed_changes_tokens_only() -> None:
    tokens = []
    for seed in (1, 2):
        rig = Rig(seed=seed)
        rig.send("m")
        tokens.append(rig.receive()[0].lock_token)
    assert tokens[0] != tokens[1]
    assert tokens[0][8:] == tokens[1][8:]
