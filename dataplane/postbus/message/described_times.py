"""Durations and times of .NET, which the .NET and Java SDKs send as described longs."""

from __future__ import annotations

from typing import Final

from postbus.message.codec import DATE_TIME_OFFSET, TIME_SPAN, Described

EPOCH_TICKS: Final = 621_355_968_000_000_000
"""Ticks, of 100 ns, from the year 1 to the epoch."""

_TICKS_A_MILLISECOND: Final = 10_000


def span_ticks(value: Described) -> int | None:
    """Return the ticks, of 100 ns, of a TimeSpan; None for other values."""
    return _ticks(value, TIME_SPAN)


def offset_ms(value: Described) -> int | None:
    """Return milliseconds since the epoch of a DateTimeOffset; None for other values."""
    ticks = _ticks(value, DATE_TIME_OFFSET)
    return None if ticks is None else (ticks - EPOCH_TICKS) // _TICKS_A_MILLISECOND


def _ticks(value: Described, descriptor: str) -> int | None:
    if value.descriptor != descriptor or type(value.value) is not int:
        return None
    ticks: int = value.value
    return ticks
