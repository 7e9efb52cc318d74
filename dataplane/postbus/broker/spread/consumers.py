"""Receivers of partitioned entities: one consumer for the link endpoint, one in every partition.

Credit is never granted twice: a partition gets demand only after a hint that it has messages, at
most the rest of the consumer's limit, and demand that it cannot meet is available to others at once
(ADR 24). So no message is fetched in excess, cached or released.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from postbus.broker.partition.host import Host
from postbus.broker.partition.sinks import DeliverySink
from postbus.entity.commands import (
    AcceptSession,
    AddConsumer,
    Delivery,
    DemandSet,
    Done,
    OnReply,
    Refusal,
    Refused,
    RemoveConsumer,
    SetDemand,
)

DRAIN_WAIT_S: Final = 0.08
"""Maximum wait of a drain for partitions: below the 100 ms after which an endpoint answers."""

REPEAT_S: Final = 0.1
"""Pause before demand is repeated to a partition whose read failed, or that delivered less than
announced."""

RETRY_S: Final = 1.0
"""Pause before an unavailable partition is asked again for a session, or for the consumer."""

AWAY: Final = frozenset({Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.BUSY})
"""Refusals that say nothing about the entity: its partition is loading or has no store."""


class PartitionedConsumer:
    """One receiver of all partitions of an entity or sub-queue."""

    def __init__(
        self,
        hosts: Sequence[Host],
        command: AddConsumer,
        sink: DeliverySink,
        on_reply: OnReply[Done],
        first: int,
    ) -> None:
        """Register in all partitions; `first`: the partition at which the round begins."""
        self.command = command
        self.sink = sink
        self.is_closed = False
        self._on_added: OnReply[Done] | None = on_reply
        self._limit = 0
        self._delivered = 0
        self._open = 0  # demand given to partitions
        self._hinted: deque[_Part] = deque()
        self._is_pumping = False
        self._on_drained: OnReply[DemandSet] | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        count = len(hosts)
        self._parts = [_Part(self, hosts[(first + n) % count]) for n in range(count)]
        for part in self._parts:
            if not self.is_closed:
                part.register()

    # --- for the endpoint -----------------------------------------------------------------------

    def set_demand(self, command: SetDemand, on_reply: OnReply[DemandSet]) -> None:
        """Set the limit over all partitions; a drain is answered when none has more, or at its
        timeout.
        """
        self._end_drain()  # first: it lowers the limit
        self._limit = command.limit
        if command.is_drain:
            self._on_drained = on_reply
            loop = asyncio.get_running_loop()
            self._drain_timer = loop.call_later(DRAIN_WAIT_S, self._end_drain)
            self.pump()
        else:
            self.pump()
            on_reply(DemandSet(self._delivered))

    def close(self) -> None:
        """Stop receiving; messages on their way return to their queue."""
        if not self.is_closed:
            self.is_closed = True
            self._end_drain()
            for part in self._parts:
                part.unregister()

    def remove(self) -> None:
        """Remove the consumer from all partitions."""
        self.close()
        for part in self._parts:
            part.host.submit(RemoveConsumer(self.command.consumer_id))

    # --- for the parts --------------------------------------------------------------------------

    def deliver(self, deliveries: list[Delivery]) -> None:
        self._delivered += len(deliveries)
        self.sink.deliver(deliveries)

    def added(self, reply: Done | Refused) -> None:
        """Answer with the first decisive reply; an entity is the same in all partitions."""
        if self.is_closed:
            return
        on_added, self._on_added = self._on_added, None
        if isinstance(reply, Refused):
            self.remove()
            if on_added is None:
                self.sink.ended(reply)
        if on_added is not None:
            on_added(reply)

    def ended(self, refused: Refused) -> None:
        if not self.is_closed:
            self.remove()
            self.sink.ended(refused)

    def hinted(self, part: _Part) -> None:
        """Append a partition that has messages to the round."""
        self._hinted.append(part)
        self.pump()

    def forget_hint(self, part: _Part) -> None:
        self._hinted.remove(part)

    def promise(self, count: int) -> None:
        """Change the total demand of the partitions; negative for demand that ended."""
        self._open += count

    def pump(self) -> None:
        """Give demand to partitions in turn and in equal shares, up to the limit."""
        if self._is_pumping or self.is_closed:
            return
        self._is_pumping = True
        try:
            while self._hinted and self._room > 0:
                count = len(
                    self._hinted
                )  # a partition with more is appended again before the round ends
                share = max(self._room // count, 1)
                for _ in range(count):
                    if self._hinted and self._room > 0:
                        self._hinted.popleft().ask(min(share, self._room))
        finally:
            self._is_pumping = False
        if self._on_drained is not None and self._is_drained():
            self._end_drain()

    @property
    def _room(self) -> int:
        """Remaining demand that may be given."""
        return self._limit - self._delivered - self._open

    def _is_drained(self) -> bool:
        if self._delivered >= self._limit:
            return True
        return not self._hinted and not any(part.is_pending for part in self._parts)

    def _end_drain(self) -> None:
        """Answer a drain; the limit falls to the number of deliveries."""
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
        on_drained, self._on_drained = self._on_drained, None
        if on_drained is not None:
            self._limit = min(self._limit, self._delivered)
            on_drained(DemandSet(self._delivered))


class _Part:
    """The consumer in one partition; a delivery sink of its host.

    `_life` counts registrations, so that replies to an earlier one are recognized.
    """

    __slots__ = (
        "_asked",
        "_delivered",
        "_hint",
        "_is_armed",
        "_is_asking",
        "_is_queued",
        "_life",
        "_owner",
        "host",
    )

    def __init__(self, owner: PartitionedConsumer, host: Host) -> None:
        self._owner = owner
        self.host = host
        self._life = 0
        self._delivered = 0  # as counted by the partition
        self._asked = 0  # demand that it has not met
        self._hint = 0
        self._is_armed = False  # True if the partition will report that it has messages
        self._is_asking = False
        self._is_queued = False

    @property
    def is_pending(self) -> bool:
        """True if it may have messages that it has not reported yet."""
        return self._is_asking or (not self._is_armed and self.host.trouble is None)

    def register(self) -> None:
        command = self._owner.command
        life = self._life
        self.host.register_sink(command.consumer_id, self)
        self.host.submit(command, lambda reply: self._added(life, reply))
        if not self._owner.is_closed:
            self._arm(life)

    def _arm(self, life: int) -> None:
        """Request a hint when the partition has messages."""
        if life == self._life:
            arm = SetDemand(self._owner.command.consumer_id, 0, wants_hint=True)
            self.host.submit(arm, lambda reply: self._armed(life, reply))

    def unregister(self) -> None:
        self._life += 1
        self.host.unregister_sink(self._owner.command.consumer_id)

    def ask(self, most: int) -> None:
        """Give demand for at most `most` messages, and request a hint when there are more."""
        self._is_queued = False
        count = min(self._hint, most)
        self._hint = 0
        self._asked = count
        self._is_asking = True
        self._owner.promise(count)
        limit, life = self._delivered + count, self._life
        command = SetDemand(self._owner.command.consumer_id, limit, is_drain=True, wants_hint=True)
        self.host.submit(command, lambda reply: self._answered(life, count, reply))

    # --- answers --------------------------------------------------------------------------------

    def _added(self, life: int, reply: Done | Refused) -> None:
        if life != self._life:
            return
        if isinstance(reply, Refused) and reply.refusal in AWAY:
            asyncio.get_running_loop().call_later(RETRY_S, self._register_again, life)
        else:
            self._owner.added(reply)

    def _register_again(self, life: int) -> None:
        if life == self._life:
            self._life += 1
            self.register()

    def _armed(self, life: int, reply: DemandSet | Refused) -> None:
        if life != self._life:
            return
        if isinstance(reply, DemandSet):
            self._is_armed = True
            self._owner.pump()
        elif reply.refusal in AWAY:
            asyncio.get_running_loop().call_later(RETRY_S, self._arm, life)

    def _answered(self, life: int, count: int, reply: DemandSet | Refused) -> None:
        """Make unmet demand available to other partitions."""
        if life != self._life:
            return
        is_fruitless = self._asked == count
        self._owner.promise(-self._asked)
        self._asked = 0
        self._is_asking = False
        if isinstance(reply, Refused):  # a read failed: the announced messages are still there
            self._later(count)
        elif self._hint and is_fruitless:  # no busy loop while the messages cannot be read
            self._later(self._hint)
        elif self._hint:
            self._queue()
        self._owner.pump()

    def _later(self, count: int) -> None:
        self._hint = 0
        loop = asyncio.get_running_loop()
        loop.call_later(REPEAT_S, self._hinted_again, self._life, count)

    def _hinted_again(self, life: int, count: int) -> None:
        if life == self._life:
            self.available(max(count, self._hint))

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._owner.hinted(self)

    # --- delivery sink --------------------------------------------------------------------------

    def deliver(self, deliveries: list[Delivery]) -> None:
        count = len(deliveries)
        self._delivered += count
        self._asked -= count
        self._owner.promise(-count)
        self._owner.deliver(deliveries)

    def available(self, count: int) -> None:
        self._hint = count
        if not self._is_asking:
            self._queue()

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        """Never called for consumers without a session."""

    def ended(self, refused: Refused) -> None:
        self._owner.ended(refused)

    def reset(self) -> None:
        """Register again in a partition that was reloaded; others are not affected."""
        self._life += 1
        self._owner.promise(-self._asked)
        self._delivered = self._asked = self._hint = 0
        self._is_armed = self._is_asking = False
        if self._is_queued:
            self._is_queued = False
            self._owner.forget_hint(self)
        if not self._owner.is_closed:
            self.register()
            self._owner.pump()


class SessionSeeker:
    """Requests the next session from every partition; the first grant wins, others are withdrawn.

    The losers are withdrawn before the winner is notified, in the same step, so that the receiver
    never holds two sessions. A session that was granted to a loser meanwhile is released at once.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        command: AcceptSession,
        on_reply: OnReply[Done],
        on_found: Callable[[Host, bytes, int], None],
        on_lost: Callable[[Refused], None],
        first: int,
    ) -> None:
        """`first`: the partition at which the round begins, so that none is always served last.

        `on_found` gets host, session and the end of its lock. `on_lost` gets a refusal after the
        reply.
        """
        self.command = command
        self._on_reply: OnReply[Done] | None = on_reply
        self._on_found = on_found
        self._on_lost = on_lost
        self._is_over = False
        count = len(hosts)
        self._seekers = [_Seeker(self, hosts[(first + n) % count]) for n in range(count)]

    def start(self) -> None:
        for seeker in self._seekers:
            seeker.ask()
            if self._is_over:  # an idle partition replies before `submit` returns
                return

    def withdraw(self) -> None:
        """Stop requesting; sessions granted from now on are released at once."""
        self._stop(None)
        self._answer(Refused(Refusal.NOT_APPLIED, "the consumer was removed"))

    # --- for the seekers ------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._is_over

    def found(self, winner: _Seeker, session_id: bytes, locked_until_ms: int) -> None:
        self._stop(winner)
        self._on_found(winner.host, session_id, locked_until_ms)
        self._answer(Done())

    def answered(self, reply: Done | Refused) -> None:
        """Report the first decisive answer; there is none while a partition may become
        available.
        """
        if self._is_over:
            return
        if isinstance(reply, Refused):
            if reply.refusal in AWAY and (
                self._on_reply is None or not all(each.is_away for each in self._seekers)
            ):
                return
            self._stop(None)
            if self._on_reply is None:
                self._on_lost(reply)
        self._answer(reply)

    def _stop(self, winner: _Seeker | None) -> None:
        if not self._is_over:
            self._is_over = True
            for seeker in self._seekers:
                if seeker is not winner:
                    seeker.stop()

    def _answer(self, reply: Done | Refused) -> None:
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(reply)


class _Seeker:
    """The request for a session in one partition; a delivery sink of its host until the grant."""

    __slots__ = ("_is_asked", "_life", "_owner", "host", "is_away")

    def __init__(self, owner: SessionSeeker, host: Host) -> None:
        self._owner = owner
        self.host = host
        self.is_away = False
        self._is_asked = False
        self._life = 0

    def ask(self) -> None:
        self._is_asked = True
        life = self._life
        self.host.register_sink(self._owner.command.consumer_id, self)
        self.host.submit(self._owner.command, lambda reply: self._answered(life, reply))

    def stop(self) -> None:
        self._life += 1
        if self._is_asked:
            consumer_id = self._owner.command.consumer_id
            self.host.unregister_sink(consumer_id)
            self.host.submit(RemoveConsumer(consumer_id))

    def _answered(self, life: int, reply: Done | Refused) -> None:
        if life != self._life:
            return
        self.is_away = isinstance(reply, Refused) and reply.refusal in AWAY
        if self.is_away:
            asyncio.get_running_loop().call_later(RETRY_S, self._ask_again, life)
        self._owner.answered(reply)

    def _ask_again(self, life: int) -> None:
        if life == self._life and not self._owner.is_over:
            self._life += 1
            self.ask()

    # --- delivery sink --------------------------------------------------------------------------

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        if not self._owner.is_over:
            self._owner.found(self, session_id, locked_until_ms)

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Never called before the session is granted and demand is set."""

    def available(self, count: int) -> None:
        """Never called: hints are not requested."""

    def ended(self, refused: Refused) -> None:
        self._life += 1
        self._is_asked = False
        self._owner.answered(refused)

    def reset(self) -> None:
        """Repeat the request after a reload of the partition."""
        self._life += 1
        if not self._owner.is_over:
            self.ask()
