"""Random transactions against a model: all of one happens or nothing, also across a crash (I13)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import (
    CheckLocks,
    Delivery,
    Disposition,
    Enqueue,
    Enqueued,
    Peek,
    Peeked,
    PeekedMessage,
    Refused,
    Settle,
    Settled,
    SubQueue,
    Transact,
    Transacted,
)
from postbus.message.codec import encode_value
from postbus.message.envelope import Envelope
from tests.entity.partition_rig import ACTIVE, DLQ, QUEUE, Rig, message

OTHER = 8
DETECTING = 9
QUEUES = (QUEUE, OTHER, DETECTING)
PROPERTIES = QueueProperties(lock_duration_ms=5_000, max_delivery_count=2)
TOO_LARGE = 300_000


@dataclass(frozen=True)
class Held:
    """A delivery and where it was made."""

    name: str
    entity_no: int
    sub_queue: SubQueue
    delivery: Delivery


@dataclass
class Model:
    """Names in each sub-queue, and how often the delivery of a message failed."""

    places: dict[str, tuple[int, SubQueue]]
    failures: dict[str, int]
    ids: dict[str, int]
    held: dict[bytes, Held]

    def copy(self) -> Model:
        return Model(dict(self.places), dict(self.failures), dict(self.ids), dict(self.held))

    def settle(self, held: Held, disposition: Disposition) -> None:
        name, is_main = held.name, held.sub_queue is ACTIVE
        del self.held[held.delivery.lock_token]
        if disposition is Disposition.COMPLETE:
            del self.places[name]
        elif disposition is Disposition.DEAD_LETTER:
            self.places[name] = (held.entity_no, DLQ)
        elif disposition is Disposition.ABANDON:
            self.failures[name] += 1
            if is_main and self.failures[name] >= 2:
                self.places[name] = (held.entity_no, DLQ)


class TransactionMachine(RuleBasedStateMachine):
    @initialize(budget_bytes=st.sampled_from([1_000, 1 << 30]))
    def start(self, budget_bytes: int) -> None:
        self.rig = Rig(PROPERTIES, budget_bytes=budget_bytes)
        self.rig.put(PROPERTIES, entity_no=OTHER)
        detecting = PROPERTIES.model_copy(update={"requires_duplicate_detection": True})
        self.rig.put(detecting, entity_no=DETECTING)
        self.model = Model({}, {}, {}, {})
        self.stale: list[Held] = []
        self.count = 0

    def envelope(self, size_bytes: int = 100) -> tuple[str, Envelope]:
        name = f"m{self.count}"
        self.count += 1
        made = message(name, size_bytes=size_bytes)
        made.message_id = encode_value(name)
        return name, made

    # --- around the transactions ------------------------------------------------------------------

    @rule(entity_no=st.sampled_from(QUEUES), count=st.integers(1, 4))
    def send(self, entity_no: int, count: int) -> None:
        made = [self.envelope() for _ in range(count)]
        self.rig.send(*(envelope for _, envelope in made), entity_no=entity_no)
        for name, _ in made:
            self.note_sent(self.model, entity_no, name, name)

    @staticmethod
    def note_sent(model: Model, entity_no: int, name: str, message_id: str) -> bool:
        """Return whether the message is stored: it is unless it is a duplicate."""
        if entity_no == DETECTING:
            if message_id in model.ids:
                return False
            model.ids[message_id] = entity_no
        model.places[name] = (entity_no, ACTIVE)
        model.failures[name] = 0
        return True

    @rule(
        entity_no=st.sampled_from(QUEUES),
        count=st.integers(1, 4),
        sub_queue=st.sampled_from([ACTIVE, DLQ]),
    )
    def receive(self, entity_no: int, count: int, sub_queue: SubQueue) -> None:
        name = f"{entity_no}-{sub_queue}"
        self.rig.consumer(name, sub_queue=sub_queue, entity_no=entity_no)
        self.rig.demand(name, count)
        for delivery in self.rig.inbox(name):
            held = Held(delivery.envelope.body.decode(), entity_no, sub_queue, delivery)
            assert self.model.places[held.name] == (entity_no, sub_queue)
            self.model.held[delivery.lock_token] = held
        for peeked in self.peek(entity_no, DLQ):
            gone = peeked.envelope.body.decode()
            if self.model.failures[gone] >= 2:  # a crash took its last delivery (ADR 19)
                self.model.places[gone] = (entity_no, DLQ)
        self.rig.detach(name)

    @rule()
    def let_locks_expire(self) -> None:
        for held in list(self.model.held.values()):
            self.stale.append(held)
            if held.sub_queue is ACTIVE:
                self.model.settle(held, Disposition.ABANDON)
            else:
                del self.model.held[held.delivery.lock_token]
        self.rig.advance(5_000)

    # --- the transactions -------------------------------------------------------------------------

    @rule(
        data=st.data(),
        fate=st.sampled_from(["commit", "commit", "crash-after", "crash-before"]),
        is_clean=st.booleans(),
    )
    def transact(self, data: st.DataObject, fate: str, is_clean: bool) -> None:
        expected = self.model.copy()
        operations: list[Enqueue | Settle] = []
        replies: list[Enqueued | Settled | None] = []
        is_refused = False
        for _ in range(data.draw(st.integers(1, 6))):
            if data.draw(st.booleans()):
                is_refused |= self.draw_send(data, operations, replies, expected, is_clean)
            else:
                is_refused |= self.draw_settlement(data, operations, replies, expected, is_clean)
        rig = self.rig
        if fate == "crash-before":
            rig.is_auto = False
            rig.submit(Transact(operations))
            rig.is_auto = True
            self.crash(rig)
            return
        reply = rig.apply(Transact(operations))
        if is_refused:
            assert isinstance(reply, Refused)
        else:
            assert isinstance(reply, Transacted)
            for actual, wanted in zip(reply.replies, replies, strict=True):
                if isinstance(wanted, Enqueued):
                    assert isinstance(actual, Enqueued)
                    assert [bool(number) for number in actual.sequence_numbers] == (
                        wanted.sequence_numbers
                    )
                else:
                    assert actual == wanted
            self.stale += [
                held for token, held in self.model.held.items() if token not in expected.held
            ]
            self.model = expected
        rig.tick_now()
        if fate == "crash-after":
            self.crash(rig)

    def draw_send(
        self,
        data: st.DataObject,
        operations: list[Enqueue | Settle],
        replies: list[Enqueued | Settled | None],
        expected: Model,
        is_clean: bool,
    ) -> bool:
        entity_no = data.draw(st.sampled_from(QUEUES))
        is_large = not is_clean and data.draw(st.integers(0, 5)) == 0
        stored: list[int] = []
        envelopes: list[Envelope] = []
        for _ in range(data.draw(st.integers(1, 3))):
            name, made = self.envelope(TOO_LARGE if is_large else 100)
            message_id = name
            if expected.ids and data.draw(st.integers(0, 2)) == 0:
                message_id = data.draw(st.sampled_from(sorted(expected.ids)))
                made.message_id = encode_value(message_id)
            stored.append(self.note_sent(expected, entity_no, name, message_id))
            envelopes.append(made)
        operations.append(Enqueue(entity_no, envelopes))
        replies.append(Enqueued(stored))
        return is_large

    def draw_settlement(
        self,
        data: st.DataObject,
        operations: list[Enqueue | Settle],
        replies: list[Enqueued | Settled | None],
        expected: Model,
        is_clean: bool,
    ) -> bool:
        candidates = list((expected if is_clean else self.model).held.values())
        if not is_clean:
            candidates += self.stale[-3:]
        if not candidates:
            return False
        held = data.draw(st.sampled_from(candidates))
        dispositions = list(Disposition)
        dispositions.remove(Disposition.DEFER)
        if is_clean and held.sub_queue is DLQ:
            dispositions.remove(Disposition.DEAD_LETTER)
        disposition = data.draw(st.sampled_from(dispositions))
        changes: list[dict[str, object] | None] = [None, {"changed": 1}]
        properties = data.draw(st.sampled_from(changes))
        operations.append(
            Settle(
                held.entity_no,
                held.sub_queue,
                [held.delivery.lock_token],
                disposition,
                properties=properties,
            )
        )
        replies.append(Settled())
        if held.delivery.lock_token not in expected.held:
            return True
        if held.sub_queue is DLQ and disposition is Disposition.DEAD_LETTER:
            return True
        expected.settle(held, disposition)
        return False

    def crash(self, rig: Rig) -> None:
        self.stale += self.model.held.values()
        self.model.held.clear()
        rig.crash()
        for entity_no in QUEUES:
            for sub_queue in (ACTIVE, DLQ):
                for peeked in self.peek(entity_no, sub_queue):
                    name = peeked.envelope.body.decode()
                    self.model.failures[name] = peeked.delivery_count

    # --- invariants -------------------------------------------------------------------------------

    def peek(self, entity_no: int, sub_queue: SubQueue) -> list[PeekedMessage]:
        reply = self.rig.apply(Peek(entity_no, sub_queue, 0, 10_000, 1 << 20))
        assert isinstance(reply, Peeked)
        return reply.messages

    @invariant()
    def every_message_is_where_the_model_says(self) -> None:
        if not hasattr(self, "rig"):
            return
        for entity_no in QUEUES:
            for sub_queue in (ACTIVE, DLQ):
                actual = sorted(
                    peeked.envelope.body.decode() for peeked in self.peek(entity_no, sub_queue)
                )
                assert actual == sorted(
                    name
                    for name, place in self.model.places.items()
                    if place == (entity_no, sub_queue)
                )

    @invariant()
    def locks_match_the_model(self) -> None:
        if not hasattr(self, "rig"):
            return
        for held in self.model.held.values():
            check = CheckLocks(held.entity_no, held.sub_queue, [held.delivery.lock_token])
            assert self.rig.apply(check) == Settled()
        for held in self.stale[-5:]:
            check = CheckLocks(held.entity_no, held.sub_queue, [held.delivery.lock_token])
            assert self.rig.apply(check) == Settled([0])


TestTransactions = pytest.mark.slow(pytest.mark.behaviour("S189")(TransactionMachine.TestCase))
TestTransactions.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
