"""The status of a pipeline in the making: begins with the former one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from postbus.contract.control_groups import ReaderGroupDescription
from postbus_operator.bus.count_changes import has_moved
from postbus_operator.conditions import Conditions, ConditionStatus
from postbus_operator.objects import Resource
from postbus_operator.outcome import Event, Outcome
from postbus_operator.pipelines.batches import batch_of, shown_batch
from postbus_operator.pipelines.lag import Lag, shown_lag
from postbus_operator.pipelines.runs import MESSAGES_DROPPED, TROUBLES, Trouble
from postbus_operator.status import Binding, PipelineStatus

WAITING_RETRY_S: Final = 30.0
"""Looks without an event at what waits for another object; it is woken by that one."""


class PipelineDraft:
    """What a look finds out; conditions that it does not reach stay as they were."""

    def __init__(self, resource: Resource, now: datetime) -> None:
        status = resource.status
        self.reader_group: str | None = status.get("readerGroup")
        self.exit_code: int | None = None
        self.binding: str | None = status.get("binding", {}).get("name")
        self._lag = shown_lag(status)
        self._batch = shown_batch(status)
        self._now = now
        self._resource = resource
        self._conditions = Conditions(status.get("conditions", ()), resource.generation, now)
        self._conditions.keep_former()
        for type in ("Reconciling", "Stalled", "DeletionBlocked"):
            self.set(type, "False", "Unknown", "")

    def set(self, type: str, status: ConditionStatus, reason: str, message: str) -> None:
        """Set a condition; the last one of a type counts."""
        self._conditions.set(type, status, reason, message)

    @property
    def is_lagging(self) -> bool:
        """Whether the reader group is too far behind."""
        return self._conditions.status_of("Lagging") == "True"

    def note_executor(self, trouble: str) -> None:
        """Note that the pipeline lags since an executor does not start."""
        self.set("Lagging", "True", "ExecutorNotStarting", f"an executor does not start: {trouble}")

    def note_trouble(self, said: str, found: Trouble | None) -> None:
        """Set the condition for what ended a run, whose message is `said`, and no other of them."""
        for type in set(TROUBLES.values()):
            self.set(type, "False", "Unknown", "")
        if found is not None:
            lost = "the bus has dropped messages that the reader group has not read: reset it"
            message = lost if found.reason == MESSAGES_DROPPED else said
            self.set(found.type, "True", found.reason, message)

    def note_batch(self, groups: Sequence[ReaderGroupDescription]) -> None:
        """Note the last batch of the reader groups."""
        self._batch = batch_of(groups, self._batch, self._now)

    def note_lag(self, found: Lag, limit_s: float | None) -> None:
        """Note how far the reader group is behind; `limit_s`: from there on it lags.

        The former lag stays unless the new one means something else.
        """
        if has_moved(self._lag, found):
            self._lag = found
        if limit_s is None or found.seconds < limit_s:
            self.set("Lagging", "False", "KeepsUp", "")
            return
        # Without the lag itself, which changes.
        text = f"the first message waits for more than {limit_s:g} s: see the log of the pod"
        self.set("Lagging", "True", "Behind", text)

    def waits(self, type: str, reason: str, message: str, ready: str) -> Outcome:
        """Return the outcome for a pipeline that waits for another object."""
        self.set(type, "False", reason, message)
        self.set("Ready", "False", ready, message)
        self.set("Reconciling", "True", ready, message)
        return self.outcome(retry_s=WAITING_RETRY_S)

    def starts(self, message: str, *, retry_s: float) -> Outcome:
        """Return the outcome for a pipeline that is being made."""
        self.set("Ready", "False", "Starting", message)
        self.set("Reconciling", "True", "Creating", message)
        return self.outcome(retry_s=retry_s)

    def paused(self) -> Outcome:
        """Return the outcome for a pipeline that is left alone."""
        ready = self._conditions.status_of("Ready") or "Unknown"
        self.set("Ready", ready, "Paused", "the resource is paused")
        return self.outcome()

    def blocked(self, reason: str, message: str, retry_s: float) -> Outcome:
        """Return the outcome for a deletion that waits."""
        self.set("Ready", "False", "Deleting", message)
        self.set("DeletionBlocked", "True", reason, message)
        return self.outcome(retry_s=retry_s)

    def outcome(self, *events: Event, retry_s: float | None = None) -> Outcome:
        """Return the outcome of the look."""
        status = PipelineStatus(
            observed_generation=self._resource.generation,
            conditions=self._conditions.all(),
            binding=None if self.binding is None else Binding(name=self.binding),
            reader_group=self.reader_group,
            exit_code=self.exit_code,
            last_batch=self._batch,
            lag_messages=None if self._lag is None else self._lag.messages,
            lag_seconds=None if self._lag is None else self._lag.seconds,
        )
        has_finalizer = not self._resource.is_released_by_force
        return Outcome(status, has_finalizer=has_finalizer, retry_s=retry_s, events=events)
