"""The receivers that move messages of a forwarded entity into the outbox.

A forwarded sub-queue has one receiver, ours, with unlimited demand: for older messages, those whose
lock ended, and dead letters that did not pass `expiry.move`. New messages go directly into the
outbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postbus.entity.commands import (
    ReceiveMode,
)
from postbus.entity.outcomes import Settling
from postbus.entity.queues import expiry
from postbus.entity.queues.queued_message import QueuedMessage
from postbus.entity.queues.sub_queue import Consumer
from postbus.entity.sessions.session_messages import SessionConsumer

if TYPE_CHECKING:
    from collections.abc import Callable

    from postbus.entity.commands import Delivery
    from postbus.entity.queues.sub_queue import SubQueueState

FORWARDER_ID: Final = -1
"""Our receiver's id in its sub-queue; ids of clients' receivers are positive."""

_EVERYTHING: Final = 1 << 62


class Forwarder(Consumer):
    """The receiver of a sub-queue that is forwarded."""

    __slots__ = ("target",)

    is_forwarder = True

    def __init__(self, target: str) -> None:
        super().__init__(FORWARDER_ID, ReceiveMode.RECEIVE_AND_DELETE)
        self.target = target
        self.limit = _EVERYTHING
        self.is_waiting = True

    def take(self, sub: SubQueueState, batch: list[QueuedMessage]) -> list[Delivery]:
        """Move a batch into the outbox, except expired messages and those out of deliveries."""
        _move_all(sub, batch, self.target)
        return []


def _move_all(sub: SubQueueState, batch: list[QueuedMessage], target: str) -> None:
    entity = sub.entity
    for message in batch:
        if expiry.is_expired(sub, message):
            expiry.expire(sub, message)
        elif sub.is_main and message.failures >= sub.entity.max_delivery_count:
            expiry.exhaust(sub, message)
        else:
            if entity.is_tapped:
                sub.context.settle(entity.entity_no, [message.row_key], Settling.FORWARDED)
            sub.ledger.leave(message)
            entity.outbox.move(
                entity,
                message,
                target,
                is_dead_letter=not sub.is_main,
                is_kept=entity.is_tapped,
            )


class SessionForwarder(SessionConsumer):
    """The receiver of a session entity that is forwarded: it takes one session after the other."""

    __slots__ = ("_give_up", "_target")

    is_forwarder = True

    def __init__(self, target: str, give_up: Callable[[SessionForwarder], None]) -> None:
        super().__init__(FORWARDER_ID, ReceiveMode.RECEIVE_AND_DELETE)
        self._give_up = give_up
        self._target = target
        self.limit = _EVERYTHING

    def take(self, sub: SubQueueState, batch: list[QueuedMessage]) -> list[Delivery]:
        """Move a batch; the rest of the session, or else the next session, follows."""
        _move_all(sub, batch, self._target)
        if self.session is not None and not self.session.is_available:
            sub.context.resumed[self.go_on] = None
        return []

    def go_on(self) -> None:
        """Release an empty session and wait for the next."""
        if self.session is not None and not self.session.is_available:
            self._give_up(self)
