"""One queue of a partition: its definition, what it refuses, and its sub-queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.contract import MAX_DURATION_MS, EntityStatus, QueueProperties
from postbus.entity.commands import Enqueue, Enqueued, Refusal, Refused, SubQueue
from postbus.entity.outcomes import RecordSize
from postbus.entity.scheduled import ScheduledMessages
from postbus.entity.sub_queue import SubQueueState
from postbus.message.envelope import Envelope
from postbus.message.patch import check_properties

if TYPE_CHECKING:
    from postbus.entity.turn import Turn

QUOTA_EXCEEDED: Final = Refused(Refusal.QUOTA_EXCEEDED, "the entity has reached its maximum size")


class QueueState:
    """A queue. Fields read on the hot path are copied out of `properties`."""

    __slots__ = (
        "_subs",
        "active",
        "dead_letters_expired",
        "default_ttl_ms",
        "entity_no",
        "lock_duration_ms",
        "max_delivery_count",
        "max_message_bytes",
        "max_size_bytes",
        "name",
        "properties",
        "scheduled",
        "size_bytes",
        "turn",
    )

    dead_letters_expired: bool
    default_ttl_ms: int | None
    lock_duration_ms: int
    max_delivery_count: int
    max_message_bytes: int
    max_size_bytes: int

    def __init__(
        self,
        entity_no: int,
        name: str,
        properties: QueueProperties,
        turn: Turn,
        next_sequence: int,
        size_bytes: int = 0,
    ) -> None:
        self.entity_no = entity_no
        self.name = name
        self.turn = turn
        self.size_bytes = size_bytes
        self._define(properties)
        self.active = SubQueueState(self, SubQueue.ACTIVE, turn, next_sequence)
        self._subs = {SubQueue.ACTIVE: self.active}
        self.scheduled = ScheduledMessages(self.active, turn)

    def _define(self, properties: QueueProperties) -> None:
        limits = self.turn.limits
        self.properties = properties
        ttl_ms = min(properties.default_message_ttl_ms, limits.max_default_ttl_ms)
        self.default_ttl_ms = None if ttl_ms >= MAX_DURATION_MS else ttl_ms
        self.lock_duration_ms = properties.lock_duration_ms
        self.max_delivery_count = properties.max_delivery_count
        self.dead_letters_expired = properties.dead_lettering_on_message_expiration
        self.max_size_bytes = properties.max_size_in_megabytes * 1024 * 1024
        self.max_message_bytes = min(
            properties.max_message_size_in_kilobytes * 1024, limits.max_message_bytes
        )

    def redefine(self, properties: QueueProperties) -> list[int]:
        """Replace the definition; messages and locks stay (N3). Return the receivers it ended."""
        if properties.lock_duration_ms < self.lock_duration_ms:
            longest_ms = self.turn.now_ms + self.lock_duration_ms
            for sub in self._subs.values():
                sub.unsorted_until_ms = max(sub.unsorted_until_ms, longest_ms)
        self._define(properties)
        refusal = self.receive_refusal()
        if refusal is None:
            return []
        return self.end_consumers(refusal.refusal)

    # --- sub-queues -------------------------------------------------------------------------------

    def sub_queue(self, kind: SubQueue) -> SubQueueState:
        """Return a sub-queue, made at first use: most entities never need the others."""
        sub = self._subs.get(kind)
        if sub is None:
            assert kind in (SubQueue.DEAD_LETTER, SubQueue.TRANSFER_DEAD_LETTER)
            sub = self._subs[kind] = SubQueueState(self, kind, self.turn)
        return sub

    def sub_queues(self) -> list[SubQueueState]:
        return list(self._subs.values())

    def live_count(self, kind: SubQueue) -> int:
        sub = self._subs.get(kind)
        return 0 if sub is None else sub.live

    @property
    def message_count(self) -> int:
        """Live messages of all sub-queues."""
        return sum(sub.live for sub in self._subs.values()) + len(self.scheduled)

    @property
    def average_bytes(self) -> int:
        """Size of the usual message, a guess where rows have not been read."""
        count = self.message_count
        return self.size_bytes // count if count else 0

    def shrink(self, size_bytes: int) -> None:
        """Subtract what left; after a load sizes are estimates and must not fall below zero."""
        self.size_bytes -= size_bytes
        if self.size_bytes < 0:
            self.size_bytes = 0

    def recorded_size(self) -> RecordSize:
        """Return a checkpoint of size and count (D18)."""
        return RecordSize(self.entity_no, self.size_bytes, self.message_count)

    def end_consumers(self, refusal: Refusal) -> list[int]:
        """Remove all receivers; return their ids."""
        return [
            consumer_id for sub in self._subs.values() for consumer_id in sub.end_consumers(refusal)
        ]

    # --- refusals ---------------------------------------------------------------------------------

    def receive_refusal(self) -> Refused | None:
        """Say why nothing may be received, or None."""
        status = self.properties.status
        if status is EntityStatus.DISABLED:
            return Refused(Refusal.ENTITY_DISABLED, self.name)
        if status is EntityStatus.RECEIVE_DISABLED:
            return Refused(Refusal.RECEIVE_DISABLED, self.name)
        return None

    def send_refusal(self) -> Refused | None:
        """Say why nothing may be sent, or None."""
        status = self.properties.status
        if status is EntityStatus.DISABLED:
            return Refused(Refusal.ENTITY_DISABLED, self.name)
        if status is EntityStatus.SEND_DISABLED:
            return Refused(Refusal.SEND_DISABLED, self.name)
        return None

    def _message_refusal(self, envelope: Envelope, pending_bytes: int) -> Refused | None:
        size_bytes = envelope.size_bytes
        if size_bytes > self.max_message_bytes:
            return Refused(
                Refusal.MESSAGE_TOO_LARGE,
                f"the message has {size_bytes} bytes, {self.max_message_bytes} are allowed",
            )
        complaint = check_properties(envelope)
        if complaint is not None:
            return Refused(Refusal.PROPERTIES_TOO_LARGE, complaint)
        if self.size_bytes + pending_bytes + size_bytes > self.max_size_bytes:
            return QUOTA_EXCEEDED
        return None

    # --- sending ----------------------------------------------------------------------------------

    def enqueue(self, command: Enqueue) -> Enqueued | Refused:
        """Check, then store. The usual burst (nothing refused, nothing scheduled) goes at once."""
        refused = self.send_refusal()
        if refused is not None:
            return refused
        messages = command.messages
        if self.default_ttl_ms is not None:
            self._lower_ttls(messages, self.default_ttl_ms)
        max_bytes = self.max_message_bytes
        total_bytes = 0
        check = check_properties
        for envelope in messages:
            size_bytes = envelope.size_bytes
            if size_bytes > max_bytes or envelope.scheduled_ms is not None or check(envelope):
                return self._enqueue_each(messages, command.is_atomic)
            total_bytes += size_bytes
        if self.size_bytes + total_bytes > self.max_size_bytes:
            return self._enqueue_each(messages, command.is_atomic)
        if not messages:
            return Enqueued([])
        return Enqueued(self.active.append(messages, total_bytes))

    @staticmethod
    def _lower_ttls(messages: list[Envelope], most_ms: int) -> None:
        """Let no message have a longer time to live of its own than the default of this moment.

        What is stored then stays as it is when the default changes (S95, S106).
        """
        for envelope in messages:
            if envelope.ttl_ms is not None and envelope.ttl_ms > most_ms:
                envelope.ttl_ms = most_ms

    def _enqueue_each(self, messages: list[Envelope], is_atomic: bool) -> Enqueued | Refused:
        """Check all, then store those that pass; with `is_atomic` one refusal refuses all (D8)."""
        if not self.message_count:
            self.size_bytes = 0  # whatever remained was the error of an estimate
        refusals: dict[int, Refused] = {}
        pending_bytes = 0
        for index, envelope in enumerate(messages):
            refused = self._message_refusal(envelope, pending_bytes)
            if refused is None:
                pending_bytes += envelope.size_bytes
            elif is_atomic:
                return refused
            else:
                refusals[index] = refused
        numbers = [0] * len(messages)
        now_ms = self.turn.now_ms
        for index, envelope in enumerate(messages):
            if index in refusals:
                continue
            if envelope.scheduled_ms is not None and envelope.scheduled_ms > now_ms:
                numbers[index] = self.scheduled.add(envelope)
            else:
                (numbers[index],) = self.active.append([envelope], envelope.size_bytes)
        return Enqueued(numbers, refusals or None)
