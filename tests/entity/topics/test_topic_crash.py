"""Crashes anywhere in the traffic of a topic: a publish is in all subscriptions or in none."""

from __future__ import annotations

import random

import pytest

from postbus.contract.entities import (
    RuleProperties,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    Cancelled,
    CancelScheduled,
    Disposition,
    Enqueue,
    Enqueued,
    Reply,
    SetDemand,
    Settle,
    Settled,
    Tick,
)
from postbus.entity.outcomes import Needs, Outcome
from postbus.entity.queues import dedup
from postbus.message.codec import encode_value
from postbus.message.envelope import Envelope
from tests.entity.partition_rig import ACTIVE, DLQ, TOPIC, Rig, message, name_of

WINDOW_MS = 600_000
WHOLE, BROKEN, BUSY = 21, 22, 23
FAILS = SqlFilter(sql_expression="sys.TimeToLive / 0 = 1")
BROKEN_RULE = RuleProperties(name="b", sql_filter=FAILS)


class Traffic:
    """Publishers and one receiver; remembers their commands and the replies.

    `WHOLE` keeps every copy, `BROKEN` makes dead letters of them, `BUSY` is received from.
    """

    def __init__(self, seed: int, budget_bytes: int) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(budget_bytes=budget_bytes, seed=seed)
        self.rig.put_topic(
            TopicProperties(
                requires_duplicate_detection=True,
                duplicate_detection_history_time_window_ms=WINDOW_MS,
            )
        )
        self.rig.put_subscription(WHOLE)
        self.rig.put_subscription(BROKEN, rules=(BROKEN_RULE,))
        self.rig.put_subscription(BUSY, SubscriptionProperties(lock_duration_ms=5_000))
        self.rig.is_auto = False
        self.sent: dict[str, list[Reply]] = {}
        self.groups: dict[str, list[str]] = {}
        self.repeated: set[str] = set()
        self.cancelled: dict[str, list[Reply]] = {}
        self.completed: dict[str, list[Reply]] = {}
        self.numbers: dict[str, int] = {}
        self.attach()

    def attach(self) -> None:
        self.demand = 0
        self.consumer_id = self.rig.consumer("A", entity_no=BUSY)

    def step(self) -> None:
        rig, choose = self.rig, self.random
        action = choose.random()
        if action < 0.45:
            self.publish()
        elif action < 0.55:
            self.demand += choose.randint(1, 5)
            rig.submit(SetDemand(self.consumer_id, self.demand))
        elif action < 0.75:
            self.settle()
        elif action < 0.82 and self.numbers:
            name = choose.choice(sorted(self.numbers))
            number = self.numbers.pop(name)
            self.cancelled[name] = rig.submit(CancelScheduled(TOPIC, [number]))
        elif action < 0.86:
            rig.put_subscription(BUSY, SubscriptionProperties(lock_duration_ms=5_000))
        else:
            rig.now_ms += choose.choice([1, 10, 120, 2_000, 5_000])
            rig.submit(Tick())
        if choose.random() < 0.6:
            rig.commit(choose.randint(1, 6))

    def envelope(self, name: str, due_ms: int | None = None) -> Envelope:
        envelope = message(name, scheduled_ms=due_ms, ttl_ms=1 << 40)
        envelope.message_id = encode_value(name)
        envelope.body = name.encode().ljust(self.random.choice([5, 1_500, 9_000]))
        envelope.size_bytes = 100 + len(envelope.body)
        return envelope

    def publish(self) -> None:
        now_ms = self.rig.now_ms
        names = [f"m{len(self.sent) + n}" for n in range(self.random.randint(1, 4))]
        if self.random.random() < 0.3 and self.sent:  # a client repeats unconfirmed sends
            names.append(self.random.choice(sorted(self.sent)))
            self.repeated.add(names[-1])
        due_ms = now_ms + 1_500 if self.random.random() < 0.2 else None
        batch = [self.envelope(name, due_ms) for name in names]
        replies = self.rig.submit(Enqueue(TOPIC, batch, is_atomic=True))
        reply = getattr(self.rig.results[-1], "reply", None)
        assert isinstance(reply, Enqueued)
        for name, number in zip(names, reply.sequence_numbers, strict=True):
            if name not in self.sent:
                self.sent[name] = replies
                self.groups[name] = names
                if due_ms is not None:
                    self.numbers[name] = number

    def settle(self) -> None:
        inbox = self.rig.clients[self.consumer_id].inbox
        self.random.shuffle(inbox)
        for _ in range(min(len(inbox), self.random.randint(1, 4))):
            delivery = inbox.pop()
            disposition = self.random.choice([Disposition.COMPLETE, *Disposition])
            replies = self.rig.submit(Settle(BUSY, ACTIVE, [delivery.lock_token], disposition))
            if disposition is Disposition.COMPLETE:
                self.completed[name_of(delivery.envelope)] = replies

    def names(self, entity_no: int, *queues: int) -> list[str]:
        return [
            name
            for sub_queue in (ACTIVE, DLQ)
            if not queues or sub_queue in queues
            for name in self.rig.peek_names(sub_queue, entity_no)
        ]

    def check_after_crash(self) -> None:
        whole, waiting = self.names(WHOLE), self.names(TOPIC, ACTIVE)
        dead, busy = self.names(BROKEN, DLQ), self.names(BUSY)
        for names in (whole, waiting, dead, busy):
            assert len(names) == len(set(names)), "a copy was made twice"
        assert sorted(whole) == sorted(dead), "one subscription has what another has not"
        assert set(busy) <= set(whole)
        assert not set(waiting) & set(whole), "a scheduled message was published and stayed"
        accepted = set(whole) | set(waiting)
        for name, replies in self.sent.items():
            if replies and name not in self.cancelled:
                assert name in accepted, f"accepted {name} is missing"
            others = set(self.groups[name]) - self.cancelled.keys() - self.repeated
            if name in accepted and name not in self.repeated:
                assert all(other in accepted for other in others), "half a batch"
        for name, replies in self.completed.items():
            if replies == [Settled()]:
                assert name not in busy, f"completed {name} is back"
        for name in set(whole) - set(busy):
            assert name in self.completed, f"{name} left without being settled"
        for name, replies in self.cancelled.items():
            if replies == [Cancelled()]:
                assert name not in accepted


@pytest.mark.slow
@pytest.mark.parametrize("budget_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("seed", range(8))
def test_a_crash_between_any_two_commits_leaves_every_publish_whole(
    seed: int, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # let most ids be old ones that are looked up in the tables
        monkeypatch.setattr(dedup, "RECENT_IDS", 4)
        monkeypatch.setattr(dedup, "RECENT_MS", 0)
    traffic = Traffic(seed, budget_bytes)
    for _ in range(5):
        for _ in range(traffic.random.randint(5, 50)):
            traffic.step()
        traffic.rig.crash()
        traffic.numbers.clear()
        traffic.check_after_crash()
        traffic.attach()
    traffic.rig.is_auto = True
    traffic.rig.advance(10_000)
    traffic.check_after_crash()
    for name in sorted(traffic.sent):  # known ids are duplicates at any age
        is_known = name in traffic.names(WHOLE)
        reply = traffic.rig.apply(Enqueue(TOPIC, [traffic.envelope(name)]))
        assert isinstance(reply, Enqueued)
        assert reply.sequence_numbers[0] == 0 or not is_known
    assert len(traffic.names(WHOLE)) == len(set(traffic.names(WHOLE)))


def plain(result: Outcome | Needs) -> list[object]:
    """Return comparable values: rebuilt envelopes are equal by their stored fields."""
    if isinstance(result, Needs):
        return [result]
    rows = [
        (row_key, enqueued_ms, name_of(envelope), envelope.application_properties)
        for row_key, enqueued_ms, envelope in result.inserts
    ]
    return [result.reply, rows, result.deletes, result.mutations, len(result.effects)]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_log_makes_the_same_outcomes(seed: int) -> None:
    first = Traffic(seed, 20_000)
    for _ in range(200):
        first.step()
    replay = Traffic(seed, 20_000).rig
    done = len(replay.log)
    for (command, now_ms, found), expected in zip(
        first.rig.log[done:], first.rig.results[done:], strict=True
    ):
        assert plain(replay.state.apply(command, now_ms, found)) == plain(expected)
