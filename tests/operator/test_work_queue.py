"""A key is looked at after each time it was woken, and never twice at the same time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from postbus_operator.objects import Key
from postbus_operator.running.work_queue import MAX_PAUSE_S, MIN_PAUSE_S, WorkQueue, parts_of

A, B, C = (Key("Queue", "shop", name) for name in "abc")


@pytest.fixture
def queue() -> WorkQueue:
    return WorkQueue(random.Random(7))


def taken(queue: WorkQueue, now: float) -> list[Key]:
    found = []
    while (each := queue.take(now)) is not None:
        found.append(each[0])
    return found


def test_a_key_that_is_woken_twice_is_looked_at_once(queue: WorkQueue) -> None:
    queue.wake(A, 1)
    queue.wake(A, 0.5)
    queue.wake(A, 2)
    assert queue.waiting(1) == 1
    assert queue.take(1) == (A, 0.5)
    queue.done(A)
    assert taken(queue, 100) == []


def test_a_key_that_is_woken_during_its_look_is_looked_at_again(queue: WorkQueue) -> None:
    queue.wake(A, 0)
    assert taken(queue, 0) == [A]
    queue.wake(A, 5)
    queue.wake(A, 1)
    assert taken(queue, 9) == []
    queue.done(A)
    assert queue.next_due() == 1
    assert taken(queue, 1) == [A]


def test_keys_are_taken_in_the_order_of_their_times(queue: WorkQueue) -> None:
    for key, due in ((A, 3), (B, 1), (C, 2)):
        queue.wake(key, due)
    assert taken(queue, 2) == [B, C]
    assert queue.next_due() == 3


def test_the_earlier_of_retry_and_wake_counts(queue: WorkQueue) -> None:
    queue.wake(A, 0)
    queue.take(0)
    queue.wake(A, 4)
    queue.done(A, again=30)
    assert queue.next_due() == 4
    queue.take(4)
    queue.done(A, again=30)
    assert queue.next_due() == 30


def test_pauses_grow_to_a_minute_and_are_spread(queue: WorkQueue) -> None:
    pauses = [queue.pause_after_failure(A) for _ in range(12)]
    assert all(MIN_PAUSE_S <= each <= MAX_PAUSE_S for each in pauses)
    assert pauses[0] <= 2
    assert min(pauses[6:]) >= 30
    assert len(set(pauses)) == len(pauses)
    assert queue.pause_after_failure(B) <= 2
    queue.forget_failures(A)
    assert queue.pause_after_failure(A) <= 2


@given(st.integers(0, 50), st.integers(1, 20))
def test_parts_are_equal_and_leave_nothing_out(length: int, count: int) -> None:
    keys = [Key("Queue", "shop", str(number)) for number in range(length)]
    parts = list(parts_of(keys, count))
    assert [key for part in parts for key in part] == keys
    assert len(parts) == count
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


class QueueModel(RuleBasedStateMachine):
    """The queue against a plain dictionary: key -> time of the next look, None for none."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WorkQueue(random.Random(1))
        self.now = 0.0
        self.due: dict[Key, float] = {}
        self.running: set[Key] = set()

    @rule(key=st.sampled_from([A, B, C]), delay=st.sampled_from([0, 1, 5, 60]))
    def wake(self, key: Key, delay: float) -> None:
        self.queue.wake(key, self.now + delay)
        self.due[key] = min(self.now + delay, self.due.get(key, float("inf")))

    @rule(seconds=st.sampled_from([0.5, 3, 70]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        ready = {k: due for k, due in self.due.items() if due <= self.now and k not in self.running}
        found = self.queue.take(self.now)
        assert (found is None) == (not ready)
        if found is not None:
            key, waited = found
            assert ready[key] == min(ready.values()) == self.now - waited
            del self.due[key]
            self.running.add(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), retry=st.sampled_from([None, 0, 30]))
    def done(self, data: st.DataObject, retry: float | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(key)
        self.queue.done(key, None if retry is None else self.now + retry)
        if retry is not None:
            self.due[key] = min(self.now + retry, self.due.get(key, float("inf")))

    @invariant()
    def nothing_is_lost(self) -> None:
        idle = [due for key, due in self.due.items() if key not in self.running]
        assert self.queue.next_due() == min(idle, default=None)
        assert self.queue.waiting(self.now) == sum(due <= self.now for due in idle)
        assert self.queue.running == len(self.running)
        assert all(self.queue.is_running(key) for key in self.running)


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
