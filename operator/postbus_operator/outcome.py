"""The result of one look at a resource: what the worker writes, and when it looks again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from postbus_operator.status import ResourceStatus


@dataclass(frozen=True, slots=True)
class Event:
    """An Event about the resource, for people. `reason` is CamelCase."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` is the complete wanted status; None: the resource goes and needs none.

    `has_finalizer`: whether the finalizer of the operator shall be there; False releases a resource
    that is being deleted. `delete_resource`: the resource itself goes, as `onAutoDelete` says.
    `retry_s`: seconds until the next look without an event; None: the resync suffices. `is_current`
    returns whether another look would decide the same, without one; None: only a look can tell.
    """

    status: ResourceStatus | None
    has_finalizer: bool
    delete_resource: bool = False
    retry_s: float | None = None
    events: tuple[Event, ...] = ()
    is_current: Callable[[], bool] | None = field(default=None, compare=False)


class SpecInvalid(Exception):
    """The spec is wrong in a way that only a change of it mends: Stalled, no retry."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DependencyMissing(Exception):
    """Another object is missing; it wakes the resource when it appears."""

    def __init__(self, condition: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.condition = condition
        self.reason = reason


class BackendUnavailable(Exception):
    """A bus or a database does not answer; the worker tries again, with growing pauses."""


class StillConnecting(BackendUnavailable):
    """A bus was not reached yet by an operator that has just begun: nothing is known of it."""
