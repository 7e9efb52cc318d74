"""Two partitions that forward to each other, crashed at any point, against "exactly once"."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from postbus.contract.entities import EntityStatus, QueueProperties
from postbus.entity.commands import (
    Disposition,
    Enqueue,
    Enqueued,
    Reply,
    ResendBySequence,
    SetDemand,
    Settle,
    Settled,
    SubQueue,
)
from tests.entity.partition_rig import ACTIVE, QUEUE, Rig, message, name_of
from tests.entity.transfer.forward_rig import Bus

TRANSFER = SubQueue.TRANSFER_DEAD_LETTER
FIRST, SECOND, END = QUEUE, 8, 9
"""queue-7 and queue-9 lie in partition 1, queue-8 in partition 2: 7 -> 8 -> 9, dead letters of 9
-> 8."""


class ForwardMachine(RuleBasedStateMachine):
    @initialize(budget_bytes=st.sampled_from([2_000, 1 << 30]))
    def start(self, budget_bytes: int) -> None:
        self.rigs = {
            number: Rig(budget_bytes=budget_bytes, is_auto=False, seed=number) for number in (1, 2)
        }
        self.bus = Bus(self.rigs, {"queue-7": (1, 7), "queue-8": (2, 8), "queue-9": (1, 9)})
        self.statuses = {FIRST: True, SECOND: True}
        self.is_open = {SECOND: True, END: True}
        for entity_no in (FIRST, SECOND, END):
            self.define(entity_no)
        self.sent: dict[str, list[Reply]] = {}
        self.completed: dict[str, list[Reply]] = {}
        self.demand = 0

    def define(self, entity_no: int) -> None:
        targets = {FIRST: "Queue-8", SECOND: "QUEUE-9", END: None}
        target = targets[entity_no] if self.statuses.get(entity_no) else None
        is_open = self.is_open.get(entity_no, True)
        rig = self.rigs[2 if entity_no == SECOND else 1]
        rig.put(
            QueueProperties(
                forward_to=target,
                status=EntityStatus.ACTIVE if is_open else EntityStatus.SEND_DISABLED,
                forward_dead_lettered_messages_to="queue-8" if entity_no == END else None,
                max_delivery_count=2,
                lock_duration_ms=5_000,
            ),
            entity_no=entity_no,
        )

    @rule(
        count=st.integers(1, 4),
        entity_no=st.sampled_from([FIRST, FIRST, SECOND]),
        is_late=st.booleans(),
    )
    def send(self, count: int, entity_no: int, is_late: bool) -> None:
        rig = self.rigs[2 if entity_no == SECOND else 1]
        names = [f"m{len(self.sent) + n}" for n in range(count)]
        due_ms = rig.now_ms + 1_000 if is_late else None
        envelopes = [message(name, scheduled_ms=due_ms) for name in names]
        replies = rig.submit(Enqueue(entity_no, envelopes, is_atomic=True))
        self.sent.update(dict.fromkeys(names, replies))

    @rule(number=st.sampled_from([1, 2]), count=st.integers(1, 5))
    def commit(self, number: int, count: int) -> None:
        self.rigs[number].commit(count)
        self.bus.start()

    @rule()
    def send_on(self) -> None:
        for hop in self.bus.hops:
            self.bus.send(hop)

    @rule()
    def answer(self) -> None:
        for hop in list(self.bus.hops):
            self.bus.answer(hop)

    @rule(number=st.sampled_from([1, 2]))
    def crash(self, number: int) -> None:
        self.bus.crash(number)
        if number == 1:
            self.demand = 0

    @rule(entity_no=st.sampled_from([FIRST, SECOND]))
    def switch_forwarding(self, entity_no: int) -> None:
        self.statuses[entity_no] = not self.statuses[entity_no]
        self.define(entity_no)

    @rule(entity_no=st.sampled_from([SECOND, END]))
    def switch_target(self, entity_no: int) -> None:
        self.is_open[entity_no] = not self.is_open[entity_no]
        self.define(entity_no)

    @rule(ms=st.sampled_from([1, 1_000, 6_000]))
    def wait(self, ms: int) -> None:
        for rig in self.rigs.values():
            rig.advance(ms)
        self.bus.start()

    @rule(count=st.integers(1, 4))
    def receive(self, count: int) -> None:
        rig = self.rigs[1]
        consumer_id = rig.consumer("A", entity_no=END)
        self.demand += count
        rig.submit(SetDemand(consumer_id, self.demand))

    @precondition(lambda self: "A" in self.rigs[1].names)
    @rule(
        disposition=st.sampled_from(
            [Disposition.COMPLETE, Disposition.ABANDON, Disposition.DEAD_LETTER]
        )
    )
    def settle(self, disposition: Disposition) -> None:
        rig = self.rigs[1]
        for delivery in rig.inbox("A"):
            replies = rig.submit(Settle(END, ACTIVE, [delivery.lock_token], disposition))
            if disposition is Disposition.COMPLETE:
                self.completed[name_of(delivery.envelope)] = replies

    @rule(count=st.integers(1, 3), to=st.sampled_from(["queue-8", "QUEUE-9", "gone", ""]))
    def resend(self, count: int, to: str) -> None:
        """Resend returned messages: through the outbox, or at once into the queue itself."""
        for number, entity_no in ((1, FIRST), (2, SECOND)):
            tables = self.rigs[number].tables
            numbers = [
                sequence
                for key, (sequence, _) in tables.kept.items()
                if (block := tables.block_of(key)).entity_no == entity_no
                and block.sub_queue is TRANSFER
            ]
            target_no, target = (None, to) if to else (entity_no, None)
            command = ResendBySequence(entity_no, TRANSFER, numbers[:count], target_no, target)
            self.rigs[number].submit(command)

    def teardown(self) -> None:
        if not hasattr(self, "bus"):
            return
        for rig in self.rigs.values():
            rig.commit()
        self.bus.settle()
        for rig in self.rigs.values():
            rig.advance(10_000)
        self.bus.settle()
        where = self.bus.where()
        for name, places in where.items():
            assert sum(places.values()) == 1, f"{name} is in {places}"
            assert next(iter(places))[1] != 0, f"{name} is left in an outbox"
        for name, replies in self.sent.items():
            if name in self.completed:
                if self.completed[name] == [Settled()]:
                    assert name not in where, f"{name} was completed and is back"
            elif replies and isinstance(replies[0], Enqueued):
                assert name in where, f"{name} was accepted and is gone"
        for rig in self.rigs.values():
            assert len(rig.state._outbox) == 0
            assert all(entity.outbound == 0 for entity in rig.state.entities.values())


TestForwarding = pytest.mark.slow(pytest.mark.behaviour("S203", "S204")(ForwardMachine.TestCase))
TestForwarding.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
