"""One sub-queue: its messages, its receivers, and deliveries to them.

A message is available and in `order`, or in exactly one of `locks`, `deferred` and `doomed`.

`locks`, `paging` and `expiry` are methods of this class in modules of their own: they and this one
import each other's types, and none is understood without the others.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Final

from postbus.entity.apply_context import MAINTENANCE_LIMIT
from postbus.entity.commands import (
    Delivery,
    ReceiveMode,
    Receiver,
    Refusal,
    StoredRow,
    SubQueue,
)
from postbus.entity.numbering import Numbering
from postbus.entity.outcomes import (
    Available,
    Deliver,
    EndConsumer,
    Fetch,
    Needs,
    Settling,
)
from postbus.entity.queues import locks, paging, runs
from postbus.entity.queues.ledger import Ledger
from postbus.entity.queues.message_order import MessageOrder
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.message.envelope import Envelope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from postbus.entity.apply_context import ApplyContext
    from postbus.entity.entity_state import EntityState

FAIR_CHUNK: Final = 32
"""Maximum number of messages for one receiver before the next is served. Our choice: small against
usual credits (100 to 1,000), large enough for one frame burst."""


class Consumer:
    """A receiver of one sub-queue. `limit` and `delivered` count since it was added (ADR 24)."""

    __slots__ = ("consumer_id", "delivered", "is_waiting", "limit", "mode", "receiver")

    is_forwarder: ClassVar[bool] = False

    def __init__(
        self, consumer_id: int, mode: ReceiveMode, receiver: Receiver | None = None
    ) -> None:
        self.consumer_id = consumer_id
        self.mode = mode
        self.receiver = receiver
        self.limit = 0
        self.delivered = 0
        self.is_waiting = False

    def take(self, sub: SubQueueState, batch: list[QueuedMessage]) -> list[Delivery]:
        """Receive and delete messages."""
        return locks.receive_and_delete(sub, batch)


def end_all(consumers: dict[int, Consumer], refusal: Refusal, context: ApplyContext) -> list[int]:
    """Remove consumers, with an effect for each that is a receiver; return these ids."""
    ended = [each.consumer_id for each in consumers.values() if not each.is_forwarder]
    context.outcome.effects += [EndConsumer(consumer_id, refusal) for consumer_id in ended]
    consumers.clear()
    return ended


class SubQueueState:
    """See the module's docstring. `is_main` is False for the dead-letter kinds: there nothing
    expires, deliveries are not limited, and only abandoning counts.

    `session_until_ms` is when the lock of a session ends, and with it each lock of its messages; 0
    outside sessions.
    """

    __slots__ = (
        "attempts",
        "consumers",
        "context",
        "deferred",
        "deferred_sections",
        "doomed",
        "entity",
        "fetch_keys",
        "hinted",
        "is_main",
        "kind",
        "ledger",
        "lock_timer_ms",
        "locks",
        "numbering",
        "order",
        "session_until_ms",
        "unsorted_until_ms",
        "waiting",
    )

    low_water: ClassVar[int] = paging.LOW_WATER

    def __init__(
        self, entity: EntityState, kind: SubQueue, context: ApplyContext, next_sequence: int = 0
    ) -> None:
        self._make_empty(entity, kind, context)
        self.numbering = Numbering(entity, kind, next_sequence)
        self.ledger = Ledger(entity, context.window)
        self.deferred_sections: dict[int, bytes] = {}
        self.attempts: dict[int, int] = {}
        context.sub_queues[self] = None

    def _make_empty(self, entity: EntityState, kind: SubQueue, context: ApplyContext) -> None:
        """Initialize the fields that each session of an entity has, too."""
        self.entity = entity
        self.kind = kind
        self.context = context
        self.is_main = kind is SubQueue.ACTIVE
        self.session_until_ms = 0
        self.order = MessageOrder()
        self.doomed: dict[int, QueuedMessage] = {}
        self.fetch_keys: list[int] | None = None
        self.locks: dict[bytes, QueuedMessage] = {}
        self.lock_timer_ms: int | None = None
        self.unsorted_until_ms = 0
        self.deferred: dict[int, int] = {}
        self.consumers: dict[int, Consumer] = {}
        self.waiting: deque[Consumer] = deque()
        self.hinted: dict[int, Consumer] | None = None

    def take_over(self, row_keys: array[int], deferred: dict[int, int]) -> None:
        """Load the rows of the sub-queue; `deferred` maps row key to number."""
        self.ledger.restore(len(row_keys))
        if deferred:
            row_keys = array("q", (key for key in row_keys if key not in deferred))
        self.order.restore(row_keys)
        self.deferred = {number: key for key, number in deferred.items()}

    @property
    def live(self) -> int:
        """Number of messages; in a session that of all sessions."""
        return self.ledger.live

    @property
    def locked_count(self) -> int:
        """Number of locked messages."""
        return len(self.locks)

    def oldest(self) -> tuple[int, int | None] | None:
        """Return row key and enqueued time of the next available message, None without one.

        The time is None when only the key is in memory. Locked and deferred messages do not wait.
        """
        return self.order.oldest()

    # --- arrivals ---------------------------------------------------------------------------------

    def append(
        self,
        envelopes: list[Envelope],
        total_bytes: int,
        *,
        is_shared: bool = False,
        enqueued_ms: int | None = None,
    ) -> list[int]:
        """Store new messages behind all others; return their sequence numbers.

        `is_shared`: bodies may be `Envelope.shared` with the copies of other sub-queues.
        `enqueued_ms` None is now.
        """
        context = self.context
        now_ms = context.now_ms
        if enqueued_ms is not None and enqueued_ms < now_ms:
            context.backdated_ms, now_ms = now_ms, enqueued_ms
        inserts = context.outcome.inserts
        count = len(envelopes)
        self.ledger.store(count, total_bytes)
        blocks = self.numbering.take(count, context)
        if len(blocks) == 1:
            key, offset, _ = blocks[0]
            arrived = runs.arrive(envelopes, key, offset, now_ms, inserts)
            numbers = list(range(key + offset, key + offset + count))
        else:
            numbers, arrived = self._append_blocks(blocks, envelopes, now_ms)
        self.distribute(envelopes, arrived, total_bytes, is_shared)
        return numbers

    def distribute(
        self,
        envelopes: list[Envelope],
        arrived: list[QueuedMessage],
        total_bytes: int,
        is_shared: bool,
    ) -> None:
        """Keep new messages, loaded if there is room, and deliver to waiting receivers."""
        context = self.context
        count = len(arrived)
        needed_bytes = total_bytes - _held_bytes(envelopes) if is_shared else total_bytes
        if context.window.has_room(count, needed_bytes, is_wanted=bool(self.waiting)):
            self.order.extend(arrived)
            self.ledger.load_all(envelopes, total_bytes, is_shared=is_shared)
        else:
            paging.append_short_of_room(self, arrived)
        if self.waiting or self.hinted:
            self.pump()

    def _append_blocks(
        self, blocks: list[tuple[int, int, int]], envelopes: list[Envelope], now_ms: int
    ) -> tuple[list[int], list[QueuedMessage]]:
        """Store messages whose keys are of several blocks."""
        inserts = self.context.outcome.inserts
        numbers: list[int] = []
        arrived: list[QueuedMessage] = []
        start = 0
        for key, offset, length in blocks:
            part = envelopes[start : start + length]
            arrived += runs.arrive(part, key, offset, now_ms, inserts)
            numbers += range(key + offset, key + offset + length)
            start += length
        return numbers, arrived

    def append_key(
        self, row_key: int, grown_bytes: int = 0, *, session_id: bytes | None = None
    ) -> None:
        """Append a message that was moved here; its row is read when a receiver needs it.

        `grown_bytes`: what it adds to the size of the entity. `session_id` must be given where
        messages are divided by session.
        """
        del session_id
        paging.evict_tail(self)
        self.order.append_keys([row_key])
        self.ledger.store(1, grown_bytes)
        if self.waiting or self.hinted:
            self.context.resumed[self.pump] = None

    def put_back(self, message: QueuedMessage) -> None:
        """Return a message to its place by key."""
        self.order.put_back(message)
        if self.hinted:
            self.context.resumed[self.pump] = None

    # --- receivers --------------------------------------------------------------------------------

    def add_consumer(self, consumer: Consumer) -> None:
        self.consumers[consumer.consumer_id] = consumer

    def arm_hint(self, consumer: Consumer, *, is_wanted: bool) -> None:
        """Send a receiver one hint, now or later; withdraw it if it is not wanted (ADR 24)."""
        if is_wanted:
            if self.hinted is None:
                self.hinted = {}
            self.hinted[consumer.consumer_id] = consumer
            self._send_hints()
        elif self.hinted:
            self.hinted.pop(consumer.consumer_id, None)

    def _send_hints(self) -> None:
        """Send hints if messages are available and no receiver with demand waits for them."""
        if self.waiting or not self.hinted:
            return
        count = len(self.order)
        if not count:
            return
        effects = self.context.outcome.effects
        for consumer_id in list(self.hinted):
            effects.append(Available(consumer_id, count))
        self.hinted.clear()

    def remove_consumer(self, consumer_id: int) -> None:
        consumer = self.consumers.pop(consumer_id)
        if consumer.is_waiting:
            self.waiting.remove(consumer)
            consumer.is_waiting = False
        if self.hinted:
            self.hinted.pop(consumer_id, None)

    def end_consumers(self, refusal: Refusal) -> list[int]:
        """Remove all receivers, with an effect for each; return their ids."""
        self.waiting.clear()
        self.hinted = None
        return end_all(self.consumers, refusal, self.context)

    def set_demand(
        self,
        consumer: Consumer,
        limit: int,
        *,
        is_drain: bool,
        found: Sequence[StoredRow] | None,
    ) -> Needs | None:
        """Deliver up to `limit`; with `is_drain` the limit then falls to what was delivered.

        A drain looks into the backlog first: "nothing there" must be true.
        """
        if is_drain and found is None:
            absent = paging.absent_keys(self, limit - consumer.delivered)
            if absent:
                return Needs(row_keys=absent)
        consumer.limit = limit
        self._note_demand(consumer)
        if consumer.is_waiting:
            paging.hand_out(self, deque(found or ()))
        if is_drain and consumer.limit > consumer.delivered:
            consumer.limit = consumer.delivered
            self._note_demand(consumer)
        return None

    def _note_demand(self, consumer: Consumer) -> None:
        is_waiting = consumer.limit > consumer.delivered
        if is_waiting is not consumer.is_waiting:
            consumer.is_waiting = is_waiting
            if is_waiting:
                self.waiting.append(consumer)
            else:
                self.waiting.remove(consumer)

    # --- handing out ------------------------------------------------------------------------------

    def pump(self) -> None:
        """Deliver available messages to waiting receivers, in turn and in small equal chunks.

        Expired messages met on the way are removed; they count into the limit of one command, and
        what is left over goes on in the next Tick.
        """
        waiting = self.waiting
        if not waiting:
            if self.hinted:
                self._send_hints()
            return
        order = self.order
        available = order.front_count
        if available:
            share = available
            if len(waiting) > 1:
                share = min(available // len(waiting) or 1, FAIR_CHUNK)
            left = MAINTENANCE_LIMIT
            bursts: dict[int, Deliver] = {}
            while waiting and left > 0:
                consumer = waiting[0]
                batch = order.take(min(share, consumer.limit - consumer.delivered, left))
                if not batch:
                    break
                left -= len(batch)
                if consumer.mode is ReceiveMode.PEEK_LOCK:
                    deliveries = locks.lock(self, batch, consumer.receiver)
                else:
                    deliveries = consumer.take(self, batch)
                self._hand_over(consumer, deliveries, bursts)
            if left <= 0 and waiting:
                self.context.resumed[self.pump] = None
        paging.fetch_if_low(self)
        if self.hinted:
            self._send_hints()
        if self.context.window.is_over:
            paging.shed(self)

    def _hand_over(
        self, consumer: Consumer, deliveries: list[Delivery], bursts: dict[int, Deliver]
    ) -> None:
        if not deliveries:
            return
        consumer_id = consumer.consumer_id
        consumer.delivered += len(deliveries)
        if self.is_main:
            self.entity.traffic.delivered += len(deliveries)
        burst = bursts.get(consumer_id)
        if burst is None:
            bursts[consumer_id] = burst = Deliver(
                consumer_id, self.entity.entity_no, self.kind, deliveries
            )
            self.context.outcome.effects.append(burst)
        else:
            burst.deliveries += deliveries
        if consumer.delivered >= consumer.limit:
            consumer.is_waiting = False
            self.waiting.popleft()
        else:
            self.waiting.rotate(-1)

    # --- callbacks ------------------------------------------------------------------------------

    def expire_locks(self) -> None:
        locks.expire(self)

    def fetch_doomed(self) -> None:
        paging.fetch(self)

    def shed(self) -> None:
        paging.shed(self)

    def end_search(self) -> None:
        """Release what was opened to search for messages."""

    def make_room(self, wanted_bytes: int) -> None:
        """Unload messages if no receiver waits and the window lacks room."""
        if not self.waiting:
            paging.free_room(self, self.order.unload_tail, 0, wanted_bytes)
            paging.free_room(self, self.order.unload_ready, 0, wanted_bytes)

    def ask(self) -> None:
        """Request the rows needed next from the host; `fetch_keys` is set until they arrive."""
        row_keys = paging.keys_wanted(self, paging.readable(self.entity, paging.FETCH_KEYS))
        if row_keys:
            self.fetch_keys = row_keys
            self.context.outcome.effects.append(Fetch(self.entity.entity_no, self.kind, row_keys))

    def clear(self) -> None:
        """Release all memory of a dropped entity."""
        for message in chain(self.order.messages(), self.locks.values(), self.doomed.values()):
            message.token = None
            if message.envelope is not None:
                self.ledger.unload(message.envelope)
        self.order.clear()
        self.locks.clear()
        self.doomed.clear()
        self.lock_timer_ms = None
        self.context.sub_queues.pop(self, None)

    def unrecorded(self) -> Iterator[tuple[QueuedMessage, int]]:
        """Yield messages with attempts the tables do not know, and the attempts."""
        if self.is_main:
            for message in self.locks.values():
                if message.recorded <= message.failures:
                    yield message, message.failures + 1
        for message in chain(self.order.returned(), self.doomed.values()):
            if message.recorded < message.failures:
                yield message, message.failures

    def row_keys(self) -> array[int]:
        """Return the keys of all messages that are in this sub-queue."""
        keys = self.order.row_keys()
        for messages in (self.locks.values(), self.doomed.values()):
            keys.extend(message.row_key for message in messages)
        keys.extend(self.deferred.values())
        return keys

    # --- reader groups ----------------------------------------------------------------------------

    def lowest_held(self) -> int | None:
        """Return the lowest key of a message that a receiver has, or that is about to leave."""
        held = (message.row_key for message in self.locks.values() if not message.is_deferred)
        return min(chain(held, self.doomed), default=None)

    def deferred_count(self) -> int:
        """Return the number of deferred messages."""
        return len(self.deferred) + sum(each.is_deferred for each in self.locks.values())

    def remove_below(self, end_key: int, limit: int) -> int:
        """Complete the first messages below a key, at most `limit`; return their number.

        Their rows are committed. Locked and deferred ones stay.
        """
        average_bytes = self.entity.average_bytes
        messages, keys = self.order.take_below(end_key, limit)
        for message in messages:
            self.settle_row(
                message.row_key, message.enqueued_ms, Settling.COMPLETED, is_stored=True
            )
            self.ledger.leave(message)
        for row_key in keys:
            self.settle_row(row_key, 0, Settling.COMPLETED, is_stored=True)
            self.ledger.leave_unloaded(average_bytes)
            self.attempts.pop(row_key, None)
        return len(messages) + len(keys)

    # --- leaving ----------------------------------------------------------------------------------

    def remove(self, message: QueuedMessage, how: Settling) -> None:
        """Settle a message that is in none of the collections any more."""
        self.settle_row(message.row_key, message.enqueued_ms, how)
        self.ledger.leave(message)

    def settle_row(
        self, row_key: int, enqueued_ms: int, how: Settling, *, is_stored: bool = False
    ) -> None:
        """Delete a row, or keep it where the entity has a history (ADR 18).

        `is_stored`: it was read from the store, so its insert is committed.
        """
        context = self.context
        if self.entity.keeps_settled:
            context.settle(self.entity.entity_no, [row_key], how)
            return
        outcome = context.outcome
        outcome.deletes.append(row_key)
        if not is_stored and context.may_be_uncommitted(row_key, enqueued_ms):
            outcome.touches_uncommitted = True


def _held_bytes(envelopes: list[Envelope]) -> int:
    """Return the bytes of bodies that another sub-queue has already loaded."""
    bodies = (envelope.shared for envelope in envelopes)
    return sum(body.size_bytes for body in bodies if body is not None and body.holders)
