"""Times of a schedule, in UTC, and the wait for the next one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from cronsim import CronSim, CronSimError

LOG: Final = logging.getLogger("postbus_spark.jobs")

LOOK_S: Final = 0.25
"""How long a wait sleeps at once: a signal, or a clock that is set, is noticed after it."""

ANY_TIME: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Clock(NamedTuple):
    """What a wait needs of the machine: the time, and a pause of some seconds."""

    now: Callable[[], datetime]
    pause: Callable[[float], None]


SYSTEM: Final = Clock(lambda: datetime.now(UTC), time.sleep)


def next_time(schedule: str, now: datetime) -> datetime:
    """Return the first time of a schedule behind another one. Raises `ValueError`."""
    try:
        return next(CronSim(schedule, now))
    except CronSimError as error:
        raise ValueError(f"{error} in {schedule}") from None


def schedule_problem(schedule: str) -> str | None:
    """Return what is wrong with a schedule, None if nothing is."""
    try:
        next_time(schedule, ANY_TIME)
    except ValueError as error:
        return f"{error}: write minute, hour, day, month and weekday, such as */5 * * * *"
    return None


def wait_for(schedule: str, clock: Clock, is_stopped: Callable[[], bool]) -> bool:
    """Wait for the next time of a schedule; return whether it has come, and nobody stopped."""
    due = next_time(schedule, clock.now())
    LOG.info("the next run begins at %s", due.isoformat())
    while clock.now() < due and not is_stopped():
        clock.pause(LOOK_S)
    return not is_stopped()
