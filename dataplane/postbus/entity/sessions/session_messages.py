"""The messages of one session: a sub-queue among many of its entity, with at most one receiver.

They have the order, paging, locks and deferral of any sub-queue; numbers and counts are those of
the whole entity. The object exists while a receiver holds the session or messages of it are loaded,
and has no backlog behind loaded messages: others are kept as keys. `session_queue` decides which
receiver holds a session and which session is next.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final

from postbus.entity.commands import ReceiveMode, Receiver, SubQueue
from postbus.entity.outcomes import Deliver
from postbus.entity.queues import locks, paging
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.entity.queues.sub_queue import Consumer, SubQueueState

if TYPE_CHECKING:
    from array import array

    from postbus.entity.sessions.messages_by_session import MessagesBySession

SESSION_BYTES: Final = 2_500
"""Memory of a session without its messages. Measured with tracemalloc on CPython 3.11."""

_NO_RECEIVERS: Final[deque[Consumer]] = deque(maxlen=0)
"""Shared by all sessions: an empty deque costs 770 bytes."""


class SessionConsumer(Consumer):
    """A receiver of one session; `session` is None while it waits for one, and after it lost it."""

    __slots__ = ("session",)

    def __init__(  # each accept makes one
        self, consumer_id: int, mode: ReceiveMode, receiver: Receiver | None = None
    ) -> None:
        self.consumer_id = consumer_id
        self.mode = mode
        self.receiver = receiver
        self.limit = 0
        self.delivered = 0
        self.is_waiting = False
        self.session: SessionMessages | None = None


class SessionMessages(SubQueueState):
    """See the module's docstring. `is_queued`: its id is in `available` of its queue."""

    __slots__ = ("holder", "is_hungry", "is_queued", "queue", "session_id")

    low_water: ClassVar[int] = 32

    def __init__(self, queue: MessagesBySession) -> None:
        self._make_empty(queue.entity, SubQueue.ACTIVE, queue.context)
        self.queue = queue
        self.session_id = b""
        self.numbering = queue.numbering
        self.ledger = queue.ledger
        self.attempts = queue.attempts
        self.deferred_sections = queue.deferred_sections
        self.waiting = _NO_RECEIVERS
        self.lock_timer_ms = 0  # the session's lock ends every lock, no timer of its own
        self.holder: SessionConsumer | None = None
        self.is_queued = False
        self.is_hungry = False

    @property
    def is_available(self) -> bool:
        """True if there are messages to deliver."""
        return not self.order.is_empty

    @property
    def is_empty(self) -> bool:
        return not (self.is_available or self.locks or self.deferred or self.doomed)

    def hold(self, consumer: SessionConsumer, until_ms: int) -> None:
        """Make a receiver the only one."""
        self.holder = consumer
        consumer.session = self
        self.session_until_ms = until_ms
        self.consumers[consumer.consumer_id] = consumer
        if self.waiting is _NO_RECEIVERS:
            self.waiting = deque()
        if consumer.limit > consumer.delivered:
            consumer.is_waiting = True
            self.waiting.append(consumer)

    def free(self) -> None:
        """Forget the receiver; the caller ends its locks."""
        holder = self.holder
        assert holder is not None
        holder.session = None
        holder.is_waiting = False
        self.holder = None
        self.session_until_ms = 0
        self.consumers.clear()
        self.waiting.clear()

    def remove_consumer(self, consumer_id: int) -> None:
        """Free the session; locked messages return as if they had not been delivered."""
        del self.queue.consumers[consumer_id]
        self.queue.release(self, is_failed=False)

    def renew(self, until_ms: int) -> None:
        """Extend the lock of the session, and every lock in it."""
        self.session_until_ms = until_ms
        for message in self.locks.values():
            message.locked_until_ms = until_ms

    def pump(self) -> None:
        """Deliver to the holder, unless its lock has expired and the Tick is still to come."""
        if not self.waiting:
            return
        if self.session_until_ms <= self.context.now_ms:
            self.queue.expire(self)
        elif self.hinted:
            SubQueueState.pump(self)
        elif (message := self.order.take_only()) is not None:
            self._hand_out_one(message)
        elif not self.order.is_empty:  # else a completion was the cause
            SubQueueState.pump(self)

    def _hand_out_one(self, message: QueuedMessage) -> None:
        """Do the same as `pump` for a single message, the usual case with many holders."""
        context, consumer = self.context, self.waiting[0]
        batch = [message]
        if consumer.mode is ReceiveMode.PEEK_LOCK:
            deliveries = locks.lock(self, batch, consumer.receiver)
        else:
            deliveries = consumer.take(self, batch)
        if deliveries:
            consumer.delivered += 1
            self.entity.traffic.delivered += 1
            context.outcome.effects.append(
                Deliver(consumer.consumer_id, self.entity.entity_no, self.kind, deliveries)
            )
            if consumer.delivered >= consumer.limit:
                consumer.is_waiting = False
                self.waiting.popleft()
        if context.window.is_over:
            paging.shed(self)

    def take_locked(self, token: bytes) -> QueuedMessage | None:
        """Remove a locked message if that is simple: no stub, no shared body."""
        message = self.locks.get(token)
        if message is None or message.envelope is None or message.envelope.shared is not None:
            return None
        if message.locked_until_ms <= self.context.now_ms:
            return None
        del self.locks[token]
        message.token = None
        return message

    def take_short_of_room(self, message: QueuedMessage) -> None:
        """Append a new message; keep only its key unless it is wanted at once or fits."""
        if self.order.backlog_count:
            self.order.append_keys([message.row_key])
        else:
            paging.append_short_of_room(self, [message])

    def ask(self) -> None:
        self.queue.want(self)

    def end_search(self) -> None:
        """Keep the session as it is, as keys, or not at all, unless a receiver holds it."""
        if self.holder is None:
            self.queue.put_away(self)

    def unload_all(self) -> array[int]:
        """Forget the objects of all available messages; return their keys in order."""
        order = self.order
        keys = order.row_keys()
        for message in order.returned():
            if message.envelope is not None:
                paging.unload(self, message)
            self.context.record(message, message.failures)
            # the row may show an attempt that was taken back
            self.attempts[message.row_key] = message.failures
        paging.evict_ready(self)
        order.clear()
        return keys
