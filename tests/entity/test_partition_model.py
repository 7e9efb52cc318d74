"""A partition against a small model that knows nothing of blocks, windows, heaps or tables.

Checked after every step: no loss and one place for each message (I1, I5), nothing after completion
(I2), one live lock (I3), stale tokens fail (I4), counts (I8, I18), reasons (I9), expiry (I10),
schedules (I11), deferral (I12), numbers (I15), receive-and-delete (I16). With a history nothing of
this differs, and the rows of settled messages stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postbus.contract.entities import DAY_MS, QueueProperties
from postbus.entity.commands import (
    Cancelled,
    CancelScheduled,
    DeferredReceived,
    DeleteBySequence,
    DeleteMessages,
    Delivery,
    Disposition,
    LocksRenewed,
    MessagesDeleted,
    MessagesHandled,
    ReceiveDeferred,
    Refusal,
    Refused,
    RenewLocks,
    ResendBySequence,
    Settled,
)
from postbus.entity.outcomes import Settling
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


@dataclass
class Known:
    """One message of the model."""

    name: str
    sequence: int
    place: int  # order among available messages
    enqueued_ms: int
    ttl_ms: int | None
    state: str = "ready"  # ready, locked, deferred, scheduled, dead, gone
    failures: int = 0
    is_deferred: bool = False
    until_ms: int = 0
    reason: str | None = None
    delivery: Delivery | None = None


class PartitionMachine(RuleBasedStateMachine):
    @initialize(
        budget_bytes=st.sampled_from([700, 3_000, 1 << 30]),
        max_delivery_count=st.integers(1, 4),
        dead_letters=st.booleans(),
        default_ttl_ms=st.sampled_from([None, 9_000]),
        keeps=st.booleans(),
    )
    def start(
        self,
        budget_bytes: int,
        max_delivery_count: int,
        dead_letters: bool,
        default_ttl_ms: int | None,
        keeps: bool,
    ) -> None:
        self.history: list[tuple[str, Settling]] = []
        self.define(max_delivery_count, dead_letters, default_ttl_ms, keeps)
        self.rig = Rig(self.properties, budget_bytes=budget_bytes)
        self.known: dict[str, Known] = {}
        self.stale: list[Delivery] = []
        self.places = 0

    def define(self, maximum: int, dead_letters: bool, ttl_ms: int | None, keeps: bool) -> None:
        self.maximum, self.dead_letters, self.default_ttl_ms = maximum, dead_letters, ttl_ms
        self.keeps = keeps
        values: dict[str, int] = {} if ttl_ms is None else {"default_message_ttl_ms": ttl_ms}
        self.properties = QueueProperties(
            lock_duration_ms=5_000,
            max_delivery_count=maximum,
            dead_lettering_on_message_expiration=dead_letters,
            history_retention_ms=DAY_MS if keeps else None,
            **values,
        )

    # --- the model ------------------------------------------------------------------------------

    def of(self, *states: str) -> list[Known]:
        return [known for known in self.known.values() if known.state in states]

    def next_place(self) -> int:
        self.places += 1
        return self.places

    def is_expired(self, known: Known, now_ms: int) -> bool:
        ttl_ms = self.ttl_of(known)
        return ttl_ms is not None and known.enqueued_ms + ttl_ms <= now_ms

    def ttl_of(self, known: Known) -> int | None:
        """Its own, fixed when it was sent, else the queue's of this moment."""
        return self.default_ttl_ms if known.ttl_ms is None else known.ttl_ms

    def leave(self, known: Known, how: Settling) -> None:
        """Be settled for good."""
        known.state, known.delivery = "gone", None
        self.remember(known, how)

    def remember(self, known: Known, how: Settling) -> None:
        if self.keeps:
            self.history.append((known.name, how))

    def die(self, known: Known, reason: str | None) -> None:
        self.remember(known, Settling.DEAD_LETTERED)
        known.state, known.reason, known.delivery = "dead", reason, None

    def expire(self, known: Known) -> None:
        if self.dead_letters:
            self.die(known, "TTLExpiredException")
        else:
            self.leave(known, Settling.EXPIRED)

    def give_back(self, known: Known, now_ms: int, *, failed: bool) -> None:
        if known.delivery is not None:
            self.stale.append(known.delivery)
        known.delivery = None
        known.failures += failed
        if failed and known.failures >= self.maximum:
            self.die(known, "MaxDeliveryCountExceeded")
        elif known.is_deferred:
            known.state = "deferred"
        elif self.is_expired(known, now_ms):
            self.expire(known)
        else:
            known.state = "ready"

    def expected(self, count: int) -> list[Known]:
        """Walk the available messages as a receiver with demand `count` does."""
        taken: list[Known] = []
        for known in sorted(self.of("ready"), key=lambda known: known.place):
            if len(taken) == count:
                break
            if self.is_expired(known, self.rig.now_ms):
                self.expire(known)
            elif known.failures >= self.maximum:
                self.die(known, "MaxDeliveryCountExceeded")
            else:
                taken.append(known)
        return taken

    # --- rules ----------------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 6),
        ttl_ms=st.sampled_from([None, None, 1_000, 20_000]),
        delay_ms=st.sampled_from([0, 0, 0, 3_000]),
    )
    def send(self, count: int, ttl_ms: int | None, delay_ms: int) -> None:
        now_ms = self.rig.now_ms
        names = [f"m{len(self.known) + n}" for n in range(count)]
        due_ms = now_ms + delay_ms if delay_ms else None
        numbers = self.rig.send(
            *(message(name, ttl_ms=ttl_ms, scheduled_ms=due_ms) for name in names)
        )
        last = max((known.sequence for known in self.known.values()), default=0)
        assert numbers == sorted(set(numbers))
        assert numbers[0] > last
        if ttl_ms is not None and self.default_ttl_ms is not None:
            ttl_ms = min(ttl_ms, self.default_ttl_ms)
        for name, number in zip(names, numbers, strict=True):
            known = Known(name, number, self.next_place(), due_ms or now_ms, ttl_ms)
            known.state = "scheduled" if due_ms else "ready"
            self.known[name] = known

    @rule(receiver=st.sampled_from("AB"), count=st.integers(1, 5))
    def receive(self, receiver: str, count: int) -> None:
        expected = self.expected(count)
        taken = self.rig.receive(receiver, count)
        assert [name_of(d.envelope) for d in taken] == [known.name for known in expected]
        for known, delivery in zip(expected, taken, strict=True):
            assert delivery.delivery_count == known.failures
            assert delivery.enqueued_ms == known.enqueued_ms
            assert delivery.ttl_ms == self.ttl_of(known)
            assert delivery.locked_until_ms == self.rig.now_ms + 5_000
            known.sequence = delivery.sequence
            known.state, known.delivery = "locked", delivery
            known.until_ms = delivery.locked_until_ms

    @rule(count=st.integers(1, 3))
    def receive_and_delete(self, count: int) -> None:
        expected = self.expected(count)
        taken = self.rig.receive("R", count, mode=DELETE)
        assert [name_of(d.envelope) for d in taken] == [known.name for known in expected]
        for known in expected:
            self.leave(known, Settling.RECEIVED)

    @precondition(lambda self: self.of("locked"))
    @rule(
        data=st.data(),
        disposition=st.sampled_from(list(Disposition)),
        is_changed=st.booleans(),
    )
    def settle(self, data: st.DataObject, disposition: Disposition, is_changed: bool) -> None:
        known = data.draw(st.sampled_from(self.of("locked")))
        assert known.delivery is not None
        delivery = known.delivery
        properties = {"changed": known.name} if is_changed else None
        reply = self.rig.settle(disposition, delivery, properties=properties)
        assert reply == Settled()
        now_ms = self.rig.now_ms
        if disposition is Disposition.COMPLETE:
            self.leave(known, Settling.COMPLETED)
            self.stale.append(delivery)
        elif disposition is Disposition.DEFER:
            known.is_deferred = True
            known.state, known.delivery = "deferred", None
            self.stale.append(delivery)
        elif disposition is Disposition.DEAD_LETTER:
            self.stale.append(delivery)
            self.die(known, None)
        else:
            self.give_back(known, now_ms, failed=disposition is Disposition.ABANDON)

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), disposition=st.sampled_from(list(Disposition)))
    def settle_with_a_stale_token(self, data: st.DataObject, disposition: Disposition) -> None:
        delivery = data.draw(st.sampled_from(self.stale))
        assert self.rig.settle(disposition, delivery) == Settled([0])
        reply = self.rig.apply(RenewLocks(QUEUE, ACTIVE, [delivery.lock_token]))
        assert isinstance(reply, Refused)

    @precondition(lambda self: self.of("locked"))
    @rule()
    def renew_all(self) -> None:
        held = self.of("locked")
        tokens = [known.delivery.lock_token for known in held if known.delivery]
        reply = self.rig.apply(RenewLocks(QUEUE, ACTIVE, tokens))
        assert reply == LocksRenewed([self.rig.now_ms + 5_000] * len(held))
        for known in held:
            known.until_ms = self.rig.now_ms + 5_000

    @precondition(lambda self: self.of("deferred"))
    @rule(data=st.data(), mode=st.sampled_from([PEEK_LOCK, DELETE]))
    def receive_deferred(self, data: st.DataObject, mode: int) -> None:
        known = data.draw(st.sampled_from(self.of("deferred")))
        reply = self.rig.apply(
            ReceiveDeferred(QUEUE, ACTIVE, [known.sequence], PEEK_LOCK if mode == 0 else DELETE)
        )
        if self.is_expired(known, self.rig.now_ms):
            assert isinstance(reply, Refused)
            self.expire(known)
            return
        assert isinstance(reply, DeferredReceived)
        (delivery,) = reply.deliveries
        assert name_of(delivery.envelope) == known.name
        assert delivery.delivery_count == known.failures
        if mode == PEEK_LOCK:
            known.state, known.delivery = "locked", delivery
            known.until_ms = delivery.locked_until_ms
        else:
            self.leave(known, Settling.RECEIVED)

    @precondition(lambda self: self.of("scheduled"))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.of("scheduled")))
        assert isinstance(self.rig.apply(CancelScheduled(QUEUE, [known.sequence])), Cancelled)
        assert isinstance(self.rig.apply(CancelScheduled(QUEUE, [known.sequence])), Refused)
        known.state = "gone"

    @rule(limit=st.integers(1, 4), age_ms=st.sampled_from([0, 2_000]))
    def delete_oldest(self, limit: int, age_ms: int) -> None:
        bound_ms = self.rig.now_ms - age_ms
        oldest = sorted(self.of("ready"), key=lambda known: known.place)
        expected = [known for known in oldest if known.enqueued_ms <= bound_ms][:limit]
        reply = self.rig.apply(DeleteMessages(QUEUE, ACTIVE, limit, bound_ms))
        assert reply == MessagesDeleted(len(expected))
        for known in expected:
            self.leave(known, Settling.PURGED)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def delete_by_sequence(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(sorted(self.known.values(), key=lambda k: k.name)))
        sub_queue = DLQ if known.state == "dead" else ACTIVE
        reply = self.rig.apply(DeleteBySequence(QUEUE, sub_queue, [known.sequence]))
        assert isinstance(reply, MessagesHandled)
        if known.state in ("ready", "deferred", "dead", "scheduled"):
            assert reply == MessagesHandled({known.sequence: 0}, {}, [])
            if known.state == "scheduled":
                known.state = "gone"
            else:
                self.leave(known, Settling.PURGED)
        else:
            expected = {"locked": Refusal.MESSAGE_LOCKED, "gone": Refusal.MESSAGE_NOT_FOUND}
            assert reply.refused[known.sequence].refusal is expected[known.state]

    @precondition(lambda self: self.of("dead"))
    @rule(data=st.data(), is_crashed=st.booleans())
    def resend(self, data: st.DataObject, is_crashed: bool) -> None:
        dead = data.draw(st.lists(st.sampled_from(self.of("dead")), unique_by=id, min_size=1))
        numbers = [known.sequence for known in dead]
        reply = self.rig.apply(ResendBySequence(QUEUE, DLQ, numbers, QUEUE))
        assert isinstance(reply, MessagesHandled)
        assert list(reply.done) == numbers
        for known in dead:
            self.remember(known, Settling.RESENT)
            known.sequence, known.place = reply.done[known.sequence], self.next_place()
            known.state, known.failures, known.is_deferred = "ready", 0, False
            known.enqueued_ms, known.reason = self.rig.now_ms, None
            if known.ttl_ms is not None and self.default_ttl_ms is not None:
                known.ttl_ms = min(known.ttl_ms, self.default_ttl_ms)
        if is_crashed:
            self.crash()

    @rule(ms=st.sampled_from([1, 60, 150, 1_000, 2_999, 5_000, 12_000]))
    def advance(self, ms: int) -> None:
        end_ms = self.rig.now_ms + ms
        moments = [(known.until_ms, known.place, known) for known in self.of("locked")]
        moments += [(known.enqueued_ms, known.sequence, known) for known in self.of("scheduled")]
        moments.sort(key=lambda moment: moment[:2])
        for when_ms, _, known in moments:
            if when_ms > end_ms:
                continue
            if known.state == "scheduled":
                known.state, known.place = "ready", self.next_place()
            else:
                self.give_back(known, when_ms, failed=True)
        self.rig.advance(ms)
        for peeked in self.rig.peek(limit=10_000):
            self.known[name_of(peeked.envelope)].sequence = peeked.sequence

    @rule(
        maximum=st.integers(1, 4),
        dead_letters=st.booleans(),
        default_ttl_ms=st.sampled_from([None, 4_000, 9_000]),
        keeps=st.booleans(),
    )
    def redefine(
        self, maximum: int, dead_letters: bool, default_ttl_ms: int | None, keeps: bool
    ) -> None:
        self.define(maximum, dead_letters, default_ttl_ms, keeps)
        self.rig.put(self.properties)

    @rule()
    def fold(self) -> None:
        self.rig.tables.fold()

    @rule()
    def crash(self) -> None:
        attempts = {}
        for known in self.of("locked"):
            attempts[known.name] = 1
            if known.delivery is not None:
                self.stale.append(known.delivery)
            known.delivery = None
            known.state = "deferred" if known.is_deferred else "ready"
        self.rig.crash()
        for peeked in self.rig.peek(limit=10_000):
            known = self.known[name_of(peeked.envelope)]
            true_count = known.failures + attempts.get(known.name, 0)
            assert true_count - 1 <= peeked.delivery_count <= true_count
            known.failures = peeked.delivery_count

    @rule()
    def drain_dead_letters(self) -> None:
        dead = self.rig.receive("D", 100, sub_queue=DLQ)
        assert sorted(name_of(d.envelope) for d in dead) == sorted(
            known.name for known in self.of("dead")
        )
        for delivery in dead:
            known = self.known[name_of(delivery.envelope)]
            assert properties_of(delivery.envelope).get("DeadLetterReason") == known.reason
            self.leave(known, Settling.COMPLETED)
        self.rig.settle(Disposition.COMPLETE, *dead, sub_queue=DLQ)

    # --- invariants -----------------------------------------------------------------------------

    @invariant()
    def every_message_is_where_the_model_says(self) -> None:
        if not hasattr(self, "rig"):
            return
        main = sorted(self.rig.peek_names())
        assert main == sorted(
            known.name for known in self.of("ready", "locked", "deferred", "scheduled")
        )
        assert sorted(self.rig.peek_names(DLQ)) == sorted(k.name for k in self.of("dead"))
        counts = self.rig.state.counts(QUEUE)
        assert counts is not None
        assert counts.active == len(self.of("ready", "locked", "deferred"))
        assert counts.scheduled == len(self.of("scheduled"))
        assert counts.dead_letter == len(self.of("dead"))
        tables = self.rig.tables
        kept = [
            (name_of(tables.rows[row_key][1]), how)
            for row_key, (_, how, _) in tables.settled.items()
        ]
        assert sorted(kept) == sorted(self.history)
        assert len(tables.rows) == len(main) + counts.dead_letter + len(kept)


TestPartition = pytest.mark.slow(PartitionMachine.TestCase)
TestPartition.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
