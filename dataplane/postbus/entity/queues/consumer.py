"""A receiver as its sub-queue knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from postbus.entity.commands import Delivery, ReceiveMode, Receiver

if TYPE_CHECKING:
    from postbus.entity.queues.queued_message import QueuedMessage
    from postbus.entity.queues.sub_queue import SubQueueState


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
        """Take messages for good."""
        return sub.delete(batch)
