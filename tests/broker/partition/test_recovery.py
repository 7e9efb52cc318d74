"""The pauses of a partition after failures, and its commits one by one."""

from __future__ import annotations

from postbus.broker.backoff import FIRST_BACKOFF_S, LAST_BACKOFF_S
from postbus.broker.partition.recovery import GOOD_S, Recovery
from postbus.store.errors import StoreUnavailable


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_waits_grow_although_each_load_commits() -> None:
    recovery = Recovery(Seconds())
    waits = []
    for _ in range(9):
        recovery.loaded()
        recovery.commit_count += 1
        recovery.failed(None)
        waits.append(recovery.wait_s)
    assert waits[:3] == [FIRST_BACKOFF_S, FIRST_BACKOFF_S * 2, FIRST_BACKOFF_S * 4]
    assert waits[-1] == LAST_BACKOFF_S


def test_a_load_with_commits_resets_failures_and_one_without_does_not() -> None:
    seconds = Seconds()
    recovery = Recovery(seconds)
    for count in (0, 1):
        recovery.failed(ValueError())
        recovery.failed(ValueError())
        assert recovery.is_one_by_one
        recovery.loaded()
        recovery.commit_count += count
        seconds.now += GOOD_S
        recovery.failed(None)
        assert recovery.is_one_by_one is (count == 0)
        assert (recovery.wait_s == FIRST_BACKOFF_S) is (count == 1)


def test_one_by_one_begins_with_the_same_failure_twice_and_ends_with_another() -> None:
    recovery = Recovery(Seconds())
    seen = []
    for error in (ValueError(), None, ValueError(), StoreUnavailable(), KeyError()):
        recovery.loaded()
        recovery.commit_count += 1
        recovery.failed(error)
        seen.append(recovery.is_one_by_one)
    assert seen == [False, False, True, True, False]


def test_outages_never_lead_to_one_by_one() -> None:
    recovery = Recovery(Seconds())
    for _ in range(5):
        recovery.failed(StoreUnavailable())
    assert not recovery.is_one_by_one
