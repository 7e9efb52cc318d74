"""A topic with subscriptions against a model of lists: the copies of each, in order.

Checked after every step: no copy lost or made twice (I1), order of the topic in each subscription
(I7), each accepted id once (I14), counts and sizes exact, every row owned by an entity.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postbus.contract.entities import (
    DEFAULT_RULE,
    RuleProperties,
    SqlAction,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    Cancelled,
    CancelScheduled,
    DeleteBySequence,
    Disposition,
    DropEntity,
    Enqueue,
    Enqueued,
    MessagesHandled,
    Refused,
    ResendBySequence,
    SubQueue,
)
from postbus.entity.queues import dedup
from postbus.message.codec import encode_value
from postbus.message.envelope import Envelope
from postbus.message.patch import merge_properties
from tests.entity.partition_rig import ACTIVE, DLQ, QUEUE, TOPIC, Rig, name_of, properties_of

WINDOW_MS = 20_000
COLORS = ("red", "blue")


def _rule(name: str, expression: str, action: str | None = None) -> RuleProperties:
    return RuleProperties(
        name=name,
        sql_filter=SqlFilter(sql_expression=expression),
        action=None if action is None else SqlAction(sql_expression=action),
    )


RULES: dict[str, tuple[RuleProperties, ...]] = {
    "all": (DEFAULT_RULE,),
    "none": (),
    "red": (_rule("r", "color = 'red'"),),
    "marked": (_rule("r", "color = 'red'"), _rule("m", "1=1", "SET mark = 1")),
    "broken": (_rule("b", "size / 0 = 1"),),
}


@dataclass(frozen=True)
class Sent:
    """A message as it was published."""

    name: str
    color: str
    body_bytes: int

    def envelope(self, scheduled_ms: int | None) -> Envelope:
        section = merge_properties(b"", {"color": self.color, "size": self.body_bytes})
        body = self.name.encode().ljust(self.body_bytes)
        return Envelope(
            message_id=encode_value(self.name),
            application_properties=section,
            body=body,
            size_bytes=50 + len(section) + len(body),
            scheduled_ms=scheduled_ms,
        )


@dataclass
class Scheduled:
    sent: Sent
    due_ms: int
    life: int


@dataclass
class Known:
    """A subscription of the model: (name, mark) in order, and dead letters."""

    rules: str
    copies: list[tuple[str, int | None]]
    dead: list[str]
    is_in_order: bool = True  # until something is sent again


class TopicMachine(RuleBasedStateMachine):
    @initialize(budget_bytes=st.sampled_from([12_000, 1 << 30]), detects=st.booleans())
    def start(self, budget_bytes: int, detects: bool) -> None:
        self.rig = Rig(budget_bytes=budget_bytes)
        self.detects = detects
        self.rig.put_topic(
            TopicProperties(
                requires_duplicate_detection=detects,
                duplicate_detection_history_time_window_ms=WINDOW_MS,
            )
        )
        self.known: dict[int, Known] = {}
        self.accepted: dict[str, int] = {}
        self.scheduled: dict[int, Scheduled] = {}
        self.slots: dict[str, int] = {}
        self.last_no = TOPIC
        self.life = 0
        self.is_exact = True
        self.put("a", "all")

    # --- the model ------------------------------------------------------------------------------

    def accept(self, sent: Sent) -> bool:
        if not self.detects:
            return True
        seen_ms = self.accepted.get(sent.name)
        if seen_ms is not None and self.rig.now_ms - seen_ms < WINDOW_MS:
            return False
        self.accepted[sent.name] = self.rig.now_ms
        return True

    def publish(self, sent: Sent) -> None:
        for known in self.known.values():
            if known.rules == "broken":
                known.dead.append(sent.name)
            if known.rules == "all" or (known.rules in ("red", "marked") and sent.color == "red"):
                known.copies.append((sent.name, None))
            if known.rules == "marked":
                known.copies.append((sent.name, 1))

    # --- rules ----------------------------------------------------------------------------------

    @rule(
        names=st.lists(st.integers(0, 11), min_size=1, max_size=5),
        color=st.sampled_from(COLORS),
        body_bytes=st.sampled_from([3, 300, 2_000, 9_000]),
        delay_ms=st.sampled_from([0, 0, 3_000]),
        is_atomic=st.booleans(),
    )
    def send(
        self, names: list[int], color: str, body_bytes: int, delay_ms: int, is_atomic: bool
    ) -> None:
        due_ms = self.rig.now_ms + delay_ms if delay_ms else None
        burst = [Sent(f"m{n}", color, body_bytes) for n in names]
        command = Enqueue(TOPIC, [sent.envelope(due_ms) for sent in burst], is_atomic)
        reply = self.rig.apply(command)
        assert isinstance(reply, Enqueued)
        assert reply.refusals is None
        numbers = [number for number in reply.sequence_numbers if number]
        assert numbers == sorted(set(numbers))
        for sent, number in zip(burst, reply.sequence_numbers, strict=True):
            is_new = self.accept(sent)
            assert (number != 0) is (is_new or due_ms is not None)
            if is_new and due_ms is None:
                self.publish(sent)
            elif is_new and due_ms is not None:
                self.scheduled[number] = Scheduled(sent, due_ms, self.life)

    @rule()
    def send_a_batch_with_one_too_large(self) -> None:
        large = Sent("large", "red", 300_000)
        small = Sent("small", "red", 3)
        command = Enqueue(TOPIC, [small.envelope(None), large.envelope(None)], is_atomic=True)
        assert isinstance(self.rig.apply(command), Refused)

    @precondition(lambda self: self.scheduled)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.scheduled)))
        assert isinstance(self.rig.apply(CancelScheduled(TOPIC, [number])), Cancelled)
        assert isinstance(self.rig.apply(CancelScheduled(TOPIC, [number])), Refused)
        if self.scheduled.pop(number).life < self.life:
            self.is_exact = False  # the size of rows unread since the load is an estimate
        self.is_exact = self.is_exact or not self.scheduled

    @rule(slot=st.sampled_from("abc"), rules=st.sampled_from(sorted(RULES)))
    def put(self, slot: str, rules: str) -> None:
        if slot not in self.slots:
            self.last_no += 1  # numbers of entities are never used again
            self.slots[slot] = self.last_no
        entity_no = self.slots[slot]
        self.rig.put_subscription(entity_no, SubscriptionProperties(), RULES[rules])
        known = self.known.setdefault(entity_no, Known(rules, [], []))
        known.rules = rules

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        entity_no = self.slots.pop(data.draw(st.sampled_from(sorted(self.slots))))
        self.rig.apply(DropEntity(entity_no, 2))
        self.rig.names = {
            name: consumer_id
            for name, consumer_id in self.rig.names.items()
            if self.rig.clients[consumer_id].entity_no != entity_no
        }
        self.rig.advance(0)
        del self.known[entity_no]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), count=st.integers(1, 4), is_dead=st.booleans())
    def receive(self, data: st.DataObject, count: int, is_dead: bool) -> None:
        entity_no = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[entity_no]
        sub_queue = DLQ if is_dead else ACTIVE
        taken = self.rig.receive(
            f"{entity_no}/{is_dead}", count, entity_no=entity_no, sub_queue=sub_queue
        )
        names = [name_of(d.envelope) for d in taken]
        if is_dead:
            assert names == known.dead[:count]
            assert all("DeadLetterReason" in properties_of(d.envelope) for d in taken)
            del known.dead[:count]
        else:
            marks = [properties_of(d.envelope).get("mark") for d in taken]
            assert list(zip(names, marks, strict=True)) == known.copies[:count]
            del known.copies[:count]
        origins = [d.envelope.origin_sequence or 0 for d in taken]
        assert all(origins)
        assert origins == sorted(origins) or not known.is_in_order
        self.rig.settle(Disposition.COMPLETE, *taken, entity_no=entity_no, sub_queue=sub_queue)

    @precondition(lambda self: any(known.dead for known in self.known.values()))
    @rule(data=st.data(), to_topic=st.booleans())
    def resend(self, data: st.DataObject, to_topic: bool) -> None:
        dead = [number for number, known in self.known.items() if known.dead]
        entity_no = data.draw(st.sampled_from(dead))
        known = self.known[entity_no]
        found = self.rig.peek(0, 10_000, DLQ, 1 << 30, entity_no)
        selected = data.draw(st.sets(st.integers(0, len(found) - 1), min_size=1))
        numbers = [found[index].sequence for index in sorted(selected)]
        target_no = TOPIC if to_topic else entity_no
        reply = self.rig.apply(ResendBySequence(entity_no, DLQ, numbers, target_no))
        assert isinstance(reply, MessagesHandled)
        assert list(reply.done) == numbers
        known.dead = [name for index, name in enumerate(known.dead) if index not in selected]
        for index in sorted(selected):
            envelope = found[index].envelope
            name = name_of(envelope)
            if to_topic:
                self.publish(Sent(name, str(properties_of(envelope)["color"]), 0))
            else:
                known.copies.append((name, None))
                known.is_in_order = False

    @precondition(lambda self: self.known)
    @rule(data=st.data(), is_dead=st.booleans())
    def delete_by_sequence(self, data: st.DataObject, is_dead: bool) -> None:
        entity_no = data.draw(st.sampled_from(sorted(self.known)))
        known, sub_queue = self.known[entity_no], DLQ if is_dead else ACTIVE
        found = self.rig.peek(0, 10_000, sub_queue, 1 << 30, entity_no)
        selected = data.draw(st.sets(st.integers(0, max(len(found) - 1, 0))))
        numbers = [found[index].sequence for index in sorted(selected) if found]
        reply = self.rig.apply(DeleteBySequence(entity_no, sub_queue, numbers))
        assert reply == MessagesHandled(dict.fromkeys(numbers, 0), {}, [])
        places: list[object] = known.dead if is_dead else known.copies  # type: ignore[assignment]
        places[:] = [each for index, each in enumerate(places) if index not in selected]

    @rule(ms=st.sampled_from([1, 1_000, 3_000, 15_000, 25_000]))
    def advance(self, ms: int) -> None:
        end_ms = self.rig.now_ms + ms
        due = [(entry.due_ms, n) for n, entry in self.scheduled.items() if entry.due_ms <= end_ms]
        for _, number in sorted(due):
            self.publish(self.scheduled.pop(number).sent)
        self.rig.advance(ms)

    @rule()
    def crash(self) -> None:
        self.rig.crash()
        self.life += 1

    # --- invariants -----------------------------------------------------------------------------

    @invariant()
    def every_copy_is_where_the_model_says(self) -> None:
        if not hasattr(self, "rig"):
            return
        rows = 0
        total_bytes = 0
        for entity_no, known in self.known.items():
            copies = self.copies_of(entity_no, ACTIVE)
            assert copies == known.copies
            assert [name for name, _ in self.copies_of(entity_no, DLQ)] == known.dead
            counts = self.rig.state.counts(entity_no)
            assert counts is not None
            assert (counts.active, counts.dead_letter) == (len(copies), len(known.dead))
            assert counts.size_bytes == self.stored_bytes(entity_no)
            rows += counts.active + counts.dead_letter
            total_bytes += counts.size_bytes
        counts = self.rig.state.counts(TOPIC)
        assert counts is not None
        assert counts.scheduled == len(self.scheduled)
        if self.is_exact:
            assert counts.size_bytes == total_bytes + self.stored_bytes(TOPIC)
        waiting = self.rig.peek(limit=1_000, entity_no=TOPIC)
        assert [p.sequence for p in waiting] == sorted(self.scheduled)
        assert len(self.rig.tables.rows) == rows + len(self.scheduled)

    def copies_of(self, entity_no: int, sub_queue: SubQueue) -> list[tuple[str, int | None]]:
        found = self.rig.peek(0, 10_000, sub_queue, 1 << 30, entity_no)
        numbers = [peeked.sequence for peeked in found]
        assert numbers == sorted(set(numbers))
        return [
            (name_of(peeked.envelope), properties_of(peeked.envelope).get("mark"))
            for peeked in found
        ]

    def stored_bytes(self, entity_no: int) -> int:
        tables = self.rig.tables
        return sum(
            envelope.size_bytes
            for row_key, (_, envelope) in tables.rows.items()
            if tables.block_of(row_key).entity_no == entity_no
        )

    @invariant()
    def detection_remembers_the_window_only(self) -> None:
        if not hasattr(self, "rig"):
            return
        oldest_ms = self.rig.now_ms - WINDOW_MS - dedup.LEAST_SWEEP_MS
        assert all(row.seen_ms >= oldest_ms for row in self.rig.tables.seen)
        assert QUEUE in self.rig.tables.definitions


TestTopic = pytest.mark.slow(TopicMachine.TestCase)
TestTopic.settings = settings(
    max_examples=40,
    stateful_step_count=35,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
