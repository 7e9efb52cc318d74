"""Messages of a sub-queue that is not divided by session (`ActiveMessages`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from postbus.entity.commands import Refusal, Refused
from postbus.entity.queues import browse, locks, paging
from postbus.entity.queues.sub_queue import SubQueueState
from postbus.entity.transfer.forwarding import FORWARDER_ID, Forwarder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from postbus.entity.commands import (
        CompleteSessions,
        DeferredReceived,
        DeleteMessages,
        LocksRenewed,
        MessagesDeleted,
        Peek,
        Peeked,
        ReceiveDeferred,
        RenewLocks,
        Settle,
        Settled,
        StoredRow,
    )
    from postbus.entity.outcomes import LoadedPartition, Needs
    from postbus.entity.partition_context import PartitionContext
    from postbus.entity.queues.active_messages import FromNumber, SessionCommand
    from postbus.entity.queues.sub_queue import Consumer


class PlainMessages(SubQueueState):
    """See the module's docstring."""

    __slots__ = ()

    context: PartitionContext
    requires_session: ClassVar[bool] = False

    def load(self, loaded: LoadedPartition) -> None:
        """Take over loaded rows."""
        place = (self.entity.entity_no, self.kind)
        row_keys = loaded.keys.get(place)
        if row_keys:
            self.take_over(row_keys, loaded.deferred.get(place, {}))

    def supply(self, rows: Iterable[StoredRow]) -> None:
        paging.supply(self, rows)

    # --- receivers --------------------------------------------------------------------------------

    def add_receiver(self, consumer: Consumer) -> None:
        self.add_consumer(consumer)
        self.context.consumers[consumer.consumer_id] = (self, consumer)

    def has_receivers(self) -> bool:
        return any(not consumer.is_forwarder for consumer in self.waiting)

    def forward(self, target: str | None) -> None:
        """Put our receiver into the sub-queue, or take it out."""
        if FORWARDER_ID in self.consumers:
            self.remove_consumer(FORWARDER_ID)
        if target is not None:
            forwarder = Forwarder(target)
            self.add_consumer(forwarder)
            self.waiting.append(forwarder)
            self.context.resumed[self.pump] = None

    def has_backlog(self) -> bool:
        return not self.order.is_empty

    # --- settlement -------------------------------------------------------------------------------

    def settle(
        self, command: Settle, found: Sequence[StoredRow] | None
    ) -> Settled | Refused | Needs:
        return locks.settle(self, command, found)

    def renew_locks(self, command: RenewLocks) -> LocksRenewed | Refused:
        return locks.renew(self, command)

    def lose_locks(self) -> None:
        locks.lose_all(self)

    def locks_of(self, session_id: bytes | None, tokens: list[bytes]) -> SubQueueState | None:
        del session_id, tokens
        return self

    # --- sessions ---------------------------------------------------------------------------------

    def use_session(self, command: SessionCommand, found: Sequence[StoredRow] | None) -> Refused:
        del command, found
        return Refused(Refusal.SESSION_NOT_SUPPORTED, self.entity.name)

    def complete_sessions(self, command: CompleteSessions) -> Refused:
        del command
        return Refused(Refusal.SESSION_NOT_SUPPORTED, self.entity.name)

    # --- reading ----------------------------------------------------------------------------------

    def peek(
        self, scheduled: FromNumber, command: Peek, found: Sequence[StoredRow] | None
    ) -> Peeked | Needs:
        return browse.peek(self, scheduled, command, found)

    def receive_deferred(
        self, command: ReceiveDeferred, found: Sequence[StoredRow] | None
    ) -> DeferredReceived | Refused | Needs:
        return browse.receive_deferred(self, command, found)

    def delete_messages(
        self, command: DeleteMessages, found: Sequence[StoredRow] | None
    ) -> MessagesDeleted | Needs:
        return browse.delete_messages(self, command, found)

    def places_of(
        self, by_key: dict[int, int], rows: dict[int, StoredRow]
    ) -> list[tuple[SubQueueState, dict[int, int]]]:
        del rows
        return [(self, by_key)]
