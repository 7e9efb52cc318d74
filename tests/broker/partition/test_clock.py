"""Entity time (ADR 28): database time carried by the monotonic clock."""

from __future__ import annotations

from postbus.broker.partition.clock import EntityClock


class Milliseconds:
    now = 1_000

    def __call__(self) -> int:
        return self.now


def test_database_time_is_carried_by_the_monotonic_clock() -> None:
    monotonic = Milliseconds()
    clock = EntityClock(monotonic, lambda: 50_000)
    assert clock() == 50_000
    clock.observe(70_000)
    monotonic.now += 25
    assert clock() == 70_025


def test_time_set_back_stands_still_until_it_caught_up() -> None:
    monotonic = Milliseconds()
    clock = EntityClock(monotonic, lambda: 70_000)
    clock.observe(50_000)
    assert clock() == 50_000
    clock.observe(49_000)
    assert clock() == 50_000
    monotonic.now += 1_001
    assert clock() == 50_001


def test_a_wall_that_is_ahead_of_the_first_sample_does_not_hold_time_up() -> None:
    clock = EntityClock(Milliseconds(), lambda: 70_000)
    assert clock() == 70_000
    clock.observe(50_000)
    assert clock() == 50_000


def test_time_is_never_below_an_earlier_sample() -> None:
    clock = EntityClock(Milliseconds(), lambda: 50_000)
    clock.observe(70_000)
    clock.observe(60_000)
    assert clock() == 70_000


def test_time_is_never_below_the_persisted_time() -> None:
    clock = EntityClock(Milliseconds(), lambda: 50_000)
    clock.raise_floor(60_000)
    clock.raise_floor(55_000)
    assert clock() == 60_000
