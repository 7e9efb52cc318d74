"""Entity time that is moved by hand: wall time plus an offset that only grows (ADR 28)."""

from __future__ import annotations

from postbus.broker.partition.clock import ClockMode, ManualClock


class Wall:
    now = 1_000_000

    def __call__(self) -> int:
        return self.now


def test_time_goes_on_with_the_wall_and_ahead_of_it() -> None:
    wall = Wall()
    clock = ManualClock(wall)
    assert (clock(), clock.offset_ms, clock.mode) == (1_000_000, 0, ClockMode.MANUAL)
    clock.advance(300_000)
    wall.now += 7
    assert (clock(), clock.offset_ms) == (1_300_007, 300_000)


def test_samples_of_the_database_neither_set_it_back_nor_move_it_twice() -> None:
    wall = Wall()
    clock = ManualClock(wall)
    clock.advance(300_000)
    for sample_ms in (1_000_000, 1_300_000, 5):
        clock.observe(sample_ms)
        assert clock() == 1_300_000


def test_samples_a_little_ahead_are_no_movement() -> None:
    wall = Wall()
    clock = ManualClock(wall)
    clock.observe(1_000_003)
    assert (clock(), clock.offset_ms) == (1_000_003, 0)
    wall.now += 4
    assert clock() == 1_000_004


def test_times_stored_by_an_earlier_run_are_not_in_the_future() -> None:
    wall = Wall()
    clock = ManualClock(wall)
    clock.observe(1_500_000)
    assert (clock(), clock.offset_ms) == (1_500_000, 500_000)
    wall.now += 1
    assert clock() == 1_500_001


def test_a_wall_set_back_stops_it_until_the_wall_has_caught_up() -> None:
    wall = Wall()
    clock = ManualClock(wall)
    clock.advance(10)
    assert clock() == 1_000_010
    wall.now -= 500
    assert clock() == 1_000_010
    wall.now += 501
    assert clock() == 1_000_011
