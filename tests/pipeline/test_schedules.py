"""Times of schedules, and waits for them on a clock that tests move."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from postbus_spark.jobs.schedules import LOOK_S, Clock, next_time, schedule_problem, wait_for

NOON = datetime(2026, 1, 30, 12, 1, tzinfo=UTC)  # a Friday


class ManualClock:
    """Goes on by what waits pause, or stands still."""

    def __init__(self) -> None:
        self.time = NOON
        self.pauses = 0
        self.clock = Clock(lambda: self.time, self.pause)

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.time += timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("schedule", "time"),
    [
        ("*/5 * * * *", datetime(2026, 1, 30, 12, 5, tzinfo=UTC)),
        ("1 12 * * *", datetime(2026, 1, 31, 12, 1, tzinfo=UTC)),
        ("0 6 * * mon-fri", datetime(2026, 2, 2, 6, tzinfo=UTC)),
        ("0 0 29 FEB *", datetime(2028, 2, 29, tzinfo=UTC)),
    ],
)
def test_the_next_time_is_behind_now(schedule: str, time: datetime) -> None:
    assert next_time(schedule, NOON) == time
    assert schedule_problem(schedule) is None


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("61 * * * *", "Bad minute in 61 "),
        ("* * * * abc", "Bad day-of-week"),
        ("*/0 * * * *", "Bad minute"),
        ("0 0 31 apr *", "Bad day-of-month"),
    ],
)
def test_a_wrong_schedule_is_named(schedule: str, text: str) -> None:
    problem = schedule_problem(schedule)
    assert problem is not None
    assert text in problem
    assert "such as */5 * * * *" in problem


def test_a_wait_ends_at_the_time() -> None:
    manual = ManualClock()
    assert wait_for("*/5 * * * *", manual.clock, lambda: False)
    assert manual.time == NOON + timedelta(minutes=4)
    assert manual.pauses == 240 / LOOK_S


def test_a_wait_follows_a_clock_that_is_set() -> None:
    manual = ManualClock()
    jumps = Clock(manual.clock.now, lambda _: manual.pause(3_600))
    assert wait_for("*/5 * * * *", jumps, lambda: False)
    assert manual.pauses == 1


def test_a_wait_that_is_stopped_ends_before_the_next_pause() -> None:
    manual = ManualClock()
    assert not wait_for("*/5 * * * *", manual.clock, lambda: manual.pauses == 3)
    assert manual.pauses == 3
