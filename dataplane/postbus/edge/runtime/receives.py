"""Receives of HTTP clients: consumers of one message with a timeout.

A consumer acts like a receiver link with a credit of one, and is removed soon after its message or
timeout; messages that reach it later are released. It always locks: the handler completes a message
to be read destructively before it answers, so that no message is lost with a client that
disconnects while it waits.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

from postbus.broker.address import Address
from postbus.broker.router import Router
from postbus.entity.commands import (
    AddConsumer,
    Delivery,
    DemandSet,
    Disposition,
    Done,
    ReceiveMode,
    Receiver,
    Refusal,
    Refused,
    RemoveConsumer,
    SetDemand,
    Settle,
    SubQueue,
)

MAX_RECEIVES: Final = 5_000
"""Receives that may wait on one entity. Source: Service Bus quotas, concurrent receive requests."""

LAST_LOOK_S: Final = 1.0
"""Longest duration of the last look: the entity delivers a message or reports that it has none. An
answer "no message" is therefore true, also with a timeout of 0."""

REPEAT_S: Final = 0.1
"""Pause before a partition that is loading or failed to read is asked again."""

LINK: Final = "HTTP"
"""Name of the receiver in a dead letter, instead of a link's name."""

PARKED_S: Final = 1.0
"""Time that a consumer waits for the next receive of its connection (ADR 24)."""

AWAY: Final = frozenset({Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.BUSY})
"""Temporary refusals: the partition loads, or decides whether the entity is idle."""

LOADING: Final = Refused(Refusal.BUSY, "The partition is loading.")
STOPPING: Final = Refused(Refusal.BUSY, "The broker is stopping.")

_Key: TypeAlias = tuple[object, int, SubQueue]
"""Connection, entity and sub-queue."""


class Receives:
    """Limits waiting receives and keeps consumers for the next receive.

    A connection that receives again and again keeps one consumer: the hints of partitions stay
    valid, and only the demand changes.
    """

    def __init__(self, router: Router, limit: int = MAX_RECEIVES) -> None:
        self._router = router
        self._limit = limit
        self._waiting: dict[int, int] = {}
        self._parked: dict[_Key, tuple[_Consumer, asyncio.TimerHandle]] = {}
        self._active: set[_Consumer] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Answer all waiting receives: a stop of the bus is shorter than their timeouts."""
        self._is_stopping = True
        for consumer in self._active:
            consumer.refuse(STOPPING)

    async def take(
        self,
        address: Address,
        timeout_s: float,
        connection: object = None,
        client: str | None = None,
    ) -> Delivery | Refused | None:
        """Return one locked message, None if none came in time, or the reason of a refusal.

        The caller settles or releases it, also when it is cancelled. A `connection` asks for one
        message at a time. `client`: its address.
        """
        if self._is_stopping:
            return STOPPING
        entity_no = address.entity_no
        count = self._waiting.get(entity_no, 0)
        if count >= self._limit:
            return Refused(Refusal.BUSY, f"{count:,} receives are already waiting on this entity.")
        self._waiting[entity_no] = count + 1
        key = (connection, entity_no, address.sub_queue)
        consumer = self._unpark(key) or _Consumer(
            self._router, address, Receiver(LINK, client or "")
        )
        self._active.add(consumer)
        try:
            return await consumer.take(timeout_s)
        finally:
            self._active.discard(consumer)
            if consumer.is_quiet and connection is not None:
                self._park(key, consumer)
            else:
                consumer.close()
            if self._waiting[entity_no] == 1:
                del self._waiting[entity_no]
            else:
                self._waiting[entity_no] -= 1

    def _park(self, key: _Key, consumer: _Consumer) -> None:
        loop = asyncio.get_running_loop()
        self._parked[key] = (consumer, loop.call_later(PARKED_S, self._let_go, key))

    def _unpark(self, key: _Key) -> _Consumer | None:
        parked = self._parked.pop(key, None)
        if parked is None:
            return None
        consumer, timer = parked
        timer.cancel()
        if not consumer.is_quiet:  # its partition was reloaded, or its entity disabled
            consumer.close()
            return None
        return consumer

    def _let_go(self, key: _Key) -> None:
        consumer, _ = self._parked.pop(key)
        consumer.close()


def release(router: Router, address: Address, lock_tokens: list[bytes]) -> None:
    """Release messages that reached no client; their delivery counts stay."""
    command = Settle(address.entity_no, address.sub_queue, lock_tokens, Disposition.RELEASE)
    router.submit(address.partition_id, command)


class _Consumer:
    """A delivery sink of the router. The entity calls while it works: nothing is submitted then."""

    def __init__(self, router: Router, address: Address, receiver: Receiver) -> None:
        self._receiver = receiver
        self.is_quiet = False
        """True if it is registered without demand and can serve another receive."""
        self._router = router
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._found: asyncio.Future[Delivery | Refused | None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle
        self._trouble: Refused | None = LOADING
        self._consumer_id = 0
        self._delivered = 0  # as counted by the entity since the consumer was added
        self._number = 0  # counts the receives, to recognize an answer to an earlier one
        self._is_last = False  # True while the last look is in progress

    async def take(self, timeout_s: float) -> Delivery | Refused | None:
        self._number += 1
        found: asyncio.Future[Delivery | Refused | None] = self._loop.create_future()
        self._found = found
        self._is_last = timeout_s <= 0
        self._timer = (
            self._loop.call_later(LAST_LOOK_S, self._give_up)
            if self._is_last
            else self._loop.call_later(timeout_s, self._look_once_more)
        )
        if self.is_quiet:
            self.is_quiet = False
            self._ask()
        else:
            self._register()
        try:
            return await found
        except asyncio.CancelledError:
            self.is_quiet = False
            if found.done() and not found.cancelled():  # it came at the same moment
                result = found.result()
                if isinstance(result, Delivery):
                    release(self._router, self._address, [result.lock_token])
            raise
        finally:
            self._timer.cancel()

    def refuse(self, refused: Refused) -> None:
        """End a waiting receive with a refusal."""
        self.is_quiet = False
        self._finish(refused)

    def close(self) -> None:
        """Remove the consumer; deliveries in flight are returned to the queue."""
        partition_id = self._address.partition_id
        self._router.unregister_sink(partition_id, self._consumer_id)
        self._router.submit(partition_id, RemoveConsumer(self._consumer_id))

    def _register(self) -> None:
        router, address = self._router, self._address
        self._consumer_id = consumer_id = router.new_consumer_id()
        self._delivered = 0
        router.register_sink(address.partition_id, consumer_id, self)
        add = AddConsumer(
            address.entity_no,
            address.sub_queue,
            consumer_id,
            ReceiveMode.PEEK_LOCK,
            self._receiver,
        )
        router.submit(address.partition_id, add, lambda reply: self._added(consumer_id, reply))
        self._ask()

    def _ask(self) -> None:
        consumer_id, number, is_last = self._consumer_id, self._number, self._is_last
        self._router.submit(
            self._address.partition_id,
            SetDemand(consumer_id, self._delivered + 1, is_drain=is_last),
            lambda reply: self._answered(consumer_id, number, is_last, reply),
        )

    def _look_once_more(self) -> None:
        """Ask the entity a last time after the timeout, to be sure that it has no message."""
        if not self._found.done():
            self._is_last = True
            self._timer = self._loop.call_later(LAST_LOOK_S, self._give_up)
            self._ask()

    def _give_up(self) -> None:
        self._finish(self._trouble)

    def _finish(self, result: Delivery | Refused | None) -> None:
        if not self._found.done():
            self._found.set_result(result)

    # --- answers --------------------------------------------------------------------------------

    def _added(self, consumer_id: int, reply: Done | Refused) -> None:
        if consumer_id != self._consumer_id:
            return
        if not isinstance(reply, Refused):
            self._trouble = None
        elif reply.refusal in AWAY:
            self._trouble = reply
            self._loop.call_later(REPEAT_S, self._again, consumer_id)
        else:
            self._finish(reply)

    def _answered(
        self, consumer_id: int, number: int, is_last: bool, reply: DemandSet | Refused
    ) -> None:
        if consumer_id != self._consumer_id or number != self._number or self._found.done():
            return
        if isinstance(reply, Refused):
            if reply.refusal in AWAY and self._trouble is None:
                self._loop.call_later(REPEAT_S, self._ask_again, consumer_id, number)
        elif is_last:
            self.is_quiet = True
            self._finish(None)

    def _ask_again(self, consumer_id: int, number: int) -> None:
        if consumer_id == self._consumer_id and number == self._number and not self._found.done():
            self._ask()

    def _again(self, consumer_id: int) -> None:
        if consumer_id == self._consumer_id and not self._found.done():
            self.close()
            self._register()

    # --- delivery sink --------------------------------------------------------------------------

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Take the message; release one that comes too late."""
        self._delivered += len(deliveries)
        if not self._found.done():
            self.is_quiet = True
            self._found.set_result(deliveries[0])
            deliveries = deliveries[1:]
        if deliveries:
            tokens = [each.lock_token for each in deliveries]
            self._loop.call_soon(release, self._router, self._address, tokens)

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        """Raise: only receivers of sessions are granted one."""
        raise AssertionError(f"asked for no session, got {session_id!r} until {locked_until_ms}")

    def available(self, count: int) -> None:
        """Raise: only the router asks for hints."""
        raise AssertionError(f"asked for no hint, got {count}")

    def ended(self, refused: Refused) -> None:
        """Refuse the receive: the entity was dropped or disabled."""
        self.refuse(refused)

    def reset(self) -> None:
        """Begin again after a reload of the partition, now or with the next receive."""
        self._trouble = LOADING
        if self._found.done():
            self.is_quiet = False
        else:
            self._register()
