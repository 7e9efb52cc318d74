"""One receive of an HTTP client: a consumer that wants one message and has until a time to get it.

The consumer takes part like a receiver link with a credit of one. It is removed when it has its
message or the time is over; whatever still reaches it then is given back. Always in peek-lock: what
shall be read destructively is completed by the door before it answers, so that nothing is lost with
a client that hangs up while it waits.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from postbus.broker.router import Address, Router
from postbus.entity.commands import (
    AddConsumer,
    Delivery,
    DemandSet,
    Disposition,
    ReceiveMode,
    Refusal,
    Refused,
    RemoveConsumer,
    Reply,
    SetDemand,
    Settle,
)

MAX_RECEIVES: Final = 5_000
"""Receives that may wait at one entity. Source: Service Bus quotas, concurrent receive requests."""

LAST_LOOK_S: Final = 1.0
"""Longest time the last look takes: the entity hands out what it has, or says that it has nothing.
An answer "no message" is true therefore, also with a timeout of 0."""

REPEAT_S: Final = 0.1
"""Pause before a partition is asked again that is loading or could not read."""

AWAY: Final = frozenset({Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.BUSY})
"""Refusals that pass: the partition loads, or decides whether the entity is idle."""


class Receives:
    """Counts who waits where, as the limit says."""

    def __init__(self, router: Router, limit: int = MAX_RECEIVES) -> None:
        self._router = router
        self._limit = limit
        self._waiting: dict[int, int] = {}

    async def take(self, address: Address, timeout_s: float) -> Delivery | Refused | None:
        """Return one locked message, None when none came in time, or why none can be had.

        The caller settles it or gives it back, also when it is cancelled.
        """
        entity_no = address.entity_no
        count = self._waiting.get(entity_no, 0)
        if count >= self._limit:
            return Refused(Refusal.BUSY, f"{count:,} receives wait here already.")
        self._waiting[entity_no] = count + 1
        try:
            return await _Receive(self._router, address).take(timeout_s)
        finally:
            if self._waiting[entity_no] == 1:
                del self._waiting[entity_no]
            else:
                self._waiting[entity_no] -= 1


def release(router: Router, address: Address, lock_tokens: list[bytes]) -> None:
    """Give messages back that reached no client; their delivery counts stay."""
    command = Settle(address.entity_no, address.sub_queue, lock_tokens, Disposition.RELEASE)
    router.submit(address.partition_id, command)


class _Receive:
    """A delivery sink of the router. The entity calls while it works: nothing is submitted then."""

    def __init__(self, router: Router, address: Address) -> None:
        self._router = router
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._found: asyncio.Future[Delivery | Refused | None] = self._loop.create_future()
        self._trouble: Refused | None = Refused(Refusal.BUSY, "The partition is loading.")
        self._consumer_id = 0
        self._timer: asyncio.TimerHandle
        self._is_last = False  # whether the entity is asked for the last time

    async def take(self, timeout_s: float) -> Delivery | Refused | None:
        self._is_last = timeout_s <= 0
        self._timer = (
            self._loop.call_later(LAST_LOOK_S, self._give_up)
            if self._is_last
            else self._loop.call_later(timeout_s, self._look_once_more)
        )
        self._register()
        try:
            return await self._found
        except asyncio.CancelledError:
            found = self._found
            if found.done() and not found.cancelled():  # it came in the same moment
                result = found.result()
                if isinstance(result, Delivery):
                    release(self._router, self._address, [result.lock_token])
            raise
        finally:
            self._timer.cancel()
            self._remove()

    def _register(self) -> None:
        router, address = self._router, self._address
        self._consumer_id = consumer_id = router.new_consumer_id()
        router.register_sink(address.partition_id, consumer_id, self)
        add = AddConsumer(address.entity_no, address.sub_queue, consumer_id, ReceiveMode.PEEK_LOCK)
        router.submit(address.partition_id, add, partial(self._added, consumer_id))
        self._ask(consumer_id)

    def _ask(self, consumer_id: int) -> None:
        demand = SetDemand(consumer_id, 1, is_drain=self._is_last)
        answered = partial(self._answered, consumer_id, self._is_last)
        self._router.submit(self._address.partition_id, demand, answered)

    def _remove(self) -> None:
        """Forget the consumer; what is on its way to it goes back to the queue."""
        partition_id = self._address.partition_id
        self._router.unregister_sink(partition_id, self._consumer_id)
        self._router.submit(partition_id, RemoveConsumer(self._consumer_id))

    def _look_once_more(self) -> None:
        """The time is over: have the entity say that there is nothing."""
        if not self._found.done():
            self._is_last = True
            self._timer = self._loop.call_later(LAST_LOOK_S, self._give_up)
            self._ask(self._consumer_id)

    def _give_up(self) -> None:
        self._finish(self._trouble)

    def _finish(self, result: Delivery | Refused | None) -> None:
        if not self._found.done():
            self._found.set_result(result)

    # --- answers --------------------------------------------------------------------------------

    def _added(self, consumer_id: int, reply: Reply) -> None:
        if consumer_id != self._consumer_id:
            return
        if not isinstance(reply, Refused):
            self._trouble = None
        elif reply.refusal in AWAY:
            self._trouble = reply
            self._loop.call_later(REPEAT_S, self._again, consumer_id)
        else:
            self._finish(reply)

    def _answered(self, consumer_id: int, is_last: bool, reply: Reply) -> None:
        if consumer_id != self._consumer_id or self._found.done():
            return
        if isinstance(reply, Refused) and reply.refusal in AWAY and self._trouble is None:
            self._loop.call_later(REPEAT_S, self._ask_again, consumer_id)
        elif is_last and isinstance(reply, DemandSet):
            self._finish(None)

    def _ask_again(self, consumer_id: int) -> None:
        if consumer_id == self._consumer_id and not self._found.done():
            self._ask(consumer_id)

    def _again(self, consumer_id: int) -> None:
        if consumer_id == self._consumer_id and not self._found.done():
            self._remove()
            self._register()

    # --- delivery sink --------------------------------------------------------------------------

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Take the message; one that comes too late goes back."""
        if not self._found.done():
            self._found.set_result(deliveries[0])
            deliveries = deliveries[1:]
        if deliveries:
            tokens = [each.lock_token for each in deliveries]
            self._loop.call_soon(release, self._router, self._address, tokens)

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        """Only receivers of sessions are granted one."""
        raise AssertionError(f"asked for no session, got {session_id!r} until {locked_until_ms}")

    def available(self, count: int) -> None:
        """Only the router asks for hints."""
        raise AssertionError(f"asked for no hint, got {count}")

    def ended(self, refusal: Refusal) -> None:
        """The entity was dropped or disabled."""
        self._finish(Refused(refusal))

    def reset(self) -> None:
        """The partition was reloaded: begin again there."""
        if not self._found.done():
            self._trouble = Refused(Refusal.BUSY, "The partition is loading.")
            self._register()
