"""Number of deliveries that a receiver link requests from its entity, and the time of its answer to
a drain.

A pure state machine for `receiver_links`: credit, deliveries, settlements, replies and the time go
in, `SetDemand` and `AnswerDrain` come out. The link's credit belongs to the AMQP engine, order and
locks belong to the entity. Demand is absolute: deliveries since the consumer was added (ADR 24).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postbus.entity.commands import DemandSet, Refused, SetDemand

UNKNOWN: Final = -1
"""A demand that may not have reached the entity."""


@dataclass(frozen=True, slots=True)
class DemandLimits:
    """Bounds of one link. All are our choice unless a source is named."""

    step: int = 2_000
    """Maximum number of deliveries requested ahead; unlimited credit is used in steps."""

    step_bytes: int = 4 << 20
    """Bytes requested ahead, by the size of the last deliveries: the most that a client that stops
    reading keeps in memory, beside its socket's buffer."""

    max_unsettled: int = 20_000
    """Deliveries without an outcome above which no more are requested. Each costs about 200 bytes
    here; SDKs hold a few thousand."""

    drain_s: float = 0.1
    """Longest time until a drain is answered (ADR 24), not counting the time in which the client
    does not read. The JavaScript SDK gives up after 200 ms."""


@dataclass(frozen=True, slots=True)
class AnswerDrain:
    """Give up the credit that is left, and report that to the client."""


ANSWER_DRAIN: Final = AnswerDrain()


class DemandWindow:
    """Demand of one link. `credit` arguments are the deliveries that its client takes now.

    `is_held` arguments are true while the client must read before it gets more:
    deliveries requested before may still come, and no drain is answered, since "no more" would be
    untrue and would wait, too.
    """

    __slots__ = (
        "_average_bytes",
        "_consumer_id",
        "_delivered",
        "_demand",
        "_limits",
        "drain",
        "drain_due_s",
        "unsettled_count",
    )

    def __init__(self, limits: DemandLimits, average_bytes: int) -> None:
        """`average_bytes`: expected size of a delivery, until the first ones are sent."""
        self.unsettled_count = 0
        """Deliveries without an outcome."""
        self.drain: SetDemand | None = None
        """Drain that the entity has not answered."""
        self.drain_due_s: float | None = None
        """Time at which `expire_drain` must be called."""
        self._limits = limits
        self._average_bytes = average_bytes
        self._consumer_id = 0
        self._delivered = 0  # as the entity counts, since the consumer was added
        self._demand = 0  # the limit of the last `SetDemand`

    def restart(self, consumer_id: int) -> None:
        """Begin again with a new consumer, whose deliveries the entity counts from zero."""
        self._consumer_id = consumer_id
        self._delivered = self._demand = 0
        self.drain = None

    # --- deliveries -----------------------------------------------------------------------------

    def receive(self, count: int, credit: int) -> int:
        """Count deliveries of the entity; return how many of them the client takes."""
        self._delivered += count
        return min(count, max(credit, 0))

    def note_sent(self, count: int, size_bytes: int) -> None:
        """Adapt the expected size to deliveries that were sent."""
        self._average_bytes = ((self._average_bytes + size_bytes // count) >> 1) or 1

    def settle(self, count: int) -> bool:
        """Count outcomes; return whether requests were suspended for lack of them."""
        was_full = self.unsettled_count >= self._limits.max_unsettled
        self.unsettled_count -= count
        return was_full

    # --- demand ---------------------------------------------------------------------------------

    def is_in_step(self, credit: int) -> bool:
        """Return whether `request` would return nothing; may be false needlessly."""
        limits = self._limits
        return (
            self._demand - self._delivered == credit
            and credit <= limits.step
            and credit * self._average_bytes <= limits.step_bytes
            and self.unsettled_count + credit <= limits.max_unsettled
        )

    def request(self, credit: int, *, is_held: bool) -> SetDemand | None:
        """Adapt the demand to the credit; small raises wait until they are a quarter of it."""
        allowed = self._allowance(credit, is_held)
        limit = self._delivered + allowed
        more = limit - self._demand
        if more < 0 or (more and more * 4 >= allowed):
            self._demand = limit
            return SetDemand(self._consumer_id, limit)
        return None

    def note_refused(self, command: SetDemand) -> bool:
        """Forget a demand that did not reach the entity; return whether it must be repeated."""
        if command.consumer_id != self._consumer_id:
            return False
        self._demand = UNKNOWN
        return True

    def _allowance(self, credit: int, is_held: bool) -> int:
        """Return the number of further deliveries that the client may get now."""
        limits = self._limits
        credit = max(min(credit, limits.max_unsettled - self.unsettled_count), 0)
        if is_held:  # deliveries requested before may come
            return min(credit, max(self._demand - self._delivered, 0))
        return min(credit, limits.step, max(limits.step_bytes // self._average_bytes, 1))

    # --- drain ----------------------------------------------------------------------------------

    def request_drain(
        self, credit: int, *, is_held: bool, now_s: float
    ) -> SetDemand | AnswerDrain | None:
        """Let the entity deliver available messages in steps until the drain is answered."""
        if credit <= 0 or self.unsettled_count >= self._limits.max_unsettled:
            return self._answer()
        allowed = self._allowance(credit, is_held)
        if not allowed:
            return None
        if self.drain_due_s is None:
            self.drain_due_s = now_s + self._limits.drain_s
        self._demand = self._delivered + allowed
        self.drain = SetDemand(self._consumer_id, self._demand, is_drain=True)
        return self.drain

    def end_drain(
        self, command: SetDemand, reply: DemandSet | Refused, *, is_draining: bool
    ) -> AnswerDrain | None:
        """Take the reply to a drain, which follows its deliveries.

        `is_draining`: the client still waits for an answer.
        """
        if command.consumer_id != self._consumer_id:
            return None
        is_over = False
        if command is self.drain:
            self.drain = None
            is_over = isinstance(reply, Refused) or reply.delivered < command.limit
        if self.drain is None:
            self._demand = self._delivered  # the entity lowered it to its delivered count
        return self._answer() if is_over and is_draining else None

    def expire_drain(self, now_s: float, *, is_draining: bool, is_held: bool) -> AnswerDrain | None:
        """Answer or forget a drain whose time is over; it holds up no other request afterwards.

        Deliveries that the entity still makes for it return.
        """
        if self.drain_due_s is None or now_s < self.drain_due_s:
            return None
        if is_draining and is_held:
            self.drain_due_s = now_s + self._limits.drain_s
            return None
        self.drain = self.drain_due_s = None
        return ANSWER_DRAIN if is_draining else None

    def _answer(self) -> AnswerDrain:
        self.drain_due_s = None
        return ANSWER_DRAIN
