"""How far a pipeline is behind, as its status shows it: without every fluctuation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from postbus.contract.control_groups import ReaderGroupDescription
from postbus.contract.pipeline import PipelineSpec

LITTLE_S: Final = 10
"""Below this lag a pipeline keeps up. The bus looks as often; batches of a second come and go."""

USUAL_LIMIT_S: Final = 600
"""Lag of a continuous pipeline that is shown as a condition. Our choice: an hour is an alert."""

BATCHES: Final = 3
"""A pipeline with rare batches lags if it has missed some."""


class Lag(NamedTuple):
    """Messages that are not planned, and the age of the first one that is not processed."""

    messages: int
    seconds: int


def lag_of(groups: Iterable[ReaderGroupDescription]) -> Lag | None:
    """Return the messages of all reader groups, and the longest lag; None: it is not known now."""
    messages, seconds = 0, 0.0
    for group in groups:
        if group.unread_messages is None or group.lag_seconds is None:
            return None
        messages += group.unread_messages
        seconds = max(seconds, group.lag_seconds)
    return Lag(0, 0) if seconds < LITTLE_S else Lag(messages, int(seconds))


def shown_lag(status: Mapping[str, Any]) -> Lag | None:
    """Return the lag in a status."""
    if "lagSeconds" not in status or "lagMessages" not in status:
        return None
    return Lag(status["lagMessages"], status["lagSeconds"])


def limit_s(spec: PipelineSpec) -> float | None:
    """Return the lag from which a pipeline has the condition Lagging; None: no lag is too long.

    What runs once or at times is behind until it runs.
    """
    if spec.operator_spec.max_lag_ms is not None:
        return spec.operator_spec.max_lag_ms / 1_000
    if spec.trigger.continuous_ms is None:
        return None
    return max(USUAL_LIMIT_S, BATCHES * spec.trigger.continuous_ms / 1_000)
