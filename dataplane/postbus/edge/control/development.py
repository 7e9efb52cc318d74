"""Control API of a development bus: the time of messages, and faults."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from postbus.broker.operate.controls import Controls
from postbus.broker.partition.clock import ClockMode
from postbus.contract.control import (
    Advance,
    Clock,
    LocksLost,
    LoseLocksOf,
    ProblemType,
    StoreInterrupted,
    StoreOutage,
)
from postbus.edge.control.calls import Answer, Call, ControlRefused, Handler

LAST_MS: Final = 32_503_680_000_000
"""Entity time ends with the year 2999: SDKs count years to 9999 and add locks and lifetimes to it.
"""


class ControlDevelopment:
    """Clock and faults; `controls` None: the bus is not for development."""

    def __init__(self, controls: Controls | None) -> None:
        self._given = controls

    def operations(self) -> Mapping[str, Handler]:
        return {
            "getClock": self._clock,
            "advanceClock": self._advance,
            "loseLocks": self._lose_locks,
            "interruptStore": self._interrupt_store,
        }

    @property
    def _controls(self) -> Controls:
        if self._given is None:
            raise ControlRefused(
                404, "only a bus of `postbus dev` has a clock and faults", ProblemType.NOT_HERE
            )
        return self._given

    # --- clock ----------------------------------------------------------------------------------

    async def _clock(self, _call: Call) -> Answer:
        return Answer(_shown_clock(self._controls))

    async def _advance(self, call: Call) -> Answer:
        duration_ms = call.read(Advance).duration
        controls = self._controls
        if controls.mode is not ClockMode.MANUAL:
            raise ControlRefused(
                409, "this bus uses real time; start it with `postbus dev --clock manual`"
            )
        if controls.now_ms + duration_ms > LAST_MS:
            raise ControlRefused(
                400,
                "duration: time would pass the year 2999; restart the bus",
                ProblemType.INVALID,
            )
        late = await controls.advance(duration_ms)
        if late:
            raise ControlRefused(
                503,
                f"time was advanced, but the store of {_named(late)} is unavailable: what is due"
                " there happens when it is back; /readyz of the metrics port shows the state",
                ProblemType.UNAVAILABLE,
            )
        return Answer(_shown_clock(controls))

    # --- faults ---------------------------------------------------------------------------------

    async def _lose_locks(self, call: Call) -> Answer:
        entity = call.read(LoseLocksOf).entity
        name = await self._controls.lose_locks(entity)
        if name is None:
            raise ControlRefused(
                404, f"there is no entity {entity!r}; check its name", ProblemType.NOT_FOUND
            )
        return Answer(LocksLost(entity=name))

    async def _interrupt_store(self, call: Call) -> Answer:
        body = call.read(StoreOutage)
        last = self._controls.partition_count - 1
        if body.partition is not None and body.partition > last:
            raise ControlRefused(
                400, f"partition: must be between 0 and {last}", ProblemType.INVALID
            )
        partitions = self._controls.interrupt_store(body.duration / 1_000, body.partition)
        return Answer(StoreInterrupted(duration=body.duration, partitions=partitions))


def _shown_clock(controls: Controls) -> Clock:
    now = datetime.fromtimestamp(controls.now_ms / 1_000, UTC)
    return Clock(mode=controls.mode.value, now=now, offset_ms=controls.offset_ms)


def _named(partitions: list[int]) -> str:
    return f"partition{'s' * (len(partitions) > 1)} {', '.join(map(str, partitions))}"
